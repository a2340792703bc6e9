"""Capture with TorchDynamo, for modules that cannot be traced directly."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn

from scheduler.errors import CaptureError
from scheduler.pytorch.capture.arguments import holds_objects
from scheduler.pytorch.capture.exporting.flat_step import ModuleWithLoss


class _Called(ModuleWithLoss):
    """A module that keeps the arguments of its call: TorchDynamo accepts objects as attributes, not as arguments.

    They are kept in containers, because the module that TorchDynamo returns has the same
    attributes but is another one.
    """

    def __init__(self, core: ModuleWithLoss, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        super().__init__(core.module, core.loss)
        self.args = [*args]
        self.kwargs = {**kwargs}

    def forward(self, *_: object, **__: object) -> object:
        return super().forward(*self.args, **self.kwargs)

    def with_arguments(self, captured: Callable[[], object]) -> Callable[..., object]:
        """Return a captured forward that takes the arguments again."""

        def forward(*args: object, **kwargs: object) -> object:
            before = [*self.args], {**self.kwargs}
            try:
                self._keep(args, kwargs)
                return captured()
            finally:
                self._keep(*before)

        return forward

    def _keep(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        self.args[:] = args
        self.kwargs.update(kwargs)


def capture_with_dynamo(
    core: ModuleWithLoss, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[nn.Module, list[str]]:
    """Return a module without Python control flow that does what `core` does with these arguments.

    TorchDynamo drops side effects: the last parts of the names of objects that it saw changed
    are returned too.

    Raises
    ------
    CaptureError
        If forward replaces a buffer.
    """
    import torch._dynamo
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export

    # Shapes of an earlier capture of the same code would otherwise make sizes symbolic here.
    torch._dynamo.reset()
    settings = {
        "automatic_dynamic_shapes": False,
        "assume_static_by_default": True,
        "ignore_logging_functions": {
            getattr(logging.Logger, name)
            for name in ("debug", "info", "warning", "error", "log", "warning_once", "info_once")
            if hasattr(logging.Logger, name)
        },
    }
    with torch._dynamo.config.patch(settings), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        captured: nn.Module
        if holds_objects((args, kwargs)):
            called = _Called(core, args, kwargs)
            captured = dynamo_graph_capture_for_export(called)()
            captured.forward = called.with_arguments(captured.forward)
        else:
            captured = dynamo_graph_capture_for_export(core)(*args, **kwargs)
    effects = [str(warning.message) for warning in caught if "side effects" in str(warning.message)]
    if found := next((effect for effect in effects if "_buffers" in effect), ""):
        raise CaptureError(f"a buffer is replaced in forward, which TorchDynamo drops: {found}")
    torch._dynamo.reset()
    return captured, [name for effect in effects for name in _LAST_NAME.findall(effect)]


_LAST_NAME = re.compile(r"(\w+)(?:'\])?[\"'][,\]]")
"""The last name in each source of a list such as ["L['self'].rng", "G['counts']"]."""


@contextlib.contextmanager
def muted_logging() -> Iterator[None]:
    """Keep torch from logging the errors of a first attempt, which may fail."""
    loggers = [logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "torch._dynamo")]
    before = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
