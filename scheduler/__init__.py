"""Optimal activation-checkpointing schedules: find them, prove them, save them as plans, and train with them."""

try:
    from scheduler import zoo
    from scheduler.api import SmallestPeak, make_plan, minimum_budget, solve
    from scheduler.comparisons.sweep import compare
    from scheduler.comparisons.table import Comparison, Row
    from scheduler.devices import Device, device, device_names
    from scheduler.errors import (
        BudgetTooSmallError,
        CaptureError,
        ExecutionError,
        GraphFormatError,
        InvalidBudgetError,
        InvalidGraphError,
        InvalidOptionError,
        InvalidScheduleError,
        MissingExtraError,
        OutOfTimeError,
        PlanClaimError,
        PlanError,
        PlanFormatError,
        PlanMismatchError,
        SchedulerError,
        SlowPlanWarning,
        UnknownDeviceError,
        UnknownModelError,
        UnknownSolverError,
        UnsuitableProblemError,
    )
    from scheduler.graph import Graph, Operation, Tensor
    from scheduler.graph.chain import Chain
    from scheduler.graph.formats import read_graph, write_graph
    from scheduler.graph.layers import Layer, Mode
    from scheduler.graph.networkx_graphs import from_networkx, to_networkx
    from scheduler.plan import Plan
    from scheduler.planning.frontiers import Frontier, frontier
    from scheduler.planning.pipeline import PipelinePlan, PipelineStagePlan, plan_pipeline
    from scheduler.problem import Problem
    from scheduler.schedule import Compute, Free, Schedule
    from scheduler.simulator import Simulation, simulate
    from scheduler.solution import Proposal, Solution, Status
    from scheduler.solvers.deadline import Deadline
    from scheduler.solvers.registry import register_solver, solver_names
    from scheduler.solvers.revolve.solver import revolve_actions
except ModuleNotFoundError as error:
    # Without a needed package, the import still succeeds so that the command line runs: every name raises instead.
    from scheduler.doctor import raiser_of

    globals()["__getattr__"] = raiser_of(error)
else:

    def __getattr__(name: str) -> str:
        """Return `__version__`, which is looked up only on request."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import version

        return version("checkpoint-scheduler")


__all__ = [
    "BudgetTooSmallError",
    "CaptureError",
    "Chain",
    "Comparison",
    "Compute",
    "Deadline",
    "Device",
    "ExecutionError",
    "Free",
    "Frontier",
    "Graph",
    "GraphFormatError",
    "InvalidBudgetError",
    "InvalidGraphError",
    "InvalidOptionError",
    "InvalidScheduleError",
    "Layer",
    "MissingExtraError",
    "Mode",
    "Operation",
    "OutOfTimeError",
    "PipelinePlan",
    "PipelineStagePlan",
    "Plan",
    "PlanClaimError",
    "PlanError",
    "PlanFormatError",
    "PlanMismatchError",
    "Problem",
    "Proposal",
    "Row",
    "Schedule",
    "SchedulerError",
    "Simulation",
    "SlowPlanWarning",
    "SmallestPeak",
    "Solution",
    "Status",
    "Tensor",
    "UnknownDeviceError",
    "UnknownModelError",
    "UnknownSolverError",
    "UnsuitableProblemError",
    "compare",
    "device",
    "device_names",
    "from_networkx",
    "frontier",
    "make_plan",
    "minimum_budget",
    "plan_pipeline",
    "read_graph",
    "register_solver",
    "revolve_actions",
    "simulate",
    "solve",
    "solver_names",
    "to_networkx",
    "write_graph",
    "zoo",
]
