"""Plans for code that runs under `torch.utils.checkpoint` instead of our executor.

Both exports lose something against the plan: torch recomputes a checkpointed region as a
whole, once, when its backward begins. It keeps what the region makes until then, runs nothing
a second time, and keeps the input order. Nothing promises the plan's peak; measure.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from scheduler.errors import ExecutionError, InvalidOptionError
from scheduler.graph import Graph, Operation
from scheduler.plan import Plan
from scheduler.pytorch.layerwise.survey import storage_keys

Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]
Key = tuple[str, tuple[str, ...]]
"""An operator's name, whatever its overload and whether it works in place, and the shapes that it reads."""


@dataclass(frozen=True)
class LayerSpan:
    """Consecutive layers that are treated alike.

    Attributes
    ----------
    layers : tuple of str
        Their names in the profile.
    recompute : bool
        Whether they are one region for `torch.utils.checkpoint.checkpoint`; else they run plainly.
    """

    layers: tuple[str, ...]
    recompute: bool


def layer_spans(plan: Plan) -> tuple[LayerSpan, ...]:
    """Return which layers of a plan run plainly, and which are recomputed together.

    A layer is saved if the plan keeps what its backward needs at the end of the forward; the
    others form a span from each kept state to the next. Give each span with `recompute` to
    `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`.

    Compared with the plan: a span is recomputed with saving as a whole, where the plan may
    recompute parts of it several times in less memory. Batch norm in a recomputed span
    updates its running statistics twice, as always under `torch.utils.checkpoint`.

    Parameters
    ----------
    plan : Plan
        Of granularity "layers".

    Raises
    ------
    InvalidOptionError
        If the plan is one of operations.
    """
    if plan.granularity != "layers":
        raise InvalidOptionError('a plan of operations has no layers: plan a profile, or use "selective_contexts"')
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
    """Return the `context_fn` that saves in a checkpointed region what a plan saves.

    >>> checkpoint(block, x, use_reentrant=False, context_fn=selective_contexts(plan, "h.3"))  # doctest: +SKIP

    An operator call is recognized by its name, the shapes that it reads, and its number among
    those alike in its region. What is not recognized, views and random draws are recomputed;
    batch norms and changes of counters are saved, since running them again would update
    statistics twice.

    Compared with the plan: the region is recomputed as a whole when its backward begins, so
    that small regions take less memory; draws and cheap calls that the plan saves are
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
        If the plan is one of layers, knows no operation of that module, or changes a buffer
        in a way that must not be repeated.
    """
    graph = plan.graph
    if plan.granularity != "operations":
        raise InvalidOptionError('a plan of layers has no operations: trace the model, or use "layer_spans"')
    updates = [operation.name for operation in graph.operations if operation.kind == "update"]
    if updates:
        raise InvalidOptionError(
            f'torch.utils.checkpoint would do "{updates[0]}" again when it recomputes: use the plan itself,'
            " or keep the module that does it out of the region"
        )
    calls = [operation for operation in graph.operations if _is_call_in(operation, module)]
    if not calls:
        raise InvalidOptionError(
            f'the plan knows no operation of a module "{module}": name another one. If TorchDynamo captured the model,'
            " it knows those that read parameters only: take the whole model"
        )
    keep = _saved_calls(graph, plan.saved)
    decisions: dict[Key, list[bool]] = defaultdict(list)
    for operation in calls:
        decisions[_key_of_signature(operation.signature)].append(operation.name in keep)

    def contexts() -> Contexts:
        seen: Counter[Key] = Counter()
        kept_storages: set[int] = set()

        def policy(
            context: SelectiveCheckpointContext, operator: torch._ops.OpOverload, *args: object, **kwargs: object
        ) -> CheckpointPolicy:
            shapes = tuple("x".join(map(str, tensor.shape)) for tensor in _tensors((args, kwargs)))
            key = (_canonical(str(operator)), shapes)
            number = seen[key]
            seen[key] += 1
            if operator._schema.is_mutable and kept_storages & storage_keys(_tensors(args[0])):
                raise ExecutionError(
                    f"{operator} changes a saved tensor in place, and torch would recompute with the changed one:"
                    " let it make a new tensor, for example with inplace=False"
                )
            known = decisions.get(key, ())
            if number >= len(known) or not known[number]:
                return CheckpointPolicy.PREFER_RECOMPUTE
            kept_storages.update(storage_keys(_tensors(context.op_output)))
            return CheckpointPolicy.MUST_SAVE

        # Torch's own check would refuse every call that works in place, even on a tensor that is not kept.
        return create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=True)  # type: ignore[no-any-return, no-untyped-call]

    return contexts


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _is_call_in(operation: Operation, module: str) -> bool:
    is_inside = not module or f"{operation.layer}.".startswith(f"{module}.")
    return operation.phase == "forward" and operation.signature.startswith("aten.") and is_inside


def _saved_calls(graph: Graph, saved: Iterable[str]) -> set[str]:
    """Return the operations that torch must save: what the plan saves less its views, and what must not run again."""
    makers = {output: operation for operation in graph.operations for output in operation.outputs}
    required = {graph.operations[i].name for i in graph.index.required}
    keep = {name for name in required if graph.operation(name).kind == "batch norm update"}
    keep.update(operation.name for operation in graph.operations if not operation.repeatable)
    for tensor in saved:
        operation = makers[tensor]
        while _is_view(operation.signature) and operation.inputs[0] in makers:
            operation = makers[operation.inputs[0]]
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
    """Return the name of an operator whatever its overload, kernel and kind: `aten.add_.Tensor` is "add"."""
    name = operator.split(".")[1].removesuffix("_")
    return "batch_norm" if "batch_norm" in name else name
