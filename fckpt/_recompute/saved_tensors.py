"""Autograd's saved tensors: hooks on them, which torch.func forbids in places, and whether a backward pass keeps them.

Private in torch 2.11 and 2.13: `torch._C._autograd`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = [
    "HooksUnavailable",
    "allow_hooks",
    "check_hooks_allowed",
    "disallow_hooks",
    "keeps_graph",
    "pop",
    "push",
    "top",
    "without_hooks",
]

_autograd = torch._C._autograd
push, pop = _autograd._push_saved_tensors_default_hooks, _autograd._pop_saved_tensors_default_hooks


class HooksUnavailable(Exception):
    """The function uses a reverse-mode transform of torch.func inside, which forbids saved-tensor hooks."""


def top() -> Any:
    """Returns the innermost hooks (pack, unpack), set by the user or by an enclosing region; None if there are none."""
    return _autograd._top_saved_tensors_default_hooks(True)


def keeps_graph() -> bool:
    """Whether the backward pass that runs now keeps the tensors that autograd saved, so that another one may follow."""
    kept: bool = _autograd._get_current_graph_task_keep_graph()
    return kept


def check_hooks_allowed() -> None:
    """Raises `HooksUnavailable` if the user has forbidden hooks."""
    if _autograd._saved_tensors_hooks_is_enabled():
        return
    message = _autograd._saved_tensors_hooks_get_disabled_error_message()
    if "torch.func" not in message:
        raise HooksUnavailable  # the user's `disable_saved_tensors_hooks`
    # torch.func disables hooks while it differentiates, and it is not doing so now: a failed torch.compile has left the
    # setting behind, for the whole process (seen up to torch 2.13).
    _autograd._saved_tensors_hooks_enable()


def allow_hooks() -> str | None:
    """Allows hooks; returns the message with which they were forbidden, or None if they were allowed."""
    if _autograd._saved_tensors_hooks_is_enabled():
        return None
    message = _autograd._saved_tensors_hooks_get_disabled_error_message()
    _autograd._saved_tensors_hooks_enable()
    return message


def disallow_hooks(message: str | None) -> None:
    """Undoes `allow_hooks`, given its result."""
    if message is not None:
        _autograd._saved_tensors_hooks_disable(message)


@contextlib.contextmanager
def without_hooks() -> Iterator[None]:
    """Runs the body without hooks, and restores them after it."""
    hooks: list[Any] = []
    while (pair := top()) is not None:
        pop()
        hooks.append(pair)
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            push(pack, unpack)
