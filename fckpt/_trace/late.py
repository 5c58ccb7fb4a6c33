"""Python code that runs in the backward pass of a traced function: hooks, and `backward` of an `autograd.Function`.

A plan runs the operations of such code, not the code. If the code writes to variables, the function is refused. What
the code reads is compared when the backward pass of a call begins: it may have changed since the forward pass.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from fckpt import _tree as tree
from fckpt._call.closure import closure_of
from fckpt._call.facts import is_library
from fckpt._call.levels import unseen
from fckpt._call.modules import facts_of
from fckpt._call.places import Slot, moved, put
from fckpt._call.snapshots import Snapshot
from fckpt._capture.reads import Reads
from fckpt._capture.sources import current
from fckpt._recompute.registrations import Registrations, dicts_of
from fckpt._trace.effects import impure_calls_refused, named_place
from fckpt._trace.lifetimes import nodes_behind
from fckpt._trace.stand_ins import WAY_OUT
from fckpt.errors import TraceError

__all__ = ["LateReads", "late_code_watched", "refuse_hook_in_c", "refuse_hooks"]


class LateReads:
    """What the user's code in the backward pass may have read."""

    def __init__(self, scopes: dict[types.CodeType, dict[str, Any]], held: list[Any]):
        """Notes the present state.

        Args:
            scopes: by code that ran: the globals of its function.
            held: what the functions got as arguments, or hold in their cells.
        """
        self._scopes, self._held = list(scopes.items()), held
        self._facts = self._now()

    def _now(self) -> tuple[Any, ...]:
        return facts_of(self._held, self._scopes)

    def check(self) -> None:
        """Raises `TraceError` if the state has changed since the trace, and so since the forward pass."""
        if self._now() != self._facts:
            raise TraceError(
                f"{_described(dict(self._scopes))} runs in the backward pass, and what it reads has changed since the "
                "forward pass. A plan runs the operations of such code, with the values that were read in the forward "
                f"pass. Read the values there, or hold them in tensors. {WAY_OUT}"
            )


class _Watch:
    """Notes the user's functions that run in the backward pass, and what they hold."""

    def __init__(self, reads: Reads):
        self._reads = reads
        self.scopes: dict[types.CodeType, dict[str, Any]] = {}
        self.held: list[Any] = []
        self.places: list[Snapshot] = []

    def note(self, frame: types.FrameType) -> None:
        """Records the call of a function."""
        self._reads.note(frame)
        module = str(frame.f_globals.get("__name__", ""))
        if frame.f_code not in self.scopes and not is_library(module) and not module.startswith("namedtuple_"):
            self.scopes[frame.f_code] = frame.f_globals
            # `.0` is the iterator of a comprehension, made by the code around it.
            held = [value for name, value in frame.f_locals.items() if name != ".0" and _may_change(value)]
            held += self._reads.registered.get(frame.f_code, ())
            self.held += held
            reached = closure_of(held, scopes=[(frame.f_code, frame.f_globals)])
            self.places += [reached.own, reached.given]

    def changes(self) -> list[Slot]:
        """Returns the places that the functions can reach and have changed, with their former values."""
        return [change for snapshot in self.places for change in snapshot.changes()]


def refuse_hooks(hooks: Registrations, existing: Sequence[torch.Tensor], result: Any) -> None:
    """Raises `TraceError` if a traced function has left a hook that would outlast the call.

    Args:
        hooks: the hooks that the function has registered.
        existing: the tensors from outside of it.
        result: the result of the function. Hooks on tensors and nodes that the function made are part of the trace.
    """
    if not hooks:
        return
    with unseen():
        known = {id(t) for t in existing}
        outside = {t.grad_fn for t in existing}
        made = [t for t in tree.leaves(result) if isinstance(t, torch.Tensor) and id(t) not in known]
        inside = {id(d): d for node in nodes_behind(made) if node not in outside for d in dicts_of(node)}

    def accepts(owner: Any, found: Any) -> bool:
        if owner is None:  # a hook on a node
            return id(found) in inside
        return isinstance(owner, torch.Tensor) and id(owner) not in known

    if hooks.outside(accepts):
        hooks.remove()
        raise TraceError(
            "the function registers a hook on a tensor from outside of it, on a node of the graph behind one, or on a "
            "module. A plan runs the operations of the function, not its Python code, so it would register nothing. "
            f"Register the hook before the call. {WAY_OUT}"
        )


def refuse_hook_in_c(hook: Any) -> None:
    """Raises `TraceError` for a hook such as `gradients.append`, which runs unseen."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    held = getattr(hook, "__self__", None)
    if isinstance(hook, types.BuiltinMethodType) and held is not None and not isinstance(held, types.ModuleType):
        raise TraceError(
            f"{current()}: the hook `{hook.__name__}` of a {type(held).__name__} would change it in the backward pass, "
            f"which a plan would not do. Register it outside of the planned function. {WAY_OUT}"
        )


def _may_change(value: Any) -> bool:
    """Whether a value is neither a tensor nor made for one backward pass."""
    if isinstance(value, (torch.Tensor, torch.autograd.function.FunctionCtx)):
        return False
    if isinstance(value, (tuple, list)):
        return not any(isinstance(item, torch.Tensor) for item in value)
    return True


@contextlib.contextmanager
def late_code_watched(reads: Reads, before: Snapshot, slots: Sequence[Slot], found: list[LateReads]) -> Iterator[None]:
    """Watches the Python code of the backward pass, which runs in the body; adds what it may have read to `found`.

    Raises:
        TraceError: the code writes to a place of `before` or `slots`, or does something else that a plan would not do.
    """
    watch = _Watch(reads)
    try:
        with impure_calls_refused(watch):
            yield
    finally:
        changes = [*before.changes(), *moved(slots), *watch.changes()]
        for change in changes:
            put(*change)
    if changes:
        names = sorted({named_place(holder, key) for holder, key, _ in changes})
        raise TraceError(
            f"{_described(watch.scopes)} assigns {', '.join(names)} in the backward pass. A plan runs the operations "
            "of such code, not the Python code, so it would assign nothing. Register a hook outside of the planned "
            f"function, on the module that is planned or on its parameters. {WAY_OUT}"
        )
    if watch.scopes:
        found.append(LateReads(watch.scopes, watch.held))


def _described(codes: Iterable[types.CodeType]) -> str:
    """Names the code, which is that of hooks, or of the `backward` of an `autograd.Function`."""
    places = [f"`{code.co_qualname}` ({code.co_filename}:{code.co_firstlineno})" for code in codes]
    return f"the hook or backward function {', '.join(places)}"
