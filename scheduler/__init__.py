"""Optimal activation-checkpointing schedules: solve them, prove them, write them down, train with them."""

try:
    from scheduler import zoo
    from scheduler.api import make_plan, minimum_budget, solve
    from scheduler.comparison import Comparison
    from scheduler.errors import SchedulerError
    from scheduler.formats import read_graph, write_graph
    from scheduler.graph import Graph, Operation, Tensor
    from scheduler.layers import Chain, Layer
    from scheduler.pareto import Frontier, frontier
    from scheduler.plan import Plan
    from scheduler.schedule import Compute, Free, Schedule
    from scheduler.simulator import Simulation, simulate
    from scheduler.solution import Solution, Status
    from scheduler.solvers.registry import solver_names
    from scheduler.solvers.revolve import revolve_actions
    from scheduler.stages import StagePlan, plan_stages
    from scheduler.sweep import compare
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
    "Plan",
    "Schedule",
    "SchedulerError",
    "Simulation",
    "Solution",
    "StagePlan",
    "Status",
    "Tensor",
    "compare",
    "frontier",
    "make_plan",
    "minimum_budget",
    "plan_stages",
    "read_graph",
    "revolve_actions",
    "simulate",
    "solve",
    "solver_names",
    "write_graph",
    "zoo",
]
