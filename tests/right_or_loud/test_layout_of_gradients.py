"""Strides of gradients: those of the plain function, for gradients in `.grad`, returned ones, and those of hooks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fckpt

Fn = Callable[..., Tensor]


def contiguous(*shape: int) -> Tensor:
    return torch.randn(*shape)


def transposed(*shape: int) -> Tensor:
    return torch.randn(*reversed(shape)).t()


def with_gaps(*shape: int) -> Tensor:
    return torch.randn(shape[0], 2 * shape[1])[:, ::2]


PROGRAMS: dict[str, tuple[Fn, Callable[..., Tensor]]] = {
    "einsum": (lambda x: torch.einsum("ij,kj->ik", x, x).square().mean(), contiguous),
    "a transposed leaf": (lambda x: x.tanh().softmax(-1).square().mean(), transposed),
    "a leaf with gaps": (lambda x: x.tanh().exp().square().mean(), with_gaps),
    "an expanded gradient": (lambda x: x.sum() * 2, contiguous),
    "a transposed product": (lambda x: (x.t() @ torch.ones(7, 3)).tanh().sum(), contiguous),
    "one gradient for two": (lambda x, y: (x + y).exp().sum(), contiguous),
    "python": (lambda x: x.tanh().softmax(-1).square().mean() * float(np.float64(2.0)), transposed),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "budget": {"budget": 1.0},
    "policy": {"policy": fckpt.policies.nothing_saveable},
    "no plan": {},
}


def seen(grads: Any) -> list[Any]:
    """What a program can see of gradients: bits, strides, and which of them are one."""
    grads = list(grads)
    bits = [part for g in grads for part in (g.clone(), g.sum(), g.norm(), g.sum(0))]
    shared = [[a.untyped_storage()._cdata == b.untyped_storage()._cdata for a in grads] for b in grads]
    return [*bits, [g.stride() for g in grads], shared]


def returned(fn: Fn, leaves: list[Tensor]) -> list[Any]:
    return seen(torch.autograd.grad(fn(*leaves), leaves))


def stored(fn: Fn, leaves: list[Tensor]) -> list[Any]:
    fn(*leaves).backward()
    found = seen(x.grad for x in leaves)
    for x in leaves:
        x.grad = None
    return found


def hooked(fn: Fn, leaves: list[Tensor]) -> list[Any]:
    grads: list[Tensor] = []
    handles = [x.register_hook(grads.append) for x in leaves]
    try:
        return [*stored(fn, leaves), *seen(grads)[:-1]]
    finally:
        for handle in handles:
            handle.remove()


WAYS = {"returned": returned, "stored": stored, "hooked": hooked}


def equal(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_have_the_strides_of_plain(program: str, options: str) -> None:
    fn, make = PROGRAMS[program]
    count = fn.__code__.co_argcount
    region = fckpt.remat(fn, **OPTIONS[options])
    orders = [["returned", "stored", "hooked"], ["stored", "returned", "stored"], ["hooked", "returned", "hooked"]]
    for ways in orders:
        region = fckpt.remat(fn, **OPTIONS[options])
        for size in (5, 9):
            leaves = [make(7, size).requires_grad_() for _ in range(count)]
            for way in ways:
                with warnings.catch_warnings():
                    if program == "python" or way == "hooked":  # it cannot be traced again; copies for hooks
                        warnings.simplefilter("ignore", fckpt.BudgetWarning)
                    found = WAYS[way](region, leaves)
                assert equal(WAYS[way](fn, leaves), found), (ways, way)


def test_a_captured_parameter() -> None:
    weight = nn.Parameter(transposed(5, 7))
    fn = lambda x: (x * weight).tanh().square().mean()
    x = torch.randn(5, 7)
    for way in (returned, stored, returned):
        assert equal(*[way(lambda _, f=f: f(x), [weight]) for f in (fn, fckpt.remat(fn, budget=1.0))])


def test_a_function_that_is_not_traced_again_says_so() -> None:
    fn, make = PROGRAMS["a transposed leaf"]
    x = make(7, 5).requires_grad_()
    planned = fckpt.remat(fn, plan=fckpt.plan(fn, x, budget=1.0))
    with pytest.warns(fckpt.BudgetWarning, match="in another layout than loss.backward"):
        found = returned(planned, [x])
    assert equal(returned(fn, [x]), found)


def test_the_memory_of_returned_gradients() -> None:
    x, y = (torch.randn(1000, 100, requires_grad=True) for _ in range(2))
    region = fckpt.remat(lambda x, y: (x + y).sum(), budget=1.0)
    torch.autograd.grad(region(x, y), [x, y])
    peak = fckpt.measure_peak(lambda: torch.autograd.grad(region(x, y), [x, y])).peak_bytes
    assert peak <= fckpt.measure_peak(lambda: torch.autograd.grad((x + y).sum(), [x, y])).peak_bytes + x.nbytes + 64


def test_the_copies_that_hooks_cause_are_said() -> None:
    """Two leaves have one gradient, of which autograd makes copies after the hooks: three of them live at once."""
    fn = lambda x, y: (x + y).tanh().sum()
    leaves = [torch.randn(300, 200).requires_grad_() for _ in range(2)]
    limit = fckpt.plan(fn, *leaves, budget=1.0).peak_bytes
    assert limit < 3 * leaves[0].nbytes
    region = fckpt.remat(fn, budget=limit)
    region(*leaves).backward()
    for x in leaves:
        x.grad = None
        x.register_hook(lambda g: None)
    with pytest.warns(fckpt.BudgetWarning, match="a hook sees a gradient"):
        region(*leaves).backward()
    assert leaves[0].grad is not None and leaves[0].grad.data_ptr() != leaves[1].grad.data_ptr()
