"""What the tests of training steps share: networks, optimizers, and twins, one of which a step trains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from helpers import assert_equal, seeded
from planned import Block, ConvNet
from torch import Tensor, nn, optim

import fckpt
from fckpt import measure_peak

Model, Batch = nn.Module, Any


class Words(nn.Module):
    """A small transformer whose head shares its weight with the embedding."""

    def __init__(self, words: int = 50, width: int = 16):
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.blocks = nn.Sequential(*[Block(width, 2) for _ in range(2)])
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(x)))


class Recurrent(nn.Module):
    """An LSTM of two layers, and a linear classifier of its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 8, 2, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def mlp(depth: int = 4, width: int = 32) -> nn.Module:
    return nn.Sequential(*[part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU())])


def squares(model: Model, batch: Batch) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def entropy(model: Model, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, -2), batch["y"].flatten())


def of_model(model: Model, batch: Batch) -> Tensor:
    return model(batch)


NETS: dict[str, tuple[Callable[[], Model], Callable[[], Batch], Callable[[Model, Batch], Tensor]]] = {
    "mlp": (mlp, lambda: (torch.randn(64, 32), torch.randn(64, 32)), squares),
    "transformer": (
        Words,
        lambda: {"x": torch.randint(50, (8, 12)), "y": torch.randint(50, (8, 12))},
        entropy,
    ),
    "conv": (ConvNet, lambda: torch.randn(8, 3, 8, 8), of_model),
    "lstm": (Recurrent, lambda: {"x": torch.randn(8, 5, 6), "y": torch.randint(4, (8,))}, entropy),
}
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: optim.Adam(p, lr=0.01),
    "adamw": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True),
}
PAIRS = [("mlp", "sgd"), ("mlp", "adam"), ("transformer", "adamw"), ("conv", "sgd"), ("lstm", "adam")]


def plain_step(
    model: Model,
    optimizer: optim.Optimizer,
    loss_fn: Callable[[Model, Batch], Tensor],
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> Callable[[Batch], Tensor]:
    """The lines that a step stands for."""

    def run(batch: Batch) -> Tensor:
        total = None
        for part in parts_of(batch, accumulate):
            loss = loss_fn(model, part)
            loss = loss / accumulate if accumulate > 1 else loss
            loss.backward()
            value = loss.detach()
            del loss
            total = value if total is None else total + value
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        if clip_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), clip_value)
        optimizer.step()
        optimizer.zero_grad()
        assert total is not None
        return total

    return run


def parts_of(batch: Batch, count: int) -> list[Batch]:
    if count == 1:
        return [batch]
    if isinstance(batch, Tensor):
        return list(batch.chunk(count))
    if isinstance(batch, dict):
        split = {k: t.chunk(count) for k, t in batch.items()}
        return [{k: parts[i] for k, parts in split.items()} for i in range(count)]
    return list(zip(*[t.chunk(count) for t in batch], strict=True))


class Twins:
    """A model that plain PyTorch trains, and a copy that a step trains."""

    def __init__(
        self,
        make: Callable[[], Model],
        optimizer: Callable[..., optim.Optimizer],
        loss_fn: Callable[[Model, Batch], Tensor],
        **options: Any,
    ):
        torch.manual_seed(0)
        self.plain, self.plain_optimizer = self._of(make(), optimizer)
        self.model, self.optimizer = self._of(copy.deepcopy(self.plain), optimizer)
        rest = {k: v for k, v in options.items() if k in ("accumulate", "clip_norm", "clip_value")}
        self.plain_step = plain_step(self.plain, self.plain_optimizer, loss_fn, **rest)
        self.step = fckpt.step(self.model, self.optimizer, loss_fn, **options)

    @staticmethod
    def _of(model: Model, optimizer: Callable[..., optim.Optimizer]) -> tuple[Model, optim.Optimizer]:
        return model, optimizer([p for p in model.parameters() if p.requires_grad])

    def check(self, batch: Batch, steps: int = 5) -> None:
        """Trains both, and compares losses, generators, parameters, buffers and the optimizers' states at each step."""
        for i in range(steps):
            assert_equal(seeded(lambda: self.step(batch), i), seeded(lambda: self.plain_step(batch), i))
            assert_equal(self.model.state_dict(), self.plain.state_dict())
            assert_equal(self.optimizer.state_dict(), self.plain_optimizer.state_dict())
            assert all(p.grad is None for p in self.model.parameters())

    def check_peak(self, batch: Batch) -> fckpt.Plan:
        """Compares the measured peaks with those of the plan."""
        plan = self.step.plan(batch)
        measured = measure_peak(lambda: self.step(batch)).peak_bytes
        plain = measure_peak(lambda: self.plain_step(batch)).peak_bytes
        assert measured == plan.peak_bytes
        assert abs(plan.baseline_peak_bytes - plain) <= 0.01 * plain
        return plan
