"""Facts about a joint graph that decide how and where its calls become operations."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import fx
from torch.fx.node import Argument

from scheduler.errors import CaptureError
from scheduler.pytorch.capture.gradient_groups import group_gradients
from scheduler.pytorch.capture.joint import Joint
from scheduler.pytorch.capture.lowering.inplace import find_reuses
from scheduler.pytorch.capture.lowering.storages import StorageSizes
from scheduler.pytorch.capture.operators import (
    BATCH_NORMS,
    IN_PLACE,
    UPDATES,
    BatchNorm,
    aten,
    is_getitem,
    may_overwrite_input,
    owner,
)
from scheduler.pytorch.torch_private.operators import OpOverload


@dataclass(frozen=True)
class Mutation:
    """A change of a resident tensor in place.

    Attributes
    ----------
    old, new : Node
        Placeholder of the tensor, and its new value.
    needs_snapshot : bool
        Whether only the backward reads the old value: it is saved just before the change.
    """

    old: fx.Node
    new: fx.Node
    needs_snapshot: bool


@dataclass(frozen=True)
class Variant:
    """The way in which a captured call is run.

    Attributes
    ----------
    target : OpOverload
    args, kwargs
    overwritten : Node or None
        The input whose storage the output takes over.
    batch_norm : BatchNorm or None
        Set if the call updates running statistics in place in its first run.
    repeatable : bool
        False if a second run would find its input overwritten.
    """

    target: OpOverload
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]
    overwritten: fx.Node | None = None
    batch_norm: BatchNorm | None = None
    repeatable: bool = True


@dataclass(frozen=True)
class Analysis:
    """Facts about a joint graph.

    Attributes
    ----------
    forward, backward : tuple of Node
        The calls of each phase, in trace order.
    variants : dict of Node to Variant
        How each call is run; counters are not included.
    counters : dict of Node to Node
        Forward calls that only change a resident tensor by a number, with its placeholder.
    changed : set of Node
        Placeholders that the step changes by an update of its own, after a snapshot if the
        old value is still needed.
    snapshots_before : dict of Node to tuple of Node
        Placeholders whose old value is saved before a forward call, the first that reads it.
    mutations_after : dict of (Node or None) to tuple of Mutation
        Updates after a forward call, the first place where nothing in the forward needs the
        old value any more; at None those that depend on no call.
    existing_gradients : dict of int to int
        Bytes of the existing gradient that is added to, by the position of the new one.
    groups_after : dict of (Node or None) to tuple of tuple of int
        Gradients to accumulate together after a backward call, the one that produces the
        last of them; at None those that no call produces.
    """

    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    variants: Mapping[fx.Node, Variant]
    counters: Mapping[fx.Node, fx.Node]
    changed: Collection[fx.Node]
    snapshots_before: Mapping[fx.Node, tuple[fx.Node, ...]]
    mutations_after: Mapping[fx.Node | None, tuple[Mutation, ...]]
    existing_gradients: Mapping[int, int]
    groups_after: Mapping[fx.Node | None, tuple[tuple[int, ...], ...]]


def analyze(joint: Joint, sizes: StorageSizes, *, accumulate_gradients: bool) -> Analysis:
    """Return the facts about a joint graph.

    Parameters
    ----------
    joint : Joint
    sizes : StorageSizes
    accumulate_gradients : bool
        Whether new gradients are added to existing ones.

    Raises
    ------
    CaptureError
        If a forward operation needs a value of the backward.
    """
    calls = [node for node in joint.module.graph.nodes if node.op == "call_function" and not is_getitem(node)]
    late = _find_backward(joint, calls)
    forward = tuple(node for node in calls if node not in late)
    norms = {} if joint.functional else _find_folded_batch_norms(joint)
    counters = {} if joint.functional else _find_counters(joint)
    in_place = {cast("fx.Node", node.args[i]) for node, norm in norms.items() for i in norm.statistics}
    in_place.update(counters.values())
    mutations = [(old, new) for old, new in joint.mutations if old not in in_place]
    existing = _existing_gradients(joint) if accumulate_gradients else {}
    return Analysis(
        forward=forward,
        backward=tuple(node for node in calls if node in late),
        variants=_find_variants(joint, [node for node in calls if node not in counters], late, norms, sizes),
        counters=counters,
        changed={old for old, _ in mutations},
        snapshots_before=_place_snapshots(mutations, forward),
        mutations_after=_place_mutations(mutations, forward),
        existing_gradients=existing,
        groups_after=_place_groups(joint, calls, existing),
    )


def _find_backward(joint: Joint, calls: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the incoming gradients and the calls of the backward: those tagged so, and all that need one of these."""
    late = set(joint.tangents)
    for node in calls:
        if node.meta.get("partitioner_tag") == "is_backward" or any(
            owner(argument) in late for argument in node.all_input_nodes
        ):
            late.add(node)
    for node in (*joint.outputs, *(new for _, new in joint.mutations)):
        if owner(node) in late:
            raise CaptureError(f'output or buffer "{node.name}" is produced in the backward: it cannot be planned')
    return late


def _find_folded_batch_norms(joint: Joint) -> dict[fx.Node, BatchNorm]:
    """Return batch norms whose running statistics nothing else reads or changes: they can update them in place."""
    updates = dict(joint.mutations)
    folded: dict[fx.Node, BatchNorm] = {}
    for node in joint.module.graph.nodes:
        norm = BATCH_NORMS.get(node.target)
        if norm is None or (node.target is _NATIVE_BATCH_NORM and node.args[5] is not True):
            continue
        statistics = [node.args[position] for position in norm.statistics]
        outputs = {user.args[1]: user for user in node.users if is_getitem(user)}
        pairs = [(old, outputs.get(position)) for old, position in zip(statistics, norm.updated, strict=True)]
        if all(_is_private(node, old, new) and updates.get(old) is new for old, new in pairs):
            folded[node] = norm
    return folded


_NATIVE_BATCH_NORM = aten._native_batch_norm_legit_functional.default


def _find_counters(joint: Joint) -> dict[fx.Node, fx.Node]:
    """Return calls that only change a resident tensor by a number, with its placeholder."""
    return {
        new: old
        for old, new in joint.mutations
        if new.target in UPDATES
        and new.args[0] is old
        and len(new.all_input_nodes) == 1
        and _is_private(new, old, new)
        and new.meta["val"].dtype == old.meta["val"].dtype
    }


def _is_private(node: fx.Node, old: object, new: fx.Node | None) -> bool:
    """Return whether only `node` reads `old`, and nothing but the end of the step reads `new`."""
    if not isinstance(old, fx.Node) or new is None:
        return False
    return set(old.users) == {node} and all(user.op == "output" for user in new.users)


def _find_variants(
    joint: Joint,
    calls: Sequence[fx.Node],
    late: Collection[fx.Node],
    norms: Mapping[fx.Node, BatchNorm],
    sizes: StorageSizes,
) -> dict[fx.Node, Variant]:
    reuses = {} if joint.functional else find_reuses(joint.module.graph, late, sizes, as_eager=joint.as_eager)
    variants: dict[fx.Node, Variant] = {}
    for node in calls:
        target = cast("OpOverload", node.target)
        if norm := norms.get(node):
            variants[node] = Variant(norm.update, node.args, node.kwargs, batch_norm=norm)
        elif reuse := reuses.get(node):
            variants[node] = Variant(reuse.target, reuse.args, reuse.kwargs, reuse.source, repeatable=False)
        elif may_overwrite_input(node, sizes.of) and not joint.functional:
            source = cast("fx.Node", node.args[0])
            variants[node] = Variant(IN_PLACE[target], node.args, node.kwargs, source)
        else:
            variants[node] = Variant(target, node.args, node.kwargs)
    return variants


def _readers(placeholder: fx.Node) -> list[fx.Node]:
    return [user for user in placeholder.users if user.op == "call_function"]


def _place_snapshots(
    mutations: Sequence[tuple[fx.Node, fx.Node]], forward: Sequence[fx.Node]
) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Return the placeholders to save before each forward call: the first that reads it."""
    position = {node: i for i, node in enumerate(forward)}
    before: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for old, _ in mutations:
        if readers := [node for node in _readers(old) if node in position]:
            first = min(readers, key=position.__getitem__)
            before[first] = (*before.get(first, ()), old)
    return before


def _place_mutations(
    mutations: Sequence[tuple[fx.Node, fx.Node]], forward: Sequence[fx.Node]
) -> dict[fx.Node | None, tuple[Mutation, ...]]:
    """Return the mutations after each forward call: the last that reads the old value or produces the new one."""
    position = {node: i for i, node in enumerate(forward)}
    after: dict[fx.Node | None, tuple[Mutation, ...]] = {}
    for old, new in mutations:
        readers = [node for node in _readers(old) if node in position]
        needed = [node for node in (owner(new), *readers) if node in position]
        last = max(needed, key=position.__getitem__, default=None)
        mutation = Mutation(old, new, needs_snapshot=bool(_readers(old)) and not readers)
        after[last] = (*after.get(last, ()), mutation)
    return after


def _existing_gradients(joint: Joint) -> dict[int, int]:
    """Return the bytes of the existing gradients, by the position of the new ones; arguments have none."""
    return {
        i: trained.meta["val"].numel() * trained.meta["val"].element_size()
        for i, (trained, _) in enumerate(joint.gradients)
        if joint.sources[trained].kind != "input"
    }


def _place_groups(
    joint: Joint, calls: Sequence[fx.Node], sizes: Mapping[int, int]
) -> dict[fx.Node | None, tuple[tuple[int, ...], ...]]:
    """Return the groups of gradients to accumulate after each call: the one that produces the last of the group."""
    position = {node: i for i, node in enumerate(calls)}
    ready = {i: position.get(owner(joint.gradients[i][1]), -1) for i in sizes}
    after: dict[fx.Node | None, tuple[tuple[int, ...], ...]] = {}
    for group in group_gradients(ready, sizes):
        last = ready[group[-1]]
        call = calls[last] if last >= 0 else None
        after[call] = (*after.get(call, ()), group)
    return after
