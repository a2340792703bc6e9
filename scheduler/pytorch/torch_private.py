"""The private names of torch that the package uses, each with what is expected of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch._C._dynamo.guards
from torch._C import DispatchKey
from torch._C._functorch import peek_interpreter_stack
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

_dict_version: Callable[[Any], int] | None = getattr(torch._C._dynamo.guards, "dict_version", None)


def dict_versions(dicts: Iterable[Mapping[Any, Any]]) -> object:
    """Return a value that is equal to an earlier one if none of these dicts has changed in between.

    TorchDynamo's guards use the version that Python keeps of each dict. Without it, no value
    is equal to another one, and the dicts have to be compared entry by entry.
    """
    return object() if _dict_version is None else tuple(map(_dict_version, dicts))


def is_transformed() -> bool:
    """Return whether a transform such as `torch.func.grad` or `vmap`, or forward-mode AD, is active."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def autograd_node_name() -> str:
    """Return the name of the autograd node whose backward is running, "" outside a backward."""
    node = torch._C._current_autograd_node()
    return "" if node is None else str(node.name())


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


def run_composite(operator: OpOverload, *args: Any) -> Any:
    """Run the C++ kernel of a composite operator, which calls the operators that it consists of."""
    return operator._op_dk(DispatchKey.CompositeImplicitAutograd, *args)


def forget_fake_results() -> None:
    """Forget the fake results of earlier calls, which depend on the kernels of that time."""
    FakeTensorMode.cache_clear()


def has_bfloat16_kernels() -> bool:
    """Return whether oneDNN's recurrent kernels run in bfloat16 on this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no data because a FakeTensorMode created it."""
    return isinstance(tensor, FakeTensor)
