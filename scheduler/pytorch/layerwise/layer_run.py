"""One step of planned layers, between its forward and the end of its backward."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scheduler.errors import ExecutionError
from scheduler.pytorch.layerwise.groups import Gradients, Link, Moment, Saved, State
from scheduler.pytorch.layerwise.profiling import Boundary, kind_of
from scheduler.pytorch.layerwise.program import LayerProgram, Step
from scheduler.pytorch.torch_private.tensors import version_of


@dataclass(frozen=True, eq=False)
class PlannedLayers:
    """The layers of a model and the program that they follow.

    Attributes
    ----------
    links : tuple of Link
    boundaries : tuple of Boundary
        Before each link, and after the last.
    extras : tuple of tuple of Tensor
        Per link: tensors that get a gradient and are not parameters of its modules.
    program : LayerProgram
    device_types : list of str
        Device types whose autocast state affects the layers.
    """

    links: tuple[Link, ...]
    boundaries: tuple[Boundary, ...]
    extras: tuple[tuple[Tensor, ...], ...]
    program: LayerProgram
    device_types: list[str]

    def trained(self, i: int) -> list[Tensor]:
        """Return the tensors that get a gradient in the backward of a link."""
        return [*dict.fromkeys([*self.links[i].trainable(), *self.extras[i]])]

    @property
    def backward(self) -> tuple[tuple[int, tuple[Step, ...]], ...]:
        """The parts of the backward, up to the last that returns a gradient."""
        takes_gradient = any(self.boundaries[0].differentiable)
        parts = enumerate(self.program.backward, 1)
        last = max(end for end, (i, _) in parts if self.trained(i) or (i == 0 and takes_gradient))
        return self.program.backward[:last]


class LayerRun:
    """One step: runs the program and holds the tensors that are live.

    Parameters
    ----------
    layers : PlannedLayers
    backward : sequence of (int, sequence of Step)
        The parts of the backward that will run.
    arguments : State
        The arguments of the call.

    Attributes
    ----------
    states : dict of int to State
        By the link that reads each; the last is the output.
    saved : dict of int to Saved
        By link.
    gradients : dict of int to list
        Of the states, by the same numbers.
    next_position : int
        The part of the backward that runs next.
    """

    def __init__(self, layers: PlannedLayers, backward: Sequence[tuple[int, Sequence[Step]]], arguments: State) -> None:
        self.layers = layers
        self.states = {0: arguments}
        self.saved: dict[int, Saved] = {}
        self.gradients: dict[int, Gradients] = {}
        self.next_position = 0
        self._parts = backward
        self._parameter_gradients: Gradients = []
        self._have_run: set[int] = set()
        self._fixed = [link.fixed_tensors() for link in layers.links]
        self._moments: dict[int, Moment] = {}
        self._last_moment: Moment | None = None
        self._versions: dict[int, list[tuple[Tensor, int]]] = {}
        self._autocast = _read_autocast(layers.device_types)
        self._in_backward = False

    def execute(self, steps: Sequence[Step]) -> None:
        """Execute these steps."""
        for step in steps:
            match step.action:
                case "backward":
                    self._backward(step)
                case "free state":
                    self.states.pop(step.link, None)
                case "free saved":
                    self.saved.pop(step.link, None)
                case "free gradient":
                    self.gradients.pop(step.link, None)
                case "forward" | "save":
                    self._forward(step.link, saving=step.action == "save")

    def backward(self, position: int, incoming: Sequence[Tensor | None]) -> Gradients:
        """Run one part of the backward and return the gradients of its link.

        Parameters
        ----------
        position : int
            Which part.
        incoming : sequence of (Tensor or None)
            For the first part: the gradients of the differentiable outputs.

        Returns
        -------
        list of (Tensor or None)
            Of what the link trains; for link 0 also of the differentiable arguments.
        """
        boundaries = self.layers.boundaries
        if position != self.next_position:
            raise ExecutionError(
                "the backward of a planned step runs once, and what it needs is gone: run the forward again"
            )
        self.next_position += 1
        self._in_backward = True
        if position == 0:
            self._check_same_tensors()
            given = iter(incoming)
            self.gradients[len(self.layers.links)] = [
                next(given) if flag else None for flag in boundaries[-1].differentiable
            ]
        link, steps = self._parts[position]
        self.execute(steps)
        found, self._parameter_gradients = self._parameter_gradients, []
        if link == 0:
            pairs = zip(self.gradients[0], boundaries[0].differentiable, strict=True)
            found += [gradient for gradient, flag in pairs if flag]
        if self.next_position == len(self._parts):
            self.states.clear()
            self.saved.clear()
            self.gradients.clear()
            self._moments.clear()
            self._versions.clear()
        return found

    def _check_same_tensors(self) -> None:
        """Raise an `ExecutionError` if a layer has got other parameters or buffers since the forward."""
        for link, then in zip(self.layers.links, self._fixed, strict=True):
            now = link.fixed_tensors()
            if len(now) != len(then) or any(a is not b for a, b in zip(now, then, strict=True)):
                raise ExecutionError(
                    f'layer "{link.name}" has other parameters or buffers in the backward than in the forward, as after'
                    " torch.func.functional_call: replace them after the backward, or use"
                    ' granularity="operations", which keeps those of the forward'
                )
        self._fixed.clear()

    def _forward(self, i: int, *, saving: bool) -> None:
        link = self.layers.links[i]
        is_first = i not in self._have_run
        saved: Saved | None = None
        with contextlib.ExitStack() as stack:
            if is_first:
                self._remember(i)
            else:
                self._check_versions(i)
                stack.enter_context(link.replay(self._moments[i]))
            if self._in_backward:
                for kind, dtype, enabled, cached in self._autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
            if saving:
                output, saved = link.forward_saving(self.states[i])
                self.saved.setdefault(i, saved)
            else:
                output = link.forward(self.states[i])
        self._check_output(i, output, saved, is_first=is_first)
        self.states.setdefault(i + 1, output)

    def _check_output(self, i: int, output: State, saved: Saved | None, *, is_first: bool) -> None:
        """Raise an `ExecutionError` if the output of a link is not like that of the profile."""
        link, planned = self.layers.links[i], self.layers.boundaries[i + 1]
        if is_first and (output.spec != planned.spec or tuple(map(kind_of, output.leaves)) != planned.kinds):
            raise ExecutionError(
                f'layer "{link.name}" returns {[kind_of(leaf) for leaf in output.leaves]}, but the plan has'
                f" {list(planned.kinds)}: make a plan for this model"
            )
        if saved is not None and tuple(edge is not None for edge in saved.outputs) != planned.differentiable:
            raise ExecutionError(
                f'other outputs of layer "{link.name}" require gradients than when the plan was made:'
                " make a plan for this model"
            )

    def _backward(self, step: Step) -> None:
        i = step.link
        found, parameters = self.layers.links[i].backward(
            self.saved[i],
            self.gradients[i + 1],
            self.layers.trained(i),  # also in a backward that is repeated later, as it was measured
            keep_saved=step.keeps_saved,
        )
        by_leaf = iter(found)
        differentiable = self.layers.boundaries[i].differentiable
        self.gradients.setdefault(i, [next(by_leaf) if flag else None for flag in differentiable])
        if step.is_last:
            self._parameter_gradients = parameters

    def _remember(self, i: int) -> None:
        """Before the first run of a link, remember what a recomputation of it must find."""
        self._have_run.add(i)
        if i in self.layers.program.repeated:
            link = self.layers.links[i]
            self._moments[i] = self._last_moment = link.remember(self._last_moment)
            tensors = [*link.fixed_tensors(), *self.layers.extras[i], *self.states[0].tensors]
            self._versions[i] = [(tensor, _version(tensor)) for tensor in tensors]

    def _check_versions(self, i: int) -> None:
        if any(_version(tensor) != version for tensor, version in self._versions[i]):
            raise ExecutionError(
                f'a parameter or buffer of layer "{self.layers.links[i].name}", or an argument of the call, was changed'
                " in place between forward and backward, but the layer must be recomputed: change it after the backward"
            )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _read_autocast(device_types: Sequence[str]) -> list[tuple[str, torch.dtype, bool, bool]]:
    cached = torch.is_autocast_cache_enabled()
    return [(t, torch.get_autocast_dtype(t), torch.is_autocast_enabled(t), cached) for t in device_types]
