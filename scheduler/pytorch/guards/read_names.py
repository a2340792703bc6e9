"""Find which names the Python code of a step may read.

Nothing is run. Names are collected from bytecode, beginning with the methods of the modules
and with the loss, and continuing with the functions, classes and objects that those names lead
to. A value counts as read if code that may run mentions its name, which is a superset of what
the step really reads. A name that code only assigns does not count.
"""

from __future__ import annotations

import dis
import functools
import operator
import sys
from collections import deque
from collections.abc import Collection, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType

from torch import Tensor, nn

from scheduler.pytorch.guards.computed_names import READ_BY_NAME, computed_names
from scheduler.pytorch.torch_private.modules import COMPILED_CALL, HOOKS, submodules_of

_LIBRARIES = frozenset({"numba", "numpy", "scheduler", "scipy", "torch", "torchgen"}) | sys.stdlib_module_names
"""Packages whose functions are not followed: their own globals are not part of a step."""

_ALWAYS_READ = frozenset({"__call__", "__getitem__", "__iter__", "__len__", COMPILED_CALL, "forward", "training"})

_CONSTRUCTION = frozenset({"__init__", "__new__", "__post_init__"})
_WITHOUT_A_STEP = _CONSTRUCTION | {
    "__class_getitem__",
    "__copy__",
    "__deepcopy__",
    "__del__",
    "__getstate__",
    "__init_subclass__",
    "__reduce__",
    "__reduce_ex__",
    "__repr__",
    "__setstate__",
    "__str__",
}
"""Special methods that no operator of a step calls; those of construction count where code mentions the class."""

_READ_EVERYTHING = frozenset({"__dict__", "asdict", "astuple", "eval", "exec", "fields", "globals", "vars"})
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
MOST_ENTRIES = 100_000
"""Containers with more entries are not searched for code or tensors."""

_WRAPPERS: dict[type, tuple[str, ...]] = {
    functools.partial: ("func", "args", "keywords"),
    functools.partialmethod: ("func", "args", "keywords"),
    functools.cached_property: ("func",),
    MethodType: ("__func__", "__self__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset"),
}
"""Callables that hold other ones, and the attributes in which they do."""
_WRAPPED = tuple(_WRAPPERS)
_WITHOUT_CODE = (Tensor, str, bytes, int, float, complex, type(None))
_CONTAINERS = (list, tuple, set, frozenset, deque, Mapping)


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
        self._scopes: dict[int, Mapping[str, object]] = {}
        """Members of classes, objects and Python modules, followed once a name leads to them."""
        self._objects: set[int] = set()
        """Which of the scopes are attributes of objects of the user's classes."""
        self._seen: dict[int, object] = {}
        self._waiting: list[FunctionType] = []
        self._pieces: set[str] = set()
        """Parts of attribute names that code puts together."""
        self._reads_everything = False
        for part in module.modules():
            self._add(part)
            for name in HOOKS:
                for hook in vars(part)[name].values():
                    self._add(hook)
        self._add(loss)
        self._follow()

    def _add(self, value: object) -> None:
        """Follow what a value leads to: code, and the objects that it holds under names that are read."""
        if id(value) in self._seen or isinstance(value, _WITHOUT_CODE):
            return
        self._seen[id(value)] = value
        if isinstance(value, FunctionType):
            self._waiting.append(value)
        elif isinstance(value, _WRAPPED):
            for name in next(names for kind, names in _WRAPPERS.items() if isinstance(value, kind)):
                self._add(getattr(value, name))
        elif isinstance(value, type):
            self._add_class(value)
            self._add_construction(value)
        elif isinstance(value, ModuleType):
            if not is_library(value.__name__):
                self._add_scope(vars(value))
        elif isinstance(value, _CONTAINERS) and is_library(type(value).__module__):
            for entry in _entries(value):
                self._add(entry)
        elif isinstance(value, operator.attrgetter | operator.methodcaller):
            self.names.update(str(name) for path in value.__reduce__()[1] for name in str(path).split("."))
        else:
            self._add_object(value)

    def _add_object(self, value: object) -> None:
        own = vars_of(value)
        self._add(own.get("__wrapped__"))  # of a cached function
        self._add_class(type(value))
        self._add_scope(own)
        if not is_installed(type(value)):
            self._objects.add(id(own))
        if isinstance(value, nn.Module):
            for part in submodules_of(value).values():
                self._add(part)
        for base in type(value).__mro__:
            for name in slots_of(base):
                self._add(getattr(value, name, None))

    def _add_scope(self, scope: Mapping[str, object]) -> None:
        if id(scope) not in self._scopes:
            self._scopes[id(scope)] = scope

    def _add_class(self, cls: type) -> None:
        for base in cls.__mro__:
            is_module = issubclass(base, nn.Module) and base is not nn.Module
            if id(base) not in self._scopes and (is_module or not is_library(base.__module__)):
                self.classes.append(base)
                self._scopes[id(base)] = vars(base)
                self.names.update(name for name, member in vars(base).items() if _is_operator(name, member))

    def _add_construction(self, cls: type) -> None:
        if not is_library(cls.__module__) and not issubclass(cls, nn.Module):
            for name in _CONSTRUCTION & vars(cls).keys():
                self._add(vars(cls)[name])

    def _follow(self) -> None:
        """Collect names until they lead to nothing new."""
        known: tuple[int, ...] = ()
        while known != (len(self.names), len(self._scopes), len(self._codes)):
            known = (len(self.names), len(self._scopes), len(self._codes))
            if self._pieces:
                unread = set().union(*self._scopes.values()) - self.names
                self.names.update(name for name in unread if any(piece in name for piece in self._pieces))
            for scope in [*self._scopes.values()]:
                if self._reads_everything and id(scope) in self._objects:
                    self.names.update(name for name in scope if name not in _OF_EVERY_MODULE)
                for name in self.names.intersection(scope):
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
        self._add_computed_names(function, names)
        for name in names.intersection(function.__globals__):
            value = function.__globals__[name]
            if not is_library(getattr(value, "__module__", None) or ""):
                self._add(value)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._add(value)
        for cell in function.__closure__ or ():
            try:
                self._add(cell.cell_contents)
            except ValueError:  # an empty cell
                continue

    def _add_computed_names(self, function: FunctionType, names: set[str]) -> None:
        if names & READ_BY_NAME:
            computed = computed_names(function.__code__)
            self.names |= computed.whole
            self._pieces |= computed.pieces
            self._reads_everything |= computed.is_open and not is_installed(function)
        if names & _READ_EVERYTHING and not is_installed(function):
            self._reads_everything = True


def _entries(value: Collection[object]) -> Collection[object]:
    """Return the entries of a container of a library, the values of a mapping; none if there are too many."""
    try:
        if len(value) > MOST_ENTRIES:
            return ()
        if isinstance(value, dict):
            return dict.values(value)
        return [*value.values()] if isinstance(value, Mapping) else value
    except Exception:  # a mapping may be a view of a user's one, which may fail in any way
        return ()


def _is_operator(name: str, member: object) -> bool:
    """Return whether a member of a class runs without being mentioned; dataclasses generate code to compare objects."""
    if not (name.startswith("__") and name.endswith("__") and isinstance(member, FunctionType)):
        return False
    return name not in _WITHOUT_A_STEP and member.__code__.co_filename != "<string>"


def is_library(name: str) -> bool:
    """Return whether a Python module belongs to a library whose functions are not followed."""
    return name.partition(".")[0] in _LIBRARIES


def is_installed(value: FunctionType | type) -> bool:
    """Return whether a function or class belongs to an installed package, whose globals are not the user's."""
    if isinstance(value, FunctionType):
        return "site-packages" in value.__code__.co_filename
    return "site-packages" in (getattr(sys.modules.get(value.__module__), "__file__", None) or "")


def name_of(function: FunctionType, loss: object) -> str:
    """Return how a message calls a function: "loss" for the loss itself, else its name."""
    return "loss" if function is loss else function.__qualname__.rpartition("<locals>.")[2]


def vars_of(value: object) -> dict[str, object]:
    """Return the attributes that an object itself holds, without those in slots."""
    own = getattr(value, "__dict__", None)
    return own if isinstance(own, dict) else {}


def slots_of(cls: type) -> tuple[str, ...]:
    """Return the names of the attributes that a class keeps in slots."""
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


@functools.lru_cache(maxsize=10_000)
def mentioned(code: CodeType) -> tuple[str, ...]:
    """Return the attributes and globals that a piece of code reads, also in functions that it defines."""
    names = dict.fromkeys(code.co_names)
    if not _STORES.isdisjoint(code.co_code[::2]):  # few functions store names, and to disassemble takes long
        read = {i.argval for i in dis.get_instructions(code) if i.opcode in dis.hasname and i.opcode not in _STORES}
        names = {name: None for name in names if name in read}
    inner = (mentioned(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return (*names, *(name for some in inner for name in some))


_STORES = {code for code in dis.hasname if dis.opname[code].startswith(("STORE_", "DELETE_"))}
"""Opcodes that change what a name stands for."""


def read_globals(function: FunctionType) -> set[str]:
    """Return the globals that a function reads; a name that it only uses for attributes does not count."""
    found = {*mentioned(function.__code__)}.intersection(function.__globals__)
    doubtful = {name for name in found if not isinstance(function.__globals__[name], _UNAMBIGUOUS)}
    return (found - doubtful) | (doubtful & _loaded_globals(function.__code__)) if doubtful else found


_UNAMBIGUOUS = (FunctionType, type, ModuleType)


@functools.lru_cache(maxsize=10_000)
def _loaded_globals(code: CodeType) -> frozenset[str]:
    own = (str(i.argval) for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    inner = (_loaded_globals(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(own).union(*inner)
