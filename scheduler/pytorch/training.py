"""Run training steps with a plan and without, and compare predictions with measurements."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Unpack

import torch
from torch import Tensor, nn

from scheduler.api import SolveOptions, make_plan
from scheduler.plan import Plan
from scheduler.problem import save_everything
from scheduler.pytorch.checkpointing import checkpointed
from scheduler.pytorch.costs.operators import Costs
from scheduler.pytorch.costs.progress import TracingProgress
from scheduler.pytorch.execute.verification import Verification
from scheduler.pytorch.measurement.memory import measure, measure_times, resident_tensors, training_step
from scheduler.pytorch.models.catalog import ModelCase
from scheduler.simulator import Simulation, simulate
from scheduler.solution import Progress as SearchProgress
from scheduler.units import format_percent

LEARNING_RATE = 1e-3

_SMALLEST_DIFFERENCE = 0.02
"""Smaller differences in time count as noise."""
_TIMED_STEPS = 5
"""Timed runs of each step."""


@dataclass(frozen=True)
class Peaks:
    """The peak of one step, resident tensors included.

    Attributes
    ----------
    live_bytes : int or None
        Peak of live storages; None for a prediction by modules.
    allocator_bytes : int or None
        Peak of allocated memory, so with the workspaces of operators; None for a prediction
        without workspaces, such as those by layers.
    """

    live_bytes: int | None
    allocator_bytes: int | None


@dataclass(frozen=True)
class TrainingReport:
    """Peaks, overheads and losses of a few training steps.

    Attributes
    ----------
    plan : Plan
    predicted, measured : Peaks
        With the plan.
    baseline, plain : Peaks
        Without a plan: predicted for the save-everything schedule of the planned step, and
        measured in plain eager PyTorch.
    measured_flop_overhead, measured_time_overhead : float
        Ratio of the step with the plan to plain eager PyTorch, minus 1; times are from
        interleaved runs.
    captured_time_overhead : float or None
        The same for the captured step that saves everything: what capturing costs before
        anything is recomputed. None for modules and layers, which are not captured.
    time_noise : float
        How far the times of repeated runs scatter: the ratio of their median to the shortest,
        minus 1, of the step with the plan or without, whichever is more. Smaller differences in
        time, and negative ones, are noise.
    losses, plain_losses : tuple of float
        The loss of each step, with the plan and in plain PyTorch.
    verification : Verification
        How one more step with the plan compares with a plain step, bit for bit.
    """

    plan: Plan
    predicted: Peaks
    measured: Peaks
    baseline: Peaks
    plain: Peaks
    measured_flop_overhead: float
    measured_time_overhead: float
    captured_time_overhead: float | None
    time_noise: float
    losses: tuple[float, ...]
    plain_losses: tuple[float, ...]
    verification: Verification

    @property
    def captured_step_is_slower(self) -> bool:
        """Whether the captured step takes longer than plain PyTorch by more than noise."""
        noise = max(self.time_noise, _SMALLEST_DIFFERENCE)
        return self.captured_time_overhead is not None and self.captured_time_overhead > noise

    @property
    def time_overhead_text(self) -> str:
        """The measured overhead in time with its noise, or the noise alone where it is larger."""
        overhead, noise = self.measured_time_overhead, self.time_noise
        if overhead <= noise:
            return f"noise ±{format_percent(max(noise, abs(overhead)))}"
        return f"{format_percent(overhead)} ±{format_percent(noise)}"

    def to_dict(self, path: str) -> dict[str, object]:
        """Return the report as plain JSON data; `path` is where the plan was saved."""
        return {
            "budget_bytes": self.plan.budget_bytes,
            "predicted_peaks": asdict(self.predicted),
            "measured_peaks": asdict(self.measured),
            "baseline_peaks": asdict(self.baseline),
            "plain_peaks": asdict(self.plain),
            "predicted_overhead": self.plan.overhead,
            "measured_flop_overhead": self.measured_flop_overhead,
            "measured_time_overhead": self.measured_time_overhead,
            "captured_time_overhead": self.captured_time_overhead,
            "time_noise": self.time_noise,
            "status": self.plan.status.name,
            "search_space": self.plan.search_space,
            "bound": self.plan.bound,
            "gap": self.plan.gap,
            "losses": list(self.losses),
            "plain_losses": list(self.plain_losses),
            "verification": self.verification.to_dict(),
            "plan": path,
        }


def compare_training(
    case: ModelCase,
    budget: int | str,
    *,
    steps: int = 5,
    costs: Costs = "measured",
    granularity: str = "auto",
    stage: Callable[[str], None] = lambda message: None,
    progress: Callable[[TracingProgress | SearchProgress], None] | None = None,
    **options: Unpack[SolveOptions],
) -> TrainingReport:
    """Plan a step, and train two copies of a model side by side: with the plan and without.

    Parameters
    ----------
    case : ModelCase
        Its module is not changed.
    budget : int or str
        As for `checkpointed`.
    steps : int
        Training steps of plain SGD, each on its own batch if the case can make others.
    costs : "measured", "measured-again" or "flops"
        Cost model of operations; modules and layers are always measured.
    granularity : "auto", "operations", "modules" or "layers"
        As for `checkpointed`. "layers" needs a case with layers: see `ModelCase.layered`.
    stage : callable
        Called with a message at the beginning of each stage.
    progress : callable, optional
        As for `checkpointed`.
    **options
        As for `checkpointed`.

    Raises
    ------
    CaptureError, BudgetTooSmallError, OutOfTimeError
        As for `checkpointed`.
    """
    case = case.layered() if granularity == "layers" else case
    plain, module = copy.deepcopy(case.module), copy.deepcopy(case.module)
    stage(f"planning {case.name or type(case.module).__name__}")
    planned = checkpointed(
        module,
        budget,
        case.args,
        case.kwargs,
        loss=case.loss,
        granularity=granularity,
        costs=costs,
        progress=progress,
        **options,
    )
    stage(f"training {steps} steps with the plan and without")
    losses = _train(planned, case, steps, with_loss=False)
    plain_losses = _train(plain, case, steps, with_loss=True)
    stage("verifying a step")
    verification = planned.verify(*case.args, **dict(case.kwargs))
    stage("measuring")
    plain_step = training_step(plain, case.args, case.kwargs, loss=case.loss)
    planned_step = training_step(planned, case.args, case.kwargs)
    measured_plain = measure(plain_step, resident=_resident(plain, case), repeats=1)
    measured = measure(planned_step, resident=_resident(module, case), repeats=1)
    plan = planned.plan  # by modules, the first steps may have made it stricter
    assert plan is not None
    times = _measured_times(plan, case, plain_step, planned_step)
    shortest = {name: min(found) for name, found in times.items()}
    noise = max(statistics.median(times[name]) / shortest[name] - 1 for name in ("plain", "planned"))
    report = TrainingReport(
        plan=plan,
        predicted=_predicted(plan, plan.simulation, costs),
        measured=Peaks(measured.live_peak_bytes, measured.allocator_peak_bytes),
        baseline=_predicted(plan, simulate(plan.graph, save_everything(plan.graph)), costs),
        plain=Peaks(measured_plain.live_peak_bytes, measured_plain.allocator_peak_bytes),
        measured_flop_overhead=measured.flops / measured_plain.flops - 1 if measured_plain.flops else 0.0,
        measured_time_overhead=shortest["planned"] / shortest["plain"] - 1,
        captured_time_overhead=shortest["captured"] / shortest["plain"] - 1 if "captured" in times else None,
        time_noise=noise,
        losses=losses,
        plain_losses=plain_losses,
        verification=replace(verification, outputs=None),
    )
    if not report.captured_step_is_slower:
        return report
    return replace(report, plan=replace(plan, captured_overhead=report.captured_time_overhead))


def _measured_times(
    plan: Plan, case: ModelCase, plain_step: Callable[[], object], planned_step: Callable[[], object]
) -> dict[str, list[float]]:
    """Return the times of repeated steps: plain, planned, and captured but saving everything."""
    steps = {"plain": plain_step, "planned": planned_step}
    if plan.granularity == "operations":
        everything = make_plan(plan.graph, "100%", solver="save-all")
        module = checkpointed(copy.deepcopy(case.module), everything, case.args, case.kwargs, loss=case.loss)
        steps["captured"] = training_step(module, case.args, case.kwargs)
    return measure_times(steps, _TIMED_STEPS)


def _resident(module: nn.Module, case: ModelCase) -> list[Tensor]:
    return resident_tensors(module, (case.args, dict(case.kwargs)))


def _predicted(plan: Plan, simulation: Simulation, costs: Costs) -> Peaks:
    """Return the peaks that a simulation predicts, as far as its workspaces tell them."""
    if plan.granularity == "modules":  # workspaces hold live storages inside a call, and those of its operators
        return Peaks(None, simulation.peak_bytes)
    if plan.granularity == "layers" or costs == "flops":  # workspaces hold no more than live storages
        return Peaks(simulation.peak_bytes, None)
    return Peaks(simulation.live_peak_bytes, simulation.peak_bytes)


def _train(module: nn.Module, case: ModelCase, steps: int, *, with_loss: bool) -> tuple[float, ...]:
    """Train with plain SGD from a fixed random state and return the losses."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=LEARNING_RATE)
    losses = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for number in range(steps):
            args, kwargs = (case.args, case.kwargs) if case.make_batch is None else case.batch(number)
            step = training_step(module, args, kwargs, loss=case.loss if with_loss else None)
            losses.append(float(step()))  # type: ignore[arg-type]
            optimizer.step()
    return tuple(losses)
