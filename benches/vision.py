"""The eighteen networks of the seed's table, with the figures that were published for them.

J. Feng, D. Huang, "Optimal Gradient Checkpoint Search for Arbitrary Computation Graphs", CVPR 2021,
https://arxiv.org/abs/1808.00079, chose what to keep for AlexNet, VGG, ResNet, DenseNet, Inception-v3 and three cells
found by architecture search, and measured it: the table of https://github.com/lordfjw/OptimalGradCheckpointing. Own
definitions, with the variants of that code: those of torchvision (VGG without BatchNorm; the stride of a bottleneck in
its 3x3 convolution; Inception-v3 without the auxiliary classifier), and for CIFAR-10 the cells of `cells.py`. Dropout,
which that benchmark switches off, is left out.

Sizes: `paper` is the batch and the image of the table; `cpu` fits a small machine, a step of a second or so in which
activations outweigh gradients, with a narrower classifier for AlexNet and VGG; `tiny` computes next to nothing.

References:
    Krizhevsky (2014), One weird trick for parallelizing convolutional neural networks, https://arxiv.org/abs/1404.5997
    Simonyan, Zisserman (2015), https://arxiv.org/abs/1409.1556
    He, Zhang, Ren, Sun (2016), https://arxiv.org/abs/1512.03385
    Huang, Liu, van der Maaten, Weinberger (2017), https://arxiv.org/abs/1608.06993
    Szegedy, Vanhoucke, Ioffe, Shlens, Wojna (2016), Rethinking the Inception Architecture for Computer Vision,
    https://arxiv.org/abs/1512.00567
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from benches.cells import AMOEBANET_A, DARTS_V2, NASNET_A, CellNetwork
from benches.models import BasicBlock, Bottleneck, ChainedBlock, DenseNet, ResNet
from benches.task import Network, Sizes

__all__ = [
    "NETWORKS",
    "VGG",
    "AlexNet",
    "InceptionV3",
    "Published",
    "SeedNetwork",
]


# ---- AlexNet and VGG -----------------------------------------------------------------------------


class Stage(nn.Sequential):
    """Convolutions with ReLU, and what pools after them."""


class _Classified(nn.Module):
    """Stages of convolutions, and a classifier of two hidden layers on `side` x `side` features."""

    block: ClassVar[type[nn.Module]] = Stage

    def __init__(self, stages: list[Stage], channels: int, side: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(side)
        self.classifier = nn.Sequential(
            nn.Linear(channels * side * side, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)).flatten(1))


class AlexNet(_Classified):
    """AlexNet in one tower, for images from 3x63x63 up; `hidden` is the classifier's width."""

    def __init__(self, *, hidden: int = 4096, classes: int = 1000) -> None:
        stages = [
            Stage(nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            Stage(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            Stage(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
            Stage(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
            Stage(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
        ]
        super().__init__(stages, 256, 6, hidden, classes)


class VGG(_Classified):
    """VGG without BatchNorm, for images from 3x32x32 up.

    Args:
        layers: convolutions in each of the five stages.
        hidden: the classifier's width.
        classes: outputs.
    """

    def __init__(self, layers: tuple[int, ...], *, hidden: int = 4096, classes: int = 1000) -> None:
        widths = (3, 64, 128, 256, 512, 512)
        stages = [_vgg_stage(*sizes) for sizes in zip(widths, widths[1:], layers, strict=False)]
        super().__init__(stages, widths[-1], 7, hidden, classes)


def _vgg_stage(channels: int, width: int, layers: int) -> Stage:
    convolutions = [nn.Conv2d(width if i else channels, width, 3, padding=1) for i in range(layers)]
    return Stage(*(module for conv in convolutions for module in (conv, nn.ReLU())), nn.MaxPool2d(2))


# ---- Inception-v3 --------------------------------------------------------------------------------


class Branches(nn.ModuleList):
    """Modules side by side on the same input, their results concatenated."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], 1)


Kernel = int | tuple[int, int]


def _conv(channels: int, out: int, kernel: Kernel, *, stride: int = 1, valid: bool = False) -> nn.Sequential:
    """Convolution, BatchNorm, ReLU; padded to the size of its input unless `valid`."""
    high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = 0 if valid else (high // 2, wide // 2)
    conv = nn.Conv2d(channels, out, (high, wide), stride=stride, padding=padding, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out, eps=1e-3), nn.ReLU())


def _convs(channels: int, *layers: tuple[int, Kernel]) -> nn.Sequential:
    """Several `_conv`, one after the other, of these widths and kernels."""
    widths = [channels, *(width for width, _ in layers)]
    return nn.Sequential(*(_conv(a, b, kernel) for a, b, (_, kernel) in zip(widths, widths[1:], layers, strict=False)))


def _pooled(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), _conv(channels, out, 1))


def _fine(channels: int, pool: int) -> Branches:
    """The module of the 35x35 grid: 3x3 and 5x5 convolutions."""
    return Branches(
        [
            _conv(channels, 64, 1),
            _convs(channels, (48, 1), (64, 5)),
            _convs(channels, (64, 1), (96, 3), (96, 3)),
            _pooled(channels, pool),
        ]
    )


def _factorised(channels: int, width: int) -> Branches:
    """The module of the 17x17 grid: 7x7 convolutions as products of 1x7 and 7x1."""
    row, column = (1, 7), (7, 1)
    twice = [(width, 1), (width, column), (width, row), (width, column), (192, row)]
    return Branches(
        [
            _conv(channels, 192, 1),
            _convs(channels, (width, 1), (width, row), (192, column)),
            _convs(channels, *twice),
            _pooled(channels, 192),
        ]
    )


def _expanded(channels: int) -> Branches:
    """The module of the 8x8 grid: 3x3 convolutions split into a row and a column side by side."""

    def split(width: int) -> Branches:
        return Branches([_conv(width, 384, (1, 3)), _conv(width, 384, (3, 1))])

    return Branches(
        [
            _conv(channels, 320, 1),
            nn.Sequential(_conv(channels, 384, 1), split(384)),
            nn.Sequential(_convs(channels, (448, 1), (384, 3)), split(384)),
            _pooled(channels, 192),
        ]
    )


def _shrunk(channels: int) -> Branches:
    """From the 35x35 grid to the 17x17 one."""
    three = _conv(channels, 384, 3, stride=2, valid=True)
    double = nn.Sequential(_convs(channels, (64, 1), (96, 3)), _conv(96, 96, 3, stride=2, valid=True))
    return Branches([three, double, nn.MaxPool2d(3, 2)])


def _shrunk_again(channels: int) -> Branches:
    """From the 17x17 grid to the 8x8 one."""
    three = nn.Sequential(_conv(channels, 192, 1), _conv(192, 320, 3, stride=2, valid=True))
    seven = _convs(channels, (192, 1), (192, (1, 7)), (192, (7, 1)))
    return Branches([three, nn.Sequential(seven, _conv(192, 192, 3, stride=2, valid=True)), nn.MaxPool2d(3, 2)])


class InceptionV3(nn.Module):
    """Inception-v3 without auxiliary classifier, for images from 3x75x75 up, 3x299x299 in its paper."""

    block: ClassVar[type[nn.Module]] = Branches

    def __init__(self, *, classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _conv(3, 32, 3, stride=2, valid=True),
            _conv(32, 32, 3, valid=True),
            _conv(32, 64, 3),
            nn.MaxPool2d(3, 2),
            _conv(64, 80, 1),
            _conv(80, 192, 3, valid=True),
            nn.MaxPool2d(3, 2),
            *(_fine(channels, pool) for channels, pool in ((192, 32), (256, 64), (288, 64))),
            _shrunk(288),
            *(_factorised(768, width) for width in (128, 160, 160, 192)),
            _shrunk_again(768),
            *(_expanded(channels) for channels in (1280, 2048)),
        )
        self.head = nn.Linear(2048, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


# ---- the table -----------------------------------------------------------------------------------


class Published(NamedTuple):
    """A row of the seed's table: megabytes above the weights, and seconds per step, on a GPU of its time."""

    plain_megabytes: int
    ogc_megabytes: int
    plain_seconds: float
    ogc_seconds: float

    @property
    def cut(self) -> float:
        """The part of the memory that is saved."""
        return 1 - self.ogc_megabytes / self.plain_megabytes

    @property
    def overhead(self) -> float:
        """The time that it takes in addition, as a fraction."""
        return self.ogc_seconds / self.plain_seconds - 1


@dataclass(frozen=True)
class SeedNetwork(Network):
    """A network of the seed's table; its sizes are "paper", "cpu" and "tiny"."""

    published: Published


def _images(batch: int, side: int, **options: int) -> Sizes:
    return {"batch": batch, "side": side, **options}


def _network(
    title: str,
    build: Callable[..., nn.Module],
    paper: Sizes,
    cpu: Sizes,
    published: Published,
    *,
    tiny: Sizes | None = None,
    classes: int = 1000,
) -> SeedNetwork:
    """A network; the sizes besides batch and side are arguments of `build`."""

    def built(sizes: Sizes) -> nn.Module:
        return build(**{name: size for name, size in sizes.items() if name not in ("batch", "side")})

    def data(sizes: Sizes) -> tuple[Tensor, Tensor]:
        batch, side = sizes["batch"], sizes["side"]
        return torch.randn(batch, 3, side, side), torch.randint(classes, (batch,))

    sizes = {"paper": paper, "cpu": cpu, "tiny": tiny or _images(2, 32)}
    return SeedNetwork(title, built, data, sizes, published)


def _resnet(*layers: int, block: type[Bottleneck | BasicBlock] = Bottleneck) -> Callable[[], ResNet]:
    return partial(ResNet, layers, classes=1000, small=False, block=block)


def _densenet(growth: int, *layers: int) -> Callable[[], DenseNet]:
    return partial(DenseNet, growth, layers, classes=1000, small=False, dense=ChainedBlock)


_CLASSIFIED = _images(2, 64, hidden=8)
_NARROW = _images(2, 64, width=4)
_FEW_CELLS = _images(2, 16, channels=4, layers=3)

NETWORKS: dict[str, SeedNetwork] = {
    "alexnet": _network(
        "AlexNet",
        AlexNet,
        _images(1024, 224),
        _images(32, 224, hidden=256),
        Published(4955, 3287, 0.388, 0.519),
        tiny=_CLASSIFIED,
    ),
    "vgg11": _network(
        "VGG-11",
        partial(VGG, (1, 1, 2, 2, 2)),
        _images(64, 224),
        _images(8, 112, hidden=256),
        Published(3577, 2781, 0.266, 0.356),
        tiny=_CLASSIFIED,
    ),
    "vgg13": _network(
        "VGG-13",
        partial(VGG, (2, 2, 2, 2, 2)),
        _images(64, 224),
        _images(8, 112, hidden=256),
        Published(5136, 3565, 0.418, 0.558),
        tiny=_CLASSIFIED,
    ),
    "vgg16": _network(
        "VGG-16",
        partial(VGG, (2, 2, 3, 3, 3)),
        _images(64, 224),
        _images(6, 112, hidden=256),
        Published(5136, 3565, 0.503, 0.666),
        tiny=_CLASSIFIED,
    ),
    "vgg19": _network(
        "VGG-19",
        partial(VGG, (2, 2, 4, 4, 4)),
        _images(64, 224),
        _images(6, 112, hidden=256),
        Published(5189, 3565, 0.581, 0.774),
        tiny=_CLASSIFIED,
    ),
    "resnet18": _network(
        "ResNet-18",
        _resnet(2, 2, 2, 2, block=BasicBlock),
        _images(256, 224),
        _images(8, 112),
        Published(5635, 3677, 0.422, 0.548),
        tiny=_NARROW,
    ),
    "resnet34": _network(
        "ResNet-34",
        _resnet(3, 4, 6, 3, block=BasicBlock),
        _images(128, 224),
        _images(8, 112),
        Published(4079, 1838, 0.364, 0.493),
        tiny=_NARROW,
    ),
    "resnet50": _network(
        "ResNet-50", _resnet(3, 4, 6, 3), _images(64, 224), _images(8, 112), Published(5323, 1973, 0.394, 0.516)
    ),
    "resnet101": _network(
        "ResNet-101", _resnet(3, 4, 23, 3), _images(32, 224), _images(8, 112), Published(3934, 1024, 0.356, 0.482)
    ),
    "resnet152": _network(
        "ResNet-152", _resnet(3, 8, 36, 3), _images(16, 224), _images(8, 112), Published(2767, 526, 0.241, 0.331)
    ),
    "densenet121": _network(
        "DenseNet-121",
        _densenet(32, 6, 12, 24, 16),
        _images(32, 224),
        _images(8, 112),
        Published(4027, 898, 0.218, 0.292),
    ),
    "densenet161": _network(
        "DenseNet-161",
        _densenet(48, 6, 12, 36, 24),
        _images(16, 224),
        _images(4, 112),
        Published(3751, 666, 0.252, 0.341),
    ),
    "densenet169": _network(
        "DenseNet-169",
        _densenet(32, 6, 12, 32, 32),
        _images(32, 224),
        _images(8, 112),
        Published(4862, 897, 0.270, 0.357),
    ),
    "densenet201": _network(
        "DenseNet-201",
        _densenet(32, 6, 12, 48, 32),
        _images(16, 224),
        _images(8, 112),
        Published(3146, 474, 0.200, 0.306),
    ),
    "inception_v3": _network(
        "Inception-v3",
        InceptionV3,
        _images(32, 300),
        _images(8, 150),
        Published(3074, 881, 0.291, 0.374),
        tiny=_images(2, 75),
    ),
    "nasnet": _network(
        "NASNet, CIFAR-10",
        partial(CellNetwork, NASNET_A),
        _images(64, 32),
        _images(8, 32),
        Published(5832, 1129, 0.408, 0.535),
        tiny=_FEW_CELLS,
        classes=10,
    ),
    "amoebanet": _network(
        "AmoebaNet, CIFAR-10",
        partial(CellNetwork, AMOEBANET_A),
        _images(64, 32),
        _images(8, 32),
        Published(4944, 1058, 0.331, 0.450),
        tiny=_FEW_CELLS,
        classes=10,
    ),
    "darts": _network(
        "DARTS, CIFAR-10",
        partial(CellNetwork, DARTS_V2),
        _images(64, 32),
        _images(8, 32),
        Published(5627, 1115, 0.318, 0.494),
        tiny=_FEW_CELLS,
        classes=10,
    ),
}
"""By name, in the order of the table."""
