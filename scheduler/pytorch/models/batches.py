"""Model cases with random weights and random batches, both from a seed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from scheduler.pytorch.models.catalog import Arguments, ModelCase


def random_case(
    name: str,
    make_module: Callable[[], nn.Module],
    seed: int,
    make_batch: Callable[[int], Arguments],
    loss: Callable[..., Tensor] | None = None,
) -> ModelCase:
    """Return a case with a module whose weights come from a seed, and its first batch.

    The global random state is not changed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = make_module()
    args, kwargs = make_batch(0)
    return ModelCase(module.train(), args, kwargs, loss, make_batch, name)


def image_batches(batch_size: int, size: int, classes: int, *, per_pixel: bool = False) -> Callable[[int], Arguments]:
    """Return a function from a seed to images (batch_size, 3, size, size) with a class for each image or pixel."""
    labeled = (batch_size, size, size) if per_pixel else (batch_size,)

    def make(seed: int) -> Arguments:
        generator = _generator(seed)
        images = torch.randn(batch_size, 3, size, size, generator=generator)
        return (images, torch.randint(classes, labeled, generator=generator)), {}

    return make


def token_batches(batch_size: int, length: int, vocabulary: int) -> Callable[[int], Arguments]:
    """Return a function from a seed to tokens (batch_size, length) with the tokens to predict."""

    def make(seed: int) -> Arguments:
        generator = _generator(seed)
        tokens = torch.randint(vocabulary, (batch_size, length + 1), generator=generator)
        return (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), {}

    return make


def _generator(seed: int) -> torch.Generator | None:
    """Return a generator of random batches; on device "meta", where nothing is drawn, none."""
    return None if torch.get_default_device().type == "meta" else torch.Generator().manual_seed(seed)
