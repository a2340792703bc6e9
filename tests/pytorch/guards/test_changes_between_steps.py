"""Changes between planning and a step: the step is the plain one bit for bit, or an error names the change."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from scheduler.errors import CaptureError, ExecutionError
from scheduler.pytorch import checkpointed
from scheduler.pytorch.execute.module import CheckpointedModule
from tests.support.pytorch import changing
from tests.support.pytorch.changing import (
    Block,
    Case,
    FrozenSettings,
    Mode,
    Net,
    Pair,
    Settings,
    Snapshot,
    Targets,
    make_case,
)

# TorchDynamo reads `.grad` of tensors that are not leaves where a submodule is compiled.
pytestmark = [
    pytest.mark.long(50),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@dataclass
class Step:
    """How the step after the change runs."""

    patch: pytest.MonkeyPatch
    contexts: list[Callable[[], contextlib.AbstractContextManager[object]]] = field(default_factory=list)
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    run: Callable[[Callable[[], Tensor]], object] | None = None


ENOUGH = "1GiB"
"""A budget for every changed model; 100 % would be the bytes of the model as it was."""

Change = Callable[[Any, Step], object]


class Row(NamedTuple):
    change: Change
    named: str
    """Part of the error that names the change; "" if it is no difference."""
    prepare: Callable[[Any], object] = lambda case: None
    make: Callable[[], Case] = make_case


def model(change: Callable[[Any], object]) -> Change:
    """Return a change of the model."""
    return lambda case, step: change(case.model)


def put(path: str, value: object) -> Change:
    """Return a change of an attribute of the model."""
    *owner, name = path.split(".")
    return lambda case, step: setattr(functools.reduce(getattr, owner, case.model), name, value)


def patched(owner: object, name: str, value: object) -> Change:
    """Return a change of a class or a Python module."""
    return lambda case, step: step.patch.setattr(owner, name, value)


def within(context: Callable[[], contextlib.AbstractContextManager[object]]) -> Change:
    """Return a change under which the step runs."""
    return lambda case, step: step.contexts.append(context)


def setting(read: Callable[[], object], write: Callable[[Any], object], value: object) -> Change:
    """Return a change of a global setting of torch, which is undone."""

    def change(case: Case, step: Step) -> None:
        step.undo.callback(write, read())
        write(value)

    return change


def hook(register: Callable[[Any], Any]) -> Change:
    """Return a change that adds a hook to the model, which is removed in the end."""
    return lambda case, step: step.undo.callback(register(case.model).remove)


def removed(register: Callable[[Any], Any]) -> tuple[Change, Callable[[Any], object]]:
    """Return a change that removes a hook which was there when the plan was made."""
    handles: list[Any] = []
    return (lambda case, step: handles[-1].remove()), (lambda case: handles.append(register(case.model)))


def scale(module: object, inputs: object, output: Tensor) -> Tensor | None:
    return output * 3 if isinstance(module, nn.Linear) else None


def freeze(*names: str) -> Change:
    return lambda case, step: [getattr(case.model, name).requires_grad_(False) for name in names]


def replaced_data(case: Case, step: Step) -> None:
    case.model.head.weight.data = case.model.head.weight.data.double()


def old_weight_norm(model: Net) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(model.head)


def counted_loss() -> Case:
    case, count = make_case(), 0

    def loss(output: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return output.mean() * count

    case.loss = loss
    return case


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor) -> Tensor:
        return self.module(*args)


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    with torch.device(device):
        yield


def transformers_case() -> Case:
    transformers = pytest.importorskip("transformers")
    case = make_case()
    config = transformers.GPT2Config(
        n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=8, attn_pdrop=0.1, use_cache=False
    )
    case.model = transformers.GPT2LMHeadModel(config).train()
    case.args = (torch.arange(8).reshape(2, 4),)
    case.loss = lambda output: output.logits.square().mean()
    return case


def in_bfloat16(case: Case) -> None:
    case.model.bfloat16()
    case.args = (case.args[0].bfloat16(),)


ADD_FORWARD_HOOK = removed(lambda m: m.head.register_forward_hook(scale))
ADD_PARAMETER_HOOK = removed(lambda m: m.head.weight.register_hook(lambda gradient: gradient * 2))

ROWS: dict[str, Row] = {
    "nothing": Row(lambda case, step: None, ""),
    # values of the model
    "number": Row(put("tau", 0.1), r"model\.tau was 2\.0 when the plan was made, is 0\.1"),
    "flag": Row(put("flag", False), r"model\.flag was True"),
    "string": Row(put("kind", "hard"), r"model\.kind was 'soft'"),
    "None": Row(put("limit", 0.1), r"model\.limit was None"),
    "list": Row(model(lambda m: m.order.__setitem__(1, 3.0)), r"model\.order\[1\] was 2\.0"),
    "list that grows": Row(model(lambda m: m.order.append(3.0)), r"model\.order had 2 entries"),
    "dict": Row(model(lambda m: m.table.update(gain=3.0)), r"model\.table\['gain'\] was 1\.0"),
    "nested dict": Row(model(lambda m: m.table["deep"]["gains"].__setitem__(1, 3.0)), r"\['gains'\]\[1\] was 2\.0"),
    "dataclass": Row(put("settings.gain", 3.0), r"model\.settings\.gain was 1\.0"),
    "list in a dataclass": Row(model(lambda m: m.settings.offsets.reverse()), r"settings\.offsets\[0\] was 0\.5"),
    "frozen dataclass": Row(put("frozen", FrozenSettings(3.0)), r"model\.frozen\.gain was 1\.0"),
    "equal dataclass": Row(put("settings", Settings()), ""),
    "slots": Row(put("slotted.rate", 3.0), r"model\.slotted\.rate was 1\.0"),
    "enum": Row(put("mode", Mode.TWICE), r"model\.mode was <Mode\.PLAIN"),
    "tuple": Row(put("sizes", (1, 3)), r"model\.sizes\[1\] was 2"),
    "set": Row(model(lambda m: m.chosen.clear()), r"model\.chosen was"),
    "attribute that a method of an object reads": Row(put("schedule.start", 3.0), r"schedule\.start was 1\.0"),
    "object inside an object": Row(
        model(lambda m: setattr(m.schedule.pieces["inner"], "gain", 3.0)), r"pieces\['inner'\]\.gain was 1\.0"
    ),
    "attribute that an operator reads": Row(put("gain.factor", 3.0), r"model\.gain\.factor was 1\.0"),
    "attribute of a descriptor": Row(
        lambda case, step: step.patch.setattr(vars(Net)["half"], "divisor", 3.0), r"Net\.half\.divisor was 2\.0"
    ),
    "attribute read by a computed name": Row(put("rate_1", 3.0), r"model\.rate_1 was 1\.0"),
    "attribute read by getattr": Row(put("named", 3.0), r"model\.named was 1\.0"),
    "class attribute": Row(patched(Net, "boost", 3.0), r"Net\.boost was 1\.0"),
    "attribute over a class attribute": Row(put("boost", 3.0), r"model\.boost was added"),
    "registry of a class": Row(
        lambda case, step: step.patch.setitem(Net.scales, "soft", 3.0), r"Net\.scales\['soft'\] was 1\.0"
    ),
    "property": Row(patched(Net, "factor", property(lambda self: 3.0)), r"Net\.factor was"),
    "what a property reads": Row(put("_factor", 3.0), r"model\._factor was added"),
    "cached property": Row(
        put("cached_factor", 3.0), r"model\.cached_factor was 1\.0", lambda case: case.model.cached_factor
    ),
    "method": Row(put("rescaled", lambda x, *factors: x), r"model\.rescaled was added"),
    "method of a class": Row(patched(Net, "rescaled", lambda self, x, *factors: x), r"Net\.rescaled was"),
    "method of an object's class": Row(patched(changing.Schedule, "value", lambda self: 3.0), r"Schedule\.value was"),
    "written and never read": Row(put("unread", 3.0), ""),
    "attribute that forward writes": Row(put("last", None), ""),
    "transformers configuration": Row(
        model(lambda m: setattr(m.config, "use_return_dict_never_read", 1)), "", make=transformers_case
    ),
    "attention of transformers": Row(
        model(lambda m: m.set_attn_implementation("eager")), "_attn_implementation", make=transformers_case
    ),
    "scale of transformers": Row(
        model(lambda m: setattr(m.transformer.h[0].attn, "scaling", 3.0)), "scaling was", make=transformers_case
    ),
    # globals
    "global": Row(patched(changing, "GAIN", 3.0), "GAIN was 1.0 when the plan was made, is 3.0"),
    "constant of another module": Row(patched(changing.user_settings, "LEVEL", 3.0), "LEVEL was 1.0"),
    "constant of a module inside": Row(patched(changing.user_settings.inner, "LEVEL", 3.0), r"LEVEL was 1\.0"),
    "class in another module": Row(
        patched(changing.user_settings.inner.Constants, "level", 3.0), r"Constants\.level was 1\.0"
    ),
    "code reloaded": Row(patched(changing, "imported_helper", lambda x: x * 3), "imported_helper was"),
    "code of another module reloaded": Row(
        patched(changing.user_settings.inner, "helper", lambda x: x * 3), "helper was"
    ),
    "code of a function replaced": Row(
        patched(changing.imported_helper, "__code__", (lambda x: x * 3).__code__), "helper"
    ),
    "through a cached helper": Row(
        lambda case, step: step.patch.setitem(changing.RATES, "head", [1.0, 3.0]), r"RATES\['head'\]\[1\] was 2\.0"
    ),
    # the loss
    "closure of the loss": Row(lambda case, step: case.set_temperature(3.0), "temperature was 1.0"),
    "weights of the loss": Row(lambda case, step: case.weights.__setitem__(1, 3.0), r"weights\[1\] was 0\.5"),
    "default argument": Row(lambda case, step: case.default.__setitem__(0, 3.0), r"\[0\] was 1\.0"),
    "keyword of a partial": Row(lambda case, step: case.options.update(power=3.0), r"\['power'\] was 1\.0"),
    "attribute of a bound object": Row(lambda case, step: setattr(case.trainer, "beta", 3.0), r"beta was 0\.5"),
    "label smoothing": Row(
        lambda case, step: setattr(case.trainer.criterion, "label_smoothing", 0.3), r"label_smoothing was 0\.1"
    ),
    "reduction": Row(lambda case, step: setattr(case.trainer.criterion, "reduction", "sum"), "reduction was 'mean'"),
    "criterion replaced": Row(lambda case, step: setattr(case.trainer, "criterion", nn.MultiMarginLoss()), "criterion"),
    # targets of the loss
    "labels": Row(lambda case, step: case.batch.update(labels=torch.arange(6) % 3), ""),
    "tensor in a tuple": Row(lambda case, step: case.batch.update(tuple=(torch.ones(4),)), ""),
    "shape of a tensor in a tuple": Row(
        lambda case, step: case.batch.update(tuple=(torch.ones(1),)), r"batch\['tuple'\]\[0\]"
    ),
    "tensor in a named tuple": Row(
        lambda case, step: case.batch.update(pair=Pair(torch.ones(4), torch.full((4,), 0.1))), ""
    ),
    "tensor in a dataclass": Row(lambda case, step: setattr(case.batch["targets"], "scale", torch.ones(4)), ""),
    "another dataclass": Row(lambda case, step: case.batch.update(targets=Targets(torch.ones(4))), ""),
    "order of a dict": Row(
        model(lambda m: m.table.update(gain=m.table.pop("gain"))), r"model\.table have another order"
    ),
    "step counter of the trainer": Row(lambda case, step: setattr(case.trainer, "steps", 3), ""),
    "history of the trainer": Row(lambda case, step: case.trainer.history.append(0.5), ""),
    # layers
    "dropout": Row(put("drop.p", 0.6), r"model\.drop\.p was 0\.3"),
    "dropout in bfloat16": Row(put("drop.p", 0.6), r"model\.drop\.p was 0\.3", in_bfloat16),
    "batch norm momentum": Row(put("norm.momentum", 0.6), r"model\.norm\.momentum was 0\.1"),
    "batch norm eps": Row(put("norm.eps", 0.6), r"model\.norm\.eps was"),
    "batch norm statistics": Row(put("norm.track_running_stats", False), r"track_running_stats was True"),
    "layer norm eps": Row(put("scale.eps", 0.6), r"model\.scale\.eps was"),
    "drop path": Row(put("path.drop_prob", 0.6), r"model\.path\.drop_prob was 0\.2"),
    "drop path off": Row(put("path.drop_prob", 0.0), r"model\.path\.drop_prob was 0\.2"),
    "activation": Row(put("activation", torch.sigmoid), r"model\.activation was"),
    "approximation of an activation": Row(
        lambda case, step: setattr(case.model.blocks[0].act, "approximate", "tanh"), "approximate was 'none'"
    ),
    "eval of a part": Row(model(lambda m: m.norm.eval()), "norm.training"),
    "train again": Row(model(lambda m: m.train()), ""),
    "submodule of the same class": Row(put("head", nn.Linear(4, 4)), r"model\.head was replaced"),
    "submodule of another class": Row(put("head", nn.Tanh()), r"model\.head was replaced"),
    "identity": Row(put("head", nn.Identity()), r"model\.head was replaced"),
    "submodule added": Row(model(lambda m: m.blocks.append(Block())), r"model\.blocks\.2 was added"),
    "submodule removed": Row(model(lambda m: m.blocks.__delitem__(1)), r"model\.blocks\.1 was removed"),
    "order of submodules": Row(
        model(lambda m: setattr(m, "blocks", nn.ModuleList([*m.blocks][::-1]))), r"model\.blocks was replaced"
    ),
    "order inside a list": Row(
        model(lambda m: m.blocks._modules.update({"0": m.blocks[1], "1": m.blocks[0]})), r"blocks\.0 was replaced"
    ),
    "order of names": Row(
        model(lambda m: m.blocks._modules.update({"0": m.blocks._modules.pop("0")})), r"model\.blocks"
    ),
    "wrapper": Row(model(lambda m: setattr(m, "head", Wrapper(m.head))), r"model\.head was replaced"),
    "compiled submodule": Row(
        model(lambda m: setattr(m, "head", torch.compile(m.head, backend="eager"))), r"model\.head was replaced"
    ),
    "compiled in place": Row(model(lambda m: m.head.compile(backend="eager")), r"model\.head"),
    "adapter off": Row(put("adapter.enabled", False), r"model\.adapter\.enabled was True"),
    "adapter merged": Row(model(lambda m: m.adapter.merge()), r"model\.adapter\.merged was False"),
    "adapter scaled": Row(model(lambda m: m.adapter.scaling.update(default=3.0)), r"scaling\['default'\] was 0\.5"),
    "gradient checkpointing": Row(put("gradient_checkpointing", True), r"model\.gradient_checkpointing was False"),
    "class of a module": Row(model(lambda m: setattr(m.head, "__class__", nn.Identity)), r"head was a Linear"),
    "forward of an object": Row(model(lambda m: setattr(m.head, "forward", lambda x: x)), r"head\.forward was added"),
    "forward of a class": Row(patched(Block, "forward", lambda self, x: x), r"Block\.forward was"),
    "forward of a class of torch": Row(patched(nn.Linear, "forward", lambda self, x: x), r"Linear\.forward was"),
    "call of a class": Row(patched(nn.Linear, "__call__", lambda self, x: x), "__call__"),
    # hooks
    "forward hook": Row(hook(lambda m: m.head.register_forward_hook(scale)), r"hook in model\.head\._forward_hooks"),
    "forward hook with arguments": Row(
        hook(lambda m: m.head.register_forward_hook(lambda m, a, k, o: o * 3, with_kwargs=True)), r"hook in model\.head"
    ),
    "forward pre-hook": Row(
        hook(lambda m: m.head.register_forward_pre_hook(lambda module, args: (args[0] * 3,))), r"_forward_pre_hooks was"
    ),
    "backward hook": Row(
        hook(lambda m: m.head.register_full_backward_hook(lambda module, i, o: (i[0] * 3,))), r"_backward_hooks was"
    ),
    "backward pre-hook": Row(
        hook(lambda m: m.head.register_full_backward_pre_hook(lambda module, o: (o[0] * 3,))),
        r"_backward_pre_hooks was",
    ),
    "hook for all modules": Row(
        hook(lambda m: nn.modules.module.register_module_forward_hook(scale)), r"_global_forward_hooks was added"
    ),
    "hook removed": Row(ADD_FORWARD_HOOK[0], r"_forward_hooks was removed", ADD_FORWARD_HOOK[1]),
    "hook of a parameter": Row(hook(lambda m: m.head.weight.register_hook(lambda g: g * 2)), ""),
    "hook of a parameter removed": Row(ADD_PARAMETER_HOOK[0], "", ADD_PARAMETER_HOOK[1]),
    "hook after accumulation": Row(
        hook(lambda m: m.head.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))), ""
    ),
    "hook of a state dict": Row(hook(lambda m: m.register_state_dict_post_hook(lambda *args: None)), ""),
    # tensors
    "freezing": Row(freeze("stem", "norm"), r"stem\.weight|requires"),
    "unfreezing": Row(
        model(lambda m: m.stem.requires_grad_(True)), "stem", lambda case: case.model.stem.requires_grad_(False)
    ),
    "unfreezing layer by layer": Row(
        model(lambda m: m.blocks[1].requires_grad_(True)),
        r"blocks\.1",
        lambda case: case.model.blocks.requires_grad_(False),
    ),
    "weight norm": Row(model(lambda m: parametrizations.weight_norm(m.head)), "head was a Linear"),
    "spectral norm": Row(model(lambda m: parametrizations.spectral_norm(m.head)), "head was a Linear"),
    "parametrization removed": Row(
        model(lambda m: parametrize.remove_parametrizations(m.head, "weight")),
        "head was a ParametrizedLinear",
        lambda case: parametrizations.weight_norm(case.model.head),
    ),
    "old weight norm": Row(model(old_weight_norm), r"hook in model\.head"),
    "tying": Row(model(lambda m: setattr(m.tied, "weight", m.head.weight)), "were two tensors"),
    "untying": Row(
        model(lambda m: setattr(m.tied, "weight", nn.Parameter(m.head.weight.detach().clone()))),
        "were one tensor",
        lambda case: setattr(case.model.tied, "weight", case.model.head.weight),
    ),
    "another parameter": Row(model(lambda m: setattr(m.head, "weight", nn.Parameter(torch.ones(4, 4)))), ""),
    "parameter set to None": Row(put("head.bias", None), r"bias was replaced"),
    "dtype of data": Row(replaced_data, "head.weight"),
    "shape of data": Row(model(lambda m: setattr(m.head.weight, "data", torch.ones(4, 1))), "head.weight"),
    "strides of data": Row(
        model(lambda m: setattr(m.head.weight, "data", m.head.weight.data.t().contiguous().t())), ""
    ),
    "half": Row(
        lambda case, step: [case.model.bfloat16(), setattr(case, "args", (case.args[0].bfloat16(),))],
        "bfloat16",
        lambda case: setattr(case.model.drop, "p", 0.5),
    ),
    "double": Row(lambda case, step: [case.model.double(), setattr(case, "args", (case.args[0].double(),))], "float64"),
    "to a dtype": Row(model(lambda m: m.to(torch.float64)), "float64"),
    "buffer registered": Row(model(lambda m: m.register_buffer("extra", torch.ones(4))), "extra"),
    "buffer of another shape": Row(put("shift", torch.ones(1)), "shift"),
    "another buffer": Row(put("shift", torch.ones(4)), ""),
    "another tensor in an attribute": Row(put("offset", torch.ones(4)), ""),
    "tensor of another shape in an attribute": Row(put("offset", torch.ones(1)), "offset"),
    "moving average of parameters": Row(
        lambda case, step: [p.data.mul_(0.9).add_(0.01) for p in case.model.parameters()], ""
    ),
    "state dict loaded": Row(model(lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()})), ""),
    "state dict assigned": Row(
        model(lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True)), ""
    ),
    "optimizer": Row(lambda case, step: torch.optim.SGD(case.model.parameters(), 0.1).step(), ""),
    # torch
    "autocast": Row(
        within(lambda: torch.autocast("cpu", torch.bfloat16)),
        "autocast",
        lambda case: setattr(case.model.drop, "p", 0.5),
    ),
    "default dtype": Row(setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64), "the default dtype"),
    "default device": Row(within(lambda: default_device("meta")), "the default device"),
    "deterministic algorithms": Row(
        setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True), "deterministic"
    ),
    "precision of products": Row(
        setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"), "precision"
    ),
    "no gradients": Row(within(torch.no_grad), ""),
    "inference mode": Row(within(torch.inference_mode), ""),
    "transform": Row(
        lambda case, step: setattr(step, "run", lambda call: torch.func.grad(lambda x: call() * x)(torch.ones(()))),
        "torch.func",
    ),
    "evaluation": Row(model(lambda m: m.eval()), ""),
}


class Result(NamedTuple):
    value: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    random_state: Tensor


def run(case: Case, call: Callable[[], Tensor], step: Step) -> Result:
    """Run a step and return what it leaves."""
    torch.default_generator.manual_seed(1)  # of the CPU only: to seed devices that are absent takes longer than a step
    case.model.zero_grad(set_to_none=True)
    with contextlib.ExitStack() as stack:
        for context in step.contexts:
            stack.enter_context(context())
        value = call() if step.run is None else step.run(call)
    if isinstance(value, Tensor) and value.requires_grad:
        value.backward()
    gradients = {name: parameter.grad for name, parameter in case.model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in case.model.named_buffers()}
    return Result(value, gradients, buffers, torch.get_rng_state())


def outcome(case: Case, call: Callable[[], Tensor], step: Step) -> Result | Exception:
    """Run a step and return what it leaves, or its error."""
    try:
        return run(case, call, step)
    except Exception as error:
        return error


def check_same(found: Result | Exception, expected: Result | Exception) -> None:
    """Assert that two steps left the same, bit for bit, or failed alike."""
    if isinstance(expected, Exception):
        assert isinstance(found, Exception), f"the plain step fails ({expected}), the planned one does not"
        return
    if isinstance(found, Exception):
        raise found
    torch.testing.assert_close(tuple(found), tuple(expected), rtol=0, atol=0)


class Planned(NamedTuple):
    """A case with a plan for it, which serves as many rows as leave no trace."""

    case: Case
    module: CheckpointedModule
    before: Snapshot
    result: Result


_planned: dict[tuple[object, ...], Planned] = {}


def planned_for(row: Row, granularity: str) -> Planned:
    """Return a planned case for a row."""
    key = (row.make, row.prepare, granularity)
    if key not in _planned:
        changing.cached_level.cache_clear()
        case = row.make()
        row.prepare(case)
        layers = case.model if granularity == "operations" else [case.model]
        module = checkpointed(
            layers,
            ENOUGH,
            case.args,
            loss=case.loss,
            granularity=granularity,
            solver="save-all",
            costs="flops",
            on_mismatch="plan",
        )
        before = Snapshot(case)
        with pytest.MonkeyPatch.context() as patch:
            expected = run(case, lambda: case.loss(case.model(*case.args)), Step(patch))
            before.restore_values()
            result = run(case, lambda: module(*case.args), Step(patch))
            check_same(result, expected)
        before.restore(case)
        _planned[key] = Planned(case, module, before, result)
    return _planned[key]


def put_back(row: Row, granularity: str) -> None:
    """Restore the case of a row; drop its plan if that does not succeed."""
    case, module, before, result = planned_for(row, granularity)
    before.restore(case)
    changing.cached_level.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "others", None)
        try:
            check_same(outcome(case, lambda: module(*case.args), Step(patch)), result)
        except (AssertionError, AttributeError, ExecutionError):
            del _planned[row.make, row.prepare, granularity]
    before.restore(case)


@pytest.fixture(params=ROWS)
def changed(request: pytest.FixtureRequest) -> Iterator[Changed]:
    """Planned by operations, and changed."""
    yield from change(ROWS[request.param], "operations")


@pytest.fixture(params=ROWS)
def changed_layers(request: pytest.FixtureRequest) -> Iterator[Changed]:
    """Planned by layers, and changed."""
    yield from change(ROWS[request.param], "layers")


class Changed(NamedTuple):
    row: Row
    planned: Planned
    step: Step
    plain: Result | Exception
    values: Snapshot

    def run(self, on_mismatch: str) -> Result | Exception:
        """Run the planned step."""
        case, module = self.planned.case, self.planned.module
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "on_mismatch", on_mismatch)
            if on_mismatch == "error":
                patch.setattr(module, "others", None)
            elif module.others is not None:
                module.others.modules.clear()
            self.values.restore_values()
            changing.cached_level.cache_clear()
            return outcome(case, lambda: module(*case.args), self.step)


def change(row: Row, granularity: str) -> Iterator[Changed]:
    planned = planned_for(row, granularity)
    case = planned.case
    try:
        with pytest.MonkeyPatch.context() as patch, Step(patch).undo as undo:
            step = Step(patch, undo=undo)
            torch.manual_seed(2)
            row.change(case, step)
            changing.cached_level.cache_clear()
            values = Snapshot(case)
            plain = outcome(case, lambda: case.loss(case.model(*case.args)), step)
            yield Changed(row, planned, step, plain, values)
    finally:
        put_back(row, granularity)


def test_a_change_is_named_or_followed(changed: Changed) -> None:
    found = changed.run("error")
    if not changed.row.named:
        check_same(found, changed.plain)
        return
    with pytest.raises(ExecutionError, match=changed.row.named):
        raise found if isinstance(found, Exception) else AssertionError("no error")


def test_after_a_change_the_plain_step_or_another_plan_is_followed(changed: Changed) -> None:
    check_same(changed.run("plain"), changed.plain)
    found = changed.run("plan")
    if not isinstance(found, CaptureError):
        check_same(found, changed.plain)


def test_layers_follow_a_change(changed_layers: Changed) -> None:
    found = changed_layers.run("error")
    if not isinstance(found, ExecutionError):
        check_same(found, changed_layers.plain)


def test_a_loss_that_changes_what_it_reads_is_refused() -> None:
    case = counted_loss()
    with pytest.raises(CaptureError, match="forward changes loss: count"):
        checkpointed(
            case.model, "100%", case.args, loss=case.loss, granularity="operations", solver="save-all", costs="flops"
        )
