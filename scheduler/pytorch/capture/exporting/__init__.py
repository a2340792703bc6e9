"""From a module to the joint graph of its training step."""

from scheduler.pytorch.capture.exporting.joint_graphs import export_graph, export_joint

__all__ = ["export_graph", "export_joint"]
