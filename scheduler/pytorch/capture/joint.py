"""The joint graph: forward, loss and backward of a module as one fx graph of ATen operators.

`aot_export_joint_with_descriptors` traces the module under fake tensors: nothing is
computed and the module is left as it was. Where the module does things that only bytecode
analysis understands (a branch on the values of a mask), TorchDynamo captures it first.

Every distinct parameter and buffer enters once, however many names it has, so that the
gradients of tied weights are added inside the graph, in autograd's order.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.fx.traceback
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from scheduler.errors import CaptureError
from scheduler.pytorch.capture.constants import Holder, find_constants
from scheduler.pytorch.capture.module_state import Attributes, describe_kept, is_number
from scheduler.pytorch.capture.operators import storage_key
from scheduler.pytorch.capture.rewriting import rewrite
from scheduler.pytorch.capture.wrappers import check_unwrapped
from scheduler.pytorch.measurement.rng import kept_generators

SourceKind = Literal["parameter", "buffer", "constant", "input"]

TENSOR = "<tensor>"
"""Stands for a tensor in a template of leaves."""


@dataclass(frozen=True)
class Source:
    """Where a resident tensor comes from when the step runs.

    Attributes
    ----------
    kind : "parameter", "buffer", "constant" or "input"
        A constant is a tensor attribute of a module that is neither parameter nor buffer, a
        tensor that the loss finds in its closure or globals, or one made from numbers in
        forward.
    names : tuple of str
        Qualified names of all attributes that hold it; for an input its path in the arguments.
    paths : tuple of str
        The same names seen from the pair of model (`module`) and loss (`loss`).
    position : int
        For an input its position among the distinct tensors in the arguments, else -1.
    read : callable or None
        Finds a constant that is not an attribute of model or loss.
    """

    kind: SourceKind
    names: tuple[str, ...]
    paths: tuple[str, ...] = ()
    position: int = -1
    read: Callable[[], Tensor] | None = None


@dataclass(frozen=True)
class Signature:
    """The arguments of a call: structure, constants and tensors.

    Attributes
    ----------
    spec : TreeSpec
        Structure of `(args, kwargs)`.
    leaves : tuple
        The leaves with each tensor replaced by its position among the distinct tensors.
    """

    spec: pytree.TreeSpec
    leaves: tuple[object, ...]


@dataclass(frozen=True)
class Position:
    """Stands for the distinct tensor of that number in a template of leaves."""

    number: int


@dataclass(frozen=True)
class Joint:
    """A joint graph and the meaning of what goes in and comes out.

    Attributes
    ----------
    module : GraphModule
        Nodes are placeholders, calls of ATen overloads, getitems, and one output.
    sources : dict of Node to Source
        Placeholders of resident tensors.
    tangents : dict of Node to int
        Placeholders of incoming gradients, with the output that each belongs to.
    outputs : tuple of Node
        The tensors among the module's outputs.
    output_spec, output_leaves
        Structure of the outputs, and their leaves with `TENSOR` for each tensor.
    mutations : tuple of (Node, Node)
        Placeholder of a tensor changed in place, and its new value.
    gradients : tuple of (Node, Node)
        Placeholder of a tensor that requires a gradient, and the gradient.
    signature : Signature
    route : str
        "direct", or "dynamo" if TorchDynamo captured the module first.
    functional : bool
        Whether calls must stay as they are: none writes over its input or updates running
        statistics, and none draws random numbers a second time.
    """

    module: fx.GraphModule
    sources: dict[fx.Node, Source]
    tangents: dict[fx.Node, int]
    outputs: tuple[fx.Node, ...]
    output_spec: pytree.TreeSpec
    output_leaves: tuple[object, ...]
    mutations: tuple[tuple[fx.Node, fx.Node], ...]
    gradients: tuple[tuple[fx.Node, fx.Node], ...]
    signature: Signature
    route: str
    functional: bool = False


def read_arguments(args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[Signature, list[Tensor]]:
    """Return the signature of a call and its distinct tensors."""
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    tensors: list[Tensor] = []
    numbers: dict[int, int] = {}
    template: list[object] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if id(leaf) not in numbers:
                numbers[id(leaf)] = len(tensors)
                tensors.append(leaf)
            template.append(Position(numbers[id(leaf)]))
        else:
            template.append(leaf)
    return Signature(spec, tuple(template)), tensors


def export_joint(
    module: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    loss: Callable[..., Tensor] | None,
) -> Joint:
    """Return the joint graph of a module, its loss and its backward.

    Parameters
    ----------
    module : nn.Module
        Left as it was: buffers, gradients, random state and attributes.
    args, kwargs
        Its arguments; only shapes, strides, dtypes and the values of non-tensors count.
    loss : callable or None
        Applied to the outputs.

    Raises
    ------
    CaptureError
        If nothing requires a gradient, or the module cannot be captured: says why, and what
        else to use.
    """
    if not isinstance(module, nn.Module):
        raise CaptureError(f"only an nn.Module can be captured, not {type(module).__name__}: wrap the function in one")
    signature, tensors = read_arguments(args, kwargs)
    trainable = [tensor for tensor in (*module.parameters(), *tensors) if tensor.requires_grad]
    if not trainable:
        raise CaptureError(
            "no parameter and no input requires a gradient, so there is no backward to plan:"
            " call requires_grad_(True) on what is to be trained"
        )
    check_unwrapped(module)
    for name, parameter in module.named_parameters():
        if is_traceable_wrapper_subclass(parameter):
            raise CaptureError(
                f'parameter "{name}" is a {type(parameter).__name__}, a tensor of several parts, which would be taken'
                ' apart in the graph: plan without it, or use granularity="layers", which captures nothing'
            )
    core = _Core(module, loss)
    with _untouched(module) as attributes, torch.enable_grad(), _quiet_logging():
        route = "direct"
        step = _Step(core, signature, loss)
        try:
            with _located(module):
                graph_module = _export(step, tensors)
        except Exception as direct:  # torch raises errors of many kinds here
            if kept := attributes.changed():
                raise CaptureError(describe_kept([*kept])) from direct
            route = "dynamo"
            try:
                step = _Step(_dynamo_capture(core, args, kwargs), signature, loss)
                graph_module = _export(step, tensors)
            except Exception as error:
                raise CaptureError(_why(module, direct, error)) from error
        changed = {name: value for name, value in attributes.changed().items() if not isinstance(value, Tensor)}
        if any(map(is_number, changed.values())) and route == "direct":
            again = _export(step, tensors)
            if again.code == graph_module.code:  # the numbers have changed once more: they count, and are not read
                changed = {name: value for name, value in changed.items() if not is_number(value)}
        if names := [*changed, *step.read_and_replaced(graph_module)]:
            raise CaptureError(describe_kept(names))
        rewrite(graph_module)
        joint = _describe(graph_module, step, signature, route)
    if loss is not None and [output.meta["val"].numel() for output in joint.outputs] != [1]:
        shapes = [tuple(output.meta["val"].shape) for output in joint.outputs]
        raise CaptureError(f"loss must return one scalar tensor, and returned tensors of shapes {shapes}: reduce it")
    return joint


def export_graph(module: fx.GraphModule, args: Sequence[object]) -> Joint:
    """Return the joint graph of what TorchDynamo captured, and of its backward.

    Parameters
    ----------
    module : GraphModule
        Takes parameters and buffers as arguments.
    args
        Its arguments; only shapes, strides, dtypes and the values of non-tensors count.

    Raises
    ------
    CaptureError
        If the graph cannot be planned: says why.
    """
    signature, tensors = read_arguments(args, {})
    step = _Step(_Core(module, None), signature, None)
    # TorchDynamo's own context would make sizes symbolic here.
    with torch._guards.tracing(None), _untouched(module), torch.enable_grad():
        graph_module = _export(step, tensors)
    rewrite(graph_module)
    if step.copied_outputs:
        raise CaptureError(
            f"the graph returns tensors that share memory with its inputs or with each other (outputs"
            f" {step.copied_outputs}), and changing one in place later would have to change the other: return a"
            ' clone(), join the graphs around it (fullgraph=True), or take compiler="inductor"'
        )
    joint = _describe(graph_module, step, signature, "dynamo")
    changed = {storage_key(new.meta["val"]) for _, new in joint.mutations}
    if changed.intersection(storage_key(output.meta["val"]) for output in joint.outputs):
        raise CaptureError(
            "the graph returns a view of an input that it changes in place, and later changes of one would have to"
            ' change the other: return a clone(), or take compiler="inductor"'
        )
    return joint


class _Core(nn.Module):
    """The module, with its loss if there is one."""

    def __init__(self, module: nn.Module, loss: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self.module = module
        self.loss = loss
        self.training = module.training

    def forward(self, *args: object, **kwargs: object) -> object:
        outputs = self.module(*args, **kwargs)
        return outputs if self.loss is None else self.loss(outputs)


class _Step(nn.Module):
    """A module of the distinct tensors of another one, called with the distinct input tensors.

    The tensors are attributes `t0`, `t1` ... of this module; while it runs they stand in for
    the attributes of `core` that they came from.
    """

    def __init__(self, core: nn.Module, signature: Signature, loss: object) -> None:
        super().__init__()
        self.__dict__["core"] = core  # not registered: the tensors belong to this module now
        self.signature = signature
        self.sources: dict[str, Source] = {}
        self.holders: dict[str, list[Holder]] = {}
        """Where each constant is held."""
        self.names: dict[str, str] = {}
        """Attribute of this module for each qualified name in `core`."""
        self.output_spec: pytree.TreeSpec | None = None
        self.output_leaves: tuple[object, ...] = ()
        self.copied_outputs: list[int] = []
        """Outputs that are copies of what the module returns."""
        self.replaced: set[str] = set()
        """Attributes for constants that forward puts other tensors in the place of."""
        for kind, found in (
            ("parameter", core.named_parameters(remove_duplicate=False)),
            ("buffer", core.named_buffers(remove_duplicate=False)),
        ):
            self._adopt(kind, found)  # type: ignore[arg-type]
        self._adopt_constants(core, loss)

    def _adopt(self, kind: SourceKind, found: Iterator[tuple[str, Tensor]]) -> None:
        names: dict[int, list[str]] = {}
        tensors: dict[int, Tensor] = {}
        for name, tensor in found:
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
        for key, tensor in tensors.items():
            attribute = f"t{len(self.sources)}"
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(attribute, tensor)
            else:
                self.register_buffer(attribute, tensor)
            short = tuple(name.removeprefix("module.") for name in names[key])
            self.sources[attribute] = Source(kind, short, tuple(names[key]))
            for name in names[key]:
                self.names[name] = attribute

    def _adopt_constants(self, core: nn.Module, loss: object) -> None:
        seen: dict[int, str] = {}
        for name, path, holder in find_constants(core, loss):
            tensor = holder.get()
            attribute = seen.setdefault(id(tensor), f"t{len(self.sources)}")
            if attribute not in self.sources:
                self.register_buffer(attribute, tensor)
                self.sources[attribute] = Source("constant", (name,), path, read=None if path else holder.get)
            self.holders.setdefault(attribute, []).append(holder)

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        leaves = [tensors[leaf.number] if isinstance(leaf, Position) else leaf for leaf in self.signature.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.signature.spec)
        own = {name: getattr(self, attribute) for name, attribute in self.names.items()}
        core: nn.Module = self.__dict__["core"]
        with contextlib.ExitStack() as stack:
            for attribute, holders in self.holders.items():
                for holder in holders:
                    stack.callback(holder.set, holder.get())
                    holder.set(getattr(self, attribute))
            stack.enter_context(nn.utils.stateless._reparametrize_module(core, own))
            outputs = core(*args, **kwargs)
            _write_back(core, own)
            self.replaced |= {
                attribute
                for attribute, holders in self.holders.items()
                if any(holder.get() is not getattr(self, attribute) for holder in holders)
            }
        flat, self.output_spec = pytree.tree_flatten(outputs)
        self.output_leaves = tuple(TENSOR if isinstance(leaf, Tensor) else leaf for leaf in flat)
        held = [*own.values(), *tensors]
        returned = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        outputs = _without_shared_gradients(returned, held)
        self.copied_outputs = [
            i for i, (ours, theirs) in enumerate(zip(outputs, returned, strict=True)) if ours is not theirs
        ]
        return outputs

    def read_and_replaced(self, graph_module: fx.GraphModule) -> list[str]:
        """Return the names of constants that the captured step reads, and that forward then replaces."""
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        read = {getattr(node.meta["desc"], "target", None) for node in placeholders if node.users}
        return [self.sources[attribute].names[0] for attribute in sorted(self.replaced & read)]


def _write_back(core: nn.Module, own: dict[str, Tensor]) -> None:
    """Turn the assignment of a new tensor to a buffer into a change of the old one."""
    for name, tensor in own.items():
        path, _, key = name.rpartition(".")
        current = core.get_submodule(path)._buffers.get(key)
        if current is not None and current is not tensor and not isinstance(tensor, nn.Parameter):
            if current.shape != tensor.shape or current.dtype != tensor.dtype:
                raise CaptureError(f'buffer "{name}" is replaced by a tensor of another shape or dtype in forward')
            with torch.no_grad():
                tensor.copy_(current)


def _without_shared_gradients(outputs: list[Tensor], held: Sequence[Tensor]) -> list[Tensor]:
    """Copy outputs that require a gradient and lie on the storage of another output or of an input.

    An autograd function cannot return them: gradients would have to flow from one to the other.
    """
    taken = {tensor.untyped_storage()._cdata for tensor in held}
    result = []
    for output in outputs:
        storage = output.untyped_storage()._cdata
        if output.requires_grad:
            if storage in taken:
                output = output.clone()
            taken.add(storage)
        result.append(output)
    return result


def _export(step: _Step, tensors: Sequence[Tensor]) -> fx.GraphModule:
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with contextlib.ExitStack() as stack:
        stack.enter_context(config.patch(backward_pass_autocast="off", functionalize_rng_ops=False))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        exported = aot_export_joint_with_descriptors(stack, step, tuple(tensors), {})
        graph_module: fx.GraphModule = exported.graph_module
    return graph_module


def _describe(graph_module: fx.GraphModule, step: _Step, signature: Signature, route: str) -> Joint:
    from torch._functorch._aot_autograd import descriptors as d

    paths = _input_paths(signature)
    sources: dict[fx.Node, Source] = {}
    tangents: dict[fx.Node, int] = {}
    by_descriptor: dict[object, fx.Node] = {}
    for node in graph_module.graph.find_nodes(op="placeholder"):
        description = node.meta["desc"]
        by_descriptor[description] = node
        if isinstance(description, (d.ParamAOTInput, d.BufferAOTInput)):
            sources[node] = step.sources[description.target]
        elif isinstance(description, d.PlainAOTInput):
            sources[node] = Source("input", (paths[description.idx],), position=description.idx)
        elif isinstance(description, d.TangentAOTInput) and isinstance(description.output, d.PlainAOTOutput):
            tangents[node] = description.output.idx
        elif isinstance(description, d.TangentAOTInput) and isinstance(description.output, d.InputMutationAOTOutput):
            changed = sources[by_descriptor[description.output.mutated_input]]
            raise CaptureError(
                f"{changed.kind} {changed.names[0]} requires a gradient and is changed in place in forward:"
                " change it outside, before the call"
            )
        else:
            raise CaptureError(f"the captured graph has an input that cannot be planned: {description}")
    for node in graph_module.graph.find_nodes(op="get_attr"):
        value = getattr(graph_module, str(node.target))
        node.meta.setdefault("val", value)
        sources[node] = Source(
            "constant", (str(node.target),), read=functools.partial(getattr, graph_module, str(node.target))
        )
    (returned,) = graph_module.graph.find_nodes(op="output")
    outputs: dict[int, fx.Node] = {}
    mutations: list[tuple[fx.Node, fx.Node]] = []
    gradients: list[tuple[fx.Node, fx.Node]] = []
    for value, description in zip(returned.args[0], returned.meta["desc"], strict=True):
        if isinstance(description, d.PlainAOTOutput):
            outputs[description.idx] = value
        elif isinstance(description, d.InputMutationAOTOutput):
            mutations.append((by_descriptor[description.mutated_input], value))
        elif isinstance(description, d.GradAOTOutput):
            if value is not None:
                gradients.append((by_descriptor[description.grad_of], value))
        elif description is not None:
            raise CaptureError(f"the captured graph has an output that cannot be planned: {description}")
    if not gradients:
        raise CaptureError(
            "no gradient flows from the outputs to anything trainable: is the loss detached, or computed under no_grad?"
        )
    assert step.output_spec is not None
    return Joint(
        module=graph_module,
        sources=sources,
        tangents=tangents,
        outputs=tuple(outputs[i] for i in range(len(outputs))),
        output_spec=step.output_spec,
        output_leaves=step.output_leaves,
        mutations=tuple(mutations),
        gradients=tuple(gradients),
        signature=signature,
        route=route,
    )


def _input_paths(signature: Signature) -> list[str]:
    """Return a readable path for each distinct tensor in the arguments."""
    template = pytree.tree_unflatten(list(signature.leaves), signature.spec)
    found: dict[int, str] = {}
    for path, leaf in pytree.tree_flatten_with_path(template)[0]:
        if isinstance(leaf, Position):
            root = "args" if path[0] == pytree.SequenceKey(0) else "kwargs"
            found.setdefault(leaf.number, root + "".join(str(key) for key in path[1:]))
    return [found[number] for number in range(len(found))]


def _dynamo_capture(core: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> nn.Module:
    import torch._dynamo
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export

    # Shapes of an earlier capture of the same code would otherwise make sizes symbolic here.
    torch._dynamo.reset()
    settings = {
        "automatic_dynamic_shapes": False,
        "assume_static_by_default": True,
        "ignore_logging_functions": {
            getattr(logging.Logger, name)
            for name in ("debug", "info", "warning", "error", "log", "warning_once", "info_once")
            if hasattr(logging.Logger, name)
        },
    }
    with torch._dynamo.config.patch(settings), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        captured: nn.Module = dynamo_graph_capture_for_export(core)(*args, **kwargs)
    for warning in caught:
        # Dynamo drops side effects; a replaced buffer is one that would be missed.
        if "side effects" in str(warning.message) and "_buffers" in str(warning.message):
            raise CaptureError(f"a buffer is replaced in forward, which TorchDynamo drops: {warning.message}")
    torch._dynamo.reset()
    return captured


@contextlib.contextmanager
def _untouched(module: nn.Module) -> Iterator[Attributes]:
    """Restore the attributes of a module and the random state afterwards."""
    attributes = Attributes(module.named_modules())
    try:
        with kept_generators():
            yield attributes
    finally:
        attributes.restore()


@contextlib.contextmanager
def _located(module: nn.Module) -> Iterator[None]:
    """Note in every node which submodule it comes from, for `location`."""
    open_notes: list[contextlib.AbstractContextManager[None]] = []
    handles = []

    def enter(name: str) -> None:
        open_notes.append(fx.traceback.annotate({_LOCATION: name}))
        open_notes[-1].__enter__()

    def leave(*_: object) -> None:
        open_notes.pop().__exit__(None, None, None)

    for name, part in module.named_modules():
        if name:
            handles.append(part.register_forward_pre_hook(lambda *_, name=name: enter(name)))
            handles.append(part.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_LOCATION = "scheduler location"


def location(node: fx.Node, sources: Mapping[fx.Node, Source]) -> str:
    """Return the submodule that a call comes from, "" if it is not known.

    TorchDynamo keeps no such note; there only calls that read a parameter are located.
    """
    noted = node.meta.get("custom", {}).get(_LOCATION)
    if noted is not None:
        return str(noted)
    read = [sources[argument] for argument in node.all_input_nodes if argument in sources]
    return next((source.names[0].rpartition(".")[0] for source in read if source.kind == "parameter"), "")


@contextlib.contextmanager
def _quiet_logging() -> Iterator[None]:
    """Keep torch from logging the errors of a first attempt that is expected to fail at times."""
    loggers = [logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "torch._dynamo")]
    before = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def _why(module: nn.Module, direct: Exception, dynamo: Exception) -> str:
    def first_lines(error: Exception) -> str:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {' '.join(lines[:2])[:300]}" if lines else type(error).__name__

    return (
        f"{type(module).__name__} cannot be captured as one graph."
        f" Traced directly: {first_lines(direct)}. Through TorchDynamo: {first_lines(dynamo)}."
        " Usual causes are branches on tensor values, .item(), and shapes that depend on data."
        " Remove them, or plan the parts that can be captured,"
        ' or checkpoint a list of layers with granularity="layers", which needs no capture.'
    )
