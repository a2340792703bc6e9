"""TorchDynamo: the capture of code that only an analysis of its bytecode understands."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import cast

from torch import nn
from torch._guards import CompileContext, TracingContext, tracing

LOGGERS = ("torch._subclasses.fake_tensor", "torch._dynamo")
"""The loggers to which torch reports what fails while it traces."""


def capture(
    module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], *, ignored_functions: set[object]
) -> nn.Module:
    """Return a module without Python control flow that does what a module does with these arguments.

    All sizes are those of the call. Side effects on objects are dropped, each with a warning
    that has "side effects" in it and lists the sources of the objects.

    Parameters
    ----------
    module : nn.Module
    args, kwargs
        Its arguments: tensors and containers of tensors.
    ignored_functions : set
        Functions whose calls are left out, such as those of loggers.
    """
    import torch._dynamo
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export

    with torch._dynamo.config.patch(
        automatic_dynamic_shapes=False, assume_static_by_default=True, ignore_logging_functions=ignored_functions
    ):
        return cast("nn.Module", dynamo_graph_capture_for_export(module)(*args, **kwargs))


def forget_compiled() -> None:
    """Forget what TorchDynamo has compiled: the shapes of earlier calls would make sizes symbolic in later ones."""
    import torch._dynamo

    torch._dynamo.reset()


def outside_of_compilation() -> AbstractContextManager[object]:
    """Return a context in which nothing is known of the graph that `torch.compile` is compiling now."""
    return tracing(None)


def compilation_number() -> str:
    """Return the number of the graph that is compiled now: that of its frame, "/", and how often it was compiled."""
    return str(CompileContext.current_compile_id())


def traced_lines() -> traceback.StackSummary:
    """Return the lines of user code that TorchDynamo traces now, the innermost one last; empty outside of it."""
    return TracingContext.extract_stack()
