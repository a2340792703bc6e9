"""The answer to whether a step fits a device: what it needs, what fills the memory, and what helps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from scheduler.devices import Device
from scheduler.graph import Graph
from scheduler.plan import Plan
from scheduler.planning.caching_allocator import allocator_use
from scheduler.planning.graph_variants import gradient_bytes
from scheduler.planning.peak_contents import KINDS, Part, total_by_kind
from scheduler.schedule import Schedule
from scheduler.simulator import simulate
from scheduler.units import format_bytes, format_percent, text_table


@dataclass(frozen=True, slots=True)
class Need:
    """What a step needs of a device.

    Attributes
    ----------
    peak_bytes : int
        Largest sum of tensors and workspaces during the step and the optimizer's step.
    live_bytes : int
        Largest sum of tensors during the step, workspaces left out.
    reserved_bytes : int
        The same as segments of the device's allocator, which returns what it can if the device is
        full; equal to the peak on a CPU, and where the peak itself does not fit.
    usable_bytes : int
        What the device has for tensors.
    optimizer_step_bytes : int
        What the optimizer's step needs: parameters, gradients, state and its temporaries.
    time : float
        Of the step without the optimizer's, in the graph's `time_unit`.
    """

    peak_bytes: int
    live_bytes: int
    reserved_bytes: int
    usable_bytes: int
    optimizer_step_bytes: int
    time: float

    @property
    def fits(self) -> bool:
        """Whether the device has as much."""
        return max(self.peak_bytes, self.reserved_bytes) <= self.usable_bytes

    @property
    def is_optimizer_bound(self) -> bool:
        """Whether the optimizer's step needs most."""
        return self.peak_bytes == self.optimizer_step_bytes

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule, device: Device, temporary_bytes: int = 0) -> Need:
        """Return what a schedule needs.

        Parameters
        ----------
        graph : Graph
            With the optimizer's state among its resident tensors.
        schedule : Schedule
        device : Device
        temporary_bytes : int
            What the optimizer's step allocates and frees again.
        """
        simulation = simulate(graph, schedule)
        held = graph.resident_bytes + gradient_bytes(graph)
        after = held + temporary_bytes
        peak = max(simulation.peak_bytes, after)
        reserved = peak
        if device.platform != "cpu" and peak <= device.usable_bytes:
            use = allocator_use(graph, schedule, capacity_bytes=device.usable_bytes)
            if not use.fits:
                use = allocator_use(graph, schedule)
            # What the optimizer allocates comes from segments that the step has freed, as far as they go.
            reserved = max(use.reserved_bytes, after)
        return cls(peak, simulation.live_peak_bytes, reserved, device.usable_bytes, after, simulation.time)


@dataclass(frozen=True, slots=True)
class Reach:
    """The largest size of one dimension that fits.

    Attributes
    ----------
    plain, planned : int
        Without a plan, and with one; 0 if none fits.
    bound : int or None
        Proven: no schedule of a larger size fits. None if nothing is proven.
    limit : int
        The largest size that was tried.
    """

    plain: int
    planned: int
    bound: int | None
    limit: int


@dataclass(frozen=True, slots=True)
class Lever:
    """A way to need less memory.

    Attributes
    ----------
    name : str
        What to change.
    peak_bytes : int
        The peak after that.
    saved_bytes : int
        By how much it is below the plain peak.
    time_factor : float or None
        Time for the same amount of training, over that of the plain step; None if it is not estimated.
    fits : bool
        Whether the step then fits.
    how : str
        How to do it.
    """

    name: str
    peak_bytes: int
    saved_bytes: int
    time_factor: float | None
    fits: bool
    how: str


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Whether the training step of a model fits a device, and what helps if it does not.

    Attributes
    ----------
    model : str
    device : Device
    batch_size : int
    length : int or None
    dtype : str
        Of the parameters.
    optimizer : str
    plain : Need
        Without a plan: everything is saved.
    planned : Need or None
        With the fastest plan that fits; None if there is none.
    plan : Plan or None
        That plan; None if none is needed.
    parts : tuple of Part
        What fills the memory at the plain peak; their bytes add up to `plain.peak_bytes`.
    floor_bytes : int
        Proven: no schedule needs less.
    batches, lengths : Reach or None
        The largest batch of this length, and the longest length of this batch; None if they were
        not looked at.
    levers : tuple of Lever
        Those that save most first.
    time_unit : str
    assumptions : tuple of str
        What sizes and times rest on.
    notes : tuple of str
        What was left out, and why.
    """

    model: str
    device: Device
    batch_size: int
    length: int | None
    dtype: str
    optimizer: str
    plain: Need
    planned: Need | None
    plan: Plan | None
    parts: tuple[Part, ...]
    floor_bytes: int
    batches: Reach | None
    lengths: Reach | None
    levers: tuple[Lever, ...]
    time_unit: str
    assumptions: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the step fits without a plan."""
        return self.plain.fits

    @property
    def fits_with_a_plan(self) -> bool:
        """Whether some known schedule fits."""
        return self.planned is not None

    @property
    def is_proven_not_to_fit(self) -> bool:
        """Whether no schedule can fit."""
        return self.floor_bytes > self.plain.usable_bytes

    @property
    def overhead(self) -> float | None:
        """Time of the planned step over that of the plain one, minus 1; None without a plan that fits."""
        return None if self.planned is None else self.planned.time / self.plain.time - 1

    def __repr__(self) -> str:
        verdict = "fits" if self.fits else "fits with a plan" if self.fits_with_a_plan else "does not fit"
        return f"Fit({self.model!r} on {self.device.title}: {verdict}, peak {format_bytes(self.plain.peak_bytes)})"

    def to_dict(self) -> dict[str, object]:
        """Return all values as plain JSON data."""
        return {
            "model": self.model,
            "device": self.device.name,
            "usable_bytes": self.plain.usable_bytes,
            "batch_size": self.batch_size,
            "length": self.length,
            "dtype": self.dtype,
            "optimizer": self.optimizer,
            "fits": self.fits,
            "fits_with_a_plan": self.fits_with_a_plan,
            "plain": _need_data(self.plain),
            "planned": None if self.planned is None else _need_data(self.planned),
            "overhead": self.overhead,
            "time_unit": self.time_unit,
            "floor_bytes": self.floor_bytes,
            "parts": [{"kind": part.kind, "layer": part.layer, "bytes": part.size_bytes} for part in self.parts],
            "batches": _reach_data(self.batches),
            "lengths": _reach_data(self.lengths),
            "levers": [
                {
                    "name": lever.name,
                    "peak_bytes": lever.peak_bytes,
                    "saved_bytes": lever.saved_bytes,
                    "time_factor": lever.time_factor,
                    "fits": lever.fits,
                    "how": lever.how,
                }
                for lever in self.levers
            ],
            "assumptions": list(self.assumptions),
            "notes": list(self.notes),
        }

    def summary(self) -> str:
        """Return the answer as one page of text."""
        return "\n".join(_page(self))


def _need_data(need: Need) -> dict[str, object]:
    return {
        "fits": need.fits,
        "peak_bytes": need.peak_bytes,
        "live_bytes": need.live_bytes,
        "reserved_bytes": need.reserved_bytes,
        "optimizer_step_bytes": need.optimizer_step_bytes,
        "time": need.time,
    }


def _reach_data(reach: Reach | None) -> dict[str, object] | None:
    if reach is None:
        return None
    return {"plain": reach.plain, "planned": reach.planned, "bound": reach.bound, "limit": reach.limit}


_BAR = 40
"""Characters of a bar of the whole peak."""
_MOST_ROWS = 12
"""Layers that are shown of each kind."""


def _page(fit: Fit) -> Iterator[str]:
    yield text_table([*fit_rows(fit)])
    yield f"\nWhat fills the memory at the plain peak of {format_bytes(fit.plain.peak_bytes)}:"
    yield text_table([*part_rows(fit)])
    if reaches := [*reach_rows(fit)]:
        yield "\nWhat fits:"
        yield text_table([("", "plainly", "with a plan", ""), *reaches])
    yield "\nWhat each change saves and costs:"
    yield text_table([("change", "saves", "peak", "time", "fits", "how"), *lever_rows(fit.levers)])
    if fit.assumptions or fit.notes:
        yield ""
    for text in (*fit.assumptions, *fit.notes):
        yield f"- {text}"


def fit_rows(fit: Fit) -> Iterator[tuple[str, str]]:
    """Yield the question and the answer as rows of a table."""
    size = f"batch {fit.batch_size}" + (f" x length {fit.length}" if fit.length else "")
    yield "model", f"{fit.model}: {fit.dtype}, {fit.optimizer}, {size}"
    yield "device", f"{fit.device.title}: {format_bytes(fit.plain.usable_bytes)} for tensors"
    yield "plainly", _verdict(fit.plain, fit.time_unit)
    yield "planned", _planned(fit)


def _verdict(need: Need, unit: str) -> str:
    excess = need.peak_bytes - need.usable_bytes
    text = f"{'fits' if need.fits else 'does not fit'}: peak {format_bytes(need.peak_bytes)}"
    if excess > 0:
        text += f", {format_bytes(excess)} too much"
    elif not need.fits:
        text += f", but the allocator takes {format_bytes(need.reserved_bytes)} for that"
    elif need.reserved_bytes > need.peak_bytes:
        text += f", and the allocator keeps {format_bytes(need.reserved_bytes - need.peak_bytes)} more"
    if need.is_optimizer_bound:
        text += ", in the optimizer's step"
    return f"{text}; {need.time:.3g} {unit}"


def _planned(fit: Fit) -> str:
    if fit.planned is None:
        if fit.is_proven_not_to_fit:
            return f"proven not to fit: no schedule needs less than {format_bytes(fit.floor_bytes)}"
        return "no schedule is known that fits"
    if fit.plan is None:
        return "no plan is needed"
    return f"{_verdict(fit.planned, fit.time_unit)}, {format_percent(fit.overhead or 0.0)} more"


def part_rows(fit: Fit) -> Iterator[tuple[str, str, str, str]]:
    """Yield what fills the memory as rows: what, bytes, share, and a bar."""
    totals = total_by_kind(fit.parts)
    whole = sum(totals.values())
    for kind, size in totals.items():
        yield KINDS[kind], format_bytes(size), f"{size / whole:6.1%}", "#" * round(size / whole * _BAR)
        layers = [part for part in fit.parts if part.kind == kind]
        shown = layers[:_MOST_ROWS] if len(layers) > 1 else []
        for part in shown:
            name = part.layer or "outside of modules, as the loss"
            yield f"  {name}", format_bytes(part.size_bytes), f"{part.size_bytes / whole:6.1%}", ""
        if rest := sum(part.size_bytes for part in layers[len(shown) :]) if shown else 0:
            yield f"  {len(layers) - len(shown)} others", format_bytes(rest), f"{rest / whole:6.1%}", ""
    yield "sum", format_bytes(whole), f"{1:6.1%}", f"{whole} bytes"


def reach_rows(fit: Fit) -> Iterator[tuple[str, str, str, str]]:
    """Yield the largest sizes as rows: what, plainly, with a plan, and what is proven."""
    for name, reach in (("largest batch", fit.batches), ("longest length", fit.lengths)):
        if reach is not None:
            proof = "" if reach.bound is None else f"proven: no more than {reach.bound}"
            if reach.planned >= reach.limit:
                proof = "the largest that was tried"
            yield name, str(reach.plain or "none"), str(reach.planned or "none"), proof


def lever_rows(levers: Iterable[Lever]) -> Iterator[tuple[str, str, str, str, str, str]]:
    """Yield the levers as rows: what, what it saves, the peak, the change of time, whether it fits, and how."""
    for lever in levers:
        if lever.time_factor is None:
            time = "not estimated"
        else:
            change = lever.time_factor - 1
            time = "none" if abs(change) < _NO_CHANGE else f"{change:+.1%}"
        saved = format_bytes(lever.saved_bytes) if lever.saved_bytes > 0 else "nothing"
        yield lever.name, saved, format_bytes(lever.peak_bytes), time, "yes" if lever.fits else "no", lever.how


_NO_CHANGE = 5e-4
"""Relative changes of time below this are none."""
