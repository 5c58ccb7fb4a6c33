"""Sizes (such as that of `x[mask]`) and numbers that a compiled function reads from the data of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fckpt._compile.joint import source_of

__all__ = ["reads_numbers", "sized_by_data"]


def sized_by_data(module: fx.GraphModule) -> str:
    """Returns the name and the place of the first result whose size depends on data, or an empty string."""
    for node in module.graph.nodes:
        if node.op.startswith("call") and _is_unknown(node.meta.get("example_value")):
            place = source_of(node)
            return f"{node.name!r}" + (f" in {place}" if place else "")
    return ""


def reads_numbers(module: fx.GraphModule) -> bool:
    """Whether the function computes with numbers or sizes that it reads from tensors while it runs.

    A Python float among the arguments is such a number too, once it has changed: Dynamo passes it as a tensor.
    """
    numbers = (torch.SymInt, torch.SymFloat, torch.SymBool)
    read = [n for n in module.graph.nodes if n.op == "call_method" and n.target in ("item", "tolist")]
    return bool(sized_by_data(module)) or any(isinstance(n.meta.get("example_value"), numbers) for n in read)


def _is_unknown(value: Any) -> bool:
    """Whether a size of a tensor is not known before the function runs."""
    sizes = value.shape if isinstance(value, torch.Tensor) and value.layout is torch.strided else ()
    return any(isinstance(size, torch.SymInt) and not size.node.has_hint() for size in sizes)
