"""The networks that the benches train: DenseNet-BC, ResNet-50 and a BERT-base-shaped encoder.

Own definitions, as plain as the papers have them, so that nothing is downloaded and no model library
is needed; weights are random. A network knows nothing of rematerialisation: `wrap_blocks` replaces
each of its blocks by `wrap(block)`, and the same code serves `fckpt.remat`, PyTorch's checkpoint
(`TorchCheckpoint`) and any other wrapper that turns a module into a module.

References:
    Huang, Liu, van der Maaten, Weinberger (2017), Densely Connected Convolutional Networks,
    https://arxiv.org/abs/1608.06993
    He, Zhang, Ren, Sun (2016), Deep Residual Learning for Image Recognition,
    https://arxiv.org/abs/1512.03385
    Devlin, Chang, Lee, Toutanova (2019), BERT, https://arxiv.org/abs/1810.04805
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = [
    "BasicBlock",
    "BertEncoder",
    "Bottleneck",
    "ChainedBlock",
    "ChainedLayer",
    "DenseBlock",
    "DenseLayer",
    "DenseNet",
    "EncoderLayer",
    "ResNet",
    "TorchCheckpoint",
    "bert_base",
    "densenet121",
    "densenet_bc_100",
    "resnet50",
    "wrap_blocks",
]

ModelT = TypeVar("ModelT", bound=nn.Module)


# ---- rematerialisation, from outside -------------------------------------------------------------


class TorchCheckpoint(nn.Module):
    """Runs `inner` under `torch.utils.checkpoint(use_reentrant=False)`, the yardstick of the benches."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.inner, *args, use_reentrant=False)


def wrap_blocks(
    model: ModelT, wrap: Callable[[nn.Module], nn.Module], *, kind: type[nn.Module] | None = None
) -> ModelT:
    """Replaces every block of `model`, in place, by `wrap(block)` and returns `model`.

    Args:
        model: one of this file's networks, or any module when `kind` is given.
        wrap: turns a module into a module that computes the same, e.g. `fckpt.remat`.
        kind: the class of the modules to wrap; by default the network's own `block`: a dense layer,
            a bottleneck or an encoder layer. Blocks inside a wrapped block are left alone.

    Raises:
        ValueError: no module of that class is in `model`: nothing would be rematerialised.
    """
    block = kind or getattr(model, "block", None)
    if block is None:
        raise ValueError(f"{type(model).__name__} names no block of its own: pass kind=")
    if _wrap_children(model, wrap, block) == 0:
        raise ValueError(f"no {block.__name__} in {type(model).__name__}: nothing to wrap")
    return model


def _wrap_children(parent: nn.Module, wrap: Callable[[nn.Module], nn.Module], kind: type[nn.Module]) -> int:
    wrapped = 0
    for name, child in list(parent.named_children()):
        if isinstance(child, kind):
            setattr(parent, name, wrap(child))
            wrapped += 1
        else:
            wrapped += _wrap_children(child, wrap, kind)
    return wrapped


# ---- DenseNet-BC ---------------------------------------------------------------------------------


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

    def grow(self, x: Tensor) -> Tensor:
        return self.grow_from(self.narrow(x))


class DenseLayer(_Grown):
    """From all feature maps before it to `growth` new ones.

    It takes the earlier maps one by one and concatenates them itself. A region around it then holds
    `growth` channels per layer; were the concatenation made outside, it would hold a copy of all
    channels so far per layer, and a block of n layers O(n^2) of them.
    """

    def forward(self, *features: Tensor) -> Tensor:
        return self.grow(torch.cat(features, 1))


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
    """Its input, and `growth` channels more."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.grow(x)], 1)


class ChainedBlock(nn.Sequential):
    """`layers` dense layers that hand on all channels so far.

    The same numbers as from `DenseBlock`, and another graph: there the concatenation is inside of a layer, here it is
    between two, and may be kept.
    """

    layer: ClassVar[type[nn.Module]] = ChainedLayer

    def __init__(self, channels: int, growth: int, layers: int) -> None:
        super().__init__(*(ChainedLayer(channels + i * growth, growth) for i in range(layers)))


class DenseNet(nn.Module):
    """DenseNet-BC: bottleneck layers of 4 x growth channels, transitions that halve the channels.

    Args:
        growth: channels that a dense layer adds (the paper's k).
        layers: dense layers in each block.
        classes: outputs.
        small: a 3x3 stem for 32x32 images; otherwise the 7x7 stem with pooling for 224x224 ones.
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
        super().__init__()
        self.block = dense.layer
        channels = 2 * growth
        stages: list[nn.Module] = [_stem(channels, small=small, normalise=not small)]
        for i, count in enumerate(layers):
            stages.append(dense(channels, growth, count))
            channels += count * growth
            if i < len(layers) - 1:
                stages.append(_transition(channels))
                channels //= 2
        self.features = nn.Sequential(*stages, nn.BatchNorm2d(channels), nn.ReLU())
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


def _transition(channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels // 2, 1, bias=False),
        nn.AvgPool2d(2),
    )


def _stem(channels: int, *, small: bool, normalise: bool) -> nn.Sequential:
    conv = (
        nn.Conv2d(3, channels, 3, padding=1, bias=False)
        if small
        else nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
    )
    norm = [nn.BatchNorm2d(channels), nn.ReLU()] if normalise else []
    pool = [] if small else [nn.MaxPool2d(3, stride=2, padding=1)]
    return nn.Sequential(conv, *norm, *pool)


def densenet_bc_100(classes: int = 10) -> DenseNet:
    """DenseNet-BC of depth 100, k=12, for 3x32x32 images (0.8 million parameters)."""
    return DenseNet(12, (16, 16, 16), classes=classes, small=True)


def densenet121(classes: int = 1000) -> DenseNet:
    """DenseNet-121, k=32, for images from 3x64x64 up, 3x224x224 in the paper (8.0 million parameters)."""
    return DenseNet(32, (6, 12, 24, 16), classes=classes, small=False)


# ---- ResNet --------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """conv1x1-conv3x3-conv1x1 with BatchNorm, and a shortcut (a 1x1 convolution where shapes differ)."""

    expansion: ClassVar[int] = 4
    """Channels of its output over its width."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = self.expansion * width
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = _shortcut(channels, out, stride)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        h = F.relu(self.norm2(self.conv2(h)))
        return F.relu(self.norm3(self.conv3(h)) + self.shortcut(x))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm, and a shortcut (a 1x1 convolution where shapes differ)."""

    expansion: ClassVar[int] = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.shortcut = _shortcut(channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


def _shortcut(channels: int, out: int, stride: int) -> nn.Module:
    if stride == 1 and channels == out:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))


class ResNet(nn.Module):
    """A ResNet, the stride of bottlenecks in the 3x3 convolution.

    Args:
        layers: blocks in each of the stages.
        classes: outputs.
        small: a 3x3 stem for 32x32 images; otherwise the 7x7 stem with pooling for 224x224 ones.
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
        super().__init__()
        self.block = block
        channels = width
        stages: list[nn.Module] = [_stem(width, small=small, normalise=True)]
        for stage, count in enumerate(layers):
            for i in range(count):
                stages.append(block(channels, width << stage, stride=2 if stage and not i else 1))
                channels = block.expansion * (width << stage)
        self.features = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


def resnet50(classes: int = 1000, *, small: bool = False) -> ResNet:
    """ResNet-50 (25.6 million parameters with 1000 classes)."""
    return ResNet((3, 4, 6, 3), classes=classes, small=small)


# ---- BERT ----------------------------------------------------------------------------------------


class SelfAttention(nn.Module):
    """Multi-head self-attention with dropout on the probabilities.

    Softmax and both products are written out: fused attention kernels may sum in another order each
    time they run backward, and then no two plain steps are bitwise equal either.
    """

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.out = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], float("-inf"))
        probabilities = self.dropout(scores.softmax(-1))
        return self.out((probabilities @ v).transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    """Attention and a GELU MLP, each followed by dropout, the residual sum and LayerNorm."""

    def __init__(self, hidden: int, heads: int, mlp: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(hidden, heads, dropout)
        self.norm1 = nn.LayerNorm(hidden, eps=1e-12)
        self.mlp = nn.Sequential(nn.Linear(hidden, mlp), nn.GELU(), nn.Linear(mlp, hidden))
        self.norm2 = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x, mask)))
        return self.norm2(x + self.dropout(self.mlp(x)))


class BertEncoder(nn.Module):
    """BERT: embeddings, encoder layers, pooler and a classifier, with dropout wherever BERT has it.

    Args:
        hidden: width of a token.
        layers: encoder layers.
        heads: attention heads.
        mlp: width of the MLP inside a layer.
        vocabulary: token ids.
        positions: longest sequence.
        classes: outputs per sequence.
        dropout: probability, for embeddings, attention, both residual branches and the classifier.
    """

    block: ClassVar[type[nn.Module]] = EncoderLayer

    def __init__(
        self,
        *,
        hidden: int = 768,
        layers: int = 12,
        heads: int = 12,
        mlp: int = 3072,
        vocabulary: int = 30522,
        positions: int = 512,
        classes: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(positions, hidden)
        self.types = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(EncoderLayer(hidden, heads, mlp, dropout) for _ in range(layers))
        self.pooler = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(hidden, classes)
        self.apply(_initialise)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        position = torch.arange(tokens.shape[1], device=tokens.device)
        # All tokens are of the first segment: its embedding is one vector for the whole batch.
        x = self.words(tokens) + self.positions(position) + self.types.weight[0]
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.pooler(x[:, 0]))


def _initialise(module: nn.Module) -> None:
    # The default N(0, 1) of embeddings saturates the attention of a BERT; 0.02 is the paper's.
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def bert_base(classes: int = 2, *, dropout: float = 0.1) -> BertEncoder:
    """BERT-base: hidden 768, 12 layers, 12 heads, MLP 3072 (109 million parameters)."""
    return BertEncoder(classes=classes, dropout=dropout)
