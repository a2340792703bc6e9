"""Qualified names of modules, which are the same whether a model is planned itself or through its forward."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from scheduler.errors import ExecutionError


class Body(nn.Module):
    """A module without its hooks: calls the forward that the module had on construction of this one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.call = module.forward

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.call(*args, **kwargs)


def root_of(model: nn.Module) -> nn.Module:
    """Return the module in which names are looked up: the model, or the module that a body calls."""
    return model.module if isinstance(model, Body) else model


def called_forward(module: nn.Module, forward: Callable[..., object]) -> Callable[..., object]:
    """Return what a forward of a module calls: that of the module itself if it is a body."""
    return module.call if isinstance(module, Body) else forward


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model, with the name "", and all modules in it; the module whose forward a body calls is left out."""
    inner = {name: module for name, module in root_of(model).named_modules() if name}
    return {"": model, **inner}


def find_module(model: nn.Module, name: str) -> nn.Module:
    """Return the module of a qualified name, "" for the model itself.

    Raises
    ------
    ExecutionError
        If there is none.
    """
    try:
        return root_of(model).get_submodule(name) if name else model
    except AttributeError:
        raise ExecutionError(
            f'the plan recomputes calls of the module "{name}", but {type(root_of(model)).__name__} has no module of'
            " this name: pass the model that the plan was made for, or make a new plan"
        ) from None
