"""Steps traced for a device that is not there: its attention, estimated times and workspaces, stated assumptions."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import scheduler as sc
from scheduler.graph import Graph
from scheduler.plan import plan_schema
from scheduler.pytorch import checkpointed, trace
from scheduler.pytorch.capture.exporting.device_kernels import attention_of

BATCH, HEADS, LENGTH, SIZE = 2, 4, 64, 16
OWN = sc.Device(
    name="own",
    memory_bytes=2**30,
    flops_per_second={"float32": 1e9, "bfloat16": 4e9},
    bytes_per_second=1e6,
    compute_efficiency=0.5,
    memory_efficiency=0.25,
    launch_seconds=1.0,
)


class Attention(nn.Module):
    def __init__(self, *, size: int = SIZE, shared: int = 1, p: float = 0.0, mask: Tensor | None = None) -> None:
        super().__init__()
        self.sizes = [HEADS * size, HEADS // shared * size, HEADS // shared * size]
        self.project = nn.Linear(8, sum(self.sizes), bias=False)
        self.options = {"is_causal": mask is None, "attn_mask": mask, "dropout_p": p, "enable_gqa": shared > 1}
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(x).split(self.sizes, -1)
        query, key, value = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)
        return F.scaled_dot_product_attention(query, key, value, **self.options).float().sum()


def traced(device: str, dtype: torch.dtype = torch.bfloat16, **options: object) -> Graph:
    args = (torch.ones(BATCH, LENGTH, 8, dtype=dtype),)
    return trace(Attention(**options).to(dtype), args, costs=sc.device(device))  # type: ignore[arg-type]


class Called(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


MASK = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("device", "dtype", "options", "kernel"),
    [
        ("h100-80gb", torch.bfloat16, {}, "flash"),
        ("h100-80gb", torch.bfloat16, {"p": 0.25}, "flash"),
        ("h100-80gb", torch.bfloat16, {"shared": 2}, "flash"),
        ("mi300x", torch.float16, {}, "flash"),
        ("h100-80gb", torch.float32, {}, "efficient"),  # flash has half precision only
        ("a100-80gb", torch.bfloat16, {"mask": MASK}, "efficient"),  # flash takes no mask
        ("t4", torch.float16, {}, "efficient"),  # flash needs compute capability 8.0
        ("rtx-4090", torch.bfloat16, {"size": 200}, "efficient"),  # flash cannot train such heads on 8.9
        ("rtx-4090", torch.bfloat16, {"size": 256}, "flash"),
        ("a100-80gb", torch.bfloat16, {"size": 200}, "flash"),
        ("a100-80gb", torch.bfloat16, {"size": 264}, "efficient"),  # flash has heads of up to 256
        ("v100-32gb", torch.bfloat16, {}, "plain"),  # which has no units for bfloat16
        ("a100-80gb", torch.float32, {"shared": 2}, "plain"),  # only flash shares heads
        ("a100-80gb", torch.float64, {}, "plain"),
    ],
)
def test_attention_is_the_kernel_that_torch_chooses_on_the_device(
    device: str, dtype: torch.dtype, options: dict[str, object], kernel: str
) -> None:
    size, shared, mask = options.get("size", SIZE), options.get("shared", 1), options.get("mask")
    query = torch.empty(BATCH, HEADS, LENGTH, size, dtype=dtype, device="meta", requires_grad=True)
    key = torch.empty(BATCH, HEADS // shared, LENGTH, size, dtype=dtype, device="meta")
    given = None if mask is None else mask.to("meta")
    with Called() as called:
        attention_of(
            sc.device(device), query, key, key, given, options.get("p", 0.0), mask is None, enable_gqa=shared > 1
        )
    kernels = {"flash": "flash_attention.default", "efficient": "efficient_attention.default", "plain": "softmax"}
    names = " ".join(called.names)
    assert [name for name, text in kernels.items() if text in names] == [kernel]


def test_the_kernel_of_the_device_is_traced_and_that_of_the_cpu_afterwards() -> None:
    def signatures(graph: Graph) -> str:
        return " ".join(operation.signature for operation in graph.operations)

    assert "_scaled_dot_product_flash_attention." in signatures(traced("h100-80gb"))
    assert "_scaled_dot_product_efficient_attention." in signatures(traced("h100-80gb", torch.float32))
    own = trace(Attention(), (torch.ones(BATCH, LENGTH, 8),), costs="flops")
    assert "_scaled_dot_product_flash_attention_for_cpu." in signatures(own)


def test_flash_attention_saves_one_number_per_row_of_scores_and_a_random_state() -> None:
    graph = traced("h100-80gb")
    (backward,) = (o for o in graph.operations if "flash_attention_backward" in o.signature)
    read = {name: graph.tensor(name).size_bytes for name in backward.inputs}
    saved = sorted(size for name, size in read.items() if "flash" in name)
    # The output, log-sum-exp in float32, and two random numbers of which one is a seed and an offset.
    assert saved == [8, 16, 4 * BATCH * HEADS * LENGTH, 2 * BATCH * HEADS * LENGTH * SIZE]


def test_the_workspace_of_its_backward_is_that_of_its_source() -> None:
    # mha_bwd: dq_accum and softmax_d in float32, for a length rounded to 128 and heads to 32 numbers.
    rounded = BATCH * HEADS * 128 * (32 + 1) * 4
    assert max(o.workspace_bytes for o in traced("h100-80gb").operations) == rounded
    # With shared heads, dk_expanded and dv_expanded in the dtype of the keys as well.
    expanded = 2 * BATCH * LENGTH * HEADS * SIZE * 2
    assert max(o.workspace_bytes for o in traced("h100-80gb", shared=2).operations) == rounded + expanded


def test_heads_are_padded_to_a_multiple_of_eight_numbers() -> None:
    graph = traced("h100-80gb", size=12)
    (forward,) = (o for o in graph.operations if o.phase == "forward" and "flash_attention." in o.signature)
    assert graph.tensor(forward.outputs[0]).size_bytes == 2 * BATCH * HEADS * LENGTH * 16


def test_a_cpu_keeps_the_operators_of_the_cpu() -> None:
    device = sc.Device(
        name="cpu", platform="cpu", memory_bytes=1, flops_per_second={"float32": 1.0}, bytes_per_second=1.0
    )
    args = (torch.ones(BATCH, LENGTH, 8),)
    one, other = (trace(Attention(), args, costs=costs) for costs in (device, "flops"))
    assert one.structure_digest == other.structure_digest


class Normalized(nn.Sequential):
    """Layers whose operators autocast treats in different ways on a GPU and on the CPU."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.LayerNorm(8), nn.Softmax(-1), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return super().forward(x)


def test_autocast_is_that_of_the_gpu() -> None:
    args = (torch.ones(4, 8),)
    graph = trace(Normalized(), args, loss=lambda y: y.float().sum(), costs=sc.device("h100-80gb"))
    forward = {o.name: o.signature for o in graph.operations if o.phase == "forward"}
    assert forward["0/addmm"].startswith("aten.addmm.default(bfloat16[8|1], bfloat16[4x8|8,1]")
    assert forward["1/native_layer_norm"].startswith("aten.native_layer_norm.default(float32[4x8|8,1]")
    assert forward["2/_softmax"].startswith("aten._softmax.default(float32[4x8|8,1]")
    assert forward["3/addmm_1"].startswith("aten.addmm.default(bfloat16[8|1], bfloat16[4x8|8,1]")


def test_without_attention_and_autocast_a_gpu_has_the_operators_of_the_cpu() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Softmax(-1), nn.Linear(8, 8)).to(torch.bfloat16)
    args = (torch.ones(4, 8, dtype=torch.bfloat16),)

    def loss(y: Tensor) -> Tensor:
        return (
            F.cross_entropy(y, torch.zeros(4, dtype=torch.long)) + F.huber_loss(y, torch.zeros_like(y)) + y.pow(2).sum()
        )

    one, other = (trace(model, args, loss=loss, costs=costs) for costs in (sc.device("h100-80gb"), "flops"))
    assert [o.signature for o in one.operations] == [o.signature for o in other.operations]
    # As in eager PyTorch, no operation writes over its input, so that all may be repeated.
    assert sum(o.repeatable for o in one.operations) > sum(o.repeatable for o in other.operations)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 32)
        self.linear = nn.Linear(32, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear(self.embedding(tokens)).relu().sum()


def test_times_are_those_of_a_roofline_by_hand() -> None:
    graph = trace(Parts(), (torch.zeros(100, dtype=torch.long),), costs=OWN)
    times = {o.name.rpartition("/")[2]: o.time for o in graph.operations if o.phase == "forward"}
    # 100 rows of 32 numbers are looked up and written, 100 indices read; at 0.25 x 1e6 bytes per second.
    assert times["embedding"] == pytest.approx(1 + (2 * 100 * 32 * 4 + 100 * 8) / 0.25e6)
    assert times["relu"] == pytest.approx(1 + 2 * 100 * 64 * 4 / 0.25e6)
    # 2 x 100 x 32 x 64 FLOPs at 0.5 x 1e9 per second take less than moving the three matrices.
    assert times["mm"] == pytest.approx(1 + 4 * (100 * 32 + 32 * 64 + 100 * 64) / 0.25e6)
    assert times["t"] == 0.0
    fast = sc.Device(name="fast", memory_bytes=1, flops_per_second={"float32": 1e3}, bytes_per_second=1e12)
    graph = trace(Parts(), (torch.zeros(100, dtype=torch.long),), costs=fast)
    (product,) = (o for o in graph.operations if o.name == "linear/mm")
    assert product.time == pytest.approx(5e-6 + 2 * 100 * 32 * 64 / (0.7 * 1e3))


def test_causal_attention_takes_half_of_the_time_of_full_attention() -> None:
    device = sc.Device(
        name="x", memory_bytes=1, flops_per_second={"float32": 1.0}, bytes_per_second=1e15, launch_seconds=0
    )
    args = (torch.ones(BATCH, LENGTH, 8, dtype=torch.bfloat16),)
    graph = trace(Attention().to(torch.bfloat16), args, costs=device)
    forward, backward = (o.time * 0.7 for o in graph.operations if "flash_attention" in o.signature)
    # Two products of LENGTH x LENGTH x SIZE for each head in the forward, and five in the backward.
    product = 2 * BATCH * HEADS * LENGTH * LENGTH * SIZE
    assert (forward, backward) == (pytest.approx(2 * product / 2), pytest.approx(5 * product / 2))


def test_convolutions_in_float32_run_in_tf32_and_other_products_do_not_by_default() -> None:
    device = sc.Device(
        name="x",
        memory_bytes=1,
        flops_per_second={"float32": 1e3, "tf32": 1e4},
        bytes_per_second=1e15,
        launch_seconds=0,
    )
    model = nn.Sequential(nn.Conv1d(2, 4, 1, bias=False), nn.Linear(10, 3, bias=False))
    graph = trace(model, (torch.ones(5, 2, 10),), loss=torch.sum, costs=device)
    times = {o.name.rpartition("/")[2]: o.time for o in graph.operations if o.phase == "forward"}
    assert times["convolution"] == pytest.approx(2 * 5 * 10 * 2 * 4 / 0.7e4)
    assert times["mm"] == pytest.approx(2 * 5 * 4 * 10 * 3 / 0.7e3)


def test_estimates_are_named_so_in_the_graph_and_its_plan(tmp_path: Path) -> None:
    graph = traced("h100-80gb")
    assert graph.time_unit == "s, estimated for H100 SXM 80 GB"
    times, operators = graph.assumptions
    assert times.startswith("times are estimated for H100 SXM 80 GB: 70% of its peak FLOP/s, 80% of its bandwidth")
    assert operators.startswith("operators were traced on the CPU, and attention as on the device: flash attention")
    plan = sc.make_plan(graph, "100%", time_limit=5.0)
    assert "s, estimated for H100 SXM 80 GB" in plan.summary()
    assert f"assumes       {operators}" in plan.summary()
    plan.save(tmp_path / "plan.json")
    jsonschema.validate(json.loads((tmp_path / "plan.json").read_text()), plan_schema())
    assert sc.Plan.load(tmp_path / "plan.json").graph.assumptions == graph.assumptions


def test_a_plan_for_a_device_is_refused_elsewhere_with_what_it_assumes() -> None:
    plan = sc.make_plan(traced("h100-80gb"), "100%", time_limit=5.0)
    args = (torch.ones(BATCH, LENGTH, 8, dtype=torch.bfloat16),)
    with pytest.raises(
        sc.PlanMismatchError, match=r"flash_attention_for_cpu.*rests on assumptions: operators were traced"
    ):
        checkpointed(Attention().to(torch.bfloat16), plan, args)


def test_operators_that_differ_between_devices_are_named() -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 1), nn.Dropout(0.3), nn.LSTM(10, 8, batch_first=True))
    graph = trace(model, (torch.ones(5, 2, 10),), loss=lambda y: y[0].sum(), costs=sc.device("h100-80gb"))
    text = " ".join(graph.assumptions)
    for part in ("convolutions need no workspace", "recurrent layers save what oneDNN saves"):
        assert part in text


def test_a_device_of_unknown_speed_is_refused() -> None:
    with pytest.raises(sc.InvalidOptionError, match=r'speeds of device "this machine" are unknown.*costs="measured"'):
        trace(nn.Linear(2, 2), (torch.ones(1, 2),), loss=torch.sum, costs=sc.device("this machine"))
