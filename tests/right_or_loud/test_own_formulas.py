"""An `autograd.Function` whose formula is not the derivative of its `forward`: a plan must use it wherever the plain
function does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_equal
from torch import Tensor
from torch.func import grad, jacrev, jvp, vmap

import fckpt

X = torch.linspace(0.1, 1, 4)
WEIGHT = torch.full((4,), 3.0, requires_grad=True)
OPTIONS: dict[str, dict[str, Any]] = {
    "budget": {"budget": 1.0},
    "policy": {"policy": fckpt.policies.everything_saveable},
}


class Generated(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * 100


class Batched(torch.autograd.Function):
    forward, setup_context = Generated.forward, Generated.setup_context
    backward = Generated.backward  # type: ignore[assignment]

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor) -> Any:  # type: ignore[override]
        return Batched.apply(x) + 1, dims[0]


class Several(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        return (x * factor).round(), x * 3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.mark_non_differentiable(output[1])
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> Any:  # type: ignore[override]
        return g * ctx.factor * ctx.saved_tensors[0], None


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * (5.0 if torch.is_grad_enabled() else 2.0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * 100


class Weighted(Plain):
    @staticmethod
    def forward(ctx: Any, x: Tensor, others: list[Tensor]) -> Tensor:  # type: ignore[override]
        return x * WEIGHT * others[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * 100, None


class Square(torch.autograd.Function):
    """Its `backward` calls another, or changes grad mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * Plain.apply(*ctx.saved_tensors) + Plain.apply(g)


class Frozen(Square):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            factor = x * 3
        return g * factor * x


def generated(x: Tensor) -> Any:
    return Generated.apply(x.sin())


def batched(x: Tensor) -> Any:
    return Batched.apply(x.sin())


def several(x: Tensor) -> Any:
    rounded, other = Several.apply(x.sin(), 2.0)
    return rounded * x + other


def below(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: vmap(f)(x[:, None]).sum(1)


def gradient_inside(x: Tensor) -> Tensor:
    return grad(lambda y: generated(y).sum())(x) * x


def without_grad(x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        with torch.no_grad():
            return (Generated.apply(y * x) * 3).sum()

    return grad(lambda y: (inner(y) * y).sum())(x) * x


def backward_of(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    def call(x: Tensor) -> Any:
        x, WEIGHT.grad = x.clone().requires_grad_(), None
        y = f(x)
        y.sum().backward()
        return y.detach(), x.grad, torch.zeros(4) if WEIGHT.grad is None else WEIGHT.grad

    return call


WAYS: dict[str, Callable[[Callable[[Tensor], Any]], Callable[[Tensor], Any]]] = {
    "backward": backward_of,
    "backward of vmap": lambda f: backward_of(lambda x: vmap(f)(torch.stack([x, x + 1]))),
    "grad of vmap": lambda f: grad(lambda x: vmap(f)(torch.stack([x, x + 1])).sum()),
    "vmap of grad": lambda f: lambda x: vmap(grad(lambda x: f(x).sum()))(torch.stack([x, x + 1])),
    "jacrev": jacrev,
    "vmap": lambda f: lambda x: vmap(f)(torch.stack([x, x + 1])),
}
FUNCTIONS = [generated, batched, several, below(generated), below(batched), gradient_inside, without_grad]


@pytest.mark.filterwarnings("ignore::fckpt.BudgetWarning")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
def test_a_formula_is_kept_below_transforms(number: int, way: str, options: str) -> None:
    fn = FUNCTIONS[number]
    expected = WAYS[way](fn)(X)
    assert_equal(WAYS[way](fckpt.remat(fn, **OPTIONS[options]))(X), expected)


def of_a_view(x: Tensor) -> Any:
    whole = torch.zeros(4)
    whole[:2].copy_(x[:2])
    return Plain.apply(whole) * x


def in_a_list(x: Tensor) -> Any:
    whole = [torch.zeros(4)]
    torch._foreach_add_(whole, [x])
    return Plain.apply(whole[0])


def of_constants(x: Tensor) -> Any:
    ones = torch.ones(4)
    return Plain.apply(ones) * x + Weighted.apply(ones, [x]) * x


@pytest.mark.parametrize("fn", [of_a_view, in_a_list, of_constants])
def test_a_formula_is_kept_for_the_arguments_that_require_grad(fn: Callable[[Tensor], Any]) -> None:
    planned = fckpt.remat(fn, budget=1.0)
    assert_equal(backward_of(planned)(X), backward_of(fn)(X))
    assert fckpt.stats(planned).captures == 1


@pytest.mark.filterwarnings("ignore::fckpt.BudgetWarning")
@pytest.mark.filterwarnings("ignore::fckpt.GradientWarning")  # a formula that ends with an addition is taken for a sum
@pytest.mark.parametrize("function", [Plain, Square, Frozen])
def test_second_derivatives_use_the_formulas(function: Any) -> None:
    def twice(f: Callable[[Tensor], Any]) -> Any:
        x = X.clone().requires_grad_()
        (found,) = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
        found.sum().backward()
        return found.detach(), x.grad

    fn = lambda x: function.apply(x)
    found, expected = twice(fckpt.remat(fn, budget=1.0)), twice(fn)
    assert_equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])


class Same(torch.autograd.Function):
    generate_vmap_rule = True
    setup_context = Generated.setup_context

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * 3

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:  # type: ignore[override]
        return t.view_as(t)


def returns_a_view(x: Tensor) -> tuple[Tensor, Tensor]:
    return Same.apply(x * 2), Same.apply(x)  # type: ignore[no-untyped-call]


@pytest.mark.filterwarnings("ignore::fckpt.BudgetWarning")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize(
    "derived",
    [
        lambda f: grad(lambda x: f(x).sum())(X),
        lambda f: grad(lambda x: grad(lambda y: f(y).sin().sum())(x).square().sum())(X),
        lambda f: jacrev(f)(X),
        lambda f: vmap(grad(lambda x: f(x).sum()))(torch.stack([X, X + 1])),
        lambda f: jvp(f, (X,), (X,))[1],
    ],
    ids=["grad", "grad of grad", "jacrev", "vmap", "jvp"],
)
def test_a_view_that_a_function_returns_below_transforms(derived: Any, output: int, options: str) -> None:
    plain = lambda x: returns_a_view(x)[output]
    assert_equal(derived(fckpt.remat(plain, **OPTIONS[options])), derived(plain))


def test_writes_to_a_view_that_a_function_returns_are_refused() -> None:
    (found, _) = fckpt.remat(returns_a_view, budget=1.0)(X.clone().requires_grad_())
    assert torch.equal(found, returns_a_view(X)[0])
    with pytest.raises(RuntimeError, match="inplace"):
        found.add_(1)
