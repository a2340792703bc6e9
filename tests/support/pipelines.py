"""The order in which a stage of a pipeline runs its microbatches."""

from __future__ import annotations


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """Return the order of 1F1B at a stage: warm up, alternate, drain."""
    warmup = min(stages - stage - 1, microbatches)
    order = [("forward", i) for i in range(warmup)]
    for i in range(microbatches - warmup):
        order += [("forward", warmup + i), ("backward", i)]
    return order + [("backward", i) for i in range(microbatches - warmup, microbatches)]
