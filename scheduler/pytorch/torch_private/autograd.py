"""Autograd, autocast, transforms and dispatch modes: what is active now, and how to leave it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar, cast

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad
from torch.autograd.graph import Node
from torch.utils import checkpoint as _checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "TorchDispatchMode",
    "autocast_disabled",
    "autograd_node_name",
    "below_autograd",
    "is_graph_kept",
    "is_transformed",
    "modes_disabled",
    "next_node_number",
    "node_number",
    "not_compiled",
    "saving_hook",
]

_Function = TypeVar("_Function", bound=Callable[..., object])


def is_transformed() -> bool:
    """Return whether a transform such as `torch.func.grad` or `vmap`, or forward-mode AD, is active."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def autograd_node_name() -> str:
    """Return the name of the autograd node whose backward is running, "" outside a backward."""
    node = torch._C._current_autograd_node()
    return "" if node is None else str(node.name())


def next_node_number() -> int:
    """Return the number of the next autograd node of this thread; nodes are numbered in the order of the forward."""
    return int(torch._C._autograd._get_sequence_nr())


def node_number(node: Node) -> int:
    """Return the number of an autograd node; one that accumulates a leaf's gradient has none of the forward's."""
    return int(node._sequence_nr())


def saving_hook() -> object:
    """Return the innermost hook to which autograd gives what it saves, None if there is none."""
    hooks: tuple[object, object] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


def is_graph_kept() -> bool:
    """Return whether the backward that runs now was called with `retain_graph=True`."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def below_autograd() -> AbstractContextManager[object]:
    """Return a context that calls the kernels of operators without autograd, whether gradients are on or not."""
    return torch._C._AutoDispatchBelowAutograd()


def autocast_disabled() -> AbstractContextManager[object]:
    """Return a context without autocast on any device, which keeps autocast's copies of weights."""
    return torch._C._DisableAutocast()


def modes_disabled() -> AbstractContextManager[object]:
    """Return a context in which no dispatch mode sees an operator."""
    return _disable_current_modes()


def not_compiled(function: _Function) -> _Function:
    """Make a function one that TorchDynamo neither traces nor compiles; TorchDynamo is imported at its first call."""
    return cast("_Function", _disable_dynamo(function))


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Call a function at the end of the backward that runs now.

    Expected: the engine calls it in a thread of its own or the caller's, once, after all gradients have been
    accumulated.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def determinism_check_of(name: str) -> str:
    """Return a `determinism_check` for `torch.utils.checkpoint` whose errors name what is recomputed.

    Expected: the check compares what a function returns for the tensors that the first run and the
    recomputation save, and its error shows both.
    """
    _checkpoint._allowed_determinism_checks_to_fns.setdefault(
        name, lambda x: {"recomputed": name, "shape": x.shape, "dtype": x.dtype, "device": x.device}
    )
    return name


def stops_early() -> bool:
    """Return whether a recomputation that is started by `torch.utils.checkpoint` may end early."""
    return _checkpoint._enable_checkpoint_early_stop is not False
