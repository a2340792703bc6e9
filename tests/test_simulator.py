"""The simulator counts what the definition says and rejects what it forbids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.errors import InvalidScheduleError
from scheduler.graph import Graph, Operation, Tensor
from scheduler.schedule import Compute, Free, Schedule, schedule_from_runs
from scheduler.simulator import Simulation, simulate
from tests.support import oracle
from tests.support.examples import examples
from tests.support.fake_clock import FakeClock
from tests.support.strategies import action_sequences, graphs, joint_graphs


def op(name: str, inputs: str, outputs: str, time: float = 1, **options: object) -> Operation:
    return Operation(name, inputs.split(), outputs.split(), time, **options)


def tensors(**sizes: int | tuple[int, str]) -> list[Tensor]:
    """Build tensors from sizes, or from (size, storage)."""
    return [Tensor(name, *(size if isinstance(size, tuple) else (size,))) for name, size in sizes.items()]


def simulation_of(graph: Graph, lines: str) -> Simulation:
    return simulate(graph, Schedule.from_lines(lines.split()))


def rejection(graph: Graph, lines: str) -> tuple[int, str]:
    with pytest.raises(InvalidScheduleError) as rejected:
        simulation_of(graph, lines)
    assert str(rejected.value) == f"action {rejected.value.index}: {rejected.value.reason}"
    return rejected.value.index, rejected.value.reason


CHAIN = Graph(
    [op("f", "x", "y", 1.5), op("g", "y", "z", 2.5, workspace_bytes=7), op("h", "y z", "w", 4)],
    tensors(x=100, y=10, z=20, w=40),
    resident=["x"],
    results=["w"],
)


# Memory.


def test_memory_is_during_each_run_and_after_each_free() -> None:
    simulation = simulation_of(CHAIN, "+f +g +h -y -z")
    # 100 + 10; 110 + 20 + 7 (workspace); 130 + 40; then y and z go.
    assert simulation.memory.tolist() == [110, 137, 170, 160, 140]
    assert simulation.memory.dtype == np.int64
    assert simulation.peak_bytes == 170
    assert simulation.peak_operation == "h"
    assert simulation.time == 8


def test_inputs_count_until_their_last_reader_has_run() -> None:
    # At g: x, y and z; y may only go after it.
    assert simulation_of(CHAIN, "+f +g -y +f +h").memory.tolist() == [110, 137, 120, 130, 170]


def test_the_workspace_counts_during_its_operation_only() -> None:
    graph = Graph([op("a", "", "x", workspace_bytes=50), op("b", "x", "y")], tensors(x=1, y=2), results=["y"])
    simulation = simulation_of(graph, "+a +b")
    assert simulation.memory.tolist() == [51, 3]
    assert simulation.peak_operation == "a"


def test_without_workspaces_the_live_peak_is_that_of_the_instances() -> None:
    # 1 during a, then 1 + 2 during b: another moment than that of the peak.
    graph = Graph([op("a", "", "x", workspace_bytes=50), op("b", "x", "y")], tensors(x=1, y=2), results=["y"])
    simulation = simulation_of(graph, "+a +b")
    assert (simulation.peak_bytes, simulation.live_peak_bytes) == (51, 3)


def test_the_peak_operation_is_the_first_of_equals() -> None:
    graph = Graph([op("a", "", "x"), op("b", "", "y"), op("c", "", "z")], tensors(x=2, y=2, z=0), results=["z"])
    assert simulation_of(graph, "+a -x +b +c").peak_operation == "a"


def test_resident_tensors_count_throughout_by_storage() -> None:
    # w and its view v lie on one storage of 9 bytes; b has 4 of its own.
    graph = Graph([op("a", "w", "y")], tensors(w=9, v=(6, "w"), b=4, y=1), resident=["w", "v", "b"], results=["y"])
    assert simulation_of(graph, "+a").memory.tolist() == [14]


def test_an_empty_schedule_of_a_graph_that_asks_for_nothing_costs_the_resident_bytes() -> None:
    simulation = simulation_of(Graph([op("a", "w", "y")], tensors(w=9, y=1), resident=["w"]), "")
    assert (simulation.time, simulation.peak_bytes, simulation.memory.tolist()) == (0, 9, [])
    assert (simulation.peak_operation, simulation.recomputed) == ("", {})


# Views and shared storages.


VIEWS = Graph(
    [op("make", "", "x"), op("view", "x", "v"), op("use", "v", "y")],
    tensors(x=8, v=(3, "x"), y=1),
    results=["y"],
)


def test_a_view_costs_nothing_and_holds_the_whole_storage() -> None:
    # 8; nothing more; x goes but v holds all 8; + 1; v goes.
    assert simulation_of(VIEWS, "+make +view -x +use -v").memory.tolist() == [8, 8, 8, 9, 1]


def test_a_storage_is_as_large_as_its_largest_tensor() -> None:
    graph = Graph([op("make", "", "x"), op("view", "x", "v")], tensors(x=3, v=(8, "x")), results=["x"])
    assert simulation_of(graph, "+make").memory.tolist() == [8]


def test_a_tensor_recomputed_next_to_its_old_view_is_a_second_instance() -> None:
    # v holds the first x; the second x is 8 bytes more; v goes, and its instance with it.
    assert simulation_of(VIEWS, "+make +view -x +make +use -v -x").memory.tolist() == [8, 8, 8, 16, 17, 9, 1]


def test_a_view_joins_the_instance_of_its_first_input_on_the_storage() -> None:
    graph = Graph(
        [op("make", "", "x"), op("view", "x", "v"), op("both", "x v", "a"), op("swap", "v x", "b")],
        tensors(x=8, v=(8, "x"), a=(8, "x"), b=(8, "x")),
        results=["v"],
    )
    # v lies on the first x, then x is recomputed: 16. a joins the second (x), b the first (v).
    joined_x = simulation_of(graph, "+make +view -x +make +both -x -a")
    assert joined_x.memory.tolist() == [8, 8, 8, 16, 16, 16, 8]
    joined_v = simulation_of(graph, "+make +view -x +make +swap -x -b")
    assert joined_v.memory.tolist() == [8, 8, 8, 16, 16, 8, 8]


def test_outputs_on_one_new_storage_share_one_instance() -> None:
    graph = Graph([op("split", "", "a b")], tensors(a=(5, "s"), b=(5, "s")), results=["b"])
    assert simulation_of(graph, "+split -a").memory.tolist() == [5, 5]


def test_tensors_of_one_storage_produced_by_separate_operations_are_separate_instances() -> None:
    graph = Graph([op("one", "", "a"), op("two", "", "b")], tensors(a=(5, "s"), b=(5, "s")), results=["a", "b"])
    assert simulation_of(graph, "+one +two").memory.tolist() == [5, 10]


def test_a_view_of_a_resident_tensor_costs_nothing() -> None:
    graph = Graph(
        [op("transpose", "w", "t"), op("use", "t", "y")], tensors(w=9, t=(9, "w"), y=1), resident=["w"], results=["y"]
    )
    simulation = simulation_of(graph, "+transpose +use -t")
    assert simulation.memory.tolist() == [9, 10, 10]
    assert simulation.saved == ("y",)


def test_a_new_tensor_on_a_resident_storage_costs_nothing() -> None:
    # DESIGN: storages that hold a resident tensor cost nothing beyond the resident bytes.
    graph = Graph([op("write", "", "t")], tensors(w=9, t=(9, "w")), resident=["w"], results=["t"])
    assert simulation_of(graph, "+write").memory.tolist() == [9]


# Outputs that are already live.


TWO_WAYS = Graph(
    [op("both", "", "a b"), op("alone", "", "a", 5), op("end", "a b", "z")],
    tensors(a=2, b=3, z=0),
    results=["z"],
)


def test_a_live_output_recomputed_counts_during_the_operation_only() -> None:
    # a; old a + copy of a + b; then a + b.
    assert simulation_of(TWO_WAYS, "+alone +both +end").memory.tolist() == [2, 7, 5]


def test_a_live_output_keeps_its_old_instance() -> None:
    graph = Graph(
        [op("both", "", "a b"), op("view", "a", "v"), op("end", "a b v", "z")],
        tensors(a=2, b=3, v=(2, "a"), z=0),
        results=["z"],
    )
    # After -b +both the view still shares with a: 5 bytes, not 7; with a freed before, 7.
    assert simulation_of(graph, "+both +view -b +both +end").memory.tolist() == [5, 5, 2, 7, 5]
    assert simulation_of(graph, "+both +view -b -a +both +end").memory.tolist() == [5, 5, 2, 2, 7, 7]


def test_a_copy_shares_the_new_instance_of_its_storage() -> None:
    graph = Graph([op("both", "", "a b")], tensors(a=(4, "s"), b=(4, "s")), results=["b"])
    # a keeps the old instance; the copy of a and the new b are one of 4: twice 4 bytes are live.
    assert simulation_of(graph, "+both -b +both").memory.tolist() == [4, 4, 8]


def test_a_live_view_recomputed_costs_nothing() -> None:
    graph = Graph([op("make", "", "x"), op("split", "x", "v y")], tensors(x=8, v=(8, "x"), y=1), results=["v", "y"])
    assert simulation_of(graph, "+make +split -y +split").memory.tolist() == [8, 9, 8, 9]


# History.


def test_recomputed_counts_the_runs_of_a_task_beyond_the_first() -> None:
    simulation = simulation_of(TWO_WAYS, "+alone -a +both -a +alone +end")
    assert simulation.recomputed == {"both": 2, "end": 0}
    assert simulation.time == 5 + 1 + 5 + 1


def test_a_task_that_never_runs_is_not_counted_as_recomputed() -> None:
    graph = Graph([op("a", "", "x"), op("unread", "", "y")], tensors(x=1, y=1), results=["x"])
    assert simulation_of(graph, "+a").recomputed == {"a": 0}


STEP = Graph(
    [
        op("f", "w", "x"),
        op("l", "x", "loss"),
        op("extra", "x", "e"),
        op("b", "x", "g", phase="backward"),
    ],
    tensors(w=100, x=8, loss=1, e=3, g=5),
    resident=["w"],
    results=["loss", "g"],
)


def test_saved_is_what_is_live_when_the_backward_begins() -> None:
    simulation = simulation_of(STEP, "+f +l +extra -e +b -x")
    assert simulation.saved == ("x", "loss")
    assert simulation.saved_bytes == 9
    assert simulation.memory.tolist() == [108, 109, 112, 109, 114, 106]


def test_saved_of_a_graph_without_backward_is_what_is_live_at_the_end() -> None:
    simulation = simulation_of(CHAIN, "+f +g +h -y")
    assert simulation.saved == ("z", "w")
    assert simulation.saved_bytes == 60


def test_a_forward_operation_may_run_again_in_the_backward_phase() -> None:
    # A recomputation before the first backward operation is part of what it saves; one after is not.
    simulation = simulation_of(STEP, "+f +l -x +f +b -x +f")
    assert simulation.saved == ("x", "loss")
    assert simulation.recomputed == {"f": 2, "l": 0, "b": 0}


def test_an_alternative_of_a_task_that_ran_may_first_run_in_the_backward_phase() -> None:
    graph = Graph(
        [op("f", "", "x"), op("again", "", "x"), op("b", "", "g", phase="backward")],
        tensors(x=8, g=5),
        results=["x", "g"],
    )
    assert simulation_of(graph, "+f -x +b +again").recomputed == {"f": 1, "b": 0}


def test_any_alternative_of_a_needed_task_lets_the_backward_begin() -> None:
    graph = Graph(
        [op("f", "", "x"), op("other", "", "x"), op("b", "x", "g", phase="backward")],
        tensors(x=8, g=5),
        results=["x", "g"],
    )
    assert simulation_of(graph, "+other +b").peak_bytes == 13


def test_a_forward_operation_that_no_forward_result_needs_may_be_left_out() -> None:
    assert simulation_of(STEP, "+f +l +b").recomputed == {"f": 0, "l": 0, "b": 0}


def test_a_forward_task_that_only_a_gradient_needs_may_first_run_any_time_before_the_backward() -> None:
    graph = Graph(
        [op("l", "", "loss"), op("mask", "", "m"), op("b", "m", "g", phase="backward")],
        tensors(loss=1, m=2, g=4),
        results=["loss", "g"],
    )
    assert simulation_of(graph, "+mask +l +b").peak_bytes == 7


def test_an_operation_without_outputs_runs() -> None:
    graph = Graph(
        [op("a", "", "x"), op("update", "x", "", 2, repeatable=False, workspace_bytes=3)], tensors(x=8), results=["x"]
    )
    assert simulation_of(graph, "+a +update").memory.tolist() == [8, 11]


def test_results_that_are_resident_need_nothing() -> None:
    graph = Graph([op("a", "w", "y")], tensors(w=9, y=1), resident=["w"], results=["w"])
    assert simulation_of(graph, "").peak_bytes == 9


def test_a_simulation_is_shown_in_one_line_and_summarized() -> None:
    simulation = simulation_of(STEP, "+f +l -x +f +b -x")
    assert repr(simulation) == "Simulation(time=4, peak='114 B', saved='9 B', recomputations=1)"
    assert simulation.summary().splitlines() == [
        "time              4",
        'peak              114 B (114 bytes), in "b"',
        "live peak         114 B without workspaces",
        "saved             9 B",
        "saved tensors     2",
        "recomputed tasks  1 of 3",
        "recomputations    1",
    ]


# Rejections.


def test_an_unknown_operation_is_rejected() -> None:
    assert rejection(CHAIN, "+f +nothing") == (1, 'the graph has no operation "nothing"')


def test_an_unknown_tensor_is_rejected() -> None:
    assert rejection(CHAIN, "+f -nothing") == (1, 'the graph has no tensor "nothing"')


def test_a_run_whose_input_was_freed_is_rejected() -> None:
    assert rejection(CHAIN, "+f +g -y +h") == (3, 'operation "h" reads "y", which is not live')


def test_a_run_whose_input_was_never_produced_is_rejected() -> None:
    assert rejection(CHAIN, "+g") == (0, 'operation "g" reads "y", which is not live')


def test_a_run_whose_outputs_are_all_live_is_rejected() -> None:
    assert rejection(CHAIN, "+f +f") == (1, 'every output of operation "f" is already live')


def test_a_free_of_a_resident_tensor_is_rejected() -> None:
    assert rejection(CHAIN, "+f -x") == (1, 'resident tensor "x" cannot be freed')


def test_a_second_free_is_rejected() -> None:
    assert rejection(CHAIN, "+f -y -y") == (2, 'tensor "y" is freed but not live')


def test_a_second_run_of_a_non_repeatable_operation_is_rejected() -> None:
    graph = Graph([op("draw", "", "x", repeatable=False)], tensors(x=1), results=["x"])
    assert rejection(graph, "+draw -x +draw") == (2, 'operation "draw" is not repeatable and runs a second time')


def test_a_second_run_of_an_operation_without_outputs_is_rejected() -> None:
    graph = Graph([op("update", "", "", repeatable=False)], [])
    assert rejection(graph, "+update +update")[0] == 1


def test_a_backward_before_what_the_forward_results_need_is_rejected() -> None:
    index, reason = rejection(STEP, "+f +b +l")
    assert index == 1
    assert '"b" runs before forward operation "l"' in reason


def test_the_forward_results_need_the_defaults_of_their_tasks() -> None:
    # "other" makes loss without x, but the default of loss reads x: f must have run before b.
    graph = Graph(
        [op("f", "", "x"), op("l", "x", "loss"), op("other", "", "loss"), op("b", "", "g", phase="backward")],
        tensors(x=8, loss=1, g=5),
        results=["loss", "g"],
    )
    index, reason = rejection(graph, "+other +b")
    assert index == 1
    assert '"f"' in reason


def test_a_forward_operation_that_first_runs_in_the_backward_phase_is_rejected() -> None:
    assert rejection(STEP, "+f +l +b +extra") == (
        3,
        'forward operation "extra" first runs after the backward phase began',
    )


def test_a_result_freed_at_the_end_is_rejected_at_the_end() -> None:
    assert rejection(CHAIN, "+f +g +h -w") == (4, 'result "w" is not live at the end')


def test_a_required_operation_left_out_is_rejected_at_the_end() -> None:
    graph = Graph([op("a", "", "x"), op("b", "", "y")], tensors(x=1, y=1), results=["x"], required=["b"])
    assert rejection(graph, "+a") == (1, 'required operation "b" has not run')
    assert simulation_of(graph, "+a +b -y").time == 2


def test_an_alternative_does_not_replace_a_required_operation() -> None:
    graph = Graph([op("a", "", "x"), op("b", "", "x")], tensors(x=1), results=["x"], required=["b"])
    assert rejection(graph, "+a") == (1, 'required operation "b" has not run')


def test_a_non_repeatable_operation_left_out_is_rejected_at_the_end() -> None:
    graph = Graph([op("a", "", "x"), op("update", "x", "", repeatable=False)], tensors(x=1), results=["x"])
    assert rejection(graph, "+a") == (1, 'required operation "update" has not run')


def test_the_first_broken_rule_is_the_one_reported() -> None:
    assert rejection(CHAIN, "-x +nothing")[0] == 0


def test_an_action_of_another_kind_is_rejected() -> None:
    with pytest.raises(InvalidScheduleError) as rejected:
        simulate(CHAIN, [Compute("f"), "g"])
    assert rejected.value.index == 1


# Against the oracle, which knows nothing of the package.


ALL_GRAPHS = graphs() | joint_graphs()


def oracle_actions(actions: Iterable[Compute | Free]) -> list[oracle.OracleVerb]:
    return [("compute", a.operation) if isinstance(a, Compute) else ("free", a.tensor) for a in actions]


def assert_simulated_as_by_the_oracle(graph: Graph, actions: Sequence[Compute | Free]) -> None:
    assert outcome(graph, actions) == oracle_outcome(graph, actions)


def outcome(graph: Graph, actions: Sequence[Compute | Free]) -> tuple[float, int] | str:
    try:
        simulation = simulate(graph, actions)
    except InvalidScheduleError as error:
        return f"rejected at {error.index}"
    return simulation.time, simulation.peak_bytes


def oracle_outcome(graph: Graph, actions: Sequence[Compute | Free]) -> tuple[float, int] | str:
    try:
        return oracle.peak_of(graph.to_dict(), oracle_actions(actions))
    except oracle.Refused as error:
        return f"rejected at {error.index}"


@settings(max_examples=examples(300))
@given(ALL_GRAPHS, st.data())
def test_random_actions_are_simulated_as_by_the_oracle(graph: Graph, data: st.DataObject) -> None:
    assert_simulated_as_by_the_oracle(graph, data.draw(action_sequences(graph)))


@settings(max_examples=examples(300))
@given(graphs(demands=False), st.data())
def test_each_moment_of_random_actions_needs_what_the_oracle_says(graph: Graph, data: st.DataObject) -> None:
    # Without demands, every valid prefix is a whole schedule.
    schedule = data.draw(action_sequences(graph))
    plain, state = oracle.read(graph.to_dict()), oracle.start()
    memory = []
    for action in oracle_actions(schedule):
        try:
            state, needed = oracle.step(plain, state, action)
        except ValueError:
            break
        memory.append(needed)
    assert simulate(graph, schedule[: len(memory)]).memory.tolist() == memory


@settings(max_examples=examples(300))
@given(ALL_GRAPHS, st.data())
def test_random_runs_are_simulated_as_by_the_oracle(graph: Graph, data: st.DataObject) -> None:
    defaults = list(graph.index.defaults)
    runs = list(defaults)
    for _ in range(data.draw(st.integers(0, 4))):
        extra = data.draw(st.integers(0, len(graph.operations) - 1))
        runs.insert(data.draw(st.integers(0, len(runs))), extra)
    assert_simulated_as_by_the_oracle(graph, schedule_from_runs(graph, runs))


@settings(max_examples=examples(150))
@given(ALL_GRAPHS, st.sampled_from(oracle.SPACES), st.integers(0, 4))
def test_optimal_schedules_cost_what_the_oracle_says(graph: Graph, space: str, more: int) -> None:
    data = graph.to_dict()
    budget = oracle.least_peak(data, space) + more
    time_needed, actions = oracle.best_schedule(data, budget, space)
    simulation = simulate(graph, [Compute(name) if kind == "compute" else Free(name) for kind, name in actions])
    assert simulation.time == time_needed
    assert simulation.peak_bytes == oracle.peak_of(data, actions)[1] <= budget


def test_20_000_actions_are_simulated_in_at_most_20_calls_each() -> None:
    operations = [op(f"f{i}", f"x{i}", f"x{i + 1}") for i in range(100)]
    graph = Graph(operations, tensors(**{f"x{i}": 1 for i in range(101)}), resident=["x0"], results=["x100"])
    once = [
        Compute("f0"),
        *(action for i in range(1, 100) for action in (Compute(f"f{i}"), Free(f"x{i}"))),
        Free("x100"),
    ]
    schedule = Schedule((once * 101)[:-1])
    assert len(schedule) > 20_000
    with FakeClock(seconds_per_call=1.0) as work:
        simulation = simulate(graph, schedule)
    assert work.calls <= 20 * len(schedule)
    # x0 (1 byte), one tensor and the next.
    assert simulation.peak_bytes == 3
    assert simulation.time == 101 * 100
