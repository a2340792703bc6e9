"""Measure the layers of a model: times and bytes of each, as a `Chain`.

Every byte is counted by the storages that are live. Two sweeps, each with little more than
one layer and the states between layers in memory: forwards to find what passes from layer to
layer, and backwards to measure each layer with the gradient that it really gets.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from scheduler.errors import CaptureError, ExecutionError
from scheduler.graph import Tensor as GraphTensor
from scheduler.graph.chain import Chain, Layer
from scheduler.pytorch.capture.device_memory import NOTHING_BESIDE, DeviceMemory, read_device_memory
from scheduler.pytorch.capture.module_state import Attributes, describe_kept, is_number
from scheduler.pytorch.capture.wrappers import check_unwrapped
from scheduler.pytorch.layerwise.groups import Gradients, Link, State
from scheduler.pytorch.layerwise.survey import LayerFunction, Layers, Survey, name_parts, storage_keys, tensors_of
from scheduler.pytorch.measurement.memory import StorageTracker, now, storage_bytes, storage_sizes
from scheduler.pytorch.measurement.rng import kept_generators

Result = TypeVar("Result")

_LEAST_RUNS = 3
_MOST_RUNS = 10
_SECONDS_PER_LINK = 0.1


def profile_layers(
    layers: nn.Sequential | Sequence[LayerFunction],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    reserve: int | str = 0,
    optimizer: Optimizer | None = None,
    accumulate_gradients: bool = False,
) -> Chain:
    """Measure what each layer of a model costs, forward and backward.

    The layers run as in `nn.Sequential`: the first takes the arguments, each other one the
    output of the one before, as one argument. A layer that only views its input, or changes
    it in place, becomes one with the layer before, since their storages are one. Buffers,
    gradients and random state are left as they were; autocast is that of the caller.

    Bytes are those of live storages; what an operator allocates inside itself is not seen.
    The last output and its gradient count as resident: the caller and autograd hold them.
    Tensors that one state passes on to the next unchanged are counted in both, unless they
    are arguments, so that a peak is never predicted too low.

    Parameters
    ----------
    layers : nn.Sequential or sequence of callable
    args, kwargs
        The arguments of one call. The batch counts as resident.
    loss : callable, optional
        Makes the scalar loss of the last output; it becomes the last layer.
    reserve, optimizer, accumulate_gradients
        As for `trace`. Gradients are added to existing ones layer by layer.

    Returns
    -------
    Chain
        Times in seconds, sizes in bytes.

    Raises
    ------
    CaptureError
        If nothing requires a gradient, or a layer is already wrapped by FSDP or
        DistributedDataParallel.
    ExecutionError
        If what a layer returns cannot be detached, or a layer changes the arguments in place,
        or attributes that are neither parameters nor buffers.
    InvalidOptionError
        If the layers are not a sequence of callables, an `nn.Sequential` does more than call
        them in turn, or the size of the optimizer's state cannot be found.
    InvalidBudgetError
        If `reserve` cannot be understood.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Flatten(), nn.Linear(8, 1))
    >>> chain = profile_layers(model, (torch.zeros(2, 4),), loss=lambda y: y.sum())
    >>> [(layer.name, layer.output_bytes) for layer in chain.layers]
    [('0.Linear', 64), ('1.Tanh+2.Flatten', 64), ('3.Linear', 8), ('loss', 4)]
    """
    memory = read_device_memory(layers, reserve, optimizer, accumulate_gradients)
    return profile(layers, args, kwargs, loss, timed=True, memory=memory).chain


@dataclass(frozen=True, eq=False)
class Boundary:
    """What passes between two links, without the values.

    Attributes
    ----------
    spec : TreeSpec
    kinds : tuple
        Per leaf: shape, dtype and device of a tensor, None for a plain value.
    differentiable : tuple of bool
        Per leaf: whether it requires a gradient.
    """

    spec: pytree.TreeSpec
    kinds: tuple[tuple[object, ...] | None, ...]
    differentiable: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class Profile:
    """A chain, and what runs it.

    Attributes
    ----------
    chain : Chain
    links : tuple of Link
        One per layer of the chain.
    boundaries : tuple of Boundary
        Before each link, and after the last.
    extras : tuple of tuple of Tensor
        Per link: tensors that get a gradient and are no parameters of its modules, such as
        those in the closure of a loss.
    """

    chain: Chain
    links: tuple[Link, ...]
    boundaries: tuple[Boundary, ...]
    extras: tuple[tuple[Tensor, ...], ...]


def profile(
    layers: Layers,
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
    loss: Callable[..., Tensor] | None,
    *,
    timed: bool,
    memory: DeviceMemory = NOTHING_BESIDE,
) -> Profile:
    """Return the chain of these layers and what runs it.

    Parameters
    ----------
    layers, args, kwargs, loss
        As for `profile_layers`.
    timed : bool
        Whether to measure times; without, all are 0.
    memory : DeviceMemory
        What stands beside the step.

    Raises
    ------
    CaptureError, ExecutionError, InvalidOptionError
        As `profile_layers`.
    """
    for module in layers if isinstance(layers, Sequence) else (layers,):
        if isinstance(module, nn.Module):
            check_unwrapped(module)
    parts = name_parts(layers, loss)
    arguments = (tuple(args), dict(kwargs or {}))
    with _restored([part for _, part in parts]), kept_generators():
        survey = Survey(parts, arguments)
        return _Measurer(survey, timed=timed, memory=memory).run(type(layers).__name__)


@dataclass
class _Costs:
    """What one link costs."""

    forward_time: float = 0.0
    forward_without_saving_time: float = 0.0
    backward_time: float = 0.0
    output_bytes: int = 0
    saved_bytes: int = 0
    keeps_input: bool = False
    keeps_output: bool = False
    forward_without_saving_workspace_bytes: int = 0
    forward_with_saving_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    gradient_bytes: int = 0
    """Of the input."""
    parameter_gradient_bytes: int = 0


class _Measurer:
    """The second sweep: each link by itself, the last first."""

    def __init__(self, survey: Survey, *, timed: bool, memory: DeviceMemory) -> None:
        self.survey = survey
        self.links = survey.links()
        self.timed = timed
        self.memory = memory
        self.accumulate_gradients: list[GraphTensor] = []
        self.trained = [
            [*dict.fromkeys([*link.trainable(), *survey.trained(number)])] for number, link in enumerate(self.links)
        ]
        self.resident = set(survey.resident_keys) | storage_keys(t for found in self.trained for t in found)
        self.users = Counter(tensor for found in self.trained for tensor in found)
        self.with_gradient: set[Tensor] = set()

    def run(self, name: str) -> Profile:
        """Measure all links."""
        survey = self.survey
        if not any(survey.flags[-1]):
            raise CaptureError(
                "the output of the last layer requires no gradient, so there is no backward to plan:"
                " call requires_grad_(True) on what is to be trained"
            )
        boundaries = tuple(_boundary(s, f) for s, f in zip(survey.states, survey.flags, strict=True))
        input_bytes = storage_bytes(survey.states[0].tensors)
        parameter_bytes = self._parameter_bytes(survey.states[-1])
        incoming: Gradients = [
            torch.ones_like(leaf) if flag and isinstance(leaf, Tensor) else None
            for leaf, flag in zip(survey.states.pop().leaves, survey.flags[-1], strict=True)
        ]
        gradient_bytes = self._bytes(g for g in incoming if g is not None)
        layers = []
        for number in range(len(self.links) - 1, -1, -1):
            costs, incoming = self._measure(number, survey.states.pop(), incoming)
            layers.append(
                Layer(
                    self.links[number].name,
                    costs.forward_time,
                    costs.backward_time,
                    costs.output_bytes,
                    costs.saved_bytes,
                    gradient_bytes=gradient_bytes,
                    parameter_bytes=parameter_bytes[number],
                    parameter_gradient_bytes=costs.parameter_gradient_bytes,
                    keeps_input=costs.keeps_input,
                    keeps_output=costs.keeps_output,
                    forward_without_saving_time=costs.forward_without_saving_time,
                    forward_without_saving_workspace_bytes=costs.forward_without_saving_workspace_bytes,
                    forward_with_saving_workspace_bytes=costs.forward_with_saving_workspace_bytes,
                    backward_workspace_bytes=costs.backward_workspace_bytes,
                )
            )
            gradient_bytes = costs.gradient_bytes
        chain = Chain(
            tuple(reversed(layers)),
            input_bytes,
            input_needs_gradient=any(boundaries[0].differentiable),
            resident=(*self.memory.tensors, *self.accumulate_gradients),
            name=name,
        )
        extras = (trained[len(link.trainable()) :] for link, trained in zip(self.links, self.trained, strict=True))
        return Profile(chain, tuple(self.links), boundaries, tuple(map(tuple, extras)))

    def _parameter_bytes(self, last: State) -> list[int]:
        """Return the resident bytes of each link that no earlier link and no argument has.

        The copies of buffers that a replay needs count twice: what it found, and what it
        works on. The last output and its gradient count too, in that the caller and autograd
        hold them to the end.
        """
        seen = set(self.survey.input_keys)
        found = []
        for number, link in enumerate(self.links):
            tensors = [*self.trained[number], *self.survey.link_constants(number)]
            tensors += [tensor for part in link.parts for tensor in tensors_of(part)]
            new = {key: size for key, size in storage_sizes(tensors).items() if key not in seen}
            seen |= new.keys()
            copied = storage_bytes(
                b for b in (module._buffers[name] for module, name in link.changing) if b is not None
            )
            found.append(sum(new.values()) + 2 * copied)
        found[-1] += 2 * self._bytes(last.tensors)
        return found

    def _measure(self, number: int, state: State, incoming: Gradients) -> tuple[_Costs, Gradients]:
        link = self.links[number]
        costs = _Costs()
        attributes = Attributes((link.name, module) for module in link.modules)
        link.find_grad_mode(state)
        # Numbers that were others in the two runs, and changed no bit of what these made, only count.
        kept = [name for name, value in attributes.changed().items() if link.needs_grad_mode or not is_number(value)]
        if kept:
            raise ExecutionError(describe_kept(kept))
        if self.timed:
            self._time(link, state, incoming, self.trained[number], costs)
        gradients = self._weigh(link, state, incoming, self.trained[number], costs)
        by_leaf = iter(gradients)
        return costs, [next(by_leaf) if flag else None for flag in link.differentiable]

    def _weigh(
        self,
        link: Link,
        state: State,
        incoming: Gradients,
        trained: Sequence[Tensor],
        costs: _Costs,
    ) -> Gradients:
        """Count the bytes of one link, and return the gradients of its input."""
        with _Scale(self.resident) as scale:
            original, state = state, _copy_state(state, self.resident)
            inputs = _storages(state.tensors, self.resident)
            output, peak = scale.peak_of(partial(link.forward, state))
            costs.output_bytes = self._bytes(output.tensors)
            costs.forward_without_saving_workspace_bytes = max(0, peak - costs.output_bytes)
            del output
            before = scale.live_bytes - sum(size for size, _ in inputs)
            (output, saved), peak = scale.peak_of(partial(link.forward_saving, state))
            outputs = _storages(output.tensors, self.resident | storage_keys(state.tensors))
            del output, state
            costs.saved_bytes = scale.live_bytes - before
            costs.keeps_input = self._keeps(inputs, self._bytes(original.tensors), costs)
            costs.keeps_output = self._keeps(outputs, costs.output_bytes, costs)
            costs.forward_with_saving_workspace_bytes = max(0, peak - costs.output_bytes - costs.saved_bytes)
            copies: dict[int, Tensor] = {}
            incoming = [None if g is None else _copy(g, copies) for g in incoming]
            # The layer before may keep the same storages, so this backward cannot count on freeing them.
            held = [storage() for _, storage in inputs]
            gradients: Gradients
            (gradients, for_parameters), peak = scale.peak_of(partial(link.backward, saved, incoming, trained))
            held.clear()
            costs.gradient_bytes = self._bytes(g for g in gradients if g is not None)
            costs.parameter_gradient_bytes, extra = self._accumulated(link, trained, for_parameters)
            made = costs.gradient_bytes + costs.parameter_gradient_bytes
            costs.backward_workspace_bytes = max(0, peak - made, extra)
        return gradients

    def _keeps(self, storages: list[tuple[int, weakref.ref[torch.UntypedStorage]]], total: int, costs: _Costs) -> bool:
        """Return whether autograd keeps a state; a smaller part of one that it keeps stays in the saved bytes."""
        kept = sum(size for size, storage in storages if storage() is not None)
        if kept * 2 < total or not kept:
            return False
        costs.saved_bytes -= kept
        return True

    def _accumulated(self, link: Link, parameters: Sequence[Tensor], gradients: Gradients) -> tuple[int, int]:
        """Return the bytes that stay as `.grad`, and those that accumulating takes meanwhile.

        Autograd takes a gradient over if it is laid out as the parameter, and copies it
        otherwise. The second gradient of a parameter with several users is added to the
        first, and does not stay. Where a `.grad` exists, only the first of several gradients
        stays, until they are all there.
        """
        staying: list[Tensor] = []
        copied = extra = existing = 0
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is None:
                continue
            size = parameter.numel() * parameter.element_size()
            if parameter in self.with_gradient:
                extra += 2 * size
                continue
            self.with_gradient.add(parameter)
            existing += size
            if self.memory.accumulate_gradients and self.users[parameter] == 1:
                continue
            if _is_laid_out_alike(gradient, parameter):
                staying.append(gradient)
            else:
                copied += size
                extra += gradient.untyped_storage().nbytes()
        if existing and self.memory.accumulate_gradients:
            self.accumulate_gradients.append(GraphTensor(f"gradient:{link.name}", existing, role="gradient"))
        return self._bytes(staying) + copied, extra

    def _bytes(self, tensors: Iterable[Tensor]) -> int:
        return sum(size for key, size in storage_sizes(tensors).items() if key not in self.resident)

    def _time(
        self,
        link: Link,
        state: State,
        incoming: Gradients,
        trained: Sequence[Tensor],
        costs: _Costs,
    ) -> None:
        """Time one link: the shortest of several runs; the first warms up and does not count."""
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
        costs.forward_without_saving_time, costs.forward_time, costs.backward_time = shortest


class _Scale(StorageTracker):  # type: ignore[no-untyped-call]
    """A storage tracker that says how much a single call adds at most."""

    def __init__(self, resident: set[int]) -> None:
        super().__init__()
        self._ignored = resident

    def peak_of(self, call: Callable[[], Result]) -> tuple[Result, int]:
        """Return what a call returns, and the most bytes live during it beyond those before."""
        before = self.peak_bytes = self.live_bytes
        result = call()
        return result, self.peak_bytes - before


def _boundary(state: State, flags: tuple[bool, ...]) -> Boundary:
    return Boundary(state.spec, tuple(map(kind_of, state.leaves)), flags)


def kind_of(leaf: object) -> tuple[object, ...] | None:
    """Return shape, dtype and device of a tensor, None for a plain value."""
    return (tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else None


def _storages(tensors: Iterable[Tensor], ignored: set[int]) -> list[tuple[int, weakref.ref[torch.UntypedStorage]]]:
    """Return bytes and a weak reference of each distinct storage that is not ignored."""
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [(storage.nbytes(), weakref.ref(storage)) for key, storage in storages.items() if key not in ignored]


def _copy_state(state: State, resident: set[int]) -> State:
    """Return the state on new storages, as large as the old ones and shared alike; resident ones stay."""
    copies: dict[int, Tensor] = {}
    leaves = (
        _copy(leaf, copies) if isinstance(leaf, Tensor) and not storage_keys([leaf]) & resident else leaf
        for leaf in state.leaves
    )
    return State(tuple(leaves), state.spec)


def _copy(tensor: Tensor, copies: dict[int, Tensor]) -> Tensor:
    storage = tensor.untyped_storage()
    if storage._cdata not in copies:
        whole = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
        copies[storage._cdata] = whole.clone()
    same = copies[storage._cdata]
    if same.dtype != tensor.dtype:
        same = same.view(tensor.dtype)
    return same.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _is_laid_out_alike(gradient: Tensor, parameter: Tensor) -> bool:
    """Return whether autograd takes a gradient over as `.grad` without copying it."""
    if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return gradient.is_contiguous()
    pairs = zip(gradient.shape, gradient.stride(), parameter.stride(), strict=True)
    return all(size == 1 or a == b for size, a, b in pairs)


@contextlib.contextmanager
def _restored(parts: Iterable[LayerFunction]) -> Iterator[None]:
    """Restore the buffers and other attributes of these layers afterwards."""
    modules = dict.fromkeys(module for part in parts if isinstance(part, nn.Module) for module in part.modules())
    attributes = Attributes(("", module) for module in modules)
    values = {b: b.detach().clone() for module in modules for b in module._buffers.values() if b is not None}
    try:
        yield
    finally:
        attributes.restore()
        with torch.no_grad():
            for buffer, value in values.items():
                buffer.copy_(value)
