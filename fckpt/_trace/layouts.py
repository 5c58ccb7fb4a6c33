"""Layouts of the tensors of a call below all levels of torch.func, as far as a trace depends on them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from fckpt._call.casts import remembers_casts_of
from fckpt._call.levels import is_wrapped, layers, transforms_active, unseen, wraps_all
from fckpt._trace.operations import Layout
from fckpt._trace.stand_ins import check_dense

__all__ = ["as_differentiated", "layouts_below"]


def layouts_below(tensors: Sequence[torch.Tensor]) -> list[Layout]:
    """Returns the layouts below all levels of torch.func. A tensor that any level tracks requires grad.

    Raises:
        TraceError: a tensor is nested, so that it has no sizes.
    """
    try:
        return _layouts_below(tensors)
    except RuntimeError:  # not looked for before: a call may have a thousand tensors
        for tensor in tensors:
            check_dense(tensor)
        raise


def _layouts_below(tensors: Sequence[torch.Tensor]) -> list[Layout]:
    if not transforms_active():
        # A call may have a thousand tensors, and the constructor of a named tuple would take most of the time.
        new, strided = functools.partial(tuple.__new__, Layout), torch.strided
        return [
            new(
                (
                    t.shape,
                    t.stride() if t.layout is strided else (),
                    t.dtype,
                    t.device,
                    tracked := t.requires_grad,
                    leaf := t.is_leaf,
                    tracked and (not leaf or t._is_view()),
                    False,
                    False,
                    False,
                    t.is_conj(),
                    t.is_neg(),
                )
            )
            for t in tensors
        ]
    with unseen():
        at_level = wraps_all()
        return [_layout_below(t, at_level) for t in tensors]


def as_differentiated(layouts: list[Layout]) -> tuple[list[Layout], list[Layout] | None]:
    """Returns the layouts of operands as a call sees them: with grad mode off, nothing is differentiated.

    Also returns the layouts that the call would see with grad mode on, if these are others, otherwise None.
    """
    if torch.is_grad_enabled() or not any(layout.requires_grad for layout in layouts):
        return layouts, None
    return [layout._replace(requires_grad=False, unrecorded=layout.requires_grad) for layout in layouts], layouts


def _layout_below(tensor: torch.Tensor, at_level: bool) -> Layout:
    tracked = tensor.requires_grad
    transformed = False
    remembered = remembers_casts_of(tensor)
    for layer in layers(tensor):
        tracked = tracked or layer.requires_grad
        transformed = transformed or (layer.requires_grad and is_wrapped(layer))
        tensor = layer
    return Layout(
        tensor.shape,
        _stride(tensor),
        tensor.dtype,
        tensor.device,
        tracked,
        tensor.is_leaf and tensor.requires_grad,
        tracked and not remembered,
        transformed,
        at_level,
        conj=tensor.is_conj(),
        neg=tensor.is_neg(),
    )


def _stride(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout is torch.strided else ()
