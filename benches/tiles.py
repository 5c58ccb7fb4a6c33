"""Tiles: the least memory of a training step, and its time, with operations cut by rows and without.

    python -m benches.tiles --json benches/results/tiles-cpu.json        # about 15 minutes
    python -m benches.tiles --tiny                                       # small sizes, for a try

Two steps whose largest operation is the lower bound of every plan: cross-entropy over a vocabulary of 50,257 words, and
causal attention by PyTorch's math kernel over 2,048 tokens. For each, plans without tiles, with `tile="exact"` and with
`tile=True`: at the least budget that works, and at half the peak of the plain step. Peaks are counted by the allocator.
The difference is the largest of any gradient, relative to the largest element of that gradient; 0 means equal bits.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fckpt
from benches.common.command import DEVICE, mib, opening, report_parser, table_of
from benches.common.results import write_json
from benches.common.timing import Spread, alternate, paired_ratio, set_up, spread

TILES: tuple[Any, ...] = (False, "exact", True)

Step = tuple[Callable[..., Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Row:
    """One plan of one step, or the plain step."""

    step: str
    tile: str
    """`plain`, or the option."""
    budget: str
    """`least` or `half`."""
    nodes: int
    predicted_bytes: int
    peak_bytes: int
    seconds: Spread
    to_plain: Spread
    difference: float


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


def cases(*, tiny: bool, device: torch.device) -> Iterator[tuple[str, Step]]:
    """Yields the steps with their names."""
    rows, words, length = (64, 1024, 64) if tiny else (512, 50_257, 2048)
    yield f"cross-entropy, {rows} x {words:,}", cross_entropy(rows, words, 32 if tiny else 256, device)
    yield f"attention, {length:,} tokens, 8 heads", attention(length, 8, 16 if tiny else 64, device)


def least_budget(fn: Callable[..., Tensor], args: Sequence[Tensor], tile: Any) -> int:
    """Returns the least budget for which a plan is found."""
    try:
        fckpt.plan(fn, *args, budget=1, tile=tile)
    except fckpt.BudgetError as error:
        return error.least_bytes
    raise AssertionError("a plan fits in one byte")


def plans_of(step: Step) -> dict[tuple[str, str], fckpt.Plan]:
    """Returns the plans of a step, by option and budget; budgets that nothing fits are left out."""
    fn, args = step
    found: dict[tuple[str, str], fckpt.Plan] = {}
    for tile in TILES:
        least = least_budget(fn, args, tile)
        found[str(tile), "least"] = fckpt.plan(fn, *args, budget=least, tile=tile)
        if least <= found[str(tile), "least"].baseline_peak_bytes / 2:
            found[str(tile), "half"] = fckpt.plan(fn, *args, budget=0.5, tile=tile)
    return found


def gradients(fn: Callable[..., Tensor], args: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Runs one step; returns the gradients."""
    return torch.autograd.grad(fn(*args), [t for t in args if t.requires_grad])


def furthest(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Returns the largest difference, relative to the largest element of its gradient."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


def measure(name: str, step: Step, rounds: int, device: torch.device) -> list[Row]:
    """Measures the plain step and all plans of it."""
    fn, args = step
    plans = plans_of(step)
    methods: dict[tuple[str, str], Callable[[], Any]] = {("plain", ""): functools.partial(gradients, fn, args)}
    for key, plan in plans.items():
        methods[key] = functools.partial(gradients, fckpt.remat(fn, plan=plan), args)
    expected = methods["plain", ""]()
    differences = {key: furthest(method(), expected) for key, method in methods.items()}
    texts = {key: f"{key[0]} {key[1]}" for key in methods}
    seconds = alternate({texts[k]: method for k, method in methods.items()}, rounds=rounds, device=device)
    baseline = next(iter(plans.values()))
    rows = []
    for key, method in methods.items():
        plan = plans.get(key)
        rows.append(
            Row(
                step=name,
                tile=key[0],
                budget=key[1],
                nodes=len((plan.graph if plan else baseline.untiled or baseline.graph).nodes),
                predicted_bytes=plan.peak_bytes if plan else baseline.baseline_peak_bytes,
                peak_bytes=fckpt.measure_peak(method, device).peak_bytes,
                seconds=spread(seconds[texts[key]]),
                to_plain=paired_ratio(seconds, texts[key], texts["plain", ""]),
                difference=differences[key],
            )
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the script."""
    parser = report_parser("tiles", __doc__)
    parser.add_argument("--device", help=DEVICE)
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="timed steps of each kind (default 7)")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a try")
    parsed: argparse.Namespace = parser.parse_args(arguments)
    device = set_up(parsed.device)
    console, document = opening("tiles", arguments, device)
    rows: list[Row] = []
    for name, step in cases(tiny=parsed.tiny, device=device):
        torch.manual_seed(0)
        found = measure(name, step, parsed.rounds, device)
        table = table_of("tile", "budget", "operations", "peak", "time to plain", "difference", left=["tile", "budget"])
        for row in found:
            share = f"{mib(row.peak_bytes)} ({row.peak_bytes / found[0].peak_bytes:.3f})"
            table.add_row(row.tile, row.budget, str(row.nodes), share, str(row.to_plain), f"{row.difference:.1e}")
        console.print(f"[bold]{name}[/]", highlight=False)
        console.print(table)
        rows += found
    if parsed.json:
        write_json(parsed.json, {**document, "rows": [asdict(row) for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
