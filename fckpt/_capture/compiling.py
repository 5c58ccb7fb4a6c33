"""What Dynamo evaluates in the place of regions and names, while fckpt captures the function around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fckpt._capture import marks

__all__ = ["is_capturing", "key_of", "marked_region", "named"]


@torch.compiler.assume_constant_result
def is_capturing() -> bool:
    """Whether fckpt captures, and not a `torch.compile` of the user's."""
    return marks.is_capturing()


@torch.compiler.assume_constant_result
def key_of(policy: Any) -> int:
    """The number by which marks name regions with a policy that are made within a captured function."""
    return marks.key_of(policy)


def marked_region(key: int, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a region's function: its calls become the enclosing function's, between two marks."""
    marks.begin(key)
    result = fn(*args, **kwargs)
    marks.end(key, [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)])
    return result


def named(tree: Any, name: str) -> Any:
    """Names the tensors in `tree`, if fckpt captures."""
    if is_capturing():
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                marks.name(leaf, name)
    return tree
