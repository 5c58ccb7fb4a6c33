"""Backward passes inside of a planned function, and Python code that runs in the backward pass: hooks, and `backward`
of an `autograd.Function`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_equal
from torch import Tensor, nn

import fckpt

BUDGET = 10**9
X = torch.linspace(-1, 1, 4)


class State:
    calls, scale = 0, 2.0
    seen: list[Any] = []  # noqa: RUF012  shared by all objects, which is tested


class Inside(nn.Module):
    """Differentiates an auxiliary loss inside."""

    def __init__(self, differentiate: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.differentiate = nn.Parameter(torch.ones(4)), differentiate

    def forward(self, x: Tensor) -> Tensor:
        found = self.differentiate((self.weight * x).square().sum(), self.weight)
        return x.sin() if found is None else x.sin() * found[0]


ACCUMULATING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "backward": lambda loss, weight: loss.backward(),
    "autograd.backward": lambda loss, weight: torch.autograd.backward(loss),
    "with inputs": lambda loss, weight: loss.backward(inputs=[weight]),
}


@pytest.mark.parametrize("name", ACCUMULATING)
def test_a_backward_pass_inside_that_accumulates_is_refused(name: str) -> None:
    net = Inside(ACCUMULATING[name])
    planned = fckpt.remat(net, budget=BUDGET)
    for _ in range(2):
        with pytest.raises(
            fckpt.MutationError, match=r"changed `\.grad` of a tensor from outside.*torch\.autograd\.grad"
        ):
            planned(X)
        assert net.weight.grad is None


def test_gradients_of_an_argument_inside_are_refused() -> None:
    planned = fckpt.remat(lambda x: (x.square().sum().backward(), x.sin())[1], budget=BUDGET)
    with pytest.raises(fckpt.MutationError, match=r"changed `\.grad`"):
        planned(X.clone().requires_grad_())


def test_gradients_that_are_returned_inside_are_right() -> None:
    net = Inside(lambda loss, weight: torch.autograd.grad(loss, weight))
    planned, x = fckpt.remat(net, budget=BUDGET), X.clone().requires_grad_()
    assert_equal(torch.autograd.grad(planned(x).sum(), x), torch.autograd.grad(net(x).sum(), x))


def counting(grad: Tensor) -> Tensor:
    State.calls += 1
    return grad * State.calls


def storing(grad: Tensor) -> None:
    State.seen.append(grad.sum())


def scaling(grad: Tensor) -> Tensor:
    return grad * State.scale


class Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return counting(grad)


class Scaling(Counting):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return scaling(grad)


def hooked(hook: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(hook)
        return y.sin()

    return fn


def with_nonlocal() -> Callable[[Tensor], Tensor]:
    calls = 0

    def fn(x: Tensor) -> Tensor:
        def hook(grad: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return grad * calls

        return hooked(hook)(x)

    return fn


def with_node(x: Tensor) -> Tensor:
    y = x * 2
    node: Any = y.grad_fn
    node.register_hook(lambda inputs, outputs: storing(outputs[0]))
    return y.sin()


def with_module(register: Callable[[nn.Module, Callable[..., Any]], Any], hook: Callable[..., Any]) -> nn.Module:
    inner = nn.Linear(4, 4)
    nn.init.eye_(inner.weight)
    register(inner, hook)
    return nn.Sequential(nn.Tanh(), inner, nn.Tanh())


FULL, PRE = nn.Module.register_full_backward_hook, nn.Module.register_full_backward_pre_hook
WRITING: dict[str, Callable[[], Callable[[Tensor], Any]]] = {
    "counts": lambda: hooked(counting),
    "stores": lambda: hooked(storing),
    "stores in C": lambda: hooked(State.seen.append),
    "nonlocal": with_nonlocal,
    "of a node": lambda: with_node,
    "of a submodule": lambda: with_module(FULL, lambda module, inputs, outputs: (counting(inputs[0]),)),
    "before a submodule": lambda: with_module(PRE, lambda module, outputs: (counting(outputs[0]),)),
    "backward of a Function": lambda: Counting.apply,
}


@pytest.fixture(autouse=True)
def _reset() -> None:
    State.calls, State.scale = 0, 2.0
    State.seen.clear()


@pytest.mark.parametrize("name", WRITING)
def test_code_that_writes_in_the_backward_pass_is_refused(name: str) -> None:
    planned = fckpt.remat(WRITING[name](), budget=BUDGET)
    for _ in range(2):
        with pytest.raises(fckpt.TraceError, match=r"hook|backward function"):
            planned(X.clone().requires_grad_())
        assert State.calls == 0 and not State.seen


READING: dict[str, Callable[[], Callable[[Tensor], Any]]] = {
    "hook": lambda: hooked(scaling),
    "of a submodule": lambda: with_module(FULL, lambda module, inputs, outputs: (scaling(inputs[0]),)),
    "backward of a Function": lambda: Scaling.apply,
}


@pytest.mark.parametrize("name", READING)
def test_what_code_in_the_backward_pass_reads_is_compared_there(name: str) -> None:
    fn = READING[name]()
    planned = fckpt.remat(fn, budget=BUDGET)
    for scale in (2.0, 3.0, 2.0):
        State.scale = scale
        x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
        planned(x).sum().backward()
        fn(y).sum().backward()
        assert_equal(x.grad, y.grad)
    out = planned(X.clone().requires_grad_()).sum()
    State.scale = 4.0
    with pytest.raises(fckpt.TraceError, match="what it reads has changed since the forward pass"):
        out.backward()


def local_later(x: Tensor) -> Tensor:
    y, scale = x * 2, 3.0
    y.register_hook(lambda grad: grad * scale)
    scale = 4.0
    return y.sin()


def masked(x: Tensor) -> Tensor:
    y, mask = x * 2, x > 0
    y.register_hook(lambda grad: grad * mask)
    return y.sin()


COMPUTING: dict[str, Callable[[], Callable[[Tensor], Any]]] = {
    "computes": lambda: hooked(lambda grad: grad.clamp(-0.5, 0.5) * 2),
    "mask": lambda: masked,
    "a variable that is assigned later": lambda: local_later,
    "of a submodule": lambda: with_module(FULL, lambda module, inputs, outputs: (inputs[0] * 3,)),
}


@pytest.mark.parametrize("name", COMPUTING)
def test_hooks_that_compute(name: str) -> None:
    fn = COMPUTING[name]()
    planned = fckpt.remat(fn, budget=BUDGET)
    for _ in range(3):
        x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
        planned(x).sum().backward()
        fn(y).sum().backward()
        assert_equal(x.grad, y.grad)
    assert fckpt.stats(planned).captures == (name == "computes")


def test_a_hook_of_the_planned_module_itself_writes() -> None:
    net = nn.Linear(4, 4)
    FULL(net, lambda module, inputs, outputs: storing(outputs[0]))
    planned = fckpt.remat(net, budget=BUDGET)
    for calls in (1, 2):
        planned(X.clone().requires_grad_()).sum().backward()
        assert len(State.seen) == calls


def on_node_behind_argument(x: Tensor) -> Tensor:
    node: Any = x.grad_fn
    node.register_prehook(lambda grads: (grads[0] * 3,))
    return x.tanh().sin()


def on_argument_with_gradient_inside(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad * 2)
    (grad,) = torch.autograd.grad(x.tanh().sum(), x, create_graph=True)
    return grad * x


def on_several_arguments(x: Tensor) -> Tensor:
    torch.autograd.graph.register_multi_grad_hook((x,), lambda grads: None)
    return x.tanh().sin()


@pytest.mark.parametrize("fn", [on_node_behind_argument, on_argument_with_gradient_inside, on_several_arguments])
def test_a_plan_refuses_hooks_that_would_outlast_the_call(fn: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, requires_grad=True)
    with pytest.raises(fckpt.TraceError, match=r"registers a hook .* Register the hook before the call"):
        fckpt.remat(fn, budget=1.0)(x * 1)
    assert not x._backward_hooks


# -- the Python code of custom operations


class Scale:
    factor = 1.0

    def backward(self, ctx: Any, grad: Tensor) -> Tensor:
        return grad * self.factor


def registered(how: str) -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    """Returns a custom operation whose Python code reads a number, and a function that sets this number."""
    number, held, scale = 1.0, {"factor": 1.0}, Scale()

    def set_to(value: float) -> None:
        nonlocal number
        number = held["factor"] = scale.factor = FACTORS["factor"] = value

    set_to(1.0)
    name = f"with_{how.replace(' ', '_')}"
    if how == "kernel":
        LIBRARY.define(f"{name}(Tensor x) -> Tensor")
        LIBRARY.impl(name, lambda x: x * held["factor"], "CompositeImplicitAutograd")
        return getattr(torch.ops.fckpt_late, name), set_to

    @torch.library.custom_op(f"fckpt_late::{name}", mutates_args=())
    def operation(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    operation.register_fake(torch.empty_like)
    setup: Callable[..., None] = lambda ctx, inputs, output: None
    if how == "setup_context":
        setup = lambda ctx, inputs, output: setattr(ctx, "factor", held["factor"])
    backward: Callable[..., Tensor] = {
        "global": lambda ctx, grad: grad * FACTORS["factor"],
        "cell": lambda ctx, grad: grad * number,
        "dict in a cell": lambda ctx, grad: grad * held["factor"],
        "method": scale.backward,
        "setup_context": lambda ctx, grad: grad * ctx.factor,
        "vmap": lambda ctx, grad: grad * 2,
    }[how]
    operation.register_autograd(backward, setup_context=setup)
    if how == "vmap":
        operation.register_vmap(lambda info, in_dims, x: (operation(x * held["factor"]), in_dims[0]))
        return torch.func.vmap(operation), set_to
    return operation, set_to


LIBRARY = torch.library.Library("fckpt_late", "FRAGMENT")
FACTORS = {"factor": 1.0}
KINDS = ["global", "cell", "dict in a cell", "method", "setup_context", "vmap", "kernel"]


@pytest.mark.filterwarnings("ignore:fckpt does not run custom operations", "ignore::fckpt.PlanWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_code_of_custom_operations(kind: str) -> None:
    operation, set_to = registered(kind)
    fn = lambda x: operation(x).sin()
    planned = fckpt.remat(fn, budget=1.0)
    x = torch.randn(4, requires_grad=True)

    def outcome(fn: Callable[..., Any]) -> Any:
        y = fn(x)
        return y, torch.autograd.grad(y.sum(), x)

    for value in (1.0, 2.0, 3.0, 1.0):
        set_to(value)
        assert_equal(outcome(planned), outcome(fn))
    y, expected = planned(x), fn(x)
    set_to(5.0)
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    if kind in ("setup_context", "vmap", "kernel"):  # read in the forward pass
        assert_equal(torch.autograd.grad(y.sum(), x), (gradient,))
    else:
        with pytest.raises(fckpt.TraceError, match="has changed since the forward pass"):
            torch.autograd.grad(y.sum(), x)


def test_a_hook_on_a_node_with_a_comprehension() -> None:
    def loss(w: Tensor) -> Tensor:
        y = (w * X).tanh()
        y.grad_fn.next_functions[0][0].register_hook(lambda grads, _: tuple(g if g is None else g * 5 for g in grads))
        return (y.sin() * y).sum()

    found = []
    for fn in (loss, planned := fckpt.remat(loss, budget=BUDGET), planned):
        w = torch.ones(4, requires_grad=True)
        fn(w).backward()
        found.append(w.grad)
    assert_equal(found[1], found[0])
    assert_equal(found[2], found[0])
