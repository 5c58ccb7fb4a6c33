"""Measured peaks against bytes counted by hand.

The network is a chain of blocks `tanh(tanh(h @ w0) @ w1)` in float64 whose activations have `A` bytes and
whose weights have `W`. A block makes m0, t0 = tanh(m0), m1, t1 = tanh(m1), of A bytes each; tanh's backward
needs t0 and t1, a product's its operands. The input x and the weights exist before the call: not counted.
`SCALARS` are the loss and its gradient, 8 bytes each; the sum's gradient is one number, expanded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fckpt
from fckpt._memory import measure_peak

ROWS, WIDTH = 2048, 8
A = ROWS * WIDTH * 8
W = WIDTH * WIDTH * 8
SCALARS = 2 * 8

Weights = list[tuple[Tensor, Tensor]]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Loss = Callable[[Weights], Tensor]


def plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def make_input() -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64)


def make_weights(blocks: int) -> Weights:
    matrices = torch.randn(blocks, 2, WIDTH, WIDTH, dtype=torch.float64) / WIDTH**0.5
    return [(first.clone(), second.clone()) for first, second in matrices]


def block(weights: tuple[Tensor, Tensor], h: Tensor) -> Tensor:
    return torch.tanh(torch.tanh(h @ weights[0]) @ weights[1])


def chain_loss(wrap: Wrap, *, group: int | None = None) -> Loss:
    """The sum over a chain of wrapped blocks, if asked for in wrapped groups of `group` blocks."""
    x, inner = make_input(), wrap(block)

    def run(weights: Weights, h: Tensor) -> Tensor:
        for pair in weights:
            h = inner(pair, h)
        return h

    def loss(weights: Weights) -> Tensor:
        h = x
        for start in range(0, len(weights), group or len(weights)):
            part = weights[start : start + (group or len(weights))]
            h = wrap(run)(part, h) if group else run(part, h)
        return h.sum()

    return loss


def autograd_grad(loss: Loss) -> Callable[[Weights], Any]:
    def gradients(weights: Weights) -> Any:
        leaves = [w.requires_grad_() for pair in weights for w in pair]
        return torch.autograd.grad(loss(weights), leaves)

    return gradients


def peak_of(transform: Callable[[Loss], Callable[[Weights], Any]], loss: Loss, blocks: int) -> int:
    weights = make_weights(blocks)
    return measure_peak(lambda: transform(loss)(weights)).peak_bytes


def squared_gradient(loss: Loss) -> Callable[[Weights], Any]:
    """The gradient of the squared norm of the gradient: second order, reverse over reverse."""

    def norm(weights: Weights) -> Tensor:
        gradients = torch.func.grad(loss)(weights)
        return sum((g.square().sum() for pair in gradients for g in pair), start=torch.zeros(()))

    return torch.func.grad(norm)


def hessian_product(loss: Loss) -> Callable[[Weights], Any]:
    """A Hessian-vector product: second order, forward over reverse."""
    return lambda weights: torch.func.jvp(torch.func.grad(loss), (weights,), (weights,))


# first order ---------------------------------------------------------------------------------------

FIRST_ORDER = pytest.mark.parametrize("transform", [autograd_grad, fckpt.grad], ids=["autograd", "fckpt.grad"])


@FIRST_ORDER
@pytest.mark.parametrize("blocks", [2, 8, 16])
def test_plain_peak_is_two_activations_per_block(transform: Any, blocks: int) -> None:
    # Backward of the last product: t0, t1 of all blocks but the last t1, two gradients of A, one of W.
    assert peak_of(transform, chain_loss(plain), blocks) == (2 * blocks - 1 + 2) * A + W + SCALARS


@FIRST_ORDER
@pytest.mark.parametrize("blocks", [2, 8, 16])
def test_a_chain_of_regions_holds_their_inputs_and_one_region(transform: Any, blocks: int) -> None:
    # Recompute of the block before the last, when it makes t1: inputs of that block and all before it but
    # the first (x); the gradient of its output; t0, m1, t1; the last block's two weight gradients.
    expected = (blocks - 2) * A + A + 3 * A + 2 * W + SCALARS
    assert peak_of(transform, chain_loss(fckpt.remat), blocks) == expected


@FIRST_ORDER
@pytest.mark.parametrize(("blocks", "group"), [(16, 4), (32, 4), (36, 6)])
def test_nested_regions_hold_the_inputs_of_the_groups_and_of_one_groups_blocks(
    transform: Any, blocks: int, group: int
) -> None:
    # The same with groups in the place of blocks; in the group, the inputs of its blocks but the first;
    # in its last block t0, m1, t1.
    expected = (blocks // group - 2) * A + A + (group - 1) * A + 3 * A + 2 * group * W + SCALARS
    assert peak_of(transform, chain_loss(fckpt.remat, group=group), blocks) == expected


def test_torch_func_grad_holds_input_and_cotangent_of_every_region() -> None:
    # It records backward for a derivative that never comes: of every block but the first the input and the
    # gradient of it, and all weight gradients; in the first block t0, t1 and two gradients.
    blocks = 16
    expected = 2 * (blocks - 1) * A + 4 * A + (2 * blocks - 1) * W + SCALARS
    peak = peak_of(torch.func.grad, chain_loss(fckpt.remat), blocks)
    assert peak <= expected
    assert peak < peak_of(torch.func.grad, chain_loss(plain), blocks) / 2.5


@pytest.mark.parametrize("wrap", [plain, fckpt.remat], ids=["plain", "remat"])
def test_fckpt_grad_grad_and_value_and_vjp_peak_where_autograd_does(wrap: Wrap) -> None:
    def pull(loss: Loss) -> Callable[[Weights], Any]:
        def gradients(weights: Weights) -> Any:
            value, vjp = fckpt.vjp(loss, weights)
            return vjp(torch.ones_like(value), retain_graph=False)  # called once

        return gradients

    loss = chain_loss(wrap)
    expected = peak_of(autograd_grad, loss, blocks=12)
    assert peak_of(fckpt.grad, loss, blocks=12) == expected
    assert peak_of(fckpt.grad_and_value, loss, blocks=12) == expected
    assert peak_of(pull, loss, blocks=12) == expected


# higher order --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transform", "activations", "weights"),
    [
        # Per block: its input, the cotangent of its first backward, and the cotangents of both in the
        # second; its weights' first gradient, their cotangents, and their second gradient.
        pytest.param(squared_gradient, 4, 6, id="grad of grad"),
        # Per block: its input and the cotangent of it, and the tangents of both; its weights' gradient and
        # the tangent of that.
        pytest.param(hessian_product, 4, 4, id="jvp of grad"),
    ],
)
def test_second_order_holds_a_few_values_at_the_boundaries_of_every_region(
    transform: Any, activations: int, weights: int
) -> None:
    few, many = (peak_of(transform, chain_loss(fckpt.remat), blocks) for blocks in (6, 14))
    assert many - few <= 8 * (activations * A + weights * W)
    assert many < peak_of(transform, chain_loss(plain), 14) / 2.5


# what a region holds between forward and backward --------------------------------------------------


def retained_by(fn: Callable[[], Any]) -> int:
    """Bytes held after the call, its result included."""
    return measure_peak(fn).retained_bytes


def test_an_input_that_backward_does_not_need_is_not_held() -> None:
    x = make_input().requires_grad_()
    bias = torch.zeros(WIDTH, dtype=torch.float64, requires_grad=True)
    add = fckpt.remat(lambda a, b: a + b)
    assert retained_by(lambda: add(-x, x.flip(0))) == A
    assert retained_by(lambda: add(-x, bias)) == A


def test_vjp_does_not_hold_an_input_that_backward_does_not_need() -> None:
    x = make_input()
    add = fckpt.remat(lambda a, b: a + b)
    assert retained_by(lambda: fckpt.vjp(lambda x: add(-x, x.flip(0)), x)) == A


def test_only_the_inputs_that_backward_needs_are_held() -> None:
    x = make_input().requires_grad_()
    scaled = fckpt.remat(lambda a, b: a.sin() + b)
    assert retained_by(lambda: scaled(-x, x.flip(0))) == A + A


def test_a_region_holds_none_of_what_it_computes() -> None:
    x = make_input().requires_grad_()
    deep = fckpt.remat(lambda h: h.sin().sin().sin().sin())
    assert retained_by(lambda: (-x).sin().sin().sin().sin()) == 4 * A + A
    assert retained_by(lambda: deep(-x)) == A + A


def test_nothing_is_held_once_backward_is_done() -> None:
    x = make_input().requires_grad_()
    deep = fckpt.remat(lambda h: fckpt.remat(torch.sin)(h.cos()).exp())

    def step() -> Tensor:
        y = deep(-x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        del y
        return gradient

    assert retained_by(step) == A


@pytest.mark.parametrize("tracked", [False, True], ids=["inputs without grad", "under no_grad"])
def test_a_call_that_is_not_differentiated_holds_nothing_more(tracked: bool) -> None:
    x = make_input().requires_grad_(tracked)

    def run(fn: Callable[..., Tensor]) -> Tensor:
        with torch.set_grad_enabled(not tracked):
            return fn((torch.eye(WIDTH, dtype=torch.float64),) * 2, x)

    usual = measure_peak(lambda: run(block))
    ours = measure_peak(lambda: run(fckpt.remat(block)))
    assert ours.retained_bytes == usual.retained_bytes == A
    # A copy of the generator's state may live for the call.
    assert ours.peak_bytes <= usual.peak_bytes + torch.get_rng_state().nbytes
