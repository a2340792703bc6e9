"""Ways to need less memory, each with the bytes that it saves and the time that it costs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from scheduler.devices import Device
from scheduler.graph import Graph
from scheduler.planning.fit_answers import Lever, Need
from scheduler.planning.graph_variants import gradient_bytes, gradient_names, with_gradients_handed_over, with_resident
from scheduler.problem import Problem
from scheduler.units import format_bytes

SHARDS = (2, 4, 8)
"""Numbers of devices among which a step is divided."""
LINK_EFFICIENCY = 0.8
"""Share of the peak bandwidth between devices that collective operations are assumed to reach."""


@dataclass(frozen=True)
class PlainStep:
    """A step without a plan, which levers are compared with.

    Attributes
    ----------
    graph, held : Graph
        Without the optimizer's state, and with it.
    state_bytes, temporary_bytes : int
        The optimizer's state, and what its step allocates and frees again.
    device : Device
    need : Need
    """

    graph: Graph
    held: Graph
    state_bytes: int
    temporary_bytes: int
    device: Device
    need: Need

    @classmethod
    def of(cls, graph: Graph, state_bytes: int, temporary_bytes: int, device: Device) -> PlainStep:
        """Return the step of a graph without the optimizer's state."""
        held = with_resident(graph, "optimizer", state_bytes, "optimizer state")
        need = Need.of(held, Problem(held, 0).save_everything, device, temporary_bytes)
        return cls(graph, held, state_bytes, temporary_bytes, device, need)

    def need_of(self, graph: Graph, state_bytes: int | None = None, temporary_bytes: int | None = None) -> Need:
        """Return what another graph needs plainly, with the same optimizer or with another one."""
        held = with_resident(
            graph, "optimizer", self.state_bytes if state_bytes is None else state_bytes, "optimizer state"
        )
        temporary = self.temporary_bytes if temporary_bytes is None else temporary_bytes
        schedule = Problem(held, self.need.usable_bytes).save_everything
        return Need.of(held, schedule, self.device, temporary)

    def lever(self, name: str, need: Need, how: str, time_factor: float | None) -> Lever:
        """Return a lever after which a step has a need."""
        saved = self.need.peak_bytes - need.peak_bytes
        return Lever(name, need.peak_bytes, saved, time_factor, need.fits, how)


def recomputation(step: PlainStep, need: Need, budget: str = "auto") -> Lever:
    """Return the lever of a plan, by its need and the budget that gives it."""
    how = f'checkpointed(model, "{budget if need.fits else "min"}", ...)'
    return step.lever("recompute", need, how, need.time / step.need.time)


def accumulation(step: PlainStep, graph_at: Callable[[int], Graph], batch_size: int) -> Lever:
    """Return the lever of the fewest smaller batches that fit, whose gradients are added up.

    Parameters
    ----------
    step : PlainStep
    graph_at : callable
        Returns the graph of a smaller batch, without the optimizer's state.
    batch_size : int
        Of the step; at least 2. If not even single samples fit, the lever is that of these.
    """
    sizes = (size for size in range(batch_size // 2, 0, -1) if batch_size % size == 0)
    for size in sizes:
        lever = _accumulation(step, graph_at(size), size, batch_size // size)
        if lever.fits:
            break
    return lever


def _accumulation(step: PlainStep, graph: Graph, micro_batch: int, count: int) -> Lever:
    existing = with_resident(with_gradients_handed_over(graph), "existing gradients", gradient_bytes(graph), "gradient")
    need = step.need_of(existing)
    how = f"{count} backward passes with batches of {micro_batch} before each step of the optimizer"
    return step.lever(f"batch {micro_batch}, {count} times", need, how, count * need.time / step.need.time)


def shorter(step: PlainStep, graph: Graph, length: int, whole: int) -> Lever:
    """Return the lever of shorter sequences; its time is for as many tokens."""
    need = step.need_of(graph)
    factor = whole / length * need.time / step.need.time
    return step.lever(f"length {length}", need, "shorter sequences, more of them", factor)


def other_dtype(step: PlainStep, graph: Graph, state_bytes: int, temporary_bytes: int) -> Lever:
    """Return the lever of parameters, gradients and optimizer state in bfloat16."""
    need = step.need_of(graph, state_bytes, temporary_bytes)
    return step.lever("bfloat16", need, "model.to(torch.bfloat16), and its inputs", need.time / step.need.time)


def other_optimizer(step: PlainStep, name: str, state_bytes: int, temporary_bytes: int) -> Lever:
    """Return the lever of another optimizer, whose own time is not counted."""
    need = step.need_of(step.graph, state_bytes, temporary_bytes)
    return step.lever(f"optimizer {name}", need, "may need another learning rate", 1.0)


def handed_over_gradients(step: PlainStep) -> Lever:
    """Return the lever of an optimizer that steps for each parameter as soon as its gradient is there."""
    graph = with_gradients_handed_over(step.graph)
    sizes = [graph.tensor(name).size_bytes for name in gradient_names(step.graph)]
    share = max(sizes, default=0) / max(1, sum(sizes))
    need = step.need_of(graph, temporary_bytes=int(step.temporary_bytes * share) + max(sizes, default=0))
    how = "register_post_accumulate_grad_hook: one optimizer per parameter, no gradient clipping"
    return step.lever("gradients in hooks", need, how, 1.0)


def sharding(step: PlainStep, devices: int) -> Lever:
    """Return the lever of FSDP: parameters, gradients and optimizer state are divided among devices.

    Blocks are gathered one after the other, the next one ahead of its use; what belongs to no
    block stays gathered. The gradients of a block are held until they are scattered. The time is
    that of as many samples on each device, whose work goes on during communication, but for the
    first gathering and the last scattering.
    """
    graph = step.graph
    blocks, rest = parameter_blocks(graph)
    block = max(blocks.values(), default=0)
    gathered = rest + (2 * block if len(blocks) > 1 else block)
    parameters = sum(blocks.values()) + rest
    gradients = gradient_bytes(graph)
    local = with_gradients_handed_over(graph)
    held = -(-(parameters + gradients + step.state_bytes) // devices) + gathered - parameters + (block or rest)
    need = step.need_of(local, 0, step.temporary_bytes // devices)
    peak = need.peak_bytes + held
    shifted = replace(
        need,
        peak_bytes=peak,
        live_bytes=need.live_bytes + held,
        reserved_bytes=need.reserved_bytes + held,
        optimizer_step_bytes=need.optimizer_step_bytes + held,
    )
    # Blocks are gathered for the forward and again for the backward. Of each, a part is there already.
    exchanged = (parameters + sum(blocks.values()) + gradients) * (devices - 1) // devices
    exposed = (rest + 2 * block if blocks else parameters + gradients) * (devices - 1) // devices
    rate = LINK_EFFICIENCY * step.device.peer_bytes_per_second
    how = f"fully_shard on each block; {format_bytes(exchanged)} over the link between devices in each step"
    if rate:
        factor = (max(step.need.time, exchanged / rate) + exposed / rate) / step.need.time
        return step.lever(f"FSDP over {devices}", shifted, how, factor)
    how += ", whose speed is unknown: no time is estimated"
    return step.lever(f"FSDP over {devices}", shifted, how, None)


def parameter_blocks(graph: Graph) -> tuple[dict[str, int], int]:
    """Return the bytes of the parameters of each numbered block of a model, and of all others."""
    blocks: defaultdict[str, int] = defaultdict(int)
    rest = 0
    for name in graph.resident:
        tensor = graph.tensor(name)
        if tensor.role == "parameter":
            found = re.match(r"(?:[^:]*:)?((?:[^.]+\.)*?\d+)\.", name)
            if found is None:
                rest += tensor.size_bytes
            else:
                blocks[found[1]] += tensor.size_bytes
    return dict(blocks), rest


def ranked(levers: Iterable[Lever]) -> tuple[Lever, ...]:
    """Return levers, those that save most first."""
    return tuple(sorted(levers, key=lambda lever: -lever.saved_bytes))
