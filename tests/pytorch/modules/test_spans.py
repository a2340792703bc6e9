"""Consecutive children of an `nn.Sequential` are divided, and recomputed together."""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from scheduler.errors import ExecutionError
from scheduler.graph.decisions import Decision
from scheduler.plan import Plan
from scheduler.pytorch import checkpointed
from scheduler.pytorch.measurement.allocator import allocator_peak
from scheduler.pytorch.measurement.memory import training_step
from scheduler.pytorch.models.catalog import make_model
from scheduler.pytorch.modules.calls import CallTree
from scheduler.pytorch.modules.choice import plan_modules
from scheduler.pytorch.modules.lowering import lower
from scheduler.pytorch.modules.measuring.recording import record
from scheduler.pytorch.modules.replay import Replay

WIDTH = 16


class Counted(nn.Module):
    """A layer with random draws and buffers, which counts the runs of its forward outside of its attributes."""

    def __init__(self, runs: Counter[int], number: int) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.count = lambda: runs.update([number])

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        return self.dropout(self.norm(self.linear(x)).tanh_())


def sequence(length: int, runs: Counter[int] | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Counted(Counter() if runs is None else runs, number) for number in range(length)))


def squares(output: Tensor) -> Tensor:
    return output.square().sum()


def batch() -> Tensor:
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0))


def spans_of(tree: CallTree) -> list[str]:
    return [call.name for call in tree.calls if call.span]


def train(model: nn.Module, decisions: list[Decision] | None) -> list[Tensor]:
    """Return loss, gradients and buffers of two steps, and the random state that they leave."""
    torch.manual_seed(1)
    found = []
    for _ in range(2):
        if decisions is None:
            loss = squares(model(batch()))
        else:
            with Replay(model, decisions).following():
                loss = squares(model(batch()))
        loss.backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        model.zero_grad()
    return [*found, *model.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize("share", ["80%", "60%", "45%"])
def test_a_flat_sequence_of_convolutions_gets_a_plan(share: str, tmp_path: Path) -> None:
    case = make_model("convnet", width=16, size=24)
    kwargs = dict(case.kwargs)
    module = checkpointed(case.module, share, case.args, kwargs, loss=case.loss, granularity="modules")
    plan = module.plan
    assert any(decision.span for decision in plan.decisions)
    assert module.verify(*case.args, **kwargs).is_equal
    module.zero_grad(set_to_none=True)
    measured = allocator_peak(training_step(module, case.args, kwargs)) + plan.graph.resident_bytes
    assert measured <= plan.peak_bytes <= 1.03 * measured
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").decisions == plan.decisions


@pytest.mark.parametrize("seed", range(8))
def test_random_decisions_with_spans_change_nothing(seed: int) -> None:
    model = nn.Sequential(sequence(7), nn.Linear(WIDTH, WIDTH))
    calls = [call for call in record(model, (batch(),), loss=squares).calls if not call.refusal]
    draws = random.Random(seed)
    decisions = [call.decision() for call in calls if draws.random() < 0.4]
    expected = train(copy.deepcopy(model), None)
    torch.testing.assert_close(train(model, decisions), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(0, 4)], [2, 2, 2, 2, 1, 1]),
        ([(2, 4), (4, 6)], [1, 1, 2, 2, 2, 2]),
        ([(0, 4), (1, 3)], [2, 3, 3, 2, 1, 1]),
        ([(), (3, 5), (1, 6)], [2, 3, 3, 4, 4, 3]),
        ([(0, 3), (2, 5)], [2, 2, 2, 1, 1, 1]),  # of two that overlap, the first counts
    ],
)
def test_a_child_runs_once_more_for_each_recomputed_span_around_it(
    spans: list[tuple[int, int] | tuple[()]], expected: list[int]
) -> None:
    runs: Counter[int] = Counter()
    model = sequence(6, runs)
    with set_checkpoint_early_stop(False), Replay(model, [Decision("", 0, span=span) for span in spans]).following():
        loss = squares(model(batch()))
    with set_checkpoint_early_stop(False):
        loss.backward()
    assert [runs[number] for number in range(6)] == expected


def test_further_calls_follow_the_spans_of_the_known_ones() -> None:
    runs: Counter[int] = Counter()
    model = sequence(3, runs)
    with Replay(model, [Decision("", 0, span=(0, 2))], calls={"": 1}).following():
        loss = squares(model(model(batch())))
    loss.backward()
    assert [runs[number] for number in range(3)] == [4, 4, 2]


def test_a_span_that_keeps_expensive_results_changes_nothing() -> None:
    model = sequence(4)
    expected = train(copy.deepcopy(model), None)
    found = train(model, [Decision("", 0, keeps_expensive=True, span=(0, 3))])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_sequence_is_divided_where_little_passes() -> None:
    widths = [16, 16, 64, 64, 1, 64, 64, 16, 16]
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths)]
    tree = record(nn.Sequential(*layers), (batch(),), loss=squares)
    # Of the first four, the second to the fourth save 16, 64 and 64 columns. Divided before the fourth, they need
    # 64 columns that pass and the 80 of the larger part; before the second or third, 16 + 144 or 64 + 128.
    assert [call.span for call in tree.calls if call.span][:2] == [(0, 4), (0, 3)]
    assert (4, 8) in [call.span for call in tree.calls]
    for call in tree.calls:
        outer = tree.calls[call.caller] if call.caller >= 0 else call
        assert outer.start <= call.start < call.stop <= outer.stop


def twice(model: nn.Sequential) -> nn.Sequential:
    return nn.Sequential(*model, model[0])


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def with_hook(model: nn.Sequential) -> nn.Sequential:
    model[2].register_forward_hook(lambda module, args, output: output * 2)
    return model


@pytest.mark.parametrize("change", [twice, lambda model: Residual(*model), with_hook])
def test_other_sequences_are_left_alone(change: Callable[[nn.Sequential], nn.Module]) -> None:
    assert spans_of(record(sequence(4), (batch(),), loss=squares))
    assert not spans_of(record(change(sequence(4)), (batch(),), loss=squares))


@pytest.mark.parametrize("model", [nn.Sequential(), nn.Sequential(nn.Tanh()), nn.Sequential(nn.Tanh(), nn.Tanh())])
def test_short_sequences_are_left_alone(model: nn.Sequential) -> None:
    tree = record(nn.ModuleList([nn.Linear(WIDTH, WIDTH), model])[0], (batch(),), loss=squares)
    assert not spans_of(tree)
    assert not spans_of(record(nn.Sequential(nn.Linear(WIDTH, WIDTH), model), (batch(),), loss=squares))


def test_a_span_of_a_module_that_is_no_sequence_is_refused() -> None:
    with pytest.raises(ExecutionError, match=r'children of "0" together, up to number 4, but it is no nn.Sequential'):
        Replay(nn.Sequential(sequence(4)), [Decision("0", 0, span=(2, 5))])


def test_the_decisions_of_a_schedule_name_their_spans() -> None:
    lowered = lower(record(sequence(8), (batch(),), loss=squares))
    plan = plan_modules(lowered, "min")
    assert any(decision.span for decision in plan.decisions)
    calls = {call.decision().call for call in lowered.layout.tree.calls}
    assert {decision.call for decision in plan.decisions} <= calls
