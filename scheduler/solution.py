"""Solutions: a schedule with its simulation and a proof of how good it is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from scheduler.problem import Problem
from scheduler.schedule import Schedule, follows_input_order
from scheduler.simulator import Simulation, simulate
from scheduler.units import format_bytes, format_peak, format_percent, text_table

TOLERANCE = 1e-6
"""A gap of at most this counts as closed."""


class Status(Enum):
    """The possible outcomes of a search. The text of each says what to do next."""

    OPTIMAL = "proven optimal within its search space: use it"
    FEASIBLE = "fits, gap above 1e-6: use it, or allow more time to close the gap"
    INFEASIBLE = "proven: no schedule fits; raise the budget or shrink the step"
    UNKNOWN = "nothing found and nothing proven: allow more time, another solver or a larger budget"


@dataclass(frozen=True)
class Proposal:
    """The result of a solver. `grade` simulates it before anything relies on it.

    Attributes
    ----------
    schedule : Schedule or None
        The best schedule found; None if none was found.
    search_space : str
        "persistent", "input order", "late order", "any order" or the solver's own family.
    bound : float
        Proven lower bound on the time of every schedule in the search space.
    global_bound : float
        Proven lower bound on the time of every schedule.
    infeasible : bool
        True if it is proven that no schedule fits the problem, in the order that it allows.
    messages : tuple of str
        Remarks for the user, such as why nothing was found.
    smallest : Schedule or None
        The schedule with the smallest peak that the solver came across, if it is another one.
    exceeding : tuple of Schedule
        Schedules that exceed the budget and are as fast as bounds allow: other searches may start from them.
    """

    schedule: Schedule | None
    search_space: str
    bound: float = 0.0
    global_bound: float = 0.0
    infeasible: bool = False
    messages: tuple[str, ...] = ()
    smallest: Schedule | None = None
    exceeding: tuple[Schedule, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a search has come.

    Attributes
    ----------
    seconds : float
        Since the search began.
    time : float
        Time of the best schedule so far, in the graph's unit; inf if there is none.
    bound : float
        Best proven lower bound on time so far, in the graph's unit.
    """

    seconds: float
    time: float
    bound: float

    @property
    def gap(self) -> float:
        """(time - bound) / time; 1 without a schedule."""
        return relative_gap(self.time, self.bound)


@dataclass(frozen=True, repr=False)
class Solution:
    """The fastest schedule found for a problem, simulated, with its proof.

    Attributes
    ----------
    status : Status
    schedule : Schedule or None
        None unless the status is OPTIMAL or FEASIBLE.
    simulation : Simulation or None
        The simulation of the schedule.
    budget_bytes : int
    baseline_time, baseline_peak_bytes : float, int
        Time and peak of the save-everything schedule.
    bound : float
        Proven lower bound on the time of every schedule in `search_space`.
    global_bound : float
        Proven lower bound on the time of every schedule.
    search_space : str
        "persistent", "input order", "late order", "any order" or the solver's own family.
    solver : str
    solve_seconds : float
    messages : tuple of str
        Remarks for the user, such as why no schedule was found.
    resident_bytes : int
        Bytes of the resident tensors of the graph.
    time_unit : str
        Unit of all times but `solve_seconds`.
    smallest_peak_bytes : int or None
        Smallest peak of all schedules that were known when the search ended, whether they fit
        or not. `minimum_budget` looks for a smaller one.
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
    resident_bytes: int = 0
    time_unit: str = "s"
    smallest_peak_bytes: int | None = None

    @property
    def time(self) -> float:
        """Time of the schedule, in the graph's unit; infinite without a schedule."""
        return self.simulation.time if self.simulation is not None else math.inf

    @property
    def peak_bytes(self) -> int | None:
        """Peak of the schedule, resident tensors included; None without a schedule."""
        return self.simulation.peak_bytes if self.simulation is not None else None

    @property
    def saved(self) -> tuple[str, ...]:
        """The checkpoint set: tensors live at the end of the forward phase."""
        return self.simulation.saved if self.simulation is not None else ()

    @property
    def overhead(self) -> float:
        """Time / baseline - 1; infinite without a schedule."""
        return relative_overhead(self.time, self.baseline_time)

    @property
    def gap(self) -> float:
        """(time - bound) / time: no schedule in the search space saves a larger share of the time."""
        return relative_gap(self.time, self.bound)

    @property
    def global_gap(self) -> float:
        """(time - global_bound) / time: no schedule saves a larger share of the time."""
        return relative_gap(self.time, self.global_bound)

    def __repr__(self) -> str:
        budget = format_bytes(self.budget_bytes)
        if self.peak_bytes is None:
            return f"Solution({self.status.name} within {budget}, solver={self.solver!r})"
        return (
            f"Solution({self.status.name} in {self.search_space}, {format_bytes(self.peak_bytes)} of {budget},"
            f" overhead {format_percent(self.overhead)}, gap {format_percent(self.gap)}, solver={self.solver!r})"
        )

    def summary(self) -> str:
        """Return the answer and its proof as text, one fact per line."""
        rows = [
            ("status", f"{self.status.name}: {self.status.value}"),
            ("budget", self._peak(self.budget_bytes)),
            ("resident", format_bytes(self.resident_bytes)),
        ]
        if self.peak_bytes is not None:
            rows += [
                ("peak", f"{self._peak(self.peak_bytes)} instead of {format_bytes(self.baseline_peak_bytes)}"),
                ("time", f"{self.time:.6g} {self.time_unit}, overhead {format_percent(self.overhead, 4)}"),
                ("bound", f"{self._bound(self.bound, self.gap)} in {self.search_space}"),
                ("global bound", f"{self._bound(self.global_bound, self.global_gap)} over all schedules"),
            ]
        if self.smallest_peak_bytes is not None:
            rows.append(("smallest", f"{self._peak(self.smallest_peak_bytes)} is the smallest peak known"))
        rows.append(("solver", f"{self.solver}, {self.solve_seconds:.3g} s"))
        rows += [("note", message) for message in self.messages]
        return text_table(rows)

    def _peak(self, count: int) -> str:
        return format_peak(count, self.resident_bytes, self.baseline_peak_bytes)

    def _bound(self, bound: float, gap: float) -> str:
        return f"{bound:.6g} {self.time_unit}, gap {format_percent(gap, 4)}"


def relative_gap(time: float, bound: float) -> float:
    """Return (time - bound) / time; 1 if the time is infinite, 0 if it is 0."""
    if math.isinf(time):
        return 1.0
    return max(0.0, (time - bound) / time) if time > 0 else 0.0


def is_close_enough(problem: Problem, time: float, bound: float) -> bool:
    """Return whether a schedule is fast enough to end a search, given a proven lower bound."""
    return relative_gap(time, bound) <= max(TOLERANCE, problem.gap)


def relative_overhead(time: float, baseline_time: float) -> float:
    """Return time / baseline - 1; 0 if both are 0, infinite if only the baseline is."""
    if baseline_time > 0:
        return (time - baseline_time) / baseline_time
    return 0.0 if time <= 0 else math.inf


def grade(problem: Problem, proposal: Proposal, *, solver: str, seconds: float) -> Solution:
    """Simulate a proposal and return it as a solution.

    OPTIMAL is computed here and nowhere else: the schedule fits and its gap is closed. A
    schedule that exceeds the budget or leaves the requested order counts as none.

    Parameters
    ----------
    problem : Problem
    proposal : Proposal
    solver : str
        Name of the solver.
    seconds : float
        Time that it took.

    Raises
    ------
    InvalidScheduleError
        If the proposed schedule breaks a rule, which is a bug in the solver.
    """
    schedule, messages = proposal.schedule, list(proposal.messages)
    simulation = None if schedule is None else simulate(problem.graph, schedule)
    known = [simulate(problem.graph, start) for start in (*problem.starts, proposal.smallest) if start is not None]
    peaks = [entry.peak_bytes for entry in (problem.baseline, simulation, *known) if entry is not None]
    if schedule is not None and simulation is not None:
        violation = _violation(problem, schedule, simulation)
        if violation:
            messages.append(violation)
            schedule = simulation = None
    global_bound = max(proposal.global_bound, problem.least_time)
    bound = max(proposal.bound, global_bound)
    space = proposal.search_space
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
        resident_bytes=problem.graph.resident_bytes,
        time_unit=problem.graph.time_unit,
        smallest_peak_bytes=min(peaks),
    )


def _violation(problem: Problem, schedule: Schedule, simulation: Simulation) -> str:
    """Return why a schedule does not solve the problem; "" if it does."""
    if simulation.peak_bytes > problem.budget_bytes:
        found, budget = (
            format_peak(count, problem.graph.resident_bytes, problem.baseline.peak_bytes)
            for count in (simulation.peak_bytes, problem.budget_bytes)
        )
        return f"the best schedule found needs {found}, which exceeds the budget of {budget}"
    if not problem.reorder and not follows_input_order(problem.graph, schedule):
        return "the best schedule found leaves the input order"
    return ""
