"""Notice that something has changed which Python contributed to a captured step.

What is watched: attributes of the modules, their submodules and hooks, methods and classes,
and what forward and the loss find in closures, defaults and globals. Only what the code can
read counts: a number that nothing mentions may change. A check mostly compares versions of
dicts and identities; only what has a new version is compared value by value.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from collections.abc import Set as AbstractSet
from itertools import chain
from operator import is_
from types import FunctionType

import torch.nn.modules.module as torch_module
from torch import nn
from torch.utils.hooks import RemovableHandle

from scheduler.pytorch.guards.read_names import HOOKS, ReadNames, is_installed, is_library, name_of
from scheduler.pytorch.guards.settings import Environment
from scheduler.pytorch.guards.values import (
    Node,
    Part,
    Trail,
    attributes_of,
    describe,
    parts_difference,
    parts_of,
    parts_of_function,
)

_GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)


class Watch:
    """What a step reads from Python, as it is now.

    Parameters
    ----------
    module : nn.Module
    loss : callable or None
    ignore : collection of str
        Qualified names of attributes that may change, such as counters: "layers.0.calls".

    Attributes
    ----------
    renewals : int
        How often an attribute of a module has got another, equal value. As long as it stays, the modules hold the
        same parameters and buffers.
    """

    def __init__(self, module: nn.Module, loss: object, *, ignore: Collection[str] = ()) -> None:
        read = ReadNames(module, loss)
        modules = dict(module.named_modules())
        self._modules = list(modules.values())
        self._types = list(map(type, self._modules))
        self._own = [
            _ModuleRoot(
                f"model.{name}".rstrip("."),
                part,
                read.names,
                {x.rpartition(".")[2] for x in ignore if x.rpartition(".")[0] == name},
            )
            for name, part in modules.items()
        ]
        self._others = [
            *(_Root(f"{name_of(function, loss)}: ", function, read.names) for function in read.functions),
            *(_Root(cls.__qualname__, cls, read.names) for cls in read.classes),
        ]
        if loss is not None and not isinstance(loss, FunctionType | nn.Module):
            self._others.append(_Root("loss", loss, read.names))
        self._environment = Environment() if _reads_environment(read) else None
        self._hooks = dict(self._find_hooks())
        self._handles = RemovableHandle.next_id
        self.renewals = 0
        self._join()

    def _join(self) -> None:
        self._trail = Trail()
        for root in chain(self._own, self._others):
            self._trail.extend(root.trail)
        self._trail.close()

    def difference(self) -> str:
        """Return the first thing that differs now, "" if nothing does.

        Returns
        -------
        str
            For example `model.tau was 1.0 when the plan was made, is 0.1`.
        """
        if found := self._hooks_difference():
            return found
        if self._environment is not None and (found := self._environment.difference()):
            return found
        if (
            self._trail.is_unchanged
            and all(map(is_, map(type, self._modules), self._types))
            and all(root.is_unchanged for root in self._others)
        ):
            return ""
        for root in chain(self._own, self._others):
            if not root.is_unchanged:
                if found := root.difference():
                    return found
                root.renew()
                self.renewals += root in self._own
        self._join()
        return ""

    def _hooks_difference(self) -> str:
        """Return which hook differs; every handle of a hook has a number, so no new number means no new hook."""
        if RemovableHandle.next_id == self._handles and all(key in held for (_, key), (held, _) in self._hooks.items()):
            return ""
        hooks = dict(self._find_hooks())
        for where in hooks.keys() ^ self._hooks.keys():
            done = "added" if where in hooks else "removed"
            return f"a hook in {where[0]} was {done} after the plan was made"
        self._handles = RemovableHandle.next_id
        return ""

    def _find_hooks(self) -> Iterator[tuple[tuple[str, int], tuple[dict[int, object], object]]]:
        for root in self._own:
            for name in HOOKS:
                held = vars(root.value)[name]
                for key, hook in held.items():
                    yield (f"{root.path}.{name}", key), (held, hook)
        for name in _GLOBAL_HOOKS:
            held = getattr(torch_module, name)
            for key, hook in held.items():
                yield (f"torch.nn.modules.module.{name}", key), (held, hook)


def _reads_environment(read: ReadNames) -> bool:
    """Return whether code mentions the environment variables, under any name."""
    return bool(read.names & {"environ", "environb", "getenv", "getenvb"}) or any(
        function.__globals__.get(name) is value
        for value in (os.environ, os.getenv)
        for function in read.functions
        for name in function.__code__.co_names
    )


class _Root:
    """A function, class or object that code reads from, with a description of what it reads there."""

    def __init__(self, path: str, value: object, names: AbstractSet[str]) -> None:
        self.path, self.value, self.names = path, value, names
        self.trail = Trail()
        self.parts: list[tuple[Part, Node]] = [
            (part, describe(part.get(value), names, self.trail)) for part in self._readable()
        ]
        self.found = self._values()
        self.trail.close()

    def _readable(self) -> Iterator[Part]:
        value = self.value
        if isinstance(value, FunctionType):
            is_users = not is_installed(value)
            for part in parts_of_function(value):
                if is_users or isinstance(part.get(value), bool | int | float | str):
                    yield part
        elif isinstance(value, type):
            yield from _class_attributes(value, self.names)
        else:
            yield from parts_of(value, self.names)

    def _values(self) -> list[object]:
        return [part.get(self.value) for part, _ in self.parts]

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing has changed for certain."""
        try:
            return all(map(is_, self._values(), self.found)) and self.trail.is_unchanged
        except (LookupError, AttributeError, ValueError):
            return False

    def difference(self) -> str:
        """Return what differs now, "" if nothing does."""
        return parts_difference(self.parts, self.value, self.path)

    def renew(self) -> None:
        """Take the present objects, which are equal to the earlier ones, as those to compare with."""
        self.trail = Trail()
        for part, _ in self.parts:
            describe(part.get(self.value), self.names, self.trail)
        self.found = self._values()
        self.trail.close()


class _ModuleRoot(_Root):
    """A module of the model, with its attributes, tensors and submodules."""

    value: nn.Module

    def __init__(self, path: str, value: nn.Module, names: AbstractSet[str], ignore: Collection[str]) -> None:
        self.ignore = ignore
        super().__init__(path, value, names)
        self.kind = type(value)
        self.held = self._held()
        self.keys = self._keys()
        self._pass_own()

    def _readable(self) -> Iterator[Part]:
        return (part for part in attributes_of(self.value, self.names) if part.text[1:] not in self.ignore)

    def _held(self) -> dict[str, object]:
        module = self.value
        tensors = {**module._parameters, **module._buffers}
        return {**module._modules, **{name: tensor is not None for name, tensor in tensors.items()}}

    def _keys(self) -> set[str]:
        return vars(self.value).keys() & self.names

    def _pass_own(self) -> None:
        module = self.value
        own = (vars(module), *(held for held in (module._modules, module._parameters, module._buffers) if held))
        self.trail.dicts += own
        self.trail.close()

    def renew(self) -> None:
        super().renew()
        self._pass_own()

    @property
    def is_unchanged(self) -> bool:
        return type(self.value) is self.kind and self.trail.is_unchanged

    def difference(self) -> str:
        if type(self.value) is not self.kind:
            return f"{self.path} was a {self.kind.__name__} when the plan was made, is a {type(self.value).__name__}"
        held, keys = self._held(), self._keys()
        for name in sorted(held.keys() ^ self.held.keys() | keys ^ self.keys):
            done = "added" if name in held or name in keys else "removed"
            return f"{self.path}.{name} was {done} after the plan was made"
        for name, then in self.held.items():
            if held[name] is not then:
                return f"{self.path}.{name} was replaced after the plan was made"
        return super().difference()


def _class_attributes(cls: type, names: AbstractSet[str]) -> Iterator[Part]:
    """Yield methods and values of a class; of a library's class its forward only."""
    members = vars(cls)
    wanted = {"forward"} if is_library(cls.__module__) else names
    for name in sorted(members.keys() & wanted):
        if not name.startswith("__") or name == "__call__":
            yield Part(f".{name}", lambda value, name=name: vars(value)[name], lambda value, _: value)  # type: ignore[misc]
