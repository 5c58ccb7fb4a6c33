"""What the tests of plans share: models, a step, its peak."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fckpt
from fckpt import policies

idle_policies = pytest.mark.filterwarnings("ignore:the policy dots_saveable saves nothing")
EVERYTHING, NOTHING, DOTS = policies.everything_saveable, policies.nothing_saveable, policies.dots_saveable


X = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

PLANNERS: dict[str, Callable[..., Any]] = {
    "nothing_saveable": partial(fckpt.remat, policy=NOTHING),
    "dots_saveable": partial(fckpt.remat, policy=DOTS),
    "budget": partial(fckpt.remat, budget=1.0),
}


class ConvNet(nn.Module):
    """Convolutions, BatchNorm, in-place ReLU and residual additions; the loss is within."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            h = self.relu(norm(convolution(h)) + h)
        return h.square().mean()


class Block(nn.Module):
    """A pre-LN transformer block with attention and dropout."""

    def __init__(self, width: int = 32, heads: int = 4):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.first(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 * self.training)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), 0.1, self.training)
        return x + self.mlp(self.second(x))


class Squared(nn.Module):
    """The sum of the squares of what a module returns."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().sum()


class Words(nn.Module):
    """An embedding, dropout, and cross entropy with a label that is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.out = nn.Embedding(50, 16), nn.Linear(16, 32), nn.Linear(32, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        h = F.dropout(torch.tanh(self.hidden(self.embedding(tokens))), 0.2)
        return F.cross_entropy(self.out(h).flatten(0, 1), tokens.roll(1, 1).flatten(), ignore_index=3)


class Unrolled(nn.Module):
    """An LSTM cell over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], 16)
        c = h.clone()
        for step in x:
            h, c = self.cell(step, (h, c))
        return h.square().sum()


class UNet(nn.Module):
    """Down, up, and skips between."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)])
        self.middle = nn.Conv2d(16, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.merge = nn.ModuleList([nn.Conv2d(24, 8, 3, padding=1), nn.Conv2d(16, 2, 3, padding=1)])

    def forward(self, x: Tensor) -> Tensor:
        a = F.silu(self.down[0](x))
        b = F.silu(self.down[1](F.max_pool2d(a, 2)))
        h = F.silu(self.merge[0](torch.cat([self.up(F.silu(self.middle(F.avg_pool2d(b, 2)))), b], 1)))
        return self.merge[1](torch.cat([F.interpolate(h, scale_factor=2.0, mode="bilinear"), a], 1)).square().sum()


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": lambda: (
        Squared(nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(32, 32), nn.GELU())])),
        torch.randn(64, 32),
    ),
    "convolutions": lambda: (ConvNet(), torch.randn(4, 3, 12, 12)),
    "transformer": lambda: (Squared(Block()), torch.randn(2, 16, 32)),
    "words": lambda: (Words(), torch.randint(0, 50, (4, 20))),
    "lstm": lambda: (Unrolled(), torch.randn(5, 32, 8)),
    "unet": lambda: (UNet(), torch.randn(2, 2, 16, 16)),
}


def model(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return MODELS[name]()


def step(net: nn.Module, x: Tensor) -> Any:
    """Loss, gradients and buffers after two steps, the second of which meets what the first left behind."""
    for _ in range(2):
        net.zero_grad()
        loss = net(x)
        loss.backward()
    return loss, [p.grad for p in net.parameters()], [b.clone() for b in net.buffers()]


def least_bytes_of(fn: Callable[..., Any], *args: Any) -> int:
    with pytest.raises(fckpt.BudgetError) as caught:
        fckpt.plan(fn, *args, budget=1)
    return caught.value.least_bytes


@cache
def least_of(name: str) -> int:
    """The least bytes of a model: what does not fit takes long to refuse, and is asked by many tests."""
    return least_bytes_of(*model(name))


def measured(net: nn.Module, x: Tensor) -> int:
    """The peak of a step that is not the first."""
    net(x).backward()
    net.zero_grad()
    return fckpt.measure_peak(lambda: net(x).backward()).peak_bytes
