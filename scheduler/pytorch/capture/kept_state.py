"""Put everything that a step may change back to what it was."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from scheduler.pytorch.capture.module_state import Attributes
from scheduler.pytorch.guards.outside_states import OutsideState
from scheduler.pytorch.measurement.rng import NumpyState, equal_numpy, global_generators, restore_numpy, save_numpy
from scheduler.pytorch.torch_private import pytree
from scheduler.pytorch.torch_private.modules import MODULES, PARAMETERS
from scheduler.pytorch.torch_private.tensors import is_traceable_wrapper_subclass, storage_id

_PYTHON, _NUMPY = random.getstate.__self__, np.random.get_state.__self__  # type: ignore[attr-defined]
"""The global generators of Python and of NumPy."""


class RandomState:
    """The states of the random generators of torch, Python and NumPy, as they are now.

    Parameters
    ----------
    own : iterable of OutsideState
        Generators of the user, in addition to the global ones, which may be among them.
    """

    def __init__(self, own: Iterable[OutsideState] = ()) -> None:
        sources: list[_Source] = [_TorchSource(generator) for generator in global_generators()]
        known = {id(_PYTHON), id(_NUMPY), *(id(source.owner) for source in sources)}
        sources += [
            _TorchSource(state.owner) if isinstance(state.owner, torch.Generator) else _OwnSource(state)
            for state in own
            if state.is_random and id(state.owner) not in known
        ]
        self._sources = (*sources, _PythonSource(), _NumpySource())
        self._states = [source.read() for source in self._sources]

    @property
    def size_bytes(self) -> int:
        """Bytes of the states of torch's generators, which are on the CPU."""
        return sum(state.nbytes for state in self._states if isinstance(state, Tensor))

    def restore(self) -> None:
        """Put the generators back to these states."""
        for source, state in zip(self._sources, self._states, strict=True):
            source.put(state)

    def now(self) -> RandomState:
        """Return the present states of the same generators."""
        return self._with(self._sources, [source.read() for source in self._sources])

    def changed(self, other: RandomState) -> RandomState:
        """Return the states of those generators that have another state in `other`."""
        compared = zip(self._sources, self._states, other._states, strict=True)
        found = [(source, state) for source, state, now in compared if not source.is_equal(state, now)]
        return self._with(tuple(source for source, _ in found), [state for _, state in found])

    def difference(self, other: RandomState) -> str:
        """Return which generator has another state in `other`, "" if none has."""
        return next((source.name for source in self.changed(other)._sources), "")

    def __bool__(self) -> bool:
        """Return whether there is any state."""
        return bool(self._states)

    def _with(self, sources: tuple[_Source, ...], states: list[Any]) -> RandomState:
        made = copy.copy(self)
        made._sources, made._states = sources, states
        return made


class _Source(Protocol):
    """A random generator. Its states are values that only its own methods take."""

    name: str

    @property
    def owner(self) -> object: ...
    def read(self) -> Any: ...
    def put(self, state: Any) -> None: ...
    def is_equal(self, one: Any, other: Any) -> bool: ...


class _TorchSource:
    def __init__(self, generator: torch.Generator) -> None:
        self.owner = generator
        self.name = f"torch generator on {generator.device}"

    def read(self) -> Tensor:
        return self.owner.get_state()

    def put(self, state: Tensor) -> None:
        self.owner.set_state(state)

    def is_equal(self, one: Tensor, other: Tensor) -> bool:
        return torch.equal(one, other)


class _PythonSource:
    owner = _PYTHON
    name = "Python's random"

    def read(self) -> tuple[Any, ...]:
        return random.getstate()

    def put(self, state: tuple[Any, ...]) -> None:
        random.setstate(state)

    def is_equal(self, one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
        # A draw changes the position, which comes last, or all 624 words before it.
        return (one[0], one[1][-9:], one[2]) == (other[0], other[1][-9:], other[2])


class _NumpySource:
    owner = _NUMPY
    name = "NumPy's random"

    def read(self) -> NumpyState:
        return save_numpy()

    def put(self, state: NumpyState) -> None:
        restore_numpy(state)

    def is_equal(self, one: NumpyState, other: NumpyState) -> bool:
        return equal_numpy(one, other)


class _OwnSource:
    def __init__(self, state: OutsideState) -> None:
        self._state = state
        self.owner = state.owner
        self.name = state.name

    def read(self) -> tuple[object, Callable[[], None]]:
        return self._state.read(), self._state.save()

    def put(self, state: tuple[object, Callable[[], None]]) -> None:
        state[1]()

    def is_equal(self, one: tuple[object, object], other: tuple[object, object]) -> bool:
        return one[0] == other[0]


class State:
    """The values of some tensors, attributes of modules, and random states, as they are now.

    Parameters
    ----------
    modules : iterable of Module
    tensors : iterable of Tensor
        In addition to those that the modules hold. Values are copied to the CPU.
    generators : iterable of OutsideState
        As for `RandomState`.
    parameters : bool
        Whether to copy the values of parameters too, which only an optimizer changes as a rule.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        tensors: Iterable[Tensor] = (),
        generators: Iterable[OutsideState] = (),
        *,
        parameters: bool = True,
    ) -> None:
        named = [(str(number), part) for number, module in enumerate(modules) for part in module.modules()]
        self._attributes = Attributes(named)
        hidden = {MODULES} if parameters else {MODULES, PARAMETERS}
        own = [[value for key, value in vars(part).items() if key not in hidden] for _, part in named]
        held = [leaf for leaf in pytree.tree_leaves(own) if isinstance(leaf, Tensor)]
        self._copies: dict[int, tuple[Tensor, torch.UntypedStorage | Tensor]] = {}
        self._views: list[tuple[Tensor, tuple[int, tuple[int, ...], tuple[int, ...]]]] = []
        for tensor in (*held, *tensors):
            if _has_no_storage(tensor):
                self._copies.setdefault(id(tensor), (tensor, tensor.detach().clone()))
            elif tensor.untyped_storage().device.type != "meta":
                storage = tensor.untyped_storage()
                if storage_id(storage) not in self._copies:
                    self._copies[storage_id(storage)] = (tensor, _copied(storage))
                self._views.append((tensor, _view_of(tensor)))
        self.random = RandomState(generators)

    def restore(self) -> None:
        """Put everything back."""
        self._attributes.restore()
        with torch.no_grad():
            for tensor, copied in self._copies.values():
                if isinstance(copied, Tensor):
                    tensor.copy_(copied)
                else:
                    storage = tensor.untyped_storage()
                    if storage.nbytes() != copied.nbytes():  # an observer may resize its buffers
                        storage.resize_(copied.nbytes())
                    storage.copy_(copied, non_blocking=False)
            for tensor, view in self._views:
                if _view_of(tensor) != view:
                    tensor.set_(tensor.untyped_storage(), *view)
        self.random.restore()


@contextlib.contextmanager
def kept_state(modules: Iterable[nn.Module], tensors: Iterable[Tensor] = ()) -> Iterator[None]:
    """Leave everything that a step may change as it was; parameters as for `State`."""
    state = State(modules, tensors)
    try:
        yield
    finally:
        state.restore()


def _has_no_storage(tensor: Tensor) -> bool:
    return tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor)


def _view_of(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()


def _copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a copy on the CPU: the memory of the device is for the step."""
    copied: torch.UntypedStorage = storage.clone() if storage.device.type == "cpu" else storage.cpu()
    return copied
