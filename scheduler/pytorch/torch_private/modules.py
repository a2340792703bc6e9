"""What modules and optimizers keep in their own attributes, past the methods that torch documents."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as _module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim import Optimizer

PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"
"""The attributes of a module with the dicts that `parameters_of`, `buffers_of` and `submodules_of` return."""

HOOKS = tuple(
    name
    for name in vars(nn.Module())
    if name.endswith(("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks"))
)
"""The attributes of a module with dicts of the hooks that run in a step, by their numbers."""

COMPILED_CALL = "_compiled_call_impl"
"""The attribute of a module with what `module.compile()` made of its call, None before."""


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict that a module itself reads its own parameters from, by name."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dict that a module itself reads its own buffers from, by name."""
    return module._buffers


def submodules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dict that a module itself reads its direct submodules from, by name."""
    return module._modules


def has_hooks(module: nn.Module) -> bool:
    """Return whether hooks run before or after the forward or the backward of a module."""
    return any(vars(module)[name] for name in HOOKS)


def global_hooks() -> dict[str, dict[int, Any]]:
    """Return the dicts of the hooks that run for all modules, by the names under which torch has them."""
    return {f"{_module.__name__}._global{name}": getattr(_module, f"_global{name}") for name in HOOKS}


def backward_hooks_of(tensor: Tensor) -> dict[int, Any]:
    """Return the hooks of a tensor's gradient by number, in the dict that autograd calls them from."""
    return tensor._backward_hooks or {}


def accumulation_hooks_of(tensor: Tensor) -> dict[int, Any]:
    """Return the hooks that run once a leaf's gradient has been accumulated, by number, in autograd's own dict."""
    return tensor._post_accumulate_grad_hooks or {}


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is what `torch.compile` returned for another, or its call has been compiled."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module is a normalization with running statistics: in training it changes its buffers."""
    return isinstance(module, _NormBase)


def with_tensors(module: nn.Module, tensors: dict[str, Tensor]) -> AbstractContextManager[object]:
    """Return a context in which a module has other parameters and buffers, given by their qualified names.

    Unlike `torch.func.functional_call`, it can be left before the tensors that forward put in
    their place are read.
    """
    return _reparametrize_module(module, tensors)


def remove_step_hooks(optimizer: Optimizer) -> None:
    """Give an optimizer empty dicts of the hooks that run before and after its step."""
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()
