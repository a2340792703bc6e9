"""Graphs: operations over tensors, the layers that lower to them, and their files."""

from scheduler.graph.graph import Graph
from scheduler.graph.index import GraphIndex
from scheduler.graph.operations import Operation, Phase, Role, Tensor

__all__ = ["Graph", "GraphIndex", "Operation", "Phase", "Role", "Tensor"]
