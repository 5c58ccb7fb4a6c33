"""What the tests of compiled functions share: models, a step, its peak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fckpt

QUIET = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    # Dynamo looks at tensors between the parts of a function, and hides this warning, unless warnings are errors.
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)
"""The warnings that compilation raises by itself."""


class Perceptron(nn.Module):
    """Linear layers with dropout: a redrawn mask would change the gradients."""

    def __init__(self, layers: int = 4, width: int = 16, dropout: float = 0.3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(F.gelu(layer(x)), self.dropout, self.training)
        return x.square().mean()


class Convolutions(nn.Module):
    """Convolutions and batch norms, whose statistics change once."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(m for i in range(3) for m in (nn.Conv2d(4 if i else 3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())),
            nn.MaxPool2d(2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


class Transformer(nn.Module):
    """A tiny GPT: attention, layer norms, an embedding, a cross-entropy."""

    def __init__(self, width: int = 16, layers: int = 2, words: int = 24):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for qkv, up, down in zip(self.qkv, self.up, self.down, strict=True):
            q, k, v = (
                t.unflatten(-1, (2, -1)).transpose(1, 2) for t in qkv(F.layer_norm(x, x.shape[-1:])).chunk(3, -1)
            )
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + down(F.gelu(up(F.layer_norm(x, x.shape[-1:]))))
        return F.cross_entropy((x @ self.words.weight.T).flatten(0, 1), words.flatten())


def made(kind: Callable[[], nn.Module]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = kind()
    if isinstance(model, Transformer):
        return model, torch.randint(24, (4, 12))
    return model, torch.randn(64, 16) if isinstance(model, Perceptron) else torch.randn(4, 3, 8, 8)


def step(run: Callable[..., Any], model: nn.Module, x: torch.Tensor) -> list[Any]:
    model.zero_grad()
    loss = run(x)
    loss.backward()
    return [loss, [p.grad.clone() for p in model.parameters()], [b.clone() for b in model.buffers()]]


# Inductor's kernels sum in another order than PyTorch's, with or without a budget.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def peak_of(run: Callable[..., Any], x: torch.Tensor, model: nn.Module) -> int:
    model.zero_grad()
    return fckpt.measure_peak(lambda: run(x).backward()).peak_bytes
