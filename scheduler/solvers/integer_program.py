"""Integer programs through PuLP, with the point found and the proven bound kept apart.

The status of PuLP 3.3 is "Optimal" even after a time limit and for answers within a tolerance,
so it is never trusted alone: the bound is read from the solver or from an LP relaxation, and the
caller computes the gap.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import pulp

from scheduler.solvers.deadline import Deadline

for _solver in vars(pulp).values():
    # PuLP keeps the errors of importing what is not installed, and their tracebacks all frames that were on the
    # stack: a model in one of them would never be freed.
    if isinstance(_error := getattr(_solver, "err", None), BaseException):
        _error.__traceback__ = None

Terms = Iterable[tuple[pulp.LpVariable, float]]
Row = tuple[Sequence[tuple[pulp.LpVariable, float]], float]
"""Sum of coefficient x variable, and its least value."""


@dataclass(frozen=True, slots=True)
class MilpResult:
    """The result of a minimization.

    Attributes
    ----------
    found : bool
        Whether the variables hold a feasible point.
    infeasible : bool
        Whether it is proven that there is none.
    bound : float
        Proven lower bound on the objective; -inf if nothing is known.
    objective : float
        Objective of the point found, computed from the variables; inf if there is none.
    """

    found: bool
    infeasible: bool
    bound: float
    objective: float


@dataclass(frozen=True)
class Relaxed:
    """The solution of a linear relaxation; the variables hold its point.

    Attributes
    ----------
    objective : float
    prices : list of float
        By how much the objective falls per unit of the limit of each row that was asked for.
    binding : list
        Keys of the added rows that hold with equality.
    """

    objective: float
    prices: list[float]
    binding: list[Any]


ROWS_PER_SECOND = 20_000
"""Rough speed of the presolve of HiGHS, which cannot be interrupted."""
TOLERANCE = 1e-6
ONLY_BOUND: dict[str, object] = {
    "mip_heuristic_effort": 0.0,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_root_reduced_cost": False,
    "mip_pscost_minreliable": 0,
}
"""Options of HiGHS without heuristics, which search in programs of their own, and without strong branching: where few
variables are integers and a relaxation takes long, both take longer than the whole search."""
ROWS_PER_LOOK = 32
"""While rows are added, the clock is read once for so many."""


class TimeIsUpError(Exception):
    """A program was not built by its deadline, and will not be solved."""


class _Highs(pulp.HiGHS):  # type: ignore[misc]  # PuLP has no types
    """PuLP's interface to HiGHS, but the program is passed in one piece: number by number takes seven times as long."""

    def buildSolverModel(self, lp: pulp.LpProblem) -> None:
        """Pass a program to be minimized to HiGHS, or raise `PulpSolverError` if it refuses it."""
        from highspy import HighsLp, HighsStatus, HighsVarType, MatrixFormat, kHighsInf

        variables, rows = lp.variables(), list(lp._constraints.values())
        for place, each in chain(enumerate(variables), enumerate(rows)):
            each.index = place
        terms = [[(variable.index, number) for variable, number in row.items() if number] for row in rows]
        program = HighsLp()
        program.num_col_, program.num_row_ = len(variables), len(rows)
        program.col_cost_ = [lp.objective.get(variable, 0.0) for variable in variables]
        program.col_lower_ = [variable.lowBound for variable in variables]
        program.col_upper_ = [variable.upBound for variable in variables]
        program.row_lower_ = [-kHighsInf if row.getLb() is None else row.getLb() for row in rows]
        program.row_upper_ = [kHighsInf if row.getUb() is None else row.getUb() for row in rows]
        program.a_matrix_.format_ = MatrixFormat.kRowwise
        program.a_matrix_.start_ = list(accumulate(map(len, terms), initial=0))
        program.a_matrix_.index_ = [column for row in terms for column, _ in row]
        program.a_matrix_.value_ = [number for row in terms for _, number in row]
        if self.mip:
            kinds = {pulp.LpInteger: HighsVarType.kInteger, pulp.LpContinuous: HighsVarType.kContinuous}
            program.integrality_ = [kinds[variable.cat] for variable in variables]
        if lp.solverModel.passModel(program) == HighsStatus.kError:
            raise pulp.PulpSolverError("HiGHS refuses the program: a number of it is too large or not finite")


class IntegerProgram:
    """An integer program under construction: minimize a sum, subject to named rows.

    Parameters
    ----------
    name : str
    deadline : Deadline, optional
        Adding a row after it raises `TimeIsUpError`.
    """

    def __init__(self, name: str, deadline: Deadline | None = None) -> None:
        self._deadline, self._is_complete = deadline, True
        self.problem = pulp.LpProblem(name, pulp.LpMinimize)
        self.cost: list[tuple[pulp.LpVariable, float]] = []
        self._variables: list[pulp.LpVariable] = []
        self._rows: list[pulp.LpConstraint] = []

    def binary(self, name: str, cost: float = 0.0) -> pulp.LpVariable:
        """Add a variable in {0, 1}."""
        return self._variable(name, cost, pulp.LpInteger)

    def fraction(self, name: str, cost: float = 0.0) -> pulp.LpVariable:
        """Add a variable in [0, 1]."""
        return self._variable(name, cost, pulp.LpContinuous)

    def count(self, name: str, terms: Terms, most: int) -> None:
        """Add the rows that say: sum of coefficient x variable is an integer from 0 to `most`."""
        number = self._variable(name, 0.0, pulp.LpInteger, most)
        same = [(number, -1.0), *terms]
        self.at_least(name, same, 0)
        self.at_most(name, same, 0)

    def at_least(self, name: str, terms: Terms, least: float) -> None:
        """Add the row: sum of coefficient x variable >= least."""
        self._row(name, terms, pulp.LpConstraintGE, least)

    def at_most(self, name: str, terms: Terms, most: float) -> None:
        """Add the row: sum of coefficient x variable <= most."""
        self._row(name, terms, pulp.LpConstraintLE, most)

    def minimize(
        self,
        deadline: Deadline,
        *,
        absolute_gap: float = 0.0,
        target: float = -math.inf,
        most_nodes: float = math.inf,
        only_bound: bool = False,
        presolve: bool = True,
    ) -> MilpResult:
        """Solve by the deadline with HiGHS, or with CBC if HiGHS is missing or fails; if both do, nothing is known.

        The search ends when the objective exceeds the bound by at most `absolute_gap`, or with HiGHS is at most
        `target` or has taken `most_nodes` nodes. With `only_bound`, HiGHS takes no time to find points early. Without
        `presolve`, it begins with the relaxation at once, which pays where this is nearly integral.
        """
        if not self._is_complete:
            return MilpResult(False, False, -math.inf, math.inf)
        self.problem.setObjective(pulp.LpAffineExpression(self.cost))
        if not self._variables and not deadline.passed:
            return self._constant()
        if not deadline.passed and pulp.HiGHS(msg=False).available():
            with suppress(Exception):  # of any kind: it must not cost the answers of other solvers
                has_time = deadline.remaining * ROWS_PER_SECOND > len(self._rows)
                options: dict[str, object] = {"presolve": "choose" if presolve and has_time else "off"}
                options |= ONLY_BOUND if only_bound else {}
                return self._minimize_highs(deadline, absolute_gap, target, most_nodes, options)
        if not deadline.passed:
            with suppress(Exception):  # no CBC, or one that died
                return self._minimize_cbc(deadline, absolute_gap)
        return MilpResult(False, False, -math.inf, math.inf)

    def relax(
        self,
        deadline: Deadline,
        rows: str,
        broken: Iterable[Mapping[Any, Row]] = (),
        *,
        least_part: float = 0.0,
    ) -> Relaxed | None:
        """Solve the LP relaxation, and return the prices of rows whose names begin with a text, in their order.

        `broken` yields rows, with keys, that the variables' values break; they are added, and the relaxation is solved
        again, until they raise the objective by at most `least_part` of what all have raised it by. Those that then
        hold with equality stay in the program. Returns None if no point was found in time, or if HiGHS, which supplies
        the duals, is missing.
        """
        solver = _Highs(mip=False, msg=False, timeLimit=max(0.01, deadline.remaining), threads=1)
        if not self._is_complete or not self._variables or not solver.available():
            return None
        # PuLP leaves out variables that are in no row, and later rows may have them.
        cost = dict.fromkeys(self._variables, 0.0) | dict(self.cost)
        self.problem.setObjective(pulp.LpAffineExpression(list(cost.items())))
        with suppress(Exception):
            self.problem.solve(solver)
        if self.problem.sol_status != pulp.LpSolutionOptimal:
            return None
        added: dict[Any, Row] = {}
        first = objective = self._objective()
        for found in broken:
            added.update(found)
            if deadline.passed or not self._relax_again(list(found.values()), deadline):
                break
            before, objective = objective, self._objective()
            if objective - before <= least_part * (objective - first):
                break
        binding = [key for key, (terms, least) in added.items() if _value(terms) <= least + TOLERANCE]
        with suppress(TimeIsUpError):
            for key in binding:
                self.at_least("added", *added[key])
        return Relaxed(objective, [max(0.0, -row.pi) for row in self._rows if row.name.startswith(rows)], binding)

    def _relax_again(self, rows: Sequence[Row], deadline: Deadline) -> bool:
        """Solve the last LP relaxation with further rows, starting from its solution; return whether that succeeded."""
        from highspy import HighsModelStatus, kHighsInf

        model = self.problem.solverModel
        starts = list(accumulate((len(terms) for terms, _ in rows), initial=0))
        columns = [variable.index for terms, _ in rows for variable, _ in terms]
        coefficients = [coefficient for terms, _ in rows for _, coefficient in terms]
        limits, no_limits = [least for _, least in rows], [kHighsInf] * len(rows)
        model.addRows(len(rows), limits, no_limits, starts[-1], starts[:-1], columns, coefficients)
        model.setOptionValue("time_limit", model.getRunTime() + max(0.01, deadline.remaining))
        model.run()
        if model.getModelStatus() != HighsModelStatus.kOptimal:
            return False
        solution = model.getSolution()
        for variable, value in zip(self._variables, solution.col_value, strict=True):
            variable.varValue = value
        for row, price in zip(self._rows, solution.row_dual, strict=False):
            row.pi = price
        return True

    def _constant(self) -> MilpResult:
        # Without variables each row reads 0 >= limit or 0 <= limit; PuLP keeps -limit as its constant.
        broken = any(row.sense * row.constant < 0 for row in self._rows)
        return MilpResult(not broken, broken, math.inf if broken else 0.0, math.inf if broken else 0.0)

    def _minimize_highs(
        self, deadline: Deadline, absolute_gap: float, target: float, most_nodes: float, options: Mapping[str, object]
    ) -> MilpResult:
        from highspy import HighsModelStatus, cb

        def stop_early(kind: object, message: str, seen: Any, answer: Any, data: object) -> None:
            # Passing the program to HiGHS takes time that its own limit does not include.
            # PuLP raises an error if HiGHS itself ends at a limit on nodes.
            answer.user_interrupt = deadline.passed or seen.mip_node_count > most_nodes

        kinds = cb.HighsCallbackType
        # Restarts pay off only on large programs; on those of the solver `ilp` they cost a third of the time.
        solver = _Highs(
            msg=False,
            timeLimit=deadline.remaining,
            gapRel=1e-7,
            gapAbs=absolute_gap,
            objective_target=target,
            threads=1,
            mip_allow_restart=False,
            callbackTuple=(stop_early, None),
            callbacksToActivate=[kinds.kCallbackMipInterrupt, kinds.kCallbackSimplexInterrupt],
            **options,
        )
        self.problem.solve(solver)
        model = self.problem.solverModel
        status = model.getModelStatus()
        if status in (HighsModelStatus.kInfeasible, HighsModelStatus.kUnboundedOrInfeasible):
            # Variables have limits, so the program cannot be unbounded.
            return MilpResult(False, True, math.inf, math.inf)
        information = model.getInfo()
        # The dual bound excludes the constant of the objective, which has none here.
        has_integers = any(variable.cat == pulp.LpInteger for variable in self._variables)
        if has_integers:
            bound = float(information.mip_dual_bound)
        else:
            bound = float(information.objective_function_value) if status == HighsModelStatus.kOptimal else -math.inf
        found = int(information.primal_solution_status) == 2
        objective = self._objective() if found else math.inf
        return MilpResult(found, False, min(bound, objective) if math.isfinite(bound) else -math.inf, objective)

    def _minimize_cbc(self, deadline: Deadline, absolute_gap: float) -> MilpResult:
        # CBC reports no bound: an LP relaxation supplies it.
        status = self.problem.solve(_cbc(mip=False, msg=False, timeLimit=deadline.remaining))
        if status == pulp.LpStatusInfeasible:
            return MilpResult(False, True, math.inf, math.inf)
        solved = self.problem.sol_status == pulp.LpSolutionOptimal and not deadline.passed
        bound = self._objective() if solved else -math.inf
        self.problem.solve(_cbc(msg=False, timeLimit=max(0.1, deadline.remaining), gapRel=0.0, gapAbs=absolute_gap))
        if self.problem.sol_status == pulp.LpSolutionInfeasible and not deadline.passed:
            return MilpResult(False, True, math.inf, math.inf)
        found = self.problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
        return MilpResult(found, False, bound, self._objective() if found else math.inf)

    def _objective(self) -> float:
        return _value(self.cost)

    def _variable(self, name: str, cost: float, category: str, most: int = 1) -> pulp.LpVariable:
        # PuLP sorts variables by name: numbered names keep them in the order of creation.
        variable = self.problem.add_variable(f"x{len(self._variables):07d}_{name}", 0, most, category)
        self._variables.append(variable)
        if cost:
            self.cost.append((variable, cost))
        return variable

    def _row(self, name: str, terms: Terms, sense: int, limit: float) -> None:
        if self._deadline is not None and len(self._rows) % ROWS_PER_LOOK == 0 and self._deadline.passed:
            self._is_complete = False
            raise TimeIsUpError
        row = pulp.LpConstraint(pulp.LpAffineExpression(list(terms)), sense, f"{name}_{len(self._rows)}", limit)
        self._rows.append(row)
        self.problem.addConstraint(row)


def _cbc(**options: object) -> pulp.LpSolver:
    with warnings.catch_warnings():
        # PuLP 3 ships CBC under this name; PuLP 4, which will not, is outside the range that we allow.
        warnings.simplefilter("ignore", DeprecationWarning)
        return pulp.PULP_CBC_CMD(**options)


def _value(terms: Terms) -> float:
    return math.fsum(coefficient * (variable.varValue or 0.0) for variable, coefficient in terms)


def is_set(variable: pulp.LpVariable) -> bool:
    """Return whether a variable is 1, within the tolerances of the solver."""
    return bool((variable.varValue or 0.0) > 0.5)
