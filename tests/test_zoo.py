"""Generated graphs have the requested size, depend only on the seed, and resemble those they are named after."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

import scheduler as sc
from scheduler.errors import InvalidOptionError
from scheduler.problem import Problem
from scheduler.zoo.tape import Tape

TINY: dict[str, Callable[[bool], sc.Graph]] = {
    "resnet": lambda backward: sc.zoo.resnet((1,), width=1, size=1, classes=1, backward=backward),
    "mobilenet": lambda backward: sc.zoo.mobilenet(
        width=1 / 32, size=1, classes=1, settings=[(2, 32, 1, 1)], backward=backward
    ),
    "densenet": lambda backward: sc.zoo.densenet((2,), growth=1, size=1, classes=1, backward=backward),
    "unet": lambda backward: sc.zoo.unet(1, width=1, size=2, classes=1, backward=backward),
    "transformer": lambda backward: sc.zoo.transformer(1, width=1, heads=1, length=1, vocabulary=1, backward=backward),
    "encoder_decoder": lambda backward: sc.zoo.encoder_decoder(
        1, width=1, heads=1, length=1, vocabulary=1, backward=backward
    ),
}
SMALL: dict[str, sc.Graph | sc.Chain] = {
    "resnet": sc.zoo.resnet((1, 1), width=16, size=64, batch_size=8, classes=10),
    "mobilenet": sc.zoo.mobilenet(size=64, batch_size=8, classes=10, settings=[(1, 16, 1, 1), (6, 24, 2, 2)]),
    "densenet": sc.zoo.densenet((2, 2), growth=8, size=64, batch_size=8, classes=10),
    "unet": sc.zoo.unet(2, width=16, size=64, batch_size=4),
    "transformer": sc.zoo.transformer(2, width=64, heads=4, length=64, batch_size=8, vocabulary=256),
    "encoder_decoder": sc.zoo.encoder_decoder(2, width=64, heads=4, length=64, batch_size=8, vocabulary=256),
    "uniform_chain": sc.zoo.uniform_chain(12, saved_bytes=3),
    "heterogeneous_chain": sc.zoo.heterogeneous_chain(12),
}


def parameters(graph: sc.Graph) -> int:
    """Elements of all parameters."""
    return sum(graph.tensor(name).size_bytes for name in graph.resident if name.endswith(".parameter")) // 4


# Counted by hand from the papers' figures, in elements. Forward operations: stem, blocks, end.
# The backward has one for each but for the sums ("add"), whose gradient is passed on, and one
# for each further reader of a tensor, where gradients are added.
@pytest.mark.parametrize(
    ("name", "forward", "backward", "resident", "peak", "where"),
    [
        # 4 + (8 in three convolutions, 2 in the shortcut, add, relu) + 3; one add, one tensor read twice.
        # 147 of 192 parameters are the stem's: its backward has all gradients, the loss and its input.
        ("resnet", 19, 19, 3 + 1 + 192, 1 + 192 + 1, "stem/convolution_backward"),
        # 3 + (3 + 3 + 2 + add) + 3 + 3. In the last norm's backward: 11 saved before it and its
        # own input of 1, loss 1, gradients of linear 41 and norm 80, and thrice 40 channels.
        ("mobilenet", 18, 18, 3 + 1 + 222, 12 + 1 + 41 + 80 + 3 * 40, "last/norm_backward"),
        # 4 + 6 + 7 + 3 + 3; of the features one is read three times and one twice. As for resnet.
        ("densenet", 23, 26, 3 + 1 + 429, 1 + 429 + 2, "stem/convolution_backward"),
        # 6 + 7 + 8 + 2; one tensor is read twice. As for resnet, with 4 pixels.
        ("unet", 23, 24, 12 + 4 + 142, 1 + 142 + 4, "down0/convolution_backward"),
        # 1 + 8 + 5 + 3; two adds, two tensors read twice. In the backward of the first linear:
        # its input 1 and output's gradient 3, its results (1 + 6), embedding and the gradient
        # that bypasses it 2, loss 1, gradients of 20 parameters.
        ("transformer", 17, 17, 2 + 29, 4 + 7 + 2 + 1 + 20, "block0/linear_backward"),
        # 15 + 1 + 8 + 9 + 5 + 3; five adds, five tensors read twice. As above, with the 38 more
        # parameters of the decoder and of the encoder's last norm.
        ("encoder_decoder", 41, 41, 3 + 67, 4 + 7 + 2 + 1 + 20 + 38, "encoder0/linear_backward"),
    ],
)
def test_tiny_networks_have_the_operations_and_the_bytes_counted_by_hand(
    name: str, forward: int, backward: int, resident: int, peak: int, where: str
) -> None:
    graph = TINY[name](True)
    phases = [operation.phase for operation in graph.operations]
    assert phases == ["forward"] * forward + ["backward"] * backward
    assert graph.resident_bytes == 4 * resident
    baseline = Problem(graph, 0).baseline
    assert (baseline.peak_bytes, baseline.peak_operation) == (4 * (resident + peak), where)
    assert baseline.time == math.fsum(operation.time for operation in graph.operations)


def test_gradients_of_all_readers_are_summed_whether_passed_on_or_computed() -> None:
    # y is read by "b" and by two sums, whose one gradient, that of the loss's input, is passed on to
    # y twice and to "b" once: two gradients are summed first, then the one that "b" computes.
    tape = Tape()
    y = tape.run("a", [tape.batch("x", (2,))], (2,), parameters=3)
    total = tape.add(y, tape.add(y, tape.run("b", [y], (2,))))
    graph = tape.graph(tape.run("loss", [total], ()), "sums", backward=True)
    backward = [operation for operation in graph.operations if operation.phase == "backward"]
    kinds = [operation.name.rstrip("0123456789") for operation in backward]
    assert kinds == ["loss_backward", "a_sum", "b_backward", "a_sum", "a_backward"]
    loss, first, b, second, a = (operation.outputs[0] for operation in backward)
    assert [operation.inputs[:2] for operation in backward[1:4]] == [(loss, loss), (loss, y), (first, b)]
    assert backward[4].inputs[0] == second
    assert graph.results == ("loss", a)
    assert graph.tensor(a).size_bytes == 12


@pytest.mark.parametrize("name", TINY)
def test_the_forward_graph_is_the_first_part_of_the_whole_step(name: str) -> None:
    step, forward = TINY[name](True), TINY[name](False)
    count = len(forward.operations)
    assert step.operations[:count] == forward.operations
    assert step.resident == forward.resident
    assert forward.results == ("head/loss",)
    gradients = step.results[1:]
    trained = [name for name in step.resident if name.endswith(".parameter")]
    assert [step.tensor(gradient).size_bytes for gradient in gradients] == [
        step.tensor(parameter).size_bytes for parameter in trained
    ]


@pytest.mark.parametrize(
    ("network", "published"),
    [
        (sc.zoo.resnet, 25_557_032),
        (sc.zoo.mobilenet, 3_504_872),
        (sc.zoo.densenet, 7_978_856),
    ],
    ids=["ResNet-50", "MobileNetV2", "DenseNet-121"],
)
def test_by_default_networks_have_as_many_parameters_as_those_of_torchvision(
    network: Callable[..., sc.Graph], published: int
) -> None:
    assert parameters(network(backward=False)) == published


def test_a_block_of_the_transformer_has_as_many_parameters_as_one_of_gpt_2() -> None:
    one, two = (sc.zoo.transformer(layers, backward=False) for layers in (1, 2))
    assert parameters(two) - parameters(one) == 7_087_872


@pytest.mark.parametrize("heads", [2, 8, 16])
def test_separate_heads_have_six_operations_each(heads: int) -> None:
    one, two = (
        sc.zoo.transformer(layers, width=16, heads=heads, length=4, vocabulary=4, separate_heads=True)
        for layers in (1, 2)
    )
    # Forward: 8 + 5, less the 3 of all heads at once, 3 splits and a concatenation more. Backward: two
    # adds less, two sums more.
    assert len(two.operations) - len(one.operations) == 2 * (13 - 3 + 4) + 6 * heads


def test_separate_heads_save_the_same_bytes() -> None:
    together, apart = (
        sc.zoo.transformer(1, width=16, heads=4, length=4, vocabulary=4, separate_heads=separate)
        for separate in (False, True)
    )
    assert Problem(apart, 0).baseline.saved_bytes == Problem(together, 0).baseline.saved_bytes


def test_a_product_takes_its_flops_and_twice_as_many_in_the_backward() -> None:
    # 64 tokens of 64 elements times 64 x 192: to move 4096 + 12288 + 12288 + 192 elements takes
    # 1 443 200, less than to compute.
    graph = sc.zoo.transformer(1, width=64, heads=1, length=64, vocabulary=2)
    assert graph.operation("block0/linear").time == 2 * 64 * 64 * 192
    assert graph.operation("block0/linear_backward").time == 2 * 2 * 64 * 64 * 192


def test_an_operation_with_few_flops_takes_the_time_to_move_its_elements() -> None:
    # Read and made: 4 x 64 x 64 elements each. Three norms, each with 64 elements twice.
    graph = sc.zoo.transformer(1, width=64, heads=1, length=64, vocabulary=2)
    assert graph.operation("block0/gelu").time == 50 * 2 * 4 * 64 * 64
    assert graph.operation("block0/gelu_backward").time == 50 * 2 * 4 * 64 * 64
    assert graph.operation("block0/norm").time == 50 * (2 * 64 * 64 + 128)
    assert graph.operation("block0/split").time == 0


def test_depthwise_convolutions_compute_one_channel_each() -> None:
    # 6 x 16 channels of 112 x 112 pixels from a kernel of 3 x 3, and as many elements read.
    graph = sc.zoo.mobilenet(size=224, settings=[(1, 16, 1, 1), (6, 24, 1, 1)], backward=False)
    depthwise = graph.operation("stage1.block0/convolution2")
    assert graph.tensor("stage1.block0/convolution2.parameter").size_bytes == 4 * 96 * 9
    assert depthwise.time == 50 * (2 * 96 * 112 * 112 + 96 * 9)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("budget", ["80%", "60%"])
def test_all_are_solved(name: str, budget: str) -> None:
    solution = sc.solve(SMALL[name], budget, time_limit=2.0)
    assert solution.status in (sc.Status.OPTIMAL, sc.Status.FEASIBLE)
    assert solution.peak_bytes is not None
    assert solution.peak_bytes <= solution.budget_bytes < solution.baseline_peak_bytes
    assert solution.time >= solution.baseline_time


def test_the_uniform_chain_is_uniform() -> None:
    chain = sc.zoo.uniform_chain(5, forward_time=2.0, backward_time=3.0, output_bytes=7, saved_bytes=11)
    assert chain.input_bytes == 7
    assert {(x.forward_time, x.backward_time, x.output_bytes, x.saved_bytes) for x in chain.layers} == {(2, 3, 7, 11)}
    baseline = Problem(chain.graph, 0).baseline
    assert baseline.time == 5 * (2 + 3)
    assert baseline.saved_bytes == 5 * (7 + 11)  # what each layer saves, and its output


def test_the_heterogeneous_chain_is_drawn_within_its_spread() -> None:
    chain = sc.zoo.heterogeneous_chain(200, seed=1, spread=4.0)
    assert all(2**19 <= layer.output_bytes <= 2**21 for layer in chain.layers)
    assert all(0.5 <= layer.forward_time <= 2.0 for layer in chain.layers)
    assert all(layer.backward_time == 2 * layer.forward_time for layer in chain.layers)
    assert all(0 <= layer.saved_bytes <= 4 * layer.output_bytes for layer in chain.layers)
    assert len({layer.output_bytes for layer in chain.layers}) > 190


@pytest.mark.parametrize("operations", [3, 4, 10, 100, 250])
def test_random_layered_has_one_source_one_sink_and_all_operations(operations: int) -> None:
    graph = sc.zoo.random_layered(operations, seed=1)
    assert len(graph.operations) == operations
    assert [operation.name for operation in graph.operations if not operation.inputs] == ["op0"]
    read = {name for operation in graph.operations for name in operation.inputs}
    assert {tensor.name for tensor in graph.tensors} - read == {f"t{operations - 1}"}
    assert len(graph.required) == operations


def test_random_layered_is_like_the_published_graph_of_100() -> None:
    # Read off random_layered_n100 of MOCCASIN: 236 edges, mean 2041 bytes, mean time 478.
    graphs = [sc.zoo.random_layered(100, seed=seed) for seed in range(20)]
    edges = sum(len(operation.inputs) for graph in graphs for operation in graph.operations) / 20
    size = sum(tensor.size_bytes for graph in graphs for tensor in graph.tensors) / 2000
    time = sum(operation.time for graph in graphs for operation in graph.operations) / 2000
    assert edges == pytest.approx(236, rel=0.2)
    assert size == pytest.approx(2041, rel=0.2)
    assert time == pytest.approx(478, rel=0.1)


@pytest.mark.parametrize("generator", [sc.zoo.random_layered, sc.zoo.heterogeneous_chain])
def test_a_graph_depends_only_on_its_seed(generator: Callable[..., object]) -> None:
    assert generator(50, seed=3) == generator(50, seed=3)
    assert generator(50, seed=3) != generator(50, seed=4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sc.zoo.random_layered(2), "operations must be at least 3, got 2"),
        (lambda: sc.zoo.uniform_chain(0), "layers must be an int of at least 1, got 0"),
        (lambda: sc.zoo.heterogeneous_chain(3, spread=0.5), "spread must be a number of at least 1, got 0.5"),
        (lambda: sc.zoo.heterogeneous_chain(3, spread=math.nan), "spread must be a number of at least 1, got nan"),
        (lambda: sc.zoo.resnet(()), "stages must be an int of at least 1, got 0"),
        (lambda: sc.zoo.resnet((2, 0)), r"blocks\[1\] must be an int of at least 1, got 0"),
        (lambda: sc.zoo.densenet(growth=0), "growth must be an int of at least 1, got 0"),
        (
            lambda: sc.zoo.mobilenet(width=0.0),
            "width, which multiplies the channels, must be a number above 0, got 0.0",
        ),
        (lambda: sc.zoo.mobilenet(settings=[(6, 24, 2, 0)]), r"settings\[0\] must be an int of at least 1, got 0"),
        (lambda: sc.zoo.unet(3, size=100), "multiple of 2\\^depth = 8, got 100"),
        (lambda: sc.zoo.transformer(width=100, heads=12), "width must be a multiple of heads = 12, got 100"),
        (lambda: sc.zoo.encoder_decoder(0), "layers must be an int of at least 1, got 0"),
    ],
)
def test_bad_sizes_are_rejected(call: Callable[[], object], words: str) -> None:
    with pytest.raises(InvalidOptionError, match=words):
        call()
