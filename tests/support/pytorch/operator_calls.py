"""Functions of torch in small sizes, in groups that are captured together."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

Shape = tuple[int, ...]
Trial = tuple[Callable[..., object], tuple[Shape, ...]]
"""A function, and the shapes of the trained tensors that it takes."""


def _classes(*shape: int) -> Tensor:
    return (torch.arange(6 * math.prod(shape)) % 5).reshape(6, *shape)


def _target(x: Tensor) -> Tensor:
    return torch.linspace(0.1, 0.9, 30, dtype=x.dtype).reshape(6, 5)


def _signs(x: Tensor) -> Tensor:
    return (torch.arange(6) % 2 * 2 - 1).to(x.dtype)


def _words() -> Tensor:
    return (torch.arange(6) * 7 % 10).reshape(2, 3)


def _columns() -> Tensor:
    return torch.arange(3).view(3, 1).expand(3, 5)


def _diagonal() -> Tensor:
    return 5 * torch.eye(4)


class Together(nn.Module):
    """Runs functions on parameters of its own and returns the sum of what they return."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.functions = [function for function, _ in trials]
        self.shapes = [shapes for _, shapes in trials]
        numbers = (torch.rand(shape, generator=generator) + 0.1 for _, shapes in trials for shape in shapes)
        self.trained = nn.ParameterList(numbers)

    def forward(self) -> Tensor:
        trained = iter(self.trained)
        total = torch.zeros(())
        for function, shapes in zip(self.functions, self.shapes, strict=True):
            returned = function(*(next(trained) * 1.0 for _ in shapes))
            tensors = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor) and leaf.requires_grad]
            total = total + sum(tensor.abs().sum() for tensor in tensors)
        return total


def _losses(reduction: str) -> Iterator[Trial]:
    options = {"reduction": reduction}
    for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss):
        yield functools.partial(loss, **options), ((6, 5), (6, 5))
        yield lambda x, loss=loss: loss(x, _target(x), **options), ((6, 5),)
    for loss in (F.kl_div, F.binary_cross_entropy_with_logits, F.poisson_nll_loss, F.cross_entropy):
        yield lambda x, loss=loss: loss(x, _target(x), **options), ((6, 5),)
    yield lambda x: F.binary_cross_entropy(x.sigmoid(), _target(x), **options), ((6, 5),)
    yield lambda x: F.binary_cross_entropy(x.sigmoid(), _target(x), _target(x)[0], **options), ((6, 5),)
    yield lambda x: F.soft_margin_loss(x, _target(x).sign(), **options), ((6, 5),)
    yield lambda x: F.multilabel_soft_margin_loss(x, _target(x).round(), **options), ((6, 5),)
    for smoothing in (0.0, 0.1):
        yield lambda x, s=smoothing: F.cross_entropy(x, _classes(), label_smoothing=s, **options), ((6, 5),)
        yield lambda x, s=smoothing: F.cross_entropy(x, _classes(4, 4), label_smoothing=s, **options), ((6, 5, 4, 4),)
    yield lambda a, b: F.cosine_embedding_loss(a, b, _signs(a), **options), ((6, 5), (6, 5))
    yield lambda a, b: F.margin_ranking_loss(a, b, _signs(a), **options), ((6,), (6,))
    yield lambda a: F.hinge_embedding_loss(a, _signs(a), **options), ((6,),)
    yield functools.partial(F.triplet_margin_loss, **options), ((6, 5), (6, 5), (6, 5))


def _margin_losses() -> Iterator[Trial]:
    """Losses without a kernel for bfloat16."""
    for reduction in ("mean", "sum", "none"):
        yield lambda x, r=reduction: F.multi_margin_loss(x, _classes(), reduction=r), ((6, 5),)
        yield lambda x, r=reduction: F.multilabel_margin_loss(x, _words() % 3, reduction=r), ((2, 3),)


def _norms() -> Iterator[Trial]:
    for p in (0.5, 1, 2, 3, float("inf")):
        yield lambda x, p=p: torch.linalg.vector_norm(x, p), ((6, 5),)
        yield lambda x, p=p: torch.linalg.vector_norm(x, p, dim=1, keepdim=True), ((6, 5),)
        yield lambda x, p=p: torch.norm(x, p, dim=0), ((6, 5),)
        yield lambda a, b, p=p: torch.cdist(a, b, p), ((6, 5), (7, 5))
        yield lambda a, p=p: F.pdist(a, p), ((6, 5),)
        yield lambda a, b, p=p: F.pairwise_distance(a, b, p), ((6, 5), (6, 5))
    yield lambda a, b: torch.cdist(a, b, compute_mode="use_mm_for_euclid_dist"), ((6, 5), (7, 5))
    for order in ("fro", "nuc", 2, 1):
        yield lambda x, order=order: torch.linalg.matrix_norm(x, order), ((2, 5, 4),)
    yield F.normalize, ((6, 5),)
    yield lambda x: torch.renorm(x, 2, 0, 1.0), ((6, 5),)


def _linalg() -> Iterator[Trial]:
    linalg = torch.linalg
    for shape in ((4, 4), (3, 4, 4)):
        right = (*shape[:-1], 3)
        for function in (linalg.inv_ex, linalg.cholesky_ex, linalg.lu_factor_ex):
            yield lambda x, f=function: f((x + x.mT) / 20 + _diagonal())[0], (shape,)
        for function in (linalg.det, linalg.slogdet, linalg.matrix_exp, linalg.lu, linalg.eigh, linalg.qr):
            yield lambda x, f=function: f((x + x.mT) / 20 + _diagonal()), (shape,)
        yield lambda x, b: linalg.solve_ex(x + _diagonal(), b)[0], (shape, right)
        yield lambda x, b: linalg.solve_triangular(x.triu() + _diagonal(), b, upper=True), (shape, right)
        yield lambda x, b: torch.cholesky_solve(b, x.tril() + _diagonal()), (shape, right)
        yield lambda x: torch.cholesky_inverse(x.tril() + _diagonal()), (shape,)
        yield lambda x: linalg.matrix_power(x, 3), (shape,)
        yield linalg.svdvals, (shape,)
        yield linalg.pinv, (shape,)
    yield linalg.qr, ((6, 4),)
    yield lambda x: linalg.svd(x, full_matrices=False), ((6, 4),)
    yield lambda x: linalg.svd(x, full_matrices=False), ((4, 6),)
    yield lambda x: linalg.householder_product(x[:, :3], x[0, :3]), ((6, 4),)
    yield linalg.cross, ((6, 3), (6, 3))
    yield torch.trace, ((4, 4),)


def _reductions() -> Iterator[Trial]:
    everything = (torch.sum, torch.mean, torch.prod, torch.std, torch.var, torch.amax, torch.max, torch.median)
    along = (*everything, torch.var_mean, torch.logsumexp, torch.amin, torch.nansum, torch.nanmedian, torch.mode)
    for function in everything:
        yield function, ((6, 5),)
    for function in along:
        yield functools.partial(function, dim=1), ((6, 5, 4),)
        yield functools.partial(function, dim=0, keepdim=True), ((6, 5, 4),)
    for function in (torch.sum, torch.mean, torch.amax, torch.std_mean, torch.logsumexp):
        yield functools.partial(function, dim=(0, 2)), ((6, 5, 4),)
    yield lambda x: torch.aminmax(x, dim=0), ((6, 5),)


def _along_a_dimension() -> Iterator[Trial]:
    scans = (torch.cumsum, torch.cumprod, torch.logcumsumexp, torch.cummax, torch.sort)
    for function in (*scans, torch.softmax, torch.log_softmax, F.softmin):
        for dim in (0, -1):
            yield functools.partial(function, dim=dim), ((6, 5),)
    for function in (torch.topk, torch.kthvalue):
        yield functools.partial(function, k=2), ((6, 5),)
    yield lambda x: F.gumbel_softmax(x, hard=True), ((6, 5),)
    yield lambda x: torch.quantile(x, 0.3, dim=1), ((6, 5),)
    yield torch.diff, ((6, 5),)


def _images(dims: int) -> Iterator[Trial]:
    shape, window = (2, 3) + (8,) * dims, (3,) * dims

    def of(name: str) -> Callable[..., object]:
        function: Callable[..., object] = getattr(F, f"{name}{dims}d")
        return function

    yield functools.partial(of("max_pool"), kernel_size=3, stride=2, padding=1, return_indices=True), (shape,)
    yield functools.partial(of("avg_pool"), kernel_size=3, stride=2, padding=1), (shape,)
    yield functools.partial(of("adaptive_max_pool"), output_size=3, return_indices=True), (shape,)
    yield functools.partial(of("adaptive_avg_pool"), output_size=3), (shape,)
    yield lambda x: of("max_unpool")(*of("max_pool")(x, 2, return_indices=True), 2), (shape,)
    yield functools.partial(of("conv"), padding=1), (shape, (4, 3, *window), (4,))
    yield functools.partial(of("conv"), stride=2, groups=3), (shape, (6, 1, *window))
    yield functools.partial(of("conv_transpose"), stride=2), (shape, (3, 4, *window))
    for mode in ("nearest", "nearest-exact", ("linear", "bilinear", "trilinear")[dims - 1]):
        yield functools.partial(F.interpolate, scale_factor=2, mode=mode), (shape,)
    for mode in ("reflect", "replicate", "circular", "constant"):
        yield functools.partial(F.pad, pad=(1, 1) * dims, mode=mode), (shape,)
    yield lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), (shape, (3,), (3,))
    yield lambda x, w: F.batch_norm(x, x.new_zeros(3), x.new_ones(3), w), (shape, (3,))
    yield lambda x, w, b: F.group_norm(x, 3, w, b), (shape, (3,), (3,))
    yield F.instance_norm, (shape,)


def _more_images() -> Iterator[Trial]:
    def last(x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)

    yield lambda x, w: F.conv2d(last(x), last(w), padding=1), ((2, 3, 8, 8), (4, 3, 3, 3))
    for function in (F.max_pool2d, F.avg_pool2d):
        yield lambda x, f=function: f(last(x), 2), ((2, 3, 8, 8),)
    yield lambda x: F.batch_norm(last(x), None, None, training=True), ((2, 3, 8, 8),)
    yield functools.partial(F.interpolate, scale_factor=2, mode="bicubic"), ((2, 3, 8, 8),)
    yield functools.partial(F.pixel_shuffle, upscale_factor=2), ((2, 4, 4, 4),)
    yield functools.partial(F.unfold, kernel_size=2), ((2, 3, 6, 6),)
    yield functools.partial(F.unfold, kernel_size=2, stride=3), ((2, 3, 6, 6),)
    yield lambda x: F.fold(x, (6, 6), 2), ((2, 12, 25),)
    yield lambda x: F.fold(x, (9, 9), 2, stride=4), ((2, 12, 4),)
    for mode in ("bilinear", "nearest", "bicubic"):
        yield lambda x, g, m=mode: F.grid_sample(x, g * 0.9, m, align_corners=False), ((2, 3, 6, 6), (2, 4, 4, 2))
    yield lambda x, g: F.grid_sample(x, g * 0.9, align_corners=False), ((2, 3, 4, 4, 4), (2, 3, 3, 3, 3))
    yield lambda t: F.affine_grid(t, [2, 3, 4, 4], align_corners=False), ((2, 2, 3),)


def _attention_and_norms() -> Iterator[Trial]:
    heads = ((2, 2, 6, 8),) * 3
    yield F.scaled_dot_product_attention, heads
    yield functools.partial(F.scaled_dot_product_attention, is_causal=True), heads
    yield lambda q, k, v: F.scaled_dot_product_attention(q, k, v, q.new_zeros(6, 6)), heads
    yield functools.partial(F.scaled_dot_product_attention, dropout_p=0.1), heads
    yield lambda x, w, b: F.layer_norm(x, (5,), w, b), ((6, 5), (5,), (5,))
    yield lambda x, w: F.rms_norm(x, (5,), w), ((6, 5), (5,))
    yield F.dropout, ((6, 5),)
    yield F.dropout2d, ((2, 3, 4, 4),)
    yield functools.partial(F.rrelu, training=True), ((6, 5),)
    yield F.prelu, ((6, 5), (5,))
    yield F.glu, ((6, 4),)
    yield F.bilinear, ((6, 5), (6, 5), (3, 5, 5))


def _pointwise() -> Iterator[Trial]:
    activations = (F.relu, F.relu6, F.elu, F.selu, F.gelu, F.silu, F.mish, F.hardswish, F.hardsigmoid, F.hardtanh)
    more = (F.leaky_relu, F.softplus, F.softsign, F.tanhshrink, F.softshrink, F.hardshrink, F.logsigmoid)
    for function in (*activations, *more, torch.tanh, torch.erf, torch.log, torch.sqrt, torch.rsqrt, torch.logit):
        yield function, ((6, 5),)
    for function in (torch.add, torch.mul, torch.div, torch.pow, torch.atan2, torch.maximum, torch.logaddexp):
        yield function, ((6, 5), (5,))
        yield lambda a, b, f=function: f(a.t(), b), ((5, 6), (6, 1))
    for function in (torch.addcmul, torch.addcdiv, torch.lerp):
        yield function, ((6, 5), (6, 5), (6, 5))
    yield lambda a, b: torch.where(a > b, a, b), ((6, 5), (6, 5))
    yield lambda a: a.masked_fill(a > 0.5, 0.0), ((6, 5),)
    yield lambda a, b: a.clamp(min=b), ((6, 5), (6, 5))


def _products() -> Iterator[Trial]:
    yield torch.mm, ((6, 5), (5, 4))
    yield torch.bmm, ((2, 6, 5), (2, 5, 4))
    yield torch.addmm, ((4,), (6, 5), (5, 4))
    yield torch.baddbmm, ((2, 6, 4), (2, 6, 5), (2, 5, 4))
    yield torch.addbmm, ((6, 4), (2, 6, 5), (2, 5, 4))
    yield torch.mv, ((6, 5), (5,))
    yield torch.dot, ((5,), (5,))
    yield torch.addmv, ((6,), (6, 5), (5,))
    yield torch.addr, ((6, 5), (6,), (5,))
    yield lambda a, b: torch.einsum("bij,bkj->bik", a, b), ((2, 6, 5), (2, 4, 5))
    yield torch.kron, ((2, 3), (3, 2))
    yield torch.matmul, ((2, 6, 5), (5, 4))


def _indexing() -> Iterator[Trial]:
    yield lambda x: x[torch.arange(3)], ((6, 5),)
    yield lambda x: x.index_select(1, torch.arange(3)), ((6, 5),)
    yield lambda x: x.gather(0, _columns()), ((6, 5),)
    yield lambda x: x.take(torch.arange(3)), ((6, 5),)
    yield lambda x, y: x.index_add(0, torch.arange(3), y), ((6, 5), (3, 5))
    yield lambda x, y: x.index_copy(0, torch.arange(3), y), ((6, 5), (3, 5))
    yield lambda x, y: x.index_put((torch.arange(3),), y, accumulate=True), ((6, 5), (3, 5))
    yield lambda x, y: x.scatter_add(0, _columns(), y), ((6, 5), (3, 5))
    yield lambda x, y: x.scatter(0, _columns(), y), ((6, 5), (3, 5))
    yield lambda x, y: x.scatter_reduce(0, _columns(), y, "amax"), ((6, 5), (3, 5))
    yield lambda x, y: torch.slice_scatter(x[1:], y, 0, 2, 5), ((6, 5), (3, 5))
    yield lambda x, y: torch.select_scatter(x[:, 1:], y, 0, 1), ((6, 5), (4,))
    yield lambda x, y: torch.diagonal_scatter(x.t(), y), ((6, 5), (5,))
    yield lambda x, y: torch.slice_scatter(x.expand(4, 5), y, 0, 2, 4), ((1, 5), (2, 5))
    yield lambda x, y: torch.as_strided_scatter(x, y, (3,), (2,)), ((6, 5), (3,))
    yield lambda w: F.embedding(_words(), w, padding_idx=0), ((10, 4),)
    for mode in ("sum", "mean", "max"):
        yield lambda w, m=mode: F.embedding_bag(_words(), w, mode=m), ((10, 4),)
        yield (
            lambda w, m=mode: F.embedding_bag(_words().flatten(), w, torch.tensor([0, 2]), mode=m),
            ((10, 4),),
        )


def _shapes() -> Iterator[Trial]:
    yield lambda a, b: torch.cat([a, b]), ((6, 5), (3, 5))
    yield lambda a, b: torch.stack([a, b]), ((6, 5), (6, 5))
    changes = (
        "flip(0)",
        "roll(1, 0)",
        "repeat(2, 3)",
        "repeat_interleave(2, 0)",
        "tril()",
        "diag()",
        "unfold(0, 3, 1)",
    )
    more = (
        "rot90()",
        "expand(3, 6, 5).reshape(18, 5)",
        "t().contiguous()",
        "to(torch.float64)",
        "split(2)",
        "chunk(2)",
    )
    for change in (*changes, *more):
        yield eval(f"lambda x: x.{change}", {"torch": torch}), ((6, 5),)
    yield torch.diag_embed, ((6, 5),)
    yield lambda x: x * torch.randn_like(x) * torch.rand(5) * torch.arange(5) * torch.ones_like(x), ((6, 5),)
    yield lambda x: x * torch.full_like(x, 2.0) * torch.zeros(5) * x.new_ones(5) * x.new_zeros(5), ((6, 5),)
    yield lambda x: x * torch.bernoulli(x.sigmoid()), ((6, 5),)


def _fft() -> Iterator[Trial]:
    fft = torch.fft
    for function in (fft.fft, fft.rfft, fft.ifft, fft.fft2, fft.rfft2, fft.fftn):
        yield function, ((2, 6, 8),)
    yield lambda x: fft.irfft(fft.rfft(x)), ((6, 8),)
    yield lambda x: fft.irfft2(fft.rfft2(x)), ((6, 8),)
    yield lambda x: fft.ifft(fft.fft(x, n=12)).real, ((6, 8),)
    yield lambda x: torch.stft(x, 8, return_complex=True, window=torch.ones(8)), ((2, 32),)
    yield torch.polar, ((6, 5), (6, 5))


def _cells() -> Iterator[Trial]:
    yield torch.gru_cell, ((6, 5), (6, 4), (12, 5), (12, 4))
    yield lambda x, h, c, w, v: torch.lstm_cell(x, (h, c), w, v), ((6, 5), (6, 4), (6, 4), (16, 5), (16, 4))


GROUPS: dict[str, Callable[[], Iterator[Trial]]] = {
    "mean of losses": lambda: _losses("mean"),
    "losses": lambda: _losses("none"),
    "margin losses": _margin_losses,
    "norms": _norms,
    "linalg": _linalg,
    "reductions": _reductions,
    "along a dimension": _along_a_dimension,
    "2d": lambda: _images(2),
    "3d": lambda: _images(3),
    "images": _more_images,
    "attention and norms": _attention_and_norms,
    "pointwise": _pointwise,
    "products": _products,
    "indexing": _indexing,
    "shapes": _shapes,
    "fft": _fft,
    "cells": _cells,
}
