"""AOTAutograd: the joint graph of a forward and its backward, and what its inputs and outputs mean.

Expected of `export_joint`: nothing is computed, the graph calls functional operators of ATen
only, placeholders and the output node have a descriptor per value in `meta["desc"]`, and
parameters, buffers and arguments come in the order of the module's own. A gradient's descriptor
names the input that it is the gradient of (`grad_of`), a tangent's the output (`output`), that
of a changed input its old value (`mutated_input`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import (
    AOTOutput,
    BufferAOTInput,
    DifferentiableAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)

__all__ = [
    "AOTOutput",
    "BufferAOTInput",
    "DifferentiableAOTInput",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "export_joint",
]


def export_joint(module: nn.Module, tensors: Sequence[Tensor]) -> fx.GraphModule:
    """Return the joint graph of a module that takes tensors and returns tensors.

    The random state of devices stays what operators draw from, and the backward is traced
    without autocast, as eager PyTorch runs it. Python code for the graph is generated only if it
    is read or called, which plans do not do.
    """
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    with contextlib.ExitStack() as stack:
        stack.enter_context(_use_lazy_graph_module(True))
        stack.enter_context(config.patch(backward_pass_autocast="off", functionalize_rng_ops=False))
        exported = aot_export_joint_with_descriptors(stack, module, tuple(tensors), {})
        graph: fx.GraphModule = exported.graph_module
    return graph
