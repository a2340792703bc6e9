"""Layers to train, schedules of their chains, and plans of these schedules."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from scheduler.graph import Graph
from scheduler.graph.chain import Chain
from scheduler.plan import Plan
from scheduler.pytorch import checkpointed, profile_layers
from scheduler.pytorch.execute.module import CheckpointedModule
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors, storage_bytes, training_step
from scheduler.schedule import Compute, Schedule, schedule_from_runs
from scheduler.solvers.walk import Walk
from tests.support.plans import plan_of_schedule
from tests.support.pytorch.planning import check_equal, train

State = tuple[Tensor, Tensor, float]


class Convolution(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, state: State) -> State:
        x, mask, scale = state
        return x + scale * torch.relu(self.norm(self.convolution(x.mT))).mT, mask, scale


class Drop(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def forward(self, state: State) -> State:
        return self.dropout(state[0]), *state[1:]


class Perceptron(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, state: State) -> State:
        x, mask, scale = state
        return x + self.down(torch.nn.functional.gelu(self.up(x))) * mask, mask, scale / 2


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, state: State) -> State:
        return self.lstm(state[0])[0], *state[1:]


def mixed_stack(layers: int = 24, width: int = 16) -> nn.Sequential:
    """Return convolutions with batch norm, dropout, perceptrons and LSTMs in turn."""
    torch.manual_seed(0)
    kinds = (Convolution, Drop, Perceptron, Recurrent)
    return nn.Sequential(*(kinds[i % 4](width) for i in range(layers)))


def mixed_state(batch: int = 4, length: int = 32, width: int = 16, *, seed: int = 0) -> State:
    """Return activations, an integer mask and a number."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.randint(2, (batch, length, 1), generator=generator)
    return torch.randn(batch, length, width, generator=generator), mask, 1.0


def mixed_loss(state: State) -> Tensor:
    return state[0].square().mean()


def random_schedule(seed: int, *, dropped: float = 0.5, gradients: bool = False) -> Callable[[Graph], Schedule]:
    """Return a maker of schedules that forget tensors, or also gradients, at random and compute them again."""

    def make(graph: Graph) -> Schedule:
        draw = random.Random(seed)
        names = [tensor.name for tensor in graph.tensors]
        kept = {t for i in graph.operations if i.phase == "backward" and not gradients for t in i.outputs}
        walk = Walk(graph)
        for operation in graph.index.defaults:
            if draw.random() < dropped:
                walk.drop(t for t in sorted(walk.available) if names[t] not in kept and draw.random() < dropped)
            walk.run(operation)
        walk.ensure(tensor for tensor, is_result in enumerate(graph.index.is_result) if is_result)
        return schedule_from_runs(graph, walk.runs)

    return make


def plan_of_layers(graph: Graph, schedule: Schedule) -> Plan:
    """Return a plan of a schedule of layers that no solver found."""
    return plan_of_schedule(graph, schedule, granularity="layers")


@contextmanager
def counted_calls(layers: Sequence[nn.Module]) -> Iterator[Counter[int]]:
    """Count how often each layer is called."""
    counts: Counter[int] = Counter()

    def count(number: int) -> Callable[[nn.Module, object], None]:
        return lambda module, arguments: counts.update([number])

    handles = [layer.register_forward_pre_hook(count(number)) for number, layer in enumerate(layers)]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def check_layers(
    model: nn.Sequential | list[Callable[..., object]],
    schedule: Callable[[Graph], Schedule],
    *batches: tuple[object, ...],
    loss: Callable[..., Tensor],
    least: float = 0.99,
) -> CheckpointedModule:
    """Assert that training leaves what plain autograd leaves, in the memory that was simulated.

    The measured peak is `least` to 1 of it. Memory counts where every backward runs once; `translate_layers` says why.
    """
    plain = copy.deepcopy(model)
    graph = _with_fixed_times(profile_layers(model, batches[0], loss=loss)).graph
    plan = plan_of_layers(graph, schedule(graph))
    module = checkpointed(model, plan, batches[0], loss=loss)
    steps = [(batch, {}) for batch in batches]
    plain_module = plain if isinstance(plain, nn.Sequential) else InTurn(plain)
    expected = train(plain_module, steps, loss)
    expected.gradients = {name.removeprefix("layers."): g for name, g in expected.gradients.items()}
    expected.buffers = {name.removeprefix("layers."): b for name, b in expected.buffers.items()}
    check_equal(train(module, steps), expected)
    step = training_step(module, batches[0])
    step()
    resident = resident_tensors(module, batches[0])
    with StorageTracker(resident) as tracker:
        step()
    measured = storage_bytes(resident) + tracker.peak_bytes
    layer_backwards = {operation.name for operation in plan.graph.operations if operation.kind == "backward"}
    backwards = [
        action for action in plan.schedule if isinstance(action, Compute) and action.operation in layer_backwards
    ]
    if len(backwards) == len(set(backwards)):
        assert least * plan.peak_bytes <= measured <= plan.peak_bytes
    return module


class InTurn(nn.Module):
    """Calls functions and modules in turn."""

    def __init__(self, layers: Sequence[Callable[..., object]]) -> None:
        super().__init__()
        self.calls = layers
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers) if isinstance(layer, nn.Module)})

    def forward(self, *args: object) -> object:
        first, *others = self.calls
        value = first(*args)
        for layer in others:
            value = layer(value)
        return value


def _with_fixed_times(chain: Chain) -> Chain:
    """Return the chain with the same times for every layer: measured ones would choose between its two forwards."""
    layers = (
        replace(layer, forward_time=1.0, forward_without_saving_time=1.0, backward_time=2.0) for layer in chain.layers
    )
    return replace(chain, layers=tuple(layers))
