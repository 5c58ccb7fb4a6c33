"""Networks of sequences: BERT, ViT, GPT-2, Llama, MLP-Mixer, a mixture of experts and an unrolled LSTM.

Written as in the papers, so that no model library and no download is needed; weights are random. A network names the
class of its blocks in `block`, for `wrapping.wrap_blocks`.

References:
    Devlin, Chang, Lee, Toutanova (2019), BERT, https://arxiv.org/abs/1810.04805
    Dosovitskiy et al. (2021), An Image is Worth 16x16 Words, https://arxiv.org/abs/2010.11929
    Radford, Wu, Child, Luan, Amodei, Sutskever (2019), Language Models are Unsupervised Multitask Learners,
    https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
    Touvron et al. (2023), LLaMA, https://arxiv.org/abs/2302.13971; grouped-query attention after Ainslie et al.
    (2023), https://arxiv.org/abs/2305.13245
    Tolstikhin et al. (2021), MLP-Mixer: An all-MLP Architecture for Vision, https://arxiv.org/abs/2105.01601
    Fedus, Zoph, Shazeer (2022), Switch Transformers, https://arxiv.org/abs/2101.03961
    Hochreiter, Schmidhuber (1997), Long Short-Term Memory, https://doi.org/10.1162/neco.1997.9.8.1735, unrolled, as in
    Gruslys, Munos, Danihelka, Lanctot, Graves (2016), Memory-Efficient Backpropagation Through Time,
    https://arxiv.org/abs/1606.03401
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _mlp(hidden: int, inner: int, approximate: str = "none") -> nn.Sequential:
    return nn.Sequential(nn.Linear(hidden, inner), nn.GELU(approximate), nn.Linear(inner, hidden))


def _at_positions(words: nn.Embedding, positions: nn.Embedding, tokens: Tensor) -> Tensor:
    """Returns the sums of both embeddings."""
    position = torch.arange(tokens.shape[1], device=tokens.device)
    return words(tokens) + positions(position)


def _initialise(model: nn.Module) -> None:
    # The default N(0, 1) of embeddings saturates the attention of a BERT. The papers have 0.02.
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


class Attention(nn.Module):
    """Multi-head self-attention with dropout on the probabilities, and one product for q, k and v if `joint`.

    Softmax and both products are written out, because the backward passes of fused attention kernels may sum in a
    different order in each run, and then not even two plain steps are bitwise equal.
    """

    def __init__(self, hidden: int, heads: int, dropout: float, *, causal: bool, joint: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        widths = [3 * hidden] if joint else [hidden] * 3
        self.qkv = nn.ModuleList(nn.Linear(hidden, width) for width in widths)
        self.out = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv[0](x).chunk(3, -1) if len(self.qkv) == 1 else (project(x) for project in self.qkv)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if self.causal:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        probabilities = self.dropout(scores.softmax(-1))
        return self.out((probabilities @ v).transpose(1, 2).flatten(2))


# ---- BERT ---------------------------------------------------------------------------------------


class EncoderLayer(nn.Module):
    """Attention and a GELU MLP, each followed by dropout, the residual sum and LayerNorm."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads, dropout, causal=False, joint=False)
        self.norm1 = nn.LayerNorm(hidden, eps=1e-12)
        self.mlp = _mlp(hidden, 4 * hidden)
        self.norm2 = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x)))
        return self.norm2(x + self.dropout(self.mlp(x)))


class BertEncoder(nn.Module):
    """BERT-base by default: embeddings, encoder layers, pooler and a classifier, with dropout wherever BERT has it.

    A token has `hidden` features, and the MLP of a layer four times as many; a sequence has at most `positions` tokens.
    """

    block: ClassVar[type[nn.Module]] = EncoderLayer

    def __init__(
        self, *, hidden: int = 768, layers: int = 12, heads: int = 12, vocabulary: int = 30522, positions: int = 512
    ) -> None:
        dropout = 0.1
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(positions, hidden)
        self.types = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(*(EncoderLayer(hidden, heads, dropout) for _ in range(layers)))
        self.pooler = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(hidden, 2)
        _initialise(self)

    def forward(self, tokens: Tensor) -> Tensor:
        # All tokens belong to the first segment, whose embedding is one vector.
        x = _at_positions(self.words, self.positions, tokens) + self.types.weight[0]
        return self.head(self.pooler(self.layers(self.dropout(self.norm(x)))[:, 0]))


# ---- ViT and GPT-2 ------------------------------------------------------------------------------


class PreNormBlock(nn.Module):
    """LayerNorm before attention and before the GELU MLP; both are added to their input."""

    def __init__(self, hidden: int, heads: int, *, causal: bool, dropout: float, approximate: str = "none") -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, dropout, causal=causal, joint=True)
        self.mlp: nn.Module = _mlp(hidden, 4 * hidden, approximate)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    """Vision transformer without dropout; ViT-B/16 by default. `side` and `patch` are those of images and patches."""

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


def _causal_blocks(hidden: int, layers: int, heads: int, dropout: float) -> nn.Sequential:
    block = lambda: PreNormBlock(hidden, heads, causal=True, dropout=dropout, approximate="tanh")
    return nn.Sequential(*(block() for _ in range(layers)))


class Decoder(nn.Module):
    """GPT-2: a causal language model with dropout (embeddings, attention, residual branches) and a tied head."""

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
        self.words, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(positions, hidden)
        self.dropout = nn.Dropout(dropout)
        self.layers = _causal_blocks(hidden, layers, heads, dropout)
        self.norm = nn.LayerNorm(hidden)
        _initialise(self)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(_at_positions(self.words, self.positions, tokens))
        return F.linear(self.norm(self.layers(x)), self.words.weight)


# ---- a mixture of experts -----------------------------------------------------------------------


class Experts(nn.Module):
    """Sends each token to one of several MLPs, as Switch Transformers do; skips tokens beyond the capacity of an MLP.

    Products with one-hot masks move tokens to the places of an expert and back, so that shapes do not depend on data.
    An expert has `capacity` places for the tokens of one text.
    """

    def __init__(self, hidden: int, count: int, capacity: int) -> None:
        super().__init__()
        self.count, self.capacity = count, capacity
        self.router = nn.Linear(hidden, count)
        self.experts = nn.ModuleList(_mlp(hidden, 4 * hidden) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        weights, choice = self.router(x).softmax(-1).max(-1)
        chosen = (choice[..., None] == torch.arange(self.count, device=x.device)).to(x.dtype)
        place = ((chosen.cumsum(1) - 1) * chosen).sum(-1)
        there = (place[..., None] == torch.arange(self.capacity, device=x.device)).to(x.dtype)
        result = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            sent = there * chosen[..., i, None]
            result = result + sent @ expert(sent.transpose(1, 2) @ x)
        return result * weights[..., None]


class MixtureOfExperts(nn.Module):
    """A causal language model with experts in place of the MLP of every second block."""

    def __init__(self, *, hidden: int, layers: int, heads: int, experts: int, vocabulary: int, tokens: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.blocks = _causal_blocks(hidden, layers, heads, dropout=0.0)
        for block in list(self.blocks)[1::2]:
            block.mlp = Experts(hidden, experts, 2 * tokens // experts)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.norm(self.blocks(self.words(tokens))), self.words.weight)


# ---- Llama --------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """Divides by the root of the mean square, over the last dimension."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt())


class GroupedAttention(nn.Module):
    """Causal attention with rotary embeddings, in which several query heads share a head of keys and values.

    The attention itself is PyTorch's fused kernel.
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

    There are `groups` heads of keys and values, which divide the `heads` of queries.
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


# ---- MLP-Mixer ----------------------------------------------------------------------------------


class MixerBlock(nn.Module):
    """An MLP across patches and an MLP across channels, each with LayerNorm before it and a skip connection."""

    def __init__(self, patches: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.across, self.within = _mlp(patches, hidden // 2), _mlp(hidden, 4 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norm2(x))


class Mixer(nn.Module):
    """MLP-Mixer; B/16 by default. `side` and `patch` are those of images and patches."""

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


# ---- LSTM ---------------------------------------------------------------------------------------


class Span(nn.Module):
    """Several steps of an LSTM, unrolled: the block that is rematerialised."""

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
    """One layer of LSTM over a series of (steps, batch, features), with `span` steps a block, and a classifier."""

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
