"""A small regression to train: random batches, a perceptron, and a loss of any outputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def batch(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mean_square(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


def mlp(*extra: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), *extra, nn.Tanh(), nn.Linear(64, 8))
