"""Functions that ask whether a tensor is a leaf, as peft does before it freezes adapters."""

from __future__ import annotations

import pytest
import torch
from helpers import leaf
from test_traced_as_python import GENERATOR, X, assert_same, drawn
from torch import Tensor, nn

import fckpt


@pytest.mark.parametrize("given", [X, leaf(X), leaf(X) * 1, leaf(X).T], ids=["constant", "leaf", "computed", "view"])
def test_leaves(given: Tensor) -> None:
    weight = leaf(torch.ones(()))

    def plain(x: Tensor) -> Tensor:
        read = [t.is_leaf for t in (given, weight, weight * 2, given * 2, given.detach(), x * given.reshape(4, 8))]
        with torch.no_grad():
            read += [(weight * 2).is_leaf, given[1:].is_leaf]
        return drawn((x * weight) @ given.reshape(8, 4).sin()) * sum(2**i * leaf for i, leaf in enumerate(read))

    planned = fckpt.remat(plain, budget=1.0)
    for _ in range(2):
        assert_same(planned, plain)
        with torch.no_grad():
            GENERATOR.manual_seed(0)
            expected = plain(X)
            GENERATOR.manual_seed(0)
            assert torch.equal(planned(X), expected)
    with pytest.raises(fckpt.TraceError, match="`is_leaf` of a tensor here"):
        torch.func.grad(planned)(X)


def test_parameters_frozen_for_a_part_of_the_call() -> None:
    net = nn.Linear(8, 8)

    def plain(x: Tensor) -> Tensor:
        for frozen in (True, False):
            for parameter in net.parameters():
                if parameter.is_leaf:
                    parameter.requires_grad_(not frozen)
            x = net(x).tanh()
        return drawn(x)

    reference, planned = [], fckpt.remat(plain, budget=1.0)
    for fn in (plain, planned, planned):
        net.zero_grad()
        GENERATOR.manual_seed(0)
        fn(X).backward()
        reference.append([p.grad for p in net.parameters()])
        assert all(p.requires_grad for p in net.parameters())
    for found in reference[1:]:
        assert all(map(torch.equal, found, reference[0]))
