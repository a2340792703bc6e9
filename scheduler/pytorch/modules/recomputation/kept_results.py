"""Recompute a call except for its expensive operators, whose results are kept from its first run."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scheduler.errors import ExecutionError
from scheduler.pytorch.measurement.flop_formulas import has_formula
from scheduler.pytorch.measurement.rng import default_generator
from scheduler.pytorch.torch_private.autograd import TorchDispatchMode
from scheduler.pytorch.torch_private.operators import OpOverload, schema_of
from scheduler.pytorch.torch_private.pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from scheduler.pytorch.torch_private.tensors import alias_of, storage_id, storage_of, version_of

_Place = tuple[int, str]
"""The position and the name of an argument."""


def is_expensive(operator: object) -> bool:
    """Return whether the results of an operator are kept: those of products, convolutions, attention and the like."""
    return isinstance(operator, OpOverload) and has_formula(operator)


def may_draw(operator: object) -> bool:
    """Return whether an operator may draw random numbers; the state of the generator is then kept with its results."""
    return isinstance(operator, OpOverload) and torch.Tag.nondeterministic_seeded in operator.tags


def changed_arguments(operator: object, args: Sequence[object], kwargs: Mapping[str, object]) -> list[object]:
    """Return the arguments that an operator changes in place.

    A recurrent network of cuDNN draws its dropout from a state of its own, and changes it, which its
    schema does not say.
    """
    found = [_argument(place, args, kwargs) for place in _written(operator)]
    if own := _own_draws(operator):
        train, dropout, state = (_argument(place, args, kwargs) for place in own)
        found += [state] if train and dropout else []
    return found


def _argument(place: _Place, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    position, name = place
    return args[position] if position < len(args) else kwargs.get(name)


@functools.cache
def _written(operator: object) -> tuple[_Place, ...]:
    """Return the arguments that an operator changes in place, by its schema."""
    arguments = schema_of(operator).arguments if isinstance(operator, OpOverload) else ()
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


@functools.cache
def _own_draws(operator: object) -> tuple[_Place, ...]:
    """Return the arguments by which a recurrent network draws dropout from a state of its own, if an operator does."""
    arguments = schema_of(operator).arguments if isinstance(operator, OpOverload) else ()
    places = {argument.name: (i, argument.name) for i, argument in enumerate(arguments)}
    own = ("train", "dropout", "dropout_state")
    return tuple(places[name] for name in own) if places.keys() >= {*own} else ()


@dataclass
class _Result:
    """What one expensive operator returned."""

    leaves: list[object]
    spec: TreeSpec
    versions: list[int]
    drawn: list[tuple[torch.Generator, Tensor]]
    """Generators from which the operator may draw, with their states after it."""

    def has_changed(self) -> bool:
        """Return whether an operator has changed the results in place since."""
        return [version_of(leaf) for leaf in self.leaves if isinstance(leaf, Tensor)] != self.versions


class KeepResults(TorchDispatchMode):
    """Keep the results of the expensive operators that run while this mode is active.

    Attributes
    ----------
    operators : list of OpOverload
        Those that have run.
    results : dict of int to _Result
        What they returned, by position among the operators, until it is used.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[OpOverload] = []
        self.results: dict[int, _Result] = {}
        self._on_storage: defaultdict[int, list[int]] = defaultdict(list)
        """The positions of the results that lie in each storage."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        returned = func(*args, **(kwargs or {}))
        # Versions do not show changes of the views that `unsafe_chunk` returns, which the cells of GRU and LSTM change.
        for storage in _storages(changed_arguments(func, args, kwargs or {})):
            for position in self._on_storage.pop(storage, ()):
                self.results.pop(position, None)
        if is_expensive(func):
            leaves, spec = tree_flatten(returned)
            kept = [alias_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            versions = [version_of(leaf) for leaf in kept if isinstance(leaf, Tensor)]
            self.results[len(self.operators)] = _Result(kept, spec, versions, _drawn_from(func, leaves))
            for storage in _storages(kept):
                self._on_storage[storage].append(len(self.operators))
            self.operators.append(func)
        return returned

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        self._on_storage.clear()
        self.drop_changed()

    def drop_changed(self) -> None:
        """Forget results that have been changed in place, and so must be computed again."""
        for position in [position for position, result in self.results.items() if result.has_changed()]:
            del self.results[position]


class UseResults(TorchDispatchMode):
    """Return kept results instead of running the expensive operators again, each once.

    Results that have been changed in place, or that have been used, are computed again.

    Parameters
    ----------
    kept : KeepResults
        The mode under which the same code has run before.
    name : str
        The module that is recomputed.
    """

    supports_higher_order_operators = True

    def __init__(self, kept: KeepResults, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._name = name
        self._count = 0

    def __enter__(self) -> UseResults:
        self._count = 0  # a backward that keeps the graph recomputes several times
        self._kept.drop_changed()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        self._kept.results.clear()  # also those of operators at the end of the call, which need not run again

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if not is_expensive(func):
            return func(*args, **(kwargs or {}))
        position = self._count
        self._count += 1
        if position >= len(self._kept.operators) or self._kept.operators[position] is not func:
            raise ExecutionError(
                f'recomputing a call of "{self._name}" runs {func} where its first run did not: what it computes must'
                " not depend on anything that changes between the forward and the backward"
            )
        result = self._kept.results.pop(position, None)
        if result is None:
            return func(*args, **(kwargs or {}))
        for generator, state in result.drawn:
            generator.set_state(state)
        return tree_unflatten(result.leaves, result.spec)


def _drawn_from(operator: OpOverload, returned: Sequence[object]) -> list[tuple[torch.Generator, Tensor]]:
    if not may_draw(operator):
        return []
    devices = {leaf.device for leaf in returned if isinstance(leaf, Tensor) and leaf.device.type in ("cpu", "cuda")}
    return [(generator, generator.get_state()) for generator in map(default_generator, devices)]


def _storages(values: Sequence[object]) -> list[int]:
    """Return the identities of the storages of nested tensors."""
    found = (storage_of(value) for value in tree_leaves(values) if isinstance(value, Tensor))
    return [storage_id(storage) for storage in found if storage is not None]
