"""Which storages are live while a step runs, by the module that allocated them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scheduler.pytorch.measurement.memory import StorageTracker, storage_sizes
from scheduler.pytorch.torch_private.autograd import autograd_node_name
from scheduler.pytorch.torch_private.pytree import tree_leaves, tree_map_only
from scheduler.pytorch.torch_private.tensors import FakeTensorMode

ACTIVATIONS = "activations"
BACKWARD = "(backward)"
OUTSIDE = "(outside of the modules)"


@dataclass(frozen=True)
class Failure:
    """The moment at which an operator ran out of memory.

    Attributes
    ----------
    operator, module : str
        What ran, and the module that ran it.
    live : dict of int to int
        Bytes of each live storage that an operator had allocated, by its identity.
    places : dict of int to str
        The module that allocated it.
    inputs : dict of int to int
        Bytes of each storage in the arguments of the model's last call.
    """

    operator: str
    module: str
    live: dict[int, int]
    places: dict[int, str]
    inputs: dict[int, int]


class LiveMemory(StorageTracker):
    """Count live storages, and note which module allocated each of them.

    Parameters
    ----------
    model : nn.Module

    Attributes
    ----------
    arguments : tuple or None
        Positional and keyword arguments of the last call of the model, without data.
    had_gradients : bool
        Whether parameters had gradients at that call.
    failure : Failure or None
        Set when an operator runs out of memory, the first time.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__([*model.parameters(), *model.buffers()])
        self.had_gradients = False
        self._inputs: dict[int, int] = {}
        self.arguments: tuple[tuple[object, ...], dict[str, object]] | None = None
        self.failure: Failure | None = None
        self._places: dict[int, str] = {}
        self._running: list[str] = []
        self._hooks = [
            hook
            for name, module in model.named_modules()
            for hook in (
                module.register_forward_pre_hook(self._entered(name or type(model).__name__)),
                module.register_forward_hook(self._left, always_call=True),
            )
        ]
        self._hooks.append(model.register_forward_pre_hook(self._called, with_kwargs=True))

    @property
    def place(self) -> str:
        """The innermost module that runs."""
        return self._running[-1] if self._running else BACKWARD if autograd_node_name() else OUTSIDE

    def remove_hooks(self) -> None:
        """Remove the hooks from the modules."""
        for hook in self._hooks:
            hook.remove()

    def now(self, operator: str = "") -> Failure:
        """Return what is live now."""
        return Failure(operator, self.place, dict(self._sizes), dict(self._places), dict(self._inputs))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        except torch.OutOfMemoryError:
            self.failure = self.failure or self.now(str(func))
            raise

    def _see(self, storage: torch.UntypedStorage) -> None:
        before = len(self._sizes)
        super()._see(storage)
        if len(self._sizes) > before:
            self._places[next(reversed(self._sizes))] = self.place

    def _forget(self, key: int, reference: object) -> None:
        super()._forget(key, reference)
        self._places.pop(key, None)

    def _entered(self, name: str):  # type: ignore[no-untyped-def]
        def enter(*_: object) -> None:
            self._running.append(name)

        return enter

    def _left(self, *_: object) -> None:
        if self._running:
            self._running.pop()

    def _called(self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        mode = FakeTensorMode()
        self.had_gradients = any(parameter.grad is not None for parameter in model.parameters())
        self._inputs = storage_sizes(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        self.arguments = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))


def bytes_by_kind(failure: Failure, kinds: Mapping[str, Iterable[Tensor]]) -> dict[str, int]:
    """Return the bytes of distinct live storages by kind; a storage counts for the first kind that holds it.

    Arguments of the model that no kind holds are "inputs". Of the rest, what a module allocated in
    its forward is "activations".

    Parameters
    ----------
    failure : Failure
    kinds : mapping of str to iterable of Tensor
    """
    found: dict[str, int] = {}
    counted: set[int] = set()
    for kind, tensors in kinds.items():
        sizes = {key: size for key, size in storage_sizes(tensors).items() if key not in counted}
        counted |= sizes.keys()
        found[kind] = sum(sizes.values())
    found["inputs"] = sum(size for key, size in failure.inputs.items() if key not in counted)
    counted |= failure.inputs.keys()
    names = {BACKWARD: "temporary tensors of the backward", OUTSIDE: "outputs, and the loss"}
    for key, size in failure.live.items():
        if key not in counted:
            kind = names.get(failure.places.get(key, OUTSIDE), ACTIVATIONS)
            found[kind] = found.get(kind, 0) + size
    return {kind: size for kind, size in found.items() if size}


def activations_by_module(failure: Failure, others: Iterable[Tensor]) -> dict[str, int]:
    """Return the bytes of live storages by the module that allocated them, the most first.

    Modules of repeated blocks count together: `layers.*.mlp` are `layers.0.mlp`, `layers.1.mlp`, ...

    Parameters
    ----------
    failure : Failure
    others : iterable of Tensor
        Gradients and other tensors that are no activations.
    """
    excluded = storage_sizes(others).keys() | failure.inputs.keys()
    found: Counter[str] = Counter()
    for key, size in failure.live.items():
        place = failure.places.get(key, OUTSIDE)
        if key not in excluded and place not in (BACKWARD, OUTSIDE):
            found[_NUMBER.sub("*", place)] += size
    return dict(found.most_common())


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A number between dots: the place of a module in a list."""
