"""Where a tensor keeps its properties in memory, so that those of many tensors can be read at once.

The Python object of a tensor refers to an implementation in C++, with its sizes, dtype, device and
kind, and this one to what autograd knows about it. The places are the same in torch 2.13 to 2.15.
Another version may have others, so an example shows first whether the words are where they are
expected, and each tensor, whether they hold its properties.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor, nn

from scheduler.pytorch.torch_private.autograd import modes_disabled

_WORD = ctypes.sizeof(ctypes.c_uint64)

_IMPLEMENTATION = 2
"""Word of the Python object that refers to the implementation."""
_AUTOGRAD, _DIM, _SIZES, _DTYPE_AND_DEVICE, _KEYS = 3, 7, 8, 20, 21
"""Words of the implementation; the first refers to the data of autograd, which may be missing."""
_GRAD_FN, _REQUIRES_GRAD = 6, 16
"""Words of the data of autograd."""
_MOST_SIZES = 5
"""Tensors of more dimensions keep their sizes elsewhere."""


class TensorWords(NamedTuple):
    """Addresses of the words that hold the properties of a tensor.

    Attributes
    ----------
    of_object : tuple of int
        Valid while the object is alive.
    of_implementation : tuple of int
        Valid while the words of the object are as they were.
    of_autograd : tuple of int
        Valid while the words of the implementation are, too.
    """

    of_object: tuple[int, ...]
    of_implementation: tuple[int, ...]
    of_autograd: tuple[int, ...]


def tensor_words(tensor: Tensor) -> TensorWords | None:
    """Return where a tensor keeps shape, dtype, device and whether it requires a gradient; None if that is unknown."""
    return _words(tensor) if _are_as_expected() else None


def _words(tensor: Tensor) -> TensorWords | None:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    start = tensor._cdata
    if _word(id(tensor) + _WORD * _IMPLEMENTATION) != start or tensor.dim() > _MOST_SIZES:
        return None
    sizes = range(_SIZES, _SIZES + tensor.dim())
    expected = [(_DIM, tensor.dim()), (_KEYS, torch._C._dispatch_keys(tensor).raw_repr())]
    expected += zip(sizes, tensor.shape, strict=True)
    if any(_word(start + _WORD * place) != value for place, value in expected):
        return None
    autograd = _word(start + _WORD * _AUTOGRAD)
    return TensorWords(
        (id(tensor) + _WORD * _IMPLEMENTATION,),
        tuple(start + _WORD * place for place in (_AUTOGRAD, _DIM, *sizes, _DTYPE_AND_DEVICE, _KEYS)),
        (autograd + _WORD * _GRAD_FN, autograd + _WORD * _REQUIRES_GRAD) if autograd else (),
    )


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


@functools.cache
def _are_as_expected() -> bool:
    """Return whether each property of an example has its place, before any address in it is followed."""
    with modes_disabled(), torch.inference_mode(False), torch.enable_grad():
        example = torch.ones(2, 3, 5, dtype=torch.float32, device="cpu")
        words = _words(example)
        if words is None or words.of_autograd:
            return False
        properties = words.of_implementation[-2]
        before = _word(properties)
        example.data = example.double()
        if _word(properties) == before:
            return False
        example.requires_grad_(True)
        return _word(words.of_implementation[0]) != 0 and _autograd_shows(example)


def _autograd_shows(example: Tensor) -> bool:
    """Return whether the data of autograd shows that an example requires a gradient, and why."""
    words = _words(example)
    if words is None:
        return False

    def read() -> tuple[bool, bool]:
        grad_fn, requires_grad = words.of_autograd
        return _word(grad_fn) != 0, _word(requires_grad) & 0xFF != 0

    is_leaf = read()
    example.requires_grad_(False)
    is_constant = read()
    example.mul_(torch.ones_like(example, requires_grad=True))
    return (is_leaf, is_constant, read()) == ((False, True), (False, False), (True, False))
