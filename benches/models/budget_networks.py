"""Eleven networks of different kinds, for `benches.budgets` and `benches.overhead`.

The sizes make activations take several times the bytes of the gradients. Where a paper's width is too slow for a CPU,
the sizes for CPUs are narrower. `quick` and `tiny` are also shallower.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benches.common.training import Network, Sizes, labelled_images, sizes_from
from benches.models.convolutional import DenseNet, GoogLeNet, NormalisedVGG, ResNet, UNet
from benches.models.sequence import BertEncoder, Decoder, Llama, Mixer, UnrolledLSTM, ViT


def _pixels(sizes: Sizes) -> tuple[Tensor, Tensor]:
    batch, side = sizes["batch"], sizes["side"]
    return torch.randn(batch, 3, side, side), torch.randint(2, (batch, side, side))


def _sentences(sizes: Sizes) -> tuple[Tensor, Tensor]:
    batch = sizes["batch"]
    return torch.randint(sizes["vocabulary"], (batch, sizes["tokens"])), torch.randint(2, (batch,))


def _next_tokens(sizes: Sizes) -> tuple[Tensor, Tensor]:
    text = torch.randint(sizes["vocabulary"], (sizes["batch"], sizes["tokens"] + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _series(sizes: Sizes) -> tuple[Tensor, Tensor]:
    batch = sizes["batch"]
    return torch.randn(sizes["steps"], batch, sizes["features"]), torch.randint(10, (batch,))


def _resnet(stages: int = 4) -> ResNet:
    # The last stage holds two thirds of the weights: without it a small batch is enough.
    return ResNet((3, 4, 6, 3)[:stages], classes=10, small=False)


def _densenet(stages: int = 4, growth: int = 32) -> DenseNet:
    return DenseNet(growth, (6, 12, 24, 16)[:stages], classes=10, small=False)


_images = labelled_images(10)

SIZES = """
resnet50    cuda  batch=64 side=224
resnet50    cpu   batch=16 side=112
resnet50    quick batch=8 side=96 stages=3
resnet50    tiny  batch=2 side=64 stages=1
densenet121 cuda  batch=64 side=224
densenet121 cpu   batch=8 side=112
densenet121 quick batch=8 side=64
densenet121 tiny  batch=2 side=32 stages=2 growth=8
vgg16       cuda  batch=64 side=224
vgg16       cpu   batch=8 side=128 hidden=512
vgg16       quick batch=8 side=64 width=32 hidden=256
vgg16       tiny  batch=4 side=32 width=4 hidden=16
googlenet   cuda  batch=128 side=224
googlenet   cpu   batch=16 side=112
googlenet   quick batch=8 side=96 divisor=2
googlenet   tiny  batch=2 side=64 divisor=8
unet        cuda  batch=8 side=512
unet        cpu   batch=4 side=128 width=32
unet        quick batch=2 side=128 width=16
unet        tiny  batch=1 side=32 width=4 depth=2
vit         cuda  batch=64 side=224
vit         cpu   batch=8 side=224 hidden=256 heads=4
vit         quick batch=4 side=160 hidden=128 heads=4
vit         tiny  batch=2 side=32 patch=4 hidden=32 heads=2 layers=2
bert        cuda  batch=32 tokens=256 hidden=768 layers=12 heads=12 vocabulary=30522
bert        cpu   batch=8 tokens=192 hidden=256 layers=12 heads=4 vocabulary=8192
bert        quick batch=4 tokens=96 hidden=128 layers=12 heads=4 vocabulary=512
bert        tiny  batch=2 tokens=32 hidden=32 layers=2 heads=2 vocabulary=64
gpt2        cuda  batch=16 tokens=512 hidden=768 layers=12 heads=12 vocabulary=50257
gpt2        cpu   batch=8 tokens=192 hidden=256 layers=12 heads=4 vocabulary=8192
gpt2        quick batch=4 tokens=96 hidden=128 layers=12 heads=4 vocabulary=512
gpt2        tiny  batch=2 tokens=32 hidden=32 layers=2 heads=2 vocabulary=64
llama       cuda  batch=16 tokens=512 hidden=1024 layers=16 heads=16 groups=4 vocabulary=32000
llama       cpu   batch=8 tokens=192 hidden=256 layers=16 heads=8 groups=2 vocabulary=8192
llama       quick batch=4 tokens=96 hidden=128 layers=12 heads=4 groups=2 vocabulary=512
llama       tiny  batch=2 tokens=32 hidden=32 layers=2 heads=4 groups=2 vocabulary=64
mixer       cuda  batch=128 side=224
mixer       cpu   batch=8 side=224 hidden=256
mixer       quick batch=4 side=160 hidden=128
mixer       tiny  batch=2 side=32 patch=4 hidden=32 layers=2
lstm        cuda  batch=512 steps=96 features=256 hidden=1024 span=8
lstm        cpu   batch=128 steps=64 features=64 hidden=256 span=8
lstm        quick batch=64 steps=36 features=32 hidden=128 span=6
lstm        tiny  batch=16 steps=8 features=8 hidden=16 span=2
"""
"""Networks, names of sizes, and the sizes."""


def _sizes(network: str) -> dict[str, Sizes]:
    lines = (line.split(maxsplit=2) for line in SIZES.strip().splitlines())
    return {size: sizes_from(text) for name, size, text in lines if name == network}


NETWORKS: dict[str, Network] = {
    name: Network(title, model, data, _sizes(name))
    for name, title, model, data in (
        ("resnet50", "ResNet-50", _resnet, _images),
        ("densenet121", "DenseNet-121", _densenet, _images),
        ("vgg16", "VGG-16-BN", NormalisedVGG, _images),
        ("googlenet", "GoogLeNet", GoogLeNet, _images),
        ("unet", "U-Net", UNet, _pixels),
        ("vit", "ViT-B/16", ViT, _images),
        ("bert", "BERT-base", BertEncoder, _sentences),
        ("gpt2", "GPT-2 small", Decoder, _next_tokens),
        ("llama", "Llama", Llama, _next_tokens),
        ("mixer", "MLP-Mixer-B/16", Mixer, _images),
        ("lstm", "unrolled LSTM", UnrolledLSTM, _series),
    )
}
"""By name, in the order of the tables."""
