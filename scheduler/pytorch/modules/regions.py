"""The runs of a step whose calls are partly recomputed, and how long each storage is held.

A region is a call that is recomputed, with everything that runs in it. A pass runs segments in
order: the forward of the step, or the recomputation of one region. In a pass, the segments
under no further region save what their backward needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from scheduler.graph.decisions import KEEPS_EXPENSIVE, RECOMPUTES
from scheduler.pytorch.modules.calls import OUTSIDE, CallTree


class Kind(Enum):
    """What a run does; the value is the kind of its operation in the graph."""

    CHECKPOINT = RECOMPUTES
    KEEPING_CHECKPOINT = KEEPS_EXPENSIVE
    SAVING = "forward with saving"
    WITHOUT_SAVING = "forward without saving"
    KEEPING = "forward that keeps expensive results"
    FROM_KEPT = "forward from kept results"
    BACKWARD = "backward"
    GRADIENTS = "gradients"

    __hash__ = object.__hash__  # that of `Enum` hashes the name, in Python


class Part(Enum):
    """What a tensor of the graph stands for."""

    VALUE = "value"
    SAVED = "saved"
    KEPT = "kept"
    HELD = "held to the end"
    COPIES = "copies"
    TAPE = "tape"
    END = "end"
    BACKWARD_END = "backward end"
    GRADIENT = "gradient"
    PARAMETER_GRADIENT = "parameter gradient"

    __hash__ = object.__hash__


Run = tuple[Kind, int]
"""A kind, and the position of the segment, or of the call for the two kinds of checkpoint."""
TensorKey = tuple[Part, int, int]
"""A part, the group, segment or call that it belongs to, and the segment that saves it (else -1)."""
Regions = Mapping[int, bool]
"""Recomputed calls, by position, and whether each keeps the results of expensive operators."""


@dataclass(frozen=True)
class Group:
    """Storages with the same life, which count as one.

    Attributes
    ----------
    size_bytes : int
    born, dies : int
        As for `Storage`; `dies` covers every use.
    readers : tuple of int
        Segments after `born` whose forward reads or saves it, or during which it dies.
    savers : tuple of int
    calls : tuple of int
        Calls that hold it if they are recomputed.
    is_expensive : bool
    """

    size_bytes: int
    born: int
    dies: int
    readers: tuple[int, ...]
    savers: tuple[int, ...]
    calls: tuple[int, ...]
    is_expensive: bool

    @property
    def outlives(self) -> bool:
        """Whether it lives on after the segment that allocates it, even if nothing is saved."""
        return self.dies > self.born


class Layout:
    """A call tree, indexed: groups of storages by birth, death, saver and call, and calls by segment.

    Attributes
    ----------
    tree : CallTree
    length : int
        Number of segments.
    around : list of tuple of int
        Per segment: the calls that it runs in, the outermost first.
    ancestors : list of tuple of int
        Per call: the calls that it is made in, the outermost first.
    starting, stopping : list of list of int
        Per segment: the calls whose first or last segment it is, the outermost first.
    groups : list of Group
    born, dying, saved : list of list of int
        Per segment: the groups that it allocates; that die during it; that it saves.
    held : list of list of int
        Per call: the groups that it holds if it is recomputed.
    outputs : list of list of int
        Per call: the groups allocated in it that live on after it.
    peaks : list of Peaks
        Per segment.
    is_expensive : list of bool
        Per segment: whether it allocates expensive results.
    """

    def __init__(self, tree: CallTree) -> None:
        self.tree = tree
        self.length = len(tree.segments)
        self.ancestors: list[tuple[int, ...]] = []
        for call in tree.calls:
            self.ancestors.append(() if call.caller == OUTSIDE else (*self.ancestors[call.caller], call.caller))
        self.around = [
            () if segment.call == OUTSIDE else (*self.ancestors[segment.call], segment.call)
            for segment in tree.segments
        ]
        self.starting: list[list[int]] = [[] for _ in range(self.length)]
        self.stopping: list[list[int]] = [[] for _ in range(self.length)]
        for c, call in enumerate(tree.calls):
            if call.start < call.stop:
                self.starting[call.start].append(c)
                self.stopping[call.stop - 1].append(c)
        self.groups = _groups(self)
        self.born: list[list[int]] = [[] for _ in range(self.length)]
        self.dying: list[list[int]] = [[] for _ in range(self.length)]
        self.saved: list[list[int]] = [[] for _ in range(self.length)]
        self.held: list[list[int]] = [[] for _ in tree.calls]
        self.outputs: list[list[int]] = [[] for _ in tree.calls]
        for g, group in enumerate(self.groups):
            self.born[group.born].append(g)
            if group.outlives:
                self.dying[min(group.dies, self.length - 1)].append(g)
            for segment in group.savers:
                self.saved[segment].append(g)
            for c in group.calls:
                self.held[c].append(g)
            for c in self.around[group.born]:
                if group.outlives and group.dies >= tree.calls[c].stop:
                    self.outputs[c].append(g)
        self.peaks = [Peaks.of(self, i) for i in range(self.length)]
        self.is_expensive = [any(self.groups[g].is_expensive for g in born) for born in self.born]

    def is_inside(self, inner: int, outer: int) -> bool:
        """Return whether a call is made in another; every call is made in the step, `OUTSIDE`."""
        return outer == OUTSIDE or outer in self.ancestors[inner]

    def calls_within(self, segment: int, root: int) -> tuple[int, ...]:
        """Return the calls around a segment that are made in `root`, the outermost first."""
        around = self.around[segment]
        return around if root == OUTSIDE else around[around.index(root) + 1 :]


@dataclass(frozen=True, slots=True)
class Peaks:
    """Most bytes above those live at the start of a forward run of one segment, by how it runs.

    What the run leaves live is included, so each is at least as much as that.
    """

    without_saving: int
    saving: int
    keeping: int
    from_kept: int

    @classmethod
    def of(cls, layout: Layout, segment: int) -> Peaks:
        """Return the peaks of a segment, which are at least what stays live at the end of the run."""
        groups = [layout.groups[g] for g in layout.born[segment]]
        measured = layout.tree.segments[segment]
        without = max(measured.forward_peak_bytes, sum(group.size_bytes for group in groups if group.outlives))
        left = sum(group.size_bytes for group in groups if group.outlives or segment in group.savers)
        saving = max(measured.saving_forward_peak_bytes, left, without)
        kept = sum(group.size_bytes for group in groups if group.outlives or group.is_expensive)
        keeping = max(measured.keeping_forward_peak_bytes, kept, without)
        again = [g for g in groups if not g.is_expensive and (g.outlives or segment in g.savers)]
        from_kept = max(measured.kept_forward_peak_bytes, sum(group.size_bytes for group in again))
        return cls(without, saving, keeping, min(from_kept, saving))


@dataclass
class Execution:
    """The runs of a step in order.

    Attributes
    ----------
    runs : list of Run
    roots : list of int
        Per run: the region that its pass recomputes, or `OUTSIDE`.
    frees : list of list of TensorKey
        Per run: what is freed after it.
    """

    runs: list[Run] = field(default_factory=list)
    roots: list[int] = field(default_factory=list)
    frees: list[list[TensorKey]] = field(default_factory=list)

    def add(self, run: Run, *frees: TensorKey, root: int = OUTSIDE) -> None:
        """Append a run and what is freed after it."""
        self.runs.append(run)
        self.roots.append(root)
        self.frees.append(list(frees))


def execute(layout: Layout, regions: Regions) -> Execution:
    """Return the runs of a step, and what is freed after each.

    Regions that keep expensive results must have no other region around or inside them.
    """
    return _Executor(layout, regions).execution


class _Executor:
    def __init__(self, layout: Layout, regions: Regions) -> None:
        self.layout, self.regions = layout, regions
        self.execution = Execution()
        self.until_backward: defaultdict[int, list[TensorKey]] = defaultdict(list)
        """What is held until the backward of a segment has ended."""
        self._pass(OUTSIDE, 0, layout.length)
        for i in reversed(range(layout.length)):
            for c in layout.stopping[i]:
                if c in regions:
                    call = layout.tree.calls[c]
                    self._pass(c, call.start, call.stop)
            freed = self.until_backward.pop(i)
            if i + 1 < layout.length:
                freed.append((Part.GRADIENT, i + 1, -1))
            self.execution.add((Kind.BACKWARD, i), *freed)
            self.execution.add((Kind.GRADIENTS, i), (Part.BACKWARD_END, i, -1))

    def _pass(self, root: int, start: int, stop: int) -> None:
        """Run the segments of the step or of a region, in order."""
        layout, regions = self.layout, self.regions
        held: set[int] = set()
        for i in range(start, stop):
            within = layout.calls_within(i, root)
            inner = [c for c in within if c in regions]
            freed: list[TensorKey] = []
            for c in layout.starting[i]:
                if c in inner:
                    self._enter(c, inner[0] == c, root, start, held)
            kind = self._kind(root, i, inner)
            if kind in (Kind.SAVING, Kind.FROM_KEPT):
                self.until_backward[i] += [(Part.SAVED, g, i) for g in layout.saved[i]]
                self.until_backward[i].append((Part.TAPE, i, -1))
            if kind is Kind.FROM_KEPT:
                freed += [(Part.KEPT, g, -1) for g in layout.born[i] if layout.groups[g].is_expensive]
            freed += [(Part.VALUE, g, -1) for g in layout.dying[i] if layout.groups[g].born >= start and g not in held]
            if i == stop - 1 and root != OUTSIDE:
                freed += [
                    (Part.VALUE, g, -1) for g in layout.outputs[root] if g not in held and g not in layout.dying[i]
                ]
            self.execution.add((kind, i), *freed, (Part.END, i, -1), root=root)

    def _enter(self, c: int, is_direct: bool, root: int, start: int, held: set[int]) -> None:
        """Begin a region in a pass: unless another region is around it, it holds its inputs until its backward.

        What it copied is held from its first run on, whatever is around it: the hooks of what autograd
        saved in it hold the region itself.
        """
        call = self.layout.tree.calls[c]
        if root == OUTSIDE:
            self.execution.add((Kind.KEEPING_CHECKPOINT if self.regions[c] else Kind.CHECKPOINT, c))
            self.until_backward[call.start].append((Part.COPIES, c, -1))
        if not is_direct:
            return
        for g in self.layout.held[c]:
            if g not in held and self.layout.groups[g].born >= start:
                held.add(g)
                self.until_backward[call.start].append((Part.VALUE, g, -1))

    def _kind(self, root: int, segment: int, inner: list[int]) -> Kind:
        """Return how a pass runs a segment, given the further regions around it."""
        keeps = self.layout.is_expensive[segment]
        if inner:
            return Kind.KEEPING if keeps and self.regions[inner[0]] else Kind.WITHOUT_SAVING
        return Kind.FROM_KEPT if keeps and root != OUTSIDE and self.regions[root] else Kind.SAVING


def _groups(layout: Layout) -> list[Group]:
    """Put storages with the same life together; those that are live only within one forward run are left out."""
    tree = layout.tree
    expensive = {s for segment in tree.segments for s in segment.expensive}
    sizes: defaultdict[tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...], bool], int] = defaultdict(int)
    inputs: defaultdict[int, list[int]] = defaultdict(list)
    for c, call in enumerate(tree.calls):
        for s in call.inputs:
            inputs[s].append(c)
    for s, storage in enumerate(tree.storages):
        born = storage.born
        calls = [c for c in inputs[s] if tree.calls[c].start > born]
        uses = {*storage.read_by, *storage.saved_by, *(tree.calls[c].start for c in calls)}
        dies = min(max(storage.dies, born, *uses), layout.length)
        readers = {i for i in (*uses, dies) if born < i < layout.length}
        around = {c for i in readers for c in layout.around[i]}
        around |= {outer for c in calls for outer in (c, *layout.ancestors[c])}
        holders = sorted(c for c in around if tree.calls[c].start > born)
        savers = tuple(sorted({i for i in storage.saved_by if i >= born}))
        is_expensive = s in expensive
        if storage.size_bytes and (savers or is_expensive or dies > born):
            sizes[born, dies, tuple(sorted(readers)), savers, tuple(holders), is_expensive] += storage.size_bytes
    return [Group(size, *life) for life, size in sizes.items()]
