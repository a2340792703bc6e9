"""Devices on which a step may train: their memory, and the speeds that estimates of time rest on.

Every figure is a vendor's, for dense numbers (without structured sparsity), and names its source.
Times computed from them are estimates, and are named so wherever they appear.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from scheduler.errors import InvalidOptionError, UnknownDeviceError
from scheduler.units import format_bytes
from scheduler.validation import count_of, set_field, text_of, time_of

Platform = Literal["cuda", "rocm", "cpu"]

THIS_MACHINE = "this machine"
"""The name of the device that the host's processor and memory are."""

_CONTEXT_BYTES = 512 * 2**20
_LAUNCH_SECONDS = 5e-6


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device by its memory and its speeds.

    Attributes
    ----------
    name : str
        As given to `device`, or of your own choice.
    title : str
        The name to show, by default `name`.
    platform : "cuda", "rocm" or "cpu"
        Decides which kernels run and how memory is allocated.
    memory_bytes : int
        What a process can see of the device's memory (`total_memory` in torch), in bytes.
    context_bytes : int
        What the driver and the libraries take of it, in bytes: an assumption. For listed devices
        512 MiB for the context of a process, and the workspaces of cuBLAS for two threads.
    flops_per_second : mapping of str to float
        Peak rate of matrix products by dtype: "float64", "float32", "tf32", "float16",
        "bfloat16". A dtype that is missing runs at the rate of "float32". Empty if unknown.
    bytes_per_second : float
        Peak bandwidth of the memory; 0 if unknown.
    host_bytes_per_second : float
        Peak bandwidth of the link to the host, in one direction; 0 if there is none.
    peer_bytes_per_second : float
        Peak bandwidth to the other devices of a node, in one direction; 0 if it is unknown.
    capability : tuple of int
        Compute capability (major, minor) of a CUDA device, which decides its attention kernels.
    compute_efficiency, memory_efficiency : float
        Shares of the peak rates that operators are assumed to reach.
    launch_seconds : float
        Time that each operator takes in addition to its work.
    source : str
        Where the speeds come from.
    memory_source : str
        Where the memory comes from: what the driver showed to a process, or the nominal size.

    Raises
    ------
    InvalidOptionError
        If a number is out of its range, or `platform` or a dtype is unknown.

    Examples
    --------
    >>> own = Device(
    ...     name="my accelerator",
    ...     memory_bytes=24 * 2**30,
    ...     flops_per_second={"float32": 20e12, "bfloat16": 80e12},
    ...     bytes_per_second=600e9,
    ... )
    >>> own.flops_per_second_of("bfloat16")
    80000000000000.0
    """

    name: str
    memory_bytes: int
    flops_per_second: Mapping[str, float] = field(default_factory=dict, hash=False)
    bytes_per_second: float = 0.0
    title: str = ""
    platform: Platform = "cuda"
    context_bytes: int = _CONTEXT_BYTES
    host_bytes_per_second: float = 0.0
    peer_bytes_per_second: float = 0.0
    capability: tuple[int, int] = (8, 0)
    compute_efficiency: float = 0.7
    memory_efficiency: float = 0.8
    launch_seconds: float = _LAUNCH_SECONDS
    source: str = "given by the user"
    memory_source: str = "given by the user"

    def __post_init__(self) -> None:
        text_of(self.name, "the name of a device", error=InvalidOptionError)
        if not self.name:
            raise InvalidOptionError("the name of a device must not be empty")
        set_field(self, "title", text_of(self.title or self.name, "the title of a device", error=InvalidOptionError))
        what = f'of device "{self.name}"'
        for name in ("memory_bytes", "context_bytes"):
            set_field(self, name, count_of(getattr(self, name), f"{name} {what}", error=InvalidOptionError))
        for name in ("bytes_per_second", "host_bytes_per_second", "peer_bytes_per_second", "launch_seconds"):
            set_field(self, name, time_of(getattr(self, name), f"{name} {what}", error=InvalidOptionError))
        for name in ("compute_efficiency", "memory_efficiency"):
            share = getattr(self, name)
            if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
                raise InvalidOptionError(f"{name} {what} must be a share above 0 and at most 1, got {share!r}")
        if self.platform not in ("cuda", "rocm", "cpu"):
            raise InvalidOptionError(f'platform {what} must be "cuda", "rocm" or "cpu", got {self.platform!r}')
        set_field(self, "flops_per_second", MappingProxyType(_checked_rates(self.flops_per_second, what)))

    def __reduce__(self) -> tuple[partial[Device], tuple[()]]:
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return partial(Device, **{**values, "flops_per_second": dict(self.flops_per_second)}), ()

    def __str__(self) -> str:
        return self.title

    @property
    def usable_bytes(self) -> int:
        """The bytes that are left for tensors: the memory without what the driver and the libraries take."""
        return max(0, self.memory_bytes - self.context_bytes)

    @property
    def has_rates(self) -> bool:
        """Whether times can be estimated for this device."""
        return bool(self.flops_per_second) and self.bytes_per_second > 0

    @property
    def time_unit(self) -> str:
        """The unit of estimated times, which names the device: they must not be taken for measured ones."""
        return f"s, estimated for {self.title}"

    def flops_per_second_of(self, dtype: str) -> float:
        """Return the peak rate of matrix products of a dtype, in FLOP/s.

        Parameters
        ----------
        dtype : str
            Such as "bfloat16", or "tf32" for products in float32 that may be rounded to it.
        """
        rates = self.flops_per_second
        return rates.get(dtype, rates.get("float32", max(rates.values(), default=math.inf)))

    def seconds(self, flops: float, moved_bytes: float, dtype: str = "float32") -> float:
        """Return the estimated time of one operator: a roofline with the efficiencies of this device.

        The longer of the times for its FLOPs and for its bytes, and the time of its launch.

        Parameters
        ----------
        flops : float
            FLOPs of its matrix products.
        moved_bytes : float
            Bytes that it reads and writes.
        dtype : str
            Of the operands of its products, as for `flops_per_second_of`.

        Raises
        ------
        InvalidOptionError
            If the speeds of the device are unknown.
        """
        if not self.has_rates:
            raise InvalidOptionError(
                f'the speeds of device "{self.name}" are unknown, so no time can be estimated for it: measure there'
                ' with costs="measured", or give flops_per_second and bytes_per_second'
            )
        compute = flops / (self.compute_efficiency * self.flops_per_second_of(dtype))
        memory = moved_bytes / (self.memory_efficiency * self.bytes_per_second)
        return self.launch_seconds + max(compute, memory)

    def summary(self) -> str:
        """Return a line with the memory and the speeds, and one with their sources."""
        rates = ", ".join(f"{dtype} {rate / 1e12:g}" for dtype, rate in self.flops_per_second.items())
        speeds = f"{rates} TFLOP/s; {self.bytes_per_second / 1e9:g} GB/s" if self.has_rates else "speeds unknown"
        memory = f"{format_bytes(self.memory_bytes)} ({self.memory_source})"
        return f"{self.title}: {memory}; {speeds}\n  speeds: {self.source}"


_DTYPES = ("float64", "float32", "tf32", "float16", "bfloat16")


def _checked_rates(rates: object, what: str) -> dict[str, float]:
    if not isinstance(rates, Mapping):
        raise InvalidOptionError(f"flops_per_second {what} must map dtypes to FLOP/s, got {rates!r}")
    for dtype, rate in rates.items():
        if dtype not in _DTYPES:
            raise InvalidOptionError(f"flops_per_second {what} knows the dtypes {', '.join(_DTYPES)}, got {dtype!r}")
        if time_of(rate, f'flops_per_second["{dtype}"] {what}', error=InvalidOptionError) == 0:
            raise InvalidOptionError(f'flops_per_second["{dtype}"] {what} must be above 0, got {rate!r}')
    return {dtype: float(rates[dtype]) for dtype in _DTYPES if dtype in rates}


def device(name: str) -> Device:
    """Return a device by its name.

    Parameters
    ----------
    name : str
        One of `device_names()`, in upper or lower case; or "this machine" for the host's
        processor, whose memory is known and whose speed is not.

    Raises
    ------
    UnknownDeviceError
        If no device has this name; the message lists those with a similar one.

    Examples
    --------
    >>> device("H100-80GB").bytes_per_second
    3350000000000.0
    """
    if not isinstance(name, str):
        raise UnknownDeviceError(f"a device must be given by its name, got {name!r}")
    if name.strip().lower().replace("-", " ") == THIS_MACHINE:
        return _this_machine()
    key = re.sub(r"[\s_-]+", "-", name.strip().lower())
    if key in _DEVICES:
        return _DEVICES[key]
    near = [known for known in _DEVICES if key and (key in known or known in key)]
    near += [known for known in difflib.get_close_matches(key, _DEVICES, n=3) if known not in near]
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(_DEVICES)}."
    raise UnknownDeviceError(
        f'unknown device "{name}": {hint} `device_names()` lists all; describe another one by its numbers, as'
        ' Device(name="...", memory_bytes=..., flops_per_second={"bfloat16": ...}, bytes_per_second=...)'
    )


def device_names() -> list[str]:
    """Return the names of the listed devices, without "this machine".

    Examples
    --------
    >>> "h100-80gb" in device_names()
    True
    """
    return list(_DEVICES)


def _this_machine() -> Device:
    memory, source = _host_bytes()
    return Device(
        name=THIS_MACHINE,
        platform="cpu",
        memory_bytes=memory,
        context_bytes=0,
        launch_seconds=0.0,
        source="unknown until measured",
        memory_source=source,
    )


def _host_bytes(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> tuple[int, str]:
    """Return the bytes of the host's memory, or of the container's limit if that is less."""
    if not {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= set(os.sysconf_names):
        raise UnknownDeviceError(
            'the memory of "this machine" is unknown on this system: give it as Device(name="...", memory_bytes=...)'
        )
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no such limit, or "max"
        allowed = int(limit.read_text())
        if allowed < found:
            return allowed, "the limit of this container"
    return found, "the memory of this host"


_MIB, _GIB = 2**20, 2**30
_PCIE_3, _PCIE_4, _PCIE_5 = 16e9, 32e9, 64e9
_SEEN = "the least total memory that processes were seen to report"
_HOPPER = {"float64": 67e12, "float32": 67e12, "tf32": 494.7e12, "float16": 989.4e12, "bfloat16": 989.4e12}
_AMPERE = {"float64": 19.5e12, "float32": 19.5e12, "tf32": 156e12, "float16": 312e12, "bfloat16": 312e12}
_VOLTA = {"float64": 7.8e12, "float32": 15.7e12, "float16": 125e12}
_PEERS = {"v100-16gb": 150e9, "v100-32gb": 150e9, "a100-40gb": 300e9, "a100-80gb": 300e9, "mi300x": 7 * 64e9}
_PEERS |= {"h100-80gb": 450e9, "h200": 450e9, "b200": 900e9}
"""Half of NVLink's bandwidth by the same datasheets, which add both directions (300, 600, 900, 1800 GB/s), and
the links of an MI300X to its seven neighbors. Others reach each other over PCIe."""


def _listed(
    name: str,
    title: str,
    memory_bytes: int,
    rates: Mapping[str, float],
    bytes_per_second: float,
    link: float,
    capability: tuple[int, int],
    source: str,
    *,
    platform: Platform = "cuda",
    memory_source: str = _SEEN,
) -> Device:
    return Device(
        name=name,
        title=title,
        memory_bytes=memory_bytes,
        flops_per_second=rates,
        bytes_per_second=bytes_per_second,
        host_bytes_per_second=link,
        peer_bytes_per_second=_PEERS.get(name, link),
        capability=capability,
        source=source,
        platform=platform,
        memory_source=memory_source,
        context_bytes=_CONTEXT_BYTES + 2 * _product_workspace(capability, platform),
    )


def _product_workspace(capability: tuple[int, int], platform: Platform) -> int:
    """Return the bytes that PyTorch keeps for cuBLAS in each thread, that of the forward and that of the backward.

    They are those of `parseChosenWorkspaceSize` in ATen/cuda/CublasHandlePool.cpp.
    """
    if platform == "rocm":
        return 128 * _MIB
    return 32 * _MIB if capability == (9, 0) else 2 * 4 * _MIB + 8 * 2**14


_DEVICES: dict[str, Device] = {
    listed.name: listed
    for listed in (
        _listed(
            "a100-40gb", "A100 SXM 40 GB", 40339 * _MIB, _AMPERE, 1.555e12, _PCIE_4, (8, 0), "NVIDIA A100 datasheet"
        ),
        _listed(
            "a100-80gb", "A100 SXM 80 GB", int(79.14 * _GIB), _AMPERE, 2039e9, _PCIE_4, (8, 0), "NVIDIA A100 datasheet"
        ),
        _listed(
            "h100-80gb", "H100 SXM 80 GB", 81082 * _MIB, _HOPPER, 3.35e12, _PCIE_5, (9, 0), "NVIDIA H100 datasheet"
        ),
        _listed(
            "h100-pcie-80gb",
            "H100 PCIe 80 GB",
            81008 * _MIB,
            {"float64": 51e12, "float32": 51e12, "tf32": 378e12, "float16": 756e12, "bfloat16": 756e12},
            2e12,
            _PCIE_5,
            (9, 0),
            "NVIDIA H100 datasheet",
        ),
        _listed("h200", "H200 SXM", 143156 * _MIB, _HOPPER, 4.8e12, _PCIE_5, (9, 0), "NVIDIA H200 datasheet"),
        _listed(
            "b200",
            "B200",
            int(178.35 * _GIB),
            {"float64": 37e12, "float32": 75e12, "tf32": 1.1e15, "float16": 2.25e15, "bfloat16": 2.25e15},
            7.7e12,
            _PCIE_5,
            (10, 0),
            "NVIDIA HGX B200 datasheet, halved where it counts sparsity; bandwidth of the 7680 bits that drivers show",
        ),
        _listed(
            "l4",
            "L4",
            int(22.03 * _GIB),
            {"float64": 0.47e12, "float32": 30.3e12, "tf32": 60e12, "float16": 121e12, "bfloat16": 121e12},
            300e9,
            _PCIE_4,
            (8, 9),
            "NVIDIA L4 datasheet, halved where it counts sparsity",
        ),
        _listed(
            "l40s",
            "L40S",
            45589 * _MIB,
            {"float64": 1.4e12, "float32": 91.6e12, "tf32": 183e12, "float16": 362e12, "bfloat16": 362e12},
            864e9,
            _PCIE_4,
            (8, 9),
            "NVIDIA L40S datasheet",
        ),
        _listed(
            "t4",
            "T4",
            14930 * _MIB,
            {"float64": 0.25e12, "float32": 8.1e12, "float16": 65e12},
            300e9,
            _PCIE_3,
            (7, 5),
            "NVIDIA T4 datasheet",
        ),
        _listed("v100-16gb", "V100 SXM2 16 GB", 16130 * _MIB, _VOLTA, 900e9, _PCIE_3, (7, 0), "NVIDIA V100 datasheet"),
        _listed(
            "v100-32gb",
            "V100 SXM2 32 GB",
            int(31.73 * _GIB),
            _VOLTA,
            900e9,
            _PCIE_3,
            (7, 0),
            "NVIDIA V100 datasheet",
        ),
        _listed(
            "rtx-3090",
            "GeForce RTX 3090",
            24259 * _MIB,
            {"float64": 0.56e12, "float32": 35.6e12, "tf32": 35.6e12, "float16": 71e12, "bfloat16": 71e12},
            936e9,
            _PCIE_4,
            (8, 6),
            "NVIDIA Ampere GA102 whitepaper, products that accumulate in float32",
        ),
        _listed(
            "rtx-4090",
            "GeForce RTX 4090",
            int(23.64 * _GIB),
            {"float64": 1.29e12, "float32": 82.6e12, "tf32": 82.6e12, "float16": 165.2e12, "bfloat16": 165.2e12},
            1.008e12,
            _PCIE_4,
            (8, 9),
            "NVIDIA Ada whitepaper, products that accumulate in float32",
        ),
        _listed(
            "rtx-5090",
            "GeForce RTX 5090",
            33677180928,
            {"float64": 1.64e12, "float32": 104.8e12, "tf32": 104.8e12, "float16": 209.5e12, "bfloat16": 209.5e12},
            1.792e12,
            _PCIE_5,
            (12, 0),
            "NVIDIA RTX Blackwell whitepaper, products that accumulate in float32",
        ),
        _listed(
            "mi300x",
            "Instinct MI300X",
            196592 * _MIB,
            {"float64": 163.4e12, "float32": 163.4e12, "tf32": 653.7e12, "float16": 1307.4e12, "bfloat16": 1307.4e12},
            5.3e12,
            _PCIE_5,
            (9, 4),
            "AMD Instinct MI300X datasheet",
            platform="rocm",
        ),
    )
}
