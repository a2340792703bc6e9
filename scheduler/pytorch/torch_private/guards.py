"""The guards of TorchDynamo in C++, which see in one call that many objects have not changed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._C._dynamo import guards


def _dict_version_if_true() -> Callable[[Any], int] | None:
    """Return the function that reads the version of a dict, None if it does not see every change.

    On Python 3.13 an attribute that is set changes the dict of its object, and not its version.
    """
    version: Callable[[Any], int] | None = getattr(guards, "dict_version", None)
    if version is None:
        return None
    probe = _Probe()
    for number in range(_WARM):
        before = version(vars(probe))
        probe.number = number
        if version(vars(probe)) == before:
            return None
    return version


class _Probe:
    """An object with a dict of attributes."""

    number = 0


_WARM = 100
"""Python stores an attribute in another way once it has done so some times."""
_dict_version = _dict_version_if_true()
SEES_DICTS = _dict_version is not None
"""Whether `dicts_check` can succeed."""

Check = Callable[[], bool]
"""Returns whether nothing has changed for certain."""


def dicts_check(dicts: Sequence[Mapping[Any, Any]]) -> Check:
    """Return a check that none of these dicts has changed since this call.

    TorchDynamo's guards use the version that Python keeps of each dict. Without it, the check
    always fails, and the dicts have to be compared entry by entry.
    """
    if len(dicts) <= _FEW:
        versions = _dict_versions(dicts)
        return lambda: _dict_versions(dicts) == versions
    return _dicts_guarded(dicts) or dicts_check_one_by_one(dicts)


_FEW = 8
"""So many dicts are compared faster than a tree of guards is built for them."""


def tensors_check(tensors: Sequence[Tensor]) -> Check:
    """Return a check that no tensor has another type, shape, dtype, device or requires_grad than now.

    The check also fails while autocast or another mode is active that was not active now.
    """
    make: Callable[..., Any] | None = getattr(guards, "TensorGuards", None)
    if make is None:
        return tensors_check_one_by_one(tensors)
    sizes, strides = [[*t.shape] for t in tensors], [[None] * t.dim() for t in tensors]  # strides may be any
    try:
        tensor_guards = make(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    except TypeError:
        return tensors_check_one_by_one(tensors)
    return functools.partial(tensor_guards.check, *tensors)


def dicts_check_one_by_one(dicts: Sequence[Mapping[Any, Any]]) -> Check:
    """Do what `dicts_check` does where torch has no guards to build a tree of."""
    versions = _dict_versions(dicts)
    return lambda: _dict_versions(dicts) == versions


def tensors_check_one_by_one(tensors: Sequence[Tensor]) -> Check:
    """Do what `tensors_check` does where torch has no guards to build a tree of."""

    def read() -> list[object]:
        return [(type(t), t.shape, t.dtype, t.device, t.requires_grad) for t in tensors]

    then = read()
    return lambda: read() == then


def _dict_versions(dicts: Sequence[Mapping[Any, Any]]) -> object:
    return object() if _dict_version is None else tuple(map(_dict_version, dicts))


def _dicts_guarded(dicts: Sequence[Mapping[Any, Any]]) -> Check | None:
    """Return a check by a tree of TorchDynamo's guards, None if this version of torch builds another tree."""
    from torch._dynamo.guards import GuardManagerType

    # A manager searches all its children to add one: a tree of two levels is built in a fraction of the time.
    if _dict_version is None:
        return None
    groups = [list(dicts[i : i + _GROUP]) for i in range(0, len(dicts), _GROUP)]
    kind = GuardManagerType.GUARD_MANAGER

    def child(manager: Any, index: int, value: object) -> Any:
        return manager.list_getitem_manager(key=index, source="", example_value=value, guard_manager_enum=kind)

    try:
        root = guards.RootGuardManager()
        for i, group in enumerate(groups):
            manager = child(root, i, group)
            for k, value in enumerate(group):
                child(manager, k, value).add_dict_version_guard(value, [], None)
    except (AttributeError, TypeError):
        return None
    return functools.partial(root.check, groups)


_GROUP = 32
