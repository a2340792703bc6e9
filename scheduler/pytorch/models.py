"""Named models to plan, train and measure: real architectures with random weights.

Sizes are chosen so that activations, not parameters, take most of the memory and one step
takes seconds on two CPU cores. Every factory takes `seed` (weights) and `batch_size`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scheduler.errors import UnknownModelError

Arguments = tuple[tuple[object, ...], dict[str, object]]
"""Positional and keyword arguments of one call."""


@dataclass(frozen=True)
class ModelCase:
    """A module with a batch for it and the loss of its outputs.

    Parameters
    ----------
    module : nn.Module
    args, kwargs
        One batch: the arguments of `module`.
    loss : callable, optional
        Makes the scalar loss of the module's outputs; None if the module returns the loss.
    make_batch : callable, optional
        Makes another batch of the same shapes from a seed.
    name : str
    """

    module: nn.Module
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    loss: Callable[..., Tensor] | None = None
    make_batch: Callable[[int], Arguments] | None = None
    name: str = ""

    def batch(self, seed: int) -> Arguments:
        """Return the arguments of another batch of the same shapes.

        Raises
        ------
        UnknownModelError
            If the case does not say how to make one.
        """
        if self.make_batch is None:
            raise UnknownModelError(f'the model case "{self.name}" has one batch only: give ModelCase a make_batch')
        return self.make_batch(seed)

    def layered(self) -> ModelCase:
        """Return the case with its model as an `nn.Sequential` of the same modules.

        What the model takes as several arguments, the sequence takes as one tuple.

        Raises
        ------
        UnknownModelError
            If the model is no `nn.Sequential` and has no method `layers` that returns its
            layers, the first taking that tuple; or if it takes keyword arguments.
        """
        if isinstance(self.module, nn.Sequential):
            return self
        layers = getattr(self.module, "layers", None)
        if not callable(layers) or self.kwargs:
            raise UnknownModelError(
                f'"{self.name or type(self.module).__name__}" is not a sequence of layers: plan its operations,'
                " give an nn.Sequential, or give the module a method layers() that returns a list of modules"
            )
        module = nn.Sequential(*cast("Iterable[nn.Module]", layers())).train(self.module.training)
        return replace(self, module=module, args=(self.args,), make_batch=self.make_batch and self._one_argument)

    def _one_argument(self, seed: int) -> Arguments:
        args, kwargs = self.batch(seed)
        return (args,), kwargs


def model_names() -> tuple[str, ...]:
    """Return the names that `make_model` knows here; those of transformers only where it is installed."""
    names = tuple(_OWN)
    if importlib.util.find_spec("transformers") is not None:
        names += tuple(_TRANSFORMERS)
    return names


def make_model(name: str, **options: object) -> ModelCase:
    """Return a named model, or what a factory `package.module:factory` makes.

    Parameters
    ----------
    name : str
        One of `model_names()`, or the path of a callable that returns a `ModelCase` or a
        tuple `(module, args)`, `(module, args, kwargs)` or `(module, args, kwargs, loss)`.
    **options
        Passed to the factory: for the named models `seed`, `batch_size` and their sizes.

    Raises
    ------
    UnknownModelError
        If there is no such model or factory, or the factory refuses the options or returns
        something else.

    Examples
    --------
    >>> case = make_model("convnet", batch_size=2)
    >>> case.module(*case.args).ndim
    0
    """
    if ":" in name:
        factory = _import_factory(name)
    elif name in model_names():
        factory = cast("Callable[..., object]", {**_OWN, **_TRANSFORMERS}[name])
    else:
        extra = ' (transformers is not installed: pip install "checkpoint-scheduler[models]")'
        missing = extra if name in _TRANSFORMERS else ""
        raise UnknownModelError(
            f'no model is called "{name}"{missing}: the names are {", ".join(model_names())};'
            " or write package.module:factory"
        )
    try:
        made = factory(**options)
    except TypeError as error:
        raise UnknownModelError(f'the factory of "{name}" cannot be called with {options}: {error}') from error
    return _as_case(made, name)


def _import_factory(path: str) -> Callable[..., object]:
    module_name, _, attribute = path.partition(":")
    try:
        found: object = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnknownModelError(f'cannot find the model factory "{path}": {error}') from error
    if not callable(found):
        raise UnknownModelError(f'"{path}" is not callable: name a function that returns a ModelCase')
    return found


def _as_case(made: object, name: str) -> ModelCase:
    if isinstance(made, ModelCase):
        return made
    parts: tuple[Any, ...] = made if isinstance(made, tuple) else (made,)
    if not 2 <= len(parts) <= 4 or not isinstance(parts[0], nn.Module):
        raise UnknownModelError(
            f'the factory of "{name}" returned {type(made).__name__}: return a ModelCase or'
            " (module, args), (module, args, kwargs) or (module, args, kwargs, loss)"
        )
    module, args, kwargs, loss = parts + (None,) * (4 - len(parts))
    arguments = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    return ModelCase(module, arguments, dict(kwargs or {}), loss, name=name)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Make random weights from this seed and leave the global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _images(batch_size: int, size: int, classes: int) -> Callable[[int], Arguments]:
    """Return batches of images with a class for each."""

    def make(seed: int) -> Arguments:
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(batch_size, 3, size, size, generator=generator)
        return (images, torch.randint(classes, (batch_size,), generator=generator)), {}

    return make


def _tokens(batch_size: int, length: int, vocabulary: int) -> Callable[[int], Arguments]:
    """Return batches of token sequences, each with the sequence to predict."""

    def make(seed: int) -> Arguments:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(vocabulary, (batch_size, length + 1), generator=generator)
        return (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), {}

    return make


def _case(
    name: str,
    module: nn.Module,
    make_batch: Callable[[int], Arguments],
    loss: Callable[..., Tensor] | None = None,
) -> ModelCase:
    args, kwargs = make_batch(0)
    return ModelCase(module.train(), args, kwargs, loss, make_batch, name)


class _Beside(nn.Module):
    """A layer that passes the targets on beside its own output."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, targets = state
        return self.module(x), targets


class _Last(nn.Module):
    """The last layer of a model: makes the loss."""

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
        """Return the layers that the forward calls in turn."""
        return [*map(_Beside, self.features), _Last(nn.Sequential(nn.Flatten(), self.classifier))]


def _convnet(*, seed: int = 0, batch_size: int = 32, width: int = 32, depth: int = 6, size: int = 32) -> ModelCase:
    with _seeded(seed):
        module = ConvNet(width, depth, size, classes=10)
    return _case("convnet", module, _images(batch_size, size, 10))


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
        """Return the layers that the forward calls in turn."""
        head = nn.Sequential(self.norm, self.head)
        return [_Beside(self.embedding), *map(_Beside, self.blocks), _Last(head)]


def _gpt2(
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
    with _seeded(seed):
        module = GPT2(layers, width, heads, vocabulary, length, dropout)
    return _case("gpt2", module, _tokens(batch_size, length, vocabulary))


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
        """Return the layers that the forward calls in turn."""
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), self.classifier)
        return [*map(_Beside, self.features), _Last(head)]


def _resnet50(
    *, seed: int = 0, batch_size: int = 16, width: int = 64, size: int = 128, classes: int = 100
) -> ModelCase:
    with _seeded(seed):
        module = ResNet50(width, classes)
    return _case("resnet50", module, _images(batch_size, size, classes))


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
    """A U-Net: down and up with a skip connection at each level; returns the loss."""

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


def _unet(
    *, seed: int = 0, batch_size: int = 4, width: int = 32, depth: int = 4, size: int = 128, classes: int = 8
) -> ModelCase:
    with _seeded(seed):
        module = UNet(width, depth, classes)

    def make(batch_seed: int) -> Arguments:
        generator = torch.Generator().manual_seed(batch_seed)
        images = torch.randn(batch_size, 3, size, size, generator=generator)
        return (images, torch.randint(classes, (batch_size, size, size), generator=generator)), {}

    return _case("unet", module, make)


_OWN: dict[str, Callable[..., ModelCase]] = {
    "gpt2": _gpt2,
    "resnet50": _resnet50,
    "unet": _unet,
    "convnet": _convnet,
}


def _output_loss(outputs: object) -> Tensor:
    """Return the loss that a transformers model put into its outputs."""
    return cast("Tensor", outputs.loss)  # type: ignore[attr-defined]


def _language_case(name: str, module: nn.Module, batch_size: int, length: int, vocabulary: int) -> ModelCase:
    def make(seed: int) -> Arguments:
        (tokens, targets), _ = _tokens(batch_size, length, vocabulary)(seed)
        return (), {"input_ids": tokens, "labels": targets}

    return _case(name, module, make, _output_loss)


def _hf_gpt2(
    *,
    seed: int = 0,
    batch_size: int = 4,
    layers: int = 6,
    width: int = 256,
    heads: int = 4,
    length: int = 256,
    vocabulary: int = 2048,
    dropout: float = 0.1,
) -> ModelCase:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        n_positions=length,
        vocab_size=vocabulary,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    with _seeded(seed):
        module = GPT2LMHeadModel(config)
    return _language_case("hf-gpt2", module, batch_size, length, vocabulary)


def _hf_llama(
    *, seed: int = 0, batch_size: int = 4, layers: int = 4, width: int = 256, length: int = 256, vocabulary: int = 2048
) -> ModelCase:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=3 * width,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length,
        vocab_size=vocabulary,
        use_cache=False,
    )
    with _seeded(seed):
        module = LlamaForCausalLM(config)
    return _language_case("hf-llama", module, batch_size, length, vocabulary)


def _hf_bert(
    *,
    seed: int = 0,
    batch_size: int = 4,
    layers: int = 4,
    width: int = 256,
    length: int = 256,
    vocabulary: int = 2048,
    dropout: float = 0.1,
) -> ModelCase:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=4,
        max_position_embeddings=length,
        vocab_size=vocabulary,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    with _seeded(seed):
        module = BertForMaskedLM(config)
    return _language_case("hf-bert", module, batch_size, length, vocabulary)


def _hf_t5(
    *,
    seed: int = 0,
    batch_size: int = 4,
    layers: int = 3,
    width: int = 256,
    length: int = 128,
    vocabulary: int = 2048,
    dropout: float = 0.1,
) -> ModelCase:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(  # type: ignore[call-arg]
        num_layers=layers,
        num_decoder_layers=layers,
        d_model=width,
        d_kv=width // 4,
        d_ff=4 * width,
        num_heads=4,
        vocab_size=vocabulary,
        decoder_start_token_id=0,
        use_cache=False,
        dropout_rate=dropout,
    )
    with _seeded(seed):
        module = T5ForConditionalGeneration(config)
    return _language_case("hf-t5", module, batch_size, length, vocabulary)


def _hf_vit(
    *,
    seed: int = 0,
    batch_size: int = 4,
    layers: int = 6,
    width: int = 192,
    size: int = 112,
    classes: int = 10,
    dropout: float = 0.1,
) -> ModelCase:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(  # type: ignore[call-arg]
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=3,
        image_size=size,
        patch_size=8,
        num_labels=classes,
        hidden_dropout_prob=dropout,
    )
    with _seeded(seed):
        module = ViTForImageClassification(config)

    def make(batch_seed: int) -> Arguments:
        (images, targets), _ = _images(batch_size, size, classes)(batch_seed)
        return (), {"pixel_values": images, "labels": targets}

    return _case("hf-vit", module, make, _output_loss)


_TRANSFORMERS: dict[str, Callable[..., ModelCase]] = {
    "hf-gpt2": _hf_gpt2,
    "hf-vit": _hf_vit,
    "hf-bert": _hf_bert,
    "hf-llama": _hf_llama,
    "hf-t5": _hf_t5,
}
