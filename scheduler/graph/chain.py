"""Layers and chains: the coarse view of a training step, and its lowering to a graph.

A chain is a sequence of layers, each reading the output of the one before. It lowers to a
`Graph` in which each layer has a forward without saving and, for each mode, a forward with
saving and a backward of its own.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from functools import cached_property
from typing import cast

from scheduler.errors import InvalidGraphError
from scheduler.graph import Graph, Operation, Tensor
from scheduler.validation import (
    build,
    check_name,
    check_text,
    check_unique,
    count_of,
    instances,
    mapping,
    sequence,
    set_field,
    sha256,
    time_of,
)

CHAIN_FORMAT = "scheduler-chain"
CHAIN_VERSION = 2


@dataclass(frozen=True, slots=True)
class Mode:
    """A further way to run a layer: another trade of saved bytes against time.

    Parameters
    ----------
    forward_time, backward_time : float
        In the chain's `time_unit`.
    saved_bytes : int
        What is kept for the backward, beyond the layer's input and output.
    forward_workspace_bytes, backward_workspace_bytes : int
        Bytes that exist only while the one or the other runs.

    Raises
    ------
    InvalidGraphError
        If a number is negative or not finite.
    """

    forward_time: float
    backward_time: float
    saved_bytes: int
    _: KW_ONLY
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0

    def __post_init__(self) -> None:
        _check_numbers(self, "a mode")


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer: what it costs to run forward, with saving and without, and backward.

    Parameters
    ----------
    name : str
        Unique within a chain.
    forward_time, backward_time : float
        In the chain's `time_unit`; the forward is the one that saves.
    output_bytes : int
    saved_bytes : int
        What autograd keeps for the backward, beyond the layer's input and output.
    gradient_bytes : int, optional
        Gradient of the output; by default as large as the output, 0 for integer state.
    parameter_bytes, parameter_gradient_bytes : int
    keeps_input, keeps_output : bool
        Whether autograd keeps the layer's input, and its output.
    forward_without_saving_time : float, optional
        By default `forward_time`.
    forward_without_saving_workspace_bytes : int
    forward_with_saving_workspace_bytes : int
    backward_workspace_bytes : int
        Bytes that exist only while the one or the other runs.
    modes : iterable of Mode
        Further ways to run the layer with saving.

    Raises
    ------
    InvalidGraphError
        If a number is negative or not finite, or a field has the wrong type.

    Examples
    --------
    >>> layer = Layer("mlp", 1.0, 2.0, output_bytes=100, saved_bytes=400)
    >>> layer.gradient_bytes
    100
    """

    name: str
    forward_time: float
    backward_time: float
    output_bytes: int
    saved_bytes: int
    _: KW_ONLY
    gradient_bytes: int = cast(int, None)
    parameter_bytes: int = 0
    parameter_gradient_bytes: int = 0
    keeps_input: bool = True
    keeps_output: bool = False
    forward_without_saving_time: float = cast(float, None)
    forward_without_saving_workspace_bytes: int = 0
    forward_with_saving_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    modes: tuple[Mode, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name, "layer")
        if self.gradient_bytes is None:
            set_field(self, "gradient_bytes", self.output_bytes)
        if self.forward_without_saving_time is None:
            set_field(self, "forward_without_saving_time", self.forward_time)
        where = f'layer "{self.name}"'
        _check_numbers(self, where)
        for name in ("keeps_input", "keeps_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidGraphError(f"{name} of {where} is a bool, not {getattr(self, name)!r}")
        set_field(self, "modes", instances(self.modes, Mode, f"modes of {where}"))

    @property
    def all_modes(self) -> tuple[Mode, ...]:
        """All ways to run the layer with saving, its own first."""
        own = Mode(
            self.forward_time,
            self.backward_time,
            self.saved_bytes,
            forward_workspace_bytes=self.forward_with_saving_workspace_bytes,
            backward_workspace_bytes=self.backward_workspace_bytes,
        )
        return (own, *self.modes)


@dataclass(frozen=True)
class Chain:
    """A sequence of layers, each reading the output of the one before.

    Parameters
    ----------
    layers : iterable of Layer
    input_bytes : int
        Input of the first layer; resident (the batch).
    input_needs_gradient : bool
        Whether the gradient of the input is a result; it is as large as the input.
    resident : iterable of Tensor
        What else is live throughout, such as the optimizer's state.
    time_unit : str
        Unit of all times, for example "s" or "FLOP".
    name : str

    Raises
    ------
    InvalidGraphError
        If there is no layer, two layers share a name, or a field has the wrong type.

    Examples
    --------
    >>> chain = Chain([Layer("a", 1, 2, 8, 16), Layer("b", 1, 2, 8, 16)], input_bytes=8)
    >>> [operation.name for operation in chain.graph.operations][:3]
    ['a.forward', 'a.forward_without_saving', 'b.forward']
    """

    layers: tuple[Layer, ...]
    input_bytes: int
    _: KW_ONLY
    input_needs_gradient: bool = False
    resident: tuple[Tensor, ...] = ()
    time_unit: str = "s"
    name: str = ""

    def __post_init__(self) -> None:
        set_field(self, "layers", instances(self.layers, Layer, "layers of a chain"))
        if not self.layers:
            raise InvalidGraphError("a chain needs at least one layer")
        check_unique([layer.name for layer in self.layers], "layers")
        set_field(self, "input_bytes", count_of(self.input_bytes, "input_bytes of the chain"))
        if not isinstance(self.input_needs_gradient, bool):
            raise InvalidGraphError(f"input_needs_gradient is a bool, not {self.input_needs_gradient!r}")
        set_field(self, "resident", instances(self.resident, Tensor, "resident tensors of a chain"))
        for field in ("time_unit", "name"):
            check_text(getattr(self, field), f"{field} of the chain")

    @cached_property
    def lowered(self) -> LoweredChain:
        """The graph, and where in it each layer's operations stand."""
        return _lower(self)

    @property
    def graph(self) -> Graph:
        """The chain as a graph: what the judge works on.

        Each layer is one forward task (a forward with saving per mode, the first being the
        default, and a forward without saving) and one backward task (a backward per mode).
        What autograd keeps of a layer's input and output are tensors on their storages,
        which hold that very instance. After the last layer a free operation makes the loss,
        of no bytes, and another begins the backward phase by making the gradient of the last
        output from it.
        """
        return self.lowered.graph

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything in the chain."""
        return sha256(self.to_dict())

    def __hash__(self) -> int:
        return hash(self.digest)

    def to_dict(self) -> dict[str, object]:
        """Return the chain as plain JSON data; `from_dict` reads it back."""
        return {
            "format": CHAIN_FORMAT,
            "version": CHAIN_VERSION,
            "name": self.name,
            "time_unit": self.time_unit,
            "input_bytes": self.input_bytes,
            "input_needs_gradient": self.input_needs_gradient,
            "resident": [tensor.to_dict() for tensor in self.resident],
            "layers": [{**_plain(layer), "modes": [_plain(mode) for mode in layer.modes]} for layer in self.layers],
        }

    @classmethod
    def from_dict(cls, data: object) -> Chain:
        """Return the chain that `to_dict` wrote.

        Raises
        ------
        InvalidGraphError
            If the data is not of that form, names an unknown field or another version, or
            the chain in it contradicts itself.
        """
        entries = dict(mapping(data, "a chain"))
        kind, version = entries.pop("format", None), entries.pop("version", None)
        if kind != CHAIN_FORMAT or isinstance(version, bool) or version not in (1, CHAIN_VERSION):
            raise InvalidGraphError(
                f'not a chain of format "{CHAIN_FORMAT}" version {CHAIN_VERSION}: format {kind!r}, version {version!r}'
            )
        if version == 1:
            raise InvalidGraphError(
                "chains of version 1 are no longer read: they do not state the roles of resident tensors. Write the"
                " chain again with this package, for example with `scheduler trace --layers` or"
                " `write_graph`"
            )
        layers = [_build_layer(entry) for entry in sequence(entries.pop("layers", None), '"layers" of the chain')]
        tensors = sequence(entries.pop("resident", []), '"resident" of the chain')
        resident = [build(Tensor, entry, "a resident tensor") for entry in tensors]
        return build(cls, {**entries, "layers": layers, "resident": resident}, "a chain")


@dataclass(frozen=True)
class LoweredChain:
    """The graph of a chain, and the positions in it of each layer's operations.

    Attributes
    ----------
    graph : Graph
    saving, backward : tuple of tuple of int
        Per layer and mode: the forward with saving, and its backward.
    without_saving : tuple of int
        Per layer: the forward without saving.
    loss, loss_backward : int
        Makes the loss; begins the backward phase with the gradient of the last output.
    """

    graph: Graph
    saving: tuple[tuple[int, ...], ...]
    without_saving: tuple[int, ...]
    backward: tuple[tuple[int, ...], ...]
    loss: int
    loss_backward: int


@dataclass(frozen=True)
class _LoweredLayer:
    """One layer's part of the graph: its tensors in order, and its operations, one per mode."""

    tensors: tuple[Tensor, ...]
    saving: tuple[Operation, ...]
    without_saving: Operation
    backward: tuple[Operation, ...]


def _lower_layer(layer: Layer, source: str, source_gradient: tuple[str, ...]) -> _LoweredLayer:
    """Return the tensors and operations of a layer that reads `source`."""
    name = layer.name
    output, gradient = _output_of(layer), _gradient_of(layer)
    tensors = [
        Tensor(output, layer.output_bytes),
        Tensor(gradient, layer.gradient_bytes, role="gradient"),
        Tensor(_parameter_gradient_of(layer), layer.parameter_gradient_bytes, role="gradient"),
    ]
    parameters: tuple[str, ...] = ()
    if layer.parameter_bytes:
        parameters = (f"{name}.parameters",)
        tensors.append(Tensor(*parameters, layer.parameter_bytes, role="parameter"))
    saving, backward = [], []
    for number, mode in enumerate(layer.all_modes):
        suffix = f"[{number}]" if number else ""
        kept = [Tensor(f"{name}.saved{suffix}", mode.saved_bytes)]
        if layer.keeps_input:
            kept.append(Tensor(f"{name}.kept_input{suffix}", 0, source))
        if layer.keeps_output:
            kept.append(Tensor(f"{name}.kept_output{suffix}", 0, output))
        tensors += kept
        kept_names = [tensor.name for tensor in kept]
        saving.append(
            Operation(
                f"{name}.forward{suffix}",
                (source, *parameters),
                (output, *kept_names),
                mode.forward_time,
                mode.forward_workspace_bytes,
                signature=f"forward with saving {number}",
                layer=name,
                kind="forward with saving",
            )
        )
        backward.append(
            Operation(
                f"{name}.backward{suffix}",
                (gradient, *kept_names, *parameters),
                (*source_gradient, _parameter_gradient_of(layer)),
                mode.backward_time,
                mode.backward_workspace_bytes,
                phase="backward",
                signature=f"backward {number}",
                layer=name,
                kind="backward",
            )
        )
    without_saving = Operation(
        f"{name}.forward_without_saving",
        (source, *parameters),
        (output,),
        layer.forward_without_saving_time,
        layer.forward_without_saving_workspace_bytes,
        signature="forward without saving",
        layer=name,
        kind="forward without saving",
    )
    return _LoweredLayer(tuple(tensors), tuple(saving), without_saving, tuple(backward))


def _lower(chain: Chain) -> LoweredChain:
    source, source_gradient = "input", ("input_gradient",) if chain.input_needs_gradient else ()
    tensors = [Tensor("input", chain.input_bytes, role="input"), Tensor("loss", 0, role="output")]
    tensors += [Tensor(name, chain.input_bytes, role="gradient") for name in source_gradient]
    results = ["loss", *source_gradient]
    operations: list[Operation] = []
    parts: list[_LoweredLayer] = []
    saving: list[tuple[int, ...]] = []
    without_saving: list[int] = []
    for layer in chain.layers:
        part = _lower_layer(layer, source, source_gradient)
        parts.append(part)
        tensors += part.tensors
        results.append(_parameter_gradient_of(layer))
        saving.append(_extend(operations, part.saving))
        without_saving += _extend(operations, (part.without_saving,))
        source, source_gradient = _output_of(layer), (_gradient_of(layer),)
    (loss,) = _extend(operations, (Operation("loss", (source,), ("loss",), 0.0, signature="loss", kind="loss"),))
    loss_gradient = Operation(
        "loss_backward",
        (source,),
        source_gradient,
        0.0,
        phase="backward",
        signature="loss backward",
        kind="loss backward",
    )
    (loss_backward,) = _extend(operations, (loss_gradient,))
    backward = [_extend(operations, part.backward) for part in reversed(parts)]
    resident = [tensor for tensor in tensors if tensor.role in ("input", "parameter")]
    graph = Graph(
        tuple(operations),
        (*tensors, *chain.resident),
        resident=tuple(tensor.name for tensor in (*resident, *chain.resident)),
        results=tuple(results),
        time_unit=chain.time_unit,
        name=chain.name,
    )
    return LoweredChain(
        graph,
        saving=tuple(saving),
        without_saving=tuple(without_saving),
        backward=tuple(reversed(backward)),
        loss=loss,
        loss_backward=loss_backward,
    )


def _extend(operations: list[Operation], more: tuple[Operation, ...]) -> tuple[int, ...]:
    """Append operations and return their positions."""
    operations += more
    return tuple(range(len(operations) - len(more), len(operations)))


def _output_of(layer: Layer) -> str:
    return f"{layer.name}.output"


def _gradient_of(layer: Layer) -> str:
    return f"{layer.name}.gradient"


def _parameter_gradient_of(layer: Layer) -> str:
    return f"{layer.name}.parameter_gradient"


def _check_numbers(value: Layer | Mode, where: str) -> None:
    for field in fields(value):
        if field.name.endswith("_bytes"):
            set_field(value, field.name, count_of(getattr(value, field.name), f"{field.name} of {where}"))
        elif field.name.endswith("_time"):
            set_field(value, field.name, time_of(getattr(value, field.name), f"{field.name} of {where}"))


def _plain(value: Layer | Mode) -> dict[str, object]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _build_layer(data: object) -> Layer:
    entries = dict(mapping(data, "a layer"))
    modes = [build(Mode, entry, "a mode") for entry in sequence(entries.pop("modes", []), '"modes" of a layer')]
    return build(Layer, {**entries, "modes": modes}, "a layer")
