"""Hypothesis strategies: small graphs of every kind that the definition allows, and schedules of them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from scheduler.graph import Graph, Operation, Tensor
from scheduler.graph.chain import Chain
from scheduler.graph.layers import Layer, Mode
from scheduler.schedule import Compute, Free, Schedule

SIZES = st.integers(0, 4)
TIMES = st.integers(0, 4)
WORKSPACES = st.sampled_from([0, 0, 0, 1, 2, 3])


@st.composite
def graphs(draw: st.DrawFn, min_operations: int = 2, max_operations: int = 8, demands: bool = True) -> Graph:
    """Draw any valid graph: views, shared storages, alternatives, two phases, and so on.

    Without demands there are no results and no required operations (so all are repeatable).
    """
    count = draw(st.integers(min_operations, max_operations))
    forward_count = draw(st.integers(1, count)) if draw(st.booleans()) else count
    tensors: list[Tensor] = []
    resident = [_tensor(draw, f"r{i}", tensors, []) for i in range(draw(st.integers(0, 2)))]
    operations: list[Operation] = []
    outputs_of_task: list[list[str]] = []
    default_made: list[str] = []

    for position in range(count):
        open_tasks = [k for k, outputs in enumerate(outputs_of_task) if outputs]
        alternative = bool(open_tasks) and draw(st.integers(0, 3)) == 0
        phase = "forward" if position < forward_count else "backward"
        if not alternative:
            inputs = _some(draw, [*resident, *default_made], 3)
            repeatable = not demands or draw(st.integers(0, 6)) > 0
            made: list[str] = []
            for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3] if repeatable else [0, 1, 2]))):
                made.append(_tensor(draw, f"t{len(tensors)}", tensors, [*inputs, *made]))
            # Nobody may share an output with a non-repeatable operation: its task is closed.
            outputs_of_task.append(made if repeatable else [])
            default_made += made
        else:
            repeatable = True
            task = draw(st.sampled_from(open_tasks))
            made = _some(draw, outputs_of_task[task], 2, at_least=1)
            made_before = [name for operation in operations for name in operation.outputs]
            inputs = [name for name in _some(draw, [*resident, *made_before], 3) if name not in made]
            if draw(st.booleans()):
                made = [*made, _tensor(draw, f"t{len(tensors)}", tensors, [*inputs, *made])]
            outputs_of_task[task] = list(dict.fromkeys([*outputs_of_task[task], *made]))
            if draw(st.booleans()):
                default = next(op for op in operations if set(op.outputs) & set(made))
                phase = default.phase
        operations.append(
            Operation(
                f"f{position}" if phase == "forward" else f"b{position}",
                inputs,
                made,
                draw(TIMES),
                workspace_bytes=draw(WORKSPACES),
                phase=phase,
                repeatable=repeatable,
            )
        )
    if not demands:
        return Graph(operations, tensors, resident=resident)
    # An alternative may read what no default makes: it cannot be required.
    may_be_required = [op.name for op in operations if set(op.inputs) <= {*resident, *default_made}]
    results = _some(draw, default_made, 3, at_least=min(1, len(default_made)))
    if resident and draw(st.integers(0, 4)) == 0:
        results = [*results, resident[0]]
    return Graph(
        operations,
        tensors,
        resident=resident,
        results=results,
        required=_some(draw, may_be_required, 2) if draw(st.booleans()) else [],
    )


@st.composite
def joint_graphs(draw: st.DrawFn, max_layers: int = 3) -> Graph:
    """Draw a training step: forward layers with skips, a loss, and a backward per layer.

    Per layer, the backward reads the layer's input, or its output, or what a saving
    alternative of the forward has kept. At most 4 * max_layers + 2 operations.
    """
    layers = draw(st.integers(1, max_layers))
    tensors, resident = [Tensor("x0", draw(SIZES))], ["x0"]
    forward: list[Operation] = []
    backward: list[Operation] = []
    results = ["loss"]

    def tensor(name: str, storage: str | None = None, size: int | None = None) -> str:
        tensors.append(Tensor(name, draw(SIZES) if size is None else size, storage))
        return name

    def operation(name: str, inputs: list[str], outputs: list[str], phase: str = "forward") -> Operation:
        return Operation(name, inputs, outputs, draw(TIMES), workspace_bytes=draw(WORKSPACES), phase=phase)

    for i in range(layers):
        weights = [tensor(f"w{i}")] if draw(st.booleans()) else []
        resident += weights
        skip = [f"x{draw(st.integers(0, i - 1))}"] if i and draw(st.integers(0, 2)) == 0 else []
        source, made = f"x{i}", f"x{i + 1}"
        tensor(made, source if i and draw(st.integers(0, 4)) == 0 else None)
        forward.append(operation(f"f{i}", [source, *skip, *weights], [made]))
        reads = [f"g{i + 1}", *draw(st.sampled_from([[source], [made], [source, made], []])), *skip, *weights]
        makes = [tensor(f"g{i}", f"g{i + 1}" if draw(st.integers(0, 4)) == 0 else None)] if i else []
        makes += [tensor(f"dw{i}")] if weights or not i else []
        results += makes[-1:] if weights or not i else []
        backward.append(operation(f"b{i}", reads, makes, "backward"))
        if draw(st.integers(0, 2)) == 0:
            saved = tensor(f"s{i}")
            forward.append(operation(f"f{i}s", [source, *skip, *weights], [made, saved]))
            backward.append(operation(f"b{i}s", [f"g{i + 1}", saved], makes, "backward"))
    tensor("loss", size=draw(st.integers(0, 1)))
    tensor(f"g{layers}")
    forward.append(operation("l", [f"x{layers}"], ["loss"]))
    backward.append(operation("bl", [f"x{layers}"], [f"g{layers}"], "backward"))
    # Of the two backwards of a layer, the one without a saved tensor is the default.
    backward.sort(key=lambda op: (-layers if op.name == "bl" else -int(op.name[1]), op.name))
    return Graph(forward + backward, tensors, resident=resident, results=results)


@st.composite
def chains(draw: st.DrawFn, min_layers: int = 1, max_layers: int = 3, max_modes: int = 1) -> Chain:
    """Draw a chain; half of the chains of several layers repeat a few."""
    length = draw(st.integers(min_layers, max_layers))
    distinct = draw(st.integers(1, length)) if draw(st.booleans()) else length
    layers = [draw(_layers(max_modes)) for _ in range(distinct)]
    return Chain(
        [replace(layers[i % distinct], name=f"l{i}") for i in range(length)],
        draw(SIZES),
        input_needs_gradient=draw(st.booleans()),
    )


@st.composite
def _layers(draw: st.DrawFn, max_modes: int) -> Layer:
    mode = st.builds(Mode, TIMES, TIMES, SIZES, forward_workspace_bytes=WORKSPACES, backward_workspace_bytes=WORKSPACES)
    return Layer(
        "l",
        draw(TIMES),
        draw(TIMES),
        draw(SIZES),
        draw(SIZES),
        gradient_bytes=draw(st.one_of(st.none(), SIZES)),
        parameter_bytes=draw(st.integers(0, 1)),
        parameter_gradient_bytes=draw(st.sampled_from([0, 0, 1, 2])),
        keeps_input=draw(st.booleans()),
        keeps_output=draw(st.booleans()),
        forward_without_saving_time=draw(st.one_of(st.none(), TIMES)),
        forward_without_saving_workspace_bytes=draw(WORKSPACES),
        forward_with_saving_workspace_bytes=draw(WORKSPACES),
        backward_workspace_bytes=draw(WORKSPACES),
        modes=draw(st.lists(mode, max_size=max_modes)),
    )


@st.composite
def action_sequences(draw: st.DrawFn, graph: Graph, max_actions: int = 24) -> Schedule:
    """Draw actions of which most could come next, and a few could not."""
    computes = [Compute(op.name) for op in graph.operations]
    frees = [Free(tensor.name) for tensor in graph.tensors]
    live = set(graph.resident)
    actions = []
    for _ in range(draw(st.integers(0, max_actions))):
        runnable = [
            Compute(op.name)
            for op in graph.operations
            if set(op.inputs) <= live and not (op.outputs and set(op.outputs) <= live)
        ]
        free = [Free(tensor.name) for tensor in graph.tensors if tensor.name in live - set(graph.resident)]
        kind = draw(st.integers(0, 60))
        choices = [] if kind == 0 else (runnable or free) if kind < 40 else (free or runnable)
        action = draw(st.sampled_from(choices or [*computes, *frees]))
        actions.append(action)
        if isinstance(action, Compute):
            live |= set(graph.operation(action.operation).outputs)
        else:
            live.discard(action.tensor)
    return Schedule(actions)


def _tensor(draw: st.DrawFn, name: str, tensors: list[Tensor], near: list[str]) -> str:
    """Add a tensor: on a storage of its own, or of one nearby (a view), or of any."""
    kind = draw(st.integers(0, 7))
    storages = {tensor.name: tensor.storage for tensor in tensors}
    candidates = near if kind in (5, 6) else list(storages) if kind == 7 else []
    storage = storages[draw(st.sampled_from(candidates))] if candidates else None
    tensors.append(Tensor(name, draw(SIZES), storage))
    return name


def _some(draw: st.DrawFn, names: list[str], at_most: int, at_least: int = 0) -> list[str]:
    if not names:
        return []
    return draw(st.lists(st.sampled_from(names), min_size=at_least, max_size=at_most, unique=True))


@st.composite
def thin_graphs(draw: st.DrawFn, max_operations: int = 7) -> Graph:
    """Draw a step most of whose tensors have one reader, which reads little else."""
    count = draw(st.integers(4, max_operations))
    forward = draw(st.integers(1, count))
    tensors: list[Tensor] = []
    operations: list[Operation] = []
    unread: list[Tensor] = []
    for i in range(count):
        inputs: dict[str, Tensor] = {}
        for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3])) if tensors else 0):
            pool = unread if unread and draw(st.booleans()) else tensors
            tensor = draw(st.sampled_from(pool[-3:]))
            inputs[tensor.name] = tensor
        outputs = []
        for k in range(draw(st.sampled_from([1, 1, 1, 2]))):
            base = draw(st.sampled_from(list(inputs.values()))) if inputs and not draw(st.integers(0, 4)) else None
            size = draw(st.integers(0, 5)) if base is None else base.size_bytes
            outputs.append(Tensor(f"t{i}_{k}", size, base.storage if base else None))
        unread = [*(tensor for tensor in unread if tensor.name not in inputs), *outputs]
        tensors += outputs
        operations.append(
            Operation(
                f"o{i}",
                list(inputs),
                [tensor.name for tensor in outputs],
                float(draw(st.integers(0, 4))),
                draw(st.sampled_from([0, 0, 1, 3])),
                "forward" if i < forward else "backward",
                repeatable=bool(draw(st.integers(0, 7))),
            )
        )
    results = [tensor.name for tensor in unread if draw(st.booleans())] or [tensors[-1].name]
    return Graph(operations, tensors, results=results)
