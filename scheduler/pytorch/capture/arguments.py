"""The arguments of a call, divided into their structure and their distinct tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import cast

import numpy as np
from torch import Tensor, nn

from scheduler.pytorch.guards.parts import HOLDERS
from scheduler.pytorch.guards.read_names import is_library, slots_of
from scheduler.pytorch.torch_private import pytree


@dataclass(frozen=True)
class Signature:
    """The arguments of a call without their tensors.

    Attributes
    ----------
    spec : TreeSpec
        Structure of `(args, kwargs)`.
    leaves : tuple
        The leaves, with a `Position` in place of each tensor.
    """

    spec: pytree.TreeSpec
    leaves: tuple[object, ...]


@dataclass(frozen=True)
class Position:
    """Placeholder for a tensor among the leaves of a signature.

    Attributes
    ----------
    number : int
        Position of the tensor among the distinct tensors of the arguments.
    """

    number: int


@dataclass(frozen=True)
class _Array:
    """Replaces a NumPy array among the leaves of a signature: equal arrays have equal replacements."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    data: bytes

    def to_array(self) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape).copy()


def read_arguments(args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[Signature, list[Tensor]]:
    """Return the signature of a call and its distinct tensors."""
    leaves, spec = flatten((tuple(args), dict(kwargs)))
    tensors: list[Tensor] = []
    numbers: dict[int, int] = {}
    template: list[object] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if id(leaf) not in numbers:
                numbers[id(leaf)] = len(tensors)
                tensors.append(leaf)
            template.append(Position(numbers[id(leaf)]))
        elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            template.append(_Array(leaf.dtype, leaf.shape, leaf.tobytes()))
        else:
            template.append(leaf)
    return Signature(spec, tuple(template)), tensors


def fill_arguments(signature: Signature, tensors: Sequence[Tensor]) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the positional and keyword arguments of a call with these distinct tensors."""
    leaves: list[object] = []
    for leaf in signature.leaves:
        if isinstance(leaf, Position):
            leaves.append(tensors[leaf.number])
        else:
            leaves.append(leaf.to_array() if isinstance(leaf, _Array) else leaf)
    args, kwargs = pytree.tree_unflatten(leaves, signature.spec)
    return args, kwargs


def tensor_paths(signature: Signature) -> list[str]:
    """Return a readable path for each distinct tensor, such as `args[0].image` or `kwargs['mask']`."""
    found: dict[int, str] = {}
    for path, leaf in zip(leaf_paths(signature), signature.leaves, strict=True):
        if isinstance(leaf, Position):
            found.setdefault(leaf.number, path)
    return [found[number] for number in range(len(found))]


def leaf_paths(signature: Signature) -> list[str]:
    """Return a readable path for each leaf."""
    numbers = [Position(number) for number in range(len(signature.leaves))]
    template = pytree.tree_unflatten(numbers, signature.spec)
    found: dict[int, str] = {}
    for path, leaf in flatten_with_paths(template)[0]:
        root = "args" if path[0] == pytree.SequenceKey(0) else "kwargs"
        assert isinstance(leaf, Position)
        found[leaf.number] = root + "".join(str(key) for key in path[1:])
    return [found[number] for number in range(len(numbers))]


def flatten(tree: object) -> tuple[list[object], pytree.TreeSpec]:
    """Return the leaves of a tree and its structure, which builds an equal tree from leaves (`tree_unflatten`).

    Objects that hold tensors, such as dataclasses, are divided into their fields: these are
    leaves or trees themselves.
    """
    leaves, spec = pytree.tree_flatten(tree)
    opened = [_open(leaf, ()) for leaf in leaves]
    if all(map(is_, opened, leaves)):
        return leaves, spec
    return pytree.tree_flatten(pytree.tree_unflatten(opened, spec))


def flatten_with_paths(tree: object) -> tuple[list[tuple[tuple[pytree.KeyEntry, ...], object]], pytree.TreeSpec]:
    """Return the leaves of a tree, each after its path, and its structure, as `flatten` does."""
    return pytree.tree_flatten_with_path(_opened(tree))


def holds_objects(tree: object) -> bool:
    """Return whether a tree contains objects that `flatten` divides into their fields."""
    return _opened(tree) is not tree


class _Opened:
    """An object divided into its fields; unflattening it builds an object of its class.

    Parameters
    ----------
    value : object
    fields : dict
        By `GetAttrKey` of an attribute or `MappingKey` of an entry.
    """

    def __init__(self, value: object, fields: Mapping[_Key, object]) -> None:
        self.cls = type(value)
        self.fields = fields


_Key = pytree.GetAttrKey | pytree.MappingKey[object, object]
_Kind = tuple[type, tuple[_Key, ...]]


def _flatten_opened(opened: _Opened) -> tuple[list[object], _Kind]:
    return [*opened.fields.values()], (opened.cls, tuple(opened.fields))


def _flatten_opened_with_keys(opened: _Opened) -> tuple[list[tuple[pytree.KeyEntry, object]], _Kind]:
    return [(key, value) for key, value in opened.fields.items()], (opened.cls, tuple(opened.fields))


def _build(values: Iterable[object], kind: _Kind) -> object:
    cls, keys = kind
    result = cast("Callable[[type], object]", cls.__new__)(cls)
    for key, value in zip(keys, values, strict=True):
        if isinstance(key, pytree.MappingKey):
            dict.__setitem__(cast("dict[object, object]", result), key.key, value)
        else:
            object.__setattr__(result, key.name, value)  # also where a frozen dataclass refuses setattr
    return result


pytree.register_pytree_node(
    _Opened,
    _flatten_opened,
    _build,
    flatten_with_keys_fn=_flatten_opened_with_keys,
)

_NOT_OF_THE_STEP = frozenset({"_encodings"})
"""Fields that are new for each batch and that no model reads: how the tokenizer of transformers divided the text."""


def _opened(tree: object, within: tuple[int, ...] = ()) -> object:
    """Return a tree with every object that holds tensors divided into its fields."""
    leaves, spec = pytree.tree_flatten(tree)
    opened = [_open(leaf, within) for leaf in leaves]
    return tree if all(map(is_, opened, leaves)) else pytree.tree_unflatten(opened, spec)


def _open(leaf: object, within: tuple[int, ...]) -> object:
    if leaf is None or isinstance(leaf, (Tensor, Position, bool, int, float, str, type, nn.Module)):
        return leaf
    cls = type(leaf)
    if id(leaf) in within or (is_library(cls.__module__) and cls not in HOLDERS):
        return leaf
    fields: dict[_Key, object] = {}
    if isinstance(leaf, dict):
        fields.update((pytree.MappingKey(key), value) for key, value in leaf.items())
    own = getattr(leaf, "__dict__", {})
    fields.update((pytree.GetAttrKey(name), value) for name, value in own.items() if name not in _NOT_OF_THE_STEP)
    for name in (name for base in cls.__mro__ for name in slots_of(base)):
        if name not in ("__dict__", "__weakref__") and hasattr(leaf, name):
            fields[pytree.GetAttrKey(name)] = getattr(leaf, name)
    values = {key: _opened(value, (*within, id(leaf))) for key, value in fields.items()}
    if not any(isinstance(inner, Tensor | Position) for inner in pytree.tree_leaves(list(values.values()))):
        return leaf
    return _Opened(leaf, values)
