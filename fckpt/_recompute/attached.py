"""Regions under torch.func: the outputs are attached to a differentiable node at every level of the transform stack.

`torch.func.grad`, `vjp`, `jvp` and `vmap` each push a level, and a tensor is wrapped once for each level that tracks
it. Saved-tensor hooks do not work at these levels. So the function runs once under all active levels, and the tensors
that autograd saves are discarded. Then its outputs are attached, level by level, to a node that saves only the inputs.
The node's backward evaluates the function's vector-Jacobian product. This is itself a function (of inputs and
cotangents) and is attached in the same way, so derivatives of every order are rematerialised.

Each level that is taken off transforms the function: `vmap` into `Batched(p)`, `jvp` into `Dual(p)`, and the backward
pass into `Pullback(p)`. These classes, and `UserCall` for the user's function, are in `primitives`.

Reference: R. Frostig, M. Johnson, D. Maclaurin, A. Paszke, A. Radul, "Decomposing reverse-mode automatic
differentiation" (2021), https://arxiv.org/abs/2105.09469, for transposition as a transform; the level structure is
functorch's.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch._C._functorch import (
    TransformType,
    _add_batch_dim,
    _unwrap_batched,
    _unwrap_for_grad,
    _wrap_for_grad,
    get_interpreter_stack,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    maybe_get_level,
    peek_interpreter_stack,
    unwrap_if_dead,
)
from torch._functorch.pyfunctorch import coerce_cinterpreter
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from fckpt._call.arguments import Arguments
from fckpt._call.casts import remembers_casts_of
from fckpt._call.conditions import BufferWrites, Conditions
from fckpt._call.levels import differentiates_once, unseen
from fckpt._call.results import Flat
from fckpt._recompute.delivery import delivered_in_order
from fckpt._recompute.dependent_outputs import check_dependents, watch
from fckpt._recompute.hooks_without_gradient import skip_hooks
from fckpt._recompute.other_uses import watch_sums
from fckpt._recompute.primitives import Batched, Dual, Primitive, Pullback, UserCall
from fckpt._recompute.stored import each_once
from fckpt.errors import ArgumentValueError, MutationError, region_name

__all__ = ["run_nodes", "run_planned"]


def run_nodes(
    fn: Callable[..., Any], arguments: Arguments, buffer_writes: BufferWrites, *, discard: bool = True
) -> Any:
    """Calls `fn` on `arguments` and attaches the outputs to recomputing nodes at all levels.

    Args:
        fn: the user's function.
        arguments: its arguments.
        buffer_writes: persists between calls, see `conditions`.
        discard: whether tensors that autograd saves in the forward can be discarded as they are saved. That is
            impossible if `fn` differentiates inside; then they are freed at the end of the forward.

    Raises:
        HooksUnavailable: `discard` was requested and is impossible; the state is as if `fn` had not been called.
        ClosureError: `fn` uses a differentiated tensor that the recompute could not replace.
        OpaqueOutputError: `fn` returned tensors inside an object that is not a pytree.
    """
    call = UserCall(fn, arguments, buffer_writes)
    outputs = call.first(discard)
    operands = call.inputs + call.closed_over
    with unseen():
        attached = attach(call, [unwrap_if_dead(x) for x in operands], outputs)
    result = call.assemble(attached, arguments.tensors)
    call.inputs = []
    arguments.release()
    return result


def run_planned(
    call: UserCall,
    flags: Sequence[bool],
    conditions: Callable[[], Conditions],
    floor: int = 0,
    dependents: Mapping[int, Sequence[int]] | None = None,
    constant: Collection[int] = (),
) -> Any:
    """Evaluates a planned call below all levels, which must be reverse-mode levels, and attaches its outputs.

    Args:
        call: the call, prepared by `UserCall.plan`.
        flags: whether each output requires grad.
        conditions: returns the conditions of the forward, after it has run.
        floor: the level of the `vmap` under which the call is evaluated; 0 to evaluate it below all levels.
        dependents: by output, the outputs that are computed from it.
        constant: the operands that get no gradient, whichever outputs are differentiated.
    """
    top = peek_interpreter_stack()
    with unseen():
        operands = [unwrap_if_dead(x) for x in (*call.inputs, *call.closed_over)]
        if constant and top is None:
            operands = [x.detach() if i in constant else x for i, x in enumerate(operands)]
        call.view_inputs(call.arguments.tensors)
        attached = _descend(call, operands, None, floor)
        call.settle(conditions())
        attached = [x if flag else x.detach() for x, flag in zip(attached, flags, strict=True)]
        watch(attached, dependents or {}, call.fn[0])
    result = call.assemble(attached, call.arguments.tensors)
    call.inputs = []
    call.arguments.release()
    return result


# -- levels ----------------------------------------------------------------------------------------------


def bind(primitive: Primitive, operands: Sequence[torch.Tensor], floor: int) -> Flat:
    """Evaluates `primitive` and attaches its outputs.

    Levels above `floor` are newer than the forward that `primitive` belongs to, so it is evaluated below them.
    """
    return _descend(primitive, operands, None, floor)


_FORWARD = sys.maxsize  # a floor above all levels: for the forward itself, no level is new


def attach(primitive: Primitive, operands: Sequence[torch.Tensor], outputs: Flat) -> Flat:
    """Returns `outputs`, which `primitive` made from `operands`, with a node behind them at every level."""
    return _descend(primitive, operands, outputs, _FORWARD)


def _descend(primitive: Primitive, operands: Sequence[torch.Tensor], outputs: Flat | None, floor: int) -> Flat:
    if outputs is None and any(is_legacy_batchedtensor(x) for x in operands):
        # `is_grads_batched` uses the legacy vmap, whose batched tensors have no separate history: recorded as it runs.
        return primitive(*operands)
    top = peek_interpreter_stack()
    if outputs is None and (top is None or top.level() <= floor):
        outputs = _evaluate(primitive, operands)
    if outputs is not None and not any(_tracked(x) for x in operands):
        return outputs
    if top is None:
        assert outputs is not None
        flags = [x is not None and x.requires_grad for x in outputs] if floor == _FORWARD else None
        return _node(primitive, operands, _map(torch.Tensor.detach, outputs), flags, 0, floor)
    interpreter = coerce_cinterpreter(top)
    descend = {
        TransformType.Grad: _descend_grad,
        TransformType.Vmap: _descend_vmap,
        TransformType.Jvp: _descend_jvp,
    }[interpreter.key()]
    return descend(interpreter, primitive, operands, outputs, floor)


def _evaluate(primitive: Primitive, operands: Sequence[torch.Tensor]) -> Flat:
    """Evaluates `primitive` under the active levels, without recording."""
    # Disabling grad mode is not enough to avoid recording, because a pullback sets grad mode itself. Detaching the
    # operands is, but drops their tangents; so under jvp the recording is made and dropped.
    if all(c.key() != TransformType.Jvp for c in get_interpreter_stack() or ()):
        with unseen():
            operands = [x.detach() for x in operands]
    with torch.no_grad():
        return primitive(*operands)


def _tracked(tensor: torch.Tensor) -> bool:
    while not tensor.requires_grad:
        if not is_functorch_wrapped_tensor(tensor):
            return False
        tensor = get_unwrapped(tensor)
    return True


def _map(fn: Callable[[torch.Tensor], Any], flat: Sequence[Any]) -> Flat:
    return [None if x is None else fn(x) for x in flat]


def _descend_grad(
    interpreter: Any, primitive: Primitive, operands: Sequence[torch.Tensor], outputs: Flat | None, floor: int
) -> Flat:
    level = interpreter.level()
    flags = None
    if outputs is not None:
        if floor == _FORWARD:
            flags = [x is not None and maybe_get_level(x) == level and x.requires_grad for x in outputs]
        outputs = _map(lambda x: _unwrap_for_grad(x, level), outputs)
    inner = [_unwrap_for_grad(x, level) for x in operands]
    with interpreter.lower():
        below = _descend(primitive, inner, outputs, floor)
    return _node(primitive, operands, _map(lambda x: _wrap_for_grad(x, level), below), flags, level, floor)


def _descend_vmap(
    interpreter: Any, primitive: Primitive, operands: Sequence[torch.Tensor], outputs: Flat | None, floor: int
) -> Flat:
    level, size, randomness = interpreter.level(), interpreter.batch_size(), interpreter.randomness()
    values, dims = _unbatch(operands, level)
    layered = None
    if level > floor:
        # The forward was not under this vmap, so it drew its random numbers once.
        randomness = "same"
        if isinstance(primitive, Pullback):
            layered = primitive.layered(dims, size, randomness)
    batched = layered or Batched(primitive, dims, size, randomness)
    out_dims: Sequence[int | None] | None = None
    if outputs is not None:
        outputs, out_dims = _unbatch(outputs, level)
    with interpreter.lower():
        below = _descend(batched, values, outputs, floor)
    if out_dims is None:
        out_dims = batched.out_dims
    return [x if d is None else _add_batch_dim(x, d, level) for x, d in zip(below, out_dims, strict=True)]


def _unbatch(flat: Sequence[Any], level: int) -> tuple[Flat, list[int | None]]:
    pairs = [(None, None) if x is None else _unwrap_batched(x, level) for x in flat]
    return [value for value, _ in pairs], [dim for _, dim in pairs]


def _descend_jvp(
    interpreter: Any, primitive: Primitive, operands: Sequence[torch.Tensor], outputs: Flat | None, floor: int
) -> Flat:
    level = interpreter.level()
    primals, tangents = _undual(operands, level)
    moving = [i for i, t in enumerate(tangents) if t is not None]
    if moving:
        primitive = Dual(primitive, len(primals), moving)
    if outputs is not None:
        values, derivatives = _undual(outputs, level)
        outputs = values + derivatives if moving else values
    with interpreter.lower():
        below = _descend(primitive, primals + [tangents[i] for i in moving], outputs, floor)
    count = len(below) // 2 if moving else len(below)
    values = _map(lambda x: _wrap_for_grad(x, level), below[:count])
    for i, tangent in enumerate(below[count:]):
        if tangent is not None:
            with unseen():
                values[i] = forward_ad.make_dual(values[i], _wrap_for_grad(tangent, level))
    return values


def _undual(flat: Sequence[Any], level: int) -> tuple[Flat, Flat]:
    primals: Flat = []
    tangents: Flat = []
    for x in flat:
        primal, tangent = x, None
        if x is not None and maybe_get_level(x) == level:
            with unseen():
                primal, tangent = forward_ad.unpack_dual(x)
        primals.append(None if primal is None else _unwrap_for_grad(primal, level))
        tangents.append(None if tangent is None else _unwrap_for_grad(tangent, level))
    return primals, tangents


# -- the node --------------------------------------------------------------------------------------------


def _node(
    primitive: Primitive,
    operands: Sequence[torch.Tensor],
    outputs: Flat,
    flags: list[bool] | None,
    level: int,
    floor: int,
) -> Flat:
    if not torch.is_grad_enabled():
        return outputs
    if level:
        # A tensor of another level is a constant at this level, even if a lower level tracks it.
        operands = [x if maybe_get_level(x) == level else _wrap_for_grad(x, level) for x in operands]
    if not any(x.requires_grad for x in operands):
        return outputs
    given = operands
    if not level and isinstance(primitive, UserCall):
        given = delivered_in_order(operands, primitive.delivered)
    try:
        with enable_single_level_autograd_function():
            return list(_Recompute.apply(primitive, level, floor, outputs, flags, list(operands), *given))
    except RuntimeError as error:
        if "Inference tensors cannot be saved" not in str(error):
            raise
        raise ArgumentValueError(
            "an argument or a captured tensor was made in inference mode, so autograd cannot keep it for the backward "
            "pass. Make it under torch.no_grad(), or pass its clone."
        ) from error


class _Recompute(_SingleLevelFunction):
    """Autograd node that saves its operands, and whose backward evaluates the pullback of its primitive.

    The gradients go to the tensors `given`, which are the operands or aliases of them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        primitive: Primitive,
        level: int,
        floor: int,
        outputs: Flat,
        flags: list[bool] | None,
        operands: list[torch.Tensor],
        *given: torch.Tensor,
    ) -> tuple[Any, ...]:
        ctx.primitive = primitive
        ctx.level = level
        ctx.floor = floor
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands)
        if flags is not None:
            ctx.mark_non_differentiable(
                *(x for x, flag in zip(outputs, flags, strict=True) if x is not None and not flag)
            )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        saved = _saved_tensors(ctx)
        needs = ctx.needs_input_grad[6:]
        given = [i for i, ct in enumerate(cotangents) if ct is not None]
        check_dependents(ctx, cotangents)
        grads: Flat = [None] * len(saved)
        if given:
            level = ctx.level
            alive = level == 0 or any(maybe_get_level(x) == level for x in saved)
            pullback = Pullback(
                ctx.primitive,
                given,
                needs,
                plain=level == 0,
                wrapped=alive and level > 0,
                create_graph=torch.is_grad_enabled(),
                computed=[x.requires_grad and not remembers_casts_of(x) for x in saved],
                receivers=() if level else saved,
            )
            operands = [unwrap_if_dead(x) for x in (*saved, *(ct for ct in cotangents if ct is not None))]
            found = iter(bind(pullback, operands, min(ctx.floor, level if alive else level - 1)))
            grads = [next(found) if need else None for need in needs]
        planned = ctx.primitive.planned if isinstance(ctx.primitive, UserCall) else None
        if ctx.level and planned is not None and differentiates_once():
            watch_sums(saved, grads, planned)
        if not ctx.level:
            if planned is not None and not torch.is_grad_enabled():
                grads = each_once(grads) if planned.as_computed else grads
                watch_sums(saved, grads, planned)
            skip_hooks(x for x, need, grad in zip(saved, needs, grads, strict=True) if need and grad is None)
        return (None, None, None, None, None, None, *grads)


def _saved_tensors(ctx: Any) -> tuple[torch.Tensor, ...]:
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        found = re.search(r"\[(\S+ \[[\d, ]*\])[^[]*version (\d+); expected version (\d+)", str(error))
        which = f" ({found[1]}, version {found[3]} -> {found[2]})" if found else ""
        raise MutationError(
            f"an argument or a captured tensor{which} of {region_name(_user_function(ctx.primitive))} was changed in "
            "place between forward and backward: the recompute would see other values. Run backward before changing "
            "it, or change a copy."
        ) from error


def _user_function(primitive: Any) -> Any:
    """Returns the user's function at the bottom of a primitive."""
    while not isinstance(primitive, UserCall):
        primitive = primitive.primitive
    return primitive.fn[0]
