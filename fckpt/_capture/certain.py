"""Comparisons of random tensors whose outcome is known in advance, so that control flow may depend on them.

Models use `torch.rand([]) < rate` to decide whether to skip a layer, with a rate that is 0 by default. Numbers drawn by
`torch.rand` lie in [0, 1), so the outcome is known for rates up to 0 and from 1 upwards. The number is still drawn, so
that the generator ends in the same state as after the plain function.

`torch.rand(1) > 0.0` (in peft, with a rate of 0.0) is false once in 16 million draws, when the number is exactly 0. It
counts as true on a CPU, with a check that raises an error otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.tensor import TensorVariable

from fckpt._capture.patching import instructions_patched

__all__ = ["certain_comparisons"]


def _outcome(op: str, bound: float) -> bool | None:
    """Returns the outcome of comparing a number from [0, 1) with `bound`; None if it depends on the number."""
    below, above = bound <= 0, bound >= 1
    return {
        "<": False if below else True if above else None,
        "<=": False if bound < 0 else True if above else None,
        ">": True if bound < 0 else False if above else None,
        ">=": True if below else False if above else None,
    }.get(op)


_ALMOST = {">": True, "<=": False}
"""Outcomes of comparisons with 0, unless the number is exactly 0."""
_ZERO = "torch.rand drew exactly 0.0 for a branch, as once in 16 million draws. A plan has the other branch: run again"


def _certain(tx: Any, tensor: Any, op: str, other: Any) -> Any:
    """Returns the outcome of a comparison as a constant of Dynamo, if it is certain, or else None."""
    number = other.value if isinstance(other, ConstantVariable) else None
    if tensor.proxy.node.target is not torch.rand or not isinstance(number, (int, float)) or isinstance(number, bool):
        return None
    example = tensor.proxy.node.meta.get("example_value")
    if example is None or any(size != 1 for size in example.shape):
        return None
    outcome = _outcome(op, number)
    rarely_zero = example.device.type == "cpu" and example.dtype in (torch.float32, torch.float64)
    if number == 0 and op in _ALMOST and rarely_zero:  # `_outcome` returned None
        outcome = _ALMOST[op]
        positive = tx.output.create_proxy("call_function", operator.gt, (tensor.as_proxy(), 0), {})
        tx.output.create_proxy("call_function", torch._assert_async, (positive, _ZERO), {})
    return None if outcome is None else ConstantVariable.create(outcome)


def _knowing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compare(tx: Any, inst: Any) -> Any:
        left, right = tx.stack[-2:]
        outcome = None
        if isinstance(left := left.realize(), TensorVariable):
            op = str(inst.argval).removeprefix("bool(").removesuffix(")")  # "bool(<)" since Python 3.13
            outcome = _certain(tx, left, op, right.realize())
        if outcome is None:  # not certain: Dynamo compares
            return original(tx, inst)
        tx.popn(2)
        tx.push(outcome)
        return None

    return compare


@contextlib.contextmanager
def certain_comparisons() -> Iterator[None]:
    """Makes Dynamo evaluate, within the body, the comparisons whose outcome is certain."""
    with instructions_patched({"COMPARE_OP": _knowing}):
        yield
