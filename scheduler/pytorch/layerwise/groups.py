"""The links of a chain: one layer, or several that belong together, and the ways to run them.

A link can run forward without saving, forward with saving, and backward. A recomputation
replays the first run in the step: it draws the same random numbers and finds buffers as the first
run found them, and its own changes to buffers are dropped.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from scheduler.errors import ExecutionError
from scheduler.pytorch.measurement.rng import restore_generators, save_generators
from scheduler.pytorch.torch_private import pytree
from scheduler.pytorch.torch_private.modules import backward_hooks_of, buffers_of, parameters_of

Gradients = list[Tensor | None]

_PLAIN = (
    Number,
    str,
    bytes,
    type(None),
    torch.Size,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    slice,
    range,
    enum.Enum,
)


@dataclass(frozen=True, eq=False)
class State:
    """What passes between links: nested tensors and plain values, flattened.

    Attributes
    ----------
    leaves : tuple
        The tensors among them are detached.
    spec : TreeSpec
        How they are nested.
    """

    leaves: tuple[object, ...]
    spec: pytree.TreeSpec

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the leaves, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]


def read_state(value: object, link: str) -> State:
    """Flatten the output of a link.

    Parameters
    ----------
    value : nested tensors and plain values
    link : str
        Name of the link, for messages.

    Raises
    ------
    ExecutionError
        If a leaf is an object that may hold tensors, which could not be detached.
    """
    leaves, spec = pytree.tree_flatten(value)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.layout is not torch.strided or leaf.is_nested:
                raise ExecutionError(
                    f'layer "{link}" returns a tensor of layout {leaf.layout}, whose storage cannot be counted:'
                    " return dense tensors"
                )
        elif not isinstance(leaf, _PLAIN):
            raise ExecutionError(
                f'layer "{link}" returns an object of type {type(leaf).__name__}, which cannot be detached:'
                " return tensors and plain values in tuples, lists and dicts, or register the type with"
                " torch.utils._pytree.register_pytree_node"
            )
    return State(tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves), spec)


@dataclass(frozen=True)
class Saved:
    """What autograd saves in one forward with saving.

    Attributes
    ----------
    outputs : tuple of (GradientEdge or None)
        Per leaf of the output; the edges hold the autograd graph, but not the output.
    inputs : tuple of GradientEdge
        Of the differentiable leaves of the input.
    """

    outputs: tuple[GradientEdge | None, ...]
    inputs: tuple[GradientEdge, ...]


@dataclass(frozen=True, eq=False)
class Moment:
    """What the first run of a link found: random state, and the buffers that it changes."""

    random: list[tuple[torch.Generator, Tensor]]
    buffers: tuple[Tensor | None, ...]


class Link:
    """One layer, or several that run as one.

    Parameters
    ----------
    name : str
    parts : sequence of callable
        Each takes what the one before returns.
    differentiable : sequence of bool
        Per leaf of the input: whether it requires a gradient.
    changing : sequence of (Module, str)
        Buffers that the forward changes.
    takes_arguments : bool
        Whether the first part takes the arguments of the call, `(args, kwargs)`, instead.
    generators : sequence of Generator
        The user's own, from which the parts may draw.

    Attributes
    ----------
    modules : tuple of Module
        The parts that are modules, and all their submodules.
    needs_grad_mode : bool
        Whether the output is bitwise the same only with gradients enabled, as for recurrent
        layers on the CPU. A forward without saving then saves, and drops the saved data at once.
    """

    def __init__(
        self,
        name: str,
        parts: Sequence[Callable[..., object]],
        differentiable: Sequence[bool],
        *,
        changing: Sequence[tuple[nn.Module, str]] = (),
        takes_arguments: bool = False,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self.name = name
        self.generators = tuple(generators)
        self.parts = tuple(parts)
        self.differentiable = tuple(differentiable)
        self.changing = tuple(changing)
        self.takes_arguments = takes_arguments
        self.modules = self.current_modules()
        self.needs_grad_mode = any(isinstance(module, nn.RNNBase) for module in self.modules)

    def find_grad_mode(self, state: State) -> None:
        """Find out whether the output for this state is bitwise the same without gradients enabled."""
        moment = self.remember()
        with self.replay(moment):
            with_saving, _ = self.forward_saving(state)
        with self.replay(moment):
            without = self.forward(state)
        pairs = zip(with_saving.tensors, without.tensors, strict=True)
        self.needs_grad_mode |= not all(torch.equal(a, b) for a, b in pairs)

    def current_modules(self) -> tuple[nn.Module, ...]:
        """Return the parts that are modules and all their submodules, as they are now."""
        return tuple(
            dict.fromkeys(module for part in self.parts if isinstance(part, nn.Module) for module in part.modules())
        )

    def trainable(self) -> list[Tensor]:
        """Return the distinct parameters that require a gradient."""
        parameters = (parameter for module in self.modules for parameter in parameters_of(module).values())
        return [*dict.fromkeys(p for p in parameters if p is not None and p.requires_grad)]

    def forward(self, state: State) -> State:
        """Run forward without saving."""
        if self.needs_grad_mode:
            return self.forward_saving(state)[0]
        with torch.no_grad(), _own_casts():
            return read_state(self._call(pytree.tree_unflatten(state.leaves, state.spec)), self.name)

    def forward_saving(self, state: State) -> tuple[State, Saved]:
        """Run forward with saving."""
        leaves = list(state.leaves)
        with torch.enable_grad(), _own_casts():
            where = [i for i, wanted in enumerate(self.differentiable) if wanted]
            edges = _enter(leaves, where)
            value = self._call(pytree.tree_unflatten(leaves, state.spec))
        outputs = tuple(
            get_gradient_edge(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else None
            for leaf in pytree.tree_leaves(value)
        )
        return read_state(value, self.name), Saved(outputs, edges)

    def backward(
        self,
        saved: Saved,
        incoming: Sequence[Tensor | None],
        wanted: Sequence[Tensor],
        *,
        keep_saved: bool = False,
    ) -> tuple[Gradients, Gradients]:
        """Run backward.

        Parameters
        ----------
        saved : Saved
            Consumed, unless `keep_saved` is true.
        incoming : sequence of (Tensor or None)
            Gradients of the leaves of the output.
        wanted : sequence of Tensor
            Parameters whose gradients are computed.
        keep_saved : bool
            Whether another backward will read `saved`. If so, up to all saved bytes count in
            addition to the workspace, which is measured while autograd frees them as it goes.

        Returns
        -------
        list, list
            Gradients of the differentiable leaves of the input, and of the parameters.
        """
        pairs = [(e, g) for e, g in zip(saved.outputs, incoming, strict=True) if e is not None and g is not None]
        inputs: list[Tensor | GradientEdge] = [*saved.inputs, *wanted]
        if not pairs or not inputs:
            return [None] * len(saved.inputs), [None] * len(wanted)
        with _without_hooks(wanted):
            found = torch.autograd.grad(
                [edge for edge, _ in pairs],
                inputs,  # type: ignore[arg-type]
                [gradient for _, gradient in pairs],
                retain_graph=keep_saved,
                allow_unused=True,
            )
        return list(found[: len(saved.inputs)]), list(found[len(saved.inputs) :])

    def remember(self, last: Moment | None = None) -> Moment:
        """Return what a replay of the next run will need; share the random state of `last` if it is equal."""
        random = save_generators(self.generators)
        if last is not None and len(random) == len(last.random):
            pairs = zip(random, last.random, strict=True)
            if all(one is other and torch.equal(now, then) for (one, now), (other, then) in pairs):
                random = last.random
        found = (buffers_of(module).get(name) for module, name in self.changing)
        return Moment(random, tuple(None if buffer is None else buffer.detach().clone() for buffer in found))

    @contextlib.contextmanager
    def replay(self, moment: Moment) -> Iterator[None]:
        """Make the runs inside repeat the first run, and undo their effects on buffers and random state."""
        random = save_generators(self.generators)
        buffers = [buffers_of(module).get(name) for module, name in self.changing]
        try:
            restore_generators(moment.random)
            for (module, name), buffer in zip(self.changing, moment.buffers, strict=True):
                buffers_of(module)[name] = None if buffer is None else buffer.clone()
            yield
        finally:
            for (module, name), buffer in zip(self.changing, buffers, strict=True):
                buffers_of(module)[name] = buffer
            restore_generators(random)

    def fixed_tensors(self) -> list[Tensor]:
        """Return parameters, and buffers that no run changes: a replay must find them unchanged."""
        found: list[Tensor | None] = []
        for module in self.modules:
            found += parameters_of(module).values()
            found += (tensor for name, tensor in buffers_of(module).items() if (module, name) not in self.changing)
        return [tensor for tensor in found if tensor is not None]

    def _call(self, value: object) -> object:
        first, *others = self.parts
        if self.takes_arguments:
            args, kwargs = cast("tuple[tuple[object, ...], dict[str, object]]", value)
            value = first(*args, **kwargs)
        else:
            value = first(value)
        for part in others:
            value = part(value)
        return value


class _Entry(torch.autograd.Function):
    """The beginning of a link's autograd graph: its input as new tensors on the same storages.

    A detached leaf would serve too, but the node that accumulates its gradient would hold it.
    """

    @staticmethod
    def forward(ctx, anchor, *tensors):  # type: ignore[no-untyped-def]
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        raise AssertionError("gradients are taken at the edges of this node")


def _enter(leaves: list[object], where: Sequence[int]) -> tuple[GradientEdge, ...]:
    """Replace the leaves at these places by tensors that begin a graph, and return their edges."""
    if not where:
        return ()
    anchor = torch.empty(0, requires_grad=True)
    entered = _Entry.apply(anchor, *(leaves[i] for i in where))  # type: ignore[no-untyped-call]
    for i, tensor in zip(where, entered, strict=True):
        leaves[i] = tensor
    return tuple(get_gradient_edge(tensor) for tensor in entered)


@contextlib.contextmanager
def _own_casts() -> Iterator[None]:
    """Keep autocast from reusing its copies of weights in later runs.

    A copy made in a run without saving would carry no gradient, and one made in a run with
    saving would outlive the autograd graph with which it is counted.
    """
    try:
        yield
    finally:
        if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            torch.clear_autocast_cache()


@contextlib.contextmanager
def _without_hooks(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Disable the tensor hooks of parameters: they run when the gradient is accumulated."""
    hooks = [(hooks, dict(hooks)) for hooks in map(backward_hooks_of, parameters)]
    for registered, _ in hooks:
        registered.clear()
    try:
        yield
    finally:
        for registered, kept in hooks:
            registered.update(kept)
