"""Optimal activation-checkpointing schedules: solve them, prove them, write them down, train with them."""

try:
    from scheduler import zoo
    from scheduler.api import make_plan, minimum_budget, solve
    from scheduler.comparisons.sweep import compare
    from scheduler.comparisons.table import Comparison
    from scheduler.errors import SchedulerError
    from scheduler.graph import Graph, Operation, Tensor
    from scheduler.graph.chain import Chain, Layer
    from scheduler.graph.formats import read_graph, write_graph
    from scheduler.plan import Plan
    from scheduler.planning.frontiers import Frontier, frontier
    from scheduler.planning.pipeline import PipelineStagePlan, plan_pipeline
    from scheduler.schedule import Compute, Free, Schedule
    from scheduler.simulator import Simulation, simulate
    from scheduler.solution import Solution, Status
    from scheduler.solvers.registry import solver_names
    from scheduler.solvers.revolve.solver import revolve_actions
except ModuleNotFoundError as error:
    # The package can be imported all the same, so that its command line runs; whoever asks for a name is told.
    from scheduler.doctor import refusal

    globals()["__getattr__"] = refusal(error)

__all__ = [
    "Chain",
    "Comparison",
    "Compute",
    "Free",
    "Frontier",
    "Graph",
    "Layer",
    "Operation",
    "PipelineStagePlan",
    "Plan",
    "Schedule",
    "SchedulerError",
    "Simulation",
    "Solution",
    "Status",
    "Tensor",
    "compare",
    "frontier",
    "make_plan",
    "minimum_budget",
    "plan_pipeline",
    "read_graph",
    "revolve_actions",
    "simulate",
    "solve",
    "solver_names",
    "write_graph",
    "zoo",
]
