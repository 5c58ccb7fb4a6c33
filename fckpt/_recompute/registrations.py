"""Hooks that a function registers while it is recomputed: its forward has registered them already.

A function may register hooks on its arguments, on parameters, on the nodes behind them and on modules
(`x.register_hook(...)`), and these stay after the call. If a recompute registered them once more, a gradient that has
not arrived yet would be changed twice. So a recompute removes the hooks that it has registered.

Each function of torch that registers a hook makes a `RemovableHandle`, and torch numbers these. If the forward made
none, nothing is watched in the recompute.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from fckpt._call.levels import unseen

__all__ = ["HooksRemoved", "Registrations", "dicts_of", "handles_made", "on_new_tensors"]

Accepts = Callable[[Any, Any], bool]
"""Whether a hook stays, given the tensor or module it is on (None for anything else) and the dict that holds it."""


def handles_made() -> int:
    """Returns how many hooks have been registered in this process."""
    return RemovableHandle.next_id


class Registrations:
    """Context manager that notes the hooks that this thread registers in the body."""

    __slots__ = ("_made", "_thread")

    def __init__(self) -> None:
        self._made: list[tuple[RemovableHandle, Any]] = []
        self._thread = 0

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        with _LOCK:
            if not _ACTIVE:
                _HANDLE.__init__ = _noting
            _ACTIVE.append(self)

    def __exit__(self, *error: Any) -> None:
        with _LOCK:
            _ACTIVE.remove(self)
            if not _ACTIVE:
                _HANDLE.__init__ = _ORIGINAL

    def __bool__(self) -> bool:
        """Whether any hook has been registered."""
        return bool(self._made)

    def note(self, handle: RemovableHandle, owner: Any) -> None:
        """Records a handle, if this thread has made it."""
        if threading.get_ident() == self._thread:
            self._made.append((handle, owner))

    def outside(self, accepts: Accepts) -> list[RemovableHandle]:
        """Returns the handles of the hooks that still exist and for which `accepts` is false."""
        held = [(handle, owner, handle.hooks_dict_ref()) for handle, owner in self._made]
        return [h for h, owner, hooks in held if hooks is not None and h.id in hooks and not accepts(owner, hooks)]

    def on_modules_in_backward(self) -> bool:
        """Whether a module got a hook for its backward pass, which the module has still."""
        held = [(handle, owner) for handle, owner in self._made if isinstance(owner, torch.nn.Module)]
        return any(handle.id in vars(owner)[name] for handle, owner in held for name in _OF_BACKWARD)

    def remove(self, accepts: Accepts = lambda owner, hooks: False) -> None:
        """Removes each hook for which `accepts` is false."""
        for handle in self.outside(accepts):
            handle.remove()
        self._made = []


class HooksRemoved(Registrations):
    """Context manager that removes the hooks that this thread registers in the body, when the body ends."""

    __slots__ = ()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.remove()


_OF_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
_LOCK = threading.RLock()
_ACTIVE: list[Registrations] = []
"""The bodies that run now, of all threads."""
_HANDLE: Any = RemovableHandle
_ORIGINAL = RemovableHandle.__init__


@functools.wraps(_ORIGINAL)
def _noting(handle: RemovableHandle, *args: Any, **kwargs: Any) -> None:
    _ORIGINAL(handle, *args, **kwargs)
    caller = sys._getframe(1)  # a method of the tensor or module; a function for a node, and for all modules
    for active in _ACTIVE[:]:  # another thread may leave its body meanwhile
        active.note(handle, caller.f_locals.get("self"))


def on_new_tensors(existing: Iterable[torch.Tensor]) -> Accepts:
    """Returns whether a hook is on a tensor or node that a recompute has made, and that it may differentiate.

    Args:
        existing: the tensors from outside of the recompute.
    """
    with unseen():
        tensors = list(existing)
        known = {id(t) for t in tensors}
        # Held here, so that no other dict can have their ids.
        on_nodes = {id(d): d for t in tensors if t.requires_grad for d in dicts_of(get_gradient_edge(t).node)}

    def accepts(owner: Any, hooks: Any) -> bool:
        if isinstance(owner, torch.Tensor):
            return id(owner) not in known
        on_node = owner is None and not _is_of_all_modules(hooks)
        return on_node and id(hooks) not in on_nodes

    return accepts


def dicts_of(node: Any) -> list[Any]:
    """Returns the dicts of the hooks on an autograd node, after and before it runs."""
    handles = [node.register_hook(_nothing), node.register_prehook(_nothing)]
    dicts = [handle.hooks_dict_ref() for handle in handles]
    for handle in handles:
        handle.remove()
    return dicts


def _nothing(*_: Any) -> None:
    pass


def _is_of_all_modules(hooks: Any) -> bool:
    return any(hooks is held for name, held in vars(torch.nn.modules.module).items() if name.startswith("_global_"))
