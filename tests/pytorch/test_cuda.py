"""The promises that hold on the CPU, on a GPU (`pytest -m gpu`), measured by the peak of its allocator."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from scheduler.pytorch import checkpointed, max_batch, trace
from scheduler.pytorch.costs.timing import interleaved_times
from scheduler.pytorch.execute.runner import build
from scheduler.pytorch.measurement.allocator import allocator_peak, peak_bytes
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors, storage_bytes, training_step
from scheduler.pytorch.models.catalog import ModelCase, make_model
from scheduler.pytorch.tracing import capture
from scheduler.simulator import simulate
from tests.benchmarks import gpu
from tests.support.pytorch.planning import check_equal, recompute_most, train

SIZES: dict[str, dict[str, object]] = {
    "gpt2": {"layers": 8, "width": 512, "heads": 8, "length": 512, "batch_size": 16, "dropout": 0.1},
    "resnet50": {"size": 160, "batch_size": 32},
}
ROUNDING = "64MiB"
"""Reserved for the rounding of the caching allocator, which rounds blocks up by 512 bytes to 1 MiB."""

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
models = pytest.mark.parametrize("name", SIZES)


def on_device(name: str) -> tuple[nn.Module, tuple[object, ...]]:
    """Return a model that returns its loss, and a batch."""
    case = make_model(name, **SIZES[name])
    return case.module.cuda(), moved(case, 0)


def moved(case: ModelCase, seed: int) -> tuple[object, ...]:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.cuda(), case.batch(seed)[0])


def batches(name: str, count: int) -> list[tuple[tuple[object, ...], dict[str, object]]]:
    case = make_model(name, **SIZES[name])
    return [(moved(case, seed), {}) for seed in range(count)]


@pytest.mark.gpu
@on_gpu
@models
def test_the_allocators_peak_is_as_predicted_and_within_the_budget(name: str) -> None:
    module, args = on_device(name)
    planned = checkpointed(module, "60%", args, reserve=ROUNDING)
    step = training_step(planned, args)
    for _ in range(2):  # libraries allocate their permanent workspaces in the first runs
        step()
    planned.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    planned(*args).backward()
    torch.cuda.synchronize()
    resident = storage_bytes(resident_tensors(planned, args))
    peak = resident + torch.cuda.max_memory_allocated() - before
    plan = planned.plan
    predicted = plan.peak_bytes - plan.graph.tensor("reserve").size_bytes
    assert peak == pytest.approx(predicted, rel=0.03)
    assert peak <= plan.budget_bytes
    assert resident + allocator_peak(step) == pytest.approx(
        peak, rel=0.001
    )  # also if the old gradients are freed first


@pytest.mark.gpu
@on_gpu
@models
def test_live_bytes_are_exactly_as_planned(name: str) -> None:
    module, args = on_device(name)
    captured = capture(module, args)
    schedule = recompute_most(captured.graph)
    step = training_step(build(module, captured, schedule, args), args)
    step()
    with StorageTracker(resident_tensors(module, args)) as tracker:
        step()
    assert captured.graph.resident_bytes + tracker.peak_bytes == simulate(captured.graph, schedule).peak_bytes


@pytest.mark.gpu
@on_gpu
@models
@pytest.mark.parametrize("granularity", ["operations", "layers"])
def test_training_with_dropout_and_batch_norm_is_the_same_as_without_a_plan(name: str, granularity: str) -> None:
    module, args = on_device(name)
    if granularity == "layers":
        case = ModelCase(module, args).layered()
        module, args = case.module, case.args
    plain = copy.deepcopy(module)
    planned = checkpointed(module, "60%", args, granularity=granularity, costs="flops")
    given = [((args,), {}) if granularity == "layers" else (args, {}) for args, _ in batches(name, 3)]
    outcomes, states = [], []
    for target in (planned, plain):
        torch.cuda.manual_seed(7)
        outcomes.append(train(target, given))
        states.append(torch.cuda.get_rng_state())
    assert sum(planned.plan.simulation.recomputed.values()) > 0
    check_equal(*outcomes, tolerance=1e-3)  # the order of atomic additions varies
    assert torch.equal(*states)


@pytest.mark.gpu
@on_gpu
def test_a_step_on_a_side_stream_is_the_same_as_on_the_default_stream() -> None:
    module, args = on_device("gpt2")
    planned = checkpointed(module, "60%", args, costs="flops")
    gradients = []
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        planned.zero_grad(set_to_none=True)
        torch.cuda.manual_seed(7)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                planned(*args).backward()
        torch.cuda.current_stream().wait_stream(stream)
        gradients.append([parameter.grad.clone() for parameter in module.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@on_gpu
def test_times_are_of_the_device_and_not_of_the_launch() -> None:
    small, large = (torch.randn(size, size, device="cuda") for size in (2048, 8192))
    first, second = interleaved_times([lambda: small @ small, lambda: large @ large], 1.0)
    assert 16 < second.seconds / first.seconds < 256  # 64 times the work at the same launch time


@pytest.mark.gpu
@on_gpu
def test_measured_times_sum_to_that_of_the_forward_and_backward() -> None:
    module, args = on_device("gpt2")
    graph = trace(module, args)
    step = training_step(module, args)
    step()
    (whole,) = interleaved_times([step], 1.0)
    assert 0.5 * whole.seconds < sum(operation.time for operation in graph.operations) < 1.5 * whole.seconds


@pytest.mark.gpu
@on_gpu
def test_a_planned_step_replays_as_a_cuda_graph() -> None:
    module, args = on_device("gpt2")
    torch.cuda.manual_seed(7)
    module(*args).backward()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad(set_to_none=True)
    gc.collect()  # nodes of autograd that are alive keep the stream on which they were made
    planned = checkpointed(module, "60%", args, costs="flops")
    assert sum(planned.plan.simulation.recomputed.values()) > 0
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            planned.zero_grad(set_to_none=True)
            planned(*args).backward()
    torch.cuda.current_stream().wait_stream(side)
    planned.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planned(*args).backward()
    torch.cuda.manual_seed(7)
    graph.replay()
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-4)


class UserKernel(nn.Module):
    """Blocks with a kernel in Triton inside an autograd function, as users write them."""

    def __init__(self) -> None:
        super().__init__()
        from tests.support.pytorch.triton_kernels import Square

        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))
        self.square = Square

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.square.apply(block(x)).tanh()
        return x.mean()


@pytest.mark.gpu
@on_gpu
def test_a_model_with_a_users_kernel_trains_by_modules() -> None:
    torch.manual_seed(0)
    module, x = UserKernel().cuda(), torch.randn(16, 512, 256, device="cuda")
    module(x).backward()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad(set_to_none=True)
    planned = checkpointed(module, "min", (x,), time_limit=5.0)
    planned(x).backward()
    assert planned.plan.granularity == "modules"
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)


@pytest.fixture
def expandable_segments() -> Iterator[None]:
    """Let the allocator reserve little more than is allocated; with segments of fixed sizes, it may be twice that."""
    gpu.set_expandable_segments(True)
    yield
    gpu.set_expandable_segments(False)


@contextlib.contextmanager
def memory_limit(limit: int) -> Iterator[None]:
    """Let PyTorch reserve at most so many bytes of the device."""
    _, total = torch.cuda.mem_get_info()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def runs_out_of_memory(step: Callable[[], object]) -> bool:
    try:
        step()
    except torch.cuda.OutOfMemoryError:
        return True
    return False


@pytest.mark.gpu
@on_gpu
@pytest.mark.usefixtures("expandable_segments")
def test_a_step_of_130_percent_of_the_memory_trains_by_a_plan() -> None:
    module, args = on_device("gpt2")
    step = training_step(module, args)
    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    limit = int(torch.cuda.max_memory_allocated() / 1.3)
    module.zero_grad(set_to_none=True)
    with memory_limit(limit):
        assert runs_out_of_memory(step)
        module.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        kept = torch.cuda.memory_allocated() - storage_bytes(resident_tensors(module, args))
        planned = checkpointed(module, limit - kept, args, reserve=ROUNDING, time_limit=5.0)
        planned_step = training_step(planned, args)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            planned_step()
        assert torch.cuda.max_memory_allocated() - kept <= planned.plan.budget_bytes


@pytest.mark.gpu
@on_gpu
@pytest.mark.usefixtures("expandable_segments")
def test_the_largest_batch_trains_within_the_memory_and_one_more_does_not() -> None:
    limit, sizes = 2 * 2**30, {**SIZES["gpt2"], "layers": 2}

    def make_batch(size: int) -> tuple[tuple[object, ...], dict[str, object]]:
        return moved(make_model("gpt2", **{**sizes, "batch_size": size}), 0), {}

    module = make_model("gpt2", **sizes).module.cuda()
    found = max_batch(lambda: module, make_batch, limit - 2**28, costs="flops", time_limit=4.0)
    assert found.next_plan is not None
    assert found.next_plan.peak_bytes > limit - 2**28
    args, _ = make_batch(found.batch_size)
    step = training_step(checkpointed(module, found.plan, args), args)
    with memory_limit(limit):
        for _ in range(2):
            step()


def test_the_benchmark_needs_a_gpu() -> None:
    with mock.patch("torch.cuda.is_available", return_value=False), pytest.raises(SystemExit, match="no CUDA device"):
        gpu.main([])


def test_the_memory_of_a_step_on_a_gpu_is_that_of_the_gpu() -> None:
    # Time, address, bytes, whether on the CPU; frees of uncounted addresses are of older allocations.
    both = [(0, 1, 700, True), (1, 2, 50, False), (2, 3, 30, False), (3, 9, -500, False), (4, 2, -50, False)]
    assert peak_bytes([*both, (5, 4, 40, False)]) == 80
    assert peak_bytes([allocation for allocation in both if allocation[3]]) == 700


class FakeEvent:
    """An event of a device that takes ten milliseconds per run, independently of the CPU."""

    runs = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.runs

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        """Return milliseconds, as a real event does."""
        return 10.0 * (end.at - self.at)


def test_times_by_events_are_seconds_of_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        FakeEvent.runs += 1

    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("torch.cuda.Event", FakeEvent)
    functions: list[Callable[[], None]] = [run, lambda: (run(), run())]
    assert [timing.seconds for timing in interleaved_times(functions, 0.0)] == pytest.approx([0.01, 0.02])


_ALLOCATIONS = """
import random, torch
from scheduler.planning.caching_allocator import CachingAllocator
torch.empty(0, device="cuda")
generator, simulated, live = random.Random(0), CachingAllocator(expandable_segments={expandable}), []
for _ in range(500):
    if live and generator.random() < 0.5:
        tensor, block = live.pop(generator.randrange(len(live)))
        del tensor
        simulated.free(block)
    else:
        size = int(2 ** generator.uniform(0, 27))
        live.append((torch.empty(size, dtype=torch.uint8, device="cuda"), simulated.malloc(size)))
    found = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    print(found[0] - simulated.allocated_bytes, found[1] - simulated.reserved_bytes)
"""


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("expandable", [False, True])
def test_the_simulated_allocator_is_that_of_the_device(expandable: bool) -> None:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
    code = _ALLOCATIONS.format(expandable=expandable)
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert set(run.stdout.splitlines()) == {"0 0"}
