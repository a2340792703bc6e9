"""Models whose batches can have any size, built without memory: from the catalog or from a configuration file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from scheduler.pytorch.models.catalog import Arguments, make_model

DEFAULT_LENGTH = 1024
"""Length of the sequences of a configured model, unless it takes shorter ones only."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SizedModel:
    """A model and its batches, as `fit` takes them.

    Attributes
    ----------
    name : str
    make_model : callable
    make_batch : callable
        Takes a batch size and, if there is a length, a length.
    loss : callable or None
    batch_size : int
    length : int or None
        None if its inputs are no sequences, or their length is fixed.
    longest : int or None
        Longest length that it takes, if that is known.
    """

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[..., Arguments]
    loss: Callable[..., Tensor] | None
    batch_size: int
    length: int | None
    longest: int | None = None


def catalog_model(name: str, *, batch_size: int | None, length: int | None) -> SizedModel:
    """Return a named model, or that of a factory, in any batch size.

    Parameters
    ----------
    name : str
        As for `make_model`.
    batch_size, length : int or None
        Given to the factory; by default its own.

    Raises
    ------
    InvalidOptionError, UnknownModelError
        As for `make_model`.
    """
    sized: dict[str, object] = {"batch_size": batch_size, "length": length}
    with torch.device("meta"):
        case = make_model(name, **{key: value for key, value in sized.items() if value is not None})

    def make_batch(batch_size: int, length: int | None = None) -> Arguments:
        longer = {} if length is None else {"length": length}
        other = make_model(name, batch_size=batch_size, **longer)
        return other.args, dict(other.kwargs)

    tensors = [leaf for leaf in (*case.args, *case.kwargs.values()) if isinstance(leaf, Tensor) and leaf.dim()]
    return SizedModel(
        name=name,
        make_model=partial(getattr, case, "module"),
        make_batch=make_batch,
        loss=case.loss,
        batch_size=batch_size or (tensors[0].shape[0] if tensors else 1),
        length=length,
        longest=length,  # its positions may be in a table of that length
    )
