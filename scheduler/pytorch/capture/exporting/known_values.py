"""Values that follow from shapes and from Python alone, such as positions, computed while a step is traced.

Fake tensors have no values, so a branch on one cannot be traced. Eager PyTorch takes the same
branch at each call, though, if the value depends on no parameter, buffer, argument or random
number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from scheduler.pytorch.torch_private.autograd import TorchDispatchMode, modes_disabled
from scheduler.pytorch.torch_private.operators import OpOverload, schema_of
from scheduler.pytorch.torch_private.pytree import tree_leaves, tree_map_only
from scheduler.pytorch.torch_private.symbolic_sizes import SYMBOLIC

_FACTORIES = {"aten::" + name for name in ("arange", "eye", "full", "linspace", "ones", "scalar_tensor", "zeros")}
"""Operators that make known values from no tensor."""


@dataclass(eq=False)
class _Call:
    """A call of an operator whose results are known, to be repeated with real tensors once a value is read."""

    operator: OpOverload
    args: Sequence[object]
    kwargs: Mapping[str, object]
    results: list[Tensor] = field(default_factory=list)
    """The real results, once computed."""


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answer what reads the values of tensors that were computed from no tensor but known ones.

    Any change in place makes all values unknown: the tensor that is changed may be a view of a
    known one. Values of symbolic sizes are not known either.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, tuple[Tensor, _Call, int]] = {}
        """By identity of a tensor: the tensor, which must live, the call that it came from, and its position."""

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if schema_of(func).is_mutable:
            self._known.clear()
        is_known = all(id(tensor) in self._known for tensor in tensors) and not any(
            isinstance(leaf, SYMBOLIC) for leaf in leaves
        )
        call = _Call(func, args, kwargs)
        if is_known and tensors and torch.Tag.data_dependent_output in func.tags:
            with modes_disabled():
                return self._run(call)
        result = func(*args, **kwargs)
        if is_known and _has_value(func, has_inputs=bool(tensors)):
            for position, leaf in enumerate(tree_leaves(result)):
                if isinstance(leaf, Tensor):
                    self._known[id(leaf)] = leaf, call, position
        return result

    def _run(self, call: _Call) -> object:
        args, kwargs = tree_map_only(Tensor, self._value, (call.args, call.kwargs))
        return call.operator(*args, **kwargs)

    def _value(self, tensor: Tensor) -> Tensor:
        _, call, position = self._known[id(tensor)]
        if not call.results:
            call.results = tree_leaves(self._run(call))
        return call.results[position]


def _has_value(operator: OpOverload, *, has_inputs: bool) -> bool:
    """Return whether the results of an operator follow from its arguments."""
    name = schema_of(operator).name
    if not has_inputs:
        return name in _FACTORIES
    is_drawn = torch.Tag.nondeterministic_seeded in operator.tags
    return name.startswith("aten::") and "empty" not in name and not is_drawn and not schema_of(operator).is_mutable
