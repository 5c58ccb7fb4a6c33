"""Hooks of tensors that a backward pass gives no gradient: plain autograd would not call them.

In plain autograd, a backward pass does not visit a parameter on which no differentiated output depends. A planned call
is one node with all operands behind it, so the engine visits every one, and calls its hooks with None as the gradient.
`torch.autograd.graph.register_multi_grad_hook` counts these calls, so its hooks stay, and are called with None.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fckpt._recompute.gradients_inside import state_of_grad

__all__ = ["skip_hooks"]


def skip_hooks(tensors: Iterable[torch.Tensor]) -> None:
    """Keeps the hooks of these tensors from being called without a gradient in the backward pass that runs now.

    A hook is called as usual if another part of the function gives its tensor a gradient.
    """
    for tensor in tensors:
        hooks: dict[int, Any] = tensor._backward_hooks or {}
        for key, hook in hooks.items():
            counts = getattr(hook, "__module__", "") == "torch.autograd.graph"
            if not (counts or isinstance(hook, _Skipped)):
                hooks[key] = _OfTensor(hooks, key, hook)
        hooks = tensor._post_accumulate_grad_hooks or {}
        for key, hook in hooks.items():
            if isinstance(hook, _AfterAccumulation):  # an earlier backward pass ended before it reached the tensor
                hook.before = state_of_grad(tensor)
            else:
                hooks[key] = _AfterAccumulation(hooks, key, hook, state_of_grad(tensor))


class _Skipped:
    """Takes the place of a hook until it would be called once."""

    def __init__(self, hooks: dict[int, Any], key: int, hook: Any):
        self.hooks = hooks
        self.key = key
        self.hook = hook

    def restore(self) -> None:
        if self.hooks.get(self.key) is self:  # the user may have removed it
            self.hooks[self.key] = self.hook


class _OfTensor(_Skipped):
    def __call__(self, grad: torch.Tensor | None) -> Any:
        self.restore()
        return None if grad is None else self.hook(grad)


class _AfterAccumulation(_Skipped):
    def __init__(self, hooks: dict[int, Any], key: int, hook: Any, before: tuple[int | None, int]):
        super().__init__(hooks, key, hook)
        self.before = before

    def __call__(self, tensor: torch.Tensor) -> Any:
        self.restore()
        return None if state_of_grad(tensor) == self.before else self.hook(tensor)
