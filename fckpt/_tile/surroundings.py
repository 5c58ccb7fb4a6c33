"""The dispatch state in which tiles are tried out: that of planned calls, below transforms, autocast and autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fckpt._call.ambient import without_modes
from fckpt._call.levels import below_autograd, out_of_reach

__all__ = ["as_planned", "faking"]


@contextlib.contextmanager
def as_planned() -> Iterator[None]:
    """Runs the body as planned calls run."""
    with out_of_reach(), without_modes(), torch.no_grad(), below_autograd():
        yield


@contextlib.contextmanager
def faking(mode: FakeTensorMode) -> Iterator[None]:
    """Runs the body as planned calls run, with tensors that have layouts but no memory."""
    with as_planned(), mode:
        yield
