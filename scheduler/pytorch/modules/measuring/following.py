"""Find which call of which module runs, in the first forward of a step and in later runs of it."""

from __future__ import annotations

import bisect
import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from scheduler.errors import ExecutionError
from scheduler.graph.decisions import Span
from scheduler.pytorch.capture.kept_state import RandomState
from scheduler.pytorch.guards.outside_states import OutsideState
from scheduler.pytorch.modules.calls import OUTSIDE
from scheduler.pytorch.modules.measuring.observation import Began, Observer, Phase
from scheduler.pytorch.modules.names import modules_by_name, root_of
from scheduler.pytorch.modules.recomputation.call_state import Parts, tensors_held_for
from scheduler.pytorch.modules.recomputation.frozen_arguments import Arguments, freeze
from scheduler.pytorch.torch_private.autograd import next_node_number, saving_hook


@dataclass
class SeenCall:
    """A call of a module as it was seen in the first forward.

    Attributes
    ----------
    module : str
    number, caller : int
        As for `Call`.
    segments, children : list of int
        The pieces of code that it ran by itself, one more than it made calls, and these calls.
    inputs : list of int
        Storages of its arguments, and of tensors in attributes of its module, by their numbers in the log.
    random_bytes : int
        Bytes on the model's device of the random states that a recomputation needs, 0 if the call draws nothing.
    begin : int
        Position in the log at which it began.
    refusal, span
        As for `Call`.
    """

    module: str
    number: int
    caller: int
    segments: list[int] = field(default_factory=list)
    children: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    random_bytes: int = 0
    begin: int = 0
    refusal: str = ""
    span: Span = ()

    def runs(self, segment: int) -> bool:
        """Return whether a segment is its own or one of a call that it makes."""
        return self.segments[0] <= segment <= self.segments[-1]


class Calls:
    """The calls of the first forward, in the order in which they begin.

    Parameters
    ----------
    observer : Observer
    hook : object
        The hook to which autograd gives what it saves.
    generators : sequence of OutsideState
        Random generators of the user.

    Attributes
    ----------
    seen : list of SeenCall
    outside : SeenCall
        The code around the model, whose child is the call of the model.
    callers : list of int
        The call that each segment belongs to.
    """

    def __init__(self, observer: Observer, hook: object, generators: Sequence[OutsideState]) -> None:
        self.seen: list[SeenCall] = []
        self.outside = SeenCall("", 0, OUTSIDE)
        self.callers: list[int] = []
        self._observer = observer
        self._hook = hook
        self._generators = generators
        self._stack: list[int] = []
        self._counts: Counter[str] = Counter()
        self._parts: dict[nn.Module, Parts] = {}
        self._begin_segment()

    @contextlib.contextmanager
    def call(self, name: str, module: nn.Module, arguments: Arguments) -> Iterator[None]:
        """Note one call of a module."""
        caller = self._stack[-1] if self._stack else OUTSIDE
        number, self._counts[name] = self._counts[name], self._counts[name] + 1
        frozen, tensors = freeze(*arguments)
        refusal = "it takes an iterator" if frozen.has_iterators else self._refusal(module)
        found = SeenCall(name, number, caller, begin=len(self._observer.log.events), refusal=refusal)
        tensors += tensors_held_for(self._parts_of(module))
        found.inputs = [n for tensor in tensors for n in self._observer.numbers_of(tensor)]
        del frozen, tensors
        random = RandomState(self._generators)
        self[caller].children.append(len(self.seen))
        self._stack.append(len(self.seen))
        self.seen.append(found)
        self._begin_segment()
        try:
            yield
        except BaseException as error:
            found.refusal = f"it ends with an exception ({type(error).__name__})"
            raise
        finally:
            with self._observer.paused():
                changed = random.difference(RandomState(self._generators))
            found.random_bytes = random.size_bytes if changed and self._observer.device_type == "cpu" else 0
            self._stack.pop()
            self._begin_segment()

    def refuse_backwards(self, positions: Iterable[int]) -> None:
        """Refuse the calls with a part that the forward itself runs backward, given by positions in the log."""
        spans = self._observer.log.spans
        for position in positions:
            piece = spans[bisect.bisect_right(spans, position, key=lambda span: span.begin) - 1].segment
            for call in self.seen:
                if call.runs(piece):
                    call.refusal = call.refusal or "its gradients are computed within the forward"

    @property
    def depth(self) -> int:
        """How many calls are nested in each other at most."""
        depths: list[int] = []
        for call in self.seen:
            depths.append(1 + (depths[call.caller] if call.caller != OUTSIDE else 0))
        return max(depths, default=0)

    def __getitem__(self, call: int) -> SeenCall:
        return self.outside if call == OUTSIDE else self.seen[call]

    def _refusal(self, module: nn.Module) -> str:
        if not torch.is_grad_enabled():
            return "it runs without gradients, so it saves nothing"
        if saving_hook() != self._hook:
            return "what it saves goes to other hooks, such as those of activation checkpointing"
        return "it is TorchScript" if isinstance(module, torch.jit.ScriptModule) else self._parts_of(module).refusal

    def _parts_of(self, module: nn.Module) -> Parts:
        if module in self._parts:
            self._parts[module].update()
        else:
            self._parts[module] = Parts(module)
        return self._parts[module]

    def _begin_segment(self) -> None:
        call = self._stack[-1] if self._stack else OUTSIDE
        self[call].segments.append(len(self.callers))
        self._observer.begin(Phase.FORWARD, len(self.callers))
        self.callers.append(call)


class Follower:
    """Follow a later run of a step through the calls of its first forward.

    Parameters
    ----------
    observer : Observer
    calls : Calls
        Of the first forward.
    regions : iterable of int
        The calls that are recomputed.

    Attributes
    ----------
    nodes : list of int
        Number of the first autograd node of each segment that has begun, with `order`.
    order : list of int
        The segments in the order in which they began.
    recomputing : int or None
        The call that was recomputed last.
    """

    def __init__(self, observer: Observer, calls: Calls, regions: Iterable[int]) -> None:
        self._observer = observer
        self._calls = calls
        self._regions = sorted(regions)
        self._recomputed: set[int] = set()
        self._stack: list[_Position | None] = []
        self._segment: int | None = None
        self.nodes: list[int] = []
        self.order: list[int] = []
        self.recomputing: int | None = None
        self._enter(_Position(calls.outside))

    @contextlib.contextmanager
    def call(self, name: str, module: nn.Module, arguments: Arguments) -> Iterator[None]:
        """Follow one call of a module."""
        position = self._next(name)
        if position is None:
            self._stack.append(None)
        else:
            self._enter(position)
        try:
            yield
        finally:
            self._stack.pop()
            self._resume()

    def begin_backward(self) -> None:
        """Note that the forward has ended."""
        self._stack.clear()
        self._segment = self.order[-1]
        self._observer.begin(Phase.BACKWARD, self._segment)

    def begin_node(self, segment: int) -> None:
        """Note that the backward has come to a node of a segment; one that it came to before is not begun again."""
        self._observer.write(Began())
        if self._segment is not None and segment < self._segment:
            self._segment = segment
            if not self._stack:
                self._observer.begin(Phase.BACKWARD, segment)

    def segment_of(self, node: int) -> int:
        """Return the segment in which the autograd node with this number was made."""
        return self.order[max(0, bisect.bisect_right(self.nodes, node) - 1)]

    def _next(self, name: str) -> _Position | None:
        if self._stack:
            caller = self._stack[-1]
            if caller is None:
                return None
            call = caller.next_call()
        else:
            call = self._region(name)
            self.recomputing = call
        if call is None and not self._stack:
            return None
        if call is None or self._calls[call].module != name:
            raise ExecutionError(
                f'the model called "{name}" where it had called'
                f" {'nothing' if call is None else self._calls[call].module!r} in the same step before, although all"
                " random states were the same: a plan needs a step that can be repeated"
            )
        return _Position(self._calls[call])

    def _region(self, name: str) -> int | None:
        """Return the call that a call of a module during the backward recomputes, None if it recomputes none."""
        assert self._segment is not None
        for region in self._regions:
            seen = self._calls[region]
            if region not in self._recomputed and seen.module == name and seen.runs(self._segment):
                self._recomputed.add(region)
                return region
        return None

    def _enter(self, position: _Position) -> None:
        self._stack.append(position)
        self._begin(position.segment)

    def _resume(self) -> None:
        if self._stack:
            position = self._stack[-1]
            if position is not None:
                position.made += 1
                self._begin(position.segment)
        elif self._segment is not None:
            self._observer.begin(Phase.BACKWARD, self._segment)

    def _begin(self, segment: int) -> None:
        if self._segment is not None:
            self._observer.begin(Phase.AGAIN, segment)
            return
        self.nodes.append(next_node_number())
        self.order.append(segment)
        self._observer.begin(Phase.FORWARD, segment)


@dataclass
class _Position:
    """How far a call has come."""

    call: SeenCall
    made: int = 0

    @property
    def segment(self) -> int:
        return self.call.segments[self.made]

    def next_call(self) -> int | None:
        return self.call.children[self.made] if self.made < len(self.call.children) else None


Watcher = Calls | Follower


@contextlib.contextmanager
def watched_calls(model: nn.Module, watcher: Watcher) -> Iterator[None]:
    """Let a watcher see every call of the model and its submodules."""
    with contextlib.ExitStack() as stack:
        for name, module in watched_modules(model).items():
            forward = module.forward
            watched = functools.partial(_watched, watcher, name, module, forward)
            stack.enter_context(replaced_forward(module, watched))
        yield


def _watched(
    watcher: Watcher, name: str, module: nn.Module, forward: Callable[..., object], *args: object, **kwargs: object
) -> object:
    with watcher.call(name, module, (args, kwargs)):
        return forward(*args, **kwargs)


@contextlib.contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., object]) -> Iterator[None]:
    """Give a module another forward, so that its hooks run around it."""
    own = vars(module)
    had, before = "forward" in own, own.get("forward")
    own["forward"] = forward
    try:
        yield
    finally:
        if had:
            own["forward"] = before
        else:
            own.pop("forward", None)


def watched_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose calls can be seen, by their qualified names; compiled ones are seen from outside."""
    found: dict[str, nn.Module] = {}
    hidden: list[str] = []
    for name, module in modules_by_name(model).items():
        if not any(name.startswith(prefix) for prefix in hidden):
            found[name] = module
            if isinstance(root_of(module), torch.jit.ScriptModule) or hasattr(root_of(module), "_orig_mod"):
                hidden.append(f"{name}." if name else "")
    return found
