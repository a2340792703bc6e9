"""Where a resident tensor is found when the step runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

from torch import Tensor, nn

from scheduler.pytorch.capture.captured_step import Capture
from scheduler.pytorch.capture.joint import Source
from scheduler.pytorch.execute.guards import tensor_key


class Place:
    """Where a resident tensor is found when the step runs: in the arguments, or in an attribute of a module.

    Parameters
    ----------
    module : nn.Module
        Holds the model as `module` and the loss as `loss`.
    source : Source
        Where the tensor came from when the step was captured.
    """

    def __init__(self, module: nn.Module, source: Source) -> None:
        self.source = source
        self._holders: list[tuple[Mapping[str, Tensor], str]] = []
        if source.kind == "input" or source.read is not None:
            return
        for name in source.paths:
            path, _, key = name.rpartition(".")
            owner = module.get_submodule(path)
            holder = {"parameter": owner._parameters, "buffer": owner._buffers, "constant": vars(owner)}
            self._holders.append((holder[source.kind], key))  # type: ignore[arg-type]

    def find(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the tensor.

        Parameters
        ----------
        inputs : sequence of Tensor
            The distinct tensors in the arguments of the call.
        """
        if self.source.kind == "input":
            return inputs[self.source.position]
        if self.source.read is not None:
            return self.source.read()
        holder, key = self._holders[0]
        return holder[key]

    def is_shared(self, tensor: Tensor) -> bool:
        """Return whether all names of the tensor still refer to this one."""
        return len(self._holders) < 2 or all(holder[key] is tensor for holder, key in self._holders)


class TensorKeys:
    """The tensors in some places, as they were when the plan was made.

    Parameters
    ----------
    places : sequence of Place
        None of them in the arguments of a call.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._planned = [(place, tensor_key(place.find(()))) for place in places]
        self._note()

    def _note(self) -> None:
        self._tensors = [place.find(()) for place, _ in self._planned]
        self._state = self._read_state()

    def _read_state(self) -> tuple[list[bool], list[int]]:
        return list(map(_REQUIRES_GRAD, self._tensors)), list(map(Tensor.data_ptr, self._tensors))

    def are_untouched(self) -> bool:
        """Return whether no tensor, if all are the same objects, has got other data or another requires_grad."""
        return self._read_state() == self._state

    def difference(self) -> str:
        """Return which tensor has another shape, dtype, device or requires_grad; "" if none has."""
        for place, key in self._planned:
            tensor = place.find(())
            if tensor_key(tensor) != key:
                return f'{place.source.kind} "{place.source.names[0]}" is {tensor_key(tensor)}, but the plan has {key}'
            if not place.is_shared(tensor):
                return f"{', '.join(place.source.names)} were one tensor when the plan was made"
        self._note()
        if len(set(map(id, self._tensors))) != len(self._tensors):
            return self._joined()
        return ""

    def _joined(self) -> str:
        """Return which places hold one tensor, although they held two."""
        first: dict[int, Place] = {}
        for (place, _), tensor in zip(self._planned, self._tensors, strict=True):
            other = first.setdefault(id(tensor), place)
            if other is not place:
                return f"{other.source.names[0]} and {place.source.names[0]} were two tensors when the plan was made"
        raise AssertionError("all tensors differ")


_REQUIRES_GRAD = attrgetter("requires_grad")


def places_of(module: nn.Module, captured: Capture, names: Sequence[str]) -> list[Place]:
    """Return the places of resident tensors of a captured step.

    Parameters
    ----------
    module : nn.Module
        As for `Place`.
    captured : Capture
    names : sequence of str
    """
    sources, nodes = captured.joint.sources, captured.lowered.resident
    return [Place(module, sources[nodes[name]]) for name in names]
