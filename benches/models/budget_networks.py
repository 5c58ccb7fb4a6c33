"""Eleven networks of different kinds, for `benches.budgets` and `benches.equal_memory`.

The sizes make activations take several times the bytes of the gradients. Where a paper's width is too slow for a CPU,
the sizes for CPUs are narrower. `quick` and `tiny` are also shallower.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benches.common.training import Network, Sizes, labelled_images, sizes_from
from benches.models.convolutional import DenseNet, GoogLeNet, NormalisedVGG, ResNet, UNet
from benches.models.sequence import BertEncoder, Decoder, Llama, Mixer, UnrolledLSTM, ViT

__all__ = ["NETWORKS"]


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

NETWORKS: dict[str, Network] = {
    name: Network(title, model, data, dict(zip(("cuda", "cpu", "quick", "tiny"), map(sizes_from, sizes), strict=True)))
    for name, title, model, data, *sizes in (
        (
            *("resnet50", "ResNet-50", _resnet, _images),
            "batch=64 side=224",
            "batch=16 side=112",
            "batch=8 side=96 stages=3",
            "batch=2 side=64 stages=1",
        ),
        (
            *("densenet121", "DenseNet-121", _densenet, _images),
            "batch=64 side=224",
            "batch=8 side=112",
            "batch=8 side=64",
            "batch=2 side=32 stages=2 growth=8",
        ),
        (
            *("vgg16", "VGG-16-BN", NormalisedVGG, _images),
            "batch=64 side=224",
            "batch=8 side=128 hidden=512",
            "batch=8 side=64 width=32 hidden=256",
            "batch=4 side=32 width=4 hidden=16",
        ),
        (
            *("googlenet", "GoogLeNet", GoogLeNet, _images),
            "batch=128 side=224",
            "batch=16 side=112",
            "batch=8 side=96 divisor=2",
            "batch=2 side=64 divisor=8",
        ),
        (
            *("unet", "U-Net", UNet, _pixels),
            "batch=8 side=512",
            "batch=4 side=128 width=32",
            "batch=2 side=128 width=16",
            "batch=1 side=32 width=4 depth=2",
        ),
        (
            *("vit", "ViT-B/16", ViT, _images),
            "batch=64 side=224",
            "batch=8 side=224 hidden=256 heads=4",
            "batch=4 side=160 hidden=128 heads=4",
            "batch=2 side=32 patch=4 hidden=32 heads=2 layers=2",
        ),
        (
            *("bert", "BERT-base", BertEncoder, _sentences),
            "batch=32 tokens=256 hidden=768 layers=12 heads=12 vocabulary=30522",
            "batch=8 tokens=192 hidden=256 layers=12 heads=4 vocabulary=8192",
            "batch=4 tokens=96 hidden=128 layers=12 heads=4 vocabulary=512",
            "batch=2 tokens=32 hidden=32 layers=2 heads=2 vocabulary=64",
        ),
        (
            *("gpt2", "GPT-2 small", Decoder, _next_tokens),
            "batch=16 tokens=512 hidden=768 layers=12 heads=12 vocabulary=50257",
            "batch=8 tokens=192 hidden=256 layers=12 heads=4 vocabulary=8192",
            "batch=4 tokens=96 hidden=128 layers=12 heads=4 vocabulary=512",
            "batch=2 tokens=32 hidden=32 layers=2 heads=2 vocabulary=64",
        ),
        (
            *("llama", "Llama", Llama, _next_tokens),
            "batch=16 tokens=512 hidden=1024 layers=16 heads=16 groups=4 vocabulary=32000",
            "batch=8 tokens=192 hidden=256 layers=16 heads=8 groups=2 vocabulary=8192",
            "batch=4 tokens=96 hidden=128 layers=12 heads=4 groups=2 vocabulary=512",
            "batch=2 tokens=32 hidden=32 layers=2 heads=4 groups=2 vocabulary=64",
        ),
        (
            *("mixer", "MLP-Mixer-B/16", Mixer, _images),
            "batch=128 side=224",
            "batch=8 side=224 hidden=256",
            "batch=4 side=160 hidden=128",
            "batch=2 side=32 patch=4 hidden=32 layers=2",
        ),
        (
            *("lstm", "unrolled LSTM", UnrolledLSTM, _series),
            "batch=512 steps=96 features=256 hidden=1024 span=8",
            "batch=128 steps=64 features=64 hidden=256 span=8",
            "batch=64 steps=36 features=32 hidden=128 span=6",
            "batch=16 steps=8 features=8 hidden=16 span=2",
        ),
    )
}
"""By name, in the order of the tables."""
