"""Irregular graphs of random layers, with their input order."""

from __future__ import annotations

import math

import numpy as np

from scheduler.errors import InvalidOptionError
from scheduler.graph import Graph, Operation, Tensor

# The four normal distributions of the bytes, in units of 1000 bytes.
_SHARES = (0.3, 0.3, 0.3, 0.1)
_MEANS = (0.5, 1.0, 3.0, 5.0)
_DEVIATIONS = (0.5, 1.0, 1.0, 1.0)


def random_layered(
    operations: int = 100,
    *,
    seed: int = 0,
    width: float = 0.27,
    variability: float = 0.75,
    edge_density: float = 0.2,
    skip_share: float = 0.14,
) -> Graph:
    """Return an irregular graph of random layers, after the public sets of Gagrani et al. and MOCCASIN.

    Between a source and a sink are layers of random width; an operation reads one or more
    operations of the layer before, and sometimes one of an earlier layer. Bytes are drawn from a
    mixture of four normal distributions, times uniformly from 1 to 1000. The input order is a
    random topological order. All operations are required, and there are no results.

    Parameters
    ----------
    operations : int
        At least 3.
    seed : int
    width : float
        Mean width of a layer, over the number of layers.
    variability : float
        Widths are drawn uniformly within this share of their mean.
    edge_density : float
        Probability that an operation reads another one of the layer before, after the first.
    skip_share : float
        Probability that an edge comes from an earlier layer instead.

    Raises
    ------
    InvalidOptionError
        If there are fewer than three operations.

    References
    ----------
    Gagrani et al., Neural topological ordering for computation graphs, NeurIPS 2022;
    Bartan et al., MOCCASIN, ICML 2023. The exact procedure is not published: the shape is theirs,
    the distributions are ours.
    """
    if operations < 3:
        raise InvalidOptionError(f"operations must be at least 3, got {operations}")
    random = np.random.default_rng(seed)
    layers = _layers(operations, width, variability, random)
    inputs, last = _inputs(layers, edge_density, skip_share, random), operations - 1
    kinds = random.choice(len(_SHARES), operations, p=_SHARES)
    sizes = np.abs(random.normal(np.take(_MEANS, kinds), np.take(_DEVIATIONS, kinds)))
    times = random.integers(1, 1001, operations)
    times[[0, last]] = 0
    return Graph(
        [
            Operation(f"op{i}", [f"t{source}" for source in inputs[i]], [f"t{i}"], float(times[i]))
            for i in _random_order(inputs, random)
        ],
        [Tensor(f"t{i}", 10 * math.ceil(100 * size)) for i, size in enumerate(sizes)],
        required=[f"op{i}" for i in range(operations)],
        time_unit="unit",
        name=f"random_layered_{operations}_{seed}",
    )


def _layers(operations: int, width: float, variability: float, random: np.random.Generator) -> list[list[int]]:
    mean = math.sqrt(operations * width)
    layers, used = [[0]], 1
    while used < operations - 1:
        drawn = round(random.uniform(mean * (1 - variability), mean * (1 + variability)))
        count = min(max(1, drawn), operations - 1 - used)
        layers.append(list(range(used, used + count)))
        used += count
    return [*layers, [operations - 1]]


def _inputs(
    layers: list[list[int]], edge_density: float, skip_share: float, random: np.random.Generator
) -> dict[int, list[int]]:
    """Return the operations that each operation reads; the last one reads all that no other reads."""
    inputs: dict[int, list[int]] = {0: []}
    for level, layer in enumerate(layers[1:], 1):
        before, earlier = layers[level - 1], [number for older in layers[: level - 1] for number in older]
        for number in layer:
            count = min(len(before), 1 + int(random.binomial(len(before), edge_density)))
            chosen = set(random.choice(before, count, replace=False).tolist())
            for source in sorted(chosen):
                if earlier and random.random() < skip_share:
                    chosen.remove(source)
                    chosen.add(int(random.choice(earlier)))
            inputs[number] = sorted(chosen)
    read = {source for sources in inputs.values() for source in sources}
    (last,) = layers[-1]
    inputs[last] = sorted({*inputs[last], *(number for number in range(last) if number not in read)})
    return inputs


def _random_order(inputs: dict[int, list[int]], random: np.random.Generator) -> list[int]:
    readers: dict[int, list[int]] = {number: [] for number in inputs}
    missing = {number: len(sources) for number, sources in inputs.items()}
    for number, sources in inputs.items():
        for source in sources:
            readers[source].append(number)
    ready, order = [0], []
    while ready:
        number = ready.pop(int(random.integers(len(ready))))
        order.append(number)
        for reader in readers[number]:
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    return order
