"""Costs of single operations: measured, or computed from FLOPs.

A third to a half of a step's time has no FLOPs: elementwise operations, normalizations and
copies. Use FLOPs to compare work on any machine, and measured times for the fastest schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, get_args

from torch import fx

from scheduler.devices import Device
from scheduler.errors import InvalidOptionError
from scheduler.pytorch.capture.instructions import Call, Instruction, Lowered
from scheduler.pytorch.capture.operators import describe_call
from scheduler.pytorch.costs.kept_costs import Cost, keep_costs, measuring_conditions, read_costs
from scheduler.pytorch.costs.progress import Progress, TracingProgress, ignore
from scheduler.pytorch.costs.roofline import with_estimates
from scheduler.pytorch.costs.storages import CLONES_STORAGE
from scheduler.pytorch.costs.timing import Rates, Timing, Trials, measure_rates
from scheduler.pytorch.costs.work import flops_of, is_view, moved_bytes, tensor_inputs

CostName = Literal["measured", "measured-again", "flops"]

Costs = CostName | Device
"""A cost model of operations; that of a device estimates its times."""

FLOPS_PER_BYTE = 1e-3
"""Cost of moving one byte, in FLOPs: small enough that fewer FLOPs always win and moved bytes only break
ties, large enough for solvers to see a difference."""


def with_costs(
    lowered: Lowered,
    costs: Costs,
    *,
    workspaces: bool | None = None,
    may_run: bool = True,
    like: Lowered | None = None,
    progress: Progress = ignore,
) -> Lowered:
    """Return the same graph with the times and workspaces of its calls.

    Parameters
    ----------
    lowered : Lowered
    costs : "measured", "measured-again", "flops" or Device
        "measured": each distinct call (operator, shapes, strides, dtypes, other arguments) is
        run alone on random data, in the order of the step; its time is in seconds. What was
        measured before on this machine is taken from a file (see `kept_costs`), unless it is to
        be measured again. The time of a call that may not be run, or cannot, because the
        operator fails on such data, is estimated from its FLOPs and bytes at the machine's
        rates. "flops": exact and the same on every machine. Matrix products, convolutions,
        attention, recurrent layers, linear algebra and Fourier transforms cost their FLOPs, as
        published comparisons count them. Everything else (elementwise operations,
        normalizations, dropout, pooling, copies) is limited by the bytes that it reads and
        writes, and costs `FLOPS_PER_BYTE` for each. A device: times are estimated in seconds by
        a roofline; see `with_estimates`.
    workspaces : bool, optional
        Whether to measure workspaces: the bytes that each distinct call, run alone, allocates
        in addition to its outputs. By default True if times are measured. For a device, those
        that are known by a formula count.
    may_run : bool
        Whether calls may be run on data of their own. If not, no workspaces are measured.
    like : Lowered, optional
        The same step at other sizes, with measured times: times that are not known are these,
        scaled to the work of the calls, instead of measured. No effect if other operators run.
    progress : callable
        Called after each round of measuring.

    Raises
    ------
    InvalidOptionError
        If `costs` is none of these.
    """
    if isinstance(costs, Device):
        return with_estimates(lowered, costs)
    if costs not in get_args(CostName):
        raise InvalidOptionError(f'costs must be "measured", "measured-again", "flops" or a Device, got {costs!r}')
    is_timed = costs != "flops"
    has_workspaces = may_run and (is_timed if workspaces is None else workspaces)
    signatures = [_signature(item) if isinstance(item, Call) else None for item in lowered.instructions]
    calls = {
        signature: call
        for signature, call in zip(signatures, lowered.instructions, strict=True)
        if signature is not None and isinstance(call, Call)
    }
    scaled = _scaled_times(lowered, signatures, like) if is_timed and like is not None else {}
    found: dict[str, Cost] = {}
    if may_run and (is_timed or has_workspaces):
        order = [signature for signature in signatures if signature is not None]
        wanted = (is_timed and not scaled, has_workspaces)
        found = _measured(calls, order, wanted, progress, again=costs == "measured-again")
    times = _times(calls, found, scaled) if is_timed else {s: flop_cost(call.node) for s, call in calls.items()}
    operations = []
    for operation, call, signature in zip(lowered.graph.operations, lowered.instructions, signatures, strict=True):
        if signature is not None and isinstance(call, Call):
            size = found[signature].workspace_bytes or 0 if has_workspaces else 0
            if has_workspaces and call.state is not None and operation.repeatable:
                # A recomputation keeps the state of the generator, to put it back.
                size += lowered.graph.tensor(call.state).size_bytes
            operation = replace(operation, time=times[signature], workspace_bytes=size)
        operations.append(operation)
    unit = "s" if is_timed else "FLOP"
    return replace(lowered, graph=replace(lowered.graph, operations=operations, time_unit=unit))


def flop_cost(node: fx.Node) -> float:
    """Return the FLOPs of a call: 0 for a view; if there are none, `FLOPS_PER_BYTE` for each byte that it moves."""
    if is_view(node):
        return 0.0
    return flops_of(node) or FLOPS_PER_BYTE * max(1, moved_bytes(node))


def _signature(call: Call) -> str:
    """Return the operator that is run, which may differ from the captured one, and the signature of the call."""
    tensors = [argument.meta["val"] for argument in tensor_inputs(call.node)]
    devices = sorted({str(tensor.device) for tensor in tensors})
    sizes = [tensor.untyped_storage().nbytes() for tensor in tensors] if call.target in CLONES_STORAGE else ""
    return f"{call.target} {describe_call(call.node)} {','.join(devices)} {sizes}"


def _measured(
    calls: Mapping[str, Call],
    order: Sequence[str],
    wanted: tuple[bool, bool],
    progress: Progress,
    *,
    again: bool,
) -> dict[str, Cost]:
    """Return what is measured or known of each call; `wanted` says whether its time and its workspace are."""
    devices = {argument.meta["val"].device for call in calls.values() for argument in tensor_inputs(call.node)}
    conditions = measuring_conditions(devices)
    known = {} if again else read_costs(calls, conditions)
    missing = [signature for signature in calls if not _has(known.get(signature), wanted)]
    if missing:
        position = {signature: number for number, signature in enumerate(missing)}
        places = [position[signature] for signature in order if signature in position]
        trials = Trials([calls[signature] for signature in missing])
        stage = f"measuring {len(missing)} calls"
        timings: Sequence[Timing | None] = [None] * len(missing)
        workspaces: Sequence[int | None] = [None] * len(missing)
        if wanted[0]:
            timings = trials.times(order=places, progress=lambda *done: progress(TracingProgress(stage, *done)))
        if wanted[1]:
            workspaces = trials.workspaces()
        fresh = {
            signature: Cost(timing.seconds if timing else None, timing.spread if timing else 0.0, workspace)
            for signature, timing, workspace in zip(missing, timings, workspaces, strict=True)
        }
        keep_costs({signature: cost for signature, cost in fresh.items() if _has(cost, wanted)}, conditions)
        known |= {signature: cost.or_else(known.get(signature)) for signature, cost in fresh.items()}
    if wanted[0]:
        progress(TracingProgress(f"measured {len(missing)} of {len(calls)} calls", 1.0, spread=_spread(order, known)))
    return known


def _has(cost: Cost | None, wanted: tuple[bool, bool]) -> bool:
    """Return whether a cost has the time and the workspace that are wanted."""
    if cost is None:
        return False
    return not (wanted[0] and cost.seconds is None) and not (wanted[1] and cost.workspace_bytes is None)


def _spread(order: Sequence[str], known: Mapping[str, Cost]) -> float:
    """Return how far the times of a step scatter."""
    timed = [cost for cost in map(known.__getitem__, order) if cost.seconds is not None]
    total = math.fsum(cost.seconds or 0.0 for cost in timed)
    return math.fsum((cost.seconds or 0.0) * cost.spread for cost in timed) / total if total else 0.0


def _scaled_times(lowered: Lowered, signatures: Sequence[str | None], like: Lowered) -> dict[str, float]:
    """Return the time of each call, scaled from its time in the same step at other sizes; {} if that is not the same.

    Every call takes at least the time of the cheapest one, and the rest in proportion to its
    FLOPs, or to the bytes that it moves if it has none.
    """
    pairs = [*zip(lowered.instructions, like.instructions, strict=False)]
    if len(lowered.instructions) != len(like.instructions) or any(map(_differ, *zip(*pairs, strict=True))):
        return {}
    least = min((o.time for o, i in zip(like.graph.operations, like.instructions, strict=True) if isinstance(i, Call)))
    times: dict[str, float] = {}
    for signature, (call, other), operation in zip(signatures, pairs, like.graph.operations, strict=True):
        if signature is not None and isinstance(call, Call) and isinstance(other, Call):
            work = flop_cost(other.node)
            ratio = flop_cost(call.node) / work if work else 1.0
            times.setdefault(signature, least + (operation.time - least) * ratio)
    return times


def _differ(one: Instruction, other: Instruction) -> bool:
    """Return whether two instructions run different operators."""
    return isinstance(one, Call) != isinstance(other, Call) or (
        isinstance(one, Call) and isinstance(other, Call) and one.target != other.target
    )


def _times(calls: Mapping[str, Call], found: Mapping[str, Cost], scaled: Mapping[str, float]) -> dict[str, float]:
    """Return the time of each call in seconds."""
    measured = {signature: cost.seconds for signature, cost in found.items() if cost.seconds is not None}
    times = {**scaled, **measured}
    if len(times) < len(calls):
        rates = measure_rates()
        times |= {s: _estimate(call.node, rates) for s, call in calls.items() if s not in times}
    return times


def _estimate(node: fx.Node, rates: Rates) -> float:
    """Return the time of a call in seconds at these rates: the longer of the times for its FLOPs and its bytes."""
    if is_view(node):
        return rates.seconds_per_call
    work = max(flops_of(node) * rates.seconds_per_flop, moved_bytes(node) * rates.seconds_per_byte)
    return rates.seconds_per_call + work
