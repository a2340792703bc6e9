"""Binomial checkpointing of uniform chains: schedules as streams of actions, and the solver."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from itertools import chain as chained
from typing import TYPE_CHECKING, Literal

import numpy as np

from scheduler.errors import InvalidOptionError, UnsuitableProblemError
from scheduler.problem import Problem
from scheduler.schedule import Schedule
from scheduler.simulator import simulate
from scheduler.solution import Proposal
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.dp.costs import chain_costs
from scheduler.solvers.dp.one_cut_bound import one_cut_bound
from scheduler.solvers.dp.runs import ChainRuns
from scheduler.units import format_bytes

if TYPE_CHECKING:
    from scheduler.graph.chain import Chain
    from scheduler.graph.layers import Layer
    from scheduler.solvers.revolve.kernels import Codes, Ints

Action = tuple[Literal["forward", "save", "backward"], int, int]
"""(action, first step, one after the last step); see `revolve_actions`."""

MOST_STEPS = 2**40
"""Most steps of a stream."""
MOST_MIXED_ENTRIES = 2**27
"""Most entries (steps times slots) of the table for mixed schedules, of 4 bytes each."""
MOST_RUNS = 1_000_000
"""Schedules of more runs are not simulated."""
_CHUNK_ACTIONS = 2**14
"""Actions computed at once."""
_ACTIONS = np.array(["forward", "save", "backward"], dtype=object)
_MAY_DIFFER = ("name", "parameter_bytes")
"""Fields in which the layers of a uniform chain may differ."""


def revolve_actions(steps: int, slots: int, *, mixed: bool = False) -> Iterator[Action]:
    """Stream the schedule of a uniform chain with the fewest forward runs for a number of slots.

    Step i leads from state i to state i + 1. An action is a tuple (action, start, stop):

    - ("forward", i, j) runs steps i to j - 1 without saving; state i stays in memory;
    - ("save", i, i + 1) runs step i and saves its data for the backward;
    - ("backward", i, i + 1) runs step i backward, which reads that data and frees it.

    A state is freed when no later action reads it. A state, or the data of a step, occupies a
    slot if it is read later than by the next action; the first state is available at the start.
    Binomial schedules keep only states, so each save is followed directly by its backward. Mixed
    ones may keep data instead of states, which never takes more runs.

    Parameters
    ----------
    steps, slots : int
        At least 1. More slots than steps have no effect.
    mixed : bool
        Whether a slot may hold the data of a step instead of a state.

    Returns
    -------
    iterator of (str, int, int)
        At most 3 `steps` - 1 actions. Binomial: a million steps take a fraction of a second
        and O(`slots`) memory. Mixed: a table is computed first, in up to O(`steps`^2 `slots`) time
        and 4 bytes per step and slot: 30 000 steps with 50 slots take a few seconds.

    Raises
    ------
    InvalidOptionError
        If a number is not an int, or is below 1 or too large.

    References
    ----------
    Griewank and Walther 2000, "Algorithm 799: revolve", ACM Transactions on Mathematical
    Software 26(1). Maddison 2023, "Step-based checkpointing with high-level
    algorithmic differentiation", arXiv 2305.09568, section 3.

    Examples
    --------
    >>> for action in revolve_actions(3, 2):
    ...     print(*action)
    forward 0 1
    forward 1 2
    save 2 3
    backward 2 3
    save 1 2
    backward 1 2
    save 0 1
    backward 0 1
    >>> for action in revolve_actions(3, 2, mixed=True):
    ...     print(*action)
    save 0 1
    save 1 2
    save 2 3
    backward 2 3
    backward 1 2
    backward 0 1
    """
    steps, slots = _checked(steps, slots, mixed)
    # Compiled code is imported only where it is needed, so that `import scheduler` stays fast.
    from scheduler.solvers.revolve import kernels

    if mixed:
        table, _ = kernels.mixed_table(steps, slots)
        return chained.from_iterable(_chunks(lambda *chunk: kernels.emit_mixed(table, *chunk), steps, slots, 0))
    repetitions = _repetitions(steps, slots) if slots > 1 else 0
    binomial = kernels.binomials(slots, repetitions, steps)
    return chained.from_iterable(
        _chunks(lambda *chunk: kernels.emit_revolve(binomial, *chunk), steps, slots, repetitions)
    )


def extra_forwards(steps: int, slots: int, *, mixed: bool = False) -> int:
    """Return the number of runs without saving in `revolve_actions`; each step also runs once with saving.

    Binomial: in closed form, r n - C(c + r, r - 1) for n steps, c slots and the least r with
    C(c + r, r) >= n. Mixed: from the table.

    Raises
    ------
    InvalidOptionError
        As `revolve_actions`.

    Examples
    --------
    >>> extra_forwards(100, 5), extra_forwards(100, 5, mixed=True)
    (316, 252)
    """
    steps, slots = _checked(steps, slots, mixed)
    if mixed:
        from scheduler.solvers.revolve import kernels

        return int(kernels.mixed_table(steps, slots)[1])
    if slots == 1:
        return steps * (steps - 1) // 2
    r = _repetitions(steps, slots)
    return r * steps - (math.comb(slots + r, r - 1) if r else 0)


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return the binomial schedule with the most slots that fits.

    Guarantee: the fewest forward runs of all schedules that keep at most that many states, the
    input of the chain included, and no saved data. Search space: that family. When: uniform
    chains whose saved data is too large to keep; "dp" is never slower. Cost: one simulated
    schedule for each of O(log n) numbers of slots. Memory: at most 256 MiB.

    Reference: Griewank and Walther 2000, "Algorithm 799: revolve", ACM TOMS 26(1).

    Raises
    ------
    UnsuitableProblemError
        If the problem does not come from a chain, or the chain's layers differ.
    """
    return propose_slots(problem, deadline, mixed=False)


def propose_slots(problem: Problem, deadline: Deadline, *, mixed: bool) -> Proposal:
    """Return the schedule of `revolve_actions` with the most slots whose simulated peak fits.

    The number of slots grows in doubling steps until it no longer fits, and is then found by bisection.
    """
    chain = uniform_chain(problem, "mixed" if mixed else "revolve")
    steps = len(chain.layers)
    found: dict[int, Schedule] = {}
    peaks: list[int] = []

    def fits(slots: int) -> bool:
        schedule = chain_schedule(chain, slots, mixed=mixed)
        peaks.append(simulate(chain.graph, schedule).peak_bytes)
        if peaks[-1] <= problem.budget_bytes:
            found[slots] = schedule
        return slots in found

    fewest = _fewest_slots(steps, mixed)
    most = min(steps, MOST_MIXED_ENTRIES // steps) if mixed else steps
    slots = _most(fewest, most, fits, deadline)
    kept = "states or data" if mixed else "states"
    global_bound = one_cut_bound(chain_costs(chain), problem.budget_bytes)
    if slots not in found:
        message = f"the fewest slots tried need {format_bytes(min(peaks))}" if peaks else "out of time"
        return Proposal(
            None,
            f"slots of {kept}",
            global_bound=global_bound,
            infeasible=global_bound == math.inf,
            messages=(message,),
        )
    layer = chain.layers[0]
    extra = extra_forwards(steps, slots, mixed=mixed)
    return Proposal(
        found[slots],
        f"{slots} slots of {kept}",
        bound=steps * (layer.forward_time + layer.backward_time) + extra * layer.forward_without_saving_time,
        global_bound=global_bound,
        messages=(f"slots: {slots}",),
    )


def chain_schedule(chain: Chain, slots: int, *, mixed: bool = False) -> Schedule:
    """Return the schedule of a chain that follows `revolve_actions`, with layers as steps."""
    runs = ChainRuns(chain)
    for action, start, stop in revolve_actions(len(chain.layers), slots, mixed=mixed):
        if action == "forward":
            for layer in range(start, stop):
                runs.forward(layer)
        elif action == "save":
            runs.forward_saving(start)
        else:
            runs.backward(start)
    return runs.schedule()


def uniform_chain(problem: Problem, solver: str) -> Chain:
    """Return the chain of a problem whose layers are equal except for names and parameters.

    Raises
    ------
    UnsuitableProblemError
        If the problem does not come from a chain, or a layer differs from the first.
    """
    chain = problem.chain
    if chain is None:
        raise UnsuitableProblemError(f'"{solver}" solves chains of equal layers, not graphs: use "auto" or "ilp"')
    first = chain.layers[0]
    for layer in chain.layers:
        for field in _differences(first, layer):
            raise UnsuitableProblemError(
                f'"{solver}" solves chains of equal layers, and layer "{layer.name}" differs from "{first.name}" in'
                f' {field}: {getattr(layer, field)!r} against {getattr(first, field)!r}; use "dp"'
            )
    return chain


def _differences(first: Layer, layer: Layer) -> list[str]:
    names = [field.name for field in fields(layer) if field.name not in _MAY_DIFFER]
    return [name for name in names if getattr(first, name) != getattr(layer, name)]


def _chunks(
    emit: Callable[[Ints, int, Codes, Ints, Ints], tuple[int, int]], steps: int, slots: int, repetitions: int
) -> Iterator[Iterable[Action]]:
    # Each row of the stack has one slot less than the row below it, except the top two.
    stack = np.empty((slots + 2, 4), np.int64)
    stack[0] = 0, steps, slots, repetitions
    codes = np.empty(_CHUNK_ACTIONS, np.int8)
    starts, stops = np.empty((2, _CHUNK_ACTIONS), np.int64)
    depth = 1
    while depth:
        filled, depth = emit(stack, depth, codes, starts, stops)
        yield zip(_ACTIONS[codes[:filled]].tolist(), starts[:filled].tolist(), stops[:filled].tolist(), strict=True)


def _repetitions(steps: int, slots: int) -> int:
    """Return the least r with C(slots + r, r) >= steps: the most runs without saving of any step."""
    r, binomial = 0, 1
    while binomial < steps:
        r += 1
        binomial = binomial * (slots + r) // r
    return r


def _checked(steps: int, slots: int, mixed: bool) -> tuple[int, int]:
    """Return the steps and the useful slots, or raise an error."""
    for name, value in (("steps", steps), ("slots", slots)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidOptionError(f"{name} must be an int of at least 1, got {value!r}")
    if steps > MOST_STEPS:
        raise InvalidOptionError(f"steps must be at most {MOST_STEPS}, got {steps}")
    slots = min(slots, steps)
    if mixed and steps * slots > MOST_MIXED_ENTRIES:
        raise InvalidOptionError(
            f"a mixed schedule of {steps} steps with {slots} slots needs a table of {steps * slots} entries; the limit"
            f" is {MOST_MIXED_ENTRIES}: use fewer steps or slots, or mixed=False, which needs no table"
        )
    return steps, slots


def _fewest_slots(steps: int, mixed: bool) -> int:
    """Return the least number of slots whose schedule does not have too many runs to be simulated."""
    slots = 1
    while steps + extra_forwards(steps, slots, mixed=mixed) > MOST_RUNS:
        slots += 1
    return slots


def _most(low: int, high: int, fits: Callable[[int], bool], deadline: Deadline) -> int:
    """Return the largest number that fits, or `low`; numbers below one that fits are assumed to fit."""
    best, step = low - 1, 1
    while best < high and not deadline.passed:
        tried = min(best + step, high)
        if not fits(tried):
            high = tried - 1
            break
        best, step = tried, 2 * step
    while best < high and not deadline.passed and best >= low:
        middle = (best + high + 1) // 2
        if fits(middle):
            best = middle
        else:
            high = middle - 1
    return max(best, low)
