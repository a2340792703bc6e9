"""Measure a training step: live storages, the allocator's peak, FLOPs and time.

A dispatch mode counts live storages to the byte, on every device; their peak is the one that
a plan predicts. The allocator's peak is the memory that the device needs: it includes what
operators allocate internally and the allocator's rounding.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from scheduler.errors import InvalidOptionError
from scheduler.pytorch.measurement.allocator import Step, allocator_peak
from scheduler.pytorch.measurement.flop_formulas import count_flops
from scheduler.pytorch.torch_private.autograd import TorchDispatchMode, added_in_place_bytes
from scheduler.pytorch.torch_private.pytree import tree_leaves
from scheduler.pytorch.torch_private.tensors import parts_of, storage_id, storage_of


@dataclass(frozen=True)
class Measurement:
    """Memory, FLOPs and time of one training step.

    Attributes
    ----------
    live_peak_bytes : int
        Largest sum of live storages at any moment, resident storages included: comparable
        with `Simulation.peak_bytes`.
    allocator_peak_bytes : int
        Largest sum of allocations at any moment, resident storages included. It also counts
        what operators allocate internally.
    resident_bytes : int
        Bytes of the storages given as resident.
    flops : int
        Floating-point operations of matrix products, convolutions, attention and other operators
        that multiply.
    seconds : float
        Shortest time of one step.
    baseline_seconds : float or None
        Shortest time of the baseline step; the two steps take turns.
    """

    live_peak_bytes: int
    allocator_peak_bytes: int
    resident_bytes: int
    flops: int
    seconds: float
    baseline_seconds: float | None = None

    @property
    def overhead(self) -> float | None:
        """Time / baseline time - 1; None without a baseline."""
        return None if self.baseline_seconds is None else self.seconds / self.baseline_seconds - 1


class StorageTracker(TorchDispatchMode):
    """Count the bytes of every storage that an operator returns while this mode is active.

    A storage counts once, from the operator that returns it until nothing refers to it any
    more. Storages of `ignored` tensors never count. A sum that autograd computes out of place only
    because a mode is active has the storage of its first term. Other modes must be entered before this one.

    Parameters
    ----------
    ignored : iterable of Tensor
        Parameters, buffers and inputs: the resident tensors.

    Attributes
    ----------
    live_bytes, peak_bytes : int
        The current sum, and the largest one so far.
    """

    supports_higher_order_operators = True

    def __init__(self, ignored: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        # Keeps them alive, so that no other storage gets the address of one of them.
        self._held = tuple(ignored)
        self._ignored = {storage_id(tensor.untyped_storage()) for tensor in self._held}
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        in_place = added_in_place_bytes(func, args)
        result = func(*args, **(kwargs or {}))
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                for storage in storages_of(leaf):
                    self._see(storage)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes - in_place)
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage_id(storage)
        if key in self._ignored:
            return
        size = storage.nbytes()
        if key not in self._references:
            self._references[key] = weakref.ref(storage, functools.partial(self._forget, key))
        self.live_bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size

    def _forget(self, key: int, _: object) -> None:
        self.live_bytes -= self._sizes.pop(key, 0)
        self._references.pop(key, None)


class FlopCounter(TorchDispatchMode):
    """Count the floating-point operations of every operator that has a known formula.

    Unlike torch's FlopCounterMode it does not track modules, so it also works inside custom
    autograd functions.

    Attributes
    ----------
    flops : int
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.flops += count_flops(func, args, kwargs, result)
        return result


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return the storages of a tensor of any layout."""
    own = storage_of(tensor)
    return [own] if own is not None else [storage for part in parts_of(tensor) for storage in storages_of(part)]


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages of these tensors."""
    return sum(storage_sizes(tensors).values())


def storage_sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of each distinct storage of these tensors, by its identity."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage_id(storage): storage.nbytes() for storage in storages}


def resident_tensors(module: torch.nn.Module, inputs: object = ()) -> list[torch.Tensor]:
    """Return the resident tensors of a step: parameters, buffers and the tensors in nested `inputs`."""
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    return [*module.parameters(), *module.buffers(), *leaves]


def training_step(
    module: torch.nn.Module,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
) -> Step:
    """Return a step: clear the gradients, run forward and backward, return the detached loss.

    Parameters
    ----------
    module : nn.Module
    args, kwargs
        Its arguments.
    loss : callable, optional
        Computes the scalar loss from the module's outputs; without it the module returns the loss.
    """

    def step() -> torch.Tensor:
        module.zero_grad(set_to_none=True)
        outputs = module(*args, **(kwargs or {}))
        value: torch.Tensor = outputs if loss is None else loss(outputs)
        del outputs
        value.backward()
        return value.detach()

    return step


def measure(
    step: Step,
    *,
    resident: Iterable[torch.Tensor] = (),
    repeats: int = 3,
    baseline: Step | None = None,
) -> Measurement:
    """Run a training step several times and return its memory, FLOPs and time.

    Memory and FLOPs are counted in separate runs, which are not timed. The very first run is
    a warm-up.

    Parameters
    ----------
    step : callable
        One training step, forward and backward; see `training_step`.
    resident : iterable of Tensor
        Parameters, buffers and inputs; counted as `resident_bytes`, not as allocated by the step.
    repeats : int
        Timed runs.
    baseline : callable, optional
        Another step to time; the two take turns.

    Returns
    -------
    Measurement

    Raises
    ------
    InvalidOptionError
        If `repeats` is less than 1.
    """
    if repeats < 1:
        raise InvalidOptionError(f"repeats must be at least 1, got {repeats}")
    kept = list(resident)
    resident_bytes = storage_bytes(kept)
    step()
    tracker, counter = StorageTracker(kept), FlopCounter()
    with counter, tracker:
        step()
    steps = {"step": step} if baseline is None else {"step": step, "baseline": baseline}
    times = measure_times(steps, repeats)
    return Measurement(
        live_peak_bytes=resident_bytes + tracker.peak_bytes,
        allocator_peak_bytes=resident_bytes + allocator_peak(step),
        resident_bytes=resident_bytes,
        flops=counter.flops,
        seconds=min(times["step"]),
        baseline_seconds=None if baseline is None else min(times["baseline"]),
    )


def now() -> float:
    """Return the clock in seconds after the device has finished its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def measure_times(
    steps: Mapping[str, Step], repeats: int, *, clock: Callable[[], float] = now
) -> dict[str, list[float]]:
    """Return the times of each step in seconds; steps take turns, so that noise affects all alike.

    Parameters
    ----------
    steps : mapping of str to callable
    repeats : int
        Timed runs of each step, after one run that is not timed.
    clock : callable
        Returns seconds; `time.process_time` excludes other processes.

    Returns
    -------
    dict of str to list of float
    """
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            start = clock()
            step()
            times[name].append(clock() - start)
    return times
