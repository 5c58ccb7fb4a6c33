"""Derivative formulas that depend on how autograd runs: a trace uses the formulas of a plain run.

Autograd has two formulas for a few operations. The formula of a plain run reads the data of a tensor, to save work. For
tensor subclasses and below dispatch modes, and so in a trace, autograd uses a formula that reads no data and rounds
differently. Here hooks on the autograd nodes of a trace replace the results of that formula by the results of the plain
formula, which becomes an operation of the trace.

Under the transforms of torch.func, a plain run uses the formulas of subclasses too, so nothing is replaced. Other
formulas depend on grad mode: they are differentiable if autograd records the backward pass, as it does under torch.func
and with `create_graph=True`.

Seen on torch 2.11 and 2.13: `at::areAnyTensorSubclassLike` and `at::GradMode::is_enabled` in derivative formulas; the
names of autograd nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fckpt._capture.sources import current
from fckpt._trace.operations import DECLARED_PURE
from fckpt.errors import TraceError

__all__ = ["FormulaError", "choose", "depends_on_wrapping", "operation"]

Gradients = tuple[torch.Tensor | None, ...]

_library = torch.library.Library("fckpt_formulas", "DEF")
"""The operations are registered while this object lives."""


def operation(schema: str, shape: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Registers a function as an operation. `shape` returns empty tensors like the results, for fake tensors."""

    def register(compute: Callable[..., Any]) -> Any:
        name = schema.partition("(")[0]
        _library.define(schema)
        _library.impl(name, compute, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fckpt_formulas::{name}", shape, lib=_library)
        packet = getattr(torch.ops.fckpt_formulas, name)
        DECLARED_PURE.add(str(packet))
        return packet

    return register


# -- masked_fill by a tensor ------------------------------------------------------------------------


@operation("masked_sum(Tensor x, Tensor mask) -> Tensor", lambda x, mask: x.new_empty(()))
def _masked_sum(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.masked_select(mask).sum()


def _masked_sum_inputs(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.shape = inputs[0].shape


def _masked_sum_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    (mask,) = ctx.saved_tensors
    return torch.where(mask.expand(ctx.shape), grad, 0), None


torch.library.register_autograd(
    "fckpt_formulas::masked_sum", _masked_sum_backward, setup_context=_masked_sum_inputs, lib=_library
)


def _of_masked_fill(node: Any, found: Gradients, given: Gradients, last: bool) -> Gradients | None:
    if found[1] is None or given[0] is None:
        return None
    return found[0], _masked_sum(given[0], node._saved_mask)


# -- max, min and median of all elements ------------------------------------------------------------


def _of_extreme(node: Any, found: Gradients, given: Gradients, last: bool) -> Gradients | None:
    """Distributes the gradient among the elements that equal the result; a product with a mask may give NaN."""
    (grad,) = given
    if grad is None:
        return None
    x, result = node._saved_self, node._saved_result
    mask = x.isnan().logical_and_(result.isnan()).logical_or_(x == result)
    return (grad.new_zeros(x.shape, dtype=x.dtype).masked_fill_(mask, grad / mask.sum()),)


# -- prod -------------------------------------------------------------------------------------------


def _quotients(grad: torch.Tensor, x: torch.Tensor, result: torch.Tensor, *_: Any) -> torch.Tensor:
    return grad * (result / x).conj()


def _of_the_others(grad: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns the gradient of a product along `dim` by the products of all other elements."""
    if x.shape[dim] == 1:
        return grad
    ones = torch.ones_like(x.narrow(dim, 0, 1), memory_format=torch.contiguous_format)
    rest = x.shape[dim] - 1
    before = torch.cat([ones, x.narrow(dim, 0, rest)], dim).cumprod(dim)
    after = torch.cat([ones, x.narrow(dim, 1, rest).flip(dim)], dim).cumprod(dim).flip(dim)
    return grad * (before * after).conj()


@operation("prod_backward(Tensor grad, Tensor x, Tensor result, bool recorded) -> Tensor", _quotients)
def _prod_backward(grad: torch.Tensor, x: torch.Tensor, result: torch.Tensor, recorded: bool) -> torch.Tensor:
    zeros = (x == 0).nonzero().shape[0]
    quotients = _quotients(grad, x, result)
    if zeros == 0:
        return quotients
    if zeros > 1 and not recorded:
        return quotients.zero_()
    return quotients.copy_(_of_the_others(grad, x.reshape(-1), 0).view(x.shape))


@operation("prod_backward_dim(Tensor grad, Tensor x, Tensor result, int dim) -> Tensor", _quotients)
def _prod_backward_dim(grad: torch.Tensor, x: torch.Tensor, result: torch.Tensor, dim: int) -> torch.Tensor:
    zeros = bool((x == 0).any())
    quotients = _quotients(grad, x, result)
    return quotients.copy_(_of_the_others(grad, x, dim)) if zeros else quotients


def _dim(node: Any, x: torch.Tensor) -> int:
    """Returns the dimension that a node saved, which may be negative and shown as an unsigned number."""
    dim = node._saved_dim % 2**64
    return (dim if dim < 2**63 else dim - 2**64) % x.dim()


def _of_prod(node: Any, found: Gradients, given: Gradients, last: bool) -> Gradients | None:
    (grad,) = given
    if grad is None:
        return None
    x, result = node._saved_self.to(grad.dtype), node._saved_result
    if x.dim() == 0 or x.numel() == 0:
        return None
    _check_not_recorded("prod", (grad, x), last)
    if node.name() == "ProdBackward0":
        return (_prod_backward(grad, x, result, torch.is_grad_enabled()),)
    dim = _dim(node, x)
    if not node._saved_keepdim:
        grad, result = grad.unsqueeze(dim), result.unsqueeze(dim)
    return (_prod_backward_dim(grad, x, result, dim),)


def _check_not_recorded(name: str, tensors: tuple[torch.Tensor, ...], last: bool) -> None:
    """Raises `TraceError` in a backward pass inside of the function that autograd records."""
    if not last and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise TraceError(
            f"{current()}: the function differentiates `{name}` inside, with create_graph=True. The formula for that "
            "reads the data of a tensor, so a plan cannot repeat it. Differentiate with torch.func.grad, whose formula "
            "reads no data."
        )


# -- cumprod ----------------------------------------------------------------------------------------


def _cumprod_gradient(grad: torch.Tensor, x: torch.Tensor, result: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns the gradient before the first zero by quotients, at the first zero by products, and zero after it."""
    zeros = (x == 0).cumsum(dim)
    before, first = zeros == 0, zeros == 1
    del zeros
    quotients = (result.conj() * grad).masked_fill_(~before, 0).flip(dim)
    quotients = quotients.cumsum(dim)
    quotients = quotients.flip(dim).div_(x.conj())
    index = first.max(dim, keepdim=True)[1]
    at_zero = torch.zeros_like(first).scatter_(dim, index, True).logical_and_(first)
    products = x.conj().masked_fill(~(first & ~at_zero), 1)
    products = products.cumprod(dim)
    terms = products.mul_(grad.masked_fill(~first, 0)).sum(dim, keepdim=True)
    del products
    terms = terms.mul_(result.conj().gather(dim, (index - 1).relu_()).masked_fill_(index == 0, 1))
    return torch.where(at_zero, terms, quotients.masked_fill_(before.logical_not_(), 0))


_cumprod_backward = operation(
    "cumprod_backward(Tensor grad, Tensor x, Tensor result, int dim) -> Tensor", _cumprod_gradient
)(_cumprod_gradient)


def _of_cumprod(node: Any, found: Gradients, given: Gradients, last: bool) -> Gradients | None:
    """Chooses between two formulas by whether there are zeros, if autograd records; otherwise there is only one.

    That one is an operation, because autograd computes it in place in a plain run, and not in a trace.
    """
    (grad,) = given
    if grad is None or found[0] is None:
        return None
    x, result = node._saved_self.to(grad.dtype), node._saved_result
    if x.dim() == 0 or x.numel() == 0:
        return None
    _check_not_recorded("cumprod", (grad, x), last)
    dim = _dim(node, x)
    if not torch.is_grad_enabled():
        return (_cumprod_backward(grad, x, result, dim),)
    sums = (result.conj() * grad).flip(dim).cumsum(dim).flip(dim)
    return (torch.where((x == 0).any(), found[0], sums.div(x.conj())),)


# -- det --------------------------------------------------------------------------------------------


class FormulaError(TraceError):
    """A plain run uses a derivative formula that a plan cannot repeat."""


def _of_det(node: Any, found: Gradients, given: Gradients, last: bool) -> Gradients | None:
    """Refuses a pass that autograd records: the formula sorts matrices by whether they are singular."""
    if given[0] is None or not torch.is_grad_enabled():
        return None
    raise FormulaError(
        f"{current()}: the gradient of `det` is recorded by autograd. The formula for that reads the data of a tensor, "
        "so a plan cannot repeat it. Differentiate with torch.func.grad, whose formula reads no data."
    )


# -- hooks ------------------------------------------------------------------------------------------

_PLAIN: dict[str, Callable[[Any, Gradients, Gradients, bool], Gradients | None]] = {
    "CumprodBackward0": _of_cumprod,
    "LinalgDetBackward0": _of_det,
    "MaskedFillBackward1": _of_masked_fill,
    "MaxBackward1": _of_extreme,
    "MedianBackward0": _of_extreme,
    "MinBackward1": _of_extreme,
    "NanmedianBackward0": _of_extreme,
    "ProdBackward0": _of_prod,
    "ProdBackward1": _of_prod,
}
"""By autograd node: a function that returns the gradients of a plain run, or None to keep those found. Its arguments:
the node, the gradients found, the gradients given, and whether this is the last backward pass of the trace, whose
records are dropped."""


def choose(node: Any, *, wrapped: bool, saved: bool, recorded: bool = False, last: bool = False) -> None:
    """Makes an autograd node of a trace return the gradients that it returns in a plain run.

    Args:
        node: the node.
        wrapped: whether the node runs at a level of torch.func in a plain run.
        saved: whether the forward pass ran at such a level. Tensors that the node saved are then wrappers, also if the
            level has been left, as under `vjp`.
        recorded: whether autograd records the backward pass in a plain run, but not in the trace. Then the node runs
            with grad mode on, and its records are dropped, so that they hold no tensors.
        last: whether this is the last backward pass of the trace.
    """
    if recorded:
        node.register_prehook(_switch_on)
    formula = _PLAIN.get(node.name())
    if wrapped or (saved and formula in (_of_masked_fill, _of_extreme)):  # the others convert what they saved first
        formula = None
    if formula is not None:
        node.register_hook(lambda found, given: formula(torch._C._current_autograd_node(), found, given, last))
    if recorded:
        node.register_hook(_switch_off)


def depends_on_wrapping(node: Any) -> bool:
    """Whether an autograd node has other formulas at a level of torch.func."""
    return node.name() in _PLAIN


def _switch_on(given: Gradients) -> None:
    torch._C._set_grad_enabled(True)


def _switch_off(found: Gradients, given: Gradients) -> Gradients:
    torch._C._set_grad_enabled(False)
    return tuple(None if t is None else t.detach() for t in found)
