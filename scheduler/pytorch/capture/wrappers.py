"""Refuse modules that are already sharded or replicated: a plan belongs inside such a wrapper, not around it."""

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
        If a submodule is wrapped by FSDP or DistributedDataParallel, or a parameter is a
        DTensor; the message gives the right order of wrapping.
    """
    if not dist.is_available() or not dist.is_initialized():
        return  # these wrappers need a process group, and the imports below take long
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise CaptureError(f'parameter "{name}" is a DTensor, whose parts are on other devices: {_BEFORE_SHARDING}')
    for name, part in module.named_modules():
        wrapped = f'"{name}" in the model' if name else "the model"
        if isinstance(part, (FSDPModule, FullyShardedDataParallel)):
            raise CaptureError(f"{wrapped} is sharded, and is complete only while it runs: {_BEFORE_SHARDING}")
        if isinstance(part, DistributedDataParallel):
            raise CaptureError(
                f"{wrapped} is a DistributedDataParallel, whose work before and after forward cannot be planned:"
                " plan before wrapping: DistributedDataParallel(checkpointed(model, plan, args))"
            )


_BEFORE_SHARDING = "plan before sharding, one plan for each FSDP2 unit: fully_shard(checkpointed(unit, plan, args))"
