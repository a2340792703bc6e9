"""Kernels compiled by numba, and its cache, whose failures cost time but no answer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import numba
import numpy as np
from numba.core import event
from numba.core.caching import FunctionCache

from scheduler.solvers.deadline import clock

Function = Callable[..., Any]


class _StopTheClock(event.Listener):
    """Keep compiling out of the time that a search has."""

    def on_start(self, event: object) -> None:
        clock.pause()

    def on_end(self, event: object) -> None:
        clock.resume()


_register: Any = event.register
_register("numba:compile", _StopTheClock())


def compiled(**options: bool) -> Callable[[Function], Function]:
    """Return a decorator that compiles a kernel on its first call, or takes it from numba's cache.

    A kernel is compiled again when its file has changed, or a kernel that it calls, or a
    constant that they name, in whatever file. Where no folder can be written to, each process
    compiles for itself; where the disk is full, what was compiled is used and not kept; a
    damaged file in the cache is not read.

    Parameters
    ----------
    **options : bool
        As for `numba.njit`.
    """

    njit: Any = numba.njit
    cache_of: Any = FunctionCache

    def compile_lazily(function: Function) -> Function:
        kernel = njit(**options)(function)
        with suppress(RuntimeError):  # numba's word for: no folder can be written to
            kernel._cache = _forgiving(_knowing(cache_of(function), kernel))
        return cast(Function, kernel)

    return compile_lazily


def _knowing(cache: Any, kernel: Any) -> Any:
    """Let numba's cache, which knows the kernel's own file, know all that it is compiled from."""
    key = cache._index_key
    cache._index_key = lambda *signature: (key(*signature), _fingerprint(kernel))
    return cache


def _fingerprint(kernel: Any) -> str:
    """Return a digest of a kernel and of all that it calls: code, options, and the constants that they name."""
    digest, kernels = hashlib.sha256(), [kernel]
    for part in kernels:
        function = part.py_func
        code = function.__code__
        constants = [getattr(constant, "co_code", constant) for constant in code.co_consts]
        digest.update(repr((code.co_code, constants, part.targetoptions)).encode())
        for name in code.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, (int, float, tuple, np.generic)):
                digest.update(f"{name}={value!r}".encode())
            elif hasattr(value, "py_func") and value not in kernels:
                kernels.append(value)
    return digest.hexdigest()


def _forgiving(cache: Any) -> Any:
    """Keep the errors of numba's cache from becoming those of the solver."""
    load, save = cache.load_overload, cache.save_overload

    def load_if_whole(*kernel: object) -> object:
        try:
            return load(*kernel)
        except Exception:  # whatever reading a damaged pickle raises
            return None

    def save_if_possible(*kernel: object) -> None:
        with suppress(Exception):  # reads the index, which may be damaged, and writes to a disk that may be full
            save(*kernel)

    cache.load_overload, cache.save_overload = load_if_whole, save_if_possible
    return cache
