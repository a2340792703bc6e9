"""Run a model with some calls of its modules under activation checkpointing.

While a planned forward runs, and while a call is recomputed, the `forward` of the modules
that a plan names is replaced on the instance. Hooks of these modules run outside of what is
recomputed, and the model's class, state dict and copies are unaffected. Which plan is followed
belongs to the thread, so other threads run the original forward of the same modules.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from scheduler.errors import ExecutionError
from scheduler.graph.decisions import Decision, span_layer
from scheduler.pytorch.guards.outside_states import OutsideState, OutsideStates
from scheduler.pytorch.guards.read_names import ReadNames
from scheduler.pytorch.modules.names import called_forward, find_module, modules_by_name, root_of
from scheduler.pytorch.modules.recomputation.call_state import CallState, ChangingBuffers, Parts
from scheduler.pytorch.modules.recomputation.frozen_arguments import Arguments, freeze
from scheduler.pytorch.modules.recomputation.kept_results import KeepResults, UseResults
from scheduler.pytorch.modules.sequences import Part, arrange, calls_in_turn, children_in_turn
from scheduler.pytorch.torch_private.autograd import determinism_check_of, is_transformed, saving_hook, stops_early
from scheduler.pytorch.torch_private.modules import COMPILED_CALL

Forward = Callable[..., object]


class Replay:
    """A model with decisions for the calls of its modules.

    Parameters
    ----------
    model : nn.Module
    decisions : iterable of Decision
        The calls that are recomputed. All others save what they save.
    calls : mapping of str to int, optional
        How many calls of each module the plan knows. Further calls follow the strictest
        decision of the known ones; modules that it does not know follow the strictest decision of
        modules of their class whose names differ only in numbers, such as an expert that no example of the
        measured step reached. Without it, the last call with a decision is the last known one.
    generators : callable, optional
        Returns the random generators that the model can reach, where they are known already. They are
        searched for when a call is first recomputed otherwise.

    Raises
    ------
    ExecutionError
        If the model has no module of the name in a decision.
    """

    def __init__(
        self,
        model: nn.Module,
        decisions: Iterable[Decision],
        *,
        calls: Mapping[str, int] | None = None,
        generators: Callable[[], Sequence[OutsideState]] | None = None,
    ) -> None:
        self.model = model
        self.decisions = frozenset(decisions)
        by_module: dict[str, list[Decision]] = {}
        for decision in sorted(self.decisions):
            by_module.setdefault(decision.module, []).append(decision)
        self._planned = {
            find_module(model, name): _PlannedCalls(found, (calls or {}).get(name, 0))
            for name, found in by_module.items()
        }
        for module, planned in self._planned.items():
            _check_spans(module, planned)
        if calls is not None:
            self._plan_siblings(calls)
        self._generators = generators or functools.cache(functools.partial(_own_generators, model))
        self._changing: ChangingBuffers = {}
        self._inside: dict[nn.Module, list[nn.Module]] = {}
        self._parts: dict[nn.Module, Parts] = {}
        self._slices: dict[tuple[nn.Module, ...], nn.Sequential] = {}

    def _plan_siblings(self, calls: Mapping[str, int]) -> None:
        """Let modules that have not been measured follow the decisions for others of their kind."""
        decisions: dict[object, list[Decision]] = {}
        for module, planned in self._planned.items():
            decisions.setdefault(_kind(planned.name, module), []).extend(planned.strictest)
        for name, module in modules_by_name(self.model).items():
            if name not in calls and module not in self._planned and (found := decisions.get(_kind(name, module))):
                strictest = [replace(decision, module=name, number=0) for decision in _strictest(found)]
                self._planned[module] = _PlannedCalls(strictest, 1)

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Return a context in which one forward of the model follows the decisions."""
        with self.counting_from(Counter(), within=self.model):
            yield

    @contextlib.contextmanager
    def counting_from(self, counts: Counter[nn.Module], *, within: nn.Module) -> Iterator[None]:
        """Return a context in which calls in one module follow the decisions, after so many calls of each module."""
        before, _thread.run = _thread.run, _Run(self, counts)
        replaced: list[nn.Module] = []
        try:
            for module in self._planned_inside(within):
                _replace_forward(module)
                replaced.append(module)
            yield
        finally:
            _thread.run = before
            for module in replaced:
                _restore_forward(module)

    def _planned_inside(self, module: nn.Module) -> list[nn.Module]:
        if module not in self._inside:
            self._inside[module] = [part for part in module.modules() if part in self._planned]
        return self._inside[module]

    def parts_of(self, module: nn.Module) -> Parts:
        """Return the modules that are now inside a module."""
        if module in self._parts:
            self._parts[module].update()
        else:
            self._parts[module] = Parts(module)
        return self._parts[module]

    def state_of(self, name: str, parts: Parts) -> CallState:
        """Return the state that a call of the module with this name, which has these parts, finds now."""
        return CallState(parts, name, self._generators(), self._changing)

    def decide(self, module: nn.Module, number: int) -> tuple[Decision | None, tuple[Part, ...]]:
        """Return the decision for a call of a planned module, None if it is not recomputed, and those in its spans."""
        return self._planned[module].decide(number)

    def slice_of(self, children: Sequence[nn.Module]) -> nn.Sequential:
        """Return a module of some children, always the same one."""
        key = tuple(children)
        if key not in self._slices:
            self._slices[key] = nn.Sequential(*key)
        return self._slices[key]

    def with_decisions(self, decisions: Iterable[Decision], *, calls: Mapping[str, int] | None = None) -> Replay:
        """Return the same model with other decisions; what its calls have been seen to change stays known."""
        other = Replay(self.model, decisions, calls=calls, generators=self._generators)
        other._changing = self._changing
        return other

    def __contains__(self, module: nn.Module) -> bool:
        """Return whether there is a decision for a call of a module."""
        return module in self._planned


def _kind(name: str, module: nn.Module) -> tuple[type, tuple[str, ...]]:
    """Return what modules have in common whose names differ only in numbers."""
    return type(module), tuple("" if part.isdigit() else part for part in name.split("."))


class _PlannedCalls:
    """The decisions for the calls of one module, called `name`."""

    def __init__(self, decisions: Sequence[Decision], known: int) -> None:
        self.name = decisions[0].module
        self.strictest = _strictest(decisions)
        self.most_children = max((decision.span[1] for decision in decisions if decision.span), default=0)
        by_number: dict[int, list[Decision]] = {}
        for decision in decisions:
            by_number.setdefault(decision.number, []).append(decision)
        self._known = max(known, *(number + 1 for number in by_number))
        self._by_number = {number: _arranged(found) for number, found in by_number.items()}
        self._further = _arranged(self.strictest)

    def decide(self, number: int) -> tuple[Decision | None, tuple[Part, ...]]:
        return self._by_number.get(number, (None, ())) if number < self._known else self._further


def _arranged(decisions: Sequence[Decision]) -> tuple[Decision | None, tuple[Part, ...]]:
    """Return the decision for a call as a whole, and those for its spans, unless it keeps expensive results."""
    whole = next((decision for decision in decisions if not decision.span), None)
    return whole, () if whole and whole.keeps_expensive else arrange(decisions)


def _strictest(decisions: Sequence[Decision]) -> list[Decision]:
    """Return the decisions for a further call: for the call as a whole if there is one, otherwise for its spans."""
    whole = [decision for decision in decisions if not decision.span]
    if whole:
        return [min(whole, key=lambda decision: decision.keeps_expensive)]
    spans = {decision.span: decision for decision in sorted(decisions, key=lambda one: -one.keeps_expensive)}
    return [*spans.values()]


def _check_spans(module: nn.Module, planned: _PlannedCalls) -> None:
    last = planned.most_children
    if last > len(children_in_turn(module)):
        raise ExecutionError(
            f'the plan recomputes children of "{planned.name}" together, up to number {last - 1}, but it is no'
            " nn.Sequential that calls as many children, each once: pass the model that the plan was made for, or make"
            " a new plan"
        )


class _Run:
    """A forward that follows decisions.

    Attributes
    ----------
    replay : Replay
    counts : Counter
        How many calls of each planned module have begun.
    hook : object
        What autograd saves goes to this hook. Where it goes to another one, such as that of the model's
        own activation checkpointing, nothing is recomputed: that would not find the decisions in the backward.
    """

    def __init__(self, replay: Replay, counts: Counter[nn.Module]) -> None:
        self.replay = replay
        self.counts = counts
        self.hook = saving_hook()

    @contextlib.contextmanager
    def inside_region(self) -> Iterator[None]:
        """Return a context for the first run of a call that is recomputed, whose hook is the one that counts."""
        before, self.hook = self.hook, saving_hook()
        try:
            yield
        finally:
            self.hook = before


class _Thread(threading.local):
    """What this thread does: `run` is the forward that it runs or recomputes, None outside."""

    run: _Run | None = None


_thread = _Thread()


class _Region:
    """A call that is recomputed: runs the forward of a module now, and once more for each later call of this object.

    Parameters
    ----------
    module : nn.Module
    forward : callable
        Its own forward.
    run : _Run
        The forward within which it is called.
    decision : Decision
    """

    def __init__(self, module: nn.Module, forward: Forward, run: _Run, decision: Decision) -> None:
        self._name = span_layer(decision.module, decision.span)
        self._module = module
        self._forward = forward
        self._run = run
        self._replay = run.replay
        self._counts = run.counts.copy()
        self._decision = decision

    def run(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run the call, and let the backward recompute it."""
        frozen, tensors = freeze(args, kwargs)
        parts = self._replay.parts_of(self._module)
        if frozen.has_iterators or parts.refusal:
            return self._forward(*args, **kwargs)
        state = self._replay.state_of(self._name, parts)
        # torch ends a recomputation with an error of its own, which TorchScript would replace.
        ends_early = stops_early() and not parts.has_script
        pending: list[Arguments] = [(args, kwargs)]

        def call(*tensors: Tensor) -> object:
            if pending:
                args, kwargs = pending.pop()
                with self._run.inside_region():
                    outputs = self._forward(*args, **kwargs)
                state.end()
                return outputs
            args, kwargs = frozen.fill(tensors)
            with state.restored(), self._replay.counting_from(self._counts.copy(), within=self._module):
                outputs = self._forward(*args, **kwargs)
            if ends_early:  # it would not have come here, had it saved as much as the first run
                raise ExecutionError(
                    f'recomputing a call of "{self._name}" saved fewer tensors than its first run: what it'
                    " computes must not depend on anything that changes between the forward and the backward"
                )
            return outputs

        return checkpoint(
            call,
            *tensors,
            use_reentrant=False,
            preserve_rng_state=False,
            early_stop=not parts.has_script,
            determinism_check=determinism_check_of(f'a call of "{self._name}"'),
            context_fn=self._keeping_results if self._decision.keeps_expensive else noop_context_fn,
        )

    def _keeping_results(self) -> tuple[KeepResults, UseResults]:
        """Return the contexts for the first run and for the recomputation."""
        kept = KeepResults()
        return kept, UseResults(kept, self._name)


class _Replaced:
    """A module whose forward is replaced, for as many runs as `users` says; its compiled call, if it has one."""

    def __init__(self, module: nn.Module) -> None:
        self.users = 0
        self._module = module
        self._name = "forward" if vars(module).get(COMPILED_CALL) is None else COMPILED_CALL
        self._own = vars(module).get(self._name)
        forward = module.forward if self._name == "forward" else self._own
        # Not set as an attribute, which the module of a script or of torch.compile would handle itself.
        vars(module)[self._name] = _planned_forward(module, cast("Forward", forward))

    def restore(self) -> None:
        if self._own is None:
            vars(self._module).pop(self._name, None)
        else:
            vars(self._module)[self._name] = self._own


_replaced: dict[nn.Module, _Replaced] = {}
_replacing = threading.Lock()


def _replace_forward(module: nn.Module) -> None:
    """Let a module ask for a decision when it is called, until `_restore_forward` has been called as often."""
    with _replacing:
        if module not in _replaced:
            _replaced[module] = _Replaced(module)
        _replaced[module].users += 1


def _restore_forward(module: nn.Module) -> None:
    with _replacing:
        replaced = _replaced[module]
        replaced.users -= 1
        if replaced.users == 0:
            _replaced.pop(module).restore()


def _planned_forward(module: nn.Module, forward: Forward) -> Forward:
    """Return a forward that is recomputed if the plan that this thread follows says so."""

    @functools.wraps(forward)
    def planned(*args: object, **kwargs: object) -> object:
        run = _thread.run
        if run is None or module not in run.replay:
            return forward(*args, **kwargs)
        decision, parts = run.replay.decide(module, run.counts[module])
        run.counts[module] += 1
        if not torch.is_grad_enabled() or is_transformed() or saving_hook() != run.hook:
            return forward(*args, **kwargs)
        called = _in_parts(module, forward, parts)
        return called(*args, **kwargs) if decision is None else _Region(module, called, run, decision).run(args, kwargs)

    return planned


def _in_parts(module: nn.Module, forward: Forward, parts: Sequence[Part]) -> Forward:
    """Return a forward that calls the children of a module in turn, and those of each part as a region."""
    if not parts or not calls_in_turn(called_forward(module, forward)):
        return forward
    children = tuple(root_of(module).children())

    def in_parts(input: object) -> object:
        return _call_in_turn(children, parts, 0, len(children), input)

    return in_parts if parts[-1].stop <= len(children) else forward


def _call_in_turn(children: Sequence[nn.Module], parts: Sequence[Part], start: int, stop: int, value: object) -> object:
    run = _thread.run
    assert run is not None
    for part in parts:
        begin, end = part.start, part.stop
        for child in children[start:begin]:
            value = child(value)
        forward = functools.partial(_call_in_turn, children, part.parts, begin, end)
        value = _Region(run.replay.slice_of(children[begin:end]), forward, run, part.decision).run((value,), {})
        start = end
    for child in children[start:stop]:
        value = child(value)
    return value


def is_following() -> bool:
    """Return whether this thread runs or recomputes a forward that follows decisions."""
    return _thread.run is not None


def _own_generators(model: nn.Module) -> list[OutsideState]:
    states = OutsideStates(model, None, ReadNames(model, None)).own_states
    return [state for state in states if state.is_random]
