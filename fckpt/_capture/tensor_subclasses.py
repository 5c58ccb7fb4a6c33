"""Tensor subclasses that define what torch's functions do with them, by `__torch_function__`.

Dynamo evaluates that method without calling it for the operations inside of it, and returns a tensor of another class
than Python does. A function that makes such a tensor (`as_subclass`) is not captured. Seen on torch 2.13.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.variables.tensor import TensorVariable

from fckpt._capture.patching import patched

__all__ = ["tensor_subclasses_refused"]


@contextlib.contextmanager
def tensor_subclasses_refused() -> Iterator[None]:
    """Ends a capture by Dynamo, within the body, where a tensor becomes one of such a class."""

    def checked(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def as_subclass(this: Any, tx: Any, cls: Any) -> Any:
            kind = cls.as_python_constant()
            if kind.__torch_function__.__func__ is not torch.Tensor.__torch_function__.__func__:
                raise LookupError(f"the class {kind.__qualname__} defines __torch_function__")
            return original(this, tx, cls)

        return as_subclass

    with patched(TensorVariable, "method_as_subclass", checked):
        yield
