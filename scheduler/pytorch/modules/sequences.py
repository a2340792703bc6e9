"""Sequences: modules that call their children in turn, and nothing else, so that some of them can be run together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from scheduler.graph.decisions import Decision
from scheduler.pytorch.modules.names import called_forward, root_of
from scheduler.pytorch.torch_private.modules import is_compiled


def calls_in_turn(forward: Callable[..., object]) -> bool:
    """Return whether a forward is the one of `nn.Sequential` itself, which passes its argument from child to child.

    The loop over an `nn.ModuleList` is the code of its caller, so its children cannot be run together.
    """
    return getattr(forward, "__func__", None) is nn.Sequential.forward


def children_in_turn(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the children that a module calls in turn; none if it does more, or calls one of them twice."""
    called = root_of(module)
    if not isinstance(called, nn.Sequential) or not calls_in_turn(called_forward(module, module.forward)):
        return ()
    if is_compiled(module):
        return ()
    children = tuple(called)
    return children if len(children) > 1 and len({*children}) == len(children) else ()


@dataclass(frozen=True)
class Part:
    """Children of a module that are recomputed together, some of them perhaps in parts of their own.

    Attributes
    ----------
    decision : Decision
    start, stop : int
        Positions of the first child, and of the first one that follows.
    parts : tuple of Part
    """

    decision: Decision
    start: int
    stop: int
    parts: tuple[Part, ...]


def arrange(decisions: Iterable[Decision]) -> tuple[Part, ...]:
    """Return the spans of one call in order, with those inside them; one that overlaps another in part is left out."""
    found: list[Part] = []
    spans = sorted(((one.span, one) for one in decisions if one.span), key=lambda one: (one[0][0], -one[0][1]))
    for (start, stop), decision in spans:
        if not found or start >= found[-1].stop:
            within = [one for (begin, end), one in spans if start <= begin and end <= stop]
            inside = [one for one in within if one.span != decision.span]
            found.append(Part(decision, start, stop, () if decision.keeps_expensive else arrange(inside)))
    return tuple(found)
