"""The training steps of a model without data, by batch size, length and dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from scheduler.devices import Device
from scheduler.errors import CaptureError, InvalidOptionError
from scheduler.graph import Graph
from scheduler.planning.deep_graphs import deep_graph_at
from scheduler.planning.graph_variants import with_resident
from scheduler.planning.levers import PlainStep
from scheduler.pytorch.costs.operators import Costs
from scheduler.pytorch.measurement.optimizer_memory import MakeOptimizer, OptimizerMemory, optimizer_memory
from scheduler.pytorch.models.catalog import Arguments
from scheduler.pytorch.models.shallow_models import shallow_copy
from scheduler.pytorch.torch_private.pytree import tree_map_only
from scheduler.pytorch.tracing import trace, trace_eager

MakeBatch = Callable[..., Arguments]
"""Takes a batch size, and a length if there is one, and returns `(args, kwargs)`."""
Sizes = tuple[int, int | None, torch.dtype | None]
"""Batch size, length and dtype of a step."""


class DatalessSteps:
    """The training steps of one model on device "meta", by batch size, length and dtype.

    Parameters
    ----------
    make_model, make_batch, device, loss, optimizer, progress
        As for `fit`.
    autocast, dtype : torch.dtype, optional
        As for `fit`.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        make_batch: MakeBatch,
        device: Device,
        *,
        loss: Callable[..., Tensor] | None,
        optimizer: str | MakeOptimizer,
        autocast: torch.dtype | None,
        dtype: torch.dtype | None,
        progress: Callable[[str], None],
    ) -> None:
        self._make_model, self._make_batch = make_model, make_batch
        self.device, self.loss, self.optimizer = device, loss, optimizer
        self.autocast, self.dtype, self._progress = autocast, dtype, progress
        self._models: dict[torch.dtype | None, nn.Module] = {}
        self._shallow: dict[torch.dtype | None, nn.Module | None] = {}
        self._memories: dict[tuple[torch.dtype | None, str | MakeOptimizer], OptimizerMemory] = {}
        self.is_plain_plannable = device.platform != "cpu"
        """Whether both graphs of a step are the same: for a device that is elsewhere, that of eager PyTorch."""
        self._plannable = _TracedSteps(self, trace)
        self._plain = self._plannable if self.is_plain_plannable else _TracedSteps(self, trace_eager)

    @property
    def name(self) -> str:
        return type(self.model(self.dtype)).__name__

    @property
    def dtype_text(self) -> str:
        """The dtype of most parameters, and that of autocast."""
        sizes: dict[str, int] = {}
        for parameter in self.model(self.dtype).parameters():
            text = str(parameter.dtype).removeprefix("torch.")
            sizes[text] = sizes.get(text, 0) + parameter.numel()
        text = max(sizes, key=lambda found: sizes[found])
        return text if self.autocast is None else f"{text}, autocast to {str(self.autocast).removeprefix('torch.')}"

    def model(self, dtype: torch.dtype | None) -> nn.Module:
        """Return the model on device "meta"."""
        if dtype not in self._models:
            with torch.device("meta"):
                made: object = self._make_model()
            if not isinstance(made, nn.Module):
                raise InvalidOptionError(f"make_model must return an nn.Module, got {type(made).__name__}")
            made.to("meta")
            self._models[dtype] = made if dtype is None else made.to(dtype)
        return self._models[dtype]

    def shallow_model(self, dtype: torch.dtype | None) -> nn.Module | None:
        """Return the model with fewer blocks, None if it has no long list of equal blocks."""
        if dtype not in self._shallow:
            self._shallow[dtype] = shallow_copy(self.model(dtype))
        return self._shallow[dtype]

    def memory(self, dtype: torch.dtype | None, optimizer: str | MakeOptimizer) -> OptimizerMemory:
        """Return the memory of an optimizer of the model."""
        key = dtype, optimizer
        if key not in self._memories:
            platform = self.device.platform.replace("rocm", "cuda")
            self._memories[key] = optimizer_memory(self.model(dtype).parameters(), optimizer, platform)
        return self._memories[key]

    def graph(self, batch_size: int, length: int | None) -> Graph:
        """Return the graph of a step that a plan can follow, with the optimizer's state."""
        return self._held(self._plannable.at((batch_size, length, self.dtype)))

    def plain_graph(self, batch_size: int, length: int | None, dtype: torch.dtype | None) -> Graph:
        """Return the graph of a step as eager PyTorch runs it, without the optimizer's state."""
        return self._plain.at((batch_size, length, dtype))

    def held_plain_graph(self, batch_size: int, length: int | None) -> Graph:
        """Return the graph of a step as eager PyTorch runs it, with the optimizer's state."""
        return self._held(self._plain.at((batch_size, length, self.dtype)))

    def plain(self, batch_size: int, length: int | None) -> PlainStep:
        """Return the step without a plan."""
        memory = self.memory(self.dtype, self.optimizer)
        graph = self.plain_graph(batch_size, length, self.dtype)
        return PlainStep.of(graph, memory.state_bytes, memory.temporary_bytes, self.device)

    def traced(self, run: Callable[..., Graph], model: nn.Module, sizes: Sizes) -> Graph:
        """Return the graph of a step of a model, by `trace` or `trace_eager`."""
        batch_size, length, dtype = sizes
        self._progress(f"tracing a batch of {batch_size}" + ("" if length is None else f" and a length of {length}"))
        with torch.device("meta"):
            args, kwargs = self._make_batch(batch_size) if length is None else self._make_batch(batch_size, length)
        if dtype is not None:
            args, kwargs = tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))
        is_known = self.device.has_rates
        costs: Costs = self.device if is_known else "measured"
        with contextlib.nullcontext() if self.autocast is None else torch.autocast("cpu", self.autocast):
            return run(model, args, kwargs, loss=self.loss, costs=costs, workspaces=None if is_known else True)

    def _held(self, graph: Graph) -> Graph:
        """Return a graph with the optimizer's state."""
        return with_resident(graph, "optimizer", self.memory(self.dtype, self.optimizer).state_bytes, "optimizer state")


class _TracedSteps:
    """The graphs of a step in one form.

    Of a model with many equal blocks, only the first size is traced as it is; others follow
    from copies with fewer blocks, where that can be checked.
    """

    def __init__(self, steps: DatalessSteps, run: Callable[..., Graph]) -> None:
        self._steps, self._run = steps, run
        self._whole: dict[Sizes, Graph] = {}
        self._shallow: dict[Sizes, Graph] = {}
        self._fails_shallow: set[torch.dtype | None] = set()

    def at(self, sizes: Sizes) -> Graph:
        """Return the graph of a step, without the optimizer's state."""
        if sizes in self._whole:
            return self._whole[sizes]
        found = self._from_fewer_blocks(sizes)
        if found is None:
            found = self._whole[sizes] = self._steps.traced(self._run, self._steps.model(sizes[2]), sizes)
        return found

    def _from_fewer_blocks(self, sizes: Sizes) -> Graph | None:
        known = {other: graph for other, graph in self._whole.items() if other[2] == sizes[2]}
        if not known or sizes[2] in self._fails_shallow:
            return None
        model = self._steps.shallow_model(sizes[2])
        if model is None:
            return None
        for wanted in (*known, sizes):
            if wanted not in self._shallow:
                try:
                    self._shallow[wanted] = self._steps.traced(self._run, model, wanted)
                except CaptureError:
                    self._fails_shallow.add(sizes[2])
                    return None
        grown = self._shallow[sizes]
        found = (deep_graph_at(graph, self._shallow[other], grown) for other, graph in known.items())
        return next((graph for graph in found if graph is not None), None)
