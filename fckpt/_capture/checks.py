"""Checks on data: branches of which one side only raises an error, such as `if not valid.all(): raise ValueError(...)`.

The data decides nothing else, so a capture takes the other side, and the check becomes an operation of the graph that
raises a `RuntimeError`. Dynamo does the same with `assert`. (`torch.distributions` validates its parameters like this.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo import trace_rules
from torch._dynamo.variables import UserFunctionVariable
from torch._dynamo.variables.ctx_manager import GenericContextWrappingVariable, WithExitFunctionVariable
from torch._dynamo.variables.tensor import TensorVariable

__all__ = ["checked", "validation_captured"]

_MOST = 200
"""The most instructions that lead to the error."""
_VALIDATING = (torch.distributions.constraints.is_dependent, torch.nn.functional.gaussian_nll_loss)
_LEAVES = ("JUMP", "RETURN", "YIELD", "FOR_ITER", "SEND", "STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "STORE_DEREF")
"""Parts of the names of instructions that make a branch more than an error."""


@contextlib.contextmanager
def validation_captured() -> Iterator[None]:
    """Lets Dynamo evaluate, within the body, torch's functions that validate data in Python.

    It would give up at `is_dependent`, which the validation in `torch.distributions` calls, and it would take
    `gaussian_nll_loss` for one operation, whose branch on data would then be met without its way out.
    """
    rules = trace_rules.get_torch_obj_rule_map()
    before = {function: rules.get(function) for function in _VALIDATING}
    rules.update(dict.fromkeys(_VALIDATING, UserFunctionVariable))
    try:
        yield
    finally:
        for function, rule in before.items():
            if rule is not None:
                rules[function] = rule
            else:
                del rules[function]


def checked(tx: Any, inst: Any, variable: Any, wanted: bool, place: Callable[[Any], str]) -> bool | None:
    """Returns the outcome with which a branch raises no error, and adds the check to the graph; None if it is no check.

    Args:
        tx: Dynamo's interpreter.
        inst: the instruction that jumps if the condition is `wanted`.
        variable: the condition.
        wanted: see `inst`.
        place: describes the present place in the user's code.
    """
    value = variable.realize()
    if not isinstance(value, TensorVariable) or not inst.target or _may_be_caught(tx):
        return None
    jumping = _raises(tx, tx.indexof[inst.target], inst)
    staying = _raises(tx, tx.instruction_pointer, inst)
    if jumping == staying:
        return None
    outcome = wanted if staying else not wanted
    condition = value.as_proxy()
    if not outcome:
        condition = tx.output.create_proxy("call_function", torch.logical_not, (condition,), {})
    message = _message(tx, tx.instruction_pointer if staying else tx.indexof[inst.target])
    message = message or f"a check failed: {place(tx)}"
    tx.output.create_proxy("call_function", torch._assert_async, (condition, message), {})
    return outcome


def _raises(tx: Any, start: int, branch: Any) -> bool:
    """Whether the instructions from a position on do nothing but raise an error."""
    for inst in tx.instructions[start : start + _MOST]:
        if inst.opname == "RAISE_VARARGS":
            return bool(inst.exn_tab_entry == branch.exn_tab_entry)  # not within a `try` of its own
        if any(part in inst.opname for part in _LEAVES):
            return False
    return False


def _message(tx: Any, start: int) -> str:
    """Returns the message of an `assert`, if it is a constant."""
    first, then = tx.instructions[start : start + 2]
    return then.argval if "ASSERTION_ERROR" in first.opname and isinstance(then.argval, str) else ""


def _may_be_caught(tx: Any) -> bool:
    """Whether a `try`, or a context manager of the user, is around the instruction in any frame."""
    while tx is not None:
        exits = [variable.ctx for variable in tx.stack if isinstance(variable, WithExitFunctionVariable)]
        if _is_in_try(tx) or any(isinstance(ctx, GenericContextWrappingVariable) for ctx in exits):
            return True
        tx = getattr(tx, "parent", None)
    return False


def _is_in_try(tx: Any) -> bool:
    """Whether the current instruction is inside a `try` block. (A `with` block has a handler, too.)"""
    entry = tx.current_instruction.exn_tab_entry
    while entry is not None:
        start = tx.indexof[entry.target]
        names = [inst.opname for inst in tx.instructions[start : start + 2]]
        if "WITH_EXCEPT_START" not in names and names[0] != "COPY":  # the end of a handler, which raises it again
            return True
        entry = tx.instructions[start].exn_tab_entry
    return False
