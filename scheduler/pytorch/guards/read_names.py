"""Find which names the Python code of a step may read.

Nothing is run. Names are collected from bytecode, beginning with the methods of the modules
and with the loss, and continuing with the functions and methods that those names lead to. A
value counts as read if code that may run mentions its name, which is a superset of what the
step really reads.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType

from torch import nn

_LIBRARIES = frozenset({"numba", "numpy", "scheduler", "scipy", "torch", "torchgen"}) | sys.stdlib_module_names
"""Packages whose functions are not followed: their own globals are not part of a step."""

_ALWAYS_READ = frozenset({"__call__", "__getitem__", "__iter__", "__len__", "forward", "training"})

HOOKS = tuple(
    name
    for name in vars(nn.Module())
    if name.endswith(("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks"))
)
"""Attributes in which a module holds the hooks that run in a step."""

_CALLABLE = (FunctionType, MethodType, functools.partial, functools.partialmethod, staticmethod, classmethod, property)
_FOLLOWED = (*_CALLABLE, type, ModuleType)


class ReadNames:
    """The names that the code of a module and its loss mentions, and the code that mentions them.

    Parameters
    ----------
    module : nn.Module
    loss : callable or None

    Attributes
    ----------
    names : set of str
        Attributes, globals and closure variables.
    functions : list of function
        Functions outside libraries that may run: they read closures, defaults and globals.
    classes : list of type
        Classes whose methods may run, or whose attributes may be read.
    """

    def __init__(self, module: nn.Module, loss: object) -> None:
        self.names: set[str] = set(_ALWAYS_READ)
        self.functions: list[FunctionType] = []
        self.classes: list[type] = []
        self._codes: set[CodeType] = set()
        self._scopes: dict[int, dict[str, object]] = {}
        """Members of classes and Python modules, followed once a name leads to them."""
        self._waiting: list[FunctionType] = []
        for part in module.modules():
            self._add(part)
            for name in HOOKS:
                for hook in vars(part)[name].values():
                    self._add(hook)
        self._add(loss)
        self._follow()

    def _add(self, value: object) -> None:
        """Follow a callable, the class and the callables of an object, a class, or a Python module."""
        if isinstance(value, functools.partial | functools.partialmethod):
            self._add(value.func)
        elif isinstance(value, MethodType):
            self._add(value.__func__)
            self._add_class(type(value.__self__))
        elif isinstance(value, staticmethod | classmethod):
            self._add(value.__func__)
        elif isinstance(value, property):
            self._add(value.fget)
            self._add(value.fset)
        elif isinstance(value, FunctionType):
            self._waiting.append(value)
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, ModuleType):
            if not is_library(value.__name__):
                self._scopes.setdefault(id(value), vars(value))
        elif value is not None:
            self._add_class(type(value))
            for own in getattr(value, "__dict__", {}).values():
                if isinstance(own, _CALLABLE):
                    self._add(own)

    def _add_class(self, cls: type) -> None:
        for base in cls.__mro__:
            is_module = issubclass(base, nn.Module) and base is not nn.Module
            if id(base) not in self._scopes and (is_module or not is_library(base.__module__)):
                self.classes.append(base)
                self._scopes[id(base)] = vars(base)  # type: ignore[assignment]

    def _follow(self) -> None:
        """Collect names until they lead to nothing new."""
        known = (-1, -1)
        while known != (len(self.names), len(self._scopes)):
            known = (len(self.names), len(self._scopes))
            for scope in [*self._scopes.values()]:
                for name in self.names.intersection(scope):
                    if isinstance(scope[name], _FOLLOWED):
                        self._add(scope[name])
            while self._waiting:
                self._add_function(self._waiting.pop())

    def _add_function(self, function: FunctionType) -> None:
        if function.__code__ in self._codes:
            return
        self._codes.add(function.__code__)
        names = set(mentioned(function.__code__))
        self.names |= names
        if is_library(function.__module__ or ""):
            return
        self.functions.append(function)
        for name in names.intersection(function.__globals__):
            value = function.__globals__[name]
            if isinstance(value, _FOLLOWED) and not is_library(getattr(value, "__module__", None) or ""):
                self._add(value)
        for cell in function.__closure__ or ():
            try:
                self._add(cell.cell_contents)
            except ValueError:  # an empty cell
                continue


def is_library(name: str) -> bool:
    """Return whether a Python module belongs to a library whose functions are not followed."""
    return name.partition(".")[0] in _LIBRARIES


def is_installed(function: FunctionType) -> bool:
    """Return whether a function belongs to an installed package, whose globals are not the user's."""
    return "site-packages" in function.__code__.co_filename


def name_of(function: FunctionType, loss: object) -> str:
    """Return how a message calls a function: "loss" for the loss itself, else its name."""
    return "loss" if function is loss else function.__qualname__.rpartition("<locals>.")[2]


def mentioned(code: CodeType) -> Iterator[str]:
    """Yield the attributes and globals that a piece of code mentions, also in functions that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from mentioned(constant)
