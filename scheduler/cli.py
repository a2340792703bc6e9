"""The command line: the answer on stdout, progress on stderr, the exit code says how it went.

Exit codes: 0 done, 1 a proven no, 2 usage, 3 no answer (out of time, or none found).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from scheduler.api import make_plan
from scheduler.errors import (
    BudgetTooSmallError,
    MissingExtraError,
    OutOfTimeError,
    PlanClaimError,
    PlanMismatchError,
    SchedulerError,
)
from scheduler.formats import read_graph, read_graph_or_chain, write_graph
from scheduler.graph import Graph
from scheduler.layers import Chain
from scheduler.plan import Plan
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

    for command in (models, trace, plan, show, verify, train):
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
    command.add_argument("--time-limit", type=float, default=time_limit, help=f"seconds (default {time_limit:g})")
    command.add_argument("--order", choices=("any", "given"), default="any", help="of first runs (default any)")
    command.add_argument("--seed", type=int, default=0)


def _positive(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"at least 1, not {count}")
    return count


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


def _verify(options: argparse.Namespace) -> int:
    plan = Plan.load(options.plan)
    plan.verify(read_graph(options.graph) if options.graph else None)
    answer = {"plan": options.plan, "verified": True, **_summary(plan)}
    _print_answer(answer, options.json)
    return DONE


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
