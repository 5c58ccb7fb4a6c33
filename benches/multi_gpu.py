"""Data parallel training of DenseNet-BC on GPUs or processes: memory and time of PyTorch's methods and of fckpt.

    python -m benches multi_gpu --json benches/results/multi-gpu-cpu.json     # two processes; one for each GPU
    python -m benches multi_gpu --processes 2 --device cuda --check           # two processes, also on a single GPU
    python -m benches multi_gpu --scaling 1 2 4

The network is that of the demonstration of efficient DenseNets in https://github.com/csrhddlam/pytorch-checkpoint. All
methods train it on the same random batch with the same SGD. They run alternately in the same processes (see
`common/timing.py`), which wait for each other before each step.

naive DDP      DistributedDataParallel.
+ layers       and `torch.utils.checkpoint(use_reentrant=False)` around each dense layer;
+ bottlenecks  or around the part of a layer that is cheap to recompute, as in efficient DenseNets.
FSDP2 + ...    both, with `fully_shard` around each dense block instead of DDP: parameters are divided.
fckpt in 57%   `fckpt.remat` of the loss with a plan for 57% of naive DDP's memory, under `fckpt.grad`, with
               `fckpt.pmean` of the gradients, in `fckpt.shard_map`.
fckpt as ...   the same, in the memory of one of PyTorch's methods.

Memory is that of the rank that holds most, time that of the slowest. Processes communicate by NCCL if each has its own
GPU, otherwise by gloo. On two ranks a sum over ranks has one order only, and gradients must be bitwise equal to naive
DDP's; on more ranks they differ by rounding. With `--check` the exit code is 1 if they differ by more, if fckpt takes
more than 57% of the memory or 1.10 of the time of naive DDP, or is slower than another method in its memory.
`--scaling` runs naive DDP and fckpt in 57% on these numbers of processes, with the same batch for each process.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

import fckpt
from benches.common.command import mib, opening, report_each, report_parser, share, table_of
from benches.common.data_parallel import NAIVE
from benches.common.data_parallel_runs import Result, compare
from benches.common.rows import Record
from benches.common.timing import Spread, pick_device

MOST_TIME = 1.10
"""Relative to naive DDP, for "fckpt in 57%"."""
ROUNDING = 1e-4
"""The largest difference of gradients if sums over ranks may have another order; relative to the largest element."""
PATIENCE_SECONDS = 30.0
"""The time for processes to end after one has failed."""


@dataclass
class Scaling(Record):
    """The times of a step on a number of ranks."""

    ranks: int
    naive_seconds: Spread | None
    planned_seconds: Spread | None
    planned_to_naive: Spread | None


# ---- the command line ----------------------------------------------------------------------------


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    check = "fckpt is slower, needs more, or fails"
    parser = report_parser("multi_gpu", __doc__, rounds="31; 2 with --tiny", tiny=True, check=check)
    for name, what in {
        "processes": "default: one for each GPU; two without",
        "batch_size": "images of all processes (default 256; on CPU 16 each)",
        "depth": "4 and a multiple of 6 (default 100; on CPU 40)",
        "growth": "channels that a layer adds (default 12)",
        "threads": "of a process, on CPU (default: an equal part of the cores)",
    }.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=what)
    parser.add_argument("--budget", type=float, metavar="B", help="fraction of naive DDP's memory (default 0.57)")
    parser.add_argument(
        "--scaling", nargs="+", type=int, metavar="N", help="instead: weak scaling over these numbers of processes"
    )
    parsed = parser.parse_args(arguments)
    _fill_in(parsed)
    numbers = ("processes", "batch_size", "growth", "rounds", "threads")
    for wrong, text in (
        (min(*(getattr(parsed, n) for n in numbers), *(parsed.scaling or [1])) < 1, "all numbers are 1 or more"),
        (
            parsed.depth < 10 or (parsed.depth - 4) % 6,
            f"a DenseNet-BC of three blocks has 4 layers and a multiple of 6, not {parsed.depth}",
        ),
        (
            parsed.batch_size % max(parsed.processes, 1),
            f"a batch of {parsed.batch_size} cannot be divided among {parsed.processes} processes",
        ),
        (not 0 < parsed.budget <= 1, "a budget is a part of naive DDP's memory, above 0 and at most 1"),
        (parsed.scaling and "RANK" in os.environ, "--scaling starts its own processes: not under torchrun"),
    ):
        if wrong:
            parser.error(text)
    return parsed


def _fill_in(parsed: argparse.Namespace) -> None:
    """Sets the defaults that depend on the device."""
    parsed.device = pick_device(parsed.device).type
    on_gpus = parsed.device == "cuda" and not parsed.tiny
    if parsed.processes is None:
        ranks = int(os.environ.get("WORLD_SIZE", "0"))  # of torchrun
        parsed.processes = ranks or (parsed.device == "cuda" and torch.cuda.device_count()) or 2
    each = 4 if parsed.tiny else 16
    defaults = {
        "batch_size": 256 if on_gpus else each * parsed.processes,
        "depth": 100 if on_gpus else 10 if parsed.tiny else 40,
        "growth": 4 if parsed.tiny else 12,
        "budget": 0.8 if parsed.tiny else 0.57,  # three layers save little
        "rounds": 2 if parsed.tiny else 31,
        "threads": max(1, (os.cpu_count() or 1) // max(1, *(parsed.scaling or [parsed.processes]))),
    }
    for name, value in defaults.items():
        if getattr(parsed, name) is None:
            setattr(parsed, name, value)


def run(fn: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """Runs a function on all ranks and returns the result of the first: in new processes, except under torchrun."""
    if "RANK" in os.environ:
        return fn(*args)
    # Otherwise the profiler warns of each tensor that is freed but was allocated before it started.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return fckpt.launch(fn, ranks, *args, timeout_seconds=PATIENCE_SECONDS)[0]


# ---- the comparison ------------------------------------------------------------------------------


def check(found: Sequence[Result], ranks: int, fraction: float) -> None:
    """Adds complaints to the rows."""
    rows = {row.name: row for row in found}
    naive = rows[NAIVE]
    for row in found:
        if row.difference > (0 if ranks <= 2 else ROUNDING):
            row.complaints.append(f"gradients differ from those of {NAIVE} by {row.difference:.1e}")
        if row.least_bytes is not None:
            row.complaints.append(f"a step has {row.budget_bytes:,} bytes, and fckpt needs {row.least_bytes:,}")
        if row.predicted_bytes is None or row.time_ratio is None:
            continue
        most = int(fraction * (naive.peak_bytes or 0)) if row.other is None else rows[row.other].peak_bytes
        if (over := (row.peak_bytes or 0) - (most or 0)) > 0:
            row.complaints.append(f"holds {over:,} bytes more than it may")
        if not row.statistics_equal:
            row.complaints.append(f"statistics of BatchNorm are not those of {NAIVE}")
        if row.other is None and row.time_ratio.median > MOST_TIME:
            row.complaints.append(f"takes {row.time_ratio} of the time of {NAIVE}, more than {MOST_TIME:.2f}")
        if row.to_other is not None and row.to_other.median >= 1:
            row.complaints.append(f"takes {row.to_other} of the time of the other method in the same memory")


def show(rows: Sequence[Result], console: Console) -> None:
    """Prints the table of all methods."""
    table = table_of("", "MiB", "of naive", "s", "time", "time of the other", "same", left=["", "same"])
    for row in rows:
        if row.step_seconds is None:
            table.add_row(row.name, *[""] * 5, "refused", style="bold red")
            continue
        same = f"off by {row.difference:.0e}" if row.difference else "yes" if row.statistics_equal else "gradients"
        memory = mib(row.peak_bytes), share(row.peak_bytes, rows[0].peak_bytes or 1)
        times = f"{row.step_seconds.median:.3f}", str(row.time_ratio), str(row.to_other or "")
        table.add_row(row.name, *memory, *times, same, style=row.style)
    console.print(table)


def show_scaling(rows: Sequence[Scaling], console: Console) -> None:
    """Prints the seconds on a number of processes."""
    table = table_of("processes", "naive s", "fckpt s", "fckpt / naive")
    for row in rows:
        assert row.naive_seconds and row.planned_seconds
        seconds = (f"{spread.median:.3f}" for spread in (row.naive_seconds, row.planned_seconds))
        table.add_row(str(row.ranks), *seconds, str(row.planned_to_naive))
    console.print(table)


def main(arguments: list[str]) -> int:
    """Runs the bench. Returns 1 if `--check` was asked for and failed, otherwise 0."""
    parsed = parse(arguments)
    console, document = opening("multi_gpu", arguments, torch.device(parsed.device))
    document["options"] = {name: value for name, value in vars(parsed).items() if name not in ("json", "check")}
    if os.environ.get("RANK", "0") != "0":  # under torchrun, the first rank reports
        compare(parsed)
        return 0
    each = parsed.batch_size // parsed.processes

    def compared(name: str, advance: Callable[[str], object]) -> list[Result]:
        rows = run(compare, parsed.processes, parsed)
        check(rows, parsed.processes, parsed.budget)
        return rows

    def scaled(ranks: str, advance: Callable[[str], object]) -> list[Scaling]:
        setting = argparse.Namespace(**{**vars(parsed), "batch_size": each * int(ranks)})
        naive, planned = run(compare, int(ranks), setting, False)
        refused = [] if planned.least_bytes is None else [f"fckpt needs {planned.least_bytes:,} bytes"]
        times = naive.step_seconds, planned.step_seconds, planned.time_ratio
        return [Scaling(int(ranks), *times, complaints=refused)]

    opened = console, document
    if parsed.scaling:
        note = f"Weak scaling, {each} images for each process of {parsed.threads} threads, {os.cpu_count()} cores."
        names = [str(ranks) for ranks in parsed.scaling]
        return report_each(parsed, opened, "scaling", names, scaled, show_scaling, note=note)
    note = (
        "MiB: everything that a rank holds at once. Time: relative to naive DDP, or to the other method, median and "
        "quartiles of the rounds. Same: gradients and statistics of BatchNorm bitwise equal to naive DDP; PyTorch's "
        "checkpoint updates statistics twice."
    )
    return report_each(parsed, opened, "rows", ["all methods"], compared, show, note=note)
