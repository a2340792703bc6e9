"""Notice that something has changed which Python contributed to a captured step.

What is watched: attributes of the modules, their submodules and hooks, methods and classes,
and what forward and the loss find in closures, defaults and globals. Only what the code can
read counts: a number that nothing mentions may change. A check mostly compares versions of
dicts and identities, in few calls that each pass over a whole list; only what these show to
have changed is compared value by value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from types import FunctionType

from torch import nn
from torch.utils.hooks import RemovableHandle

from scheduler.errors import CaptureError
from scheduler.pytorch.guards.environment import Environment
from scheduler.pytorch.guards.object_words import types_check
from scheduler.pytorch.guards.parts import Part, attributes_of, parts_of, parts_of_function
from scheduler.pytorch.guards.quick_check import Objects
from scheduler.pytorch.guards.read_names import ReadNames, is_installed, is_library, name_of
from scheduler.pytorch.guards.values import (
    Node,
    TooLargeError,
    Trail,
    Whole,
    attributes_added,
    describe_parts,
    parts_difference,
)
from scheduler.pytorch.torch_private.modules import HOOKS, buffers_of, global_hooks, parameters_of, submodules_of


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
    environment : Environment
    renewals : int
        How often an attribute of a module has got another, equal value. As long as it stays, the modules hold the
        same parameters and buffers.

    Raises
    ------
    CaptureError
        If code reads a NumPy array, or another buffer or container, that is too large to be compared at every call.
    """

    def __init__(self, module: nn.Module, loss: object, *, ignore: Collection[str] = ()) -> None:
        read = ReadNames(module, loss)
        modules = dict(module.named_modules())
        self._have_same_types = types_check([*modules.values()])
        known: dict[int, Node] = {id(part): Whole(part, by_value=False) for part in modules.values()}
        self._own = {
            name: _ModuleRoot(f"model.{name}".rstrip("."), part, read.names, known) for name, part in modules.items()
        }
        self.ignore(ignore)
        functions = [f for f in read.functions if f is not loss]
        self._functions: list[_Root] = [
            _FunctionRoot(f"{name_of(function, loss)}: ", function, read.names, known)
            for function in (*(f for f in [loss] if isinstance(f, FunctionType)), *functions)
        ]
        self._classes: list[_Root] = [_ClassRoot(cls.__qualname__, cls, read.names, known) for cls in read.classes]
        self._others: list[_Root] = []
        if loss is not None and not isinstance(loss, FunctionType | nn.Module):
            self._others.append(_Root("loss", loss, read.names, known))
        self.environment = Environment(read.functions)
        self._hooks = dict(self._find_hooks())
        self._handles = RemovableHandle.next_id
        self.renewals = 0
        others = [*self._functions, *self._classes, *self._others]
        self._changing = _Group([])
        # The changing ones are checked first, so that others may join them afterwards.
        self._groups = [self._changing, _Group([*self._own.values()]), _Group(others)]

    def ignore(self, names: Iterable[str]) -> None:
        """Do not watch these attributes of modules: qualified names such as "layers.0.calls"."""
        for full in names:
            path, _, name = full.rpartition(".")
            if path in self._own:
                self._own[path].ignore(name)

    def difference(self) -> str:
        """Return the first thing that differs now, "" if nothing does.

        Returns
        -------
        str
            For example `model.tau was 1.0 when the plan was made, is 0.1`.
        """
        if found := self._hooks_difference():
            return found
        if found := self.environment.difference():
            return found
        have_same_types = self._have_same_types()
        for group in self._groups:
            if not (have_same_types and group.is_unchanged()) and (found := self._difference_in(group)):
                return found
        return ""

    def _difference_in(self, group: _Group) -> str:
        """Return what differs in a group, in which something has changed."""
        changed = [root for root in group.roots if not root.is_unchanged]
        for root in changed:
            if found := root.difference():
                return found
            root.renew()
            self.renewals += isinstance(root, _ModuleRoot)
        if group is not self._changing:
            group.roots = [root for root in group.roots if root not in changed]
            self._changing.roots += changed
            group.renew()
        self._changing.renew()
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
        for root in self._own.values():
            own = vars(root.value)
            for name in HOOKS:
                for key, hook in own[name].items():
                    yield (f"{root.path}.{name}", key), (own[name], hook)
        for name, held in global_hooks().items():
            for key, hook in held.items():
                yield (name, key), (held, hook)


class _Group:
    """Roots that are checked together. What has changed once is checked apart from what never has.

    Attributes
    ----------
    roots : list of _Root
    is_unchanged : callable
        Returns whether nothing has changed for certain in any of them.
    """

    def __init__(self, roots: list[_Root]) -> None:
        self.roots = roots
        self.renew()

    def renew(self) -> None:
        """Take the present state as the one to compare with."""
        objects = Objects()
        for root in self.roots:
            objects.extend(root.trail)
        self.is_unchanged = objects.check()


class _Root:
    """A function, class or object that code reads from, with a description of what it reads there.

    Attributes
    ----------
    path : str
        For messages.
    trail : Trail
    """

    def __init__(self, path: str, value: object, names: AbstractSet[str], known: Mapping[int, Node]) -> None:
        self.path, self.value, self.names, self.known = path, value, names, known
        self.trail = Trail(known)
        try:
            self.parts: list[tuple[Part, Node]] = list(
                describe_parts(value, self._readable(), self.names, self.trail, (id(value),))
            )
        except TooLargeError as error:
            raise CaptureError(
                f"{path}{error.path} may be read by the step and holds {error.size}: {error.limit} compared at every"
                " call. Make it a tensor, whose values are read at every step, or make an array read-only"
                " (array.flags.writeable = False)"
            ) from None
        self._close()

    def _readable(self) -> Iterator[Part]:
        yield from parts_of(self.value, self.names)

    def _close(self) -> None:
        """Take the present state as the one to compare with."""
        self.trail.add(self.value)
        self.trail.nodes.clear()
        self._check = self.trail.check()

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing has changed for certain."""
        return self._check()

    def difference(self) -> str:
        """Return what differs now, "" if nothing does."""
        return parts_difference(self.parts, self.value, self.path)

    def renew(self) -> None:
        """Take the present objects, which are equal to the earlier ones, as those to compare with."""
        self.trail = Trail(self.known)
        parts = (part for part, _ in self.parts)
        list(describe_parts(self.value, parts, self.names, self.trail, (id(self.value),)))
        self._close()


class _FunctionRoot(_Root):
    """A function, with its code, its closure, its defaults and the globals that it mentions."""

    def _readable(self) -> Iterator[Part]:
        function = self.value
        assert isinstance(function, FunctionType)
        self.code = function.__code__
        for part in parts_of_function(function):
            if not is_installed(function) or isinstance(part.get(function), _WATCHED_IN_PACKAGES):
                yield part

    def _close(self) -> None:
        function = self.value
        assert isinstance(function, FunctionType)
        names = [part.text for part, _ in self.parts]
        self.trail.functions.append(function)
        self.trail.entries += [(function.__globals__, name) for name in names if name in function.__globals__]
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self.trail.cells += [cell for name, cell in cells if name in names]
        if function.__kwdefaults__:
            self.trail.dicts.append(function.__kwdefaults__)
        super()._close()

    def difference(self) -> str:
        if not isinstance(self.value, FunctionType) or self.value.__code__ is not self.code:
            return f"the code of {self.path.removesuffix(': ')} was replaced after the plan was made"
        return super().difference()


_WATCHED_IN_PACKAGES = (bool, int, float, str, FunctionType, type)
"""What of the globals of an installed package is watched: its settings, and functions that a user may replace."""


class _ClassRoot(_Root):
    """A class, with its methods and values; of a library's class only what runs in every call."""

    value: type

    def _readable(self) -> Iterator[Part]:
        self.keys = self._keys()
        for name in sorted(self.keys):
            yield Part(f".{name}", lambda value, name=name: vars(value)[name], lambda value, _: value)  # type: ignore[misc]

    def _keys(self) -> set[str]:
        wanted = {"__call__", "forward"} if is_library(self.value.__module__) else self.names
        return {name for name in vars(self.value).keys() & wanted if name not in _OF_EVERY_CLASS}

    def _close(self) -> None:
        self.trail.classes.append(self.value)
        self.trail.entries += [(vars(self.value), name) for name in self.keys]
        super()._close()

    def difference(self) -> str:
        for name in sorted(self._keys() - self.keys):
            return f"{self.path}.{name} was added after the plan was made"
        return super().difference()


_OF_EVERY_CLASS = frozenset({"__class__", "__dict__", "__doc__", "__module__", "__weakref__"})


class _ModuleRoot(_Root):
    """A module of the model, with its attributes, tensors and submodules."""

    value: nn.Module

    def __init__(self, path: str, value: nn.Module, names: AbstractSet[str], known: Mapping[int, Node]) -> None:
        self.kind = type(value)
        super().__init__(path, value, names, known)
        self.held = self._held()
        self.keys = self._keys()

    def ignore(self, name: str) -> None:
        """Let an attribute change."""
        self.names = self.names - {name}
        self.parts = [(part, node) for part, node in self.parts if part.text != f".{name}"]
        self.keys.discard(name)

    def _readable(self) -> Iterator[Part]:
        return attributes_of(self.value, self.names)

    def _held(self) -> dict[str, object]:
        module = self.value
        tensors = {**parameters_of(module), **buffers_of(module)}
        return {**submodules_of(module), **{name: tensor is not None for name, tensor in tensors.items()}}

    def _keys(self) -> set[str]:
        return vars(self.value).keys() & self.names

    def _close(self) -> None:
        module = self.value
        self.trail.add_dict(submodules_of(module))
        for held in (parameters_of(module), buffers_of(module)):
            if held or not is_library(self.kind.__module__):  # torch's layers look for no tensor that they lack
                self.trail.add_dict(held)
        super()._close()

    @property
    def is_unchanged(self) -> bool:
        return type(self.value) is self.kind and super().is_unchanged

    def difference(self) -> str:
        if type(self.value) is not self.kind:
            return f"{self.path} was a {self.kind.__name__} when the plan was made, is a {type(self.value).__name__}"
        held = self._held()
        added = (held.keys() - self.held.keys()).union(attributes_added(self.value, self.names, self.keys))
        removed = self.held.keys() - held.keys() | self.keys - self._keys()
        for name in sorted(added | removed):
            if name in removed:
                return f"{self.path}.{name} was removed after the plan was made"
            is_value = isinstance(vars(self.value).get(name), bool | int | float | str | tuple | list | dict)
            advice = " (if its first call adds it, call the model once before it is planned)" if is_value else ""
            return f"{self.path}.{name} was added after the plan was made{advice}"
        for name, then in self.held.items():
            if held[name] is not then:
                return f"{self.path}.{name} was replaced after the plan was made"
        if [*held] != [*self.held]:
            return f"the submodules or tensors of {self.path} have another order than when the plan was made"
        return super().difference()
