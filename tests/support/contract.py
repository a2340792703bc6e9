"""What every solver owes its callers on a small graph, checked against the exhaustive oracle.

The tests of a solver of your own can inherit the contract:

    @given(data=st.data())
    def test_my_solver_keeps_the_contract(data: st.DataObject) -> None:
        case = draw_case(data, data.draw(SMALL_STEPS))
        for reorder in (True, False):
            check_answer(case, "my solver", reorder=reorder)
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

import scheduler as sc
from scheduler.errors import MissingExtraError, UnsuitableProblemError
from scheduler.schedule import follows_input_order
from scheduler.solvers.late_order import late_order
from tests.support.oracle import least_peak, optimum
from tests.support.strategies import chains, graphs, joint_graphs

SMALL_STEPS = st.one_of(graphs(max_operations=7), joint_graphs(max_layers=2))
SMALL_CHAINS = chains(max_layers=2, max_modes=0)


@dataclass(frozen=True)
class Case:
    """A graph and a budget, with the oracle's answers for them.

    Attributes
    ----------
    any_order, input_order, late_order : float or None
        Least time of any schedule within the budget, and of any that keeps the input order or the
        late order; None if none fits.
    """

    graph_or_chain: sc.Graph | sc.Chain
    budget_bytes: int
    any_order: float | None
    input_order: float | None
    late_order: float | None

    @property
    def graph(self) -> sc.Graph:
        """The graph, or the graph to which the chain lowers."""
        return self.graph_or_chain.graph if isinstance(self.graph_or_chain, sc.Chain) else self.graph_or_chain


def draw_case(data: st.DataObject, graph_or_chain: sc.Graph | sc.Chain) -> Case:
    """Draw a budget, from just below the smallest peak to that of saving everything, and ask the oracle once."""
    graph = graph_or_chain.graph if isinstance(graph_or_chain, sc.Chain) else graph_or_chain
    plain = graph.to_dict()
    peak = sc.simulate(graph, sc.solve(graph, 2**40, solver="save-all").schedule).peak_bytes
    least = least_peak(plain, "any")
    budget = data.draw(st.integers(max(0, least - 2), max(least, peak)), label="budget")
    late = late_order(graph)
    in_input_order = optimum(plain, budget, "input order")
    in_late_order = in_input_order if late is graph else optimum(late.to_dict(), budget, "input order")
    return Case(graph_or_chain, budget, optimum(plain, budget, "any"), in_input_order, in_late_order)


def solve_or_skip(graph_or_chain: sc.Graph | sc.Chain, budget: int, **options: object) -> sc.Solution | None:
    """Return the answer; None from a solver that refuses the kind of graph, or lacks its extra."""
    try:
        return sc.solve(graph_or_chain, budget, time_limit=20.0, **options)
    except (MissingExtraError, UnsuitableProblemError):
        return None


def check_answer(case: Case, solver: str, *, reorder: bool, gap: float = 0.0) -> sc.Solution | None:
    """Check the answer of a solver, its bounds and its status; return it, or None if the solver refuses the graph."""
    try:
        solution = solve_or_skip(case.graph_or_chain, case.budget_bytes, solver=solver, reorder=reorder, gap=gap)
        if solution is not None:
            _check(case, solution, reorder=reorder)
    except BaseException as error:
        error.add_note(f"solver {solver!r}, reorder={reorder}, gap={gap}, budget {case.budget_bytes}")
        raise
    return solution


def _check(case: Case, solution: sc.Solution, *, reorder: bool) -> None:
    if solution.status is sc.Status.INFEASIBLE:
        assert (case.any_order if reorder else case.input_order) is None
    if case.any_order is not None:
        assert solution.global_bound <= case.any_order * (1 + 1e-9)
    if solution.schedule is None:
        return
    simulated = sc.simulate(case.graph, solution.schedule)
    assert (simulated.time, simulated.peak_bytes) == (solution.time, solution.peak_bytes)
    assert simulated.peak_bytes <= case.budget_bytes
    assert reorder or follows_input_order(case.graph, solution.schedule)
    optima = {"any order": case.any_order, "input order": case.input_order, "late order": case.late_order}
    if solution.search_space not in optima:
        # The space is the solver's own: nothing here can check its bound, only its schedule and `global_bound`.
        assert case.any_order is not None
        assert solution.bound <= solution.time
        assert case.any_order <= solution.time * (1 + 1e-9)
        return
    best = optima[solution.search_space]
    assert best is not None
    assert solution.bound <= best * (1 + 1e-9)
    assert best <= solution.time * (1 + 1e-9)
    if solution.status is sc.Status.OPTIMAL:
        assert solution.time <= best * (1 + 2e-6)
