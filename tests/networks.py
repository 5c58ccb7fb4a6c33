"""Small networks as functions of a list of weights, for tests of calls and steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Params = list[Tensor]
Fn = Callable[[Params, Tensor], Any]

ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [torch.tanh, F.gelu, F.silu, torch.sin]


def weights(layers: int, width: int = 16) -> Params:
    return [torch.randn(width, width) / 4 for _ in range(layers)]


def network(layers: list[int], skips: bool) -> Fn:
    """Returns a network whose layers have these activations, perhaps with connections from its start to its end."""

    def run(params: Params, x: Tensor) -> Tensor:
        h, held = x, []
        for i, (w, kind) in enumerate(zip(params, layers, strict=True)):
            h = ACTIVATIONS[kind](h @ w)
            if skips and i < len(layers) // 2:
                held.append(h)
            elif held:
                h = h + held.pop()
        return h

    return run


def loss_of(run: Fn) -> Fn:
    return lambda params, x: run(params, x).square().mean()
