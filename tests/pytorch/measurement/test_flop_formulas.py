from __future__ import annotations

import csv
import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from scheduler.pytorch.capture.exporting import export_joint
from scheduler.pytorch.measurement.flop_formulas import count_flops, has_formula
from scheduler.pytorch.measurement.memory import FlopCounter
from tests.support.paths import BENCHMARKS
from tests.support.pytorch.operator_calls import GROUPS, Together

aten = torch.ops.aten


def flops(function: Callable[..., object], *args: object, **kwargs: object) -> int:
    """Return the FLOPs that are counted while a function runs, without its autograd."""
    with torch.no_grad(), FlopCounter() as counter:
        function(*args, **kwargs)
    return counter.flops


def ones(*shape: int) -> Tensor:
    return torch.eye(shape[-1]).expand(*shape).clone() if shape[-2:-1] == shape[-1:] else torch.ones(shape)


BATCH, HEADS, LENGTH, OTHER, WIDTH = 2, 4, 5, 7, 8


def test_attention_on_the_cpu_counts_its_two_products_and_its_backward_five():
    query, key = ones(BATCH, HEADS, LENGTH, WIDTH), ones(BATCH, HEADS, OTHER, WIDTH)
    product = 2 * BATCH * HEADS * LENGTH * OTHER * WIDTH
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert flops(forward, query, key, key) == 2 * product
    output, logsumexp = forward(query, key, key)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert flops(backward, output, query, key, key, output, logsumexp, 0.0, False) == 5 * product


def test_attention_with_shared_heads_of_keys_counts_every_head_of_queries():
    meta = [torch.empty(BATCH, heads, LENGTH, WIDTH, device="meta") for heads in (HEADS, 2, 2)]
    counted = count_flops(aten._scaled_dot_product_flash_attention_for_cpu.default, meta, {}, meta[:1])
    assert counted == 4 * BATCH * HEADS * LENGTH * LENGTH * WIDTH


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_backward_of_a_convolution_counts_its_forward_for_each_gradient(groups: int, transposed: bool) -> None:
    # By hand: 6 channels in and 12 out, 3 x 3 taps; 2 x 4 x 4 outputs of the plain one, 2 x 8 x 8 inputs of the other.
    convolve = F.conv_transpose2d if transposed else F.conv2d
    value = torch.ones(2, 6, 8, 8, requires_grad=True)
    weight = torch.ones(6, 12 // groups, 3, 3) if transposed else torch.ones(12, 6 // groups, 3, 3)
    positions = 2 * 8 * 8 if transposed else 2 * 4 * 4
    forward = 2 * positions * 12 * (6 // groups) * 9
    stride = 1 if transposed else 2
    for trained, gradients in ((False, 1), (True, 2)):
        weight.requires_grad_(trained)
        with FlopCounter() as counter:
            convolve(value, weight, stride=stride, padding=1, groups=groups).sum().backward()
        assert counter.flops == (1 + gradients) * forward


def test_ungrouped_convolutions_and_products_count_as_in_torch():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3), nn.Flatten(1), nn.LazyLinear(5)
    )
    value = torch.ones(2, 3, 9, 9)
    model(value)
    counters = FlopCounterMode(display=False), FlopCounter()
    for counter in counters:
        with counter:
            model(value).sum().backward()
    assert counters[0].get_total_flops() == counters[1].flops > 0


def test_grouped_products_count_each_row_once():
    ends = torch.tensor([2, 6], dtype=torch.int32)
    assert flops(torch._grouped_mm, torch.ones(6, 16).bfloat16(), torch.ones(2, 16, 24).bfloat16(), offs=ends) == (
        2 * 6 * 16 * 24
    )
    shapes = [torch.empty(shape, device="meta") for shape in ((8, 6), (6, 24), (2, 8, 24))]
    assert count_flops(aten._grouped_mm.default, shapes[:2], {}, shapes[2]) == 2 * 8 * 6 * 24


def test_a_recurrent_layer_counts_the_products_of_all_steps_and_its_backward_twice_as_many():
    layer = nn.LSTM(3, 4)
    with FlopCounter() as counter:
        output, _ = layer(torch.ones(5, 2, 3))
        forward = counter.flops
        output.sum().backward()
    assert forward == 2 * 5 * 2 * 16 * (3 + 4)
    assert counter.flops == 3 * forward


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        # A product of n x n matrices is 2 n^3; elimination of column k updates (n - k)^2 entries.
        (torch.linalg.lu_factor, (ones(3, 6, 6),), 3 * 2 * 6**3 / 3),
        (torch.linalg.inv, (ones(6, 6),), 2 * 6**3),
        (torch.linalg.cholesky, (ones(6, 6),), 6**3 / 3),
        (torch.linalg.qr, (ones(9, 6),), 2 * (2 * 9 * 6**2 - 2 / 3 * 6**3)),
        (torch.linalg.solve, (ones(6, 6), ones(6, 2)), 2 * 6**3 / 3 + 2 * 6**2 * 2),
        (torch.cholesky_solve, (ones(6, 2), ones(6, 6)), 2 * 6**2 * 2),
        (torch.linalg.eigh, (ones(6, 6),), 9 * 6**3),
        (torch.linalg.svd, (ones(9, 6), False), 14 * 9 * 6**2 + 8 * 6**3),
        (torch.fft.fft, (ones(4, 32).cfloat(),), 4 * 5 * 32 * 5),
        (torch.fft.rfft, (ones(4, 32),), 4 * 5 * 32 * 5 / 2),
        (torch.cdist, (ones(4, 3), ones(5, 3), 1.0), 3 * 4 * 5 * 3),
        (F.bilinear, (ones(7, 2), ones(7, 3), ones(5, 2, 3)), 3 * 7 * 5 * 2 * 3),
        (torch.dot, (torch.ones(6), torch.ones(6)), 2 * 6),
        (torch.mv, (ones(4, 6), torch.ones(6)), 2 * 4 * 6),
        (torch.addbmm, (ones(4, 5), ones(3, 4, 6), ones(3, 6, 5)), 2 * 3 * 4 * 5 * 6),
        (torch._addmm_activation, (torch.ones(5), ones(4, 6), ones(6, 5)), 2 * 4 * 5 * 6),
    ],
)
def test_flops_are_those_of_the_textbook(
    function: Callable[..., object], args: tuple[object, ...], expected: float
) -> None:
    assert flops(function, *args) == pytest.approx(expected, abs=1)


def test_the_registry_of_torch_is_left_as_it_is():
    assert not any(formula.__module__.startswith("scheduler") for formula in flop_registry.values())


BYTE_BOUND = {
    "normalizations and softmax do some arithmetic for each element that they read": (
        "_safe_softmax _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data native_layer_norm"
        " native_layer_norm_backward native_batch_norm_backward _native_batch_norm_legit"
    ),
    "each random number is used once": "native_dropout bernoulli rrelu_with_noise_functional native_dropout_backward",
    "each element of the result comes from as many as a window has": "max_pool2d_with_indices",
    "each element of the result comes from one or two elements": (
        "_prelu_kernel _prelu_kernel_backward abs add addr div glu glu_backward linalg_cross mul neg pow rsqrt"
        " rrelu_with_noise_backward sgn sub where eq"
    ),
    "each element is read once": "mean sum trace",
    "elements are moved or filled in": (
        "_unsafe_view arange cat clone diag_embed diagonal diagonal_scatter empty_like expand eye fill getitem"
        " index_fill lu_unpack new_empty new_zeros permute scalar_tensor select select_backward slice slice_backward"
        " slice_scatter squeeze t transpose tril triu unsqueeze view zeros zeros_like"
    ),
}
"""Operators without FLOPs, by the reason why they count by the bytes that they move."""


def _by_bytes() -> set[str]:
    return {name for names in BYTE_BOUND.values() for name in names.split()}


@pytest.mark.parametrize("group", ["attention and norms", "products", "linalg"])
def test_every_operator_of_a_function_that_multiplies_has_a_formula_or_is_limited_by_bytes(group: str) -> None:
    graph = export_joint(Together([*GROUPS[group]()]), (), {}, None).module.graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    without = {node.target.__name__.partition(".")[0] for node in calls if not has_formula(node.target)}
    assert without - _by_bytes() == set()


def test_no_call_of_over_one_per_cent_of_a_step_of_the_catalog_counts_as_nothing() -> None:
    with (BENCHMARKS / "flop_coverage.csv").open() as file:
        rows = list(csv.DictReader(file))
    operators = {row["operator"]: operator.attrgetter(row["operator"])(torch.ops) for row in rows}
    assert len(operators) > 5
    for name, found in operators.items():
        assert has_formula(found) or name.split(".")[1] in _by_bytes(), name
