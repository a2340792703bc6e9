"""Times of single operations: measured, or computed from FLOPs.

FLOPs alone call a third to a half of a step's time free, because elementwise operations,
normalisations and copies have none. Here only views are free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Literal, cast

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from scheduler.errors import InvalidOptionError
from scheduler.pytorch.memory import count_flops
from scheduler.pytorch.operators import describe_call, is_getitem, nodes_in, output_values, storage_key

Costs = Literal["measured", "flops"]

FLOPS_PER_BYTE = 10.0
"""FLOPs that take as long as moving one byte: measured on CPU caches, the order of magnitude elsewhere."""

_LEAST_RUNS = 3
_MOST_RUNS = 20
_SECONDS_PER_SIGNATURE = 0.02


def time_function(costs: Costs, nodes: Iterable[fx.Node]) -> tuple[Callable[[fx.Node], float], str]:
    """Return the function that gives a call's time, and its unit.

    Parameters
    ----------
    costs : "measured" or "flops"
        Measured: each distinct call (operator, shapes, strides, dtypes, other arguments) is
        run alone on random data several times, and its shortest time taken, in seconds.
        FLOPs: exact and the same on every machine; a call without FLOPs costs
        `FLOPS_PER_BYTE` for each byte that it reads and writes.
    nodes : iterable of Node
        The calls that will be asked for.

    Returns
    -------
    callable, str
        The unit is "s" or "FLOP".

    Raises
    ------
    InvalidOptionError
        If `costs` is neither.
    """
    if costs == "flops":
        return flop_cost, "FLOP"
    if costs == "measured":
        signatures = {describe_call(node): node for node in nodes if not is_getitem(node)}
        measured = {signature: measure_call(node) for signature, node in signatures.items()}
        return lambda node: measured[describe_call(node)], "s"
    raise InvalidOptionError(f'costs is "measured" or "flops", not {costs!r}')


def flop_cost(node: fx.Node) -> float:
    """Return the FLOPs of a call; for a call without, what moving its bytes is worth; 0 for views."""
    if _is_view(node):
        return 0.0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    flops = count_flops(node.target, args, kwargs, node.meta["val"])
    return float(flops) if flops else FLOPS_PER_BYTE * max(1, _moved_bytes(node))


def measure_call(node: fx.Node) -> float:
    """Return the shortest time of a call run alone on random data, in seconds."""
    generator = torch.Generator().manual_seed(0)
    made: dict[fx.Node, Argument] = {}

    def real(argument: fx.Node) -> Argument:
        if argument not in made:
            made[argument] = cast("Argument", _random_like(argument.meta["val"], generator))
        return made[argument]

    args, kwargs = fx.map_arg((node.args, node.kwargs), real)
    target = node.target
    assert callable(target)
    states = _save_generators()
    best, spent, runs = float("inf"), 0.0, 0
    try:
        with torch.no_grad(), torch._C._DisableAutocast():
            while runs <= _LEAST_RUNS or (runs <= _MOST_RUNS and spent < _SECONDS_PER_SIGNATURE):
                _synchronize()
                start = time.perf_counter()
                result = target(*args, **kwargs)
                _synchronize()
                seconds = time.perf_counter() - start
                del result
                runs += 1
                if runs > 1:  # the first run warms up
                    best, spent = min(best, seconds), spent + seconds
    finally:
        _restore_generators(states)
    return best


def _is_view(node: fx.Node) -> bool:
    inputs = {storage_key(a.meta["val"]) for a in _tensor_inputs(node)}
    outputs = [value for value in output_values(node) if isinstance(value, Tensor)]
    return bool(outputs) and all(storage_key(value) in inputs for value in outputs)


def _moved_bytes(node: fx.Node) -> int:
    tensors = [argument.meta["val"] for argument in _tensor_inputs(node)]
    tensors += [value for value in output_values(node) if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _tensor_inputs(node: fx.Node) -> list[fx.Node]:
    arguments = nodes_in((node.args, node.kwargs))
    return [argument for argument in arguments if isinstance(argument.meta["val"], Tensor)]


def _random_like(value: object, generator: torch.Generator) -> object:
    """Return a real tensor of the same shape, strides and dtype; integers are 0, a valid index everywhere."""
    if not isinstance(value, Tensor):
        return value
    size = value.untyped_storage().nbytes() // value.element_size()
    flat = torch.zeros(size, dtype=value.dtype)
    if value.dtype.is_floating_point:
        flat = torch.rand(size, generator=generator).to(value.dtype)
    return flat.to(value.device).as_strided(value.shape, value.stride(), value.storage_offset())


def _save_generators() -> list[tuple[torch.Generator, Tensor]]:
    generators = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generators += list(torch.cuda.default_generators)
    return [(generator, generator.get_state()) for generator in generators]


def _restore_generators(states: list[tuple[torch.Generator, Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
