"""Writes through `.data` by the function itself: a recompute would repeat them, and no version shows them."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal
from torch import Tensor, nn

import fckpt


def scaled(target: Tensor, source: Tensor) -> None:
    target.data.mul_(0.9).add_(source.data, alpha=0.1)


def replaced(target: Tensor, source: Tensor) -> None:
    target.data = 0.9 * target.data + 0.1 * source.data


def by_item(target: Tensor, source: Tensor) -> None:
    target.data[:] = source.data


def by_list(target: Tensor, source: Tensor) -> None:
    torch._foreach_copy_([target.data], [source.data])


def by_out(target: Tensor, source: Tensor) -> None:
    torch.add(target.data, source.data, out=target.data)


WRITES = {"replaced": replaced, "item": by_item, "list": by_list, "out": by_out}


class Average:
    """An object of the user that updates one module by another."""

    def __init__(self, kind: str):
        self.kind = kind

    def update(self, target: nn.Module, source: nn.Module) -> None:
        for q, p in zip(target.parameters(), source.parameters(), strict=True):
            WRITES[self.kind](q, p) if self.kind in WRITES else self.scale(q, p)

    def scale(self, target: Tensor, source: Tensor) -> None:
        scaled(target, source)


class Momentum(nn.Module):
    """An encoder, and an average of it that its own forward updates."""

    def __init__(self, kind: str, *, first: bool):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.average, self.first = Average(kind), first

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        if self.first:
            self.average.update(self.target, self.online)
        with torch.no_grad():
            found = self.target(b)
        loss = F.mse_loss(self.online(a), found)
        if not self.first:
            self.average.update(self.target, self.online)
        return loss.exp().sin()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", ["scaled", *WRITES])
def test_a_momentum_encoder_is_refused(kind: str, first: bool) -> None:
    net = Momentum(kind, first=first)
    with pytest.raises(fckpt.MutationError, match=r"changed the parameter `(weight|bias)` .* through `\.data`"):
        fckpt.remat(net)(torch.randn(4, 6), torch.randn(4, 6))


CAPTURED = [torch.zeros(2, 2), torch.zeros(4, dtype=torch.long), nn.Parameter(torch.zeros(2, 2)), torch.zeros(())]


@pytest.mark.parametrize("number", range(len(CAPTURED)))
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_captured_tensor_that_is_written_is_refused(number: int, wrapped: bool) -> None:
    held = CAPTURED[number].clone().detach()
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def loss(held: Tensor, x: Tensor) -> Tensor:
        held.data.add_(1)
        return net(x).square().mean()

    fn = functools.partial(loss, held) if wrapped else lambda x: loss(held, x)
    with pytest.raises(fckpt.MutationError, match=r"changed a captured tensor .* through `\.data`"):
        fckpt.remat(fn)(torch.randn(2, 4))


def test_statistics_and_buffers_are_written_once() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
            self.register_buffer("queue", torch.zeros(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            self.queue.data.add_(x.data[:2])
            return self.net(x).square().mean()

    torch.manual_seed(0)
    plain, x = Counting(), torch.randn(3, 4)
    other = copy.deepcopy(plain)
    for _ in range(3):
        plain(x).backward()
        fckpt.remat(other)(x).backward()
    assert_equal(other.state_dict(), plain.state_dict())
    assert_equal([p.grad for p in other.parameters()], [p.grad for p in plain.parameters()])


def test_reading_data_is_fine() -> None:
    net, norms = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), []

    def loss(x: Tensor) -> Tensor:
        norms.append(float(net[0].weight.data.norm()))
        y = fckpt.remat(net)(x)
        y.data.mul_(1)
        return y.square().mean()

    torch.manual_seed(0)
    x = torch.randn(3, 4)
    expected = torch.autograd.grad(loss(x), list(net.parameters()))
    assert_equal(torch.autograd.grad(fckpt.remat(loss)(x), list(net.parameters())), expected)
