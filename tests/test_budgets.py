"""Forms of budgets: what each means in bytes, where each is accepted, and that "min" always has an answer."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings

import scheduler as sc
from scheduler import zoo
from scheduler.errors import InvalidBudgetError
from scheduler.problem import Budget, Problem, read_budget
from tests.support.contract import SMALL_STEPS
from tests.support.examples import examples
from tests.support.oracle import least_peak
from tests.support.training_graphs import conv_net, uniform_chain


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (7, Budget("bytes", 7)),
        ("1.5 kB", Budget("bytes", 1500)),
        ("60 %", Budget("percent", share=Fraction(3, 5))),
        ("min", Budget("min")),
        (" Min ", Budget("min")),
        ("min+12.5%", Budget("min", share=Fraction(1, 8))),
        ("min + 10 %", Budget("min", share=Fraction(1, 10))),
        ("auto", Budget("auto")),
    ],
)
def test_a_budget_is_read(given: int | str, expected: Budget) -> None:
    assert read_budget(given) == expected


@pytest.mark.parametrize("budget", ["min10%", "min+", "min+%", "min+10", "min+1GiB", "min-5%", "minimum", "auto+1%"])
def test_text_that_is_nearly_a_budget_is_rejected(budget: str) -> None:
    with pytest.raises(InvalidBudgetError, match="cannot read"):
        read_budget(budget)


def test_min_counts_the_way_from_the_smallest_peak_to_that_of_saving_everything() -> None:
    assert [read_budget(text).resolve(100, 200, lambda: 140) for text in ("min", "min+10%", "min+100%")] == [
        140,
        146,
        200,
    ]


@settings(max_examples=examples(25))
@given(graph=SMALL_STEPS)
def test_min_is_solved_at_or_above_the_least_peak_of_all_schedules(graph: sc.Graph) -> None:
    for reorder in (True, False):
        solution = sc.solve(graph, "min", reorder=reorder, time_limit=5.0)
        assert solution.schedule is not None
        assert solution.peak_bytes is not None
        least = least_peak(graph.to_dict(), "any" if reorder else "input order")
        assert least <= solution.peak_bytes <= solution.budget_bytes <= solution.baseline_peak_bytes


def test_min_of_a_uniform_chain_is_four_sizes() -> None:
    # The last backward has input, output, and both gradients; the resident input is one more outside the first layer.
    for layers in (3, 8):
        assert sc.solve(uniform_chain(layers), "min", time_limit=2.0).budget_bytes == 16
        whole = Problem(uniform_chain(layers), 0).baseline.peak_bytes
        assert sc.solve(uniform_chain(layers), "min+50%", time_limit=2.0).budget_bytes == 16 + (whole - 16) // 2


@pytest.mark.parametrize("name", ["mobilenet", "random_layered", "transformer", "uniform_chain", "unet"])
def test_min_is_solved_for_graphs_of_the_zoo(name: str) -> None:
    solution = sc.solve(getattr(zoo, name)(), "min", time_limit=1.0)
    assert solution.schedule is not None
    assert solution.peak_bytes is not None
    assert solution.peak_bytes <= solution.budget_bytes < solution.baseline_peak_bytes


@pytest.mark.parametrize("call", [lambda g: sc.solve(g, "auto"), lambda g: sc.frontier(g, ["auto"])])
def test_auto_has_no_meaning_for_a_graph_alone(call: object) -> None:
    with pytest.raises(InvalidBudgetError, match=r'"auto" is the free memory of the device .* give bytes'):
        call(uniform_chain(3))  # type: ignore[operator]


def test_a_frontier_takes_all_forms() -> None:
    rows = sc.frontier(uniform_chain(8), ["min", "min+50%", "100%"], time_limit=5.0)
    assert [row.budget_bytes for row in rows] == [16, 28, 40]
    assert all(row.schedule is not None for row in rows)


def test_a_comparison_takes_all_forms_and_finds_its_rows_again(tmp_path: object) -> None:
    path = f"{tmp_path}/rows.jsonl"
    graph = conv_net(4)
    table = sc.compare([graph], ["min", "min+50%"], ["auto", "save-all"], time_limit=2.0, path=path)
    assert [(row.budget, row.solver, row.status in ("OPTIMAL", "FEASIBLE")) for row in table] == [
        ("min", "auto", True),
        ("min", "save-all", False),
        ("min+50%", "auto", True),
        ("min+50%", "save-all", False),
    ]
    ran: list[int] = []
    again = sc.compare(
        [graph], ["min", "min+50%"], ["auto", "save-all"], time_limit=2.0, path=path, progress=lambda *_: ran.append(1)
    )
    assert not ran
    assert [row.budget_bytes for row in again] == [row.budget_bytes for row in table]


def test_a_problem_with_another_budget_keeps_what_its_graph_has_cost_to_find_out() -> None:
    problem = Problem(conv_net(4), 100)
    known = problem.baseline
    other = problem.changed(budget_bytes=200, starts=(problem.save_everything,))
    assert (other.budget_bytes, other.starts) == (200, (problem.save_everything,))
    assert other.baseline is known
    with_another_graph = problem.changed(graph=conv_net(5))
    assert with_another_graph.baseline.time == Problem(conv_net(5), 100).baseline.time != known.time
