"""The captured step computes what eager PyTorch computes, bit for bit, in every precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from scheduler.pytorch.tracing import capture
from tests.support.pytorch.planning import Comparison, check_like_autograd, recompute_most, save_everything
from tests.support.pytorch.small_models import SMALL, small_model

pytestmark = pytest.mark.long(65)  # second: it needs no kernels, which the first file compiles meanwhile

Precision = Literal["float32", "autocast", "bfloat16"]
PRECISIONS = get_args(Precision)


class InPrecision(nn.Module):
    """A model that runs in a precision, with its loss."""

    def __init__(self, model: nn.Module, precision: Precision, loss: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.model = model.bfloat16() if precision == "bfloat16" else model
        self.precision = precision
        self.loss = loss

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        if self.precision == "bfloat16":
            args, kwargs = tree_map(_in_bfloat16, (args, kwargs))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "autocast"):
            result = self.model(*args, **kwargs)
            return result if self.loss is None else self.loss(result)


def _in_bfloat16(value: object) -> object:
    return value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize("precision", ["autocast", "bfloat16"])
@pytest.mark.parametrize("name", SMALL)
def test_a_model_trains_like_autograd_in_bfloat16_in_the_predicted_memory(name: str, precision: Precision) -> None:
    case = small_model(name)
    module = InPrecision(case.module, precision, case.loss)
    check_like_autograd(module, recompute_most, case.batch(1))


MASKS: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {
    "nothing is masked": lambda ids: {"attention_mask": torch.ones_like(ids)},
    "padding": lambda ids: {"attention_mask": (torch.arange(ids.shape[1]) < 20).long().expand_as(ids).contiguous()},
    "packed sequences": lambda ids: {"position_ids": (torch.arange(ids.shape[1]) % 16).expand_as(ids).contiguous()},
}


@pytest.mark.parametrize(
    ("name", "mask", "precision"),
    [
        *(("hf-llama", mask, precision) for mask in ("nothing is masked", "padding") for precision in PRECISIONS),
        ("hf-llama", "packed sequences", "bfloat16"),
        ("hf-t5", "nothing is masked", "bfloat16"),
    ],
)
def test_a_mask_is_read_as_eager_reads_it(name: str, mask: str, precision: Precision) -> None:
    """Transformers drops a mask that hides nothing, which lets another kernel compute the attention."""
    case = small_model(name)
    _, kwargs = case.batch(1)
    module = InPrecision(case.module, precision, case.loss)
    check_like_autograd(module, recompute_most, ((), kwargs | MASKS[mask](kwargs["input_ids"])))


class Wrapped(nn.Module):
    """A function of the outputs of a linear layer, with a loss that gives each element another gradient."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int = 32) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        value = self.function(self.linear(x))
        return (value * torch.linspace(-1, 1, value.numel()).view(value.shape)).sum()


DROPOUTS = {
    "dropout": F.dropout,
    "dropout1d": lambda x, p: F.dropout1d(x.unsqueeze(0), p),
    "dropout2d": lambda x, p: F.dropout2d(x.view(1, 4, -1, 8), p),
    "alpha": lambda x, p: F.alpha_dropout(x, p, training=True),
    "feature alpha": lambda x, p: F.feature_alpha_dropout(x.view(2, -1, 8), p, training=True),
    "in place": lambda x, p: F.dropout(x * 2, p, inplace=True),
    "attention": lambda x, p: F.scaled_dot_product_attention(*(x.view(2, 2, -1, 8) for _ in range(3)), dropout_p=p),
}


@pytest.mark.parametrize("p", [0.0, 0.1, 0.15, 1 / 3, 0.5, 1.0])
@pytest.mark.parametrize("kind", DROPOUTS)
def test_dropout_draws_and_rounds_as_eager_does(kind: str, p: float) -> None:
    for precision in PRECISIONS:
        torch.manual_seed(0)
        module = InPrecision(Wrapped(lambda x: DROPOUTS[kind](x, p)), precision)
        check_like_autograd(module, recompute_most, ((torch.randn(16, 32),), {}))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_norms_of_groups_hold_what_is_predicted(precision: Precision) -> None:
    """On the CPU, their statistics and gradients have other dtypes under autocast than fake tensors show."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 8, 3), nn.GroupNorm(4, 8))
    module = InPrecision(nn.Sequential(*layers, nn.Conv2d(8, 4, 3)), precision, lambda y: y.float().square().mean())
    for schedule in (save_everything, recompute_most):
        check_like_autograd(module, schedule, ((torch.randn(2, 3, 16, 16),), {}))


def test_dropout_that_drops_nothing_is_no_operation() -> None:
    with_dropout, without = (capture(Wrapped(f), (torch.ones(4, 32),)) for f in (lambda x: F.dropout(x, 0.0), _same))
    assert len(with_dropout.graph.operations) == len(without.graph.operations)


def _same(x: Tensor) -> Tensor:
    return x


@dataclasses.dataclass(frozen=True)
class Shape:
    """Options of a recurrent network."""

    num_layers: int = 1
    dropout: float = 0.0
    bidirectional: bool = False
    batch_first: bool = False
    bias: bool = True


SHAPES = [
    Shape(),
    Shape(3, dropout=0.3),
    Shape(2, dropout=0.3, bidirectional=True, batch_first=True),
    Shape(2, batch_first=True, bias=False),
]


class Recurrent(nn.Module):
    """A recurrent network between a linear layer and a loss of its outputs and last states."""

    def __init__(self, kind: type[nn.RNNBase], shape: Shape, **options: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 32)
        self.recurrent = kind(32, 32, **dataclasses.asdict(shape), **options)

    def forward(self, x: Tensor) -> Tensor:
        outputs, state = self.recurrent(self.linear(x))
        weights = torch.linspace(-1, 1, outputs.numel()).view(outputs.shape)
        return (outputs * weights).sum() + (state[0] if isinstance(state, tuple) else state).sum()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_lstm_is_one_operation_per_layer_and_direction(shape: Shape) -> None:
    for precision in PRECISIONS:
        torch.manual_seed(0)
        module = InPrecision(Recurrent(nn.LSTM, shape), precision)
        comparison = Comparison(module, ((torch.randn(5, 3, 8),), {}))
        comparison.check(recompute_most)
        names = [operation.name for operation in comparison.captured.graph.operations]
        # Eager has no such kernel in bfloat16 on processors without its instructions, and unrolls the layer.
        has_kernel = precision == "float32" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        layers = shape.num_layers * (1 + shape.bidirectional) if has_kernel else 0
        assert sum("rnn_layer" in name for name in names) == 2 * layers


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_a_network_that_eager_unrolls_keeps_its_dropout_between_layers(kind: type[nn.RNNBase], shape: Shape) -> None:
    for precision in PRECISIONS:
        torch.manual_seed(0)
        module = InPrecision(Recurrent(kind, shape), precision)
        check_like_autograd(module, recompute_most, ((torch.randn(3, 2, 8),), {}))


def test_an_lstm_that_onednn_does_not_run_is_unrolled_as_in_eager() -> None:
    torch.manual_seed(0)
    module = Recurrent(nn.LSTM, Shape(2, dropout=0.3), proj_size=16)
    check_like_autograd(module, recompute_most, ((torch.randn(3, 2, 8),), {}))


UPSAMPLED = {
    f"{mode} {factor}": lambda x, mode=mode, factor=factor: F.interpolate(
        x.view(2, 4, -1, 8), scale_factor=factor, mode=mode
    )
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic")
    for factor in (2, 1.7)
}


@pytest.mark.parametrize(
    "function",
    [*UPSAMPLED.values(), F.hardshrink, F.softshrink, lambda x: F.multi_margin_loss(x, torch.arange(16))],
    ids=[*UPSAMPLED, "hardshrink", "softshrink", "multi_margin_loss"],
)
def test_what_eager_runs_as_one_kernel_is_one_operation(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    module = Wrapped(function)
    check_like_autograd(module, recompute_most, ((torch.randn(16, 32),), {}))


class Experts(nn.Module):
    """A mixture of experts that multiplies the rows of each expert in one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.weight = nn.Parameter(torch.randn(4, 16, 32) / 4)

    def forward(self, x: Tensor) -> Tensor:
        probability, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        ends = (expert[:, None] == torch.arange(4)).sum(0).cumsum(0).to(torch.int32)
        value = torch._grouped_mm(x[order], self.weight, offs=ends) * probability[order, None]
        return (value * torch.linspace(-1, 1, value.numel()).view(value.shape)).sum()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_mixture_of_experts_keeps_its_one_operator(precision: Precision) -> None:
    torch.manual_seed(0)
    module = InPrecision(Experts(), precision)
    comparison = Comparison(module, ((torch.randn(24, 16),), {}))
    comparison.check(recompute_most)
    assert comparison.captured.joint.route == "direct"
    assert sum("grouped_mm" in operation.name for operation in comparison.captured.graph.operations) == 2


class Repeated(nn.Module):
    """A linear layer that is used several times, in regions of autocast of which each has a cache of its own."""

    def __init__(self, regions: int) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.regions = regions

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.regions):
            with torch.autocast("cpu", torch.bfloat16):
                x = self.linear(self.linear(x).relu()).float()
        return (x * self.linear.weight.to(torch.bfloat16).sum() * torch.linspace(-1, 1, 16)).sum()


@pytest.mark.parametrize("regions", [1, 2])
@pytest.mark.parametrize("around", [False, True])
def test_autocast_casts_a_parameter_once_per_region(regions: int, around: bool) -> None:
    torch.manual_seed(0)
    module = InPrecision(Repeated(regions), "autocast") if around else Repeated(regions)
    batch = ((torch.randn(8, 16),), {})
    comparison = Comparison(module, batch)
    comparison.check(recompute_most)
    check_like_autograd(InPrecision(Repeated(regions), "float32"), recompute_most, batch)
    operations = comparison.captured.graph.operations
    names = [operation.name for operation in operations if operation.phase == "forward"]
    # Weight and bias, once per region; the weight that the model casts itself; the input of each region, the outputs.
    casts = [name for name in names if "_to_copy" in name]
    assert len(casts) == 2 * (1 if around else regions) + 1 + 2 * regions
