"""Pieces of programs with state: modules from [batch, 32] to [batch, 32], and what may change in them between calls.

Imported anew for each example, so that classes, globals and caches are the example's. A method whose name begins with
`change_` changes a piece between calls; `close`, where there is one, undoes what lies outside. `PIECES` holds all by
name; `memory.py` has the pieces whose Python state is the point.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import fckpt

PIECES: dict[str, type[Piece]] = {}
Mask = Tensor | None


class Piece(nn.Module):
    """A part of a program."""

    def __init_subclass__(cls) -> None:
        """Registers a piece by its name."""
        if not cls.__name__.startswith("_"):
            PIECES[cls.__name__] = cls

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        """Returns a tensor of the same shape."""
        raise NotImplementedError

    def changes(self) -> list[Callable[[], Any]]:
        """What may be done to it between calls."""
        return [getattr(self, name) for name in sorted(dir(type(self))) if name.startswith("change_")]


class Dense(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return torch.tanh(self.linear(x)).sin() + x

    def change_data(self) -> None:
        with torch.no_grad():
            self.linear.weight.mul_(0.5)

    def change_freeze(self) -> None:
        self.linear.weight.requires_grad_(not self.linear.weight.requires_grad)

    def change_load(self) -> None:
        self.load_state_dict({k: v * 0.7 for k, v in self.state_dict().items()})

    def change_parameter(self) -> None:
        self.linear.weight = nn.Parameter(self.linear.weight.detach() * 0.9)

    def change_unread(self) -> None:
        self.note = getattr(self, "note", 0) + 1

    def change_without_bias(self) -> None:
        self.linear.bias = None


class Twice(Dense):
    """One module in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.linear

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return F.gelu(self.again(F.gelu(self.linear(x))))

    def change_part(self) -> None:
        self.again = copy.deepcopy(self.linear)


class Tied(Dense):
    """Two modules that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(32, 32)
        self.other.weight = self.linear.weight

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return torch.sigmoid(self.other(torch.sin(self.linear(x))))

    def change_untie(self) -> None:
        self.other.weight = nn.Parameter(self.linear.weight.detach().clone())

    def change_tie(self) -> None:
        self.other.weight = self.linear.weight


class Chained(Piece):
    """Parameters in a dictionary, used in its order."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: torch.randn(32, 32) / 6 for name in "ab"})
        self.order = {"a": 1.0, "b": 0.5}

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        for name, scale in self.order.items():
            x = torch.tanh(x @ self.weights[name]) * scale
        return x.exp()

    def change_order(self) -> None:
        self.order["a"] = self.order.pop("a")

    def change_scale(self) -> None:
        self.order["b"] += 0.25


class Normed(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return F.silu(self.norm(x)) + x

    def change_mode(self) -> None:
        self.norm.train(not self.norm.training)

    def change_momentum(self) -> None:
        self.norm.momentum = 0.3

    def change_statistics(self) -> None:
        self.norm.reset_running_stats()

    def change_tracking(self) -> None:
        self.norm.track_running_stats = False


class LayerNormed(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return self.norm(x).exp().sin()

    def change_eps(self) -> None:
        self.norm.eps *= 100


class Dropped(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return self.dropout(torch.tanh(x)) + F.dropout(x.sin().t(), 0.1, self.training).t()

    def change_rate(self) -> None:
        self.dropout.p = 0.5

    def change_mode(self) -> None:
        self.train(not self.training)


class Noise(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.1

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return (x + self.scale * torch.rand_like(x)).sin() * torch.randn(32, dtype=x.dtype)

    def change_scale(self) -> None:
        self.scale = 0.0 if self.scale else 0.1


class Attended(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.causal = nn.Linear(32, 96), False

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(0, 1) for t in self.qkv(x).chunk(3, -1))
        allowed = None if mask is None or self.causal else mask[None, :].expand(len(x), -1)
        out = F.scaled_dot_product_attention(q, k, v, allowed, is_causal=self.causal)
        return x + out.transpose(0, 1).flatten(1)

    def change_causal(self) -> None:
        self.causal = not self.causal


class Masked(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.fill = 0.0

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        h = torch.cos(x).exp()
        return h if mask is None else h.masked_fill(~mask[:, None], self.fill)

    def change_fill(self) -> None:
        self.fill -= 1.5


class Averaging(Piece):
    """A buffer that follows what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(32))
        self.decay = 0.9

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(self.decay).add_(x.mean(0), alpha=1 - self.decay)
        return torch.tanh(x - self.mean.clone())

    def change_decay(self) -> None:
        self.decay = 0.5

    def change_buffer(self) -> None:
        self.mean = torch.ones_like(self.mean)

    def change_mode(self) -> None:
        self.train(not self.training)


class Sliced(Piece):
    """Fills a tensor part by part."""

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        out = torch.empty_like(x)
        out[:, :16] = x[:, 16:].sin()
        out[:, 16:] = x[:, :16].exp() * 0.1
        out[0] += 1
        return out


class InPlace(Piece):
    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        h = torch.tanh(x)
        h = h * 2
        h.add_(x).mul_(0.5)
        return F.relu(h + 0.1, inplace=True) - F.elu(h.clone(), inplace=True)


class RowWritten(Piece):
    """A row of a buffer is written at each call, another read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(4, 32))
        self.row = 0

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        self.rows[self.row] = x.detach().mean(0)
        return torch.sin(x) + self.rows.sum(0)

    def change_row(self) -> None:
        self.row = (self.row + 1) % 4


class WithoutGrad(Piece):
    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        with torch.no_grad():
            scale = x.exp().mean(0).sqrt()
        return torch.tanh(x / scale) * x.detach().sigmoid()


class Lowered(Piece):
    """Autocast within."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.enabled = nn.Linear(32, 32), True

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.enabled):
            h = F.gelu(self.linear(x))
        return h.to(x.dtype).sin()

    def change_enabled(self) -> None:
        self.enabled = not self.enabled


class Checkpointed(Dense):
    """torch's checkpoint within."""

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return checkpoint(super().forward, x, mask, use_reentrant=False)


class RematInside(Dense):
    """A plain region within."""

    def __init__(self) -> None:
        super().__init__()
        self.region = fckpt.remat(lambda x: torch.tanh(self.linear(x)).exp().sin())

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return self.region(x)


class Named(Dense):
    """A value with a name, for policies."""

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return fckpt.checkpoint_name(torch.tanh(self.linear(x)), "hidden").sin()


class Clamp(torch.autograd.Function):
    """Passes gradients straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bound = bound
        return x.clamp(-bound, bound)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * (1 + x.abs() * ctx.bound), None


class Custom(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.bound = 1.0

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return Clamp.apply(x.exp(), self.bound).sin()  # type: ignore[no-any-return]

    def change_bound(self) -> None:
        self.bound += 0.5


class GradientScaled(Piece):
    """A hook on an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        h = torch.tanh(x).exp()
        if h.requires_grad:
            scale = self.scale
            h.register_hook(lambda grad: grad * scale)
        return h.sin()

    def change_scale(self) -> None:
        self.scale += 0.25


class Convolved(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return torch.tanh(self.conv(x[:, None])).sum(1)

    def change_padding(self) -> None:
        self.conv.padding, self.conv.dilation = (2,), (2,)


class Gated(Piece):
    """A step of a recurrent cell."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.steps = nn.GRUCell(32, 32), 2

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        h = torch.zeros_like(x)
        for _ in range(self.steps):
            h = self.cell(x, h)
        return h

    def change_steps(self) -> None:
        self.steps = self.steps % 3 + 1


class LookedUp(Piece):
    """An embedding of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.period = nn.Embedding(16, 32), 16

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return torch.sin(x + self.table(torch.arange(len(x)) % self.period))

    def change_period(self) -> None:
        self.period = 5


class Sorted(Piece):
    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        top, _ = torch.tanh(x).topk(16, dim=1)
        return torch.cat([top, x.sort(dim=1).values[:, :16]], 1).cumsum(1) * 0.1


class WeightNormed(Piece):
    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(32, 32))

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return torch.tanh(self.linear(x)).sin()


class Batched(Dense):
    """`vmap` within."""

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return torch.func.vmap(lambda row: torch.tanh(self.linear(row)).exp())(x)


class Descent(Dense):
    """A gradient that is taken within."""

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        slope = torch.func.grad(lambda x: torch.tanh(self.linear(x)).square().sum())(x)
        return torch.tanh(x - 0.1 * slope)


class Scheduled(Piece):
    """A property of what the training loop sets."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch, self.depth = 0, 2

    @property
    def rate(self) -> float:
        return 0.5 ** (self.epoch // 2)

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        for _ in range(self.depth):
            x = torch.tanh(x * self.rate).exp()
        return x

    def change_epoch(self) -> None:
        self.epoch += 1

    def change_depth(self) -> None:
        self.depth = self.depth % 3 + 1


class Activated(Piece):
    """An activation by its name, another as a function, a third in a partial."""

    def __init__(self) -> None:
        super().__init__()
        self.name, self.act = "gelu", torch.tanh
        self.part = functools.partial(F.leaky_relu, negative_slope=0.2)

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return self.part(getattr(F, self.name)(self.act(x)).sin())

    def change_name(self) -> None:
        self.name = "silu" if self.name == "gelu" else "gelu"

    def change_function(self) -> None:
        self.act = torch.sin if self.act is torch.tanh else torch.tanh

    def change_lambda(self) -> None:
        self.act = lambda x: x.cos()

    def change_partial(self) -> None:
        self.part = functools.partial(F.leaky_relu, negative_slope=0.4)


class Layers(Piece):
    """A list of modules that grows, shrinks and changes its order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(OrderedDict(a=nn.Linear(32, 32), b=nn.Tanh(), c=nn.Dropout(0.1)))

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        return self.layers(x).sin()

    def change_grow(self) -> None:
        self.layers.append(nn.Sigmoid())

    def change_order(self) -> None:
        self.layers._modules["a"] = self.layers._modules.pop("a")

    def change_kind(self) -> None:
        self.layers.b = nn.GELU()
