"""Measure the layers of a model: times and bytes of each, as a `Chain`.

Every byte is counted by the storages that are live. There are two sweeps, each with little more
than one layer and the states between layers in memory: a forward sweep finds what passes from
layer to layer, and a backward sweep measures each layer with the gradient that it really gets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scheduler.errors import CaptureError, ExecutionError, SchedulerError
from scheduler.graph import Tensor as GraphTensor
from scheduler.graph.chain import Chain
from scheduler.graph.layers import Layer
from scheduler.pytorch.capture.device_memory import NO_OTHER_MEMORY, DeviceMemory, read_device_memory
from scheduler.pytorch.capture.exporting.failures import check_has_data, check_runs, describe_reshaped
from scheduler.pytorch.capture.module_state import Attributes, describe_kept, is_number
from scheduler.pytorch.capture.wrappers import check_unwrapped
from scheduler.pytorch.layerwise.groups import Gradients, Link, State
from scheduler.pytorch.layerwise.link_costs import (
    GradientAccumulation,
    LinkBytes,
    LinkTimes,
    bytes_outside,
    time_link,
    weigh_link,
)
from scheduler.pytorch.layerwise.survey import (
    LayerFunction,
    Layers,
    Survey,
    name_parts,
    run_in_turn,
    storage_keys,
    tensors_of,
)
from scheduler.pytorch.measurement.memory import resident_tensors, storage_bytes, storage_sizes
from scheduler.pytorch.measurement.rng import kept_generators
from scheduler.pytorch.torch_private import pytree
from scheduler.pytorch.torch_private.modules import buffers_of


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
    """Measure the time and memory of each layer of a model, forward and backward.

    The layers run as in `nn.Sequential`: the first takes the arguments, and each other layer takes
    the output of the one before as its only argument. A layer that only views its input, or
    changes it in place, is merged with the layer before, because they share storages.
    Buffers, gradients and random state are left as they were; autocast is that of the caller.

    Bytes are those of live storages; what an operator allocates inside itself is not counted.
    The last output and its gradient count as resident, because the caller and autograd hold them.
    Tensors that one state passes on to the next unchanged are counted in both, unless they
    are arguments, so a peak is never predicted too low.

    Parameters
    ----------
    layers : nn.Sequential or sequence of callable
    args, kwargs
        The arguments of one call. The batch counts as resident.
    loss : callable, optional
        Computes the scalar loss from the last output; it becomes the last layer.
    reserve, optimizer, accumulate_gradients
        As for `trace`. Gradients are added to existing ones layer by layer.

    Returns
    -------
    Chain
        Times in seconds, sizes in bytes.

    Raises
    ------
    CaptureError
        If nothing requires a gradient, if a layer is already wrapped by FSDP or
        DistributedDataParallel, if the layers themselves fail on these arguments, or if they give
        a buffer another shape.
    ExecutionError
        If the output of a layer cannot be detached, or if a layer changes the arguments in place,
        or changes attributes that are neither parameters nor buffers.
    InvalidOptionError
        If the layers are not a sequence of callables, if an `nn.Sequential` does more than call
        them in turn, or if the size of the optimizer's state cannot be found.
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
    """The structure of what passes between two links, without the values.

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
    """A chain, and the links that run it.

    Attributes
    ----------
    chain : Chain
    links : tuple of Link
        One per layer of the chain.
    boundaries : tuple of Boundary
        Before each link, and after the last.
    extras : tuple of tuple of Tensor
        Per link: tensors that get a gradient and are not parameters of its modules, such as
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
    memory: DeviceMemory = NO_OTHER_MEMORY,
) -> Profile:
    """Return the chain of these layers and the links that run it.

    Parameters
    ----------
    layers, args, kwargs, loss
        As for `profile_layers`.
    timed : bool
        Whether to measure times; if not, all are 0.
    memory : DeviceMemory
        What the device holds in addition to the step.

    Raises
    ------
    CaptureError, ExecutionError, InvalidOptionError
        As for `profile_layers`.
    """
    for module in layers if isinstance(layers, Sequence) else (layers,):
        if isinstance(module, nn.Module):
            check_unwrapped(module)
    parts = name_parts(layers, loss)
    arguments = (tuple(args), dict(kwargs or {}))
    modules = nn.ModuleList(part for _, part in parts if isinstance(part, nn.Module))
    check_has_data(resident_tensors(modules, arguments), "measured by layers")
    name = type(layers).__name__
    try:
        with _restored([part for _, part in parts]), kept_generators():
            survey = Survey(parts, arguments)
            with kept_generators(one for found in survey.generators for one in found):
                return _Sweep(survey, timed=timed, memory=memory).measure(name)
    except SchedulerError:
        raise
    except Exception:  # torch raises errors of many kinds here
        check_runs(lambda *args, **kwargs: run_in_turn(parts, args, kwargs), name, *arguments, modules)
        raise


class _Sweep:
    """The second sweep: measures each link by itself, the last first."""

    def __init__(self, survey: Survey, *, timed: bool, memory: DeviceMemory) -> None:
        self._survey = survey
        self._links = survey.links()
        self._timed = timed
        self._memory = memory
        self._trained = [
            [*dict.fromkeys([*link.trainable(), *survey.trained(number)])] for number, link in enumerate(self._links)
        ]
        self._resident = survey.resident_keys | storage_keys(t for tensors in self._trained for t in tensors)
        self._accumulation = GradientAccumulation(
            self._trained, self._resident, accumulates=memory.accumulate_gradients
        )

    def measure(self, name: str) -> Profile:
        """Measure all links; the states of the survey are dropped on the way.

        Parameters
        ----------
        name : str
            Of the chain.
        """
        survey = self._survey
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
        gradient_bytes = bytes_outside(self._resident, (g for g in incoming if g is not None))
        layers: list[Layer] = []
        existing_gradients: list[GraphTensor] = []
        for number in range(len(self._links) - 1, -1, -1):
            link = self._links[number]
            times, sizes, incoming, existing = self._measure(number, survey.states.pop(), incoming)
            layers.append(_layer(link.name, times, sizes, gradient_bytes, parameter_bytes[number]))
            gradient_bytes = sizes.input_gradient_bytes
            if existing:
                existing_gradients.append(GraphTensor(f"gradient:{link.name}", existing, role="gradient"))
        chain = Chain(
            tuple(reversed(layers)),
            input_bytes,
            input_needs_gradient=any(boundaries[0].differentiable),
            resident=(*self._memory.tensors, *existing_gradients),
            name=name,
        )
        extras = (trained[len(link.trainable()) :] for link, trained in zip(self._links, self._trained, strict=True))
        return Profile(chain, tuple(self._links), boundaries, tuple(map(tuple, extras)))

    def _parameter_bytes(self, last: State) -> list[int]:
        """Return the resident bytes of each link that no earlier link and no argument has.

        The copies of buffers that a replay needs count twice: those that the first run found,
        and those that the replay changes. The last output and its gradient count too, because
        the caller and autograd hold them to the end.
        """
        seen = set(self._survey.input_keys)
        found = []
        for number, link in enumerate(self._links):
            tensors = [*self._trained[number], *self._survey.link_constants(number)]
            tensors += [tensor for part in link.parts for tensor in tensors_of(part)]
            new = {key: size for key, size in storage_sizes(tensors).items() if key not in seen}
            seen |= new.keys()
            copied = storage_bytes(
                b for b in (buffers_of(module)[name] for module, name in link.changing) if b is not None
            )
            found.append(sum(new.values()) + 2 * copied)
        found[-1] += 2 * bytes_outside(self._resident, last.tensors)
        return found

    def _measure(self, number: int, state: State, incoming: Gradients) -> tuple[LinkTimes, LinkBytes, Gradients, int]:
        """Return times and bytes of a link, the gradients of its input, and the bytes of existing gradients."""
        link, trained = self._links[number], self._trained[number]
        attributes = Attributes((link.name, module) for module in link.modules)
        link.find_grad_mode(state)
        # A number that changed between the two runs, and no bit of their outputs, is only a counter.
        kept = [name for name, value in attributes.changed().items() if link.needs_grad_mode or not is_number(value)]
        if kept:
            raise ExecutionError(describe_kept(kept))
        times = time_link(link, state, incoming, trained) if self._timed else LinkTimes()
        sizes, gradients, existing = weigh_link(link, state, incoming, trained, self._resident, self._accumulation)
        by_leaf = iter(gradients)
        return times, sizes, [next(by_leaf) if flag else None for flag in link.differentiable], existing


def _layer(name: str, times: LinkTimes, sizes: LinkBytes, gradient_bytes: int, parameter_bytes: int) -> Layer:
    """Return a layer of the chain; the gradient of its output is what the next link returns for its input."""
    return Layer(
        name,
        times.forward,
        times.backward,
        sizes.output_bytes,
        sizes.saved_bytes,
        gradient_bytes=gradient_bytes,
        parameter_bytes=parameter_bytes,
        parameter_gradient_bytes=sizes.parameter_gradient_bytes,
        keeps_input=sizes.keeps_input,
        keeps_output=sizes.keeps_output,
        forward_without_saving_time=times.forward_without_saving,
        forward_without_saving_workspace_bytes=sizes.forward_without_saving_workspace_bytes,
        forward_with_saving_workspace_bytes=sizes.forward_with_saving_workspace_bytes,
        backward_workspace_bytes=sizes.backward_workspace_bytes,
    )


def _boundary(state: State, flags: tuple[bool, ...]) -> Boundary:
    return Boundary(state.spec, tuple(map(kind_of, state.leaves)), flags)


def kind_of(leaf: object) -> tuple[object, ...] | None:
    """Return shape, dtype and device of a tensor, None for a plain value."""
    return (tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else None


@contextlib.contextmanager
def _restored(parts: Iterable[LayerFunction]) -> Iterator[None]:
    """Restore the buffers and other attributes of these layers afterwards.

    Raises
    ------
    CaptureError
        If the layers have given a buffer another shape.
    """
    modules = dict.fromkeys(module for part in parts if isinstance(part, nn.Module) for module in part.modules())
    attributes = Attributes(("", module) for module in modules)
    held = [(m, name, buffer) for m in modules for name, buffer in buffers_of(m).items() if buffer is not None]
    values = {buffer: buffer.detach().clone() for _, _, buffer in held}
    reshaped: list[str] = []
    try:
        yield
        now = [(name, values[buffer], buffers_of(module).get(name)) for module, name, buffer in held]
        reshaped = [name for name, then, after in now if after is not None and after.shape != then.shape]
    finally:
        attributes.restore()
        with torch.no_grad():
            for buffer, value in values.items():
                if buffer.shape != value.shape:
                    buffer.resize_(value.shape)
                buffer.copy_(value)
    if reshaped:
        raise CaptureError(describe_reshaped(reshaped))
