"""NumPy in a function: its numbers and functions are not captured.

Dynamo would compute them with PyTorch, as tensors: with other bits (`np.sin` of a float32), and with other dtypes of
results (a tensor of 64 bits for a `np.float64`, which PyTorch takes for a Python float). A function that uses them is
traced by running its Python code. Seen on torch 2.11 and 2.13: `config.trace_numpy`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch._dynamo import config
from torch._dynamo.variables.builder import VariableBuilder

from fckpt._capture.patching import patched

__all__ = ["numpy_refused"]


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrap(this: Any, value: Any) -> Any:
        if isinstance(value, np.generic):
            raise LookupError(f"the function reads a number of NumPy ({type(value).__name__})")
        return original(this, value)

    return wrap


@contextlib.contextmanager
def numpy_refused() -> Iterator[None]:
    """Makes Dynamo give up, within the body, at numbers and functions of NumPy."""
    with config.patch(trace_numpy=False), patched(VariableBuilder, "_wrap", _refusing):
        yield
