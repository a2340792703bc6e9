"""The global random generators and their state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

Generators = list[tuple[torch.Generator, Tensor]]
"""Each global generator in use, with a state of it."""


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that random operators on this device draw from."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def save_generators(own: Iterable[torch.Generator] = ()) -> Generators:
    """Return the state of every global generator that is in use, and of the user's own."""
    generators = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generators += list(torch.cuda.default_generators)
    return [(generator, generator.get_state()) for generator in (*generators, *own)]


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
