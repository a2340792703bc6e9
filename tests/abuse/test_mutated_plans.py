"""Plans of which anything was altered: all refused, with the reason."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

import scheduler as sc
from scheduler.errors import PlanError, SchedulerError
from tests.abuse.hostile import edited, places
from tests.abuse.tally import BOOK
from tests.support.plans import layered_plan, oddly_named_plan, twice_plan, viewing_plan
from tests.support.training_graphs import conv_net

pytestmark = pytest.mark.abuse

PLANS = {
    "solved": lambda: sc.make_plan(conv_net(3), "80%"),
    "saves everything": lambda: sc.make_plan(conv_net(1), "100%"),
    "by hand": twice_plan,
    "layers": layered_plan,
    "views": viewing_plan,
    "odd names": oddly_named_plan,
}
REASONS = re.compile(
    r"differs from the graph in the plan|changed after it was written|the plan states .*, but simulation gives"
    r"|breaks a rule|over the budget|must be a lower bound|must be between|must not be above"
    r"|plan version must be|not a plan"
    r"|JSON object|JSON list|printable text|a finite number|must be an int|must be OPTIMAL or FEASIBLE"
    r"|granularity must|an action must be|unknown field|lacks a field|must be text|non-empty text|sequence of names"
    r"|names an unknown|neither resident nor produced|must be printable|must be a bool|\"forward\" or \"backward\""
    r"|produces nothing|are called|produces the same tensor twice|reads and produces|needs at least one"
    r"|do not produce|first in its task|no operation may produce it|comes after backward|format must be"
    r"|version 1 are no longer|role of tensor|before .* produces it|add up to"
)


def alterations(value: object) -> Iterator[object]:
    """Yield other values for one: near ones of its kind, and those of other kinds."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + 1, -1, value * 2 + 1, 1e300)
        if value:
            yield from (0, value * (1 + 2**-50))
    elif isinstance(value, str):
        yield from (value + "x", value[:-1], value.swapcase() if value.swapcase() != value else "", value[::-1] + "-")
        if re.fullmatch("[0-9a-f]{64}", value):
            yield "0" * 64
    for other in (None, True, "", 0, -1, 0.5, [], {}, [None], "\ud800"):
        if type(other) is not type(value) and not (isinstance(value, float) and other == value):
            yield other


def refused(plan: object, what: object) -> None:
    tally = BOOK.of("mutated plans")
    error = tally.attempt(sc.Plan.from_dict, plan)
    tally.accept(isinstance(error, PlanError), what)
    tally.accept(REASONS.search(str(error)) is not None, (what, str(error)))


def plain(plan: sc.Plan) -> Any:
    return json.loads(json.dumps(plan.to_dict()))


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_with_any_value_altered_is_refused_with_the_reason(name: str) -> None:
    data = plain(PLANS[name]())
    for place in places(data):
        value = data
        for key in place:
            value = value[key]
        for other in alterations(value):
            if other == value and isinstance(other, bool) == isinstance(value, bool):
                continue
            refused(edited(data, place, "replace", other), (place, value, other))


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_with_any_entry_dropped_doubled_swapped_or_renamed_is_refused(name: str) -> None:
    data = plain(PLANS[name]())
    for place in places(data):
        for way in ("drop", "double", "rename", "swap"):
            other = edited(data, place, way, None)
            if other != data:  # two equal neighbors were swapped
                refused(other, (place, way))


def resealed(data: Any) -> Any:
    """The plan with digests made for what it now holds, as a forger would: they are no secret."""
    graph = sc.Graph.from_dict(data["graph"])
    data = {**data, "graph_digest": graph.digest, "structure_digest": graph.structure_digest}
    del data["digest"]
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return {**data, "digest": hashlib.sha256(text.encode()).hexdigest()}


JUDGED = [("budget_bytes",), ("saved",), ("schedule",)]
JUDGED += [("claims", key) for key in ("time", "peak_bytes", "overhead", "baseline_time", "baseline_peak_bytes")]
JUDGED += [("proof", key) for key in ("status", "gap", "global_gap")]


@pytest.mark.parametrize("place", JUDGED, ids=lambda place: place[-1])
@pytest.mark.parametrize("name", ["solved", "by hand", "layers"])
def test_a_claim_that_the_judge_can_check_is_refused_even_with_digests_made_anew(
    name: str, place: tuple[str, ...]
) -> None:
    """Smaller budgets, other claims, fewer runs; bounds can only be checked for not contradicting the judge."""
    data = plain(PLANS[name]())
    refused_as_whole = BOOK.of("mutated plans").attempt(sc.Plan.from_dict, resealed(data))
    assert not isinstance(refused_as_whole, SchedulerError)
    value = data
    for key in place:
        value = value[key]
    if isinstance(value, list):
        others: list[object] = [
            [*value[:i], *value[i + 1 :]] for i, entry in enumerate(value) if place == ("saved",) or entry[0] == "+"
        ]
    elif place == ("budget_bytes",):
        others = [data["claims"]["peak_bytes"] - 1, 0]
    elif isinstance(value, str):
        others = ["OPTIMAL" if value == "FEASIBLE" else "FEASIBLE"]
    else:
        others = [value * 0.99, value + 1, 0] if value else [1, 0.5]
    for other in others:
        refused(resealed(edited(data, place, "replace", other)), (place, value, other))
