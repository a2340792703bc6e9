"""PuLP's pitfalls: the point found and the proven bound are kept apart."""

from __future__ import annotations

import math
import subprocess
import sys
import tomllib
from random import Random

import numpy as np
import pulp
import pytest

from scheduler.solvers.deadline import Deadline
from scheduler.solvers.integer_program import IntegerProgram, MilpResult, TimeIsUpError, Variable, _cbc, is_set
from tests.support.deadlines import CountedDeadline
from tests.support.paths import ROOT


def knapsack(items: int) -> tuple[IntegerProgram, list[Variable]]:
    """Cover at least half of the weights 3, 5, 7, ... at the least cost 4, 5, 6, ..."""
    program = IntegerProgram("cover")
    chosen = [program.binary("item", float(4 + i)) for i in range(items)]
    weights = [3.0 + 2 * i for i in range(items)]
    program.at_least("cover", zip(chosen, weights, strict=True), sum(weights) / 2)
    return program, chosen


def cheapest_cover(items: int) -> float:
    weights = [3.0 + 2 * i for i in range(items)]
    return min(
        float(sum(4 + i for i in range(items) if mask >> i & 1))
        for mask in range(2**items)
        if sum(w for i, w in enumerate(weights) if mask >> i & 1) >= sum(weights) / 2
    )


def test_a_program_that_is_not_built_by_its_deadline_claims_nothing() -> None:
    program = IntegerProgram("late", Deadline(0))
    item = program.binary("item", 1.0)
    with pytest.raises(TimeIsUpError):
        program.at_least("cover", [(item, 1.0)], 1)
    result = program.minimize(Deadline(20))
    assert (result.found, result.infeasible, result.bound) == (False, False, -math.inf)
    assert program.relax(Deadline(20), "cover") is None


def test_bound_and_objective_meet_at_the_optimum_found_by_enumeration() -> None:
    program, chosen = knapsack(10)
    result = program.minimize(Deadline(10))
    assert result.found
    assert result.objective == cheapest_cover(10)
    assert result.bound == pytest.approx(result.objective)
    assert sum(4 + i for i, variable in enumerate(chosen) if is_set(variable)) == result.objective


def test_a_relaxation_takes_rows_that_its_point_breaks() -> None:
    program = IntegerProgram("relaxed")
    x, y, free = program.fraction("x", 1.0), program.fraction("y", 2.0), program.fraction("free")
    program.at_least("cover", [(x, 1.0), (y, 1.0)], 1)
    # x = 1 until the first row; then both are a half, since "free", which no row has had so far, may be 0.
    rows = [{"half": ([(y, 1.0), (free, -1.0)], 0.5)}, {"loose": ([(x, 1.0), (y, 1.0)], 0.5)}]
    relaxed = program.relax(Deadline(20), "cover", rows)
    assert relaxed is not None
    assert (relaxed.objective, relaxed.binding) == (pytest.approx(1.5), ["half"])
    assert program.minimize(Deadline(20)).objective == pytest.approx(1.5)


@pytest.mark.parametrize("only_bound", [False, True])
def test_a_count_is_an_integer_though_what_it_counts_may_be_parts(only_bound: bool) -> None:
    def optimum(most: int) -> MilpResult:
        program = IntegerProgram("count")
        parts = [program.fraction("part", 1.0) for _ in range(4)]
        program.at_least("cover", [(part, 1.0) for part in parts], 2.5)
        if most:
            program.count("count", [(part, 1.0) for part in parts], most)
        return program.minimize(Deadline(20), only_bound=only_bound)

    assert optimum(0).bound == pytest.approx(2.5)
    assert optimum(4).bound == pytest.approx(3.0)
    assert optimum(2).infeasible


def test_an_infeasible_program_is_distinguished_from_one_out_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", "/no such program")
    program, _ = knapsack(4)
    program.at_most("nothing", [(variable, 1.0) for variable in program.variables], 0)
    impossible = program.minimize(Deadline(10))
    assert impossible.infeasible
    assert impossible.bound == math.inf
    late = knapsack(4)[0].minimize(Deadline(0))
    assert not late.infeasible
    assert not late.found
    assert late.bound == -math.inf


def test_a_bound_at_the_time_limit_is_still_below_the_optimum() -> None:
    program, _ = knapsack(16)
    result = program.minimize(Deadline(0.001))
    assert result.bound <= cheapest_cover(16) <= result.objective


def test_cbc_proves_no_more_than_its_relaxation(monkeypatch: pytest.MonkeyPatch) -> None:
    program, _ = knapsack(10)
    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    result = program.minimize(Deadline(20))
    assert result.found
    assert result.objective == cheapest_cover(10)
    assert result.bound <= result.objective


def test_a_program_that_highs_refuses_is_not_taken_for_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", "/no such program")
    program = IntegerProgram("refused")
    program.at_least("row", [(program.binary("x", 1.0), 1e16)], 1e16)
    assert program.minimize(Deadline(20)) == MilpResult(False, False, -math.inf, math.inf)
    assert program.relax(Deadline(20), "row") is None


def test_without_highs_and_cbc_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    program, _ = knapsack(4)
    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", "/no such program")
    assert program.minimize(Deadline(20)) == MilpResult(False, False, -math.inf, math.inf)


def test_highs_presolves_unless_that_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[object] = []
    make = pulp.HiGHS.__init__

    def look(self: pulp.HiGHS, **given: object) -> None:
        options.append(given.get("presolve"))
        make(self, **given)

    monkeypatch.setattr(pulp.HiGHS, "__init__", look)
    for presolve, option in ((True, "choose"), (False, "off")):
        program, _ = knapsack(12)
        assert program.minimize(Deadline(20), presolve=presolve).objective == pytest.approx(cheapest_cover(12))
        assert options[-1] == option


def test_a_program_without_variables_is_feasible_if_its_rows_hold() -> None:
    holds, breaks = IntegerProgram("holds"), IntegerProgram("breaks")
    holds.at_most("row", [], 1)
    breaks.at_most("row", [], -1)
    assert holds.minimize(Deadline(1)).found
    assert breaks.minimize(Deadline(1)).infeasible


def test_a_positive_lower_limit_is_infeasible_without_variables() -> None:
    program = IntegerProgram("reach")
    program.at_least("row", [], 1)
    assert program.minimize(Deadline(1)).infeasible


def test_a_search_that_is_stopped_returns_what_is_proven_so_far() -> None:
    # A market split (Cornuejols and Dawande 1998): small, but too hard for branch and bound.
    random = np.random.default_rng(1)
    program = IntegerProgram("market_split")
    chosen = [program.binary("market", 1.0) for _ in range(50)]
    for row in random.integers(0, 100, size=(6, 50)).tolist():
        for bound in (program.at_least, program.at_most):
            bound("split", zip(chosen, map(float, row), strict=True), sum(row) // 2)
    # HiGHS alone would go on for hours; it looks at the deadline as it searches.
    result = program.minimize(CountedDeadline(1000))
    assert not result.infeasible
    assert 0 <= result.bound <= 50


def market_split(seed: int = 0) -> IntegerProgram:
    """Meet five sums of random weights exactly, at least cost of slack: hours for any branch and bound."""
    random = Random(seed)
    program = IntegerProgram("market_split")
    chosen = [program.binary("shop", 0.0) for _ in range(40)]
    for _ in range(5):
        weights = [float(random.randrange(100)) for _ in chosen]
        short, over = program.fraction("short", 1000.0), program.fraction("over", 1000.0)
        terms = [*zip(chosen, weights, strict=True), (short, 1000.0), (over, -1000.0)]
        program.at_least("sum", terms, sum(weights) // 2)
        program.at_most("sum", terms, sum(weights) // 2)
    return program


def hide_highs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)


@pytest.mark.parametrize("backend", ["HiGHS", "CBC"])
def test_pulp_reports_optimal_after_a_time_limit_and_is_not_trusted(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "CBC":
        hide_highs(monkeypatch)
    program = market_split()
    result = program.minimize(Deadline(0.5))
    assert pulp.LpStatus[program.problem.status] == "Optimal"
    assert result.found
    assert not result.infeasible
    assert result.bound < result.objective - 1


def test_cbc_reports_optimal_within_a_tolerance_and_is_given_none(monkeypatch: pytest.MonkeyPatch) -> None:
    loose, _ = knapsack(12)
    problem = loose.for_cbc()
    problem.solve(_cbc(msg=False, gapRel=0.5))
    assert pulp.LpStatus[problem.status] == "Optimal"
    hide_highs(monkeypatch)
    tight = knapsack(12)[0].minimize(Deadline(20))
    assert tight.objective == cheapest_cover(12) <= pulp.value(problem.objective)
    # The bound is that of the relaxation, so the gap stays open although CBC reports "Optimal".
    assert tight.bound < tight.objective


def test_values_within_a_tolerance_of_an_integer_count_as_integers() -> None:
    (variable,) = knapsack(1)[1]
    for value, expected in ((0.9999997, True), (1.0000002, True), (3e-7, False), (-1e-9, False), (None, False)):
        variable.value = value
        assert is_set(variable) is expected


def test_the_version_of_pulp_is_bounded() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (needed,) = [line for line in pyproject["project"]["dependencies"] if line.startswith("pulp")]
    assert "<4" in needed
    assert pulp.__version__.startswith("3.")


_FIRST_USE = """
import gc, weakref

class Model: ...

def found():
    model = Model()
    import scheduler.solvers.integer_program
    return weakref.ref(model)

model = found()
gc.collect()
print(model())
"""


def test_the_first_import_keeps_nothing_that_its_callers_hold() -> None:
    run = subprocess.run([sys.executable, "-c", _FIRST_USE], capture_output=True, text=True, check=True)
    assert run.stdout == "None\n"
