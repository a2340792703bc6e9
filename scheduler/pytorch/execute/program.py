"""A planned step as code: one forward and a list of segments of the backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from scheduler.pytorch.capture.instructions import Tangents

Code = Callable[..., tuple[list[Tensor], ...]]


@dataclass(frozen=True)
class Forward:
    """The code of the forward pass.

    Attributes
    ----------
    run : callable
        Takes a list of the tensors of `resident`, which it empties, and returns the outputs and
        the tensors of `saved`.
    resident : tuple of str
        Resident tensors that it reads or changes.
    saved : tuple of str
        Tensors that the first segment of the backward takes.
    source : str
        The Python source code.
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
        Takes two lists, which it empties: the tensors of `carried` and `resident`, and the
        incoming gradients. Returns its gradients and the tensors that the next segment carries.
    carried : tuple of str
        Tensors that the forward or the segment before hands to it.
    resident : tuple of str
        Resident tensors that it reads.
    gradients : tuple of int
        Which of the capture's gradients it returns.
    source : str
        The Python source code.
    """

    run: Code
    carried: tuple[str, ...]
    resident: tuple[str, ...]
    gradients: tuple[int, ...]
    source: str

    @property
    def saved(self) -> tuple[str, ...]:
        """All tensors that the segment takes."""
        return (*self.carried, *self.resident)


@dataclass(frozen=True)
class Program:
    """A planned step as code.

    Attributes
    ----------
    forward : Forward
    backward : tuple of Segment
    outputs : tuple of str
        The name of the tensor that each of the module's outputs is.
    tangents : Tangents
        The outputs that receive gradients.
    """

    forward: Forward
    backward: tuple[Segment, ...]
    outputs: tuple[str, ...]
    tangents: Tangents
