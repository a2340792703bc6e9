"""Named models to plan, train and measure: real architectures with random weights.

Their default sizes are such that activations, not parameters, take most of the memory and
that a step takes seconds on two CPU cores. Every factory takes `seed` (for the weights) and
`batch_size`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn

from scheduler.errors import InvalidOptionError, SchedulerError, UnknownModelError

Arguments = tuple[tuple[object, ...], dict[str, object]]
"""Positional and keyword arguments of one call."""


@dataclass(frozen=True)
class ModelCase:
    """A module with a batch for it and the loss on its outputs.

    Parameters
    ----------
    module : nn.Module
    args, kwargs
        A batch: the arguments of `module`.
    loss : callable, optional
        Computes the scalar loss from the module's outputs; None if the module returns it.
    make_batch : callable, optional
        Returns another batch of the same shapes from a seed.
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
        InvalidOptionError
            If the case has no `make_batch`.
        """
        if self.make_batch is None:
            raise InvalidOptionError(f'the model case "{self.name}" has only one batch: give ModelCase a make_batch')
        return self.make_batch(seed)

    def layered(self) -> LayeredCase:
        """Return the case with its model as an `nn.Sequential` of the same modules.

        If the model takes several arguments, the sequence takes them as one tuple.

        Raises
        ------
        InvalidOptionError
            If the model is not an `nn.Sequential` and has no method `layers` that returns its
            layers, the first of which takes that tuple; or if it takes keyword arguments.
        """
        if isinstance(self.module, nn.Sequential):
            return LayeredCase(self.module, self.args, self.kwargs, self.loss, self.make_batch, self.name)
        layers = getattr(self.module, "layers", None)
        if not callable(layers) or self.kwargs:
            raise InvalidOptionError(
                f'"{self.name or type(self.module).__name__}" is not a sequence of layers: plan its operations,'
                " pass an nn.Sequential, or give the module a method layers() that returns a list of modules"
            )
        module = nn.Sequential(*cast("Iterable[nn.Module]", layers())).train(self.module.training)
        make_batch = self.make_batch and self._one_argument
        return LayeredCase(module, (self.args,), loss=self.loss, make_batch=make_batch, name=self.name)

    def _one_argument(self, seed: int) -> Arguments:
        args, kwargs = self.batch(seed)
        return (args,), kwargs


@dataclass(frozen=True)
class LayeredCase(ModelCase):
    """A model case whose module is a sequence of layers; returned by `ModelCase.layered`."""

    module: nn.Sequential


_OWN = {name: f"scheduler.pytorch.models.networks:{name}" for name in ("gpt2", "resnet50", "unet", "convnet")}
_TRANSFORMERS = {
    f"hf-{name}": f"scheduler.pytorch.models.hf_networks:{name}" for name in ("gpt2", "vit", "bert", "llama", "t5")
}
"""The paths of the factories by name. They are imported on use: they need `ModelCase`, and some need transformers."""


def model_names() -> tuple[str, ...]:
    """Return the names that `make_model` knows, with the models of transformers if it is installed."""
    names = tuple(_OWN)
    if importlib.util.find_spec("transformers") is not None:
        names += tuple(_TRANSFORMERS)
    return names


def make_model(name: str, **options: object) -> ModelCase:
    """Return a named model, or the model of a factory `package.module:factory`.

    Parameters
    ----------
    name : str
        One of `model_names()`, or the path of a callable that returns a `ModelCase` or a
        tuple `(module, args)`, `(module, args, kwargs)` or `(module, args, kwargs, loss)`.
    **options
        Passed to the factory; the named models take `seed`, `batch_size` and their sizes.

    Raises
    ------
    UnknownModelError
        If there is no such model or factory.
    InvalidOptionError
        If the factory does not take the options, fails, or does not return a model.

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
            f'there is no model "{name}"{missing}: the names are {", ".join(model_names())};'
            " or pass the path of a factory, package.module:factory"
        )
    factory = _import_factory({**_OWN, **_TRANSFORMERS}.get(name, name))
    try:
        result = factory(**options)
    except TypeError as error:
        raise InvalidOptionError(f'the factory of "{name}" cannot be called with {options}: {error}') from error
    except SchedulerError:
        raise
    except Exception as error:  # it runs the user's code
        raise InvalidOptionError(
            f'the factory of "{name}" failed, called with {options}: {type(error).__name__}: {error}'
        ) from error
    return _as_case(result, name)


def _import_factory(path: str) -> Callable[..., object]:
    module_name, _, attribute = path.partition(":")
    try:
        found: object = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # an import runs the user's code
        raise UnknownModelError(f'cannot find the model factory "{path}": {type(error).__name__}: {error}') from error
    if not callable(found):
        raise UnknownModelError(f'"{path}" is not callable: give the path of a function that returns a ModelCase')
    return found


def _as_case(result: object, name: str) -> ModelCase:
    if isinstance(result, ModelCase):
        return result
    parts: tuple[Any, ...] = result if isinstance(result, tuple) else (result,)
    if not 2 <= len(parts) <= 4 or not isinstance(parts[0], nn.Module):
        raise InvalidOptionError(
            f'the factory of "{name}" must return a ModelCase or (module, args), (module, args, kwargs) or'
            f" (module, args, kwargs, loss), got {type(result).__name__}"
        )
    module, args, kwargs, loss = parts + (None,) * (4 - len(parts))
    arguments = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    return ModelCase(module, arguments, dict(kwargs or {}), loss, name=name)
