"""The plan: a solution as a self-contained file, which is simulated again when it is loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Literal, cast, get_args

from scheduler.errors import (
    InvalidGraphError,
    InvalidScheduleError,
    PlanClaimError,
    PlanFormatError,
    PlanMismatchError,
    SchedulerError,
)
from scheduler.files import read_json, write_text
from scheduler.graph import Graph
from scheduler.graph.decisions import RECOMPUTES, Decision, call_ranges, decisions_of
from scheduler.problem import floor, least_time, save_everything
from scheduler.schedule import Schedule, runs_of
from scheduler.simulator import Simulation, simulate
from scheduler.solution import TOLERANCE, Solution, Status, relative_gap
from scheduler.units import format_bytes, format_peak, format_percent, text_table
from scheduler.validation import count_of, mapping, names_of, sequence, sha256, text_of, time_of

PLAN_FORMAT = "scheduler-plan"
PLAN_VERSION = 2
_NAMES_SHOWN = 5

Granularity = Literal["operations", "modules", "layers"]


@dataclass(frozen=True)
class Plan:
    """A schedule of a graph, with claims that the simulator has confirmed, and their proof.

    Attributes
    ----------
    graph : Graph
    schedule : Schedule
    budget_bytes : int
        Includes the resident tensors, as all peaks do.
    time, baseline_time : float
        Time of the schedule and of the save-everything schedule, in the graph's unit.
    peak_bytes, baseline_peak_bytes : int
    saved : tuple of str
        Tensors live at the end of the forward phase.
    status : Status
        OPTIMAL or FEASIBLE.
    search_space, solver : str
    bound, global_bound : float
        Proven lower bounds on the time, in the search space and over all schedules.
    solve_seconds : float
    granularity : "operations", "modules" or "layers"
    torch_version : str or None
        Version of torch that was installed where the plan was made.
    package_version : str
    smallest_peak_bytes : int or None
        Smallest peak of the schedules that were known when the plan was made.
    captured_overhead : float or None
        How much longer the captured step takes than plain PyTorch before anything is recomputed,
        if that was measured to be more than noise; `overhead` is on top of it.
    """

    graph: Graph
    schedule: Schedule
    budget_bytes: int
    time: float
    peak_bytes: int
    baseline_time: float
    baseline_peak_bytes: int
    saved: tuple[str, ...]
    status: Status
    search_space: str
    bound: float
    global_bound: float
    solver: str
    solve_seconds: float
    granularity: Granularity = "operations"
    torch_version: str | None = None
    package_version: str = ""
    smallest_peak_bytes: int | None = None
    captured_overhead: float | None = None

    @classmethod
    def of(cls, graph: Graph, solution: Solution, *, granularity: Granularity = "operations") -> Plan:
        """Return the plan of a solution that has a schedule.

        Raises
        ------
        PlanClaimError
            If the solution has no schedule.
        """
        if solution.schedule is None or solution.simulation is None:
            raise PlanClaimError(
                f"a plan needs a solution with a schedule, got {solution.status.name}: {solution.status.value}"
            )
        return cls(
            graph=graph,
            schedule=solution.schedule,
            budget_bytes=solution.budget_bytes,
            time=solution.simulation.time,
            peak_bytes=solution.simulation.peak_bytes,
            baseline_time=solution.baseline_time,
            baseline_peak_bytes=solution.baseline_peak_bytes,
            saved=solution.saved,
            status=solution.status,
            search_space=solution.search_space,
            bound=solution.bound,
            global_bound=solution.global_bound,
            solver=solution.solver,
            solve_seconds=solution.solve_seconds,
            granularity=granularity,
            torch_version=_installed("torch"),
            package_version=_installed("checkpoint-scheduler") or "unknown",
            smallest_peak_bytes=solution.smallest_peak_bytes,
        )

    @property
    def overhead(self) -> float:
        """Time / baseline - 1."""
        return self.time / self.baseline_time - 1 if self.baseline_time else 0.0

    @property
    def gap(self) -> float:
        """(time - bound) / time."""
        return relative_gap(self.time, self.bound)

    @property
    def global_gap(self) -> float:
        """(time - global_bound) / time."""
        return relative_gap(self.time, self.global_bound)

    @cached_property
    def simulation(self) -> Simulation:
        """The simulation of the schedule."""
        return simulate(self.graph, self.schedule)

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """The calls that it recomputes, in the order of the step, if it is of granularity "modules"."""
        return decisions_of(self.graph, runs_of(self.graph, self.schedule))

    @cached_property
    def saved_data(self) -> tuple[str, ...]:
        """The saved tensors that hold data: those on storages of 0 bytes only order the operations."""
        index = self.graph.index
        return tuple(name for name in self.saved if index.storage_bytes[index.storage_of[index.tensor_ids[name]]])

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the plan's whole content."""
        return sha256(self._content())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON: to the side, then renamed into place.

        Raises
        ------
        OSError
            If the path cannot be written; an existing file is left as it was.
        """
        write_text(path, json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan, and simulate it again.

        Raises
        ------
        PlanFormatError
            If the file is not a plan, or has an unknown version.
        PlanMismatchError
            If a digest differs from the data that it covers.
        PlanClaimError
            If a claim is untrue.
        """
        try:
            return cls.from_dict(read_json(path))
        except PlanMismatchError as error:
            raise PlanMismatchError(f"{path}: {error}") from error
        except PlanClaimError as error:
            raise PlanClaimError(f"{path}: {error}") from error
        except SchedulerError as error:
            raise PlanFormatError(f"{path}: {error}") from error

    def verify(self, graph: Graph | None = None) -> None:
        """Simulate the schedule again and compare every claim.

        Parameters
        ----------
        graph : Graph, optional
            A graph that the plan should belong to; structure and costs must agree.

        Raises
        ------
        PlanMismatchError
            If the plan belongs to another graph.
        PlanClaimError
            If a claim is untrue: names the claim, the stated value and the simulated one.
        """
        if graph is not None and graph.digest != self.graph.digest:
            same = graph.structure_digest == self.graph.structure_digest
            raise PlanMismatchError(
                "the plan was made for another graph"
                + (": same structure, other names, roles, times or workspaces" if same else "")
                + f" (digest {self.graph.digest[:12]}, given {graph.digest[:12]}); make a plan for this one"
            )
        try:
            simulated = self.simulation
        except InvalidScheduleError as error:
            raise PlanClaimError(f"the schedule breaks a rule: {error}") from error
        baseline = simulate(self.graph, save_everything(self.graph))
        self._check("time", self.time, simulated.time)
        self._check("peak_bytes", self.peak_bytes, simulated.peak_bytes)
        self._check("baseline_time", self.baseline_time, baseline.time)
        self._check("baseline_peak_bytes", self.baseline_peak_bytes, baseline.peak_bytes)
        self._check("saved", self.saved, simulated.saved)
        if self.peak_bytes > self.budget_bytes:
            raise PlanClaimError(f"the peak of {self.peak_bytes} bytes is over the budget of {self.budget_bytes}")
        for name, bound in (("bound", self.bound), ("global_bound", self.global_bound)):
            if not least_time(self.graph) * (1 - 1e-12) <= bound <= self.time:
                raise PlanClaimError(
                    f"{name} {bound} must be a lower bound on the time {self.time} and at least the least time"
                    " of the graph"
                )
        if self.global_bound > self.bound:
            raise PlanClaimError(
                f"global_bound {self.global_bound} must not be above bound {self.bound}: it holds for more schedules"
            )
        smallest, least = self.smallest_peak_bytes, floor(self.graph).bytes
        if smallest is not None and not least <= smallest <= self.peak_bytes:
            raise PlanClaimError(
                f"smallest_peak_bytes must be between the floor of {least} bytes and the peak of {self.peak_bytes}, got"
                f" {smallest}"
            )
        expected = Status.OPTIMAL if self.gap <= TOLERANCE else Status.FEASIBLE
        self._check("status", self.status.name, expected.name)

    def __repr__(self) -> str:
        return (
            f"Plan({self.graph.name!r}, {self.status.name}, {format_bytes(self.peak_bytes)} of"
            f" {format_bytes(self.budget_bytes)}, overhead {format_percent(self.overhead)}, solver={self.solver!r})"
        )

    def summary(self) -> str:
        """Return the claims, their proof, and what is saved and recomputed, as text."""
        unit, smallest, captured = self.graph.time_unit, self.smallest_peak_bytes, self.captured_overhead
        recomputed = {name: runs for name, runs in self.simulation.recomputed.items() if runs}
        peak = f"{self.peak_text(self.peak_bytes)} instead of {format_bytes(self.baseline_peak_bytes)}"
        calls, saved = tuple(map(str, call_ranges(self.decisions))), self.saved_data
        rows = [
            ("plan", f"{self.graph.name or 'without a name'}, {self.granularity}: {self.parts_text()}"),
            ("status", f"{self.status.name}: {self.status.value}"),
            ("budget", self.peak_text(self.budget_bytes)),
            ("resident", self.graph.resident_text()),
            ("peak", peak),
            *(("assumes", assumption) for assumption in self.graph.assumptions),
            ("time", f"{self.time:.6g} {unit}, overhead {format_percent(self.overhead, 4)}"),
            *(
                []
                if captured is None
                else [("captured", f"takes {format_percent(captured)} longer than plain PyTorch")]
            ),
            ("bound", f"{self.bound:.6g} {unit}, gap {format_percent(self.gap, 4)} in {self.search_space}"),
            (
                "global bound",
                f"{self.global_bound:.6g} {unit}, gap {format_percent(self.global_gap, 4)} over all schedules",
            ),
            *([] if smallest is None else [("smallest", f"{self.peak_text(smallest)} is the smallest peak known")]),
            ("solver", f"{self.solver}, {self.solve_seconds:.3g} s"),
            ("saved", f"{format_bytes(self.simulation.saved_bytes)} in {len(saved)} tensors{_shown(saved)}"),
            *([("calls", f"{len(self.decisions)} recomputed{_shown(calls)}")] if calls else []),
            (
                "recomputed",
                f"{sum(recomputed.values())} runs of {len(recomputed)} operations{_shown(tuple(recomputed))}",
            ),
        ]
        return text_table(rows)

    def peak_text(self, count: int) -> str:
        """Return a peak or a budget in bytes and in percent of what saving everything adds."""
        return format_peak(count, self.graph.resident_bytes, self.baseline_peak_bytes)

    def parts_text(self) -> str:
        """Return the number of operations, or of the calls of modules if it is of granularity "modules"."""
        if self.granularity == "modules":
            calls = sum(operation.kind == RECOMPUTES for operation in self.graph.operations)
            return f"{calls} calls of modules, {len(self.decisions)} recomputed"
        return f"{len(self.graph.operations)} operations"

    def to_dict(self) -> dict[str, object]:
        """Return the plan as plain JSON data; `from_dict` reads and simulates it."""
        return {**self._content(), "digest": self.digest}

    @classmethod
    def from_dict(cls, data: object) -> Plan:
        """Return the plan that `to_dict` wrote, simulated again.

        Raises
        ------
        PlanFormatError, PlanMismatchError, PlanClaimError
            As for `load`.
        """
        fields = _object(data, "a plan")
        if fields.get("format") != PLAN_FORMAT:
            raise PlanFormatError(f'not a plan: format must be "{PLAN_FORMAT}", got {fields.get("format")!r}')
        if fields.get("version") != PLAN_VERSION or isinstance(fields.get("version"), bool):
            raise PlanFormatError(
                f"plan version must be {PLAN_VERSION}, got {fields.get('version')!r}: make the plan again with this"
                " package, for example with `scheduler plan` or `make_plan`"
            )
        plan = cls._parse(fields)
        for name, stated, actual in (
            ("graph_digest", fields.get("graph_digest"), plan.graph.digest),
            ("structure_digest", fields.get("structure_digest"), plan.graph.structure_digest),
        ):
            if stated != actual:
                raise PlanMismatchError(f"{name} differs from the graph in the plan: stated {stated}, found {actual}")
        claims, proof = _object(fields.get("claims"), "claims"), _object(fields.get("proof"), "proof")
        plan._check("overhead", claims.get("overhead"), plan.overhead)
        plan._check("gap", proof.get("gap"), plan.gap)
        plan._check("global_gap", proof.get("global_gap"), plan.global_gap)
        plan.verify()
        if fields.get("digest") != plan.digest or {**plan._content(), "digest": plan.digest} != fields:
            raise PlanMismatchError("the plan was changed after it was written: its digest differs; make it again")
        return plan

    def _check(self, name: str, claimed: object, found: object) -> None:
        if claimed != found or isinstance(claimed, bool):  # in Python, False == 0.0
            raise PlanClaimError(f"the plan states {name}={claimed}, but simulation gives {found}")

    def _content(self) -> dict[str, object]:
        return {
            "format": PLAN_FORMAT,
            "version": PLAN_VERSION,
            "package_version": self.package_version,
            "torch_version": self.torch_version,
            "granularity": self.granularity,
            "budget_bytes": self.budget_bytes,
            **({} if self.captured_overhead is None else {"captured_overhead": self.captured_overhead}),
            "claims": {
                "time": self.time,
                "time_unit": self.graph.time_unit,
                "peak_bytes": self.peak_bytes,
                "overhead": self.overhead,
                "baseline_time": self.baseline_time,
                "baseline_peak_bytes": self.baseline_peak_bytes,
            },
            "proof": {
                "status": self.status.name,
                "search_space": self.search_space,
                "bound": self.bound,
                "global_bound": self.global_bound,
                "gap": self.gap,
                "global_gap": self.global_gap,
                "solver": self.solver,
                "solve_seconds": self.solve_seconds,
                **({} if self.smallest_peak_bytes is None else {"smallest_peak_bytes": self.smallest_peak_bytes}),
            },
            "saved": list(self.saved),
            "schedule": self.schedule.to_lines(),
            "graph_digest": self.graph.digest,
            "structure_digest": self.graph.structure_digest,
            "graph": self.graph.to_dict(),
        }

    @classmethod
    def _parse(cls, fields: Mapping[str, object]) -> Plan:
        claims, proof = _object(fields.get("claims"), "claims"), _object(fields.get("proof"), "proof")
        status = proof.get("status")
        if status not in (Status.OPTIMAL.name, Status.FEASIBLE.name):
            raise PlanFormatError(f"proof.status must be OPTIMAL or FEASIBLE, got {status!r}")
        granularity = fields.get("granularity")
        if granularity not in get_args(Granularity):
            raise PlanFormatError(f'granularity must be "operations", "modules" or "layers", got {granularity!r}')
        try:
            graph = Graph.from_dict(fields.get("graph"))
            schedule = Schedule.from_lines(_names(fields, "schedule"))
        except (InvalidGraphError, InvalidScheduleError) as error:
            raise PlanFormatError(str(error)) from error
        return cls(
            graph=graph,
            schedule=schedule,
            budget_bytes=_count(fields, "budget_bytes"),
            time=_number(claims, "time"),
            peak_bytes=_count(claims, "peak_bytes"),
            baseline_time=_number(claims, "baseline_time"),
            baseline_peak_bytes=_count(claims, "baseline_peak_bytes"),
            saved=_names(fields, "saved"),
            status=Status[str(status)],
            search_space=_text(proof, "search_space"),
            bound=_number(proof, "bound"),
            global_bound=_number(proof, "global_bound"),
            solver=_text(proof, "solver"),
            solve_seconds=_number(proof, "solve_seconds"),
            granularity=cast(Granularity, granularity),
            torch_version=None if fields.get("torch_version") is None else _text(fields, "torch_version"),
            package_version=_text(fields, "package_version"),
            smallest_peak_bytes=_count(proof, "smallest_peak_bytes") if "smallest_peak_bytes" in proof else None,
            captured_overhead=_number(fields, "captured_overhead") if "captured_overhead" in fields else None,
        )


def plan_schema() -> dict[str, object]:
    """Return the JSON Schema of plan files, which ships with the package."""
    schema: dict[str, object] = json.loads(files("scheduler").joinpath("plan.schema.json").read_text(encoding="utf-8"))
    return schema


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _shown(names: Sequence[str]) -> str:
    """Return the first names, to follow their count."""
    if not names:
        return ""
    more = f", and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f": {', '.join(names[:_NAMES_SHOWN])}{more}"


def _object(value: object, what: str) -> Mapping[str, object]:
    return mapping(value, what, error=PlanFormatError)


def _names(fields: Mapping[str, object], key: str) -> tuple[str, ...]:
    return names_of(sequence(fields.get(key), f'"{key}"', error=PlanFormatError), f'"{key}"', error=PlanFormatError)


def _text(fields: Mapping[str, object], key: str) -> str:
    return text_of(fields.get(key), f'"{key}"', error=PlanFormatError)


def _count(fields: Mapping[str, object], key: str) -> int:
    return count_of(fields.get(key), f'"{key}"', error=PlanFormatError)


def _number(fields: Mapping[str, object], key: str) -> float:
    return time_of(fields.get(key), f'"{key}"', error=PlanFormatError)
