"""Explain why no schedule was found within a budget, or only a slow one, and what helps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from scheduler.graph import Graph
from scheduler.problem import Floor, Problem
from scheduler.simulator import Simulation
from scheduler.solution import Solution, Status
from scheduler.units import format_bytes, format_peak, format_percent

_NAMES = {
    "parameter": "parameters",
    "buffer": "buffers",
    "input": "inputs",
    "constant": "constants",
    "optimizer state": "optimizer state",
    "reserve": "the reserve",
    "gradient": "gradients",
    "output": "outputs",
    "activation": "other results",
    "random state": "random states",
}
_HELPS = {
    "parameter": ("train fewer parameters or in a smaller dtype", "shard them over several devices"),
    "gradient": ("train fewer parameters or in a smaller dtype", "shard them over several devices"),
    "optimizer state": ("use an optimizer with less state",),
    "reserve": ("lower reserve=",),
}
"""What makes the memory of a role smaller; of other roles, a smaller batch does."""
_LEAST_SHARE = 0.05
"""Roles with a smaller share of the memory that is fixed are not named."""


def explain(
    problem: Problem,
    solution: Solution,
    known_bytes: int,
    *,
    floor: Floor | None = None,
    least_bytes: int = 0,
    scope: str = "",
) -> str:
    """Return why there is no schedule, and what to do, given the smallest known peak.

    Parameters
    ----------
    problem : Problem
    solution : Solution
        Has no schedule.
    known_bytes : int
        The smallest known peak.
    floor : Floor, optional
        A proven lower bound on every peak; by default that of the problem.
    least_bytes : int
        A proven lower bound on the peak in the search space, if it is known.
    scope : str, optional
        What a proof covers, if not every schedule: "for every choice of ...".
    """

    def peak(count: int) -> str:
        return format_peak(count, solution.resident_bytes, solution.baseline_peak_bytes)

    floor = floor or problem.floor
    budget, known = peak(problem.budget_bytes), peak(known_bytes)
    fixed = fixed_bytes(problem.graph)
    is_fixed = 2 * fixed.total() > known_bytes
    if floor.bytes > problem.budget_bytes:
        why = f"no schedule fits {budget}: {floor.explained(peak(floor.bytes))}."
    elif fixed.total() > problem.budget_bytes:
        why = f"no schedule fits {budget}: what a step begins and ends with needs {peak(fixed.total())}."
    elif solution.status is Status.INFEASIBLE:
        why = (
            f"no schedule fits {budget}: this is proven{scope and f' {scope}'}, although no moment by itself needs that"
            f" much ({floor.explained(peak(floor.bytes))})."
        )
    elif known_bytes <= problem.budget_bytes:
        return (
            f"{solution.solver} found no schedule that fits {budget}, but another solver found one that needs {known}:"
            ' use solver="auto", or allow more time.'
        )
    else:
        why = f"{solution.solver} found no schedule that fits {budget} ({floor.explained(peak(floor.bytes))})."
    if known_bytes > max(floor.bytes, least_bytes):
        why += f" The smallest known schedule needs {known}; whether a smaller one exists is open."
    else:
        why += f" The smallest possible schedule needs {known}."
    if is_fixed:
        stay = format_bytes(fixed.total())
        why += f" Of that, {stay} stay in memory whatever is recomputed, mostly {_listed(fixed)}."
    helps, but = _helps(fixed) if is_fixed else (["use a smaller batch", "split that operation"], "")
    return f'{why} Set the budget to "min" or {known_bytes} bytes, {", ".join(helps[:-1])}, or {helps[-1]}.{but}'


def explain_slow(solution: Solution, faster: Simulation) -> str:
    """Return how slow a solution is, whether a faster one may exist, and which budget is known to have one.

    Parameters
    ----------
    solution : Solution
    faster : Simulation
        Of a faster schedule, for a larger budget unless one is known to fit.
    """

    def peak(count: int) -> str:
        return format_peak(count, solution.resident_bytes, solution.baseline_peak_bytes)

    if solution.status is Status.OPTIMAL:
        proof = f"which is proven optimal in {solution.search_space}"
    else:
        proof = f"with a gap of {format_percent(solution.gap)}: a longer search may find a faster plan"
    times = f"{faster.time / solution.baseline_time:.2f} times"
    if faster.peak_bytes <= solution.budget_bytes:
        advice = f'A plan that takes {times} as long fits this budget: use solver="auto"'
    else:
        advice = f"With a budget of {peak(faster.peak_bytes)}, at most {times} is known to suffice"
    return (
        f"the plan for {peak(solution.budget_bytes)} takes {solution.time / solution.baseline_time:.2f} times as long"
        f" as the plain step, {proof}. {advice}."
    )


def fixed_bytes(graph: Graph) -> Counter[str]:
    """Return the bytes that are in memory at the end of every schedule, by role: resident tensors and results."""
    sizes = graph.resident_bytes_by_role()
    index = graph.index
    results = {index.storage_of[t]: t for t in reversed(range(len(graph.tensors))) if index.is_result[t]}
    for storage, t in results.items():
        sizes[graph.tensors[t].role] += index.storage_bytes[storage]  # 0 if it is resident
    return sizes


def _listed(fixed: Counter[str]) -> str:
    """Return the roles that take most, with their bytes."""
    shown = [f"{_NAMES[role]} ({format_bytes(size)})" for role, size in _largest(fixed)]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _helps(fixed: Counter[str]) -> tuple[list[str], str]:
    """Return what makes the largest roles smaller, at least two ways, and what does not."""
    roles = [role for role, _ in _largest(fixed)]
    helps = list(dict.fromkeys(way for role in roles for way in _HELPS.get(role, ("use a smaller batch",))))
    but = "" if "use a smaller batch" in helps else " A smaller batch does not make these smaller."
    return (helps if len(helps) > 1 else [*helps, "use a smaller model"]), but


def _largest(fixed: Counter[str]) -> Sequence[tuple[str, int]]:
    return [(role, size) for role, size in fixed.most_common() if size >= _LEAST_SHARE * fixed.total()]
