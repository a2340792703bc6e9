from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import scheduler as sc
from scheduler.errors import BudgetTooSmallError, InvalidOptionError
from scheduler.schedule import Action
from tests.support.pipelines import one_forward_one_backward

SECONDS = 3.0


def stage_chain(layers: int = 6, *, seed: int = 0) -> sc.Chain:
    """Layers of unlike sizes, with their parameters' gradients resident, as steps that add them up have them."""
    random = np.random.default_rng(seed)
    print(f"seed {seed}")
    return sc.Chain(
        [
            sc.Layer(
                f"layer{i}",
                float(random.integers(1, 9)),
                float(random.integers(1, 9)),
                int(random.integers(10, 100)),
                int(random.integers(10, 200)),
                parameter_bytes=50,
            )
            for i in range(layers)
        ],
        input_bytes=40,
        input_needs_gradient=True,
        resident=[sc.Tensor("gradients", 50 * layers)],
    )


def split(graph: sc.Graph, schedule: sc.Schedule) -> tuple[list[Action], list[Action]]:
    """Return the actions before and from the first backward operation."""
    phases = {operation.name: operation.phase for operation in graph.operations}
    actions = list(schedule)
    first = next(
        i
        for i, action in enumerate(actions)
        if isinstance(action, sc.Compute) and phases[action.operation] == "backward"
    )
    return actions[:first], actions[first:]


def simulated_peak(graph: sc.Graph, schedule: sc.Schedule, order: list[tuple[str, int]]) -> int:
    """Return the simulated peak of one long schedule: every microbatch's own operations and tensors, in this order.

    Inputs come to life with a microbatch's forward; its results go when its backward has ended.
    """
    shared = [name for name in graph.resident if not name.startswith("input")]
    own_inputs = [name for name in graph.resident if name.startswith("input")]
    parts = dict(zip(("forward", "backward"), split(graph, schedule), strict=True))
    tensors = [graph.tensor(name) for name in shared]
    operations: list[sc.Operation] = []
    actions: list[Action] = []

    def mine(name: str, i: int) -> str:
        return name if name in shared else f"{name} of {i}"

    for phase, i in order:
        if phase == "forward":
            tensors += [
                sc.Tensor(mine(t.name, i), t.size_bytes, None if t.storage is None else mine(t.storage, i))
                for t in graph.tensors
                if t.name not in shared
            ]
            operations.append(sc.Operation(f"receive {i}", (), tuple(mine(name, i) for name in own_inputs), 0.0))
            operations += [
                replace(
                    operation,
                    name=mine(operation.name, i),
                    inputs=tuple(mine(name, i) for name in operation.inputs),
                    outputs=tuple(mine(name, i) for name in operation.outputs),
                    phase="forward",  # of one long forward: the simulator then sees no end of the forward phase
                )
                for operation in graph.operations
            ]
            actions.append(sc.Compute(f"receive {i}"))
        for action in parts[phase]:
            if isinstance(action, sc.Compute):
                actions.append(sc.Compute(mine(action.operation, i)))
            else:
                actions.append(sc.Free(mine(action.tensor, i)))
        if phase == "backward":
            actions += [sc.Free(mine(name, i)) for name in (*own_inputs, *graph.results)]
    return sc.simulate(sc.Graph(operations, tensors, shared), actions).peak_bytes


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("budget", ["80%", "50%"])
def test_a_pipeline_run_in_full_stays_within_what_is_claimed(seed, budget):
    stages, microbatches = 4, 9
    chains = [stage_chain(5 + s, seed=seed * 10 + s) for s in range(stages)]
    plans = sc.plan_pipeline(chains, budget, time_limit=SECONDS)
    for s, (chain, stage) in enumerate(zip(chains, plans, strict=True)):
        assert stage.in_flight == stages - s
        order = one_forward_one_backward(s, stages, microbatches)
        run = simulated_peak(chain.graph, stage.plan.schedule, order)
        assert run <= stage.peak_bytes <= stage.budget_bytes
        # The claim is met where the running one's peak falls in the steady part of the pipeline.
        assert run == stage.peak_bytes


def two_layers() -> sc.Chain:
    return sc.Chain([sc.Layer("a", 1.0, 2.0, 10, 100), sc.Layer("b", 1.0, 2.0, 10, 100)], input_bytes=5)


def test_microbatches_in_flight_add_what_they_keep():
    # Kept: 100 saved of each layer, the output of each (10), and the microbatch's input (5).
    # The running one peaks in b's backward: 5 + 10 + 100 + 100, and a gradient of 10 for each output.
    kept, peak = 225, 235
    (stage,) = sc.plan_pipeline([two_layers()], peak + 2 * kept, 3, time_limit=SECONDS)
    assert (stage.kept_bytes, stage.plan.peak_bytes, stage.peak_bytes) == (kept, peak, peak + 2 * kept)
    assert stage.plan.overhead == 0.0
    assert stage.plan.status is sc.Status.OPTIMAL


def test_a_byte_less_is_worth_a_recomputation():
    (stage,) = sc.plan_pipeline([two_layers()], 235 + 2 * 225 - 1, 3, time_limit=SECONDS)
    # One forward of the two layers again: of six units of time, one.
    assert stage.plan.overhead == pytest.approx(1 / 6)
    assert stage.peak_bytes <= 235 + 2 * 225 - 1
    assert 6.0 <= stage.plan.bound <= stage.plan.time


def test_the_bound_counts_what_others_keep_where_the_backward_begins_once():
    graph = two_layers().graph
    operations = [replace(op, repeatable=op.name != "loss_backward") for op in graph.operations]
    # As the backward begins, three inputs and three times what saving everything keeps do not fit.
    (stage,) = sc.plan_pipeline([replace(graph, operations=operations)], 3 * 225 - 1, 3, time_limit=SECONDS)
    # Nothing but saving everything takes 6: the next is one forward more.
    assert (stage.plan.time, stage.plan.bound, stage.plan.status) == (7.0, 7.0, sc.Status.OPTIMAL)


def test_less_kept_can_be_found_where_the_peak_of_one_microbatch_stays():
    """Saving everything has the least peak of one microbatch here, whose backward needs it all at once."""
    layer = sc.Layer("wide", 1.0, 2.0, output_bytes=1, saved_bytes=1000)
    chain = sc.Chain([layer], input_bytes=1)
    alone, six = (sc.plan_pipeline([chain], "100%" if n == 1 else 1100, n, time_limit=SECONDS)[0] for n in (1, 6))
    assert alone.kept_bytes == 1002  # saved, output and input
    assert six.kept_bytes == 2
    assert six.plan.overhead == pytest.approx(1 / 3)


def test_one_microbatch_gets_what_solve_answers():
    chain = stage_chain(6, seed=1)
    (stage,) = sc.plan_pipeline([chain], "60%", 1, time_limit=SECONDS)
    solution = sc.solve(chain, "60%", time_limit=SECONDS)
    assert solution.status is sc.Status.OPTIMAL
    assert (stage.plan.status, stage.plan.time, stage.plan.search_space) == (
        solution.status,
        solution.time,
        solution.search_space,
    )


def test_the_least_that_can_be_kept_is_tried():
    # Eight keep an input (5) and the output of b (10) that the loss reads; the running one recomputes
    # all for b's backward: 5 + 10 + 100, and two gradients of 10.
    (stage,) = sc.plan_pipeline([two_layers()], 8 * 15 + 135, 9, time_limit=SECONDS)
    assert (stage.kept_bytes, stage.peak_bytes) == (15, 255)


def test_stages_of_1f1b_hold_one_microbatch_less_each():
    chains = [two_layers()] * 3
    everywhere = sc.plan_pipeline(chains, "100%", time_limit=SECONDS)
    assert [stage.in_flight for stage in everywhere] == [3, 2, 1]
    assert [stage.budget_bytes for stage in everywhere] == [235 + 2 * 225, 235 + 225, 235]
    assert [s.in_flight for s in sc.plan_pipeline(chains, ["1kB", "1kB", 700], 2, time_limit=SECONDS)] == [2, 2, 2]


def test_a_stage_that_does_not_fit_is_named_with_what_is_known():
    with pytest.raises(BudgetTooSmallError, match=r"stage 1: no schedule fits .* alone needs") as caught:
        sc.plan_pipeline([two_layers(), two_layers()], [1000, 100], 1, time_limit=SECONDS)
    assert caught.value.proven
    with pytest.raises(
        BudgetTooSmallError, match=r"stage 0: no plan found fits .* with 9 .* smallest known plan needs"
    ) as caught:
        sc.plan_pipeline([two_layers()], 255 - 1, 9, time_limit=SECONDS)
    assert not caught.value.proven


@pytest.mark.parametrize(
    ("graphs", "budget", "in_flight", "why"),
    [
        ([], 100, None, "at least one graph"),
        (two_layers(), 100, None, "must be a sequence of at least one graph"),
        ([two_layers()], [100, 100], None, "got 1 stages, 2 budgets"),
        ([two_layers()], 100, [1, 1], "2 numbers in flight"),
        ([two_layers()], 100, 0, "got 0"),
        ([two_layers()], 100, [True], "got True"),
    ],
)
def test_invalid_options_are_refused(graphs, budget, in_flight, why):
    with pytest.raises(InvalidOptionError, match=why):
        sc.plan_pipeline(graphs, budget, in_flight)


def test_the_plan_of_a_pipeline_is_a_sequence_of_its_stages_shown_in_one_line_and_as_a_table():
    plan = sc.plan_pipeline([two_layers()] * 2, "100%", time_limit=SECONDS)
    assert isinstance(plan, sc.PipelinePlan)
    assert (len(plan), plan[0], list(plan)) == (2, plan.stages[0], list(plan.stages))
    # As counted above: the running one peaks at 235 B, and each other one keeps 225 B.
    assert repr(plan) == "PipelinePlan(2 stages, largest peak 460 B, largest overhead 0.00%)"
    assert [line.split() for line in plan.summary().splitlines()[1:]] == [
        ["0", "2", "460", "B", "460", "B", "225", "B", "0.00%", "0.00%", "OPTIMAL"],
        ["1", "1", "235", "B", "235", "B", "225", "B", "0.00%", "0.00%", "OPTIMAL"],
    ]
