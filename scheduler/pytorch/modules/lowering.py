"""Lower a call tree to a graph, and decisions to schedules of it.

Each segment is one forward task and two backward operations. Its forward has an alternative for
each way to run it: saving what its backward needs, saving nothing, and the same for regions
that keep the results of expensive operators. Its backward is one operation for its peak and one
for the gradients that remain, because what the segment saved is freed between the two. Each
call has an operation without cost, whose run begins a recomputed region: a schedule
therefore says which calls it recomputes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from scheduler.errors import InvalidOptionError
from scheduler.graph import Graph, Operation, Tensor
from scheduler.graph.decisions import SPAN_KINDS, Decision, span_layer, span_signature
from scheduler.graph.operations import Role
from scheduler.pytorch.modules.calls import OUTSIDE, CallTree
from scheduler.pytorch.modules.regions import Execution, Kind, Layout, Part, Regions, Run, TensorKey, execute
from scheduler.schedule import Action, Compute, Free, Schedule

_ROLES: dict[Part, Role] = {Part.GRADIENT: "gradient", Part.PARAMETER_GRADIENT: "gradient", Part.HELD: "output"}
_SUFFIXES = {
    Kind.CHECKPOINT: "checkpoint",
    Kind.KEEPING_CHECKPOINT: "checkpoint_keeping",
    Kind.SAVING: "forward",
    Kind.WITHOUT_SAVING: "forward_without_saving",
    Kind.KEEPING: "forward_keeping",
    Kind.FROM_KEPT: "forward_from_kept",
    Kind.BACKWARD: "backward",
    Kind.GRADIENTS: "gradients",
}
_MODEL, _OUTSIDE = "(model)", "(outside)"
"""Names of the model itself and of what runs outside of it."""


@dataclass(frozen=True)
class LoweredTree:
    """The graph of a call tree, and the names in it of runs and tensors.

    Attributes
    ----------
    layout : Layout
    graph : Graph
    operation_names : dict of Run to str
    tensor_names : dict of TensorKey to str
    """

    layout: Layout
    graph: Graph
    operation_names: dict[Run, str]
    tensor_names: dict[TensorKey, str]

    @cached_property
    def _actions(self) -> tuple[dict[Run, Compute], dict[TensorKey, Free]]:
        return (
            {run: Compute(name) for run, name in self.operation_names.items()},
            {key: Free(name) for key, name in self.tensor_names.items()},
        )

    def schedule(self, regions: Regions) -> Schedule:
        """Return the schedule of a step that recomputes these calls, by position."""
        return self.schedule_of_execution(execute(self.layout, regions))

    def schedule_of_execution(self, execution: Execution) -> Schedule:
        """Return the schedule of these runs."""
        compute, free = self._actions
        actions: list[Action] = []
        for run, freed in zip(execution.runs, execution.frees, strict=True):
            actions.append(compute[run])
            actions += [free[key] for key in freed if key in free]
        return Schedule(actions)


def lower(tree: CallTree) -> LoweredTree:
    """Return the graph of a call tree.

    Raises
    ------
    InvalidGraphError
        If a size or time is negative, or there is no segment.
    """
    return _Lowering(Layout(tree)).result()


def schedule_of(lowered: LoweredTree, decisions: Iterable[Decision]) -> Schedule:
    """Return the schedule of a step that recomputes some calls.

    Raises
    ------
    InvalidOptionError
        As for `regions_of`.
    """
    return lowered.schedule(regions_of(lowered.layout.tree, decisions))


def regions_of(tree: CallTree, decisions: Iterable[Decision]) -> dict[int, bool]:
    """Return the calls that decisions recompute, by position, and whether each keeps expensive results.

    Raises
    ------
    InvalidOptionError
        If a decision names no call, a call that cannot be recomputed, or a call twice, or if one that
        keeps expensive results has none, or has another recomputed call around or inside it.
    """
    positions = {(call.module, call.number, call.span): c for c, call in enumerate(tree.calls)}
    regions: dict[int, bool] = {}
    for decision in decisions:
        c = positions.get(decision.call)
        if c is None:
            called = span_layer(decision.module, decision.span)
            raise InvalidOptionError(f'the step has no call {decision.number} of module "{called}"')
        if tree.calls[c].refusal:
            raise InvalidOptionError(f'call "{tree.calls[c].name}" cannot be recomputed: {tree.calls[c].refusal}')
        if decision.keeps_expensive and not _keeps_something(tree, c):
            raise InvalidOptionError(
                f'call "{tree.calls[c].name}" has no expensive results that could be kept: leave keeps_expensive out'
            )
        if c in regions:
            raise InvalidOptionError(f'there must be one decision for call "{tree.calls[c].name}", got several')
        regions[c] = decision.keeps_expensive
    for c in regions:
        outer = tree.calls[c].caller
        while outer != OUTSIDE:
            if outer in regions and (regions[c] or regions[outer]):
                raise InvalidOptionError(
                    f'calls "{tree.calls[outer].name}" and "{tree.calls[c].name}", which runs in it, cannot both be'
                    " recomputed, because one of them keeps expensive results"
                )
            outer = tree.calls[outer].caller
    return regions


def _keeps_something(tree: CallTree, call: int) -> bool:
    """Return whether a call has results of expensive operators, which a region can keep."""
    return any(tree.segments[i].expensive for i in range(tree.calls[call].start, tree.calls[call].stop))


class _Lowering:
    def __init__(self, layout: Layout) -> None:
        self.layout, self.tree = layout, layout.tree
        self.tensors: list[Tensor] = []
        self.results: list[str] = []
        self.operations: list[Operation] = []
        self.operation_names: dict[Run, str] = {}
        self.tensor_names: dict[TensorKey, str] = {}
        self.labels = _labels(self.tree)
        self.read: list[list[str]] = [[] for _ in range(layout.length)]
        """Per segment: the values that it reads."""
        self._by_name: dict[str, Tensor] = {}

    def result(self) -> LoweredTree:
        """Lower the calls and segments in the order of the step."""
        segments = range(self.layout.length)
        for i in segments:
            for c in self.layout.starting[i]:
                self._lower_call(c)
            self._lower_forward(i)
        for i in reversed(segments):
            self._lower_backward(i)
        graph = Graph(
            self.operations,
            (*self.tensors, *self.tree.resident),
            resident=[tensor.name for tensor in self.tree.resident],
            results=self.results,
            name=self.tree.name,
        )
        return LoweredTree(self.layout, graph, self.operation_names, self.tensor_names)

    def _lower_call(self, c: int) -> None:
        call = self.tree.calls[c]
        name = call.name or _MODEL
        copies = [self._tensor((Part.COPIES, c, -1), f"{name} {Part.COPIES.value}", call.copied_bytes)]
        inputs = [self.tensor_names[Part.VALUE, g, -1] for g in self.layout.held[c]]
        kinds = [Kind.CHECKPOINT]
        if _keeps_something(self.tree, c):
            kinds.append(Kind.KEEPING_CHECKPOINT)
        for kind in kinds:
            purpose = SPAN_KINDS[kind.value] if call.span else kind.value
            signature = f"call {call.number} {span_signature(call.span)}".rstrip()
            self._operation((kind, c), name, call.module, inputs, copies, signature=signature, purpose=purpose)

    def _lower_forward(self, i: int) -> None:
        layout, segment, label = self.layout, self.tree.segments[i], self.labels[i]
        born = [(g, layout.groups[g]) for g in layout.born[i]]
        values = [self._group((Part.VALUE, g, -1)) for g, group in born if group.outlives]
        values += [self._group((Part.HELD, g, -1)) for g, group in born if group.dies >= layout.length]
        if not values:
            values = [self._tensor((Part.END, i, -1), f"{label} {Part.END.value}", 0)]
        saved = [self._group((Part.SAVED, g, i)) for g in layout.saved[i]]
        saved.append(self._tensor((Part.TAPE, i, -1), f"{label} {Part.TAPE.value}", 0))
        kept = [self._group((Part.KEPT, g, -1)) for g, group in born if group.is_expensive]
        peaks, time, module, read = layout.peaks[i], segment.forward_time, self._module(i), self.read[i]
        self._operation((Kind.SAVING, i), label, module, read, (*values, *saved), time, peaks.saving)
        self._operation((Kind.WITHOUT_SAVING, i), label, module, read, values, time, peaks.without_saving)
        if kept:
            again = max(0.0, time - segment.expensive_time)
            self._operation((Kind.KEEPING, i), label, module, read, (*values, *kept), time, peaks.keeping)
            inputs, outputs = (*read, *kept), (*values, *saved)
            self._operation((Kind.FROM_KEPT, i), label, module, inputs, outputs, again, peaks.from_kept)

    def _lower_backward(self, i: int) -> None:
        segment, label, module = self.tree.segments[i], self.labels[i], self._module(i)
        saved = [self.tensor_names[Part.SAVED, g, i] for g in self.layout.saved[i]]
        inputs = [*saved, self.tensor_names[Part.TAPE, i, -1]]
        if i + 1 < self.layout.length:
            inputs.append(self.tensor_names[Part.GRADIENT, i + 1, -1])
        end = self._tensor((Part.BACKWARD_END, i, -1), f"{label} {Part.BACKWARD_END.value}", 0)
        time = segment.backward_time
        self._operation((Kind.BACKWARD, i), label, module, inputs, [end], time, segment.backward_peak_bytes)
        gradients = [self._tensor((Part.GRADIENT, i, -1), f"{label} {Part.GRADIENT.value}", segment.gradient_bytes)]
        if segment.parameter_gradient_bytes:
            key = (Part.PARAMETER_GRADIENT, i, -1)
            gradients.append(
                self._tensor(key, f"{label} {Part.PARAMETER_GRADIENT.value}", segment.parameter_gradient_bytes)
            )
            self.results.append(gradients[-1])
        if not i:
            self.results.append(gradients[0])
        self._operation((Kind.GRADIENTS, i), label, module, [end], gradients)

    def _module(self, segment: int) -> str:
        call = self.tree.segments[segment].call
        return _OUTSIDE if call == OUTSIDE else self.tree.calls[call].module or _MODEL

    def _group(self, key: TensorKey) -> str:
        """Add a tensor on the storage of a group; the first one names the storage."""
        part, g, saver = key
        group = self.layout.groups[g]
        label = self.labels[group.born]
        name = f"{label} {part.value} {g}" + (f" by {self.labels[saver]}" if part is Part.SAVED else "")
        if part is Part.HELD:
            self.results.append(name)
        if part is Part.VALUE:
            for segment in group.readers:
                self.read[segment].append(name)
        return self._tensor(key, name, group.size_bytes, f"{label} storage {g}")

    def _tensor(self, key: TensorKey, name: str, size_bytes: int, storage: str | None = None) -> str:
        tensor = Tensor(name, size_bytes, storage, role=_ROLES.get(key[0], "activation"))
        self.tensors.append(tensor)
        self.tensor_names[key], self._by_name[name] = name, tensor
        return name

    def _operation(
        self,
        run: Run,
        label: str,
        module: str,
        inputs: Iterable[str],
        outputs: Iterable[str],
        time: float = 0.0,
        peak_bytes: int = 0,
        *,
        signature: str = "",
        purpose: str = "",
    ) -> None:
        """Add an operation whose memory, above what is live at its start, is `peak_bytes`."""
        kind, _ = run
        inputs, outputs = tuple(inputs), tuple(outputs)
        self.operation_names[run] = name = f"{label}.{_SUFFIXES[kind]}"
        self.operations.append(
            Operation(
                name,
                inputs,
                outputs,
                time,
                max(0, peak_bytes - self._allocated(inputs, outputs)),
                phase="backward" if kind in (Kind.BACKWARD, Kind.GRADIENTS) else "forward",
                signature=f"{kind.value} of {label}" + (f": {signature}" if signature else ""),
                layer=module,
                kind=purpose or kind.value,
            )
        )

    def _allocated(self, inputs: Iterable[str], outputs: Iterable[str]) -> int:
        """Return the bytes of the storages of outputs that no input lies in."""
        storages = {self._by_name[name].storage: self._by_name[name].size_bytes for name in outputs}
        for name in inputs:
            storages.pop(self._by_name[name].storage, None)
        return sum(storages.values())


def _labels(tree: CallTree) -> list[str]:
    """Return a name for each segment: that of its call, with a number where the call has several."""
    counts = Counter(segment.call for segment in tree.segments)
    seen: Counter[int] = Counter()
    labels = []
    for segment in tree.segments:
        name = _OUTSIDE if segment.call == OUTSIDE else tree.calls[segment.call].name or _MODEL
        labels.append(f"{name}[{seen[segment.call]}]" if counts[segment.call] > 1 else name)
        seen[segment.call] += 1
    return labels
