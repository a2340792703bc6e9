"""Settings of torch that decide, while a step is captured, which operators run and with which dtypes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from scheduler.pytorch.torch_private.autograd import is_transformed

_SETTINGS: dict[str, Callable[[], object]] = {
    "the default dtype": torch.get_default_dtype,
    "the default device": torch.get_default_device,
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
    "torch.backends.mkldnn.enabled": lambda: torch.backends.mkldnn.enabled,
    "torch.backends.cudnn.enabled": lambda: torch.backends.cudnn.enabled,
    "torch.backends.cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "torch.backends.cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "torch.backends.cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
    "torch.backends.cuda.flash_sdp_enabled()": torch.backends.cuda.flash_sdp_enabled,
    "torch.backends.cuda.mem_efficient_sdp_enabled()": torch.backends.cuda.mem_efficient_sdp_enabled,
    "torch.backends.cuda.math_sdp_enabled()": torch.backends.cuda.math_sdp_enabled,
    "whether a transform of torch.func is active": is_transformed,
}


class Settings:
    """The settings of torch as they were when this object was made. Autocast is part of `Modes`."""

    def __init__(self) -> None:
        self._then = _read()

    def difference(self) -> str:
        """Return what differs now, "" if nothing does."""
        now = _read()
        if now == self._then:
            return ""
        name, then, value = next(row for row in zip(_SETTINGS, self._then, now, strict=True) if row[1] != row[2])
        return f"{name} was {then} when the plan was made, is {value}"


def _read() -> list[object]:
    return [read() for read in _SETTINGS.values()]
