"""Models with most of their repeated blocks left out."""

from __future__ import annotations

import copy

from torch import Tensor, nn

KEPT_BLOCKS = 4
"""Blocks that are kept of each list: the first three and the last."""
_LEAST_BLOCKS = 8
"""Shorter lists of blocks stay as they are."""


def shallow_copy(model: nn.Module) -> nn.Module | None:
    """Return a copy of a model with fewer blocks, None if it has no long list of equal blocks.

    Parameters
    ----------
    model : nn.Module
        On device "meta": the copy has parameters of its own.
    """
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module) >= _LEAST_BLOCKS
        and len({_form(block) for block in module}) == 1
    ]
    if not lists:
        return None
    shallow = copy.deepcopy(model)
    for name in lists:
        blocks = shallow.get_submodule(name)
        assert isinstance(blocks, nn.ModuleList | nn.Sequential)
        del blocks[KEPT_BLOCKS - 1 : -1]
    return shallow


def _form(block: nn.Module) -> tuple[object, ...]:
    """Return the type of a block, and the names, shapes and dtypes of its parameters and buffers."""

    def form(tensors: list[tuple[str, Tensor]]) -> tuple[object, ...]:
        return tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)

    return type(block), form([*block.named_parameters()]), form([*block.named_buffers()])
