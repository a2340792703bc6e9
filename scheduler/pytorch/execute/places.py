"""Where a resident tensor is found when the step runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_

from torch import Tensor, nn

from scheduler.pytorch.capture.captured_step import Capture
from scheduler.pytorch.capture.joint import Source
from scheduler.pytorch.execute.guards import tensor_key
from scheduler.pytorch.guards.object_words import properties_check
from scheduler.pytorch.torch_private.modules import buffers_of, parameters_of


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
        for name in source.paths:
            path, _, key = name.rpartition(".")
            owner = module.get_submodule(path)
            held = parameters_of(owner) if source.kind == "parameter" else buffers_of(owner)
            self._holders.append((held, key))  # type: ignore[arg-type]

    def find(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the tensor.

        Parameters
        ----------
        inputs : sequence of Tensor
            The distinct tensors in the arguments of the call.
        """
        if self.source.kind == "input":
            return inputs[self.source.position]
        if self._holders:
            holder, key = self._holders[0]
            return holder[key]
        return self.source.reads[0]()

    def is_shared(self, tensor: Tensor) -> bool:
        """Return whether all names of the tensor still refer to this one."""
        if len(self._holders) + len(self.source.reads) < 2:
            return True
        return all(holder[key] is tensor for holder, key in self._holders) and all(
            read() is tensor for read in self.source.reads
        )


class TensorKeys:
    """The tensors in some places, as they were when the plan was made.

    Parameters
    ----------
    places : sequence of Place
        None of them in the arguments of a call.

    Attributes
    ----------
    are_untouched : callable
        Returns whether the tensors, if all are the same objects, have the same properties for certain.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._planned = [(place, tensor_key(place.find(()))) for place in places]
        self._note()

    def _note(self) -> None:
        self._tensors = [place.find(()) for place, _ in self._planned]
        self.are_untouched = properties_check(self._tensors)

    def difference(self) -> str:
        """Return which tensor has another shape, dtype, device or requires_grad; "" if none has."""
        tensors: list[Tensor] = []
        for place, key in self._planned:
            try:
                tensor = place.find(())
                is_shared = place.is_shared(tensor)
            except (LookupError, AttributeError, ValueError, TypeError) as error:
                return f"{place.source.names[0]} was a tensor when the plan was made, and cannot be read now ({error})"
            if tensor_key(tensor) != key:
                return f'{place.source.kind} "{place.source.names[0]}" is {tensor_key(tensor)}, but the plan has {key}'
            if not is_shared:
                return f"{', '.join(place.source.names)} were one tensor when the plan was made"
            tensors.append(tensor)
        if not (all(map(is_, tensors, self._tensors)) and self.are_untouched()):
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
