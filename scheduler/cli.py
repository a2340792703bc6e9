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
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from inspect import signature
from multiprocessing import active_children, get_context
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, cast

from scheduler import zoo
from scheduler.api import lower, make_plan
from scheduler.comparison import FAILED, Comparison, Row, compare
from scheduler.doctor import examine, is_well
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

_ZOO = "zoo:"
_GRAPH = 'a graph or chain file; "-" reads standard input; "zoo:unet:batch_size=8" is one of scheduler.zoo'


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Parameters
    ----------
    arguments : sequence of str, optional
        By default those of the process.
    """
    options = _parser().parse_args(arguments)
    try:
        _check_writable(getattr(options, "output", None))
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
    plan.add_argument("graph", metavar="GRAPH", help=_GRAPH)
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

    batches = commands.add_parser("max-batch", help="find the largest batch that a model trains with in a budget")
    batches.set_defaults(run=_max_batch)
    _add_model(batches, layers=False)
    batches.add_argument("--budget", required=True, help='peak of the whole step: "8GiB", "8GB", or bytes')
    batches.add_argument("--solver", default="auto", help=f"one of {', '.join(solver_names())} (default auto)")
    _add_searching(batches, 60.0)
    batches.add_argument("--limit", type=_positive, help="largest batch looked at")
    batches.add_argument("--measure", action="store_true", help="run a step of that batch, and of one more")
    batches.add_argument("-o", "--output", metavar="PLAN", help="the plan file to write")

    budgets = commands.add_parser("frontier", help="find the fastest schedule of a graph for each of several budgets")
    budgets.set_defaults(run=_frontier)
    budgets.add_argument("graph", metavar="GRAPH", help=_GRAPH)
    budgets.add_argument(
        "--budgets", type=_list, help='as "90%%,80%%,8GiB" (default ten, from the smallest peak known)'
    )
    budgets.add_argument("--solver", default="auto", help=f"one of {', '.join(solver_names())} (default auto)")
    _add_searching(budgets, 60.0)
    _add_files(budgets)

    sweep = commands.add_parser("compare", help="run every solver on every graph and budget")
    sweep.set_defaults(run=_compare)
    sweep.add_argument(
        "graphs",
        nargs="+",
        metavar="GRAPH",
        help="graph or chain files, folders of them, or graphs of scheduler.zoo: zoo:unet:batch_size=8, or zoo:all",
    )
    sweep.add_argument("--budgets", type=_list, default=["80%", "60%", "40%"], help="(default 80%%,60%%,40%%)")
    sweep.add_argument(
        "--solvers", type=_list, default=list(solver_names()), help=f"of {','.join(solver_names())} (default all)"
    )
    _add_searching(sweep, 60.0)
    sweep.add_argument("--jobs", type=_positive, default=1, help="cases at once (default 1)")
    sweep.add_argument("--output", metavar="JSONL", help="finished rows are appended here, and not run again")
    _add_files(sweep)

    doctor = commands.add_parser(
        "doctor", help="say what is installed and what mends the rest; exit 1 if nothing can be solved"
    )
    doctor.set_defaults(run=_doctor)

    for command in (models, trace, plan, show, report, export, verify, train, batches, budgets, sweep, doctor):
        command.add_argument("--json", action="store_true", help="print the answer as JSON")
    return parser


def _add_model(command: argparse.ArgumentParser, *, layers: bool = True) -> None:
    command.add_argument("model", metavar="MODEL", help='a name from "scheduler models", or package.module:factory')
    command.add_argument(
        "--costs",
        choices=("measured", "flops"),
        default="measured",
        help="of operations: times and workspaces, measured, or FLOPs (default measured)",
    )
    if layers:
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


def _add_files(command: argparse.ArgumentParser) -> None:
    command.add_argument("--csv", metavar="FILE", help="the rows to write")
    command.add_argument("--table", metavar="FILE", help="the overheads to write, in Markdown: a column per solver")
    command.add_argument(
        "--plot",
        metavar="SVG",
        help="the picture to write, one panel per graph; FOLDER/: one picture per graph, and one of solve times",
    )


def _positive(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"at least 1, not {count}")
    return count


def _list(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",")]


def _doctor(options: argparse.Namespace) -> int:
    findings = examine()
    if options.json:
        print(json.dumps([finding.to_dict() for finding in findings]))
    else:
        for finding in findings:
            print(f"{finding.part.name:<14}  {finding.state:<8}  {finding.detail}")
            if finding.state != "ok":
                print(f"{'':<26}for {finding.part.serves}: {finding.part.mends}")
    return DONE if is_well(findings) else PROVEN_NO


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
    graph = _read_graph(options.graph)
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
    _check_files(options)
    graph = _read_graph(options.graph)
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
    _check_files(options)
    graphs = _read_graphs(options.graphs)
    with _workers(options.jobs) if options.jobs > 1 else nullcontext() as executor:
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


def _read_graphs(names: Sequence[str]) -> dict[str, Graph | Chain]:
    """Return graphs by their zoo name, or that of their file, or its path where two share it."""
    found = [entry for name in names for entry in _listed(name)]
    labels = [entry if entry.startswith(_ZOO) else Path(entry).stem for entry in found]
    return {
        label if labels.count(label) == 1 else entry: _read_graph(entry)
        for label, entry in zip(labels, found, strict=True)
    }


def _listed(name: str) -> list[str]:
    """Return what a name stands for: the graphs of the zoo, the files of a folder, or itself."""
    if name == f"{_ZOO}all":
        return [f"{_ZOO}{generator}" for generator in zoo.__all__]
    if not Path(name).is_dir():
        return [name]
    files = sorted(file for file in Path(name).iterdir() if file.suffix in (".json", ".txt"))
    if not files:
        raise InvalidOptionError(f"no graph in {name}: a folder of graphs holds .json or .txt files")
    return [str(file) for file in files]


def _read_graph(name: str) -> Graph | Chain:
    """Return the graph in a file, or what a name of the zoo such as `zoo:resnet:batch_size=8,size=128` generates."""
    if not name.startswith(_ZOO):
        return read_graph_or_chain(name)
    generator, _, sizes = name.removeprefix(_ZOO).partition(":")
    if generator not in zoo.__all__:
        raise InvalidOptionError(f'no graph "{generator}" in the zoo; known are {", ".join(zoo.__all__)}')
    generate: Callable[..., Graph | Chain] = getattr(zoo, generator)
    entries = [entry.partition("=") for entry in sizes.split(",")] if sizes else []
    try:
        options = {key: float(value) if "." in value else int(value) for key, _, value in entries}
        signature(generate).bind(**options)
    except (TypeError, ValueError) as error:
        raise InvalidOptionError(f"{name}: {error}; write {_ZOO}{generator}:NAME=NUMBER,...") from error
    return generate(**options)


def _check_files(options: argparse.Namespace) -> None:
    """Refuse what cannot be written before the work is done, not after it."""
    picture = options.plot
    if picture is not None:
        from importlib.util import find_spec

        if find_spec("matplotlib") is None:
            raise MissingExtraError('--plot needs matplotlib: pip install "checkpoint-scheduler[plot]"')
        if _is_folder(picture):
            Path(picture).mkdir(exist_ok=True)
            picture = os.path.join(picture, "solve_time.svg")
    for path in (options.csv, options.table, picture):
        _check_writable(path)


def _check_writable(path: str | None) -> None:
    if path is None:
        return
    why = "it is a folder" if Path(path).is_dir() else None
    try:
        TemporaryFile(dir=Path(path).parent).close()
    except OSError as error:  # what the rights of a file say is not all: a disk may be mounted for reading only
        why = error.strerror
    if why is not None:
        raise InvalidOptionError(
            f"cannot write {path}: {why}; give a file in a folder that exists and can be written to"
        )


def _is_folder(path: str) -> bool:
    return path.endswith(("/", os.sep)) or Path(path).is_dir()


@contextmanager
def _workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Yield processes that run cases, and end them when the table is made, or at Ctrl-C."""
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _ignore_interrupt)
    try:
        yield pool
    finally:
        try:
            pool.shutdown(wait=False, cancel_futures=True)
            # A pool of Python 3.11 hangs if its workers die before it has dropped what was cancelled.
            time.sleep(0.1)
        finally:
            for worker in active_children():
                worker.kill()


def _ignore_interrupt() -> None:
    """Leave Ctrl-C to the process that started this one: it keeps the finished rows."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


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
    if options.table:
        table.to_markdown(options.table)
    if options.plot:
        from scheduler.plots import plot_comparison, write_comparison, write_figure

        if _is_folder(options.plot):
            write_comparison(table, options.plot)
        else:
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
        ("live peak, without the plan", *_pair(report.baseline.live_bytes, report.eager.live_bytes)),
        ("live peak, with the plan", *_pair(report.predicted.live_bytes, report.measured.live_bytes)),
        ("allocator peak, without", *_pair(report.baseline.allocator_bytes, report.eager.allocator_bytes)),
        ("allocator peak, with", *_pair(report.predicted.allocator_bytes, report.measured.allocator_bytes)),
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
        print(f"{name:<28}{predicted:>14}{measured:>14}")
    print(f"\n{'step':<8}{'loss, plain':>16}{'loss, with the plan':>22}")
    for number, (plain, planned) in enumerate(zip(report.baseline_losses, report.losses, strict=True), 1):
        print(f"{number:<8}{plain:>16.6f}{planned:>22.6f}")


def _max_batch(options: argparse.Namespace) -> int:
    _needs_torch()
    from scheduler.pytorch.batches import MOST, max_batch, measured_peak
    from scheduler.pytorch.models import Arguments, make_model

    case = make_model(options.model, batch_size=1)

    def make_batch(size: int) -> Arguments:
        made = make_model(options.model, batch_size=size)
        return made.args, dict(made.kwargs)

    found = max_batch(
        lambda: case.module,
        make_batch,
        options.budget,
        loss=case.loss,
        costs=options.costs,
        limit=options.limit or MOST,
        solver=options.solver,
        time_limit=options.time_limit,
        order=options.order,
        seed=options.seed,
        progress=_say,
    )
    if options.output:
        found.plan.save(options.output)
    size, one_more = found.batch_size, found.next_plan
    answer: dict[str, object] = {
        "batch_size": size,
        "one_more": found.one_more,
        "largest_possible": found.bound,
        "traced": list(found.traced),
        **_summary(found.plan),
        "next_peak_bytes": one_more and one_more.peak_bytes,
    }
    if options.measure:
        for key, number, plan in (("measured", size, found.plan), ("next_measured", size + 1, one_more)):
            if plan is not None:
                _say(f"training one step with a batch of {number}")
                answer[f"{key}_peak_bytes"] = measured_peak(case.module, plan, *make_batch(number), loss=case.loss)
    _print_answer({**answer, "plan": options.output}, options.json)
    return DONE


def _pair(predicted: int | None, measured: int | None) -> tuple[str, str]:
    first, second = ("" if size is None else format_bytes(size) for size in (predicted, measured))
    return first, second


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
    """Print on stderr; what a hostile file would have the terminal do is spelled out."""
    shown = "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in message)
    print(shown, file=sys.stderr, flush=True)
