"""The arguments of a call as they were before it, with their tensors apart.

A recomputation gets copies of lists, dicts and other objects that can be changed, such as a
cache to which layers append: the originals have been changed since.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

from torch import Tensor, nn

from scheduler.pytorch.guards.parts import HOLDERS
from scheduler.pytorch.guards.read_names import is_library, slots_of, vars_of

Arguments = tuple[tuple[object, ...], dict[str, object]]
"""The positional and the keyword arguments of a call."""


class FrozenArguments:
    """The arguments of a call as they are now, without their tensors.

    Attributes
    ----------
    has_iterators : bool
        Whether there are iterators among the arguments, which only one run can use.
    """

    def __init__(self, tree: object, *, has_iterators: bool) -> None:
        self._tree = tree
        self.has_iterators = has_iterators

    def fill(self, tensors: Sequence[Tensor]) -> Arguments:
        """Return the arguments anew, with these tensors."""

        def thaw(leaf: object) -> object:
            return tensors[leaf.number] if isinstance(leaf, _Slot) else leaf

        return cast("Arguments", _rebuilt(self._tree, thaw, {}))


def freeze(args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[FrozenArguments, list[Tensor]]:
    """Return the arguments of a call, and apart from them their distinct tensors, also those inside objects."""
    slots: dict[int, _Slot] = {}
    tensors: list[Tensor] = []
    has_iterators = False

    def replace(leaf: object) -> object:
        nonlocal has_iterators
        if not isinstance(leaf, Tensor):
            has_iterators |= isinstance(leaf, Iterator)
            return leaf
        if id(leaf) not in slots:
            slots[id(leaf)] = _Slot(len(tensors))
            tensors.append(leaf)
        return slots[id(leaf)]

    tree = _rebuilt((tuple(args), dict(kwargs)), replace, {})
    return FrozenArguments(tree, has_iterators=has_iterators), tensors


class _Slot:
    """The place of a tensor."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


_UNCHANGING = (str, bytes, bool, int, float, complex, type(None), type, nn.Module)


def _rebuilt(value: object, replace: Callable[[object], object], memo: dict[int, object]) -> object:
    """Return a copy of a nested value, in which `replace` has replaced what has no parts."""
    if isinstance(value, _UNCHANGING):
        return value
    if isinstance(value, Tensor | _Slot):
        return replace(value)
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, tuple):
        return _rebuilt_tuple(value, replace, memo)
    made = _new_of(type(value))
    if made is None:
        return replace(value)
    memo[id(value)] = made
    _fill(made, value, lambda part: _rebuilt(part, replace, memo))
    return made


def _rebuilt_tuple(value: tuple[object, ...], replace: Callable[[object], object], memo: dict[int, object]) -> object:
    parts = [_rebuilt(part, replace, memo) for part in value]
    if all(made is part for made, part in zip(parts, value, strict=True)):
        return value
    try:
        return tuple.__new__(type(value), parts)  # a named tuple may check its fields when it is constructed
    except TypeError:  # what torch.max returns
        return cast("Callable[[list[object]], object]", type(value))(parts)


def _new_of(cls: type) -> object | None:
    """Return an empty object of a class, None if its objects are shared rather than copied."""
    if is_library(cls.__module__) and cls not in HOLDERS and not issubclass(cls, list | dict | set | deque):
        return None
    try:
        return cast("Callable[[type], object]", cls.__new__)(cls)
    except TypeError:  # it cannot be made without arguments
        return None


def _fill(made: object, value: object, rebuild: Callable[[object], object]) -> None:
    """Put the rebuilt parts of a value into a new object of its class."""
    if isinstance(value, list):
        list.extend(cast("list[object]", made), map(rebuild, value))
    elif isinstance(value, dict):
        for key, entry in value.items():
            dict.__setitem__(cast("dict[object, object]", made), key, rebuild(entry))
        if hasattr(value, "default_factory"):
            made.default_factory = value.default_factory  # type: ignore[attr-defined]
    elif isinstance(value, set):
        set.update(cast("set[object]", made), value)
    elif isinstance(value, deque):
        deque.__init__(cast("deque[object]", made), map(rebuild, value), value.maxlen)
    for name, part in vars_of(value).items():
        vars(made)[name] = rebuild(part)
    for name in (name for base in type(value).__mro__ for name in slots_of(base)):
        if name not in ("__dict__", "__weakref__") and hasattr(value, name):
            object.__setattr__(made, name, rebuild(getattr(value, name)))
