"""From a module to the joint graph of its training step."""

from scheduler.pytorch.capture.exporting.joint_graphs import VaryingStep, export_graph, export_joint, export_varying
from scheduler.pytorch.capture.exporting.varying_sizes import Varying

__all__ = ["Varying", "VaryingStep", "export_graph", "export_joint", "export_varying"]
