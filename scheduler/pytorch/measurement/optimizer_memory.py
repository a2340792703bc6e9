"""What an optimizer holds and allocates, found by running its steps on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scheduler.errors import InvalidOptionError
from scheduler.pytorch.measurement.memory import StorageTracker, storage_bytes
from scheduler.pytorch.torch_private.autograd import TorchDispatchMode
from scheduler.pytorch.torch_private.operators import OpOverload
from scheduler.pytorch.torch_private.pytree import tree_leaves

MakeOptimizer = Callable[[Sequence[nn.Parameter]], Optimizer]

_RATE = 1e-3

OPTIMIZERS: Mapping[str, MakeOptimizer] = {
    "adamw": partial(torch.optim.AdamW, lr=_RATE),
    "adam": partial(torch.optim.Adam, lr=_RATE),
    "adafactor": partial(torch.optim.Adafactor, lr=_RATE),
    "sgd-momentum": partial(torch.optim.SGD, lr=_RATE, momentum=0.9),
    "sgd": partial(torch.optim.SGD, lr=_RATE),
}
"""Optimizers by name, with the defaults of torch."""
LIGHT_OPTIMIZERS = ("adafactor", "sgd-momentum", "sgd")
"""Those with less state than Adam."""


@dataclass(frozen=True)
class OptimizerMemory:
    """The memory of an optimizer in addition to parameters and gradients.

    Attributes
    ----------
    state_bytes : int
        Held from the first step on.
    temporary_bytes : int
        Largest number of bytes that a later step allocates and frees again.
    """

    state_bytes: int
    temporary_bytes: int


def optimizer_memory(
    parameters: Iterable[Tensor], optimizer: str | MakeOptimizer, device_type: str = "cuda"
) -> OptimizerMemory:
    """Return the memory of an optimizer for parameters that may have no data.

    Two steps are run on copies of the parameters on device "meta": nothing is computed.

    Parameters
    ----------
    parameters : iterable of Tensor
        Those that require a gradient count.
    optimizer : str or callable
        A name in `OPTIMIZERS`, or a function from parameters to an optimizer.
    device_type : str
        On "cuda", torch updates all parameters at once by default (`foreach`), which allocates
        more. There, counters of steps are on the host and do not count.

    Raises
    ------
    InvalidOptionError
        If the name is unknown, or the optimizer cannot take a step on tensors without data.
    """
    copies = [nn.Parameter(torch.empty_like(p, device="meta")) for p in parameters if p.requires_grad]
    if not copies:
        return OptimizerMemory(0, 0)
    made = _make(optimizer, copies)
    for group in made.param_groups:
        if group.get("foreach", 0) is None:
            group["foreach"] = device_type == "cuda"
    for copy in copies:
        copy.grad = torch.empty_like(copy)
    given = [*copies, *(copy.grad for copy in copies if copy.grad is not None)]
    try:
        with _AnyValues():  # type: ignore[no-untyped-call]
            made.step()
            states = [leaf for leaf in tree_leaves(dict(made.state)) if isinstance(leaf, Tensor)]
            with StorageTracker([*given, *states]) as tracker:
                made.step()
    except Exception as error:  # optimizers raise errors of many kinds
        raise InvalidOptionError(
            f"{type(made).__name__} cannot take a step on tensors without data ({type(error).__name__}: {error}), so"
            f" its memory is unknown: use one of {', '.join(OPTIMIZERS)}, which needs about as much"
        ) from error
    counted = [state for state in states if state.is_meta or device_type == "cpu"]
    return OptimizerMemory(storage_bytes(counted), tracker.peak_bytes)


def _make(optimizer: str | MakeOptimizer, parameters: Sequence[nn.Parameter]) -> Optimizer:
    make = OPTIMIZERS.get(optimizer) if isinstance(optimizer, str) else optimizer
    if make is None:
        raise InvalidOptionError(f'optimizer must be one of {", ".join(OPTIMIZERS)} or a function, got "{optimizer}"')
    made: object = make(parameters)
    if not isinstance(made, Optimizer):
        raise InvalidOptionError(f"optimizer must return a torch.optim.Optimizer, got {type(made).__name__}")
    return made


class _AnyValues(TorchDispatchMode):
    """Answer 1 where an optimizer reads the value of a tensor without data, such as a norm."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], Tensor) and args[0].is_meta:
            return 1.0
        return func(*args, **(kwargs or {}))
