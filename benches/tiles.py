"""Tiles: the least memory of a training step, and its time, with operations cut by rows and without.

    python -m benches tiles --json benches/results/tiles-cpu.json        # about 15 minutes
    python -m benches tiles --tiny                                       # small sizes, for a try

Two steps whose largest operation is the lower bound of every plan: cross-entropy over a vocabulary of 50,257 words, and
causal attention by PyTorch's math kernel over 2,048 tokens. For each, plans without tiles, with `tile="exact"` and with
`tile=True`: at the least budget that works, and at half the peak of the plain step. Peaks are counted by the allocator.
The difference is the largest of any gradient, relative to the largest element of that gradient; 0 means equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fckpt
from benches.common.command import mib, opening, report_each, report_parser, share, table_of
from benches.common.rows import Compared, compare
from benches.common.timing import set_up

TILES: tuple[Any, ...] = (False, "exact", True)

Step = tuple[Callable[..., Tensor], tuple[Tensor, ...]]


@dataclass
class Tiled(Compared):
    """One plan of one step, or the plain step."""

    step: str
    tile: str
    """`plain`, or the option."""
    budget: str
    """`least` or `half`."""
    nodes: int


def cross_entropy(rows: int, words: int, width: int, device: torch.device) -> Step:
    """Returns the loss of a language model's head, and of a layer below it."""
    hidden = (torch.randn(width, width, device=device) / width**0.5).requires_grad_()
    head = (torch.randn(words, width, device=device) / width**0.5).requires_grad_()
    x, target = torch.randn(rows, width, device=device), torch.randint(words, (rows,), device=device)

    def loss(hidden: Tensor, head: Tensor, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(torch.tanh(x @ hidden) @ head.t(), target)

    return loss, (hidden, head, x, target)


def attention(length: int, heads: int, width: int, device: torch.device) -> Step:
    """Returns the loss of a layer of causal attention by the math kernel."""
    total = heads * width
    weight = (torch.randn(total, 3 * total, device=device) / total**0.5).requires_grad_()
    out = (torch.randn(total, total, device=device) / total**0.5).requires_grad_()
    x = torch.randn(1, length, total, device=device)

    def loss(weight: Tensor, out: Tensor, x: Tensor) -> Tensor:
        parts = (x @ weight).view(1, length, 3, heads, width).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.MATH):
            q, k, v = parts.unbind(0)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (attended.transpose(1, 2).reshape(1, length, total) @ out).square().mean()

    return loss, (weight, out, x)


def cases(*, tiny: bool, device: torch.device) -> dict[str, Callable[[], Step]]:
    """Returns functions that make the steps, by name."""
    rows, words, length = (64, 1024, 64) if tiny else (512, 50_257, 2048)
    return {
        f"cross-entropy, {rows} x {words:,}": lambda: cross_entropy(rows, words, 32 if tiny else 256, device),
        f"attention, {length:,} tokens, 8 heads": lambda: attention(length, 8, 16 if tiny else 64, device),
    }


def plans_of(step: Step) -> dict[tuple[str, str], fckpt.Plan]:
    """Returns the plans of a step, by option and budget; budgets that nothing fits are left out."""
    fn, args = step
    found: dict[tuple[str, str], fckpt.Plan] = {}
    for tile in TILES:
        try:
            plan = fckpt.plan(fn, *args, budget=1, tile=tile)
        except fckpt.BudgetError as error:
            plan = fckpt.plan(fn, *args, budget=error.least_bytes, tile=tile)
        found[str(tile), "least"] = plan
        if plan.peak_bytes <= plan.baseline_peak_bytes / 2:
            found[str(tile), "half"] = fckpt.plan(fn, *args, budget=0.5, tile=tile)
    return found


def measure(name: str, step: Step, rounds: int, device: torch.device) -> list[Tiled]:
    """Measures the plain step and all plans of it."""
    fn, args = step
    leaves = [t for t in args if t.requires_grad]
    gradients = lambda loss: lambda: torch.autograd.grad(loss(*args), leaves)
    plans = plans_of(step)
    baseline = next(iter(plans.values()))
    nodes = len((baseline.untiled or baseline.graph).nodes)
    plain = Tiled(name, "plain", "", nodes, predicted_bytes=baseline.baseline_peak_bytes)
    rows: dict[Callable[[], Sequence[Tensor]], Tiled] = {gradients(fn): plain}
    for (tile, budget), plan in plans.items():
        row = Tiled(name, tile, budget, len(plan.graph.nodes), predicted_bytes=plan.peak_bytes)
        rows[gradients(fckpt.remat(fn, plan=plan))] = row
    compare(rows, rounds, device)
    return list(rows.values())


def show(rows: Sequence[Tiled], console: Console) -> None:
    """Prints the table of one step."""
    columns = ("tile", "budget", "operations", "peak MiB", "of plain", "time to plain", "difference")
    table = table_of(*columns, left=("tile", "budget"), title=rows[0].step)
    for row in rows:
        peaks = (mib(row.peak_bytes), share(row.peak_bytes, rows[0].peak_bytes or 1))
        table.add_row(row.tile, row.budget, str(row.nodes), *peaks, str(row.time_ratio), f"{row.difference:.1e}")
    console.print(table)


def main(arguments: list[str]) -> int:
    """Runs the bench."""
    parsed = report_parser("tiles", __doc__, rounds="7", tiny=True).parse_args(arguments)
    device = set_up(parsed.device)
    opened = opening("tiles", arguments, device)
    torch.manual_seed(0)
    found = cases(tiny=parsed.tiny, device=device)
    run = lambda name, advance: measure(name, found[name](), parsed.rounds, device)
    return report_each(parsed, opened, "rows", found, run, show, note="Time: median and quartiles of the rounds.")
