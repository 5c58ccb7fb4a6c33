"""NumPy in a function: its numbers are constants with a guard, and its functions are not captured.

Dynamo would compute them with PyTorch, as tensors: with other bits (`np.sin` of a float32), and with other dtypes of
results (a tensor of 64 bits for a `np.float64`, which PyTorch takes for a Python float). A function that calls NumPy is
traced by running its Python code. Seen on torch 2.11 and 2.13: `config.trace_numpy`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch._dynamo import config
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.builder import VariableBuilder

from fckpt._capture.patching import patched

__all__ = ["numpy_not_computed"]

_LIKE_PYTHONS: tuple[type, ...] = (np.float64, np.int64)
"""Types of numbers whose arithmetic is that of Python's numbers, to which PyTorch converts them."""
_GUARDED: tuple[type, ...] = (np.integer, np.float16, np.float32, np.float64)
"""Types of numbers that Dynamo's guards compare. (And np.bool_ is no bool: PyTorch takes it for a float.)"""


def _as_constants(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrap(this: Any, value: Any) -> Any:
        if not isinstance(value, np.generic):
            return original(this, value)
        if not isinstance(value, _GUARDED):
            raise LookupError(f"a {type(value).__name__} of NumPy has no guard")
        this.install_guards(GuardBuilder.EQUALS_MATCH)
        # With its source: Dynamo shares constants without one between captures, and would give the shared one a source.
        if isinstance(value, _LIKE_PYTHONS):
            return ConstantVariable.create(value.item(), source=this.source)
        found: Any = ConstantVariable.create(0, source=this.source)
        found.value = value
        found.as_proxy = value.item  # PyTorch converts the number in the same way
        return found

    return wrap


@contextlib.contextmanager
def numpy_not_computed() -> Iterator[None]:
    """Makes Dynamo take numbers of NumPy for constants, within the body, and give up at its functions."""
    with config.patch(trace_numpy=False), patched(VariableBuilder, "_wrap", _as_constants):
        yield
