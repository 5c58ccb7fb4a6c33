"""What the benches record of a way to run a step: what its plan predicts, what is measured, and what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benches.common.timing import Spread, alternate, paired_ratio, spread
from fckpt._memory import measure_peak

TOLERANCE = 0.02
"""How far a predicted peak may be from the measured one."""


@dataclass(kw_only=True)
class Record:
    """The results for one thing, with complaints; `rows`, if there are any, have complaints as well."""

    complaints: list[str] = field(default_factory=list)

    def everything_wrong(self) -> Iterator[str]:
        """Yields the complaints. A complaint about a row begins with the title of the row."""
        yield from self.complaints
        for row in getattr(self, "rows", ()):
            yield from (f"{row.title}: {text}" for text in row.complaints)


@dataclass(kw_only=True)
class Row(Record):
    """One way to run a step."""

    budget_bytes: int | None = None
    least_bytes: int | None = None
    """If there is no plan: the least budget for which there would be one."""
    predicted_bytes: int | None = None
    predicted_overhead: float | None = None
    peak_bytes: int | None = None
    """Measured."""
    time_ratio: Spread | None = None
    """The time of a step relative to the plain step."""
    step_seconds: Spread | None = None
    unequal: list[str] = field(default_factory=list)
    """The names of the results that are not bitwise equal to the results of the plain step."""

    @property
    def style(self) -> str | None:
        """The style of this row in a table."""
        return "bold red" if self.complaints else None

    @property
    def same(self) -> str:
        """Whether the results are bitwise equal, in words."""
        return "no" if self.unequal else "yes"

    def predict(self, plan: Any) -> None:
        """Records what a plan predicts."""
        self.predicted_bytes, self.predicted_overhead = plan.peak_bytes, plan.overhead

    def measure(
        self, step: Callable[[], object], plain: Callable[[], object], rounds: int, device: torch.device
    ) -> dict[str, list[float]]:
        """Measures the peak, then the time, alternately with the plain step. Returns all samples."""
        self.peak_bytes = measure_peak(step, device).peak_bytes
        seconds = alternate({"plain": plain, "step": step}, rounds=rounds, device=device)
        self.time_ratio, self.step_seconds = paired_ratio(seconds, "step", "plain"), spread(seconds["step"])
        return seconds

    def judge(self) -> None:
        """Complains if the peak is above the budget or not as predicted, or if a result is not bitwise equal."""
        if self.peak_bytes is not None and self.peak_bytes > (self.budget_bytes or self.peak_bytes):
            over = self.peak_bytes - (self.budget_bytes or 0)
            self.complaints.append(f"peaks {over:,} bytes above its budget")
        self.complaints += deviation(self.predicted_bytes, self.peak_bytes)
        self.complaints += different(self.unequal)


@dataclass(kw_only=True)
class Compared(Row):
    """One of several ways to compute the same gradients."""

    difference: float = 0.0
    """From the plain gradients, as `difference` says."""


def difference(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    """Returns the largest difference of gradients, relative to the largest element of each; 0 is bitwise equal."""
    pairs = [(a, b) for a, b in zip(expected, actual, strict=True) if not torch.equal(a, b)]
    least = lambda a: torch.finfo(a.dtype).tiny
    return max((float((a - b).abs().max() / a.abs().max().clamp_min(least(a))) for a, b in pairs), default=0.0)


def compare(rows: Mapping[Callable[[], Sequence[Tensor]], Compared], rounds: int, device: torch.device) -> None:
    """Measures functions that return gradients, alternately, and fills in their rows. The first is the plain one."""
    expected = next(iter(rows))()
    for run, row in rows.items():
        row.difference = difference(expected, run())
    seconds = alternate({run: run for run in rows}, rounds=rounds, device=device)
    for run, row in rows.items():
        row.peak_bytes = measure_peak(run, device).peak_bytes
        row.step_seconds, row.time_ratio = spread(seconds[run]), paired_ratio(seconds, run, next(iter(rows)))


def deviation(predicted: int | None, measured: int | None) -> list[str]:
    """Returns a complaint if a predicted peak is off by more than `TOLERANCE`."""
    if predicted is None or measured is None or abs(predicted - measured) <= TOLERANCE * measured:
        return []
    return [f"predicted {predicted:,} bytes, measured {measured:,} ({predicted / measured - 1:+.1%})"]


def different(names: Sequence[str]) -> list[str]:
    """Returns a complaint if there are results that are not bitwise equal."""
    more = ", ..." if len(names) > 4 else ""
    return [f"{len(names)} results not bitwise equal: {', '.join(names[:4])}{more}"] if names else []
