"""Python values that a step may advance while it is captured: random states, iterators, counters.

What a captured step draws from Python's `random` or from NumPy, and what it takes from an
iterator, would be the same in every later step. A state that differs after the capture shows it.
"""

from __future__ import annotations

import io
import itertools
import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import BuiltinMethodType, FunctionType, GeneratorType, ModuleType

import numpy as np
import torch
from torch import Tensor, nn

from scheduler.pytorch.guards.parts import Part, attributes_of, is_followed, parts_of, parts_of_function
from scheduler.pytorch.guards.read_names import ReadNames, is_installed, name_of

_SEED = 0x5EED0FAC
"""Seed of the disturbed states. A capture that seeds a generator itself shows, because nobody else uses this seed."""

_SCALARS = (bool, int, float, complex, str, bytes)


@dataclass(frozen=True)
class OutsideState:
    """The state of one source of values outside the captured step.

    Attributes
    ----------
    name : str
        For a reader: "Python's random", `model.rng`.
    owner : object
        The generator or iterator; of a plain value, the object that holds it.
    read : callable
        Returns the state as a value that can be compared.
    disturb : callable
        Moves a random state to one that no user's code has; does nothing to other states.
    save : callable
        Returns a function that puts the present state back.
    is_random, is_value : bool
        Whether it is a generator; whether it is a plain value, such as a counter.
    """

    name: str
    owner: object
    read: Callable[[], object]
    disturb: Callable[[], None]
    save: Callable[[], Callable[[], None]]
    is_random: bool = True
    is_value: bool = False


class OutsideStates:
    """The states of all sources that a step can reach, beginning with the global generators.

    Parameters
    ----------
    module : nn.Module
    loss : callable or None
    read : ReadNames
        Of both.

    Attributes
    ----------
    states : list of OutsideState
    """

    def __init__(self, module: nn.Module, loss: object, read: ReadNames) -> None:
        self.states = [*_global_states()]
        self._global_count = len(self.states)
        self.states += _Walk(read.names).states(module, loss, read)
        self._restore: list[Callable[[], None]] = []
        self._before: list[object] = []

    def begin(self) -> None:
        """Save all states, and disturb the random ones, so that also a capture that seeds them shows."""
        self._restore = [state.save() for state in self.states]
        for state in self.states:
            state.disturb()
        self._before = [state.read() for state in self.states]

    def end(self) -> None:
        """Put all states back."""
        for restore in self._restore:
            restore()

    def repeat(self) -> None:
        """Put all states back to what the capture found, so that it can be repeated."""
        self.end()
        for state in self.states:
            state.disturb()

    def changed(self) -> list[OutsideState]:
        """Return the states that differ from those that the capture found."""
        return [s for s, before in zip(self.states, self._before, strict=True) if not _same(before, s.read())]

    def owns(self, generator: torch.Generator) -> bool:
        """Return, during a capture, whether a generator was there before it; torch may wrap it in a new object."""
        return generator.initial_seed() == _SEED

    @property
    def own_states(self) -> list[OutsideState]:
        """The states other than those of the global generators."""
        return self.states[self._global_count :]

    @property
    def has_own_generators(self) -> bool:
        """Whether the step can reach a generator other than the global ones."""
        return any(state.is_random for state in self.own_states)

    @property
    def own_generators(self) -> list[torch.Generator]:
        """The generators of torch other than the default ones."""
        owners = (state.owner for state in self.own_states)
        return [owner for owner in owners if isinstance(owner, torch.Generator)]

    def named(self, name: str) -> list[OutsideState]:
        """Return the states that belong to an attribute or global of this name, and to what it holds."""
        return [state for state in self.own_states if name in re.findall(r"\w+", state.name.partition(" (")[0])]


def _same(before: object, now: object) -> bool:
    return before is now or bool(before == now) or (before != before and now != now)


def _global_states() -> Iterator[OutsideState]:
    yield _of_random("Python's random", random._inst)
    yield _of_numpy_legacy("numpy.random", np.random.get_state.__self__)  # type: ignore[attr-defined]
    yield _of_torch("the default generator of torch", torch.default_generator)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for number, generator in enumerate(torch.cuda.default_generators):
            yield _of_torch(f"the default generator of cuda:{number}", generator)


def _of_random(name: str, source: random.Random) -> OutsideState:
    def save() -> Callable[[], None]:
        state = source.getstate()
        return lambda: source.setstate(state)

    return OutsideState(name, source, source.getstate, lambda: source.seed(_SEED), save)


def _of_numpy(name: str, source: np.random.Generator | np.random.BitGenerator) -> OutsideState:
    bits = source.bit_generator if isinstance(source, np.random.Generator) else source

    def disturb() -> None:
        bits.state = type(bits)(_SEED).state

    def save() -> Callable[[], None]:
        state = bits.state
        return lambda: setattr(bits, "state", state)

    return OutsideState(name, source, lambda: _plain(bits.state), disturb, save)


def _of_numpy_legacy(name: str, source: np.random.RandomState) -> OutsideState:
    def save() -> Callable[[], None]:
        state = source.get_state(legacy=False)
        return lambda: source.set_state(state)

    return OutsideState(name, source, lambda: _plain(source.get_state(legacy=False)), lambda: source.seed(_SEED), save)


def _plain(state: object) -> object:
    """Return a state of NumPy as a value that can be compared."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


def _of_torch(name: str, source: torch.Generator) -> OutsideState:
    def disturb() -> None:
        source.manual_seed(_SEED)

    def save() -> Callable[[], None]:
        state = source.get_state()
        return lambda: _ignore(source.set_state(state))

    # While a step is captured, nothing is drawn from torch's generators: only a new seed or state shows.
    return OutsideState(name, source, source.initial_seed, disturb, save)


def _of_iterator(name: str, source: Iterator[object]) -> OutsideState:
    return OutsideState(name, source, lambda: iterator_state(source), _nothing, lambda: _nothing, is_random=False)


def _of_value(name: str, holder: object, part: Part) -> OutsideState:
    def read() -> object:
        try:
            return part.get(holder)
        except (LookupError, AttributeError, ValueError):
            return _nothing

    def save() -> Callable[[], None]:
        value = read()
        return lambda: None if read() is value else _ignore(part.put(holder, value))

    return OutsideState(name, holder, read, _nothing, save, is_random=False, is_value=True)


def _of_list(name: str, held: list[object]) -> OutsideState:
    def save() -> Callable[[], None]:
        entries = held.copy()
        return lambda: None if [*map(id, held)] == [*map(id, entries)] else held.__setitem__(slice(None), entries)

    return OutsideState(name, held, lambda: [*map(id, held)], _nothing, save, is_random=False, is_value=True)


def _nothing() -> None:
    """Do nothing."""


def _ignore(result: object) -> None:
    """Drop a result."""


def iterator_state(source: object) -> object:
    """Return how far an iterator is, as a value that can be compared; a new object each time if it cannot be seen."""
    if isinstance(source, GeneratorType):
        frame = source.gi_frame
        return None if frame is None else (frame.f_lasti, _comparable([*frame.f_locals.values()]))
    if isinstance(source, itertools.count | itertools.repeat):
        return repr(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _comparable(source.__reduce_ex__(2))
    except Exception:  # any class may refuse to be copied, in its own way
        return object()


def _comparable(value: object) -> object:
    if isinstance(value, (*_SCALARS, range)):
        return value
    if isinstance(value, tuple | list):
        return [_comparable(entry) for entry in value]
    if isinstance(value, dict):
        return [(_comparable(key), _comparable(entry)) for key, entry in dict.items(value)]
    return iterator_state(value) if _is_iterator(value) else type(value)


def _is_iterator(value: object) -> bool:
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase | nn.Module)


class _Walk:
    """Finds sources among what the code of a step reads."""

    def __init__(self, names: set[str]) -> None:
        self._names = names
        self._seen: set[int] = set()

    def states(self, module: nn.Module, loss: object, read: ReadNames) -> Iterator[OutsideState]:
        for name, part in module.named_modules():
            yield from self._inside(f"model.{name}".rstrip("."), part)
        for function in read.functions:
            root = f"{name_of(function, loss)}: "
            for part in (*parts_of_function(function), *attributes_of(function, self._names)):
                yield from self._part(root, function, part, has_values=not is_installed(function))
        for cls in read.classes:
            for name in sorted(vars(cls).keys() & self._names):
                part = Part(f".{name}", lambda value, name=name: vars(value)[name], _set(name))  # type: ignore[misc]
                yield from self._part(cls.__qualname__, cls, part, has_values=not is_installed(cls))
        yield from self._value("loss", loss)

    def _part(self, path: str, holder: object, part: Part, *, has_values: bool = True) -> Iterator[OutsideState]:
        value = part.get(holder)
        if isinstance(value, list) and has_values and not isinstance(holder, nn.Module):
            yield _of_list(path + part.text, value)
        if isinstance(value, _SCALARS) or value is None:
            if has_values and not isinstance(holder, nn.Module | tuple | ModuleType) and value is not None:
                yield _of_value(path + part.text, holder, part)
        else:
            yield from self._value(path + part.text, value, has_values=has_values)

    def _value(self, name: str, value: object, *, has_values: bool = True) -> Iterator[OutsideState]:
        if isinstance(value, BuiltinMethodType):
            value = value.__self__
        if id(value) in self._seen or isinstance(value, Tensor | type | FunctionType):
            return
        source = _source(name, value)
        if source is not None:
            self._seen.add(id(value))
            yield source
        elif is_followed(value) or (hasattr(value, "__dict__") and not isinstance(value, ModuleType)):
            yield from self._inside(name, value, has_values=has_values)

    def _inside(self, name: str, value: object, *, has_values: bool = True) -> Iterator[OutsideState]:
        if id(value) in self._seen or isinstance(value, torch.jit.ScriptModule):  # which holds no Python objects
            return
        self._seen.add(id(value))
        if isinstance(value, set):
            for entry in value:
                yield from self._value(f"an entry of {name}", entry, has_values=has_values)
            return
        for part in parts_of(value, self._names):
            yield from self._part(name, value, part, has_values=has_values)


def _source(name: str, value: object) -> OutsideState | None:
    """Return the state of a value that is itself a source, None if it is not."""
    if isinstance(value, random.Random):
        if isinstance(value, random.SystemRandom) or value is random._inst:
            return None
        return _of_random(f"{name} (a random.Random)", value)
    if isinstance(value, np.random.Generator | np.random.BitGenerator):
        return _of_numpy(f"{name} (a numpy.random.{type(value).__name__})", value)
    if isinstance(value, np.random.RandomState):
        is_global = value is np.random.get_state.__self__  # type: ignore[attr-defined]
        return None if is_global else _of_numpy_legacy(f"{name} (a numpy.random.RandomState)", value)
    if isinstance(value, torch.Generator):
        return _of_torch(f"{name} (a torch.Generator)", value)
    return _of_iterator(f"{name} (an iterator)", value) if _is_iterator(value) else None  # type: ignore[arg-type]


def _set(name: str) -> Callable[[object, object], object]:
    def put(value: object, item: object) -> object:
        setattr(value, name, item)
        return value

    return put
