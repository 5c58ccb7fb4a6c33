"""Calls that nothing outside differentiates: derivatives inside, within half of the plain call's peak.

    python -m benches.calls --json benches/results/calls-cpu.json --check       # five minutes
    python -m benches.calls --tiny

One perceptron, and six functions of its weights and a batch that take derivatives inside by `torch.func`: a step of
SGD, a Hessian-vector product, the gradient of a gradient penalty, gradients per sample, the gradient of a loss after an
inner step (MAML), and, of its first four layers, the gradient of the residual of Poisson's equation (PINN). Each runs
plainly and by `fckpt.remat(fn, budget=...)` with half of the measured plain peak, and with the least budget found.

Peaks are counted by the allocator; times are relative to the plain call, run alternately. `extra` is the predicted time
of recomputations. With `--check` the exit code is 1 if a peak exceeds its budget or is not the predicted one, or if a
result is not bitwise equal.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, hessian, jvp, vmap
from torch.utils._pytree import tree_leaves

import fckpt
from benches.common.command import DEVICE, in_mib, opening, report_parser, steps, table_of
from benches.common.results import write_json
from benches.common.timing import Spread, alternate, paired_ratio, set_up
from fckpt._memory import measure_peak
from fckpt.errors import BudgetError

Params = list[Tensor]
Call = Callable[[Params, Tensor], Any]


def network(params: Params, x: Tensor) -> Tensor:
    for w in params:
        x = torch.tanh(x @ w)
    return x


def loss(params: Params, x: Tensor) -> Tensor:
    return network(params, x).square().mean()


def step(params: Params, x: Tensor) -> Any:
    grads, value = grad_and_value(loss)(params, x)
    return value, [p - 0.1 * g for p, g in zip(params, grads, strict=True)]


def hessian_vector_product(params: Params, x: Tensor) -> Any:
    ones = [torch.ones_like(p) for p in params]
    return jvp(lambda p: grad(loss)(p, x), (params,), (ones,))[1]


def gradient_penalty(params: Params, x: Tensor) -> Any:
    norm = lambda params: torch.stack([g.square().sum() for g in grad(loss)(params, x)]).sum()
    return grad(norm)(params)


def per_sample(params: Params, x: Tensor) -> Any:
    return vmap(lambda row: torch.stack([g.norm() for g in grad(loss)(params, row[None])]))(x[: len(x) // 8])


def meta_learning(params: Params, x: Tensor) -> Any:
    half = len(x) // 2

    def outer(params: Params) -> Tensor:
        inner = grad(loss)(params, x[:half])
        return loss([p - 0.1 * g for p, g in zip(params, inner, strict=True)], x[half:])

    return grad(outer)(params)


def equation(params: Params, x: Tensor) -> Any:
    points, used = x[: len(x) // 64], params[:4]

    def residual(params: Params) -> Tensor:
        value = lambda point: network(params, point[None]).sum()
        laplacian = vmap(lambda point: torch.diagonal(hessian(value)(point)).sum())(points)
        return (laplacian + vmap(value)(points).sin()).square().mean()

    return grad(residual)(used)


CALLS: dict[str, Call] = {
    "step": step,
    "Hessian-vector product": hessian_vector_product,
    "gradient penalty": gradient_penalty,
    "per sample": per_sample,
    "MAML": meta_learning,
    "PINN": equation,
}
SIZES = {"cuda": (16384, 512, 24), "cpu": (1024, 64, 12), "tiny": (128, 16, 3)}
"""Rows, width and layers."""


@dataclass
class Row:
    """One call within one budget."""

    call: str
    budget: str
    plain_bytes: int
    budget_bytes: int
    peak_bytes: int | None = None
    predicted_bytes: int | None = None
    predicted_overhead: float | None = None
    time_ratio: Spread | None = None
    complaints: list[str] = field(default_factory=list)


def examine(name: str, size: str, rounds: int, device: torch.device) -> list[Row]:
    """Runs one call within half of its peak, and within its least budget."""
    count, width, layers = SIZES[size]
    torch.manual_seed(0)
    params = [torch.randn(width, width, device=device) / width**0.5 for _ in range(layers)]
    x = torch.randn(count, width, device=device)
    plain = lambda: CALLS[name](params, x)
    plain()
    peak = _peak(plain, device)
    rows = []
    for budget, nbytes in (("half", peak // 2), ("least", 1)):
        row = Row(name, budget, peak, nbytes)
        rows.append(row)
        try:
            _run(row, name, params, x, plain, rounds, device)
        except BudgetError as error:
            row.budget_bytes = error.least_bytes
            if budget == "least":
                _run(row, name, params, x, plain, rounds, device)
            else:
                row.complaints.append("half of the peak is not feasible")
    return rows


def _run(
    row: Row, name: str, params: Params, x: Tensor, plain: Callable[[], Any], rounds: int, device: torch.device
) -> None:
    plan = fckpt.plan(CALLS[name], params, x, budget=row.budget_bytes)
    planned = fckpt.remat(CALLS[name], plan=plan)
    run = lambda: planned(params, x)
    if not all(map(torch.equal, tree_leaves(plain()), tree_leaves(run()))):
        row.complaints.append("not bitwise equal")
    row.peak_bytes, row.predicted_bytes, row.predicted_overhead = _peak(run, device), plan.peak_bytes, plan.overhead
    row.time_ratio = paired_ratio(
        alternate({"plain": plain, "planned": run}, rounds=rounds, device=device), "planned", "plain"
    )
    if row.peak_bytes > row.budget_bytes:
        row.complaints.append(f"{row.peak_bytes - row.budget_bytes:,} bytes above its budget")
    if row.peak_bytes != row.predicted_bytes and device.type == "cpu":
        row.complaints.append(f"predicted {row.predicted_bytes:,} bytes, measured {row.peak_bytes:,}")


def _peak(run: Callable[[], Any], device: torch.device) -> int:
    held: list[Any] = []
    return measure_peak(lambda: held.append(run()), device).peak_bytes


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = report_parser("calls", __doc__)
    parser.add_argument("--device", help=DEVICE)
    parser.add_argument("--rounds", type=int, default=21, metavar="N", help="timed calls of each kind (default 21)")
    parser.add_argument("--calls", nargs="+", choices=list(CALLS), default=list(CALLS), metavar="NAME")
    parser.add_argument("--tiny", action="store_true", help="a very small network, for a try")
    parser.add_argument("--check", action="store_true", help="exit 1 if a peak or a result is not as it should be")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs the bench. Returns 1 if `--check` was asked for and failed, otherwise 0."""
    parsed = parse(arguments)
    device = set_up(parsed.device)
    console, document = opening("calls", arguments, device)
    size = "tiny" if parsed.tiny else device.type
    table = table_of("call", "budget", "plain MiB", "of plain", "extra", "time", left=("call", "budget"))
    rows: list[Row] = []
    with steps(len(parsed.calls)) as advance:
        for name in parsed.calls:
            advance(name)
            rows += examine(name, size, parsed.rounds, device)
    for row in rows:
        share = "" if row.peak_bytes is None else f"{row.peak_bytes / row.plain_bytes:.2f}"
        extra = "" if row.predicted_overhead is None else f"{row.predicted_overhead:.3f}"
        cells = [row.call, row.budget, in_mib(row.plain_bytes), share, extra, str(row.time_ratio or "")]
        table.add_row(*cells, style="bold red" if row.complaints else None)
    console.print(table)
    complaints = [f"{row.call}, {row.budget}: {text}" for row in rows for text in row.complaints]
    for complaint in complaints:
        console.print(f"  [bold red]{complaint}[/]", highlight=False)
    if parsed.json:
        write_json(parsed.json, {**document, "size": size, "rows": [asdict(row) for row in rows]})
    return int(parsed.check and bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
