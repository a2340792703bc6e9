"""Plans: what is written reads back, and what was changed is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import scheduler as sc
from scheduler.errors import PlanClaimError, PlanError, PlanFormatError, PlanMismatchError
from scheduler.plan import plan_schema
from tests.support.plans import twice_plan
from tests.support.training_graphs import conv_net, uniform_chain


@pytest.fixture(scope="module")
def plan() -> sc.Plan:
    return sc.make_plan(conv_net(3), "80%")


def test_a_saved_plan_loads_as_the_same_plan(plan: sc.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert sc.Plan.load(tmp_path / "plan.json") == plan


def test_the_file_keeps_to_the_schema_that_ships(plan: sc.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    jsonschema.Draft202012Validator.check_schema(plan_schema())
    jsonschema.validate(json.loads((tmp_path / "plan.json").read_text()), plan_schema())


def test_claims_are_those_of_the_simulation(plan: sc.Plan) -> None:
    simulated = sc.simulate(plan.graph, plan.schedule)
    assert (plan.time, plan.peak_bytes, plan.saved) == (simulated.time, simulated.peak_bytes, simulated.saved)
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.overhead == pytest.approx(plan.time / plan.baseline_time - 1)


def leaves(data: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(data, dict):
        return [found for key, value in data.items() for found in leaves(value, (*path, key))]
    if isinstance(data, list) and data:
        return [found for key, value in enumerate(data) for found in leaves(value, (*path, key))]
    return [path]


def changed(value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 1.01 + 1e-3
    if isinstance(value, str):
        return value[:-1] + ("0" if value[-1:] != "0" else "1")
    return "changed"


def test_no_single_value_of_a_plan_file_can_be_changed(plan: sc.Plan) -> None:
    data = json.loads(json.dumps(plan.to_dict()))
    places = leaves(data)
    assert len(places) > 250
    for place in places:
        edited = json.loads(json.dumps(data))
        inside = edited
        for key in place[:-1]:
            inside = inside[key]
        inside[place[-1]] = changed(inside[place[-1]])
        with pytest.raises(PlanError):
            sc.Plan.from_dict(edited)


def edit(plan: sc.Plan, change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    data = json.loads(json.dumps(plan.to_dict()))
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda d: d["claims"].update(peak_bytes=1), PlanClaimError, "states peak_bytes=1, but simulation gives"),
        (lambda d: d["claims"].update(time=1.0), PlanClaimError, "but simulation gives"),
        (lambda d: d["claims"].update(overhead=0.0), PlanClaimError, "states overhead=0.0"),
        (lambda d: d.update(budget_bytes=1), PlanClaimError, "over the budget"),
        (lambda d: d["proof"].update(bound=1e9, gap=0.0), PlanClaimError, "bound"),
        (lambda d: d["schedule"].pop(3), PlanError, "but simulation gives|breaks a rule"),
        (lambda d: d["schedule"].insert(0, "+nothing"), PlanClaimError, 'no operation "nothing"'),
        (lambda d: d.update(version=1), PlanFormatError, "version must be 2, got 1: make the plan again"),
        (lambda d: d.update(format="other"), PlanFormatError, "not a plan"),
        (lambda d: d.update(graph_digest="0" * 64), PlanMismatchError, "graph_digest"),
        (lambda d: d.update(structure_digest="0" * 64), PlanMismatchError, "structure_digest"),
        (lambda d: d.update(note="hello"), PlanMismatchError, "changed after it was written"),
        (lambda d: d["graph"]["operations"][0].update(time=0.5), PlanMismatchError, "graph_digest"),
        (lambda d: d.update(schedule=None), PlanFormatError, "schedule"),
        (lambda d: d.update(saved=[1]), PlanFormatError, "saved"),
        (lambda d: d["proof"].update(bound="x"), PlanFormatError, "bound"),
        (lambda d: d["proof"].update(bound=10**400), PlanFormatError, "bound"),
        (lambda d: d["proof"].update(solver="\x1b[31m"), PlanFormatError, "printable text"),
        (lambda d: d.pop("claims"), PlanFormatError, "claims"),
    ],
)
def test_an_edited_plan_is_refused_with_the_reason(
    plan: sc.Plan, change: Callable[[dict[str, Any]], object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        sc.Plan.from_dict(edit(plan, change))


def test_a_bool_is_not_a_claim_though_it_equals_the_number() -> None:
    data = sc.make_plan(uniform_chain(2), "100%").to_dict()
    assert data["claims"]["overhead"] == False == 0.0  # type: ignore[index]  # noqa: E712
    data["claims"]["overhead"] = False  # type: ignore[index]
    with pytest.raises(PlanClaimError, match="states overhead=False"):
        sc.Plan.from_dict(data)


def test_a_plan_for_another_graph_is_refused_and_says_if_only_costs_differ(plan: sc.Plan) -> None:
    plan.verify(conv_net(3))
    with pytest.raises(PlanMismatchError, match="another graph"):
        plan.verify(conv_net(4))
    faster = plan.graph.to_dict()
    faster["operations"][0]["time"] = 7.0  # type: ignore[index]
    with pytest.raises(PlanMismatchError, match="same structure"):
        plan.verify(sc.Graph.from_dict(faster))


def test_a_plan_file_that_is_not_one_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}")
    with pytest.raises(PlanFormatError, match=str(path)):
        sc.Plan.load(path)


def test_a_plan_is_shown_in_one_line() -> None:
    assert repr(twice_plan()) == (
        "Plan('uniform chain of 2', FEASIBLE, 16 B of 17 B, overhead 16.67%, solver='by hand')"
    )


def test_the_summary_of_a_plan_has_one_fact_per_line() -> None:
    # Saving everything adds 12 bytes to the 4 resident ones: 16 bytes are 100 %, 17 are 108.3 %.
    assert twice_plan().summary().splitlines() == [
        "plan          uniform chain of 2, operations: 5 operations",
        "status        FEASIBLE: fits, gap above 1e-6: use it, or allow more time to close the gap",
        "budget        17 B (108.3%)",
        "resident      4 B: activation 4 B",
        "peak          16 B (100.0%) instead of 16 B",
        "time          7 s, overhead 16.6667%",
        "bound         6 s, gap 14.2857% in any order",
        "global bound  6 s, gap 14.2857% over all schedules",
        "smallest      16 B (100.0%) is the smallest peak known",
        "solver        by hand, 0.25 s",
        "saved         4 B in 1 tensors: x2",
        "recomputed    1 runs of 1 operations: f0",
    ]


def test_the_smallest_known_peak_is_kept_and_must_be_possible(tmp_path: Path) -> None:
    plan = sc.make_plan(uniform_chain(8), "100%")
    assert (plan.peak_bytes, plan.smallest_peak_bytes) == (40, 16)  # ten sizes of 4 bytes, and four
    plan.save(tmp_path / "plan.json")
    assert sc.Plan.load(tmp_path / "plan.json") == plan
    for impossible in (15, 41):
        with pytest.raises(
            PlanClaimError, match=rf"between the floor of 16 bytes and the peak of 40, got {impossible}"
        ):
            replace(plan, smallest_peak_bytes=impossible).verify()
    unknown = replace(plan, smallest_peak_bytes=None)
    assert "smallest" not in unknown.summary()
    assert sc.Plan.from_dict(unknown.to_dict()) == unknown


def test_a_plan_keeps_what_capturing_alone_costs(tmp_path: Path) -> None:
    plan = replace(sc.make_plan(uniform_chain(8), "100%"), captured_overhead=0.125)
    assert "captured      takes 12.50% longer than plain PyTorch" in plan.summary().splitlines()
    plan.save(tmp_path / "plan.json")
    assert sc.Plan.load(tmp_path / "plan.json") == plan
    jsonschema.validate(plan.to_dict(), plan_schema())


def test_long_lists_of_names_are_cut_in_a_summary() -> None:
    graph = uniform_chain(9)
    plan = sc.make_plan(graph, "100%", solver="save-all")
    assert plan.summary().splitlines()[-2:] == [
        "saved         36 B in 9 tensors: x1, x2, x3, x4, x5, and 4 more",
        "recomputed    0 runs of 0 operations",
    ]


def test_there_is_no_plan_without_a_schedule() -> None:
    graph = uniform_chain(4)
    solution = sc.solve(graph, graph.resident_bytes)
    with pytest.raises(PlanClaimError, match="a plan needs a solution with a schedule, got INFEASIBLE"):
        sc.Plan.of(graph, solution)
