"""A model and a loss that read values from everywhere: what a training script may change between two steps."""

from __future__ import annotations

import copy
import enum
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.checkpoint import checkpoint

GAIN = 1.0
RATES = {"head": [1.0, 2.0]}


class Mode(enum.Enum):
    PLAIN = "plain"
    TWICE = "twice"


@dataclass
class Settings:
    gain: float = 1.0
    offsets: list[float] = field(default_factory=lambda: [0.5, 0.25])


@dataclass(frozen=True)
class FrozenSettings:
    gain: float = 1.0


class Schedule:
    """An object whose method and operators read its attributes."""

    def __init__(self) -> None:
        self.start = 1.0
        self.written = 0
        self.pieces = {"inner": Settings()}

    def value(self) -> float:
        return self.start * self.pieces["inner"].gain

    @property
    def doubled(self) -> float:
        return self._base() * 2

    def _base(self) -> float:
        return self.pieces["inner"].offsets[0]


class Gain:
    """A number with an operator of its own."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __rmul__(self, x: Tensor) -> Tensor:
        return x * self.factor

    __array_ufunc__ = None


class Slotted:
    __slots__ = ("rate",)

    def __init__(self) -> None:
        self.rate = 1.0


class Halved:
    """A descriptor."""

    def __init__(self) -> None:
        self.divisor = 2.0

    def __get__(self, owner: object, kind: type) -> float:
        return 1.0 / self.divisor


def _user_module() -> ModuleType:
    """Return a module of the user, as from a file of settings, with a module inside."""
    outer, inner = ModuleType("changing_settings"), ModuleType("changing_settings.inner")
    source = "LEVEL = 1.0\ndef helper(x):\n    return x * LEVEL\nclass Constants:\n    level = 1.0\n"
    for module in (outer, inner):
        exec(compile(source, f"{module.__name__}.py", "exec"), vars(module))
    outer.inner = inner  # type: ignore[attr-defined]
    sys.modules[outer.__name__] = outer
    sys.modules[inner.__name__] = inner
    return outer


user_settings = _user_module()
imported_helper = user_settings.helper


@functools.lru_cache
def cached_level(name: str) -> float:
    return RATES[name][1]


class DropPath(nn.Module):
    """Skips the branch of a sample, as timm does."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.drop_prob = rate

    def forward(self, x: Tensor) -> Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        return x * x.new_empty(x.shape[0], 1).bernoulli_(keep) / keep


class Adapter(nn.Module):
    """A linear layer with a low-rank update, as of LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.scaling = {"default": 0.5}
        self.enabled, self.merged = True, False

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y + self.up(self.down(x)) * self.scaling["default"] if self.enabled and not self.merged else y

    def merge(self) -> None:
        with torch.no_grad():
            self.base.weight += self.up.weight @ self.down.weight * self.scaling["default"]
        self.merged = True


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.linear(x))


class Net(nn.Module):
    """Reads in forward whatever its attributes hold."""

    boost = 1.0
    scales: ClassVar = {"soft": 1.0, "hard": 2.0}
    half = Halved()

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.scale = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4)
        self.drop, self.path, self.adapter = nn.Dropout(0.3), DropPath(0.2), Adapter()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("shift", torch.full((4,), 0.5))
        self.tau, self.flag, self.kind, self.mode = 2.0, True, "soft", Mode.PLAIN
        self.sizes, self.chosen, self.order = (1, 2), {"stem"}, [1.0, 2.0]
        self.table = {"gain": 1.0, "deep": {"gains": [1.0, 2.0]}}
        self.settings, self.frozen, self.slotted = Settings(), FrozenSettings(), Slotted()
        self.schedule, self.gain, self.activation = Schedule(), Gain(), torch.tanh
        self.rate_0, self.rate_1, self.named = 1.0, 1.0, 1.0
        self.offset = torch.full((4,), 0.25)
        self.gradient_checkpointing, self.calls, self.unread = False, 0, 1.0
        self.limit: float | None = None

    @property
    def factor(self) -> float:
        return self._factor * 1.0

    _factor = 1.0

    @functools.cached_property
    def cached_factor(self) -> float:
        return self.table["gain"] * 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.shape
        x = self.drop(self.scale(self.norm(self.stem(x))))
        x = x + self.path(self.adapter(x))
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if self.gradient_checkpointing else block(x)
            x = x * getattr(self, f"rate_{i % 2}")
        x = self.tied(self.activation(self.head(x))) + self.shift + self.offset
        return self.rescaled(x, *self.read_settings())

    def read_settings(self) -> list[float]:
        values = [self.tau, self.scales[self.kind], self.boost, self.sizes[1], *self.order, self.half]
        values += [self.table["gain"], self.table["deep"]["gains"][1], self.settings.gain, *self.settings.offsets]
        values += [self.frozen.gain, self.slotted.rate, self.schedule.value(), self.schedule.doubled, self.factor]
        values += [GAIN, user_settings.LEVEL, user_settings.inner.LEVEL, user_settings.inner.Constants.level]
        values += [cached_level("head"), getattr(self, "named"), self.cached_factor]  # noqa: B009
        return values

    def rescaled(self, x: Tensor, *factors: float) -> Tensor:
        if self.flag and "stem" in self.chosen:
            x = x * 0.5
        if self.mode is Mode.TWICE:
            x = x * 2
        if self.limit is not None:
            x = x.clamp(max=self.limit)
        for factor in factors:
            x = x * factor
        from changing_settings import LEVEL

        return user_settings.inner.helper(imported_helper(x)) * self.gain * LEVEL


class Trainer:
    """Holds what the loss reads, and what it does not."""

    def __init__(self) -> None:
        self.beta, self.steps, self.history = 0.5, 0, []
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def criterion_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.criterion(output, target) * self.beta


class Pair(NamedTuple):
    scale: Tensor
    offset: Tensor


@dataclass
class Targets:
    scale: Tensor


@dataclass
class Case:
    """A model with its loss and a batch, and what a change can reach."""

    model: nn.Module
    loss: Callable[[Tensor], Tensor]
    args: tuple[Tensor, ...]
    trainer: Trainer
    set_temperature: Callable[[float], None]
    weights: list[float]
    default: list[float]
    options: dict[str, float]
    batch: dict[str, object]
    """Targets of the loss: tensors in an entry, a tuple, a named tuple and a dataclass."""


def make_case(model: Callable[[], nn.Module] = Net) -> Case:
    """Return the model, and a loss that reads a closure, a default, a partial's keyword and a bound object."""
    torch.manual_seed(0)
    trainer, weights, default, options = Trainer(), [1.0, 0.5], [1.0], {"power": 1.0}
    batch: dict[str, Any] = {
        "labels": torch.arange(6) % 4,
        "tuple": (torch.full((4,), 0.5),),
        "pair": Pair(torch.full((4,), 0.5), torch.zeros(4)),
        "targets": Targets(torch.full((4,), 2.0)),
    }
    temperature = 1.0

    def set_temperature(value: float) -> None:
        nonlocal temperature
        temperature = value

    def compute(output: Tensor, scales: list[float] = default, *, extra: dict[str, float]) -> Tensor:
        total = (
            trainer.criterion_loss(output / temperature, batch["labels"]) * weights[0]
            + weights[1] * output.square().mean()
        )
        output = output * batch["tuple"][0] * batch["pair"].scale + batch["pair"].offset
        output = output * batch["targets"].scale
        return total * scales[0] * extra["power"] + functional.softplus(output).mean()

    made = model()
    loss = functools.partial(compute, extra=options)
    return Case(made, loss, (torch.randn(6, 4),), trainer, set_temperature, weights, default, options, batch)


class Snapshot:
    """The modules of a model, their tensors and the containers in their attributes, as they are now."""

    def __init__(self, case: Case) -> None:
        roots = [*case.model.modules(), *(x for x in (case.trainer, case.trainer.criterion))]
        self._vars = [(root, type(root), dict(vars(root))) for root in roots]
        # A parametrized module has a class of its own, from which removing the parametrization deletes the property.
        self._classes = [(type(m), dict(vars(type(m)))) for m in case.model.modules() if is_parametrized(m)]
        self._containers: list[tuple[object, object]] = []
        for _, _, own in self._vars:
            for value in own.values():
                self._add(value)
        for value in (case.weights, case.default, case.options, case.batch):
            self._add(value)
        tensors = [*case.model.parameters(), *case.model.buffers()]
        self._tensors = [(t, t.data, t.data.clone(), t.requires_grad) for t in tensors]
        self._args = case.args

    def _add(self, value: object) -> None:
        if isinstance(value, list | dict | set):
            self._containers.append((value, copy.copy(value)))
            for entry in value.values() if isinstance(value, dict) else value:
                self._add(entry)
        elif type(value).__module__ == __name__ and hasattr(value, "__dict__") and not isinstance(value, nn.Module):
            self._add(vars(value))

    def restore(self, case: Case) -> None:
        """Put everything back."""
        for kind, attributes in self._classes:
            for name in attributes.keys() - vars(kind).keys():
                setattr(kind, name, attributes[name])
        for root, kind, own in self._vars:
            if type(root) is not kind:
                root.__class__ = kind
            vars(root).clear()
            vars(root).update(own)
        for value, then in self._containers:
            value.clear()  # type: ignore[attr-defined]
            value.extend(then) if isinstance(value, list) else value.update(then)  # type: ignore[attr-defined]
        self.restore_values()
        for tensor, _, _, requires_grad in self._tensors:
            tensor.requires_grad_(requires_grad)
        case.args = self._args

    def restore_values(self) -> None:
        """Put the values of tensors back."""
        for tensor, data, values, _ in self._tensors:
            data.copy_(values)
            tensor.data = data
