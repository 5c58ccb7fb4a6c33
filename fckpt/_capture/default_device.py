"""The default device: `with torch.device("cuda")` and `torch.set_default_device`.

It is a torch function mode, which names the device in calls of functions that make tensors. Dynamo evaluates the code
of the mode at each call. On torch 2.13 it cannot, so that under a default device nothing was captured. Here the mode is
known. Seen on torch 2.11 and 2.13: `TorchFunctionModeVariable.call_torch_function`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.source import AttrSource
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.torch_function import TorchFunctionModeVariable
from torch.utils._device import DeviceContext, _device_constructors

from fckpt._capture.patching import patched

__all__ = ["default_device_known"]


@contextlib.contextmanager
def default_device_known() -> Iterator[None]:
    """Makes Dynamo do what the mode of a default device does, within the body, without evaluating its code."""
    with patched(TorchFunctionModeVariable, "call_torch_function", _calling):
        yield


def _calling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_torch_function(this: Any, tx: Any, fn: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if type(this.value) is not DeviceContext:
            return original(this, tx, fn, types, args, kwargs)
        called = getattr(fn, "value", None)
        given = kwargs.get("device")
        is_named = given is not None and not (given.is_python_constant() and given.as_python_constant() is None)
        if not is_named and any(called is known for known in _device_constructors()):
            kwargs = {**kwargs, "device": _device(this, tx)}
        return fn.call_function(tx, list(args), dict(kwargs))

    return call_torch_function


def _device(this: Any, tx: Any) -> Any:
    device = this.value.device
    if this.source is None:
        return ConstantVariable.create(device)
    return VariableBuilder(tx, AttrSource(this.source, "device"))(device)  # with a guard
