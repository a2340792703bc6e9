from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from scheduler.errors import CaptureError
from scheduler.problem import save_everything
from scheduler.pytorch import trace
from scheduler.pytorch.capture.instructions import Call
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors, storage_bytes, training_step
from scheduler.pytorch.models.catalog import make_model
from scheduler.pytorch.tracing import capture
from scheduler.schedule import schedule_from_runs
from scheduler.simulator import simulate


def test_parameters_buffers_and_inputs_are_resident_and_gradients_are_results():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    graph = trace(model, (torch.ones(2, 4),), loss=torch.sum, costs="flops")
    assert set(graph.resident) == {
        "parameter:0.weight",
        "parameter:0.bias",
        "parameter:1.weight",
        "parameter:1.bias",
        "buffer:1.running_mean",
        "buffer:1.running_var",
        "buffer:1.num_batches_tracked",
        "input:args[0]",
    }
    assert graph.resident_bytes == 4 * (32 + 8 + 8 + 8 + 8 + 8 + 2 * 4) + 8
    # Loss, its incoming gradient, and four gradients.
    assert len(graph.results) == 6


class Residual(nn.Module):
    """Two residual blocks with a classifier, whose backward adds up gradients and could overwrite others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2)
        )
        self.classifier = nn.Linear(16, 500)

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.classifier(x), classes)


@pytest.mark.parametrize("classes", [500, 2])
def test_the_peak_of_eager_training_is_that_of_a_step_captured_as_eager(classes: int):
    model = Residual()
    model.classifier = nn.Linear(16, classes)  # many: the peak is in the loss; few: in the blocks
    args = (torch.rand(64, 16), torch.zeros(64, dtype=torch.long))
    graph = capture(model, args, as_eager=True).graph
    step, resident = training_step(model, args), resident_tensors(model, args)
    with StorageTracker(resident) as tracker:
        step()
    expected = storage_bytes(resident) + tracker.peak_bytes
    assert simulate(graph, save_everything(graph)).peak_bytes == expected
    reused = capture(model, args).graph
    assert simulate(reused, save_everything(reused)).peak_bytes < expected


def test_operations_are_named_after_their_submodule():
    case = make_model("convnet", batch_size=2, width=4, depth=2, size=8)
    graph = trace(case.module, case.args, costs="flops")
    names = [operation.name for operation in graph.operations]
    assert "features.0/convolution" in names
    assert "features.4/convolution_backward" in names


def test_views_cost_no_memory_and_no_flops():
    graph = trace(nn.Linear(4, 8), (torch.ones(2, 4),), loss=lambda y: y.t().sum(), costs="flops")
    assert graph.time_unit == "FLOP"
    times = {operation.name: operation.time for operation in graph.operations}
    assert times["t"] == 0
    assert graph.tensor("t").storage == "parameter:weight"
    assert times["addmm"] == 2 * 2 * 4 * 8


def test_nothing_but_views_is_free():
    case = make_model("gpt2", batch_size=1, layers=1, width=16, heads=2, vocabulary=32, length=8)
    captured = capture(case.module, case.args)
    for operation, instruction in zip(captured.graph.operations, captured.instructions, strict=True):
        if isinstance(instruction, Call) and not operation.time:
            made = {captured.graph.tensor(name).storage for name in operation.outputs}
            read = {captured.graph.tensor(name).storage for name in operation.inputs}
            assert made <= read, operation.name


def test_measured_times_are_in_seconds_and_positive():
    graph = trace(nn.Linear(4, 8), (torch.ones(2, 4),), loss=torch.sum)
    assert graph.time_unit == "s"
    assert all(operation.time > 0 for operation in graph.operations if "addmm" in operation.name)


def test_two_captures_have_the_same_structure_and_another_shape_has_another():
    def digest(batch_size: int, **options: object) -> str:
        case = make_model("convnet", batch_size=batch_size, width=4, depth=2, size=8, **options)
        return trace(case.module, case.args, costs="flops").structure_digest

    assert digest(2) == digest(2, seed=3)
    assert digest(2) != digest(3)


def test_tracing_leaves_the_model_as_it_was():
    case = make_model("convnet", batch_size=2, width=4, depth=2, size=8)
    case.module.last = None
    for parameter in case.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy(case.module.state_dict())
    attributes = {name: dict(vars(part)) for name, part in case.module.named_modules()}
    parameters = list(case.module.parameters())
    state = torch.get_rng_state()
    trace(case.module, case.args)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in case.module.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(a is b for a, b in zip(case.module.parameters(), parameters, strict=True))
    assert all(bool((parameter.grad == 1).all()) for parameter in parameters)
    assert {name: dict(vars(part)) for name, part in case.module.named_modules()} == attributes


def test_a_model_that_keeps_what_it_computed_is_left_without_fake_tensors():
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.linear(x)
            return self.last.sum()

    model = Keeping()
    trace(model, (torch.ones(2, 4),), costs="flops")
    assert model.last is None


def test_random_operations_keep_their_order_by_tokens():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4), nn.Dropout())
    graph = trace(model, (torch.ones(2, 4),), loss=torch.sum, costs="flops")
    assert graph.operation("rng state 1").inputs == ()
    assert graph.operation("rng state 2").inputs == ("rng token 1",)
    assert "rng token 1" in graph.operation("1/native_dropout").outputs
    assert "state 1" in graph.operation("1/native_dropout").inputs
    assert graph.operation("1/native_dropout").repeatable
    assert not graph.operation("rng state 1").repeatable
    assert graph.tensor("state 1").size_bytes == torch.get_rng_state().untyped_storage().nbytes()


def test_attention_without_dropout_is_not_random():
    case = make_model("gpt2", batch_size=1, layers=1, width=16, heads=2, vocabulary=32, length=8, dropout=0.0)
    graph = trace(case.module, case.args, costs="flops")
    assert any("flash_attention" in operation.signature for operation in graph.operations)
    assert not any(operation.name.startswith("rng state") for operation in graph.operations)


def test_a_mutated_buffer_is_read_through_a_snapshot_and_updated_after_it():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x) + self.scale
            with torch.no_grad():
                self.scale.mul_(2).add_(y.mean(0))
            return y.sin().sum()

    graph = trace(Counting(), (torch.ones(2, 4),), costs="flops")
    readers = [op for op in graph.operations if "snapshot:scale" in op.inputs]
    assert len(readers) == 2
    assert [op.name for op in graph.operations if "buffer:scale" in op.inputs] == ["snapshot:scale"]
    assert "snapshot:scale:token" in graph.operation("update:scale").inputs
    assert not graph.operation("update:scale").repeatable


def test_a_relu_writes_over_an_input_that_nothing_else_reads():
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            alone, shared = self.linear(x), self.linear(x)
            return (alone.relu() * shared.relu() * shared).sum()

    graph = trace(Branch(), (torch.ones(8, 16),), costs="flops")
    assert graph.tensor("relu").storage == graph.tensor("linear/addmm").storage
    assert graph.tensor("relu_1").storage == "relu_1"


def test_the_peak_of_a_small_network_is_the_hand_count():
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 16, bias=False), nn.Tanh())
    graph = trace(model, (torch.ones(16, 16),), loss=torch.sum, costs="flops")
    simulation = simulate(graph, schedule_from_runs(graph, graph.index.defaults))
    kib = 1024
    # Resident: two weights and the input. Saved: the outputs of both tanh. The loss and its
    # gradient take 4 bytes each. At the peak, the gradients of the second layer's input and
    # weight, the first tanh and the gradient of the second tanh are live.
    assert simulation.saved_bytes == 2 * kib + 4
    assert simulation.peak_bytes == 3 * kib + 8 + 4 * kib


def test_a_model_without_anything_trainable_is_refused():
    model = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(CaptureError, match=r"requires_grad_\(True\)"):
        trace(model, (torch.ones(2, 4),), loss=torch.sum)


def test_a_loss_cut_off_from_the_parameters_is_refused():
    with pytest.raises(CaptureError, match="no gradient flows"):
        trace(nn.Linear(4, 4), (torch.ones(2, 4),), loss=lambda y: y.detach().sum())


def test_a_function_is_refused():
    with pytest.raises(CaptureError, match=r"must be an nn\.Module, got builtin_function_or_method: wrap the function"):
        trace(torch.sum, (torch.ones(2, 4),))


def test_a_loss_that_is_not_one_number_is_refused():
    with pytest.raises(CaptureError, match=r"shapes \[\(2, 4\)\]: reduce it"):
        trace(nn.Linear(4, 4), (torch.ones(2, 4),), loss=torch.tanh)


def test_a_parameter_changed_in_forward_is_refused():
    class Clipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.5, 0.5)
            return (x @ self.weight).sum()

    with pytest.raises(CaptureError, match="parameter weight requires a gradient and is changed in place"):
        trace(Clipping(), (torch.ones(2, 4),))


def test_a_branch_on_a_value_is_refused_with_the_reason_and_a_way_out():
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return y.sum() if y.sum() > 0 else y.square().sum()

    with pytest.raises(CaptureError, match=r'branches on tensor values.*granularity="modules"'):
        trace(Branching(), (torch.ones(2, 4),))


def test_a_tensor_hidden_from_the_capture_is_refused():
    hidden = {torch.ones(4)}
    with pytest.raises(CaptureError, match=r"test_tracing\.py:\d+: .*hidden.*reads a tensor that is held where"):
        trace(nn.Linear(4, 4), (torch.ones(2, 4),), loss=lambda y: (y * next(iter(hidden))).sum())


def test_a_tensor_made_from_numbers_in_forward_is_a_constant():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum()

    graph = trace(Scaled(), (torch.ones(2, 4),), costs="flops")
    assert graph.resident_bytes >= 4 * (16 + 4 + 8) + 16
