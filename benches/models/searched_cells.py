"""Three cells found by architecture search, and the network for CIFAR-10 that DARTS makes of them.

The variants are those of Feng & Huang's code: 20 cells of 36 channels, separable convolutions applied twice, no
auxiliary head and no drop path; NASNet-A and AmoebaNet-A as in the comparisons of DARTS.

References:
    Zoph, Vasudevan, Shlens, Le (2018), Learning Transferable Architectures for Scalable Image Recognition,
    https://arxiv.org/abs/1707.07012
    Real, Aggarwal, Huang, Le (2019), Regularized Evolution for Image Classifier Architecture Search,
    https://arxiv.org/abs/1802.01548
    Liu, Simonyan, Yang (2019), DARTS: Differentiable Architecture Search, https://arxiv.org/abs/1806.09055
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["AMOEBANET_A", "DARTS_V2", "NASNET_A", "Cell", "CellNetwork", "Genotype"]


class Genotype(NamedTuple):
    """A normal and a reducing cell: two pairs (operation, number of its input state) for each new state."""

    normal: list[tuple[str, int]]
    normal_concat: list[int]
    """The states whose concatenation is the cell's output; states 0 and 1 are its inputs."""
    reduce: list[tuple[str, int]]
    reduce_concat: list[int]


def _edges(text: str) -> list[tuple[str, int]]:
    """Reads `sep3:0 skip:1`."""
    pairs = [edge.split(":") for edge in text.split()]
    return [(operation, int(state)) for operation, state in pairs]


NASNET_A = Genotype(
    _edges("sep5:1 sep3:0 sep5:0 sep3:0 avg:1 skip:0 avg:0 avg:0 sep3:1 skip:1"),
    [2, 3, 4, 5, 6],
    _edges("sep5:1 sep7:0 max:1 sep7:0 avg:1 sep5:0 skip:3 avg:2 sep3:2 max:1"),
    [4, 5, 6],
)
AMOEBANET_A = Genotype(
    _edges("avg:0 max:1 sep3:0 sep5:2 sep3:0 avg:3 sep3:1 skip:1 skip:0 avg:1"),
    [4, 5, 6],
    _edges("avg:0 sep3:1 max:0 sep7:2 sep7:0 avg:1 max:0 max:1 cross7:0 sep3:5"),
    [3, 4, 6],
)
DARTS_V2 = Genotype(
    _edges("sep3:0 sep3:1 sep3:0 sep3:1 sep3:1 skip:0 skip:0 dil3:2"),
    [2, 3, 4, 5],
    _edges("max:0 max:1 skip:2 max:1 max:0 skip:2 skip:2 max:1"),
    [2, 3, 4, 5],
)


def _relu_conv_norm(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.ReLU(), nn.Conv2d(channels, out, 1, bias=False), nn.BatchNorm2d(out))


def _depthwise(channels: int, kernel: int, stride: int, dilation: int = 1) -> nn.Sequential:
    """ReLU, a depthwise convolution, a 1x1 convolution, BatchNorm."""
    padding = dilation * (kernel // 2)
    own = nn.Conv2d(channels, channels, kernel, stride, padding, dilation, groups=channels, bias=False)
    return nn.Sequential(nn.ReLU(), own, nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels))


def _separable(channels: int, stride: int, *, kernel: int) -> nn.Sequential:
    return nn.Sequential(_depthwise(channels, kernel, stride), _depthwise(channels, kernel, 1))


def _cross(channels: int, stride: int) -> nn.Sequential:
    row = nn.Conv2d(channels, channels, (1, 7), stride=(1, stride), padding=(0, 3), bias=False)
    column = nn.Conv2d(channels, channels, (7, 1), stride=(stride, 1), padding=(3, 0), bias=False)
    return nn.Sequential(nn.ReLU(), row, column, nn.BatchNorm2d(channels))


class FactorisedReduction(nn.Module):
    """Halves the resolution by two 1x1 convolutions, one of them on the image shifted by a pixel."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out // 2, 1, stride=2, bias=False)
        self.conv2 = nn.Conv2d(channels, out // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        return self.norm(torch.cat([self.conv1(x), self.conv2(x[:, :, 1:, 1:])], 1))


def _skip(channels: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else FactorisedReduction(channels, channels)


_OPERATIONS: dict[str, Callable[[int, int], nn.Module]] = {
    "skip": _skip,
    "avg": lambda channels, stride: nn.AvgPool2d(3, stride, 1, count_include_pad=False),
    "max": lambda channels, stride: nn.MaxPool2d(3, stride, 1),
    "sep3": partial(_separable, kernel=3),
    "sep5": partial(_separable, kernel=5),
    "sep7": partial(_separable, kernel=7),
    "dil3": lambda channels, stride: _depthwise(channels, 3, stride, dilation=2),
    "cross7": _cross,
}
"""Functions of channels and stride."""


class Cell(nn.Module):
    """A cell: the first two states are outputs of earlier cells, each other one the sum of two operations on states.

    Args:
        genotype: the operations.
        channels: of the outputs of the two cells before, and of the states of this cell.
        reduce: whether this cell halves the resolution.
        reduced: whether the cell before did.
    """

    def __init__(self, genotype: Genotype, channels: tuple[int, int, int], *, reduce: bool, reduced: bool) -> None:
        super().__init__()
        before, last, own = channels
        self.adapt0 = FactorisedReduction(before, own) if reduced else _relu_conv_norm(before, own)
        self.adapt1 = _relu_conv_norm(last, own)
        edges = genotype.reduce if reduce else genotype.normal
        self.concat = genotype.reduce_concat if reduce else genotype.normal_concat
        self.sources = [source for _, source in edges]
        strides = [2 if reduce and source < 2 else 1 for source in self.sources]
        self.operations = nn.ModuleList(
            _OPERATIONS[name](own, stride) for (name, _), stride in zip(edges, strides, strict=True)
        )

    def forward(self, before: Tensor, last: Tensor) -> Tensor:
        states = [self.adapt0(before), self.adapt1(last)]
        edges = zip(self.operations, self.sources, strict=True)
        for (one, source), (other, source_of_other) in zip(edges, edges, strict=True):
            states.append(one(states[source]) + other(states[source_of_other]))
        return torch.cat([states[i] for i in self.concat], 1)


class CellNetwork(nn.Module):
    """A stack of cells for 3x32x32 images. The resolution is halved after a third and after two thirds of them.

    Args:
        genotype: of the cells.
        channels: of the states in the first cells.
        layers: cells.
        classes: outputs.
    """

    block: ClassVar[type[nn.Module]] = Cell

    def __init__(self, genotype: Genotype, *, channels: int = 36, layers: int = 20, classes: int = 10) -> None:
        super().__init__()
        before = last = 3 * channels
        self.stem = nn.Sequential(nn.Conv2d(3, last, 3, padding=1, bias=False), nn.BatchNorm2d(last))
        self.cells = nn.ModuleList()
        reduced = False
        for i in range(layers):
            reduce = i in (layers // 3, 2 * layers // 3)
            channels *= 1 + reduce
            cell = Cell(genotype, (before, last, channels), reduce=reduce, reduced=reduced)
            self.cells.append(cell)
            before, last, reduced = last, len(cell.concat) * channels, reduce
        self.head = nn.Linear(last, classes)

    def forward(self, x: Tensor) -> Tensor:
        before = last = self.stem(x)
        for cell in self.cells:
            before, last = last, cell(before, last)
        return self.head(last.mean((2, 3)))
