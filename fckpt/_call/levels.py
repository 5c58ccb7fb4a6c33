"""Levels of torch.func, and autograd modes: which of them are active, and the tensors below their wrappers.

`grad`, `vjp`, `jvp` and `vmap` each push a level, and each level that tracks a tensor wraps it once. This module has
all queries about levels that the preparation of a call needs: which transforms surround the call, which tensor is below
the wrappers, and how to run code outside of all levels.

Private in torch 2.11 and 2.13: `torch._C._functorch`, `torch._functorch`, `torch._C.DisableTorchFunction`, guards of
dispatch keys.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._C._functorch import (
    TransformType,
    _add_batch_dim,
    _unwrap_batched,
    get_interpreter_stack,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    pop_dynamic_layer_stack_and_undo_to_depth,
)
from torch._functorch.pyfunctorch import coerce_cinterpreter, temporarily_clear_interpreter_stack
from torch._functorch.vmap import restore_vmap
from torch._tensor_str import _str
from torch.autograd import forward_ad

__all__ = [
    "EXCLUDE_LEGACY_VMAP",
    "add_batch_dim",
    "below_all",
    "below_autograd",
    "differentiates_once",
    "has_forward_mode",
    "innermost",
    "innermost_is_vmap",
    "is_legacy_batch",
    "is_recorded",
    "is_wrapped",
    "layers",
    "only_reverse",
    "out_of_reach",
    "restore_vmap",
    "share_idle_level",
    "transforms_active",
    "transforms_in_the_way",
    "unbatched",
    "unseen",
    "unwrapped",
    "version",
    "vmap_around_grad",
    "wraps_all",
]

# Reading an attribute of a tensor also calls the active torch function modes, among them those of an enclosing region,
# which record or reject the access. Operations of fckpt itself must not reach them.
unseen = torch._C.DisableTorchFunction

transforms_active = torch._C._are_functorch_transforms_active
"""Whether any transform of torch.func is active."""
is_wrapped = is_functorch_wrapped_tensor
"""Whether a tensor is a wrapper that a level has made."""
is_legacy_batch = is_legacy_batchedtensor
"""Whether a tensor is a batch of the legacy vmap, which `torch.autograd.grad(is_grads_batched=True)` uses."""

# The legacy vmap forbids random operations in its body, even on tensors without a batch dimension.
EXCLUDE_LEGACY_VMAP = torch._C.DispatchKeySet(torch._C._parse_dispatch_key("VmapMode"))  # type: ignore[call-overload]  # the stub lacks this constructor

_idle_level = -1
"""The forward-mode level that is open although no function uses it; -1 if there is none."""


# ---- tensors ------------------------------------------------------------------------------------


def layers(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields a tensor and then each tensor below its wrappers, level by level."""
    yield tensor
    while is_wrapped(tensor):
        tensor = get_unwrapped(tensor)
        yield tensor


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without its torch.func wrappers. The version of this tensor counts all in-place changes."""
    while is_wrapped(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def version(tensor: torch.Tensor) -> int:
    """Returns how often `tensor` was changed in place; 0 for inference tensors, for which torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


def unbatched(tensor: torch.Tensor, level: int) -> tuple[torch.Tensor, int | None]:
    """Returns the tensor that the `vmap` at `level` wraps, and its batch dimension (None if it has none)."""
    return _unwrap_batched(tensor, level)


def add_batch_dim(tensor: torch.Tensor, dim: int | None, level: int) -> torch.Tensor:
    """Returns a tensor as the `vmap` at `level` represents it, batched along `dim`. The inverse of `unbatched`."""
    return tensor if dim is None else _add_batch_dim(tensor, dim, level)


# ---- transforms ---------------------------------------------------------------------------------


def _stack() -> Sequence[Any]:
    """Returns the active levels of torch.func, outermost first."""
    return (get_interpreter_stack() or ()) if transforms_active() else ()


def differentiates_once() -> bool:
    """Whether exactly one of the active transforms is reverse-mode differentiation."""
    return [level.key() for level in _stack()].count(TransformType.Grad) == 1


def innermost() -> Any:
    """Returns torch's interpreter for the innermost transform; there must be one."""
    return coerce_cinterpreter(_stack()[-1])


def innermost_is_vmap() -> bool:
    """Whether the innermost transform is a `vmap`."""
    stack = _stack()
    return bool(stack) and stack[-1].key() == TransformType.Vmap


def vmap_around_grad() -> Any:
    """Returns the interpreter of the `vmap` if the active transforms are `vmap` of one reverse-mode transform;
    otherwise None.
    """
    stack = _stack()
    found = [level.key() for level in stack] == [TransformType.Vmap, TransformType.Grad]
    return coerce_cinterpreter(stack[0]) if found else None


def wraps_all() -> bool:
    """Whether an active transform wraps each tensor that an operation gets, as all but `vmap` do."""
    return any(level.key() != TransformType.Vmap for level in _stack())


def only_reverse() -> bool:
    """Whether all active transforms are reverse-mode transforms."""
    return not has_forward_mode() and all(level.key() == TransformType.Grad for level in _stack())


def has_forward_mode() -> bool:
    """Whether the forward mode of plain autograd is in use."""
    return forward_ad._current_level > _idle_level


def transforms_in_the_way() -> str:
    """Returns the transform that makes a plan impossible: "forward mode", or "vmap" if a `vmap` is outside of the
    differentiating transform.

    Empty if a plan can run: under reverse mode alone, under `vmap`s inside of it, and under `vmap` of `grad`.
    """
    if has_forward_mode():
        return "forward mode"
    keys = [level.key() for level in _stack()]
    if keys == [TransformType.Vmap, TransformType.Grad]:
        return ""
    while keys and keys[-1] == TransformType.Vmap:
        keys.pop()
    if all(key == TransformType.Grad for key in keys):
        return ""
    return "vmap" if TransformType.Vmap in keys else "forward mode"


def is_recorded() -> bool:
    """Whether a graph is being recorded, into which no recompute must be written.

    `torch.jit.trace` would record both runs of a region. `make_fx` drops the calls that set generator states, so it
    would trace a recompute of dropout with different random numbers.
    """
    proxy = torch._C._TorchDispatchModeKey.PROXY
    if torch._C._get_dispatch_mode(proxy) is not None or torch._C._get_tracing_state() is not None:
        return True
    return any(level.key() == TransformType.Functionalize for level in _stack())


# ---- leaving them -------------------------------------------------------------------------------


@contextlib.contextmanager
def below_all() -> Iterator[None]:
    """Runs the body as if no transform of torch.func were active. If the body fails, leaves the levels that it opened:
    a captured graph opens and closes levels by separate calls.
    """
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(*keys):  # sets the thread's keys again at its end
        try:
            with temporarily_clear_interpreter_stack():
                try:
                    yield
                except BaseException:
                    pop_dynamic_layer_stack_and_undo_to_depth(0)
                    raise
        except BaseException as error:
            _end_printing(error)
            raise


def _end_printing(error: BaseException) -> None:
    """Clears the frames in which torch was printing a tensor when the error occurred.

    Each holds a guard that sets the thread's dispatch keys when the frame dies, to those from before the printing. By
    then they may be others, and autograd would ignore all later calls of the thread (seen on torch 2.13, where Dynamo
    prints a tensor at a level of torch.func).
    """
    todo, known = [error], set[int]()
    while todo:
        found = todo.pop()
        if id(found) not in known:
            known.add(id(found))
            for frame, _ in traceback.walk_tb(found.__traceback__):
                if frame.f_code is _str.__code__:
                    frame.clear()
            todo += [e for e in (found.__cause__, found.__context__) if e is not None]


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Runs the body below autograd: no operation is recorded, cast or intercepted.

    Grad mode is on, because some kernels depend on it.
    """
    with (
        torch._C.DisableTorchFunction(),
        torch.enable_grad(),
        torch._C._DisableAutocast(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._ExcludeDispatchKeyGuard(EXCLUDE_LEGACY_VMAP),
    ):
        yield


@contextlib.contextmanager
def out_of_reach() -> Iterator[None]:
    """Runs the body outside of all transforms, autocast and torch function modes."""
    with torch._C._DisableFuncTorch(), torch._C._DisableAutocast(), torch._C.DisableTorchFunction():
        yield


@contextlib.contextmanager
def share_idle_level() -> Iterator[None]:
    """Opens one forward-mode level for all threads that run in the body; `has_forward_mode` does not count it as in
    use.
    """
    global _idle_level
    with forward_ad.dual_level():
        _idle_level = 0
        try:
            yield
        finally:
            _idle_level = -1
