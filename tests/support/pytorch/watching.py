"""Watchers of compiled code and of operator calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from scheduler.pytorch.compile.backend import Backend
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors


class Watched:
    """A backend whose compiled code runs under a tracker; TorchDynamo itself cannot run under one."""

    def __init__(self, planned: Backend) -> None:
        self.planned = planned
        self.tracker: contextlib.AbstractContextManager[object] = contextlib.nullcontext()

    def __call__(self, module: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        run = self.planned(module, inputs)

        def call(*args: object) -> object:
            with self.tracker:
                return run(*args)

        return call

    def measure(self, module: nn.Module, args: object, kwargs: dict[str, object], step: Callable[[], Tensor]):
        """Return the live bytes between forward and backward and at the peak, without resident tensors."""
        module.zero_grad()
        self.tracker = tracker = StorageTracker(resident_tensors(module, (args, kwargs)))
        loss = step()
        between = tracker.live_bytes
        with tracker:
            loss.backward()
        self.tracker = contextlib.nullcontext()
        return between, tracker.peak_bytes


class Count(TorchDispatchMode):
    """Count the calls of an operator, or of all operators."""

    def __init__(self, operator: torch._ops.OpOverload | None = None) -> None:
        super().__init__()
        self.operator, self.count = operator, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += self.operator is None or func is self.operator
        return func(*args, **(kwargs or {}))
