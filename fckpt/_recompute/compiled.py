"""The functions that Dynamo traces instead of a rematerialised region. Imported only under `torch.compile`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import get_dynamic_layer_stack_depth
from torch.utils.checkpoint import checkpoint

from fckpt._capture import compiling

__all__ = ["call"]


def call(region: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a region while Dynamo traces.

    The partitioner would undo a recompute that is written into the graph, and with dropout the recompute would be
    wrong. So the region becomes torch's checkpoint operator, which tells the compiler what to recompute. That operator
    does not support torch.func; under it the graph is broken and the region runs eagerly (an error with
    fullgraph=True).

    If fckpt itself is capturing an enclosing function, the region's operations become part of its graph, between two
    marks.
    """
    if compiling.is_capturing():
        return compiling.marked_region(region.key, fn, args, kwargs)
    if _under_torch_func():
        return _eagerly(region, fn, args, kwargs)  # type: ignore[call-arg]  # torch types the decorator wrongly
    return checkpoint(functools.partial(fn, **kwargs), *args, use_reentrant=False)


def made(fn: Callable[..., Any], policy: Any, remat: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the region of `fn`, for a call of `remat` itself while Dynamo traces."""

    def rematerialised(*args: Any, **kwargs: Any) -> Any:
        if compiling.is_capturing():
            return compiling.marked_region(compiling.key_of(policy), fn, args, kwargs)
        if _under_torch_func():
            return _made_eagerly(remat, fn, args, kwargs)  # type: ignore[call-arg]
        return checkpoint(functools.partial(fn, **kwargs), *args, use_reentrant=False)

    return rematerialised


@torch.compiler.assume_constant_result  # torch 2.11 cannot trace the query
def _under_torch_func() -> bool:
    return get_dynamic_layer_stack_depth() > 0


@torch.compiler.disable
def _eagerly(region: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return region(fn, args, kwargs)


@torch.compiler.disable
def _made_eagerly(
    remat: Callable[..., Any], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return remat(fn)(*args, **kwargs)
