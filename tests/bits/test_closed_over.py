"""Every way to close over a tensor, under every stack of transforms: the gradients are the plain function's.

`USES` are ways in which a rematerialised function reaches a tensor `a` that it is not passed (or passed as well);
`w` is `fckpt.remat`, or the identity for comparison. `STACKS` differentiate the result with respect to `a`.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap

import fckpt

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Use = Callable[[Wrap, Tensor], Tensor]
Fn = Callable[[Tensor], Tensor]

X = torch.linspace(0.3, 1.2, 3, dtype=torch.float64)
ROWS = torch.stack([X, X.cos()])
GLOBAL: dict[str, Tensor] = {}


def plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


# -- ways to reach a tensor ---------------------------------------------------------------------------------


def of_derived(w: Wrap, a: Tensor) -> Tensor:
    d = a.exp()
    return w(lambda b: w(lambda c: c * d)(b).sin() * d)(a)


def passed_and_closed_over(w: Wrap, a: Tensor) -> Tensor:
    d = a.exp()
    return w(lambda b: w(lambda c: c * d.sin())(d) * b)(a)


def tuple_and_list(w: Wrap, a: Tensor) -> Tensor:
    t = (a, [a.exp()])
    return w(lambda b: t[0].sin() * b * t[1][0])(a.cos())


def list_of_tensors(w: Wrap, a: Tensor) -> Tensor:
    held = [a, a.exp()]
    return w(lambda b: torch.stack(held).sum(0).sin() * b)(a.cos())


class Plain:
    def __init__(self, a: Tensor):
        self.held = {"k": [a]}

    def scale(self, b: Tensor) -> Tensor:
        return self.held["k"][0].sin() * b


class Slotted:
    __slots__ = ("t",)

    def __init__(self, a: Tensor):
        self.t = a


def object_attribute(w: Wrap, a: Tensor) -> Tensor:
    held = Plain(a)
    return w(lambda b: held.held["k"][0].sin() * b)(a.cos())


def slotted_attribute(w: Wrap, a: Tensor) -> Tensor:
    held = Slotted(a)
    return w(lambda b: held.t.sin() * b)(a.cos())


def module_attributes(w: Wrap, a: Tensor) -> Tensor:
    module = torch.nn.Module()
    module.scale, module.inner = a, torch.nn.Module()
    module.inner.held = [a.exp()]
    return w(lambda b: module.scale.sin() * b * module.inner.held[0])(a.cos())


def through_a_global(w: Wrap, a: Tensor) -> Tensor:
    GLOBAL["a"] = a
    try:
        return w(lambda b: GLOBAL["a"].sin() * b)(a.cos())
    finally:
        GLOBAL.clear()


def variable_of_a_loop(w: Wrap, a: Tensor) -> Tensor:
    y = a
    for k in range(3):
        scale = a * k
        y = w(lambda b: (b * scale).sin() + b)(y)
    return y


def variable_that_takes_the_result(w: Wrap, a: Tensor) -> Tensor:
    y = a
    for _ in range(3):
        y = w(lambda b: (b * y).sin() + b)(y.cos())
    return y


USES: dict[str, Use] = {
    "cell": lambda w, a: w(lambda b: a.sin() * b)(a),
    "nested_twice": lambda w, a: w(lambda b: w(lambda c: c * a.sin())(b) * a)(a.cos()),
    "nested_thrice": lambda w, a: w(lambda b: w(lambda c: w(lambda t: t * a.sin())(c))(b) * b)(a.cos()),
    "nested_and_passed": lambda w, a: w(lambda b: w(lambda c: w(lambda t: t[0] * t[1].cos())((a, c)))(b))(a),
    "nested_and_passed_later": lambda w, a: w(lambda b: w(lambda c: w(lambda t: t[0] * t[1].cos())((a, c)))(b))(
        a.exp()
    ),
    "nested_four_times": lambda w, a: w(
        lambda b: w(lambda c: w(lambda t: w(lambda u: u * b.sin() * a)(t) * c)(c * a))(b)
    )(a.exp()),
    "passed": lambda w, a: w(lambda b: w(lambda c: c * a.sin())(a) * b)(a.cos()),
    "derived_and_passed": passed_and_closed_over,
    "derived": of_derived,
    "nothing_passed": lambda w, a: w(lambda: w(lambda: a.sin() * a)())(),
    "returned": lambda w, a: sum(w(lambda b: (a, a.sin() * b))(a.cos())),  # type: ignore[arg-type, return-value]
    "detached": lambda w, a: w(lambda b: a.detach().sin() * b * a)(a.cos()),
    "in_place": lambda w, a: w(lambda b: b.clone().mul_(a).sin())(a.cos()),
    "function_passed": lambda w, a: w(lambda f, b: f(b))(lambda z: z * a.sin(), a.cos()),
    "vmap_of_it": lambda w, a: w(lambda b: vmap(torch.sin)(a) * b)(a.cos()),
    "vmap_beside_it": lambda w, a: w(lambda b: vmap(lambda s: s.sin() * a.cos().sum())(b))(a.cos()),
    "grad_beside_it": lambda w, a: w(lambda b: grad(lambda z: (z.sin() * a).sum())(b))(a.cos()),
    "grad_of_it": lambda w, a: w(lambda b: grad(lambda z: (z.sin() * b).sum())(a))(a.cos()),
    "grad_of_a_region_inside": lambda w, a: w(lambda b: grad(lambda z: (w(lambda q: q.sin() * a)(z) * b).sum())(a))(
        a.cos()
    ),
    "jvp_of_it": lambda w, a: w(lambda b: jvp(lambda z: z.sin() * a, (b,), (a,))[1])(a.cos()),
    "jacrev_beside_it": lambda w, a: w(lambda b: jacrev(lambda z: z.sin() * a)(b).sum(0))(a.cos()),
    "partial": lambda w, a: w(functools.partial(lambda k, b: k.sin() * b, a))(a.cos()),
    "partial_by_name": lambda w, a: w(functools.partial(lambda b, k: k.sin() * b, k=a))(a.cos()),
    "method_of_it": lambda w, a: w(a.mul)(a.cos()),
    "method_of_a_holder": lambda w, a: w(Plain(a).scale)(a.cos()),
    "default": lambda w, a: w(lambda b, k=a: k.sin() * b)(a.cos()),
    "default_by_name": lambda w, a: w(lambda b, *, k=a: k.sin() * b)(a.cos()),
    "tuple_and_list": tuple_and_list,
    "list": list_of_tensors,
    "object": object_attribute,
    "slotted_object": slotted_attribute,
    "module": module_attributes,
    "global": through_a_global,
    "loop": variable_of_a_loop,
    "loop_with_result": variable_that_takes_the_result,
}


# -- ways to differentiate ----------------------------------------------------------------------------------


def squared(f: Fn) -> Fn:
    return lambda p: (f(p) ** 2).sum()


def backward(f: Fn) -> Tensor:
    y = X.clone().requires_grad_()
    return torch.autograd.grad(squared(f)(y), y)[0]


def double_backward(f: Fn) -> Tensor:
    y = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(squared(f)(y), y, create_graph=True)
    return torch.autograd.grad((first**2).sum(), y)[0]


def backward_of_grad(f: Fn) -> Tensor:
    y = X.clone().requires_grad_()
    return torch.autograd.grad((grad(lambda p: squared(f)(p * y))(X) ** 2).sum(), y)[0]


STACKS: dict[str, Callable[[Fn], Tensor]] = {
    "backward": backward,
    "double_backward": double_backward,
    "backward_of_grad": backward_of_grad,
    "jacobian_vectorized": lambda f: torch.autograd.functional.jacobian(f, X, vectorize=True),  # type: ignore[return-value]
    "grad": lambda f: grad(squared(f))(X),
    "grad_of_later_value": lambda f: grad(lambda p: squared(f)(p.sin()))(X),
    "grad_of_grad": lambda f: grad(squared(grad(squared(f))))(X),
    "vmap_of_grad": lambda f: vmap(grad(squared(f)))(ROWS),
    "grad_of_vmap": lambda f: grad(squared(vmap(f)))(ROWS),
    "grad_of_vmap_beside": lambda f: grad(lambda p: (vmap(lambda s: f(p) * s)(X) ** 2).sum())(X),
    "vmap_of_grad_of_vmap": lambda f: vmap(grad(lambda p: squared(vmap(f))(torch.stack([p, p.sin()]))))(ROWS),
    "jvp": lambda f: jvp(f, (X,), (X.cos(),))[1],
    "jacrev": lambda f: jacrev(f)(X),
    "grad_of_jvp": lambda f: grad(lambda p: (jvp(f, (p,), (p.cos(),))[1] ** 2).sum())(X),
    "jvp_of_grad": lambda f: jvp(grad(squared(f)), (X,), (X.cos(),))[1],
    "hessian": lambda f: hessian(squared(f))(X),
}


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("use", USES)
def test_gradient_is_the_plain_functions(use: str, stack: str) -> None:
    expected = STACKS[stack](lambda a: USES[use](plain, a))
    actual = STACKS[stack](lambda a: USES[use](fckpt.remat, a))
    # The tensor is used at several places, whose contributions are summed in another order: doubles around 1.
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


# -- what cannot be followed is an error --------------------------------------------------------------------


def test_tensor_that_no_walk_finds_is_named() -> None:
    hidden = [[[[[[[[[X]]]]]]]]]

    def dig(value: Any) -> Tensor:
        return value if isinstance(value, Tensor) else dig(value[0])

    def value(p: Tensor) -> Tensor:
        hidden[0][0][0][0][0][0][0][0][0] = p
        return fckpt.remat(lambda b: dig(hidden) * b)(X).sum()

    with pytest.raises(fckpt.ClosureError, match=r"shape \[3\].*pass the tensor as an argument"):
        grad(value)(X)
    y = X.clone().requires_grad_()
    value(y).backward()
    assert torch.equal(y.grad, X)  # plain autograd finds it by itself


def test_vjp_function_made_outside_is_refused_under_a_transform_and_right_without() -> None:
    def value(w: Wrap) -> Fn:
        def run(p: Tensor) -> Tensor:
            pull = vjp(lambda q: q.sin() * p, p)[1]
            return (w(lambda ct: pull(ct)[0] * ct)(torch.ones_like(X)) ** 2).sum()

        return run

    with pytest.raises(fckpt.ClosureError, match="outside of the rematerialised function"):
        grad(value(fckpt.remat))(X)
    y = X.clone().requires_grad_()
    (got,) = torch.autograd.grad(value(fckpt.remat)(y), y)
    torch.testing.assert_close(got, grad(value(plain))(X), rtol=1e-12, atol=1e-12)


# -- variables that move on ---------------------------------------------------------------------------------


def test_plain_backward_recomputes_with_the_values_of_its_own_turn() -> None:
    """The functions of a loop share its variables, whose values have changed when backward comes."""

    def run(w: Wrap) -> Tensor:
        y = x = X.clone().requires_grad_()
        for k, scale in enumerate((X, X.cos(), X.exp())):
            y = w(lambda b: (b * scale).sin() * k + b)(y)
        return torch.autograd.grad(y.sum(), x)[0]

    assert torch.equal(run(fckpt.remat), run(plain))


@pytest.mark.parametrize("how", ["grad", "backward", "forward only"])
def test_variable_that_takes_the_result_makes_no_cycle(how: str) -> None:
    """Through its own closure a result would hold itself, where Python's collector cannot see it."""
    results = []

    def loop(p: Tensor) -> Tensor:
        x = p
        for _ in range(2):
            x = fckpt.remat(lambda h: fckpt.remat(lambda g: (g * x).sin())(h).cos())(x.cos())
        results.append(weakref.ref(x))
        return x.sum()

    if how == "grad":
        grad(loop)(X)
    else:
        y = X.clone().requires_grad_()
        out = loop(y)
        if how == "backward":
            out.backward()
        del out
    gc.collect()
    assert results[0]() is None


def test_what_a_finished_region_closed_over_is_let_go_at_once() -> None:
    def step() -> weakref.ref[Tensor]:
        held, x = torch.ones(3), torch.ones(3, requires_grad=True)
        fckpt.remat(lambda x: (x * held).sin())(x).sum().backward()
        return weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        assert step()() is None
    finally:
        gc.enable()


def test_closure_of_a_closure_under_a_budget() -> None:
    """The function has no cell of its own; what a capture names lies in one of a function that it reaches."""

    class Reached:
        def __init__(self, a: Tensor):
            self.get = lambda: a

        def step(self, x: Tensor) -> Tensor:
            return (x * self.get()).sin().sin().sin()

    a, x = X.clone().requires_grad_(), X.cos().requires_grad_()
    found = Reached(a)
    wanted = torch.autograd.grad(found.step(x).sum(), [a, x])
    got = torch.autograd.grad(fckpt.remat(found.step, budget=1.0)(x).sum(), [a, x])
    assert all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True))


def in_a_list() -> tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]:
    held = [torch.ones_like(X)]

    def fn(x: Tensor) -> Tensor:
        held[0] = held[0] + x.detach()
        return (x.tanh() * held[0]).sum()

    return fn, lambda: held[0]


def in_a_dict() -> tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]:
    held = {"state": torch.ones_like(X)}

    def fn(x: Tensor) -> Tensor:
        held["state"] = x.tanh().detach() + held["state"]
        return (x.tanh() * held["state"]).sum()

    return fn, lambda: held["state"]


def in_an_object() -> tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]:
    class Held:
        state = torch.ones_like(X)

    held = Held()
    held.state = torch.ones_like(X)

    def fn(x: Tensor) -> Tensor:
        held.state = held.state * 2
        return (x.tanh() * held.state).sum()

    return fn, lambda: held.state


def in_a_variable() -> tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]:
    state = torch.ones_like(X)

    def fn(x: Tensor) -> Tensor:
        nonlocal state
        state = state + x.tanh().detach()
        return (x.tanh() * state).sum()

    return fn, lambda: state


def new_in_a_dict() -> tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]:
    held: dict[str, Tensor] = {}

    def fn(x: Tensor) -> Tensor:
        held["state"] = held["state"] + 1 if "state" in held else torch.ones_like(X)
        return (x.tanh() * held["state"]).sum()

    return fn, lambda: held["state"]


def new_in_an_object() -> tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]:
    class Held:
        state: Tensor | None = None

    held = Held()
    held.state = None

    def fn(x: Tensor) -> Tensor:
        held.state = torch.ones_like(X) if held.state is None else held.state * 2
        return (x.tanh() * held.state).sum()

    def state() -> Tensor:
        assert held.state is not None
        return held.state

    return fn, state


def appended_to_a_list() -> tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]:
    held: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        held.append(torch.ones_like(X) * len(held))
        return (x.tanh() * sum(held)).sum()

    return fn, lambda: torch.stack(held)


@pytest.mark.filterwarnings("ignore:.*is captured for the third time:fckpt.PlanWarning")
@pytest.mark.parametrize("budget", [None, 1.0])
@pytest.mark.parametrize(
    "make",
    [in_a_list, in_a_dict, in_an_object, in_a_variable, new_in_a_dict, new_in_an_object, appended_to_a_list],
)
def test_a_tensor_that_the_function_replaces_is_replaced_once(make: Callable[[], Any], budget: float | None) -> None:
    found = []
    for wrapped in (False, True):
        fn, state = make()
        run = fckpt.remat(fn, budget=budget) if wrapped else fn
        x = X.clone().requires_grad_()
        steps = [(run(x), *torch.autograd.grad(run(x), x), state()) for _ in range(2)]
        found.append([tensor for step in steps for tensor in step])
    assert all(map(torch.equal, *found))
