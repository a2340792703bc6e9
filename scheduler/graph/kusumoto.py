"""The text format of Kusumoto et al. 2019: functions of a forward and a backward pass, as one joint graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scheduler.errors import GraphFormatError
from scheduler.graph import Graph, Operation, Tensor

_KINDS = ("_", "input", "output", "gradient")
_CONVOLUTION_TIME = 10.0
_OTHER_TIME = 1.0
_BACKWARD_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class _Function:
    """A record of the file: a direction, operands as (value, kind), the values produced, and a type."""

    line: int
    direction: str
    operands: tuple[tuple[str, str], ...]
    produced: tuple[str, ...]
    type: str


def looks_like_computation_graph(text: str) -> bool:
    """Return whether the first line holds two integers and nothing else."""
    words = text.lstrip().partition("\n")[0].split()
    return len(words) == 2 and all(_is_count(word) for word in words)


def parse_computation_graph(text: str, *, name: str = "") -> Graph:
    """Return the joint graph of a file in the text format of Kusumoto et al.

    Each function is one forward operation with the bytes of its value; a convolution takes
    10 units of time, anything else 1. Values that no function produces (parameters, the
    batch) cost nothing. Forward operations are in depth-first topological order. One
    backward operation each follows in reverse, with the bytes of the forward value and twice
    its time. It reads the backward operations of all readers of that value (the value itself
    if nothing reads it) and the `input` and `output` operands of the file's backward record.
    All are required, and nothing is kept at the end.

    Parameters
    ----------
    text : str
        `n m`; n lines `value bytes name`; then m functions: direction, `inputs outputs`,
        one line `value kind` for each input, one value for each output, type, detail.
    name : str
        Of the graph.

    Raises
    ------
    GraphFormatError
        If a line is missing or cannot be understood, a value is unknown or produced twice, or
        a function lacks its backward record.
    InvalidGraphError
        If the graph contradicts itself, for example by a cycle.

    Reference: Kusumoto, Inoue, Watanabe, Akiba and Koyama 2019, "A graph theoretic framework
    of recomputation algorithms for memory-efficient backpropagation", NeurIPS.
    """
    sizes, functions = _Reader(text).read()
    forward = [function for function in functions if function.direction == "forward"]
    if not forward:
        raise GraphFormatError("the file has no forward function")
    number_of: dict[str, int] = {}
    for number, function in enumerate(forward):
        if len(function.produced) != 1:
            raise GraphFormatError(
                f"line {function.line}: a forward function must produce one value, got {len(function.produced)}"
            )
        if number_of.setdefault(function.produced[0], number) != number:
            raise GraphFormatError(
                f"line {function.line}: value {function.produced[0]} is produced by a second function"
            )
    records = _backward_records(functions)
    reads = [list(dict.fromkeys(value for value, _ in function.operands if value in number_of)) for function in forward]
    readers: dict[str, list[int]] = {}
    for number, values in enumerate(reads):
        for value in values:
            readers.setdefault(value, []).append(number)
    value_of = [function.produced[0] for function in forward]
    names = [f"{function.type}_{function.produced[0]}" for function in forward]
    times = [_CONVOLUTION_TIME if function.type.startswith("Conv") else _OTHER_TIME for function in forward]
    order = _depth_first([[number_of[value] for value in values] for values in reads])
    operations = [
        Operation(names[i], [names[number_of[value]] for value in reads[i]], [names[i]], times[i]) for i in order
    ]
    for i in reversed(order):
        value = value_of[i]
        if value not in records:
            raise GraphFormatError(f"line {forward[i].line}: no backward function reads the gradient of value {value}")
        inputs = [f"{names[reader]}_backward" for reader in readers.get(value, ())] or [names[i]]
        inputs += [
            names[number_of[v]] for v, kind in records[value].operands if kind in ("input", "output") and v in number_of
        ]
        name_backward = f"{names[i]}_backward"
        operations.append(
            Operation(name_backward, inputs, [name_backward], _BACKWARD_FACTOR * times[i], phase="backward")
        )
    tensors = [Tensor(names[i], sizes[value_of[i]]) for i in order]
    tensors += [Tensor(f"{names[i]}_backward", sizes[value_of[i]], role="gradient") for i in reversed(order)]
    return Graph(operations, tensors, required=[op.name for op in operations], time_unit="unit", name=name)


def _backward_records(functions: Sequence[_Function]) -> dict[str, _Function]:
    """Return the backward record of each value, by the gradient that it reads."""
    records: dict[str, _Function] = {}
    for function in functions:
        if function.direction == "backward":
            for value, kind in function.operands:
                if kind == "gradient" and records.setdefault(value, function) is not function:
                    raise GraphFormatError(
                        f"line {function.line}: the gradient of value {value} is read by a second backward function"
                    )
    return records


def _depth_first(reads: Sequence[Sequence[int]]) -> list[int]:
    """Return every function after those that it reads, depth first; the graph's own checks reject a cycle."""
    order: list[int] = []
    seen: set[int] = set()
    for root in range(len(reads)):
        if root in seen:
            continue
        seen.add(root)
        stack: list[tuple[int, Iterator[int]]] = [(root, iter(reads[root]))]
        while stack:
            number, pending = stack[-1]
            below = next((i for i in pending if i not in seen), None)
            if below is None:
                stack.pop()
                order.append(number)
            else:
                seen.add(below)
                stack.append((below, iter(reads[below])))
    return order


class _Reader:
    """Reads the lines of a file in order."""

    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        self.position = 0

    def read(self) -> tuple[dict[str, int], list[_Function]]:
        values, count = self._counts("the numbers of values and of functions")
        sizes: dict[str, int] = {}
        for _ in range(values):
            line = self._next("a value")
            words = line.split(maxsplit=2)
            if len(words) < 2 or not _is_count(words[1]):
                raise self._error(f'a value must read "number bytes name", got {_shown(line)}')
            if words[0] in sizes:
                raise self._error(f"value {words[0]} is listed twice")
            sizes[words[0]] = int(words[1])
        functions = [self._function(sizes) for _ in range(count)]
        if any(line.strip() for line in self.lines[self.position :]):
            raise GraphFormatError(f"line {self.position + 1}: text after the last of {count} functions")
        return sizes, functions

    def _function(self, sizes: dict[str, int]) -> _Function:
        direction = self._next("a function").strip()
        line = self.position
        if direction not in ("forward", "backward"):
            raise self._error(f'a function must begin with "forward" or "backward", got {_shown(direction)}')
        inputs, outputs = self._counts("the numbers of inputs and of outputs")
        operands = []
        for _ in range(inputs):
            words = self._next("an input").split()
            if len(words) != 2 or words[0] not in sizes or words[1] not in _KINDS:
                raise self._error(
                    f'an input must read "value kind", with a listed value and one of {", ".join(_KINDS)},'
                    f" got {_shown(' '.join(words))}"
                )
            operands.append((words[0], words[1]))
        produced = []
        for _ in range(outputs):
            value = self._next("an output").strip()
            if value not in sizes:
                raise self._error(f"an output must be a listed value, got {_shown(value)}")
            produced.append(value)
        kind = self._next("a type").strip()
        if not kind or not kind.isprintable():
            raise self._error(f"a type must be printable text, got {_shown(kind)}")
        self._next("a detail")
        return _Function(line, direction, tuple(operands), tuple(produced), kind)

    def _counts(self, what: str) -> tuple[int, int]:
        line = self._next(what)
        words = line.split()
        if len(words) != 2 or not all(_is_count(word) for word in words):
            raise self._error(f"expected {what}, got {_shown(line)}")
        return int(words[0]), int(words[1])

    def _next(self, what: str) -> str:
        if self.position >= len(self.lines):
            raise GraphFormatError(f"the file ends after {len(self.lines)} lines, where {what} should follow")
        self.position += 1
        return self.lines[self.position - 1]

    def _error(self, message: str) -> GraphFormatError:
        return GraphFormatError(f"line {self.position}: {message}")


def _is_count(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) <= 20


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "...")
