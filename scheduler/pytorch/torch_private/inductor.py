"""Inductor, the compiler; importing it is slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from torch import fx
from torch._functorch import config as autograd_config
from torch._functorch.partitioners import _extract_fwd_bwd_modules
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

__all__ = ["CustomPartitionerFn", "compile_graph", "extract_forward_and_backward"]


def compile_graph(
    module: fx.GraphModule, inputs: Sequence[object], partitioner: CustomPartitionerFn | None = None
) -> Callable[..., Sequence[object]]:
    """Compile a graph from TorchDynamo.

    Parameters
    ----------
    module : GraphModule
    inputs
        Its arguments.
    partitioner : CustomPartitionerFn or None
        Splits the joint graph into forward and backward. It is identified by its `uuid()` in
        the keys of Inductor's caches, next to the two graphs that it returns; AOTAutograd's
        cache is off.
    """
    if partitioner is None:
        return cast("Callable[..., Sequence[object]]", compile_fx(module, inputs))  # type: ignore[arg-type]
    with (
        # Other layouts would save copies of inputs and weights, which plans do not count.
        config.patch(custom_partitioner_fn=partitioner, layout_optimization=False),
        autograd_config.patch(enable_autograd_cache=False),
    ):
        return cast("Callable[..., Sequence[object]]", compile_fx(module, inputs))  # type: ignore[arg-type]


def extract_forward_and_backward(
    joint: fx.GraphModule, saved: list[fx.Node], num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph; the forward returns its own outputs, and then `saved`, which the backward takes.

    Parameters
    ----------
    joint : GraphModule
    saved : list of Node
        The nodes that both parts need, in any order.
    num_fwd_outputs : int
        Number of the outputs that belong to the forward; they come first.
    """
    forward, backward = _extract_fwd_bwd_modules(joint, saved, [], num_fwd_outputs=num_fwd_outputs)
    return forward, backward
