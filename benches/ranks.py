"""What the processes of `multi_gpu` do together: compare ways to train, time them, or train.

Every function here runs on all ranks alike. Memory is what the allocator gave out (see `fckpt.measure_peak`): all that
a contender holds between steps, parameters, momentum and buckets of messages included, and the most that a step takes
besides. The rank that holds most counts, and the one that takes longest.
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
from benches.replicas import (
    NAIVE,
    NEEDS_GPUS,
    Contender,
    Planned,
    Replica,
    Setting,
    join,
    plain_plan,
    planned_step,
    state_bytes,
    torch_ways,
)
from benches.script import described, steps
from benches.timing import Spread, alternate, describe_machine, paired_ratio, spread
from fckpt._memory import measure_peak
from fckpt._planned.making import make_plan
from fckpt.errors import BudgetError

__all__ = ["PLANNED_AS", "Epoch", "Pace", "Report", "Row", "compare", "pace", "train"]

TRIES = 2
"""On CPU a message that a thread of gloo lets go of is not seen to be released: the least count is right."""
PLANNED_AS = "fckpt as "
STEPS_BEFORE = 2
"""After them every library has what it keeps for good, and DistributedDataParallel its buckets."""


@dataclass
class Row:
    """What was found out about one way to train."""

    name: str
    held_bytes: int = 0
    """Between steps."""
    step_bytes: int = 0
    """The most that a step takes besides."""
    difference: float = 0.0
    """Of the gradients from naive DDP's, relative to the largest of each tensor; 0 is bitwise equal."""
    statistics_equal: bool = True
    """Whether BatchNorm's statistics are bitwise those of naive DDP."""
    step_seconds: Spread | None = None
    to_naive: Spread | None = None
    """Its step over naive DDP's, within a round."""
    complaints: list[str] = field(default_factory=list)
    # ---- fckpt alone
    budget_bytes: int | None = None
    """For a step, without what is held."""
    predicted_bytes: int | None = None
    predicted_overhead: float | None = None
    least_bytes: int | None = None
    """Where no plan fits: the least budget that would do."""
    solve_seconds: float = 0.0
    rival: str | None = None
    """Whose memory it was given."""
    to_rival: Spread | None = None

    @property
    def peak_bytes(self) -> int:
        """All that is held at once."""
        return self.held_bytes + self.step_bytes


@dataclass
class Report:
    """The comparison, as the first rank has it."""

    machine: dict[str, Any]
    parameters: int
    plan_seconds: float
    """To trace and to price a step."""
    rows: list[Row]


@dataclass
class _Race:
    replica: Replica
    setting: Setting
    advance: Callable[[str], object]
    images: Tensor
    labels: Tensor
    rows: dict[str, Row] = field(default_factory=dict)
    contenders: dict[str, Contender] = field(default_factory=dict)
    expected: tuple[list[Tensor | None], list[Tensor]] = ([], [])

    def try_out(self, row: Row, make: Callable[[], Contender]) -> None:
        """Makes a contender, and measures its memory and compares its results."""
        self.advance(row.name)
        self.rows[row.name] = row
        try:
            self._try_out(row, make)
        except Exception as error:  # what fails with one contender may work with the next
            row.complaints.append(described(error))
        everywhere = self.replica.gathered(row)
        for what in ("held_bytes", "step_bytes", "difference"):
            setattr(row, what, max(getattr(other, what) for other in everywhere))
        row.statistics_equal = all(other.statistics_equal for other in everywhere)
        row.complaints = next((other.complaints for other in everywhere if other.complaints), [])
        if row.complaints:
            self.contenders.pop(row.name, None)

    def _try_out(self, row: Row, make: Callable[[], Contender]) -> None:
        device = self.replica.device
        row.held_bytes = self._held_bytes(make)
        contender = self.contenders[row.name] = self._begun(make)
        gradients = contender.gradients(self.images, self.labels)
        statistics = [x.clone() for x in contender.statistics()]
        if row.name == NAIVE:
            self.expected = gradients, statistics
        row.difference = max(map(_difference, self.expected[0], gradients))
        row.statistics_equal = all(map(torch.equal, self.expected[1], statistics))
        del gradients, statistics
        step = lambda: contender.step(self.images, self.labels)
        row.step_bytes = min(measure_peak(step, device).peak_bytes for _ in range(TRIES))

    def _begun(self, make: Callable[[], Contender]) -> Contender:
        contender = make()
        for _ in range(STEPS_BEFORE):
            contender.step(self.images, self.labels)
        return contender

    def _held_bytes(self, make: Callable[[], Contender]) -> int:
        """Returns what a contender holds between steps: what becomes free with it, of what was seen to be made."""
        held: list[Contender] = []
        measure_peak(lambda: held.append(self._begun(make)), self.replica.device)

        def release() -> None:
            held.clear()
            gc.collect()

        return -measure_peak(release, self.replica.device).retained_bytes

    def complain_of_naive(self) -> None:
        """Raises what failed with the measure of all others."""
        if self.rows[NAIVE].complaints:
            raise RuntimeError(f"{NAIVE} failed: {self.rows[NAIVE].complaints[0]}")

    def plan(self, row: Row, plain: fckpt.Plan | None) -> fckpt.Plan | None:
        """Returns the plan that the first rank makes for a row, on all ranks."""
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

        found = self.replica.from_first(solved)
        if "plan" not in found:
            row.least_bytes = found["least_bytes"]
            return None
        plan = fckpt.Plan.from_json(found["plan"])
        row.predicted_bytes, row.predicted_overhead = plan.peak_bytes, plan.overhead
        row.solve_seconds = found["seconds"]
        return plan

    def time(self) -> None:
        """Lets the contenders take turns."""
        seconds = self._seconds()
        for name, values in seconds.items():
            row = self.rows[name]
            row.step_seconds = spread(values)
            row.to_naive = paired_ratio(seconds, name, NAIVE)
            if row.rival is not None:
                row.to_rival = paired_ratio(seconds, name, row.rival)

    def _seconds(self) -> dict[str, list[float]]:
        turns = {name: lambda c=c: c.step(self.images, self.labels) for name, c in self.contenders.items()}
        mine = alternate(
            turns,
            rounds=self.setting.rounds,
            device=self.replica.device,
            before_sample=self.replica.wait,
            on_sample=lambda: self.advance("in turn"),
        )
        everywhere = self.replica.gathered(mine)
        return {
            name: [max(samples) for samples in zip(*(other[name] for other in everywhere), strict=True)]
            for name in mine
        }


def _difference(expected: Tensor | None, actual: Tensor | None) -> float:
    """Returns by how much two gradients differ, relative to the largest element."""
    if expected is None or actual is None or torch.equal(expected, actual):
        return 0.0
    return float((expected - actual).abs().max() / expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny))


def _race(replica: Replica, setting: Setting, advance: Callable[[str], object]) -> _Race:
    batch = replica.data.batch(replica.numbers[replica.part], replica.device)
    return _Race(replica, setting, advance, *batch)


def _progress(replica: Replica, total: int) -> contextlib.AbstractContextManager[Callable[[str], object]]:
    """The first rank shows how far all are."""
    return contextlib.nullcontext(lambda what: None) if replica.rank else steps(total)


# ---- the comparison ------------------------------------------------------------------------------


def compare(setting: Setting) -> Report:
    """Compares PyTorch's ways to train in less memory with fckpt's, within the memory of each."""
    replica = join(setting)
    ways = dict(torch_ways(replica))
    turns = (2 * len(ways)) * (1 + setting.rounds)
    with _progress(replica, 3 * len(ways) + turns) as advance:
        race = _race(replica, setting, advance)
        for name, make in ways.items():
            race.try_out(Row(name), make)
        race.complain_of_naive()
        start = time.perf_counter()
        plain = plain_plan(replica) if replica.rank == 0 else None
        plan_seconds = time.perf_counter() - start
        for row in _planned_rows(race):
            plan = race.plan(row, plain)
            if plan is None:
                race.rows[row.name] = row
            else:
                step = planned_step(replica, plan)
                race.try_out(row, lambda step=step: Planned(replica, step))
        gc.collect()
        race.time()
    parameters = sum(p.numel() for p in replica.loss.parameters())
    machine = describe_machine(replica.device)
    return Report(machine, parameters, plan_seconds, list(race.rows.values()))


def _planned_rows(race: _Race) -> list[Row]:
    """Rows for fckpt: in a fraction of naive DDP's memory, and in that of each rival."""
    held = state_bytes(race.replica.loss)
    fraction = race.setting.fraction
    budget = int(fraction * race.rows[NAIVE].peak_bytes) - held
    rows = [Row(f"fckpt in {fraction:.0%}", budget_bytes=budget)]
    for name in race.contenders:
        if name not in (NAIVE, NEEDS_GPUS):
            memory = race.rows[name].peak_bytes
            rows.append(Row(PLANNED_AS + name, budget_bytes=memory - held, rival=name))
    return rows


# ---- weak scaling --------------------------------------------------------------------------------


@dataclass
class Pace:
    """Steps of so many ranks, naive DDP's and fckpt's in turn."""

    ranks: int
    naive_seconds: Spread
    planned_seconds: Spread
    planned_to_naive: Spread
    plan: str
    """As text: on more ranks, with the same batch for each, the same plan does."""


def pace(setting: Setting, plan: str | None) -> Pace:
    """Times naive DDP and fckpt, which makes a plan if there is none."""
    replica = join(setting)
    with _progress(replica, 3 + 2 * (1 + setting.rounds)) as advance:
        race = _race(replica, setting, advance)
        race.try_out(Row(NAIVE), dict(torch_ways(replica))[NAIVE])
        race.complain_of_naive()
        row = _planned_rows(race)[0]
        if plan is None:
            made = race.plan(row, plain_plan(replica) if replica.rank == 0 else None)
            if made is None:
                raise BudgetError(f"{row.budget_bytes} bytes do not do for a step", row.least_bytes or 0)
        else:
            made = fckpt.Plan.from_json(plan)
        step = planned_step(replica, made)
        race.try_out(row, lambda: Planned(replica, step))
        if wrong := [text for found in race.rows.values() for text in found.complaints]:
            raise RuntimeError("; ".join(wrong))
        race.time()
    naive, planned = race.rows[NAIVE], race.rows[row.name]
    assert naive.step_seconds and planned.step_seconds and planned.to_naive
    text = json.dumps(made.to_json())
    return Pace(replica.ranks, naive.step_seconds, planned.step_seconds, planned.to_naive, text)


# ---- training ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Epoch:
    """What the first rank tells of an epoch."""

    number: int
    first_loss: float
    """Mean over all ranks, of the first batch."""
    last_loss: float
    mean_loss: float
    seconds: float
    """For each step."""


def train(setting: Setting, epochs: int, folder: str | None) -> list[Epoch]:
    """Trains the efficient version alone, and goes on from what a folder holds."""
    replica = join(setting)
    plan = _own_plan(replica, setting)
    contender = Planned(replica, planned_step(replica, plan))
    path = None if folder is None else Path(folder) / "densenet.pt"
    done = 0
    if path is not None and path.exists():
        state = torch.load(path, map_location=replica.device, weights_only=True)
        contender.load_state_dict(state)
        done = state["epoch"]
    count = len(replica.data) // replica.batch
    found: list[Epoch] = []
    with _progress(replica, epochs * count) as advance:
        for epoch in range(done, done + epochs):
            found.append(_epoch(replica, contender, epoch, advance))
            if path is not None and replica.rank == 0:
                _save(path, {**contender.state_dict(), "epoch": epoch + 1})
    replica.wait()
    return found


def _own_plan(replica: Replica, setting: Setting) -> fckpt.Plan:
    """Returns the plan of the first rank for a fraction of what fckpt without a plan would take."""

    def made() -> str:
        plain = plain_plan(replica)
        held = state_bytes(replica.loss)
        budget = int(setting.fraction * (plain.baseline_peak_bytes + held)) - held
        plan = make_plan(plain.graph, max(1, budget), "auto", plain.torch_version, setting.search_seconds)
        return json.dumps(plan.to_json())

    return fckpt.Plan.from_json(replica.from_first(made))


def _epoch(replica: Replica, contender: Planned, epoch: int, advance: Callable[[str], object]) -> Epoch:
    losses: list[float] = []
    start = time.perf_counter()
    for numbers in replica.data.batches(replica.batch, epoch=epoch, part=replica.part):
        loss = contender.step(*replica.data.batch(numbers, replica.device))
        losses.append(float(loss))
        advance(f"epoch {epoch + 1}, loss {losses[-1]:.3f}")
    seconds = (time.perf_counter() - start) / len(losses)
    means = [sum(values) / len(values) for values in zip(*replica.gathered(losses), strict=True)]
    return Epoch(epoch + 1, means[0], means[-1], sum(means) / len(means), seconds)


def _save(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(path)
