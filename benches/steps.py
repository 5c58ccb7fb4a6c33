"""Whole training steps: forward, backward and update, by `fckpt.step` and by hand.

    python -m benches.steps --quick --json benches/results/steps-cpu.json --check     # three quarters of an hour
    python -m benches.steps --tiny --networks vit lstm --optimizers adamw             # seconds

For each network, optimizer and number of microbatches, in one process and from the same parameters:

plain     `loss.backward()` per microbatch, then `optimizer.step()` and `optimizer.zero_grad()`.
blocks    the same with `torch.utils.checkpoint` per block.
hooks     blocks, and each parameter is updated by a hook as soon as its gradient is complete (in the last microbatch).
step      `fckpt.step` within the peak of hooks, and within the least budget that it finds feasible.
today     the least budget of forward and backward alone by `fckpt.remat`; the optimizer's own memory comes on top.

Peaks are counted by the allocator; times are relative to plain, run alternately. After five steps, losses, parameters
and the optimizer's state are compared bitwise with those of plain. With `--check` the exit code is 1 if anything
differs, or if a peak exceeds its budget.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import fckpt
from benches.common.command import (
    conclude,
    described,
    each_network,
    in_mib,
    network_parser,
    opening,
    rounds_of,
    table_of,
)
from benches.common.timing import Spread, alternate, paired_ratio, set_up
from benches.common.training import SEED, Network, Task, labelled_images, prepare, size_of, sizes_from
from benches.models.budget_networks import NETWORKS as ELEVEN
from benches.models.wrapping import TorchCheckpoint
from fckpt._memory import measure_peak
from fckpt.errors import BudgetError

STEPS = 5
ATTEMPTS = 6
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, foreach=False),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=False),
}


class Perceptron(nn.Module):
    """Equal layers, whose weights are large beside their activations."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        part = lambda: nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.block = nn.Sequential
        self.layers = nn.ModuleList(part() for _ in range(layers))
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)[:, : self.width]
        for layer in self.layers:
            x = layer(x)
        return x


_SIZES = {
    size: sizes_from(text)
    for size, text in {
        "cuda": "batch=512 side=32 width=3072 layers=24",
        "cpu": "batch=128 side=32 width=512 layers=12",
        "quick": "batch=128 side=16 width=256 layers=12",
        "tiny": "batch=8 side=8 width=64 layers=3",
    }.items()
}
NETWORKS = {**ELEVEN, "mlp": Network("perceptron", Perceptron, labelled_images(10), _SIZES)}
Step = Callable[[], Tensor]


@dataclass
class Row:
    """One way to do a step."""

    way: str
    optimizer: str
    accumulate: int
    peak_bytes: int | None = None
    budget_bytes: int | None = None
    predicted_bytes: int | None = None
    predicted_overhead: float | None = None
    time_ratio: Spread | None = None
    plan_seconds: float | None = None
    unequal: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@dataclass
class Report:
    """The results of one network."""

    name: str
    what: str
    parameter_bytes: int = 0
    today_bytes: int = 0
    """The least budget of forward and backward alone, without the optimizer's memory."""
    rows: list[Row] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def everything_wrong(self) -> Iterator[str]:
        """Yields all complaints."""
        yield from self.complaints
        for row in self.rows:
            yield from (f"{row.way}, {row.optimizer}, {row.accumulate}: {text}" for text in row.complaints)


# ---- ways to do a step -----------------------------------------------------------------------------


class Trainee:
    """A copy of a network with an optimizer, and one way to do a step."""

    def __init__(self, task: Task, optimizer: str, accumulate: int, *, blocks: bool = False) -> None:
        loss = task.in_blocks(TorchCheckpoint) if blocks else task.loss
        self.loss = copy.deepcopy(loss)
        self.parameters = [p for p in self.loss.parameters() if p.requires_grad]
        self.optimizer = OPTIMIZERS[optimizer](self.parameters)
        self.batch = (task.inputs, task.labels)
        self.accumulate = accumulate

    def microbatches(self) -> list[tuple[Tensor, Tensor]]:
        inputs, labels = (t.chunk(self.accumulate) for t in self.batch)
        return list(zip(inputs, labels, strict=True))

    def backward(self, parts: Sequence[tuple[Tensor, Tensor]], count: int) -> Tensor:
        total: Tensor | None = None
        for part in parts:
            loss = self.loss(*part) / count if count > 1 else self.loss(*part)
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    def plain(self) -> Tensor:
        parts = self.microbatches()
        total = self.backward(parts, len(parts))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def hooked(self) -> Step:
        """Returns a step in which hooks update the parameters."""
        optimizers = {p: type(self.optimizer)([p], **_options(self.optimizer)) for p in self.parameters}
        self.several = list(optimizers.values())
        active = [False]

        def update(parameter: Tensor) -> None:
            if active[0]:
                optimizers[parameter].step()  # type: ignore[index]
                optimizers[parameter].zero_grad()  # type: ignore[index]

        for p in self.parameters:
            p.register_post_accumulate_grad_hook(update)

        def step() -> Tensor:
            parts = self.microbatches()
            before = [self.backward([part], len(parts)) for part in parts[:-1]]
            active[0] = True
            last = self.backward(parts[-1:], len(parts))
            active[0] = False
            total = before[0] if before else last
            for value in (*before[1:], *([last] if before else [])):
                total = total + value
            return total

        return step

    def planned(self, budget: int) -> Any:
        loss_fn = lambda loss, batch: loss(*batch)
        return fckpt.step(self.loss, self.optimizer, loss_fn, budget=budget, accumulate=self.accumulate)

    def state(self) -> list[Tensor]:
        """Returns parameters, buffers, and the optimizer's state by parameter."""
        optimizers = getattr(self, "several", [self.optimizer])
        kept = {p: o.state[p] for o in optimizers for p in o.state}
        found = [*self.parameters, *self.loss.buffers()]
        return found + [v for p in self.parameters for v in kept.get(p, {}).values() if isinstance(v, Tensor)]


def _options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = ("lr", "momentum", "foreach") if isinstance(optimizer, torch.optim.SGD) else ("lr", "foreach")
    return {name: optimizer.param_groups[0][name] for name in names}


# ---- one network ---------------------------------------------------------------------------------


def examine(task: Task, parsed: argparse.Namespace, device: torch.device, advance: Callable[[str], object]) -> Report:
    """Runs all ways to do a step of one network."""
    report = Report(task.name, task.what)
    try:
        advance("least of forward and backward")
        report.parameter_bytes = sum(p.nbytes for p in task.loss.parameters())
        report.today_bytes = prepare(task).least_bytes()
    except Exception as error:
        report.complaints.append(described(error))
    for optimizer in parsed.optimizers:
        for accumulate in parsed.accumulate:
            advance(f"{optimizer}, {accumulate}")
            try:
                report.rows += _Experiment(task, optimizer, accumulate, parsed.rounds, device).rows()
            except Exception as error:
                report.complaints.append(described(error))
    return report


class _Experiment:
    """All ways to do a step, for one network, optimizer and number of microbatches."""

    def __init__(self, task: Task, optimizer: str, accumulate: int, rounds: int, device: torch.device) -> None:
        self.task, self.options, self.rounds, self.device = task, (optimizer, accumulate), rounds, device

    def rows(self) -> list[Row]:
        plain = Trainee(self.task, *self.options)
        expected = _five(plain.plain, plain)
        rows = [self._row("plain", plain, plain.plain, plain.plain, expected)]
        blocks = Trainee(self.task, *self.options, blocks=True)
        rows.append(self._row("blocks", blocks, blocks.plain, plain.plain, expected))
        hooks = Trainee(self.task, *self.options, blocks=True)
        rows.append(self._row("hooks", hooks, hooks.hooked(), plain.plain, expected))
        within = rows[-1].peak_bytes or 0
        for way, budget in (("step", within), ("step, least", 1)):
            rows.append(self._planned(way, budget, plain.plain, expected))
        return rows

    def _planned(self, way: str, budget: int, plain: Step, expected: Any) -> Row:
        for _ in range(ATTEMPTS):
            try:
                return self._within(way, budget, plain, expected)
            except BudgetError as error:
                if way == "step":
                    return Row(way, *self.options, budget_bytes=budget, complaints=[described(error)])
                budget = error.least_bytes  # more, if the first update takes more memory than later ones
        return Row(way, *self.options, budget_bytes=budget, complaints=["its least budget does not suffice"])

    def _within(self, way: str, budget: int, plain: Step, expected: Any) -> Row:
        start = time.perf_counter()
        trainee = Trainee(self.task, *self.options)
        step = trainee.planned(budget)
        step.plan(trainee.batch)
        seconds = time.perf_counter() - start
        row = self._row(way, trainee, lambda: step(trainee.batch), plain, expected)
        plan = step.plan(trainee.batch)
        row.plan_seconds = seconds
        row.budget_bytes, row.predicted_bytes, row.predicted_overhead = budget, plan.peak_bytes, plan.overhead
        if row.peak_bytes is not None and row.peak_bytes > budget:
            row.complaints.append(f"peaks {row.peak_bytes - budget:,} bytes above its budget")
        return row

    def _row(self, way: str, trainee: Trainee, step: Step, plain: Step, expected: Any) -> Row:
        row = Row(way, *self.options)
        if way != "plain":
            row.unequal = _unequal(expected, _five(step, trainee))
            # PyTorch's checkpoint updates statistics a second time.
            if row.unequal and way.startswith("step"):
                row.complaints.append(f"not bitwise equal: {', '.join(row.unequal)}")
        row.peak_bytes = measure_peak(step, self.device).peak_bytes
        if way != "plain":
            seconds = alternate({"plain": plain, way: step}, rounds=self.rounds, device=self.device)
            row.time_ratio = paired_ratio(seconds, way, "plain")
        return row


def _five(step: Step, trainee: Trainee) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the losses of five steps from a fixed seed, and copies of the state after them."""
    torch.manual_seed(SEED)
    losses = [step() for _ in range(STEPS)]
    return losses, [t.detach().clone() for t in trainee.state()]


def _unequal(expected: tuple[list[Tensor], list[Tensor]], actual: tuple[list[Tensor], list[Tensor]]) -> list[str]:
    same = [len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(expected, actual, strict=True)]
    return [what for what, equal in zip(("losses", "parameters and state"), same, strict=True) if not equal]


# ---- the script ----------------------------------------------------------------------------------


def show(report: Report, console: Console) -> None:
    """Prints the table of one network."""
    console.print(
        f"[bold]{report.name}[/]: {report.what}; parameters {in_mib(report.parameter_bytes)} MiB, "
        f"forward and backward alone at least {in_mib(report.today_bytes)} MiB",
        highlight=False,
    )
    table = table_of("optimizer", "n", "way", "peak MiB", "of plain", "time", "same", left=("optimizer", "way"))
    plain = 1
    for row in report.rows:
        plain = row.peak_bytes or 1 if row.way == "plain" else plain
        share = "" if row.peak_bytes is None else f"{row.peak_bytes / plain:.3f}"
        cells = ["" if row.peak_bytes is None else in_mib(row.peak_bytes), share, str(row.time_ratio or "")]
        style = "bold red" if row.complaints else None
        table.add_row(row.optimizer, str(row.accumulate), row.way, *cells, "no" if row.unequal else "yes", style=style)
    console.print(table)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = network_parser("steps", __doc__, "exit 1 if a peak or a result is not as it should be", NETWORKS)
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS), metavar="NAME")
    parser.add_argument("--accumulate", nargs="+", type=int, default=[1, 4], metavar="N", help="microbatches")
    parsed = parser.parse_args(arguments)
    parsed.rounds = rounds_of(parsed)
    return parsed


def main(arguments: list[str] | None = None) -> int:
    """Runs the bench. Returns 1 if `--check` was asked for and failed, otherwise 0."""
    parsed = parse(arguments)
    device = set_up(parsed.device)
    console, document = opening("steps", arguments, device)
    size = size_of(device, quick=parsed.quick, tiny=parsed.tiny)
    document["options"] = {"size": size, "rounds": parsed.rounds}

    def try_to(name: str, advance: Callable[[str], object]) -> Report:
        return examine(NETWORKS[name].task(size, device), parsed, device, advance)

    count = 1 + len(parsed.optimizers) * len(parsed.accumulate)
    reports = each_network(parsed, document, NETWORKS, count, try_to, show, console)
    console.print("Time: relative to the plain step, median and quartiles. n: microbatches.", style="dim")
    return conclude(parsed, reports, console)


if __name__ == "__main__":
    sys.exit(main())
