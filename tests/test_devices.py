"""Devices: their figures, names, errors, and the roofline by which times are estimated."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

import scheduler as sc
from scheduler.devices import THIS_MACHINE, _host_bytes

OWN = sc.Device(
    name="own",
    memory_bytes=1000,
    flops_per_second={"bfloat16": 100.0, "float32": 10.0},
    bytes_per_second=20.0,
    compute_efficiency=0.5,
    memory_efficiency=0.25,
    launch_seconds=2.0,
    context_bytes=100,
)


def test_the_devices_that_people_rent_or_own_are_listed() -> None:
    wanted = {"a100-40gb", "a100-80gb", "h100-80gb", "h100-pcie-80gb", "h200", "b200", "l40s", "l4", "t4"}
    wanted |= {"v100-16gb", "v100-32gb", "rtx-3090", "rtx-4090", "rtx-5090", "mi300x"}
    assert set(sc.device_names()) == wanted


@pytest.mark.parametrize("name", sc.device_names())
def test_figures_are_in_the_units_that_their_names_say(name: str) -> None:
    device = sc.device(name)
    assert device.name == name
    assert 2**33 < device.usable_bytes < device.memory_bytes < 2**38  # 8 to 256 GiB
    assert min(device.flops_per_second.values()) > 1e11
    assert max(device.flops_per_second.values()) < 1e16
    assert 1e11 < device.bytes_per_second < 1e13
    assert 1e10 < device.host_bytes_per_second <= device.peer_bytes_per_second < device.bytes_per_second
    assert "datasheet" in device.source or "whitepaper" in device.source
    # Half precision multiplies at least twice as fast as float32, and products in tf32 are in between.
    rates = device.flops_per_second
    assert rates["float16"] >= 1.9 * rates["float32"]
    assert rates["float32"] <= rates.get("tf32", rates["float32"]) < rates["float16"]


def test_an_h100_has_the_figures_of_its_datasheet() -> None:
    h100 = sc.device("h100-80gb")
    # 1 979 TFLOP/s with sparsity, 3.35 TB/s; torch reports 81 082 MiB on such a device.
    assert h100.flops_per_second_of("bfloat16") == pytest.approx(1979e12 / 2, rel=1e-3)
    assert h100.bytes_per_second == 3.35e12
    assert h100.memory_bytes == 81082 * 2**20
    # A context of 512 MiB, and two workspaces of cuBLAS of 32 MiB each on Hopper, 8 MiB and 128 KiB elsewhere.
    assert h100.context_bytes == 576 * 2**20
    assert sc.device("a100-80gb").context_bytes == 528 * 2**20 + 2**18
    assert h100.peer_bytes_per_second == 900e9 / 2  # NVLink, both directions
    assert h100.time_unit == "s, estimated for H100 SXM 80 GB"


@pytest.mark.parametrize("name", ["H100-80GB", " h100 80gb", "h100_80gb"])
def test_a_name_may_be_written_with_capitals_and_spaces(name: str) -> None:
    assert sc.device(name) is sc.device("h100-80gb")


@pytest.mark.parametrize(
    ("name", "near"),
    [("h100", "h100-80gb or h100-pcie-80gb"), ("a100-80", "a100-80gb"), ("rtx-4080", "rtx-4090"), ("tpu", "known are")],
)
def test_an_unknown_name_is_refused_with_similar_ones(name: str, near: str) -> None:
    with pytest.raises(sc.UnknownDeviceError, match=near):
        sc.device(name)


def test_a_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(sc.UnknownDeviceError, match="by its name, got 3"):
        sc.device(3)  # type: ignore[arg-type]


def test_time_is_that_of_the_slower_of_arithmetic_and_memory_and_of_a_launch() -> None:
    # 100 FLOPs at 0.5 x 100 FLOP/s take 2 s; 20 bytes at 0.25 x 20 B/s take 4 s; a launch takes 2 s.
    assert OWN.seconds(100, 0, "bfloat16") == 4.0
    assert OWN.seconds(100, 20, "bfloat16") == 6.0
    assert OWN.seconds(100, 20, "float32") == 22.0
    assert OWN.seconds(100, 20, "float16") == 22.0  # which is not among its dtypes
    assert OWN.seconds(0, 0) == 2.0


def test_memory_for_tensors_is_what_the_driver_leaves() -> None:
    assert OWN.usable_bytes == 900


def test_this_machine_has_the_memory_of_the_host_and_no_speed() -> None:
    here = sc.device(THIS_MACHINE)
    assert (here.platform, here.usable_bytes) == ("cpu", here.memory_bytes)
    assert here.memory_bytes > 2**28
    with pytest.raises(sc.InvalidOptionError, match='speeds of device "this machine" are unknown'):
        here.seconds(1, 1)


def test_the_limit_of_a_container_counts_where_it_is_less(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("4096\n")
    assert _host_bytes(limit) == (4096, "the limit of this container")
    limit.write_text("max\n")
    assert _host_bytes(limit) == _host_bytes(tmp_path / "missing")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes": 1.5}, "memory_bytes of device"),
        ({"bytes_per_second": float("nan")}, "bytes_per_second of device"),
        ({"compute_efficiency": 1.5}, "compute_efficiency of device .* above 0 and at most 1"),
        ({"platform": "tpu"}, "platform of device"),
        ({"flops_per_second": {"int8": 1.0}}, "got 'int8'"),
        ({"flops_per_second": {"float32": 0.0}}, "must be above 0"),
        ({"flops_per_second": 1e12}, "must map dtypes"),
        ({"name": ""}, "must not be empty"),
    ],
)
def test_bad_numbers_are_refused(change: dict[str, object], message: str) -> None:
    options: dict[str, object] = {"name": "own", "memory_bytes": 1, **change}
    with pytest.raises(sc.InvalidOptionError, match=message):
        sc.Device(**options)  # type: ignore[arg-type]


def test_a_device_is_a_value() -> None:
    assert pickle.loads(pickle.dumps(OWN)) == copy.deepcopy(OWN) == OWN
    assert len({OWN, copy.copy(OWN)}) == 1
    with pytest.raises(TypeError):
        OWN.flops_per_second["float32"] = 1.0  # type: ignore[index]


def test_the_summary_names_figures_and_sources() -> None:
    first, second = sc.device("l4").summary().splitlines()
    assert first.startswith("L4: 22.03 GiB (the least total memory that processes were seen to report); float64 0.47, ")
    assert first.endswith("bfloat16 121 TFLOP/s; 300 GB/s")
    assert second == "  speeds: NVIDIA L4 datasheet, halved where it counts sparsity"
