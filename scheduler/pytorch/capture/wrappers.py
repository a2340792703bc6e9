"""Refuse modules that are already sharded or replicated: a plan belongs inside of that, not around it."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scheduler.errors import CaptureError


def check_unwrapped(module: nn.Module) -> None:
    """Refuse a module whose parameters a wrapper gathers, or whose gradients a wrapper reduces.

    Raises
    ------
    CaptureError
        If a part of it is wrapped by FSDP or DistributedDataParallel, or a parameter is a
        DTensor: says in which order to wrap.
    """
    if not dist.is_available() or not dist.is_initialized():
        return  # these wrappers need a process group, and the imports below take long
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise CaptureError(f'parameter "{name}" is a DTensor, whose parts lie elsewhere: {_BEFORE_SHARDING}')
    for name, part in module.named_modules():
        what = f'"{name}" in the model' if name else "the model"
        if isinstance(part, (FSDPModule, FullyShardedDataParallel)):
            raise CaptureError(f"{what} is sharded, and is whole only while it runs: {_BEFORE_SHARDING}")
        if isinstance(part, DistributedDataParallel):
            raise CaptureError(
                f"{what} is a DistributedDataParallel, and what that does before and after its forward is no part of a"
                " plan: plan before wrapping: DistributedDataParallel(checkpointed(model, plan, args))"
            )


_BEFORE_SHARDING = "plan before sharding, each FSDP2 unit by itself: fully_shard(checkpointed(unit, plan, args))"
