"""`remat` and its kin: where the stages meet."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import nn

from fckpt.arguments import Arguments, StaticArguments
from fckpt.conditions import BufferHabits
from fckpt.errors import ArgumentTypeError
from fckpt.segment import HooksUnavailable, run_segment
from fckpt.transform import run_nodes

P = ParamSpec("P")
R = TypeVar("R")


def remat(fn, *, static_argnums=(), static_argnames=(), name=None):
    static = StaticArguments(fn, static_argnums, static_argnames)
    static = static if static else None
    habits: BufferHabits = {}
    differentiates_inside = False

    @functools.wraps(fn)
    def wrapped(*args, **kwargs):
        nonlocal differentiates_inside
        if not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        arguments = Arguments(args, kwargs, static)
        if not differentiates_inside:
            try:
                if torch._C._are_functorch_transforms_active():
                    return run_nodes(fn, arguments, habits)
                return run_segment(fn, arguments, habits)
            except HooksUnavailable:
                differentiates_inside = True
        return run_nodes(fn, arguments, habits, discard=False)

    return wrapped
