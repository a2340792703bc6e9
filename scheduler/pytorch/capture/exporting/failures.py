"""Why a model cannot be captured: because it fails by itself, or because of something that a capture cannot follow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from scheduler.errors import CaptureError, SchedulerError
from scheduler.pytorch.capture.joint import Joint
from scheduler.pytorch.capture.kept_state import kept_state
from scheduler.pytorch.capture.wrappers import check_unwrapped
from scheduler.pytorch.guards.read_names import MOST_ENTRIES
from scheduler.pytorch.source_lines import line_of_error
from scheduler.pytorch.torch_private import pytree
from scheduler.pytorch.torch_private.operators import schema_of
from scheduler.pytorch.torch_private.tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    fake_mode_of,
    has_data,
    is_traceable_wrapper_subclass,
)


def check_module(module: object, tensors: Sequence[Tensor]) -> None:
    """Refuse, before any tracing, a module that certainly cannot be captured for these arguments.

    Raises
    ------
    CaptureError
        If it is no module, nothing requires a gradient, or a wrapper or parameter cannot be traced.
    """
    if not isinstance(module, nn.Module):
        raise CaptureError(f"the model must be an nn.Module, got {type(module).__name__}: wrap the function in one")
    if not any(tensor.requires_grad for tensor in (*module.parameters(), *tensors)):
        raise CaptureError(
            "no parameter and no input requires a gradient, so there is no backward to plan:"
            " call requires_grad_(True) on what is to be trained"
        )
    check_unwrapped(module)
    for name, parameter in module.named_parameters():
        if is_traceable_wrapper_subclass(parameter):
            raise CaptureError(
                f'parameter "{name}" is a {type(parameter).__name__}, which consists of several tensors and would be'
                ' taken apart in the graph: plan without it, or use granularity="modules", which captures nothing'
            )


def check_has_data(tensors: Iterable[Tensor], what: str) -> None:
    """Refuse to train or measure a model on tensors without data.

    Parameters
    ----------
    tensors : iterable of Tensor
        The parameters and buffers of the model, and its arguments.
    what : str
        What cannot be done with them.

    Raises
    ------
    CaptureError
        If one of them is fake or on device "meta".
    """
    without = next((tensor for tensor in tensors if not has_data(tensor)), None)
    if without is not None:
        kind = 'on device "meta"' if without.is_meta else "fake"
        raise CaptureError(
            f"a model whose parameters or arguments have no data cannot be {what}: a tensor of shape"
            f" {tuple(without.shape)} is {kind}. A plan can be made without data, with"
            ' make_plan(trace(model, args, loss=loss, costs="flops"), budget); give it to checkpointed() with the real'
            " model"
        )


def check_runs(
    run: Callable[..., object],
    name: str,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    modules: Iterable[nn.Module],
) -> None:
    """Run a model plainly, without gradients, and leave it as it was.

    Call this where a capture has failed, before blaming the capture.

    Parameters
    ----------
    run : callable
        The model with its loss.
    name : str
        Name of the model in the message.
    args, kwargs
    modules : iterable of Module
        The modules that may change while it runs.

    Raises
    ------
    CaptureError
        If the model fails by itself; its own error is the cause. If it runs, but gives buffers
        another shape, which only its first step does.
    """
    modules = list(modules)
    before = _shapes(modules)
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    parameters = (parameter for module in modules for parameter in module.parameters())
    # Operators take no fake tensors together with those that a model makes, unless these are fake too.
    mode = next((mode for tensor in (*tensors, *parameters) if (mode := fake_mode_of(tensor)) is not None), None)
    with kept_state(modules, tensors), torch.no_grad(), mode or contextlib.nullcontext():
        try:
            run(*args, **kwargs)
        except (torch.OutOfMemoryError, SchedulerError):
            return  # a step without a plan may not fit; that says nothing about the arguments
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise CaptureError(
                f"{name} reads the value of a tensor{at_line(error)}, and these have no data: give it real tensors, or"
                " compute without .item(), .tolist() and `if` on tensors there"
            ) from error
        except Exception as error:
            raise CaptureError(
                f"{name} itself fails on these arguments, also without a plan:"
                f" {type(error).__name__}: {_first_lines(error)}{at_line(error)}"
            ) from error
        after = _shapes(modules)
        if changed := [key for key, shape in before.items() if after.get(key, shape) != shape]:
            raise CaptureError(describe_reshaped([key[1] for key in changed]))


def check_outputs(leaves: Iterable[object]) -> None:
    """Refuse outputs with objects that hold tensors, such as dataclasses: a step returns tensors, and plain values.

    Parameters
    ----------
    leaves : iterable of object
        The leaves of the outputs, in torch's sense of a tree.

    Raises
    ------
    CaptureError
        If one of them holds a tensor.
    """
    for leaf in leaves:
        if not isinstance(leaf, Tensor) and _holds_tensor(leaf):
            kind = type(leaf).__name__
            raise CaptureError(
                f"the model returns an object of type {kind} that holds tensors, and a captured step cannot build such"
                " an object: pass loss=, which takes the outputs as they are and returns one tensor, or return the"
                f" tensors in tuples, lists and dicts, or call torch.utils._pytree.register_dataclass({kind}) if it is"
                " a dataclass"
            )


def _holds_tensor(value: object, depth: int = 4) -> bool:
    if isinstance(value, Tensor):
        return True
    if depth == 0 or isinstance(value, type | nn.Module):
        return False
    inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    slots = (getattr(value, name, None) for base in type(value).__mro__ for name in _slots_of(base))
    return any(_holds_tensor(part, depth - 1) for part in (*inside, *slots, *getattr(value, "__dict__", {}).values()))


def _slots_of(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def check_observers(joint: Joint) -> None:
    """Refuse observers of a quantization-aware model that have not seen a batch yet.

    Raises
    ------
    CaptureError
        If an operator will give its buffers another shape at its first run.
    """
    for node in joint.module.graph.nodes:
        if node.op != "call_function" or "fused_moving_avg_obs_fq_helper" not in str(node.target):
            continue
        values = dict(zip((argument.name for argument in schema_of(node.target).arguments), node.args, strict=False))
        if not values.get("per_row_fake_quant"):
            continue
        rows = values["self"].meta["val"].shape[values["ch_axis"]]
        held = [values[name] for name in ("running_min", "running_max", "scale", "zero_point")]
        if names := [joint.sources[x].names[0] for x in held if x in joint.sources and x.meta["val"].shape != (rows,)]:
            raise CaptureError(describe_reshaped(names))


def describe_reshaped(names: Sequence[str]) -> str:
    """Return the error message for a forward that gives these buffers another shape."""
    return (
        f"forward gives {', '.join(dict.fromkeys(names))} another shape, as an observer does that sees its first batch,"
        " but a plan is for buffers of one shape: call the model once in training mode before planning"
    )


def _shapes(modules: Iterable[nn.Module]) -> dict[tuple[int, str], tuple[int, ...]]:
    return {
        (number, name.removeprefix("module.")): tuple(buffer.shape)
        for number, module in enumerate(modules)
        for name, buffer in module.named_buffers()
    }


def at_line(*errors: BaseException) -> str:
    """Return ", at FILE:LINE: CODE" for the first error that passed user code, "" if none did."""
    return next((f", at {line}" for error in errors if (line := line_of_error(error)) is not None), "")


def describe_failure(name: str, direct: Exception, dynamo: Exception) -> str:
    """Return the message for a model that runs but cannot be captured.

    Parameters
    ----------
    name : str
    direct, dynamo : Exception
        What each way to capture it raised.
    """
    if "convert all Tensors to FakeTensors" in f"{direct} {dynamo}":
        return (
            f"{name} cannot be captured as one graph{at_line(direct, dynamo)}: it reads a tensor that is held where a"
            " later step would not find it again, such as in a set, an iterator, a weak reference or a container of"
            f" more than {MOST_ENTRIES} entries. Pass it as an argument, or hold it in a variable, a list, a dict or an"
            " attribute of an object"
        )
    return (
        f"{name} cannot be captured as one graph."
        f" Traced directly: {type(direct).__name__}: {_first_lines(direct)}{at_line(direct)}."
        f" Through TorchDynamo: {type(dynamo).__name__}: {_first_lines(dynamo)}{at_line(dynamo)}."
        " Usual causes are branches on tensor values, .item(), and shapes that depend on data."
        " Remove them, or plan the parts that can be captured,"
        ' or plan by modules, with granularity="modules", which captures nothing.'
    )


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300].rstrip(".")
