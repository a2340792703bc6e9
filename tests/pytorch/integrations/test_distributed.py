from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import scheduler as sc
from scheduler.errors import CaptureError, ExecutionError
from scheduler.plan import Plan
from scheduler.pytorch import backend, checkpointed, profile_layers, trace
from scheduler.pytorch.checkpointing import plan_step
from scheduler.pytorch.integrations.distributed import share_plan
from scheduler.pytorch.integrations.planned_forward import PlannedForward
from scheduler.pytorch.measurement.allocator import allocator_peak
from scheduler.pytorch.measurement.memory import storage_bytes
from tests.support.pytorch.guide_examples import run_example
from tests.support.pytorch.modules import Meets
from tests.support.pytorch.planning import planned, recompute_most
from tests.support.pytorch.processes import run_on_processes
from tests.support.pytorch.watching import Count

pytestmark = pytest.mark.long(30)
PROCESSES, STEPS, ROWS, WIDTH, BLOCKS = 2, 5, 192, 32, 4


def mean_square(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


def network(*, frozen: bool = False, tied: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh())
            for _ in range(BLOCKS)
        )
    )
    for part in model if frozen else ():
        part[0].requires_grad_(False)
    if tied:
        model[-1][0].weight = model[0][0].weight
    return model


def batch(step: int) -> Tensor:
    """Return the batch of all processes."""
    return torch.randn(PROCESSES * ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def share(step: int, rank: int) -> Tensor:
    """Return the rows of one process."""
    return batch(step)[rank * ROWS : (rank + 1) * ROWS].clone()


def losses_of_one_process(**options: bool) -> list[float]:
    model = network(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(STEPS):
        loss = mean_square(model(batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(
    rank: int, module: nn.Module, loss: Callable[[Tensor], Tensor] | None = None, *, input_gradient: bool = False
) -> dict[str, object]:
    """Return the losses of this process, and the allocator's peak in the last step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    losses: list[float] = []
    for number in range(STEPS):
        x = share(number, rank).requires_grad_(input_gradient)

        def step(x: Tensor = x) -> None:
            value = module(x) if loss is None else loss(module(x))
            value.backward()
            losses.append(value.item())

        resident = [x, *(local(t) for p in module.parameters() for t in (p, p.grad) if t is not None)]
        peak = storage_bytes(resident) + allocator_peak(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return {"losses": losses, "peak": peak}


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def not_called() -> Plan:
    raise AssertionError("a plan is made on one process only")


def replicated(rank: int) -> dict[str, object]:
    """Train under DistributedDataParallel; record how many gradients were ready as each bucket was sent."""
    model, x = network(), share(0, rank)

    def make() -> Plan:
        graph = trace(model, (x,), loss=mean_square, costs="flops", accumulate_gradients=True)
        return sc.make_plan(graph, "60%", solver="greedy", time_limit=2.0)

    plan = share_plan(make if rank == 0 else not_called)
    module = DistributedDataParallel(
        checkpointed(model, plan, (x,), loss=mean_square), gradient_as_bucket_view=True, bucket_cap_mb=0.02
    )
    ready: list[str] = []
    sent: list[int] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))

    def reduce(_, bucket):
        sent.append(len(ready))
        work = dist.all_reduce(bucket.buffer().div_(PROCESSES), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    module.register_comm_hook(None, reduce)
    found = train(rank, module)
    return {**found, "digest": plan.digest, "budget": plan.budget_bytes, "sent": sent, "gradients": len(ready)}


def sharded(rank: int) -> dict[str, object]:
    """Train under FSDP2, a unit per block; the plan of a block counts the memory of the others."""
    model, example = network(), (torch.randn(ROWS, WIDTH, requires_grad=True),)
    unit = storage_bytes(model[0].parameters())
    shards = 2 * BLOCKS * unit // PROCESSES  # of parameters and of gradients
    gathered = 2 * unit  # buffers of two all-gathers
    scattered = 2 * unit + unit // PROCESSES  # inputs of two reduce-scatters and an output
    made: list[sc.PipelineStagePlan] = []

    def make() -> Plan:
        graph = trace(model[1], example, costs="flops", workspaces=True, reserve=shards + gathered + scattered)
        made.extend(sc.plan_pipeline([graph], "60%", BLOCKS, time_limit=2.0))
        return made[0].plan

    plan = share_plan(make if rank == 0 else not_called)
    found = train(rank, in_units(model, plan, example), mean_square, input_gradient=True)
    counts = [count_gathers(rank, module) for module in (model, in_units(network()))]
    claims = [(stage.budget_bytes, stage.peak_bytes) for stage in made]
    return {**found, "digest": plan.digest, "claims": claims, "gathers": counts}


def sharded_and_frozen(rank: int) -> dict[str, object]:
    """Train under FSDP2 with every other layer frozen."""
    model, example = network(frozen=True), (torch.randn(ROWS, WIDTH, requires_grad=True),)

    def make() -> Plan:
        (stage,) = sc.plan_pipeline([trace(model[1], example, costs="flops")], "60%", BLOCKS, time_limit=2.0)
        return stage.plan

    plan = share_plan(make if rank == 0 else not_called)
    assert sum(plan.simulation.recomputed.values()) > 0
    return {**train(rank, in_units(model, plan, example), mean_square, input_gradient=True), "digest": plan.digest}


def in_units(model: nn.Sequential, plan: Plan | None = None, example: tuple[Tensor, ...] = ()) -> nn.Sequential:
    """Make every block an FSDP2 unit, with the plan if there is one; all inputs require gradients, as in the plan."""
    for i in range(BLOCKS) if plan is not None else ():
        model[i] = checkpointed(model[i], plan, example)
    for part in model:
        fully_shard(part)
    return fully_shard(model)


def count_gathers(rank: int, module: nn.Module) -> int:
    with Count(torch.ops.c10d._allgather_base_.default) as counter:
        mean_square(module(share(0, rank).requires_grad_())).backward()
    return counter.count


class ReducesInPlace(Meets):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh().clone()
        dist.all_reduce(h)
        return self.second(h).sum()


def reducing(rank: int) -> dict[str, object]:
    """Run a step with an all-reduce in its forward, without a plan and with everything recomputed."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    plain = Meets()
    module, captured, schedule = planned(Meets(), recompute_most, (x,))
    results = []
    for target in (plain, module):
        with Count(torch.ops._c10d_functional.all_reduce.default) as counter:
            loss = target(x)
            loss.backward()
        results.append((counter.count, loss.item(), [p.grad.tolist() for p in target.parameters()]))
    graph = captured.graph
    recomputed = sum(sc.simulate(graph, schedule).recomputed.values())
    once = [operation.name for operation in graph.operations if not operation.repeatable]
    measured = trace(Meets(), (x,)) if rank == 0 else None  # on one process: measuring must not wait for the other
    try:
        trace(ReducesInPlace(), (x,), costs="flops")
        refusal = ""
    except CaptureError as error:
        refusal = str(error)
    return {
        "results": results,
        "recomputed": recomputed,
        "once": once,
        "times": [] if measured is None else [operation.time for operation in measured.operations],
        "refusal": refusal,
    }


def sharing(rank: int) -> dict[str, object]:
    """Return the errors of plans that cannot be shared."""
    chain = sc.zoo.uniform_chain(4)

    def fail() -> Plan:
        sc.make_plan(chain, 1, solver="save-all")
        raise AssertionError

    errors = {"made": error_of(lambda: share_plan(fail if rank == 1 else not_called, source=1))}
    original = json.loads

    def other(text: str) -> object:
        return {**original(text), "digest": "other"}

    with mock.patch("scheduler.pytorch.integrations.distributed.json.loads", other if rank == 1 else original):
        errors["differs"] = error_of(lambda: share_plan(lambda: sc.make_plan(chain, "100%", solver="save-all")))
    forward = PlannedForward(network(), "60%", on_mismatch="plan")
    errors["sharded"] = error_of(lambda: trace(fully_shard(network()), (share(0, rank),), costs="flops"))
    errors["solved by each"] = error_of(lambda: forward.module(share(0, rank)))
    return errors


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def in_place_of_forward(rank: int) -> dict[str, object]:
    """Train under DistributedDataParallel with a planned forward, which plans at the first call."""
    model = network()
    forward = PlannedForward(model, "70%", costs="flops", solver="greedy", time_limit=2.0)
    found = train(rank, DistributedDataParallel(model, gradient_as_bucket_view=True), mean_square)
    assert forward.planned is not None
    assert forward.planned.plan is not None
    segments = len(forward.planned.program.backward)
    return {**found, "digest": forward.planned.plan.digest, "segments": segments}


class Branching(nn.Module):
    """A network that cannot be captured; the largest number in the batch of all processes decides what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor) -> Tensor:
        largest = x.detach().abs().max()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return x if largest.item() > 1e9 else self.body(x)


def by_modules(rank: int) -> dict[str, object]:
    """Train a model that cannot be captured, whose forward waits for the other process, with a planned forward."""
    model = Branching()
    forward = PlannedForward(model, "min+10%", costs="flops")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(share(0, rank))  # plans under a profiler of its own
    found = train(rank, DistributedDataParallel(model, gradient_as_bucket_view=True), mean_square)
    plan = forward.planned.plan
    said = [str(one.message) for one in caught if "planned by modules, because" in str(one.message)]
    return {**found, "digest": plan.digest, "recomputed": plan.overhead, "said": said}


def sharded_by_modules(rank: int) -> dict[str, object]:
    """Train under FSDP2 with one plan by modules for all units."""
    model, x = network(), share(0, rank)
    plan = share_plan(lambda: plan_step(model, "min+10%", (x,), loss=mean_square, granularity="modules"))
    module = checkpointed(model, plan, (x,), loss=mean_square)
    in_units(model)
    found = train(rank, module)
    with Count(torch.ops.c10d._allgather_base_.default) as counter:
        module(share(0, rank).requires_grad_()).backward()
    gathers = (counter.count, count_gathers(rank, in_units(network())))
    return {**found, "digest": plan.digest, "recomputed": plan.overhead, "gathers": gathers}


def as_in_the_guide(rank: int) -> dict[str, object]:
    """Train a model with a tied weight as in the guide."""
    names = run_example("share_plan", sc=sc, model=network(tied=True), args=(share(0, rank),), loss=mean_square)
    return {**train(rank, names["module"]), "digest": names["planned"].plan.digest}


def compiled(rank: int) -> dict[str, object]:
    """Train a compiled model under DistributedDataParallel; then compile around it."""
    fast = {"solver": "greedy", "time_limit": 5.0}
    made, around = backend("60%", **fast), backend("60%", **fast)
    found = train(rank, DistributedDataParallel(torch.compile(network(), backend=made)), mean_square)
    (graph,) = made.plans
    outside = train(rank, torch.compile(DistributedDataParallel(network()), backend=around), mean_square)
    return {
        **found,
        "digest": str(graph.plan.schedule),
        "recomputed": sum(graph.plan.simulation.recomputed.values()),
        "outside": (outside["losses"], len(around.plans)),
    }


def split_at_buckets(rank: int) -> dict[str, object]:
    """Compile a model whose gradients fill several buckets, of which the first holds at least a MiB."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), *(nn.Tanh() for _ in range(4))) for _ in range(3)))
    x = torch.randn(512, 512)

    def run(**options: object) -> dict[str, object]:
        torch._dynamo.reset()
        made = backend(**options)
        module = DistributedDataParallel(torch.compile(model, backend=made), bucket_cap_mb=1)
        losses: list[float] = []
        error = error_of(lambda: losses.append(mean_square(module(x)).item()))
        plans = [graph.plan for graph in made.plans]
        return {
            "error": error,
            "losses": losses,
            "count": len(plans),
            "needs": sum(plan.baseline_peak_bytes - plan.graph.resident_bytes for plan in plans),
            "free": sum(plan.budget_bytes - plan.graph.resident_bytes for plan in plans),
        }

    whole = run(budget="100%", solver="save-all", graph_breaks="share")
    resident = (
        storage_bytes([*model.parameters(), x]) + (whole["count"] - 1) * x.nbytes
    )  # passed from one graph to the next
    return {
        "plain": mean_square(model(x)).item(),
        "whole": whole,
        "refused": run(budget="100%", solver="save-all"),
        "shared": run(budget=resident + whole["needs"] * 4 // 5, solver="greedy", time_limit=2.0, graph_breaks="share"),
    }


def wrapped(rank: int) -> dict[str, dict[str, str]]:
    """Return the errors of planning modules that are already wrapped."""

    def errors(module: nn.Module, layers: list[nn.Module]) -> dict[str, str]:
        args = (share(0, rank),)
        return {
            "auto": error_of(lambda: checkpointed(module, "60%", args, loss=mean_square)),
            "layers": error_of(lambda: checkpointed(module, "60%", args, loss=mean_square, granularity="layers")),
            "list": error_of(lambda: profile_layers(layers, args, loss=mean_square)),
        }

    replica, block = DistributedDataParallel(network()), DistributedDataParallel(network()[0])
    gathered = fully_shard(network())
    gathered.unshard()  # its parameters are not DTensors now
    found = errors(fully_shard(network()), [*in_units(network())])
    return {
        "replicated": errors(replica, [block, nn.Tanh()]),
        "sharded": {**found, "gathered": error_of(lambda: checkpointed(gathered, "60%", (share(0, rank),)))},
    }


WORK = (
    *(as_in_the_guide, replicated, sharded, sharded_and_frozen, reducing, sharing, in_place_of_forward),
    *(compiled, split_at_buckets, wrapped, by_modules, sharded_by_modules),
)


def do_all(rank: int) -> dict[str, dict[str, object]]:
    return {work.__name__: work(rank) for work in WORK}


@pytest.fixture(scope="module")
def outcome() -> Callable[[Callable[..., object]], list[dict[str, object]]]:
    """The answers of each process; the processes start once for all tests."""
    found = run_on_processes(do_all, count=PROCESSES)
    return lambda work: [answers[work.__name__] for answers in found]


FOLLOWING = (
    *(as_in_the_guide, replicated, sharded, sharded_and_frozen, in_place_of_forward, compiled),
    *(by_modules, sharded_by_modules),
)


@pytest.mark.parametrize("work", FOLLOWING)
def test_processes_follow_one_plan_and_train_as_one_process_does(outcome, work):
    one, other = outcome(work)
    assert one["digest"] == other["digest"]
    means = [(a + b) / 2 for a, b in zip(one["losses"], other["losses"], strict=True)]
    assert len(means) == STEPS
    expected = losses_of_one_process(frozen=work is sharded_and_frozen, tied=work is as_in_the_guide)
    assert means == pytest.approx(expected, rel=1e-5)


def test_replicas_stay_within_the_budget_and_send_buckets_early(outcome):
    for found in outcome(replicated):
        assert 0.9 * found["budget"] < found["peak"] <= found["budget"]
        assert found["gradients"] == STEPS * 4 * BLOCKS
        per_step = [sent - found["gradients"] + 4 * BLOCKS for sent in found["sent"]]
        last_step = [sent for sent in per_step if sent > 0]
        assert len(last_step) > 3
        assert last_step[0] <= 4 * BLOCKS / 2  # half of the gradients are not ready yet


def test_a_planned_forward_returns_gradients_in_groups_if_processes_reduce_them(outcome):
    assert all(found["segments"] > 4 for found in outcome(in_place_of_forward))


def test_what_one_process_cannot_capture_all_measure_by_modules(outcome):
    for found in outcome(by_modules):
        assert found["recomputed"] > 0
        assert len(found["said"]) == 1


def test_shards_stay_within_the_budget_including_the_memory_of_other_units(outcome):
    one, other = outcome(sharded)
    ((budget, claimed),) = one["claims"]
    assert other["claims"] == []
    for found in (one, other):
        assert found["peak"] <= claimed <= budget


@pytest.mark.parametrize("work", [sharded, sharded_by_modules])
def test_recomputing_does_not_gather_parameters_again(outcome, work):
    for found in outcome(work):
        planned_gathers, plain_gathers = found["gathers"]
        assert planned_gathers == plain_gathers > BLOCKS


def test_a_collective_is_never_recomputed(outcome):
    answers = outcome(reducing)
    for found in answers:
        (count, loss, gradients), ours = found["results"]
        assert count == 2  # one in the forward and its gradient's in the backward
        assert ours == (count, loss, gradients)
        assert found["recomputed"] > 0
        assert {"all_reduce", "wait_tensor", "all_reduce_1", "wait_tensor_1"} <= set(found["once"])
    assert all(time >= 0 for time in answers[0]["times"])
    assert len(answers[0]["times"]) > 4


def test_a_collective_in_place_is_rejected(outcome):
    for found in outcome(reducing):
        assert '"c10d.allreduce_.default" for its side effects' in found["refusal"]


def test_an_error_on_one_process_is_reported_on_all(outcome):
    one, other = outcome(sharing)
    assert one["made"].startswith("ExecutionError: process 1, which makes the plan for all, failed: BudgetTooSmall")
    assert other["made"].startswith("BudgetTooSmallError: ")
    for errors in (one, other):
        assert errors["differs"].startswith("PlanMismatchError: the processes do not have the same plan")
        assert "its digest differs" in errors["differs"]
        assert errors["sharded"].startswith('CaptureError: parameter "0.0.weight" is a DTensor')
        assert errors["solved by each"].startswith("InvalidOptionError: several processes follow one plan")


def test_sharing_a_plan_needs_a_process_group():
    with pytest.raises(ExecutionError, match="no process group"):
        share_plan(not_called)


def test_a_model_compiled_inside_ddp_follows_a_plan(outcome):
    for found in outcome(compiled):
        assert found["recomputed"] > 0
        assert found["outside"] == (found["losses"], 0)  # around DDP, TorchDynamo skips torch's own code


def test_a_graph_that_is_split_at_buckets_is_rejected_or_shares_the_budget(outcome):
    for found in outcome(split_at_buckets):
        assert "unless torch._dynamo.config.optimize_ddp is False" in found["refused"]["error"]
        whole, shared = found["whole"], found["shared"]
        assert not shared["error"]
        assert shared["losses"] == pytest.approx([found["plain"]])
        assert whole["count"] == shared["count"] > 1
        assert shared["free"] <= whole["needs"] * 4 // 5


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_wrapping_before_planning_is_rejected_with_the_right_order(outcome, kind):
    for errors in outcome(wrapped):
        for found in errors[kind].values():
            assert found.startswith("CaptureError: ")
            assert {"replicated": "plan before wrapping", "sharded": "plan before sharding"}[kind] in found
