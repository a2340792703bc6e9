"""The claim: an answer with its proof."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from scheduler.problem import Problem
from scheduler.schedule import Schedule, follows_input_order
from scheduler.simulator import Simulation, simulate
from scheduler.units import format_bytes

TOLERANCE = 1e-6
"""A gap of this much or less counts as closed."""


class Status(Enum):
    """What a solver can say; the text says what to do next."""

    OPTIMAL = "proven optimal within its search space: use it"
    FEASIBLE = "fits, gap above 1e-6: use it, or allow more time to close the gap"
    INFEASIBLE = "proven: no schedule fits; raise the budget or shrink the step"
    UNKNOWN = "nothing found and nothing proven: allow more time, another solver or a larger budget"


@dataclass(frozen=True)
class Proposal:
    """What a solver returns; it is not believed until it is simulated.

    Attributes
    ----------
    schedule : Schedule or None
    search_space : str
        "persistent", "input order", "any order" or the solver's own family.
    bound : float
        Proven lower bound on the time within the search space.
    global_bound : float
        Proven lower bound on the time over all schedules.
    infeasible : bool
        True if it is proven that no schedule of the problem's order fits.
    messages : tuple of str
        What a reader should know: cuts used, why nothing was found.
    cuts : tuple of int
        Tasks that served `ilp`, for the same graph at other budgets.
    """

    schedule: Schedule | None
    search_space: str
    bound: float = 0.0
    global_bound: float = 0.0
    infeasible: bool = False
    messages: tuple[str, ...] = ()
    cuts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Solution:
    """A simulated answer.

    Attributes
    ----------
    status : Status
    schedule : Schedule or None
        None unless the status is OPTIMAL or FEASIBLE.
    simulation : Simulation or None
        The judge's word on the schedule.
    budget_bytes : int
    baseline_time, baseline_peak_bytes : float, int
        Of the save-everything schedule.
    bound : float
        Proven lower bound on the time within `search_space`.
    global_bound : float
        Proven lower bound on the time over all schedules.
    search_space : str
    solver : str
    solve_seconds : float
    messages : tuple of str
    """

    status: Status
    schedule: Schedule | None
    simulation: Simulation | None
    budget_bytes: int
    baseline_time: float
    baseline_peak_bytes: int
    bound: float
    global_bound: float
    search_space: str
    solver: str
    solve_seconds: float
    messages: tuple[str, ...] = ()

    @property
    def time(self) -> float:
        """Time of the schedule, in the graph's unit; infinite without one."""
        return self.simulation.time if self.simulation is not None else float("inf")

    @property
    def peak_bytes(self) -> int | None:
        """Peak of the schedule, resident tensors included; None without one."""
        return self.simulation.peak_bytes if self.simulation is not None else None

    @property
    def saved(self) -> tuple[str, ...]:
        """The checkpoint set: tensors live at the end of the forward phase."""
        return self.simulation.saved if self.simulation is not None else ()

    @property
    def overhead(self) -> float:
        """Time / baseline - 1; infinite without a schedule."""
        return _ratio(self.time - self.baseline_time, self.baseline_time)

    @property
    def gap(self) -> float:
        """(time - bound) / time: at most this share of the time can be saved in the search space."""
        return relative_gap(self.time, self.bound)

    @property
    def global_gap(self) -> float:
        """(time - global_bound) / time: at most this share can be saved by any schedule."""
        return relative_gap(self.time, self.global_bound)


def relative_gap(time: float, bound: float) -> float:
    """Return (time - bound) / time; 1 without a schedule, 0 for a free one."""
    if time == float("inf"):
        return 1.0
    return max(0.0, (time - bound) / time) if time > 0 else 0.0


def grade(problem: Problem, proposal: Proposal, *, solver: str, seconds: float) -> Solution:
    """Return the solution that a proposal amounts to, simulated by `simulate`.

    OPTIMAL is computed here and nowhere else: the schedule fits and its gap is closed. A
    schedule over budget, or out of the requested order, counts as none.

    Raises
    ------
    InvalidScheduleError
        If the proposed schedule breaks a rule: a bug in the solver.
    """
    schedule, simulation = proposal.schedule, None
    messages = list(proposal.messages)
    global_bound = max(proposal.global_bound, problem.least_time)
    bound = max(proposal.bound, global_bound)
    space = proposal.search_space
    if schedule is not None:
        simulation = simulate(problem.graph, schedule)
        if simulation.peak_bytes > problem.budget_bytes:
            messages.append(
                f"the best schedule found needs {format_bytes(simulation.peak_bytes)},"
                f" over the budget of {format_bytes(problem.budget_bytes)}"
            )
            schedule = simulation = None
        elif not problem.reorder and not follows_input_order(problem.graph, schedule):
            messages.append("the best schedule found leaves the input order")
            schedule = simulation = None
    if simulation is None:
        status = Status.INFEASIBLE if proposal.infeasible else Status.UNKNOWN
    else:
        # A bound from floating-point optimization may exceed the truth by its tolerance.
        bound, global_bound = min(bound, simulation.time), min(global_bound, simulation.time)
        if relative_gap(simulation.time, global_bound) <= TOLERANCE:
            bound, space = global_bound, "any order"
        status = Status.OPTIMAL if relative_gap(simulation.time, bound) <= TOLERANCE else Status.FEASIBLE
    return Solution(
        status=status,
        schedule=schedule,
        simulation=simulation,
        budget_bytes=problem.budget_bytes,
        baseline_time=problem.baseline.time,
        baseline_peak_bytes=problem.baseline.peak_bytes,
        bound=bound,
        global_bound=global_bound,
        search_space=space,
        solver=solver,
        solve_seconds=seconds,
        messages=tuple(messages),
    )


def _ratio(extra: float, base: float) -> float:
    if base > 0:
        return extra / base
    return 0.0 if extra <= 0 else float("inf")
