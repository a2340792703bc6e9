"""Export the joint graph of a module, or of a graph that TorchDynamo captured.

`aot_export_joint_with_descriptors` traces under fake tensors: nothing is computed, and the
module is left as it was. Where a module does something that only an analysis of its bytecode
understands (a branch on the values of a mask), TorchDynamo captures it first.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_not

import torch
from torch import Tensor, fx, nn

from scheduler.errors import CaptureError
from scheduler.pytorch.capture.arguments import fill_arguments, holds_objects, read_arguments, tensor_paths
from scheduler.pytorch.capture.descriptors import DescribedGraph, read_descriptors
from scheduler.pytorch.capture.exporting.dynamo import capture_with_dynamo, muted_logging
from scheduler.pytorch.capture.exporting.eager_kernels import eager_kernels
from scheduler.pytorch.capture.exporting.failures import (
    at_line,
    check_module,
    check_observers,
    check_outputs,
    check_runs,
    describe_failure,
)
from scheduler.pytorch.capture.exporting.flat_step import FlatStep, ModuleWithLoss, StepForm
from scheduler.pytorch.capture.exporting.known_values import Condition, KnownValues
from scheduler.pytorch.capture.exporting.meta_tensors import fake_in_place_of_meta
from scheduler.pytorch.capture.exporting.norms import correct_norms
from scheduler.pytorch.capture.exporting.varying_sizes import Conditions, Varying, VaryingGraph
from scheduler.pytorch.capture.held_tensors import kept_separate
from scheduler.pytorch.capture.joint import Joint, Route, Source
from scheduler.pytorch.capture.locations import noted_locations
from scheduler.pytorch.capture.module_state import Attributes, describe_kept, is_number
from scheduler.pytorch.capture.operators import check_call, storage_key
from scheduler.pytorch.capture.outside_draws import OutsideDraws
from scheduler.pytorch.capture.rewriting import rewrite
from scheduler.pytorch.measurement.rng import kept_generators
from scheduler.pytorch.torch_private.aot import (
    BufferAOTInput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
)
from scheduler.pytorch.torch_private.aot import export_joint as export_joint_graph
from scheduler.pytorch.torch_private.dynamo import outside_of_compilation
from scheduler.pytorch.torch_private.symbolic_sizes import (
    SYMBOLIC,
    conditions_of,
    fakes_of_varying_sizes,
    mark_varying,
)
from scheduler.pytorch.torch_private.tensors import (
    DataDependentOutputException,
    is_fake,
)


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
        Its arguments; shapes, strides, dtypes and the values of non-tensors count, and conditions on
        the values of tensors on which the code branches.
    loss : callable or None
        Applied to the outputs.

    Raises
    ------
    CaptureError
        If nothing requires a gradient, or the module cannot be captured; the message says
        why and what to use instead.
    """
    return _joint_of(_trace(module, args, kwargs, loss))


def export_varying(
    module: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    loss: Callable[..., Tensor] | None,
    varying: Varying,
) -> VaryingStep:
    """Return the joint graph of a module for calls that differ in some sizes only.

    Parameters
    ----------
    module, args, kwargs, loss
        As for `export_joint`.
    varying : dict of int to frozenset of int
        The dimensions in which calls differ, by position of the distinct tensor in the arguments.

    Raises
    ------
    CaptureError
        As for `export_joint`, and if the step depends on sizes in ways that cannot be traced.
    """
    traced = _trace(module, args, kwargs, loss, varying)
    if any(isinstance(leaf, SYMBOLIC) for leaf in traced.form.output_leaves):
        raise CaptureError("the step returns a size")
    return VaryingStep(traced)


class VaryingStep:
    """A step that was traced with symbolic sizes.

    Attributes
    ----------
    varying : dict of int to frozenset of int
        Dimensions with symbolic sizes, by position of the distinct tensor in the arguments.
    """

    def __init__(self, traced: _Traced) -> None:
        self._traced = traced
        self.varying = traced.varying

    def at(self, shapes: Sequence[tuple[int, ...]]) -> Joint:
        """Return the joint graph for arguments of these shapes.

        Raises
        ------
        CaptureError
            If what was traced does not hold for them.
        """
        traced = self._traced
        graph = VaryingGraph(traced.graph, traced.shapes, traced.varying, traced.conditions)
        answers = tuple(condition.at(graph.sizes(shapes)) for condition in traced.answers)
        if any(not condition.names and condition.difference(()) for condition in answers):
            raise CaptureError(f"the step takes another path for the shapes {[*shapes]}")
        return _joint_of(replace(traced, graph=graph.at(shapes), answers=answers))


@dataclass(frozen=True)
class _Traced:
    """An exported step before its graph is rewritten."""

    graph: fx.GraphModule
    form: StepForm
    route: Route
    counters: tuple[str, ...]
    has_loss: bool
    shapes: tuple[tuple[int, ...], ...]
    varying: Varying
    conditions: tuple[Conditions, ...]
    answers: tuple[Condition, ...]


def _joint_of(traced: _Traced) -> Joint:
    rewrite(traced.graph)
    answers = tuple(condition for condition in traced.answers if condition.names)
    joint = replace(_read_joint(traced.graph, traced.form, traced.route), counters=traced.counters, conditions=answers)
    check_observers(joint)
    if traced.has_loss:
        _check_loss(joint)
    return joint


def _trace(
    module: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    loss: Callable[..., Tensor] | None,
    varying: Varying | None = None,
) -> _Traced:
    """Export a step; with `varying`, with symbolic sizes in these dimensions of the arguments."""
    signature, given = read_arguments(args, kwargs)
    check_module(module, given)
    core = ModuleWithLoss(module, loss)
    with fake_in_place_of_meta(core, given) as fakes:
        if any(map(is_not, fakes, given)):
            args, kwargs = fill_arguments(signature, fakes)
        return _trace_on_device(core, args, kwargs, varying)


def _trace_on_device(
    core: ModuleWithLoss, args: Sequence[object], kwargs: Mapping[str, object], varying: Varying | None
) -> _Traced:
    """Export a step that has no tensor on device "meta"."""
    module, loss = core.module, core.loss
    signature, given = read_arguments(args, kwargs)
    name = type(module).__name__
    check = functools.partial(check_runs, core, name, args, kwargs, [core])
    draws = OutsideDraws(module, loss, core.read)
    tensors = given if varying is None else fakes_of_varying_sizes(given, varying)
    with (
        kept_separate(core.places, module, loss) as held,
        _untouched(module) as attributes,
        draws.kept(),
        torch.enable_grad(),
        muted_logging(),
    ):
        route: Route = "direct"
        conditions: tuple[Conditions, ...] = ()
        step = FlatStep(core, signature, held)
        known = KnownValues(given, tensor_paths(signature))
        try:
            with noted_locations(module), draws.recorded():
                exported = _export(step, tensors, known)
        except Exception as direct:  # torch raises errors of many kinds here
            draws.check(functools.partial(_export, step, tensors, known))
            _check_unchanged(attributes, draws, check, direct)
            route = "dynamo"
            try:
                with draws.recorded(by_dynamo=True):
                    captured, dropped = capture_with_dynamo(core, *_marked((args, kwargs), varying))
                if varying is not None:
                    tensors = fakes_of_varying_sizes(given, varying)  # without what the first attempt found out
                    conditions = (conditions_of(captured),)
                step = FlatStep(captured, signature, held)
                known = KnownValues(given, tensor_paths(signature))
                exported = _export(step, tensors, known)
            except Exception as error:
                draws.check(lambda: None)
                attributes.restore()
                draws.put_back()
                if varying is None:
                    check()
                raise CaptureError(describe_failure(name, direct, error)) from error
            draws.check_dropped(dropped)
        for node in exported.graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects):
            check_call(node)  # before the draws: tracing a collective in place draws from Python's random itself
        again = functools.partial(_export, step, tensors, known)
        draws.check(again)
        draws.check_generators(exported)
        check_outputs(step.output_leaves)
        counters = _check_state(attributes, draws, step, again, exported, route)
    if varying is not None:
        conditions = (*conditions, conditions_of(tensors[0]))
    shapes = tuple(tuple(tensor.shape) for tensor in given)
    answers = tuple(known.conditions)
    return _Traced(exported, step.form, route, counters, loss is not None, shapes, varying or {}, conditions, answers)


def _check_unchanged(
    attributes: Attributes, draws: OutsideDraws, check: Callable[[], None], failure: Exception
) -> None:
    """Refuse a step whose failed attempt has changed what it reads, unless the model itself fails."""
    if changed := attributes.changed() | draws.changed_values():
        attributes.restore()
        draws.put_back()
        check()
        raise CaptureError(describe_kept([*changed]) + at_line(failure)) from failure


def _marked(
    call: tuple[Sequence[object], Mapping[str, object]], varying: Varying | None
) -> tuple[Sequence[object], Mapping[str, object]]:
    """Return the arguments of a call, with marks on the dimensions that vary."""
    if varying is None:
        return call
    if holds_objects(call):
        raise CaptureError("TorchDynamo traces no symbolic sizes of tensors in objects")
    signature, tensors = read_arguments(*call)
    marked = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
    for position, dimensions in varying.items():
        mark_varying(marked[position], dimensions)
    return fill_arguments(signature, marked)


def export_graph(module: fx.GraphModule, args: Sequence[object]) -> Joint:
    """Return the joint graph of a graph that TorchDynamo captured, and of its backward.

    Parameters
    ----------
    module : GraphModule
        Takes parameters and buffers as arguments.
    args
        Its arguments; only shapes, strides, dtypes and the values of non-tensors count.

    Raises
    ------
    CaptureError
        If the graph cannot be planned; the message says why.
    """
    signature, tensors = read_arguments(args, {})
    step = FlatStep(ModuleWithLoss(module, None), signature, ())
    # TorchDynamo's own context would make sizes symbolic here.
    with outside_of_compilation(), _untouched(module), torch.enable_grad():
        exported = _export(step, tensors)
    rewrite(exported)
    if step.copied_outputs:
        raise CaptureError(
            f"the graph returns tensors that share memory with its inputs or with each other (outputs"
            f" {step.copied_outputs}), and changing one in place later would have to change the other: return a"
            ' clone(), join the graphs around it (fullgraph=True), or use compiler="inductor"'
        )
    joint = _read_joint(exported, step.form, "dynamo")
    changed = {storage_key(new.meta["val"]) for _, new in joint.mutations}
    if changed.intersection(storage_key(output.meta["val"]) for output in joint.outputs):
        raise CaptureError(
            "the graph returns a view of an input that it changes in place, and later changes of one would have to"
            ' change the other: return a clone(), or use compiler="inductor"'
        )
    return joint


@contextlib.contextmanager
def _untouched(module: nn.Module) -> Iterator[Attributes]:
    """Restore the attributes of a module and the random state afterwards."""
    attributes = Attributes(module.named_modules())
    try:
        with kept_generators():
            yield attributes
    finally:
        attributes.restore()


def _export(step: FlatStep, tensors: Sequence[Tensor], known: KnownValues | None = None) -> fx.GraphModule:
    known = known or KnownValues()
    with warnings.catch_warnings(), eager_kernels():
        warnings.simplefilter("ignore")
        try:
            # With symbolic sizes, a value that is read would become a symbol, too.
            with known.of_arguments(step) if any(map(is_fake, tensors)) else contextlib.nullcontext():
                exported = export_joint_graph(step, tensors)
        except DataDependentOutputException:  # a branch on a value, which may follow from shapes or arguments
            with known.of_arguments(step):
                exported = export_joint_graph(step, tensors)
    correct_norms(exported.graph)
    return exported


def _read_joint(exported: fx.GraphModule, step: StepForm, route: Route) -> Joint:
    """Return an exported graph with the meaning of its inputs and outputs."""
    described = read_descriptors(exported)
    sources = {**_sources(described, step), **described.constants}
    _drop_unread(exported, sources)
    tangents = _tangents(described, sources)
    outputs, mutations = _outputs_and_mutations(described)
    if not described.gradients:
        raise CaptureError(
            "no gradient flows from the outputs to anything trainable: is the loss detached, or computed under no_grad?"
        )
    return Joint(
        module=exported,
        sources=sources,
        tangents=tangents,
        outputs=outputs,
        output_spec=step.output_spec,
        output_leaves=step.output_leaves,
        mutations=mutations,
        gradients=described.gradients,
        signature=step.signature,
        route=route,
    )


def _sources(described: DescribedGraph, step: StepForm) -> dict[fx.Node, Source]:
    paths = tensor_paths(step.signature)
    sources = {}
    for node, description in described.inputs.items():
        if isinstance(description, (ParamAOTInput, BufferAOTInput)):
            sources[node] = step.sources[description.target]
        elif isinstance(description, PlainAOTInput):
            sources[node] = Source("input", (paths[description.idx],), position=description.idx)
        else:
            raise CaptureError(f"the captured graph has an input that cannot be planned: {description}")
    return sources


def _drop_unread(exported: fx.GraphModule, sources: dict[fx.Node, Source]) -> None:
    """Remove the placeholders of tensors that code might have read, and does not."""
    for node, source in [*sources.items()]:
        if source.kind == "constant" and not node.users:
            exported.graph.erase_node(node)
            del sources[node]


def _tangents(described: DescribedGraph, sources: Mapping[fx.Node, Source]) -> dict[fx.Node, int]:
    tangents = {}
    for node, description in described.tangents.items():
        output = description.output
        if isinstance(output, PlainAOTOutput):
            tangents[node] = output.idx
        elif isinstance(output, InputMutationAOTOutput):
            changed = sources[described.placeholder(output.mutated_input)]
            raise CaptureError(
                f"{changed.kind} {changed.names[0]} requires a gradient and is changed in place in forward:"
                " change it outside, before the call"
            )
        else:
            raise CaptureError(f"the captured graph has an input that cannot be planned: {description}")
    return tangents


def _outputs_and_mutations(
    described: DescribedGraph,
) -> tuple[tuple[fx.Node, ...], tuple[tuple[fx.Node, fx.Node], ...]]:
    outputs: dict[int, fx.Node] = {}
    mutations: list[tuple[fx.Node, fx.Node]] = []
    for value, description in described.outputs:
        if isinstance(description, PlainAOTOutput) and value is not None:
            outputs[description.idx] = value
        elif isinstance(description, InputMutationAOTOutput) and value is not None:
            mutations.append((described.placeholder(description.mutated_input), value))
        elif description is not None:
            raise CaptureError(f"the captured graph has an output that cannot be planned: {description}")
    return tuple(outputs[i] for i in range(len(outputs))), tuple(mutations)


def _check_state(
    attributes: Attributes,
    draws: OutsideDraws,
    step: FlatStep,
    export_again: Callable[[], fx.GraphModule],
    exported: fx.GraphModule,
    route: Route,
) -> tuple[str, ...]:
    """Refuse a forward whose result depends on what an earlier forward left behind; return what only counts."""
    counters: tuple[str, ...] = ()
    changed = {name: value for name, value in attributes.changed().items() if not isinstance(value, Tensor)}
    changed |= draws.changed_values()
    has_numbers = any(map(is_number, changed.values())) and route == "direct"
    if has_numbers and export_again().code == exported.code:
        # The numbers have changed once more without effect: forward only counts.
        counters = tuple(name for name, value in changed.items() if is_number(value))
        changed = {name: value for name, value in changed.items() if not is_number(value)}
    if names := [*changed, *step.constants_read_and_replaced(exported)]:
        raise CaptureError(describe_kept(names))
    return counters


def _check_loss(joint: Joint) -> None:
    shapes = [tuple(output.meta["val"].shape) for output in joint.outputs]
    if [output.meta["val"].numel() for output in joint.outputs] != [1]:
        raise CaptureError(f"loss must return one scalar tensor, got tensors of shapes {shapes}: reduce it")
