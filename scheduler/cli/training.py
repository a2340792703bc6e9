"""Commands that run a PyTorch model: trace it, train it with a plan, find its largest batch."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from scheduler.api import TRAINING_GAP
from scheduler.cli.answers import DONE, plan_facts, print_answer, say, show_line, show_search
from scheduler.cli.arguments import (
    Commands,
    add_command,
    add_granularity,
    add_model,
    add_searching,
    add_solver,
    add_solving,
    positive,
    solve_options,
)
from scheduler.devices import Device
from scheduler.errors import InvalidOptionError, MissingExtraError
from scheduler.graph import Graph
from scheduler.graph.chain import Chain
from scheduler.graph.formats import write_graph
from scheduler.plan import Plan
from scheduler.solution import Progress as SearchProgress
from scheduler.units import format_bytes, format_percent

if TYPE_CHECKING:
    from scheduler.pytorch.costs.progress import TracingProgress
    from scheduler.pytorch.training import TrainingReport


def add_models(commands: Commands) -> None:
    """Add `scheduler models`."""
    add_command(commands, "models", _models, "list the named models")


def _models(options: argparse.Namespace) -> int:
    require_torch()
    from scheduler.pytorch.models.catalog import model_names

    names = model_names()
    print(json.dumps(list(names)) if options.json else "\n".join(names))
    return DONE


def add_trace(commands: Commands) -> None:
    """Add `scheduler trace`."""
    trace = add_command(commands, "trace", _trace, "trace a training step of a model into a graph file")
    add_model(trace, has_devices=True)
    add_granularity(trace, "operations", "modules", "layers")
    trace.add_argument("-o", "--output", required=True, metavar="GRAPH", help="graph or chain file to write")


def _trace(options: argparse.Namespace) -> int:
    require_torch()
    from scheduler.pytorch import profile_layers, trace
    from scheduler.pytorch.models.catalog import make_model

    if options.granularity == "modules":
        raise InvalidOptionError(
            "a graph file cannot hold a step of granularity modules, because only the search for calls to recompute"
            f" can plan it: measure, plan and train it with scheduler train {options.model} --granularity modules"
        )
    is_layered = options.granularity == "layers"
    if is_layered and isinstance(options.costs, Device):
        raise InvalidOptionError("layers are measured on this machine, and --device estimates: leave one of them out")
    case = make_model(options.model)
    written: Graph | Chain
    if is_layered:
        layered = case.layered()
        say(f"measuring the layers of {options.model}")
        chain = profile_layers(layered.module, layered.args, layered.kwargs, loss=layered.loss)
        written = chain = replace(chain, name=chain.name or options.model)
        graph = chain.graph
    else:
        say(f"tracing {options.model}")
        graph = trace(case.module, case.args, case.kwargs, loss=case.loss, costs=options.costs, progress=show)
        written = graph = replace(graph, name=graph.name or options.model)
    write_graph(written, options.output)
    answer = {
        "graph": options.output,
        "layers": len(chain.layers) if is_layered else None,
        "operations": len(graph.operations),
        "tensors": len(graph.tensors),
        "resident_bytes": graph.resident_bytes,
        "time_unit": graph.time_unit,
        "digest": graph.digest,
        "structure_digest": graph.structure_digest,
        **({"assumptions": list(graph.assumptions)} if graph.assumptions else {}),
    }
    print_answer(answer, options.json)
    return DONE


def show(progress: TracingProgress | SearchProgress) -> None:
    """Show how far tracing or a search is if stderr is a terminal, and say when measured times are noise."""
    from scheduler.pytorch.costs.progress import NOISE

    if isinstance(progress, SearchProgress):
        show_search(progress)
        return
    show_line(f"{progress.stage}: {progress.fraction:.0%}, {progress.seconds:.1f} s" if progress.fraction < 1 else "")
    if progress.spread is not None and progress.spread > NOISE:
        say(
            f"measured times are noise: repeated runs take {progress.spread:.0%} more than the shortest ones; on a"
            " quiet machine, renew them with --measure-again"
        )


def add_train(commands: Commands) -> None:
    """Add `scheduler train`."""
    train = add_command(
        commands, "train", _train, "plan and run training steps, and compare predictions with measurements"
    )
    add_model(train)
    add_granularity(train, "auto", "operations", "modules", "layers")
    add_solving(train, None, TRAINING_GAP)
    train.add_argument("--steps", type=positive, default=5, help="number of training steps (default 5)")
    train.add_argument("-o", "--output", metavar="PLAN", help="plan file to write (default MODEL.plan.json)")


def _begin_stage(message: str) -> None:
    show_line("")
    say(message)


def _train(options: argparse.Namespace) -> int:
    require_torch()
    from scheduler.pytorch.models.catalog import make_model
    from scheduler.pytorch.training import compare_training

    case = make_model(options.model)
    output = options.output or f"{options.model.replace(':', '.').replace('/', '.')}.plan.json"
    report = compare_training(
        case,
        options.budget,
        steps=options.steps,
        costs=options.costs,
        granularity=options.granularity,
        stage=_begin_stage,
        progress=show,
        **solve_options(options),
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
        ("live peak, without the plan", *_pair(report.baseline.live_bytes, report.plain.live_bytes)),
        ("live peak, with the plan", *_pair(report.predicted.live_bytes, report.measured.live_bytes)),
        ("allocator peak, without", *_pair(report.baseline.allocator_bytes, report.plain.allocator_bytes)),
        ("allocator peak, with", *_pair(report.predicted.allocator_bytes, report.measured.allocator_bytes)),
        ("overhead in time", format_percent(plan.overhead), report.time_overhead_text),
        ("overhead in FLOPs", "", format_percent(report.measured_flop_overhead)),
    ]
    print(f"model    {plan.graph.name}: {plan.parts_text()}")
    print(f"resident {plan.graph.resident_text()}")
    print(f"budget   {plan.peak_text(plan.budget_bytes)}, {plan.budget_bytes} bytes")
    if plan.smallest_peak_bytes is not None:
        print(f"smallest {plan.peak_text(plan.smallest_peak_bytes)} is the smallest peak known")
    gap = format_percent(plan.gap)
    print(f"proof    {plan.status.name} in {plan.search_space}: bound {_percent(plan.bound, plan)}, gap {gap}")
    print(f"plan     {output}\n")
    for name, predicted, measured in rows:
        print(f"{name:<28}{predicted:>14}{measured:>18}")
    if report.captured_time_overhead is not None and report.captured_step_is_slower:
        print(
            f"\nThe captured step itself takes {format_percent(report.captured_time_overhead)} more time than plain"
            " PyTorch, before anything is recomputed: the predicted overhead does not contain this."
        )
    print(f"\n{'step':<8}{'loss, plain':>16}{'loss, with the plan':>22}")
    for number, (plain, planned) in enumerate(zip(report.plain_losses, report.losses, strict=True), 1):
        print(f"{number:<8}{plain:>16.6f}{planned:>22.6f}")
    print(f"\n{report.verification.summary()}")


def _pair(predicted: int | None, measured: int | None) -> tuple[str, str]:
    first, second = ("" if size is None else format_bytes(size) for size in (predicted, measured))
    return first, second


def _percent(bound: float, plan: Plan) -> str:
    return f"+{bound / plan.baseline_time - 1:.3%}" if plan.baseline_time else "0"


def add_max_batch(commands: Commands) -> None:
    """Add `scheduler max-batch`."""
    batches = add_command(
        commands, "max-batch", _max_batch, "find the largest batch that a model can train with within a budget"
    )
    add_model(batches)
    add_granularity(batches, "auto", "operations", "modules")
    batches.add_argument(
        "--budget", required=True, help='largest peak of the whole step: "8GiB", "8GB", bytes, or "auto"'
    )
    add_solver(batches)
    add_searching(batches, 60.0, TRAINING_GAP)
    batches.add_argument("--limit", type=positive, help="do not try larger batches than this")
    batches.add_argument(
        "--measure", action="store_true", help="measure a step with that batch, and one with a batch larger by 1"
    )
    batches.add_argument("-o", "--output", metavar="PLAN", help="plan file to write")


def _max_batch(options: argparse.Namespace) -> int:
    require_torch()
    from scheduler.pytorch.largest_batch import DEFAULT_LIMIT, max_batch, measured_peak
    from scheduler.pytorch.models.catalog import Arguments, make_model

    case = make_model(options.model, batch_size=1)

    def make_batch(size: int) -> Arguments:
        sized = make_model(options.model, batch_size=size)
        return sized.args, dict(sized.kwargs)

    found = max_batch(
        lambda: case.module,
        make_batch,
        options.budget,
        loss=case.loss,
        granularity=options.granularity,
        costs=options.costs,
        limit=options.limit or DEFAULT_LIMIT,
        progress=say,
        **solve_options(options),
    )
    if options.output:
        found.plan.save(options.output)
    size, one_more = found.batch_size, found.next_plan
    answer: dict[str, object] = {
        "batch_size": size,
        "one_more": found.one_more,
        "largest_possible": found.bound,
        "traced": list(found.traced),
        **plan_facts(found.plan),
        "next_peak_bytes": one_more and one_more.peak_bytes,
    }
    if options.measure:
        for key, number, plan in (("measured", size, found.plan), ("next_measured", size + 1, one_more)):
            if plan is not None:
                say(f"training one step with a batch of {number}")
                answer[f"{key}_peak_bytes"] = measured_peak(case.module, plan, *make_batch(number), loss=case.loss)
    print_answer({**answer, "plan": options.output}, options.json)
    return DONE


def require_torch() -> None:
    """Raise an error without PyTorch, and let Python find modules in the working directory, as `python -m` does."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError('this command needs PyTorch: pip install "checkpoint-scheduler[torch]"')
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
