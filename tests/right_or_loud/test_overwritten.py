"""In-place work that plain autograd refuses, because backward needs what was overwritten, is refused in a region."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_equal, leaf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fckpt

W = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))
Fn = Callable[..., Any]


def gradients(fn: Fn, finish: Fn = Tensor.sum) -> list[Tensor]:
    w, x = leaf(W), leaf(X)
    finish(fn(w, x)).backward()
    return [w.grad, x.grad]


def agree(fn: Fn, region: Fn | None = None) -> None:
    """Plain refuses if and only if the region refuses; else the gradients are equal."""
    region = region or fckpt.remat(fn)
    try:
        expected = gradients(fn)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        with pytest.raises(fckpt.MutationError, match=r"by a later operation.*returns a new tensor"):
            gradients(region)
    else:
        assert_equal(gradients(region), expected)


STEPS: dict[str, Fn] = {
    "relu_": lambda h, w: h.relu_(),
    "exp_": lambda h, w: h.exp_(),
    "sin_": lambda h, w: h.sin_(),
    "mul_": lambda h, w: h.mul_(1.5),
    "mul_w": lambda h, w: h.mul_(w.sum()),
    "add_": lambda h, w: h.add_(h.detach() * 0.1),
    "sigmoid_": lambda h, w: h.sigmoid_(),
    "view_add_": lambda h, w: (h[0].add_(1), h)[1],
    "half_exp_": lambda h, w: (h[:, :2].exp_(), h)[1],
    "detached_mul_": lambda h, w: (h.detach().mul_(0.5), h)[1],
    "zero_row": lambda h, w: (h[1].zero_(), h)[1],
    "clamp_": lambda h, w: h.clamp_(-1, 1),
    "exp": lambda h, w: h.exp(),
    "sin": lambda h, w: h.sin(),
    "matmul": lambda h, w: torch.tanh(h @ w),
    "square": lambda h, w: h * h,
    "softmax": lambda h, w: h.softmax(-1),
    "norm": lambda h, w: torch.nn.functional.layer_norm(h, (4,)),
    "residual": lambda h, w: h + h.sigmoid(),
}


@settings(deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=6), st.booleans())
def test_chains_of_in_place_work(chain: list[str], nested: bool) -> None:
    def fn(w: Tensor, x: Tensor, nested: bool = False) -> Tensor:
        h = x @ w - 0.2
        for name in chain:
            own = nested and not name.endswith(("_", "_w", "row"))
            h = fckpt.remat(STEPS[name])(h, w) if own else STEPS[name](h, w)
        return h

    if nested:
        # What overwrites the result of an inner region overwrites no value that backward needs.
        with contextlib.suppress(fckpt.MutationError):
            assert_equal(gradients(fckpt.remat(lambda w, x: fn(w, x, True))), gradients(lambda w, x: fn(w, x, True)))
    else:
        agree(fn)


CASES: dict[str, Fn] = {
    "relu_ then exp_": lambda w, x: (x @ w - 0.2).relu_().exp_().log(),
    "overwritten last, where an early stop does not go": lambda w, x: (x @ w).exp().mul_(2),
    "overwritten through a view": lambda w, x: (lambda h: (h.view(-1).mul_(2), h)[1])((x @ w).exp()),
    "overwritten through a detached alias": lambda w, x: (lambda h: (h.detach().mul_(2), h)[1])((x @ w).sin().exp()),
    "the operand of a product": lambda w, x: (lambda h: (h * h.sin(), h.add_(1))[0])(x @ w),
    "allowed: nothing saved is overwritten": lambda w, x: (x @ w).mul_(2).add_(1).sin(),
    "allowed: overwritten before it is saved": lambda w, x: (x @ w).relu().mul_(1.5).clone().exp(),
    "an accumulator": lambda w, x: (lambda h, out: [out.add_(h.sin()) for _ in range(3)][-1])(x @ w, torch.zeros(3, 4)),
    "an accumulator that is saved": lambda w, x: (lambda h, out: [out.add_(h.sin()) * out for _ in range(3)][-1])(
        x @ w, torch.zeros(3, 4)
    ),
    "rows of a buffer": lambda w, x: (lambda h, out: [out.__setitem__(i, h[i].sin()) for i in range(3)] and out)(
        x @ w, torch.zeros(3, 4)
    ),
    "rows of a buffer, each read": lambda w, x: (
        lambda h, out: [out.__setitem__(i, (h[i] * out[i - 1]).sin()) for i in range(3)] and out
    )(x @ w, torch.ones(3, 4)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_region_refuses_what_plain_autograd_refuses(case: str) -> None:
    agree(CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_in_a_region_within_a_region(case: str) -> None:
    region = fckpt.remat(lambda w, x: fckpt.remat(CASES[case])(w, x.sin()).cos())
    agree(lambda w, x: CASES[case](w, x.sin()).cos(), region)


def test_the_argument_of_an_inner_region_that_the_outer_one_overwrites() -> None:
    def fn(w: Tensor, x: Tensor) -> Tensor:
        h = x @ w
        y = fckpt.remat(lambda h: h.sin().exp())(h)
        h.mul_(2)
        return y + h

    with pytest.raises(fckpt.MutationError, match="was changed in place"):
        gradients(fn)
    with pytest.raises(fckpt.MutationError, match="was changed in place"):
        gradients(fckpt.remat(fn))


def test_a_result_that_is_overwritten_outside_is_recomputed() -> None:
    """Plain autograd refuses it, as it has no other copy of the value; a region computes it again."""
    right = gradients(lambda w, x: (x @ w).exp() * 2)
    assert_equal(gradients(fckpt.remat(lambda w, x: (x @ w).exp()), lambda y: y.mul_(2).sum()), right)


def test_a_value_of_a_retained_graph() -> None:
    w, x = leaf(W), leaf(X)
    out = fckpt.remat(lambda w, x: (x @ w).relu_().exp_().sin())(w, x).sum()
    for _ in range(2):
        with pytest.raises(fckpt.MutationError):
            out.backward(retain_graph=True)
