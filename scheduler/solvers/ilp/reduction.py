"""Reduce a graph for integer programs: fold views, merge twin tensors, and absorb operations into their readers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler.graph import Graph
from scheduler.problem import necessary_tasks
from scheduler.solvers.ilp.precedence import Precedence
from scheduler.solvers.ilp.views import fold_views


@dataclass(frozen=True)
class Merged:
    """Operations that count as one at a cut, because what passes between them is never worth keeping.

    Attributes
    ----------
    before : int
        Bits of the tasks that count as run before the cut.
    lead : dict of int to int
        Of each absorbed operation, the one that it runs together with.
    members : dict of int to list of int
        Of each such operation, those that run together with it.
    inputs : dict of int to list of int
        Of each such operation, what it and its members read from others.
    """

    before: int
    lead: dict[int, int] = field(default_factory=dict)
    members: dict[int, list[int]] = field(default_factory=dict)
    inputs: dict[int, list[int]] = field(default_factory=dict)


class Reduction:
    """A graph as the programs of `ilp` see it: smaller, with the same optimum.

    A reader of a free view reads its base.

    An operation is absorbed by the only reader of its outputs if the reader reads nothing else
    but what the operation reads too, and if its own outputs take no more memory. Once both have
    run, to keep what passes between them is never better than to keep the reader's outputs: these
    take no more memory, and save the reader's time as well. Where first runs may be reordered,
    the reader first runs right after the operation; before that, what passes between them is live
    (had it been freed unread, the operation could have waited), and takes at least as much memory.

    Twins are outputs of one operation that the same operations read, each alone on its storage.
    To keep one without the other saves no recomputation.

    Parameters
    ----------
    graph : Graph
    absorbs : bool
        Whether operations are absorbed, and twins merged.

    Attributes
    ----------
    folded : tuple of bool
        Whether each operation is a folded view.
    inputs : list of list of int
        Tensors that each operation reads, without resident ones, and without twins of others.
    results : set of int
        Tensors that must be live at the end.
    necessary : set of int
        Tasks that run in every schedule.
    base : dict of int to int
        For each view, a tensor on its storage that whatever produces it reads.
    reader : dict of int to int
        The operation that absorbs each absorbed one; it may itself be absorbed.
    twins : dict of int to list of int
        The twins that each tensor stands for.
    twin_of : dict of int to int
        The tensor that stands for each other twin.
    """

    def __init__(self, graph: Graph, *, absorbs: bool) -> None:
        self.graph, self.index = graph, graph.index
        views = fold_views(graph, free=True)
        self.folded = views.folded
        self.inputs = [sorted({views.root[t] for t in ids} - {-1}) for ids in self.index.inputs]
        self.results = {views.root[t] for t, result in enumerate(self.index.is_result) if result}
        self.necessary = set(necessary_tasks(graph))
        self.base = self._bases()
        self.reader: dict[int, int] = {}
        self.twins: dict[int, list[int]] = {}
        self.twin_of: dict[int, int] = {}
        if absorbs:
            readers: list[set[int]] = [set() for _ in graph.tensors]
            for i, row in enumerate(self.inputs):
                for t in () if self.folded[i] else row:
                    readers[t].add(i)
            on_storage: dict[int, set[int]] = {}
            for i, outputs in enumerate(self.index.outputs):
                for t in () if self.folded[i] else outputs:
                    on_storage.setdefault(self.index.storage_of[t], set()).add(t)
            self._absorb(readers, on_storage)
            self._merge_twins(readers, on_storage)

    def task_of(self, tensor: int) -> int:
        """Return the task that produces a tensor; -1 if it is resident."""
        producers = self.index.producers[tensor]
        return self.index.task_of[producers[0]] if producers else -1

    def with_bases(self, tensors: Iterable[int]) -> list[int]:
        """Return tensors, and what they are views of: wherever a view is live or recomputed, its base is too."""
        found: dict[int, None] = {}
        for tensor in tensors:
            while tensor >= 0 and tensor not in found:
                found[tensor] = None
                tensor = self.base.get(tensor, -1)
        return list(found)

    def with_twins(self, tensors: Iterable[int]) -> frozenset[int]:
        """Return tensors, and the twins that they stand for."""
        return frozenset(other for t in tensors for other in (t, *self.twins.get(t, ())))

    def merged(self, precedence: Precedence, cut: int) -> Merged:
        """Return what counts as one at a cut: an operation and its reader that have both run, or may run together.

        Where the order is free, a reader counts as run as soon as the operation has that it absorbs.
        """
        task_of, operations = self.index.task_of, self.graph.operations
        before, later = precedence.before(cut), precedence.after(cut) | 1 << cut
        together: set[int] = set()
        for i, reader in sorted(self.reader.items()) if precedence.reorder else ():
            may_wait = not (before | later) >> task_of[reader] & 1
            if may_wait and operations[i].phase == operations[reader].phase:
                if before >> task_of[i] & 1:
                    before |= 1 << task_of[reader]
                elif not later >> task_of[i] & 1:
                    together.add(i)
        merged = Merged(before)
        applies = {i for i, reader in self.reader.items() if before >> task_of[reader] & 1 or i in together}
        for i in sorted(applies):
            lead = i
            while lead in applies:
                lead = self.reader[lead]
            merged.lead[i] = lead
            merged.members.setdefault(lead, []).append(i)
        for lead, members in merged.members.items():
            inside = {t for i in members for t in self.index.outputs[i]}
            merged.inputs[lead] = sorted({t for i in (lead, *members) for t in self.inputs[i]} - inside)
        return merged

    def _bases(self) -> dict[int, int]:
        index, found = self.index, {}
        for tensor, producers in enumerate(index.producers):
            read = [{t for t in self.inputs[i] if index.storage_of[t] == index.storage_of[tensor]} for i in producers]
            common = set.intersection(*read) - {tensor} if read else set()
            if common:
                found[tensor] = min(common)
        return found

    def _is_plain(self, i: int) -> bool:
        """Return whether an operation has a variable of its own, no alternative, and runs in every schedule."""
        task = self.index.task_of[i]
        return not self.folded[i] and len(self.index.tasks[task]) == 1 and task in self.necessary

    def _absorb(self, readers: list[set[int]], on_storage: dict[int, set[int]]) -> None:
        """Absorb operations in the input order, each with what it has absorbed before."""
        reads = [set(row) for row in self.inputs]
        within: dict[int, set[int]] = {}
        for i, outputs in enumerate(self.index.outputs):
            passed = {t for t in outputs if readers[t]}
            found = {reader for t in passed for reader in readers[t]}
            if len(found) != 1 or not self._is_plain(i) or self.results.intersection(outputs):
                continue
            (reader,) = found
            inside = passed | within.get(i, set())
            if not self._is_plain(reader) or reads[reader] - passed - reads[i]:
                continue
            if self._takes_no_more(reader, passed, inside, on_storage):
                self.reader[i] = reader
                reads[reader] = (reads[reader] - passed) | reads[i]
                within.setdefault(reader, set()).update(inside)

    def _takes_no_more(self, reader: int, passed: set[int], inside: set[int], on_storage: dict[int, set[int]]) -> bool:
        """Return whether the outputs of a reader take no more memory than the tensors that it reads did."""
        index = self.index
        freed = {index.storage_of[t] for t in passed}
        taken = {index.storage_of[t] for t in index.outputs[reader]}
        if taken <= freed:
            return True
        is_free = all(on_storage[storage] <= inside for storage in freed)
        return is_free and sum(index.storage_bytes[s] for s in taken) <= sum(index.storage_bytes[s] for s in freed)

    def _merge_twins(self, readers: list[set[int]], on_storage: dict[int, set[int]]) -> None:
        index = self.index
        for i, outputs in enumerate(index.outputs):
            if self.folded[i] or len(index.tasks[index.task_of[i]]) > 1:
                continue
            first: dict[frozenset[int], int] = {}
            for t in outputs:
                if readers[t] and t not in self.results and on_storage[index.storage_of[t]] == {t}:
                    other = first.setdefault(frozenset(readers[t]), t)
                    if other != t:
                        self.twins.setdefault(other, []).append(t)
                        self.twin_of[t] = other
        self.inputs = [[t for t in row if t not in self.twin_of] for row in self.inputs]
