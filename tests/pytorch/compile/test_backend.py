"""`torch.compile` with our backend and generated code: the numbers of plain autograd, memory as planned."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from scheduler.errors import BudgetTooSmallError, ExecutionError, InvalidBudgetError, InvalidOptionError
from scheduler.pytorch import backend
from scheduler.pytorch.measurement.memory import storage_bytes
from scheduler.simulator import simulate
from tests.support.pytorch.modules import Mutating, Step
from tests.support.pytorch.planning import check_equal, train
from tests.support.pytorch.regression import batch, mean_square, mlp
from tests.support.pytorch.small_models import small_model
from tests.support.pytorch.watching import Watched

# TorchDynamo reads `.grad` of the tensors that the first graph passes to the second.
pytestmark = [
    pytest.mark.long(30),
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.mark.parametrize("name", ["hf-gpt2", "unet", "hf-vit"])
def test_a_compiled_model_trains_as_under_autograd_in_the_planned_memory_at_each_batch_size(name: str) -> None:
    cases = [small_model(name, batch_size=size) for size in (4, 3)]
    loss = cases[0].loss or (lambda outputs: outputs)
    module = Step(cases[0].module, loss)
    # Without these, transformers logs its guesses, which TorchDynamo cannot capture.
    module.model.loss_type = "ForCausalLM" if name == "hf-gpt2" else "ForImageClassification"
    if name == "hf-vit":
        module.model.config.problem_type = "single_label_classification"
    plain = copy.deepcopy(module)
    watched = Watched(backend("90%", solver="greedy", time_limit=4.0))
    compiled = torch.compile(module, backend=watched, fullgraph=True)
    batches = [cases[0].batch(1), cases[1].batch(1), cases[0].batch(2)]
    check_equal(train(compiled, batches), renamed(train(plain, batches)))
    first, second = watched.planned.plans
    assert first.shapes != second.shapes
    args, kwargs = cases[0].batch(1)
    between, peak = watched.measure(module, args, kwargs, lambda: compiled(*args, **kwargs))
    assert between == first.saved_bytes
    assert first.plan.graph.resident_bytes + peak == first.plan.peak_bytes
    assert first.plan.peak_bytes <= first.plan.budget_bytes < first.plan.baseline_peak_bytes


def renamed(outcome):
    """Name the gradients and buffers of a plain module as a compiled one does."""
    outcome.gradients = {f"_orig_mod.{name}": value for name, value in outcome.gradients.items()}
    outcome.buffers = {f"_orig_mod.{name}": value for name, value in outcome.buffers.items()}
    return outcome


def test_a_buffer_read_and_then_changed_gives_the_gradients_of_autograd():
    module = Step(Mutating())
    plain = copy.deepcopy(module)
    planned = backend("60%", solver="greedy", time_limit=2.0)
    batches = [((batch(512, 16, seed=seed),), {}) for seed in (1, 2)]
    check_equal(train(torch.compile(module, backend=planned), batches), renamed(train(plain, batches)))
    (graph,) = planned.plans
    assert sum(simulate(graph.plan.graph, graph.plan.schedule).recomputed.values()) > 0


class Broken(nn.Module):
    """Two halves with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = mlp(nn.Tanh(), nn.Dropout(0.1))
        self.second = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        return self.second(hidden).square().mean()


def test_a_graph_break_is_rejected_with_its_place():
    compiled = torch.compile(Broken(), backend=backend("100%", solver="save-all"))
    with pytest.raises(ExecutionError, match=r"graph break in test_backend.py:\d+ in forward: Call to .*graph_break"):
        compiled(batch(64, 16))


def test_graphs_of_a_broken_step_share_a_budget_from_the_second_step_on():
    module = Broken()
    plain = copy.deepcopy(module)
    x = batch(512, 16)
    separate = backend("100%", graph_breaks="share", solver="save-all")
    torch.compile(copy.deepcopy(module), backend=separate)(x).backward()
    added = [graph.plan.peak_bytes - graph.plan.graph.resident_bytes for graph in separate.plans]
    hidden_bytes = 512 * 8 * 4  # passed from the first graph to the second
    resident = storage_bytes([*module.parameters(), x]) + hidden_bytes
    budget = resident + 9 * sum(added) // 10
    watched = Watched(backend(budget, graph_breaks="share", time_limit=2.0))
    compiled = torch.compile(module, backend=watched)
    batches = [((x,), {}), ((batch(512, 16, seed=2),), {})]
    check_equal(train(compiled, batches), renamed(train(plain, batches)))
    _, peak = watched.measure(module, x, {}, lambda: compiled(x))
    assert storage_bytes([*module.parameters(), x]) + peak <= budget
    plans = [graph.plan for graph in watched.planned.plans]
    assert len(plans) == 2
    assert sum(plan.peak_bytes - plan.graph.resident_bytes for plan in plans) <= 9 * sum(added) // 10
    assert "graph break" in watched.planned.plans[0].graph_break
    assert not watched.planned.plans[1].graph_break
    assert sum(plan.overhead for plan in plans) > 0


def test_code_that_runs_twice_before_its_backward_is_rejected_or_shares_the_budget():
    block = mlp()
    x, y = batch(64, 16), batch(64, 16, seed=1)
    compiled = torch.compile(block, backend=backend("100%", solver="save-all"))
    first = compiled(x)
    with pytest.raises(ExecutionError, match="runs more than once before its backward"):
        compiled(y)
    first.sum().backward()
    compiled(y).sum().backward()
    del first
    torch._dynamo.reset()
    shared = backend("8GiB", graph_breaks="share", solver="save-all")
    compiled = torch.compile(block, backend=shared)
    block.zero_grad()
    (compiled(x) * compiled(y)).sum().backward()
    plain = copy.deepcopy(block)
    plain.zero_grad()
    (plain(x) * plain(y)).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(block.parameters(), plain.parameters(), strict=True))


def test_a_run_whose_outputs_are_deleted_is_no_longer_counted():
    compiled = torch.compile(mlp(), backend=backend("100%", solver="save-all"))
    for seed in (1, 2):
        compiled(batch(8, 16, seed=seed))


def test_graphs_without_gradients_run_without_a_plan():
    model = mlp(nn.Dropout())
    planned = backend("100%", solver="save-all")
    compiled = torch.compile(model, backend=planned)
    with torch.no_grad():
        torch.manual_seed(0)
        ours = compiled(batch(8, 16))
        torch.manual_seed(0)
        assert torch.equal(ours, model(batch(8, 16)))
    assert planned.plans == ()
    compiled(batch(8, 16)).sum().backward()
    assert len(planned.plans) == 1


def test_overlapping_inputs_are_rejected_if_one_of_them_is_changed():
    weight = batch(16, 16).requires_grad_()

    def change(x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.sin(y @ weight)
        x.mul_(2)
        return (hidden + x).square().mean()

    compiled = torch.compile(change, backend=backend("100%", solver="save-all"))
    compiled(batch(8, 16), batch(8, 16, seed=1)).backward()
    both = batch(16, 16)
    compiled(both[:8], both[8:]).backward()
    with pytest.raises(ExecutionError, match="overlaps another input in memory"):
        compiled(both[:8], both[4:12])


def test_a_compiled_step_may_contain_its_backward():
    model, plain = mlp(), mlp()

    def step(x: Tensor) -> Tensor:
        loss = mean_square(model(x))
        loss.backward()
        return loss.detach()

    planned = backend("100%", solver="save-all")
    loss = torch.compile(step, backend=planned)(batch(8, 16))
    expected = mean_square(plain(batch(8, 16)))
    expected.backward()
    assert torch.equal(loss, expected)
    assert len(planned.plans) == 1
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_outputs_that_share_memory_are_rejected():
    def halves(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().chunk(2)

    with pytest.raises(BackendCompilerFailed, match="share memory"):
        torch.compile(halves, backend=backend("100%"))(batch(8, 16).requires_grad_())


def test_a_budget_that_is_too_small_raises_the_packages_own_error():
    compiled = torch.compile(mlp(), backend=backend("1KiB"))
    with pytest.raises(BudgetTooSmallError, match="must stay in memory while it runs need"):
        compiled(batch(8, 16))


def test_a_report_names_the_place_of_the_graph_and_the_effects_of_its_plan():
    planned = backend("100%", solver="save-all")
    torch.compile(Step(mlp()), backend=planned)(batch(8, 16)).backward()
    (graph,) = planned.plans
    assert graph.name == "0/0"
    assert graph.place.startswith("modules.py:")
    assert graph.shapes == ((8, 16),)
    assert str(graph).startswith(f"graph 0/0 ({graph.place}): peak ")
    assert "overhead 0.00%" in str(graph)


def test_a_reserve_counts_as_resident():
    graphs = []
    for reserve in (0, "1MiB"):
        torch._dynamo.reset()
        planned = backend("100%", solver="save-all", reserve=reserve)
        torch.compile(mlp(), backend=planned)(batch(8, 16)).sum().backward()
        graphs.append(planned.plans[0].plan.graph)
    assert graphs[1].resident_bytes - graphs[0].resident_bytes == 2**20


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"budget": "50%", "compiler": "llvm"}, InvalidOptionError, 'compiler must be "eager" or "inductor"'),
        ({"budget": "50%", "graph_breaks": "ignore"}, InvalidOptionError, 'graph_breaks must be "error" or'),
        ({"budget": "1GiB", "compiler": "inductor", "graph_breaks": "share"}, InvalidOptionError, "percent"),
        ({"budget": "8G"}, InvalidBudgetError, "8G"),
    ],
)
def test_invalid_options_are_rejected(options, error, text):
    with pytest.raises(error, match=text):
        backend(**options)
