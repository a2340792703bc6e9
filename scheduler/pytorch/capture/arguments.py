"""The arguments of a call, divided into their structure and their distinct tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Signature:
    """The arguments of a call without their tensors.

    Attributes
    ----------
    spec : TreeSpec
        Structure of `(args, kwargs)`.
    leaves : tuple
        The leaves, with a `Position` in place of each tensor.
    """

    spec: pytree.TreeSpec
    leaves: tuple[object, ...]


@dataclass(frozen=True)
class Position:
    """Placeholder for a tensor among the leaves of a signature.

    Attributes
    ----------
    number : int
        Position of the tensor among the distinct tensors of the arguments.
    """

    number: int


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


def fill_arguments(signature: Signature, tensors: Sequence[Tensor]) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the positional and keyword arguments of a call with these distinct tensors."""
    leaves = [tensors[leaf.number] if isinstance(leaf, Position) else leaf for leaf in signature.leaves]
    args, kwargs = pytree.tree_unflatten(leaves, signature.spec)
    return args, kwargs


def tensor_paths(signature: Signature) -> list[str]:
    """Return a readable path for each distinct tensor, such as `args[0]` or `kwargs['mask']`."""
    template = pytree.tree_unflatten(list(signature.leaves), signature.spec)
    found: dict[int, str] = {}
    for path, leaf in pytree.tree_flatten_with_path(template)[0]:
        if isinstance(leaf, Position):
            root = "args" if path[0] == pytree.SequenceKey(0) else "kwargs"
            found.setdefault(leaf.number, root + "".join(str(key) for key in path[1:]))
    return [found[number] for number in range(len(found))]
