"""Autograd, autocast, transforms and dispatch modes: what is active now, and how to leave it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
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
    "added_in_place_bytes",
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


_REFERENCES = 4, 3, 2
"""References to a gradient that only its place in the backward holds, as `added_in_place_bytes` counts them.

To the tensor: of that place, of its Python object, and two of the call. To the object: of the tensor,
of the arguments, and of the call that counts. To the storage: of the tensor, and of the object made here.
"""


def added_in_place_bytes(operator: object, args: Sequence[object]) -> int:
    """Return the bytes that a sum of gradients takes under a dispatch mode only; 0 for all other operators.

    Where a value is used several times, autograd adds up the gradients in place if it holds the last
    reference to the first one, which is dense (`can_accumulate_inplace` in
    torch/csrc/autograd/input_buffer.cpp). Under a dispatch mode it never does, because
    `isTensorSubclassLike` (ATen/TensorSubclassLikeUtils.h) then holds for all tensors.

    Parameters
    ----------
    operator, args
        As a dispatch mode gets them. It must be the innermost one: those entered after it hold `args` too.
    """
    if operator is not torch.ops.aten.add.Tensor or torch._C._current_graph_task_id() < 0 or torch.is_grad_enabled():
        return 0
    if type(args[0]) is not torch.Tensor or sys.getrefcount(args[0]) > _REFERENCES[1]:
        return 0
    storage = args[0].untyped_storage()
    uses: int = args[0]._use_count()  # type: ignore[attr-defined]
    is_held = uses > _REFERENCES[0] or torch._C._storage_Use_Count(storage._cdata) > _REFERENCES[2]
    return 0 if is_held or storage.nbytes() != args[0].nbytes else storage.nbytes()


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
