"""XLA's rematerialisation: a greedy heuristic that considers bytes only.

HloRematerialization, https://github.com/openxla/xla, xla/hlo/transforms/simplifiers/hlo_rematerialization.cc (read in
2026; no paper describes it). Where more bytes than the limit are live, one block of computations before that position
runs again later. Of all blocks of at most `BLOCK` consecutive computations, the one with the least cost is chosen:

    cost = memory limit / bytes reduced         in integers, the first of equals; 0 if the block is only moved

Its results are recomputed before their next use; the new results serve all later uses. Time has no influence on the
choice. Nothing is optimal, and a limit that could be met may be missed: "Can't reduce memory use below".

    bytes reduced       `_Pass.reduced`: results that are live and not in use at the position, minus inputs that are not
                        live, and would have to be held for it
    kAlwaysRemat        `_Pass.walk`: through the schedule from its beginning, wherever the limit is exceeded
    kPeakPriority       `_Pass.climb`: always the highest position; recomputed blocks are no longer candidates
    denylist            `_Pass.fixed`: a computation that was moved twice

XLA leaves the choice between the two to its users; here the faster plan that fits is returned. Unlike in XLA, an input
may be read from a copy that is made later, and a position that stays over the limit ends the search, because the plan
must fit.

Complexity: per recomputation, one pass over the live values; if single computations do not help, one pass over all
blocks before the position. Left out: compression (other layouts), offloading to the host, called computations.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Schedule
from fckpt.solve.core.bisection import bisected
from fckpt.solve.core.rules import Order, Rules, seconds_of
from fckpt.solve.core.starts import save_everything
from fckpt.solve.repair.editable import EditableSchedule
from fckpt.solve.repair.repair import Gaps

__all__ = ["xla"]

BLOCK = 8
"""XLA's block size limit."""


def xla(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the plan of XLA's heuristic for a limit of `budget` bytes.

    Args:
        graph: one training step.
        budget: bytes; None saves everything.

    Raises:
        BudgetError: the heuristic cannot reduce the peak to the budget.
    """
    rules = Rules(graph)
    return bisected(rules, lambda limit: _faster(rules, limit), budget, "xla")


def _faster(rules: Rules, limit: int | None) -> Order | None:
    plain = save_everything(rules)
    if limit is None:
        return plain
    found = [_Pass(rules, plain, limit).walk(), _Pass(rules, plain, limit).climb()]
    return min(filter(None, found), key=lambda order: seconds_of(rules, order), default=None)


class _Block(NamedTuple):
    """Consecutive computations, and the cost of running them again."""

    cost: int
    start: int
    runs: list[int]


class _Pass:
    """A schedule whose memory is being reduced."""

    def __init__(self, rules: Rules, order: Order, limit: int):
        self.rules, self.limit = rules, limit
        self.schedule = EditableSchedule(rules, order)
        self.gaps = Gaps(self.schedule)
        self.moved: set[int] = set()
        """Runs that replaced an earlier run."""
        self.fixed: set[int] = set()
        """Runs that must not be repeated."""

    def walk(self) -> Order | None:
        """Reduces one position after another to the limit."""
        position = 0
        while (over := self.schedule.profile[position:] > self.limit).any():
            position += int(over.argmax())
            if not self.attack(position):
                return None
        # Inputs that live longer for the recomputations may have raised positions that had been passed.
        return self.schedule.order() if self.schedule.profile.max(initial=0) <= self.limit else None

    def climb(self) -> Order | None:
        """Reduces the highest position until no position exceeds the limit."""
        while self.schedule.profile.max(initial=0) > self.limit:
            known = len(self.schedule.node)
            if not self.attack(int(self.schedule.profile.argmax())):
                return None
            self.fixed.update(range(known, len(self.schedule.node)))
        return self.schedule.order()

    def attack(self, position: int) -> bool:
        """Runs the best block before `position` again after it; returns whether that reduced the bytes held there."""
        least = size = 1
        while size <= BLOCK:
            block = self.best(position, least, size)
            if block is not None:
                before = int(self.schedule.profile[position])
                self.recompute(block.runs, position)
                return bool(self.schedule.profile[position] < before)
            least, size = size + 1, 2 * size
        return False

    def best(self, position: int, least: int, most: int) -> _Block | None:
        """Returns the block of `least` to `most` computations before `position` with the least cost."""
        schedule = self.schedule
        runs = [r for r in schedule.at[:position].tolist() if schedule.node[r] >= 0]
        live, movable = self.live(position)
        nbytes = np.array([live.get(r, 0) for r in runs], dtype=np.int64)
        barred = np.array([r in self.fixed or self.rules.pinned[schedule.node[r]] for r in runs], dtype=np.int64)
        sums, bars = (np.concatenate([[0], np.cumsum(a)]) for a in (nbytes, barred))
        hopes: list[tuple[int, int, int]] = []  # lower bounds: a block reduces at most its live bytes
        for size in range(least, min(most, len(runs)) + 1):
            bound = sums[size:] - sums[:-size]
            starts = np.flatnonzero((bound > 0) & (bars[size:] == bars[:-size])).tolist()
            hopes += [(0 if size == 1 and runs[i] in movable else self.limit // int(bound[i]), i, size) for i in starts]
        found: _Block | None = None
        for hope, start, size in sorted(hopes):
            if found is not None and (hope, start) >= found[:2]:
                break
            block = runs[start : start + size]
            reduced = self.reduced(block, live, position)
            if reduced > 0:
                cost = hope if hope == 0 else self.limit // reduced
                if found is None or (cost, start) < found[:2]:
                    found = _Block(cost, start, block)
        return found

    def live(self, position: int) -> tuple[dict[int, int], set[int]]:
        """Returns the idle bytes at `position` by the run that made them, and the runs whose outputs are unread."""
        schedule = self.schedule
        nbytes: dict[int, int] = {}
        read: set[int] = set()
        for row in self.gaps.rows_around(position).tolist():
            value, first = int(self.gaps.value[row]), int(self.gaps.first[row])
            maker = first
            if not schedule.makes(first, value):
                runs = schedule.runs[schedule.producer[value] or 0]
                maker = runs[bisect_left(runs, position, key=schedule.places.__getitem__) - 1]
                read.add(maker)
            nbytes[maker] = nbytes.get(maker, 0) + schedule.nbytes[value]
        return nbytes, {r for r in nbytes if r not in read and self.is_unread(r, position)}

    def is_unread(self, run: int, position: int) -> bool:
        schedule = self.schedule
        outputs = self.rules.graph.nodes[schedule.node[run]].outputs
        return all(schedule.index(v, position + 1) - schedule.index(v, schedule.places[run]) == 1 for v in outputs)

    def reduced(self, block: list[int], live: dict[int, int], position: int) -> int:
        """Returns the bytes freed at `position` if `block` runs again after it; 0 if it may not run again."""
        schedule, graph = self.schedule, self.rules.graph
        nodes = [schedule.node[r] for r in block]
        mine = {v for index in nodes for v in graph.nodes[index].outputs}
        uses = [r for index in nodes if (r := self.next_use(index, position)) is not None]
        target = min(schedule.places[r] for r in uses)
        reduced = sum(live.get(r, 0) for r in block)
        for value in {v for index in nodes for v in graph.nodes[index].inputs}.difference(mine):
            if schedule.is_live(value, target):
                continue
            i = schedule.index(value, target)
            end = schedule.places[schedule.events[value][i - 1]] if i else -1  # where its last copy is freed
            if end < 0 or (value in self.rules.unsaved and end < schedule.split <= target):
                return 0
            if end < position:
                reduced -= schedule.nbytes[value]
        return reduced

    def next_use(self, index: int, position: int) -> int | None:
        """Returns the first run after `position` that reads what node `index` made before it."""
        schedule = self.schedule
        found = []
        for value in self.rules.graph.nodes[index].outputs:
            events = schedule.events[value]
            i = schedule.index(value, position + 1)
            if i < len(events) and not schedule.makes(events[i], value):
                found.append(events[i])
        return min(found, key=lambda r: schedule.places[r], default=None)

    def recompute(self, block: list[int], position: int) -> None:
        """Runs `block` again: each computation directly before the first use of its results after `position`."""
        schedule = self.schedule
        changed: set[int] = set()
        for run in reversed(block):
            index = schedule.node[run]
            use = self.next_use(index, position)
            if use is None:
                continue
            new = schedule.insert([index], use)[0]
            changed.update(schedule.touched([index]))
            for useless in schedule.useless(self.rules.graph.nodes[index].outputs, schedule.places[new]):
                changed.update(schedule.touched(schedule.remove(useless)))
            if schedule.node[run] < 0:
                (self.fixed if run in self.moved else self.moved).add(new)
        self.gaps.refresh(sorted(changed))
