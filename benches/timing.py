"""How the benches measure: contenders take turns in one process, and ratios are taken round by round.

A machine that is shared, or that changes its clock, slows down all contenders of a round alike. So
nothing here compares a time of this minute with one of the last: each round runs every contender once,
in an order that changes from round to round, and `paired_ratio` divides within a round before it takes
the median. Absolute seconds mean something only beside `describe_machine`.
"""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = [
    "Spread",
    "alternate",
    "describe_machine",
    "device_slug",
    "machine_line",
    "mib",
    "paired_ratio",
    "pick_device",
    "progress_bar",
    "set_up",
    "sign_test",
    "spread",
    "write_json",
]


@dataclass(frozen=True)
class Spread:
    """The middle of a sample, its interquartile range and its least value."""

    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""
    least: float
    """The smallest value: for a time, the one that a busy machine disturbed least."""
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def spread(values: Sequence[float]) -> Spread:
    """Returns the median, the quartiles and the least of `values`."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high, min(values), len(values))


def alternate(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    calls: int = 1,
    warm_up: int = 1,
    device: torch.device,
    before_sample: Callable[[], object] = lambda: None,
    on_sample: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Times the contenders in turn and returns the seconds per call of each, round by round.

    Args:
        contenders: name to a function that is called without arguments.
        rounds: samples per contender.
        calls: calls per sample; more than one where a call is too short for the clock.
        warm_up: samples per contender that are run and thrown away first.
        device: synchronised before and after each sample.
        before_sample: called before each sample, outside the clock: where several processes wait for each other.
        on_sample: called after each sample, outside the clock.
    """
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(warm_up + rounds):
        gc.collect()
        turn = index % len(names)
        order = names[turn:] + names[:turn]
        # Backwards every other time: whoever runs after a contender finds the caches as that one left
        # them, which alone makes some percent of a tiny region.
        for name in order if index % 2 else reversed(order):
            before_sample()
            elapsed = _sample(contenders[name], calls, device)
            if index >= warm_up:
                seconds[name].append(elapsed)
            on_sample()
    return seconds


def _sample(fn: Callable[[], object], calls: int, device: torch.device) -> float:
    _synchronise(device)
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    _synchronise(device)
    return (time.perf_counter() - start) / calls


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def paired_ratio(seconds: Mapping[str, Sequence[float]], of: str, to: str) -> Spread:
    """Returns the spread of `of / to`, the quotient taken within each round."""
    return spread([a / b for a, b in zip(seconds[of], seconds[to], strict=True)])


def sign_test(seconds: Mapping[str, Sequence[float]], of: str, to: str) -> float:
    """Returns how likely `of` is slower than `to` in at least so many rounds if both are equally fast.

    The one-sided sign test: it asks nothing of the shape of the noise, which on a shared machine
    has a long tail. Seven rounds lost out of seven have p = 0.008.
    """
    pairs = list(zip(seconds[of], seconds[to], strict=True))
    lost = sum(a > b for a, b in pairs)
    return sum(math.comb(len(pairs), k) for k in range(lost, len(pairs) + 1)) / 2 ** len(pairs)


def set_up(name: str | None) -> torch.device:
    """Returns the device to measure on, with the process prepared for measuring on it.

    On CUDA kernels are made to repeat themselves bitwise, as they do on CPU; without that, not even
    two plain steps agree and equality says nothing.
    """
    # torch.profiler, which counts the CPU's bytes, otherwise prints two lines per measurement.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    device = pick_device(name)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
        # Filling what `empty` returns is for debugging; it would add a kernel to every allocation.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return device


def pick_device(name: str | None) -> torch.device:
    """Returns the named device; without a name the first GPU, or the CPU where there is none."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Returns what absolute times depend on: processor, cores, GPU, versions, date."""
    machine = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    if device.type == "cuda":
        machine |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return machine


def machine_line(machine: Mapping[str, Any]) -> str:
    """Returns `describe_machine`'s answer as one line."""
    gpu = "" if machine["device"] == "cpu" else f"{machine['device']}, CUDA {machine.get('cuda')}, host "
    return (
        f"{gpu}{machine['cpu']}, {machine['cores']} cores ({machine['torch_threads']} threads), "
        f"torch {machine['torch']}, Python {machine['python']}, {machine['date']}"
    )


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def device_slug(device: torch.device) -> str:
    """Returns the device as a part of a file name: `cpu`, `nvidia-h100-80gb-hbm3`."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return "-".join(name.lower().split())


def mib(nbytes: int) -> str:
    """Returns bytes as text in MiB."""
    return f"{nbytes / 2**20:,.1f} MiB"


def progress_bar() -> Progress:
    """A progress bar on stderr, so that stdout holds the tables alone."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Writes `document` to `path`, with the folders that lead there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")
