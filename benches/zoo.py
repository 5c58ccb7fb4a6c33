"""The networks of the benches that plan: those of `models.py`, and eight more, each with data to train it on.

Own definitions, as plain as the papers have them, so that nothing is downloaded and no model library is needed;
weights are random. A network names its `block`, so `models.wrap_blocks` serves all of them. Sizes are chosen such
that activations take several times the bytes of the gradients; where a paper's width makes that too slow for a CPU,
the CPU's sizes are narrower, never shallower (`quick` and `tiny` are both).

References:
    Simonyan, Zisserman (2015), Very Deep Convolutional Networks for Large-Scale Image Recognition,
    https://arxiv.org/abs/1409.1556
    Szegedy et al. (2015), Going Deeper with Convolutions, https://arxiv.org/abs/1409.4842; its convolutions are
    followed by BatchNorm, as in Ioffe, Szegedy (2015), https://arxiv.org/abs/1502.03167, and the auxiliary
    classifiers are left out
    Ronneberger, Fischer, Brox (2015), U-Net: Convolutional Networks for Biomedical Image Segmentation,
    https://arxiv.org/abs/1505.04597; padded convolutions with BatchNorm
    Dosovitskiy et al. (2021), An Image is Worth 16x16 Words, https://arxiv.org/abs/2010.11929
    Radford, Wu, Child, Luan, Amodei, Sutskever (2019), Language Models are Unsupervised Multitask Learners,
    https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
    Touvron et al. (2023), LLaMA, https://arxiv.org/abs/2302.13971; grouped-query attention after Ainslie et al.
    (2023), https://arxiv.org/abs/2305.13245
    Tolstikhin et al. (2021), MLP-Mixer: An all-MLP Architecture for Vision, https://arxiv.org/abs/2105.01601
    Hochreiter, Schmidhuber (1997), Long Short-Term Memory, https://doi.org/10.1162/neco.1997.9.8.1735, unrolled, as in
    Gruslys, Munos, Danihelka, Lanctot, Graves (2016), Memory-Efficient Backpropagation Through Time,
    https://arxiv.org/abs/1606.03401
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benches.models import BertEncoder, DenseNet, ResNet
from benches.task import Network, Sizes

__all__ = [
    "NETWORKS",
    "VGG",
    "Decoder",
    "GoogLeNet",
    "Llama",
    "Mixer",
    "UNet",
    "UnrolledLSTM",
    "ViT",
]


# ---- data ----------------------------------------------------------------------------------------


def _images(sizes: Sizes) -> tuple[Tensor, Tensor]:
    batch, side = sizes["batch"], sizes["side"]
    return torch.randn(batch, 3, side, side), torch.randint(10, (batch,))


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


# ---- convolutions --------------------------------------------------------------------------------


class ConvNorm(nn.Sequential):
    """Convolution, BatchNorm, ReLU."""

    def __init__(self, channels: int, out: int, kernel: int, *, stride: int = 1) -> None:
        conv = nn.Conv2d(channels, out, kernel, stride=stride, padding=kernel // 2, bias=False)
        super().__init__(conv, nn.BatchNorm2d(out), nn.ReLU())


class VGGStage(nn.Sequential):
    """Convolutions of one width, and the pooling after them."""

    def __init__(self, channels: int, out: int, layers: int) -> None:
        convolutions = [ConvNorm(channels if i == 0 else out, out, 3) for i in range(layers)]
        super().__init__(*convolutions, nn.MaxPool2d(2))


class VGG(nn.Module):
    """VGG-16 with BatchNorm: configuration D, dropout in the classifier.

    Args:
        width: channels of the first stage, 64 in the paper; later ones have up to eight times as many.
        hidden: width of the classifier, 4096 in the paper.
        side: of the images.
        classes: outputs.
    """

    block: ClassVar[type[nn.Module]] = VGGStage

    def __init__(self, *, width: int = 64, hidden: int = 4096, side: int = 224, classes: int = 10) -> None:
        super().__init__()
        widths = [3, width, 2 * width, 4 * width, 8 * width, 8 * width]
        self.features = nn.Sequential(
            *(VGGStage(a, b, n) for a, b, n in zip(widths, widths[1:], (2, 2, 3, 3, 3), strict=False))
        )
        self.classifier = nn.Sequential(
            nn.Linear(widths[-1] * (side // 32) ** 2, hidden),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


class Inception(nn.Module):
    """Four branches over the same input, concatenated: 1x1, 3x3 and 5x5 convolutions, and a pooling.

    Args:
        channels: of the input.
        widths: 1x1; 1x1 before 3x3, 3x3; 1x1 before 5x5, 5x5; 1x1 after the pooling.
    """

    def __init__(self, channels: int, widths: tuple[int, int, int, int, int, int]) -> None:
        super().__init__()
        one, before_three, three, before_five, five, pool = widths
        self.one = ConvNorm(channels, one, 1)
        self.three = nn.Sequential(ConvNorm(channels, before_three, 1), ConvNorm(before_three, three, 3))
        self.five = nn.Sequential(ConvNorm(channels, before_five, 1), ConvNorm(before_five, five, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), ConvNorm(channels, pool, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


class GoogLeNet(nn.Module):
    """GoogLeNet with BatchNorm: nine inception modules; `divisor` narrows all of it."""

    block: ClassVar[type[nn.Module]] = Inception

    TABLE: ClassVar[list[list[tuple[int, int, int, int, int, int]]]] = [
        [(64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)],
        [
            (192, 96, 208, 16, 48, 64),
            (160, 112, 224, 24, 64, 64),
            (128, 128, 256, 24, 64, 64),
            (112, 144, 288, 32, 64, 64),
            (256, 160, 320, 32, 128, 128),
        ],
        [(256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)],
    ]
    """Table 1 of the paper, by stage."""

    def __init__(self, *, divisor: int = 1, classes: int = 10) -> None:
        super().__init__()
        channels = 192 // divisor
        stages: list[nn.Module] = [
            ConvNorm(3, 64 // divisor, 7, stride=2),
            nn.MaxPool2d(3, stride=2, padding=1),
            ConvNorm(64 // divisor, 64 // divisor, 1),
            ConvNorm(64 // divisor, channels, 3),
        ]
        for stage in self.TABLE:
            stages.append(nn.MaxPool2d(3, stride=2, padding=1))
            for row in stage:
                a, b, c, d, e, f = (max(1, width // divisor) for width in row)
                stages.append(Inception(channels, (a, b, c, d, e, f)))
                channels = a + c + e + f
        self.features = nn.Sequential(*stages)
        self.dropout = nn.Dropout(0.4)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.features(x).mean((2, 3))))


class DoubleConv(nn.Sequential):
    """Two 3x3 convolutions with BatchNorm and ReLU."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__(ConvNorm(channels, out, 3), ConvNorm(out, out, 3))


class UNet(nn.Module):
    """U-Net: `depth` times down and up again, with a skip connection at each resolution.

    Args:
        width: channels at the full resolution, 64 in the paper.
        depth: poolings, 4 in the paper.
        classes: outputs per pixel.
    """

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


# ---- transformers --------------------------------------------------------------------------------


class Attention(nn.Module):
    """Multi-head self-attention with one projection for queries, keys and values, causal or not.

    Softmax and both products are written out, for the reason that `models.SelfAttention` gives.
    """

    def __init__(self, hidden: int, heads: int, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if self.causal:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        probabilities = self.dropout(scores.softmax(-1))
        return self.out((probabilities @ v).transpose(1, 2).flatten(2))


class PreNormBlock(nn.Module):
    """LayerNorm before attention and before the GELU MLP; both are added to their input."""

    def __init__(self, hidden: int, heads: int, *, causal: bool, dropout: float, approximate: str = "none") -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, causal=causal, dropout=dropout)
        mlp = [nn.Linear(hidden, 4 * hidden), nn.GELU(approximate), nn.Linear(4 * hidden, hidden)]
        self.mlp = nn.Sequential(*mlp)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    """Vision transformer; ViT-B/16 by default, without dropout.

    Args:
        side: of the images.
        patch: side of a patch.
        hidden: width of a token.
        layers: blocks.
        heads: attention heads.
        classes: outputs.
    """

    block: ClassVar[type[nn.Module]] = PreNormBlock

    def __init__(
        self,
        *,
        side: int = 224,
        patch: int = 16,
        hidden: int = 768,
        layers: int = 12,
        heads: int = 12,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, hidden))
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, hidden) * 0.02)
        self.layers = nn.Sequential(*(PreNormBlock(hidden, heads, causal=False, dropout=0.0) for _ in range(layers)))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.positions
        return self.head(self.norm(self.layers(tokens))[:, 0])


class Decoder(nn.Module):
    """GPT-2: a causal language model with dropout, its head tied to the embedding.

    Args:
        hidden: width of a token.
        layers: blocks.
        heads: attention heads.
        vocabulary: token ids.
        positions: longest sequence.
        dropout: probability, for embeddings, attention and both residual branches.
    """

    block: ClassVar[type[nn.Module]] = PreNormBlock

    def __init__(
        self,
        *,
        hidden: int = 768,
        layers: int = 12,
        heads: int = 12,
        vocabulary: int = 50257,
        positions: int = 1024,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(positions, hidden)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(
            *(PreNormBlock(hidden, heads, causal=True, dropout=dropout, approximate="tanh") for _ in range(layers))
        )
        self.norm = nn.LayerNorm(hidden)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        position = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.words(tokens) + self.positions(position))
        return F.linear(self.norm(self.layers(x)), self.words.weight)


class RMSNorm(nn.Module):
    """Divides by the root of the mean square, over the last dimension."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt())


class GroupedAttention(nn.Module):
    """Causal attention with rotary embeddings, in which several query heads share a head of keys and values.

    The attention itself is PyTorch's fused kernel, as everyone runs it.
    """

    def __init__(self, hidden: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        size = hidden // heads
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key, self.value = (nn.Linear(hidden, groups * size, bias=False) for _ in range(2))
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = _rotate(self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2), cos, sin)
        k = _rotate(self.key(x).unflatten(-1, (self.groups, -1)).transpose(1, 2), cos, sin)
        v = self.value(x).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class LlamaBlock(nn.Module):
    """RMSNorm before attention and before the SwiGLU MLP; both are added to their input."""

    def __init__(self, hidden: int, heads: int, groups: int, mlp: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(hidden), RMSNorm(hidden)
        self.attention = GroupedAttention(hidden, heads, groups)
        self.gate, self.up = (nn.Linear(hidden, mlp, bias=False) for _ in range(2))
        self.down = nn.Linear(mlp, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """A Llama-shaped language model: RMSNorm, rotary embeddings, SwiGLU, grouped-query attention, no dropout.

    Args:
        hidden: width of a token.
        layers: blocks.
        heads: heads of queries.
        groups: heads of keys and values; divides `heads`.
        vocabulary: token ids.
        positions: longest sequence.
    """

    block: ClassVar[type[nn.Module]] = LlamaBlock
    cos: Tensor
    sin: Tensor

    def __init__(
        self, *, hidden: int, layers: int, heads: int, groups: int, vocabulary: int = 32000, positions: int = 2048
    ) -> None:
        super().__init__()
        mlp = -(-8 * hidden // 3 // 32) * 32  # two thirds of 4 x hidden, for three matrices instead of two
        self.words = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(LlamaBlock(hidden, heads, groups, mlp) for _ in range(layers))
        self.norm = RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        size = hidden // heads
        frequencies = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.arange(positions)[:, None] * torch.cat([frequencies, frequencies])
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        cos, sin = (table[: tokens.shape[1]] for table in (self.cos, self.sin))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


# ---- MLP-Mixer -----------------------------------------------------------------------------------


class MixerBlock(nn.Module):
    """An MLP across patches and an MLP across channels, each with LayerNorm before it and a skip connection."""

    def __init__(self, patches: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.across = nn.Sequential(nn.Linear(patches, hidden // 2), nn.GELU(), nn.Linear(hidden // 2, patches))
        self.within = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norm2(x))


class Mixer(nn.Module):
    """MLP-Mixer; B/16 by default.

    Args:
        side: of the images.
        patch: side of a patch.
        hidden: channels per patch.
        layers: blocks.
        classes: outputs.
    """

    block: ClassVar[type[nn.Module]] = MixerBlock

    def __init__(
        self, *, side: int = 224, patch: int = 16, hidden: int = 768, layers: int = 12, classes: int = 10
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, patch, stride=patch)
        self.layers = nn.Sequential(*(MixerBlock((side // patch) ** 2, hidden) for _ in range(layers)))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.layers(tokens)).mean(1))


# ---- LSTM ----------------------------------------------------------------------------------------


class Span(nn.Module):
    """Some steps of an LSTM, written out: the block that is rematerialised is a stretch of time."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.cell = nn.Linear(features + hidden, 4 * hidden)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        for now in x.unbind(0):
            i, f, g, o = self.cell(torch.cat([now, h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return h, c


class UnrolledLSTM(nn.Module):
    """One layer of LSTM over a series of (steps, batch, features), and a classifier of its last state.

    Args:
        features: of the series.
        hidden: width of the state.
        span: steps in a block.
        classes: outputs.
    """

    block: ClassVar[type[nn.Module]] = Span

    def __init__(self, *, features: int, hidden: int, span: int, classes: int = 10) -> None:
        super().__init__()
        self.hidden, self.span = hidden, span
        self.steps = Span(features, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[1], self.hidden)
        for stretch in x.split(self.span):
            h, c = self.steps(stretch, h, c)
        return self.head(h)


# ---- the list ------------------------------------------------------------------------------------


def _resnet(sizes: Sizes) -> nn.Module:
    # The last stage holds two thirds of the weights: without it a small batch is enough.
    return ResNet((3, 4, 6, 3)[: sizes.get("stages", 4)], classes=10, small=False)


def _densenet(sizes: Sizes) -> nn.Module:
    return DenseNet(sizes.get("growth", 32), (6, 12, 24, 16)[: sizes.get("stages", 4)], classes=10, small=False)


def _bert(sizes: Sizes) -> nn.Module:
    hidden = sizes["hidden"]
    return BertEncoder(
        hidden=hidden,
        layers=sizes["layers"],
        heads=sizes["heads"],
        mlp=4 * hidden,
        vocabulary=sizes["vocabulary"],
        positions=sizes["tokens"],
    )


def _own(model: type[nn.Module], *names: str) -> Callable[[Sizes], nn.Module]:
    """A builder that passes those sizes on which `model` takes."""
    return lambda sizes: model(**{name: sizes[name] for name in names if name in sizes})


def _decoder(model: type[nn.Module], *names: str) -> Callable[[Sizes], nn.Module]:
    build = _own(model, "hidden", "layers", "heads", "vocabulary", "positions", *names)
    return lambda sizes: build({**sizes, "positions": sizes["tokens"]})


def _text(batch: int, tokens: int, **sizes: int) -> Sizes:
    return {"batch": batch, "tokens": tokens, **sizes}


NETWORKS: dict[str, Network] = {
    "resnet50": Network(
        "ResNet-50",
        _resnet,
        _images,
        {
            "cuda": {"batch": 64, "side": 224},
            "cpu": {"batch": 16, "side": 112},
            "quick": {"batch": 8, "side": 96, "stages": 3},
            "tiny": {"batch": 2, "side": 64, "stages": 1},
        },
    ),
    "densenet121": Network(
        "DenseNet-121",
        _densenet,
        _images,
        {
            "cuda": {"batch": 64, "side": 224},
            "cpu": {"batch": 8, "side": 112},
            "quick": {"batch": 8, "side": 64},
            "tiny": {"batch": 2, "side": 32, "stages": 2, "growth": 8},
        },
    ),
    "vgg16": Network(
        "VGG-16-BN",
        _own(VGG, "width", "hidden", "side"),
        _images,
        {
            "cuda": {"batch": 64, "side": 224},
            "cpu": {"batch": 8, "side": 128, "hidden": 512},
            "quick": {"batch": 8, "side": 64, "width": 32, "hidden": 256},
            "tiny": {"batch": 4, "side": 32, "width": 4, "hidden": 16},
        },
    ),
    "googlenet": Network(
        "GoogLeNet",
        _own(GoogLeNet, "divisor"),
        _images,
        {
            "cuda": {"batch": 128, "side": 224},
            "cpu": {"batch": 16, "side": 112},
            "quick": {"batch": 8, "side": 96, "divisor": 2},
            "tiny": {"batch": 2, "side": 64, "divisor": 8},
        },
    ),
    "unet": Network(
        "U-Net",
        _own(UNet, "width", "depth"),
        _pixels,
        {
            "cuda": {"batch": 8, "side": 512},
            "cpu": {"batch": 4, "side": 128, "width": 32},
            "quick": {"batch": 2, "side": 128, "width": 16},
            "tiny": {"batch": 1, "side": 32, "width": 4, "depth": 2},
        },
    ),
    "vit": Network(
        "ViT-B/16",
        _own(ViT, "side", "patch", "hidden", "layers", "heads"),
        _images,
        {
            "cuda": {"batch": 64, "side": 224},
            "cpu": {"batch": 8, "side": 224, "hidden": 256, "heads": 4},
            "quick": {"batch": 4, "side": 160, "hidden": 128, "heads": 4},
            "tiny": {"batch": 2, "side": 32, "patch": 4, "hidden": 32, "heads": 2, "layers": 2},
        },
    ),
    "bert": Network(
        "BERT-base",
        _bert,
        _sentences,
        {
            "cuda": _text(32, 256, hidden=768, layers=12, heads=12, vocabulary=30522),
            "cpu": _text(8, 192, hidden=256, layers=12, heads=4, vocabulary=8192),
            "quick": _text(4, 96, hidden=128, layers=12, heads=4, vocabulary=512),
            "tiny": _text(2, 32, hidden=32, layers=2, heads=2, vocabulary=64),
        },
    ),
    "gpt2": Network(
        "GPT-2 small",
        _decoder(Decoder),
        _next_tokens,
        {
            "cuda": _text(16, 512, hidden=768, layers=12, heads=12, vocabulary=50257),
            "cpu": _text(8, 192, hidden=256, layers=12, heads=4, vocabulary=8192),
            "quick": _text(4, 96, hidden=128, layers=12, heads=4, vocabulary=512),
            "tiny": _text(2, 32, hidden=32, layers=2, heads=2, vocabulary=64),
        },
    ),
    "llama": Network(
        "Llama",
        _decoder(Llama, "groups"),
        _next_tokens,
        {
            "cuda": _text(16, 512, hidden=1024, layers=16, heads=16, groups=4, vocabulary=32000),
            "cpu": _text(8, 192, hidden=256, layers=16, heads=8, groups=2, vocabulary=8192),
            "quick": _text(4, 96, hidden=128, layers=12, heads=4, groups=2, vocabulary=512),
            "tiny": _text(2, 32, hidden=32, layers=2, heads=4, groups=2, vocabulary=64),
        },
    ),
    "mixer": Network(
        "MLP-Mixer-B/16",
        _own(Mixer, "side", "patch", "hidden", "layers"),
        _images,
        {
            "cuda": {"batch": 128, "side": 224},
            "cpu": {"batch": 8, "side": 224, "hidden": 256},
            "quick": {"batch": 4, "side": 160, "hidden": 128},
            "tiny": {"batch": 2, "side": 32, "patch": 4, "hidden": 32, "layers": 2},
        },
    ),
    "lstm": Network(
        "unrolled LSTM",
        _own(UnrolledLSTM, "features", "hidden", "span"),
        _series,
        {
            "cuda": {"batch": 512, "steps": 96, "features": 256, "hidden": 1024, "span": 8},
            "cpu": {"batch": 128, "steps": 64, "features": 64, "hidden": 256, "span": 8},
            "quick": {"batch": 64, "steps": 36, "features": 32, "hidden": 128, "span": 6},
            "tiny": {"batch": 16, "steps": 8, "features": 8, "hidden": 16, "span": 2},
        },
    ),
}
"""By name; the order is that of the tables."""
