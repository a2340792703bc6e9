"""Modules that more than one test trains."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives

from tests.support.pytorch.regression import batch, mean_square


class Step(nn.Module):
    """A model with its loss."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor] = mean_square) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        return self.loss(self.model(*args, **kwargs))


class Mutating(nn.Module):
    """Reads a buffer that backward needs too, then changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(batch(16, 16) / 4)
        self.register_buffer("shift", batch(16, seed=3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sin(x @ self.weight + self.shift)
        hidden = torch.sin(hidden @ self.weight + self.shift.view(1, 16))
        with torch.no_grad():
            self.shift.mul_(0.9).add_(hidden.mean(0))
            self.steps += 1
        return hidden * self.shift


class Meets(nn.Module):
    """Two layers with an all-reduce between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = collectives.all_reduce(self.first(x).tanh(), "sum", dist.group.WORLD)
        return self.second(h.sin()).tanh().square().sum()
