"""The functions that Dynamo traces instead of a rematerialised region. Imported only under `torch.compile`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import get_dynamic_layer_stack_depth
from torch.utils.checkpoint import checkpoint

from fckpt._capture import compiling

__all__ = ["call", "called_eagerly"]


OPTIONS = ("budget", "policy", "solver")
"""The options of the backend "fckpt" for a region, in the order of `region.compiled_options`."""
REASON = (
    "a budget or a policy of fckpt.remat applies to a region inside of the compiled function. The region is compiled "
    "by itself, so the graph breaks. With fullgraph=True, put the budget on the whole: "
    'torch.compile(fn, backend="fckpt", options={"budget": ...}).'
)


def call(region: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a region while Dynamo traces.

    The partitioner would undo a recompute that is written into the graph, and with dropout the recompute would be
    wrong. So a region without a plan becomes torch's checkpoint operator, which tells the compiler what to recompute. A
    region with a budget or a policy breaks the graph. It is then compiled by itself, with the backend "fckpt" and the
    options, mode and `dynamic` of the compiler around it; for other compilers than Inductor, it runs as it does without
    a compiler. So do regions under torch.func, which the checkpoint operator does not support, and regions without a
    plan for compilers that do not differentiate the graph before it runs ("eager", for example): there, the operator
    draws other random numbers in the recompute (seen on torch 2.13).

    If fckpt itself is capturing an enclosing function, the region's operations become part of its graph, between two
    marks.
    """
    if compiling.is_capturing():
        return compiling.marked_region(region.key, fn, args, kwargs)
    if _under_torch_func():
        return _eagerly(region, fn, args, kwargs)  # type: ignore[call-arg]  # torch types the decorator wrongly
    if region.is_planned:
        if region.compiled_options is not None and compiling.compiler_name() in ("inductor", "fckpt"):
            return _separately(region, compiling.key_of_settings(), fn, args, kwargs)
        return _planned_eagerly(region, fn, args, kwargs)
    if not compiling.differentiates():
        return _eagerly(region, fn, args, kwargs)  # type: ignore[call-arg]  # as above
    return checkpoint(functools.partial(fn, **kwargs), *args, use_reentrant=False)


def made(
    fn: Callable[..., Any], policy: Any, remat: Callable[..., Any], planned: Callable[..., Any] | None
) -> Callable[..., Any]:
    """Returns the region of `fn`, for a call of `remat` itself while Dynamo traces.

    Args:
        fn: the function.
        policy: the policy for marks in an enclosing graph.
        remat: the function `remat`.
        planned: `remat` with its options, if they are for a plan.
    """

    def rematerialised(*args: Any, **kwargs: Any) -> Any:
        if compiling.is_capturing():
            return compiling.marked_region(compiling.key_of(policy), fn, args, kwargs)
        if _under_torch_func():
            return _made_eagerly(remat, fn, args, kwargs)  # type: ignore[call-arg]  # as above
        if planned is not None:
            return _made_planned(planned, fn, args, kwargs)
        if not compiling.differentiates():
            return _made_eagerly(remat, fn, args, kwargs)  # type: ignore[call-arg]  # as above
        return checkpoint(functools.partial(fn, **kwargs), *args, use_reentrant=False)

    return rematerialised


@torch.compiler.disable(reason=REASON)
def _separately(region: Any, key: int, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the region compiled by itself.

    Args:
        region: the region.
        key: the key of the settings of the compiler around it, which hold for the region too.
        fn: its function.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    known = _compiled.get(region)
    if known is None or known[0] != fn:
        known = _compiled[region] = fn, {}
    if key not in known[1]:
        around = compiling.settings_at(key)
        own = {k: v for k, v in zip(OPTIONS, region.compiled_options, strict=True) if v is not None}
        chosen = {k: v for k, v in around.options.items() if k not in OPTIONS}
        mode = {} if around.mode is None else {"mode": around.mode}
        known[1][key] = torch.compile(fn, backend="fckpt", dynamic=around.dynamic, options={**mode, **chosen, **own})
    return known[1][key](*args, **kwargs)


_compiled: weakref.WeakKeyDictionary[Any, tuple[Any, dict[int, Callable[..., Any]]]] = weakref.WeakKeyDictionary()
"""By region: its function, and the compiled functions by the key of the settings."""


@torch.compiler.disable(reason=REASON)
def _planned_eagerly(region: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return region(fn, args, kwargs)


@torch.compiler.disable(reason=REASON)
def _made_planned(
    planned: Callable[..., Any], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return planned(fn)(*args, **kwargs)


@torch.compiler.assume_constant_result  # torch 2.11 cannot trace the query
def _under_torch_func() -> bool:
    return get_dynamic_layer_stack_depth() > 0


@torch.compiler.disable(reason="a training step of fckpt.step runs by its plan")
def called_eagerly(fn: Callable[..., Any], *args: Any) -> Any:
    """Calls a function as it runs without a compiler, where Dynamo traces the caller."""
    return fn(*args)


@torch.compiler.disable
def _eagerly(region: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return region(fn, args, kwargs)


@torch.compiler.disable
def _made_eagerly(
    remat: Callable[..., Any], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return remat(fn)(*args, **kwargs)
