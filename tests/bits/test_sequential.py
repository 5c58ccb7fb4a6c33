"""sequential does what checkpoint_sequential does, with boundaries of one's choice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import assert_equal, gradients, leaf
from torch import nn
from torch.func import grad
from torch.utils.checkpoint import checkpoint_sequential

import fckpt
from fckpt._sequential import segment_lengths

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
FNS = [lambda w, x: torch.tanh(x @ w)] * 9
PARAMS = [torch.randn(16, 16, generator=torch.Generator().manual_seed(i)) / 4 for i in range(9)]


@pytest.mark.parametrize("segments", [1, 2, 4, 9, (1, 1, 7), (9,), "sqrt"])
@pytest.mark.parametrize("remat_last", [False, True])
def test_functions(segments: Any, remat_last: bool) -> None:
    def plain(params: Any, x: torch.Tensor) -> torch.Tensor:
        for fn, w in zip(FNS, params, strict=True):
            x = fn(w, x)
        return x

    chain = fckpt.sequential(FNS, segments, remat_last=remat_last)
    assert_equal(grad(lambda p: (chain(p, X) ** 2).sum())(PARAMS), grad(lambda p: (plain(p, X) ** 2).sum())(PARAMS))
    a, b = leaf(PARAMS), leaf(PARAMS)
    (chain(a, X) ** 2).sum().backward()
    (plain(b, X) ** 2).sum().backward()
    assert_equal(gradients(a), gradients(b))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(9)])


@pytest.mark.parametrize("segments", [1, 3, 9, (2, 3, 4), "sqrt"])
def test_modules_beside_checkpoint_sequential(segments: Any) -> None:
    plain, torchs, ours = mlp(), mlp(), fckpt.sequential(mlp(), segments)
    (plain(X) ** 2).sum().backward()
    (ours(X) ** 2).sum().backward()
    count = segments if isinstance(segments, int) else 3
    (checkpoint_sequential(torchs, count, X, use_reentrant=False) ** 2).sum().backward()
    assert list(ours.state_dict()) == list(plain.state_dict())
    for a, b, c in zip(ours.parameters(), plain.parameters(), torchs.parameters(), strict=True):
        assert_equal((a.grad, c.grad), (b.grad, b.grad))


def test_a_list_of_modules_is_an_nn_sequential() -> None:
    layers = list(mlp())
    chain = fckpt.sequential(layers)
    assert isinstance(chain, nn.Sequential) and list(chain.state_dict()) == list(mlp().state_dict())
    assert torch.equal(chain(X), nn.Sequential(*layers)(X))


def test_modules_may_be_replaced_afterwards() -> None:
    chain = fckpt.sequential(mlp())
    chain(X)
    chain[0] = nn.Identity()
    assert torch.equal(chain(X), nn.Sequential(*chain)(X))


def test_lengths() -> None:
    assert segment_lengths(9, "sqrt") == (3, 3, 3)
    assert segment_lengths(10, 3) == (4, 3, 3)
    assert segment_lengths(1, "sqrt") == (1,)
    assert segment_lengths(5, (1, 4)) == (1, 4)


def test_peak_falls_to_the_order_of_the_square_root() -> None:
    """64 layers, 8 segments: 8 boundaries and 8 layers of one segment are alive at once, not 64."""
    width, rows, count = 16, 4096, 64
    x = torch.randn(rows, width)
    weights = [w / 4 for w in torch.randn(count, width, width)]
    fns = [lambda w, x: torch.tanh(x @ w)] * count
    one = rows * width * 4

    def peak(segments: Any) -> float:
        chain = fckpt.sequential(fns, segments)
        return fckpt.measure_peak(lambda: fckpt.grad(lambda w: (chain(w, x) ** 2).sum())(weights)).peak_bytes / one

    # Boundaries 8 + a segment's 8 + the two or three temporaries of one step, weights and gradients aside.
    assert peak("sqrt") < 8 + 8 + 4
    assert peak(1) > 64


def test_a_chain_follows_the_one_that_it_was_made_of() -> None:
    act, x = nn.Tanh(), torch.randn(4, 8)
    net = nn.Sequential(nn.Linear(8, 8), act, nn.Dropout(), nn.Linear(8, 8), act)
    chain = fckpt.sequential(net, 2)
    net[1] = nn.ReLU()
    net.eval()
    assert torch.equal(chain(x), net(x)) and not chain[2].training
    chain[3] = nn.Linear(8, 2)
    chain.train()
    assert net(x).shape == (4, 2) and net[2].training
    assert list(chain.state_dict()) == list(net.state_dict())
    both = copy.deepcopy([net, chain])
    both[0][1] = nn.Sigmoid()
    both[0].eval()
    assert torch.equal(both[1](x), both[0](x)) and type(net[1]) is nn.ReLU
    net.append(nn.Tanh())
    with pytest.raises(ValueError, match="now has 6 modules"):
        chain(x)
