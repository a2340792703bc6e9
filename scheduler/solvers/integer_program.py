"""Integer programs through PuLP: what was found, and what is proven, told apart.

PuLP's own status says "Optimal" after a time limit and for answers within a tolerance
(PuLP 3.3), so it is never believed alone: the bound is read from the solver or from an LP
relaxation, and the caller computes the gap.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pulp

from scheduler.solvers.deadline import Deadline

Terms = Iterable[tuple[pulp.LpVariable, float]]


@dataclass(frozen=True, slots=True)
class MilpResult:
    """What a minimization gave.

    Attributes
    ----------
    found : bool
        Variables hold a feasible point.
    infeasible : bool
        It is proven that there is none.
    bound : float
        Proven lower bound on the objective; -inf if nothing is known.
    objective : float
        Objective of the point found, computed from the variables; inf without one.
    """

    found: bool
    infeasible: bool
    bound: float
    objective: float


ROWS_A_SECOND = 20_000
"""That the presolve of HiGHS gets through, roughly: it cannot be interrupted."""


class TimeIsUpError(Exception):
    """A program is not finished by its deadline; what stands of it is not solved."""


class IntegerProgram:
    """An integer program under construction: minimize a sum, subject to named rows.

    Parameters
    ----------
    name : str
    deadline : Deadline, optional
        A row that is added later raises `TimeIsUpError`.
    """

    def __init__(self, name: str, deadline: Deadline | None = None) -> None:
        self._deadline, self._is_whole = deadline, True
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

    def at_least(self, name: str, terms: Terms, least: float) -> None:
        """Add the row: sum of coefficient x variable >= least."""
        self._row(name, terms, pulp.LpConstraintGE, least)

    def at_most(self, name: str, terms: Terms, most: float) -> None:
        """Add the row: sum of coefficient x variable <= most."""
        self._row(name, terms, pulp.LpConstraintLE, most)

    def minimize(self, deadline: Deadline, *, relative_gap: float = 1e-7) -> MilpResult:
        """Solve by the deadline: HiGHS, or CBC where HiGHS is missing or fails; nothing is known where both do."""
        if not self._is_whole:
            return MilpResult(False, False, -math.inf, math.inf)
        self.problem.setObjective(pulp.LpAffineExpression(self.cost))
        if not self._variables and not deadline.passed:
            return self._constant()
        if not deadline.passed and pulp.HiGHS(msg=False).available():
            with suppress(Exception):  # of whatever kind: the answer of the other solvers is not to be lost by it
                return self._minimize_highs(deadline, relative_gap)
        if not deadline.passed:
            with suppress(Exception):  # no CBC, or one that died
                return self._minimize_cbc(deadline)
        return MilpResult(False, False, -math.inf, math.inf)

    def relax(self, deadline: Deadline, row: str) -> tuple[float, float] | None:
        """Solve without integrality; return the objective, and how it falls as the limit of a row grows.

        None if there is no point, or none was found in time; or HiGHS, whose duals it takes, is missing.
        """
        solver = pulp.HiGHS(mip=False, msg=False, timeLimit=max(0.01, deadline.remaining), threads=1)
        if not self._is_whole or not self._variables or not solver.available():
            return None
        self.problem.setObjective(pulp.LpAffineExpression(self.cost))
        with suppress(Exception):
            self.problem.solve(solver)
        if self.problem.sol_status != pulp.LpSolutionOptimal:
            return None
        price = next(entry.pi for entry in self._rows if entry.name.startswith(row))
        return self._objective(), max(0.0, -price)

    def _constant(self) -> MilpResult:
        # Without variables each row reads 0 >= limit or 0 <= limit; PuLP keeps -limit as its constant.
        broken = any(row.sense * row.constant < 0 for row in self._rows)
        return MilpResult(not broken, broken, math.inf if broken else 0.0, math.inf if broken else 0.0)

    def _minimize_highs(self, deadline: Deadline, relative_gap: float) -> MilpResult:
        from highspy import HighsModelStatus, cb

        def stop_early(kind: object, message: str, seen: object, answer: Any, data: object) -> None:
            # Handing the program over took time too, of which HiGHS knows nothing.
            answer.user_interrupt = deadline.passed

        kinds = cb.HighsCallbackType
        # Restarts pay off on large programs only; on the cuts' they cost a third of the time.
        solver = pulp.HiGHS(
            msg=False,
            timeLimit=deadline.remaining,
            gapRel=relative_gap,
            gapAbs=0.0,
            threads=1,
            mip_allow_restart=False,
            presolve="choose" if deadline.remaining * ROWS_A_SECOND > len(self._rows) else "off",
            callbackTuple=(stop_early, None),
            callbacksToActivate=[kinds.kCallbackMipInterrupt, kinds.kCallbackSimplexInterrupt],
        )
        self.problem.solve(solver)
        model = self.problem.solverModel
        status = model.getModelStatus()
        if status in (HighsModelStatus.kInfeasible, HighsModelStatus.kUnboundedOrInfeasible):
            # Variables lie in [0, 1]: unbounded is out of the question.
            return MilpResult(False, True, math.inf, math.inf)
        information = model.getInfo()
        # The dual bound lacks the objective's constant: the objective here has none.
        has_integers = any(variable.cat == pulp.LpInteger for variable in self._variables)
        if has_integers:
            bound = float(information.mip_dual_bound)
        else:
            bound = float(information.objective_function_value) if status == HighsModelStatus.kOptimal else -math.inf
        found = int(information.primal_solution_status) == 2
        objective = self._objective() if found else math.inf
        return MilpResult(found, False, min(bound, objective) if math.isfinite(bound) else -math.inf, objective)

    def _minimize_cbc(self, deadline: Deadline) -> MilpResult:
        # CBC tells no bound: one LP relaxation gives it.
        status = self.problem.solve(_cbc(mip=False, msg=False, timeLimit=deadline.remaining))
        if status == pulp.LpStatusInfeasible:
            return MilpResult(False, True, math.inf, math.inf)
        solved = self.problem.sol_status == pulp.LpSolutionOptimal and not deadline.passed
        bound = self._objective() if solved else -math.inf
        self.problem.solve(_cbc(msg=False, timeLimit=max(0.1, deadline.remaining), gapRel=0.0))
        if self.problem.sol_status == pulp.LpSolutionInfeasible and not deadline.passed:
            return MilpResult(False, True, math.inf, math.inf)
        found = self.problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
        return MilpResult(found, False, bound, self._objective() if found else math.inf)

    def _objective(self) -> float:
        return math.fsum(cost * (variable.varValue or 0.0) for variable, cost in self.cost)

    def _variable(self, name: str, cost: float, category: str) -> pulp.LpVariable:
        # PuLP sorts variables by name: numbered names keep them in the order of creation.
        variable = self.problem.add_variable(f"x{len(self._variables):07d}_{name}", 0, 1, category)
        self._variables.append(variable)
        if cost:
            self.cost.append((variable, cost))
        return variable

    def _row(self, name: str, terms: Terms, sense: int, limit: float) -> None:
        if self._deadline is not None and self._deadline.passed:
            self._is_whole = False
            raise TimeIsUpError
        row = pulp.LpConstraint(pulp.LpAffineExpression(list(terms)), sense, f"{name}_{len(self._rows)}", limit)
        self._rows.append(row)
        self.problem.addConstraint(row)


def _cbc(**options: object) -> pulp.LpSolver:
    with warnings.catch_warnings():
        # PuLP 3 ships CBC under this name; PuLP 4, which will not, is out of the range that we allow.
        warnings.simplefilter("ignore", DeprecationWarning)
        return pulp.PULP_CBC_CMD(**options)


def is_set(variable: pulp.LpVariable) -> bool:
    """Return whether a variable stands at 1, solver tolerances allowed for."""
    return bool((variable.varValue or 0.0) > 0.5)
