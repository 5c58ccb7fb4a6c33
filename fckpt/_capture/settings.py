"""Settings of torch for the whole program: a function that changes them is not captured.

Dynamo records such a change as an operation of the graph. A plan would not do it at its place between the others, or
not at all. Grad mode, which Dynamo notes at each operation, may be changed and set back. Seen on torch 2.11 and 2.13.
"""

from __future__ import annotations

import types

import torch
from torch import fx

__all__ = ["changed_setting"]

_SETTERS = ("use_deterministic_algorithms", "set_deterministic_debug_mode")


def changed_setting(graph: fx.GraphModule, enabled: bool) -> str:
    """Returns the name of the function by which a captured graph changes a setting; empty if there is none.

    Args:
        graph: the graph.
        enabled: whether grad mode was on before the call.
    """
    now = enabled
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is torch._C._set_grad_enabled:
            now = bool(node.args[0])
        elif isinstance(node.target, (types.FunctionType, types.BuiltinFunctionType)):
            name = node.target.__name__
            if name in _SETTERS or (name.startswith(("set_", "_set_")) and _is_of_torch(node.target)):
                return name
    return "" if now == enabled else "set_grad_enabled"


def _is_of_torch(target: types.FunctionType | types.BuiltinFunctionType) -> bool:
    return any(getattr(owner, target.__name__, None) is target for owner in (torch, torch._C))
