"""Nested values, from `torch.utils._pytree`: the containers that AOTAutograd and `torch.compile` see.

Expected: `tree_unflatten` inverts `tree_flatten`; leaves come in the order of the containers,
those of a dict in the order of its keys; what is not a registered container is a leaf, None too.
"""

from __future__ import annotations

from torch.utils._pytree import (
    GetAttrKey,
    KeyEntry,
    MappingKey,
    SequenceKey,
    TreeSpec,
    keystr,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_structure,
    tree_unflatten,
)

__all__ = [
    "GetAttrKey",
    "KeyEntry",
    "MappingKey",
    "SequenceKey",
    "TreeSpec",
    "keystr",
    "register_pytree_node",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map_only",
    "tree_structure",
    "tree_unflatten",
]
