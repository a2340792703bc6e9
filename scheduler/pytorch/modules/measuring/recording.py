"""Measure one training step of any module as a tree of calls, without the memory that the plain step needs.

The first forward saves nothing: it shows the calls, what autograd would save, and how long each
storage is in use. A whole step follows in which chosen calls are recomputed. It shows the
backward and, under the profiler, what operators allocate internally. It is repeated for the times
of its operators, unless it takes much longer to watch them than to run them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks

from scheduler.errors import CaptureError
from scheduler.graph import Tensor as GraphTensor
from scheduler.graph.decisions import Decision
from scheduler.graph.operations import Role
from scheduler.pytorch.capture.device_memory import NO_OTHER_MEMORY, DeviceMemory
from scheduler.pytorch.capture.kept_state import RandomState, State
from scheduler.pytorch.costs.timing import thread_seconds
from scheduler.pytorch.guards.outside_states import OutsideState, OutsideStates
from scheduler.pytorch.guards.read_names import ReadNames
from scheduler.pytorch.measurement.allocator import peaks_of_regions
from scheduler.pytorch.measurement.memory import storage_sizes
from scheduler.pytorch.modules.calls import CallTree
from scheduler.pytorch.modules.measuring.backward_reading import StepReading
from scheduler.pytorch.modules.measuring.first_decisions import decide_by_saved_bytes
from scheduler.pytorch.modules.measuring.following import Calls, Follower, watched_calls, watched_modules
from scheduler.pytorch.modules.measuring.forward_reading import ForwardReading
from scheduler.pytorch.modules.measuring.observation import OPERATOR, Log, NotSavedError, Observer, Run, Saving
from scheduler.pytorch.modules.measuring.outputs import loss_outside
from scheduler.pytorch.modules.measuring.trees import make_tree
from scheduler.pytorch.modules.names import modules_by_name, root_of
from scheduler.pytorch.modules.replay import Replay
from scheduler.pytorch.modules.sequences import children_in_turn
from scheduler.pytorch.torch_private.autograd import node_number
from scheduler.pytorch.torch_private.modules import accumulation_hooks_of, backward_hooks_of, buffers_of, is_batch_norm
from scheduler.pytorch.torch_private.pytree import tree_leaves, tree_map_only

Decide = Callable[[CallTree], Sequence[Decision]]
"""Chooses the calls that are recomputed while the step is measured; nothing is known of the backward yet."""

_ATTEMPTS = 5
"""How many regions whose recomputation fails are refused one after the other."""

_LEAST_SHARE = 0.3
"""A step whose operators take less of the time in which it is measured is not run again."""


def record(
    model: nn.Module,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    loss: Callable[..., Tensor] | None = None,
    *,
    memory: DeviceMemory = NO_OTHER_MEMORY,
    decide: Decide = decide_by_saved_bytes,
) -> CallTree:
    """Measure one training step as a tree of module calls.

    The model, its gradients, the arguments and all random states are left as they were.

    Parameters
    ----------
    model : nn.Module
    args, kwargs
        The arguments of one call.
    loss : callable, optional
        Computes the scalar loss from the output. Without it, the model returns the loss, or it is
        computed outside of what is planned: then the outputs are held to the end of the step, and
        each of them that requires a gradient gets a gradient of ones.
    memory : DeviceMemory
        What the device holds in addition to the step.
    decide : callable
        Chooses the calls that are recomputed while the step is measured, from a tree without
        spans. `keeps_expensive` is ignored.

    Returns
    -------
    CallTree
        Times in seconds, sizes in bytes.

    Raises
    ------
    CaptureError
        If the loss is no scalar tensor that requires a gradient, or no output requires one.
    ExecutionError
        If a second run of the step calls other modules than the first.
    """
    step, name = _Step(model, args, kwargs or {}, loss), type(root_of(model)).__name__
    with step.restored(), torch.enable_grad():
        forward = step.first_forward()
        refusals: dict[tuple[str, int], str] = {}
        while True:
            resident = step.resident(memory, forward)
            tree = make_tree(name, forward.reading, [], resident, refusals, {})
            try:
                logs = step.measure(forward, decide(tree))
            except _RegionFailedError as failed:
                if len(refusals) == _ATTEMPTS:
                    raise failed.error from None
                refusals[failed.region] = f"recomputing it failed: {failed.error}"
                continue
            steps = [StepReading(log, forward.reading) for log in logs]
            resident = step.resident(memory, forward)
            return make_tree(name, forward.reading, steps, resident, refusals, sequences_of(model))


@dataclass
class _Forward:
    """What the first forward showed."""

    log: Log
    calls: Calls
    reading: ForwardReading


class _RegionFailedError(Exception):
    """A call could not be recomputed."""

    def __init__(self, region: tuple[str, int], error: Exception) -> None:
        self.region = region
        self.error = error


class _Step:
    """A step that is run several times from the same state."""

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        loss: Callable[..., Tensor] | None,
    ) -> None:
        self._model = model
        self._args, self._kwargs = tree_map_only(Tensor, _leaf, (tuple(args), dict(kwargs)))
        self._loss = loss
        given = [leaf for leaf in tree_leaves((self._args, self._kwargs)) if isinstance(leaf, Tensor)]
        self._named: dict[str, tuple[Tensor, Role]] = {
            **{f"parameter:{name}": (tensor, "parameter") for name, tensor in model.named_parameters()},
            **{f"buffer:{name}": (tensor, "buffer") for name, tensor in model.named_buffers()},
            **{f"input:{number}": (tensor, "input") for number, tensor in enumerate(given)},
        }
        self._given = given
        self._leaves: list[Tensor] = []
        self._with_gradient: dict[Tensor, None] = {}
        tensors = [tensor for tensor, _ in self._named.values()]
        devices = [tensor.device for tensor in tensors if tensor.device.type != "meta"]
        self._device = next((one for one in devices if one.type != "cpu"), torch.device("cpu"))
        self._generators: list[OutsideState] = []
        self._reset: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Leave everything as it was; each run begins from the same state."""
        parts = [self._model, *([self._loss] if isinstance(self._loss, nn.Module) else [])]
        outside = OutsideStates(self._model, self._loss, ReadNames(self._model, self._loss)).own_states
        self._generators = [one for one in outside if one.is_random]
        state = State(parts, self._given, outside, parameters=False)
        others = [one.save() for one in outside if not one.is_random]
        training = [(module, module.training) for part in parts for module in part.modules()]

        def reset() -> None:
            state.restore()
            for restore in others:
                restore()
            for module, mode in training:
                module.training = mode
            if any(torch.is_autocast_enabled(kind) for kind in {"cpu", self._device.type}):
                torch.clear_autocast_cache()

        self._reset = reset
        try:
            yield
        finally:
            reset()

    def first_forward(self) -> _Forward:
        """Run a forward that saves nothing, except what a backward within it needs."""
        try:
            return self._first_forward(set())[0]
        except NotSavedError:
            _, needed = self._first_forward(None)
            return self._first_forward(set(needed))[0]

    def _first_forward(self, kept: set[int] | None) -> tuple[_Forward, dict[int, int]]:
        self._reset()
        observer = Observer([tensor for tensor, _ in self._named.values()], self._device)
        saving = Saving(observer, kept)
        calls = Calls(observer, saving.pack, self._generators)
        buffers, changing = self._buffers(observer)
        # While it is followed, planned modules inside the model follow no plan of their own.
        unplanned = Replay(self._model, (), generators=lambda: self._generators)
        try:
            with (
                saved_tensors_hooks(saving.pack, saving.unpack),
                watched_calls(self._model, calls),
                unplanned.following(),
                observer,
            ):
                value = self._forward()
        finally:
            log = observer.close()
            self._reset()
        self._check(value)
        trained = [tensor for tensor, _ in self._named.values() if tensor.is_leaf and tensor.requires_grad]
        self._leaves = [*dict.fromkeys([*trained, *_leaves_of(value)])]
        calls.refuse_backwards(saving.unpacked.values())
        return _Forward(log, calls, ForwardReading(log, calls, buffers, changing)), saving.unpacked

    def measure(self, forward: _Forward, decisions: Sequence[Decision]) -> list[Log]:
        """Run a whole step with these decisions under the profiler, and again without it if that does not take long."""
        logs: list[Log] = []
        started = thread_seconds()
        peaks = peaks_of_regions(lambda: logs.append(self._run(forward, decisions, profiled=True)), OPERATOR)
        seconds = thread_seconds() - started
        log = logs[0]
        for number, event in enumerate(log.events):
            if isinstance(event, Run):
                returned = sum(log.sizes[storage] for storage in event.born)
                event.workspace_bytes = max(0, peaks.get(f"{OPERATOR}{number}", 0) - returned)
        if sum(event.seconds for event in log.events if isinstance(event, Run)) > _LEAST_SHARE * seconds:
            logs.append(self._run(forward, decisions, profiled=False))
        return logs

    def _run(self, forward: _Forward, decisions: Sequence[Decision], *, profiled: bool) -> Log:
        self._reset()
        seen = {(call.module, call.number): position for position, call in enumerate(forward.calls.seen)}
        again = [Decision(one.module, one.number) for one in decisions]
        replay = Replay(self._model, again, generators=lambda: self._generators)
        observer = Observer([tensor for tensor, _ in self._named.values()], self._device, profiled=profiled)
        follower = Follower(observer, forward.calls, [seen[one.module, one.number] for one in decisions])
        try:
            with self._gradients_set_aside(observer), watched_calls(self._model, follower), observer:
                with replay.following():
                    value = self._forward()
                follower.begin_backward()
                _watch_nodes(value, follower)
                value.backward()
        except Exception as error:
            if follower.recomputing is None:
                raise
            region = forward.calls[follower.recomputing]
            raise _RegionFailedError((region.module, region.number), error) from error
        finally:
            log = observer.close()
            self._reset()
        return log

    @contextlib.contextmanager
    def _gradients_set_aside(self, observer: Observer) -> Iterator[None]:
        """Let a backward leave no gradients and run no hooks of leaves; the observer sees each gradient."""
        before = [leaf.grad for leaf in self._leaves]
        hooks = [h for leaf in self._leaves for h in (backward_hooks_of(leaf), accumulation_hooks_of(leaf))]
        kept = [dict(registered) for registered in hooks]
        for registered in hooks:
            registered.clear()

        def seen(leaf: Tensor) -> None:
            if leaf.grad is not None:
                observer.accumulated(leaf.grad)
                self._with_gradient[leaf] = leaf.grad = None

        for leaf in self._leaves:
            leaf.grad = None
        handles = [leaf.register_post_accumulate_grad_hook(seen) for leaf in self._leaves]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for registered, own in zip(hooks, kept, strict=True):
                registered.update(own)
            for leaf, gradient in zip(self._leaves, before, strict=True):
                leaf.grad = gradient

    def _forward(self) -> Tensor:
        if self._loss is None:
            return loss_outside(self._model(*self._args, **self._kwargs))
        return self._loss(self._model(*self._args, **self._kwargs))

    def _check(self, value: object) -> None:
        if not isinstance(value, Tensor) or value.numel() != 1:
            found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise CaptureError(f"the loss of a step must be a scalar tensor, got {found}: reduce it")
        if not value.requires_grad:
            raise CaptureError(
                "the loss requires no gradient, so there is no backward to plan: call requires_grad_(True) on what"
                " is to be trained"
            )

    def _buffers(self, observer: Observer) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
        """Return the storages of the buffers of each module, and of those that change unseen."""
        own: dict[str, set[int]] = {}
        changing: dict[str, set[int]] = {}
        for name, module in modules_by_name(self._model).items():
            tensors = [tensor for part in module.modules() for tensor in buffers_of(part).values()]
            norms = [part for part in module.modules() if is_batch_norm(part) and part.training]
            unseen = [tensor for part in norms for tensor in buffers_of(part).values()]
            own[name], changing[name] = (
                {number for tensor in found if tensor is not None for number in observer.numbers_of(tensor)}
                for found in (tensors, unseen)
            )
        return own, changing

    def resident(self, memory: DeviceMemory, forward: _Forward) -> list[GraphTensor]:
        """Return the resident tensors of the tree."""
        found: list[GraphTensor] = []
        seen: set[int] = set()
        for name, (tensor, role) in self._named.items():
            sizes = storage_sizes([tensor]) if tensor.layout is torch.strided else {}
            size = sum(size for key, size in sizes.items() if key not in seen)
            seen |= sizes.keys()
            if size:
                found.append(GraphTensor(name, size, role=role))
        constants = sum(forward.log.constants.values())
        if constants:
            found.append(GraphTensor("constants", constants, role="constant"))
        if self._device.type == "cpu":
            # Each nested call that is recomputed holds the random states while it runs, and compares them afterwards.
            states = (forward.calls.depth + 2) * RandomState(self._generators).size_bytes
            found.append(GraphTensor("random states", states, role="random state"))
        if memory.accumulate_gradients:
            for number, leaf in enumerate(self._with_gradient):
                found.append(GraphTensor(f"gradient:{number}", leaf.numel() * leaf.element_size(), role="gradient"))
        return [*found, *memory.tensors]


def sequences_of(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the children of each module that calls them in turn."""
    modules = watched_modules(model)
    names = {module: name for name, module in modules.items()}
    found = {name: children_in_turn(module) for name, module in modules.items()}
    return {name: [names[child] for child in children] for name, children in found.items() if {*children} <= {*names}}


def _leaf(tensor: Tensor) -> Tensor:
    """Return an argument as the beginning of the step's own autograd graph."""
    return tensor.detach().requires_grad_() if tensor.grad_fn is not None else tensor


def _graph_nodes(value: Tensor) -> Iterator[Node]:
    """Yield the nodes of the autograd graph of a tensor."""
    seen: set[Node] = set()
    pending = [value.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            pending += [following for following, _ in node.next_functions]


def _leaves_of(value: Tensor) -> list[Tensor]:
    """Return the leaf tensors that get a gradient."""
    found = (getattr(node, "variable", None) for node in _graph_nodes(value))
    return [leaf for leaf in found if isinstance(leaf, Tensor)]


def _watch_nodes(value: Tensor, follower: Follower) -> None:
    """Let the follower know when the backward comes to a segment."""
    for node in _graph_nodes(value):
        if getattr(node, "variable", None) is None:
            node.register_prehook(functools.partial(_come_to, follower, follower.segment_of(node_number(node))))


def _come_to(follower: Follower, segment: int, _: object) -> None:
    follower.begin_node(segment)
