"""The tape: the forward operations of a network with their shapes, and the backward derived from them.

A tensor has elements of four bytes. A time is the number of FLOPs or, if that is more, 50 FLOPs for
each element read or written (on an A100, 19.5 TFLOP/s in single precision against 1.555 TB/s). A
backward operation takes the time of its forward for each gradient that it computes. Views take
no time and no bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from scheduler.errors import InvalidOptionError
from scheduler.graph import Graph, Operation, Role, Tensor

Shape = tuple[int, ...]

ELEMENT_BYTES = 4
FLOPS_PER_ELEMENT = 50.0

Backward = Literal["one operation", "same", "split", "concatenate"]
"""How the gradients of an operation's inputs follow from that of its output: one operation computes them all;
they are the same tensor; that of a concatenation is split; those of a split are concatenated."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A forward operation, and what its backward needs."""

    operation: Operation
    backward: Backward
    kept: tuple[str, ...]


class Tape:
    """Records forward operations; `graph` returns them with or without their backward.

    Attributes
    ----------
    shapes : dict of str to tuple of int
        Of every tensor recorded.
    scope : str
        The layer of the operations recorded from then on; their names are "SCOPE/KIND".
    """

    def __init__(self) -> None:
        self.shapes: dict[str, Shape] = {}
        self.scope = ""
        self._tensors: dict[str, Tensor] = {}
        self._batch: list[str] = []
        self._parameters: list[str] = []
        self._steps: list[_Step] = []
        self._named: Counter[str] = Counter()

    def batch(self, name: str, shape: Shape) -> str:
        """Return a resident tensor that needs no gradient."""
        self._batch.append(name)
        return self._tensor(name, shape, role="input")

    def run(
        self,
        kind: str,
        inputs: Sequence[str],
        shape: Shape,
        *,
        flops: int = 0,
        parameters: int = 0,
        keeps: Literal["inputs", "output", "nothing"] = "inputs",
    ) -> str:
        """Record an operation whose backward is one operation, and return its output.

        Parameters
        ----------
        kind : str
        inputs : sequence of str
        shape : tuple of int
            Of the output.
        flops : int
        parameters : int
            Elements of its parameter, which gets a gradient; 0 for none.
        keeps : "inputs", "output" or "nothing"
            What its backward reads in addition to the gradient and the parameter.
        """
        name = self._name(kind)
        own = [self._tensor(f"{name}.parameter", (parameters,), role="parameter")] if parameters else []
        self._parameters += own
        read = (*inputs, *own)
        output = self._tensor(name, shape)
        kept = {"inputs": read, "output": (output, *own), "nothing": tuple(own)}[keeps]
        time = max(float(flops), self._moving_time(*read, output))
        self._record(kind, Operation(name, read, [output], time), "one operation", kept)
        return output

    def add(self, *inputs: str) -> str:
        """Record the sum of tensors of one shape; its gradient is that of each of them."""
        output = self._tensor(self._name("add"), self.shapes[inputs[0]])
        self._record("add", Operation(output, inputs, [output], self._moving_time(*inputs, output)), "same")
        return output

    def concatenate(self, inputs: Sequence[str], *, axis: int) -> str:
        """Record a concatenation; the gradients of its inputs are views of its own."""
        shape = list(self.shapes[inputs[0]])
        shape[axis] = sum(self.shapes[tensor][axis] for tensor in inputs)
        output = self._tensor(self._name("concatenate"), tuple(shape))
        self._record("concatenate", Operation(output, inputs, [output], self._moving_time(*inputs, output)), "split")
        return output

    def split(self, tensor: str, pieces: int) -> list[str]:
        """Record views of equal pieces along the last axis; their gradients are concatenated."""
        name = self._name("split")
        *others, last = self.shapes[tensor]
        storage = self._tensors[tensor].storage
        views = [self._tensor(f"{name}[{i}]", (*others, last // pieces), storage) for i in range(pieces)]
        self._record("split", Operation(name, [tensor], views, 0.0), "concatenate")
        return views

    def graph(self, loss: str, name: str, *, backward: bool) -> Graph:
        """Return the recorded operations as a graph.

        Parameters
        ----------
        loss : str
            A result; with a backward, the gradients of all parameters are results as well.
        name : str
        backward : bool
        """
        operations, tensors, results = [step.operation for step in self._steps], {**self._tensors}, [loss]
        tensors[loss] = replace(tensors[loss], role="output")
        if backward:
            reverse = _Reverse(self._steps, tensors, self._parameters)
            operations, tensors = operations + reverse.operations, reverse.tensors
            results += [reverse.gradients[parameter] for parameter in self._parameters]
        resident = (*self._batch, *self._parameters)
        return Graph(operations, tuple(tensors.values()), resident, results, time_unit="FLOP", name=name)

    def _name(self, kind: str) -> str:
        name = f"{self.scope}/{kind}" if self.scope else kind
        self._named[name] += 1
        return name if self._named[name] == 1 else f"{name}{self._named[name]}"

    def _tensor(self, name: str, shape: Shape, storage: str | None = None, *, role: Role = "activation") -> str:
        self.shapes[name] = shape
        self._tensors[name] = Tensor(name, ELEMENT_BYTES * math.prod(shape), storage, role=role)
        return name

    def _moving_time(self, *tensors: str) -> float:
        return _moving_time(self._tensors[name] for name in tensors)

    def _record(self, kind: str, operation: Operation, backward: Backward, kept: tuple[str, ...] = ()) -> None:
        shapes = ", ".join(str(list(self.shapes[name])) for name in operation.inputs)
        signature = f"{kind}({shapes}) -> {list(self.shapes[operation.outputs[0]])}"
        self._steps.append(_Step(replace(operation, signature=signature, layer=self.scope), backward, kept))


class _Reverse:
    """The backward operations of a tape, in the order of autograd; gradients are summed as they are computed."""

    def __init__(self, steps: Sequence[_Step], tensors: Mapping[str, Tensor], parameters: Sequence[str]) -> None:
        self.operations: list[Operation] = []
        self.tensors = dict(tensors)
        self.gradients: dict[str, str] = {}
        self._gradients_of: Counter[str] = Counter()
        self._layers: dict[str, str] = {}
        """Layer that first produces or reads a tensor; its gradient is summed there."""
        for step in steps:
            for name in (*step.operation.inputs, *step.operation.outputs):
                self._layers.setdefault(name, step.operation.layer)
        self._trained = set(parameters)
        for step in steps:
            if self._trained.intersection(step.operation.inputs):
                self._trained.update(step.operation.outputs)
        for step in reversed(steps):
            self._differentiate(step)

    def _differentiate(self, step: _Step) -> None:
        forward = step.operation
        gradients = [self.gradients[name] for name in forward.outputs if name in self.gradients]
        sources = [name for name in forward.inputs if name in self._trained]
        if not sources:
            return
        if step.backward == "same":
            computed = gradients * len(sources)
        elif step.backward == "split":
            storage = self.tensors[gradients[0]].storage
            computed = [self._gradient(name, storage) for name in sources]
            self._run(forward, gradients, computed, 0.0)
        elif step.backward == "concatenate":
            computed = [self._gradient(name) for name in sources]
            self._run(
                forward, gradients, computed, _moving_time(self.tensors[name] for name in (*gradients, *computed))
            )
        else:
            computed = [self._gradient(name) for name in sources]
            self._run(forward, [*gradients, *step.kept], computed, forward.time * len(computed))
        for name, gradient in zip(sources, computed, strict=True):
            self._accumulate(name, gradient)

    def _accumulate(self, name: str, gradient: str) -> None:
        if name in self.gradients:
            terms = [self.gradients[name], gradient]
            gradient = self._gradient(name)
            time = _moving_time(self.tensors[term] for term in (*terms, gradient))
            operation = f"{name}_sum{self._gradients_of[name]}"
            signature = f"sum({self.tensors[gradient].size_bytes} bytes)"
            self.operations.append(
                Operation(
                    operation,
                    terms,
                    [gradient],
                    time,
                    phase="backward",
                    signature=signature,
                    layer=self._layers[name],
                )
            )
        self.gradients[name] = gradient

    def _gradient(self, name: str, storage: str | None = None) -> str:
        self._gradients_of[name] += 1
        gradient = f"d_{name}" if self._gradients_of[name] == 1 else f"d_{name}#{self._gradients_of[name]}"
        self.tensors[gradient] = Tensor(gradient, self.tensors[name].size_bytes, storage, role="gradient")
        return gradient

    def _run(self, forward: Operation, inputs: Sequence[str], outputs: Sequence[str], time: float) -> None:
        name, signature = f"{forward.name}_backward", f"backward of {forward.signature}"
        self.operations.append(
            Operation(name, inputs, outputs, time, phase="backward", signature=signature, layer=forward.layer)
        )


def check_sizes(**sizes: int) -> None:
    """Reject sizes that are not ints of at least 1.

    Raises
    ------
    InvalidOptionError
        For the first such size.
    """
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidOptionError(f"{name} must be an int of at least 1, got {size!r}")


def _moving_time(tensors: Iterable[Tensor]) -> float:
    return FLOPS_PER_ELEMENT * sum(tensor.size_bytes // ELEMENT_BYTES for tensor in tensors)
