"""The eighteen networks of Feng & Huang, with the figures that they published.

J. Feng, D. Huang, "Optimal Gradient Checkpoint Search for Arbitrary Computation Graphs", CVPR 2021,
https://arxiv.org/abs/1808.00079, chose checkpoints for these networks and measured them: see the table of
https://github.com/lordfjw/OptimalGradCheckpointing. The variants are those of that code: torchvision's (VGG without
BatchNorm; the stride of a bottleneck in its 3x3 convolution; Inception-v3 without the auxiliary classifier), and cells
found by architecture search for CIFAR-10. Dropout, which that benchmark switches off, is left out.

Sizes: `paper` has the batch and the image of the table. `cpu` fits a small machine: a step takes about a second, and
activations are larger than gradients, with a narrower classifier for AlexNet and VGG. `tiny` is for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import nn

from benches.common.training import Network, Sizes, labelled_images, sizes_from
from benches.models.convolutional import VGG, AlexNet, BasicBlock, ChainedBlock, DenseNet, InceptionV3, ResNet
from benches.models.searched_cells import AMOEBANET_A, DARTS_V2, NASNET_A, CellNetwork

__all__ = ["NETWORKS", "Published", "PublishedNetwork"]


class Published(NamedTuple):
    """A row of the published table: megabytes above the weights, and seconds per step, on a GPU of its time."""

    plain_megabytes: int
    ogc_megabytes: int
    plain_seconds: float
    ogc_seconds: float

    @property
    def cut(self) -> float:
        """The fraction of the memory that is saved."""
        return 1 - self.ogc_megabytes / self.plain_megabytes

    @property
    def overhead(self) -> float:
        """The extra time, as a fraction of the plain step's."""
        return self.ogc_seconds / self.plain_seconds - 1


@dataclass(frozen=True)
class PublishedNetwork(Network):
    """A network of the table; its sizes are "paper", "cpu" and "tiny"."""

    published: Published


class _Small(NamedTuple):
    """What the smaller sizes of a kind of network have besides: see `_network`."""

    tiny: str = "batch=2 side=32"
    cpu: str = ""
    classes: int = 1000


_CLASSIFIER = _Small("batch=2 side=64 hidden=8", cpu=" hidden=256")
_NARROW = _Small("batch=2 side=64 width=4")
_CELLS = _Small("batch=2 side=16 channels=4 layers=3", classes=10)


def _network(
    title: str,
    model: Callable[..., nn.Module],
    paper: tuple[int, int],
    cpu: tuple[int, int],
    published: Published,
    small: _Small = _Small(),  # noqa: B008  immutable
) -> PublishedNetwork:
    """Makes a row of the table, from the batch and the side of the images in the two sizes."""
    texts = {name: "batch={} side={}".format(*numbers) for name, numbers in (("paper", paper), ("cpu", cpu))}
    texts = {"paper": texts["paper"], "cpu": texts["cpu"] + small.cpu, "tiny": small.tiny}
    sizes: dict[str, Sizes] = {name: sizes_from(text) for name, text in texts.items()}
    return PublishedNetwork(title, model, labelled_images(small.classes), sizes, published)


_vgg = lambda *layers: partial(VGG, layers)
_resnet = lambda *layers, **block: partial(ResNet, layers, classes=1000, small=False, **block)
_densenet = lambda growth, *layers: partial(DenseNet, growth, layers, classes=1000, small=False, dense=ChainedBlock)
_basic_resnet = partial(_resnet, block=BasicBlock)
_cells = lambda genotype: partial(CellNetwork, genotype)
_P = Published

NETWORKS: dict[str, PublishedNetwork] = {
    "alexnet": _network("AlexNet", AlexNet, (1024, 224), (32, 224), _P(4955, 3287, 0.388, 0.519), _CLASSIFIER),
    "vgg11": _network("VGG-11", _vgg(1, 1, 2, 2, 2), (64, 224), (8, 112), _P(3577, 2781, 0.266, 0.356), _CLASSIFIER),
    "vgg13": _network("VGG-13", _vgg(2, 2, 2, 2, 2), (64, 224), (8, 112), _P(5136, 3565, 0.418, 0.558), _CLASSIFIER),
    "vgg16": _network("VGG-16", _vgg(2, 2, 3, 3, 3), (64, 224), (6, 112), _P(5136, 3565, 0.503, 0.666), _CLASSIFIER),
    "vgg19": _network("VGG-19", _vgg(2, 2, 4, 4, 4), (64, 224), (6, 112), _P(5189, 3565, 0.581, 0.774), _CLASSIFIER),
    "resnet18": _network(
        "ResNet-18", _basic_resnet(2, 2, 2, 2), (256, 224), (8, 112), _P(5635, 3677, 0.422, 0.548), _NARROW
    ),
    "resnet34": _network(
        "ResNet-34", _basic_resnet(3, 4, 6, 3), (128, 224), (8, 112), _P(4079, 1838, 0.364, 0.493), _NARROW
    ),
    "resnet50": _network("ResNet-50", _resnet(3, 4, 6, 3), (64, 224), (8, 112), _P(5323, 1973, 0.394, 0.516)),
    "resnet101": _network("ResNet-101", _resnet(3, 4, 23, 3), (32, 224), (8, 112), _P(3934, 1024, 0.356, 0.482)),
    "resnet152": _network("ResNet-152", _resnet(3, 8, 36, 3), (16, 224), (8, 112), _P(2767, 526, 0.241, 0.331)),
    "densenet121": _network(
        "DenseNet-121", _densenet(32, 6, 12, 24, 16), (32, 224), (8, 112), _P(4027, 898, 0.218, 0.292)
    ),
    "densenet161": _network(
        "DenseNet-161", _densenet(48, 6, 12, 36, 24), (16, 224), (4, 112), _P(3751, 666, 0.252, 0.341)
    ),
    "densenet169": _network(
        "DenseNet-169", _densenet(32, 6, 12, 32, 32), (32, 224), (8, 112), _P(4862, 897, 0.270, 0.357)
    ),
    "densenet201": _network(
        "DenseNet-201", _densenet(32, 6, 12, 48, 32), (16, 224), (8, 112), _P(3146, 474, 0.200, 0.306)
    ),
    "inception_v3": _network(
        "Inception-v3", InceptionV3, (32, 300), (8, 150), _P(3074, 881, 0.291, 0.374), _Small("batch=2 side=75")
    ),
    "nasnet": _network("NASNet, CIFAR-10", _cells(NASNET_A), (64, 32), (8, 32), _P(5832, 1129, 0.408, 0.535), _CELLS),
    "amoebanet": _network(
        "AmoebaNet, CIFAR-10", _cells(AMOEBANET_A), (64, 32), (8, 32), _P(4944, 1058, 0.331, 0.450), _CELLS
    ),
    "darts": _network("DARTS, CIFAR-10", _cells(DARTS_V2), (64, 32), (8, 32), _P(5627, 1115, 0.318, 0.494), _CELLS),
}
"""By name, in the order of the published table."""
