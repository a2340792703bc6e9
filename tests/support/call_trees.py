"""Random call trees, and a small model of their time and memory, written from the definition alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from scheduler.graph import Tensor
from scheduler.pytorch.modules.calls import OUTSIDE, Call, CallTree, Segment, Storage

Regions = Mapping[int, bool]
"""Recomputed calls, by position, and whether each keeps the results of expensive operators."""


def random_tree(seed: int, *, most_calls: int = 8, expensive: bool = True) -> CallTree:
    """Return a tree of nested calls whose storages are read, saved and passed on at random."""
    return _Program(random.Random(seed), most_calls, expensive).tree()


def every_choice(tree: CallTree, *, expensive: bool = True) -> Iterator[Regions]:
    """Yield every set of calls to recompute, with every way to keep expensive results."""
    options = [(None, False, True) if expensive and _has_expensive(tree, c) else (None, False) for c in _calls(tree)]
    for choice in itertools.product(*options):
        regions = {c: keeps for c, keeps in zip(_calls(tree), choice, strict=True) if keeps is not None}
        pairs = [(c, d) for c, d in itertools.permutations(regions, 2) if _is_inside(tree, c, d)]
        if not any(regions[c] or regions[d] for c, d in pairs):
            yield regions


def block_tree(blocks: int, *, saved: int = 10, value: int = 2, forward: float = 1.0) -> CallTree:
    """Blocks in a row, one segment each: reads the value before it, saves `saved` bytes, returns a value."""
    calls = [
        Call(module=f"blocks.{i}", number=0, caller=OUTSIDE, start=i, stop=i + 1, inputs=(2 * i - 2,) if i else ())
        for i in range(blocks)
    ]
    segments = [Segment(call=i, forward_time=forward, backward_time=2 * forward) for i in range(blocks)]
    storages = []
    for i in range(blocks):
        last = i + 1 == blocks
        storages.append(Storage(size_bytes=value, born=i, dies=i if last else i + 1, read_by=() if last else (i + 1,)))
        storages.append(Storage(size_bytes=saved, born=i, dies=i, saved_by=(i,)))
    return CallTree(calls=tuple(calls), segments=tuple(segments), storages=tuple(storages), resident=())


def transformer_tree(blocks: int, *, width: int = 1024, spread: int = 0) -> CallTree:
    """A transformer of 13 calls per block, with the tensors that PyTorch saves; `spread` makes blocks unequal."""
    step = _Step()
    with step.call("", []) as model:
        x = step.leaf("wte", [], width, time=1.0)
        for i in range(blocks):
            size = width + (i * i * 7919) % (spread + 1)
            x = _block(step, f"h.{i}", x, size)
            model.append(x)
        x = step.leaf("ln_f", [x], width, saves=[x], time=1.0)
        logits = step.leaf("lm_head", [x], 8 * width, saves=[x], time=40.0)
    step.segment(OUTSIDE, [logits], saves=[logits], keeps=8 * width, time=4.0)
    return step.tree()


def _block(step: _Step, name: str, x: int, width: int) -> int:
    with step.call(name, [x]) as known:
        y = step.leaf(f"{name}.ln_1", [x], width, saves=[x], time=1.0)
        with step.call(f"{name}.attn", [y]) as attention:
            heads = step.leaf(f"{name}.attn.c_attn", [y], 3 * width, saves=[y], time=12.0)
            mixed = step.segment(step.around[-1], [heads], saves=[heads], keeps=width, new=width, time=6.0)
            mixed = step.leaf(f"{name}.attn.drop", [mixed], width, keeps=width // 4, time=1.0)
            mixed = step.leaf(f"{name}.attn.c_proj", [mixed], width, saves=[mixed], time=4.0)
            y = step.leaf(f"{name}.attn.resid_drop", [mixed], width, keeps=width // 4, time=1.0)
            attention.append(y)
        x = step.segment(step.around[-1], [x, y], new=width, time=1.0)
        y = step.leaf(f"{name}.ln_2", [x], width, saves=[x], time=1.0)
        with step.call(f"{name}.mlp", [y]) as mlp:
            wide = step.leaf(f"{name}.mlp.c_fc", [y], 4 * width, saves=[y], time=16.0)
            active = step.leaf(f"{name}.mlp.act", [wide], 4 * width, saves=[wide], time=4.0)
            y = step.leaf(f"{name}.mlp.c_proj", [active], width, saves=[active], time=16.0)
            y = step.leaf(f"{name}.mlp.drop", [y], width, keeps=width // 4, time=1.0)
            mlp.append(y)
        x = step.segment(step.around[-1], [x, y], new=width, time=1.0)
        known.append(x)
    return x


class _Step:
    """A step written down call by call; values die with their last reader."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.segments: list[Segment] = []
        self.storages: list[Storage] = []
        self.around = [OUTSIDE]

    @contextmanager
    def call(self, module: str, inputs: list[int]) -> Iterator[list[int]]:
        """A call of a module; the storages that are put into the list are what it returns."""
        c, start = len(self.calls), len(self.segments)
        self.calls.append(
            Call(module=module, number=0, caller=self.around[-1], start=start, stop=start + 1, inputs=tuple(inputs))
        )
        self.around.append(c)
        returned: list[int] = []
        yield returned
        self.around.pop()
        self.calls[c] = replace(self.calls[c], stop=len(self.segments))

    def leaf(
        self, module: str, inputs: list[int], new: int, *, saves: list[int] | None = None, keeps: int = 0, time: float
    ) -> int:
        """A call without inner calls, which returns a new storage."""
        with self.call(module, inputs):
            return self.segment(self.around[-1], inputs, saves=saves, keeps=keeps, new=new, time=time)

    def segment(
        self, call: int, reads: list[int], *, saves: list[int] | None = None, keeps: int = 0, new: int = 0, time: float
    ) -> int:
        """Code that reads storages, saves some, allocates what only it saves, and returns a new storage."""
        i = len(self.segments)
        for s in reads:
            is_saved = s in (saves or ())
            storage = self.storages[s]
            saved_by = (*storage.saved_by, i) if is_saved else storage.saved_by
            self.storages[s] = replace(storage, dies=i, read_by=(*storage.read_by, i), saved_by=saved_by)
        if keeps:
            self.storages.append(Storage(size_bytes=keeps, born=i, dies=i, saved_by=(i,)))
        self.storages.append(Storage(size_bytes=new, born=i, dies=i))
        read = sum(self.storages[s].size_bytes for s in reads)
        self.segments.append(
            Segment(
                call=call,
                forward_time=time,
                backward_time=2 * time,
                forward_peak_bytes=new + keeps,
                saving_forward_peak_bytes=new + keeps,
                backward_peak_bytes=read,
                gradient_bytes=read,
                expensive=(len(self.storages) - 1,) if time >= 4 and new else (),
                expensive_time=0.9 * time if time >= 4 and new else 0.0,
            )
        )
        return len(self.storages) - 1

    def tree(self) -> CallTree:
        return CallTree(
            calls=tuple(self.calls), segments=tuple(self.segments), storages=tuple(self.storages), resident=()
        )


class _Program:
    """A random program. The code of a call knows its arguments, what it allocates, and what its calls return."""

    def __init__(self, draw: random.Random, most_calls: int, expensive: bool) -> None:
        self.draw, self.left, self.expensive = draw, most_calls, expensive
        self.calls: list[Call] = []
        self.segments: list[Segment] = []
        self.storages: list[Storage] = []

    def tree(self) -> CallTree:
        for s in self.run(OUTSIDE, []):  # what the user holds
            self.hold(s, len(self.segments))
        resident = Tensor("weights", self.draw.choice([0, 7]), role="parameter")
        return CallTree(
            calls=tuple(self.calls), segments=tuple(self.segments), storages=tuple(self.storages), resident=(resident,)
        )

    def run(self, caller: int, known: list[int]) -> list[int]:
        """Run the code of a call; return the storages that it returns."""
        draw, known = self.draw, list(known)
        if draw.random() < 0.8 or not self.segments or caller != OUTSIDE:
            known += self.segment(caller, known)
        while self.left and draw.random() < (0.9 if caller == OUTSIDE else 0.5):
            self.left -= 1
            arguments = [s for s in known if draw.random() < 0.6]
            c, start = len(self.calls), len(self.segments)
            copied = draw.choice([0, 0, 0, 2])
            call = Call(module=f"m{c}", number=0, caller=caller, start=start, stop=start + 1, copied_bytes=copied)
            self.calls.append(replace(call, inputs=tuple(arguments)))
            for s in arguments:
                self.hold(s, start)
            returned = self.run(c, arguments)
            self.calls[c] = replace(self.calls[c], stop=len(self.segments))
            known += [s for s in returned if s not in known]
            if draw.random() < 0.7 or returned:
                for s in returned:
                    self.hold(s, len(self.segments))
                known += self.segment(caller, known)
        return [s for s in known if draw.random() < 0.3]

    def segment(self, call: int, known: list[int]) -> list[int]:
        """Run code between calls; return what it allocates."""
        draw, i = self.draw, len(self.segments)
        new = list(range(len(self.storages), len(self.storages) + draw.choice([0, 1, 1, 2])))
        for _ in new:
            self.storages.append(Storage(size_bytes=draw.randint(1, 9), born=i, dies=i))
        for s in [*known, *new]:
            if draw.random() < 0.5:
                self.hold(s, i)
                storage = self.storages[s]
                read_by = (*storage.read_by, i) if s in known else ()
                saved_by = (*storage.saved_by, i) if draw.random() < 0.6 else storage.saved_by
                self.storages[s] = replace(storage, read_by=read_by, saved_by=saved_by)
        kept = tuple(s for s in new if self.expensive and draw.random() < 0.4)
        time = draw.randint(1, 9)
        self.segments.append(
            Segment(
                call=call,
                forward_time=float(time),
                backward_time=float(draw.randint(1, 9)),
                forward_peak_bytes=draw.randint(0, 20),
                saving_forward_peak_bytes=draw.randint(0, 25),
                keeping_forward_peak_bytes=draw.randint(0, 25),
                kept_forward_peak_bytes=draw.randint(0, 20),
                backward_peak_bytes=draw.randint(0, 20),
                gradient_bytes=draw.randint(0, 9),
                parameter_gradient_bytes=draw.choice([0, 3]),
                expensive=kept,
                expensive_time=float(draw.randint(0, time)) if kept else 0.0,
            )
        )
        return new

    def hold(self, s: int, segment: int) -> None:
        self.storages[s] = replace(self.storages[s], dies=max(self.storages[s].dies, segment))


@dataclass(eq=False)
class _Copy:
    """One allocation of a storage, and why it is still held."""

    size_bytes: int
    reasons: set[tuple[str, int]] = field(default_factory=set)


class Machine:
    """Runs a step with recomputed calls, by the definition; counts time and the peak.

    A storage is freed when nothing holds it: Python, during the pass that allocated it; a segment
    that saved it, until its backward; a region whose argument it is, until the region's
    backward has ended; the user, to the end. What a region copies is held from its first run on.
    """

    def __init__(self, tree: CallTree, regions: Regions) -> None:
        self.tree, self.regions = tree, regions
        self.copies: list[_Copy] = []
        self.arguments: dict[int, dict[int, _Copy]] = {}
        self.kept: dict[int, _Copy] = {}
        self.fixed = sum(tensor.size_bytes for tensor in tree.resident)
        self.gradients = 0
        self.time, self.peak_bytes, self.passes = 0.0, 0, 0
        self._pass(OUTSIDE, range(len(tree.segments)))
        for i in reversed(range(len(tree.segments))):
            for c in _calls(tree):
                if tree.calls[c].stop - 1 == i and c in regions:
                    self._pass(c, range(tree.calls[c].start, i + 1))
            self._backward(i)

    def _backward(self, i: int) -> None:
        segment = self.tree.segments[i]
        self._see(segment.backward_peak_bytes)
        self.time += segment.backward_time
        self._let_go({("saved", i)})
        self._let_go({("region", c) for c in _calls(self.tree) if self.tree.calls[c].start == i})
        self.gradients = segment.gradient_bytes
        self.fixed += segment.parameter_gradient_bytes
        self._see(0)

    def _pass(self, root: int, segments: range) -> None:
        self.passes += 1
        known = dict(self.arguments.get(root, {}))
        for i in segments:
            around = [c for c in self._around(i) if c in self.regions and _is_inside(self.tree, c, root)]
            for c in around:
                if self.tree.calls[c].start == i:
                    self._enter(c, known, is_direct=not any(_is_inside(self.tree, c, other) for other in around))
            self._forward(root, i, around, known)
            for s, storage in enumerate(self.tree.storages):
                if storage.dies <= i and s in known:
                    known[s].reasons.discard(("python", self.passes))
            self._let_go(set())
        self._let_go({("python", self.passes)})

    def _enter(self, c: int, known: dict[int, _Copy], *, is_direct: bool) -> None:
        call, reason = self.tree.calls[c], ("region", c)
        if self.passes == 1:
            self.copies.append(_Copy(call.copied_bytes, {reason}))
        if is_direct:
            self.arguments[c] = {s: known[s] for s in call.inputs}
            for copy in self.arguments[c].values():
                copy.reasons.add(reason)

    def _forward(self, root: int, i: int, around: list[int], known: dict[int, _Copy]) -> None:
        segment, before = self.tree.segments[i], self._live()
        keeps = any(self.regions[c] for c in around)
        is_again = root != OUTSIDE and self.regions[root]
        for s, storage in enumerate(self.tree.storages):
            if storage.born != i:
                continue
            is_kept = is_again and s in segment.expensive
            known[s] = copy = self.kept[s] if is_kept else _Copy(storage.size_bytes)
            if storage.dies > i:
                copy.reasons.add(("python", self.passes))
            if storage.dies == len(self.tree.segments) and root == OUTSIDE:
                copy.reasons.add(("user", 0))
            if keeps and s in segment.expensive:
                self.kept[s] = copy
                copy.reasons.add(("kept", i))
            if not is_kept:
                self.copies.append(copy)
        if not around:
            for s, storage in enumerate(self.tree.storages):
                if i in storage.saved_by:
                    known[s].reasons.add(("saved", i))
        self._let_go(set())
        self._see(0)
        run_peak = self._peak_of_run(i, saves=not around, keeps=keeps, is_again=is_again)
        self.peak_bytes = max(self.peak_bytes, before + run_peak)
        if is_again:
            self._let_go({("kept", i)})
        self.time += segment.forward_time - (segment.expensive_time if is_again else 0.0)

    def _peak_of_run(self, i: int, *, saves: bool, keeps: bool, is_again: bool) -> int:
        """Measured peaks, but never less than what the same run leaves, or than a run that saves nothing needs.

        A run that uses kept results may need less than that, but never more than one that computes them.
        """
        segment = self.tree.segments[i]
        born = [(s, storage) for s, storage in enumerate(self.tree.storages) if storage.born == i]
        outlives = sum(storage.size_bytes for _, storage in born if storage.dies > i)
        nothing = max(segment.forward_peak_bytes, outlives)
        if keeps and segment.expensive:
            kept = sum(x.size_bytes for s, x in born if x.dies > i or s in segment.expensive)
            return max(nothing, segment.keeping_forward_peak_bytes, kept)
        if not saves:
            return nothing
        left = {s: x.size_bytes for s, x in born if x.dies > i or i in x.saved_by}
        saving = max(nothing, segment.saving_forward_peak_bytes, sum(left.values()))
        if not is_again or not segment.expensive:
            return saving
        new = sum(size for s, size in left.items() if s not in segment.expensive)
        return min(saving, max(new, segment.kept_forward_peak_bytes))

    def _live(self) -> int:
        return self.fixed + self.gradients + sum(copy.size_bytes for copy in self.copies)

    def _see(self, more: int) -> None:
        self.peak_bytes = max(self.peak_bytes, self._live() + more)

    def _let_go(self, reasons: set[tuple[str, int]]) -> None:
        for copy in self.copies:
            copy.reasons -= reasons
        self.copies = [copy for copy in self.copies if copy.reasons]

    def _around(self, segment: int) -> list[int]:
        return [c for c, call in enumerate(self.tree.calls) if call.start <= segment < call.stop]


def _calls(tree: CallTree) -> range:
    return range(len(tree.calls))


def _is_inside(tree: CallTree, inner: int, outer: int) -> bool:
    """Return whether a call is made in another one, directly or not."""
    while inner != OUTSIDE:
        inner = tree.calls[inner].caller
        if inner == outer:
            return True
    return False


def _has_expensive(tree: CallTree, c: int) -> bool:
    return any(segment.expensive for segment in tree.segments[tree.calls[c].start : tree.calls[c].stop])
