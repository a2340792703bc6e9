"""Turn a point of the integer program back into a schedule."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.graph import Graph
from scheduler.schedule import Schedule, schedule_from_runs
from scheduler.solvers.walk import Walk


def decode(graph: Graph, chain: Sequence[int], live: Sequence[frozenset[int]]) -> Schedule:
    """Return the schedule that keeps exactly these tensors at the cuts.

    A walk follows the input order. At a cut it recomputes the tensors to keep and drops the
    others; before each operation it recomputes the missing inputs.

    Parameters
    ----------
    graph : Graph
    chain : sequence of int
        Tasks, ascending.
    live : sequence of frozenset of int
        Tensors to keep when each task first runs.
    """
    index = graph.index
    keep = dict(zip(chain, live, strict=True))
    walk = Walk(graph)
    computed: set[int] = set()
    for i in index.defaults:
        task = index.task_of[i]
        if task in keep:
            # A tensor that was never computed is left to its readers: forward tasks may not first run this late.
            walk.ensure(t for t in keep[task] if t in computed and walk.can_compute(t))
            walk.keep_only(keep[task])
        begun = len(walk.runs)
        walk.run(i)
        computed.update(t for run in walk.runs[begun:] for t in index.outputs[run])
    walk.ensure(t for t, result in enumerate(index.is_result) if result)
    return schedule_from_runs(graph, walk.runs)
