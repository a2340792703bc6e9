"""Turn a point of the integer program back into a schedule."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from scheduler.graph import Graph
from scheduler.schedule import Schedule, schedule_from_runs
from scheduler.solvers.ilp.precedence import Precedence, bits
from scheduler.solvers.walk import Walk


def decode(
    graph: Graph,
    chain: Sequence[int],
    live: Sequence[frozenset[int]],
    order: Sequence[int] | None = None,
    rebuilt_alone: Collection[int] = (),
) -> Schedule:
    """Return the schedule that keeps exactly these tensors at the cuts.

    A walk follows the order of first runs. At a cut it recomputes the tensors to keep and drops
    the others; before each operation it recomputes the missing inputs.

    Parameters
    ----------
    graph : Graph
    chain : sequence of int
        Tasks, ascending.
    live : sequence of frozenset of int
        Tensors to keep when each task first runs.
    order : sequence of int, optional
        Operations in the order of their first runs; by default the defaults in the input order.
    rebuilt_alone : collection of int, optional
        As for `Walk`.
    """
    index = graph.index
    keep = dict(zip(chain, live, strict=True))
    walk = Walk(graph, rebuilt_alone)
    computed: set[int] = set()
    for i in index.defaults if order is None else order:
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


def first_run_order(
    graph: Graph,
    precedence: Precedence,
    chain: Sequence[int],
    has_run: Sequence[frozenset[int]],
    chosen: Mapping[int, int],
) -> list[int]:
    """Return operations in an order of first runs in which exactly these tasks have run before each cut.

    Parameters
    ----------
    graph : Graph
    precedence : Precedence
    chain : sequence of int
        Tasks, each before the next.
    has_run : sequence of frozenset of int
        Tasks without precedence to each cut's that have run before it.
    chosen : mapping of int to int
        `substitutes` that run first instead of their tasks' defaults, by task.
    """
    index = graph.index
    wanted = [2 * len(chain)] * len(index.tasks)
    for k in range(len(chain) - 1, -1, -1):
        for task in (*bits(precedence.before(chain[k])), *has_run[k]):
            wanted[task] = 2 * k
        wanted[chain[k]] = 2 * k + 1
    place: dict[int, int] = {}
    last_forward = 0
    runs = [chosen.get(index.task_of[i], i) for i in index.defaults]
    for i in runs:
        # Precedence knows less of tasks with several alternatives than of those that run.
        place[i] = max([wanted[index.task_of[i]], *(place[source] for source in _sources(graph, i) if source in place)])
        if graph.operations[i].phase == "forward":
            last_forward = max(last_forward, place[i])
        else:
            place[i] = max(place[i], last_forward)
    return sorted(runs, key=place.__getitem__)


def _sources(graph: Graph, i: int) -> Iterator[int]:
    """Yield the operations that produce what an operation reads."""
    for tensor in graph.index.inputs[i]:
        yield from graph.index.producers[tensor]
