"""Data parallel training of DenseNet-BC on GPUs or processes: memory and time of PyTorch's methods and of fckpt.

    python -m benches.multi_gpu --json benches/results/multi-gpu-cpu.json     # two processes; one for each GPU
    python -m benches.multi_gpu --processes 2 --device cuda --check           # two processes, also on a single GPU
    python -m benches.multi_gpu --scaling 1 2 4
    python -m benches.multi_gpu --efficient --data ~/data --save model --batch_size 256 --epochs 3

The comparison follows the demonstration of efficient DenseNets in https://github.com/csrhddlam/pytorch-checkpoint,
which ran on two GPUs. All methods train the same network on the same batch with the same SGD. They run alternately in
the same processes (see `common/timing.py`), which wait for each other before each step.

naive DDP      DistributedDataParallel.
+ layers       and `torch.utils.checkpoint(use_reentrant=False)` around each dense layer;
+ bottlenecks  or around the part of a layer that is cheap to recompute, as in efficient DenseNets.
FSDP2 + ...    both, with `fully_shard` around each dense block instead of DDP: parameters are divided.
DataParallel   with the reentrant checkpoint around bottlenecks, as in that demonstration: the threads of one process
               run the GPUs. Needs two of them.
fckpt in 57%   `fckpt.remat` of the loss with a plan for 57% of naive DDP's memory, under `fckpt.grad`, with
               `fckpt.pmean` of the gradients, in `fckpt.shard_map`.
fckpt as ...   the same, in the memory of one of PyTorch's methods.

Memory is that of the rank that holds most, time that of the slowest. Processes communicate by NCCL if each has its own
GPU, otherwise by gloo. On two ranks a sum over ranks has one order only, and gradients must be bitwise equal to naive
DDP's; on more ranks they differ by rounding. With `--check` the exit code is 1 if they differ by more, if fckpt takes
more than 57% of the memory or 1.10 of the time of naive DDP, or is slower than another method in its memory.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from rich.console import Console

import fckpt
from benches.common.command import DEVICE, in_mib, mib, opening, report_parser, table_of
from benches.common.data_parallel import NAIVE, NEEDS_GPUS, Setting
from benches.common.data_parallel_runs import PLANNED_AS, Epoch, Report, Row, ScalingRow, compare, time_scaling, train
from benches.common.results import write_json
from benches.common.timing import pick_device

MOST_TIME = 1.10
"""Relative to naive DDP, for "fckpt in 57%"."""
ROUNDING = 1e-4
"""The largest difference of gradients if sums over ranks may have another order; relative to the largest element."""
PATIENCE_SECONDS = 30.0
"""The time for processes to end after one has failed."""
PUBLISHED = {NAIVE: (5.25, 0.27), NEEDS_GPUS: (2.98, 1.41), "fckpt": (2.97, 0.31)}
"""Gigabytes and seconds that pytorch-checkpoint published, for two GPUs of 2018 and a batch of 256: naive, PyTorch's
reentrant checkpoint, and pytorch-checkpoint, in the row of fckpt."""


# ---- the command line ----------------------------------------------------------------------------


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = report_parser("multi_gpu", __doc__)
    yes = {"nargs": "?", "const": True, "default": False, "type": _truth, "metavar": "True"}
    parser.add_argument("--processes", type=int, metavar="N", help="default: one for each GPU; two without")
    parser.add_argument("--device", choices=["cpu", "cuda"], help=DEVICE.replace(", cuda:1, ...", ""))
    parser.add_argument("--data", metavar="FOLDER", help="of CIFAR-10's python version; default: random images")
    parser.add_argument(
        "--batch_size", "--batch-size", type=int, metavar="N", help="of all processes (default 256; on CPU 16 each)"
    )
    parser.add_argument("--depth", type=int, help="4 and a multiple of 6 (default 100; on CPU 40)")
    parser.add_argument("--growth", type=int, help="channels that a layer adds (default 12)")
    parser.add_argument("--budget", type=float, metavar="B", help="fraction of naive DDP's memory (default 0.57)")
    parser.add_argument("--rounds", type=int, metavar="N", help="timed steps of each kind (default 31)")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="of a process, on CPU (default: an equal part of the cores)"
    )
    parser.add_argument("--tiny", action="store_true", help="a very small network, for a try")
    parser.add_argument("--check", action="store_true", help="exit 1 if fckpt is slower, needs more, or fails")
    parser.add_argument(
        "--scaling", nargs="+", type=int, metavar="N", help="instead: weak scaling over these numbers of processes"
    )
    parser.add_argument("--efficient", **yes, help="instead: train with fckpt, and show the loss")
    parser.add_argument("--save", metavar="FOLDER", help="with --efficient: save the model there, and continue from it")
    parser.add_argument("--epochs", type=int, default=1, metavar="N", help="with --efficient (default 1)")
    parsed = parser.parse_args(arguments)
    _fill_in(parsed)
    if wrong := next(_mistakes(parsed), None):
        parser.error(wrong)
    return parsed


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"True or False, not {text}")
    return text.lower() == "true"


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


def _mistakes(parsed: argparse.Namespace) -> Iterator[str]:
    numbers = ("processes", "batch_size", "growth", "rounds", "threads", "epochs")
    if min(getattr(parsed, name) for name in numbers) < 1 or min(parsed.scaling or [1]) < 1:
        yield "numbers of processes, images, channels, rounds, threads and epochs are 1 or more"
    if parsed.depth < 10 or (parsed.depth - 4) % 6:
        yield f"a DenseNet-BC of three blocks has 4 layers and a multiple of 6, not {parsed.depth}"
    if parsed.batch_size % parsed.processes:
        yield f"a batch of {parsed.batch_size} cannot be divided among {parsed.processes} processes"
    if not 0 < parsed.budget <= 1:
        yield "a budget is a part of naive DDP's memory, above 0 and at most 1"
    if parsed.save and not parsed.efficient:
        yield "--save is for --efficient: the comparison keeps no model"
    if parsed.efficient and parsed.scaling:
        yield "--efficient trains, --scaling measures: one of them"
    if parsed.scaling and "RANK" in os.environ:
        yield "--scaling starts processes of its own: not under torchrun"


def setting_of(parsed: argparse.Namespace) -> Setting:
    """Returns the setting for the processes."""
    return Setting(
        depth=parsed.depth,
        growth=parsed.growth,
        batch=parsed.batch_size,
        device=parsed.device,
        threads=parsed.threads,
        fraction=parsed.budget,
        rounds=parsed.rounds,
        data=parsed.data,
        search_seconds=1.0 if parsed.tiny else None,
    )


def run(fn: Any, ranks: int, *args: Any) -> Any:
    """Runs a function on all ranks and returns the result of the first: in new processes, except under torchrun."""
    if "RANK" in os.environ:
        return fn(*args)
    # Otherwise the profiler warns of each tensor that is freed but was allocated before it started.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return fckpt.launch(fn, ranks, *args, timeout_seconds=PATIENCE_SECONDS)[0]


# ---- the comparison ------------------------------------------------------------------------------


def check(report: Report, ranks: int, fraction: float) -> None:
    """Adds complaints to the rows."""
    rows = {row.name: row for row in report.rows}
    naive = rows[NAIVE]
    for row in report.rows:
        exact = ranks <= 2 and row.name != NEEDS_GPUS
        if row.difference > (0 if exact else ROUNDING):
            row.complaints.append(f"gradients differ from those of {NAIVE} by {row.difference:.1e}")
        if row.least_bytes is not None:
            row.complaints.append(f"a step has {mib(row.budget_bytes or 0)}, and fckpt needs {mib(row.least_bytes)}")
        if row.predicted_bytes is None or row.to_naive is None:
            continue
        most = int(fraction * naive.peak_bytes) if row.other is None else rows[row.other].peak_bytes
        if row.peak_bytes > most:
            row.complaints.append(f"holds {row.peak_bytes - most:,} bytes more than it may")
        if not row.statistics_equal:
            row.complaints.append(f"statistics of BatchNorm are not those of {NAIVE}")
        if row.other is None and row.to_naive.median > MOST_TIME:
            row.complaints.append(f"takes {row.to_naive} of the time of {NAIVE}, more than {MOST_TIME:.2f}")
        if row.to_other is not None and row.to_other.median >= 1:
            row.complaints.append(f"takes {row.to_other} of the time of the other method in the same memory")


def show(report: Report, console: Console) -> None:
    """Prints the tables."""
    rows = {row.name: row for row in report.rows}
    table = table_of("", "MiB", "%", "s", "time", "same", "published %", "time", left=["", "same"])
    for row in (row for row in report.rows if row.other is None):
        table.add_row(
            row.name, *_cells(row, rows[NAIVE]), *_published(row), style="bold red" if row.complaints else None
        )
    if NEEDS_GPUS not in rows:
        table.add_row(NEEDS_GPUS, *[""] * 3, "needs 2 GPUs", "", *_published(Row(NEEDS_GPUS)), style="dim")
    console.print(table)
    pairs = table_of("fckpt, in memory of", "MiB", "%", "s", "time", "same", "fckpt / it", left=["", "same"])
    for row in (row for row in report.rows if row.other is not None):
        name = row.name.removeprefix(PLANNED_AS)
        cells = (*_cells(row, rows[NAIVE]), str(row.to_other or ""))
        pairs.add_row(name, *cells, style="bold red" if row.complaints else None)
    console.print(pairs)
    console.print(
        "MiB: everything that a rank holds at once. Time: relative to naive DDP, or to the other method, median and "
        "quartiles of the rounds. Same: gradients and statistics of BatchNorm bitwise equal to naive DDP; PyTorch's "
        "checkpoint updates statistics twice. Published: on two GPUs of 2018, with a batch of 256.",
        style="dim",
    )


def _cells(row: Row, naive: Row) -> list[str]:
    if row.step_seconds is None:
        return ["", "", "", "refused" if row.least_bytes is not None else "error", ""]
    same = f"off by {row.difference:.0e}" if row.difference else "yes" if row.statistics_equal else "gradients"
    percent = 100 * row.peak_bytes / naive.peak_bytes
    seconds = f"{row.step_seconds.median:.3f}"
    return [in_mib(row.peak_bytes), f"{percent:.1f}", seconds, str(row.to_naive), same]


def _published(row: Row) -> tuple[str, str]:
    """Returns the published memory in percent and the time, relative to the published naive figures."""
    found = PUBLISHED.get("fckpt" if row.predicted_bytes is not None and row.other is None else row.name)
    if found is None:
        return "", ""
    memory, seconds = (a / b for a, b in zip(found, PUBLISHED[NAIVE], strict=True))
    return f"{100 * memory:.0f}", f"{seconds:.2f}"


def _compare(parsed: argparse.Namespace, console: Console, document: dict[str, Any]) -> int:
    report: Report = run(compare, parsed.processes, setting_of(parsed))
    if os.environ.get("RANK", "0") != "0":
        return 0
    check(report, parsed.processes, parsed.budget)
    show(report, console)
    complaints = [f"{row.name}: {text}" for row in report.rows for text in row.complaints]
    for complaint in complaints:
        console.print(f"  [bold red]{complaint}[/]", highlight=False)
    console.print(f"{len(complaints)} complaints.", highlight=False)
    if parsed.json:
        rows = [{**asdict(row), "peak_bytes": row.peak_bytes} for row in report.rows]
        write_json(parsed.json, {**document, **asdict(report), "rows": rows, "published": PUBLISHED})
    return int(parsed.check and bool(complaints))


# ---- scaling and training ------------------------------------------------------------------------


def _scale(parsed: argparse.Namespace, console: Console, document: dict[str, Any]) -> int:
    each = parsed.batch_size // parsed.processes
    rows: list[ScalingRow] = []
    for ranks in parsed.scaling:
        setting = replace(setting_of(parsed), batch=each * ranks)
        rows.append(run(time_scaling, ranks, setting, rows[0].plan if rows else None))
    console.print(f"Weak scaling, {each} images for each process of {parsed.threads} threads, {os.cpu_count()} cores")
    table = table_of("processes", "naive s", "of the first", "fckpt s", "of the first", "fckpt / naive")
    for found in rows:
        cells: list[str] = []
        for kind in ("naive_seconds", "planned_seconds"):
            seconds, first = getattr(found, kind).median, getattr(rows[0], kind).median
            cells += [f"{seconds:.3f}", f"{seconds / first:.2f}"]
        table.add_row(str(found.ranks), *cells, str(found.planned_to_naive))
    console.print(table)
    if parsed.json:
        scaling = [{name: value for name, value in asdict(row).items() if name != "plan"} for row in rows]
        write_json(parsed.json, {**document, "scaling": scaling})
    return 0


def _train(parsed: argparse.Namespace, console: Console, document: dict[str, Any]) -> int:
    epochs: list[Epoch] = run(train, parsed.processes, setting_of(parsed), parsed.epochs, parsed.save)
    if os.environ.get("RANK", "0") != "0":
        return 0
    table = table_of("epoch", "first loss", "last loss", "mean loss", "s / step")
    for found in epochs:
        losses = (found.first_loss, found.last_loss, found.mean_loss)
        table.add_row(str(found.number), *(f"{loss:.4f}" for loss in losses), f"{found.seconds:.3f}")
    console.print(table)
    if parsed.json:
        write_json(parsed.json, {**document, "epochs": [asdict(found) for found in epochs]})
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the bench. Returns 1 if `--check` was asked for and failed, otherwise 0."""
    given = None if arguments is None else list(arguments)
    parsed = parse(given)
    console, document = opening("multi_gpu", given, torch.device(parsed.device))
    document["options"] = {
        name: value for name, value in vars(parsed).items() if name not in ("json", "check", "save", "data")
    }
    todo = _train if parsed.efficient else _scale if parsed.scaling else _compare
    return todo(parsed, console, document)


if __name__ == "__main__":
    sys.exit(main())
