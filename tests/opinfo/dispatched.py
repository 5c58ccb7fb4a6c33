"""What a program dispatches below autograd: operations, and how their tensors lie in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from opinfo_harness import Case
from torch.utils._python_dispatch import TorchDispatchMode

import fckpt

Call = tuple[Any, ...]
_EMPTY = ("empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted")


class Dispatched(TorchDispatchMode):
    """Counts the calls that reach kernels: those that make or write memory."""

    fckpt_looks_on = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Call] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func).replace("_efficientzerotensor", "zeros")  # which a plan gives memory, to write to
        is_new = func is torch.ops.aten.lift_fresh.default  # a tensor of Python numbers, which a plan copies
        name = name.replace("lift_fresh", "clone")
        call = (name, _form(args), _form({k: v for k, v in kwargs.items() if v is not None}))
        given = {_memory(t) for t in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        made = {_memory(t) for t in _tensors(result)}
        is_view = made <= given and not func._schema.is_mutable and not is_new
        is_view |= torch.Tag.inplace_view in func.tags
        if not is_view and func.namespace != "prim" and func.overloadpacket.__name__ not in _EMPTY:
            self.calls[call] += 1
        return result


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [t for part in parts for t in _tensors(part)]


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        strides = tuple(s for n, s in zip(value.shape, value.stride(), strict=True) if n > 1)
        return (str(value.dtype), tuple(value.shape), strides, value.is_conj(), value.is_neg())
    if isinstance(value, dict):
        return tuple(sorted((k, _form(v)) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        parts = [_form(part) for part in value]
        while parts and parts[-1] == "None":
            parts.pop()
        return tuple(parts)
    return repr(value)


def _like(end: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
    if end.layout != torch.strided:
        return cotangent
    memory = torch.empty_strided(end.shape, end.stride(), dtype=end.dtype)
    if any(stride == 0 and size > 1 for size, stride in zip(end.shape, end.stride(), strict=True)):
        return cotangent
    return memory.copy_(cotangent)


def dispatched(case: Case, program: Callable[..., Any]) -> Counter[Call]:
    """The calls of one forward and backward pass."""
    leaves = case.fresh(requires_grad=True)
    for i in case.active:
        leaves[i] = torch.ops.aten.alias(leaves[i])  # what is no leaf takes its gradient as it comes
    active = [leaves[i] for i in case.active]
    torch.manual_seed(0)
    with Dispatched() as log:
        outputs = case.call(program, leaves)
        ends = [outputs[i] for i in case.outputs]
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            # laid out as they are in the trace
            cotangents = [_like(end, ct) for end, ct in zip(ends, case.cotangents, strict=True)]
        torch.autograd.grad(ends, active, cotangents, allow_unused=True)
    return log.calls


def differences(case: Case) -> tuple[Counter[Call], Counter[Call]]:
    """What only a plan dispatches, and what only the plain program does."""
    planned = fckpt.remat(case.program, policy=fckpt.policies.everything_saveable)
    dispatched(case, planned)  # which traces
    plain, ours = dispatched(case, case.program), dispatched(case, planned)
    return ours - plain, plain - ours
