"""A chain of layers in segments: `checkpoint_sequential` of torch beside `fckpt.sequential`.

    python docs/examples/sequential_mlp.py
    python docs/examples/sequential_mlp.py --layers 25 --width 256 --batch 1024

Torch cuts the chain into equal segments, and never checkpoints the last one. `fckpt.sequential` also takes
the length of each segment, cuts into about sqrt(layers) segments if nothing is said, and works on pure
functions too, there under `fckpt.grad` and all of torch.func.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

import fckpt


class Layer(nn.Module):
    """A residual block of an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def layer(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """The same block as a pure function."""
    h = nn.functional.layer_norm(x, x.shape[-1:], params["norm.weight"], params["norm.bias"])
    h = torch.relu(nn.functional.linear(h, params["up.weight"], params["up.bias"]))
    return x + nn.functional.linear(h, params["down.weight"], params["down.bias"])


@dataclass(frozen=True)
class Row:
    """What one way of running the chain comes to."""

    way: str
    peak_bytes: int
    equal: bool
    """Whether all gradients are those of the plain chain, bit for bit."""


def loss(y: Tensor) -> Tensor:
    """Something to minimise."""
    return y.square().mean()


def module_grads(model: nn.Sequential, x: Tensor, call: Callable[[nn.Sequential, Tensor], Tensor]) -> list[Tensor]:
    """Gradients by `.backward()`, in the order of `model.parameters()`."""
    loss(call(model, x)).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def function_grads(
    chain: Callable[[list[dict[str, Tensor]], Tensor], Tensor], model: nn.Sequential, x: Tensor
) -> list[Tensor]:
    """Gradients by `fckpt.grad`, of the chain of pure functions at the model's parameters."""
    params = [{name: p.detach() for name, p in layer.named_parameters()} for layer in model]
    grads = fckpt.grad(lambda params: loss(chain(params, x)))(params)
    return [g for tree in grads for g in tree.values()]


def main(arguments: list[str] | None = None) -> list[Row]:
    """Parses the command line, runs, prints the table and returns its rows."""
    parser = argparse.ArgumentParser(description="A chain of layers in segments.")
    parser.add_argument("--layers", type=int, default=16, help="layers (default 16)")
    parser.add_argument("--width", type=int, default=64, help="width of a layer (default 64)")
    parser.add_argument("--batch", type=int, default=1024, help="rows of the input (default 1024)")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    count = options.layers
    model = nn.Sequential(*(Layer(options.width) for _ in range(count)))
    x = torch.randn(options.batch, options.width)

    segments = max(1, round(count**0.5))
    # The square root balances segments against layers as if both held the same. A layer holds more here.
    threes = (*[3] * (count // 3), *[count % 3] * (count % 3 > 0))
    ways: dict[str, Callable[[nn.Sequential], list[Tensor]]] = {
        "plain": lambda m: module_grads(m, x, lambda m, x: m(x)),
        f"checkpoint_sequential(model, {segments}, x)": lambda m: module_grads(
            m, x, lambda m, x: checkpoint_sequential(m, segments, x, use_reentrant=False)
        ),
        "fckpt.sequential(model)": lambda m: module_grads(m, x, lambda m, x: fckpt.sequential(m)(x)),
        f"fckpt.sequential(model, {threes})": lambda m: module_grads(m, x, lambda m, x: fckpt.sequential(m, threes)(x)),
        "plain functions": lambda m: function_grads(lambda ps, x: _chain(ps, x), m, x),
        "fckpt.sequential(functions)": lambda m: function_grads(fckpt.sequential([layer] * count), m, x),
        "fckpt.sequential(functions, remat_last=True)": lambda m: function_grads(
            fckpt.sequential([layer] * count, remat_last=True), m, x
        ),
    }
    rows: list[Row] = []
    plain: list[Tensor] = []
    for way, grads_of in ways.items():
        own, grads = copy.deepcopy(model), []
        peak = fckpt.measure_peak(lambda: grads.extend(grads_of(own))).peak_bytes
        plain = plain or grads
        rows.append(Row(way, peak, all(torch.equal(a, b) for a, b in zip(grads, plain, strict=True))))
        print(f"{way:46} {peak / 2**20:7.1f} MiB  gradients {'equal' if rows[-1].equal else 'DIFFER'}")
    return rows


def _chain(params_list: list[dict[str, Tensor]], x: Tensor) -> Tensor:
    for params in params_list:
        x = layer(params, x)
    return x


if __name__ == "__main__":
    main()
