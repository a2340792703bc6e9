"""Compile kernels with numba and cache them; a fault of the cache costs time but never an answer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import numba
import numpy as np
from numba.core import event
from numba.core.caching import FunctionCache
from numba.core.types import BaseNamedTuple

from scheduler.solvers.deadline import clock

Function = Callable[..., Any]


class _PauseClock(event.Listener):
    """Pause the clock of all searches while numba compiles."""

    def on_start(self, event: object) -> None:
        clock.pause()

    def on_end(self, event: object) -> None:
        clock.resume()


_register: Any = event.register
_register("numba:compile", _PauseClock())


def compiled(*, inner: bool = False, **options: bool) -> Callable[[Function], Function]:
    """Return a decorator that compiles a kernel on its first call, or takes it from numba's cache.

    A kernel is compiled again if its file has changed, or a kernel that it calls in any file, or
    a constant or a named tuple that they name or take. If no folder can be written to, each
    process compiles for itself; if the disk is full, compiled code is used and not kept; a
    damaged file in the cache is ignored. With a version of numba whose cache differs from the
    tested ones (see pyproject.toml), kernels are compiled in each process.

    Parameters
    ----------
    inner : bool
        Only kernels call this one. Without the wrapper for calls from Python it compiles in half
        the time; such a call would end the process.
    **options : bool
        As for `numba.njit`.
    """
    if inner:
        options |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

    njit: Any = numba.njit
    cache_of: Any = FunctionCache

    def compile_lazily(function: Function) -> Function:
        kernel = njit(**options)(function)
        # RuntimeError: no folder can be written to. AttributeError: numba's private names have changed.
        with suppress(RuntimeError, AttributeError):
            cache = _fault_tolerant(_keyed_by_content(cache_of(function), kernel))
            if hasattr(kernel, "_cache"):
                kernel._cache = cache
        return cast(Function, kernel)

    return compile_lazily


def _keyed_by_content(cache: Any, kernel: Any) -> Any:
    """Make numba's cache, which checks the kernel's own file, check everything that it is compiled from."""
    key = cache._index_key
    cache._index_key = lambda signature, codegen: (key(signature, codegen), _layout(signature), _fingerprint(kernel))
    return cache


def _layout(types: Any) -> str:
    """Return the names of the fields of all named tuples among some argument types, inner ones included."""
    named: list[Any] = [kind for kind in types if isinstance(kind, BaseNamedTuple)]
    return repr([(kind.fields, _layout(kind)) for kind in named])


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
            elif hasattr(value, "_fields"):
                digest.update(f"{name}={value._fields}".encode())
            elif hasattr(value, "py_func") and value not in kernels:
                kernels.append(value)
    return digest.hexdigest()


def _fault_tolerant(cache: Any) -> Any:
    """Keep the errors of numba's cache from becoming errors of the solver."""
    load, save = cache.load_overload, cache.save_overload

    def load_if_whole(*kernel: object) -> object:
        try:
            with clock.paused():
                return load(*kernel)
        except Exception:  # any that reading a damaged pickle raises
            return None

    def save_if_possible(*kernel: object) -> None:
        with suppress(Exception):  # reads the index, which may be damaged, and writes to a disk that may be full
            save(*kernel)

    cache.load_overload, cache.save_overload = load_if_whole, save_if_possible
    return cache


inner_kernel = compiled(inner=True, _nrt=False)
"""For kernels that only kernels call and that create no array: reference counts, which took five sixths of the time
of annealing, are disabled."""
inlined_kernel = compiled(inner=True, _nrt=False, forceinline=True)
"""For small ones of those: a call copies all named tuples of arrays among the arguments, which takes longer than they
do."""
