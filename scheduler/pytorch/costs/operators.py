"""Costs of single operations: measured, or computed from FLOPs.

A third to a half of a step's time has no FLOPs: elementwise operations, normalizations and
copies. Use FLOPs to compare work on any machine, and measured times for the fastest schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

from torch import Tensor, fx

from scheduler.errors import InvalidOptionError
from scheduler.pytorch.capture.instructions import Call, Lowered
from scheduler.pytorch.capture.operators import describe_call, nodes_in, output_values, storage_key
from scheduler.pytorch.costs.timing import Rates, Trials, measure_rates
from scheduler.pytorch.measurement.flop_formulas import count_flops

Costs = Literal["measured", "flops"]

FLOPS_PER_BYTE = 1e-3
"""Cost of moving one byte, in FLOPs: small enough that fewer FLOPs always win and moved bytes only break
ties, large enough for solvers to see a difference."""


def with_costs(lowered: Lowered, costs: Costs, *, workspaces: bool | None = None) -> Lowered:
    """Return the same graph with the times and workspaces of its calls.

    Parameters
    ----------
    lowered : Lowered
    costs : "measured" or "flops"
        "measured": each distinct call (operator, shapes, strides, dtypes, other arguments) is
        run alone on random data; its time is the shortest one, in seconds. The time of a call
        that cannot be run (on device "meta", or because the operator fails on such data) is
        estimated from its FLOPs and bytes at the machine's rates. "flops": exact and the same
        on every machine. Matrix products, convolutions, attention, recurrent layers, linear
        algebra and Fourier transforms cost their FLOPs, as published comparisons count them.
        Everything else (elementwise operations, normalizations, dropout, pooling, copies) is
        limited by the bytes that it reads and writes, and costs `FLOPS_PER_BYTE` for each.
    workspaces : bool, optional
        Whether to measure workspaces: the bytes that each distinct call, run alone, allocates
        in addition to its outputs. By default True if times are measured.

    Raises
    ------
    InvalidOptionError
        If `costs` is neither "measured" nor "flops".
    """
    if costs not in get_args(Costs):
        raise InvalidOptionError(f'costs must be "measured" or "flops", got {costs!r}')
    is_timed = costs == "measured"
    has_workspaces = is_timed if workspaces is None else workspaces
    calls = {_signature(call): call for call in lowered.instructions if isinstance(call, Call)}
    trials = Trials([*calls.values()] if is_timed or has_workspaces else ())
    times = _times(calls, trials) if is_timed else {s: flop_cost(call.node) for s, call in calls.items()}
    sizes = dict(zip(calls, trials.workspaces(), strict=True)) if has_workspaces else dict.fromkeys(calls, 0)
    operations = []
    for operation, call in zip(lowered.graph.operations, lowered.instructions, strict=True):
        if isinstance(call, Call):
            signature = _signature(call)
            operation = replace(operation, time=times[signature], workspace_bytes=sizes[signature])
        operations.append(operation)
    unit = "s" if is_timed else "FLOP"
    return replace(lowered, graph=replace(lowered.graph, operations=operations, time_unit=unit))


def flop_cost(node: fx.Node) -> float:
    """Return the FLOPs of a call: 0 for a view; if there are none, `FLOPS_PER_BYTE` for each byte that it moves."""
    if _is_view(node):
        return 0.0
    return _flops(node) or FLOPS_PER_BYTE * max(1, _moved_bytes(node))


def _signature(call: Call) -> str:
    """Return the operator that is run, which may differ from the captured one, and the signature of the call."""
    return f"{call.target} {describe_call(call.node)}"


def _times(calls: Mapping[str, Call], trials: Trials) -> dict[str, float]:
    """Return the time of each call in seconds."""
    measured = dict(zip(calls, trials.times(), strict=True))
    times = {signature: seconds for signature, seconds in measured.items() if seconds is not None}
    if len(times) < len(calls):
        rates = measure_rates()
        times |= {s: _estimate(call.node, rates) for s, call in calls.items() if s not in times}
    return times


def _estimate(node: fx.Node, rates: Rates) -> float:
    """Return the time of a call in seconds at these rates: the longer of the times for its FLOPs and its bytes."""
    if _is_view(node):
        return rates.seconds_per_call
    work = max(_flops(node) * rates.seconds_per_flop, _moved_bytes(node) * rates.seconds_per_byte)
    return rates.seconds_per_call + work


def _flops(node: fx.Node) -> float:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    return float(count_flops(node.target, args, kwargs, node.meta.get("val")))


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
