"""Plans made by hand, without a solver, whose figures can be counted."""

from __future__ import annotations

import scheduler as sc
from scheduler.plan import Granularity
from scheduler.problem import Problem
from scheduler.solution import Proposal, grade
from tests.support.training_graphs import uniform_chain

TWICE = sc.Schedule.from_text("+f0\n+f1\n-x1\n+loss\n-x2\n+f0\n+b1\n-g2\n-x1\n+b0\n-g1")
"""A uniform chain of two layers whose first is computed again: 7 units of time instead of 6."""


def plan_of_schedule(
    graph: sc.Graph, schedule: sc.Schedule, budget_bytes: int = 2**62, *, granularity: Granularity = "operations"
) -> sc.Plan:
    """Return the plan of a schedule that no solver found, with the bounds that `grade` proves."""
    proposal = Proposal(schedule, "any order")
    solution = grade(Problem(graph, budget_bytes), proposal, solver="by hand", seconds=0.25)
    return sc.Plan.of(graph, solution, granularity=granularity)


def twice_plan() -> sc.Plan:
    """The plan of `TWICE` within 17 bytes: it needs 16 of them, as saving everything does."""
    return plan_of_schedule(uniform_chain(2), TWICE, 17)


def layered_plan() -> sc.Plan:
    """Two layers "enc" and "dec": enc is run without saving, dec with, and enc once more.

    Live at the end of the forward phase is what dec keeps (its saved 8 bytes and its input,
    4) and the output of dec (4): 16 bytes.
    """
    layers = [sc.Layer("enc", 1.0, 2.0, 4, 8), sc.Layer("dec", 1.0, 2.0, 4, 8)]
    chain = sc.Chain(layers, input_bytes=4, name="two layers")
    schedule = sc.Schedule.from_text(
        "+enc.forward_without_saving\n+dec.forward\n-enc.output\n+loss\n+loss_backward\n-dec.output\n+dec.backward\n"
        "-dec.gradient\n-dec.saved\n-dec.kept_input\n+enc.forward\n-enc.output\n+enc.backward\n-enc.gradient\n"
        "-enc.saved\n-enc.kept_input"
    )
    return plan_of_schedule(chain.graph, schedule, 64)


def viewing_plan() -> sc.Plan:
    """A step that saves a tensor of 4 bytes and a view of it: 4 bytes together."""
    operations = [
        sc.Operation("f", [], ["y"], 1.0),
        sc.Operation("view", ["y"], ["z"], 0.0),
        sc.Operation("b", ["y", "z"], ["g"], 2.0, phase="backward"),
    ]
    graph = sc.Graph(operations, [sc.Tensor("y", 4), sc.Tensor("z", 4, "y"), sc.Tensor("g", 4)], results=["g"])
    return plan_of_schedule(graph, sc.Schedule.from_text("+f\n+view\n+b\n-y\n-z"), 8)


def oddly_named_plan() -> sc.Plan:
    """One operation whose names are markup, mathematics and other scripts."""
    name = "<script>alert('$x_2$')</script>/&amp; \"模型\" 🧠 $y$"
    operation = sc.Operation(name, [], [name], 1.0, layer=name.rpartition("/")[0])
    graph = sc.Graph([operation], [sc.Tensor(name, 1)], results=[name], name=f"<b>{name}")
    return plan_of_schedule(graph, sc.Schedule([sc.Compute(name)]), 1)
