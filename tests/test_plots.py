"""Plots draw the values of the simulator and of the rows."""

from __future__ import annotations

import math
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import scheduler as sc
from scheduler.cli import main
from scheduler.comparisons.table import Row
from scheduler.errors import InvalidOptionError, MissingExtraError
from scheduler.plots import (
    inline_svg,
    plot_comparison,
    plot_frontier,
    plot_memory,
    plot_schedule,
    plot_solve_time,
    write_comparison,
    write_figure,
)
from tests.support.plans import TWICE, layered_plan, oddly_named_plan, plan_of_schedule, twice_plan
from tests.support.training_graphs import uniform_chain

pyplot = pytest.importorskip("matplotlib.pyplot")
pyplot.switch_backend("Agg")


@pytest.fixture(autouse=True)
def _closed_figures() -> Iterator[None]:
    yield
    pyplot.close("all")


def line(ax: Any, label: str) -> Any:
    return next(entry for entry in ax.get_lines() if entry.get_label().startswith(label))


def bars(ax: Any, label: str) -> list[list[float]]:
    """[left, right, row] of each bar."""
    (collection,) = [entry for entry in ax.collections if entry.get_label() == label]
    boxes = [path.get_extents() for path in collection.get_paths()]
    return sorted([box.x0, box.x1, (box.y0 + box.y1) / 2] for box in boxes)


def test_memory_is_drawn_as_the_simulator_counts_it() -> None:
    ax = plot_memory(twice_plan())
    drawn = line(ax, "plan: peak 16 B")
    assert list(drawn.get_xdata()) == [0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 5, 5, 7]
    assert list(drawn.get_ydata()) == [4, 8, 8, 12, 12, 12, 12, 12, 12, 16, 16, 12, 12]
    assert list(line(ax, "save everything: peak 16 B").get_xdata())[-1] == 6
    assert set(line(ax, "budget: 17 B").get_ydata()) == {17}
    assert set(line(ax, "resident tensors: 4 B").get_ydata()) == {4}
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("time (s)", "memory (B)")


def test_units_suit_the_largest_value() -> None:
    graph = uniform_chain(2, size=3 * 2**20, forward=1e-3, backward=2e-3)
    ax = plot_memory((graph, TWICE))
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("time (ms)", "memory (MiB)")
    assert max(line(ax, "schedule: peak 12.00 MiB").get_ydata()) == 12
    assert line(ax, "schedule").get_xdata()[-1] == pytest.approx(7)
    assert not [entry for entry in ax.get_lines() if entry.get_label().startswith("budget")]
    estimated = plot_memory((replace(graph, time_unit=sc.device("t4").time_unit), TWICE))
    assert estimated.get_xlabel() == "time (ms, estimated for T4)"


def test_the_schedule_shows_what_is_computed_saved_freed_and_recomputed_by_layer() -> None:
    ax = plot_schedule(layered_plan())
    assert [label.get_text() for label in ax.get_yticklabels()] == ["enc", "dec", "loss", "loss_backward"]
    # Forward without saving and with, 1 each; backward of dec, 2; enc again, 1, and its backward, 2.
    assert bars(ax, "computed, forward") == [[0, 1, 0], [1, 2, 1], [2, 2, 2]]
    assert bars(ax, "recomputed") == [[4, 5, 0]]
    assert bars(ax, "computed, backward") == [[2, 2, 3], [2, 4, 1], [5, 7, 0]]
    assert bars(ax, "saved for the backward phase") == [[1, 4, 1]]
    assert bars(ax, "held for a while") == [[0, 2, 0], [2, 4, 3], [2, 7, 1], [4, 7, 0]]
    freed = line(ax, "freed")
    # Rows as above; kept inputs lie on other storages, that of enc on the batch, which costs nothing.
    assert sorted(zip(freed.get_xdata(), freed.get_ydata(), strict=True)) == [
        (2, 0),  # enc.output
        (2, 1),  # dec.output
        (4, 1),  # dec.saved
        (4, 1),  # dec.kept_input
        (4, 3),  # dec.gradient
        (5, 0),  # enc.output again
        (7, 0),  # enc.saved
        (7, 1),  # enc.gradient
    ]


def test_results_are_not_drawn_as_held() -> None:
    ax = plot_schedule(twice_plan())
    # Rows f0, f1, loss, b1, b0: x1 twice in a row, g2, g1; g0 is the result.
    assert bars(ax, "held for a while") == [[0, 5, 0], [2, 5, 2], [3, 7, 3]]
    assert bars(ax, "saved for the backward phase") == [[1, 2, 1]]


def answer(budget: int, overhead: float | None, bound: float, global_bound: float, baseline: float = 10.0) -> Any:
    return SimpleNamespace(
        budget_bytes=budget,
        baseline_time=baseline,
        baseline_peak_bytes=400,
        overhead=overhead,
        bound=bound,
        global_bound=global_bound,
    )


def test_frontiers_show_schedules_and_bounds() -> None:
    exact = [answer(300, 0.1, 11.0, 10.5), answer(200, 0.5, 15.0, 12.0), answer(100, None, 0.0, 10.0)]
    rough = [answer(200, 0.8, 12.0, 12.0), answer(300, 0.2, 10.0, 10.0)]
    ax = plot_frontier({"exact": exact, "rough": rough})
    assert list(line(ax, "exact").get_xdata()) == [200, 300]
    assert list(line(ax, "exact").get_ydata()) == pytest.approx([50, 10])
    assert list(line(ax, "rough").get_ydata()) == pytest.approx([80, 20])
    assert line(ax, "exact").get_drawstyle() == "steps-post"
    # What is proven at 200 bytes, 12 of 10 units, holds at 100.
    (region,) = ax.collections
    assert region.get_label() == "proven: no schedule here"
    corners = {(x, round(y, 9)) for x, y in region.get_paths()[0].vertices if y > 0}
    assert corners == {(100, 20), (200, 20), (200, 5), (300, 5)}
    assert list(line(ax, "bound proven").get_ydata()) == pytest.approx([20, 20, 5])
    # The bounds of "exact" in its own space are higher than what is proven for all.
    dashes = [entry for entry in ax.get_lines() if entry.get_marker() == "_"]
    assert [list(entry.get_xdata()) for entry in dashes] == [[100, 200, 300], [200, 300], []]
    assert list(dashes[1].get_ydata()) == pytest.approx([50, 10])
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("budget (B)", "overhead in time (%)")


def test_a_wide_range_of_overheads_is_drawn_on_a_logarithmic_scale() -> None:
    for overhead, scale in ((1.0, "linear"), (1.01, "symlog"), (math.inf, "linear")):
        assert plot_frontier({"a": [answer(300, overhead, 10.0, 10.0)]}).get_yscale() == scale


def test_frontiers_of_the_solvers_themselves_can_be_drawn() -> None:
    rows = sc.frontier(uniform_chain(3), ["100%", "80%"], solver="greedy")
    ax = plot_frontier({"greedy": rows})
    found = [row for row in rows if row.schedule is not None]
    assert list(line(ax, "greedy").get_ydata()) == pytest.approx([100 * row.overhead for row in found])


def test_frontiers_of_different_graphs_or_none_are_rejected() -> None:
    with pytest.raises(InvalidOptionError, match="different baselines"):
        plot_frontier({"a": [answer(10, 0.0, 1.0, 1.0)], "b": [answer(10, 0.0, 1.0, 1.0, baseline=11.0)]})
    with pytest.raises(InvalidOptionError, match="no frontier"):
        plot_frontier({"a": []})


ROW = Row(
    graph="g",
    graph_digest="",
    operations=10,
    resident_bytes=0,
    time_unit="s",
    baseline_time=1.0,
    baseline_peak_bytes=1,
    budget="1",
    budget_bytes=1,
    solver="ilp",
    reorder=True,
    seed=0,
    stop_gap=0.0,
    time_limit=None,
    version="",
    status="OPTIMAL",
    seconds=1.0,
)


def test_a_comparison_has_a_panel_per_graph() -> None:
    asked = replace(ROW, overhead=0.5, bound=1.0, global_bound=1.0, budget_bytes=2**30)
    rows = [
        replace(asked, graph="$a$ long name of a graph, that is too long"),
        replace(asked, graph="$b$", solver="greedy", budget_bytes=2**31),
        replace(asked, graph="$b$", overhead=None, status="UNKNOWN"),
        replace(asked, graph="$b$", solver="dp", overhead=None, bound=None, global_bound=None, status="unsuitable"),
    ]
    figure = plot_comparison(rows)
    figure.canvas.draw()
    first, second = figure.axes
    assert first.get_ylabel() == "…f a graph, that is too long\noverhead in time (%)"
    assert second.get_ylabel() == "$b$\noverhead in time (%)"
    assert list(line(first, "ilp").get_ydata()) == [50]
    assert list(line(second, "greedy").get_xdata()) == [2]
    assert list(line(second, "ilp").get_ydata()) == []
    assert "dp" not in [entry.get_label() for entry in second.get_lines()]
    assert line(first, "greedy").get_color() == line(second, "greedy").get_color()
    with pytest.raises(InvalidOptionError, match="no comparison to plot"):
        plot_comparison(rows[-1:])


def test_a_folder_gets_a_plot_per_graph_and_one_of_solve_times(tmp_path: Path) -> None:
    asked = replace(ROW, overhead=0.5, bound=1.0, global_bound=1.0)
    names = ["a/b", "a:b", "solve_time", "..."]
    rows = [replace(asked, graph=name) for name in names]
    rows += [replace(asked, solver="greedy"), replace(asked, graph="a/b", solver="none", overhead=None)]
    files = write_comparison(rows, tmp_path / "new")
    assert sorted((tmp_path / "new").iterdir()) == sorted(files)
    texts = {path.name: set(ElementTree.parse(path).getroot().itertext()) for path in files}
    assert list(texts) == ["solve_time.svg", "a_b.svg", "a_b-2.svg", "solve_time-2.svg", "graph.svg", "g.svg"]
    assert {"ilp", "greedy", "solve time (s)"} <= texts["solve_time.svg"]
    for file, name in zip(files[1:], [*names, "g"], strict=True):
        assert {name, "overhead in time (%)"} <= texts[file.name]
    # Only series with points are in the legend.
    assert "ilp" in texts["a_b.svg"]
    assert not {"greedy", "none"} & texts["a_b.svg"]
    assert pyplot.get_fignums() == []


def test_the_command_line_draws_frontiers_and_comparisons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sc.write_graph(uniform_chain(3), "step.json")
    assert main(["frontier", "step.json", "--solver", "save-all", "--budgets", "100%", "--plot", "a.svg"]) == 0
    compared = ["compare", "step.json", "--solvers", "save-all", "--budgets", "100%", "--plot"]
    assert main([*compared, "b.svg"]) == 0
    for name, graph in (("a.svg", "uniform chain of 3"), ("b.svg", "step")):
        texts = list(ElementTree.parse(name).getroot().itertext())
        assert {"save-all", graph, "overhead in time (%)"} <= set(texts)
    assert main([*compared, "figures/"]) == 0
    assert sorted(path.name for path in Path("figures").iterdir()) == ["solve_time.svg", "step.svg"]
    assert main([*compared, "c.PNG"]) == 0
    assert Path("c.PNG").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert main([*compared, "d.jpeg"]) == 2
    assert 'the suffix must be .svg, .png, .pdf, got ".jpeg"' in capsys.readouterr().err
    assert main([*compared, "none/c.svg"]) == 2
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main([*compared, "c.svg"]) == 2
    printed = capsys.readouterr()
    assert "none" in printed.err
    assert 'pip install "checkpoint-scheduler[plot]"' in printed.err
    assert printed.out == ""


def test_solve_times_are_points_and_medians_of_each_size() -> None:
    rows = [
        replace(ROW, operations=100, seconds=9.0, status="FEASIBLE"),
        replace(ROW, seconds=4.0),
        ROW,
        replace(ROW, seconds=2.0),
        replace(ROW, operations=50, status="unsuitable", seconds=0.0),
    ]
    ax = plot_solve_time(rows)
    points = [entry for entry in ax.get_lines() if len(entry.get_xdata()) == 1]
    assert sorted((p.get_xdata()[0], p.get_ydata()[0]) for p in points) == [(10, 1), (10, 2), (10, 4), (100, 9)]
    assert [p.get_xdata()[0] for p in points if p.get_markerfacecolor() == "white"] == [100]
    (medians,) = [entry for entry in ax.get_lines() if len(entry.get_xdata()) == 2]
    assert (list(medians.get_xdata()), list(medians.get_ydata())) == ([10, 100], [2, 9])
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    with pytest.raises(InvalidOptionError, match="no solve times"):
        plot_solve_time(rows[-1:])


def test_every_plot_draws_on_given_axes() -> None:
    figure, axes = pyplot.subplots(1, 4)
    plan = twice_plan()
    assert plot_memory(plan, ax=axes[0]) is axes[0]
    assert plot_schedule(plan, ax=axes[1]) is axes[1]
    assert plot_frontier({"a": [answer(10, 0.0, 1.0, 1.0)]}, ax=axes[2]) is axes[2]
    assert plot_solve_time([ROW], ax=axes[3]) is axes[3]
    assert pyplot.get_fignums() == [figure.number]


@pytest.mark.parametrize("draw", [plot_memory, plot_schedule])
def test_anything_without_a_schedule_is_rejected(draw: Any) -> None:
    solution = sc.solve(uniform_chain(2), 1, solver="save-all")
    for nothing in (solution, (uniform_chain(2), solution.schedule), None):
        with pytest.raises(InvalidOptionError, match=r"must be a Plan, or a tuple of a Graph and its Schedule, got"):
            draw(nothing)


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"checkpoint-scheduler\[plot\]"):
        plot_memory(twice_plan())


@pytest.mark.parametrize("draw", [plot_memory, plot_schedule])
def test_names_are_drawn_as_text_whatever_they_contain(draw: Any) -> None:
    svg = inline_svg(draw, oddly_named_plan(), "a")
    texts = "".join(ElementTree.fromstring(svg).itertext())
    assert ("alert('$x_2$')</script>" in texts) is (draw is plot_schedule)
    assert pyplot.get_fignums() == []


@pytest.mark.parametrize("draw", [plot_memory, plot_schedule])
@pytest.mark.parametrize("text", ["+f", ""], ids=["no costs", "no runs"])
def test_a_schedule_that_costs_nothing_can_be_drawn(draw: Any, text: str) -> None:
    graph = sc.Graph([sc.Operation("f", [], ["y"], 0.0)], [sc.Tensor("y", 0)])
    ax = draw(plan_of_schedule(graph, sc.Schedule.from_text(text), 0))
    ax.figure.canvas.draw()
    assert ax.get_xlim() == (0, 1)


@pytest.mark.parametrize(("layers", "named", "second"), [(40, 40, "f1"), (41, 21, "f2"), (100, 34, "f3")])
def test_at_most_forty_layers_are_named(layers: int, named: int, second: str) -> None:
    graph = uniform_chain(layers)
    forward = sc.Graph(graph.operations[:layers], graph.tensors[: layers + 1], resident=["x0"])
    ax = plot_schedule((forward, sc.Schedule([sc.Compute(operation.name) for operation in forward.operations])))
    assert len(ax.get_yticklabels()) == named
    assert ax.get_yticklabels()[1].get_text() == second


def test_a_figure_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    ax = plot_memory(twice_plan())
    write_figure(ax, tmp_path / "memory.svg")
    first = (tmp_path / "memory.svg").read_bytes()
    assert ElementTree.fromstring(first).tag == "{http://www.w3.org/2000/svg}svg"
    with pytest.raises(OSError, match="No such file"):
        write_figure(ax, tmp_path / "none" / "memory.svg")
    assert [path.name for path in tmp_path.iterdir()] == ["memory.svg"]
    write_figure(plot_memory(twice_plan()), tmp_path / "memory.svg")
    assert (tmp_path / "memory.svg").read_bytes() == first


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_the_suffix_decides_the_format_and_equal_figures_are_equal_files(
    suffix: str, start: bytes, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        write_figure(plot_memory(twice_plan()), tmp_path / f"{name}.{suffix}")
    first, second = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("a", "b"))
    assert first == second
    assert first.startswith(start)


@pytest.mark.parametrize("name", ["figure.jpg", "figure", "svg", "figure.svg.txt"])
def test_another_suffix_is_refused_with_the_list(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match=r"the suffix must be \.svg, \.png, \.pdf, got"):
        write_figure(plot_memory(twice_plan()), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seconds", [1e-3 * (1 - 1e-15), math.nextafter(10, 11), 0.0])
def test_a_single_solve_time_near_a_power_of_ten_has_limits(seconds: float) -> None:
    low, high = plot_solve_time([replace(ROW, seconds=seconds)]).get_ylim()
    assert low < max(seconds, 1e-6) < high
