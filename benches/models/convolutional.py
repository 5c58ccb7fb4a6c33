"""Convolutional networks: DenseNet, ResNet, AlexNet, VGG, Inception, GoogLeNet and U-Net.

Written as in the papers, so that no model library and no download is needed; weights are random. A network names the
class of its blocks in `block`, for `wrapping.wrap_blocks`.

References:
    Huang, Liu, van der Maaten, Weinberger (2017), Densely Connected Convolutional Networks,
    https://arxiv.org/abs/1608.06993
    He, Zhang, Ren, Sun (2016), Deep Residual Learning for Image Recognition, https://arxiv.org/abs/1512.03385
    Krizhevsky (2014), One weird trick for parallelizing convolutional neural networks, https://arxiv.org/abs/1404.5997
    Simonyan, Zisserman (2015), Very Deep Convolutional Networks for Large-Scale Image Recognition,
    https://arxiv.org/abs/1409.1556
    Szegedy et al. (2015), Going Deeper with Convolutions, https://arxiv.org/abs/1409.4842, with BatchNorm after its
    convolutions, as in Ioffe, Szegedy (2015), https://arxiv.org/abs/1502.03167, without auxiliary classifiers
    Szegedy, Vanhoucke, Ioffe, Shlens, Wojna (2016), Rethinking the Inception Architecture for Computer Vision,
    https://arxiv.org/abs/1512.00567, without the auxiliary classifier
    Ronneberger, Fischer, Brox (2015), U-Net: Convolutional Networks for Biomedical Image Segmentation,
    https://arxiv.org/abs/1505.04597, with padded convolutions and BatchNorm
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kernel = int | tuple[int, int]


class ConvNorm(nn.Sequential):
    """Convolution, BatchNorm and, by default, ReLU; padded to the size of its input unless `valid`."""

    def __init__(
        self,
        channels: int,
        out: int,
        kernel: Kernel,
        *,
        stride: int = 1,
        valid: bool = False,
        eps: float = 1e-5,
        relu: bool = True,
    ) -> None:
        high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = 0 if valid else (high // 2, wide // 2)
        conv = nn.Conv2d(channels, out, (high, wide), stride=stride, padding=padding, bias=False)
        super().__init__(conv, nn.BatchNorm2d(out, eps=eps), *([nn.ReLU()] if relu else []))


class Classifier(nn.Module):
    """Stages of convolutions, the mean over the image, and a linear layer; `block` is the class of the blocks."""

    def __init__(
        self, stages: Sequence[nn.Module], channels: int, classes: int, block: type[nn.Module], dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.block = block
        self.features = nn.Sequential(*stages)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.features(x).mean((2, 3))))


def _stem(channels: int, *, small: bool, normalise: bool) -> list[nn.Module]:
    """Returns a 3x3 stem for 32x32 images if `small`; otherwise the 7x7 stem with pooling for 224x224 ones."""
    conv = ConvNorm(3, channels, 3 if small else 7, stride=1 if small else 2)
    return [conv if normalise else conv[0], *([] if small else [nn.MaxPool2d(3, stride=2, padding=1)])]


# ---- DenseNet-BC --------------------------------------------------------------------------------


class _Grown(nn.Module):
    """BN-ReLU-conv1x1-BN-ReLU-conv3x3, to `growth` channels."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def narrow(self, x: Tensor) -> Tensor:
        """The bottleneck, to 4 x `growth` channels."""
        return self.conv1(F.relu(self.norm1(x)))

    def grow_from(self, narrow: Tensor) -> Tensor:
        return self.conv2(F.relu(self.norm2(narrow)))


class DenseLayer(_Grown):
    """From all feature maps before it to `growth` new ones.

    It takes the earlier maps one by one and concatenates them itself, so that a region around it saves `growth`
    channels per layer. With the concatenation outside, a region would save a copy of all channels so far, and a block
    of n layers O(n^2) channels.
    """

    def forward(self, *features: Tensor) -> Tensor:
        return self.grow_from(self.narrow(torch.cat(features, 1)))


class DenseBlock(nn.Module):
    """`layers` dense layers; the output is the input and every layer's maps, concatenated."""

    layer: ClassVar[type[nn.Module]] = DenseLayer

    def __init__(self, channels: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(channels + i * growth, growth) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(*features))
        return torch.cat(features, 1)


class ChainedLayer(_Grown):
    """Returns its input with `growth` more channels."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.grow_from(self.narrow(x))], 1)


class ChainedBlock(nn.Sequential):
    """`layers` dense layers, each of which returns all channels so far.

    It computes the same as `DenseBlock`, by another graph: the concatenations are between the layers, and may be saved.
    """

    layer: ClassVar[type[nn.Module]] = ChainedLayer

    def __init__(self, channels: int, growth: int, layers: int) -> None:
        super().__init__(*(ChainedLayer(channels + i * growth, growth) for i in range(layers)))


class DenseNet(Classifier):
    """DenseNet-BC: bottleneck layers of 4 x growth channels, and transitions that halve the channels.

    Args:
        growth: channels that a dense layer adds (the paper's k).
        layers: dense layers in each block.
        classes: outputs.
        small: see `_stem`.
        dense: the class of the blocks.
    """

    def __init__(
        self,
        growth: int,
        layers: tuple[int, ...],
        *,
        classes: int,
        small: bool,
        dense: type[DenseBlock | ChainedBlock] = DenseBlock,
    ) -> None:
        channels = 2 * growth
        stages = _stem(channels, small=small, normalise=not small)
        for i, count in enumerate(layers):
            if i:
                narrow = nn.Conv2d(channels, channels // 2, 1, bias=False)
                stages += [nn.BatchNorm2d(channels), nn.ReLU(), narrow, nn.AvgPool2d(2)]
                channels //= 2
            stages.append(dense(channels, growth, count))
            channels += count * growth
        super().__init__([*stages, nn.BatchNorm2d(channels), nn.ReLU()], channels, classes, dense.layer)


# ---- ResNet -------------------------------------------------------------------------------------


class _Residual(nn.Module):
    """Convolutions with BatchNorm, and a shortcut (a 1x1 convolution where shapes differ)."""

    def __init__(self, channels: int, out: int, stride: int, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        same = stride == 1 and channels == out
        self.shortcut = nn.Identity() if same else ConvNorm(channels, out, 1, stride=stride, relu=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.shortcut(x))


class Bottleneck(_Residual):
    """conv1x1-conv3x3-conv1x1."""

    expansion: ClassVar[int] = 4
    """Channels of its output over its width."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        narrow, middle = ConvNorm(channels, width, 1), ConvNorm(width, width, 3, stride=stride)
        super().__init__(channels, 4 * width, stride, narrow, middle, ConvNorm(width, 4 * width, 1, relu=False))


class BasicBlock(_Residual):
    """Two 3x3 convolutions."""

    expansion: ClassVar[int] = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        first = ConvNorm(channels, width, 3, stride=stride)
        super().__init__(channels, width, stride, first, ConvNorm(width, width, 3, relu=False))


class ResNet(Classifier):
    """A ResNet, the stride of bottlenecks in the 3x3 convolution.

    Args:
        layers: blocks in each of the stages.
        classes: outputs.
        small: see `_stem`.
        block: the class of the blocks.
        width: of the blocks of the first stage, doubled in each of the others.
    """

    def __init__(
        self,
        layers: tuple[int, ...],
        *,
        classes: int,
        small: bool,
        block: type[Bottleneck | BasicBlock] = Bottleneck,
        width: int = 64,
    ) -> None:
        channels = width
        stages = _stem(width, small=small, normalise=True)
        for stage, count in enumerate(layers):
            for i in range(count):
                stages.append(block(channels, width << stage, stride=2 if stage and not i else 1))
                channels = block.expansion * (width << stage)
        super().__init__(stages, channels, classes, block)


# ---- AlexNet and VGG ----------------------------------------------------------------------------


class Stage(nn.Sequential):
    """Convolutions with ReLU, and what pools after them."""


class _Stages(nn.Module):
    """Stages of convolutions, and a classifier of two hidden layers on `features` values, with dropout or without."""

    block: ClassVar[type[nn.Module]] = Stage

    def __init__(
        self, stages: Sequence[Stage], pool: nn.Module, features: int, hidden: int, classes: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(*stages)
        self.pool = pool
        layers = [nn.Linear(features, hidden), nn.ReLU(), nn.Dropout(dropout)]
        layers += [nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout)]
        self.classifier = nn.Sequential(*layers, nn.Linear(hidden, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)).flatten(1))


class AlexNet(_Stages):
    """AlexNet in one tower, for images from 3x63x63 up; `hidden` is the classifier's width."""

    def __init__(self, *, hidden: int = 4096, classes: int = 1000) -> None:
        stages = [
            Stage(nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            Stage(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            Stage(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
            Stage(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
            Stage(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
        ]
        super().__init__(stages, nn.AdaptiveAvgPool2d(6), 256 * 36, hidden, classes)


def _vgg_stages(width: int, layers: Sequence[int], conv: Callable[[int, int], list[nn.Module]]) -> list[Stage]:
    """Returns stages of `layers` convolutions, and the pooling after them."""
    widths = (3, width, 2 * width, 4 * width, 8 * width, 8 * width)
    return [
        Stage(*conv(a, b), *(module for _ in range(count - 1) for module in conv(b, b)), nn.MaxPool2d(2))
        for a, b, count in zip(widths, widths[1:], layers, strict=False)
    ]


class VGG(_Stages):
    """VGG without BatchNorm, for images from 3x32x32 up, with `layers` convolutions in each of the five stages."""

    def __init__(self, layers: tuple[int, ...], *, hidden: int = 4096, classes: int = 1000) -> None:
        stages = _vgg_stages(64, layers, lambda a, b: [nn.Conv2d(a, b, 3, padding=1), nn.ReLU()])
        super().__init__(stages, nn.AdaptiveAvgPool2d(7), 512 * 49, hidden, classes)


class NormalisedVGG(_Stages):
    """VGG-16 with BatchNorm and dropout. The first stage has `width` channels, later ones up to eight times as many."""

    def __init__(self, *, width: int = 64, hidden: int = 4096, side: int = 224, classes: int = 10) -> None:
        stages = _vgg_stages(width, (2, 2, 3, 3, 3), lambda a, b: [ConvNorm(a, b, 3)])
        super().__init__(stages, nn.Identity(), 8 * width * (side // 32) ** 2, hidden, classes, dropout=0.5)


# ---- Inception ----------------------------------------------------------------------------------


class Branches(nn.ModuleList):
    """Modules side by side on the same input, their results concatenated."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], 1)


def _convs(channels: int, *layers: tuple[int, Kernel], eps: float = 1e-3) -> nn.Sequential:
    """Several `ConvNorm`, one after the other, of these widths and kernels."""
    widths = [channels, *(width for width, _ in layers)]
    return nn.Sequential(
        *(ConvNorm(a, b, kernel, eps=eps) for a, b, (_, kernel) in zip(widths, widths[1:], layers, strict=False))
    )


class Inception(Branches):
    """Four branches: 1x1, 3x3 and 5x5 convolutions, and a pooling.

    Args:
        channels: of the input.
        widths: 1x1; 1x1 before 3x3, 3x3; 1x1 before 5x5, 5x5; 1x1 after the pooling.
    """

    def __init__(self, channels: int, widths: Sequence[int]) -> None:
        one, before_three, three, before_five, five, pool = widths
        convs = partial(_convs, channels, eps=1e-5)
        pooled = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), *convs((pool, 1)))
        super().__init__(
            convs((one, 1)), convs((before_three, 1), (three, 3)), convs((before_five, 1), (five, 5)), pooled
        )


class GoogLeNet(Classifier):
    """GoogLeNet with BatchNorm: nine inception modules; `divisor` narrows all of it."""

    TABLE = (
        ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
        (
            (192, 96, 208, 16, 48, 64),
            (160, 112, 224, 24, 64, 64),
            (128, 128, 256, 24, 64, 64),
            (112, 144, 288, 32, 64, 64),
            (256, 160, 320, 32, 128, 128),
        ),
        ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
    )
    """Table 1 of the paper, by stage."""

    def __init__(self, *, divisor: int = 1, classes: int = 10) -> None:
        pool = lambda: nn.MaxPool2d(3, stride=2, padding=1)
        first, channels = 64 // divisor, 192 // divisor
        stages = [ConvNorm(3, first, 7, stride=2), pool(), ConvNorm(first, first, 1), ConvNorm(first, channels, 3)]
        for stage in self.TABLE:
            stages.append(pool())
            for row in stage:
                widths = [max(1, width // divisor) for width in row]
                stages.append(Inception(channels, widths))
                channels = widths[0] + widths[2] + widths[4] + widths[5]
        super().__init__(stages, channels, classes, Inception, dropout=0.4)


_conv = partial(ConvNorm, eps=1e-3)  # as in Inception-v3
_reducing = partial(_conv, stride=2, valid=True)
_ROW, _COLUMN = (1, 7), (7, 1)


def _pooled(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), _conv(channels, out, 1))


def _fine(channels: int, pool: int) -> Branches:
    """The module of the 35x35 grid: 3x3 and 5x5 convolutions."""
    five, double = _convs(channels, (48, 1), (64, 5)), _convs(channels, (64, 1), (96, 3), (96, 3))
    return Branches(_conv(channels, 64, 1), five, double, _pooled(channels, pool))


def _factorised(channels: int, width: int) -> Branches:
    """The module of the 17x17 grid: 7x7 convolutions as products of 1x7 and 7x1."""
    once = _convs(channels, (width, 1), (width, _ROW), (192, _COLUMN))
    twice = _convs(channels, (width, 1), (width, _COLUMN), (width, _ROW), (width, _COLUMN), (192, _ROW))
    return Branches(_conv(channels, 192, 1), once, twice, _pooled(channels, 192))


def _expanded(channels: int) -> Branches:
    """The module of the 8x8 grid: 3x3 convolutions split into a row and a column side by side."""
    split = lambda width: Branches(_conv(width, 384, (1, 3)), _conv(width, 384, (3, 1)))
    once = nn.Sequential(_conv(channels, 384, 1), split(384))
    twice = nn.Sequential(_convs(channels, (448, 1), (384, 3)), split(384))
    return Branches(_conv(channels, 320, 1), once, twice, _pooled(channels, 192))


def _shrunk(channels: int) -> Branches:
    """From the 35x35 grid to the 17x17 one."""
    double = nn.Sequential(_convs(channels, (64, 1), (96, 3)), _reducing(96, 96, 3))
    return Branches(_reducing(channels, 384, 3), double, nn.MaxPool2d(3, 2))


def _shrunk_again(channels: int) -> Branches:
    """From the 17x17 grid to the 8x8 one."""
    three = nn.Sequential(_conv(channels, 192, 1), _reducing(192, 320, 3))
    seven = nn.Sequential(_convs(channels, (192, 1), (192, _ROW), (192, _COLUMN)), _reducing(192, 192, 3))
    return Branches(three, seven, nn.MaxPool2d(3, 2))


class InceptionV3(Classifier):
    """Inception-v3 without auxiliary classifier, for images from 3x75x75 up, 3x299x299 in its paper."""

    def __init__(self, *, classes: int = 1000) -> None:
        stem = [_reducing(3, 32, 3), _conv(32, 32, 3, valid=True), _conv(32, 64, 3), nn.MaxPool2d(3, 2)]
        stem += [_conv(64, 80, 1), _conv(80, 192, 3, valid=True), nn.MaxPool2d(3, 2)]
        fine = (_fine(channels, pool) for channels, pool in ((192, 32), (256, 64), (288, 64)))
        factorised = (_factorised(768, width) for width in (128, 160, 160, 192))
        stages = [*stem, *fine, _shrunk(288), *factorised, _shrunk_again(768), _expanded(1280), _expanded(2048)]
        super().__init__(stages, 2048, classes, Branches)


# ---- U-Net --------------------------------------------------------------------------------------


class DoubleConv(nn.Sequential):
    """Two 3x3 convolutions with BatchNorm and ReLU."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__(ConvNorm(channels, out, 3), ConvNorm(out, out, 3))


class UNet(nn.Module):
    """U-Net with `width` channels at the full resolution, `depth` poolings, and `classes` outputs per pixel."""

    block: ClassVar[type[nn.Module]] = DoubleConv

    def __init__(self, *, width: int = 64, depth: int = 4, classes: int = 2) -> None:
        super().__init__()
        widths = [width << i for i in range(depth + 1)]
        self.down = nn.ModuleList(DoubleConv(a, b) for a, b in zip([3, *widths], widths, strict=False))
        pairs = list(zip(widths[1:], widths, strict=False))[::-1]
        self.widen = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairs)
        self.up = nn.ModuleList(DoubleConv(2 * b, b) for _, b in pairs)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for i, stage in enumerate(self.down):
            x = stage(F.max_pool2d(x, 2) if i else x)
            skips.append(x)
        skips.pop()
        for widen, stage in zip(self.widen, self.up, strict=True):
            x = stage(torch.cat([skips.pop(), widen(x)], 1))
        return self.head(x)
