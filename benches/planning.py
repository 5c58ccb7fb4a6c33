"""How long planning takes, for steps of 90 to 9,000 operations: to trace a step, and to find a plan for it.

    python -m benches.planning --json benches/results/planning-cpu.json
    python -m benches.planning --networks "GPT-2, 12 layers" --solver greedy        # seconds

Times of operations come from a device profile (`fckpt.cost.Analytic`), so nothing is measured or run. The networks are
small and deep, because planning does not depend on the sizes of tensors.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import fckpt
from benches.common.command import opening, report_parser, steps, table_of
from benches.common.results import write_json
from benches.common.training import Task, TrainingLoss
from benches.models.convolutional import DenseNet
from benches.models.sequence import Decoder
from fckpt import solve
from fckpt._planned.making import make_plan
from fckpt.cost import Analytic, profile_of

BUDGETS = (0.8, 0.5, 0.3)


def _gpt(layers: int) -> tuple[nn.Module, Tensor, Tensor]:
    tokens = torch.randint(64, (8, 33))
    model = Decoder(hidden=32, layers=layers, heads=2, vocabulary=64, positions=32)
    return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _densenet(*layers: int) -> tuple[nn.Module, Tensor, Tensor]:
    model = DenseNet(32, layers, classes=10, small=False)
    return model, torch.randn(8, 3, 64, 64), torch.randint(10, (8,))


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {
    "GPT-2, 1 layer": lambda: _gpt(1),
    "GPT-2, 12 layers": lambda: _gpt(12),
    "GPT-2, 50 layers": lambda: _gpt(50),
    "DenseNet-121": lambda: _densenet(6, 12, 24, 16),
    "DenseNet-201": lambda: _densenet(6, 12, 48, 32),
    "GPT-2, 142 layers": lambda: _gpt(142),
}


def examine(name: str, solver: str, advance: Callable[[str], object]) -> dict[str, Any]:
    """Times the planning of one network."""
    torch.manual_seed(0)
    model, inputs, labels = NETWORKS[name]()
    task = Task(name, "", TrainingLoss(model), inputs, labels)
    advance(f"{name}: trace")
    start = time.perf_counter()
    plain = task.plan(Analytic(profile_of("cpu")))
    seconds = time.perf_counter() - start  # includes no search: the plan recomputes nothing
    graph = plain.graph
    found: dict[str, Any] = {"network": name, "nodes": len(graph.nodes), "trace_seconds": seconds}
    for budget in BUDGETS:
        advance(f"{name}: {budget:.0%}")
        start = time.perf_counter()
        try:
            plan = make_plan(graph, budget, solver, plain.torch_version)
            row = {"overhead": plan.overhead, "peak_bytes": plan.peak_bytes}
        except fckpt.BudgetError as error:
            row = {"least_bytes": error.least_bytes}
        found[f"{budget}"] = row | {"solve_seconds": time.perf_counter() - start}
    return found


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Prints the table: seconds, and the overheads of the plans."""
    budgets = [f"{budget:.0%}" for budget in BUDGETS]
    table = table_of("network", "operations", "trace", *budgets, left=["network"])
    for row in rows:
        cells = [row["network"], f"{row['nodes']:,}", f"{row['trace_seconds']:.1f} s"]
        for plan in (row[f"{budget}"] for budget in BUDGETS):
            extra = f"+{plan['overhead']:.1%}" if "overhead" in plan else "none"
            cells.append(f"{plan['solve_seconds']:.1f} s {extra:>6}")
        table.add_row(*cells)
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    """Runs the bench."""
    parser = report_parser("planning", __doc__)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), metavar="NAME", help="; ".join(NETWORKS))
    parser.add_argument("--solver", choices=solve.names(), default="auto", help="default: auto")
    parsed = parser.parse_args(arguments)
    console, document = opening("planning", arguments, torch.device("cpu"))
    names = parsed.networks or list(NETWORKS)
    with steps(len(names) * (1 + len(BUDGETS))) as advance:
        rows = [examine(name, parsed.solver, advance) for name in names]
    show(rows, console)
    if parsed.json:
        write_json(parsed.json, {**document, "networks": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
