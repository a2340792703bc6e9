"""Make the plans of announced lengths before training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from scheduler.errors import BudgetTooSmallError, InvalidOptionError
from scheduler.plan import Plan
from scheduler.pytorch.capture.arguments import fill_arguments
from scheduler.pytorch.execute.guards import CallKey
from scheduler.pytorch.execute.module import CheckpointedModule

Arguments = tuple[Sequence[object], Mapping[str, object]]


def plan_lengths(
    planned: CheckpointedModule, lengths: Iterable[int], *, example: Callable[[int], Arguments] | None = None
) -> dict[int, Plan]:
    """Make the plans for calls of several lengths before training, the longest first.

    A budget that is too small is therefore known at once. Nothing is computed with the model's
    weights. In training, a call of one of these lengths finds its plan.

    Parameters
    ----------
    planned : CheckpointedModule
        With `on_mismatch="plan"`.
    lengths : iterable of int
        Such as the numbers of tokens to which batches are padded. At most `max_shapes`.
    example : callable, optional
        Takes a length and returns args and kwargs of a call. The default is the call that
        `planned` was made for, with other sizes: its length is the size of the second dimension
        of its first tensor that has two, and every dimension of that size changes, except the
        first dimension of each tensor.

    Returns
    -------
    dict of int to Plan
        By length, the longest first.

    Raises
    ------
    InvalidOptionError
        If the module does not make plans for other calls, there are more lengths than it keeps
        plans, or there is no default example.
    ExecutionError
        If the module is in evaluation, or gradients are off.
    BudgetTooSmallError, CaptureError
        If a length cannot be planned; those that are longer keep their plans.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from scheduler.pytorch import checkpointed
    >>> model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 1))
    >>> tokens = torch.zeros(4, 16, dtype=torch.long)
    >>> planned = checkpointed(model, "1GiB", (tokens,), loss=torch.sum, costs="flops", on_mismatch="plan")
    >>> [*plan_lengths(planned, [8, 16, 12])]
    [16, 12, 8]
    """
    if planned.others is None:
        raise InvalidOptionError('plan_lengths makes further plans: make the module with on_mismatch="plan"')
    plans = {}
    for length in longest_first(lengths, planned.others.max_shapes):
        args, kwargs = example_of(planned.planned_call, length) if example is None else example(length)
        try:
            plans[length] = planned.plan_call(*args, **kwargs)
        except BudgetTooSmallError as error:
            raise BudgetTooSmallError(f"length {length}: {error}", proven=error.proven) from error
    return plans


def longest_first(lengths: Iterable[int], max_shapes: int) -> list[int]:
    """Return the different lengths in descending order.

    Raises
    ------
    InvalidOptionError
        If they are not ints above 0, or more than the number of plans that are kept.
    """
    given = [*lengths]
    if not given or any(isinstance(length, bool) or not isinstance(length, int) or length < 1 for length in given):
        raise InvalidOptionError(f"lengths must be at least one int >= 1, got {given!r}")
    different = sorted({*given}, reverse=True)
    if len(different) > max_shapes:
        raise InvalidOptionError(
            f"lengths has {len(different)} different lengths, but max_shapes={max_shapes} plans are kept: pad to"
            " fewer lengths, or raise max_shapes"
        )
    return different


def example_of(call: CallKey, length: int) -> Arguments:
    """Return the arguments of a call like this one, of another length; all tensors are filled with ones.

    Raises
    ------
    InvalidOptionError
        If the call has no tensor with two dimensions, or one that is not contiguous.
    """
    shapes = [key.shape for key in call.tensors]
    present = next((shape[1] for shape in shapes if len(shape) > 1), None)
    if present is None:
        raise InvalidOptionError("no argument has a second dimension, so its length is not known: pass example=")
    tensors: list[Tensor] = []
    for key in call.tensors:
        shape = [size if i == 0 or size != present else length for i, size in enumerate(key.shape)]
        tensor = torch.ones(shape, dtype=key.dtype, device=key.device, requires_grad=key.requires_grad)
        if torch.empty(key.shape, device="meta").stride() != key.strides:
            raise InvalidOptionError(f"an argument of shape {tuple(key.shape)} is not contiguous: pass example=")
        tensors.append(tensor)
    return fill_arguments(call.signature, tensors)
