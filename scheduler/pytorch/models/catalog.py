"""Named models to plan, train and measure: real architectures with random weights.

Sizes are chosen so that activations, not parameters, take most of the memory and one step
takes seconds on two CPU cores. Every factory takes `seed` (weights) and `batch_size`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import Tensor, nn

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

    @property
    def sequential(self) -> nn.Sequential:
        """The module of a case made by `layered`."""
        return cast("nn.Sequential", self.module)

    def _one_argument(self, seed: int) -> Arguments:
        args, kwargs = self.batch(seed)
        return (args,), kwargs


_OWN = {name: f"scheduler.pytorch.models.networks:{name}" for name in ("gpt2", "resnet50", "unet", "convnet")}
_TRANSFORMERS = {
    f"hf-{name}": f"scheduler.pytorch.models.hf_networks:{name}" for name in ("gpt2", "vit", "bert", "llama", "t5")
}
"""Paths of the factories by name: imported when asked for, as they need `ModelCase`, and some transformers."""


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
    if ":" not in name and name not in model_names():
        extra = ' (transformers is not installed: pip install "checkpoint-scheduler[models]")'
        missing = extra if name in _TRANSFORMERS else ""
        raise UnknownModelError(
            f'no model is called "{name}"{missing}: the names are {", ".join(model_names())};'
            " or write package.module:factory"
        )
    factory = _import_factory({**_OWN, **_TRANSFORMERS}.get(name, name))
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
