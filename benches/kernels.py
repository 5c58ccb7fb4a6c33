"""Compiled kernels: peak, time and differences of networks within half of their peak, by the kernels that run the plan.

    python -m benches kernels --json benches/results/kernels-cpu.json        # about 10 minutes
    python -m benches kernels --tiny                                         # small sizes, for a try

For each network: the plain function, `torch.compile`, and fckpt with `kernels="aten"`, `"exact"` and `"fused"` in half
of the plain peak. The difference is the largest of any gradient from the plain one, relative to the largest element of
that gradient; 0 means equal bits. The seconds of the first call include compilation, which inductor's cache on disk
shortens, and fckpt's planning.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fckpt
from benches.common.command import add_names, mib, opening, report_each, report_parser, share, table_of
from benches.common.rows import Compared, compare
from benches.common.timing import set_up
from benches.models.sequence import Llama

Step = tuple[Callable[[], Tensor], list[Tensor]]


@dataclass
class Method(Compared):
    """One method on one network."""

    network: str
    method: str
    first_seconds: float
    """The time of the first call."""


def llama(layers: int, width: int, length: int) -> Step:
    """Returns the mean square of the result of a small Llama, whose attention is not a fused kernel."""
    net = Llama(hidden=width, layers=layers, heads=4, groups=4, vocabulary=width, positions=length)
    tokens = torch.randint(width, (4, length))

    def loss() -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return net(tokens).square().mean()

    return loss, list(net.parameters())


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
        "Llama": functools.partial(llama, 2 if tiny else 4, width // 2, width // 2),
        "ReLU perceptron": functools.partial(perceptron, nn.ReLU, 6 if tiny else 8, width, 4 * width),
        "GELU perceptron": functools.partial(perceptron, nn.GELU, 6 if tiny else 8, width, 4 * width),
    }


def measure(name: str, step: Step, rounds: int, device: torch.device) -> list[Method]:
    """Measures all methods on one network."""
    fn, leaves = step
    made: dict[str, Callable[[], Tensor]] = {"plain": fn, "torch.compile": torch.compile(fn)}
    kernels: tuple[Any, ...] = ("aten", "exact", "fused")
    made |= {f"fckpt {k}": fckpt.remat(fn, budget=0.5, kernels=k) for k in kernels}
    rows: dict[Callable[[], Sequence[Tensor]], Method] = {}
    for method, loss in made.items():
        run = lambda loss=loss: torch.autograd.grad(loss(), leaves)
        start = time.perf_counter()
        run()
        rows[run] = Method(name, method, time.perf_counter() - start)
    compare(rows, rounds, device)
    return list(rows.values())


def show(rows: Sequence[Method], console: Console) -> None:
    """Prints the table of one network."""
    columns = ("method", "peak MiB", "of plain", "time to plain", "difference", "first call s")
    table = table_of(*columns, left=("method",), title=rows[0].network)
    for row in rows:
        peaks = (mib(row.peak_bytes), share(row.peak_bytes, rows[0].peak_bytes or 1))
        table.add_row(row.method, *peaks, str(row.time_ratio), f"{row.difference:.1e}", f"{row.first_seconds:.1f}")
    console.print(table)


def main(arguments: list[str]) -> int:
    """Runs the bench."""
    parser = report_parser("kernels", __doc__, rounds="9", tiny=True)
    add_names(parser, "networks", cases(tiny=True))
    parsed = parser.parse_args(arguments)
    device = set_up(parsed.device)
    opened = opening("kernels", arguments, device)
    torch.manual_seed(0)
    found = cases(tiny=parsed.tiny)
    run = lambda name, advance: measure(name, found[name](), parsed.rounds, device)
    note = "Time: median and quartiles of the rounds."
    return report_each(parsed, opened, "rows", parsed.networks, run, show, note=note)
