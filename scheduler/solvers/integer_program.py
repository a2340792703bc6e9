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
from itertools import accumulate, pairwise
from typing import Any

import pulp

from scheduler.solvers.deadline import Deadline

for _solver in vars(pulp).values():
    # PuLP keeps the errors of importing what is not installed, and their tracebacks all frames that were on the
    # stack: a model in one of them would never be freed.
    if isinstance(_error := getattr(_solver, "err", None), BaseException):
        _error.__traceback__ = None


class Variable:
    """A variable of an integer program.

    Attributes
    ----------
    number : int
        Its place among all variables of its program.
    value : float or None
        Its value in the last point that was found.
    """

    __slots__ = ("number", "value")

    def __init__(self, number: int) -> None:
        self.number = number
        self.value: float | None = None


Terms = Iterable[tuple[Variable, float]]
"""Variables, each of them at most once (HiGHS refuses other rows), and their coefficients."""
Row = tuple[Sequence[tuple[Variable, float]], float]
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

    def __init__(self, program: IntegerProgram, **options: Any) -> None:
        super().__init__(msg=False, threads=1, **options)
        self.program = program

    def buildSolverModel(self, lp: pulp.LpProblem) -> None:
        """Pass the program to HiGHS, or raise `PulpSolverError` if it refuses it."""
        from highspy import HighsStatus

        if lp.solverModel.passModel(self.program.for_highs(self.mip)) == HighsStatus.kError:
            raise pulp.PulpSolverError("HiGHS refuses the program: a number of it is too large or not finite")


class IntegerProgram:
    """An integer program under construction: minimize a sum, subject to named rows.

    Parameters
    ----------
    name : str
    deadline : Deadline, optional
        Adding a row after it raises `TimeIsUpError`.

    Attributes
    ----------
    variables : list of Variable
    costs : list of float
        What each adds to the sum.
    problem : pulp.LpProblem
        What PuLP says of the last solution.

    Rows are kept as numbers, as HiGHS takes them: to build PuLP's own takes longer than to solve many a program, and
    only CBC needs them.
    """

    def __init__(self, name: str, deadline: Deadline | None = None) -> None:
        self._deadline, self._is_complete = deadline, True
        self.problem = pulp.LpProblem(name, pulp.LpMinimize)
        self.variables: list[Variable] = []
        self._names: list[str] = []
        self.costs: list[float] = []
        self._most: list[int] = []
        self._is_integer: list[bool] = []
        self._rows: list[str] = []
        self._least: list[float] = []
        self._limits: list[float] = []
        self._starts, self._columns, self._coefficients = [0], list[int](), list[float]()
        """The terms of row r are entries `_starts[r]` to `_starts[r + 1]` of the other two."""
        self._duals: list[float] = []

    def binary(self, name: str, cost: float = 0.0) -> Variable:
        """Add a variable in {0, 1}."""
        return self._variable(name, cost, is_integer=True)

    def fraction(self, name: str, cost: float = 0.0) -> Variable:
        """Add a variable in [0, 1]."""
        return self._variable(name, cost, is_integer=False)

    def count(self, name: str, terms: Terms, most: int) -> None:
        """Add the row that says: sum of coefficient x variable is an integer from 0 to `most`."""
        number = self._variable(name, 0.0, is_integer=True, most=most)
        self._row(name, [(number, -1.0), *terms], 0, 0)

    def at_least(self, name: str, terms: Terms, least: float) -> None:
        """Add the row: sum of coefficient x variable >= least."""
        self._row(name, terms, least, math.inf)

    def at_most(self, name: str, terms: Terms, most: float) -> None:
        """Add the row: sum of coefficient x variable <= most."""
        self._row(name, terms, -math.inf, most)

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
        if not self.variables and not deadline.passed:
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
        solver = _Highs(self, mip=False, timeLimit=max(0.01, deadline.remaining))
        if not self._is_complete or not self.variables or not solver.available():
            return None
        self.problem.sol_status = pulp.LpSolutionNoSolutionFound
        with suppress(Exception):
            self._solve(solver)
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
        priced = [max(0.0, -dual) for row, dual in zip(self._rows, self._duals, strict=False) if row.startswith(rows)]
        return Relaxed(objective, priced, binding)

    def _relax_again(self, rows: Sequence[Row], deadline: Deadline) -> bool:
        """Solve the last LP relaxation with further rows, starting from its solution; return whether that succeeded."""
        from highspy import HighsModelStatus

        model = self.problem.solverModel
        starts = list(accumulate((len(terms) for terms, _ in rows), initial=0))
        columns = [variable.number for terms, _ in rows for variable, _ in terms]
        coefficients = [coefficient for terms, _ in rows for _, coefficient in terms]
        limits, no_limits = [least for _, least in rows], [math.inf] * len(rows)
        model.addRows(len(rows), limits, no_limits, starts[-1], starts[:-1], columns, coefficients)
        model.setOptionValue("time_limit", model.getRunTime() + max(0.01, deadline.remaining))
        model.run()
        if model.getModelStatus() != HighsModelStatus.kOptimal:
            return False
        self._take_solution()
        return True

    def _constant(self) -> MilpResult:
        # Without variables each row reads: least <= 0 <= limit.
        broken = any(least > 0 for least in self._least) or any(limit < 0 for limit in self._limits)
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
            self,
            timeLimit=deadline.remaining,
            gapRel=1e-7,
            gapAbs=absolute_gap,
            objective_target=target,
            mip_allow_restart=False,
            callbackTuple=(stop_early, None),
            callbacksToActivate=[kinds.kCallbackMipInterrupt, kinds.kCallbackSimplexInterrupt],
            **options,
        )
        self._solve(solver)
        model = self.problem.solverModel
        status = model.getModelStatus()
        if status in (HighsModelStatus.kInfeasible, HighsModelStatus.kUnboundedOrInfeasible):
            # Variables have limits, so the program cannot be unbounded.
            return MilpResult(False, True, math.inf, math.inf)
        information = model.getInfo()
        # The dual bound excludes the constant of the objective, which has none here.
        if any(self._is_integer):
            bound = float(information.mip_dual_bound)
        else:
            bound = float(information.objective_function_value) if status == HighsModelStatus.kOptimal else -math.inf
        found = int(information.primal_solution_status) == 2
        objective = self._objective() if found else math.inf
        return MilpResult(found, False, min(bound, objective) if math.isfinite(bound) else -math.inf, objective)

    def _solve(self, solver: _Highs) -> None:
        """Solve with HiGHS, and take over values and duals."""
        solver.actualSolve(self.problem)
        self._take_solution()

    def _take_solution(self) -> None:
        solution = self.problem.solverModel.getSolution()
        if solution.value_valid:
            for variable, value in zip(self.variables, solution.col_value, strict=True):
                variable.value = value
        self._duals = solution.row_dual

    def _minimize_cbc(self, deadline: Deadline, absolute_gap: float) -> MilpResult:
        # CBC reports no bound: an LP relaxation supplies it.
        self.problem = self.for_cbc()
        status = self._solve_cbc(mip=False, timeLimit=deadline.remaining)
        if status == pulp.LpStatusInfeasible:
            return MilpResult(False, True, math.inf, math.inf)
        solved = self.problem.sol_status == pulp.LpSolutionOptimal and not deadline.passed
        bound = self._objective() if solved else -math.inf
        self._solve_cbc(timeLimit=max(0.1, deadline.remaining), gapRel=0.0, gapAbs=absolute_gap)
        if self.problem.sol_status == pulp.LpSolutionInfeasible and not deadline.passed:
            return MilpResult(False, True, math.inf, math.inf)
        found = self.problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
        return MilpResult(found, False, bound, self._objective() if found else math.inf)

    def _solve_cbc(self, **options: object) -> int:
        """Solve with CBC, take over the values, and return PuLP's status."""
        status: int = self.problem.solve(_cbc(msg=False, **options))
        for variable, other in zip(self.variables, self.problem.variables(), strict=True):
            variable.value = other.varValue
        return status

    def for_highs(self, has_integers: bool) -> Any:
        """Return the program as a `HighsLp`; without integers, as its relaxation."""
        from highspy import HighsLp, HighsVarType, MatrixFormat

        program = HighsLp()
        program.num_col_, program.num_row_ = len(self.variables), len(self._rows)
        program.col_cost_, program.col_lower_, program.col_upper_ = self.costs, [0] * len(self._most), self._most
        program.row_lower_, program.row_upper_ = self._least, self._limits
        program.a_matrix_.format_ = MatrixFormat.kRowwise
        program.a_matrix_.start_, program.a_matrix_.index_ = self._starts, self._columns
        program.a_matrix_.value_ = self._coefficients
        if has_integers:
            kinds = (HighsVarType.kContinuous, HighsVarType.kInteger)
            program.integrality_ = [kinds[is_integer] for is_integer in self._is_integer]
        return program

    def for_cbc(self) -> pulp.LpProblem:
        """Return the program with PuLP's variables and rows."""
        problem = pulp.LpProblem(self.problem.name, pulp.LpMinimize)
        # PuLP sorts variables by name: numbered names keep them in the order of creation.
        variables = [
            problem.add_variable(f"x{number:07d}_{name}", 0, most, pulp.LpInteger if is_integer else pulp.LpContinuous)
            for number, (name, most, is_integer) in enumerate(
                zip(self._names, self._most, self._is_integer, strict=True)
            )
        ]
        # It leaves out those that are in no row, unless the objective has them.
        problem.setObjective(pulp.LpAffineExpression(list(zip(variables, self.costs, strict=True))))
        limits = zip(self._rows, self._least, self._limits, strict=True)
        for r, ((start, end), (name, least, most)) in enumerate(zip(pairwise(self._starts), limits, strict=True)):
            numbers = zip(self._columns[start:end], self._coefficients[start:end], strict=True)
            terms = [(variables[column], number) for column, number in numbers]
            for sense, limit in ((pulp.LpConstraintGE, least), (pulp.LpConstraintLE, most)):
                if math.isfinite(limit):
                    row = pulp.LpConstraint(pulp.LpAffineExpression(terms), sense, f"{name}_{r}_{sense}", limit)
                    problem.addConstraint(row)
        return problem

    def _objective(self) -> float:
        return math.fsum(
            cost * (variable.value or 0.0) for variable, cost in zip(self.variables, self.costs, strict=True) if cost
        )

    def _variable(self, name: str, cost: float, *, is_integer: bool, most: int = 1) -> Variable:
        variable = Variable(len(self.variables))
        self.variables.append(variable)
        self._names.append(name)
        self.costs.append(cost)
        self._most.append(most)
        self._is_integer.append(is_integer)
        return variable

    def _row(self, name: str, terms: Terms, least: float, limit: float) -> None:
        if self._deadline is not None and len(self._rows) % ROWS_PER_LOOK == 0 and self._deadline.passed:
            self._is_complete = False
            raise TimeIsUpError
        for variable, coefficient in terms:
            if coefficient:
                self._columns.append(variable.number)
                self._coefficients.append(coefficient)
        self._starts.append(len(self._columns))
        self._rows.append(name)
        self._least.append(least)
        self._limits.append(limit)


def _cbc(**options: object) -> pulp.LpSolver:
    with warnings.catch_warnings():
        # PuLP 3 ships CBC under this name; PuLP 4, which will not, is outside the range that we allow.
        warnings.simplefilter("ignore", DeprecationWarning)
        return pulp.PULP_CBC_CMD(**options)


def _value(terms: Terms) -> float:
    return math.fsum(coefficient * (variable.value or 0.0) for variable, coefficient in terms)


def is_set(variable: Variable) -> bool:
    """Return whether a variable is 1, within the tolerances of the solver."""
    return bool((variable.value or 0.0) > 0.5)
