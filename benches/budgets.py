"""Whether a budget holds: for eleven networks, predicted and measured peaks, times and results of plans.

    python -m benches budgets --json benches/results/budgets-cpu.json --check
    python -m benches budgets --device cuda --json benches/results/budgets-cuda.json --check
    python -m benches budgets --quick --json benches/results/budgets-quick-cpu.json     # some minutes
    python -m benches budgets --tiny --networks vit lstm --budgets 0.7 0.4              # seconds

A step is forward, loss and backward to all parameters, planned as one region by `fckpt.remat(step, budget=...)`. A
budget is a fraction of the predicted peak of the plain step; the row `plain` compares that prediction with the
measurement. `least` is the least budget that fckpt says is feasible. The floor below the table is a lower bound on the
peak of any schedule. Peaks are measured by counting the allocator's bytes (`fckpt.measure_peak`). The planned and the
plain step are run alternately in one process (see `common/timing.py`), and their losses, gradients, buffers and states
of the random generator are compared bitwise.

On CUDA, the plain and the planned steps run with deterministic kernels; results that two plain steps do not have in
common are not compared. With `--check` the exit code is 1 if a peak
exceeds its budget, a prediction is off by more than 2%, a result is not bitwise equal, a budget is refused that
`torch.utils.checkpoint` per block meets, or a step with the budget 1.0 is slower than the plain step beyond noise.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from rich.console import Console

import fckpt
from benches.common.command import (
    described,
    fraction,
    mib,
    network_parser,
    opening,
    parse_networks,
    report_each,
    share,
    table_of,
)
from benches.common.rows import Record, Row, deviation
from benches.common.timing import is_slower, set_up, settle_kernels
from benches.common.training import Task, buffers_of, outcome_of, prepare, size_of, step_of, unequal
from benches.models.budget_networks import NETWORKS
from benches.models.wrapping import TorchCheckpoint
from fckpt._memory import measure_peak
from fckpt.errors import BudgetError
from fckpt.solve.proofs.bounds import least_peak

BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
LEAST_ROUNDS = 9
"""With these, a sign test can be significant even if one round goes the other way."""


@dataclass
class Budget(Row):
    """One budget of one network."""

    budget: str
    """A fraction of the predicted plain peak, or "least"."""

    @property
    def title(self) -> str:
        """The budget, as a place."""
        return f"at {self.budget}"


@dataclass
class Report(Record):
    """The results of one network."""

    name: str
    what: str
    nodes: int = 0
    gradient_bytes: int = 0
    plain_bytes: int = 0
    """Measured peak of the plain step."""
    predicted_plain_bytes: int = 0
    blocks_bytes: int = 0
    """Measured peak with `torch.utils.checkpoint` per block."""
    floor_bytes: int = 0
    """A lower bound on the peak of any schedule."""
    unrepeated: list[str] = field(default_factory=list)
    """The results that two plain steps do not have in common. These are not compared."""
    rows: list[Budget] = field(default_factory=list)


def examine(
    task: Task, budgets: Sequence[float], rounds: int, device: torch.device, advance: Callable[[str], object]
) -> Report:
    """Plans and runs one network with each budget."""
    report = Report(task.name, task.what)
    try:
        for row in _examined(task, report, budgets, rounds, device):
            report.rows.append(row)
            advance(row.title)
    except Exception as error:  # the other networks may work
        report.complaints.append(described(error))
    return report


def _examined(
    task: Task, report: Report, budgets: Sequence[float], rounds: int, device: torch.device
) -> Iterator[Budget]:
    """Measures the plain step and a checkpoint per block, then yields a row for each budget."""
    report.gradient_bytes = sum(p.nbytes for p in task.loss.parameters() if p.requires_grad)
    plain, blocks = step_of(task.loss, task), step_of(task.in_blocks(TorchCheckpoint), task)
    for step in (plain, blocks):
        settle_kernels(step, device)  # and every library has allocated its permanent memory
    report.plain_bytes, report.blocks_bytes = (measure_peak(step, device).peak_bytes for step in (plain, blocks))
    buffers = buffers_of(task.loss)
    expected = outcome_of(task.loss, task, buffers)
    report.unrepeated = unequal(expected, outcome_of(task.loss, task, buffers))
    prepared = prepare(task)
    baseline = report.predicted_plain_bytes = prepared.baseline_peak_bytes
    report.nodes, report.floor_bytes = len(prepared.graph.nodes), least_peak(prepared.graph)
    report.complaints += deviation(baseline, report.plain_bytes)
    for budget in (*budgets, "least"):
        nbytes = prepared.least_bytes() if isinstance(budget, str) else int(baseline * budget)
        row = Budget(str(budget), budget_bytes=nbytes)
        try:
            plan = prepared.plan(nbytes)
        except BudgetError as error:
            row.least_bytes = error.least_bytes
            if min(report.blocks_bytes, error.least_bytes) <= nbytes:
                row.complaints.append(f"refused, and {min(report.blocks_bytes, error.least_bytes):,} bytes suffice")
            yield row
            continue
        row.predict(plan)
        planned = fckpt.remat(task.loss, plan=plan)
        found = unequal(expected, outcome_of(planned, task, buffers))
        row.unequal = [name for name in found if name not in report.unrepeated]
        # A step without recomputation must not be slower, which takes a sign test with enough rounds.
        least_rounds = 0 if plan.timeline.recomputed_nodes else LEAST_ROUNDS
        seconds = row.measure(step_of(planned, task), plain, max(rounds, least_rounds), device)
        row.judge()
        if least_rounds and is_slower(seconds, "step", "plain"):
            row.complaints.append(f"recomputes nothing and takes {row.time_ratio} of the plain time")
        yield row


# ---- the script ----------------------------------------------------------------------------------


def show(reports: Sequence[Report], console: Console) -> None:
    """Prints the table of each network."""
    for report in reports:
        console.print(f"[bold]{report.name}[/]: {report.what}; {report.nodes} operations")
        table = table_of("budget", "MiB", "predicted", "measured", "of plain", "extra", "time", "same")
        plain = report.plain_bytes
        table.add_row("plain", "", mib(report.predicted_plain_bytes), mib(plain), "", "", "", "", style="dim")
        for row in report.rows:
            peaks = [mib(row.budget_bytes), mib(row.predicted_bytes), mib(row.peak_bytes), share(row.peak_bytes, plain)]
            extra = "" if row.predicted_overhead is None else f"{row.predicted_overhead:.3f}"
            last = [f"least {mib(row.least_bytes)}", ""] if row.least_bytes else [str(row.time_ratio), row.same]
            table.add_row(row.budget, *peaks, extra, *last, style=row.style)
        console.print(table)
        others = f"gradients {mib(report.gradient_bytes)}, a checkpoint per block {mib(report.blocks_bytes)} MiB"
        console.print(f"floor {mib(report.floor_bytes)}, {others}", style="dim")
        if report.unrepeated:
            console.print(f"not compared, as plain steps differ in them: {len(report.unrepeated)} results", style="dim")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = network_parser("budgets", __doc__, "a peak, a result or a time is not as it should be", NETWORKS)
    parser.add_argument(
        "--budgets", nargs="+", type=fraction, metavar="X", default=BUDGETS, help="fractions of the plain peak"
    )
    return parse_networks(parser, NETWORKS, arguments)


def main(arguments: list[str]) -> int:
    """Runs the bench. Returns 1 if `--check` was asked for and failed, otherwise 0."""
    parsed = parse(arguments)
    device = set_up(parsed.device)
    console, document = opening("budgets", arguments, device)
    size = size_of(device, quick=parsed.quick, tiny=parsed.tiny)
    document["options"] = {"size": size, "budgets": parsed.budgets, "rounds": parsed.rounds}

    def run(name: str, advance: Callable[[str], object]) -> list[Report]:
        return [examine(NETWORKS[name].task(size, device), parsed.budgets, parsed.rounds, device, advance)]

    note = (
        "Extra: predicted time of recomputations, relative to the plain step. Time: relative to the plain step, "
        "median and quartiles of the rounds. Same: bitwise equal."
    )
    count = len(parsed.budgets) + 1
    return report_each(parsed, (console, document), "networks", parsed.networks, run, show, count=count, note=note)
