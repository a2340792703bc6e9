"""Find the tensors that code reads from Python: in closures, containers, and attributes of objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from types import FunctionType

from torch import Tensor, nn

from scheduler.pytorch.guards.parts import CONTAINERS, Part, attributes_of, is_followed, parts_of, parts_of_function
from scheduler.pytorch.guards.read_names import MOST_ENTRIES, ReadNames, is_installed, is_library, name_of
from scheduler.pytorch.guards.values import is_large_and_flat

MISSING = (LookupError, AttributeError, ValueError)
"""What getting a value from a place raises if there is none any more."""


@dataclass(frozen=True, eq=False)
class TensorPlace:
    """A place where code finds a tensor.

    Attributes
    ----------
    name : str
        For a reader: `loss: batch['target']`.
    root : object
        The function or object that the code begins with.
    parts : tuple of Part
        The way from there to the tensor.
    """

    name: str
    root: object
    parts: tuple[Part, ...]

    def get(self) -> Tensor:
        """Return the tensor that is there now.

        Raises
        ------
        LookupError, AttributeError, ValueError
            If there is nothing any more.
        TypeError
            If there is something else.
        """
        value = self.root
        for part in self.parts:
            value = part.get(value)
        if not isinstance(value, Tensor):
            raise TypeError(f"{self.name} must be a tensor, got {type(value).__name__}")
        return value

    def holds(self, tensor: Tensor) -> bool:
        """Return whether this tensor is there now."""
        try:
            return self.get() is tensor
        except (*MISSING, TypeError):
            return False

    def put(self, tensor: Tensor) -> Callable[[], object]:
        """Put another tensor in its place, and return a function that undoes it.

        Tuples on the way are replaced by copies; undoing puts the original ones back.
        """
        values = [self.root]
        for part in self.parts[:-1]:
            values.append(part.get(values[-1]))
        old: object = self.parts[-1].get(values[-1])
        new: object = tensor
        for part, holder in zip(reversed(self.parts), reversed(values), strict=True):
            changed = part.put(holder, new)
            if changed is holder:
                return _Undo(part, holder, old)
            old, new = holder, changed
        raise TypeError(f"{self.name} cannot be replaced in {type(self.root).__name__}")


@dataclass(frozen=True, eq=False)
class _Undo:
    """Puts the former value back."""

    part: Part
    holder: object
    value: object

    def __call__(self) -> object:
        return self.part.put(self.holder, self.value)


def find_tensors(module: nn.Module, loss: object, read: ReadNames) -> Iterator[TensorPlace]:
    """Yield the places where a module and its loss find tensors, other than by their registered names.

    A place may hold a tensor that is registered elsewhere: a list of parameters in a closure.
    The same tensor may be in several places, and two places may be one entry of a container
    that is reached in two ways.

    Parameters
    ----------
    module : nn.Module
    loss : callable or None
    read : ReadNames
        Of both.
    """
    parts = dict(module.named_modules())
    if isinstance(loss, nn.Module):
        parts.update({f"loss.{name}".rstrip("."): part for name, part in loss.named_modules()})
    roots: list[tuple[str, object, Iterator[Part]]] = [
        (name, part, attributes_of(part, read.names | _own_tensors(part))) for name, part in parts.items()
    ]
    roots += [
        (f"{name_of(function, loss)}: ", function, parts_of_function(function, with_globals=not is_installed(function)))
        for function in read.functions
    ]
    roots += [
        (cls.__qualname__, cls, _class_attributes(cls, read.names))
        for cls in read.classes
        if not is_library(cls.__module__)
    ]
    if loss is not None and not isinstance(loss, FunctionType | nn.Module):
        roots.append(("loss", loss, parts_of(loss, read.names)))
    walk = _Walk(read.names, {id(part) for part in parts.values()})
    for path, root, found in roots:
        for part in found:
            yield from walk.inside(part.get(root), TensorPlace((path + part.text).lstrip("."), root, (part,)), ())


def _own_tensors(part: nn.Module) -> set[str]:
    """Return the attributes that hold a tensor itself: they count as read, whatever way the code names them."""
    return {name for name, value in vars(part).items() if isinstance(value, Tensor)}


def _class_attributes(cls: type, names: AbstractSet[str]) -> Iterator[Part]:
    for name in sorted(vars(cls).keys() & names):
        if not isinstance(vars(cls)[name], FunctionType):
            yield Part(f".{name}", partial(_class_value, name), partial(_set_class_value, name))


def _class_value(name: str, cls: object) -> object:
    return vars(cls)[name]


def _set_class_value(name: str, cls: object, value: object) -> object:
    setattr(cls, name, value)
    return cls


class _Walk:
    """Finds tensors inside values, for code that mentions `names`."""

    def __init__(self, names: AbstractSet[str], passed: set[int]) -> None:
        self._names = names
        self._passed = passed
        """Identities of objects that hold no tensor, or are roots themselves."""

    def inside(self, value: object, place: TensorPlace, within: tuple[int, ...]) -> Iterator[TensorPlace]:
        """Yield the places of the tensors inside a value, which is in the given place."""
        if isinstance(value, Tensor):
            yield place
            return
        if id(value) in self._passed or id(value) in within or not is_followed(value):
            return
        if isinstance(value, CONTAINERS) and (len(value) > MOST_ENTRIES or is_large_and_flat(value)):
            return
        is_empty = True
        for part in parts_of(value, self._names):
            inner = TensorPlace(place.name + part.text, place.root, (*place.parts, part))
            for found in self.inside(part.get(value), inner, (*within, id(value))):
                is_empty = False
                yield found
        if is_empty:
            self._passed.add(id(value))
