"""The command line: the answer on stdout, progress on stderr, the exit code says how it went.

Exit codes: 0 done, 1 a proven no, 2 usage, 3 no answer (out of time, or none found).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, cast

from scheduler.api import lower, make_plan
from scheduler.comparison import FAILED, Comparison, Row, compare
from scheduler.errors import (
    BudgetTooSmallError,
    InvalidOptionError,
    MissingExtraError,
    OutOfTimeError,
    PlanClaimError,
    PlanMismatchError,
    SchedulerError,
)
from scheduler.formats import read_graph, read_graph_or_chain, write_graph
from scheduler.graph import Graph
from scheduler.layers import Chain
from scheduler.pareto import frontier
from scheduler.plan import Plan
from scheduler.solution import Status
from scheduler.solvers.registry import solver_names
from scheduler.units import format_bytes

if TYPE_CHECKING:
    from torch import nn

    from scheduler.pytorch.training import TrainingReport

DONE, PROVEN_NO, USAGE, NO_ANSWER = 0, 1, 2, 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Parameters
    ----------
    arguments : sequence of str, optional
        By default those of the process.
    """
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except BudgetTooSmallError as error:
        _say(f"{type(error).__name__}: {error}")
        return PROVEN_NO if error.proven else NO_ANSWER
    except OutOfTimeError as error:
        _say(f"{type(error).__name__}: {error}")
        return NO_ANSWER
    except (PlanClaimError, PlanMismatchError) as error:
        _say(f"{type(error).__name__}: {error}")
        return PROVEN_NO
    except SchedulerError as error:
        _say(f"{type(error).__name__}: {error}")
        return USAGE
    except BrokenExecutor:
        _say("a worker process died, for lack of memory perhaps: use fewer --jobs; finished rows are in --output")
        return NO_ANSWER
    except OSError as error:
        _say(f"{error.strerror}: {error.filename}" if error.filename else str(error))
        return USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scheduler", description="Optimal activation-checkpointing schedules for a memory budget."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    models = commands.add_parser("models", help="list the models that trace and train know")
    models.set_defaults(run=_models)

    trace = commands.add_parser("trace", help="capture a model's training step as a graph file")
    trace.set_defaults(run=_trace)
    _add_model(trace)
    trace.add_argument("-o", "--output", required=True, metavar="GRAPH", help="the graph or chain file to write")

    plan = commands.add_parser("plan", help="find the fastest schedule of a graph that fits a budget")
    plan.set_defaults(run=_plan)
    plan.add_argument("graph", metavar="GRAPH", help='a graph or chain file; "-" reads standard input')
    _add_solving(plan, 60.0)
    plan.add_argument("-o", "--output", metavar="PLAN", help="the plan file to write")

    show = commands.add_parser("show", help="print what a plan does")
    show.set_defaults(run=_show)
    show.add_argument("plan", metavar="PLAN")

    report = commands.add_parser("report", help="write a plan as an HTML page: memory, schedule, layers, proof")
    report.set_defaults(run=_report)
    report.add_argument("plan", metavar="PLAN")
    report.add_argument("-o", "--output", required=True, metavar="PAGE", help="the HTML file to write")

    export = commands.add_parser("export", help="write a plan as a Chrome trace, which Perfetto opens")
    export.set_defaults(run=_export)
    export.add_argument("plan", metavar="PLAN")
    export.add_argument("-o", "--output", required=True, metavar="TRACE", help="the JSON file to write")

    verify = commands.add_parser("verify", help="judge a plan again; exit 1 if any claim is untrue")
    verify.set_defaults(run=_verify)
    verify.add_argument("plan", metavar="PLAN")
    verify.add_argument("--graph", metavar="GRAPH", help="a graph that the plan should belong to")

    train = commands.add_parser("train", help="trace, plan, and run real training steps: predicted against measured")
    train.set_defaults(run=_train)
    _add_model(train)
    _add_solving(train, 20.0)
    train.add_argument("--steps", type=_positive, default=5, help="training steps (default 5)")
    train.add_argument("-o", "--output", metavar="PLAN", help="the plan file to write (default MODEL.plan.json)")

    budgets = commands.add_parser("frontier", help="find the fastest schedule of a graph for each of several budgets")
    budgets.set_defaults(run=_frontier)
    budgets.add_argument("graph", metavar="GRAPH", help='a graph or chain file; "-" reads standard input')
    budgets.add_argument(
        "--budgets", type=_list, help='as "90%%,80%%,8GiB" (default ten, from the smallest peak known)'
    )
    budgets.add_argument("--solver", default="auto", help=f"one of {', '.join(solver_names())} (default auto)")
    _add_searching(budgets, 60.0)
    budgets.add_argument("--csv", metavar="FILE", help="the table to write")
    budgets.add_argument("--plot", metavar="SVG", help="the picture to write")

    sweep = commands.add_parser("compare", help="run every solver on every graph and budget")
    sweep.set_defaults(run=_compare)
    sweep.add_argument("graphs", nargs="+", metavar="GRAPH", help="graph or chain files, or folders of them")
    sweep.add_argument("--budgets", type=_list, default=["80%", "60%", "40%"], help="(default 80%%,60%%,40%%)")
    sweep.add_argument(
        "--solvers", type=_list, default=list(solver_names()), help=f"of {','.join(solver_names())} (default all)"
    )
    _add_searching(sweep, 60.0)
    sweep.add_argument("--jobs", type=_positive, default=1, help="cases at once (default 1)")
    sweep.add_argument("--output", metavar="JSONL", help="finished rows are appended here, and not run again")
    sweep.add_argument("--csv", metavar="FILE", help="the table to write")
    sweep.add_argument("--plot", metavar="SVG", help="the picture to write, one panel per graph")

    for command in (models, trace, plan, show, report, export, verify, train, budgets, sweep):
        command.add_argument("--json", action="store_true", help="print the answer as JSON")
    return parser


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help='a name from "scheduler models", or package.module:factory')
    command.add_argument(
        "--costs", choices=("measured", "flops"), default="measured", help="times of operations (default measured)"
    )
    command.add_argument(
        "--layers", action="store_true", help="layer by layer, uncaptured: the model is a sequence of layers"
    )


def _add_solving(command: argparse.ArgumentParser, time_limit: float) -> None:
    command.add_argument("--budget", required=True, help='peak of the whole step: "8GiB", "8GB", bytes, or "60%%"')
    command.add_argument("--solver", default="auto", help=f"one of {', '.join(solver_names())} (default auto)")
    _add_searching(command, time_limit)


def _add_searching(command: argparse.ArgumentParser, time_limit: float) -> None:
    command.add_argument("--time-limit", type=float, default=time_limit, help=f"seconds (default {time_limit:g})")
    command.add_argument("--order", choices=("any", "given"), default="any", help="of first runs (default any)")
    command.add_argument("--seed", type=int, default=0)


def _positive(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"at least 1, not {count}")
    return count


def _list(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",")]


def _models(options: argparse.Namespace) -> int:
    _needs_torch()
    from scheduler.pytorch.models import model_names

    names = model_names()
    print(json.dumps(list(names)) if options.json else "\n".join(names))
    return DONE


def _trace(options: argparse.Namespace) -> int:
    _needs_torch()
    from scheduler.pytorch import profile_layers, trace
    from scheduler.pytorch.models import make_model

    case = make_model(options.model)
    written: Graph | Chain
    if options.layers:
        case = case.layered()
        _say(f"measuring the layers of {options.model}")
        chain = profile_layers(cast("nn.Sequential", case.module), case.args, case.kwargs, loss=case.loss)
        written = chain = replace(chain, name=chain.name or options.model)
        graph = chain.graph
    else:
        _say(f"tracing {options.model}")
        graph = trace(case.module, case.args, case.kwargs, loss=case.loss, costs=options.costs)
        written = graph = replace(graph, name=graph.name or options.model)
    write_graph(written, options.output)
    answer = {
        "graph": options.output,
        "layers": len(chain.layers) if options.layers else None,
        "operations": len(graph.operations),
        "tensors": len(graph.tensors),
        "resident_bytes": graph.resident_bytes,
        "time_unit": graph.time_unit,
        "digest": graph.digest,
        "structure_digest": graph.structure_digest,
    }
    _print_answer(answer, options.json)
    return DONE


def _plan(options: argparse.Namespace) -> int:
    graph = read_graph_or_chain(options.graph)
    if isinstance(graph, Chain):
        _say(f"planning {len(graph.layers)} layers")
    else:
        _say(f"planning {len(graph.operations)} operations")
    plan = make_plan(
        graph,
        options.budget,
        solver=options.solver,
        time_limit=options.time_limit,
        order=options.order,
        seed=options.seed,
    )
    if options.output:
        plan.save(options.output)
    _print_answer({**_summary(plan), "plan": options.output}, options.json)
    return DONE


def _show(options: argparse.Namespace) -> int:
    plan = Plan.load(options.plan)
    recomputed = {name: runs for name, runs in plan.simulation.recomputed.items() if runs}
    answer = {
        **_summary(plan),
        "operations": len(plan.graph.operations),
        "verbs": len(plan.schedule),
        "peak_operation": plan.simulation.peak_operation,
        "boundary_bytes": plan.simulation.boundary_bytes,
        "saved": list(plan.saved),
        "recomputed": recomputed,
    }
    if options.json:
        print(json.dumps(answer))
        return DONE
    _print_answer({key: value for key, value in answer.items() if key not in ("saved", "recomputed")}, False)
    sizes = {tensor.name: tensor.size_bytes for tensor in plan.graph.tensors}
    print(f"\nsaved for the backward phase: {len(plan.saved)} tensors")
    for name in plan.saved:
        print(f"  {format_bytes(sizes[name]):>12}  {name}")
    print(f"\ncomputed again: {len(recomputed)} operations, {sum(recomputed.values())} runs")
    for name, runs in recomputed.items():
        print(f"  {runs:>3} x  {name}")
    return DONE


def _report(options: argparse.Namespace) -> int:
    from scheduler.report import write_report

    plan = Plan.load(options.plan)
    write_report(plan, options.output)
    _print_answer({"report": options.output, **_summary(plan)}, options.json)
    return DONE


def _export(options: argparse.Namespace) -> int:
    from scheduler.exports import write_chrome_trace

    plan = Plan.load(options.plan)
    write_chrome_trace(plan, options.output)
    _print_answer({"trace": options.output, **_summary(plan)}, options.json)
    return DONE


def _verify(options: argparse.Namespace) -> int:
    plan = Plan.load(options.plan)
    plan.verify(read_graph(options.graph) if options.graph else None)
    answer = {"plan": options.plan, "verified": True, **_summary(plan)}
    _print_answer(answer, options.json)
    return DONE


def _frontier(options: argparse.Namespace) -> int:
    _check_writable(options.csv)
    _check_picture(options.plot)
    graph = read_graph_or_chain(options.graph)
    _say(f"solving {len(options.budgets) if options.budgets else 'ten'} budgets")
    rows = frontier(
        graph,
        options.budgets,
        solver=options.solver,
        time_limit=options.time_limit,
        order=options.order,
        seed=options.seed,
    )
    table = Comparison.of_frontier(
        rows,
        graph,
        time_limit=options.time_limit,
        order=options.order,
        seed=options.seed,
        name=lower(graph)[0].name or Path(options.graph).stem,
    )
    _print_table(table, options, ("budget_bytes", "peak_bytes", "overhead", "gap", "gap_any", "status", "search_space"))
    if any(row.schedule is not None for row in rows):
        return DONE
    return PROVEN_NO if all(row.status is Status.INFEASIBLE for row in rows) else NO_ANSWER


def _compare(options: argparse.Namespace) -> int:
    _check_writable(options.csv)
    _check_picture(options.plot)
    graphs = _read_graphs(options.graphs)
    with ExitStack() as stack:
        executor = None
        if options.jobs > 1:
            pool = ProcessPoolExecutor(options.jobs, get_context("spawn"), _die_at_interrupt)
            executor = stack.enter_context(pool)
        table = compare(
            graphs,
            options.budgets,
            options.solvers,
            time_limit=options.time_limit,
            order=options.order,
            seed=options.seed,
            executor=executor,
            path=options.output,
            progress=_progress_bar(),
        )
    _print_table(table, options, ("graph", "budget", "solver", "status", "overhead", "gap", "gap_any", "seconds"))
    for row in table:
        if row.status == FAILED:
            _say(f"{row.solver} failed on {row.graph} at {row.budget}: {row.reason}")
    if table.missing:
        _say(f"stopped: {table.missing} of {len(table) + table.missing} cases have not run")
        return NO_ANSWER
    return DONE


def _read_graphs(paths: Sequence[str]) -> dict[str, Graph | Chain]:
    """Return the graphs in files and folders by name: that of the file, or its path where two share it."""
    files: list[Path] = []
    for path in map(Path, paths):
        found = sorted(file for file in path.iterdir() if file.suffix in (".json", ".txt")) if path.is_dir() else [path]
        if not found:
            raise InvalidOptionError(f"no graph in {path}: a folder of graphs holds .json or .txt files")
        files += found
    stems = [file.stem for file in files]
    return {file.stem if stems.count(file.stem) == 1 else str(file): read_graph_or_chain(file) for file in files}


def _check_picture(path: str | None) -> None:
    """Refuse a picture that cannot be made before the work is done, not after it."""
    if path is None:
        return
    from importlib.util import find_spec

    _check_writable(path)
    if find_spec("matplotlib") is None:
        raise MissingExtraError('--plot needs matplotlib: pip install "checkpoint-scheduler[plot]"')


def _check_writable(path: str | None) -> None:
    """Refuse a path before the work is done, not after it."""
    if path is not None and (Path(path).is_dir() or not os.access(Path(path).parent, os.W_OK)):
        raise InvalidOptionError(f"cannot write {path}: give a file in a folder that exists and can be written to")


def _die_at_interrupt() -> None:
    """Let Ctrl-C end a worker without a word: the process that started it keeps the finished rows."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _progress_bar() -> Callable[[int, int, Row], None] | None:
    """Return what draws a bar on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        return None

    def draw(done: int, total: int, row: Row) -> None:
        filled = 30 * done // total
        text = f"[{'#' * filled}{'.' * (30 - filled)}] {done}/{total}  {row.graph} {row.budget} {row.solver}"
        width = shutil.get_terminal_size().columns - 1
        end = "\n" if done == total else ""
        print(f"\r{text[:width]:<{width}}", end=end, file=sys.stderr, flush=True)

    return draw


def _print_table(table: Comparison, options: argparse.Namespace, columns: Sequence[str]) -> None:
    """Print the table on stdout, and then write its files: if that fails, nothing is lost."""
    rows = table.to_dicts()
    if options.json:
        print(json.dumps(rows))
    else:
        cells = [list(columns), *([_cell(name, row[name]) for name in columns] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for line in cells:
            print("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())
    if options.csv:
        table.to_csv(options.csv)
    if options.plot:
        from scheduler.plots import plot_comparison, write_figure

        write_figure(plot_comparison(table), options.plot)


def _cell(name: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if name == "seconds" else f"{value:.3%}"
    return str(value)


def _train(options: argparse.Namespace) -> int:
    _needs_torch()
    from scheduler.pytorch.models import make_model
    from scheduler.pytorch.training import compare_training

    case = make_model(options.model)
    output = options.output or f"{options.model.replace(':', '.').replace('/', '.')}.plan.json"
    report = compare_training(
        case,
        options.budget,
        steps=options.steps,
        costs=options.costs,
        granularity="layers" if options.layers else "operations",
        progress=_say,
        solver=options.solver,
        time_limit=options.time_limit,
        order=options.order,
        seed=options.seed,
    )
    report.plan.save(output)
    if options.json:
        print(json.dumps(report.to_dict(output)))
    else:
        _print_training(report, output)
    return DONE


def _print_training(report: TrainingReport, output: str) -> None:
    plan = report.plan
    rows = [
        ("", "predicted", "measured"),
        ("peak, without the plan", format_bytes(plan.baseline_peak_bytes), format_bytes(report.eager_peak_bytes)),
        ("peak, with the plan", format_bytes(plan.peak_bytes), format_bytes(report.measured_peak_bytes)),
        ("overhead in time", f"{plan.overhead:.2%}", f"{report.measured_time_overhead:.2%}"),
        ("overhead in FLOPs", "", f"{report.measured_flop_overhead:.2%}"),
    ]
    print(
        f"budget   {format_bytes(plan.budget_bytes)} ({plan.budget_bytes} bytes),"
        f" of which {format_bytes(plan.graph.resident_bytes)} resident"
    )
    print(f"proof    {plan.status.name} in {plan.search_space}: bound {_percent(plan.bound, plan)}, gap {plan.gap:.2%}")
    print(f"plan     {output}\n")
    for name, predicted, measured in rows:
        print(f"{name:<24}{predicted:>14}{measured:>14}")
    print(f"\n{'step':<8}{'loss, plain':>16}{'loss, with the plan':>22}")
    for number, (plain, planned) in enumerate(zip(report.baseline_losses, report.losses, strict=True), 1):
        print(f"{number:<8}{plain:>16.6f}{planned:>22.6f}")


def _percent(bound: float, plan: Plan) -> str:
    return f"+{bound / plan.baseline_time - 1:.3%}" if plan.baseline_time else "0"


def _summary(plan: Plan) -> dict[str, object]:
    return {
        "status": plan.status.name,
        "search_space": plan.search_space,
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "overhead": plan.overhead,
        "time": plan.time,
        "time_unit": plan.graph.time_unit,
        "bound": plan.bound,
        "bound_any": plan.bound_any,
        "gap": plan.gap,
        "gap_any": plan.gap_any,
        "solver": plan.solver,
        "solve_seconds": plan.solve_seconds,
    }


def _print_answer(answer: dict[str, object], as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer))
        return
    width = max(map(len, answer))
    for key, value in answer.items():
        if value is None:
            continue
        text = str(value)
        if isinstance(value, float):
            text = f"{value:.4%}" if key in ("overhead", "gap", "gap_any") else f"{value:.6g}"
        elif key.endswith("_bytes") and isinstance(value, int):
            text = f"{value} ({format_bytes(value)})"
        print(f"{key:<{width}}  {text}")


def _needs_torch() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise MissingExtraError('this command needs PyTorch: pip install "checkpoint-scheduler[torch]"')


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
