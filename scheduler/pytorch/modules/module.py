"""The module that follows a plan of granularity "modules", and compares what it needs with what was predicted."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, Unpack

import torch
from torch import Tensor, nn

from scheduler.errors import BudgetTooSmallError, ExecutionError, InvalidOptionError, OutOfTimeError
from scheduler.graph.decisions import Decision, Span
from scheduler.plan import Plan
from scheduler.pytorch.capture.arguments import Signature, read_arguments
from scheduler.pytorch.execute.guards import CallKey
from scheduler.pytorch.execute.module import MAX_SHAPES, CheckpointedModule, ModuleSettings
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors
from scheduler.pytorch.measurement.step_peaks import AllocatorPeak
from scheduler.pytorch.modules.names import find_module, root_of
from scheduler.pytorch.modules.regions import Kind
from scheduler.pytorch.modules.replay import Replay, is_following
from scheduler.pytorch.torch_private import pytree
from scheduler.pytorch.torch_private.modules import is_compiled, submodules_of
from scheduler.units import format_bytes

_LOG = logging.getLogger(__name__)

FIRST_STEPS = 3
"""How many steps of a plan are compared with the prediction on the CPU, where it takes time to measure them."""


MOST_ROUTES = 4
"""How many routes through the model are measured for calls of one size."""


class Planner(Protocol):
    """Makes plans while a module trains."""

    def replan(self, plan: Plan, budget: int | str) -> Plan:
        """Return the plan for the measured step of another plan within another budget.

        Raises
        ------
        BudgetTooSmallError, OutOfTimeError
            If no plan fits, or none is found in time.
        """

    def remeasure(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Plan:
        """Measure a step with these arguments and return a plan for it, within the same budget."""


@dataclass(frozen=True)
class CallSize:
    """How large the arguments of a call are.

    Attributes
    ----------
    structure : object
        What is equal for calls whose shapes can be compared.
    shapes : tuple of tuple of int
        Of the distinct tensors.
    size_bytes : int
        Of all of them.
    autocast : tuple
        Data type of autocast on each type of device.
    """

    structure: tuple[pytree.TreeSpec, tuple[tuple[torch.dtype, torch.device, int], ...]]
    shapes: tuple[tuple[int, ...], ...]
    size_bytes: int
    autocast: tuple[torch.dtype | None, ...]

    def exceeds(self, other: CallSize) -> bool:
        """Return whether a call may need more memory than another one."""
        if self.autocast != other.autocast:
            return True
        if self.structure != other.structure:
            return self.size_bytes > other.size_bytes
        return any(
            size > largest
            for shape, limits in zip(self.shapes, other.shapes, strict=True)
            for size, largest in zip(shape, limits, strict=True)
        )


class _Measured:
    """A measured call, the plans that were made for it, and how its steps have done so far.

    Parameters
    ----------
    size : CallSize
    plan : Plan
    replay : Replay
        Of the model, with any decisions.

    Attributes
    ----------
    plans : list of Plan
        One for each route through the model that has been measured. Together they say what is
        recomputed: a call follows the strictest of them.
    steps : int
        Those that have been watched since the last change.
    excess_bytes : int
        The most that a step needed beyond what was predicted.
    has_exceeded : bool
        Whether the last step needed more than the budget.
    """

    def __init__(self, size: CallSize, plan: Plan, replay: Replay) -> None:
        self.size = size
        self.plans: list[Plan] = []
        self._replay = replay
        self.follow([plan])
        self.excess_bytes = 0
        self.has_exceeded = False

    def follow(self, plans: Sequence[Plan]) -> None:
        """Follow these plans from now on."""
        self.plans = [*plans]
        self.steps = 0
        self.bind(self._replay)

    def bind(self, replay: Replay) -> None:
        """Follow the plans with the model of another replay."""
        calls: Counter[str] = Counter()
        decisions: dict[tuple[str, int, Span], Decision] = {}
        for plan in self.plans:
            calls |= number_of_calls(plan)
            for decision in plan.decisions:
                # One that keeps nothing comes first.
                decisions[decision.call] = min(decision, decisions.get(decision.call, decision))
        self._replay = self.replay = replay.with_decisions(decisions.values(), calls=calls)

    @property
    def peak_bytes(self) -> int:
        """The largest peak that is predicted."""
        return max(plan.peak_bytes for plan in self.plans)


class ModulesModule(CheckpointedModule):
    """A module some calls of whose submodules are recomputed, as a plan says; returned by `checkpointed`.

    The model's own code runs in every step, so nothing that it reads needs to be as it was when
    the plan was made, and calls of any shape follow the plan. A call that is larger than those
    measured is measured first. In the first steps, the memory in use is compared with the
    prediction; where it would exceed the budget, the plan is made stricter. Inside another
    planned step, a module runs without its own plan.

    Parameters
    ----------
    module : nn.Module
    args, kwargs
        The arguments of the call that was measured.
    planner : Planner, optional
        Without it, the plan stays as it is, and larger calls differ from it.
    **settings
        As for `CheckpointedModule`; `plan` must be given, and be of granularity "modules".

    Raises
    ------
    ExecutionError
        If the plan names modules that the model does not have.
    InvalidOptionError
        If there is no plan.
    """

    def __init__(
        self,
        module: nn.Module,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        *,
        planner: Planner | None = None,
        **settings: Unpack[ModuleSettings],
    ) -> None:
        super().__init__(module, args, kwargs, **settings)
        plan = self.plan
        if plan is None:
            raise InvalidOptionError('a plan of granularity "modules" must be given, got None')
        self._planner = planner
        self._budget_bytes = plan.budget_bytes
        self._logged: set[str] = set()
        self._measured = [_Measured(self._size(read_arguments(args, kwargs)), plan, Replay(module, ()))]
        self._classes = {name: type(find_module(module, name)) for name in number_of_calls(plan)}
        self._links = _links(module, self._classes)

    def difference(self, call: CallKey, inputs: Sequence[Tensor]) -> str:
        """Return why the plan does not cover a call: other modules, or larger arguments that cannot be measured."""
        if found := self.state_difference():
            return "" if self._plans_anew() else found
        size = self._size((call.signature, inputs))
        if self._planner is None and all(size.exceeds(measured.size) for measured in self._measured):
            limits = " or ".join(str([*measured.size.shapes]) for measured in self._measured)
            return (
                f"its tensors have the shapes {[*size.shapes]}, but the plan was made for {limits}, and covers only"
                " calls that are not larger"
            )
        return ""

    def plan_call(self, *args: object, **kwargs: object) -> Plan:
        """Return the plan for a call; see `CheckpointedModule`. A call that is larger than others is measured."""
        found = self._find_planned("plan", args, kwargs)
        if found is not self:
            return found.plan_call(*args, **kwargs)
        return self._find_measured(args, kwargs).plans[-1]

    def state_difference(self) -> str:
        """Return which module of the plan is missing or of another class, "" if none is."""
        if all(held.get(name) is part for held, name, part in self._links):
            return ""
        for name, cls in self._classes.items():
            try:
                found = type(find_module(self.module, name))
            except ExecutionError:
                return f'the model has no module "{name}" any more'
            if not issubclass(found, cls):  # fully_shard makes a subclass
                return f'module "{name}" is a {found.__name__}, but was a {cls.__name__} when the plan was made'
        return ""

    def run_planned(self, args: tuple[object, ...], kwargs: dict[str, object], inputs: Sequence[Tensor]) -> object:
        """Run the forward, and let the backward recompute the calls that the plan chose."""
        if is_following():
            return self.run_plain(args, kwargs)
        measured = self._find_measured(args, kwargs)
        if measured.has_exceeded:
            self._tighten(measured, args, kwargs)
        self.plan = measured.plans[-1]
        device = next((tensor.device for tensor in (*self.module.parameters(), *inputs)), _CPU)
        is_watched = self._planner is not None and (device.type == "cuda" or measured.steps < FIRST_STEPS)
        if not is_watched or any(map(is_compiled, self.module.modules())):
            return self._follow(measured, args, kwargs)
        if device.type == "cuda":
            peak = AllocatorPeak(device, lambda found: self._compare_peak(measured, found))
            outputs = self._follow(measured, args, kwargs)
            peak.watch(outputs)
            return outputs
        measured.steps += 1
        tracker = StorageTracker(resident_tensors(self, (args, kwargs)))
        with tracker:
            outputs = self._follow(measured, args, kwargs)
        self._compare_saved(measured, tracker.live_bytes)
        return outputs

    def _follow(self, measured: _Measured, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        with measured.replay.following():
            return self.run_plain(args, kwargs)

    def _find_measured(self, args: tuple[object, ...], kwargs: dict[str, object]) -> _Measured:
        """Return the measured call whose plan covers a call; measure it if there is none."""
        if not all(held.get(name) is part for held, name, part in self._links):
            self._follow_changes()
        size = self._size(read_arguments(args, kwargs))
        covering = [one for one in self._measured if not size.exceeds(one.size)]
        if covering:
            found = min(covering, key=lambda one: one.size.size_bytes)
            self._measured.remove(found)
        else:
            assert self._planner is not None  # or `difference` has said what differs
            plan = self._planner.remeasure(args, kwargs)
            self._budget_bytes = max(self._budget_bytes, plan.budget_bytes)
            _LOG.info("a call with tensors of %s was measured: %s", [*size.shapes], plan)
            found = _Measured(size, plan, Replay(self.module, ()))
            self._classes |= {name: type(find_module(self.module, name)) for name in number_of_calls(plan)}
            self._links = _links(self.module, self._classes)
        self._measured.append(found)
        del self._measured[:-MAX_SHAPES]
        return found

    def _follow_changes(self) -> None:
        """Find the modules of the plans anew, or forget all plans if there are others now."""
        if self.state_difference():
            self._measured.clear()
            self._classes.clear()
        self._links = _links(self.module, self._classes)
        replay = Replay(self.module, ())
        for measured in self._measured:
            measured.bind(replay)

    def _plans_anew(self) -> bool:
        """Return whether a plan may be made for other modules."""
        return self._planner is not None and self.on_mismatch == "plan"

    def _compare_peak(self, measured: _Measured, found: int) -> None:
        predicted = max(plan.peak_bytes - plan.graph.resident_bytes for plan in measured.plans)
        self._note(measured, found - predicted, f"a step needed {format_bytes(found)} beyond its resident tensors")

    def _compare_saved(self, measured: _Measured, found: int) -> None:
        predicted = max(plan.simulation.saved_bytes for plan in measured.plans)
        self._note(measured, found - predicted, f"a forward left {format_bytes(found)} in memory")

    def _note(self, measured: _Measured, excess_bytes: int, what: str) -> None:
        """Remember that a step needed more than predicted, if the budget does not have as much to spare."""
        if excess_bytes > measured.excess_bytes and measured.peak_bytes + excess_bytes > self._budget_bytes:
            measured.excess_bytes, measured.has_exceeded = excess_bytes, True
            self._log("predicted", f"{what}, {format_bytes(excess_bytes)} more than predicted")

    def _tighten(self, measured: _Measured, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Follow stricter plans, because a step needed more than predicted.

        If there are none, the model may have taken another route than in the steps that were
        measured, so the step that comes is measured too.
        """
        assert self._planner is not None
        measured.has_exceeded = False
        budget = max(0, self._budget_bytes - measured.excess_bytes)
        try:
            plans = [
                plan if plan.peak_bytes <= budget else self._planner.replan(plan, budget) for plan in measured.plans
            ]
        except (BudgetTooSmallError, OutOfTimeError) as error:
            self._log("stricter", f"a step may exceed the budget of {format_bytes(self._budget_bytes)}: {error}")
            plans = [self._planner.replan(plan, "min") for plan in measured.plans]
            if len(plans) < MOST_ROUTES:
                with contextlib.suppress(BudgetTooSmallError, OutOfTimeError):
                    plans.append(self._planner.remeasure(args, kwargs))
                    measured.excess_bytes = 0
        measured.follow(plans)

    def _log(self, cause: str, text: str) -> None:
        if cause not in self._logged:
            self._logged.add(cause)
            _LOG.warning("%s: %s", type(self.module).__name__, text)

    def _size(self, call: tuple[Signature, Sequence[Tensor]]) -> CallSize:
        signature, tensors = call
        return CallSize(
            (signature.spec, tuple((tensor.dtype, tensor.device, tensor.dim()) for tensor in tensors)),
            tuple(tuple(tensor.shape) for tensor in tensors),
            sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            tuple(self.modes.autocast()),
        )


_CPU = torch.device("cpu")


def number_of_calls(plan: Plan) -> Counter[str]:
    """Return how many calls of each module the planned step has."""
    return Counter(one.layer for one in plan.graph.operations if one.kind == Kind.CHECKPOINT.value)


def _links(module: nn.Module, names: Iterable[str]) -> list[tuple[dict[str, nn.Module | None], str, nn.Module]]:
    """Return where modules are held, from the root down to the named ones."""
    paths = {path for name in names if name for path in accumulate(name.split("."), lambda one, key: f"{one}.{key}")}
    root, found = root_of(module), []
    for path in paths:
        parent, _, key = path.rpartition(".")
        found.append((submodules_of(root.get_submodule(parent)), key, root.get_submodule(path)))
    return found
