"""Measure one link of a chain by itself: its times, and its bytes to the byte.

Bytes are those of live storages: a dispatch mode sees every storage that an operator returns.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from scheduler.pytorch.layerwise.groups import Gradients, Link, State
from scheduler.pytorch.layerwise.survey import storage_keys
from scheduler.pytorch.measurement.memory import StorageTracker, now, storage_sizes
from scheduler.pytorch.torch_private.tensors import storage_id

Result = TypeVar("Result")

_LEAST_RUNS = 3
"""Timed runs of a link, at least."""
_MOST_RUNS = 10
"""Timed runs of a link, at most."""
_SECONDS_PER_LINK = 0.1
"""Once the timed runs have taken this long together, the least number of runs is enough."""


class LinkTimes(NamedTuple):
    """Seconds that one link takes."""

    forward_without_saving: float = 0.0
    forward: float = 0.0
    backward: float = 0.0


@dataclass(frozen=True)
class LinkBytes:
    """Bytes that one link needs; the fields are those of `Layer`, except as noted.

    Attributes
    ----------
    input_gradient_bytes : int
        Bytes of the gradients that its backward returns for its input.
    """

    output_bytes: int
    saved_bytes: int
    keeps_input: bool
    keeps_output: bool
    forward_without_saving_workspace_bytes: int
    forward_with_saving_workspace_bytes: int
    backward_workspace_bytes: int
    input_gradient_bytes: int
    parameter_gradient_bytes: int


class GradientBytes(NamedTuple):
    """Bytes of accumulating gradients.

    Attributes
    ----------
    staying : int
        Of gradients that stay as `.grad`.
    workspace : int
        In use only while gradients are accumulated.
    existing : int
        Of the existing gradients to which they are added.
    """

    staying: int
    workspace: int
    existing: int


class GradientAccumulation:
    """Counts what autograd does with the gradients of parameters, link by link, the last link first.

    Parameters
    ----------
    trained : sequence of sequence of Tensor
        Per link: the tensors that get a gradient.
    resident : set of int
        Storages that count as resident.
    accumulates : bool
        Whether every trained tensor has a `.grad` already, to which the step adds.
    """

    def __init__(self, trained: Sequence[Sequence[Tensor]], resident: set[int], *, accumulates: bool) -> None:
        self._links_using = Counter(tensor for tensors in trained for tensor in tensors)
        self._with_gradient: set[Tensor] = set()
        self._resident = resident
        self._accumulates = accumulates

    def add(self, parameters: Sequence[Tensor], gradients: Gradients) -> GradientBytes:
        """Return the bytes of accumulating the gradients of the parameters of one link.

        Autograd takes a gradient over as `.grad` if it is laid out like the parameter, and copies
        it otherwise. The second gradient of a parameter with several users is added to the
        first and then freed. Where a `.grad` exists already, only the first of several
        gradients stays, until all of them are there.
        """
        staying: list[Tensor] = []
        copied = workspace = existing = 0
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is None:
                continue
            size = parameter.numel() * parameter.element_size()
            if parameter in self._with_gradient:
                workspace += 2 * size
                continue
            self._with_gradient.add(parameter)
            existing += size
            if self._accumulates and self._links_using[parameter] == 1:
                continue
            if _is_laid_out_alike(gradient, parameter):
                staying.append(gradient)
            else:
                copied += size
                workspace += gradient.untyped_storage().nbytes()
        return GradientBytes(
            bytes_outside(self._resident, staying) + copied, workspace, existing if self._accumulates else 0
        )


def time_link(link: Link, state: State, incoming: Gradients, trained: Sequence[Tensor]) -> LinkTimes:
    """Return the shortest times of several runs of a link; a first run warms up and is not timed."""
    shortest = [float("inf")] * 3
    spent, runs = 0.0, 0
    while runs <= _LEAST_RUNS or (runs <= _MOST_RUNS and spent < _SECONDS_PER_LINK):
        marks = [now()]
        link.forward(state)
        marks.append(now())
        _, saved = link.forward_saving(state)
        marks.append(now())
        link.backward(saved, incoming, trained)
        marks.append(now())
        runs += 1
        if runs > 1:
            times = [end - start for start, end in itertools.pairwise(marks)]
            shortest = [min(pair) for pair in zip(shortest, times, strict=True)]
            spent += sum(times)
    return LinkTimes(*shortest)


def weigh_link(
    link: Link,
    state: State,
    incoming: Gradients,
    trained: Sequence[Tensor],
    resident: set[int],
    accumulation: GradientAccumulation,
) -> tuple[LinkBytes, Gradients, int]:
    """Count the bytes of one link.

    Parameters
    ----------
    link : Link
    state : State
        Its input.
    incoming : list of (Tensor or None)
        Gradients of its output.
    trained : sequence of Tensor
        The tensors that get a gradient.
    resident : set of int
        Storages that count as resident.
    accumulation : GradientAccumulation

    Returns
    -------
    LinkBytes, list of (Tensor or None), int
        The bytes, the gradients of its input, and the bytes of existing gradients to which
        those of `trained` are added.
    """
    with _Scale(resident) as scale:
        original, state = state, _copy_state(state, resident)
        inputs = _storages(state.tensors, resident)
        output, forward_peak = scale.peak_of(partial(link.forward, state))
        output_bytes = bytes_outside(resident, output.tensors)
        del output
        before = scale.live_bytes - sum(size for size, _ in inputs)
        (output, saved), saving_peak = scale.peak_of(partial(link.forward_saving, state))
        outputs = _storages(output.tensors, resident | storage_keys(state.tensors))
        del output, state
        saved_bytes = scale.live_bytes - before
        kept_input = _kept_bytes(inputs, bytes_outside(resident, original.tensors))
        kept_output = _kept_bytes(outputs, output_bytes)
        saved_bytes -= kept_input + kept_output
        copies: dict[int, Tensor] = {}
        incoming = [None if gradient is None else _copy(gradient, copies) for gradient in incoming]
        # The layer before may keep the same storages, so this backward cannot count on freeing them.
        held = [storage() for _, storage in inputs]
        gradients: Gradients
        (gradients, for_parameters), backward_peak = scale.peak_of(partial(link.backward, saved, incoming, trained))
        held.clear()
        input_gradient_bytes = bytes_outside(resident, (g for g in gradients if g is not None))
        accumulated = accumulation.add(trained, for_parameters)
    found = LinkBytes(
        output_bytes=output_bytes,
        saved_bytes=saved_bytes,
        keeps_input=kept_input > 0,
        keeps_output=kept_output > 0,
        forward_without_saving_workspace_bytes=max(0, forward_peak - output_bytes),
        forward_with_saving_workspace_bytes=max(0, saving_peak - output_bytes - saved_bytes),
        backward_workspace_bytes=max(
            0, backward_peak - input_gradient_bytes - accumulated.staying, accumulated.workspace
        ),
        input_gradient_bytes=input_gradient_bytes,
        parameter_gradient_bytes=accumulated.staying,
    )
    return found, gradients, accumulated.existing


class _Scale(StorageTracker):
    """A storage tracker that measures how much a single call adds at most."""

    def __init__(self, resident: set[int]) -> None:
        super().__init__()
        self._ignored = resident

    def peak_of(self, call: Callable[[], Result]) -> tuple[Result, int]:
        """Return the result of a call, and the most bytes live during it in addition to those before."""
        before = self.peak_bytes = self.live_bytes
        result = call()
        return result, self.peak_bytes - before


def bytes_outside(ignored: set[int], tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages of these tensors that are not ignored."""
    return sum(size for key, size in storage_sizes(tensors).items() if key not in ignored)


def _storages(tensors: Iterable[Tensor], ignored: set[int]) -> list[tuple[int, weakref.ref[torch.UntypedStorage]]]:
    """Return bytes and a weak reference of each distinct storage that is not ignored."""
    storages = {storage_id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [(storage.nbytes(), weakref.ref(storage)) for key, storage in storages.items() if key not in ignored]


def _kept_bytes(storages: list[tuple[int, weakref.ref[torch.UntypedStorage]]], total: int) -> int:
    """Return how many bytes of a state autograd keeps, 0 if less than half: then they count as saved bytes."""
    kept = sum(size for size, storage in storages if storage() is not None)
    return kept if kept * 2 >= total else 0


def _copy_state(state: State, resident: set[int]) -> State:
    """Return the state on new storages, as large as the old ones and shared alike; resident ones are not copied."""
    copies: dict[int, Tensor] = {}
    leaves = (
        _copy(leaf, copies) if isinstance(leaf, Tensor) and not storage_keys([leaf]) & resident else leaf
        for leaf in state.leaves
    )
    return State(tuple(leaves), state.spec)


def _copy(tensor: Tensor, copies: dict[int, Tensor]) -> Tensor:
    storage = tensor.untyped_storage()
    if storage_id(storage) not in copies:
        whole = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
        copies[storage_id(storage)] = whole.clone()
    same = copies[storage_id(storage)]
    if same.dtype != tensor.dtype:
        same = same.view(tensor.dtype)
    return same.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _is_laid_out_alike(gradient: Tensor, parameter: Tensor) -> bool:
    """Return whether autograd takes a gradient over as `.grad` without copying it."""
    if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return gradient.is_contiguous()
    pairs = zip(gradient.shape, gradient.stride(), parameter.stride(), strict=True)
    return all(size == 1 or a == b for size, a, b in pairs)
