"""The private names of torch that the package uses, each with what is expected of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch._C._dynamo.guards
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

_dict_version: Callable[[Any], int] | None = getattr(torch._C._dynamo.guards, "dict_version", None)


def dict_versions(dicts: Iterable[Mapping[Any, Any]]) -> object:
    """Return a value that is equal to an earlier one if none of these dicts has changed in between.

    TorchDynamo's guards use the version that Python keeps of each dict. Without it, no value
    is equal to another one, and the dicts have to be compared entry by entry.
    """
    return object() if _dict_version is None else tuple(map(_dict_version, dicts))


def is_transformed() -> bool:
    """Return whether a transform such as `torch.func.grad` or `vmap`, or forward-mode AD, is active."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def autograd_node_name() -> str:
    """Return the name of the autograd node whose backward is running, "" outside a backward."""
    node = torch._C._current_autograd_node()
    return "" if node is None else str(node.name())
