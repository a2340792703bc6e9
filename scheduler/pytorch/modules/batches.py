"""The largest batch of a model that is planned by modules: measured at a few sizes, and predicted at the others."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

from scheduler.errors import BudgetTooSmallError, OutOfTimeError
from scheduler.graph.decisions import Decision
from scheduler.plan import Plan
from scheduler.planning.batch_scaling import LEAST_PREDICTED, StepsBySize, bytes_of, extrapolate
from scheduler.planning.batch_search import largest_where
from scheduler.pytorch.modules.calls import CallTree, Segment
from scheduler.pytorch.modules.choice import plan_modules
from scheduler.pytorch.modules.lowering import LoweredTree, lower, schedule_of
from scheduler.simulator import simulate

_SEARCH_SHARE = 0.1
"""The share of the time limit that the search for a plan at one size may take."""

_ANY_GAP = 0.99
"""Any plan that fits will do."""

_SEGMENT_SIZES = tuple(name for name in Segment.__dataclass_fields__ if name.endswith("_bytes"))
_SEGMENT_TIMES = tuple(name for name in Segment.__dataclass_fields__ if name.endswith("_time"))


@dataclass(frozen=True)
class LargestTree:
    """The result of `largest_batch_by_modules`.

    Attributes
    ----------
    size : int
    plan : Plan
    bound : int or None
        `size` if it is proven that one more does not fit, whatever calls are recomputed.
    next_plan : Plan or None
        The plan with the smallest known peak for a batch larger by one; None at the limit.
    """

    size: int
    plan: Plan
    bound: int | None
    next_plan: Plan | None


class TreeGrowth(StepsBySize[LoweredTree]):
    """The call trees of one model, by batch size; see `StepsBySize`.

    Parameters
    ----------
    measure : callable
        Returns the tree of a batch size.
    """

    def __init__(self, measure: Callable[[int], CallTree]) -> None:
        super().__init__(lambda size: lower(measure(size)))

    def structure(self, step: LoweredTree) -> Hashable:
        return _structure(step.layout.tree)

    def bytes_of(self, step: LoweredTree) -> object:
        return bytes_of(step.graph)

    def predict(self, size: int, one: int, other: int) -> LoweredTree:
        return lower(predict(size, one, other, *(self.traced[known].layout.tree for known in (one, other))))


def largest_batch_by_modules(
    growth: TreeGrowth, budget_bytes: int, *, limit: int, seconds: float, gap: float
) -> LargestTree:
    """Find the largest batch for which recomputing calls fits a budget.

    Decisions found at one size are simulated at the others, so few sizes need a search. The steps
    at the answer and at one more are measured; if they need another memory than predicted,
    the search continues.

    Parameters
    ----------
    growth : TreeGrowth
    budget_bytes : int
    limit : int
        Largest batch size to try.
    seconds : float
        Time limit of the plan; each search on the way takes a tenth of it at most.
    gap : float
        As for `plan_modules`.

    Raises
    ------
    BudgetTooSmallError
        If not even a batch of one fits.
    """
    for size in range(LEAST_PREDICTED, min(limit, LEAST_PREDICTED + 1) + 1):
        growth.at(size)
    known: list[tuple[Decision, ...]] = [()]

    def fits(size: int) -> bool:
        lowered = growth.at(size)
        return any(
            simulate(lowered.graph, schedule_of(lowered, decisions)).peak_bytes <= budget_bytes
            for decisions in reversed(known)
        )

    def find(size: int) -> bool | None:
        """Search for decisions that fit; return None if there are none for sure."""
        try:
            plan = plan_modules(growth.at(size), budget_bytes, gap=_ANY_GAP, time_limit=_SEARCH_SHARE * seconds)
        except BudgetTooSmallError as error:
            return None if error.proven else False
        except OutOfTimeError:
            return False
        known.append(plan.decisions)
        return True

    while True:
        size = _largest(fits, limit)
        found = size < limit and find(size + 1)
        if found:
            continue
        if all([growth.confirm(one) for one in (size, size + 1) if 0 < one <= limit]):
            break
    plan = plan_modules(growth.at(max(size, 1)), budget_bytes, gap=gap, time_limit=seconds)
    next_plan = None
    if size < limit:
        next_plan = plan_modules(growth.at(size + 1), "min", gap=_ANY_GAP, time_limit=_SEARCH_SHARE * seconds)
    return LargestTree(size, plan, size if found is None else None, next_plan)


def predict(size: int, one: int, other: int, tree: CallTree, second: CallTree) -> CallTree:
    """Return the tree of a batch size, with bytes and times extrapolated from two other sizes.

    Parameters
    ----------
    size : int
        The batch size to predict.
    one, other : int
        The batch sizes of `tree` and `second`.
    tree, second : CallTree
        Two trees of equal structure.
    """

    def affine(a: int, b: int) -> int:
        return extrapolate(size, one, other, a, b)

    def segment(a: Segment, b: Segment) -> Segment:
        values: dict[str, Any] = {name: affine(getattr(a, name), getattr(b, name)) for name in _SEGMENT_SIZES}
        values |= {name: getattr(a, name) * size / one for name in _SEGMENT_TIMES}
        return replace(a, **values)

    return replace(
        tree,
        calls=tuple(
            replace(a, copied_bytes=affine(a.copied_bytes, b.copied_bytes))
            for a, b in zip(tree.calls, second.calls, strict=True)
        ),
        segments=tuple(map(segment, tree.segments, second.segments)),
        storages=tuple(
            replace(a, size_bytes=affine(a.size_bytes, b.size_bytes))
            for a, b in zip(tree.storages, second.storages, strict=True)
        ),
        resident=tuple(
            replace(a, size_bytes=affine(a.size_bytes, b.size_bytes))
            for a, b in zip(tree.resident, second.resident, strict=True)
        ),
    )


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    if limit >= LEAST_PREDICTED and fits(LEAST_PREDICTED):
        return largest_where(fits, LEAST_PREDICTED, limit)
    return int(fits(1))


def _structure(tree: CallTree) -> Hashable:
    """Return a key that trees share if they differ only in bytes and times."""
    nothing: dict[str, Any] = dict.fromkeys((*_SEGMENT_SIZES, *_SEGMENT_TIMES), 0)
    return (
        tuple(replace(call, copied_bytes=0, refusal="refused" if call.refusal else "") for call in tree.calls),
        tuple(replace(segment, **nothing) for segment in tree.segments),
        tuple(replace(storage, size_bytes=0) for storage in tree.storages),
        tuple((tensor.name, tensor.role) for tensor in tree.resident),
    )
