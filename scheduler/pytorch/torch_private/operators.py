"""Operators: their schemas, and the kernels that torch runs for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._C import DispatchKey, FunctionSchema
from torch._library.simple_registry import singleton as registry
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = [
    "DispatchKey",
    "Kernels",
    "OpOverload",
    "call_of",
    "forget_fake_results",
    "has_bfloat16_kernels",
    "replaced_kernels",
    "run_composite",
    "schema_of",
    "without_effect_tokens",
]


def schema_of(operator: OpOverload) -> FunctionSchema:
    """Return the schema of an operator: its qualified `name`, its `arguments`, whether it `is_mutable`."""
    return operator._schema


def call_of(operator: OpOverload) -> Callable[..., Any]:
    """Return the function in C++ that calls an operator; it takes less time than the operator's own call."""
    return operator._op


Kernels = Mapping[DispatchKey, Callable[..., object] | None]
"""Kernels in Python by dispatch key."""


@contextlib.contextmanager
def replaced_kernels(kernels: Mapping[OpOverload, Kernels]) -> Iterator[None]:
    """Replace what torch registered in Python for operators, or remove it where the replacement is None.

    While AOTAutograd traces, a kernel registered in Python (`OpOverload.py_impl`) is preferred to
    the one in C++ that eager PyTorch runs.
    """
    before = {operator: dict(operator.py_kernels) for operator in kernels}
    try:
        for operator, replacements in kernels.items():
            for key, kernel in replacements.items():
                operator.py_kernels.pop(key, None)
                if kernel is not None:
                    operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator, registered in before.items():
            operator.py_kernels.clear()
            operator.py_kernels.update(registered)
            operator._dispatch_cache.clear()


@contextlib.contextmanager
def without_effect_tokens(operators: Iterable[OpOverload]) -> Iterator[None]:
    """Trace operators with side effects as plain calls; torch would order them by tokens that it passes through.

    None of them is removed as unused.
    """
    entries = [registry.find(operator._schema.name) for operator in operators]
    before = [entry.effect._effect for entry in entries]
    try:
        for operator, entry in zip(operators, entries, strict=True):
            torch.fx.node.has_side_effect(operator)
            entry.effect.register(None)
        yield
    finally:
        for entry, effect in zip(entries, before, strict=True):
            entry.effect.register(effect)


def run_composite(operator: OpOverload, *args: Any) -> Any:
    """Run the C++ kernel of a composite operator, which calls the operators that it consists of."""
    return operator._op_dk(DispatchKey.CompositeImplicitAutograd, *args)


def forget_fake_results() -> None:
    """Forget the fake results of earlier calls, which depend on the kernels of that time."""
    FakeTensorMode.cache_clear()


def has_bfloat16_kernels() -> bool:
    """Return whether oneDNN's recurrent kernels run in bfloat16 on this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
