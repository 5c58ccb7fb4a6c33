"""Every way in which torch differentiates: `WAYS`, from a function of parameters and data to its results."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as fwad
import torch.nn.functional as F
from helpers import gradients, leaf
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import fckpt

Fn = Callable[[Any, torch.Tensor], torch.Tensor]

GENERATOR = torch.Generator().manual_seed(0)
PARAMS = {
    "w": torch.randn(4, 5, dtype=torch.float64, generator=GENERATOR),
    "v": torch.randn(5, 3, dtype=torch.float64, generator=GENERATOR),
    "b": torch.randn(3, dtype=torch.float64, generator=GENERATOR),
}
X = torch.randn(2, 4, dtype=torch.float64, generator=GENERATOR)
CT = torch.randn(2, 3, dtype=torch.float64, generator=GENERATOR)
CTS = torch.randn(5, 2, 3, dtype=torch.float64, generator=GENERATOR)


def mlp(params: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.tanh(x @ params["w"]) @ params["v"] + params["b"]).sin()


def dropout_mlp(params: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.dropout(torch.tanh(x @ params["w"]), 0.5)
    return F.dropout(torch.tanh(h @ params["v"]), 0.3)


def branching(params: Any, x: torch.Tensor) -> torch.Tensor:
    """In-place work on its own tensors, an integer index, a view, a detached factor."""
    h = x @ params["w"]
    h = h.clone().mul_(2).relu_()
    top = h.detach().sum(-1).argsort()
    h = torch.cat([h[..., 1:], h.narrow(-1, 0, 1)], -1) * (h > 0)
    return (h @ params["v"]).index_select(0, top) if x.dim() == 2 else h @ params["v"]


def loss(fn: Fn) -> Fn:
    return lambda params, x: (fn(params, x) ** 2).sum()


def of_x(fn: Fn) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: fn(PARAMS, x)


# -- ways to differentiate: each takes the function and returns a tree of tensors ---------------------------

WAYS: dict[str, Callable[[Fn], Any]] = {}
# Higher orders under torch.func: every contribution to a region's input is summed within its region first, so
# the order of summation, and with it the last bit, differs from the plain function's. See docs/concepts.md.
REGROUPED: set[str] = set()


def way(fn: Callable[[Fn], Any] | None = None, *, regrouped: bool = False) -> Any:
    def register(fn: Callable[[Fn], Any]) -> Callable[[Fn], Any]:
        WAYS[fn.__name__] = fn
        if regrouped:
            REGROUPED.add(fn.__name__)
        return fn

    return register(fn) if fn else register


@way
def backward(fn: Fn) -> Any:
    params, x = leaf(PARAMS), leaf(X)
    loss(fn)(params, x).backward()
    return gradients(params), x.grad


@way
def backward_of_parameters_only(fn: Fn) -> Any:
    params = leaf(PARAMS)
    loss(fn)(params, X).backward()
    return gradients(params)


@way
def backward_with_inputs(fn: Fn) -> Any:
    params = leaf(PARAMS)
    loss(fn)(params, X).backward(inputs=[params["v"]])
    return params["v"].grad


@way
def autograd_grad(fn: Fn) -> Any:
    params = leaf(PARAMS)
    return torch.autograd.grad(loss(fn)(params, X), [params["w"], params["v"]])


@way
def retained_graph_three_times(fn: Fn) -> Any:
    params = leaf(PARAMS)
    value = loss(fn)(params, X)
    value.backward(retain_graph=True)
    value.backward(retain_graph=True)
    value.backward()
    return gradients(params)


@way
def backward_create_graph(fn: Fn) -> Any:
    params = leaf(PARAMS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that create_graph=True makes a reference cycle
        loss(fn)(params, X).backward(create_graph=True)
    sum((p.grad**2).sum() for p in params.values() if p.grad is not None).backward()
    return gradients(params)


@way
def double_backward(fn: Fn) -> Any:
    x = leaf(X)
    (first,) = torch.autograd.grad(loss(fn)(PARAMS, x), x, create_graph=True)
    return torch.autograd.grad((first**2).sum(), x)


@way
def triple_backward(fn: Fn) -> Any:
    x = leaf(X)
    (first,) = torch.autograd.grad(loss(fn)(PARAMS, x), x, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), x, create_graph=True)
    return torch.autograd.grad((second**2).sum(), x)


@way
def is_grads_batched(fn: Fn) -> Any:
    x = leaf(X)
    return torch.autograd.grad(fn(PARAMS, x), x, CTS, is_grads_batched=True)


@way
def autograd_functional_jacobian(fn: Fn) -> Any:
    return torch.autograd.functional.jacobian(of_x(fn), X)


@way
def autograd_functional_jacobian_vectorized(fn: Fn) -> Any:
    return torch.autograd.functional.jacobian(of_x(fn), X, vectorize=True)


@way
def autograd_functional_hessian(fn: Fn) -> Any:
    return torch.autograd.functional.hessian(of_x(loss(fn)), X)


@way
def autograd_functional_hvp(fn: Fn) -> Any:
    return torch.autograd.functional.hvp(of_x(loss(fn)), X, X.cos())


@way
def dual_level(fn: Fn) -> Any:
    with fwad.dual_level():
        return tuple(fwad.unpack_dual(fn(PARAMS, fwad.make_dual(X, X.cos()))))


@way
def reverse_over_dual_level(fn: Fn) -> Any:
    params = leaf(PARAMS)
    with fwad.dual_level():
        tangent = fwad.unpack_dual(fn(params, fwad.make_dual(X, X.cos()))).tangent
        assert tangent is not None
        return torch.autograd.grad((tangent**2).sum(), [params["w"], params["v"]])


@way
def reverse_after_dual_level(fn: Fn) -> Any:
    params = leaf(PARAMS)
    with fwad.dual_level():
        tangent = fwad.unpack_dual(fn(params, fwad.make_dual(X, X.cos()))).tangent
    assert tangent is not None
    return torch.autograd.grad((tangent**2).sum(), [params["w"], params["v"]])


@way
def func_grad(fn: Fn) -> Any:
    return grad(loss(fn), argnums=(0, 1))(PARAMS, X)


@way
def func_grad_and_value(fn: Fn) -> Any:
    return grad_and_value(loss(fn))(PARAMS, X)


@way
def func_grad_of_leaves_that_require_grad(fn: Fn) -> Any:
    return grad(loss(fn))(leaf(PARAMS), leaf(X))


@way
def func_vjp_twice(fn: Fn) -> Any:
    out, pull = vjp(fn, PARAMS, X)
    return out, pull(CT), pull(2 * CT)


@way
def func_jvp(fn: Fn) -> Any:
    return jvp(of_x(fn), (X,), (X.cos(),))


@way
def func_jvp_of_all(fn: Fn) -> Any:
    return jvp(fn, (PARAMS, X), ({k: p.cos() for k, p in PARAMS.items()}, X.cos()))


@way
def func_linearize(fn: Fn) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.fx warns of its own get_attr nodes
        out, push = linearize(of_x(fn), X)
        return out, push(X.cos())


@way
def func_jacrev(fn: Fn) -> Any:
    return jacrev(of_x(fn))(X)


@way
def func_jacrev_of_params(fn: Fn) -> Any:
    return jacrev(fn)(PARAMS, X)


@way
def func_jacrev_chunked(fn: Fn) -> Any:
    return jacrev(of_x(fn), chunk_size=2)(X)


@way
def func_jacfwd(fn: Fn) -> Any:
    return jacfwd(of_x(fn), randomness="same")(X)


@way
def func_vmap(fn: Fn) -> Any:
    return vmap(fn, (None, 0), randomness="different")(PARAMS, X)


@way
def func_vmap_other_dims(fn: Fn) -> Any:
    batch = torch.stack([X, X.cos(), X.sin()], 1)
    return vmap(fn, (None, 1), out_dims=-1, randomness="different")(PARAMS, batch)


@way
def func_vmap_chunked(fn: Fn) -> Any:
    return vmap(fn, (None, 0), chunk_size=1, randomness="different")(PARAMS, X)


@way
def func_vmap_over_params(fn: Fn) -> Any:
    stacked = {k: torch.stack([p, p.cos()]) for k, p in PARAMS.items()}
    return vmap(grad(loss(fn)), (0, None), randomness="different")(stacked, X)


@way
def func_vmap_nothing_batched(fn: Fn) -> Any:
    return vmap(lambda i: fn(PARAMS, X) + i, randomness="different")(torch.arange(3.0))


@way
def per_sample_gradients(fn: Fn) -> Any:
    return vmap(grad(loss(fn)), (None, 0), randomness="different")(PARAMS, X)


@way
def per_sample_gradients_same_randomness(fn: Fn) -> Any:
    return vmap(grad(loss(fn)), (None, 0), randomness="same")(PARAMS, X)


@way
def grad_of_vmap(fn: Fn) -> Any:
    mapped = vmap(fn, (None, 0), randomness="different")
    return grad(lambda params: (mapped(params, X) ** 2).sum())(PARAMS)


@way
def grad_of_vmap_nothing_batched(fn: Fn) -> Any:
    many = lambda params: vmap(lambda i: fn(params, X) + i, randomness="different")(torch.arange(3.0))
    return grad(lambda params: (many(params) ** 2).sum())(PARAMS)


@way
def backward_of_vmap(fn: Fn) -> Any:
    params = leaf(PARAMS)
    (vmap(fn, (None, 0), randomness="different")(params, X) ** 2).sum().backward()
    return gradients(params)


@way
def vmap_of_vmap_of_grad(fn: Fn) -> Any:
    return vmap(vmap(grad(of_x(loss(fn))), randomness="different"), randomness="different")(X.expand(3, 2, 4))


@way
def vmap_of_jvp(fn: Fn) -> Any:
    return vmap(lambda x: jvp(of_x(fn), (x,), (x.cos(),)), randomness="different")(X)


@way
def jvp_of_vmap(fn: Fn) -> Any:
    return jvp(lambda x: vmap(fn, (None, 0), randomness="different")(PARAMS, x), (X,), (X.cos(),))


@way(regrouped=True)
def func_hessian(fn: Fn) -> Any:
    return hessian(of_x(loss(fn)))(X)


@way(regrouped=True)
def vmap_of_hessian(fn: Fn) -> Any:
    return vmap(hessian(of_x(loss(fn))))(X)


@way(regrouped=True)
def jacrev_of_jacrev(fn: Fn) -> Any:
    return jacrev(jacrev(of_x(loss(fn))))(X)


@way(regrouped=True)
def jacrev_of_jacfwd(fn: Fn) -> Any:
    return jacrev(jacfwd(of_x(loss(fn)), randomness="same"))(X)


@way
def jacfwd_of_jacfwd(fn: Fn) -> Any:
    return jacfwd(jacfwd(of_x(fn), randomness="same"), randomness="same")(X)


@way
def jvp_of_jvp(fn: Fn) -> Any:
    return jvp(lambda y: jvp(of_x(fn), (y,), (y.cos(),)), (X,), (X.sin(),))


@way(regrouped=True)
def grad_of_grad(fn: Fn) -> Any:
    return grad(lambda x: (grad(of_x(loss(fn)))(x) ** 2).sum())(X)


@way(regrouped=True)
def grad_of_grad_of_grad(fn: Fn) -> Any:
    second = lambda x: (grad(lambda x: (grad(of_x(loss(fn)))(x) ** 2).sum())(x) ** 2).sum()
    return grad(second)(X)


@way(regrouped=True)
def grad_of_jvp(fn: Fn) -> Any:
    return grad(lambda x: (jvp(of_x(fn), (x,), (X.cos(),))[1] ** 2).sum())(X)


@way(regrouped=True)
def jvp_of_grad(fn: Fn) -> Any:
    return jvp(grad(of_x(loss(fn))), (X,), (X.cos(),))


@way(regrouped=True)
def grad_through_vjp(fn: Fn) -> Any:
    return grad(lambda x: vjp(of_x(fn), x)[1](CT)[0].sin().sum())(X)


@way
def grad_of_cotangent(fn: Fn) -> Any:
    return grad(lambda ct: vjp(of_x(fn), X)[1](ct)[0].sin().sum())(CT)


@way
def vmap_of_grad_of_cotangent(fn: Fn) -> Any:
    _, pull = vjp(of_x(fn), X)
    return vmap(grad(lambda ct: pull(ct)[0].sin().sum()))(CTS)


@way
def autocast(fn: Fn) -> Any:
    params, x = leaf({k: p.float() for k, p in PARAMS.items()}), X.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fn(params, x)
    (out.float() ** 2).sum().backward()
    return out, gradients(params)


@way
def autocast_under_func_grad(fn: Fn) -> Any:
    def value(params: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (fn(params, X.float()).float() ** 2).sum()

    return grad(value)({k: p.float() for k, p in PARAMS.items()})


@way
def no_grad(fn: Fn) -> Any:
    with torch.no_grad():
        return fn(leaf(PARAMS), X)


@way
def inference_mode(fn: Fn) -> Any:
    with torch.inference_mode():
        return fn(PARAMS, X).clone()


@way
def save_on_cpu(fn: Fn) -> Any:
    params = leaf(PARAMS)
    with torch.autograd.graph.save_on_cpu():
        loss(fn)(params, X).backward()
    return gradients(params)


@way
def fckpt_grad(fn: Fn) -> Any:
    return fckpt.grad(loss(fn), argnums=(0, 1))(PARAMS, X)


@way
def fckpt_vjp(fn: Fn) -> Any:
    out, pull = fckpt.vjp(fn, PARAMS, X)
    return out, pull(CT), pull(CT, retain_graph=False)


@way
def vmap_of_fckpt_vjp_function(fn: Fn) -> Any:
    _, pull = fckpt.vjp(of_x(fn), X)
    return vmap(lambda ct: pull(ct)[0])(CTS)


@way(regrouped=True)
def func_grad_of_fckpt_grad(fn: Fn) -> Any:
    return grad(lambda x: (fckpt.grad(of_x(loss(fn)))(x) ** 2).sum())(X)


# Plain PyTorch fails there too: a random operation within the vmap of `jacrev` or `hessian`.
RANDOM_FORBIDDEN = {"func_hessian", "vmap_of_hessian", "func_linearize"}
