"""What is expected of torch's private names for AOTAutograd, TorchDynamo, Inductor and the profiler."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, fx, nn

from scheduler.pytorch.torch_private import aot, dynamo, operators, profiler, symbolic_sizes, tensors
from tests.pytorch.torch_private.expectations import MODULES, VALUES, Expectations, public_names

LOGGER = logging.getLogger(__name__)
EXPECTED = Expectations()
NAMES = public_names(MODULES - VALUES)
aten = torch.ops.aten


def test_there_is_an_expectation_of_every_name() -> None:
    assert sorted(EXPECTED) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_torch_does_what_is_expected_of(name: str) -> None:
    EXPECTED[name]()


class Step(nn.Module):
    """A parameter, a changed buffer and an argument, all of which requires gradients but the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.count.add_(1)
        return ((x * self.weight).exp() + self.count,)


@EXPECTED.of(
    "aot.export_joint",
    "aot.ParamAOTInput",
    "aot.BufferAOTInput",
    "aot.PlainAOTInput",
    "aot.DifferentiableAOTInput",
    "aot.TangentAOTInput",
    "aot.PlainAOTOutput",
    "aot.InputMutationAOTOutput",
    "aot.GradAOTOutput",
    "aot.AOTOutput",
)
def a_joint_graph_says_what_its_inputs_and_outputs_are() -> None:
    module, x = Step(), torch.ones(2, requires_grad=True)
    graph = aot.export_joint(module, [x])
    described = [node.meta["desc"] for node in graph.graph.find_nodes(op="placeholder")]
    assert described == [
        aot.ParamAOTInput("weight"), aot.BufferAOTInput("count"), aot.PlainAOTInput(0), described[3]
    ]  # fmt: skip
    assert isinstance(described[3], aot.TangentAOTInput)
    assert described[3].output == aot.PlainAOTOutput(0)
    assert all(isinstance(found, aot.DifferentiableAOTInput) for found in described[:3])
    (returned,) = graph.graph.find_nodes(op="output")
    mutation, output, *gradients = returned.meta["desc"]
    assert mutation == aot.InputMutationAOTOutput(aot.BufferAOTInput("count"))
    assert output == aot.PlainAOTOutput(0)
    of_weight, of_count, of_x = gradients
    assert isinstance(of_weight, aot.GradAOTOutput)
    assert (of_weight.grad_of, of_x.grad_of) == (described[0], described[2])
    assert of_count is None
    assert all(isinstance(found, aot.AOTOutput) for found in (mutation, output, of_weight))
    assert [value is None for value in returned.args[0]] == [False, False, False, True, False]
    calls = graph.graph.find_nodes(op="call_function", target=aten.exp.default)
    assert len(calls) == 1
    assert all(tensors.is_fake(node.meta["val"]) for node in calls)
    assert module.count.eq(0).all()


class Branching(nn.Module):
    """A step with a side effect, a log message and a branch that only Python can take."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seen: list[float] = []

    def forward(self, x: Tensor, scales: dict[str, float]) -> Tensor:
        self.seen.append(scales["scale"])
        LOGGER.warning("a step")
        return x * self.weight * scales["scale"] if "scale" in scales else x


@EXPECTED.of("dynamo.capture", "dynamo.forget_compiled")
def code_is_captured_for_one_shape_with_its_side_effects_reported() -> None:
    module = Branching()
    for size in (2, 1):
        dynamo.forget_compiled()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            captured = dynamo.capture(
                module, (torch.ones(size), {"scale": 3.0}), {}, ignored_functions={logging.Logger.warning}
            )
        (effect,) = (str(warning.message) for warning in caught if "side effects" in str(warning.message))
        assert "seen" in effect
        assert captured(torch.ones(size), {"scale": 3.0}).tolist() == [3.0, 3.0]
        assert [*captured.parameters()] == [module.weight]
    dynamo.forget_compiled()
    assert module.seen == []


@EXPECTED.of("symbolic_sizes.fakes_of_varying_sizes", "symbolic_sizes.conditions_of", "symbolic_sizes.size_at")
def equal_sizes_share_a_symbol_and_what_code_finds_out_is_a_condition() -> None:
    x, y, z = symbolic_sizes.fakes_of_varying_sizes(
        [torch.ones(4, 6), torch.ones(6, 2), torch.ones(2)], {0: {1}, 1: {0}}
    )
    hold = symbolic_sizes.conditions_of(x)
    assert hold({6: 9})
    assert not hold({6: 1})  # torch traces sizes 0 and 1 by themselves
    assert not hold({})
    product = (x @ y).reshape(-1)
    assert product.shape == (8,)
    assert [symbolic_sizes.size_at(size, {6: 9}) for size in (*x.shape, *y.shape, *z.shape)] == [4, 9, 9, 2, 2]
    assert symbolic_sizes.size_at((x.T + 1).reshape(-1).shape[0], {6: 9}) == 36
    assert x.shape[1] > 5
    assert hold({6: 7})
    assert not hold({6: 5})
    assert int(x.shape[1]) == 6
    assert not hold({6: 7})


@EXPECTED.of("symbolic_sizes.mark_varying")
def dynamo_traces_marked_dimensions_with_symbols() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() if x.shape[0] > 5 else x.cos()

    marked = torch.ones(6, 2)
    symbolic_sizes.mark_varying(marked, {0})
    hold = symbolic_sizes.conditions_of(dynamo.capture(Branch(), [marked], {}, ignored_functions=set()))
    dynamo.forget_compiled()
    assert hold({6: 8})
    assert not hold({6: 4})


@EXPECTED.of("symbolic_sizes.SYMBOLIC", "symbolic_sizes.new_fake_mode")
def sizes_of_varying_tensors_are_symbolic_and_others_are_numbers() -> None:
    (x,) = symbolic_sizes.fakes_of_varying_sizes([torch.ones(4, 6)], {0: {1}})
    assert [isinstance(size, symbolic_sizes.SYMBOLIC) for size in x.shape] == [False, True]
    with symbolic_sizes.new_fake_mode():
        assert tensors.is_fake(torch.ones(2) + 1)
    assert not tensors.is_fake(torch.ones(2))


@EXPECTED.of("dynamo.LOGGERS")
def the_loggers_exist() -> None:

    assert set(dynamo.LOGGERS) <= logging.root.manager.loggerDict.keys()


def compiled(function: Callable[[Tensor], Tensor], look: Callable[[], object]) -> object:
    """Return what `look` returns while a function is compiled."""
    found = []

    def backend(module: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        found.append(look())
        return module.forward

    dynamo.forget_compiled()
    torch.compile(function, backend=backend)(torch.ones(2))
    dynamo.forget_compiled()
    (seen,) = found
    return seen


@EXPECTED.of("dynamo.compilation_number")
def compilations_are_numbered() -> None:
    assert compiled(lambda x: x + 1, dynamo.compilation_number) == "0/0"


@EXPECTED.of("dynamo.outside_of_compilation")
def a_compilation_is_left() -> None:
    def symbolic() -> tuple[bool, bool]:
        inside = torch._guards.TracingContext.try_get() is not None
        with dynamo.outside_of_compilation():
            return inside, torch._guards.TracingContext.try_get() is not None

    assert compiled(lambda x: x + 1, symbolic) == (True, False)


@EXPECTED.of("dynamo.traced_lines")
def the_traced_line_is_known() -> None:
    lines = []

    def noting(value: Tensor) -> Tensor:
        lines.extend(line.line for line in dynamo.traced_lines()[-1:])
        return torch.empty_like(value)

    def function(x: Tensor) -> Tensor:
        return x.sin()

    with operators.replaced_kernels({aten.sin.default: {operators.DispatchKey.Meta: noting}}):
        operators.forget_fake_results()
        compiled(function, lambda: None)
    operators.forget_fake_results()
    assert lines == ["return x.sin()"]
    assert list(dynamo.traced_lines()) == []


@EXPECTED.of("inductor.CustomPartitionerFn", "inductor.compile_graph", "inductor.extract_forward_and_backward")
def inductor_splits_a_joint_graph_as_it_is_told() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing Inductor warns
        from scheduler.pytorch.torch_private import inductor
    outputs = []

    class Partitioner(inductor.CustomPartitionerFn):
        def __call__(self, joint: fx.GraphModule, inputs: object, **options: object) -> object:
            saved = [n for n in joint.graph.find_nodes(op="placeholder") if "tangent" not in n.name]
            pair = inductor.extract_forward_and_backward(joint, saved, options["num_fwd_outputs"])
            outputs.extend(len(part.graph.find_nodes(op="output")[0].args[0]) for part in pair)
            return pair

        def uuid(self) -> str:
            return __name__

    def backend(module: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        return inductor.compile_graph(module, inputs, Partitioner())

    dynamo.forget_compiled()
    x, weight = torch.rand(2, 3), torch.rand(3, 4, requires_grad=True)
    result = torch.compile(lambda x: x @ weight, backend=backend)(x)
    result.backward(torch.ones(2, 4))
    dynamo.forget_compiled()
    assert outputs == [2, 2]  # the product and x; the gradient of the weight, and none of x
    assert torch.equal(result, x @ weight)
    assert torch.equal(weight.grad, x.T @ torch.ones(2, 4))


def spans(root: profiler.ProfilerEvent) -> list[profiler.ProfilerEvent]:
    return [root, *(event for child in root.children for event in spans(child))]


@EXPECTED.of(
    "profiler.start_profile",
    "profiler.stop_profile",
    "profiler.ProfilerEvent",
    "profiler.AllocationFields",
    "profiler.NamedRegion",
)
def allocations_are_events_with_addresses_and_times() -> None:
    profiler.start_profile()
    with profiler.NamedRegion("a span"):
        held = torch.empty(1000)
        address = held.data_ptr()
        del held
    events = [event for root in profiler.stop_profile() for event in spans(root)]
    assert len(events) == 3  # operators are not among them
    (span,) = (event for event in events if event.name == "a span")
    assert isinstance(span, profiler.ProfilerEvent)
    found = [event for event in events if isinstance(event.extra_fields, profiler.AllocationFields)]
    sizes = [event.extra_fields.alloc_size for event in found if event.extra_fields.ptr == address]
    assert sizes == [4000, -4000]
    assert all(span.start_time_ns <= event.start_time_ns <= span.end_time_ns for event in found)
    assert {event.extra_fields.device.type for event in found} == {"cpu"}
