"""remat composes with every way that torch differentiates, in both orders and nested in itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_equal, seeded
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from ways import RANDOM_FORBIDDEN, REGROUPED, WAYS, Fn, X, branching, dropout_mlp, loss, mlp

import fckpt

# -- ways to rematerialise ----------------------------------------------------------------------------------


def twice(fn: Fn) -> Fn:
    return fckpt.remat(fckpt.remat(fn))


def parts(fn: Fn) -> Fn:
    """Regions before, around and after, one within another."""
    inner = fckpt.remat(fn)

    def outer(params: Any, x: torch.Tensor) -> torch.Tensor:
        return fckpt.remat(torch.sin)(inner(params, fckpt.remat(torch.cos)(x)))

    return fckpt.remat(outer)


def plain_parts(fn: Fn) -> Fn:
    return lambda params, x: torch.sin(fn(params, torch.cos(x)))


def closed_over(fn: Fn) -> Fn:
    """The parameters are closed over, not passed."""
    return lambda params, x: fckpt.remat(lambda x: fn(params, x))(x)


def closed_over_nested(fn: Fn) -> Fn:
    def outer(params: Any, x: torch.Tensor) -> torch.Tensor:
        inner = fckpt.remat(lambda y: fn(params, y))
        return fckpt.remat(lambda y: inner(y))(x)

    return outer


def closed_over_passed_on(fn: Fn) -> Fn:
    """What the outer function closes over is an argument of the inner one."""

    def outer(params: Any, x: torch.Tensor) -> torch.Tensor:
        return fckpt.remat(lambda y: fckpt.remat(fn)(params, y))(x)

    return outer


REMATS: dict[str, tuple[Callable[[Fn], Fn], Callable[[Fn], Fn]]] = {
    "remat": (fckpt.remat, lambda fn: fn),
    "twice": (twice, lambda fn: fn),
    "parts": (parts, plain_parts),
    "closed_over": (closed_over, lambda fn: fn),
    "closed_over_nested": (closed_over_nested, lambda fn: fn),
    "closed_over_passed_on": (closed_over_passed_on, lambda fn: fn),
}


def compare(name: str, remat: Callable[[Fn], Fn], plain: Callable[[Fn], Fn], program: Fn) -> None:
    run = WAYS[name]
    expected, state = seeded(lambda: run(plain(program)))
    actual, state_after = seeded(lambda: run(remat(program)))
    if name in REGROUPED:
        # Sums of a few dozen doubles of order 1 to 1e3, regrouped.
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    else:
        assert_equal(actual, expected)
    assert torch.equal(state_after, state), "the generator ends elsewhere"


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("name", WAYS)
def test_transform_of_remat(name: str, remat: str) -> None:
    compare(name, *REMATS[remat], mlp)


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("name", sorted(set(WAYS) - RANDOM_FORBIDDEN))
def test_transform_of_remat_with_dropout(name: str, remat: str) -> None:
    compare(name, *REMATS[remat], dropout_mlp)


@pytest.mark.parametrize("name", ["backward", "double_backward", "func_grad", "func_jvp", "func_jacrev"])
def test_transform_of_remat_with_views_indices_and_in_place_work(name: str) -> None:
    compare(name, *REMATS["remat"], branching)


@pytest.mark.parametrize(
    "fn",
    [
        lambda p: fckpt.remat(lambda b: p.sin() * b)(p),
        lambda p: fckpt.remat(lambda b: (b.sin(), p.exp().sin())[1] * b)(p),
        lambda p: sum(fckpt.remat(lambda b: (b.sin(), p.exp()))(p.cos())),
    ],
)
def test_tensor_closed_over_and_passed(fn: Any) -> None:
    plain = torch.autograd.functional.jacobian(fn, X)
    torch.testing.assert_close(jacrev(fn)(X), plain, rtol=1e-12, atol=1e-12)
    value = lambda p: (fn(p) ** 2).sum()
    expected = torch.autograd.functional.jacobian(value, X)
    torch.testing.assert_close(grad(value)(X), expected, rtol=1e-12, atol=1e-12)


def test_transform_inside_of_a_closed_over_tensor() -> None:
    def slope(x: torch.Tensor) -> torch.Tensor:
        return x + grad(lambda z: z.sin().square().sum())(x)

    region = fckpt.remat
    forms: list[Any] = [
        lambda d: region(lambda: slope(d))(),
        lambda d: region(lambda: region(lambda: slope(d))())(),
        lambda d: region(lambda: region(lambda e: slope(e))(d))(),
        lambda d: region(lambda e: region(lambda: slope(e))())(d),
    ]
    outer: list[Any] = [
        lambda f: grad(lambda w: (f(w.sin()) ** 2).sum())(X),
        lambda f: vmap(lambda u: grad(lambda w: (f(w.sin()) ** 2).sum())(X) + u)(torch.zeros(2)),
        lambda f: grad(lambda w: (vmap(lambda u: f(w.sin()) + u)(torch.zeros(2)) ** 2).sum())(X),
        lambda f: grad(lambda w: (vmap(lambda r: f(r.sin()))(w) ** 2).sum())(X),
    ]
    for run in outer:
        for form in forms:
            torch.testing.assert_close(run(form), run(slope), rtol=1e-12, atol=1e-12)


def test_closed_over_batches_and_duals_that_nothing_differentiates() -> None:
    """Their level is popped, and its number taken by another, when the region runs again."""
    scale = torch.arange(1.0, 3, dtype=torch.float64)

    def run(region: Any) -> Any:
        def value(w: torch.Tensor) -> torch.Tensor:
            each = lambda s: region(lambda y: region(lambda z: (z * s.sin()).sin().exp())(y))(w.sum())
            return (vmap(each)(scale) * torch.func.jvp(each, (scale[0],), (scale[1],))[1]).sum()

        return vmap(grad(value))(torch.stack([X[0], X[1]]))

    torch.testing.assert_close(run(fckpt.remat), run(lambda f: f), rtol=1e-12, atol=1e-12)


# -- the other order: remat around transforms ---------------------------------------------------------------

INSIDE: dict[str, Callable[[Fn], Fn]] = {
    "grad": lambda fn: lambda params, x: grad(lambda x: loss(fn)(params, x))(x),
    "grad_and_value": lambda fn: lambda params, x: grad_and_value(lambda x: loss(fn)(params, x))(x)[0],
    "vjp": lambda fn: lambda params, x: vjp(lambda x: fn(params, x), x)[1](torch.ones_like(fn(params, x)))[0],
    "jvp": lambda fn: lambda params, x: jvp(lambda x: fn(params, x), (x,), (x.cos(),))[1],
    "vmap": lambda fn: lambda params, x: vmap(lambda x: fn(params, x))(x),
    "per_sample": lambda fn: lambda params, x: vmap(grad(lambda x: loss(fn)(params, x)))(x),
    "jacrev": lambda fn: lambda params, x: jacrev(lambda x: fn(params, x))(x),
    "jacfwd": lambda fn: lambda params, x: jacfwd(lambda x: fn(params, x))(x),
    "hessian": lambda fn: lambda params, x: hessian(lambda x: loss(fn)(params, x))(x),
    "fckpt.grad": lambda fn: lambda params, x: fckpt.grad(lambda x: loss(fn)(params, x))(x),
}


def autograd_inside(fn: Fn) -> Fn:
    def inner(params: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (first,) = torch.autograd.grad(loss(fn)(params, y), y, create_graph=True)
        return first * x

    return inner


OUTSIDE = ["backward", "double_backward", "retained_graph_three_times", "func_jvp", "no_grad"]


@pytest.mark.parametrize("outside", [*OUTSIDE, "func_grad", "func_vmap", "per_sample_gradients", "func_jacrev"])
@pytest.mark.parametrize("inside", INSIDE)
def test_remat_of_transform(inside: str, outside: str) -> None:
    if inside in ("vmap", "per_sample") and outside in ("func_vmap", "per_sample_gradients"):
        pytest.skip("the program maps over rows, and a sample is one row")
    run = WAYS[outside]
    expected = run(INSIDE[inside](mlp))
    actual = run(fckpt.remat(INSIDE[inside](mlp)))
    if inside in ("jvp", "vmap") or outside == "no_grad":
        assert_equal(actual, expected)
    else:
        # Second derivatives, so sums are regrouped: see REGROUPED.
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("outside", ["backward", "double_backward", "retained_graph_three_times", "no_grad"])
def test_remat_of_autograd_grad(outside: str) -> None:
    compare(outside, fckpt.remat, lambda fn: fn, autograd_inside(mlp))
