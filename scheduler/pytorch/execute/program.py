"""A planned step as code: one forward and a list of backward segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from scheduler.pytorch.capture.instructions import Tangents

Code = Callable[..., tuple[list[Tensor], ...]]


@dataclass(frozen=True)
class Forward:
    """The code of the forward.

    Attributes
    ----------
    run : callable
        Takes the tensors of `resident` and returns the outputs and the tensors of `saved`.
    resident : tuple of str
        Resident tensors that it reads or changes.
    saved : tuple of str
        Tensors that the first segment of the backward takes.
    source : str
        The Python text.
    """

    run: Code
    resident: tuple[str, ...]
    saved: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class Segment:
    """The code of one segment of the backward: one autograd node.

    Attributes
    ----------
    run : callable
        Takes the tensors of `carried` and `resident` and the incoming gradients as two lists,
        which it empties, and returns its gradients and what the next segment is carried.
    carried, resident : tuple of str
        Tensors that it takes from the part before, and resident ones that it reads.
    gradients : tuple of int
        Which of the capture's gradients it returns.
    source : str
    """

    run: Code
    carried: tuple[str, ...]
    resident: tuple[str, ...]
    gradients: tuple[int, ...]
    source: str

    @property
    def saved(self) -> tuple[str, ...]:
        """All tensors that it takes."""
        return (*self.carried, *self.resident)


@dataclass(frozen=True)
class Program:
    """A planned step as code.

    Attributes
    ----------
    forward : Forward
    backward : tuple of Segment
    outputs : tuple of str
        The tensor of each of the module's output tensors.
    tangents : Tangents
        Which outputs receive gradients.
    """

    forward: Forward
    backward: tuple[Segment, ...]
    outputs: tuple[str, ...]
    tangents: Tangents
