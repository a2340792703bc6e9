"""Free memory of the device of a model: what the budget "auto" means."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scheduler.errors import InvalidBudgetError
from scheduler.problem import read_budget
from scheduler.pytorch.measurement.memory import storage_bytes
from scheduler.pytorch.torch_private.pytree import tree_leaves

MEMORY_FILE = Path("/proc/meminfo")
_IN_BYTES = 'give the budget in bytes, such as "8GiB", or as "min"'


def device_budget(
    budget: int | str, model: object, inputs: object = (), optimizer: Optimizer | None = None
) -> int | str:
    """Return a budget; "auto" becomes the free memory of the model's device and what the step holds there.

    The step holds parameters, buffers, their gradients, inputs, and the existing state of the
    optimizer. On a CUDA device, memory that PyTorch has cached counts as free. On the CPU, memory
    is what the system has available, or less if a limit of the container leaves less.

    Parameters
    ----------
    budget : int or str
    model : nn.Module or sequence of callable
    inputs : nested containers of Tensor
        Arguments of a call.
    optimizer : torch.optim.Optimizer, optional

    Raises
    ------
    InvalidBudgetError
        If the budget cannot be understood; or if it is "auto" and the tensors are on several
        devices or on none, or the free memory of the device is unknown.
    """
    if read_budget(budget).form != "auto":
        return budget
    layers = model if isinstance(model, Sequence) else [model]
    modules = [layer for layer in layers if isinstance(layer, nn.Module)]
    trained = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    passed = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    found = {str(tensor.device): tensor.device for tensor in trained or passed}
    if len(found) != 1:
        where = f"on several devices ({', '.join(sorted(found))})" if found else "not known to be on any device"
        raise InvalidBudgetError(f'the budget "auto" needs a model on one device, and this one is {where}: {_IN_BYTES}')
    (device,) = found.values()
    gradients = [tensor.grad for tensor in trained if tensor.grad is not None]
    state = [leaf for leaf in tree_leaves(dict(optimizer.state) if optimizer else {}) if isinstance(leaf, Tensor)]
    held = [tensor for tensor in (*trained, *gradients, *passed, *state) if tensor.device == device]
    return free_bytes(device) + storage_bytes(held)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that a process can still allocate on a device.

    Raises
    ------
    InvalidBudgetError
        If that is unknown.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "cpu" and MEMORY_FILE.exists():
        return min([_available_bytes(MEMORY_FILE.read_text()), *_free_in_containers()])
    if device.type == "cpu" and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    raise InvalidBudgetError(
        f'the budget "auto" is the free memory of the device, which is unknown for "{device}" on this system:'
        f" {_IN_BYTES}"
    )


def _available_bytes(text: str) -> int:
    """Return the bytes in the line `MemAvailable: 1024 kB`."""
    (line,) = (line for line in text.splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024


def _free_in_containers(folder: Path = Path("/sys/fs/cgroup")) -> Iterable[int]:
    """Yield the bytes that each limit of the container leaves, with what the kernel can reclaim from its files."""
    for limit, usage, inactive in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
            lines = (folder / usage).with_name("memory.stat").read_text().splitlines()
        except (OSError, ValueError):  # no such limit, or "max"
            continue
        reclaimable = sum(int(line.split()[1]) for line in lines if line.split()[0] == inactive)
        yield max(0, most - used + reclaimable)
