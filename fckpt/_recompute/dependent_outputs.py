"""Outputs of a planned call that other outputs are computed from, such as the hidden states beside a loss.

All outputs of a plan are outputs of one node of autograd, whose backward pass computes the gradients of the operands.
The gradient of a hidden state is a value within it. Plain autograd would pass this gradient to the hooks of the hidden
state, and store it if `retain_grad()` was called; here only the cotangent that comes from outside of the call would be.
So a backward pass that should do this is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils.hooks import unserializable_hook

from fckpt._call.levels import is_wrapped
from fckpt.errors import PlanError, region_name

__all__ = ["check_dependents", "watch"]


class _Watched(NamedTuple):
    output: int
    name: str
    """How messages refer to the function."""
    tensor: weakref.ref[torch.Tensor]
    hooks: Mapping[int, Any]
    """The hooks that are registered on the tensor, which may outlive it: the first one is that of `watch`."""
    dependents: Sequence[int]


def watch(outputs: Sequence[Any], dependents: Mapping[int, Sequence[int]], fn: Any) -> None:
    """Prepares to refuse backward passes that would not call hooks as plain autograd does.

    Args:
        outputs: the outputs of one node.
        dependents: by output, the outputs that are computed from it.
        fn: the function, for error messages.
    """
    name = region_name(fn) if dependents else ""
    for i, others in dependents.items():
        tensor = outputs[i]
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not is_wrapped(tensor):
            first = _FirstHook(i, name)
            tensor.register_hook(unserializable_hook(first))
            node: Any = tensor.grad_fn
            hooks: Any = tensor._backward_hooks
            first.hooks = weakref.ref(hooks)
            node.watched = (*getattr(node, "watched", ()), _Watched(i, name, weakref.ref(tensor), hooks, others))


class _FirstHook:
    """Runs before the user's hooks, which plain autograd would not call without a gradient."""

    def __init__(self, output: int, name: str) -> None:
        self.output, self.name = output, name
        self.hooks: Callable[[], Mapping[int, Any] | None] = lambda: None

    def __call__(self, grad: torch.Tensor | None) -> None:
        hooks = self.hooks()
        if grad is None and hooks is not None and len(hooks) > 1:
            _refuse(_HOOKED, self.output, self.name)


def check_dependents(node: Any, cotangents: Sequence[Any]) -> None:
    """Raises `PlanError` if hooks of an output should see the gradient of another output."""
    for one in getattr(node, "watched", ()):
        if any(cotangents[i] is not None for i in one.dependents):
            tensor = one.tensor()
            if tensor is not None and tensor.retains_grad:
                _refuse("retain_grad() was called on", one.output, one.name)
            if len(one.hooks) > 1:
                _refuse(_HOOKED, one.output, one.name)


_HOOKED = "a hook was registered on"


def _refuse(what: str, output: int, name: str) -> NoReturn:
    raise PlanError(
        f"{what} output {output} of {name}, from which other outputs are computed. Their gradients flow through it "
        "within the plan, where no hook sees them. Use fckpt.remat without budget and policy, which runs the function "
        "as it is; or put one plan around what comes before this output, and another one around what follows on it."
    )
