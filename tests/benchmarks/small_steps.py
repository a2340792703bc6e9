"""Training steps of small models, whose elementwise operations cost as much as their products.

    python tests/benchmarks/small_steps.py [NAME ...]

captures each of them (and GPT-2, ResNet-50 and the U-Net of the catalog) with measured costs, and
writes its graph to tests/benchmarks/small_steps, from where `small_budgets.py` reads it. The
graphs are kept, so that a table can be made again with the same costs.
"""

from __future__ import annotations

import lzma
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import scheduler as sc
from scheduler.pytorch import trace
from scheduler.pytorch.models.catalog import make_model

TOKENS, WIDTH, HEADS = 128, 128, 4


class Attention(nn.Module):
    """Attention without a fused kernel; with dropout inside, unless `dropout` is 0."""

    def __init__(self, width: int = WIDTH, *, heads: int = HEADS, dropout: float = 0.1, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.queries, self.keys, self.values = (nn.Linear(width, width) for _ in range(3))
        self.last, self.dropout = nn.Linear(width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor, context: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        context = x if context is None else context
        queries, keys, values = split(self.queries(x)), split(self.keys(context)), split(self.values(context))
        scores = queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, None, :], -1e9)
        if self.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -1e9)
        mixed = self.dropout(scores.softmax(-1)) @ values
        return self.last(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """A transformer's block with the norm first."""

    def __init__(self, width: int = WIDTH, *, dropout: float = 0.1, causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.attention = Attention(width, dropout=dropout, causal=causal)
        self.cross = Attention(width, dropout=dropout) if cross else None
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3 if cross else 2))
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, context: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.norms[0](x), padding=padding))
        if self.cross is not None:
            x = x + self.dropout(self.cross(self.norms[2](x), context))
        hidden = functional.gelu(self.first(self.norms[1](x)))
        return x + self.dropout(self.second(hidden))


class Transformer(nn.Module):
    """Blocks on given features, with a padding mask, under bf16 autocast, or causal."""

    def __init__(self, blocks: int, *, dropout: float = 0.1, causal: bool = False, autocast: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout=dropout, causal=causal) for _ in range(blocks))
        self.autocast = autocast

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            for block in self.blocks:
                x = block(x, padding=padding)
        return x


class EncoderDecoder(nn.Module):
    """Two blocks that encode, and three that decode with cross attention."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(Block(causal=True, cross=True) for _ in range(3))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        for block in self.encoder:
            source = block(source)
        for block in self.decoder:
            target = block(target, source)
        return target


class DiffusionBlock(nn.Module):
    """A block whose norms are modulated by a condition (adaLN)."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.attention = Attention(width, dropout=0.0)
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = (
            self.modulation(functional.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        )
        x = x + gate * self.attention(self.norms[0](x) * (1 + scale) + shift)
        hidden = functional.gelu(self.first(self.norms[1](x) * (1 + scale2) + shift2), approximate="tanh")
        return x + gate2 * self.second(hidden)


class DiffusionTransformer(nn.Module):
    """Diffusion blocks on patches, with a step of time as the condition."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DiffusionBlock() for _ in range(blocks))
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        condition = self.time(time)
        for block in self.blocks:
            x = block(x, condition)
        return x


class LlamaBlock(nn.Module):
    """RMS norms, rotary positions, unfused causal attention, and a gated network."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(2))
        self.projections = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        def norm(y: Tensor, weight: Tensor) -> Tensor:
            return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))

        def rotate(y: Tensor) -> Tensor:
            first, second = y.chunk(2, dim=-1)
            return y * cosine + torch.cat((-second, first), dim=-1) * sine

        normed = norm(x, self.norms[0])
        queries, keys, values = (
            projection(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for projection in self.projections[:3]
        )
        scores = rotate(queries) @ rotate(keys).transpose(-2, -1) / math.sqrt(queries.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, -1e9).softmax(-1) @ values
        x = x + self.projections[3](mixed.transpose(1, 2).flatten(-2))
        normed = norm(x, self.norms[1])
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """Llama-like blocks."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LlamaBlock() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        size = WIDTH // HEADS
        angles = torch.outer(torch.arange(x.shape[1]), 1e4 ** (-torch.arange(0, size, 2) / size))
        angles = torch.cat((angles, angles), dim=-1)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return x


class Scan(nn.Module):
    """A selective state-space layer whose scan is a loop over time, as in Mamba's reference."""

    def __init__(self, width: int = 64, states: int = 8) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.step, self.reads, self.writes = nn.Linear(width, width), nn.Linear(width, states), nn.Linear(width, states)
        self.decay = nn.Parameter(torch.log(torch.arange(1.0, states + 1)).repeat(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        values, gates = self.first(self.norm(x)).chunk(2, dim=-1)
        steps = functional.softplus(self.step(values))
        decays = torch.exp(steps.unsqueeze(-1) * -torch.exp(self.decay))
        inputs = (steps * values).unsqueeze(-1) * self.writes(values).unsqueeze(-2)
        reads = self.reads(values)
        state, outputs = torch.zeros_like(inputs[:, 0]), []
        for time in range(x.shape[1]):
            state = decays[:, time] * state + inputs[:, time]
            outputs.append((state * reads[:, time].unsqueeze(-2)).sum(-1))
        return x + self.last(torch.stack(outputs, dim=1) * functional.silu(gates))


class Recurrent(nn.Module):
    """A recurrent cell of torch, unrolled over time, and a linear layer on every output."""

    def __init__(self, cell: type[nn.LSTMCell] | type[nn.GRUCell], width: int = 64) -> None:
        super().__init__()
        self.cell, self.last = cell(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros_like(x[:, 0])
        memory, outputs = hidden, []
        for time in range(x.shape[1]):
            if isinstance(self.cell, nn.LSTMCell):
                hidden, memory = self.cell(x[:, time], (hidden, memory))
            else:
                hidden = self.cell(x[:, time], hidden)
            outputs.append(self.last(hidden))
        return torch.stack(outputs, dim=1)


class StackedLSTM(nn.Module):
    """Layers of an unrolled LSTM, each of which reads all outputs of the one below, with dropout between."""

    def __init__(self, layers: int = 3, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))
        self.dropout, self.last = nn.Dropout(0.2), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = memory = torch.zeros_like(x[:, 0])
            outputs = []
            for time in range(x.shape[1]):
                hidden, memory = layer(x[:, time], (hidden, memory))
                outputs.append(hidden)
            x = self.dropout(torch.stack(outputs, dim=1))
        return self.last(x)


class Gated(nn.Module):
    """A recurrence without products of matrices: gates and inputs come from all times at once."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        gates, values = self.first(self.norm(x)).chunk(2, dim=-1)
        gates = torch.sigmoid(gates)
        values = torch.tanh(values) * (1 - gates)
        state, outputs = torch.zeros_like(values[:, 0]), []
        for time in range(x.shape[1]):
            state = gates[:, time] * state + values[:, time]
            outputs.append(state)
        return x + self.last(torch.stack(outputs, dim=1) * functional.silu(x))


class Residual(nn.Module):
    """A residual block of two convolutions with batch norms."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.norms[0](self.convolutions[0](x)))
        return functional.relu(x + self.norms[1](self.convolutions[1](hidden)))


class SmallUNet(nn.Module):
    """Three levels with connections across."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.ModuleList(Residual(channels) for _ in range(3))
        self.up = nn.ModuleList(Residual(channels) for _ in range(3))
        self.merge = nn.ModuleList(nn.Conv2d(2 * channels, channels, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.first(x), []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = functional.avg_pool2d(x, 2)
        for block, merge in zip(self.up, self.merge, strict=True):
            x = functional.interpolate(x, scale_factor=2)
            x = block(merge(torch.cat((x, kept.pop()), dim=1)))
        return x


class Mixer(nn.Module):
    """A block that mixes patches, then channels."""

    def __init__(self, patches: int, channels: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(2))
        self.patches = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.channels = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.patches(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norms[1](x))


def squares(output: Tensor) -> Tensor:
    return output.float().pow(2).mean()


def features(batch: int = 4, tokens: int = TOKENS, width: int = WIDTH) -> Tensor:
    return torch.randn(batch, tokens, width)


def padded() -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([TOKENS, TOKENS - 20, TOKENS - 40, TOKENS - 60])
    return features(), torch.arange(TOKENS) >= lengths[:, None]


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "masked encoder": lambda: (Transformer(4), padded()),
    "encoder with dropout": lambda: (Transformer(6), (features(),)),
    "encoder without dropout": lambda: (Transformer(6, dropout=0.0), (features(),)),
    "decoder": lambda: (Transformer(6, causal=True), (features(),)),
    "decoder bf16": lambda: (Transformer(4, causal=True, autocast=True), (features(),)),
    "masked encoder bf16": lambda: (Transformer(4, autocast=True), padded()),
    "encoder-decoder": lambda: (EncoderDecoder(), (features(), features())),
    "diffusion transformer": lambda: (DiffusionTransformer(), (features(), torch.randn(4, WIDTH))),
    "llama": lambda: (Llama(), (features(),)),
    "state space": lambda: (nn.Sequential(*(Scan() for _ in range(3))), (features(8, 32, 64),)),
    "LSTM": lambda: (Recurrent(nn.LSTMCell), (features(16, 160, 64),)),
    "GRU": lambda: (Recurrent(nn.GRUCell), (features(16, 128, 64),)),
    "stacked LSTM": lambda: (StackedLSTM(), (features(16, 50, 64),)),
    "gated recurrence": lambda: (nn.Sequential(*(Gated() for _ in range(4))), (features(8, 64, 96),)),
    "residual convolutions": lambda: (
        nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *(Residual(32) for _ in range(6))),
        (torch.randn(8, 3, 32, 32),),
    ),
    "U-Net": lambda: (SmallUNet(), (torch.randn(8, 3, 64, 64),)),
    "mixer": lambda: (nn.Sequential(*(Mixer(64, 128) for _ in range(6))), (features(8, 64, 128),)),
}


CATALOG = ("gpt2", "resnet50", "unet")
FOLDER = Path(__file__).parent / "small_steps"


def capture(name: str) -> sc.Graph:
    """Capture the step of a model with measured costs."""
    torch.manual_seed(0)
    if name in CATALOG:
        case = make_model(name)
        return trace(case.module, case.args, dict(case.kwargs), loss=case.loss)
    model, args = MODELS[name]()
    return trace(model, args, loss=squares)


def path_of(name: str) -> Path:
    """Return where the graph of a model is kept."""
    return FOLDER / f"{name.replace(' ', '_')}.json.xz"


def read(name: str) -> sc.Graph:
    """Read the graph of a model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.json"
        path.write_bytes(lzma.decompress(path_of(name).read_bytes()))
        graph = sc.read_graph(path)
    assert isinstance(graph, sc.Graph)
    return graph


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or (*MODELS, *CATALOG):
        graph = capture(name)
        with tempfile.TemporaryDirectory() as folder:
            sc.write_graph(graph, Path(folder) / "graph.json")
            path_of(name).write_bytes(lzma.compress((Path(folder) / "graph.json").read_bytes(), preset=9))
        print(f"{name}: {len(graph.operations)} operations", flush=True)


if __name__ == "__main__":
    main()
