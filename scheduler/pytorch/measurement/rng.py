"""The global random generators and their state."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator
from typing import cast

import numpy as np
import torch
from torch import Tensor

Generators = list[tuple[torch.Generator, Tensor]]
"""Each global generator in use, with a state of it."""


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that random operators on this device draw from."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def global_generators() -> list[torch.Generator]:
    """Return torch's global generators that are in use."""
    if torch.cuda.is_initialized():
        return [torch.default_generator, *torch.cuda.default_generators]
    return [torch.default_generator]


def save_generators(own: Iterable[torch.Generator] = ()) -> Generators:
    """Return the state of every global generator that is in use, and of the user's own."""
    return [(generator, generator.get_state()) for generator in (*global_generators(), *own)]


def restore_generators(states: Generators) -> None:
    """Restore the states that `save_generators` returned."""
    for generator, state in states:
        generator.set_state(state)


@contextlib.contextmanager
def kept_generators(own: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Leave the global generators, and the user's own, as they were."""
    states = save_generators(own)
    try:
        yield
    finally:
        restore_generators(states)


NumpyState = tuple[str, np.ndarray, int, int, float]
"""What `numpy.random.get_state` returns: the words of the state, the position in them, a number drawn in advance."""

_WORDS_BYTES = 624 * 4
"""Bytes of the words in the memory of a Mersenne Twister; the position follows as an int."""


class _Last:
    """The last state of NumPy's global generator that was read, after the memory of the generator at that time."""

    read: tuple[bytes, NumpyState] | None = None


def save_numpy() -> NumpyState:
    """Return the state of NumPy's global generator: the same object as before if it has not changed.

    NumPy takes a tenth of a millisecond to copy the state, so its memory is compared first. A
    number drawn in advance is elsewhere, and there is none before a draw changes the memory.
    """
    memory, last = _memory(), _Last.read
    if memory is not None and last is not None and memory == last[0]:
        return last[1]
    state = cast("NumpyState", np.random.get_state())
    _, words, position, has_gauss, _ = state
    is_known = not has_gauss and memory == words.tobytes() + bytes(ctypes.c_int(position))
    _Last.read = (memory, state) if is_known and memory is not None else None
    return state


def restore_numpy(state: NumpyState) -> None:
    """Put NumPy's global generator back to a state."""
    np.random.set_state(state)
    _Last.read = None


def equal_numpy(one: NumpyState, other: NumpyState) -> bool:
    """Return whether two states of NumPy's global generator are equal."""
    return one is other or (one[1].tobytes() == other[1].tobytes() and one[2:] == other[2:])


def _memory() -> bytes | None:
    """Return the memory of NumPy's global generator, None if it is of another kind than usual."""
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if not isinstance(bits, np.random.MT19937):
        return None
    return ctypes.string_at(bits.ctypes.state_address, _WORDS_BYTES + ctypes.sizeof(ctypes.c_int))
