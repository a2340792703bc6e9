"""The plan: an answer as a file that stands on its own and is simulated again when it is read."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Literal

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
from scheduler.problem import least_time, save_everything
from scheduler.schedule import Schedule
from scheduler.simulator import Simulation, simulate
from scheduler.solution import TOLERANCE, Solution, Status, relative_gap

PLAN_FORMAT = "scheduler-plan"
PLAN_VERSION = 2

Granularity = Literal["operations", "layers"]


@dataclass(frozen=True)
class Plan:
    """A schedule of a graph, with claims that the judge has confirmed and the proof behind them.

    Attributes
    ----------
    graph : Graph
    schedule : Schedule
    budget_bytes : int
        Resident tensors included, as are all peaks.
    time, baseline_time : float
        Of the schedule and of the save-everything schedule, in the graph's unit.
    peak_bytes, baseline_peak_bytes : int
    saved : tuple of str
        Tensors live at the end of the forward phase.
    status : Status
        OPTIMAL or FEASIBLE.
    search_space, solver : str
    bound, global_bound : float
        Proven lower bounds on the time, in the search space and over all schedules.
    solve_seconds : float
    granularity : "operations" or "layers"
    torch_version : str or None
        The torch installed where the plan was made.
    package_version : str
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

    @classmethod
    def of(cls, graph: Graph, solution: Solution, *, granularity: Granularity = "operations") -> Plan:
        """Return the plan of a solution that has a schedule.

        Raises
        ------
        PlanClaimError
            If the solution has no schedule.
        """
        if solution.schedule is None or solution.simulation is None:
            raise PlanClaimError(f"a solution without a schedule is no plan: {solution.status.value}")
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
        """The judge's word on the schedule."""
        return simulate(self.graph, self.schedule)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the plan's whole content."""
        return _digest(self._content())

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
        """Read a plan and judge it again.

        Raises
        ------
        PlanFormatError
            If the file is no plan, or of an unknown version.
        PlanMismatchError
            If a digest differs from what it stands for.
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
        """Judge the schedule again and compare every claim.

        Parameters
        ----------
        graph : Graph, optional
            A graph that the plan should belong to; structure and costs must agree.

        Raises
        ------
        PlanMismatchError
            If the plan belongs to another graph.
        PlanClaimError
            If a claim is untrue: names the claim, its value and the judge's.
        """
        if graph is not None and graph.digest != self.graph.digest:
            same = graph.structure_digest == self.graph.structure_digest
            raise PlanMismatchError(
                "the plan was made for another graph"
                + (": same structure, other names, times or workspaces" if same else "")
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
                raise PlanClaimError(f"{name} {bound} is no lower bound on the time {self.time}")
        if self.global_bound > self.bound:
            raise PlanClaimError(
                f"global_bound {self.global_bound} holds for more schedules than bound, and is above it"
            )
        expected = Status.OPTIMAL if self.gap <= TOLERANCE else Status.FEASIBLE
        self._check("status", self.status.name, expected.name)

    def to_dict(self) -> dict[str, object]:
        """Return the plan as plain JSON data; `from_dict` reads and judges it."""
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
            raise PlanFormatError(f'not a plan: format is {fields.get("format")!r}, expected "{PLAN_FORMAT}"')
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
            raise PlanClaimError(f"claimed {name} {claimed}, the judge finds {found}")

    def _content(self) -> dict[str, object]:
        return {
            "format": PLAN_FORMAT,
            "version": PLAN_VERSION,
            "package_version": self.package_version,
            "torch_version": self.torch_version,
            "granularity": self.granularity,
            "budget_bytes": self.budget_bytes,
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
            },
            "saved": list(self.saved),
            "schedule": self.schedule.to_lines(),
            "graph_digest": self.graph.digest,
            "structure_digest": self.graph.structure_digest,
            "graph": self.graph.to_dict(),
        }

    @classmethod
    def _parse(cls, fields: dict[str, object]) -> Plan:
        claims, proof = _object(fields.get("claims"), "claims"), _object(fields.get("proof"), "proof")
        status = proof.get("status")
        if status not in (Status.OPTIMAL.name, Status.FEASIBLE.name):
            raise PlanFormatError(f"proof.status is OPTIMAL or FEASIBLE, not {status!r}")
        granularity = fields.get("granularity")
        if granularity not in ("operations", "layers"):
            raise PlanFormatError(f'granularity is "operations" or "layers", not {granularity!r}')
        try:
            graph = Graph.from_dict(fields.get("graph"))
            schedule = Schedule.from_lines(_texts(fields.get("schedule"), "schedule"))
        except (InvalidGraphError, InvalidScheduleError) as error:
            raise PlanFormatError(str(error)) from error
        return cls(
            graph=graph,
            schedule=schedule,
            budget_bytes=_whole(fields, "budget_bytes"),
            time=_number(claims, "time"),
            peak_bytes=_whole(claims, "peak_bytes"),
            baseline_time=_number(claims, "baseline_time"),
            baseline_peak_bytes=_whole(claims, "baseline_peak_bytes"),
            saved=tuple(_texts(fields.get("saved"), "saved")),
            status=Status[str(status)],
            search_space=_text(proof, "search_space"),
            bound=_number(proof, "bound"),
            global_bound=_number(proof, "global_bound"),
            solver=_text(proof, "solver"),
            solve_seconds=_number(proof, "solve_seconds"),
            granularity=granularity,
            torch_version=None if fields.get("torch_version") is None else _text(fields, "torch_version"),
            package_version=_text(fields, "package_version"),
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


def _digest(content: dict[str, object]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _object(data: object, what: str) -> dict[str, object]:
    if not isinstance(data, dict):
        raise PlanFormatError(f"{what} is a JSON object, not {type(data).__name__}")
    return data


def _texts(data: object, what: str) -> list[str]:
    if not isinstance(data, list) or not all(isinstance(entry, str) for entry in data):
        raise PlanFormatError(f'"{what}" is a list of text')
    return data


def _text(fields: dict[str, object], key: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str) or not value.isprintable():
        raise PlanFormatError(f'"{key}" is printable text, not {value!r}')
    return value


def _whole(fields: dict[str, object], key: str) -> int:
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise PlanFormatError(f'"{key}" is a whole number >= 0, not {value!r}')
    return value


def _number(fields: dict[str, object], key: str) -> float:
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PlanFormatError(f'"{key}" is a number, not {value!r}')
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < 0:
        raise PlanFormatError(f'"{key}" is a finite number >= 0, not {value!r}')
    return number
