"""Find the tensors that code reads from Python: in closures, containers, and attributes of objects."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import FunctionType

from torch import Tensor, nn

from scheduler.pytorch.guards.read_names import ReadNames, is_installed, name_of
from scheduler.pytorch.guards.values import Part, attributes_of, is_followed, parts_of, parts_of_function


@dataclass(frozen=True)
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

    def put(self, tensor: Tensor) -> None:
        """Put another tensor in its place."""
        _put(self.root, self.parts, tensor)


def _put(value: object, parts: tuple[Part, ...], tensor: Tensor) -> object:
    """Replace a tensor inside a value; return the value, or a copy where it cannot be changed."""
    if not parts:
        return tensor
    part, *rest = parts
    inner = part.get(value)
    changed = _put(inner, tuple(rest), tensor)
    return value if changed is inner else part.put(value, changed)


def find_tensors(module: nn.Module, loss: object, read: ReadNames) -> Iterator[TensorPlace]:
    """Yield the places where a module and its loss find tensors that are not registered.

    Parameters
    ----------
    module : nn.Module
        Its registered parameters and buffers are left out.
    loss : callable or None
    read : ReadNames
        Of both.
    """
    registered = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    seen = {id(part) for part in module.modules()}
    roots: list[tuple[str, object, Iterator[Part]]] = [
        (name, part, attributes_of(part, read.names)) for name, part in module.named_modules()
    ]
    roots += [
        (f"{name_of(function, loss)}: ", function, parts_of_function(function))
        for function in read.functions
        if not is_installed(function)
    ]
    if loss is not None and not isinstance(loss, FunctionType | nn.Module):
        roots.append(("loss", loss, parts_of(loss, read.names)))
    for path, root, parts in roots:
        for part in parts:
            for place in _inside(part.get(root), TensorPlace(path + part.text, root, (part,)), read.names, seen):
                if id(place.get()) not in registered:
                    yield place


def _inside(value: object, place: TensorPlace, names: AbstractSet[str], seen: set[int]) -> Iterator[TensorPlace]:
    if isinstance(value, Tensor):
        yield place
        return
    if not is_followed(value) or id(value) in seen:
        return
    if not isinstance(value, tuple):  # two places that hold one tuple are changed one by one
        seen.add(id(value))
    for part in parts_of(value, names):
        inner = TensorPlace(place.name + part.text, place.root, (*place.parts, part))
        yield from _inside(part.get(value), inner, names, seen)
