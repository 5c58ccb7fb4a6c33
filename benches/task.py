"""What a bench needs to know of a network: how to build it and its data, in which sizes, and how to plan a step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fckpt
from benches.models import wrap_blocks
from fckpt.cost import CostSource

__all__ = ["Network", "Sizes", "Task", "TrainingLoss", "size_of"]

Sizes = Mapping[str, int]


class TrainingLoss(nn.Module):
    """From inputs and labels to the mean cross-entropy: what a step differentiates."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(inputs)
        if labels.ndim == 2:  # a label per token
            logits, labels = logits.flatten(0, 1), labels.flatten()
        return F.cross_entropy(logits, labels)


@dataclass(frozen=True)
class Task:
    """A network with its loss, and a batch to train it on."""

    name: str
    what: str
    loss: TrainingLoss
    inputs: Tensor
    labels: Tensor

    def in_blocks(self, wrap: Callable[[nn.Module], nn.Module]) -> TrainingLoss:
        """Returns the loss with every block of the network replaced by `wrap(block)`; parameters are shared."""
        shared: dict[int, Any] = {id(p): p for p in self.loss.parameters()}
        return wrap_blocks(copy.deepcopy(self.loss, shared), wrap, kind=self.loss.model.block)  # type: ignore[arg-type]

    def plan(self, costs: CostSource) -> fckpt.Plan:
        """Traces and prices a step. The plan recomputes nothing; on the meta device nothing is allocated or run."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # operations that have to be estimated
            return fckpt.plan(self.loss, self.inputs, self.labels, budget=1.0, costs=costs)


@dataclass(frozen=True)
class Network:
    """How to build a network, and its data, in each size."""

    title: str
    build: Callable[[Sizes], nn.Module]
    data: Callable[[Sizes], tuple[Tensor, Tensor]]
    sizes: Mapping[str, Sizes]
    """By "cuda", "cpu", "quick" and "tiny"; other tables may have others."""

    def task(self, size: str, device: torch.device, *, seed: int = 0) -> Task:
        """Makes the network and its batch on `device`, the same for the same seed."""
        torch.manual_seed(seed)
        sizes = self.sizes[size]
        with device:
            loss = TrainingLoss(self.build(sizes))
            inputs, labels = self.data(sizes)
        what = ", ".join(f"{key} {value}" for key, value in sizes.items())
        return Task(self.title, what, loss, inputs, labels)


def size_of(device: torch.device, *, quick: bool = False, tiny: bool = False) -> str:
    """Returns which of a network's sizes to take: a device's own, unless a smaller one is asked for."""
    if tiny:
        return "tiny"
    if quick:
        return "quick"
    return "cpu" if device.type == "cpu" else "cuda"
