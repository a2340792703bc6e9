"""Floating-point operations of operators that multiply.

torch's own registry (`torch.utils.flop_counter`) has no formula for attention on the CPU,
grouped products, recurrent layers, fused operators of oneDNN and cuDNN, linear algebra or
Fourier transforms, and counts the backward of a grouped convolution once per group. The
formulas here are asked first, and torch's registry is left as it is. As there, a product of
m x k and k x n matrices counts 2 m n k, additions of biases count nothing, and causal
attention counts as if it were full.

Reference: L. S. Blackford and J. J. Dongarra (1999), Installation guide for LAPACK, LAPACK
Working Note 41, appendix C; eigenvalues and singular values: G. H. Golub and C. F. Van Loan
(2013), Matrix Computations, sections 7.5, 8.3 and 8.6.
"""

# mypy: disable-error-code="no-any-return"
# Shapes are nested in lists and lie among flags, so arguments have no type in common.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from scheduler.pytorch.torch_private.operators import OpOverload, schema_of
from scheduler.pytorch.torch_private.pytree import tree_map_only

_Formula = Callable[[Sequence[Any], Sequence[Any]], float]
"""Takes the arguments by position and the outputs, with shapes in place of tensors."""


def count_flops(operator: object, args: Sequence[object], kwargs: Mapping[str, object], result: object) -> int:
    """Return the floating-point operations of one call, 0 if no formula is known.

    Parameters
    ----------
    operator : OpOverload
    args, kwargs
        The arguments of the call; fake tensors will do.
    result
        The returned value.
    """
    if isinstance(operator, OpOverload) and schema_of(operator).name in _FORMULAS:
        missing = schema_of(operator).arguments[len(args) :]
        given = [*args, *(kwargs.get(argument.name, argument.default_value) for argument in missing)]
        outputs = result if isinstance(result, (tuple, list)) else [result]
        shapes = tree_map_only(Tensor, lambda tensor: tuple(tensor.shape), (given, list(outputs)))
        return int(_FORMULAS[schema_of(operator).name](*shapes))
    formula = flop_registry.get(getattr(operator, "overloadpacket", operator))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def has_formula(operator: object) -> bool:
    """Return whether the floating-point operations of an operator are known."""
    if isinstance(operator, OpOverload) and schema_of(operator).name in _FORMULAS:
        return True
    return getattr(operator, "overloadpacket", operator) in flop_registry


def _product(given: Sequence[Any], out: Sequence[Any]) -> float:
    """Sum over the last dimension of the first argument for each output."""
    return 2 * math.prod(out[0]) * given[0][-1]


def _added_product(given: Sequence[Any], out: Sequence[Any]) -> float:
    return 2 * math.prod(out[0]) * given[1][-1]


def _added_batch(given: Sequence[Any], out: Sequence[Any]) -> float:
    return 2 * math.prod(given[1]) * given[2][-1]


def _dot(given: Sequence[Any], out: Sequence[Any]) -> float:
    return 2 * math.prod(given[0])


def _grouped_product(given: Sequence[Any], out: Sequence[Any]) -> float:
    """Count every row once; of two matrices, the groups divide the dimension that is summed over."""
    left, right = given[0], given[1]
    return 2 * math.prod(left) * right[-1] if len(left) == len(right) == 2 else 2 * math.prod(out[0]) * left[-1]


def _products(given: Sequence[Any], out: Sequence[Any]) -> float:
    return sum(2 * math.prod(left) * right[-1] for left, right in zip(given[0], given[1], strict=True))


def _linear_backward(given: Sequence[Any], out: Sequence[Any]) -> float:
    _, gradient, weight, mask = given
    return 2 * math.prod(gradient) * weight[1] * sum(mask[:2])


def _linear_input_backward(given: Sequence[Any], out: Sequence[Any]) -> float:
    return 2 * math.prod(given[1]) * given[2][1]


def _linear_weight_backward(given: Sequence[Any], out: Sequence[Any]) -> float:
    return 2 * math.prod(given[0]) * given[1][-1]


def _trilinear(given: Sequence[Any], out: Sequence[Any]) -> float:
    """Two multiplications and an addition for each combination of the three."""
    shapes = []
    for shape, expanded in zip(given[:3], given[3:6], strict=True):
        full = list(shape)
        for position in sorted(expanded):
            full.insert(position, 1)
        shapes.append(full)
    return 3 * math.prod(max(sizes) for sizes in zip(*shapes, strict=True))


def _distances(given: Sequence[Any], out: Sequence[Any]) -> float:
    """A difference, its power and an addition for each pair of rows and each feature."""
    return 3 * math.prod(out[0]) * given[0][-1]


def _distances_backward(given: Sequence[Any], out: Sequence[Any]) -> float:
    return 3 * math.prod(given[0]) * given[1][-1]


def _attention(given: Sequence[Any], out: Sequence[Any]) -> float:
    """Scores, and the weighted sum of the values; several heads of queries may share one of keys."""
    query, key, value = given[:3]
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward(given: Sequence[Any], out: Sequence[Any]) -> float:
    """The scores again, and the gradients of scores, values, queries and keys."""
    query, key, value = given[1:4]
    return 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def _convolved(weight: Sequence[int], positions: Sequence[int]) -> float:
    """Each weight once for each example and position; weights are per group already."""
    return 2 * math.prod(weight) * positions[0] * math.prod(positions[2:])


def _convolution(given: Sequence[Any], out: Sequence[Any]) -> float:
    return _convolved(given[1], out[0])


def _transposed_convolution(given: Sequence[Any], out: Sequence[Any]) -> float:
    return _convolved(given[1], given[0])


def _convolution_backward(given: Sequence[Any], out: Sequence[Any]) -> float:
    """Both the gradient of the input and that of the weight take as many as the forward."""
    gradient, value, weight, *_, transposed, _, _, mask = given
    return _convolved(weight, value if transposed else gradient) * sum(mask[:2])


def _sequence_convolution(given: Sequence[Any], out: Sequence[Any]) -> float:
    return 2 * math.prod(given[1]) * math.prod(out[0][:2])


def _sequence_convolution_backward(given: Sequence[Any], out: Sequence[Any]) -> float:
    return 4 * math.prod(given[2]) * math.prod(given[0][:2])


def _recurrent_layer(given: Sequence[Any], out: Sequence[Any]) -> float:
    """The products of all steps with the weights of the input and of the state."""
    return 2 * math.prod(given[0][:2]) * (math.prod(given[1]) + math.prod(given[2]))


def _recurrent_layer_backward(given: Sequence[Any], out: Sequence[Any]) -> float:
    return 2 * _recurrent_layer(given, out)


def _recurrent_network(given: Sequence[Any], out: Sequence[Any]) -> float:
    """The products of all steps with every matrix among the weights; sequences may be packed."""
    return 2 * math.prod(given[0][:-1]) * sum(math.prod(weight) for weight in given[1] if len(weight) == 2)


def _recurrent_network_backward(given: Sequence[Any], out: Sequence[Any]) -> float:
    return 2 * _recurrent_network(given, out)


def _eliminated(rows: int, columns: int) -> float:
    """An LU factorization: 2/3 n^3 for a square matrix; a QR factorization takes twice as many."""
    steps = min(rows, columns)
    return 2 * (rows * columns * steps - (rows + columns) * steps**2 / 2 + steps**3 / 3)


def _lu(given: Sequence[Any], out: Sequence[Any]) -> float:
    *batch, rows, columns = given[0]
    return math.prod(batch) * _eliminated(rows, columns)


def _qr(given: Sequence[Any], out: Sequence[Any]) -> float:
    return 2 * _lu(given, out)


def _explicit_qr(given: Sequence[Any], out: Sequence[Any]) -> float:
    """The factorization, and the orthogonal matrix unless the mode is "r"."""
    return _qr(given, out) * (1 if given[1] == "r" else 2)


def _reflected(given: Sequence[Any], out: Sequence[Any]) -> float:
    """A matrix times the k reflectors that are the columns of the first argument."""
    *_, length, reflectors = given[0]
    return (4 * length - 2 * reflectors) * reflectors * math.prod(given[2]) / length


def _cubic(factor: float) -> _Formula:
    """Return the formula of an algorithm that takes `factor` n^3 for each square matrix of a batch."""
    return lambda given, out: factor * math.prod(given[0][:-2]) * given[0][-1] ** 3


def _substituted(triangles: int, position: int = 0) -> _Formula:
    """Return the formula of substitutions into the triangles of the matrix at a position of the arguments."""
    return lambda given, out: triangles * given[position][-1] * math.prod(out[0])


def _solved(given: Sequence[Any], out: Sequence[Any]) -> float:
    return _lu(given, out) + _substituted(2)(given, out)


def _least_squares(given: Sequence[Any], out: Sequence[Any]) -> float:
    """The QR factorization, and the right-hand sides times its reflectors."""
    return _qr(given, out) + 4 * given[0][-1] * math.prod(given[1])


def _symmetric_eigenvalues(given: Sequence[Any], out: Sequence[Any]) -> float:
    return _cubic(9 if given[2] else 4 / 3)(given, out)


def _singular_values(given: Sequence[Any], out: Sequence[Any]) -> float:
    *batch, rows, columns = given[0]
    long, short = max(rows, columns), min(rows, columns)
    if not given[2]:
        return math.prod(batch) * (4 * long * short**2 - 4 / 3 * short**3)
    if given[1]:
        return math.prod(batch) * (4 * long**2 * short + 8 * long * short**2 + 9 * short**3)
    return math.prod(batch) * (14 * long * short**2 + 8 * short**3)


def _pseudo_inverse(given: Sequence[Any], out: Sequence[Any]) -> float:
    """The singular vectors, and the product of them."""
    *_, rows, columns = given[0]
    return _singular_values((given[0], False, True), out) + 2 * math.prod(given[0]) * min(rows, columns)


def _fourier(factor: float, *, of_output: bool = False) -> _Formula:
    """Return the formula of transforms along some dimensions, `factor` n log2(n) for each one of length n."""

    def formula(given: Sequence[Any], out: Sequence[Any]) -> float:
        shape = out[0] if of_output else given[0]
        return factor * math.prod(shape) * math.log2(max(1, math.prod(shape[dim] for dim in given[1])))

    return formula


_BY_FORMULA: dict[_Formula, str] = {
    _product: "linear mkldnn_linear _int_mm _scaled_mm_v2 mv _mixed_dtypes_linear _weight_int8pack_mm"
    " _weight_int4pack_mm _weight_int4pack_mm_for_cpu mkldnn::_linear_pointwise",
    _added_product: "_addmm_activation addmv",
    _added_batch: "addbmm",
    _dot: "dot vdot",
    _grouped_product: "_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2",
    _products: "_foreach_mm",
    _linear_backward: "linear_backward mkldnn_linear_backward",
    _linear_input_backward: "mkldnn_linear_backward_input",
    _linear_weight_backward: "mkldnn_linear_backward_weights",
    _trilinear: "_trilinear",
    _distances: "_cdist_forward _pdist_forward",
    _distances_backward: "_cdist_backward _pdist_backward",
    _attention: "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable"
    " _scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps",
    _attention_backward: "_scaled_dot_product_flash_attention_for_cpu_backward"
    " _scaled_dot_product_fused_attention_overrideable_backward",
    _convolution: "mkldnn_convolution cudnn_convolution cudnn_convolution_relu cudnn_convolution_add_relu"
    " _conv_depthwise2d conv_depthwise3d _slow_conv2d_forward slow_conv3d_forward slow_conv_dilated2d"
    " slow_conv_dilated3d miopen_convolution miopen_convolution_relu miopen_convolution_add_relu"
    " miopen_depthwise_convolution _nnpack_spatial_convolution _mps_convolution mkldnn::_convolution_pointwise",
    _transposed_convolution: "cudnn_convolution_transpose miopen_convolution_transpose slow_conv_transpose2d"
    " slow_conv_transpose3d mkldnn::_convolution_transpose_pointwise",
    _convolution_backward: "convolution_backward convolution_backward_overrideable",
    _sequence_convolution: "conv_tbc",
    _sequence_convolution_backward: "conv_tbc_backward",
    _recurrent_layer: "mkldnn_rnn_layer scheduler::lstm_layer",
    _recurrent_layer_backward: "mkldnn_rnn_layer_backward",
    _recurrent_network: "_cudnn_rnn miopen_rnn",
    _recurrent_network_backward: "_cudnn_rnn_backward miopen_rnn_backward",
    _lu: "linalg_lu linalg_lu_factor_ex _linalg_det _linalg_slogdet",
    _qr: "geqrf linalg_householder_product orgqr",
    _explicit_qr: "linalg_qr",
    _reflected: "ormqr",
    _solved: "_linalg_solve_ex",
    _least_squares: "linalg_lstsq",
    _symmetric_eigenvalues: "_linalg_eigh",
    _singular_values: "_linalg_svd",
    _pseudo_inverse: "linalg_pinv",
    _cubic(1 / 3): "linalg_cholesky_ex linalg_ldl_factor_ex",
    _cubic(2 / 3): "cholesky_inverse",
    _cubic(2): "linalg_inv_ex",
    _cubic(10): "linalg_matrix_exp linalg_eigvals _linalg_eigvals",
    _cubic(25): "linalg_eig",
    _substituted(1): "linalg_solve_triangular",
    _substituted(1, 1): "triangular_solve",
    _substituted(2): "linalg_lu_solve linalg_ldl_solve",
    _substituted(2, 1): "cholesky_solve _cholesky_solve_helper",
    _fourier(5): "_fft_c2c",
    _fourier(2.5): "_fft_r2c",
    _fourier(2.5, of_output=True): "_fft_c2r",
}
"""Operators by formula; without a namespace, of ATen. The matrix exponential counts its five products."""

_FORMULAS: dict[str, _Formula] = {
    name if "::" in name else f"aten::{name}": formula
    for formula, names in _BY_FORMULA.items()
    for name in names.split()
}
