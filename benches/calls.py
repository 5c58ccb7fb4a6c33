"""Calls that nothing outside differentiates: derivatives inside, within half of the plain call's peak.

    python -m benches calls --json benches/results/calls-cpu.json --check       # five minutes
    python -m benches calls --tiny

One perceptron, and six functions of its weights and a batch that take derivatives inside by `torch.func`: a step of
SGD, a Hessian-vector product, the gradient of a gradient penalty, gradients per sample, the gradient of a loss after an
inner step (MAML), and, of its first four layers, the gradient of the residual of Poisson's equation (PINN). Each runs
plainly and by `fckpt.remat(fn, budget=...)` with half of the measured plain peak, and with the least budget found.

Peaks are counted by the allocator; times are relative to the plain call, run alternately. `extra` is the predicted time
of recomputations. With `--check` the exit code is 1 if a peak exceeds its budget or is more than 2% from the predicted
one, or if a result is not bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.func import grad, grad_and_value, hessian, jvp, vmap
from torch.utils._pytree import tree_leaves

import fckpt
from benches.common.command import add_names, described, mib, opening, report_each, report_parser, share, table_of
from benches.common.rows import Row
from benches.common.timing import set_up
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
class Within(Row):
    """One call within one budget."""

    call: str
    budget: str
    plain_bytes: int


def examine(name: str, size: str, rounds: int, device: torch.device) -> list[Within]:
    """Runs one call within half of its peak, and within its least budget."""
    count, width, layers = SIZES[size]
    torch.manual_seed(0)
    params = [torch.randn(width, width, device=device) / width**0.5 for _ in range(layers)]
    x = torch.randn(count, width, device=device)
    plain = lambda: CALLS[name](params, x)
    expected = tree_leaves(plain())
    peak = measure_peak(plain, device).peak_bytes
    rows = [Within(name, "half", peak, budget_bytes=peak // 2), Within(name, "least", peak)]
    for row in rows:
        try:
            plan = fckpt.plan(CALLS[name], params, x, budget=row.budget_bytes or 1)
        except BudgetError as error:
            if row.budget_bytes is not None:
                row.complaints.append(f"half of the peak is not feasible: {described(error)}")
                continue
            row.budget_bytes = error.least_bytes
            plan = fckpt.plan(CALLS[name], params, x, budget=error.least_bytes)
        row.predict(plan)
        planned = fckpt.remat(CALLS[name], plan=plan)
        run = lambda planned=planned: planned(params, x)
        pairs = enumerate(zip(expected, tree_leaves(run()), strict=True))
        row.unequal = [f"result {i}" for i, (one, other) in pairs if not torch.equal(one, other)]
        row.measure(run, plain, rounds, device)
        row.judge()
    return rows


def show(rows: Sequence[Within], console: Console) -> None:
    """Prints the table of one call."""
    table = table_of("call", "budget", "plain MiB", "of plain", "extra", "time", left=("call", "budget"))
    for row in rows:
        extra = "" if row.predicted_overhead is None else f"{row.predicted_overhead:.3f}"
        cells = [row.call, row.budget, mib(row.plain_bytes), share(row.peak_bytes, row.plain_bytes), extra]
        table.add_row(*cells, str(row.time_ratio or ""), style=row.style)
    console.print(table)


def main(arguments: list[str]) -> int:
    """Runs the bench. Returns 1 if `--check` was asked for and failed, otherwise 0."""
    parser = report_parser("calls", __doc__, rounds="21", tiny=True, check="a peak or a result is not as it should be")
    add_names(parser, "calls", CALLS)
    parsed = parser.parse_args(arguments)
    device = set_up(parsed.device)
    console, document = opening("calls", arguments, device)
    document["size"] = size = "tiny" if parsed.tiny else device.type
    run = lambda name, advance: examine(name, size, parsed.rounds, device)
    note = "Time: relative to the plain call, median and quartiles of the rounds."
    return report_each(parsed, (console, document), "rows", parsed.calls, run, show, note=note)
