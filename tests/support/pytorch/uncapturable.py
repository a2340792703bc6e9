"""Small models that train, but whose step cannot be captured as one graph, each with batches of differing shapes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

Batch = tuple[tuple[Any, ...], dict[str, Any]]
WIDTH = 16


@dataclass(frozen=True)
class Case:
    """A model that trains, batches for it by seed, and its loss; without a loss the model returns it."""

    model: nn.Module
    batch: Callable[[int], Batch]
    loss: Callable[[Any], Tensor] | None = None
    rounds_anew: bool = False
    """Whether two plain steps may round differently."""


def rows(seed: int, *shape: int) -> Tensor:
    """Return random numbers; the first dimension varies with the seed unless it is given."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape or (64 + 16 * (seed % 5), WIDTH), generator=generator)


def of_rows(seed: int) -> Batch:
    return (rows(seed),), {}


def of_images(seed: int) -> Batch:
    return (rows(seed, 3, 4, 16 + 8 * (seed % 3), 16),), {}


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH))


class Experts(nn.Module):
    """Runs each expert on the rows that a router sends to it, and counts them; an expert without rows is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(block() for _ in range(4))
        self.register_buffer("used", torch.zeros(4, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            where = (chosen == number).nonzero().squeeze(-1)
            if len(where):
                self.used[number] += len(where)
                output = output.index_add(0, where, expert(x[where]) * weights[where, None])
        return x + output


class DroppedLayers(nn.Module):
    """Leaves out layers at random, as `draw` says."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(5))
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.draw() > 0.4:
                x = x + layer(x)
        return x + self.layers[0](x)


class Mask(nn.Module):
    """Takes another path where a mask is full."""

    def __init__(self) -> None:
        super().__init__()
        self.masked, self.full = block(), block()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.full(x) if bool(mask.all()) else self.masked(x[mask])


class Translation(nn.Module):
    """`nn.Transformer` with a mask of the target, whose values say whether it is causal."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 2 * WIDTH, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.transformer(source, target, tgt_mask=mask)


class Packed(nn.Module):
    """An LSTM over packed sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=True)
        self.head = block()

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        packed, _ = self.lstm(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        output, _ = pad_packed_sequence(packed, batch_first=True)
        return self.head(output)


class Convolution(nn.Module):
    """A graph convolution that adds a self loop where there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        missing = torch.tensor(sorted({*range(len(x))} - {int(i) for i, j in edges.T if i == j}), dtype=torch.long)
        source, target = torch.cat([edges, missing.expand(2, -1)], 1)
        degree = torch.bincount(target, minlength=len(x)).clamp(min=1)
        for layer in self.layers:
            x = torch.tanh(torch.zeros_like(x).index_add(0, target, layer(x)[source]) / degree[:, None])
        return x


class BranchOnLoss(nn.Module):
    """Adds a second term where the first is large."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.extra = block(), block()

    def forward(self, x: Tensor) -> Tensor:
        loss = self.body(x).square().mean()
        return loss + self.extra(x).abs().mean() if loss.item() > 0.05 else loss


class EarlyExit(nn.Module):
    """Stops at the first layer whose head is sure."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = x + layer(x)
            logits = self.head(x)
            if logits.softmax(-1).max() > 0.8:
                break
        return {"logits": logits}


class Tree(nn.Module):
    """Joins the branches of a tree of tuples, recursively."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.join = block(), nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.Tanh())

    def forward(self, tree: Any) -> Tensor:
        if isinstance(tree, Tensor):
            return self.leaf(tree)
        left, right = tree
        return self.join(torch.cat([self(left), self(right)], -1))


class Scaled(torch.autograd.Function):
    """A custom function that keeps a number and a shape for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor, ctx.count = factor, x.numel()
        ctx.save_for_backward(x)
        return x.sin() * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradients[0] * x.cos() * ctx.factor * (1 + 1 / ctx.count), None


class WithFunction(nn.Module):
    """Calls a custom function with a number that it reads from the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = block(), block()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Scaled.apply(self.first(x), float(x.abs().max())))  # type: ignore[no-untyped-call]


class Pondering(nn.Module):
    """Calls one module until it says that it is done."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.halt = block(), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        total, steps = 0.0, 0
        while total < 2.0 and steps < 8:
            x = x + self.cell(x)
            total += float(self.halt(x).sigmoid().mean().detach())
            steps += 1
        return x


class Averaging(nn.Module):
    """Batch normalization with a cumulative average, after convolutions with activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None), nn.ReLU(inplace=True))
                for _ in range(3)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if x.mean() > -100 else x


class Sparse(nn.Module):
    """An embedding with sparse gradients, of the distinct words only."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(50, WIDTH, sparse=True), block()

    def forward(self, words: Tensor) -> Tensor:
        distinct, where = words.unique(return_inverse=True)
        return self.body(self.embedding(distinct))[where]


class OwnCheckpoints(nn.Module):
    """Uses activation checkpointing itself, for a number of layers that it draws."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_() if not x.requires_grad else x
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x * random.random()


class Noisy(nn.Module):
    """Draws from generators of Python, NumPy and torch, global ones and its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(NoisyLayer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in random.sample([*self.layers], k=len(self.layers)):
            x = layer(x)
        return x


class NoisyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = block()
        self.own = random.Random(1)
        self.own_numpy = np.random.default_rng(2)
        self.own_torch = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.randn(x.shape[-1])).float() + torch.randn(WIDTH, generator=self.own_torch)
        x = x + noise * self.own.random() + random.gauss(0, 1) * float(self.own_numpy.normal())
        return F.dropout(self.body(x).exp(), 0.3, training=True).tanh()


class Cache:
    """Keys and values of layers, to which each layer appends."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.seen = 0


class CachedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.body = nn.Linear(WIDTH, WIDTH), block()

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        assert cache is not None
        cache.keys.append(self.key(x))
        cache.seen += 1
        return self.body(x * torch.stack(cache.keys).mean(0).exp() / cache.seen)


class Cached(nn.Module):
    """Layers that append to a cache, which the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CachedLayer() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Cache]:
        cache = Cache()
        for layer in self.layers:
            x = x + layer(x, cache=cache)
        assert cache.seen == len(self.layers)
        return x, cache


class Critic(nn.Module):
    """Spectral normalization of both kinds, whose power iterations advance buffers, and a penalty on gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.old = nn.Sequential(nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())
        self.new = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        score = self.new(self.old(x)).square().sum()
        return score if score.item() > 0 else -score


class Forces(nn.Module):
    """Predicts an energy and its derivative by the positions, so its loss needs second derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, positions: Tensor) -> Tensor:
        positions = positions.detach().requires_grad_()
        energy = self.head(self.body(positions)).sum()
        (slope,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy.square() + slope.square().sum()


@dataclass
class Prediction:
    """The output of a model as a dataclass."""

    scores: Tensor
    parts: dict[str, list[Tensor]]


class Structured(nn.Module):
    """Takes nested arguments and returns a dataclass of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = StructuredLayer()

    def forward(self, batch: dict[str, Any], *, scale: float) -> Prediction:
        found = self.inner(batch, ("x", [0, 1]), scale=scale)
        return self.inner({"x": [found.scores, *found.parts["x"]]}, ("x", [1]), scale=1.0)


class StructuredLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = block()

    def forward(self, batch: dict[str, Any], chosen: tuple[str, list[int]], *, scale: float) -> Prediction:
        name, numbers = chosen
        parts = [self.body(batch[name][i]) * scale for i in numbers]
        batch["count"] = batch.get("count", 0) + len(parts)
        return Prediction(sum(parts) / batch["count"], {name: parts})  # type: ignore[arg-type]


class Auxiliary(nn.Module):
    """Its layers count their calls, and keep losses and their last output in attributes that the model reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = AuxiliaryLayer()
        self.state = rows(0, 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.losses.clear()
        for number in range(3):
            self.layer.scale = number
            x = self.layer(x, self.state)
        self.state = x.detach().mean(0, keepdim=True)
        return x.square().mean() + sum(self.layer.losses) + self.layer.last.mean()


class AuxiliaryLayer(nn.Module):
    scale: int
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = block()
        self.losses: list[Tensor] = []
        self.counts = {"calls": 0}

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        self.counts["calls"] += 1
        self.last = self.body(x + state * self.scale / self.counts["calls"])
        self.losses.append(self.last.abs().mean())
        return torch.tanh(self.last) * x if len(self.losses) % 2 else self.last + x


class Residual(nn.Module):
    """Activations and additions in place, on a path that the data pick."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True), nn.BatchNorm2d(4)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            found = layer(x)
            found += x
            found.relu_()
            x = found if float(found.detach().max()) > 0 else x
        return x


class Objects(nn.Module):
    """Selects a number of boxes that depends on their scores, for a list of images of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), nn.ReLU(), nn.Conv2d(WIDTH, WIDTH, 3))
        self.score, self.head = nn.Conv2d(WIDTH, 1, 1), block()

    def forward(self, images: Sequence[Tensor]) -> list[Tensor]:
        found = []
        for image in images:
            features = self.body(image[None])
            keep = self.score(features).flatten() > 0.0
            keep[0] = True
            found.append(self.head(features.flatten(2)[0].T[keep]))
        return found


class Scripted(nn.Module):
    """A TorchScript module with a loop over a number that the data decide."""

    def __init__(self) -> None:
        super().__init__()
        self.script = torch.jit.script(ScriptedLayer())
        self.body = block()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.script(x, int(x.abs().max())))


class ScriptedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, count: int) -> Tensor:
        for _ in range(count):
            x = torch.tanh(self.linear(x)) + x
        return x


def sure(output: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output["logits"], torch.zeros(len(output["logits"]), dtype=torch.long))


def masked_batch(seed: int) -> Batch:
    x = rows(seed)
    return (x,), {"mask": torch.arange(len(x)) < len(x) - seed % 2}


def packed_batch(seed: int) -> Batch:
    lengths = [20 + seed % 3, 30, 15 + seed % 5]
    return (rows(seed, 3, max(lengths), WIDTH), lengths), {}


def graph_batch(seed: int) -> Batch:
    x = rows(seed)
    return (x, torch.randint(0, len(x), (2, 200), generator=torch.Generator().manual_seed(seed))), {}


def tree_batch(seed: int) -> Batch:
    leaves = [rows(seed + i, 30, WIDTH) for i in range(5)]
    tree: Any = leaves.pop()
    for leaf in leaves:
        tree = (tree, leaf) if seed % 2 else ((leaf, leaf), tree)
    return (tree,), {}


def word_batch(seed: int) -> Batch:
    return (torch.randint(0, 50, (3, 60 + seed % 4), generator=torch.Generator().manual_seed(seed)),), {}


CASES: dict[str, Callable[[], Case]] = {
    "experts one by one": lambda: Case(Experts(), of_rows, mean_square),
    "layers dropped by Python": lambda: Case(DroppedLayers(random.random), of_rows, mean_square),
    "layers dropped by NumPy": lambda: Case(DroppedLayers(lambda: float(np.random.rand())), of_rows, mean_square),
    "layers dropped by item": lambda: Case(DroppedLayers(lambda: torch.rand(()).item()), of_rows, mean_square),
    "mask picks the path": lambda: Case(Mask(), masked_batch, mean_square),
    "transformer with tgt_mask": lambda: Case(
        Translation(), lambda seed: ((rows(seed, 2, 24, WIDTH), rows(seed, 2, 20 + seed % 4, WIDTH)), {}), mean_square
    ),
    "packed LSTM": lambda: Case(Packed(), packed_batch, mean_square),
    "graph with self loops": lambda: Case(Convolution(), graph_batch, mean_square),
    "branch on a loss": lambda: Case(BranchOnLoss(), of_rows),
    "early exit": lambda: Case(EarlyExit(), of_rows, sure),
    "recursion over a tree": lambda: Case(Tree(), tree_batch, mean_square),
    "custom function": lambda: Case(WithFunction(), of_rows, mean_square),
    "while loop": lambda: Case(Pondering(), of_rows, mean_square),
    "batch norm without momentum": lambda: Case(Averaging(), of_images, mean_square),
    "sparse embedding": lambda: Case(Sparse(), word_batch, mean_square),
    "own checkpoints": lambda: Case(OwnCheckpoints(use_reentrant=False), of_rows, mean_square),
    "own reentrant checkpoints": lambda: Case(OwnCheckpoints(use_reentrant=True), of_rows, mean_square),
    "generators of all kinds": lambda: Case(Noisy(), of_rows, mean_square),
    "cache of keys": lambda: Case(Cached(), of_rows, lambda out: out[0].mean() + torch.stack(out[1].keys).sum()),
    "spectral norm": lambda: Case(Critic(), of_rows),
    "forces": lambda: Case(Forces(), lambda seed: ((rows(seed, 40 + seed % 3, 3),), {})),
    "nested arguments": lambda: Case(
        Structured(),
        lambda seed: (({"x": [rows(seed), rows(seed)]},), {"scale": 0.5 + seed}),
        lambda out: out.scores.square().mean() + out.parts["x"][0].mean(),
    ),
    "losses in attributes": lambda: Case(Auxiliary(), of_rows),
    "additions in place": lambda: Case(Residual(), of_images, mean_square),
    "images of several sizes": lambda: Case(
        Objects(),
        lambda seed: (([rows(seed, 3, 12 + seed % 3, 14), rows(seed, 3, 10, 12)],), {}),
        lambda out: torch.stack([one.square().mean() for one in out]).sum(),
    ),
    "script": lambda: Case(Scripted(), of_rows, mean_square, rounds_anew=True),  # optimized after the first runs
}
"""By name. Building one draws its parameters from torch's generator."""
