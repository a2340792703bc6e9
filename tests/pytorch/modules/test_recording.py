"""A step measured as a tree of calls: known figures, models of many kinds, and what measuring itself costs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from scheduler.errors import CaptureError, ExecutionError
from scheduler.graph.decisions import Decision
from scheduler.pytorch.capture.device_memory import DeviceMemory
from scheduler.pytorch.measurement.allocator import allocator_peak
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors, storage_bytes, training_step
from scheduler.pytorch.modules.calls import OUTSIDE, Call, CallTree
from scheduler.pytorch.modules.measuring.recording import record
from scheduler.pytorch.torch_private.autograd import autograd_node_name
from tests.support.pytorch.call_trees import plain_peak

ROWS, WIDTH = 16, 32
ACTIVATION = 4 * ROWS * WIDTH
"""Bytes of what each layer of these models returns."""


def squares(output: Tensor) -> Tensor:
    return output.pow(2).sum()


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH)


def layer() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.tanh, self.second = layer(), nn.Tanh(), layer()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.tanh(self.first(x)))
        return x + y


def call(tree: CallTree, name: str) -> Call:
    (found,) = (one for one in tree.calls if one.name == name)
    return found


def saved_bytes(tree: CallTree, name: str) -> int:
    found = call(tree, name)
    inside = range(found.start, found.stop)
    return sum(s.size_bytes for s in tree.storages if any(i in inside for i in s.saved_by))


def input_bytes(tree: CallTree, name: str) -> int:
    return sum(tree.storages[i].size_bytes for i in call(tree, name).inputs)


# Figures that are known.


def test_a_sequence_of_linear_and_tanh_saves_what_can_be_counted_by_hand() -> None:
    model = nn.Sequential(layer(), nn.Tanh(), layer())
    tree = record(model, (batch(),), loss=squares)
    assert [(one.name, one.caller, one.start, one.stop, one.refusal) for one in tree.calls] == [
        ("", OUTSIDE, 0, 3, ""),
        ("0", 0, 0, 1, ""),
        ("[1:3]", 0, 1, 3, ""),  # or the first two: they need the same
        ("1", 2, 1, 2, ""),
        ("2", 2, 2, 3, ""),
    ]
    assert [segment.call for segment in tree.segments] == [1, 3, 4, OUTSIDE]
    # The first layer saves the batch and its weight, which are resident; tanh saves its result, and so
    # does the next layer, its input; the loss saves the output.
    assert [(s.size_bytes, s.born, s.dies, s.saved_by) for s in tree.storages] == [
        (ACTIVATION, 0, 1, ()),
        (ACTIVATION, 1, 2, (1, 2)),
        (ACTIVATION, 2, 3, (3,)),
        (4, 3, 4, ()),
    ]
    assert [s.read_by for s in tree.storages] == [(1,), (2,), (3,), ()]
    parameters = 4 * (WIDTH * WIDTH + WIDTH)
    assert [segment.parameter_gradient_bytes for segment in tree.segments] == [parameters, 0, parameters, 0]
    one = 4  # the gradient of the loss, which autograd holds to the end
    assert [segment.gradient_bytes - one for segment in tree.segments[1:]] == [ACTIVATION] * 3
    assert tree.segments[0].gradient_bytes <= one
    assert [segment.forward_peak_bytes for segment in tree.segments] == [ACTIVATION] * 3 + [ACTIVATION + 4]
    assert tree.segments[1].backward_peak_bytes == ACTIVATION
    assert tree.segments[0].backward_peak_bytes == parameters
    assert all(segment.forward_time > 0 and segment.backward_time > 0 for segment in tree.segments)
    roles = {role: sum(t.size_bytes for t in tree.resident if t.role == role) for role in ("parameter", "input")}
    assert roles == {"parameter": 2 * parameters, "input": ACTIVATION}


def test_nested_blocks_hold_their_own_calls_and_segments() -> None:
    model = nn.Sequential(Block(), Block())
    tree = record(model, (batch(),), loss=squares)
    assert [one.name for one in tree.calls] == [
        "", "0", "0.first", "0.tanh", "0.second", "1", "1.first", "1.tanh", "1.second",
    ]  # fmt: skip
    assert [one.caller for one in tree.calls] == [OUTSIDE, 0, 1, 1, 1, 0, 5, 5, 5]
    # A block runs its three calls, and then adds.
    assert [(one.start, one.stop) for one in tree.calls[1:6:4]] == [(0, 4), (4, 8)]
    assert tree.segments[3].call == 1
    assert tree.callers(2) == [4, 1, 0]
    # The second block also saves its input, for its first layer.
    assert saved_bytes(tree, "0") == ACTIVATION
    assert saved_bytes(tree, "1") == 2 * ACTIVATION
    assert (input_bytes(tree, "0"), input_bytes(tree, "1")) == (0, ACTIVATION)


def test_calls_of_one_module_are_numbered_and_its_gradient_is_counted_once() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer()
            self.never = layer()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.layer(x)
            return x

    tree = record(Loop(), (batch(),), loss=squares)
    assert [one.name for one in tree.calls] == ["", "layer", "layer#1", "layer#2"]
    parameters = 4 * (WIDTH * WIDTH + WIDTH)
    assert sum(segment.parameter_gradient_bytes for segment in tree.segments) == parameters
    # Until the backward of the first call has run, autograd holds the sum of the gradients so far.
    assert tree.segments[2].gradient_bytes == ACTIVATION + 4 + parameters


def test_expensive_results_are_those_of_products() -> None:
    tree = record(nn.Sequential(layer(), nn.Tanh()), (batch(),), loss=squares)
    assert [len(segment.expensive) for segment in tree.segments] == [1, 0, 0]
    assert tree.storages[tree.segments[0].expensive[0]].size_bytes == ACTIVATION
    assert 0 < tree.segments[0].expensive_time <= tree.segments[0].forward_time


def test_a_mask_of_dropout_is_saved() -> None:
    tree = record(nn.Sequential(layer(), nn.Dropout(0.5)), (batch(),), loss=squares)
    assert saved_bytes(tree, "1") in (ROWS * WIDTH, ACTIVATION)  # a mask of bytes or of floats


def test_the_buffers_that_a_normalization_changes_are_copied_for_its_recomputation() -> None:
    tree = record(nn.Sequential(layer(), nn.BatchNorm1d(WIDTH)), (batch(),), loss=squares)
    # A mean, a variance and a count; a recomputation changes a second copy.
    assert call(tree, "1").copied_bytes == call(tree, "").copied_bytes == 2 * (2 * 4 * WIDTH + 8)
    assert call(tree, "0").copied_bytes == 0
    assert call(tree, "1").refusal == ""


def test_a_call_that_draws_keeps_the_random_state_for_its_recomputation() -> None:
    tree = record(nn.Sequential(layer(), nn.Dropout(0.5)), (batch(),), loss=squares)
    assert call(tree, "1").copied_bytes == call(tree, "").copied_bytes == torch.get_rng_state().nbytes
    assert call(tree, "0").copied_bytes == 0


def test_tensors_in_attributes_are_held_for_a_recomputation() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer()
            self.losses: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.losses.append(self.layer(x).tanh())
            return self.losses[-1] * 2

    model = nn.Sequential(*[Keeps()] * 2)
    tree = record(model, (batch(),), loss=squares)
    assert input_bytes(tree, "0") == 0
    assert input_bytes(tree, "0#1") == 2 * ACTIVATION  # its argument, and what the first call has put in the list


# What cannot be recomputed.


def test_a_call_that_changes_its_argument_is_refused_and_one_around_it_is_not() -> None:
    block = nn.Sequential(layer(), nn.ReLU(inplace=True))
    tree = record(nn.Sequential(block, layer()), (batch(),), loss=squares)
    assert "changed in place" in call(tree, "0.1").refusal
    assert [one.name for one in tree.calls if one.refusal] == ["0.1"]


@torch.library.custom_op("recording::recurrent", mutates_args=())
def recurrent(x: Tensor, dropout: float, train: bool, dropout_state: Tensor) -> Tensor:
    """Draw its dropout from a state of its own, which it changes, as `_cudnn_rnn` does."""
    dropout_state.add_(1)
    return x.sin()


recurrent.register_autograd(lambda ctx, gradient: (gradient, None, None, None))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_call_that_draws_from_a_state_that_cannot_be_put_back_is_refused(dropout: float) -> None:
    class Recurrent(nn.Module):
        state = torch.zeros(64)

        def forward(self, x: Tensor) -> Tensor:
            return recurrent(x, dropout, self.training, self.state)

    tree = record(nn.Sequential(layer(), Recurrent()), (batch(),), loss=squares)
    assert [one.name for one in tree.calls if one.refusal] == (["", "1"] if dropout else [])


def test_a_call_whose_argument_is_changed_after_it_is_refused() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.side = layer(), nn.Identity()
            self.side.forward = lambda x: x * 2  # type: ignore[method-assign]

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            z: Tensor = self.side(y)
            y.add_(1)
            return z + y

    tree = record(Late(), (batch(),), loss=squares)
    assert [one.name for one in tree.calls if one.refusal] == ["side"]


def test_calls_without_gradients_are_refused() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = layer(), layer()

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                goal = self.teacher(x)
            return (self.student(x) - goal).pow(2).sum()

    tree = record(Frozen(), (batch(),))
    assert "without gradients" in call(tree, "teacher").refusal
    assert call(tree, "student").refusal == ""


def test_a_call_that_ends_with_an_exception_is_refused() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError(x.sum())

    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails, self.layer = Fails(), layer()

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.fails(x)
            except KeyError:
                return self.layer(x)

    tree = record(Tries(), (batch(),), loss=squares)
    assert "KeyError" in call(tree, "fails").refusal


def test_calls_under_checkpoints_of_the_model_itself_are_refused() -> None:
    tree = record(Checkpointed(reentrant=False), (batch(),), loss=squares)
    assert all("other hooks" in one.refusal for one in tree.calls if one.name)
    assert call(tree, "").refusal == ""
    tree = record(Checkpointed(reentrant=True), (batch().requires_grad_(),), loss=squares)
    assert all("without gradients" in one.refusal for one in tree.calls if one.name)


def test_a_forward_that_computes_gradients_itself_is_measured_and_its_calls_are_refused() -> None:
    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy, self.scale = nn.Sequential(layer(), nn.Tanh()), layer()

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(self.energy(x).sum(), [x], create_graph=True)
            y: Tensor = self.scale(found)
            return y

    tree = record(Forces(), (batch(),), loss=squares)
    refused = [one.name for one in tree.calls if "within the forward" in one.refusal]
    assert refused == ["", "energy", "energy.0", "energy.1"]
    assert saved_bytes(tree, "scale") == ACTIVATION


def test_what_a_value_that_only_python_reads_saves_is_not_saved_for_the_backward() -> None:
    class Halting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.halt, self.second = layer(), nn.Sequential(layer(), nn.Sigmoid()), layer()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if self.halt(x).mean() > 2:
                return x
            y: Tensor = self.second(x)
            return y

    tree = record(Halting(), (batch(),), loss=squares)
    assert saved_bytes(tree, "halt") == 0
    assert saved_bytes(tree, "second") == ACTIVATION


def test_a_call_that_cannot_be_recomputed_is_refused_and_measured_without() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x[1:] if autograd_node_name() else x)
            return y

    model = nn.Sequential(layer(), Changing(), layer())
    tree = record(model, (batch(),), loss=squares, decide=lambda tree: everything(tree, {"1"}))
    assert "recomputing it failed" in call(tree, "1").refusal
    assert tree.segments[0].backward_peak_bytes > 0


def everything(tree: CallTree, names: set[str]) -> list[Decision]:
    return [Decision(one.module, one.number) for one in tree.calls if one.module in names and not one.refusal]


def test_a_step_that_takes_another_way_the_second_time_is_refused() -> None:
    seen = iter(range(100))

    class Random(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layer() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layers[next(seen) % 3](x)
            return y

    with pytest.raises(ExecutionError, match="can be repeated"):
        record(Random(), (batch(),), loss=squares)


def test_a_loss_without_gradient_or_with_elements_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"scalar tensor, got a tensor of shape \(16, 32\)"):
        record(layer(), (batch(),), loss=torch.sin)
    with pytest.raises(CaptureError, match="requires no gradient"):
        record(nn.Tanh(), (batch(),), loss=squares)


# Predicted and measured peaks.


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a": layer(), "b": layer()})
        self.again = self.parts["a"]

    def forward(self, pair: tuple[Tensor, Tensor], *, scale: float) -> dict[str, Tensor]:
        x, y = pair
        return {"x": self.parts["a"](x).tanh() * scale, "y": self.again(self.parts["b"](y)).tanh()}


@dataclass
class Answer:
    value: Tensor


class Tree(nn.Module):
    """Recursion: each call makes two calls of the same module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, x: Tensor, depth: int) -> Tensor:
        y = self.layer(x).tanh()
        return y if depth == 0 else self(y, depth - 1) + self(y, depth - 1)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Answer:
        return Answer(self.block(x))


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant, preserve_rng_state=False)  # type: ignore[assignment]
        return x


def convolutions() -> nn.Module:
    def part(inner: int, outer: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(inplace=True))

    return nn.Sequential(part(3, 8), nn.MaxPool2d(2), part(8, 16), nn.Flatten(), nn.Linear(16 * 16, 10))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)[0]
        return y


def attention() -> tuple[nn.Module, tuple[object, ...], dict[str, object]]:
    model = nn.Transformer(WIDTH, 4, 2, 2, 64, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(8)
    return model, (torch.randn(2, 16, WIDTH), torch.randn(2, 8, WIDTH)), {"tgt_mask": mask}


Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[..., Tensor]]

EXAMPLES: dict[str, Callable[[], Example]] = {
    "blocks": lambda: (nn.Sequential(*(Block() for _ in range(4))), (batch(),), {}, squares),
    "dropout": lambda: (nn.Sequential(layer(), nn.Dropout(0.2), layer(), nn.Dropout(0.2)), (batch(),), {}, squares),
    "pair": lambda: (Pair(), ((batch(), batch()),), {"scale": 0.5}, lambda out: squares(out["x"] - out["y"])),
    "dataclass": lambda: (Wrapped(), (batch(),), {}, lambda out: squares(out.value)),
    "recursion": lambda: (Tree(), (batch(), 2), {}, squares),
    "own checkpoints": lambda: (Checkpointed(reentrant=False), (batch(),), {}, squares),
    "own reentrant ones": lambda: (Checkpointed(reentrant=True), (batch().requires_grad_(),), {}, squares),
    "convolutions": lambda: (convolutions(), (torch.randn(4, 3, 8, 8),), {}, squares),
    "recurrent": lambda: (Recurrent(), (torch.randn(4, 12, WIDTH),), {}, squares),
    "attention": lambda: (*attention(), squares),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_predicted_peak_of_the_plain_step_is_the_measured_one(name: str) -> None:
    torch.manual_seed(0)
    model, args, kwargs, loss = EXAMPLES[name]()
    tree = record(model, args, kwargs, loss)
    step = training_step(model, args, kwargs, loss=loss)
    tracker = StorageTracker(resident_tensors(model, (args, kwargs)))
    with tracker:
        step()
    predicted = plain_peak(tree) + sum(t.size_bytes for t in tree.resident if t.role == "constant")
    assert tracker.peak_bytes <= predicted
    assert plain_peak(record(model, args, kwargs, loss)) == plain_peak(tree)
    model.zero_grad(set_to_none=True)
    leaves = [leaf for leaf in args if isinstance(leaf, Tensor)]
    for leaf in leaves:
        leaf.grad = None
    measured = allocator_peak(step)
    assert measured <= predicted <= 1.03 * measured


def of_transformers(name: str) -> nn.Module:
    """Return a small model; Llama appends to a cache of keys and values, which is an argument of its layers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 1}
    if name == "GPT2LMHeadModel":
        config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=16, **sizes)
    elif name == "LlamaForCausalLM":
        sizes |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.LlamaConfig(use_cache=True, **sizes)
    else:
        config = transformers.T5Config(
            num_layers=2, d_model=32, d_ff=64, num_heads=2, decoder_start_token_id=0, **sizes
        )
    model: nn.Module = getattr(transformers, name)(config)
    return model


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration"])
def test_models_of_transformers_are_measured(name: str) -> None:
    torch.manual_seed(0)
    model, tokens = of_transformers(name), torch.randint(0, 50, (4, 16))
    kwargs = {"input_ids": tokens, "labels": tokens}
    step = training_step(model, (), kwargs, loss=lambda output: output.loss)
    tree = record(model, (), kwargs, lambda output: output.loss)
    assert not any(one.refusal for one in tree.calls)
    measured = allocator_peak(step)
    predicted = plain_peak(tree) + sum(t.size_bytes for t in tree.resident if t.role == "constant")
    scalars = 64  # autograd makes a tensor of 8 bytes of a number that is multiplied, outside of any operator
    assert measured - scalars <= predicted <= 1.03 * measured


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_saved_is_what_is_live_at_the_end_of_a_plain_forward(name: str) -> None:
    torch.manual_seed(0)
    model, args, kwargs, loss = EXAMPLES[name]()
    tree = record(model, args, kwargs, loss)
    tracker = StorageTracker(resident_tensors(model, (args, kwargs)))
    with tracker:
        value = loss(model(*args, **kwargs))
    count = len(tree.segments)
    assert tracker.live_bytes == sum(s.size_bytes for s in tree.storages if s.saved_by or s.dies == count)
    del value


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_measured_does_not_depend_on_what_is_recomputed(name: str) -> None:
    def figures(tree: CallTree) -> list[int]:
        found = [(s.saving_forward_peak_bytes, s.backward_peak_bytes, s.gradient_bytes) for s in tree.segments]
        return [number for numbers in found for number in numbers]

    torch.manual_seed(0)
    model, args, kwargs, loss = EXAMPLES[name]()
    trees = [record(model, args, kwargs, loss, decide=partial(every, step=step)) for step in (0, 1, 2)]
    for tree in trees[1:]:
        # A few bytes of operators' own memory differ from run to run.
        assert figures(tree) == pytest.approx(figures(trees[0]), rel=0.02)
        grown = [segment.parameter_gradient_bytes for segment in tree.segments]
        assert grown == [segment.parameter_gradient_bytes for segment in trees[0].segments]
    assert trees[0].storages == trees[1].storages
    assert trees[0].calls == trees[1].calls


def every(tree: CallTree, step: int) -> list[Decision]:
    """Return decisions for no call, for each innermost one, or for each one but the model itself."""
    callers = {one.caller for one in tree.calls}
    return [
        Decision(one.module, one.number)
        for position, one in enumerate(tree.calls)
        if step and not one.refusal and one.name and (step == 2 or position not in callers)
    ]


# What measuring needs and leaves.


def test_a_step_is_measured_in_far_less_memory_than_it_needs() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(40))), torch.randn(2048, WIDTH)
    tracker = StorageTracker(resident_tensors(model, (x,)))
    with tracker:
        tree = record(model, (x,), loss=squares)
    # The inputs of 40 blocks, and what one of them needs; plainly, each block keeps three activations.
    activation = 4 * 2048 * WIDTH
    assert tracker.peak_bytes <= (40 + 8) * activation
    assert plain_peak(tree) >= 80 * activation


def test_measuring_runs_at_most_four_times_as_many_operators_as_a_plain_step() -> None:
    class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
        runs = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.runs += func is not torch.ops.aten.detach.default
            return func(*args, **(kwargs or {}))

    model, x = nn.Sequential(*(Block() for _ in range(8))), batch()
    step = training_step(model, (x,), loss=squares)
    with Count() as plain:  # type: ignore[no-untyped-call]
        step()
    with Count() as measuring:  # type: ignore[no-untyped-call]
        record(model, (x,), loss=squares)
    assert measuring.runs <= 4 * plain.runs


def test_everything_is_left_as_it_was() -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = layer(), nn.BatchNorm1d(WIDTH)
            self.own = random.Random(1)
            self.arrays = np.random.default_rng(2)
            self.torch = torch.Generator().manual_seed(3)
            self.steps, self.seen = 0, [1]

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            self.seen.append(2)
            self.last = self.norm(self.layer(x))
            noise = torch.randn(x.shape, generator=self.torch) + torch.randn(x.shape)
            factor = self.own.random() + random.random() + self.arrays.random() + np.random.rand()
            return self.last * noise * factor

    def states(model: Any) -> Iterable[object]:
        yield torch.get_rng_state().tolist()
        yield random.getstate()
        yield np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
        yield model.own.getstate()
        yield model.arrays.bit_generator.state
        yield model.torch.get_state().tolist()
        yield (model.steps, list(model.seen), hasattr(model, "last"), "forward" in vars(model.layer))
        yield [buffer.tolist() for buffer in model.buffers()]
        yield [parameter.tolist() for parameter in model.parameters()]
        yield [None if p.grad is None else p.grad.tolist() for p in model.parameters()]
        yield [tensor.requires_grad for tensor in model.parameters()]

    model, x = Drawing(), batch()
    model.layer.weight.grad = torch.full_like(model.layer.weight, 7.0)
    ran: list[Tensor] = []
    model.layer.weight.register_hook(ran.append)
    model.layer.weight.register_post_accumulate_grad_hook(ran.append)
    before, given = list(states(model)), x.clone()
    record(model, (x,), loss=squares)
    assert list(states(model)) == before
    assert torch.equal(x, given)
    assert x.grad is None
    assert ran == []
    squares(model(x)).backward()
    assert len(ran) == 2  # the hooks work as before


def test_an_argument_of_another_graph_gets_no_gradient() -> None:
    before = batch().requires_grad_()
    tree = record(layer(), (before * 2,), loss=squares)
    assert before.grad is None
    assert tree.segments[0].parameter_gradient_bytes == ACTIVATION + 4 * (WIDTH * WIDTH + WIDTH)


def test_other_memory_of_the_device_and_existing_gradients_are_resident() -> None:
    model = nn.Sequential(layer(), layer())
    tree = record(model, (batch(),), loss=squares, memory=DeviceMemory(accumulate_gradients=True))
    gradients = [tensor.size_bytes for tensor in tree.resident if tensor.role == "gradient"]
    assert sum(gradients) == storage_bytes(model.parameters())


def test_autocast_is_that_of_the_caller() -> None:
    model = nn.Sequential(layer(), nn.Tanh(), layer())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tree = record(model, (batch(),), loss=lambda y: squares(y.float()))
    halves = [s.size_bytes for s in tree.storages if s.born <= 1 and s.saved_by]
    assert halves.count(ACTIVATION // 2) == 2  # the cast batch, and the result of tanh


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return nn.functional.scaled_dot_product_attention(y, y, y).sum()


def test_the_random_state_that_is_kept_with_the_results_of_an_attention_counts() -> None:
    tree = record(Attending(), (torch.ones(1, 2, 4, 8),))
    kept = [tree.storages[place] for segment in tree.segments for place in segment.expensive]
    states = [storage for storage in kept if not storage.saved_by and not storage.read_by]
    assert [storage.size_bytes for storage in states] == [torch.get_rng_state().nbytes]
