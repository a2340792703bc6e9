"""Plots of plans, frontiers and comparisons, on given axes or in a figure of their own."""

from scheduler.plots.comparisons import (
    Answer,
    plot_comparison,
    plot_frontier,
    plot_solve_time,
    write_comparison,
)
from scheduler.plots.figures import write_figure
from scheduler.plots.plans import PlanOrSchedule, inline_svg, plot_memory, plot_schedule

__all__ = [
    "Answer",
    "PlanOrSchedule",
    "inline_svg",
    "plot_comparison",
    "plot_frontier",
    "plot_memory",
    "plot_schedule",
    "plot_solve_time",
    "write_comparison",
    "write_figure",
]
