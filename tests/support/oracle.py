"""An exhaustive oracle: the least time and the least peak of any schedule of a small graph.

It shares no code with the package: it reads the plain data of `Graph.to_dict()` and has its
own model of memory, written from the definition. Two independent parts check each other:

- `start`, `step` and `check_end` are the definition taken literally, one action at a time;
  `peak_of` judges a list of actions with them.
- `best_schedule` is an A* search in bit masks over the same states; `optimum` and
  `least_peak` ask it.

A state is which tensors are live, how they lie in instances, and what has run. The search
is exact; what it leaves out is argued where it is left out:

1. *Late frees.* A free can wait until just before the first later run that has the tensor
   among its outputs, or that does not fit without it: until then, holding the tensor
   changes nothing but the memory. So before a run the search frees any subset of the run's
   live outputs, and, if the run does not fit, any inclusion-minimal set of whole
   instances without inputs (part of an instance gives back no bytes).
2. *Dominance.* A state may be dropped for one that took no longer, holds at least the same
   tensors, keeps together on one instance whatever the first keeps together, and has the
   same history but for bits that only ever allow more. Freeing the surplus leaves the same
   live tensors on a coarser partition; every continuation then makes the same new
   instances and joins the same inputs, so it stays valid and never needs more memory.
3. *Bound.* The A* bound adds one cheapest run of each task, and each required operation
   that has not run, that any continuation must still run. A run of another task never
   shortens that list (the inputs of a task about to run are live, so nothing is listed for
   its sake), hence the bound is consistent and the first end reached is the optimum.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

SPACES = ("any", "input order")

OracleVerb = tuple[str, str]
"""("compute", operation) or ("free", tensor)."""


class Refused(Exception):
    """A list of actions breaks a rule; `index` is that of the action, or the length at the end."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"action {index}: {reason}")
        self.index = index


@dataclass(frozen=True)
class OracleOperation:
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    time: float
    workspace: int
    backward: bool
    repeatable: bool


@dataclass(frozen=True)
class OracleGraph:
    """A graph as plain data; an operation is meant by its position."""

    operations: tuple[OracleOperation, ...]
    storage: Mapping[str, str]
    resident: frozenset[str]
    results: frozenset[str]
    required: frozenset[int]
    size: Mapping[str, int]
    """Bytes of an instance of each storage; 0 where a resident tensor lies on it."""
    resident_bytes: int

    @cached_property
    def task(self) -> tuple[int, ...]:
        """The default (first) operation of each operation's task."""
        default = list(range(len(self.operations)))
        for a, b in itertools.combinations(range(len(default)), 2):
            if set(self.operations[a].outputs) & set(self.operations[b].outputs):
                old, new = max(default[a], default[b]), min(default[a], default[b])
                default = [new if entry == old else entry for entry in default]
        return tuple(default)

    @cached_property
    def forward_tasks(self) -> frozenset[int]:
        """Forward tasks whose default the forward results need."""
        pending = {
            self.task_making(name)
            for name in self.results - self.resident
            if not self.operations[self.task_making(name)].backward
        }
        needed: set[int] = set()
        while pending:
            default = pending.pop()
            needed.add(default)
            inputs = set(self.operations[default].inputs) - self.resident
            pending |= {self.task_making(name) for name in inputs} - needed
        return frozenset(default for default in needed if not self.operations[default].backward)

    def task_making(self, tensor: str) -> int:
        return next(self.task[i] for i, op in enumerate(self.operations) if tensor in op.outputs)


def read(data: Mapping) -> OracleGraph:
    """Return the graph that `Graph.to_dict()` describes."""
    operations = tuple(
        OracleOperation(
            name=entry["name"],
            inputs=tuple(entry["inputs"]),
            outputs=tuple(entry["outputs"]),
            time=entry["time"],
            workspace=entry.get("workspace_bytes", 0),
            backward=entry.get("phase", "forward") == "backward",
            repeatable=entry.get("repeatable", True),
        )
        for entry in data["operations"]
    )
    storage = {entry["name"]: entry.get("storage", entry["name"]) for entry in data["tensors"]}
    size: dict[str, int] = {}
    for entry in data["tensors"]:
        size[storage[entry["name"]]] = max(size.get(storage[entry["name"]], 0), entry["size_bytes"])
    resident_storages = {storage[name] for name in data["resident"]}
    return OracleGraph(
        operations=operations,
        storage=storage,
        resident=frozenset(data["resident"]),
        results=frozenset(data["results"]),
        required=frozenset(i for i, op in enumerate(operations) if op.name in data["required"] or not op.repeatable),
        size={name: 0 if name in resident_storages else count for name, count in size.items()},
        resident_bytes=sum(size[name] for name in resident_storages),
    )


# The definition, one action at a time.


class State(NamedTuple):
    instances: frozenset[frozenset[str]]
    """Live tensors that are not resident, grouped by the instance they lie on."""
    ran: frozenset[int]


def start() -> State:
    """Return the state before any action."""
    return State(frozenset(), frozenset())


def step(graph: OracleGraph, state: State, action: OracleVerb) -> tuple[State, int]:
    """Return the state after an action, and the bytes that it needs.

    Raises
    ------
    ValueError
        If the action breaks a rule.
    """
    kind, name = action
    live = frozenset().union(*state.instances)
    if kind == "free":
        if name not in live:
            raise ValueError(f"{name} is resident or not live")
        rest = frozenset(instance - {name} for instance in state.instances) - {frozenset()}
        return State(rest, state.ran), live_bytes(graph, rest)

    i = next((i for i, op in enumerate(graph.operations) if op.name == name), None)
    if i is None:
        raise ValueError(f"there is no operation {name}")
    op = graph.operations[i]
    if not set(op.inputs) <= live | graph.resident:
        raise ValueError(f"an input of {name} is not live")
    if op.outputs and set(op.outputs) <= live:
        raise ValueError(f"every output of {name} is live")
    if not op.repeatable and i in state.ran:
        raise ValueError(f"{name} runs twice")
    tasks_ran = {graph.task[j] for j in state.ran}
    backward_began = any(graph.operations[j].backward for j in state.ran)
    if op.backward and not backward_began and not graph.forward_tasks <= tasks_ran:
        raise ValueError(f"{name} begins the backward phase too early")
    if not op.backward and backward_began and graph.task[i] not in tasks_ran:
        raise ValueError(f"{name} first runs in the backward phase")

    input_storages = {graph.storage[tensor] for tensor in op.inputs}
    copies = {graph.storage[tensor] for tensor in op.outputs} - input_storages
    during = live_bytes(graph, state.instances) + sum(graph.size[s] for s in copies) + op.workspace
    instances = set(state.instances)
    for storage in {graph.storage[tensor] for tensor in op.outputs}:
        made = frozenset(t for t in op.outputs if graph.storage[t] == storage and t not in live)
        if storage in input_storages:
            viewed = next(tensor for tensor in op.inputs if graph.storage[tensor] == storage)
            old = next((instance for instance in instances if viewed in instance), frozenset())
            instances.discard(old)
            made |= old
        if made:
            instances.add(made)
    return State(frozenset(instances), state.ran | {i}), during


def live_bytes(graph: OracleGraph, instances: Iterable[frozenset[str]]) -> int:
    """Return the bytes that stand when these instances are live, resident ones included."""
    return graph.resident_bytes + sum(graph.size[graph.storage[min(instance)]] for instance in instances)


def check_end(graph: OracleGraph, state: State) -> None:
    """Raise ValueError if a required operation has not run or a result is not live."""
    if not graph.required <= state.ran:
        raise ValueError("a required operation has not run")
    if not graph.results <= graph.resident.union(*state.instances):
        raise ValueError("a result is not live at the end")


def peak_of(data: Mapping, actions: Sequence[OracleVerb]) -> tuple[float, int]:
    """Return time and peak of a list of actions.

    Raises
    ------
    Refused
        At the first action that breaks a rule.
    """
    graph, state = read(data), start()
    time_of = {op.name: op.time for op in graph.operations}
    peak = graph.resident_bytes
    for index, action in enumerate(actions):
        try:
            state, needed = step(graph, state, action)
        except ValueError as error:
            raise Refused(index, str(error)) from None
        peak = max(peak, needed)
    try:
        check_end(graph, state)
    except ValueError as error:
        raise Refused(len(actions), str(error)) from None
    return math.fsum(time_of[name] for kind, name in actions if kind == "compute"), peak


# The search.


def optimum(data: Mapping, budget_bytes: int, space: str = "any") -> float | None:
    """Return the least time of any schedule within the budget; None if none fits."""
    found = best_schedule(data, budget_bytes, space)
    return None if found is None else found[0]


def best_schedule(data: Mapping, budget_bytes: int, space: str = "any") -> tuple[float, list[OracleVerb]] | None:
    """Return the least time within the budget, and actions that take it; None if none fits.

    Spaces: "any" is every schedule; in "input order" the first runs of tasks stand in the
    order of their default operations, tasks that never run left out.
    """
    search = _Search(read(data), space)
    actions = search.run(budget_bytes)
    return None if actions is None else (search.time(actions), actions)


def least_peak(data: Mapping, space: str = "any") -> int:
    """Return the smallest budget for which a schedule exists."""
    search = _Search(read(data), space, timed=False)
    actions = search.run(math.inf)
    if actions is None:
        raise ValueError(f"no schedule exists in space {space!r}")
    low, high = search.graph.resident_bytes, peak_of(data, actions)[1]
    while low < high:
        budget = (low + high) // 2
        actions = search.run(budget)
        if actions is None:
            low = budget + 1
        else:
            high = peak_of(data, actions)[1]
    return high


class _Op(NamedTuple):
    """An operation in bit masks over the tensors that are not resident."""

    inputs: int
    outputs: int
    extra: int
    """Bytes of its new instances, copies and workspace."""
    fresh: tuple[tuple[int, int], ...]
    """Per storage that costs bytes: its outputs, and the input viewed (0: a new instance)."""
    time: float
    backward: bool
    once: int
    """History bit that forbids another run; 0 if it may be repeated."""
    marks: int
    """History bits that a run sets."""
    task: int
    """History bit of its task; 0 where the task's history is of no use."""
    later_tasks: int
    """History bits of the tasks that may not have run before its task's first run."""


Node = tuple[int, tuple[int, ...], int]
"""Live tensors; those on storages that cost bytes, by instance; history."""


class _Search:
    def __init__(self, graph: OracleGraph, space: str, *, timed: bool = True) -> None:
        if space not in SPACES:
            raise ValueError(f"unknown space {space!r}")
        self.graph = graph
        self.names = [name for name in graph.storage if name not in graph.resident]
        self.bit = {name: 1 << t for t, name in enumerate(self.names)}
        self.results = self._mask(graph.results)
        self.bytes_of_bit = {self.bit[name]: graph.size[graph.storage[name]] for name in self.names}
        self.bytes_of: dict[int, int] = {}
        # History: a bit per required operation, then one per task, then "backward began".
        n = len(graph.operations)
        self.began = 1 << 2 * n
        self.required = sum(1 << i for i in graph.required)
        self.forward_tasks = sum(1 << n + task for task in graph.forward_tasks)
        given = space == "input order"
        two_phases = any(op.backward for op in graph.operations)
        tracked = {graph.task[i] for i, op in enumerate(graph.operations) if given or (two_phases and not op.backward)}
        # A required operation that has run, or a forward task that has, only allows more;
        # but not one whose output can never be made again, and no task in input order.
        self.allowing = sum(
            1 << i for i in graph.required if graph.operations[i].repeatable or not graph.operations[i].outputs
        ) | (0 if given else sum(1 << n + task for task in tracked))
        self.ops = [self._op(i, tracked, given, timed) for i in range(n)]
        self.tasks = sorted(set(graph.task))
        self.least_time = {t: min(op.time for i, op in enumerate(self.ops) if graph.task[i] == t) for t in self.tasks}
        self.maker: dict[int, tuple[int, int]] = {}
        """Per tensor bit: its task, and the inputs that all who make it share."""
        for bit in self.bit.values():
            makers = [i for i, op in enumerate(self.ops) if op.outputs & bit]
            shared = ~0
            for i in makers:
                shared &= self.ops[i].inputs
            self.maker[bit] = (graph.task[makers[0]], shared)
        self.bounds: dict[tuple[int, int], float] = {}

    def run(self, budget: float) -> list[OracleVerb] | None:
        """Return actions of the least time within the budget; None if there are none."""
        first: Node = (0, (), 0)
        if self.graph.resident_bytes > budget:
            return None
        heap = [(self._bound(first), 0, 0.0, first, None)]
        closed: dict[int, list[tuple[float, Node]]] = {}
        number = 0
        while heap:
            _, _, time, node, path = heapq.heappop(heap)
            live, _, history = node
            if self.required & ~history == 0 and self.results & ~live == 0:
                return self._actions(path)
            peers = closed.setdefault(history & ~self.allowing, [])
            if self._is_dominated(time, node, peers):
                continue
            peers.append((time, node))
            for i, freed, after in self._steps(node, budget):
                later = time + self.ops[i].time
                if not self._is_dominated(later, after, closed.get(after[2] & ~self.allowing, ())):
                    number -= 1
                    heapq.heappush(heap, (later + self._bound(after), number, later, after, (path, freed, i)))
        return None

    def time(self, actions: Iterable[OracleVerb]) -> float:
        """Return the sum of the times of all runs."""
        time_of = {op.name: op.time for op in self.graph.operations}
        return math.fsum(time_of[name] for kind, name in actions if kind == "compute")

    def _steps(self, node: Node, budget: float) -> Iterator[tuple[int, int, Node]]:
        """Yield each run that the rules allow next: operation, tensors freed before, node after."""
        live, instances, history = node
        for i, op in enumerate(self.ops):
            if op.inputs & ~live or op.once & history:
                continue
            first_run = op.task and not op.task & history
            if first_run and (op.later_tasks & history or (history & self.began and not op.backward)):
                continue
            if op.backward and not history & self.began and self.forward_tasks & ~history:
                continue
            again = op.outputs & live
            for freed in _subsets(again):
                if freed == 0 and again == op.outputs != 0:
                    continue
                held = tuple(rest for mask in instances if (rest := mask & ~freed)) if freed else instances
                excess = self.graph.resident_bytes + sum(map(self._bytes, held)) + op.extra - budget
                fixed = op.inputs | again & ~freed
                removable = [mask for mask in held if not mask & fixed and self._bytes(mask)]
                if excess > sum(map(self._bytes, removable)):
                    continue
                for removed in self._least_sets(removable, excess):
                    kept = [mask for mask in held if not mask & removed]
                    for made, viewed in op.fresh:
                        made &= ~live | freed
                        if viewed:
                            old = next(mask for mask in kept if mask & viewed)
                            kept.remove(old)
                            made |= old
                        if made:
                            kept.append(made)
                    after = live & ~freed & ~removed | op.outputs
                    yield i, freed | removed, (after, tuple(sorted(kept)), history | op.marks)

    def _least_sets(self, instances: Sequence[int], excess: float) -> Iterator[int]:
        """Yield the unions of the inclusion-minimal sets of instances with at least that many bytes."""
        if excess <= 0:
            yield 0
            return
        for chosen in _subsets((1 << len(instances)) - 1):
            picked = [mask for k, mask in enumerate(instances) if chosen >> k & 1]
            sizes = [self._bytes(mask) for mask in picked]
            if sizes and sum(sizes) >= excess > sum(sizes) - min(sizes):
                yield sum(picked)

    def _bound(self, node: Node) -> float:
        """Return a lower bound on the time from here to the end."""
        live, _, history = node
        missing = self.required & ~history
        key = (live, missing)
        if key not in self.bounds:
            time_of_task: dict[int, float] = {}
            pending = self.results & ~live
            for i in _positions(missing):
                task = self.graph.task[i]
                time_of_task[task] = time_of_task.get(task, 0.0) + self.ops[i].time
                pending |= self.ops[i].inputs & ~live
            seen = 0
            while pending:
                bit = pending & -pending
                seen |= bit
                task, inputs = self.maker[bit]
                time_of_task.setdefault(task, self.least_time[task])
                pending = (pending | inputs & ~live) & ~seen
            self.bounds[key] = sum(time_of_task.values())
        return self.bounds[key]

    def _is_dominated(self, time: float, node: Node, peers: Iterable[tuple[float, Node]]) -> bool:
        live, instances, history = node
        return any(
            not live & ~peer[0]
            and not history & ~peer[2]
            and peer_time <= time
            and all(any(not mask & ~other for other in peer[1]) for mask in instances)
            for peer_time, peer in peers
        )

    def _bytes(self, mask: int) -> int:
        if mask not in self.bytes_of:
            self.bytes_of[mask] = self.bytes_of_bit[mask & -mask]
        return self.bytes_of[mask]

    def _mask(self, names: Iterable[str]) -> int:
        return sum(self.bit[name] for name in set(names) if name in self.bit)

    def _op(self, i: int, tracked: set[int], given: bool, timed: bool) -> _Op:
        graph, op, n = self.graph, self.graph.operations[i], len(self.graph.operations)
        storage, size, default = graph.storage, graph.size, graph.task[i]
        viewed: dict[str, str] = {}
        for name in op.inputs:
            viewed.setdefault(storage[name], name)
        made = dict.fromkeys(storage[name] for name in op.outputs)
        task = 1 << n + default if default in tracked else 0
        return _Op(
            inputs=self._mask(op.inputs),
            outputs=self._mask(op.outputs),
            extra=sum(size[s] for s in made if s not in viewed) + op.workspace,
            fresh=tuple(
                (self._mask(t for t in op.outputs if storage[t] == s), self.bit[viewed[s]] if s in viewed else 0)
                for s in made
                if size[s]
            ),
            time=op.time if timed else 0.0,
            backward=op.backward,
            once=0 if op.repeatable else 1 << i,
            marks=task | (1 << i if i in graph.required else 0) | (self.began if op.backward else 0),
            task=task,
            later_tasks=sum(1 << n + other for other in tracked if other > default) if given else 0,
        )

    def _actions(self, path: tuple | None) -> list[OracleVerb]:
        parts: list[list[OracleVerb]] = []
        while path is not None:
            path, freed, i = path
            frees = [("free", self.names[t]) for t in _positions(freed)]
            parts.append([*frees, ("compute", self.graph.operations[i].name)])
        return [action for part in reversed(parts) for action in part]


def _subsets(mask: int) -> Iterator[int]:
    """Yield every subset of the bits of a mask, the empty one included."""
    subset = mask
    while subset:
        yield subset
        subset = (subset - 1) & mask
    yield 0


def _positions(mask: int) -> Iterator[int]:
    """Yield the positions of the bits of a mask."""
    while mask:
        bit = mask & -mask
        yield bit.bit_length() - 1
        mask ^= bit
