"""The networks of this package, with random weights and random batches."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scheduler.pytorch.models.batches import image_batches, random_case, token_batches
from scheduler.pytorch.models.catalog import ModelCase


class _WithTargets(nn.Module):
    """A layer that returns its output together with the targets that it was given."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, targets = state
        return self.module(x), targets


class _Last(nn.Module):
    """The last layer of a model; returns the loss."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, state: tuple[Tensor, Tensor]) -> Tensor:
        x, targets = state
        return F.cross_entropy(self.module(x).flatten(0, -2), targets.flatten())


class ConvNet(nn.Module):
    """Convolutions with batch norm and dropout, then a linear classifier; returns the loss."""

    def __init__(self, width: int, depth: int, size: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for level in range(depth):
            layers += [
                nn.Conv2d(channels, width, 3, stride=2 if level == depth // 2 else 1, padding=1),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Dropout(0.1),
            ]
            channels = width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(width * (size // 2) ** 2, classes)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.features(images).flatten(1)), classes)

    def layers(self) -> list[nn.Module]:
        """Return the layers in the order in which the forward calls them."""
        return [*map(_WithTargets, self.features), _Last(nn.Sequential(nn.Flatten(), self.classifier))]


def convnet(*, seed: int = 0, batch_size: int = 32, width: int = 32, depth: int = 6, size: int = 32) -> ModelCase:
    """Return a convolutional network for images of ten classes."""
    return random_case(
        "convnet", lambda: ConvNet(width, depth, size, classes=10), seed, image_batches(batch_size, size, 10)
    )


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.inputs = nn.Linear(width, 3 * width)
        self.outputs = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.inputs(x).split(width, dim=2))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = self.outputs(mixed.transpose(1, 2).reshape(batch, length, width))
        return F.dropout(mixed, self.dropout, self.training)


class _TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = _Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + cast("Tensor", self.mlp(self.mlp_norm(x)))


class _Embedding(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return cast("Tensor", self.dropout(self.tokens(tokens) + self.positions(positions)))


class GPT2(nn.Module):
    """A GPT-2 of pre-norm blocks with tied embeddings; returns the loss."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int, dropout: float) -> None:
        super().__init__()
        self.embedding = _Embedding(vocabulary, length, width, dropout)
        self.blocks = nn.ModuleList(_TransformerBlock(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def layers(self) -> list[nn.Module]:
        """Return the layers in the order in which the forward calls them."""
        head = nn.Sequential(self.norm, self.head)
        return [_WithTargets(self.embedding), *map(_WithTargets, self.blocks), _Last(head)]


def gpt2(
    *,
    seed: int = 0,
    batch_size: int = 4,
    layers: int = 8,
    width: int = 256,
    heads: int = 4,
    vocabulary: int = 2048,
    length: int = 256,
    dropout: float = 0.1,
) -> ModelCase:
    """Return a GPT-2 for sequences of `length` tokens."""
    return random_case(
        "gpt2",
        lambda: GPT2(layers, width, heads, vocabulary, length, dropout),
        seed,
        token_batches(batch_size, length, vocabulary),
    )


class _Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        wide = width * self.expansion
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != wide:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, wide, 1, stride=stride, bias=False), nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


class ResNet50(nn.Module):
    """ResNet-50: bottleneck stages of 3, 4, 6 and 3 blocks; returns the loss."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        stem: list[nn.Module] = [
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        blocks: list[nn.Module] = []
        channels = width
        for stage, depth in enumerate((3, 4, 6, 3)):
            for block in range(depth):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(_Bottleneck(channels, width * 2**stage, stride))
                channels = width * 2**stage * _Bottleneck.expansion
        self.features = nn.Sequential(*stem, *blocks)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        pooled = F.adaptive_avg_pool2d(self.features(images), 1).flatten(1)
        return F.cross_entropy(self.classifier(pooled), classes)

    def layers(self) -> list[nn.Module]:
        """Return the layers in the order in which the forward calls them."""
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), self.classifier)
        return [*map(_WithTargets, self.features), _Last(head)]


def resnet50(*, seed: int = 0, batch_size: int = 16, width: int = 64, size: int = 128, classes: int = 100) -> ModelCase:
    """Return a ResNet-50 for square images of `size` pixels a side."""
    return random_case("resnet50", lambda: ResNet50(width, classes), seed, image_batches(batch_size, size, classes))


class _DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """A U-Net: levels down and up, with a skip connection at each; returns the loss."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(_DoubleConv(a, b) for a, b in zip([3, *widths[:-2]], widths[:-1], strict=True))
        self.bottom = _DoubleConv(widths[-2], widths[-1])
        self.widen = nn.ModuleList(
            nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in zip(widths[-2::-1], widths[:0:-1], strict=True)
        )
        self.up = nn.ModuleList(_DoubleConv(2 * a, a) for a in widths[-2::-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x, skips = images, []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for widen, up in zip(self.widen, self.up, strict=True):
            x = up(torch.cat([skips.pop(), widen(x)], dim=1))
        return F.cross_entropy(self.head(x), classes)


def unet(
    *, seed: int = 0, batch_size: int = 4, width: int = 32, depth: int = 4, size: int = 128, classes: int = 8
) -> ModelCase:
    """Return a U-Net that classifies each pixel of square images of `size` pixels a side."""
    make_batch = image_batches(batch_size, size, classes, per_pixel=True)
    return random_case("unet", lambda: UNet(width, depth, classes), seed, make_batch)
