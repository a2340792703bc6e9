"""From a captured step and a schedule to Python code: one forward and a list of backward segments.

The code does what the schedule says, action by action: a `Compute` becomes a call, a `Free`
becomes `name = None`. Nothing interprets it at run time. A segment ends where the schedule
adds gradients to existing ones; where it does not, after a group of gradients that neither it
nor their parameters are read any more.

A random operation draws from the global generator in its first run; later runs set the
generator to the state kept before, and set it back. Batch norm updates its running
statistics in its first run only. Snapshots that no later run needs are not made.
"""

from __future__ import annotations

import functools
import keyword
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx

from scheduler.pytorch.capture.captured_step import Capture
from scheduler.pytorch.capture.gradient_groups import group_gradients
from scheduler.pytorch.capture.instructions import Accumulate, Call, Ref, Return, SaveState, Snapshot, Tangents, Update
from scheduler.pytorch.capture.lowering import default_generator
from scheduler.pytorch.capture.operators import aten
from scheduler.pytorch.execute.program import Code, Forward, Program, Segment
from scheduler.schedule import Compute, Schedule

Actions = Sequence[tuple[int, str]]
"""The operation that each action runs, or -1 and the tensor that it frees."""


_HANDED_AT_ONCE = 2**20
"""Bytes of gradients that are worth a segment of their own: those of DistributedDataParallel's first bucket."""


def generate(capture: Capture, schedule: Schedule) -> Program:
    """Return the code that runs a captured step as a schedule says.

    Parameters
    ----------
    capture : Capture
    schedule : Schedule
        Of `capture.graph`, simulated valid.
    """
    return _Generator(capture, schedule).run()


@dataclass(frozen=True)
class _Part:
    """The code of a part of the step.

    Attributes
    ----------
    lines : list of str
    before : list of str
        Tensors that live when it begins.
    reads : dict of str to None
        Tensors that it needs from before.
    made : set of str
    gradients : tuple of int
        Which of the capture's gradients it hands over at its end.
    """

    lines: list[str]
    before: list[str]
    reads: dict[str, None]
    made: set[str]
    gradients: tuple[int, ...]


class _Generator:
    def __init__(self, capture: Capture, schedule: Schedule) -> None:
        self.capture = capture
        self.graph = capture.graph
        self.index = self.graph.index
        self.schedule = schedule
        self.resident = set(self.graph.resident)
        self.constants: dict[str, object] = {}
        self.constant_names: dict[object, str] = {}
        self.variables = {tensor.name: f"t{i}" for i, tensor in enumerate(self.graph.tensors)}
        self.storage = {tensor.name: tensor.storage for tensor in self.graph.tensors}
        self.actions = [
            (self.index.operation_ids[action.operation], "") if isinstance(action, Compute) else (-1, action.tensor)
            for action in schedule
        ]
        self.runs = [0] * len(self.graph.operations)
        for i, _ in self.actions:
            if i >= 0:
                self.runs[i] += 1
        self.elided: dict[str, str] = {}
        """Snapshots that stand for the resident tensor itself: nobody reads them after the update."""
        self.done = [0] * len(self.graph.operations)
        self.live: dict[str, None] = {}
        """Variables that hold a tensor now; tokens and elided tensors never do."""
        self.made: set[str] = set()
        """Tensors made so far in the part that is being written."""
        self.reads: dict[str, None] = {}
        """Tensors that this part needs from before."""

    def run(self) -> Program:
        self._find_elided_snapshots()
        boundary = next(
            position
            for position, (i, _) in enumerate(self.actions)
            if i >= 0 and self.graph.operations[i].phase == "backward"
        )
        forward_part = self._emit(self.actions[:boundary])
        parts = [self._emit(actions, gradients) for actions, gradients in self._split(self.actions[boundary:])]
        segments = self._segments(parts)
        outputs = self.capture.lowered.output_tensors
        handed = next(x for x in self.capture.instructions if isinstance(x, Return))
        result_of = dict(zip(handed.values, handed.results, strict=True))
        returned = tuple(result_of.get(name, name) for name in outputs)
        forward = self._forward(forward_part, segments[0].saved, returned)
        tangents = next(x for x in self.capture.instructions if isinstance(x, Tangents))
        return Program(forward, segments, outputs, tangents)

    def _split(self, actions: Actions) -> list[tuple[Actions, tuple[int, ...]]]:
        """Cut after each run that is followed by handing gradients over, and what is freed then."""
        handed = self._handed_by_schedule(actions) or self._handed_when_spent(actions)
        parts = []
        start = 0
        for position in sorted(handed):
            later = range(position + 1, len(actions))
            end = next((other for other in later if actions[other][0] >= 0), len(actions))
            parts.append((actions[start:end], handed[position]))
            start = end
        return [*parts, (actions[start:], ())] if start < len(actions) else parts

    def _handed_by_schedule(self, actions: Actions) -> dict[int, tuple[int, ...]]:
        """Return the gradients that the schedule itself hands over, by the position of the run."""
        runs = {position: self.capture.instructions[i] for position, (i, _) in enumerate(actions) if i >= 0}
        return {position: run.gradients for position, run in runs.items() if isinstance(run, Accumulate)}

    def _handed_when_spent(self, actions: Actions) -> dict[int, tuple[int, ...]]:
        """Return groups of gradients by the position of the run after which they may go.

        By then nothing reads a gradient or its parameter any more, so hooks may change both.
        Gradients of inputs, and those that lie on the memory of other results, stay to the end.
        All are results of the step, so the memory is the same.
        """
        joint, tensors = self.capture.joint, self.capture.lowered.gradient_tensors
        placeholders = {node: name for name, node in self.capture.lowered.resident.items()}
        last: dict[str | None, int] = {}
        for position, (i, _) in enumerate(actions):
            if i >= 0:
                operation = self.graph.operations[i]
                last |= {self.storage[tensor]: position for tensor in (*operation.inputs, *operation.outputs)}
        holders = Counter(self.storage[tensor] for tensor in (*tensors, *{*self.graph.results}.difference(tensors)))
        spent = {
            i: max(last[self.storage[tensor]], last.get(self.storage[placeholders[trained]], -1))
            for i, ((trained, _), tensor) in enumerate(zip(joint.gradients, tensors, strict=True))
            if joint.sources[trained].kind != "input"
            and holders[self.storage[tensor]] == 1
            and self.storage[tensor] in last
        }
        sizes = {i: self.graph.tensor(tensors[i]).size_bytes for i in spent}
        handed: dict[int, tuple[int, ...]] = {}
        for group in group_gradients(spent, sizes, least=_HANDED_AT_ONCE)[:-1]:  # the last goes with the rest
            handed[spent[group[-1]]] = handed.get(spent[group[-1]], ()) + group
        return handed

    def _find_elided_snapshots(self) -> None:
        results = set(self.graph.results)
        for i, instruction in enumerate(self.capture.instructions):
            if not isinstance(instruction, Snapshot):
                continue
            storage = self.storage[instruction.tensor]
            views = {name for name, own in self.storage.items() if own == storage}
            updates = {
                j
                for j, other in enumerate(self.capture.instructions)
                if isinstance(other, Update) and other.target == instruction.source
            }
            written = min(position for position, (j, _) in enumerate(self.actions) if j in updates)
            last_read = max(
                position
                for position, (j, _) in enumerate(self.actions)
                if j >= 0 and (j == i or views.intersection(self.graph.operations[j].inputs))
            )
            if last_read < written and not views & results:
                self.elided[instruction.tensor] = instruction.source

    def _emit(self, actions: Actions, gradients: tuple[int, ...] = ()) -> _Part:
        """Return the code for these actions, after which these gradients are handed over."""
        lines: list[str] = []
        self.reads = {}
        self.made = set()
        before = list(self.live)
        freed: list[str] = []
        for i, tensor in actions:
            if i < 0:
                if tensor in self.live:
                    del self.live[tensor]
                    freed.append(self.variables[tensor])
                continue
            if freed:
                lines.append(" = ".join([*freed, "None"]))
                freed = []
            lines += self._emit_operation(i)
            self.done[i] += 1
        for gradient in gradients:
            self._read(self.capture.lowered.gradient_tensors[gradient])
        if freed and not gradients:  # else returning lets go of it
            lines.append(" = ".join([*freed, "None"]))
        return _Part(lines, before, self.reads, self.made, gradients)

    def _emit_operation(self, i: int) -> list[str]:
        instruction = self.capture.instructions[i]
        if isinstance(instruction, Call):
            return self._emit_call(i, instruction)
        if isinstance(instruction, SaveState):
            # A view, so that dispatch modes see the state's memory.
            source = self._constant(default_generator(instruction.device))
            alias = self._constant(aten.alias.default)
            return [f"{self._make(instruction.tensor)} = {alias}({source}.get_state())"]
        if isinstance(instruction, Snapshot):
            if instruction.tensor in self.elided:
                return []
            clone = self._constant(aten.clone.default)
            value = self._read(instruction.source)
            return [f"{self._make(instruction.tensor)} = {clone}({value})"]
        if isinstance(instruction, Update):
            copy = self._constant(aten.copy_.default)
            return [f"{copy}({self._read(instruction.target)}, {self._read(instruction.value)})"]
        if isinstance(instruction, Return):
            handed = zip(instruction.values, instruction.results, strict=True)
            return [f"{self._make(result)} = {self._read(value)}" for value, result in handed]
        if isinstance(instruction, Accumulate):
            return []
        return self._emit_tangents(instruction)

    def _emit_call(self, i: int, call: Call) -> list[str]:
        target, args, outputs = call.target, call.args, list(call.outputs)
        lines: list[str] = []
        if call.batch_norm is not None and self.done[i]:
            norm = call.batch_norm
            target = norm.replay
            # The statistics themselves must not be read again: they have changed.
            text = [
                self._literal(argument) if position not in norm.statistics else self._scratch(call.node.args[position])
                for position, argument in enumerate(args)
                if norm.replay_takes_statistics or position not in norm.statistics
            ]
            arguments = ", ".join(text)
        else:
            arguments = self._arguments(args, call.kwargs)
        expression = f"{self._constant(target)}({arguments})"
        if not call.has_several:
            lines += [f"{self._make(name)} = {expression}" for name in outputs if name is not None] or [expression]
        else:
            fresh = [(k, name) for k, name in enumerate(outputs) if name is not None and name not in self.live]
            lines.append(f"several = {expression}")
            lines += [f"{self._make(name)} = several[{k}]" for k, name in fresh]
            lines.append("several = None")
        if call.state is not None and self.done[i]:
            source = self._constant(default_generator(call.device or torch.device("cpu")))
            state = self._read(call.state)
            lines = [
                f"before = {source}.get_state()",
                f"{source}.set_state({state})",
                *lines,
                f"{source}.set_state(before)",
                "before = None",
            ]
        return lines

    def _scratch(self, statistic: object) -> str:
        value = cast(fx.Node, statistic).meta["val"]
        make = functools.partial(torch.empty, tuple(value.shape), dtype=value.dtype, device=value.device)
        return f"{self._constant(make)}()"

    def _emit_tangents(self, tangents: Tangents) -> list[str]:
        lines = []
        dense = self._constant(with_strides)
        for position, (name, strides) in enumerate(zip(tangents.tensors, tangents.strides, strict=True)):
            lines.append(f"{self._make(name)} = {dense}(incoming, {position}, {strides})")
        return lines

    def _make(self, tensor: str) -> str:
        self.live[tensor] = None
        self.made.add(tensor)
        return self.variables[tensor]

    def _read(self, tensor: str) -> str:
        tensor = self.elided.get(tensor, tensor)
        if tensor not in self.made:
            self.reads[tensor] = None
        return self.variables[tensor]

    def _arguments(self, args: Sequence[object], kwargs: dict[str, object]) -> str:
        parts = [self._literal(argument) for argument in args]
        parts += [
            f"**{{{key!r}: {self._literal(value)}}}" if keyword.iskeyword(key) else f"{key}={self._literal(value)}"
            for key, value in kwargs.items()
        ]
        return ", ".join(parts)

    def _literal(self, value: object) -> str:
        if isinstance(value, Ref):
            return self._read(value.tensor)
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(self._literal(entry) for entry in value) + "]"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        if isinstance(value, float) and value - value == 0.0:
            return repr(value)
        return self._constant(value)

    def _constant(self, value: object) -> str:
        key = (type(value), value)
        if key not in self.constant_names:
            name = f"c{len(self.constants)}"
            self.constants[name] = value._op if isinstance(value, torch._ops.OpOverload) else value
            self.constant_names[key] = name
        return self.constant_names[key]

    def _forward(self, part: _Part, saved: tuple[str, ...], outputs: tuple[str, ...]) -> Forward:
        needed = tuple(dict.fromkeys(name for name in (*part.reads, *saved, *outputs) if name in self.resident))
        results = [self._several_outputs(outputs), self._names(saved)]
        source = self._function("forward", needed, [], part.lines, results)
        return Forward(self._compile(source, "forward"), needed, saved, source)

    def _several_outputs(self, outputs: tuple[str, ...]) -> list[str]:
        """Return the outputs, with a view instead of a tensor that is returned twice."""
        names, seen = [], set()
        for name in outputs:
            variable = self.variables[name]
            names.append(f"{self._constant(aten.alias.default)}({variable})" if name in seen else variable)
            seen.add(name)
        return names

    def _segments(self, parts: Sequence[_Part]) -> tuple[Segment, ...]:
        """Return the parts of the backward; the last also returns the gradients that none handed over."""
        tensors = self.capture.lowered.gradient_tensors
        handed = {gradient for part in parts for gradient in part.gradients}
        gradients = tuple(gradient for gradient in range(len(tensors)) if gradient not in handed)
        needed = {tensors[gradient] for gradient in gradients}
        carried: tuple[str, ...] = ()
        segments: list[Segment] = []
        for part in reversed(parts):
            gradients = (*part.gradients, *gradients)
            returned = [self._names([tensors[gradient] for gradient in gradients]), self._names(carried)]
            needed = (needed - part.made) | part.reads.keys()
            carried = tuple(tensor for tensor in part.before if tensor in needed)
            resident = tuple(tensor for tensor in self.graph.resident if tensor in part.reads)
            source = self._function("backward", (*carried, *resident), ["incoming"], part.lines, returned)
            segments.append(Segment(self._compile(source, "backward"), carried, resident, gradients, source))
            gradients = ()
        return tuple(reversed(segments))

    def _names(self, tensors: Sequence[str]) -> list[str]:
        return [self.variables[tensor] for tensor in tensors]

    def _function(
        self, name: str, inputs: Sequence[str], more: list[str], lines: list[str], results: list[list[str]]
    ) -> str:
        body = []
        if inputs:
            body.append(f"[{', '.join(self._names(inputs))}] = inputs")
        body.append("inputs.clear()")
        returned = ", ".join(f"[{', '.join(names)}]" for names in results)
        body += [*lines, f"return {returned},"]
        header = f"def {name}({', '.join(['inputs', *more])}):"
        return "\n    ".join([header, *body]) + "\n"

    def _compile(self, source: str, name: str) -> Code:
        scope: dict[str, object] = dict(self.constants)
        exec(compile(source, f"<planned {name}>", "exec"), scope)
        return scope[name]  # type: ignore[return-value]


def with_strides(incoming: list[Tensor | None], position: int, strides: tuple[int, ...]) -> Tensor:
    """Take an incoming gradient out of the list, copied if its strides are not those planned for."""
    tensor, incoming[position] = incoming[position], None
    assert tensor is not None
    if tensor.stride() != strides and tensor.numel() > 1:
        dense = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        return dense.copy_(tensor)
    return tensor
