"""From a joint graph to a graph of operations, with the instruction that each operation runs."""

from scheduler.pytorch.capture.lowering.order import lower

__all__ = ["lower"]
