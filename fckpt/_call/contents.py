"""Samples of what tensors contain, which show most changes that autograd does not count.

Autograd counts in-place operations on a tensor. It does not see writes through `.data`, through a NumPy array with the
same memory, or by another library.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from fckpt._call.levels import is_wrapped

__all__ = ["WORD", "contents", "is_dense", "words_in"]

WORD = 8
"""The bytes of a word."""
_SMALL = 256
"""Tensors of so many bytes are compared whole."""


def contents(tensor: torch.Tensor, number: int) -> Any:
    """Returns a sample of about `number` words of a dense tensor on the CPU, for comparison; None on other devices."""
    if not tensor.is_cpu or is_wrapped(tensor):
        return None
    address = tensor.data_ptr()
    if not address:  # no elements, or all of them zero
        return tensor.shape
    return _reader(tensor.shape, tensor.stride(), tensor.element_size(), number)(address)


@functools.lru_cache(maxsize=1024)
def _reader(shape: Sequence[int], strides: Sequence[int], size: int, number: int) -> Callable[[int], Any]:
    """Returns a function that reads a sample of a tensor with this layout at an address."""
    count = prod(shape) * size
    if not is_dense(shape, strides):
        places = _places(shape, strides, size, number)
        return lambda address: [ctypes.string_at(address + place, size) for place in places]
    if count <= _SMALL:
        return lambda address: ctypes.string_at(address, count)
    return lambda address: words_in(address, count // WORD, number)


def words_in(address: int, count: int, number: int) -> tuple[int, ...]:
    """Returns about `number` of `count` words in memory. They are spread, because a value may begin with zeros."""
    step = count // number | 1  # odd, because an even step would often read the same columns of every row
    return tuple(_array(count).from_address(address)[::step])


@functools.lru_cache(maxsize=256)
def _array(count: int) -> Any:
    return ctypes.c_uint64 * count


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements of a permuted tensor fill its memory without gaps."""
    return 1 + sum([(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]) == prod(shape)


def _places(shape: Sequence[int], strides: Sequence[int], size: int, number: int) -> tuple[int, ...]:
    """Returns the places of about `number` elements in bytes, counted from the first element."""
    count, found = prod(shape), []
    for element in range(0, count, count // number | 1):
        place, rest = 0, element
        for length, stride in zip(reversed(shape), reversed(strides), strict=True):
            rest, index = divmod(rest, length)
            place += index * stride * size
        found.append(place)
    return tuple(found)
