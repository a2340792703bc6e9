from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

import scheduler as sc
from scheduler.errors import ExecutionError, InvalidOptionError, UnsuitableProblemError
from scheduler.pytorch import checkpointed, trace
from scheduler.pytorch.capture.captured_step import Capture
from scheduler.pytorch.capture.device_memory import DeviceMemory
from scheduler.pytorch.execute.runner import CapturedModule, build
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors, storage_bytes
from scheduler.pytorch.tracing import capture
from scheduler.schedule import schedule_from_runs
from scheduler.simulator import simulate
from tests.support.pytorch.planning import (
    SCHEDULES,
    check_equal,
    check_like_autograd,
    recompute_most,
    save_everything,
    train,
)
from tests.support.pytorch.small_models import small_model

EXISTING = DeviceMemory(accumulate_gradients=True)

schedules = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


def batch(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mean_square(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


def linear_layers(count: int = 8, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


def accumulating(model, schedule, args, loss=mean_square) -> tuple[CapturedModule, Capture, sc.Schedule]:
    captured = capture(model, args, None, loss, memory=EXISTING)
    made = schedule(captured.graph)
    return build(model, captured, made, args, loss=loss), captured, made


def peak_of_step(module: nn.Module, args: tuple[object, ...]) -> int:
    """Return the live bytes at the peak of one more step, including parameters, inputs and existing gradients."""
    existing = [p.grad for p in module.parameters() if p.grad is not None]
    resident = [*resident_tensors(module, args), *existing]
    with StorageTracker(resident) as tracker:
        module(*args).backward()
    return storage_bytes(resident) + tracker.peak_bytes


@schedules
@pytest.mark.parametrize("name", ["convnet", "gpt2", "hf-t5"])
def test_gradients_are_added_to_existing_ones_in_the_predicted_memory(name, schedule):
    case = small_model(name)
    plain = copy.deepcopy(case.module)
    captured = capture(case.module, case.args, case.kwargs, case.loss, memory=EXISTING)
    made = schedule(captured.graph)
    module = build(case.module, captured, made, case.args, case.kwargs, loss=case.loss)
    assert len(module.program.backward) > 4
    gradients, buffers = [], []
    for target in (module, plain):
        torch.manual_seed(3)
        for number in (1, 2, 3):
            args, kwargs = case.batch(number)
            outputs = target(*args, **kwargs)
            (outputs if target is module or case.loss is None else case.loss(outputs)).backward()
        gradients.append([p.grad.clone() for p in target.parameters() if p.grad is not None])
        buffers.append([buffer.clone() for buffer in target.buffers()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)
    assert all(torch.equal(one, other) for one, other in zip(*buffers, strict=True))
    resident = [*resident_tensors(module, (case.args, case.kwargs)), *(p.grad for p in module.parameters())]
    with StorageTracker(tensor for tensor in resident if tensor is not None) as tracker:
        module(*case.args, **case.kwargs).backward()
    assert captured.graph.resident_bytes + tracker.peak_bytes == simulate(captured.graph, made).peak_bytes


def test_existing_gradients_are_resident_and_new_ones_are_not_results():
    model = linear_layers(2)
    model.append(nn.Linear(64, 3))
    model[0].requires_grad_(False)
    graph = trace(model, (batch(4, 64),), loss=mean_square, costs="flops", accumulate_gradients=True)
    held = {name: graph.tensor(name).size_bytes for name in graph.resident if name.startswith("gradient:")}
    assert held == {"gradient:1.weight": 64 * 64 * 4, "gradient:2.weight": 64 * 3 * 4, "gradient:2.bias": 3 * 4}
    plain = trace(model, (batch(4, 64),), loss=mean_square, costs="flops")
    assert graph.resident_bytes == plain.resident_bytes + sum(held.values())
    assert len(plain.results) == len(graph.results) + 3


def test_no_second_set_of_gradients_is_held():
    layers, width, rows = 32, 256, 2
    model, x = linear_layers(layers, width), batch(rows, width)
    module, captured, _ = accumulating(model, save_everything, (x,))
    module(x).backward()
    beyond = peak_of_step(module, (x,)) - captured.graph.resident_bytes
    one_weight, one_activation = width * width * 4, rows * width * 4
    # A sixteenth of 32 weights is two; at most all activations are live, with two gradients and some scalars.
    assert 2 * one_weight <= beyond <= 2 * one_weight + (layers + 3) * one_activation + 64
    # A plan made without existing gradients counts a second set, and does not hold one either.
    unaware = capture(model, (x,), None, mean_square)
    made = save_everything(unaware.graph)
    assert simulate(unaware.graph, made).peak_bytes >= unaware.graph.resident_bytes + layers * one_weight
    plain = build(model, unaware, made, (x,), loss=mean_square)
    # Four gradients are 1 MiB, and one more is being computed.
    assert peak_of_step(plain, (x,)) - captured.graph.resident_bytes <= 5 * one_weight + (layers + 3) * one_activation


def linear_step(x: Tensor, model: nn.Module) -> tuple[CapturedModule, list[str]]:
    """Return a plan without existing gradients that recomputes most, and the parameters whose gradients arrive."""
    captured = capture(model, (x,), None, mean_square)
    arrived: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    return build(model, captured, recompute_most(captured.graph), (x,), loss=mean_square), arrived


def test_new_gradients_leave_the_backward_in_groups_too():
    model, x = linear_layers(width=512), batch(4, 512)  # a MiB each
    module, arrived = linear_step(x, model)
    made_before: list[int] = []
    model[4].weight.register_post_accumulate_grad_hook(
        lambda _: made_before.append(sum(parameter.grad is not None for parameter in model.parameters()))
    )
    module(x).backward()
    assert arrived == [f"{i}.weight" for i in reversed(range(8))]
    assert [len(segment.gradients) for segment in module.program.backward] == [1] * 8
    assert made_before == [4]  # those of layers 7 to 4, but not yet those of 3 to 0


def test_parameters_may_be_changed_as_their_gradients_arrive():
    """An optimizer step in the backward: nothing reads a parameter after its gradient has left."""
    models, x = [linear_layers(width=512), linear_layers(width=512)], batch(4, 512)

    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for parameter in itertools.chain.from_iterable(model.parameters() for model in models):
        parameter.register_post_accumulate_grad_hook(step)
    module, _ = linear_step(x, models[0])
    for _ in range(3):
        module(x).backward()
        mean_square(models[1](x)).backward()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


class Odd(nn.Module):
    """Parameters whose gradients share a tensor, are an incoming gradient, have another layout, or are read again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Parameter(torch.randn(512, 512)), nn.Parameter(torch.randn(512, 512))
        self.transposed = nn.Parameter(torch.randn(512, 512).T)
        self.strided = nn.Parameter(torch.randn(512, 1024)[:, ::2])
        self.offset = nn.Parameter(torch.zeros(()))
        self.first = nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sin(self.first(x) * self.strided + self.one + self.other) * self.transposed
        return hidden.square().mean() + self.offset


@schedules
def test_gradients_of_every_kind_are_complete_in_the_predicted_memory(schedule):
    x = batch(512, 512)
    module = check_like_autograd(Odd(), schedule, ((x,), {}), ((batch(512, 512, seed=1),), {}))
    assert len(module.program.backward) > 3


def test_a_schedule_may_accumulate_gradients_later_than_it_computes_them():
    def at_the_end(graph: sc.Graph) -> sc.Schedule:
        late = {i for i, operation in enumerate(graph.operations) if operation.signature == "Accumulate"}
        runs = [i for i in graph.index.defaults if i not in late]
        return schedule_from_runs(graph, [*runs, *sorted(late)])

    model, plain, x = linear_layers(), linear_layers(), batch(4, 64)
    module, captured, made = accumulating(model, at_the_end, (x,))
    for _ in range(2):
        module(x).backward()
        mean_square(plain(x)).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    predicted = simulate(captured.graph, made).peak_bytes
    assert peak_of_step(module, (x,)) == predicted >= captured.graph.resident_bytes + 8 * 64 * 64 * 4


@schedules
def test_the_first_step_without_gradients_needs_no_more_than_predicted(schedule):
    model, x = linear_layers(), batch(16, 64)
    module, captured, made = accumulating(model, schedule, (x,))
    assert peak_of_step(module, (x,)) <= simulate(captured.graph, made).peak_bytes
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_gradients_arrive_group_by_group_and_hooks_run_once():
    model, x = linear_layers(), batch(4, 64)
    module, _, _ = accumulating(model, save_everything, (x,))
    arrived: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    module(x).backward()
    assert arrived == [f"{i}.weight" for i in reversed(range(8))]
    assert [len(segment.gradients) for segment in module.program.backward] == [1] * 8
    assert {gradient for segment in module.program.backward for gradient in segment.gradients} == set(range(8))


def test_a_parameter_changed_in_a_hook_that_a_later_segment_reads_is_noticed():
    model, x = linear_layers(), batch(4, 64)
    module, _, _ = accumulating(model, save_everything, (x,))
    # Its gradient is computed, and leaves, before that of its input, which reads the weight.
    assert "parameter:7.weight" in module.program.backward[1].resident

    def change(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter += 1

    model[7].weight.register_post_accumulate_grad_hook(change)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        module(x).backward()


def test_gradients_of_some_parameters_only_can_be_asked_for():
    model, x = linear_layers(), batch(4, 64)
    module, _, _ = accumulating(model, recompute_most, (x,))
    expected = torch.autograd.grad(mean_square(model(x)), [model[5].weight, model[6].weight])
    found = torch.autograd.grad(module(x), [model[5].weight, model[6].weight])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_gradient_of_an_input_stays_a_result():
    model, x = linear_layers(4), batch(4, 64).requires_grad_()
    module, captured, _ = accumulating(model, recompute_most, (x,))
    assert not any(name == "gradient:args[0]" for name in captured.graph.resident)
    (expected,) = torch.autograd.grad(mean_square(model(x)), [x])
    module(x).backward()
    assert torch.equal(x.grad, expected)


def test_a_second_backward_and_a_second_derivative_are_refused_in_segments_too():
    model, x = linear_layers(), batch(4, 64)
    module, _, _ = accumulating(model, save_everything, (x,))
    with pytest.raises(ExecutionError, match="retain_graph"):
        module(x).backward(retain_graph=True)
    with pytest.raises(ExecutionError, match="create_graph"):
        module(x).backward(create_graph=True)
    loss = module(x)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_several_steps_in_segments_may_be_outstanding():
    model, plain = linear_layers(), linear_layers()
    module, _, _ = accumulating(model, recompute_most, (batch(4, 64),))
    for target in (module, lambda x: mean_square(plain(x))):
        losses = [target(batch(4, 64, seed=seed)) for seed in (1, 2, 3)]
        for position in (1, 0, 2):
            losses[position].backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_plan_that_accumulates_gradients_is_a_file_like_any_other(tmp_path):
    model, x = linear_layers(), batch(64, 64)
    options = {"costs": "flops", "solver": "greedy", "time_limit": 2.0, "accumulate_gradients": True}
    module = checkpointed(model, "70%", (x,), loss=mean_square, **options)
    module.plan.save(tmp_path / "plan.json")
    plan = sc.Plan.load(tmp_path / "plan.json")
    module(x).backward()
    assert peak_of_step(module, (x,)) == plan.peak_bytes <= plan.budget_bytes
    assert plan.overhead > 0
    again = checkpointed(linear_layers(), plan, (x,), loss=mean_square)
    assert len(again.program.backward) == len(module.program.backward) == 8
    check_equal(train(again, [((x,), {})]), train(linear_layers(), [((x,), {})], mean_square))
    with pytest.raises(InvalidOptionError, match="accumulate_gradients"):
        checkpointed(model, plan, (x,), loss=mean_square, accumulate_gradients=True)


@pytest.mark.parametrize("solver", sc.solver_names())
def test_a_solver_serves_a_graph_whose_gradients_are_accumulated_if_it_serves_others(solver):
    def solve(**options: bool) -> sc.Solution:
        graph = trace(linear_layers(3), (batch(64, 64),), loss=mean_square, costs="flops", **options)
        return sc.solve(graph, "100%", solver=solver, time_limit=2.0)

    try:
        solution = solve(accumulate_gradients=True)
    except UnsuitableProblemError:
        with pytest.raises(UnsuitableProblemError):
            solve()
        return
    assert solution.peak_bytes <= solution.budget_bytes


def test_layers_add_their_gradients_to_existing_ones_in_the_predicted_memory():
    model, plain, x = linear_layers(), linear_layers(), batch(16, 64)
    module = checkpointed(
        model, "80%", (x,), loss=mean_square, granularity="layers", accumulate_gradients=True, solver="dp"
    )
    for seed in (1, 2):
        module(batch(16, 64, seed=seed)).backward()
        mean_square(plain(batch(16, 64, seed=seed))).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    graph = module.plan.graph
    held = [graph.tensor(name).size_bytes for name in graph.resident if name.startswith("gradient:")]
    assert held == [64 * 64 * 4] * 8
    assert 0.99 * module.plan.peak_bytes <= peak_of_step(module, (x,)) <= module.plan.peak_bytes
    checkpointed(model, module.plan, (x,), loss=mean_square)  # the same profile again


def test_a_layer_used_twice_holds_its_gradient_until_both_are_there():
    shared = nn.Linear(64, 64, bias=False)
    model, x = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(64, 64, bias=False)), batch(4, 64)
    plain = copy.deepcopy(model)
    module = checkpointed(
        model, "100%", (x,), loss=mean_square, granularity="layers", accumulate_gradients=True, solver="dp"
    )
    for _ in range(2):
        module(x).backward()
        mean_square(plain(x)).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    graph = module.plan.graph
    held = [graph.tensor(name).size_bytes for name in graph.resident if name.startswith("gradient:")]
    assert held == [64 * 64 * 4] * 2
    assert peak_of_step(module, (x,)) <= module.plan.peak_bytes
