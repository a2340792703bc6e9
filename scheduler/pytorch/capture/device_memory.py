"""What stands in the device's memory beside a step: a reserve, the optimizer's state, old gradients.

It joins the resident tensors of a graph or a chain, so that a budget is the device's. A graph
says by the names of its resident tensors what was counted.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor as TorchTensor
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from scheduler.errors import InvalidOptionError
from scheduler.graph import Graph, Tensor
from scheduler.pytorch.measurement.memory import storage_bytes
from scheduler.units import parse_bytes

_BESIDE_THE_STEP = ("reserve", "optimizer state")


@dataclass(frozen=True)
class DeviceMemory:
    """What stands in the device's memory beside a step.

    Attributes
    ----------
    tensors : tuple of Tensor
        Named "reserve", and "optimizer:" with the name of a parameter.
    accumulate_gradients : bool
        Whether every trained tensor has a `.grad` already, to which the step adds.
    """

    tensors: tuple[Tensor, ...] = ()
    accumulate_gradients: bool = False


NOTHING_BESIDE = DeviceMemory()


def read_device_memory(
    model: object,
    reserve: int | str = 0,
    optimizer: Optimizer | None = None,
    accumulate_gradients: bool = False,
) -> DeviceMemory:
    """Return what stands beside the step of a model.

    Parameters
    ----------
    model : nn.Module or sequence of callable
        Names the parameters.
    reserve : int or str
        Bytes, as an int or as text such as "1GiB".
    optimizer : torch.optim.Optimizer, optional
        Its state counts for each of its parameters that requires a gradient.
    accumulate_gradients : bool

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
            raise InvalidOptionError(f"optimizer is a torch.optim.Optimizer, not {type(optimizer).__name__}")
        if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
            raise InvalidOptionError(f"{type(optimizer).__name__} wraps another optimizer: give that one")
        names = _parameter_names(model)
        tensors += [
            Tensor(f"optimizer:{name}", size, role="optimizer state")
            for name, size in _state_sizes(optimizer, names)
            if size
        ]
    return DeviceMemory(tuple(tensors), bool(accumulate_gradients))


def memory_beside(graph: Graph) -> DeviceMemory:
    """Return what a graph counts beside its step."""
    resident = [graph.tensor(name) for name in graph.resident]
    return DeviceMemory(
        tuple(tensor for tensor in resident if tensor.role in _BESIDE_THE_STEP),
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
    """Return the state that the optimizer makes for such a parameter in its first step.

    A twin of the optimizer takes a step on a twin of the parameter.
    """
    twin = torch.zeros_like(parameter, requires_grad=True)
    twin.grad = torch.zeros_like(parameter)
    trial = object.__new__(type(optimizer))
    trial.__dict__.update(vars(optimizer))
    trial.__dict__.pop("step", None)  # a learning-rate scheduler's, which would step the original
    trial.param_groups = [{**group, "params": [twin]}]
    trial.state = defaultdict(dict)
    trial._optimizer_step_pre_hooks = OrderedDict()
    trial._optimizer_step_post_hooks = OrderedDict()
    try:
        type(optimizer).step(trial)
    except Exception as error:  # optimizers raise errors of many kinds
        raise InvalidOptionError(
            f"{type(optimizer).__name__} cannot take a step on one parameter alone ({type(error).__name__}: {error}),"
            " so the size of its state is not known: let it take its first step before, or give the bytes as reserve="
        ) from error
    return trial.state[twin]
