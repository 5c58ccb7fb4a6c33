"""Answers to code that asks whether an argument overrides torch's functions, before it takes a faster path.

`nn.MultiheadAttention` and `nn.TransformerEncoderLayer` ask so before they call a fused operation, which rounds
differently. To torch, the function modes of a trace are overrides for all arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fckpt._call.modules import is_plain_type
from fckpt._trace.recorder import Recorder

__all__ = ["overrides_answered"]


@contextlib.contextmanager
def overrides_answered(recorder: Recorder) -> Iterator[None]:
    """Makes `torch.overrides.has_torch_function` disregard the modes of a trace, for tensors that `recorder` owns."""
    original = torch.overrides.has_torch_function

    def answer(relevant_args: Iterable[Any]) -> bool:
        args = tuple(relevant_args)
        traced = any(isinstance(t, torch.Tensor) and recorder.owns(t) for t in args)
        return original(args) and not (traced and not any(map(_overrides, args)))

    torch.overrides.has_torch_function = answer  # one trace at a time in the process
    try:
        yield
    finally:
        torch.overrides.has_torch_function = original


def _overrides(arg: Any) -> bool:
    return hasattr(arg, "__torch_function__") and not (isinstance(arg, torch.Tensor) and is_plain_type(type(arg)))
