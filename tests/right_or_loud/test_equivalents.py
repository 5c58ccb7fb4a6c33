"""Code that Dynamo does not evaluate is captured in an equivalent form, or traced as Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_equal, leaf
from torch import Tensor, nn

import fckpt
from fckpt import policies

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(5))


def planned(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fckpt.remat(fn, policy=policies.nothing_saveable)


def frozen(x: Tensor) -> Tensor:
    one = torch.eye(4)
    one.requires_grad = False
    return (x @ one).sin()


def frozen_copy(x: Tensor) -> Tensor:
    held = x.detach()
    held.requires_grad = False
    return x.sin() * held


LINEAR = nn.Linear(4, 4)


def named(x: Tensor) -> Tensor:
    kind = type(LINEAR.weight)
    if kind.__module__.startswith("other.") or not kind.__qualname__.endswith("Parameter"):
        return x.cos()
    return LINEAR(x).sin()


@pytest.mark.parametrize("fn", [frozen, frozen_copy, named])
def test_code_with_an_equivalent_is_captured(fn: Callable[[Tensor], Tensor]) -> None:
    region = planned(fn)
    found = []
    for call in (region, fn):
        x = leaf(X)
        y = call(x)
        found.append((y, *torch.autograd.grad(y.sum(), x)))
    assert_equal(*found)
    assert fckpt.stats(region).captures == 1


def test_a_tensor_that_is_made_a_leaf_is_traced_as_python() -> None:
    def fn(x: Tensor) -> Tensor:
        one = torch.eye(4)
        one.requires_grad = True
        return (x @ one).sin()

    assert_equal(planned(fn)(leaf(X)), fn(leaf(X)))
