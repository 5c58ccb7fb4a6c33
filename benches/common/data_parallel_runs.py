"""The runs of `benches.multi_gpu`: comparing methods to train, timing them, and training.

Every function here runs on all ranks. Memory is counted by the allocator (see `fckpt.measure_peak`): the bytes that a
method holds between steps, including parameters, momentum and buckets of messages, and the peak of a step above them.
The results are those of the rank that holds most, and of the slowest.
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fckpt
from benches.common.command import described, steps
from benches.common.data_parallel import (
    NAIVE,
    NEEDS_GPUS,
    Method,
    Planned,
    Rank,
    Setting,
    join,
    plain_plan,
    planned_step,
    state_bytes,
    torch_methods,
)
from benches.common.results import describe_machine
from benches.common.timing import Spread, alternate, paired_ratio, spread
from fckpt._memory import measure_peak
from fckpt._planned.making import make_plan
from fckpt.errors import BudgetError

__all__ = ["PLANNED_AS", "Epoch", "Report", "Row", "ScalingRow", "compare", "time_scaling", "train"]

TRIES = 2
"""On CPU, the release of a message by a thread of gloo may not be counted: the lowest count is right."""
PLANNED_AS = "fckpt as "
STEPS_BEFORE = 2
"""Steps after which every library has its permanent memory, and DistributedDataParallel its buckets."""


@dataclass
class Row:
    """The results of one method."""

    name: str
    held_bytes: int = 0
    """Between steps."""
    step_bytes: int = 0
    """The peak of a step above them."""
    difference: float = 0.0
    """From the gradients of naive DDP, relative to the largest element of each; 0 is bitwise equal."""
    statistics_equal: bool = True
    """Whether BatchNorm's statistics are bitwise equal to those of naive DDP."""
    step_seconds: Spread | None = None
    to_naive: Spread | None = None
    """The time of its step relative to naive DDP."""
    complaints: list[str] = field(default_factory=list)
    # ---- only for fckpt
    budget_bytes: int | None = None
    """For a step, without `held_bytes`."""
    predicted_bytes: int | None = None
    predicted_overhead: float | None = None
    least_bytes: int | None = None
    """If there is no plan: the least budget that is feasible."""
    solve_seconds: float = 0.0
    other: str | None = None
    """The method whose memory is its budget."""
    to_other: Spread | None = None

    @property
    def peak_bytes(self) -> int:
        """All bytes that are held at once."""
        return self.held_bytes + self.step_bytes


@dataclass
class Report:
    """The comparison, on the first rank."""

    machine: dict[str, Any]
    parameters: int
    plan_seconds: float
    """To trace and to price a step."""
    rows: list[Row]


@dataclass
class _Comparison:
    rank: Rank
    setting: Setting
    advance: Callable[[str], object]
    images: Tensor
    labels: Tensor
    rows: dict[str, Row] = field(default_factory=dict)
    methods: dict[str, Method] = field(default_factory=dict)
    expected: tuple[list[Tensor | None], list[Tensor]] = ([], [])

    def try_out(self, row: Row, make: Callable[[], Method]) -> None:
        """Makes a method, measures its memory and compares its results."""
        self.advance(row.name)
        self.rows[row.name] = row
        try:
            self._try_out(row, make)
        except Exception as error:  # the other methods may work
            row.complaints.append(described(error))
        everywhere = self.rank.gathered(row)
        for what in ("held_bytes", "step_bytes", "difference"):
            setattr(row, what, max(getattr(other, what) for other in everywhere))
        row.statistics_equal = all(other.statistics_equal for other in everywhere)
        row.complaints = next((other.complaints for other in everywhere if other.complaints), [])
        if row.complaints:
            self.methods.pop(row.name, None)

    def _try_out(self, row: Row, make: Callable[[], Method]) -> None:
        device = self.rank.device
        row.held_bytes = self._held_bytes(make)
        method = self.methods[row.name] = self._begun(make)
        gradients = method.gradients(self.images, self.labels)
        statistics = [x.clone() for x in method.statistics()]
        if row.name == NAIVE:
            self.expected = gradients, statistics
        row.difference = max(map(_difference, self.expected[0], gradients))
        row.statistics_equal = all(map(torch.equal, self.expected[1], statistics))
        del gradients, statistics
        step = lambda: method.step(self.images, self.labels)
        row.step_bytes = min(measure_peak(step, device).peak_bytes for _ in range(TRIES))

    def _begun(self, make: Callable[[], Method]) -> Method:
        method = make()
        for _ in range(STEPS_BEFORE):
            method.step(self.images, self.labels)
        return method

    def _held_bytes(self, make: Callable[[], Method]) -> int:
        """Returns the bytes that a method holds between steps: those that are freed with it."""
        held: list[Method] = []
        measure_peak(lambda: held.append(self._begun(make)), self.rank.device)

        def release() -> None:
            held.clear()
            gc.collect()

        return -measure_peak(release, self.rank.device).retained_bytes

    def complain_of_naive(self) -> None:
        """Raises an error if naive DDP failed, to which all others are compared."""
        if self.rows[NAIVE].complaints:
            raise RuntimeError(f"{NAIVE} failed: {self.rows[NAIVE].complaints[0]}")

    def plan(self, row: Row, plain: fckpt.Plan | None) -> fckpt.Plan | None:
        """Returns the plan for a row, made by the first rank, on all ranks."""
        self.advance(f"{row.name}: a plan")

        def solved() -> dict[str, Any]:
            assert plain is not None
            start = time.perf_counter()
            budget = max(1, row.budget_bytes or 0)
            try:
                plan = make_plan(plain.graph, budget, "auto", plain.torch_version, self.setting.search_seconds)
            except BudgetError as error:
                return {"least_bytes": error.least_bytes}
            return {"plan": json.dumps(plan.to_json()), "seconds": time.perf_counter() - start}

        found = self.rank.from_first(solved)
        if "plan" not in found:
            row.least_bytes = found["least_bytes"]
            return None
        plan = fckpt.Plan.from_json(found["plan"])
        row.predicted_bytes, row.predicted_overhead = plan.peak_bytes, plan.overhead
        row.solve_seconds = found["seconds"]
        return plan

    def time(self) -> None:
        """Times the methods alternately."""
        seconds = self._seconds()
        for name, values in seconds.items():
            row = self.rows[name]
            row.step_seconds = spread(values)
            row.to_naive = paired_ratio(seconds, name, NAIVE)
            if row.other is not None:
                row.to_other = paired_ratio(seconds, name, row.other)

    def _seconds(self) -> dict[str, list[float]]:
        turns = {name: lambda c=c: c.step(self.images, self.labels) for name, c in self.methods.items()}
        mine = alternate(
            turns,
            rounds=self.setting.rounds,
            device=self.rank.device,
            before_sample=self.rank.wait,
            on_sample=lambda: self.advance("in turn"),
        )
        everywhere = self.rank.gathered(mine)
        return {
            name: [max(samples) for samples in zip(*(other[name] for other in everywhere), strict=True)]
            for name in mine
        }


def _difference(expected: Tensor | None, actual: Tensor | None) -> float:
    """Returns the largest difference of two gradients, relative to the largest element."""
    if expected is None or actual is None or torch.equal(expected, actual):
        return 0.0
    return float((expected - actual).abs().max() / expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny))


def _comparison(rank: Rank, setting: Setting, advance: Callable[[str], object]) -> _Comparison:
    batch = rank.data.batch(rank.numbers[rank.part], rank.device)
    return _Comparison(rank, setting, advance, *batch)


def _progress(rank: Rank, total: int) -> contextlib.AbstractContextManager[Callable[[str], object]]:
    """Shows a progress bar on the first rank."""
    return contextlib.nullcontext(lambda what: None) if rank.number else steps(total)


# ---- the comparison ------------------------------------------------------------------------------


def compare(setting: Setting) -> Report:
    """Compares PyTorch's methods with fckpt in the memory of each."""
    rank = join(setting)
    methods = dict(torch_methods(rank))
    turns = (2 * len(methods)) * (1 + setting.rounds)
    with _progress(rank, 3 * len(methods) + turns) as advance:
        run = _comparison(rank, setting, advance)
        for name, make in methods.items():
            run.try_out(Row(name), make)
        run.complain_of_naive()
        start = time.perf_counter()
        plain = plain_plan(rank) if rank.number == 0 else None
        plan_seconds = time.perf_counter() - start
        for row in _planned_rows(run):
            plan = run.plan(row, plain)
            if plan is None:
                run.rows[row.name] = row
            else:
                step = planned_step(rank, plan)
                run.try_out(row, lambda step=step: Planned(rank, step))
        gc.collect()
        run.time()
    parameters = sum(p.numel() for p in rank.loss.parameters())
    machine = describe_machine(rank.device)
    return Report(machine, parameters, plan_seconds, list(run.rows.values()))


def _planned_rows(run: _Comparison) -> list[Row]:
    """Returns rows for fckpt: in a fraction of naive DDP's memory, and in the memory of each other method."""
    held = state_bytes(run.rank.loss)
    fraction = run.setting.fraction
    budget = int(fraction * run.rows[NAIVE].peak_bytes) - held
    rows = [Row(f"fckpt in {fraction:.0%}", budget_bytes=budget)]
    for name in run.methods:
        if name not in (NAIVE, NEEDS_GPUS):
            memory = run.rows[name].peak_bytes
            rows.append(Row(PLANNED_AS + name, budget_bytes=memory - held, other=name))
    return rows


# ---- weak scaling --------------------------------------------------------------------------------


@dataclass
class ScalingRow:
    """The times of a step on a number of ranks."""

    ranks: int
    naive_seconds: Spread
    planned_seconds: Spread
    planned_to_naive: Spread
    plan: str
    """As text. It is the same on more ranks, with the same batch for each."""


def time_scaling(setting: Setting, plan: str | None) -> ScalingRow:
    """Times naive DDP and fckpt, with a given plan or a new one."""
    rank = join(setting)
    with _progress(rank, 3 + 2 * (1 + setting.rounds)) as advance:
        run = _comparison(rank, setting, advance)
        run.try_out(Row(NAIVE), dict(torch_methods(rank))[NAIVE])
        run.complain_of_naive()
        row = _planned_rows(run)[0]
        if plan is None:
            made = run.plan(row, plain_plan(rank) if rank.number == 0 else None)
            if made is None:
                raise BudgetError(f"{row.budget_bytes} bytes are not enough for a step", row.least_bytes or 0)
        else:
            made = fckpt.Plan.from_json(plan)
        step = planned_step(rank, made)
        run.try_out(row, lambda: Planned(rank, step))
        if wrong := [text for found in run.rows.values() for text in found.complaints]:
            raise RuntimeError("; ".join(wrong))
        run.time()
    naive, planned = run.rows[NAIVE], run.rows[row.name]
    assert naive.step_seconds and planned.step_seconds and planned.to_naive
    text = json.dumps(made.to_json())
    return ScalingRow(rank.ranks, naive.step_seconds, planned.step_seconds, planned.to_naive, text)


# ---- training ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Epoch:
    """The results of an epoch."""

    number: int
    first_loss: float
    """Of the first batch, the mean of all ranks."""
    last_loss: float
    mean_loss: float
    seconds: float
    """For each step."""


def train(setting: Setting, epochs: int, folder: str | None) -> list[Epoch]:
    """Trains with fckpt, and continues from the model in a folder if there is one."""
    rank = join(setting)
    plan = _own_plan(rank, setting)
    method = Planned(rank, planned_step(rank, plan))
    path = None if folder is None else Path(folder) / "densenet.pt"
    done = 0
    if path is not None and path.exists():
        state = torch.load(path, map_location=rank.device, weights_only=True)
        method.load_state_dict(state)
        done = state["epoch"]
    count = len(rank.data) // rank.batch
    found: list[Epoch] = []
    with _progress(rank, epochs * count) as advance:
        for epoch in range(done, done + epochs):
            found.append(_epoch(rank, method, epoch, advance))
            if path is not None and rank.number == 0:
                _save(path, {**method.state_dict(), "epoch": epoch + 1})
    rank.wait()
    return found


def _own_plan(rank: Rank, setting: Setting) -> fckpt.Plan:
    """Returns the first rank's plan, for a fraction of the memory of fckpt without a plan."""

    def made() -> str:
        plain = plain_plan(rank)
        held = state_bytes(rank.loss)
        budget = int(setting.fraction * (plain.baseline_peak_bytes + held)) - held
        plan = make_plan(plain.graph, max(1, budget), "auto", plain.torch_version, setting.search_seconds)
        return json.dumps(plan.to_json())

    return fckpt.Plan.from_json(rank.from_first(made))


def _epoch(rank: Rank, method: Planned, epoch: int, advance: Callable[[str], object]) -> Epoch:
    losses: list[float] = []
    start = time.perf_counter()
    for numbers in rank.data.batches(rank.batch, epoch=epoch, part=rank.part):
        loss = method.step(*rank.data.batch(numbers, rank.device))
        losses.append(float(loss))
        advance(f"epoch {epoch + 1}, loss {losses[-1]:.3f}")
    seconds = (time.perf_counter() - start) / len(losses)
    means = [sum(values) / len(values) for values in zip(*rank.gathered(losses), strict=True)]
    return Epoch(epoch + 1, means[0], means[-1], sum(means) / len(means), seconds)


def _save(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(path)
