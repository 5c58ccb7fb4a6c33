"""The comparison of `benches.multi_gpu`: memory, gradients and times of all methods.

Every function here runs on all ranks. Memory is counted by the allocator (see `fckpt.measure_peak`): the bytes that a
method holds between steps, including parameters, momentum and buckets of messages, and the peak of a step above them.
The results are those of the rank that holds most, and of the slowest.
"""

from __future__ import annotations

import contextlib
import gc
import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import fckpt
from benches.common.command import steps
from benches.common.data_parallel import (
    NAIVE,
    Method,
    Planned,
    Rank,
    join,
    plain_plan,
    planned_step,
    state_bytes,
    torch_methods,
)
from benches.common.rows import Compared, difference
from benches.common.timing import Spread, alternate, paired_ratio, spread
from fckpt._memory import measure_peak
from fckpt._planned.making import make_plan
from fckpt.errors import BudgetError

TRIES = 2
"""On CPU, the release of a message by a thread of gloo may not be counted: the lowest count is right."""
PLANNED_AS = "fckpt as "
STEPS_BEFORE = 2
"""Steps after which every library has its permanent memory, and DistributedDataParallel its buckets."""


@dataclass
class Result(Compared):
    """The results of one method. The plain step is that of naive DDP; a budget is for a step, without `held_bytes`."""

    name: str
    held_bytes: int = 0
    """Between steps."""
    step_bytes: int = 0
    """The peak of a step above them."""
    statistics_equal: bool = True
    """Whether BatchNorm's statistics are bitwise equal to those of naive DDP."""
    other: str | None = None
    """The method whose memory is the budget."""
    to_other: Spread | None = None
    """The time of a step relative to that method."""

    @property
    def title(self) -> str:
        """The method."""
        return self.name


@dataclass
class _Comparison:
    rank: Rank
    setting: Namespace
    """The command line."""
    advance: Callable[[str], object]
    rows: dict[str, Result] = field(default_factory=dict)
    methods: dict[str, Method] = field(default_factory=dict)
    expected: tuple[list[Tensor], list[Tensor]] = ([], [])
    """Gradients and statistics of naive DDP."""

    def try_out(self, row: Result, make: Callable[[], Method]) -> None:
        """Makes a method, measures its memory and compares its results."""
        self.advance(row.name)
        row.held_bytes = self._held_bytes(make)
        method = _begun(make)
        found = method.gradients(), [x.clone() for x in method.statistics()]
        if not self.methods:
            self.expected = found
        row.difference = difference(self.expected[0], found[0])
        row.statistics_equal = all(torch.equal(a, b) for a, b in zip(self.expected[1], found[1], strict=True))
        del found
        row.step_bytes = min(measure_peak(method.step, self.rank.device).peak_bytes for _ in range(TRIES))
        everywhere = self.rank.gathered(row)
        for what in ("held_bytes", "step_bytes", "difference"):
            setattr(row, what, max(getattr(other, what) for other in everywhere))
        row.statistics_equal = all(other.statistics_equal for other in everywhere)
        row.peak_bytes = row.held_bytes + row.step_bytes  # all that is held at once
        self.rows[row.name], self.methods[row.name] = row, method

    def _held_bytes(self, make: Callable[[], Method]) -> int:
        """Returns the bytes that a method holds between steps: those that are freed with it."""
        held: list[Method] = []
        measure_peak(lambda: held.append(_begun(make)), self.rank.device)

        def release() -> None:
            held.clear()
            gc.collect()

        return -measure_peak(release, self.rank.device).retained_bytes

    def plan(self, row: Result, plain: fckpt.Plan | None) -> fckpt.Plan | None:
        """Returns the plan for a row, made by the first rank, on all ranks; None if the budget is too small."""
        self.advance(f"{row.name}: a plan")

        def solved() -> str | int:
            assert plain is not None
            budget, limit = max(1, row.budget_bytes or 0), 1.0 if self.setting.tiny else None
            try:
                return json.dumps(make_plan(plain.graph, budget, "auto", plain.torch_version, limit).to_json())
            except BudgetError as error:
                return error.least_bytes

        found = self.rank.from_first(solved)
        if isinstance(found, int):
            row.least_bytes = found
            return None
        plan = fckpt.Plan.from_json(found)
        row.predicted_bytes, row.predicted_overhead = plan.peak_bytes, plan.overhead
        return plan

    def time(self) -> None:
        """Times the methods alternately; a sample is that of the slowest rank."""
        mine = alternate(
            {name: method.step for name, method in self.methods.items()},
            rounds=self.setting.rounds,
            device=self.rank.device,
            before_sample=self.rank.wait,
        )
        everywhere = self.rank.gathered(mine)
        seconds = {
            name: [max(samples) for samples in zip(*(other[name] for other in everywhere), strict=True)]
            for name in mine
        }
        for name, values in seconds.items():
            row = self.rows[name]
            row.step_seconds, row.time_ratio = spread(values), paired_ratio(seconds, name, NAIVE)
            row.to_other = paired_ratio(seconds, name, row.other) if row.other else None


def _begun(make: Callable[[], Method]) -> Method:
    method = make()
    for _ in range(STEPS_BEFORE):
        method.step()
    return method


def compare(setting: Namespace, others: bool = True) -> list[Result]:
    """Compares naive DDP, fckpt in a fraction of its memory and, if asked, the other methods, each also with fckpt."""
    rank = join(setting)
    methods = {name: make for name, make in torch_methods(rank).items() if others or name == NAIVE}
    progress = contextlib.nullcontext(lambda what: None) if rank.number else steps(3 * len(methods) + 1)
    with progress as advance:
        run = _Comparison(rank, setting, advance)
        for name, make in methods.items():
            run.try_out(Result(name), make)
        held = state_bytes(rank.task.loss)
        budget = int(setting.budget * (run.rows[NAIVE].peak_bytes or 0)) - held
        planned = [Result(f"fckpt in {setting.budget:.0%}", budget_bytes=budget)]
        planned += [
            Result(PLANNED_AS + name, budget_bytes=(run.rows[name].peak_bytes or 0) - held, other=name)
            for name in methods
            if name != NAIVE
        ]
        plain = plain_plan(rank) if rank.number == 0 else None
        for row in planned:
            run.rows[row.name] = row
            if plan := run.plan(row, plain):
                step = planned_step(rank, plan)
                run.try_out(row, lambda step=step: Planned(rank, step))
        gc.collect()
        advance("in turn")
        run.time()
    return [*run.rows.values()]
