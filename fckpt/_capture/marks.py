"""What a captured graph holds beside torch's operations: names of values, and the ends of rematerialised regions.

A capture follows no context variable, and it evaluates Python code without running it. So a region or a name inside of
the captured function becomes a call of one of the functions below, which whoever runs the graph answers.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = [
    "Marked",
    "Marks",
    "answered",
    "begin",
    "capturing",
    "end",
    "is_capturing",
    "key_of",
    "marks_answered",
    "name",
    "register",
]


class Marked(Protocol):
    """A rematerialised region, as a mark names it."""

    key: int


class Marks(Protocol):
    """Answers the marks of a graph that is running."""

    def begin(self, region: Any) -> None:
        """A rematerialised function begins."""

    def end(self, region: Any, outputs: Sequence[torch.Tensor]) -> None:
        """A rematerialised function has returned `outputs`."""

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """`checkpoint_name` names a tensor."""


class _State(threading.local):
    capturing = False
    marks: Marks | None = None


_state = _State()
_regions: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_keys = itertools.count(1)


def register(region: Any) -> int:
    """Gives a region the number by which marks name it."""
    key = next(_keys)
    _regions[key] = region
    return key


@dataclass(frozen=True)
class _Made:
    """A region that a captured function makes anew in each call."""

    policy: Any


@functools.cache
def key_of(policy: Any) -> int:
    """Returns the number by which marks name regions with this policy, which is kept."""
    region = _kept[policy] = _Made(policy)
    return register(region)


_kept: dict[Any, _Made] = {}


def is_capturing() -> bool:
    """Whether this thread is capturing a function for fckpt. Read as a constant by the capture itself."""
    return _state.capturing


@contextmanager
def capturing() -> Iterator[None]:
    """Marks the body as a capture of this thread."""
    before, _state.capturing = _state.capturing, True
    try:
        yield
    finally:
        _state.capturing = before


@contextmanager
def marks_answered(marks: Marks | None) -> Iterator[None]:
    """Has `marks` answer the marks of graphs that run in the body; without them, marks do nothing."""
    before, _state.marks = _state.marks, marks
    try:
        yield
    finally:
        _state.marks = before


def answered() -> Marks | None:
    """What answers the marks in this thread, if anything does."""
    return _state.marks


def begin(key: int) -> None:
    """Marks the beginning of a region."""
    if _state.marks is not None:
        _state.marks.begin(_regions.get(key))


def end(key: int, outputs: list[torch.Tensor]) -> None:
    """Marks the end of a region, which returned the tensors in `outputs`."""
    if _state.marks is not None:
        _state.marks.end(_regions.get(key), outputs)


def name(tensor: torch.Tensor, text: str) -> torch.Tensor:
    """Names a tensor, and returns it."""
    if _state.marks is not None:
        _state.marks.name(tensor, text)
    return tensor
