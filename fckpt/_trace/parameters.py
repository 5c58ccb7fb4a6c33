"""Parameters that a traced function makes: `nn.Parameter(...)`, a new module, a copy of a module.

torch makes a parameter without dispatching an operation, so that a recorder cannot follow it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fckpt._trace.recorder import Recorder
from fckpt._trace.stand_ins import seems

__all__ = ["parameters_made"]


@contextlib.contextmanager
def parameters_made(recorder: Recorder) -> Iterator[None]:
    """Lets the body, one trace at a time in the process, make parameters of the tensors that `recorder` owns."""
    owner: Any = nn.Parameter
    method = vars(owner)["__new__"]

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        data = torch.empty(0) if data is None else data
        if not isinstance(data, torch.Tensor) or not recorder.owns(data):  # also what other threads make
            return method.__func__(cls, data, requires_grad)
        parameter = data.detach().requires_grad_(requires_grad)
        parameter._is_param = True  # for `isinstance`, where the type has to stay
        seems(parameter, cls)
        return parameter

    owner.__new__ = staticmethod(new)
    try:
        yield
    finally:
        owner.__new__ = method
