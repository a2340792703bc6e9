"""Schedules to execute, made here by a crude rule, and a comparison with plain autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scheduler.graph import Graph
from scheduler.pytorch.capture.captured_step import Capture
from scheduler.pytorch.execute.module import CheckpointedModule
from scheduler.pytorch.execute.runner import build
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors, training_step
from scheduler.pytorch.tracing import capture
from scheduler.schedule import Schedule, schedule_from_runs
from scheduler.simulator import simulate


def save_everything(graph: Graph) -> Schedule:
    """Return the schedule that runs everything once in the input order."""
    return schedule_from_runs(graph, graph.index.defaults)


def recompute_most(graph: Graph, keep_every: int = 6) -> Schedule:
    """Return a schedule that keeps what every n-th forward operation makes and recomputes the rest.

    Each backward operation first runs again what it reads, back to what was kept. What runs
    once only (random states, snapshots) is kept too.
    """
    index, operations = graph.index, graph.operations
    runs = [i for i in index.defaults if operations[i].phase == "forward"]
    producer = {tensor: i for i in runs for tensor in index.outputs[i]}
    live = {tensor for tensor, resident in enumerate(index.is_resident) if resident}
    for position, i in enumerate(runs):
        if position % keep_every == 0 or not operations[i].repeatable:
            live.update(index.outputs[i])

    def make(tensor: int, again: list[int], made: set[int]) -> None:
        if tensor not in live and tensor not in made:
            for needed in index.inputs[producer[tensor]]:
                make(needed, again, made)
            made.update(index.outputs[producer[tensor]])
            again.append(producer[tensor])

    for i in index.defaults:
        if operations[i].phase == "backward":
            again: list[int] = []
            made: set[int] = set()
            for tensor in index.inputs[i]:
                make(tensor, again, made)
            runs += [*again, i]
            live.update(index.outputs[i])
    return schedule_from_runs(graph, runs)


SCHEDULES: dict[str, Callable[[Graph], Schedule]] = {
    "save everything": save_everything,
    "recompute most": recompute_most,
}


@dataclass
class Outcome:
    """What one or more training steps left behind."""

    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    random_state: Tensor


def planned(
    model: nn.Module,
    schedule: Callable[[Graph], Schedule],
    args: tuple[object, ...] = (),
    kwargs: dict[str, object] | None = None,
    loss: Callable[..., Tensor] | None = None,
) -> tuple[CheckpointedModule, Capture, Schedule]:
    """Return the model under a schedule, the capture and the schedule."""
    captured = capture(model, args, kwargs, loss)
    made = schedule(captured.graph)
    return build(model, captured, made, args, kwargs, loss=loss), captured, made


def train(
    module: nn.Module,
    batches: list[tuple[tuple[object, ...], dict[str, object]]],
    loss: Callable[..., Tensor] | None = None,
) -> Outcome:
    """Run a step on each batch, with a small change of the parameters after each."""
    torch.manual_seed(5)
    losses = []
    for args, kwargs in batches:
        losses.append(training_step(module, args, kwargs, loss=loss)())
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
    return _outcome(module, losses)


def _outcome(module: nn.Module, losses: list[Tensor]) -> Outcome:
    return Outcome(
        losses,
        {name: parameter.grad for name, parameter in module.named_parameters()},
        {name: buffer.clone() for name, buffer in module.named_buffers()},
        torch.get_rng_state(),
    )


def train_with_optimizer(
    module: nn.Module,
    batches: list[tuple[tuple[object, ...], dict[str, object]]],
    loss: Callable[..., Tensor] | None = None,
    *,
    steps: int,
) -> Outcome:
    """Run steps as a training script does: with an optimizer, a learning rate schedule and clipping."""
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    losses = []
    for step in range(steps):
        args, kwargs = batches[step % len(batches)]
        optimizer.zero_grad()
        output = module(*args, **kwargs)
        value = output if loss is None else loss(output)
        value.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        rates.step()
        losses.append(value.detach())
    return _outcome(module, losses)


def check_equal(outcome: Outcome, expected: Outcome, *, tolerance: float = 0.0) -> None:
    """Assert that losses, gradients, buffers and random state are the same."""
    torch.testing.assert_close(outcome.losses, expected.losses, rtol=tolerance, atol=tolerance)
    assert outcome.gradients.keys() == expected.gradients.keys()
    for name, gradient in outcome.gradients.items():
        other = expected.gradients[name]
        assert (gradient is None) == (other is None), name
        if gradient is not None and other is not None:
            torch.testing.assert_close(gradient, other, rtol=tolerance, atol=tolerance, msg=f"gradient of {name}")
    for name, buffer in expected.buffers.items():
        torch.testing.assert_close(outcome.buffers[name], buffer, rtol=tolerance, atol=tolerance, msg=name)
    assert torch.equal(outcome.random_state, expected.random_state)


class Comparison:
    """A model that is captured, and trained by plain autograd, once for all schedules that are compared with it."""

    def __init__(
        self,
        model: nn.Module,
        *batches: tuple[tuple[object, ...], dict[str, object]],
        loss: Callable[..., Tensor] | None = None,
    ) -> None:
        self.model, self.batches, self.loss = model, [*batches], loss
        plain = copy.deepcopy(model)
        self.captured = capture(model, *batches[0], loss)
        self.expected = train(plain, self.batches, loss)
        self._start = [(tensor, tensor.detach().clone()) for tensor in (*model.parameters(), *model.buffers())]

    def planned(self, schedule: Schedule) -> CheckpointedModule:
        """Return the model under a schedule, with its first parameters and buffers."""
        with torch.no_grad():
            for tensor, value in self._start:
                tensor.copy_(value)
        self.model.zero_grad(set_to_none=True)
        args, kwargs = self.batches[0]
        return build(self.model, self.captured, schedule, args, kwargs, loss=self.loss)

    def check(self, schedule: Callable[[Graph], Schedule], *, tolerance: float = 0.0) -> CheckpointedModule:
        """Assert that training under a schedule leaves what plain autograd leaves, in the planned memory."""
        made = schedule(self.captured.graph)
        module = self.planned(made)
        args, kwargs = self.batches[0]
        check_equal(train(module, self.batches), self.expected, tolerance=tolerance)
        with StorageTracker(resident_tensors(module, (args, kwargs))) as tracker:
            training_step(module, args, kwargs)()
        peak_bytes = self.captured.graph.resident_bytes + tracker.peak_bytes
        assert peak_bytes == simulate(self.captured.graph, made).peak_bytes
        return module


def check_like_autograd(
    model: nn.Module,
    schedule: Callable[[Graph], Schedule],
    *batches: tuple[tuple[object, ...], dict[str, object]],
    loss: Callable[..., Tensor] | None = None,
    tolerance: float = 0.0,
) -> CheckpointedModule:
    """Assert that training under a schedule leaves exactly what plain autograd leaves, in the planned memory."""
    return Comparison(model, *batches, loss=loss).check(schedule, tolerance=tolerance)
