"""Eighteen networks: the checkpoints of Feng & Huang, compared with plans in the same memory and in the same time.

    python -m benches networks --planned --json benches/results/networks-planned.json      # nothing is run
    python -m benches networks --json benches/results/networks-cpu.json --check
    python -m benches networks --device cuda --json benches/results/networks-cuda.json --check
    python -m benches networks --tiny --networks resnet18 --points 2                       # seconds

The networks are those of `models/published_networks.py`; a step is forward, cross-entropy and backward to all
parameters. With `--planned` they have the batch and the images of the paper and lie on the meta device, and the times
come from a GPU's data sheet (`--profile`). Otherwise the steps are run: on a GPU in those sizes, on a CPU in smaller
ones. The methods, for each network:

plain     eager PyTorch.
torch     `torch.utils.checkpoint` around each block. Its prediction is a schedule that recomputes whole blocks.
ogc       the checkpoints of Feng & Huang, which take no budget. Their memory is the budget of the next methods.
rotor, torch_dp, ...   other solvers (`--solvers`); torch_dp is the knapsack of `torch.compile`.
auto      in the same memory; in half of it; and in the least memory in which it takes no longer than ogc.

A plan and the plain step are run alternately (see `common/timing.py`), and compared bitwise. The curve of `auto` is in
the JSON.

Memory is counted as in the paper: the peak above weights and gradients of a step that adds to the gradients of the
previous step, as autograd does one by one. Plans are made for that count (`network_plans.accumulating`), and the
allocator confirms it for plain and torch. A plan of fckpt returns all gradients at once, and is run without existing
gradients: `step MiB` is the peak of that above the weights, measured if it was run. It is at most the paper's count
plus the gradients. The published figures also contain the batch and its gradient, which a training step does not have.

With `--check` the exit code is 1 if a peak exceeds its budget or is not as predicted, a gradient is not bitwise equal,
or `auto` misses a target: in ogc's memory at most half of its overhead, and with its overhead at most 0.75 of its
memory. A target also counts as met if it is proven to be impossible and `auto` is within 5% of the proven bound.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from torch import nn

import fckpt
from benches.common.command import described, mib, network_parser, opening, parse_networks, report_each, table_of
from benches.common.network_plans import Method, Point, Report, curve_of, plan_all, price, targets_of
from benches.common.results import read_json
from benches.common.rows import deviation, different
from benches.common.timing import alternate, paired_ratio, set_up, spread
from benches.common.torch_knapsack import TORCHS
from benches.common.training import Task, buffers_of, outcome_of, step_of, unequal
from benches.models.published_networks import NETWORKS
from benches.models.wrapping import TorchCheckpoint
from fckpt import solve
from fckpt._memory import measure_peak
from fckpt.cost import Analytic, Measured, profile_of, profiles

OTHERS = ("rotor", "torch_dp")


# ---- measuring -----------------------------------------------------------------------------------


def run_all(task: Task, methods: Sequence[Method], rounds: int, device: torch.device) -> None:
    """Measures peaks and times, and compares the results with the plain step."""
    task.loss.zero_grad(set_to_none=True)
    step_of(task.loss, task)()  # so that every library has allocated its permanent memory
    buffers = buffers_of(task.loss)
    plain = outcome_of(task.loss, task, buffers)
    steps: dict[str, Callable[[], object]] = {}
    modules: dict[str, Callable[[], nn.Module]]
    modules = {"plain": lambda: task.loss, "torch": lambda: task.in_blocks(TorchCheckpoint)}
    for point, plan in methods:
        if point.predicted_bytes is None:
            continue
        module = modules[point.solver]() if plan is None else fckpt.remat(task.loss, plan=plan)
        found = unequal(plain, outcome_of(module, task, buffers))
        # PyTorch's checkpoint updates BatchNorm's statistics twice.
        point.unequal = [what for what in found if point.solver != "torch" or not what.startswith("buffer")]
        point.measured_step_bytes = measure_peak(step_of(module, task), device).peak_bytes
        if plan is None:
            point.peak_bytes = _accumulating_peak(module, task, device)
        steps[point.title] = step_of(module, task)
    seconds = alternate(steps, rounds=rounds, device=device)
    for point, _ in methods:
        if point.title in seconds:
            point.time_ratio = paired_ratio(seconds, point.title, "plain")
            point.step_seconds = spread(seconds[point.title])


def _accumulating_peak(module: nn.Module, task: Task, device: torch.device) -> int:
    """Returns the measured peak of a step that adds to existing gradients."""

    def step() -> None:
        module(task.inputs, task.labels).backward()

    step()
    peak = measure_peak(step, device).peak_bytes
    module.zero_grad(set_to_none=True)
    return peak


# ---- one network ---------------------------------------------------------------------------------


def examine(parsed: argparse.Namespace, name: str, advance: Callable[[str], object]) -> Report:
    """Plans one network with every method, and runs it."""
    network = NETWORKS[name]
    task = network.task(parsed.size, parsed.device)
    published = network.published
    figures = {**published._asdict(), "cut": published.cut, "overhead": published.overhead}
    report = Report(name, task.name, task.what, figures)
    try:
        _examine(task, report, parsed, advance)
    except Exception as error:  # the other networks may work
        report.complaints.append(described(error))
    return report


def _examine(task: Task, report: Report, parsed: argparse.Namespace, advance: Callable[[str], object]) -> None:
    start = time.perf_counter()
    step = price(task, parsed.costs, parsed.solver)
    report.trace_seconds = time.perf_counter() - start
    report.nodes = len(step.graph.nodes)
    report.gradient_bytes = sum(p.nbytes for p in task.loss.parameters() if p.requires_grad)
    report.predicted_seconds = step.graph.seconds
    methods = plan_all(step, report, parsed.solvers, advance)
    report.points = [point for point, _ in methods]
    if parsed.points > 1:
        advance("curve")
        most = report.points[0].predicted_bytes
        assert report.least_bytes is not None
        assert most is not None
        report.curve = curve_of(step, report.least_bytes, most, parsed.points)
    if not parsed.planned:
        advance("run")
        run_all(task, methods, parsed.rounds, parsed.device)
        for point in report.points:
            _judge(point, report.gradient_bytes)
    report.targets = targets_of(step, report)


def _judge(point: Point, gradient_bytes: int) -> None:
    if point.solver != "torch":  # the prediction for torch's checkpoint is a model
        point.complaints += deviation(point.predicted_bytes, point.peak_bytes)
        point.complaints += deviation(point.predicted_step_bytes, point.measured_step_bytes)
    if point.budget_bytes is not None and point.measured_step_bytes is not None:
        over = point.measured_step_bytes - gradient_bytes - point.budget_bytes
        if over > 0:
            point.complaints.append(f"peaks {over:,} bytes above its budget")
    point.complaints += different(point.unequal)


# ---- the script ----------------------------------------------------------------------------------


def show(reports: Sequence[Report], console: Console) -> None:
    """Prints the table of each network."""
    for report in reports:
        console.print(f"[bold]{report.title}[/]: {report.what}; {report.nodes} operations")
        columns = ("MiB", "cut", "extra", "bound", "time", "step MiB", "same")
        table = table_of("method", *columns, left=["method"])
        for point in report.points:
            table.add_row(*_cells(point, report), style=point.style)
        console.print(table)
        published = report.published
        console.print(
            f"published: {published['plain_megabytes']} MB, ogc {published['ogc_megabytes']} MB "
            f"(-{published['cut']:.0%}) for {published['overhead']:.0%} more time; gradients "
            f"{mib(report.gradient_bytes)} MiB; least {mib(report.least_bytes)}, proven {mib(report.floor_bytes)}",
            style="dim",
            soft_wrap=True,
        )
        for name, target in report.targets.items():
            console.print(f"{name}: {target}", style="dim")


def _cells(point: Point, report: Report) -> list[str]:
    if point.bytes is None:
        return [point.title, f"least {mib(point.least_bytes)}", *[""] * 6]
    measured = point.measured_step_bytes is not None
    return [
        point.title,
        mib(point.bytes),
        f"{1 - point.bytes / (report.points[0].bytes or 1):.0%}",
        f"{point.predicted_overhead:.3f}",
        "" if point.lower_bound is None else f"{point.lower_bound:.3f}",
        str(point.time_ratio or ""),
        mib(point.measured_step_bytes if measured else point.predicted_step_bytes),
        ("NO" if point.unequal else "yes") if measured else "",
    ]


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = network_parser("networks", __doc__, "a peak or a gradient is wrong, or a target is missed", NETWORKS)
    parser.add_argument("--planned", action="store_true", help="the paper's sizes on the meta device; nothing is run")
    parser.add_argument("--profile", default="H100", choices=[name for name in profiles if name != "cpu"])
    others = f"other solvers; default: {', '.join(OTHERS)}"
    known = [*solve.names(), *TORCHS]
    parser.add_argument("--solvers", nargs="*", choices=known, metavar="NAME", default=OTHERS, help=others)
    ours = "the solver to compare with them; default: auto"
    parser.add_argument("--solver", choices=solve.names(), default="auto", help=ours)
    resume = "continue after the networks in the JSON file: all take an hour"
    parser.add_argument("--resume", action="store_true", help=resume)
    parser.add_argument("--points", type=int, default=8, metavar="N", help="points of auto's curve; 0 for none")
    parsed = parse_networks(parser, NETWORKS, arguments)
    parsed.device = torch.device("meta") if parsed.planned else set_up(parsed.device)
    parsed.costs = Analytic(profile_of(parsed.profile)) if parsed.planned else Measured(cache=False)
    parsed.size = "tiny" if parsed.tiny else "cpu" if parsed.device.type == "cpu" else "paper"
    return parsed


def main(arguments: list[str]) -> int:
    """Runs the bench. Returns 1 if `--check` was asked for and failed, otherwise 0."""
    parsed = parse(arguments)
    console, document = opening("networks", arguments, parsed.device)
    options = {"size": parsed.size, "solver": parsed.solver, "solvers": list(parsed.solvers), "points": parsed.points}
    document["options"] = options | ({"profile": parsed.profile} if parsed.planned else {"rounds": parsed.rounds})
    resumed = parsed.resume and parsed.json and parsed.json.exists()
    known = read_json(parsed.json)["networks"] if resumed else []
    done = {report["network"] for report in known}
    names = [name for name in parsed.networks if name not in done]
    note = (
        "MiB: peak above weights and gradients, as in the paper. Cut: relative to plain. Extra: predicted time of "
        "recomputations, relative to the plain step. Bound: a proven lower bound on it. Time: relative to the plain "
        "step, median and quartiles of the rounds. Step MiB: peak above the weights, of a step that begins without "
        "gradients (measured if it was run). Same: bitwise equal."
    )
    count = len(parsed.solvers) + 3 + (parsed.points > 1) + (not parsed.planned)  # see `plan_all` for the three
    run = lambda name, advance: [examine(parsed, name, advance)]
    return report_each(parsed, (console, document), "networks", names, run, show, note=note, count=count, known=known)
