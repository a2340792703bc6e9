"""Plan the steps of one model by modules, within one budget: measure a step, then choose the calls to recompute."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from scheduler.api import SolveOptions
from scheduler.errors import BudgetTooSmallError, CaptureError
from scheduler.graph.decisions import Decision
from scheduler.plan import Plan
from scheduler.problem import read_budget
from scheduler.pytorch.capture.device_memory import DeviceMemory
from scheduler.pytorch.capture.exporting.failures import check_has_data, check_runs
from scheduler.pytorch.capture.operators import NEEDS_COMPILER
from scheduler.pytorch.capture.wrappers import check_unwrapped
from scheduler.pytorch.measurement.memory import resident_tensors
from scheduler.pytorch.modules.calls import CallTree
from scheduler.pytorch.modules.choice import first_decisions, plan_modules, with_estimated_backward
from scheduler.pytorch.modules.lowering import LoweredTree, lower
from scheduler.pytorch.modules.measuring.recording import record
from scheduler.pytorch.torch_private.dynamo import forget_compiled
from scheduler.solvers.deadline import clock


@dataclass(frozen=True)
class _Measured:
    """A step, and how long it took to measure it."""

    lowered: LoweredTree
    seconds: float


@dataclass
class ModulePlanner:
    """Makes plans of granularity "modules" for calls of one model, all within the same bytes.

    Attributes
    ----------
    model : nn.Module
    loss : callable or None
    budget : int or str
        As for `make_plan`; resolved for the first step that is measured.
    options : SolveOptions
        Of these, `gap` and `time_limit` have an effect: there is one solver, and the order is the model's.
    read_memory : callable
        Returns what the device holds in addition to the step.
    budget_bytes : int or None
        The budget in bytes; None before the first plan.
    may_raise : bool
        Whether a budget such as "min" is raised for a call that does not fit.
    """

    model: nn.Module
    loss: Callable[..., Tensor] | None
    budget: int | str
    options: SolveOptions
    read_memory: Callable[[], DeviceMemory]
    budget_bytes: int | None = None
    may_raise: bool = False
    _measured: dict[str, _Measured] = field(default_factory=dict)

    def remeasure(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Plan:
        """Measure a step with these arguments, and return a plan for it within the budget.

        Raises
        ------
        CaptureError
            If the model fails on these arguments, nothing is trained, or it is sharded or replicated already.
        BudgetTooSmallError, OutOfTimeError
            As for `make_plan`.
        """
        with _older_objects_uncollected():
            started = clock.now()
            lowered = lower(self.measure(args, kwargs))
            measured = _Measured(lowered, clock.now() - started)
            try:
                plan = self._plan(measured, self.budget if self.budget_bytes is None else self.budget_bytes)
            except BudgetTooSmallError:
                if not self.may_raise or read_budget(self.budget).form != "min":
                    raise
                plan = self._plan(measured, self.budget)
        self.budget_bytes = plan.budget_bytes
        self._measured[plan.graph.digest] = measured
        return plan

    def replan(self, plan: Plan, budget: int | str) -> Plan:
        """Return the plan for the measured step of another plan within another budget.

        Raises
        ------
        BudgetTooSmallError, OutOfTimeError
            As for `make_plan`.
        """
        return self._plan(self._measured[plan.graph.digest], budget)

    def measure(self, args: Sequence[object], kwargs: Mapping[str, object]) -> CallTree:
        """Measure a step with these arguments as a tree of module calls.

        Raises
        ------
        CaptureError
            As for `remeasure`.
        """
        check_unwrapped(self.model)
        check_has_data(resident_tensors(self.model, (args, kwargs)), "measured by modules")
        memory = self.read_memory()
        try:
            return record(self.model, args, kwargs, self.loss, memory=memory, decide=self._decide)
        except Exception as error:  # torch raises errors of many kinds here
            if "found no compiled frames" in str(error):
                forget_compiled()  # or the same function would not be compiled any more
                raise CaptureError(f"the step calls a function such as FlexAttention, {NEEDS_COMPILER}") from error
            check_runs(self._run, type(self.model).__name__, tuple(args), dict(kwargs), [self.model])
            raise

    def _decide(self, tree: CallTree) -> list[Decision]:
        """Return the decisions with which a step is measured."""
        budget = self.budget if self.budget_bytes is None else self.budget_bytes
        return sorted(first_decisions(with_estimated_backward(tree), budget))

    def _run(self, *args: object, **kwargs: object) -> object:
        outputs = self.model(*args, **kwargs)
        return outputs if self.loss is None else self.loss(outputs)

    def _plan(self, measured: _Measured, budget: int | str) -> Plan:
        given = {name: self.options[name] for name in ("gap", "time_limit") if name in self.options}
        return plan_modules(measured.lowered, budget, measuring_seconds=measured.seconds, **given)


@contextlib.contextmanager
def _older_objects_uncollected() -> Iterator[None]:
    """Let the collector of reference cycles visit only new objects: of the older ones, torch alone has a million."""
    is_frozen = gc.get_freeze_count() > 0  # then they are, and stay so
    if not is_frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not is_frozen:
            gc.unfreeze()
