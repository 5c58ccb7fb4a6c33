"""Times several steps in one process, alternately, and compares them round by round.

A shared machine, or one that changes its clock, slows down all steps of a round alike. So no time is compared with one
that was measured minutes before: each round runs every step once, in an order that changes from round to round, and
`paired_ratio` divides within a round before it takes the median. Absolute seconds only mean something beside
`results.describe_machine`.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from scipy.stats import binomtest

Name = TypeVar("Name")
SIGNIFICANCE = 0.01
RESOLUTION = 1.01
"""A smaller ratio of the medians is not reported: the places of tensors in memory make as large a difference."""


@dataclass(frozen=True)
class Spread:
    """The median, the quartiles and the minimum of a sample."""

    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""
    least: float
    """The minimum: of times, the one that other load disturbed least."""
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def spread(values: Sequence[float]) -> Spread:
    """Returns the median, the quartiles and the minimum of `values`."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high, min(values), len(values))


def alternate(
    steps: Mapping[Name, Callable[[], object]],
    *,
    rounds: int,
    calls: int = 1,
    device: torch.device,
    before_sample: Callable[[], object] = lambda: None,
) -> dict[Name, list[float]]:
    """Times the steps alternately. Returns the seconds per call of each, by round.

    Args:
        steps: functions without arguments, by name.
        rounds: samples per step, after one that is discarded.
        calls: calls per sample; more than one where a call is too short for the clock.
        device: synchronised before and after each sample.
        before_sample: called before each sample, and not timed: several processes wait for each other there.
    """
    names = list(steps)
    seconds: dict[Name, list[float]] = {name: [] for name in names}
    for index in range(1 + rounds):
        gc.collect()
        turn = index % len(names)
        order = names[turn:] + names[:turn]
        # Reversed every other time: a step finds the caches as the one before left them, which alone is some percent
        # of the time of a tiny region.
        for name in order if index % 2 else reversed(order):
            before_sample()
            elapsed = _sample(steps[name], calls, device)
            if index:
                seconds[name].append(elapsed)
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


def paired_ratio(seconds: Mapping[Name, Sequence[float]], of: Name, to: Name) -> Spread:
    """Returns the spread of the ratios `of / to` of all rounds."""
    return spread([a / b for a, b in zip(seconds[of], seconds[to], strict=True)])


def is_slower(seconds: Mapping[Name, Sequence[float]], of: Name, to: Name) -> bool:
    """Whether `of` is slower than `to` beyond noise: in significantly many rounds, and by more than `RESOLUTION`.

    The one-sided sign test assumes nothing about the distribution of the noise: on a shared machine that has a long
    tail. Seven rounds of seven have p = 0.008.
    """
    pairs = list(zip(seconds[of], seconds[to], strict=True))
    lost = sum(a > b for a, b in pairs)
    p = float(binomtest(lost, len(pairs), alternative="greater").pvalue)
    return p < SIGNIFICANCE and paired_ratio(seconds, of, to).median > RESOLUTION


def set_up(name: str | None, *, background: bool = False) -> torch.device:
    """Prepares the process for measurements, and returns the device.

    Plans are solved before they run, and are not read from disk. With `background`, they are solved by another process
    while the steps run, as in a program.

    On CUDA, kernels are made deterministic, as they are on CPU. Otherwise not even two plain steps are bitwise equal.
    """
    # torch.profiler, which counts the CPU's bytes, otherwise prints two lines per measurement.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("FCKPT_PLANS", "0")  # or solving would take no time at the second run of a bench
    if not background:
        os.environ.setdefault("FCKPT_BACKGROUND", "0")  # or plans would change from step to step
    device = pick_device(name)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
        # Filling what `empty` returns is for debugging; it would add a kernel to every allocation.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return device


def settle_kernels(step: Callable[[], object], device: torch.device) -> None:
    """Runs a step once, with kernels that are all deterministic if there are such kernels.

    Only the strict mode makes memory-efficient attention deterministic; but it refuses operations without such a
    kernel, so that others are only deterministic where they can be.
    """
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True)
        try:
            step()
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            torch.use_deterministic_algorithms(True, warn_only=True)
    step()


def pick_device(name: str | None) -> torch.device:
    """Returns the named device; without a name the first GPU, or the CPU where there is none."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
