"""Recomputation as XLA has it: greedy by bytes alone.

HloRematerialization, https://github.com/openxla/xla, xla/hlo/transforms/simplifiers/hlo_rematerialization.cc (read in
2026; as a planner for JAX it has no paper). Where more than the limit is live, run something again: of all blocks of
up to `BLOCK` consecutive computations before that point, the one with the least

    cost = memory limit / bytes reduced         in whole numbers, the first of several; 0 if it is but moved

whose results are then computed again before their next use, for all later uses. What it takes in time has no part in
the choice. Nothing is optimal, and nothing says that a limit is met that could be: "Can't reduce memory use below".

    bytes reduced       `_Pass.reduced`: results that are live at the point and not in use there, less inputs that are
                        not live, and would have to be kept for it
    kAlwaysRemat        `_Pass.walk`: through the schedule from its beginning, wherever the limit is exceeded
    kPeakPriority       `_Pass.climb`: the highest point, always; what was computed again is not a candidate any more
    denylist            `_Pass.fixed`: a computation that was moved twice

XLA leaves the choice between the two to its users; here the faster plan that fits is taken. Unlike there an input may
be read from a copy that is made later, and a point that stays over the limit ends the search, for what comes out must
fit.

Complexity: per computation that runs again, a look at what is live at the point; where single computations do not help,
at all blocks before it. Left out: compression (other layouts), offloading to the host, called computations.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Schedule
from fckpt.solve.core.bisection import fitted
from fckpt.solve.core.rules import Order, Rules, seconds_of
from fckpt.solve.core.starts import save_everything
from fckpt.solve.repair.editable import Tape
from fckpt.solve.repair.repair import Gaps

__all__ = ["xla"]

BLOCK = 8
"""The block size limit."""


def xla(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the plan of XLA's greedy for a limit of `budget` bytes.

    Args:
        graph: one training step.
        budget: bytes; None saves everything.

    Raises:
        BudgetError: it cannot reduce the peak so far.
    """
    rules = Rules(graph)
    return fitted(rules, lambda limit: _faster(rules, limit), budget, "xla")


def _faster(rules: Rules, limit: int | None) -> Order | None:
    plain = save_everything(rules)
    if limit is None:
        return plain
    found = [_Pass(rules, plain, limit).walk(), _Pass(rules, plain, limit).climb()]
    return min(filter(None, found), key=lambda order: seconds_of(rules, order), default=None)


class _Block(NamedTuple):
    """Consecutive computations, and how good it is to run them again."""

    cost: int
    start: int
    moments: list[int]


class _Pass:
    """A schedule that is being reduced."""

    def __init__(self, rules: Rules, order: Order, limit: int):
        self.rules, self.limit = rules, limit
        self.tape = Tape(rules, order)
        self.gaps = Gaps(self.tape)
        self.moved: set[int] = set()
        """Moments that took the place of others."""
        self.fixed: set[int] = set()
        """Moments that are not to run again."""

    def walk(self) -> Order | None:
        """Brings one point after the other under the limit."""
        position = 0
        while (over := self.tape.memory[position:] > self.limit).any():
            position += int(over.argmax())
            if not self.attack(position):
                return None
        # What lived on for what runs again may have raised points that had been passed.
        return self.tape.order() if self.tape.memory.max(initial=0) <= self.limit else None

    def climb(self) -> Order | None:
        """Brings the highest point down until it is under the limit."""
        while self.tape.memory.max(initial=0) > self.limit:
            known = len(self.tape.node)
            if not self.attack(int(self.tape.memory.argmax())):
                return None
            self.fixed.update(range(known, len(self.tape.node)))
        return self.tape.order()

    def attack(self, position: int) -> bool:
        """Runs the best block before `position` again behind it; returns whether that took bytes off it."""
        least = size = 1
        while size <= BLOCK:
            block = self.best(position, least, size)
            if block is not None:
                before = int(self.tape.memory[position])
                self.repeat(block.moments, position)
                return bool(self.tape.memory[position] < before)
            least, size = size + 1, 2 * size
        return False

    def best(self, position: int, least: int, most: int) -> _Block | None:
        """The block of `least` to `most` computations before `position` with the least cost."""
        tape = self.tape
        moments = [m for m in tape.at[:position].tolist() if tape.node[m] >= 0]
        live, movable = self.live(position)
        nbytes = np.array([live.get(m, 0) for m in moments], dtype=np.int64)
        barred = np.array([m in self.fixed or self.rules.pinned[tape.node[m]] for m in moments], dtype=np.int64)
        sums, bars = (np.concatenate([[0], np.cumsum(a)]) for a in (nbytes, barred))
        hopes: list[tuple[int, int, int]] = []  # no block costs less than its live bytes say
        for size in range(least, min(most, len(moments)) + 1):
            bound = sums[size:] - sums[:-size]
            starts = np.flatnonzero((bound > 0) & (bars[size:] == bars[:-size])).tolist()
            hopes += [
                (0 if size == 1 and moments[i] in movable else self.limit // int(bound[i]), i, size) for i in starts
            ]
        found: _Block | None = None
        for hope, start, size in sorted(hopes):
            if found is not None and (hope, start) >= found[:2]:
                break
            block = moments[start : start + size]
            reduced = self.reduced(block, live, position)
            if reduced > 0:
                cost = hope if hope == 0 else self.limit // reduced
                if found is None or (cost, start) < found[:2]:
                    found = _Block(cost, start, block)
        return found

    def live(self, position: int) -> tuple[dict[int, int], set[int]]:
        """By moment: the bytes that it made and that lie idle at `position`. And moments of which nothing was read."""
        tape = self.tape
        nbytes: dict[int, int] = {}
        read: set[int] = set()
        for row in self.gaps.crossing(position).tolist():
            value, first = int(self.gaps.value[row]), int(self.gaps.first[row])
            maker = first
            if not tape.makes(first, value):
                runs = tape.runs[tape.producer[value] or 0]
                maker = runs[bisect_left(runs, position, key=tape.places.__getitem__) - 1]
                read.add(maker)
            nbytes[maker] = nbytes.get(maker, 0) + tape.nbytes[value]
        return nbytes, {m for m in nbytes if m not in read and self.is_unread(m, position)}

    def is_unread(self, moment: int, position: int) -> bool:
        tape = self.tape
        outputs = self.rules.graph.nodes[tape.node[moment]].outputs
        return all(tape.index(v, position + 1) - tape.index(v, tape.places[moment]) == 1 for v in outputs)

    def reduced(self, block: list[int], live: dict[int, int], position: int) -> int:
        """The bytes that go at `position` if `block` runs again behind it; 0 if it may not."""
        tape, graph = self.tape, self.rules.graph
        nodes = [tape.node[m] for m in block]
        mine = {v for index in nodes for v in graph.nodes[index].outputs}
        uses = [m for index in nodes if (m := self.next_use(index, position)) is not None]
        target = min(tape.places[m] for m in uses)
        reduced = sum(live.get(m, 0) for m in block)
        for value in {v for index in nodes for v in graph.nodes[index].inputs}.difference(mine):
            if tape.is_live(value, target):
                continue
            i = tape.index(value, target)
            end = tape.places[tape.events[value][i - 1]] if i else -1  # where its last copy goes
            if end < 0 or (value in self.rules.unsaved and end < tape.split <= target):
                return 0
            if end < position:
                reduced -= tape.nbytes[value]
        return reduced

    def next_use(self, index: int, position: int) -> int | None:
        """The first moment behind `position` that reads what node `index` made before it."""
        tape = self.tape
        found = []
        for value in self.rules.graph.nodes[index].outputs:
            events = tape.events[value]
            i = tape.index(value, position + 1)
            if i < len(events) and not tape.makes(events[i], value):
                found.append(events[i])
        return min(found, key=lambda m: tape.places[m], default=None)

    def repeat(self, block: list[int], position: int) -> None:
        """Runs `block` again, each computation before the first use of its results behind `position`."""
        tape = self.tape
        changed: set[int] = set()
        for moment in reversed(block):
            index = tape.node[moment]
            use = self.next_use(index, position)
            if use is None:
                continue
            new = tape.insert([index], use)[0]
            changed.update(tape.touched([index]))
            for useless in tape.useless(self.rules.graph.nodes[index].outputs, tape.places[new]):
                changed.update(tape.touched(tape.remove(useless)))
            if tape.node[moment] < 0:
                (self.fixed if moment in self.moved else self.moved).add(new)
        self.gaps.refresh(sorted(changed))
