"""Put everything that a step may change back to what it was."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from scheduler.pytorch.capture.module_state import Attributes
from scheduler.pytorch.guards.outside_states import OutsideState
from scheduler.pytorch.measurement.rng import Generators, restore_generators, save_generators
from scheduler.pytorch.torch_private import pytree
from scheduler.pytorch.torch_private.modules import MODULES, PARAMETERS
from scheduler.pytorch.torch_private.tensors import is_traceable_wrapper_subclass, storage_id


class RandomState:
    """The states of the random generators of torch, Python and NumPy, as they are now.

    Parameters
    ----------
    own : iterable of OutsideState
        Generators of the user, in addition to the global ones.
    """

    def __init__(self, own: Iterable[OutsideState] = ()) -> None:
        random_states = [state for state in own if state.is_random]
        generators = [state.owner for state in random_states if isinstance(state.owner, torch.Generator)]
        self._torch: Generators = save_generators()
        known = [one for one, _ in self._torch]
        self._torch += [(one, one.get_state()) for one in generators if one not in known]
        self._own = [(s.name, s.read(), s.save()) for s in random_states if not isinstance(s.owner, torch.Generator)]
        self._python = random.getstate()
        self._numpy = np.random.get_state()

    @property
    def size_bytes(self) -> int:
        """Bytes of the states of torch's generators, which are on the CPU."""
        return sum(state.nbytes for _, state in self._torch)

    def restore(self) -> None:
        """Put the generators back to these states."""
        restore_generators(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        for _, _, restore in self._own:
            restore()

    def difference(self, other: RandomState) -> str:
        """Return which generator has another state in `other`, "" if none has."""
        for (generator, state), (_, other_state) in zip(self._torch, other._torch, strict=True):
            if not torch.equal(state, other_state):
                return f"torch generator on {generator.device}"
        if self._python != other._python:
            return "Python's random"
        if not _equal_numpy(self._numpy, other._numpy):
            return "NumPy's random"
        own = zip(self._own, other._own, strict=True)
        return next((name for (name, state, _), (_, other_state, _) in own if state != other_state), "")


def _equal_numpy(one: object, other: object) -> bool:
    assert isinstance(one, tuple)
    assert isinstance(other, tuple)
    return bool(one[1].tobytes() == other[1].tobytes() and one[2:] == other[2:])


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
    copied: torch.UntypedStorage = storage.clone() if storage.device.type == "cpu" else storage.cpu()  # type: ignore[no-untyped-call]
    return copied
