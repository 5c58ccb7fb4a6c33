"""Local moves on a `Tape`: free a value where it lies idle and compute it again, or stop computing it again.

`repair` is peak-driven as XLA's HloRematerialization is (https://github.com/openxla/xla,
xla/hlo/transforms/simplifiers/hlo_rematerialization.h, `kPeakPriority`): it attacks the highest point of the profile.
Unlike XLA it weighs seconds: a move is as good as the bytes times steps over budget that it removes per second. `prune`
goes the other way. Both are heuristics, without a guarantee; every number they compare is exact.

Complexity: a move costs a few slices of the profile. There are about as many moves as values to evict.

Left out: moves of a computation without repeating it (the order comes from `orders`), random restarts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fckpt.solve.tape import Tape

__all__ = ["prune", "repair"]

LEVELS = 10
"""How many generations of missing ancestors a move computes again before it gives up."""
PASSES = 2
"""How often `prune` looks at all repetitions: what did not fit may fit once others have gone."""
TOLERANCE = 1.02
"""A move this much worse than the best is as good, where another look at all of them would cost time."""
FORGET = 0.75
"""All scores are taken anew whenever the excess has fallen to this part of what it was."""
PATIENCE = 50
"""After so many moves that remove nothing over budget it gives up: gains are exact but for overwritten inputs."""
PREFERENCE = {"prefer_save": 1.001, "prefer_recompute": 0.999}
"""What the tie-breakers of a policy do to the price of computing a value again."""


class Move(NamedTuple):
    """Computes `nodes` just before `moment`."""

    nodes: list[int]
    moment: int


class Gaps:
    """Where values lie idle: between an event and the next, a read. One row each; rows die when events change."""

    def __init__(self, tape: Tape):
        self.tape = tape
        self.rows: list[list[int]] = [[] for _ in tape.nbytes]
        self.value: list[int] = []
        self.first = np.zeros(1024, dtype=np.int64)
        self.second = np.zeros(1024, dtype=np.int64)
        self.score = np.zeros(1024)
        self.refresh(range(len(tape.nbytes)))

    def refresh(self, values: Iterable[int]) -> None:
        """Takes up the events of `values` anew; the scores of unchanged gaps stay."""
        rules = self.tape.rules
        for value in values:
            producer = self.tape.producer[value]
            if producer is None or value in rules.kept or rules.pinned[producer] or not self.tape.nbytes[value]:
                continue
            events = self.tape.events[value]
            old = {(int(self.first[r]), int(self.second[r])): r for r in self.rows[value]}
            rows = []
            for first, second in pairwise(events):
                if not self.tape.makes(second, value):
                    row = old.pop((first, second), -1)
                    rows.append(self._add(value, first, second) if row < 0 else row)
            for row in old.values():
                self.first[row] = self.second[row] = 0  # crosses nothing
            self.rows[value] = rows

    def _add(self, value: int, first: int, second: int) -> int:
        row = len(self.value)
        if row == len(self.first):
            self.first = np.concatenate([self.first, np.zeros_like(self.first)])
            self.second = np.concatenate([self.second, np.zeros_like(self.second)])
            self.score = np.concatenate([self.score, np.zeros_like(self.score)])
        self.value.append(value)
        self.first[row], self.second[row], self.score[row] = first, second, 0.0
        return row

    def crossing(self, position: int) -> np.ndarray:
        """The rows of the gaps around `position`."""
        count, place = len(self.value), self.tape.place
        return np.flatnonzero((place[self.first[:count]] < position) & (place[self.second[:count]] > position))

    def steps(self, rows: np.ndarray, budget: int) -> np.ndarray:
        """How many steps over `budget` lie within each of `rows`."""
        over = np.concatenate([[0], np.cumsum(self.tape.memory > budget)])
        place = self.tape.place
        return over[place[self.second[rows]]] - over[place[self.first[rows]] + 1]


class Repair:
    """Brings a tape under a budget."""

    def __init__(self, tape: Tape, budget: int):
        self.tape = tape
        self.budget = budget
        self.gaps = Gaps(tape)
        self.least_price = 1e-9 * sum(tape.rules.seconds) / max(1, len(tape.rules.seconds)) or 1e-9

    def run(self) -> bool:
        """Moves until the peak is at most the budget (true) or no move helps (false)."""
        stale = self.excess()
        least, idle = stale, 0
        while idle < PATIENCE:
            position = int(self.tape.memory.argmax())
            if self.tape.memory[position] <= self.budget:
                return True
            if (excess := self.excess()) < FORGET * stale:
                stale = excess
                self.gaps.score[:] = 0.0
            move = self.best(position)
            if move is None:
                return False
            self.apply(move)
            idle = 0 if excess < least else idle + 1
            least = min(excess, least)
        return False

    def best(self, position: int) -> Move | None:
        """The move with the least price per byte and step over budget, of those that free a value at `position`."""
        rows = self.gaps.crossing(position)
        if not len(rows):
            return None
        steps = self.gaps.steps(rows, self.budget)
        if np.isinf(self.gaps.score[rows]).all():
            self.gaps.score[rows] = 0.0  # they may help by now
        # Old scores are scaled by how many steps over budget are left, and looked at again only at the front.
        score = self.gaps.score[rows] / steps
        while True:
            i = int(score.argmin())
            if np.isinf(score[i]):
                return None
            row = int(rows[i])
            exact, move = self.evaluate(self.gaps.value[row], int(self.gaps.second[row]))
            self.gaps.score[row] = exact * steps[i]
            score[i] = np.inf
            if exact < np.inf and exact <= TOLERANCE * score.min():
                return move
            score[i] = exact

    def evaluate(self, value: int, moment: int) -> tuple[float, Move | None]:
        """The best move that computes `value` again before `moment`, and its price per excess removed."""
        best: tuple[float, Move | None] = (np.inf, None)
        for nodes, extended in self.closures(value, moment):
            gain = self.gain(nodes, extended, moment)
            if gain > 0:
                price = sum(self.price(index, moment) for index in nodes) / gain
                if price < best[0]:
                    best = (price, Move(nodes, moment))
        return best

    def closures(self, value: int, moment: int) -> Iterator[tuple[list[int], list[int]]]:
        """Yields nodes to run again to have `value` before `moment`, and the values that must live longer for them."""
        tape, position = self.tape, int(self.tape.place[moment])
        nodes: set[int] = set()
        extended: list[int] = []
        frontier = [value]
        for _ in range(LEVELS):
            fresh = {p for v in frontier if (p := tape.producer[v]) is not None}
            nodes |= fresh
            missing: list[int] = []
            for index in sorted(fresh):
                for v in tape.rules.graph.nodes[index].inputs:
                    known = v in missing or v in extended or tape.producer[v] in nodes
                    if not known and not tape.is_live(v, position):
                        missing.append(v)
            frontier = []
            for v in missing:
                (extended if self.must_extend(v, position) else frontier).append(v)
            if all(self.may_extend(v, position) for v in (*frontier, *extended)):
                yield sorted(nodes), [*extended, *frontier]
            if not frontier:
                return

    def must_extend(self, value: int, position: int) -> bool:
        """Whether `value` cannot be made again, or can live on until `position` at no price."""
        tape = self.tape
        producer = tape.producer[value]
        if producer is None or tape.rules.pinned[producer]:
            return True
        end = self.end(value, position)
        room = self.budget - tape.nbytes[value]
        return self.may_extend(value, position) and int(tape.memory[end + 1 : position].max(initial=0)) <= room

    def may_extend(self, value: int, position: int) -> bool:
        """Whether the last copy of `value` before `position` may live until then."""
        unsaved = value in self.tape.rules.unsaved and self.end(value, position) < self.tape.split <= position
        return not unsaved and self.end(value, position) >= 0

    def end(self, value: int, position: int) -> int:
        """Where the last copy of `value` before `position` is freed; -1 if there is none."""
        i = self.tape.index(value, position)
        return int(self.tape.place[self.tape.events[value][i - 1]]) if i else -1

    def behind(self, value: int, position: int) -> int:
        """Where the memory of the last copy of `value` before `position` is free: at its end, if it is overwritten."""
        end = self.end(value, position)
        index = self.tape.node[self.tape.at[end]] if end >= 0 else -1
        return end + (index < 0 or value not in self.tape.rules.graph.nodes[index].overwrites)

    def price(self, index: int, moment: int) -> float:
        """What it costs to run node `index` before `moment`: next to nothing if a later run becomes useless by it."""
        tape = self.tape
        position = tape.place[moment]
        outputs = tape.rules.graph.nodes[index].outputs
        later = next((m for m in tape.runs[index] if tape.place[m] > position), None)
        if later is not None:
            nbytes = sum(tape.nbytes[v] for v in outputs if v not in tape.rules.kept)
            if int(tape.memory[position : tape.place[later]].max()) + nbytes <= self.budget:
                return self.least_price
        factor = min((PREFERENCE.get(tape.rules.graph.values[v].decision, 1.0) for v in outputs), default=1.0)
        return factor * tape.rules.seconds[index] + self.least_price

    def gain(self, nodes: list[int], extended: list[int], moment: int) -> int:
        """By how much the excess, bytes times steps over budget, falls when `nodes` run before `moment`."""
        tape = self.tape
        position = int(tape.place[moment])
        changes: list[tuple[int, int]] = []
        stays: set[int] = set()
        for index in nodes:
            for value in tape.rules.graph.nodes[index].outputs:
                if value not in tape.rules.kept and tape.is_live(value, position):
                    changes.append((self.behind(value, position), -tape.nbytes[value]))
                    stays.add(value)
        changes += [(self.behind(value, position), tape.nbytes[value]) for value in extended]
        first = min(start for start, _ in changes)
        over = tape.memory[first:position] - self.budget
        before = int(np.maximum(over, 0).sum())
        for start, change in changes:
            over[start - first :] += change
        held = tape.before(moment) + sum(change for _, change in changes)
        return before - int(np.maximum(over, 0).sum()) - self._transient_excess(nodes, {*extended}, stays, held)

    def _transient_excess(self, nodes: list[int], extended: set[int], stays: set[int], held: int) -> int:
        """The excess while `nodes` run, `held` bytes being held before; `extended` go with their last use."""
        tape, excess = self.tape, 0
        last = {v: index for index in nodes for v in tape.rules.graph.nodes[index].inputs}
        mine = set(extended)
        for index in nodes:
            node = tape.rules.graph.nodes[index]
            over = any(last[v] == index and v in mine and v not in stays for v in node.overwrites)
            made = 0 if over else sum(tape.nbytes[v] for v in node.outputs)
            excess += max(0, held + made + node.temporary_nbytes - self.budget)
            for value in node.outputs:
                if value in stays or (value in last and value not in tape.rules.kept):
                    held += tape.nbytes[value]
                    mine.add(value)
            for value in node.inputs:
                if last[value] == index and value in mine and value not in stays:
                    held -= tape.nbytes[value]
        return excess

    def apply(self, move: Move) -> None:
        """Makes `move`, and takes out what it makes superfluous."""
        tape = self.tape
        graph = tape.rules.graph
        new = tape.insert(move.nodes, move.moment)
        changed = set(tape.touched(move.nodes))
        outputs = [v for index in move.nodes for v in graph.nodes[index].outputs]
        for moment in tape.useless(outputs, int(tape.place[new[0]])):
            changed.update(tape.touched(tape.remove(moment)))
        excess = self.excess()
        for index, moment in zip(move.nodes, new, strict=True):
            later = next((m for m in tape.runs[index] if tape.place[m] > tape.place[moment]), None)
            if later is not None:
                gone = without(tape, later, lambda: self.excess() <= excess)
                changed.update(tape.touched(gone))
        self.gaps.refresh(sorted(changed))

    def excess(self) -> int:
        """Bytes times steps over budget."""
        return int(np.maximum(self.tape.memory - self.budget, 0).sum())


def without(tape: Tape, moment: int, accepts: Callable[[], bool]) -> list[int]:
    """Takes out a repetition, if nothing speaks against it, and returns the nodes that went: none if it stays.

    Args:
        tape: the sequence.
        moment: not the first run of its node.
        accepts: asked afterwards, whether the tape may stay like this.
    """
    outputs = tape.rules.graph.nodes[tape.node[moment]].outputs
    gone = tape.remove(moment)
    allowed = not any(v in tape.rules.unsaved and tape.crosses_boundary(v) for v in outputs)
    if allowed and accepts():
        return gone
    tape.restore(tape.gone)
    return []


def repair(tape: Tape, budget: int) -> bool:
    """Frees and computes again until the peak is at most `budget` bytes. Returns whether it succeeded."""
    return Repair(tape, budget).run()


def prune(tape: Tape, budget: int) -> None:
    """Takes out repetitions, the dearest first, as long as the peak stays at most `budget` bytes."""
    for _ in range(PASSES):
        repeated = [m for runs in tape.runs for m in runs[1:]]
        repeated.sort(key=lambda m: (-tape.rules.seconds[tape.node[m]], m))
        found = False
        for moment in repeated:
            index = tape.node[moment]
            if index >= 0 and tape.runs[index][0] != moment:
                found |= bool(without(tape, moment, lambda: bool(tape.memory.max() <= budget)))
        if not found:
            return
