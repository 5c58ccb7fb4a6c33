"""Compiled kernels: peak, time and differences of networks within half of their peak, by the kernels that run the plan.

    python -m benches kernels --json benches/results/kernels-cpu.json        # about 10 minutes
    python -m benches kernels --tiny                                         # small sizes, for a try

For each network: the plain function, `torch.compile`, and fckpt with `kernels="aten"`, `"exact"` and `"fused"` in half
of the plain peak. A difference is the norm of the gradients' difference from the plain ones, relative to the norm of
the gradients; 0 means equal bits. The seconds of the first call include compilation, which inductor's cache on disk
shortens, and fckpt's planning.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import fckpt
from benches.common.command import mib, opening, report_each, report_parser, share, table_of
from benches.common.rows import Row
from benches.common.timing import alternate, paired_ratio, set_up, spread

Step = tuple[Callable[[], Tensor], list[Tensor]]


@dataclass
class Measured(Row):
    """One method on one network."""

    network: str
    method: str
    first_seconds: float
    """The time of the first call."""
    difference: float


class GatedBlock(nn.Module):
    """A layer as in Llama: RMS norms, rotated queries and keys, attention, and a gated product."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, heads: int, length: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-6) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)
        half = width // heads // 2
        angles = torch.arange(length).unsqueeze(1) * torch.exp(-torch.arange(half) / half).repeat(2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        q, k = (t * self.cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * self.sin for t in (q, k))
        attended = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def gated(layers: int, width: int, length: int) -> Step:
    """Returns the mean square of the result of a few layers as in Llama."""
    net = nn.Sequential(*[GatedBlock(width, 4, length) for _ in range(layers)])
    x = torch.randn(4, length, width)
    return lambda: net(x).square().mean(), list(net.parameters())


def perceptron(activation: type[nn.Module], layers: int, width: int, rows: int) -> Step:
    """Returns the sum of squares of the result of a deep perceptron."""
    net = nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(width, width), activation())])
    x = torch.randn(rows, width)
    return lambda: net(x).square().sum(), list(net.parameters())


def elementwise(count: int, rows: int, width: int) -> Step:
    """Returns a chain of pointwise operations, most of them exactly rounded."""
    w, x = torch.randn(count, width, requires_grad=True), torch.randn(rows, width, requires_grad=True)

    def loss() -> Tensor:
        h = x
        for row in w:
            a = (h * row + x).relu() * 0.5
            h = torch.maximum(a, h) / (a.abs() + 1.5)
            h = h * h - a
        return h.square().sum()

    return loss, [w, x]


def cases(*, tiny: bool) -> dict[str, Callable[[], Step]]:
    """Returns functions that make the networks, by name."""
    width = 32 if tiny else 256
    return {
        "pointwise": functools.partial(elementwise, 3 if tiny else 6, 8 * width, 2 * width),
        "Llama-like": functools.partial(gated, 2 if tiny else 4, width // 2, width // 2),
        "ReLU perceptron": functools.partial(perceptron, nn.ReLU, 3 if tiny else 8, width, 4 * width),
        "GELU perceptron": functools.partial(perceptron, nn.GELU, 3 if tiny else 8, width, 4 * width),
    }


def gradients(fn: Callable[[], Tensor], leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Runs one step; returns the gradients."""
    return torch.autograd.grad(fn(), leaves)


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Returns the largest norm of a difference, relative to the norm of its gradient."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


def measure(name: str, step: Step, rounds: int, device: torch.device) -> list[Measured]:
    """Measures all methods on one network."""
    fn, leaves = step
    made: dict[str, Callable[[], Tensor]] = {"plain": fn, "torch.compile": torch.compile(fn)}
    kernels: tuple[Any, ...] = ("aten", "exact", "fused")
    made |= {f"fckpt {k}": fckpt.remat(fn, budget=0.5, kernels=k) for k in kernels}
    methods: dict[Any, Callable[[], Any]] = {k: functools.partial(gradients, f, leaves) for k, f in made.items()}
    first: dict[str, float] = {}
    for key, method in methods.items():
        start = time.perf_counter()
        method()
        first[key] = time.perf_counter() - start
    expected = methods["plain"]()
    differences = {key: difference(method(), expected) for key, method in methods.items()}
    seconds = alternate(methods, rounds=rounds, device=device)
    return [
        Measured(
            network=name,
            method=key,
            first_seconds=first[key],
            predicted_bytes=None,
            peak_bytes=fckpt.measure_peak(method, device).peak_bytes,
            step_seconds=spread(seconds[key]),
            time_ratio=paired_ratio(seconds, key, "plain"),
            difference=differences[key],
        )
        for key, method in methods.items()
    ]


def show(rows: Sequence[Measured], console: Console) -> None:
    """Prints the table of one network."""
    columns = ("method", "peak MiB", "of plain", "time to plain", "difference", "first call s")
    table = table_of(*columns, left=("method",), title=rows[0].network)
    for row in rows:
        peaks = (mib(row.peak_bytes), share(row.peak_bytes, rows[0].peak_bytes or 1))
        table.add_row(row.method, *peaks, str(row.time_ratio), f"{row.difference:.1e}", f"{row.first_seconds:.1f}")
    console.print(table)


def main(arguments: list[str]) -> int:
    """Runs the bench."""
    parsed = report_parser("kernels", __doc__, rounds="9", tiny=True).parse_args(arguments)
    device = set_up(parsed.device)
    opened = opening("kernels", arguments, device)
    torch.manual_seed(0)
    found = cases(tiny=parsed.tiny)
    run = lambda name, advance: measure(name, found[name](), parsed.rounds, device)
    return report_each(parsed, opened, "rows", found, run, show, note="Time: median and quartiles of the rounds.")
