"""Annealing from a given schedule, with a limit on moves instead of time."""

from __future__ import annotations

from scheduler.problem import Problem
from scheduler.schedule import Schedule
from scheduler.simulator import simulate
from scheduler.solvers.anneal.solver import Annealing
from scheduler.solvers.deadline import Deadline


def polish(problem: Problem, start: Schedule, *, deadline: Deadline, seed: int, moves: int | None = None) -> Schedule:
    """Return the best schedule that annealing finds from a start, or the start itself if it finds none.

    Parameters
    ----------
    problem : Problem
    start : Schedule
        A schedule of the graph in the problem's order; it may exceed the budget.
    deadline : Deadline
    seed : int
    moves : int, optional
        Of all walkers together. The answer then depends only on the arguments, unless the
        deadline comes first.
    """
    simulate(problem.graph, start)
    search = Annealing(problem)
    search.offer(start)
    if not search.is_optimal:
        search.run(start, deadline, seed, moves)
    return search.best or start
