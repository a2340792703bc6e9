"""Mixed checkpointing of uniform chains: a slot holds a state or the saved data of a step."""

from __future__ import annotations

from scheduler.problem import Problem
from scheduler.solution import Proposal
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.revolve.solver import propose_slots


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return the mixed schedule with the most slots that fits.

    Guarantee: the fewest forward runs of all schedules that keep at most that many states and
    saved data of layers together, the input of the chain included. Search space: that family.
    When: uniform chains whose saved data is about as large as an output; "dp" uses the exact bytes
    of both and is never slower. Cost: for each of O(log n) numbers of slots, one table of
    O(n^2 slots) steps at most and one simulated schedule. Memory: at most 768 MiB.

    Reference: Maddison 2023, "Step-based checkpointing with high-level algorithmic
    differentiation", arXiv 2305.09568, section 3.

    Raises
    ------
    UnsuitableProblemError
        If the problem does not come from a chain, or the chain's layers differ.
    """
    return propose_slots(problem, deadline, mixed=True)
