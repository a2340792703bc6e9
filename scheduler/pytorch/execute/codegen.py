"""Generate Python code for a captured step and a schedule: one forward and a list of backward segments.

The code does what the schedule says, action by action: a `Compute` becomes a call, a `Free`
becomes `name = None`. Nothing is interpreted at run time. `gradient_segments` says where one
segment ends and the next begins, `emitters` what each kind of instruction becomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.pytorch.capture.captured_step import Capture
from scheduler.pytorch.capture.instructions import Return, Tangents
from scheduler.pytorch.capture.operators import aten
from scheduler.pytorch.execute.emitters import PartWriter, Scope, emit
from scheduler.pytorch.execute.gradient_segments import BackwardPart, split_backward
from scheduler.pytorch.execute.program import Code, Forward, Program, Segment
from scheduler.pytorch.execute.schedule_analysis import analyze_schedule
from scheduler.schedule import Action, Compute, Schedule


def generate(capture: Capture, schedule: Schedule) -> Program:
    """Return the code that runs a captured step as a schedule says.

    Parameters
    ----------
    capture : Capture
    schedule : Schedule
        Valid for `capture.graph`.
    """
    analysis = analyze_schedule(capture, schedule)
    generator = _Generator(capture, Scope(capture.graph, analysis.elided_snapshots))
    forward = generator.write(analysis.forward)
    parts = split_backward(capture, analysis.backward)
    segments = generator.segments(parts, [generator.write(part.actions, part) for part in parts])
    tangents = next(x for x in capture.instructions if isinstance(x, Tangents))
    return Program(generator.forward(forward, segments[0].saved), segments, capture.lowered.output_tensors, tangents)


@dataclass(frozen=True)
class _WrittenPart:
    """The code of one part of the step.

    Attributes
    ----------
    lines : list of str
    live_before : list of str
        Tensors that are live when the part begins.
    reads : dict of str to None
        Tensors that the part needs from earlier parts, and resident ones.
    produced : set of str
    """

    lines: list[str]
    live_before: list[str]
    reads: dict[str, None]
    produced: set[str]


class _Generator:
    """Writes the parts of a step one after another, and makes functions of them."""

    def __init__(self, capture: Capture, scope: Scope) -> None:
        self._capture = capture
        self._graph = capture.graph
        self._scope = scope
        self._resident = frozenset(capture.graph.resident)
        self._have_run: set[str] = set()

    def write(self, actions: Sequence[Action], part: BackwardPart | None = None) -> _WrittenPart:
        """Return the code of the next actions of the schedule.

        Parameters
        ----------
        actions : sequence of Action
        part : BackwardPart, optional
            The segment of the backward that they are; None for the forward.
        """
        writer = PartWriter(self._scope)
        live_before = [*self._scope.live]
        lines: list[str] = []
        freed: list[str] = []
        for action in actions:
            if isinstance(action, Compute):
                lines += [*_free(freed), *self._run(writer, action.operation)]
                freed = []
            elif action.tensor in self._scope.live:
                del self._scope.live[action.tensor]
                freed.append(self._scope.variable(action.tensor))
        for gradient in () if part is None else part.gradients:
            writer.read(self._capture.lowered.gradient_tensors[gradient])
        if part is None or not part.is_cut:  # at a cut, returning from the function frees what it does not return
            lines += _free(freed)
        return _WrittenPart(lines, live_before, writer.reads, writer.produced)

    def _run(self, writer: PartWriter, name: str) -> list[str]:
        instruction = self._capture.instructions[self._graph.index.operation_ids[name]]
        is_recomputation = name in self._have_run
        self._have_run.add(name)
        return emit(writer, instruction, is_recomputation=is_recomputation)

    def forward(self, written: _WrittenPart, saved: tuple[str, ...]) -> Forward:
        """Return the forward, which returns the outputs and what the first segment takes."""
        outputs = self._returned_outputs()
        needed = tuple(dict.fromkeys(name for name in (*written.reads, *saved, *outputs) if name in self._resident))
        results = [self._distinct(outputs), self._scope.variables(saved)]
        source = self._source("forward", needed, ["inputs"], written.lines, results)
        return Forward(self._compile(source, "forward"), needed, saved, source)

    def _returned_outputs(self) -> list[str]:
        """Return the tensor that the caller gets for each output; a resident tensor is returned itself."""
        instruction = next(x for x in self._capture.instructions if isinstance(x, Return))
        returned = dict(zip(instruction.values, instruction.results, strict=True))
        return [returned.get(name, name) for name in self._capture.lowered.output_tensors]

    def _distinct(self, outputs: Sequence[str]) -> list[str]:
        """Return the outputs, with an alias in place of a tensor that was returned before."""
        names: list[str] = []
        seen: set[str] = set()
        for name in outputs:
            variable = self._scope.variable(name)
            names.append(f"{self._scope.constant(aten.alias.default)}({variable})" if name in seen else variable)
            seen.add(name)
        return names

    def segments(self, parts: Sequence[BackwardPart], written: Sequence[_WrittenPart]) -> tuple[Segment, ...]:
        """Return the segments of the backward, each of which takes from the one before what later ones need."""
        tensors = self._capture.lowered.gradient_tensors
        needed: set[str] = set()
        carried: tuple[str, ...] = ()
        segments: list[Segment] = []
        for part, code in zip(reversed(parts), reversed(written), strict=True):
            gradients = [tensors[gradient] for gradient in part.gradients]
            returned = [self._scope.variables(gradients), self._scope.variables(carried)]
            needed = (needed - code.produced) | code.reads.keys()
            carried = tuple(tensor for tensor in code.live_before if tensor in needed)
            resident = tuple(tensor for tensor in self._graph.resident if tensor in code.reads)
            source = self._source("backward", (*carried, *resident), ["inputs", "incoming"], code.lines, returned)
            segments.append(Segment(self._compile(source, "backward"), carried, resident, part.gradients, source))
        return tuple(reversed(segments))

    def _source(
        self,
        name: str,
        inputs: Sequence[str],
        parameters: Sequence[str],
        lines: Sequence[str],
        results: list[list[str]],
    ) -> str:
        """Return the text of a function that takes a list of tensors, which it empties, and returns lists."""
        body = [f"[{', '.join(self._scope.variables(inputs))}] = inputs"] if inputs else []
        returned = ", ".join(f"[{', '.join(names)}]" for names in results)
        body += ["inputs.clear()", *lines, f"return {returned},"]
        return "\n    ".join([f"def {name}({', '.join(parameters)}):", *body]) + "\n"

    def _compile(self, source: str, name: str) -> Code:
        names: dict[str, Any] = dict(self._scope.constants)
        exec(compile(source, f"<planned {name}>", "exec"), names)
        code: Code = names[name]
        return code


def _free(variables: Sequence[str]) -> list[str]:
    """Return the line that frees the tensors of these variables, if there are any."""
    return [" = ".join([*variables, "None"])] if variables else []
