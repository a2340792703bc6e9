"""Chains of layers: the coarse view of a training step, and its lowering to a graph.

A chain is a sequence of layers, each reading the output of the one before. It lowers to a
`Graph` in which each layer has a forward without saving and, for each mode, a forward with
saving and a backward of its own.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, fields
from functools import cached_property

from scheduler.errors import InvalidGraphError
from scheduler.graph import Graph, Operation, Tensor
from scheduler.graph.layers import Layer, Mode
from scheduler.units import format_bytes, text_table
from scheduler.validation import (
    build,
    check_unique,
    check_version,
    count_of,
    instances,
    mapping,
    sequence,
    set_field,
    sha256,
    text_of,
)

CHAIN_FORMAT = "scheduler-chain"
CHAIN_VERSION = 2


@dataclass(frozen=True)
class Chain:
    """A sequence of layers, each reading the output of the one before.

    Parameters
    ----------
    layers : iterable of Layer
    input_bytes : int
        Bytes of the first layer's input (the batch), which is resident.
    input_needs_gradient : bool
        Whether the gradient of the input is a result; it is as large as the input.
    resident : iterable of Tensor
        Other tensors that are live throughout, such as the optimizer's state.
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
            raise InvalidGraphError(f"input_needs_gradient must be a bool, got {self.input_needs_gradient!r}")
        set_field(self, "resident", instances(self.resident, Tensor, "resident tensors of a chain"))
        for field in ("time_unit", "name"):
            text_of(getattr(self, field), f"{field} of the chain")

    @cached_property
    def lowered(self) -> LoweredChain:
        """The graph, and the position in it of each layer's operations."""
        return _lower(self)

    @property
    def graph(self) -> Graph:
        """The chain as a graph, which the simulator works on.

        Each layer is one forward task (a forward with saving per mode, the first being the
        default, and a forward without saving) and one backward task (a backward per mode).
        The input and output that autograd keeps of a layer are tensors on the storages of
        both, and hold that instance. After the last layer, an operation without cost
        produces the loss, of no bytes, and another begins the backward phase: it produces
        the gradient of the last output.
        """
        return self.lowered.graph

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything in the chain."""
        return sha256(self.to_dict())

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Chain({self.name!r}, {len(self.layers)} layers, {format_bytes(self.graph.resident_bytes)} resident)"

    def summary(self) -> str:
        """Return the number of layers, their bytes and their times, as text."""
        modes = sum(len(layer.modes) for layer in self.layers)
        output_bytes = sum(layer.output_bytes for layer in self.layers)
        saved_bytes = sum(layer.saved_bytes for layer in self.layers)
        forward = math.fsum(layer.forward_time for layer in self.layers)
        backward = math.fsum(layer.backward_time for layer in self.layers)
        rows = [
            ("chain", self.name or "without a name"),
            ("layers", f"{len(self.layers)}, {modes} further modes" if modes else str(len(self.layers))),
            ("resident", format_bytes(self.graph.resident_bytes)),
            ("outputs", format_bytes(output_bytes)),
            ("saved", f"{format_bytes(saved_bytes)} if nothing is recomputed"),
            ("time", f"{forward:.6g} {self.time_unit} forward, {backward:.6g} {self.time_unit} backward"),
        ]
        return text_table(rows)

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
        check_version(entries, CHAIN_FORMAT, CHAIN_VERSION, lacks="the roles of resident tensors")
        del entries["format"], entries["version"]
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
        Produces the loss; begins the backward phase with the gradient of the last output.
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
    tensors = [
        Tensor(_output_of(layer), layer.output_bytes),
        Tensor(_gradient_of(layer), layer.gradient_bytes, role="gradient"),
        Tensor(_parameter_gradient_of(layer), layer.parameter_gradient_bytes, role="gradient"),
    ]
    parameters: tuple[str, ...] = ()
    if layer.parameter_bytes:
        parameters = (f"{layer.name}.parameters",)
        tensors.append(Tensor(*parameters, layer.parameter_bytes, role="parameter"))
    saving, backward = [], []
    for number, mode in enumerate(layer.all_modes):
        kept = _kept_tensors(layer, mode, source, number)
        tensors += kept
        names = tuple(tensor.name for tensor in kept)
        suffix = _suffix(number)
        saving.append(
            Operation(
                f"{layer.name}.forward{suffix}",
                (source, *parameters),
                (_output_of(layer), *names),
                mode.forward_time,
                mode.forward_workspace_bytes,
                signature=f"forward with saving {number}",
                layer=layer.name,
                kind="forward with saving",
            )
        )
        backward.append(
            Operation(
                f"{layer.name}.backward{suffix}",
                (_gradient_of(layer), *names, *parameters),
                (*source_gradient, _parameter_gradient_of(layer)),
                mode.backward_time,
                mode.backward_workspace_bytes,
                phase="backward",
                signature=f"backward {number}",
                layer=layer.name,
                kind="backward",
            )
        )
    without_saving = Operation(
        f"{layer.name}.forward_without_saving",
        (source, *parameters),
        (_output_of(layer),),
        layer.forward_without_saving_time,
        layer.forward_without_saving_workspace_bytes,
        signature="forward without saving",
        layer=layer.name,
        kind="forward without saving",
    )
    return _LoweredLayer(tuple(tensors), tuple(saving), without_saving, tuple(backward))


def _kept_tensors(layer: Layer, mode: Mode, source: str, number: int) -> list[Tensor]:
    """Return what a mode keeps for its backward: its saved bytes, and that instance of its input and output."""
    kept = [Tensor(f"{layer.name}.saved{_suffix(number)}", mode.saved_bytes)]
    if layer.keeps_input:
        kept.append(Tensor(f"{layer.name}.kept_input{_suffix(number)}", 0, source))
    if layer.keeps_output:
        kept.append(Tensor(f"{layer.name}.kept_output{_suffix(number)}", 0, _output_of(layer)))
    return kept


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


def _suffix(number: int) -> str:
    return f"[{number}]" if number else ""


def _output_of(layer: Layer) -> str:
    return f"{layer.name}.output"


def _gradient_of(layer: Layer) -> str:
    return f"{layer.name}.gradient"


def _parameter_gradient_of(layer: Layer) -> str:
    return f"{layer.name}.parameter_gradient"


def _plain(value: Layer | Mode) -> dict[str, object]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _build_layer(data: object) -> Layer:
    entries = dict(mapping(data, "a layer"))
    modes = [build(Mode, entry, "a mode") for entry in sequence(entries.pop("modes", []), '"modes" of a layer')]
    return build(Layer, {**entries, "modes": modes}, "a layer")
