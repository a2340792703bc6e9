"""Memory of the device in addition to a step's own: a reserve, the optimizer's state, existing gradients.

It joins the resident tensors of a graph or a chain, so that a budget is the device's. The
roles of a graph's resident tensors state what was counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor as TorchTensor
from torch import nn
from torch.optim import Optimizer

from scheduler.errors import InvalidOptionError
from scheduler.graph import Graph, Tensor
from scheduler.pytorch.measurement.memory import storage_bytes
from scheduler.pytorch.torch_private.modules import remove_step_hooks
from scheduler.pytorch.torch_private.pytree import tree_leaves
from scheduler.units import parse_bytes

_ROLES = ("reserve", "optimizer state")


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of the device in addition to a step's own.

    Attributes
    ----------
    tensors : tuple of Tensor
        Of role "reserve" or "optimizer state".
    accumulate_gradients : bool
        Whether every trained tensor already has a `.grad`, to which the step adds.
    """

    tensors: tuple[Tensor, ...] = ()
    accumulate_gradients: bool = False


NO_OTHER_MEMORY = DeviceMemory()


def read_device_memory(
    model: object,
    reserve: int | str = 0,
    optimizer: Optimizer | None = None,
    accumulate_gradients: bool = False,
) -> DeviceMemory:
    """Return the memory in addition to the step of a model.

    Parameters
    ----------
    model : nn.Module or sequence of callable
        Gives the names of the parameters.
    reserve : int or str
        Bytes to keep free, as an int or as text such as "1GiB".
    optimizer : torch.optim.Optimizer, optional
        Its state is counted for each of its parameters that requires a gradient.
    accumulate_gradients : bool
        Whether the trained tensors have gradients already.

    Raises
    ------
    InvalidBudgetError
        If `reserve` cannot be understood.
    InvalidOptionError
        If the optimizer wraps another one, or has no state yet and cannot take a step on a
        parameter alone.
    """
    reserved = parse_bytes(reserve)
    tensors = [Tensor("reserve", reserved, role="reserve")] if reserved else []
    if optimizer is not None:
        if not isinstance(optimizer, Optimizer):
            raise InvalidOptionError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
            raise InvalidOptionError(f"{type(optimizer).__name__} wraps another optimizer: give the wrapped one")
        names = _parameter_names(model)
        tensors += [
            Tensor(f"optimizer:{name}", size, role="optimizer state")
            for name, size in _state_sizes(optimizer, names)
            if size
        ]
    return DeviceMemory(tuple(tensors), bool(accumulate_gradients))


def device_memory_of(graph: Graph) -> DeviceMemory:
    """Return the memory that a graph counts in addition to its step."""
    resident = [graph.tensor(name) for name in graph.resident]
    return DeviceMemory(
        tuple(tensor for tensor in resident if tensor.role in _ROLES),
        any(tensor.role == "gradient" for tensor in resident),
    )


def _parameter_names(model: object) -> dict[TorchTensor, str]:
    layers = [(f"{number}.", layer) for number, layer in enumerate(model)] if isinstance(model, Sequence) else []
    return {
        parameter: f"{prefix}{name}"
        for prefix, layer in layers or [("", model)]
        if isinstance(layer, nn.Module)
        for name, parameter in layer.named_parameters()
    }


def _state_sizes(optimizer: Optimizer, names: Mapping[TorchTensor, str]) -> Iterator[tuple[str, int]]:
    """Yield the bytes of the state of each parameter, on the parameter's device."""
    known: dict[tuple[object, ...], int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(dict.fromkeys(group["params"])):
            if not parameter.requires_grad:
                continue
            name = names.get(parameter, f"group {number}, parameter {position}")
            state = optimizer.state.get(parameter)
            if state:
                yield name, _bytes_of(state, parameter)
                continue
            key = (number, parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
            if key not in known:
                known[key] = _bytes_of(_first_state(optimizer, group, parameter), parameter)
            yield name, known[key]


def _bytes_of(state: object, parameter: TorchTensor) -> int:
    leaves = tree_leaves(state)
    return storage_bytes(x for x in leaves if isinstance(x, TorchTensor) and x.device == parameter.device)


def _first_state(optimizer: Optimizer, group: dict[str, object], parameter: TorchTensor) -> object:
    """Return the state that the optimizer creates for such a parameter in its first step.

    A copy of the optimizer takes a step on a copy of the parameter.
    """
    copy = torch.zeros_like(parameter, requires_grad=True)
    copy.grad = torch.zeros_like(parameter)
    trial = object.__new__(type(optimizer))
    trial.__dict__.update(vars(optimizer))
    trial.__dict__.pop("step", None)  # the wrapper of a learning-rate scheduler, which would step the original
    trial.param_groups = [{**group, "params": [copy]}]
    trial.state = defaultdict(dict)
    remove_step_hooks(trial)
    try:
        type(optimizer).step(trial)
    except Exception as error:  # optimizers raise errors of many kinds
        raise InvalidOptionError(
            f"{type(optimizer).__name__} cannot take a step on one parameter alone ({type(error).__name__}: {error}),"
            " so the size of its state is unknown: let it take its first step before planning, or give its bytes as"
            " reserve="
        ) from error
    return trial.state[copy]
