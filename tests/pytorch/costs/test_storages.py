"""What a call's outputs hold is predicted: sizes of storages, and which outputs share one."""

from __future__ import annotations

import functools
from operator import attrgetter

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

import scheduler as sc
from scheduler.pytorch import trace
from scheduler.pytorch.capture.captured_step import Capture
from scheduler.pytorch.capture.instructions import Call, Ref, Return, Snapshot, Tangents, Update
from scheduler.pytorch.costs.storages import EXACT, find_storage_sizes
from scheduler.pytorch.execute.runner import build
from scheduler.pytorch.measurement.memory import measure, resident_tensors, training_step
from scheduler.pytorch.models.catalog import ModelCase
from scheduler.pytorch.tracing import capture
from tests.support.pytorch.operator_calls import GROUPS, Together
from tests.support.pytorch.small_models import SMALL, small_model

pytestmark = [pytest.mark.long(30), pytest.mark.xdist_group("storages")]  # each step is captured once

FLOAT_BYTES = 4
HALF = ("mean of losses", "reductions", "2d", "attention and norms")
"""Groups with kernels for bfloat16."""

CASES = [*GROUPS, *(f"{name} in bfloat16" for name in HALF), *SMALL]


@functools.cache
def _case(name: str) -> ModelCase:
    if name in SMALL:
        return small_model(name)
    group, _, in_half = name.partition(" in ")
    model = Together([*GROUPS[group]()])
    return ModelCase(model.bfloat16() if in_half else model)


@functools.cache
def _captured(name: str) -> Capture:
    case = _case(name)
    return capture(case.module, case.args, case.kwargs, case.loss)


class Held:
    """Runs the calls of a captured step one after another and keeps everything."""

    def __init__(self, captured: Capture, case: ModelCase) -> None:
        self.captured = captured
        self.values: dict[str, Tensor] = {}
        arguments = [leaf for leaf in tree_leaves((case.args, dict(case.kwargs))) if isinstance(leaf, Tensor)]
        for name, node in captured.lowered.resident.items():
            source = captured.joint.sources[node]
            if source.kind == "input":
                self.values[name] = [*{id(tensor): tensor for tensor in arguments}.values()][source.position]
            elif not source.paths:
                self.values[name] = source.reads[0]()
            else:
                self.values[name] = attrgetter(source.names[0])(case.module).detach().clone()
        with torch.no_grad(), torch._C._DisableAutocast():
            for instruction in captured.instructions:
                self._run(instruction)

    def _run(self, instruction: object) -> None:
        match instruction:
            case Call():
                args, kwargs = tree_map_only(
                    Ref, lambda ref: self.values[ref.tensor], (instruction.args, instruction.kwargs)
                )
                result = instruction.target(*args, **kwargs)
                outputs = result if isinstance(result, (tuple, list)) else [result]
                for tensor, value in zip(instruction.outputs, outputs, strict=False):
                    if tensor is not None:
                        self.values[tensor] = value
            case Snapshot():
                self.values[instruction.tensor] = self.values[instruction.source].clone()
            case Update():
                self.values[instruction.target].copy_(self.values[instruction.value])
            case Return():
                for tensor, result in zip(instruction.values, instruction.results, strict=True):
                    self.values[result] = self.values[tensor]
            case Tangents():
                for node, tensor in zip(self.captured.joint.tangents, instruction.tensors, strict=True):
                    fake = node.meta["val"]
                    self.values[tensor] = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).fill_(1)

    def differences(self) -> list[str]:
        """Return the tensors whose storage has other bytes than predicted, or that share it with others."""
        graph, found = self.captured.graph, []
        storage_of: dict[str, int] = {}
        holder_of: dict[int, str] = {}
        for name, value in self.values.items():
            tensor, storage = graph.tensor(name), value.untyped_storage()
            if name not in graph.resident and tensor.size_bytes != storage.nbytes():
                found.append(f"{name}: {storage.nbytes()} bytes instead of {tensor.size_bytes}")
            if storage_of.setdefault(tensor.storage, storage._cdata) != storage._cdata:
                found.append(f"{name}: on another storage than {tensor.storage}")
            if holder_of.setdefault(storage._cdata, tensor.storage) != tensor.storage:
                found.append(f"{name}: on the storage of {holder_of[storage._cdata]}")
        return found


@pytest.mark.parametrize("name", CASES)
def test_every_call_holds_the_predicted_storages(name):
    assert Held(_captured(name), _case(name)).differences() == []


def test_the_operators_that_need_no_run_have_been_checked():
    targets = {node.target for name in CASES for node in _captured(name).joint.module.graph.nodes}
    names = {target._schema.name for target in targets if isinstance(target, torch._ops.OpOverload)}
    assert names >= EXACT


def test_what_is_known_of_operators_is_what_a_run_shows():
    for name in CASES:
        joint = _captured(name).joint
        run, known = (find_storage_sizes(joint, may_run=may_run).held for may_run in (True, False))
        assert run == known
        assert run or name not in ("mean of losses", "images", "indexing", "hf-t5")


class WithLoss(nn.Module):
    def __init__(self, loss: str, reduction: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())))
        self.loss, self.reduction = getattr(F, loss), reduction

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = self.layers(x)
        return self.loss(y, target, reduction=self.reduction) + 0.1 * self.loss(y.sin(), target, reduction="sum")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", ["mse_loss", "smooth_l1_loss", "huber_loss"])
def test_a_model_with_this_loss_trains_within_its_budget(loss, reduction):
    model, args = WithLoss(loss, reduction), (torch.rand(512, 8), torch.rand(512, 8))
    captured = capture(model, args, workspaces=True)
    sizes = {tensor.name: tensor.size_bytes for tensor in captured.graph.tensors}
    terms = FLOAT_BYTES * 512 * 8
    assert sizes[loss] == (FLOAT_BYTES if loss == "huber_loss" else terms)
    training_step(model, args)()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    solutions = [found for found in sc.frontier(captured.graph, ["75%", "100%"], time_limit=1.0) if found.schedule]
    assert solutions[-1].overhead == 0
    for solution in solutions:
        module = build(model, captured, solution.schedule, args)
        measured = measure(training_step(module, args), resident=resident_tensors(model, args), repeats=1)
        assert measured.live_peak_bytes == solution.simulation.live_peak_bytes
        assert measured.allocator_peak_bytes <= solution.budget_bytes
        assert all(torch.equal(parameter.grad, expected[name]) for name, parameter in model.named_parameters())


def test_the_structure_does_not_depend_on_costs_or_on_whether_the_model_is_real():
    def make() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        return WithLoss("mse_loss", "mean"), (torch.zeros(16, 8), torch.zeros(16, 8))

    model, args = make()
    flops, measured = (trace(model, args, costs=costs) for costs in ("flops", "measured"))
    assert flops.structure_digest == measured.structure_digest
    with FakeTensorMode():
        model, args = make()
        assert trace(model, args, costs="flops").structure_digest == flops.structure_digest
    with torch.device("meta"):
        model, args = make()
    on_meta = trace(model, args, costs="flops")  # captured as other operations, on storages of the same sizes
    assert on_meta.tensor("mse_loss").size_bytes == flops.tensor("mse_loss").size_bytes == FLOAT_BYTES * 16 * 8


runs: list[torch.Size] = []
"""The shapes on which the custom operator has run."""


@torch.library.custom_op("storages::half", mutates_args=())
def half(x: Tensor) -> Tensor:
    """Return half of what is allocated."""
    runs.append(x.shape)
    return (2 * x).resize_(x.shape[0] // 2)


half.register_fake(lambda x: x.new_empty(x.shape[0] // 2))
half.register_autograd(lambda ctx, gradient: torch.cat([gradient, gradient]))


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self) -> Tensor:
        return half(self.weight.exp()).sum() + half(self.weight.sin()).view(4, 8).sum()


def test_a_custom_operator_is_run_once_for_equal_calls_and_its_views_share_its_storage():
    runs.clear()
    model = Halves()
    captured = capture(model)
    assert runs == [(64,)]
    tensors = [captured.graph.tensor(name) for name in ("half", "half_1", "view")]
    assert [tensor.size_bytes for tensor in tensors] == [FLOAT_BYTES * 64] * 3
    assert tensors[2].storage == "half_1"
    assert Held(captured, ModelCase(model)).differences() == []


def test_a_model_that_is_fake_is_not_run():
    runs.clear()
    with FakeTensorMode():
        graph = capture(Halves()).graph
    assert runs == []
    assert graph.tensor("half").size_bytes == FLOAT_BYTES * 32


class Scattered(nn.Module):
    """Scatters into views: the result is on a clone of the whole storage."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64, 8))

    def forward(self, table: Tensor) -> Tensor:
        part = torch.slice_scatter(table[10:20], self.weight[:4].sin(), 0, 3, 7)
        loss = F.mse_loss(self.weight, self.weight.cos())
        return part.sum() + torch.as_strided_scatter(loss, self.weight[0, 0], (), ())


def test_a_clone_of_a_storage_is_as_large_as_that_storage():
    case = ModelCase(Scattered(), (torch.rand(100, 8),))
    captured = capture(case.module, case.args, workspaces=True)
    sizes = {operation.kind or operation.name: operation for operation in captured.graph.operations}
    assert captured.graph.tensor("slice_scatter").size_bytes == FLOAT_BYTES * 100 * 8
    assert captured.graph.tensor("as_strided_scatter").size_bytes == FLOAT_BYTES * 64 * 8
    assert sizes["slice_scatter"].workspace_bytes == 0
    assert Held(captured, case).differences() == []


def test_finding_the_storages_leaves_the_random_state_as_it_was():
    class Drawn(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.rrelu(super().forward(x), training=True).sum()

    model, x = Drawn(4, 4), torch.rand(2, 4)
    state = torch.get_rng_state()
    capture(model, (x,))
    assert torch.equal(torch.get_rng_state(), state)


class Norms(nn.Module):
    """Norms of an input in one dtype with parameters in another; running statistics are kept in the latter."""

    def __init__(self) -> None:
        super().__init__()
        norms = (nn.BatchNorm1d(32), nn.BatchNorm1d(32, track_running_stats=False), nn.LayerNorm(32))
        self.norms = nn.ModuleList([*norms, nn.GroupNorm(4, 32, affine=False), nn.BatchNorm1d(32).eval()])

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = norm(x.tanh())
        return x.float().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_hold_the_predicted_storages_in_mixed_precision(dtype):
    case = ModelCase(Norms().to(dtype), (torch.rand(8, 32, dtype=torch.bfloat16).requires_grad_(),))
    captured = capture(case.module, case.args)
    assert Held(captured, case).differences() == []
    updates = [operation for operation in captured.graph.operations if operation.kind == "batch norm update"]
    assert len(updates) == 1
    assert not any(operation.name.startswith("update:norms.0.running") for operation in captured.graph.operations)
