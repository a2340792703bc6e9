"""Values that follow from shapes, from Python and from the arguments of a call, computed while a step is traced.

Fake tensors have no values, so a branch on one cannot be traced. If the value depends on no
parameter, buffer or random number, it can be computed, though. Where it follows from shapes and
Python alone, eager PyTorch takes the same branch at each call. Where it depends on arguments,
such as whether a mask hides anything, a condition is recorded: the traced step is that of all
calls with the same answer.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import SymInt, Tensor, nn

from scheduler.pytorch.torch_private.autograd import (
    TorchDispatchMode,
    autocast_disabled,
    below_autograd,
    modes_disabled,
)
from scheduler.pytorch.torch_private.operators import OpOverload, schema_of
from scheduler.pytorch.torch_private.pytree import tree_leaves, tree_map_only
from scheduler.pytorch.torch_private.symbolic_sizes import SYMBOLIC, size_at
from scheduler.pytorch.torch_private.tensors import has_data

_FACTORIES = {"aten::" + name for name in ("arange", "eye", "full", "linspace", "ones", "scalar_tensor", "zeros")}
"""Operators that make known values from no tensor."""


@dataclass(frozen=True)
class _Input:
    """A tensor among the arguments of the step, by its position among the distinct ones."""

    position: int


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of an operator whose results are known.

    Attributes
    ----------
    args, kwargs
        With the origin of each tensor in its place.
    inputs : frozenset of int
        Positions of the arguments of the step that the results depend on.
    is_symbolic : bool
        Whether they depend on symbolic sizes.
    """

    operator: OpOverload
    args: Sequence[object]
    kwargs: Mapping[str, object]
    inputs: frozenset[int]
    is_symbolic: bool


@dataclass(frozen=True)
class _Result:
    """One result of a call."""

    call: _Call
    position: int


_Origin = _Input | _Result


class _Values:
    """Computes known values from the arguments of a call, and from sizes where they are symbolic."""

    def __init__(self, inputs: Sequence[Tensor], sizes: Mapping[int, int] | None) -> None:
        self._inputs = inputs
        self._sizes = sizes
        self._results: dict[_Call, object] = {}

    def of(self, call: _Call) -> object:
        if call not in self._results:
            args, kwargs = tree_map_only((_Input, _Result, SymInt), self._real, (call.args, call.kwargs))
            self._results[call] = call.operator(*args, **kwargs)
        return self._results[call]

    def _real(self, leaf: _Input | _Result | SymInt) -> object:
        if isinstance(leaf, _Input):
            return self._inputs[leaf.position]
        if isinstance(leaf, _Result):
            return tree_leaves(self.of(leaf.call))[leaf.position]
        return size_at(leaf, self._sizes) if self._sizes is not None else leaf.node.hint


@dataclass(frozen=True, eq=False)
class Condition:
    """An answer that the code of a step got from the values of its arguments.

    Attributes
    ----------
    call : _Call
        What reads the value.
    answer : bool
    names : tuple of str
        The arguments that it depends on.
    sizes : dict of int to int, optional
        What the sizes of the trace are replaced by.
    """

    call: _Call = field(repr=False)
    answer: bool
    names: tuple[str, ...]
    sizes: Mapping[int, int] | None = None

    def at(self, sizes: Mapping[int, int]) -> Condition:
        """Return the condition for calls of other sizes."""
        return replace(self, sizes=sizes)

    def difference(self, inputs: Sequence[Tensor]) -> str:
        """Return how the answer differs for the distinct tensors of a call, "" if it does not."""
        with torch.no_grad(), below_autograd(), autocast_disabled():
            answer = bool(_Values(inputs, self.sizes).of(self.call))
        if answer == self.answer:
            return ""
        what = f"the values of {', '.join(self.names)}" if self.names else "sizes"
        return f"a condition on {what} was {self.answer} when the plan was made, is {answer}"


class _Known(NamedTuple):
    """What is known of a tensor.

    Attributes
    ----------
    tensor : Tensor
        Must live, because it is found by its identity.
    origin : _Input or _Result
    memory : frozenset of int
        Numbers that it shares with all tensors that may share memory with it.
    """

    tensor: Tensor
    origin: _Origin
    memory: frozenset[int]


_ARGUMENTS = 0
"""The number for the memory of all arguments: they may be views of each other."""


class KnownValues(TorchDispatchMode):
    """Answer what reads the values of tensors that were computed from no tensor but known ones.

    A change of a known tensor in place makes it and its views unknown. What is a view of a known
    tensor is known itself. Of values that depend on arguments, only answers to conditions are given.

    Parameters
    ----------
    given : sequence of Tensor
        The distinct tensors in the arguments of the step.
    names : sequence of str
        Of each.

    Attributes
    ----------
    conditions : list of Condition
        What the trace depends on.
    """

    def __init__(self, given: Sequence[Tensor] = (), names: Sequence[str] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = given
        self._names = names
        self._values = _Values([tensor.detach() for tensor in given], None)
        self._known: dict[int, _Known] = {}
        """By identity of a tensor."""
        self._memories = itertools.count(_ARGUMENTS + 1)
        self.conditions: list[Condition] = []

    @contextlib.contextmanager
    def of_arguments(self, step: nn.Module) -> Iterator[None]:
        """Answer questions while a step is traced, whose arguments have the given values."""
        handle = step.register_forward_pre_hook(self._enter)
        try:
            with self:
                yield
        finally:
            handle.remove()
            self._known.clear()

    def _enter(self, step: object, tensors: Sequence[Tensor]) -> None:
        """Begin a run of the step; only the last one is traced."""
        self.conditions = []
        self._known.clear()
        for position, (tensor, given) in enumerate(zip(tensors, self._given, strict=False)):
            if has_data(given) and not given.requires_grad:
                self._known[id(tensor)] = _Known(tensor, _Input(position), frozenset({_ARGUMENTS}))

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        self._forget(_changed(func, args, kwargs))
        has_inputs = any(isinstance(leaf, Tensor) for leaf in leaves)
        call = self._call(func, args, kwargs)
        if call is not None and has_inputs and torch.Tag.data_dependent_output in func.tags:
            with modes_disabled(), torch.no_grad():
                value = self._values.of(call)
            if isinstance(value, bool) or not call.inputs:
                self._note(call, value)
                return value
        result = func(*args, **kwargs)
        if call is not None and _has_value(func, has_inputs=has_inputs):
            memory = self._memory_of(leaves) if _shares_memory(func) else frozenset({next(self._memories)})
            for position, leaf in enumerate(tree_leaves(result)):
                if isinstance(leaf, Tensor):
                    self._known[id(leaf)] = _Known(leaf, _Result(call, position), memory)
        return result

    def _memory_of(self, leaves: Sequence[object]) -> frozenset[int]:
        return frozenset().union(*(self._known[id(leaf)].memory for leaf in leaves if id(leaf) in self._known))

    def _forget(self, changed: Sequence[object]) -> None:
        """Forget what may share memory with tensors that are changed in place."""
        if memory := self._memory_of(changed):
            self._known = {key: known for key, known in self._known.items() if not known.memory & memory}

    def _note(self, call: _Call, value: object) -> None:
        if call.inputs or call.is_symbolic:
            self.conditions.append(Condition(call, bool(value), tuple(self._names[i] for i in sorted(call.inputs))))

    def _call(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Call | None:
        """Return a call with the origins of its tensors; None if one is unknown."""
        leaves = tree_leaves((args, kwargs))
        if any(id(leaf) not in self._known if isinstance(leaf, Tensor) else _is_unknown(leaf) for leaf in leaves):
            return None
        origins = [self._known[id(leaf)].origin for leaf in leaves if isinstance(leaf, Tensor)]
        calls = [origin.call for origin in origins if isinstance(origin, _Result)]
        inputs = {origin.position for origin in origins if isinstance(origin, _Input)}.union(*(c.inputs for c in calls))
        is_symbolic = any(isinstance(leaf, SymInt) for leaf in leaves) or any(c.is_symbolic for c in calls)
        args, kwargs = tree_map_only(Tensor, lambda tensor: self._known[id(tensor)].origin, (args, kwargs))
        return _Call(func, args, kwargs, frozenset(inputs), is_symbolic)


def _changed(operator: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> list[object]:
    """Return the arguments of a call that it changes in place."""
    arguments = schema_of(operator).arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | {**kwargs}
    return tree_leaves([given.get(argument.name) for argument in arguments if argument.is_write])


def _shares_memory(operator: OpOverload) -> bool:
    """Return whether the results of an operator may share memory with its arguments."""
    schema = schema_of(operator)
    return "view" in schema.name or any(value.alias_info is not None for value in schema.returns)


def _is_unknown(leaf: object) -> bool:
    return isinstance(leaf, SYMBOLIC) and not isinstance(leaf, SymInt)


def _has_value(operator: OpOverload, *, has_inputs: bool) -> bool:
    """Return whether the results of an operator follow from its arguments."""
    name = schema_of(operator).name
    if not has_inputs:
        return name in _FACTORIES
    is_drawn = torch.Tag.nondeterministic_seeded in operator.tags
    return name.startswith("aten::") and "empty" not in name and not is_drawn and not schema_of(operator).is_mutable
