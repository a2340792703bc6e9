"""Find what passes between the layers of a model, before they are measured.

One forward sweep finds the states between layers, and the layers that must run as one: a layer
that only views its input, or changes it in place, shares storages with the layer before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scheduler.errors import CaptureError, ExecutionError, InvalidOptionError
from scheduler.pytorch.capture.outside_draws import OutsideDraws
from scheduler.pytorch.guards.read_names import ReadNames
from scheduler.pytorch.guards.tensors import find_tensors
from scheduler.pytorch.layerwise.groups import Link, Saved, State, read_state
from scheduler.pytorch.measurement.memory import storage_sizes
from scheduler.pytorch.torch_private import pytree
from scheduler.pytorch.torch_private.modules import buffers_of, has_hooks, is_batch_norm, submodules_of
from scheduler.pytorch.torch_private.tensors import version_of

LayerFunction = Callable[..., object]
Layers = nn.Module | Sequence[LayerFunction]
"""An `nn.Sequential` or a sequence; other modules are rejected when their layers are read."""


def name_parts(layers: Layers, loss: Callable[..., Tensor] | None) -> list[tuple[str, LayerFunction]]:
    """Return the layers and the loss with a name for each.

    Raises
    ------
    InvalidOptionError
        As for `profile_layers`.
    """
    if isinstance(layers, nn.Sequential):
        if type(layers).forward is not nn.Sequential.forward or has_hooks(layers):
            raise InvalidOptionError(
                f"{type(layers).__name__} does more than call its layers in turn (it has its own forward or hooks):"
                " give the layers as a list"
            )
        named: list[tuple[str, object]] = list(submodules_of(layers).items())
    elif isinstance(layers, Sequence) and not isinstance(layers, str):
        named = [(str(number), layer) for number, layer in enumerate(layers)]
    else:
        raise InvalidOptionError(
            f"layers must be an nn.Sequential or a list of layers, got {type(layers).__name__}:"
            ' give its layers as a list, or use granularity="operations"'
        )
    parts: list[tuple[str, LayerFunction]] = []
    for name, layer in named:
        if not callable(layer):
            raise InvalidOptionError(f'layer "{name}" must be callable, got {type(layer).__name__}')
        kind = type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", "layer")
        parts.append((f"{name}.{kind}", layer))
    if not parts:
        raise InvalidOptionError("there are no layers: give at least one")
    return parts if loss is None else [*parts, ("loss", loss)]


def run_in_turn(
    parts: Sequence[tuple[str, LayerFunction]], args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    """Run named layers without a plan: the first on the arguments, each other on what the one before returned."""
    (_, first), *others = parts
    value = first(*args, **kwargs)
    for _, part in others:
        value = part(value)
    return value


class Survey:
    """The first sweep: finds what passes between layers, and which layers must run as one.

    Attributes
    ----------
    states, flags : list
        Before each link and after the last: the state, and which of its leaves require a gradient.
    starts : list of int
        The first layer of each link, and the number of layers.
    input_keys, resident_keys : set of int
        Storages of the arguments; of these, and of parameters, buffers and constants.
    """

    def __init__(self, parts: list[tuple[str, LayerFunction]], arguments: tuple[object, ...]) -> None:
        self.constants = [_constants_of(part) for _, part in parts]
        state, flags = _arguments_state(arguments)
        self.input_keys = storage_keys(state.tensors)
        owned = [tensor for _, part in parts for tensor in tensors_of(part)]
        owned += [tensor for found in self.constants for tensor in found]
        self.resident_keys = self.input_keys | storage_keys(owned)
        self.starts = [0]
        self.states = [state]
        self.flags = [flags]
        self.found: list[list[Tensor]] = []
        self.changing: list[tuple[tuple[nn.Module, str], ...]] = []
        self.generators: list[list[torch.Generator]] = []
        self.parts = parts
        for number, (name, part) in enumerate(parts):
            draws = _draws_of(name, part)
            generators = draws.own_generators
            link = Link(name, [part], flags, takes_arguments=number == 0, generators=generators)
            state, flags = self._advance(number, link, state, draws)
            self.generators.append(generators)
        self.starts.append(len(parts))
        self.states.append(state)
        self.flags.append(flags)

    def _advance(self, number: int, link: Link, state: State, draws: OutsideDraws) -> tuple[State, tuple[bool, ...]]:
        _check_own_draws(link)
        versions = [version_of(tensor) for tensor in state.tensors]
        buffers = _buffers_of(link)
        with draws.kept():
            with draws.recorded():
                output, saved = link.forward_saving(state)
            draws.check(functools.partial(link.forward_saving, state))
            draws.check_values()
        self.found.append(_leaves_of_graph(saved))
        self.changing.append(tuple(buffer.place for buffer in buffers if buffer.has_changed()))
        changed = [t for t, version in zip(state.tensors, versions, strict=True) if version_of(t) != version]
        if storage_keys(changed) & self.resident_keys:
            raise ExecutionError(
                f'layer "{link.name}" changes the arguments of the call in place, so it could not be recomputed:'
                " make it work on a copy"
            )
        own = storage_keys(output.tensors) - self.resident_keys
        joined = storage_keys(changed)
        if own and own <= storage_keys(state.tensors):
            joined |= own
        if number:
            self.starts.append(number)
            self.states.append(state)
            self.flags.append(link.differentiable)
        while len(self.starts) > 1 and storage_keys(self.states[-1].tensors) & joined:
            del self.starts[-1], self.states[-1], self.flags[-1]
        return output, tuple(edge is not None for edge in saved.outputs)

    def links(self) -> list[Link]:
        """Return the links, in which layers that must run as one are merged."""
        links = []
        for start, end, flags in zip(self.starts[:-1], self.starts[1:], self.flags[:-1], strict=True):
            name = "+".join(name for name, _ in self.parts[start:end])
            parts = [part for _, part in self.parts[start:end]]
            changing = [place for places in self.changing[start:end] for place in places]
            generators = dict.fromkeys(one for found in self.generators[start:end] for one in found)
            links.append(
                Link(name, parts, flags, changing=changing, takes_arguments=start == 0, generators=[*generators])
            )
        return links

    def trained(self, number: int) -> list[Tensor]:
        """Return the tensors whose gradients a link computes, whether they are parameters or not, each once."""
        span = range(self.starts[number], self.starts[number + 1])
        return [*dict.fromkeys(tensor for i in span for tensor in self.found[i])]

    def link_constants(self, number: int) -> list[Tensor]:
        """Return the tensors that a link reads besides parameters, buffers and its input."""
        span = range(self.starts[number], self.starts[number + 1])
        return [tensor for i in span for tensor in self.constants[i]]


def _arguments_state(arguments: tuple[object, ...]) -> tuple[State, tuple[bool, ...]]:
    leaves = pytree.tree_leaves(arguments)
    flags = tuple(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
    return read_state(arguments, "arguments"), flags


def tensors_of(part: LayerFunction) -> list[Tensor]:
    """Return the parameters and buffers of a layer."""
    return [*part.parameters(), *part.buffers()] if isinstance(part, nn.Module) else []


def _check_own_draws(link: Link) -> None:
    """Refuse a layer that draws from a state which cannot be put back, as recurrent networks of cuDNN do."""
    for module in (one for part in link.parts if isinstance(part, nn.Module) for one in part.modules()):
        if isinstance(module, nn.RNNBase) and module.training and module.dropout and module.num_layers > 1:
            device = next(module.parameters()).device
            if device.type != "cpu":
                raise CaptureError(
                    f'layer "{link.name}" has a recurrent network of {module.num_layers} layers with dropout'
                    f" {module.dropout} between them, which draws it inside one operator on {device.type}, so a"
                    " recomputation would draw otherwise: use single layers with nn.Dropout between them"
                )


def _draws_of(name: str, part: LayerFunction) -> OutsideDraws:
    module, function = _module_and_function(part)
    return OutsideDraws(module, function, ReadNames(module, function), name)


def _constants_of(part: LayerFunction) -> list[Tensor]:
    module, function = _module_and_function(part)
    return [place.get() for place in find_tensors(module, function, ReadNames(module, function))]


def _module_and_function(part: LayerFunction) -> tuple[nn.Module, LayerFunction | None]:
    return (part, None) if isinstance(part, nn.Module) else (nn.Module(), part)


def storage_keys(tensors: Iterable[Tensor]) -> set[int]:
    """Return the identities of the storages, valid while the tensors are alive."""
    return set(storage_sizes(tensors))


def _leaves_of_graph(saved: Saved) -> list[Tensor]:
    """Return the leaf tensors whose gradients an autograd graph computes, except its own inputs."""
    seen = {edge.node for edge in saved.inputs}
    stack = [edge.node for edge in saved.outputs if edge is not None]
    found: list[Tensor] = []
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found.append(variable)
        stack += [following for following, _ in node.next_functions if following is not None]
    return found


@dataclass(frozen=True, eq=False)
class _Buffer:
    """A buffer as it was before a run."""

    place: tuple[nn.Module, str]
    tensor: Tensor
    version: int
    value: Tensor

    def has_changed(self) -> bool:
        """Return whether the run changed or replaced the buffer, or another run may, as in a normalization."""
        module, name = self.place
        now = buffers_of(module).get(name)
        if is_batch_norm(module) and module.training:
            return True
        return now is not self.tensor or version_of(now) != self.version or not torch.equal(now, self.value)


def _buffers_of(link: Link) -> list[_Buffer]:
    """Return the buffers of a link as they are now."""
    return [
        _Buffer((module, name), buffer, version_of(buffer), buffer.detach().clone())
        for module in link.modules
        for name, buffer in buffers_of(module).items()
        if buffer is not None
    ]
