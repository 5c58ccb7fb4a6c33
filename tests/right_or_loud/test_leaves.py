"""Functions that ask whether a tensor is a leaf, as peft does before it freezes adapters."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.parametrize("options", [{}, {"budget": 1.0}, {"policy": fckpt.policies.dots_saveable}], ids=str)
@pytest.mark.parametrize("thawed", [True, False], ids=["thawed", "left frozen"])
def test_a_function_that_freezes_parameters(options: dict[str, Any], thawed: bool) -> None:
    """Training of a generator freezes the discriminator: a plan that would leave it as it was is refused."""

    def trained(wrap: Any) -> list[Any]:
        torch.manual_seed(0)
        generator, last = nn.Linear(4, 4), nn.Linear(4, 1)
        discriminator = nn.Sequential(nn.Linear(4, 4), last)

        def loss(x: torch.Tensor) -> torch.Tensor:
            discriminator.requires_grad_(False)
            y = discriminator(torch.tanh(generator(x))).square().mean()
            if thawed:
                last.weight.requires_grad = True
                discriminator.requires_grad_(True)
            return y

        fn, found = wrap(loss), []
        for _ in range(2):
            fn(torch.ones(3, 4)).backward()
            found += [p.requires_grad for p in discriminator.parameters()]
        return [*found, *(p.grad for p in (*generator.parameters(), *discriminator.parameters()))]

    expected = trained(lambda fn: fn)
    if options and not thawed:
        with pytest.raises(fckpt.TraceError, match=r"leaves `requires_grad` of .*0.weight` at False"):
            trained(lambda fn: fckpt.remat(fn, **options))
        return
    found = trained(lambda fn: fckpt.remat(fn, **options))
    for ours, plain in zip(found, expected, strict=True):
        assert torch.equal(ours, plain) if isinstance(plain, torch.Tensor) else ours == plain


def test_an_argument_that_begins_to_require_grad_inside() -> None:
    """Energies of molecules are differentiated with respect to positions: a plan would lose the flag, and `.grad`."""

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        energy = torch.tanh(x.requires_grad_() @ w).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force.square().mean() + energy

    planned, w = fckpt.remat(loss, budget=1.0), torch.full((4, 4), 0.3, requires_grad=True)
    with pytest.raises(fckpt.TraceError, match=r"leaves `requires_grad` of `args\[0\]` at True.*before the call"):
        planned(torch.ones(3, 4), w)
    x, other = (torch.ones(3, 4, requires_grad=True) for _ in range(2))
    planned(x, w).backward()
    (expected,) = torch.autograd.grad(loss(other, w), other)
    assert x.grad is not None and torch.equal(x.grad, expected)
