"""A captured training step: the graph to plan, and what each of its operations runs."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.graph import Graph
from scheduler.pytorch.capture.arguments import Signature
from scheduler.pytorch.capture.instructions import Instruction, Lowered
from scheduler.pytorch.capture.joint import Joint


@dataclass(frozen=True)
class Capture:
    """A captured training step: the graph to plan, and what each of its operations runs.

    Attributes
    ----------
    graph : Graph
        Its results are the outputs, the gradients of what is trainable, and incoming
        gradients as small as a number.
    joint : Joint
        The joint fx graph behind it.
    lowered : Lowered
        Instruction of each operation, node of each resident tensor.
    """

    joint: Joint
    lowered: Lowered

    @property
    def graph(self) -> Graph:
        """The graph to plan."""
        return self.lowered.graph

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """What each operation runs, in the order of the graph's operations."""
        return self.lowered.instructions

    @property
    def signature(self) -> Signature:
        """The structure of the arguments."""
        return self.joint.signature
