"""Chains of equal layers, and of layers with random sizes and times."""

from __future__ import annotations

import math

import numpy as np

from scheduler.errors import InvalidOptionError
from scheduler.graph.chain import Chain
from scheduler.graph.layers import Layer
from scheduler.zoo.tape import check_sizes


def uniform_chain(
    layers: int = 32,
    *,
    forward_time: float = 1.0,
    backward_time: float = 2.0,
    output_bytes: int = 1,
    saved_bytes: int = 0,
) -> Chain:
    """Return a chain of equal layers, for which the closed forms of the literature hold.

    Parameters
    ----------
    layers : int
    forward_time, backward_time : float
        Of each layer, in units.
    output_bytes, saved_bytes : int
        Of each layer, as for `Layer`; the batch is as large as an output.

    Raises
    ------
    InvalidOptionError
        If there is no layer.
    InvalidGraphError
        If a time or a size is negative or not finite.

    Examples
    --------
    >>> chain = uniform_chain(3)
    >>> [layer.name for layer in chain.layers], chain.layers[0].backward_time
    (['layer0', 'layer1', 'layer2'], 2.0)
    """
    check_sizes(layers=layers)
    return Chain(
        tuple(Layer(f"layer{i}", forward_time, backward_time, output_bytes, saved_bytes) for i in range(layers)),
        output_bytes,
        time_unit="unit",
        name=f"uniform_chain_{layers}",
    )


def heterogeneous_chain(layers: int = 32, *, seed: int = 0, spread: float = 8.0) -> Chain:
    """Return a chain of layers of random sizes and times.

    Output bytes and forward times are drawn log-uniformly around 2^20 bytes and 1 unit; a
    backward takes twice as long as its forward, and a layer saves up to four times its output.

    Parameters
    ----------
    layers : int
    seed : int
    spread : float
        Ratio of the largest to the smallest value that can be drawn, at least 1.

    Raises
    ------
    InvalidOptionError
        If there is no layer, or the spread is below 1.
    """
    check_sizes(layers=layers)
    if not 1 <= spread < math.inf:
        raise InvalidOptionError(f"spread must be a number of at least 1, got {spread!r}")
    random = np.random.default_rng(seed)
    factors = spread ** random.uniform(-0.5, 0.5, (2, layers))
    outputs = [round(2**20 * factor) for factor in factors[0]]
    saved = [round(share * output) for share, output in zip(random.uniform(0, 4, layers), outputs, strict=True)]
    return Chain(
        tuple(
            Layer(f"layer{i}", float(time), 2 * float(time), output, kept)
            for i, (time, output, kept) in enumerate(zip(factors[1], outputs, saved, strict=True))
        ),
        2**20,
        time_unit="unit",
        name=f"heterogeneous_chain_{layers}_{seed}",
    )
