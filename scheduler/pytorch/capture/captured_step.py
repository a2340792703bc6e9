"""A captured training step."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.graph import Graph
from scheduler.pytorch.capture.arguments import Signature
from scheduler.pytorch.capture.instructions import Instruction, Lowered
from scheduler.pytorch.capture.joint import Joint


@dataclass(frozen=True)
class Capture:
    """A captured training step: the graph to plan, and the instruction of each operation.

    Attributes
    ----------
    joint : Joint
        The joint fx graph.
    lowered : Lowered
        The graph to plan, the instruction of each operation, the node of each resident tensor.
    """

    joint: Joint
    lowered: Lowered

    @property
    def graph(self) -> Graph:
        """The graph to plan.

        Its results are the outputs, the gradients of all trainable tensors, and incoming
        gradients no larger than one number.
        """
        return self.lowered.graph

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """The instruction of each operation, in the order of the graph's operations."""
        return self.lowered.instructions

    @property
    def signature(self) -> Signature:
        """The structure of the arguments."""
        return self.joint.signature
