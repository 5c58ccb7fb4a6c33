"""Whether a budget holds: for eleven networks, predicted and measured peaks, times and results of plans.

    python -m benches.budgets --json benches/results/budgets-cpu.json --check
    python -m benches.budgets --device cuda --json benches/results/budgets-cuda.json --check
    python -m benches.budgets --quick --json benches/results/budgets-quick-cpu.json     # some minutes
    python -m benches.budgets --tiny --networks vit lstm --budgets 0.7 0.4              # seconds

A step is forward, loss and backward to all parameters, planned as one region by `fckpt.remat(step, budget=...)`. A
budget is a fraction of the predicted peak of the plain step; the row `plain` compares that prediction with the
measurement. `least` is the least budget that fckpt says is feasible. The floor below the table is a lower bound on the
peak of any schedule. The columns, for each network, measured in one process:

peak     predicted by the plan, and measured by counting the allocator's bytes (`fckpt.measure_peak`).
time     of the planned step relative to the plain step, run alternately (see `common/timing.py`), and the predicted
         overhead.
plan     seconds to trace and to price (once per network, without a cache), to solve, and of the first planned call,
         which traces again, lowers and runs.
bitwise  whether the loss, gradients, buffers and the state of the random generator equal those of the plain step.

On CUDA, the plain and the planned steps run with deterministic kernels. With `--check` the exit code is 1 if a peak
exceeds its budget, a prediction is off by more than 2%, a result is not bitwise equal, a budget is refused that another
solver or `torch.utils.checkpoint` per block meets, or a step with the budget 1.0 is slower than the plain step beyond
noise.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from rich.console import Console
from torch import Tensor, nn

import fckpt
from benches.common.command import (
    conclude,
    described,
    deviation,
    each_network,
    in_mib,
    mib,
    network_parser,
    opening,
    rounds_of,
    table_of,
)
from benches.common.timing import Spread, alternate, is_slower, paired_ratio, set_up, spread
from benches.common.training import (
    Outcome,
    Prepared,
    Task,
    buffers_of,
    different,
    outcome_of,
    prepare,
    size_of,
    step_of,
    unequal,
)
from benches.models.budget_networks import NETWORKS
from benches.models.wrapping import TorchCheckpoint
from fckpt._memory import measure_peak
from fckpt.errors import BudgetError
from fckpt.solve.proofs.bounds import least_peak

BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
LEAST_ROUNDS = 9
"""With these, a sign test can be significant even if one round goes the other way."""
OTHER_SOLVERS = ("greedy", "knapsack", "min_cut", "recompute_all")


# ---- one network ---------------------------------------------------------------------------------


@dataclass
class Row:
    """One budget of one network."""

    budget: str
    """A fraction of the predicted plain peak, or "least"."""
    budget_bytes: int
    least_bytes: int | None = None
    """If there is no plan: the least budget for which there would be one."""
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    predicted_overhead: float | None = None
    recomputed_nodes: int | None = None
    time_ratio: Spread | None = None
    """Planned step over plain step."""
    step_seconds: Spread | None = None
    solve_seconds: float = 0.0
    first_call_seconds: float | None = None
    unequal: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@dataclass
class Report:
    """The results of one network."""

    name: str
    what: str
    gradient_bytes: int = 0
    plain_bytes: int = 0
    """Measured peak of the plain step."""
    predicted_plain_bytes: int = 0
    floor_bytes: int = 0
    """A lower bound on the peak of any schedule."""
    blocks_bytes: int = 0
    """Measured peak with `torch.utils.checkpoint` per block."""
    plain_seconds: Spread | None = None
    plain_repeats: bool = True
    """Whether two plain steps are bitwise equal. Otherwise no others need to be."""
    nodes: int = 0
    trace_seconds: float = 0.0
    price_seconds: float = 0.0
    estimated: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def everything_wrong(self) -> Iterator[str]:
        """Yields the complaints, those of the rows with their budgets."""
        yield from self.complaints
        for row in self.rows:
            yield from (f"at {row.budget}: {text}" for text in row.complaints)


def examine(
    task: Task, budgets: Sequence[float], *, rounds: int, device: torch.device, advance: Callable[[str], object]
) -> Report:
    """Plans and runs one network with each budget."""
    report = Report(task.name, task.what)
    try:
        plain = _examine_plain(task, report, device)
        advance("trace and price")
        prepared = _examine_planning(task, report)
    except Exception as error:
        report.complaints.append(described(error))
        return report
    for budget in (*budgets, "least"):
        advance(f"budget {budget}")
        try:
            report.rows.append(_examine_budget(task, report, prepared, budget, plain, rounds, device))
        except Exception as error:
            report.rows.append(Row(str(budget), 0, complaints=[described(error)]))
    return report


@dataclass(frozen=True)
class _Plain:
    """The buffers before a step, and the outcome of the plain step."""

    buffers: list[Tensor]
    outcome: Outcome


def _examine_plain(task: Task, report: Report, device: torch.device) -> _Plain:
    report.gradient_bytes = sum(p.nbytes for p in task.loss.parameters() if p.requires_grad)
    blocks = task.in_blocks(TorchCheckpoint)
    for module in (task.loss, blocks):
        step_of(module, task)()  # so that every library has allocated its permanent memory
    report.plain_bytes = measure_peak(step_of(task.loss, task), device).peak_bytes
    report.blocks_bytes = measure_peak(step_of(blocks, task), device).peak_bytes
    del blocks
    buffers = buffers_of(task.loss)
    outcome = outcome_of(task.loss, task, buffers)
    report.plain_repeats = not unequal(outcome, outcome_of(task.loss, task, buffers))
    return _Plain(buffers, outcome)


def _examine_planning(task: Task, report: Report) -> Prepared:
    prepared = prepare(task)
    report.nodes = len(prepared.plain.graph.nodes)
    report.trace_seconds, report.price_seconds = prepared.trace_seconds, prepared.price_seconds
    report.estimated = prepared.estimated
    report.predicted_plain_bytes = prepared.plain.baseline_peak_bytes
    report.floor_bytes = least_peak(prepared.plain.graph)
    if wrong := deviation(prepared.plain.baseline_peak_bytes, report.plain_bytes):
        report.complaints.append(f"plain peak {wrong}")
    return prepared


def _examine_budget(
    task: Task,
    report: Report,
    prepared: Prepared,
    budget: float | str,
    plain: _Plain,
    rounds: int,
    device: torch.device,
) -> Row:
    nbytes = prepared.least_bytes() if isinstance(budget, str) else int(prepared.plain.baseline_peak_bytes * budget)
    row = Row(str(budget), nbytes)
    start = time.perf_counter()
    try:
        plan = prepared.plan(nbytes)
    except BudgetError as error:
        row.solve_seconds = time.perf_counter() - start
        row.least_bytes = error.least_bytes
        row.complaints = _others_that_fit(prepared, report, nbytes)
        if isinstance(budget, str):
            row.complaints.append(f"the least budget was {nbytes}, and with it {error.least_bytes}")
        return row
    row.solve_seconds = time.perf_counter() - start
    row.predicted_bytes, row.predicted_overhead = plan.peak_bytes, plan.overhead
    row.recomputed_nodes = plan.timeline.recomputed_nodes
    _run(task, report, row, fckpt.remat(task.loss, plan=plan), plain, rounds, device)
    _judge(report, row)
    return row


def _others_that_fit(prepared: Prepared, report: Report, nbytes: int) -> list[str]:
    """Returns a complaint for each other way that meets a budget which `auto` refuses."""
    found = []
    for solver in OTHER_SOLVERS:
        try:
            peak = prepared.plan(nbytes, solver).peak_bytes
        except BudgetError:
            continue
        found.append(f"refused, and the solver {solver} needs {mib(peak)}")
    if report.blocks_bytes <= nbytes:
        found.append(f"refused, and torch.utils.checkpoint per block needs {mib(report.blocks_bytes)}")
    return found


def _run(
    task: Task, report: Report, row: Row, planned: nn.Module, plain: _Plain, rounds: int, device: torch.device
) -> None:
    start = time.perf_counter()
    row.unequal = unequal(plain.outcome, outcome_of(planned, task, plain.buffers))
    row.first_call_seconds = time.perf_counter() - start
    row.measured_bytes = measure_peak(step_of(planned, task), device).peak_bytes
    steps = {"plain": step_of(task.loss, task), "planned": step_of(planned, task)}
    # A step without recomputation must not be slower, which takes a sign test with enough rounds.
    rounds = rounds if row.recomputed_nodes else max(rounds, LEAST_ROUNDS)
    seconds = alternate(steps, rounds=rounds, device=device)
    row.time_ratio = paired_ratio(seconds, "planned", "plain")
    row.step_seconds = spread(seconds["planned"])
    if report.plain_seconds is None:
        report.plain_seconds = spread(seconds["plain"])
    if not row.recomputed_nodes and is_slower(seconds, "planned", "plain"):
        row.complaints.append(f"recomputes nothing and takes {row.time_ratio} of the plain time")


def _judge(report: Report, row: Row) -> None:
    assert row.measured_bytes is not None
    assert row.predicted_bytes is not None
    if row.measured_bytes > row.budget_bytes:
        over = row.measured_bytes - row.budget_bytes
        row.complaints.append(f"peaks {over:,} bytes above its budget ({over / row.budget_bytes:+.2%})")
    if wrong := deviation(row.predicted_bytes, row.measured_bytes):
        row.complaints.append(wrong)
    if row.unequal and report.plain_repeats:
        row.complaints.append(different(row.unequal))


# ---- the script ----------------------------------------------------------------------------------


def show(report: Report, console: Console) -> None:
    """Prints the table of one network."""
    console.print(f"[bold]{report.name}[/]: {report.what}; {report.nodes} operations", highlight=False)
    table = table_of("budget", "MiB", "predicted", "measured", "off", "extra", "time", "s", "same")
    seconds = f"{report.plain_seconds.least * 1e3:.1f} ms" if report.plain_seconds else ""
    predicted, measured = report.predicted_plain_bytes, report.plain_bytes
    sizes = [in_mib(predicted), in_mib(measured), _percent(predicted, measured)]
    table.add_row("plain", "", *sizes, "", seconds, "", "yes" if report.plain_repeats else "no", style="dim")
    for row in report.rows:
        table.add_row(*_cells(row, report), style="bold red" if row.complaints else None)
    console.print(table)
    console.print(
        f"floor {mib(report.floor_bytes)}, gradients {mib(report.gradient_bytes)}, "
        f"a checkpoint per block {mib(report.blocks_bytes)}; "
        f"trace {report.trace_seconds:.2f} s, price {report.price_seconds:.2f} s"
        + "".join(f"; estimated: {op}" for op in report.estimated),
        style="dim",
        highlight=False,
    )


def _cells(row: Row, report: Report) -> list[str]:
    cells = [row.budget, in_mib(row.budget_bytes)]
    solve = f"{row.solve_seconds:.2f}"
    if row.measured_bytes is None or row.predicted_bytes is None:
        least = f"least {in_mib(row.least_bytes)}" if row.least_bytes is not None else "error"
        return [*cells, "", "", "", "", least, solve, ""]
    return [
        *cells,
        in_mib(row.predicted_bytes),
        in_mib(row.measured_bytes),
        _percent(row.predicted_bytes, row.measured_bytes),
        f"{row.predicted_overhead:.3f}",
        str(row.time_ratio or ""),
        solve,
        ("NO" if report.plain_repeats else "no") if row.unequal else "yes",
    ]


def _percent(predicted: int, measured: int) -> str:
    return f"{predicted / measured - 1:+.1%}" if measured else ""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = network_parser("budgets", __doc__, "exit 1 if a peak, a result or a time is not as it should be", NETWORKS)
    parser.add_argument(
        "--budgets", nargs="+", type=_fraction, metavar="X", default=BUDGETS, help="fractions of the plain peak"
    )
    parsed = parser.parse_args(arguments)
    parsed.rounds = rounds_of(parsed)
    return parsed


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"a budget is a fraction above 0 and at most 1, not {text}")
    return value


def main(arguments: list[str] | None = None) -> int:
    """Runs the bench. Returns 1 if `--check` was asked for and failed, otherwise 0."""
    parsed = parse(arguments)
    device = set_up(parsed.device)
    console, document = opening("budgets", arguments, device)
    size = size_of(device, quick=parsed.quick, tiny=parsed.tiny)
    document["options"] = {"size": size, "budgets": parsed.budgets, "rounds": parsed.rounds}

    def try_to(name: str, advance: Callable[[str], object]) -> Report:
        task = NETWORKS[name].task(size, device)
        return examine(task, parsed.budgets, rounds=parsed.rounds, device=device, advance=advance)

    reports = each_network(parsed, document, NETWORKS, len(parsed.budgets) + 2, try_to, show, console)
    console.print(
        "Extra: predicted time of recomputations, relative to the plain step. Time: relative to the plain step, "
        "median and quartiles of the rounds. s: seconds to solve. Same: bitwise equal.",
        style="dim",
    )
    return conclude(parsed, reports, console)


if __name__ == "__main__":
    sys.exit(main())
