"""Find what a step takes from outside torch while it is captured, and refuse it with the line of the user's code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import fx, nn

from scheduler.errors import CaptureError
from scheduler.pytorch.capture.module_state import describe_kept
from scheduler.pytorch.guards.draw_lines import (
    Draw,
    first_change,
    line_that_mentions,
    mentions_unseen_sources,
    recorded_draws,
)
from scheduler.pytorch.guards.outside_states import OutsideState, OutsideStates
from scheduler.pytorch.guards.read_names import ReadNames

_ONCE = "a capture takes it once, and every later step would use the same value"
_RECOMPUTED = "to recompute the layer takes another value than its first run"
_AS_ARGUMENT = "take it outside of the step and pass what depends on it as a tensor argument"


class OutsideDraws:
    """What a step takes from random generators of Python and NumPy, clocks, the operating system and iterators.

    Parameters
    ----------
    module : nn.Module
    loss : callable or None
    read : ReadNames
        The names that their code mentions.
    layer : str
        Name of the layer that is run, "" if a whole step is captured. A layer may seed torch's
        generators: it does so again when it is recomputed.
    """

    def __init__(self, module: nn.Module, loss: object, read: ReadNames, layer: str = "") -> None:
        self._layer = layer
        self._subject = f'layer "{layer}"' if layer else "the step"
        self._why = _RECOMPUTED if layer else _ONCE
        self._read = read
        self._states = OutsideStates(module, loss, read)
        self._mentions_unseen = mentions_unseen_sources(read)
        self._recorded: list[Draw] = []
        self._modules = len(sys.modules)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Disturb the random states for a capture, and put all states back afterwards."""
        self._states.begin()
        try:
            yield
        finally:
            self._states.end()

    def put_back(self) -> None:
        """Put all states back before the end of `kept`."""
        self._states.end()

    @contextlib.contextmanager
    def recorded(self, *, by_dynamo: bool = False) -> Iterator[None]:
        """Record the calls of sources that keep no state; TorchDynamo changes no state at all."""
        draws_unseen = by_dynamo and ("random" in self._read.names or self._states.has_own_generators)
        if not self._mentions_unseen and not draws_unseen:
            yield
            return
        with recorded_draws() as draws:
            try:
                yield
            finally:
                self._recorded += draws

    def check(self, again: Callable[[], object]) -> None:
        """Refuse a capture that took anything from outside.

        Parameters
        ----------
        again : callable
            Captures once more, to find the line.

        Raises
        ------
        CaptureError
            With the line of the user's code and the source.
        """
        changed = [state for state in self._states.changed() if not state.is_value and self._matters(state.owner)]
        if changed:
            self._states.repeat()
            found = first_change(again, changed)
            if found is None and len(sys.modules) == self._modules:
                found = Draw(changed[0].name, None)
            if found is not None:  # else a first import drew
                # Where TorchDynamo's graph draws, in code of its own, the line was seen while it was traced.
                lines = (draw.line for draw in self._recorded if draw.source in found.source)
                found = replace(found, line=next(lines, found.line))
                raise CaptureError(self._describe(next(s for s in changed if s.name == found.source), found))
        recorded = [draw for draw in self._recorded if self._matters(draw.owner)]
        if recorded:
            first = recorded[0]
            advice = "seed it outside of the step" if isinstance(first.owner, torch.Generator) else _AS_ARGUMENT
            raise CaptureError(
                f"{self._subject} depends on {first.source}{_at(first)}: {self._why}. To train it, {advice}"
            )

    def _matters(self, owner: object) -> bool:
        return not self._layer or not isinstance(owner, torch.Generator)

    def check_dropped(self, names: Sequence[str]) -> None:
        """Refuse a capture by TorchDynamo that saw a generator, an iterator or a counter advance.

        Parameters
        ----------
        names : sequence of str
            The last parts of the names of objects that it saw changed.

        Raises
        ------
        CaptureError
        """
        for name in names:
            for state in self._states.named(name):
                raise CaptureError(self._describe(state, Draw(state.name, line_that_mentions(name, self._read))))

    def check_generators(self, exported: fx.GraphModule) -> None:
        """Refuse a step that draws from a generator which it makes anew each time.

        Raises
        ------
        CaptureError
        """
        for node in exported.graph.find_nodes(op="get_attr"):
            generator = getattr(exported, str(node.target))
            if isinstance(generator, torch.Generator) and not self._states.owns(generator):
                line = line_that_mentions("Generator", self._read)
                raise CaptureError(
                    f"{self._subject} creates the torch.Generator that it draws from{_at(Draw('', line))}, so a plan"
                    " would go on with the first one. Create it once, as an attribute of the model, and seed it outside"
                    " of the step"
                )

    @property
    def own_generators(self) -> list[torch.Generator]:
        """The user's own generators of torch among what the step can reach."""
        return self._states.own_generators

    def check_values(self) -> None:
        """Refuse a run that changed plain values, such as counters in objects.

        Raises
        ------
        CaptureError
        """
        if changed := self.changed_values():
            raise CaptureError(f"{self._subject}: {describe_kept([*changed])}")

    def changed_values(self) -> dict[str, object]:
        """Return the plain values outside of modules that the capture changed, by name."""
        return {state.name: state.read() for state in self._states.changed() if state.is_value}

    def _describe(self, state: OutsideState, draw: Draw) -> str:
        if isinstance(state.owner, torch.Generator):
            return (
                f"{self._subject} sets the seed or the state of {state.name}{_at(draw)}, which a plan does not repeat:"
                " seed it outside of the step"
            )
        if state.is_random:
            return (
                f"{self._subject} draws from {state.name}{_at(draw)}: {self._why}. Draw with torch instead, for example"
                f" torch.rand(()), also with a torch.Generator of your own; or {_AS_ARGUMENT}"
            )
        return f"{self._subject} advances {state.name}{_at(draw)}: {self._why}. To train it, {_AS_ARGUMENT}"


def _at(draw: Draw) -> str:
    return "" if draw.line is None else f", at {draw.line}"
