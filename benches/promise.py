"""Whether a budget holds: plans for eleven networks, their predicted and measured peaks, their times, their results.

    python -m benches.promise --json benches/results/promise-cpu.json --check
    python -m benches.promise --device cuda --json benches/results/promise-cuda.json --check
    python -m benches.promise --quick --json benches/results/promise-quick-cpu.json     # some minutes
    python -m benches.promise --tiny --networks vit lstm --budgets 0.7 0.4              # seconds

A step is forward, loss and backward to all parameters, planned as one region by `fckpt.remat(step, budget=...)`. A
budget is a fraction of the plain step's peak as fckpt predicts it, which is what a float means there; the row `plain`
compares that prediction with the measurement. `least` is the least budget that fckpt says is feasible; the floor below
the table is what no schedule can do without. By network, in one process:

peak     predicted by the plan, and measured by the allocator's own count (`fckpt.measure_peak`).
time     planned against plain, run in turn (see `timing.py`), beside the overhead that was predicted.
plan     seconds to trace and to price (once per network, nothing cached), to solve, and of the first planned call,
         which traces again, lowers and runs.
bitwise  loss, gradients, buffers and the random generator afterwards, against those of the plain step.

On CUDA plain and planned steps alike run with deterministic kernels. With `--check` the exit code is 1 if a peak
exceeds its budget, a prediction is off by more than 2%, anything is not bitwise equal, a budget is refused that
another solver or `torch.utils.checkpoint` per block meets, or the step planned with all the memory of the plain one is
slower beyond noise.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import fckpt
from benches.models import TorchCheckpoint
from benches.script import conclude, described, each_network, in_mib, network_parser, opening, rounds_of, table_of
from benches.task import Task, size_of
from benches.timing import Spread, alternate, mib, paired_ratio, set_up, sign_test, spread
from benches.zoo import NETWORKS
from fckpt._memory import measure_peak
from fckpt._planned.making import make_plan
from fckpt.cost import CostSource, Measured, OpCost
from fckpt.errors import BudgetError
from fckpt.graph import Graph

__all__ = [
    "Outcome",
    "Prepared",
    "buffers_of",
    "different",
    "floor_bytes",
    "off",
    "outcome_of",
    "prepare",
    "step_of",
    "unequal",
]

BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
TOLERANCE = 0.02
"""How far a predicted peak may be from the measured one."""
SIGNIFICANCE = 0.01
LEAST_ROUNDS = 9
"""With which a sign test can be significant, even if one round goes the other way."""
RESOLUTION = 1.01
"""A difference of the medians under 1% is not a finding: where a tensor lands in memory makes as much."""
SEED = 0
OTHER_SOLVERS = ("greedy", "knapsack", "min_cut", "recompute_all")


# ---- a step, and what comes out of it ------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a step leaves behind, to be compared bitwise."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    generator: Tensor


def step_of(loss: nn.Module, task: Task) -> Callable[[], None]:
    """Returns a training step without an optimizer: forward, backward, and the gradients dropped."""

    def step() -> None:
        loss(task.inputs, task.labels).backward()
        # Dropped at once: gradients that outlive the step would not be the step's own memory.
        loss.zero_grad(set_to_none=True)

    return step


def buffers_of(loss: nn.Module) -> list[Tensor]:
    """Returns copies of the buffers."""
    return [buffer.clone() for buffer in loss.buffers()]


def outcome_of(loss: nn.Module, task: Task, buffers: Sequence[Tensor]) -> Outcome:
    """Runs one step from a fixed seed, and from buffers with the values of `buffers`."""
    for buffer, start in zip(loss.buffers(), buffers, strict=True):
        buffer.copy_(start)
    torch.manual_seed(SEED)
    value = loss(task.inputs, task.labels)
    value.backward()
    device = task.inputs.device
    state = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    gradients = {name: p.grad for name, p in loss.named_parameters()}
    loss.zero_grad(set_to_none=True)
    after = {name: buffer.clone() for name, buffer in loss.named_buffers()}
    return Outcome(value.detach(), gradients, after, state)


def unequal(expected: Outcome, actual: Outcome) -> list[str]:
    """Names everything in which two outcomes differ, be it by one bit. Parameters go by position."""
    found = [] if torch.equal(expected.loss, actual.loss) else ["loss"]
    for what in ("gradients", "buffers"):
        one, other = getattr(expected, what), list(getattr(actual, what).values())
        if len(one) != len(other):
            found.append(f"number of {what}")
            continue
        pairs = zip(one.items(), other, strict=True)
        found += [f"{what[:-1]} {name}" for (name, a), b in pairs if not _same(a, b)]
    return found if torch.equal(expected.generator, actual.generator) else [*found, "generator"]


def different(names: Sequence[str]) -> str:
    """Returns a complaint about what is `unequal`."""
    more = ", ..." if len(names) > 4 else ""
    return f"{len(names)} results not bitwise equal: {', '.join(names[:4])}{more}"


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a, b)


# ---- planning ------------------------------------------------------------------------------------


class _Clocked:
    """A cost source that says how long it took and what it had to estimate."""

    def __init__(self, source: CostSource) -> None:
        self.source = source
        self.seconds = 0.0

    def __call__(self, call: Any, specs: Sequence[Any]) -> OpCost:
        start = time.perf_counter()
        cost = self.source(call, specs)
        self.seconds += time.perf_counter() - start
        return cost


@dataclass(frozen=True)
class Prepared:
    """A traced and priced step, from which plans are made."""

    plain: fckpt.Plan
    """The plan that recomputes nothing."""
    trace_seconds: float
    price_seconds: float
    estimated: dict[str, str]
    """Operations that could not be measured, and why."""

    def plan(self, budget: float, solver: str = "auto") -> fckpt.Plan:
        """Plans for a number of bytes, or for a fraction of the plain peak."""
        return make_plan(self.plain.graph, budget, solver, self.plain.torch_version)

    def least_bytes(self) -> int:
        """Returns the least budget that is said to be feasible."""
        try:
            return self.plan(1).peak_bytes
        except BudgetError as error:
            return error.least_bytes


def floor_bytes(graph: Graph) -> int:
    """Returns what one operation holds by itself, or all results together: no schedule peaks below."""
    given = set(graph.inputs)

    def held(values: Iterable[int]) -> int:
        return sum(graph.values[v].nbytes for v in set(values) - given)

    needed = {*graph.gradients, *graph.outputs}
    floor = held(needed)
    for node in reversed(graph.nodes):
        if node.once or not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
            made = () if node.overwrites else node.outputs
            floor = max(floor, held((*node.inputs, *made)) + node.temporary_nbytes)
    return floor


def prepare(task: Task) -> Prepared:
    """Traces and prices a step, measuring each operation anew."""
    source = Measured(cache=False)
    clocked = _Clocked(source)
    start = time.perf_counter()
    plan = task.plan(clocked)
    seconds = time.perf_counter() - start - clocked.seconds
    return Prepared(plan, seconds, clocked.seconds, dict(source.failures))


# ---- one network ---------------------------------------------------------------------------------


@dataclass
class Row:
    """One budget of one network."""

    budget: str
    """A fraction of the predicted plain peak, or "least"."""
    budget_bytes: int
    least_bytes: int | None = None
    """Where no plan fits: the least budget that would."""
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
    """What was found out about one network."""

    name: str
    what: str
    gradient_bytes: int = 0
    plain_bytes: int = 0
    """Measured peak of the plain step."""
    predicted_plain_bytes: int = 0
    floor_bytes: int = 0
    """No schedule whatsoever peaks below."""
    blocks_bytes: int = 0
    """Measured peak with `torch.utils.checkpoint` per block."""
    plain_seconds: Spread | None = None
    plain_repeats: bool = True
    """Whether two plain steps agree bitwise; if they do not, no others need to."""
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
    """The buffers from which a step starts, and what the plain one then leaves behind."""

    buffers: list[Tensor]
    outcome: Outcome


def _examine_plain(task: Task, report: Report, device: torch.device) -> _Plain:
    report.gradient_bytes = sum(p.nbytes for p in task.loss.parameters() if p.requires_grad)
    blocks = task.in_blocks(TorchCheckpoint)
    for module in (task.loss, blocks):
        step_of(module, task)()  # by then every library has allocated what it keeps for good
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
    report.floor_bytes = floor_bytes(prepared.plain.graph)
    if wrong := off(prepared.plain.baseline_peak_bytes, report.plain_bytes):
        report.complaints.append(f"plain peak {wrong}")
    return prepared


def off(predicted: int, measured: int) -> str:
    """Returns a complaint about a prediction that is too far from what was measured, or nothing."""
    if abs(predicted - measured) <= TOLERANCE * measured:
        return ""
    return f"predicted {mib(predicted)}, measured {mib(measured)} ({predicted / measured - 1:+.1%})"


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
    """Says who meets a budget that `auto` refuses."""
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
    contenders = {"plain": step_of(task.loss, task), "planned": step_of(planned, task)}
    # Without a repetition there is something to prove, for which a sign test needs its rounds.
    rounds = rounds if row.recomputed_nodes else max(rounds, LEAST_ROUNDS)
    seconds = alternate(contenders, rounds=rounds, device=device)
    row.time_ratio = paired_ratio(seconds, "planned", "plain")
    row.step_seconds = spread(seconds["planned"])
    if report.plain_seconds is None:
        report.plain_seconds = spread(seconds["plain"])
    # Nothing is recomputed with the memory of the plain step: the time has no excuse.
    if not row.recomputed_nodes and row.time_ratio.median > RESOLUTION:
        p = sign_test(seconds, "planned", "plain")
        if p < SIGNIFICANCE:
            row.complaints.append(f"recomputes nothing and takes {row.time_ratio} of the plain time (p = {p:.4f})")


def _judge(report: Report, row: Row) -> None:
    assert row.measured_bytes is not None
    assert row.predicted_bytes is not None
    if row.measured_bytes > row.budget_bytes:
        over = row.measured_bytes - row.budget_bytes
        row.complaints.append(f"peaks {over:,} bytes above its budget ({over / row.budget_bytes:+.2%})")
    if wrong := off(row.predicted_bytes, row.measured_bytes):
        row.complaints.append(wrong)
    if row.unequal and report.plain_repeats:
        row.complaints.append(different(row.unequal))


# ---- the script ----------------------------------------------------------------------------------


def show(report: Report, console: Console) -> None:
    """Prints one network's table, and what is wrong with it."""
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
    parser = network_parser("promise", __doc__, "exit 1 if a promise is broken", NETWORKS)
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
    console, document = opening("promise", arguments, device)
    size = size_of(device, quick=parsed.quick, tiny=parsed.tiny)
    document["options"] = {"size": size, "budgets": parsed.budgets, "rounds": parsed.rounds}

    def try_to(name: str, advance: Callable[[str], object]) -> Report:
        task = NETWORKS[name].task(size, device)
        return examine(task, parsed.budgets, rounds=parsed.rounds, device=device, advance=advance)

    reports = each_network(parsed, document, NETWORKS, len(parsed.budgets) + 2, try_to, show, console)
    console.print(
        "Extra: predicted time of repetitions, to the plain time. Time: planned to plain step, the median of quotients "
        "within a round, and their interquartile range. s: seconds to solve. Same: bitwise.",
        style="dim",
    )
    return conclude(parsed, reports, console)


if __name__ == "__main__":
    sys.exit(main())
