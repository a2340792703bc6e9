"""What recomputing evicted tensors costs, as a walk estimates it whenever it evicts.

A tensor counts with those that it is recomputed from; or with all evicted tensors that are connected
with it, which a union-find keeps (Kirisame et al. 2021, "Dynamic Tensor Rematerialization").
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler.solvers.graph_arrays import Flags, Ints
from scheduler.solvers.jit import inlined_kernel, inner_kernel

Floats = npt.NDArray[np.float64]


class EvictionCosts(NamedTuple):
    """What is known of evicted tensors.

    Attributes
    ----------
    weight : ndarray of float64, shape (storages,)
        What evicting each storage gains.
    run_cost : ndarray of float64, shape (operations,)
        What each run counts.
    adds : bool
        Whether other evicted tensors count as well; if not, only the run of a tensor's own operation.
    connects : bool
        Whether all connected tensors count.
    cost : ndarray of float64, shape (tensors,)
        If they do not: about what the operations that recompute each evicted tensor count.
    evicted : ndarray of bool, shape (tensors,)
        If they do: the tensors that were evicted, are not available, and will be needed.
    node : ndarray of int64, shape (tensors,)
        The last eviction of each tensor.
    joined : ndarray of int64, shape (evictions,)
        Another eviction of connected tensors, or the same one if it stands for them (union-find). What is available
        again stays joined, and counts no more.
    sum : ndarray of float64, shape (evictions,)
        What connected tensors count together, at the eviction that stands for them.
    seen : ndarray of int64, shape (evictions,)
        When the tensors that one stands for were counted last, by `_SUMS`.
    counts : ndarray of int64
        By `_SUMS` and `_EVICTIONS`: numbers of costs computed, and of evictions of which connected tensors count.
    """

    weight: Floats
    run_cost: Floats
    adds: bool
    connects: bool
    cost: Floats
    evicted: Flags
    node: Ints
    joined: Ints
    sum: Floats
    seen: Ints
    counts: Ints


_SUMS, _EVICTIONS = range(2)


def no_evictions(
    tensors: int, weight: Floats, run_cost: Floats, *, adds: bool, connects: bool, most: int
) -> EvictionCosts:
    """Return the costs before anything is evicted; connected tensors count for at most so many evictions."""
    evictions = most if connects else 0
    return EvictionCosts(
        weight=weight,
        run_cost=run_cost,
        adds=adds,
        connects=connects,
        cost=np.zeros(tensors, dtype=np.float64),
        evicted=np.zeros(tensors, dtype=np.bool_),
        node=np.zeros(tensors, dtype=np.int64),
        joined=np.arange(evictions),
        sum=np.zeros(evictions, dtype=np.float64),
        seen=np.zeros(evictions, dtype=np.int64),
        counts=np.zeros(2, dtype=np.int64),
    )


@inner_kernel
def recomputation_cost(graph, uses, costs, available, t):  # type: ignore[no-untyped-def]
    """Return about what the operations that recompute a tensor count."""
    i = graph.producer[t]
    cost = costs.run_cost[i]
    if not costs.adds:
        return cost
    costs.counts[_SUMS] += 1
    for e in range(graph.input_start[i], graph.input_start[i + 1]):
        source = graph.inputs[e]
        if costs.connects:
            cost += _connected_cost(costs, source)
        elif not available[source]:
            cost += costs.cost[source]
    if costs.connects:
        for k in range(uses.start[t], uses.start[t + 1]):
            reader = graph.order[uses.steps[k]]
            for place in range(graph.output_start[reader], graph.output_start[reader + 1]):
                cost += _connected_cost(costs, graph.outputs[place])
    return cost


@inner_kernel
def note_eviction(graph, uses, costs, available, t):  # type: ignore[no-untyped-def]
    """Note what recomputing a tensor will cost, right before it is evicted."""
    if costs.connects:
        _connect(graph, uses, costs, t)
    else:
        costs.cost[t] = recomputation_cost(graph, uses, costs, available, t)


@inlined_kernel
def forget_eviction(graph, costs, t):  # type: ignore[no-untyped-def]
    """Count a tensor no more among the evicted ones: it is available again, or nothing will need it."""
    if costs.evicted[t]:
        costs.evicted[t] = False
        root = _root(costs, costs.node[t])
        costs.sum[root] = max(0.0, costs.sum[root] - costs.run_cost[graph.producer[t]])


@inlined_kernel
def _connected_cost(costs, t):  # type: ignore[no-untyped-def]
    """Return what an evicted tensor and those connected with it count, unless they are in the present sum already."""
    if not costs.evicted[t]:
        return 0.0
    root = _root(costs, costs.node[t])
    if costs.seen[root] == costs.counts[_SUMS]:
        return 0.0
    costs.seen[root] = costs.counts[_SUMS]
    return costs.sum[root]


@inner_kernel
def _connect(graph, uses, costs, t):  # type: ignore[no-untyped-def]
    """Join a tensor with the evicted ones that it is recomputed from, and those recomputed from it."""
    if costs.counts[_EVICTIONS] == costs.sum.shape[0]:
        return  # after so many evictions, as many as runs at most, it does not count
    i, node = graph.producer[t], costs.counts[_EVICTIONS]
    costs.counts[_EVICTIONS] += 1
    costs.evicted[t], costs.node[t], costs.sum[node] = True, node, costs.run_cost[i]
    for e in range(graph.input_start[i], graph.input_start[i + 1]):
        _join(costs, node, graph.inputs[e])
    for k in range(uses.start[t], uses.start[t + 1]):
        reader = graph.order[uses.steps[k]]
        for place in range(graph.output_start[reader], graph.output_start[reader + 1]):
            _join(costs, node, graph.outputs[place])


@inner_kernel
def _join(costs, node, t):  # type: ignore[no-untyped-def]
    """Join an eviction with that of a tensor, if it is evicted."""
    if not costs.evicted[t]:
        return
    root, other = _root(costs, node), _root(costs, costs.node[t])
    if root != other:
        costs.joined[root] = other
        costs.sum[other] += costs.sum[root]


@inlined_kernel
def _root(costs, node):  # type: ignore[no-untyped-def]
    """Return the eviction that stands for those joined with one, and shorten the way there."""
    while costs.joined[node] != node:
        costs.joined[node] = costs.joined[costs.joined[node]]
        node = costs.joined[node]
    return node
