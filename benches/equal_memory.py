"""Who is faster in equal memory: plans of fckpt, or PyTorch's ways to train in less memory, on eleven networks.

    python -m benches.equal_memory --json benches/results/equal-memory-cpu.json
    python -m benches.equal_memory --device cuda --json benches/results/equal-memory-cuda.json --check
    python -m benches.equal_memory --quick --networks vit gpt2                          # some minutes
    python -m benches.equal_memory --tiny --networks vit --compile-budgets 0.5          # seconds

The methods, one after the other in one process:

plain      eager PyTorch.
torch      `torch.utils.checkpoint(use_reentrant=False)` around each of the network's blocks.
remat      `fckpt.remat` around each block, without a plan.
compile B  `torch.compile` with its min-cut partitioner at `activation_memory_budget` B. The backend is `boxed_nop`,
           which runs the same kernels as eager PyTorch: this compares the choices of what to recompute, not the fusion
           of an inductor. Budgets that lead to the same peak are measured once.

The measured peak of each method is then the budget of `fckpt.remat(step, budget=...)`. Both steps and the plain step
run alternately (see `common/timing.py`). One is called faster or slower if both quartiles of the ratios are on one side
of 1. A network is priced once, without a cache. With `--check` the exit code is 1 if fckpt is slower than a method in
its memory, needs more memory, or anything fails.
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
from benches.common.command import (
    conclude,
    described,
    each_network,
    in_mib,
    mib,
    network_parser,
    opening,
    rounds_of,
    table_of,
)
from benches.common.timing import Spread, alternate, paired_ratio, set_up
from benches.common.training import Outcome, Prepared, Task, buffers_of, outcome_of, prepare, size_of, step_of, unequal
from benches.models.budget_networks import NETWORKS
from benches.models.wrapping import TorchCheckpoint
from fckpt._memory import measure_peak
from fckpt.errors import BudgetError

COMPILE_BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


# ---- the methods ---------------------------------------------------------------------------------


def methods(task: Task, budgets: Sequence[float]) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Yields names, and functions that make a variant of `task.loss` with the same parameters."""
    yield "plain", lambda: task.loss
    for name, wrap in (("torch", TorchCheckpoint), ("remat", fckpt.remat)):
        yield name, lambda wrap=wrap: task.in_blocks(wrap)
    for budget in budgets:
        yield f"compile {budget}", lambda b=budget: _compiled(task, b)


def _compiled(task: Task, budget: float) -> nn.Module:
    """Compiles with the min-cut partitioner, and without a code generator."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch import config

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        partition_fn=min_cut_rematerialization_partition,
        # Otherwise BatchNorm's statistics are changed after they were saved for the backward pass, which is an error.
        keep_inference_input_mutations=True,
    )
    model: Any = torch.compile(task.loss, backend=backend, dynamic=False)
    with config.patch(activation_memory_budget=budget):
        step_of(model, task)()  # compiles forward and backward
    return model


# ---- one network ---------------------------------------------------------------------------------


@dataclass
class Pair:
    """A method, and fckpt with the method's peak as its budget."""

    method: str
    peak_bytes: int = 0
    set_up_seconds: float = 0.0
    """To wrap or compile it, including its first step."""
    bitwise: bool = True
    """Whether the method's results equal those of the plain step."""
    to_plain: Spread | None = None
    """The time of the method's step relative to the plain step."""
    least_bytes: int | None = None
    """If fckpt refuses that budget: the least budget that is feasible."""
    predicted_bytes: int | None = None
    planned_bytes: int | None = None
    planned_bitwise: bool | None = None
    planned_to_plain: Spread | None = None
    ratio: Spread | None = None
    """The time of fckpt's step relative to the method's."""
    solve_seconds: float = 0.0
    verdict: str = ""
    same_peak: list[str] = field(default_factory=list)
    """Other methods with the same peak, which were not measured again."""
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
        """Yields the complaints; those of a pair begin with its method."""
        yield from self.complaints
        for pair in self.pairs:
            yield from (f"{pair.method}: {text}" for text in pair.complaints)


@dataclass(frozen=True)
class _Network:
    """What all pairs of a network share."""

    task: Task
    prepared: Prepared
    buffers: list[Tensor]
    plain: Outcome
    rounds: int
    device: torch.device


def examine(
    task: Task, budgets: Sequence[float], *, rounds: int, device: torch.device, advance: Callable[[str], object]
) -> Report:
    """Compares fckpt with every method on one network."""
    report = Report(task.name, task.what)
    buffers = buffers_of(task.loss)
    network = _Network(task, prepare(task), buffers, outcome_of(task.loss, task, buffers), rounds, device)
    report.plan_seconds = network.prepared.trace_seconds + network.prepared.price_seconds
    for name, make in methods(task, budgets):
        advance(name)
        pair = Pair(name)
        try:
            _examine_pair(network, report, pair, make)
        except Exception as error:  # the other methods may work
            pair.complaints.append(described(error))
            report.pairs.append(pair)
        gc.collect()
    if budgets:
        torch._dynamo.reset()
    return report


def _examine_pair(network: _Network, report: Report, pair: Pair, make: Callable[[], nn.Module]) -> None:
    task, device = network.task, network.device
    start = time.perf_counter()
    model = make()
    step = step_of(model, task)
    step()
    pair.set_up_seconds = time.perf_counter() - start
    pair.peak_bytes = measure_peak(step, device).peak_bytes
    for other in report.pairs:
        if _is_compiled(pair) and _is_compiled(other) and other.peak_bytes == pair.peak_bytes:
            other.same_peak.append(pair.method)
            return
    report.pairs.append(pair)
    pair.bitwise = not unequal(network.plain, outcome_of(model, task, network.buffers))
    steps = {"plain": step_of(task.loss, task), "method": step}
    if pair.method == "plain":
        del steps["method"]
    planned = _planned(network, pair)
    if planned is not None:
        steps["planned"] = step_of(planned, task)
    seconds = alternate(steps, rounds=network.rounds, device=device)
    subject = "method" if "method" in steps else "plain"
    pair.to_plain = paired_ratio(seconds, subject, "plain")
    if planned is not None:
        pair.planned_to_plain = paired_ratio(seconds, "planned", "plain")
        pair.ratio = paired_ratio(seconds, "planned", subject)
    _judge(pair)


def _is_compiled(pair: Pair) -> bool:
    return pair.method.startswith("compile")


def _planned(network: _Network, pair: Pair) -> nn.Module | None:
    start = time.perf_counter()
    try:
        plan = network.prepared.plan(pair.peak_bytes)
    except BudgetError as error:
        pair.least_bytes = error.least_bytes
        return None
    finally:
        pair.solve_seconds = time.perf_counter() - start
    pair.predicted_bytes = plan.peak_bytes
    planned = fckpt.remat(network.task.loss, plan=plan)
    pair.planned_bitwise = not unequal(network.plain, outcome_of(planned, network.task, network.buffers))
    pair.planned_bytes = measure_peak(step_of(planned, network.task), network.device).peak_bytes
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
    """Prints the table of one network."""
    console.print(f"[bold]{report.name}[/]: {report.what}", highlight=False)
    columns = ("method", "MiB", "time", "same", "fckpt MiB", "time", "fckpt / it", "fckpt is")
    table = table_of(*columns, left=["method", "fckpt is"])
    for pair in report.pairs:
        more = f" +{len(pair.same_peak)}" if pair.same_peak else ""
        planned = pair.planned_bytes if pair.planned_bytes is not None else pair.least_bytes
        table.add_row(
            pair.method + more,
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
    parser = network_parser("equal_memory", __doc__, "exit 1 if fckpt is slower, needs more, or fails", NETWORKS)
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
    logging.getLogger("torch").setLevel(logging.ERROR)  # the partitioner warns at each memory budget
    console, document = opening("equal_memory", arguments, device)
    size = size_of(device, quick=parsed.quick, tiny=parsed.tiny)
    budgets: list[float] = parsed.compile_budgets
    document["options"] = {"size": size, "compile_budgets": budgets, "rounds": parsed.rounds}

    def try_to(name: str, advance: Callable[[str], object]) -> Report:
        task = NETWORKS[name].task(size, device)
        try:
            return examine(task, budgets, rounds=parsed.rounds, device=device, advance=advance)
        except Exception as error:  # the other networks may work
            return Report(task.name, task.what, complaints=[described(error)])

    reports = each_network(parsed, document, NETWORKS, 3 + len(budgets), try_to, show, console)
    console.print(
        "Time: relative to the plain step, median. Same: bitwise equal to the plain step. +n: n smaller budgets have "
        "the same peak. fckpt / it: ratios of the rounds, median and quartiles.",
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
