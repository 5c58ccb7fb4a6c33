"""Operations run once on zeros, for the layouts of their results, where torch's fake tensors do not tell them."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fckpt._call.levels import out_of_reach
from fckpt._call.rng import RandomState
from fckpt._trace.operations import is_random
from fckpt._trace.stand_ins import set_lazy

__all__ = ["hinted", "run_on_zeros"]


def hinted(value: Any) -> Any:
    """Returns a value; in place of a symbolic size, its value in the call that is traced."""
    return value.node.hint if isinstance(value, torch.SymInt) else value


def run_on_zeros(func: Any, args: Any, kwargs: dict[str, Any], device: torch.device | None = None) -> Any:
    """Returns the results of an operation on zeros that have the layouts of its fake operands.

    Args:
        func: the operation.
        args: its arguments.
        kwargs: its keyword arguments. Generators are left out. Symbolic sizes have their values in the traced call.
        device: where to run; by default, on the devices of the operands.

    No mode and no transform sees the operation, and it draws nothing. Whatever the kernel raises is raised.
    """
    devices: set[torch.device] = set()

    def zeros(fake: torch.Tensor) -> torch.Tensor:
        devices.add(fake.device if device is None else device)
        shape, stride = tuple(map(hinted, fake.shape)), tuple(map(hinted, fake.stride()))
        made = torch.empty_strided(shape, stride, dtype=fake.dtype, device=device or fake.device).zero_()
        set_lazy(made, conj=fake.is_conj(), neg=fake.is_neg())
        return made

    def sent(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return zeros(value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(sent, value))
        if isinstance(value, torch.Generator):
            return None
        return device if device is not None and isinstance(value, torch.device) else hinted(value)

    with out_of_reach(), _disable_current_modes(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given, named = sent(tuple(args)), {k: sent(v) for k, v in kwargs.items()}
        before = RandomState.capture(devices) if is_random(func) else None
        try:
            return func(*given, **named)
        finally:
            if before is not None:
                before.drawn().rewind()
