"""Commands about one plan: make it, show it, verify it, and export it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

from scheduler.api import lower, make_plan
from scheduler.cli.answers import DONE, plan_facts, print_answer, say, show_line, show_search
from scheduler.cli.arguments import GRAPH, Commands, add_command, add_solving, solve_options
from scheduler.cli.graphs import read_named_graph
from scheduler.graph.chain import Chain
from scheduler.graph.decisions import call_ranges
from scheduler.graph.formats import read_graph
from scheduler.plan import Plan
from scheduler.units import format_bytes


def add_plan(commands: Commands) -> None:
    """Add `scheduler plan`."""
    plan = add_command(commands, "plan", _plan, "find the fastest schedule of a graph that fits a budget")
    plan.add_argument("graph", metavar="GRAPH", help=GRAPH)
    add_solving(plan, 60.0)
    plan.add_argument("-o", "--output", metavar="PLAN", help="plan file to write")


def _plan(options: argparse.Namespace) -> int:
    graph = read_named_graph(options.graph)
    if isinstance(graph, Chain):
        say(f"planning {len(graph.layers)} layers")
    else:
        say(f"planning {len(graph.operations)} operations")
    plan = make_plan(graph, options.budget, progress=show_search, **solve_options(options))
    show_line("")
    if options.output:
        plan.save(options.output)
    print_answer({**plan_facts(plan), "plan": options.output}, options.json)
    return DONE


def add_show(commands: Commands) -> None:
    """Add `scheduler show`."""
    show = add_command(commands, "show", _show, "show what a plan saves and recomputes")
    show.add_argument("plan", metavar="PLAN")


def _show(options: argparse.Namespace) -> int:
    plan = Plan.load(options.plan)
    recomputed = {name: runs for name, runs in plan.simulation.recomputed.items() if runs}
    answer = {
        **plan_facts(plan),
        "actions": len(plan.schedule),
        "peak_operation": plan.simulation.peak_operation,
        "saved_bytes": plan.simulation.saved_bytes,
        "saved": list(plan.saved),
        **({"calls": [str(decision) for decision in plan.decisions]} if plan.decisions else {}),
        "recomputed": recomputed,
    }
    if options.json:
        print(json.dumps(answer))
        return DONE
    print_answer({key: value for key, value in answer.items() if key not in ("saved", "calls", "recomputed")}, False)
    sizes = {tensor.name: tensor.size_bytes for tensor in plan.graph.tensors}
    print(f"\nsaved for the backward phase: {len(plan.saved_data)} tensors")
    for name in plan.saved_data:
        print(f"  {format_bytes(sizes[name]):>12}  {name}")
    if plan.granularity == "modules":
        print(f"\n{plan.parts_text()}")
        for calls in call_ranges(plan.decisions):
            print(f"  {'  ' * calls.depth}recompute {calls}")
    print(f"\nrecomputed: {len(recomputed)} operations, {sum(recomputed.values())} runs")
    for name, runs in recomputed.items():
        print(f"  {runs:>3} x  {name}")
    return DONE


def add_report(commands: Commands) -> None:
    """Add `scheduler report`."""
    report = add_command(commands, "report", _report, "write an HTML report of a plan: memory, schedule, layers, proof")
    report.add_argument("plan", metavar="PLAN")
    report.add_argument("-o", "--output", required=True, metavar="PAGE", help="HTML file to write")


def _report(options: argparse.Namespace) -> int:
    from scheduler.export.html_report import write_report

    return _write_export(options, "report", write_report)


def add_export(commands: Commands) -> None:
    """Add `scheduler export`."""
    export = add_command(commands, "export", _export, "export the timeline of a plan as a Chrome trace, for Perfetto")
    export.add_argument("plan", metavar="PLAN")
    export.add_argument("-o", "--output", required=True, metavar="TRACE", help="JSON file to write")


def _export(options: argparse.Namespace) -> int:
    from scheduler.export.chrome_trace import write_chrome_trace

    return _write_export(options, "trace", write_chrome_trace)


def _write_export(options: argparse.Namespace, kind: str, write: Callable[[Plan, str], None]) -> int:
    plan = Plan.load(options.plan)
    write(plan, options.output)
    print_answer({kind: options.output, **plan_facts(plan)}, options.json)
    return DONE


def add_verify(commands: Commands) -> None:
    """Add `scheduler verify`."""
    verify = add_command(
        commands, "verify", _verify, "check every claim of a plan by simulation; exit 1 if one is untrue"
    )
    verify.add_argument("plan", metavar="PLAN")
    verify.add_argument("--graph", metavar="GRAPH", help="also check that the plan was made for this graph")


def _verify(options: argparse.Namespace) -> int:
    plan = Plan.load(options.plan)
    plan.verify(lower(read_graph(options.graph))[0] if options.graph else None)
    answer = {"plan": options.plan, "verified": True, **plan_facts(plan)}
    print_answer(answer, options.json)
    return DONE
