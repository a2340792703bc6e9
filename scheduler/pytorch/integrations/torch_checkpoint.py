"""Plans for code that runs under `torch.utils.checkpoint` instead of our executor.

Neither export can express all that a plan does: torch recomputes a checkpointed region as a
whole, once, when its backward begins. It keeps the recomputed tensors until their backward,
recomputes nothing twice, and keeps the input order. The plan's peak is not guaranteed; measure
it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from scheduler.errors import ExecutionError, InvalidOptionError
from scheduler.graph import Graph, Operation
from scheduler.plan import Plan
from scheduler.pytorch.layerwise.survey import storage_keys
from scheduler.pytorch.torch_private.operators import OpOverload, schema_of
from scheduler.pytorch.torch_private.pytree import tree_leaves

Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]
Key = tuple[str, tuple[str, ...]]
"""An operator's name, without its overload and whether it works in place, and the shapes of its inputs."""


@dataclass(frozen=True)
class LayerSpan:
    """Consecutive layers that are all saved, or recomputed together.

    Attributes
    ----------
    layers : tuple of str
        Their names in the profile.
    recompute : bool
        Whether they form one region for `torch.utils.checkpoint.checkpoint`; otherwise they
        run plainly.
    """

    layers: tuple[str, ...]
    recompute: bool


def layer_spans(plan: Plan) -> tuple[LayerSpan, ...]:
    """Return the layers of a plan that run plainly, and those that are recomputed together.

    A layer is saved if the plan keeps the inputs of its backward at the end of the forward;
    the others form spans, each from one kept state to the next. Pass each span with `recompute` to
    `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`.

    In contrast to the plan, a span is recomputed with saving as a whole; the plan may
    recompute parts of it several times in less memory. Batch norm in a recomputed span
    updates its running statistics twice, as always under `torch.utils.checkpoint`.

    Parameters
    ----------
    plan : Plan
        Of granularity "layers".

    Raises
    ------
    InvalidOptionError
        If the plan is of another granularity.
    """
    if plan.granularity != "layers":
        raise InvalidOptionError(
            'the plan must be of granularity "layers": plan a profile, or use "selective_contexts"'
        )
    saved = set(plan.saved)
    spans: list[LayerSpan] = []
    state_is_kept = True
    for operation in plan.graph.operations:
        if operation.kind != "forward without saving":
            continue
        (output,) = operation.outputs
        is_saved = any(
            saved.intersection(other.outputs[1:])
            for other in plan.graph.operations
            if output in other.outputs and other is not operation
        )
        last = spans[-1] if spans else None
        if last is not None and last.recompute is not is_saved and (is_saved or not state_is_kept):
            spans[-1] = LayerSpan((*last.layers, operation.layer), last.recompute)
        else:
            spans.append(LayerSpan((operation.layer,), not is_saved))
        state_is_kept = output in saved
    return tuple(spans)


def selective_contexts(plan: Plan, module: str = "") -> Callable[[], Contexts]:
    """Return the `context_fn` that makes a checkpointed region save the tensors that a plan saves.

    An operator call is recognized by its name, the shapes of its inputs, and its number among
    equal calls in its region. Unrecognized calls, views and random draws are recomputed.
    Batch norms and changes of counters are saved, since to recompute them would update
    statistics twice.

    In contrast to the plan, the region is recomputed as a whole when its backward begins, so
    small regions take less memory. Random draws and cheap calls that the plan saves are
    recomputed, and batch norms that it recomputes are saved.

    Parameters
    ----------
    plan : Plan
        Of granularity "operations".
    module : str
        Qualified name of the submodule that is the region; by default the whole model.

    Raises
    ------
    InvalidOptionError
        If the granularity of the plan is "layers", the plan has no operation of that module,
        or it changes a buffer in a way that must not be repeated.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.checkpoint import checkpoint
    >>> from scheduler.pytorch import plan_step
    >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), torch.ones(2, 4)
    >>> plan = plan_step(model, "100%", (x,), loss=torch.sum, costs="flops")
    >>> saving = selective_contexts(plan, "0")
    >>> checkpoint(model[0], x, use_reentrant=False, context_fn=saving).shape
    torch.Size([2, 4])
    """
    graph = plan.graph
    if plan.granularity != "operations":
        raise InvalidOptionError('the plan must be of granularity "operations": trace the model, or use "layer_spans"')
    updates = [operation.name for operation in graph.operations if operation.kind == "update"]
    if updates:
        raise InvalidOptionError(
            f'torch.utils.checkpoint would repeat "{updates[0]}" when it recomputes: use the plan itself,'
            " or keep the module that does it out of the region"
        )
    calls = [operation for operation in graph.operations if _is_call_in(operation, module)]
    if not calls:
        raise InvalidOptionError(
            f'the plan has no operation of a module "{module}": name another one. If TorchDynamo captured the model,'
            " only operations that read a parameter have a module: use the whole model"
        )
    keep = _saved_calls(graph, plan.saved)
    decisions: dict[Key, list[bool]] = defaultdict(list)
    for operation in calls:
        decisions[_key_of_signature(operation.signature)].append(operation.name in keep)

    def contexts() -> Contexts:
        seen: Counter[Key] = Counter()
        kept_storages: set[int] = set()

        def policy(
            context: SelectiveCheckpointContext, operator: OpOverload, *args: object, **kwargs: object
        ) -> CheckpointPolicy:
            shapes = tuple("x".join(map(str, tensor.shape)) for tensor in _tensors((args, kwargs)))
            key = (_canonical(str(operator)), shapes)
            number = seen[key]
            seen[key] += 1
            if schema_of(operator).is_mutable and kept_storages & storage_keys(_tensors(args[0])):
                raise ExecutionError(
                    f"{operator} changes a saved tensor in place, and torch would recompute with the changed one:"
                    " let it return a new tensor, for example with inplace=False"
                )
            known = decisions.get(key, ())
            if number >= len(known) or not known[number]:
                return CheckpointPolicy.PREFER_RECOMPUTE
            kept_storages.update(storage_keys(_tensors(context.op_output)))
            return CheckpointPolicy.MUST_SAVE

        # Torch's own check would reject every in-place call, even on a tensor that is not kept.
        return create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=True)  # type: ignore[no-any-return]

    return contexts


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _is_call_in(operation: Operation, module: str) -> bool:
    is_inside = not module or f"{operation.layer}.".startswith(f"{module}.")
    return operation.phase == "forward" and operation.signature.startswith("aten.") and is_inside


def _saved_calls(graph: Graph, saved: Iterable[str]) -> set[str]:
    """Return the operations that torch must save: those that the plan saves, without views, and those that run once."""
    producers = {output: operation for operation in graph.operations for output in operation.outputs}
    required = {graph.operations[i].name for i in graph.index.required}
    keep = {name for name in required if graph.operation(name).kind == "batch norm update"}
    keep.update(operation.name for operation in graph.operations if not operation.repeatable)
    for tensor in saved:
        operation = producers[tensor]
        while _is_view(operation.signature) and operation.inputs[0] in producers:
            operation = producers[operation.inputs[0]]
        if operation.name not in required and not _is_view(operation.signature):
            keep.add(operation.name)
    return keep


def _is_view(signature: str) -> bool:
    _, _, path = signature.partition("(")[0].partition("aten.")
    packet, _, overload = path.partition(".")
    return bool(path) and getattr(getattr(torch.ops.aten, packet), overload).is_view


def _key_of_signature(signature: str) -> Key:
    operator, _, arguments = signature.partition("(")
    return _canonical(operator), tuple(re.findall(r"\[([0-9x]*)\|", arguments))


def _canonical(operator: str) -> str:
    """Return an operator's name without overload, kernel and in-place mark: `aten.add_.Tensor` is "add"."""
    name = operator.split(".")[1].removesuffix("_")
    return "batch_norm" if "batch_norm" in name else name
