"""The plan of a step for a device: the fastest whose tensors fit, and the segments of the allocator too."""

from __future__ import annotations

import warnings

from scheduler.api import TRAINING_GAP, make_plan
from scheduler.errors import BudgetTooSmallError, OutOfTimeError, SlowPlanWarning
from scheduler.graph import Graph
from scheduler.plan import Plan
from scheduler.planning.fit_answers import Need
from scheduler.planning.levers import PlainStep
from scheduler.solvers.deadline import Deadline

_PLANNING_SHARE = 0.4
"""Share of the remaining time for the search for a plan."""
_PLANNING_SECONDS = 10.0
_TRIES = 3
"""Plans within smaller and smaller budgets, until the segments of the allocator fit too."""
_STEP = 1.5
"""How far a budget is lowered, as a multiple of what the segments exceed: they shrink by less than the budget."""


def find_plan(graph: Graph, step: PlainStep, deadline: Deadline) -> tuple[Plan | None, Need | None]:
    """Return the fastest plan that fits, or one with a small peak, and what it needs; no plan if none is needed."""
    if step.need.fits:
        return None, step.need
    usable = step.need.usable_bytes
    budget = known = usable
    plan, need = None, None
    for _ in range(_TRIES):
        seconds = max(1.0, min(_PLANNING_SECONDS, _PLANNING_SHARE * deadline.remaining))
        try:
            plan = _make_plan(graph, budget, seconds)
        except OutOfTimeError:
            break
        except BudgetTooSmallError:
            if plan is None:
                break
            budget = (budget + known) // 2
            continue
        need = Need.of(graph, plan.schedule, step.device, step.temporary_bytes)
        if need.fits or need.optimizer_step_bytes > usable:
            return plan, need
        known = budget
        budget -= max(int(_STEP * (need.reserved_bytes - usable)), usable // 200)
    if plan is None:
        seconds = max(1.0, min(_PLANNING_SECONDS, _PLANNING_SHARE * deadline.remaining))
        plan = _make_plan(graph, "min", seconds)
        need = Need.of(graph, plan.schedule, step.device, step.temporary_bytes)
    return plan, need


def _make_plan(graph: Graph, budget: int | str, seconds: float) -> Plan:
    with warnings.catch_warnings():  # the answer says what a plan costs
        warnings.simplefilter("ignore", SlowPlanWarning)
        return make_plan(graph, budget, time_limit=seconds, gap=TRAINING_GAP)
