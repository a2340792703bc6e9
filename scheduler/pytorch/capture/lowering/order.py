"""The order in which a joint graph becomes operations over tensors.

Each call becomes one operation, in trace order. Six more kinds of operation exist only here:

- `rng state N` saves the generator's state for random call N, so that it can be recomputed;
- `snapshot:NAME` saves the old value of a tensor that the step changes in place;
- `update:NAME` writes the new value;
- `return` hands the outputs to the caller, who holds them to the end;
- `tangents` receives the incoming gradients and begins the backward;
- `accumulate N` adds a group of gradients to existing ones, if there are any. It reads both
  and produces nothing, so the new gradients are not results and are freed.

Constraints on the order that data does not show (random draws one after another, collectives
in the same order on all processes, the snapshot before the update, the tangents before the
backward) are expressed by tokens: tensors of zero bytes.
"""

from __future__ import annotations

from scheduler.pytorch.capture.device_memory import DeviceMemory
from scheduler.pytorch.capture.instructions import Lowered
from scheduler.pytorch.capture.joint import Joint
from scheduler.pytorch.capture.lowering.analysis import analyze
from scheduler.pytorch.capture.lowering.emitters import Emitter
from scheduler.pytorch.capture.lowering.storages import StorageSizes


def lower(joint: Joint, memory: DeviceMemory, sizes: StorageSizes, *, name: str) -> Lowered:
    """Return the joint graph as a `Graph` of operations without times, with the instruction of each.

    Parameters
    ----------
    joint : Joint
    memory : DeviceMemory
        The memory that the device holds in addition to the step.
    sizes : StorageSizes
        What the storages of this joint graph hold at run time.
    name : str
        Name of the graph.

    Raises
    ------
    CaptureError
        If a forward operation needs a value of the backward.
    """
    analysis = analyze(joint, sizes, accumulate_gradients=memory.accumulate_gradients)
    emit = Emitter(joint, analysis, sizes)
    emit.resident_tensors(memory)
    for call in analysis.forward:
        for old in analysis.snapshots_before.get(call, ()):
            emit.snapshot(old)
        if call in analysis.counters:
            emit.counter(call)
        else:
            emit.call(call, "forward")
        for mutation in analysis.mutations_after.get(call, ()):
            emit.update(mutation)
    for mutation in analysis.mutations_after.get(None, ()):
        emit.update(mutation)
    emit.return_outputs()
    emit.tangents()
    for group in analysis.groups_after.get(None, ()):
        emit.accumulate(group)
    for call in analysis.backward:
        emit.call(call, "backward")
        for group in analysis.groups_after.get(call, ()):
            emit.accumulate(group)
    return emit.lowered(name)
