"""Functions whose outcome Python keeps elsewhere: singledispatch registries and caches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from helpers import assert_equal, leaf
from torch import Tensor

import fckpt

X = torch.randn(5, generator=torch.Generator().manual_seed(0))


def planned(fn: Any) -> Any:
    return fckpt.remat(fn, policy=fckpt.policies.nothing_saveable)


def dispatching() -> tuple[Any, Callable[[Tensor], Tensor]]:
    @functools.singledispatch
    def chosen(kind: Any, h: Tensor) -> Tensor:
        return h.sin()

    return chosen, lambda x: (chosen(1, x * 2) * x).exp()


def test_a_registration_between_forward_and_backward() -> None:
    """A recompute with the old registry would leave its choice in the dispatcher's cache, for all later calls."""
    chosen, fn = dispatching()
    x = leaf(X)
    result = fckpt.remat(fn)(x).sum()
    chosen.register(int)(lambda kind, h: h.cos())
    with pytest.raises(fckpt.ImpureFunctionError, match="a function for int was registered"):
        result.backward()
    assert_equal(fn(x), (torch.cos(x * 2) * x).exp())


@pytest.mark.filterwarnings("ignore:.*is captured for the third time:fckpt.PlanWarning")
@pytest.mark.parametrize("wrap", [fckpt.remat, planned])
def test_a_registration_between_two_steps(wrap: Any) -> None:
    chosen, fn = dispatching()
    region, x = wrap(fn), leaf(X)
    for function in (torch.sin, torch.cos, torch.tanh):
        chosen.register(int)(lambda kind, h, function=function: function(h))
        assert_equal(torch.autograd.grad(region(x).sum(), x), torch.autograd.grad(fn(x).sum(), x))


@pytest.mark.parametrize("wrap", [fckpt.remat, planned])
@pytest.mark.parametrize("cleared", [False, True])
def test_a_cached_function_whose_variables_change(wrap: Any, cleared: bool) -> None:
    """The cache returns what it has, until it is cleared."""
    settings = {"factor": 2.0}

    @functools.lru_cache
    def factor(n: int) -> float:
        return settings["factor"] * n

    region, x = wrap(lambda x: ((x * 2).sin() * factor(3) * x).exp()), leaf(X)
    for value in (2.0, 5.0):
        settings["factor"] = value
        if cleared:
            factor.cache_clear()
        expected = ((x * 2).sin() * (3 * (value if cleared else 2.0)) * x).exp()
        result = region(x)
        assert_equal(result, expected)
        assert_equal(torch.autograd.grad(result.sum(), x), torch.autograd.grad(expected.sum(), x))


def test_a_structure_that_is_closed_over_and_changes() -> None:
    """By the Python tracer, too, which Dynamo's refusal of `id` leads to."""
    spec = optree.tree_structure((0, 1))

    def fn(x: Tensor) -> Tensor:
        h = x * 2
        known = {id(h): h}
        return optree.tree_unflatten(spec, [known[id(h)].sin(), h])[0].exp()

    region, x = planned(fn), leaf(X)
    for made in (optree.tree_structure((0, 1)), optree.tree_structure(((0,), 1)), optree.tree_structure((0, 1))):
        spec = made
        if made.num_children == 2 and made.child(0).is_leaf():
            assert_equal(torch.autograd.grad(region(x).sum(), x), torch.autograd.grad(fn(x).sum(), x))
        else:
            with pytest.raises(AttributeError):  # a tuple has no exp, in the plain function as well
                region(x)
