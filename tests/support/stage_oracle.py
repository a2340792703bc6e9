"""Every schedule of stages of a small graph, simulated one by one, and what holds a solver to the best of them."""

from __future__ import annotations

import itertools
import math

from hypothesis import strategies as st

import scheduler as sc
from scheduler.errors import InvalidScheduleError
from scheduler.problem import Problem
from scheduler.schedule import schedule_from_runs
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.registry import Propose


@st.composite
def plain_graphs(draw: st.DrawFn) -> sc.Graph:
    """Four operations with one or two outputs each, every tensor on a storage of its own."""
    tensors: list[sc.Tensor] = []
    operations: list[sc.Operation] = []
    for k in range(4):
        known = [tensor.name for tensor in tensors]
        inputs = draw(st.lists(st.sampled_from(known), unique=True, max_size=3)) if known else []
        outputs = [f"t{k}{end}" for end in "ab"[: draw(st.sampled_from([1, 1, 2]))]]
        tensors += [sc.Tensor(name, draw(st.integers(0, 4))) for name in outputs]
        time, workspace = draw(st.integers(0, 4)), draw(st.sampled_from([0, 0, 2]))
        repeatable = draw(st.integers(0, 5)) > 0
        operations.append(sc.Operation(f"o{k}", inputs, outputs, time, workspace, repeatable=repeatable))
    names = [tensor.name for tensor in tensors]
    results = draw(st.lists(st.sampled_from(names), unique=True, max_size=2))
    return sc.Graph(operations, tensors, results=results, required=[op.name for op in operations])


def best_of_all_stages(graph: sc.Graph, budget: int, *, most_runs: int = 99) -> float:
    """The least time of any choice of what to run again in which stage, so many runs each; inf if none fits."""
    count = len(graph.operations)
    repeatable = [op.repeatable for op in graph.operations]
    stages = range(count + bool(graph.results))
    choices = [(t, k) for t in stages for k in range(min(t, count)) if repeatable[k]]
    best = math.inf
    for chosen in itertools.product((False, True), repeat=len(choices)):
        again = {choice for choice, taken in zip(choices, chosen, strict=True) if taken}
        if any(sum(k == run for _, run in again) >= most_runs for k in range(count)):
            continue
        runs = [k for t in stages for k in range(count) if k == t or (t, k) in again]
        try:
            simulated = sc.simulate(graph, schedule_from_runs(graph, runs))
        except InvalidScheduleError:
            continue
        if simulated.peak_bytes <= budget:
            best = min(best, simulated.time)
    return best


def check_against_all_stages(propose: Propose, graph: sc.Graph, tighter: int, *, most_runs: int = 99) -> None:
    """Hold a solver to the best of all schedules of stages, at so many bytes under the peak, or at the floor."""
    problem = Problem(graph, 2**40)
    budget = max(problem.floor.bytes, problem.baseline.peak_bytes - tighter)
    best = best_of_all_stages(graph, budget, most_runs=most_runs)
    proposal = propose(Problem(graph, budget), deadline=Deadline(20), seed=0)
    assert proposal.bound == best
    if best == math.inf:
        assert proposal.schedule is None
    else:
        assert proposal.schedule is not None
        simulated = sc.simulate(graph, proposal.schedule)
        assert (simulated.time, simulated.peak_bytes <= budget) == (best, True)
