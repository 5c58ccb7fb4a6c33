"""Whole training steps: forward, backward and update, by `fckpt.step` and by hand.

    python -m benches steps --json benches/results/steps-cpu.json --check             # an hour
    python -m benches steps --json benches/results/steps-cpu.json --resume            # what an interrupted run left out
    python -m benches steps --quick --check                                           # five minutes
    python -m benches steps --tiny --networks vit lstm --optimizers adamw             # seconds

For each network, optimizer and number of microbatches, in one process and from the same parameters:

plain          `loss.backward()` per microbatch, then `optimizer.step()` and `optimizer.zero_grad()`.
blocks         the same with `torch.utils.checkpoint` per block.
hooks          blocks, and each parameter is updated by a hook when its gradient is complete (in the last microbatch).
step, free     `fckpt.step` without a budget.
step           `fckpt.step` within the peak of hooks.
step, least    `fckpt.step` within the least budget that it finds feasible.
today          the least budget of forward and backward alone by `fckpt.remat`; the optimizer's own memory comes on top.

Peaks are counted by the allocator; times are taken alternately, and relative to plain and to hooks. After five steps,
losses, parameters and the optimizer's state are compared bitwise with those of the plain step. With `--check` the exit
code is 1 if a planned step differs, or if its peak is not the predicted one.
"""

from __future__ import annotations

import argparse
import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import fckpt
from benches.common.command import described, mib, network_parser, opening, parse_networks, report_each, share, table_of
from benches.common.results import read_json
from benches.common.rows import Record, Row
from benches.common.timing import Spread, alternate, is_slower, paired_ratio, set_up, spread
from benches.common.training import SEED, Task, prepare, size_of
from benches.models.step_networks import NETWORKS
from benches.models.wrapping import TorchCheckpoint
from fckpt._memory import measure_peak
from fckpt.errors import BudgetError
from fckpt.solve._known_orders import remembering

STEPS = 5
COLUMNS = ("optimizer", "n", "way", "peak MiB", "of plain", "time", "of hooks", "than plain", "same")
ATTEMPTS = 6
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, foreach=False),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=False),
}

Step = Callable[[], Tensor]


@dataclass
class Way(Row):
    """One way to do a step."""

    way: str
    optimizer: str
    accumulate: int
    time_to_hooks: Spread | None = None
    """The time of a step relative to hooks."""
    slower: bool = False
    """Whether it is slower than the plain step beyond noise."""

    @property
    def title(self) -> str:
        """What was run."""
        return f"{self.way}, {self.optimizer}, {self.accumulate}"


@dataclass
class Report(Record):
    """The results of one network."""

    name: str
    what: str
    parameter_bytes: int = 0
    today_bytes: int = 0
    """The least budget of forward and backward alone, without the optimizer's memory."""
    rows: list[Way] = field(default_factory=list)


# ---- ways to do a step -----------------------------------------------------------------------------


class Model:
    """A copy of a network that several trainees train one after the other, each from the start.

    Dynamo captures it once for all budgets and optimizers, because a capture takes longer than everything else.
    """

    def __init__(self, task: Task) -> None:
        self.loss = copy.deepcopy(task.loss)
        self.start = copy.deepcopy(task.loss.state_dict())
        self.loss_fn: Callable[[Any, Any], Tensor] = lambda loss, batch: loss(*batch)
        self.known: dict[int, Any] = {}
        """The first step for each number of microbatches, which captures the loss."""

    def fresh(self) -> nn.Module:
        """Returns the module with the values that it had at first."""
        self.loss.load_state_dict(self.start)
        return self.loss

    def step(self, optimizer: torch.optim.Optimizer, budget: int | None, accumulate: int) -> Any:
        """Returns `fckpt.step` within a budget."""
        if accumulate in self.known:
            return self.known[accumulate].within(budget, optimizer)
        first = fckpt.step(self.loss, optimizer, self.loss_fn, budget=budget, accumulate=accumulate)
        return self.known.setdefault(accumulate, first)


class Trainee:
    """A network with an optimizer, and ways to do a step."""

    def __init__(self, task: Task, optimizer: str, accumulate: int, loss: nn.Module) -> None:
        self.loss = loss
        self.parameters = [p for p in self.loss.parameters() if p.requires_grad]
        self.make = OPTIMIZERS[optimizer]
        self.optimizers = [self.make(self.parameters)]
        self.batch, self.accumulate = (task.inputs, task.labels), accumulate
        if len(task.inputs) < accumulate:
            raise ValueError(f"{len(task.inputs)} samples make no {accumulate} microbatches")
        self.updates_in_hooks = False

    def step(self) -> Tensor:
        """One step by hand: gradients of all microbatches, then the update, unless hooks make it."""
        parts = [*zip(*(t.chunk(self.accumulate) for t in self.batch), strict=True)]
        losses: list[Tensor] = []
        for i, part in enumerate(parts, 1):
            self.updates_in_hooks = i == len(parts)
            loss = self.loss(*part) / len(parts) if len(parts) > 1 else self.loss(*part)
            loss.backward()
            losses.append(loss.detach())
        if len(self.optimizers) == 1:
            self.optimizers[0].step()
            self.optimizers[0].zero_grad()
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total

    def update_in_hooks(self) -> None:
        """Gives each parameter its own optimizer, which a hook runs when the gradient is complete."""
        self.optimizers = [self.make([p]) for p in self.parameters]
        for parameter, optimizer in zip(self.parameters, self.optimizers, strict=True):

            def update(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                if self.updates_in_hooks:
                    optimizer.step()
                    optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)

    def after(self, step: Step) -> dict[str, list[Tensor]]:
        """Returns the losses of some steps from a fixed seed, and copies of the state after them."""
        torch.manual_seed(SEED)
        losses = [step() for _ in range(STEPS)]
        kept = {p: state for optimizer in self.optimizers for p, state in optimizer.state.items()}
        moments = [v for p in self.parameters for v in kept.get(p, {}).values() if isinstance(v, Tensor)]
        state = [*self.parameters, *self.loss.buffers(), *moments]
        return {"losses": losses, "parameters and state": [t.detach().clone() for t in state]}


# ---- one network ---------------------------------------------------------------------------------


def examine(task: Task, parsed: argparse.Namespace, device: torch.device, advance: Callable[[str], object]) -> Report:
    """Runs all ways to do a step of one network."""
    report = Report(task.name, task.what)
    try:
        report.parameter_bytes = sum(p.nbytes for p in task.loss.parameters())
        report.today_bytes = prepare(task).least_bytes()
        model = Model(task)
        for optimizer in parsed.optimizers:
            for accumulate in parsed.accumulate:
                advance(f"{optimizer}, {accumulate}")
                report.rows += Comparison(task, model, optimizer, accumulate, device).run(parsed.rounds)
    except Exception as error:  # the other networks may work
        report.complaints.append(described(error))
    return report


class Comparison:
    """The ways to do a step, for one optimizer and one number of microbatches."""

    def __init__(self, task: Task, model: Model, optimizer: str, accumulate: int, device: torch.device) -> None:
        self.task, self.model, self.options, self.device = task, model, (optimizer, accumulate), device
        self.rows: list[Way] = []
        self.steps: dict[str, Step] = {}
        """By way."""
        self.expected: dict[str, list[Tensor]] = {}

    def run(self, rounds: int) -> list[Way]:
        """Runs and times all ways."""
        losses = copy.deepcopy(self.task.loss), *(copy.deepcopy(self.task.in_blocks(TorchCheckpoint)) for _ in range(2))
        plain, blocks, hooks = (Trainee(self.task, *self.options, loss) for loss in losses)
        hooks.update_in_hooks()
        self.expected = plain.after(plain.step)
        for way, trainee in (("plain", plain), ("blocks", blocks), ("hooks", hooks)):
            self._add(Way(way, *self.options), trainee, trainee.step)
        self._plan("step, free", None)
        self._plan("step", self.rows[2].peak_bytes)
        self._plan("step, least", 1)
        gc.collect()
        gc.freeze()  # collecting what Dynamo keeps would take longer than the steps
        seconds = alternate(self.steps, rounds=rounds, device=self.device)
        gc.unfreeze()
        for row in (row for row in self.rows if row.way in seconds):
            row.step_seconds = spread(seconds[row.way])
            row.time_ratio = paired_ratio(seconds, row.way, "plain")
            row.time_to_hooks = paired_ratio(seconds, row.way, "hooks")
            row.slower = row.way != "plain" and is_slower(seconds, row.way, "plain")
        return self.rows

    def _add(self, row: Way, trainee: Trainee, step: Step) -> None:
        actual = self.expected if row.way == "plain" else trainee.after(step)
        same = lambda one, other: len(one) == len(other) and all(map(torch.equal, one, other))
        row.unequal = [what for what, values in self.expected.items() if not same(values, actual[what])]
        row.peak_bytes = measure_peak(step, self.device).peak_bytes
        self.rows.append(row)
        self.steps[row.way] = step

    @remembering()
    def _plan(self, way: str, budget: int | None) -> None:
        """Tries a budget, and with "step, least" the least budget that is said to be feasible."""
        row = Way(way, *self.options, budget_bytes=budget)
        trainee = Trainee(self.task, *self.options, self.model.fresh())
        step = self.model.step(trainee.optimizers[0], budget, trainee.accumulate)
        for _ in range(ATTEMPTS):
            try:
                step.plan(trainee.batch)
            except BudgetError as error:
                row.least_bytes = error.least_bytes
                if way == "step":
                    break
                row.budget_bytes = error.least_bytes
                step = step.within(error.least_bytes)  # which may be below what the next search finds
                continue
            self._add(row, trainee, lambda: step(trainee.batch))
            row.predict(step.plan(trainee.batch))
            row.judge()
            return
        row.complaints.append(f"needs {row.least_bytes} bytes")
        self.rows.append(row)


# ---- the script ----------------------------------------------------------------------------------


def show(reports: Sequence[Report], console: Console) -> None:
    """Prints the table of each network."""
    for report in reports:
        sizes = f"parameters {mib(report.parameter_bytes)} MiB, forward and backward alone at least"
        console.print(f"[bold]{report.name}[/]: {report.what}; {sizes} {mib(report.today_bytes)} MiB")
        table = table_of(*COLUMNS, left=COLUMNS[:3:2])
        plain = 1
        for row in report.rows:
            plain = row.peak_bytes or 1 if row.way == "plain" else plain
            times = [str(row.time_ratio or ""), str(row.time_to_hooks or ""), "slower" if row.slower else ""]
            cells = [mib(row.peak_bytes), share(row.peak_bytes, plain), *times, row.same]
            table.add_row(row.optimizer, str(row.accumulate), row.way, *cells, style=row.style)
        console.print(table)


def main(arguments: list[str]) -> int:
    """Runs the bench. Returns 1 if `--check` was asked for and failed, otherwise 0."""
    parser = network_parser("steps", __doc__, "a peak or a result is not as it should be", NETWORKS)
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), metavar="NAME")
    parser.add_argument("--accumulate", nargs="+", type=int, default=[1, 4], metavar="N", help="microbatches")
    parser.add_argument("--resume", action="store_true", help="keep the networks that the JSON has, and run the others")
    parsed = parse_networks(parser, NETWORKS, arguments)
    parsed.optimizers = parsed.optimizers or (["adamw"] if parsed.quick else list(OPTIMIZERS))
    device = set_up(parsed.device)
    console, document = opening("steps", arguments, device)
    size = size_of(device, quick=parsed.quick, tiny=parsed.tiny)
    document["options"] = {"size": size, "rounds": parsed.rounds}

    def run(name: str, advance: Callable[[str], object]) -> list[Report]:
        return [examine(NETWORKS[name].task(size, device), parsed, device, advance)]

    resumed = parsed.resume and parsed.json and parsed.json.exists()
    known = [report for report in read_json(parsed.json)["networks"] if not report["complaints"]] if resumed else []
    done = {report["name"] for report in known}
    names = [name for name in parsed.networks if NETWORKS[name].title not in done]
    count = len(parsed.optimizers) * len(parsed.accumulate)
    note = "Time: relative to the plain step, median and quartiles. n: microbatches."
    return report_each(parsed, (console, document), "networks", names, run, show, note=note, count=count, known=known)
