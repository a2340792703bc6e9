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
from scheduler.pytorch.torch_private.dynamo import LOGGERS, capture, forget_compiled
from scheduler.pytorch.torch_private.modules import BUFFERS


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
    logs: set[object] = {
        getattr(logging.Logger, name)
        for name in ("debug", "info", "warning", "error", "log", "warning_once", "info_once")
        if hasattr(logging.Logger, name)
    }
    forget_compiled()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if holds_objects((args, kwargs)):
            called = _Called(core, args, kwargs)
            captured = capture(called, (), {}, ignored_functions=logs)
            captured.forward = called.with_arguments(captured.forward)
        else:
            captured = capture(core, args, kwargs, ignored_functions=logs)
    effects = [str(warning.message) for warning in caught if "side effects" in str(warning.message)]
    if found := next((effect for effect in effects if BUFFERS in effect), ""):
        raise CaptureError(f"a buffer is replaced in forward, which TorchDynamo drops: {found}")
    forget_compiled()
    return captured, [name for effect in effects for name in _LAST_NAME.findall(effect)]


_LAST_NAME = re.compile(r"(\w+)(?:'\])?[\"'][,\]]")
"""The last name in each source of a list such as ["L['self'].rng", "G['counts']"]."""


@contextlib.contextmanager
def muted_logging() -> Iterator[None]:
    """Keep torch from logging the errors of a first attempt, which may fail."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
