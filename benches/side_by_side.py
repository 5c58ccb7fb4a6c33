"""Who is faster in the same memory: fckpt's plans, against PyTorch's own ways to train in less.

    python -m benches.side_by_side --json benches/results/side-by-side-cpu.json
    python -m benches.side_by_side --device cuda --json benches/results/side-by-side-cuda.json --check
    python -m benches.side_by_side --quick --networks vit gpt2                          # some minutes
    python -m benches.side_by_side --tiny --networks vit --compile-budgets 0.5          # seconds

For each network of `zoo.py`, one after the other in one process:

plain      eager PyTorch.
torch      `torch.utils.checkpoint(use_reentrant=False)` around each of the network's blocks.
remat      `fckpt.remat` around each of them, without a plan.
compile B  `torch.compile` with its min-cut partitioner at `activation_memory_budget` B. What the partitioner leaves is
           run by the same kernels as eager PyTorch (the backend is `boxed_nop`): what is compared is who recomputes
           what, not the fusion of an inductor. Budgets that lead to the same peak are measured once.

The measured peak of each is then the budget of `fckpt.remat(step, budget=...)`, and the two steps run in turn, with the
plain one between them (see `timing.py`). Faster or slower is said where the quartiles of the quotients are on one side
of 1. The network is planned once, with nothing cached. With `--check` the exit code is 1 if fckpt is slower than
another in that one's memory, needs more, or anything fails.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import fckpt
from benches.models import TorchCheckpoint
from benches.promise import Outcome, Prepared, buffers_of, outcome_of, prepare, step_of, unequal
from benches.script import conclude, described, each_network, in_mib, network_parser, opening, rounds_of, table_of
from benches.task import Task, size_of
from benches.timing import Spread, alternate, mib, paired_ratio, set_up
from benches.zoo import NETWORKS
from fckpt._memory import measure_peak
from fckpt.errors import BudgetError

COMPILE_BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


# ---- the others ----------------------------------------------------------------------------------


def contenders(task: Task, budgets: Sequence[float]) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Yields names, and functions that make a module like `task.loss` which shares its parameters."""
    yield "plain", lambda: task.loss
    for name, wrap in (("torch", TorchCheckpoint), ("remat", fckpt.remat)):
        yield name, lambda wrap=wrap: task.in_blocks(wrap)
    for budget in budgets:
        yield f"compile {budget}", lambda b=budget: _compiled(task, b)


def _compiled(task: Task, budget: float) -> nn.Module:
    """Compiles with the min-cut partitioner, and without a code generator behind it."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch import config

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        partition_fn=min_cut_rematerialization_partition,
        # Otherwise BatchNorm's statistics are written after they were saved for backward, which torch then refuses.
        keep_inference_input_mutations=True,
    )
    model: Any = torch.compile(task.loss, backend=backend, dynamic=False)
    with config.patch(activation_memory_budget=budget):
        step_of(model, task)()  # compiles forward and backward
    return model


# ---- one network ---------------------------------------------------------------------------------


@dataclass
class Pair:
    """One contender, and fckpt with a budget of that contender's peak."""

    contender: str
    peak_bytes: int = 0
    set_up_seconds: float = 0.0
    """To wrap or compile it, its first step included."""
    bitwise: bool = True
    """Whether the contender's results are those of the plain step."""
    to_plain: Spread | None = None
    """The contender's step over the plain one."""
    least_bytes: int | None = None
    """Where fckpt refuses that budget: the least that would do."""
    predicted_bytes: int | None = None
    planned_bytes: int | None = None
    planned_bitwise: bool | None = None
    planned_to_plain: Spread | None = None
    ratio: Spread | None = None
    """fckpt's step over the contender's."""
    solve_seconds: float = 0.0
    verdict: str = ""
    same_peak: list[str] = field(default_factory=list)
    """Other contenders with the same peak, which were not measured again."""
    complaints: list[str] = field(default_factory=list)


@dataclass
class Report:
    """All pairs of one network."""

    name: str
    what: str
    plan_seconds: float = 0.0
    """To trace and to price the step."""
    pairs: list[Pair] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def everything_wrong(self) -> Iterator[str]:
        """Yields the complaints, those of the pairs with their contenders."""
        yield from self.complaints
        for pair in self.pairs:
            yield from (f"{pair.contender}: {text}" for text in pair.complaints)


@dataclass(frozen=True)
class _Bench:
    """What all pairs of a network have in common."""

    task: Task
    prepared: Prepared
    buffers: list[Tensor]
    plain: Outcome
    rounds: int
    device: torch.device


def examine(
    task: Task, budgets: Sequence[float], *, rounds: int, device: torch.device, advance: Callable[[str], object]
) -> Report:
    """Compares fckpt with every contender on one network."""
    report = Report(task.name, task.what)
    buffers = buffers_of(task.loss)
    bench = _Bench(task, prepare(task), buffers, outcome_of(task.loss, task, buffers), rounds, device)
    report.plan_seconds = bench.prepared.trace_seconds + bench.prepared.price_seconds
    for name, make in contenders(task, budgets):
        advance(name)
        pair = Pair(name)
        try:
            _examine_pair(bench, report, pair, make)
        except Exception as error:  # what fails with one contender may work with the next
            pair.complaints.append(described(error))
            report.pairs.append(pair)
        gc.collect()
    if budgets:
        torch._dynamo.reset()
    return report


def _examine_pair(bench: _Bench, report: Report, pair: Pair, make: Callable[[], nn.Module]) -> None:
    task, device = bench.task, bench.device
    start = time.perf_counter()
    model = make()
    step = step_of(model, task)
    step()
    pair.set_up_seconds = time.perf_counter() - start
    pair.peak_bytes = measure_peak(step, device).peak_bytes
    for other in report.pairs:
        if _is_compiled(pair) and _is_compiled(other) and other.peak_bytes == pair.peak_bytes:
            other.same_peak.append(pair.contender)
            return
    report.pairs.append(pair)
    pair.bitwise = not unequal(bench.plain, outcome_of(model, task, bench.buffers))
    steps = {"plain": step_of(task.loss, task), "contender": step}
    if pair.contender == "plain":
        del steps["contender"]
    planned = _planned(bench, pair)
    if planned is not None:
        steps["planned"] = step_of(planned, task)
    seconds = alternate(steps, rounds=bench.rounds, device=device)
    subject = "contender" if "contender" in steps else "plain"
    pair.to_plain = paired_ratio(seconds, subject, "plain")
    if planned is not None:
        pair.planned_to_plain = paired_ratio(seconds, "planned", "plain")
        pair.ratio = paired_ratio(seconds, "planned", subject)
    _judge(pair)


def _is_compiled(pair: Pair) -> bool:
    return pair.contender.startswith("compile")


def _planned(bench: _Bench, pair: Pair) -> nn.Module | None:
    start = time.perf_counter()
    try:
        plan = bench.prepared.plan(pair.peak_bytes)
    except BudgetError as error:
        pair.least_bytes = error.least_bytes
        return None
    finally:
        pair.solve_seconds = time.perf_counter() - start
    pair.predicted_bytes = plan.peak_bytes
    planned = fckpt.remat(bench.task.loss, plan=plan)
    pair.planned_bitwise = not unequal(bench.plain, outcome_of(planned, bench.task, bench.buffers))
    pair.planned_bytes = measure_peak(step_of(planned, bench.task), bench.device).peak_bytes
    return planned


def _judge(pair: Pair) -> None:
    if pair.ratio is None or pair.planned_bytes is None:
        pair.verdict = "refused"
        pair.complaints.append(f"peaks at {mib(pair.peak_bytes)}, and fckpt needs {mib(pair.least_bytes or 0)}")
        return
    pair.verdict = "faster" if pair.ratio.high < 1 else "slower" if pair.ratio.low > 1 else "even"
    if pair.verdict == "slower":
        pair.complaints.append(f"fckpt takes {pair.ratio} of its time in the same memory")
    if pair.planned_bytes > pair.peak_bytes:
        pair.complaints.append(f"fckpt peaks {pair.planned_bytes - pair.peak_bytes:,} bytes higher")
    if not pair.planned_bitwise:
        pair.complaints.append("fckpt's results are not bitwise those of the plain step")


# ---- the script ----------------------------------------------------------------------------------


def show(report: Report, console: Console) -> None:
    """Prints one network's table, and what is wrong with it."""
    console.print(f"[bold]{report.name}[/]: {report.what}", highlight=False)
    columns = ("contender", "MiB", "time", "same", "fckpt MiB", "time", "fckpt / it", "fckpt is")
    table = table_of(*columns, left=["contender", "fckpt is"])
    for pair in report.pairs:
        more = f" +{len(pair.same_peak)}" if pair.same_peak else ""
        planned = pair.planned_bytes if pair.planned_bytes is not None else pair.least_bytes
        table.add_row(
            pair.contender + more,
            in_mib(pair.peak_bytes),
            f"{pair.to_plain.median:.2f}" if pair.to_plain else "",
            "yes" if pair.bitwise else "no",
            in_mib(planned) if planned is not None else "",
            f"{pair.planned_to_plain.median:.2f}" if pair.planned_to_plain else "",
            str(pair.ratio or ""),
            pair.verdict or "error",
            style="bold red" if pair.complaints else None,
        )
    console.print(table)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = network_parser("side_by_side", __doc__, "exit 1 if fckpt is slower, needs more, or fails", NETWORKS)
    parser.add_argument(
        "--compile-budgets", nargs="*", type=float, metavar="B", default=COMPILE_BUDGETS, help="from 0 to 1"
    )
    parsed = parser.parse_args(arguments)
    parsed.rounds = rounds_of(parsed)
    return parsed


def main(arguments: list[str] | None = None) -> int:
    """Runs the bench. Returns 1 if `--check` was asked for and failed, otherwise 0."""
    parsed = parse(arguments)
    device = set_up(parsed.device)
    logging.getLogger("torch").setLevel(logging.ERROR)  # the partitioner warns of each memory budget
    console, document = opening("side_by_side", arguments, device)
    size = size_of(device, quick=parsed.quick, tiny=parsed.tiny)
    budgets: list[float] = parsed.compile_budgets
    document["options"] = {"size": size, "compile_budgets": budgets, "rounds": parsed.rounds}

    def try_to(name: str, advance: Callable[[str], object]) -> Report:
        task = NETWORKS[name].task(size, device)
        try:
            return examine(task, budgets, rounds=parsed.rounds, device=device, advance=advance)
        except Exception as error:  # the next network may do
            return Report(task.name, task.what, complaints=[described(error)])

    reports = each_network(parsed, document, NETWORKS, 3 + len(budgets), try_to, show, console)
    console.print(
        "Time: to the plain step, the median. Same: bitwise like the plain step. +n: so many smaller budgets have the "
        "same peak. fckpt / it: within a round, the median and its interquartile range.",
        style="dim",
    )
    _summarise(reports, console)
    return conclude(parsed, reports, console)


def _summarise(reports: Sequence[Report], console: Console) -> None:
    verdicts = [pair.verdict or "error" for report in reports for pair in report.pairs]
    counts = ", ".join(f"{verdict}: {verdicts.count(verdict)}" for verdict in dict.fromkeys(sorted(verdicts)))
    console.print(f"fckpt in the memory of another: {counts}.", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
