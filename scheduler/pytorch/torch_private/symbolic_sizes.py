"""Symbolic sizes: a trace that holds for several sizes of its inputs, and the conditions under which it does.

Expected of a `ShapeEnv`: `backed_var_to_val` has the size that each symbol had while tracing,
`guards` what code found out about sizes, `replacements` the symbols that turned out to be
another expression, and `var_to_range` the sizes for which torch assumed nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import SymInt, Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""The types of values that depend on symbolic sizes."""


def mark_varying(tensor: Tensor, dimensions: Collection[int]) -> None:
    """Let TorchDynamo trace a tensor with symbolic sizes in these dimensions."""
    import torch._dynamo

    for dimension in dimensions:
        torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def fakes_of_varying_sizes(tensors: Sequence[Tensor], dimensions: Mapping[int, Collection[int]]) -> list[Tensor]:
    """Return fake tensors whose sizes are symbolic in some dimensions; equal sizes have the same symbol.

    Parameters
    ----------
    tensors : sequence of Tensor
    dimensions : dict of int to collection of int
        Dimensions by position of the tensor.
    """
    from torch._dynamo.source import ConstantSource

    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = []
    for position, tensor in enumerate(tensors):
        varying = dimensions.get(position, ())
        sizes = [DimDynamic.DUCK if d in varying else DimDynamic.STATIC for d in range(tensor.dim())]
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
        source = ConstantSource(f"input{position}")
        fakes.append(cast("Tensor", mode.from_tensor(tensor, source=source, symbolic_context=context)))
    return fakes


def conditions_of(traced: nn.Module | Tensor) -> Callable[[Mapping[int, int]], bool]:
    """Return a function that says whether a trace holds where each size of it is replaced by another one.

    Parameters
    ----------
    traced : nn.Module or Tensor
        One of the fake tensors of `fakes_of_varying_sizes`, after the trace, or the module that
        TorchDynamo captured with dimensions that `mark_varying` marked.
    """
    owner: Any = traced
    mode: FakeTensorMode = owner.meta["fake_mode"] if isinstance(traced, nn.Module) else owner.fake_mode
    env = mode.shape_env
    assert env is not None

    def hold(sizes: Mapping[int, int]) -> bool:
        values = {symbol: sizes.get(int(size)) for symbol, size in env.backed_var_to_val.items()}
        if None in values.values() or env.deferred_runtime_asserts:
            return False
        ranges = [(values.get(symbol), interval) for symbol, interval in env.var_to_range.items()]
        return (
            all(value is not None and interval.lower <= value <= interval.upper for value, interval in ranges)
            and all(values[symbol] == expression.subs(values) for symbol, expression in env.replacements.items())
            and all(bool(guard.expr.subs(values)) for guard in env.guards)
        )

    return hold


def new_fake_mode() -> AbstractContextManager[object]:
    """Return a mode in which operators compute shapes and no data."""
    return cast("AbstractContextManager[object]", FakeTensorMode())


def size_at(size: int | SymInt, sizes: Mapping[int, int]) -> int:
    """Return a size where each size of the trace is replaced by another one."""
    if isinstance(size, int):
        return size
    env = size.node.shape_env
    return int(size.node.expr.subs({symbol: sizes[int(value)] for symbol, value in env.backed_var_to_val.items()}))
