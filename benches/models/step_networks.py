"""Twelve networks for `benches.steps`: the eleven of `benches.budgets` in other sizes, and a perceptron."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from benches.common.training import Network, Sizes, sizes_from
from benches.models.budget_networks import NETWORKS as ELEVEN
from benches.models.sequence import UnrolledLSTM


class Layer(nn.Sequential):
    """A layer of the perceptron."""


class Perceptron(nn.Sequential):
    """Equal layers, whose weights are large beside their activations."""

    block = Layer

    def __init__(self, width: int, layers: int) -> None:
        super().__init__(*(Layer(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))


class BatchFirst(UnrolledLSTM):
    """An LSTM that takes batches whose first dimension is split into microbatches."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1))


def _series(sizes: Sizes) -> tuple[Tensor, Tensor]:
    batch = sizes["batch"]
    return torch.randn(batch, sizes["steps"], sizes["features"]), torch.randint(10, (batch,))


def _features(sizes: Sizes) -> tuple[Tensor, Tensor]:
    return torch.randn(sizes["batch"], sizes["width"]), torch.randint(10, (sizes["batch"],))


_CPU = """
resnet50    batch=4 side=64 stages=3
densenet121 batch=4 side=64 stages=2
vgg16       batch=4 side=64 width=32 hidden=256
googlenet   batch=4 side=64 divisor=2
unet        batch=4 side=32 width=16 depth=3
vit         batch=4 side=64 patch=8 hidden=192 heads=4 layers=3
bert        batch=4 tokens=64 hidden=192 layers=3 heads=4 vocabulary=512
gpt2        batch=4 tokens=64 hidden=192 layers=3 heads=4 vocabulary=512
llama       batch=4 tokens=64 hidden=192 layers=3 heads=4 groups=2 vocabulary=512
mixer       batch=4 side=64 patch=8 hidden=192 layers=3
lstm        batch=32 steps=16 features=32 hidden=256 span=4
"""
"""Sizes for which weights take as many bytes as activations, as they do in training with small microbatches."""

_PERCEPTRON = {
    "cuda": sizes_from("batch=512 width=3072 layers=24"),
    "cpu": sizes_from("batch=128 width=384 layers=8"),
    "quick": sizes_from("batch=8 width=64 layers=3"),
    "tiny": sizes_from("batch=8 width=64 layers=3"),
}


def _networks() -> dict[str, Network]:
    """Returns the networks with the sizes of this bench, in which a batch makes four microbatches."""
    own = dict(ELEVEN)
    for line in _CPU.strip().splitlines():
        name, sizes = line.split(maxsplit=1)
        tiny = {**own[name].sizes["tiny"], "batch": 4}
        known = {**own[name].sizes, "cpu": sizes_from(sizes), "quick": tiny, "tiny": tiny}
        own[name] = replace(own[name], sizes=known)
    own["lstm"] = replace(own["lstm"], model=BatchFirst, data=_series)
    return {**own, "mlp": Network("perceptron", Perceptron, _features, _PERCEPTRON)}


NETWORKS = _networks()
