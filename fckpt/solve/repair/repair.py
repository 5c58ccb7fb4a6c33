"""Local moves on a `EditableSchedule`: free a value where it lies idle and compute it again, or stop computing it again.

`Repair` is peak-driven as XLA's HloRematerialization is (https://github.com/openxla/xla,
xla/hlo/transforms/simplifiers/hlo_rematerialization.h, `kPeakPriority`): it attacks the highest point of the profile.
Unlike XLA it weighs seconds: a move is as good as the bytes times steps over budget that it removes per second. `prune`
goes the other way. Both are heuristics, without a guarantee; every number they compare is exact.

Complexity: a move costs a few slices of the profile. There are about as many moves as values to evict. Small moves come
first, and wider ones when none of them helps: where a node has several inputs, all that can be computed again is many
times as much as what is worth it.

Left out: moves of a computation without repeating it (the order comes from `seeds`), random restarts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fckpt.graph.graph import Node
from fckpt.solve.core.rules import Rules
from fckpt.solve.repair.editable import EditableSchedule

__all__ = ["Gaps", "Repair", "prune", "remove_if"]

LEVELS = 10
"""How many generations of missing ancestors a move computes again before it gives up."""
PASSES = 2
"""How often `prune` looks at all repetitions: what did not fit may fit once others have gone."""
TOLERANCE = 1.02
"""A move this much worse than the best is as good, where another look at all of them would cost time."""
FORGET = 0.75
"""All scores are taken anew whenever the excess has fallen to this part of what it was."""
PATIENCE = 50
"""After so many moves that remove nothing over budget it gives up: gains are exact, but for overwritten inputs and for
values that were to live longer before a further generation turned out to make them."""
NODES = 8
"""A move of so many nodes takes about twice as long to weigh as one of few."""
NARROW, WIDE = 32, 64
"""Moves have up to so many nodes at first, and twice as many whenever no move helps, up to the second number."""
PREFERENCE = {"prefer_save": 1.001, "prefer_recompute": 0.999}
"""What the tie-breakers of a policy do to the price of computing a value again."""


class Move(NamedTuple):
    """Computes `nodes` just before `run`."""

    nodes: list[int]
    run: int


class MoveWeights:
    """What moves are weighed by, of the graph alone."""

    def __init__(self, rules: Rules):
        graph, seconds = rules.graph, rules.seconds
        self.least_price = 1e-9 * sum(seconds) / max(1, len(seconds)) or 1e-9
        self.prices = np.array([_preference(rules, n) * seconds[n.id] for n in graph.nodes]) + self.least_price
        """By node: what it costs to run, as decisions go."""
        self.producer = np.array([-1 if v.producer is None else v.producer for v in graph.values], dtype=np.int64)
        """By value: its node, or -1."""
        self.taken = [sum(rules.nbytes[v] for v in n.outputs) for n in graph.nodes]
        """By node: the bytes that its results take while it runs."""
        made = [sum(rules.nbytes[v] for v in n.outputs if v not in rules.permanent) for n in graph.nodes]
        self.made = np.array(made, dtype=np.int64)
        """By node: the bytes that its results take until they are freed."""


class Gaps:
    """Where values lie idle: between an event and the next, a read. One row each; rows die when events change."""

    def __init__(self, schedule: EditableSchedule):
        self.schedule = schedule
        self.weights = MoveWeights(schedule.rules)
        self.rows: list[list[int]] = [[] for _ in schedule.nbytes]
        self.count = 0
        self.value = np.zeros(1024, dtype=np.int64)
        self.first = np.zeros(1024, dtype=np.int64)
        self.second = np.zeros(1024, dtype=np.int64)
        self.score = np.zeros(1024)
        """Price per excess removed, times the steps over budget, when it was last taken; 0 where it never was."""
        self.refresh(range(len(schedule.nbytes)))

    def copy(self, schedule: EditableSchedule) -> Gaps:
        """Returns gaps of their own, for a copy of the schedule; all scores are to be taken again."""
        twin = copy.copy(self)
        twin.schedule, twin.rows = schedule, [*self.rows]
        twin.value, twin.first, twin.second = self.value.copy(), self.first.copy(), self.second.copy()
        twin.score = np.zeros_like(self.score)
        return twin

    def refresh(self, values: Iterable[int]) -> None:
        """Takes up the events of `values` anew; the scores of unchanged gaps stay."""
        rules = self.schedule.rules
        for value in values:
            producer = self.schedule.producer[value]
            if (
                producer is None
                or value in rules.permanent
                or rules.pinned[producer]
                or not self.schedule.nbytes[value]
            ):
                continue
            events = self.schedule.events[value]
            old = {(int(self.first[r]), int(self.second[r])): r for r in self.rows[value]}
            rows = []
            for first, second in pairwise(events):
                if not self.schedule.makes(second, value):
                    row = old.pop((first, second), -1)
                    rows.append(self._add(value, first, second) if row < 0 else row)
            for row in old.values():
                self.first[row] = self.second[row] = 0  # crosses nothing
            self.rows[value] = rows

    def _add(self, value: int, first: int, second: int) -> int:
        row = self.count
        if row == len(self.first):
            self.value, self.first, self.second = (
                np.concatenate([a, np.zeros_like(a)]) for a in (self.value, self.first, self.second)
            )
            self.score = np.concatenate([self.score, np.zeros_like(self.score)])
        self.value[row], self.first[row], self.second[row], self.score[row] = value, first, second, 0.0
        self.count += 1
        return row

    def rows_around(self, position: int) -> np.ndarray:
        """The rows of the gaps around `position`."""
        count, place = self.count, self.schedule.place
        return np.flatnonzero((place[self.first[:count]] < position) & (place[self.second[:count]] > position))

    def sums(self, rows: np.ndarray, amount: np.ndarray) -> np.ndarray:
        """The sum over each of `rows` of an `amount` per position."""
        total = np.concatenate([[0], np.cumsum(amount)])
        place = self.schedule.place
        return total[place[self.second[rows]]] - total[place[self.first[rows]] + 1]


class Repair:
    """Brings a schedule under a budget."""

    def __init__(
        self,
        schedule: EditableSchedule,
        budget: int,
        gaps: Gaps | None = None,
        factor: np.ndarray | None = None,
        max_candidates: int | None = None,
    ):
        """Prepares to edit `schedule`.

        Args:
            schedule: the sequence.
            budget: bytes.
            gaps: those of the schedule, if they are known.
            factor: what the price of each node is multiplied by.
            max_candidates: how many candidates are looked at for a move, unless none of them helps; None looks at all that
                may be the best.
        """
        self.schedule = schedule
        self.budget = budget
        self.max_candidates = max_candidates
        self.seconds = 0.0
        """The time of the repetitions that have come, without those that have gone."""
        self.width = NARROW
        """The most nodes of a move."""
        self.effort = 0
        """Moves that have been weighed, more or less: one of many nodes counts more than once."""
        self.gaps = Gaps(schedule) if gaps is None else gaps
        self.weights = self.gaps.weights
        self.prices = self.weights.prices if factor is None else self.weights.prices * factor
        """By node: what it costs to run here."""
        self.over_before: list[int] = []
        """By position, and at the end: how many positions before it are over the budget, as `best` last counted."""
        self._clear()

    def _clear(self) -> None:
        """Drops what was looked up for one run."""
        self.ends: dict[int, int] = {}
        """By value: where its last copy before the run is freed, -1 if there is none."""
        self.free_from: dict[int, int | None] = {}
        """By value: where its memory is free before the run, None where it is not live then."""
        self.prices_here: dict[int, float] = {}
        """By node: what it costs to run before the run."""

    def run(self, limit: float = float("inf"), effort: float = float("inf")) -> bool:
        """Moves until the peak is at most the budget.

        Args:
            limit: gives up where all repetitions together take longer.
            effort: and where so many moves have been weighed.

        Returns:
            Whether it is; false also where no move helps.
        """
        if limit < float("inf"):
            schedule = self.schedule
            limit -= sum(schedule.rules.seconds[schedule.node[r]] for runs in schedule.runs for r in runs[1:])
        stale = self.excess()
        least, idle = stale, 0
        while idle < PATIENCE and self.seconds <= limit and self.effort <= effort:
            position = int(self.schedule.profile.argmax())
            if self.schedule.profile[position] <= self.budget:
                return True
            if (excess := self.excess()) < FORGET * stale:
                stale = excess
                self.gaps.score[:] = 0.0
            move = self.best(position)
            if move is None:
                if self.width >= WIDE:
                    return False
                self.width *= 2
                self.gaps.score[:] = 0.0
                continue
            self.apply(move)
            idle = 0 if excess < least else idle + 1
            least = min(excess, least)
        return False

    def best(self, position: int) -> Move | None:
        """The move with the least price per byte and step over budget, of those that free a value at `position`."""
        gaps = self.gaps
        rows = gaps.rows_around(position)
        if not len(rows):
            return None
        over = self.schedule.profile > self.budget
        steps = gaps.sums(rows, over)
        self.over_before = [0, *np.cumsum(over).tolist()]
        if np.isinf(gaps.score[rows]).all():
            gaps.score[rows] = 0.0  # they may help by now
        # Old scores are scaled by how many steps over budget are left, and looked at again only at the front.
        score = np.maximum(gaps.score[rows] / steps, self.least_score(rows, steps))
        exact = np.zeros(len(rows), dtype=bool)
        moves: dict[int, Move | None] = {}
        while True:
            i = int(score.argmin())
            if np.isinf(score[i]):
                return None
            if exact[i]:
                return moves[i]
            row = int(rows[i])
            score[i], moves[i] = self.evaluate(int(gaps.value[row]), int(gaps.second[row]))
            gaps.score[row] = score[i] * steps[i]
            exact[i] = True
            others = score[~exact]
            if score[i] < np.inf and score[i] <= TOLERANCE * others.min(initial=np.inf):
                return moves[i]
            if self.max_candidates is not None and len(moves) >= self.max_candidates:
                k = min(moves, key=score.__getitem__)
                if score[k] < np.inf:
                    return moves[k]

    def least_score(self, rows: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """The least that the price per excess removed can be, for each of `rows`."""
        gaps, schedule = self.gaps, self.schedule
        producer = self.weights.producer[gaps.value[rows]]
        excess = gaps.sums(rows, np.maximum(schedule.profile - self.budget, 0))
        gain = np.minimum(self.weights.made[producer] * steps, excess)
        last = np.array([schedule.runs[index][-1] for index in producer.tolist()])
        later = schedule.place[last] > schedule.place[gaps.second[rows]]
        return np.where(later, self.weights.least_price, self.prices[producer]) / gain

    def evaluate(self, value: int, run: int) -> tuple[float, Move | None]:
        """The best move that computes `value` again before `run`, and its price per excess removed."""
        self.effort += 1
        self._clear()
        best: tuple[float, Move | None] = (np.inf, None)
        for nodes, extended in self.closures(value, run):
            self.effort += 1 + len(nodes) // NODES
            changes = self.changes(nodes, extended, run)
            most = self.most_gain(changes, run)
            if most > 0:  # otherwise it cannot help, and the rest is not worth its time
                price = sum([self.price(index, run) for index in nodes])
                if price / most < best[0]:
                    gain = self.gain(nodes, extended, changes, run)
                    if gain > 0 and price / gain < best[0]:
                        best = (price / gain, Move(nodes, run))
        return best

    def closures(self, value: int, run: int) -> Iterator[tuple[list[int], list[int]]]:
        """Yields nodes to run again to have `value` before `run`, and the values that must live longer for them."""
        schedule, position = self.schedule, self.schedule.places[run]
        nodes: set[int] = set()
        extended: list[int] = []
        frontier = [value]
        for _ in range(LEVELS):
            fresh = {p for v in frontier if (p := schedule.producer[v]) is not None}
            nodes |= fresh
            if len(nodes) > self.width:
                return
            missing: list[int] = []
            for index in sorted(fresh):
                for v in schedule.rules.graph.nodes[index].inputs:
                    known = v in missing or v in extended or schedule.producer[v] in nodes
                    if not known and self.free_behind(v, position) is None:
                        missing.append(v)
            longer = [v for v in missing if self.must_extend(v, position)]
            if not all(self.may_extend(v, position) for v in longer):
                return
            extended += longer
            frontier = [v for v in missing if v not in longer]
            if all(self.may_extend(v, position) for v in frontier):
                yield sorted(nodes), [*extended, *frontier]
            if not frontier:
                return

    def must_extend(self, value: int, position: int) -> bool:
        """Whether `value` cannot be made again, or can live on until `position` at no price."""
        schedule = self.schedule
        producer = schedule.producer[value]
        if producer is None or schedule.rules.pinned[producer]:
            return True
        end = self.end(value, position)
        if not self.may_extend(value, position) or self.over_before[position] > self.over_before[end + 1]:
            return False
        return int(schedule.profile[end + 1 : position].max(initial=0)) <= self.budget - schedule.nbytes[value]

    def may_extend(self, value: int, position: int) -> bool:
        """Whether the last copy of `value` before `position` may live until then."""
        end = self.end(value, position)
        return end >= 0 and not (end < self.schedule.split <= position and value in self.schedule.rules.unsaved)

    def end(self, value: int, position: int) -> int:
        """Where the last copy of `value` before `position` is freed, -1 if there is none: looked up once a run."""
        end = self.ends.get(value)
        if end is None:
            end = self.ends[value] = self.schedule.end(value, position)
        return end

    def free_behind(self, value: int, position: int) -> int | None:
        """`behind`, None unless `value` is live at `position`: looked up once a run."""
        if value not in self.free_from:
            self.free_from[value] = self.behind(value, position) if self.schedule.is_live(value, position) else None
        return self.free_from[value]

    def behind(self, value: int, position: int) -> int:
        """Where the memory of the last copy of `value` before `position` is free: at its end, if it is overwritten."""
        end = self.end(value, position)
        index = self.schedule.node[self.schedule.at[end]] if end >= 0 else -1
        return end + (index < 0 or value not in self.schedule.rules.graph.nodes[index].overwrites)

    def price(self, index: int, run: int) -> float:
        """What it costs to run node `index` before `run`: looked up once a run."""
        if index not in self.prices_here:
            self.prices_here[index] = self._price(index, run)
        return self.prices_here[index]

    def _price(self, index: int, run: int) -> float:
        """What it costs to run node `index` before `run`: next to nothing if a later run becomes useless by it."""
        schedule = self.schedule
        position = schedule.places[run]
        later = next((r for r in schedule.runs[index] if schedule.places[r] > position), None)
        if later is None:
            return float(self.prices[index])
        if int(schedule.profile[position : schedule.places[later]].max()) + self.weights.made[index] <= self.budget:
            return self.weights.least_price
        return float(self.prices[index])

    def changes(self, nodes: list[int], extended: list[int], run: int) -> dict[int, tuple[int, int]]:
        """By value: from where on it holds how many bytes more, up to `run`, when `nodes` run before that."""
        schedule = self.schedule
        position = schedule.places[run]
        found: dict[int, tuple[int, int]] = {}
        for index in nodes:
            for value in schedule.rules.graph.nodes[index].outputs:
                if value not in schedule.rules.permanent and (free := self.free_behind(value, position)) is not None:
                    found[value] = (free, -schedule.nbytes[value])
        for value in extended:
            found[value] = (self.behind(value, position), schedule.nbytes[value])
        return found

    def most_gain(self, changes: dict[int, tuple[int, int]], run: int) -> int:
        """The most by which `changes` can lower the excess: by what they do where the profile is over the budget."""
        before = self.over_before
        all_before = before[self.schedule.places[run]]
        return sum([change * (before[start] - all_before) for start, change in changes.values()])

    def gain(self, nodes: list[int], extended: list[int], changes: dict[int, tuple[int, int]], run: int) -> int:
        """By how much the excess, bytes times steps over budget, falls when `nodes` run before `run`.

        If it does not fall, what is returned is at most 0, and no less than the gain.
        """
        schedule = self.schedule
        first = min([start for start, _ in changes.values()])
        over = schedule.profile[first : schedule.places[run]] - self.budget
        gain = int(np.maximum(over, 0).sum())
        for start, change in changes.values():
            over[start - first :] += change
        gain -= int(np.maximum(over, 0, out=over).sum())
        if gain <= 0:
            return gain
        held = schedule.before(run) + sum([change for _, change in changes.values()])
        return gain - self._transient_excess(nodes, {*extended}, {*changes}.difference(extended), held)

    def _transient_excess(self, nodes: list[int], extended: set[int], stays: set[int], held: int) -> int:
        """The excess while `nodes` run, `held` bytes being held before; `extended` go with their last use."""
        graph, permanent, nbytes, excess = (
            self.schedule.rules.graph,
            self.schedule.rules.permanent,
            self.schedule.nbytes,
            0,
        )
        last = {v: index for index in nodes for v in graph.nodes[index].inputs}
        mine = set(extended)
        for index in nodes:
            node = graph.nodes[index]
            over = any(last[v] == index and v in mine and v not in stays for v in node.overwrites)
            made = 0 if over else self.weights.taken[index]
            excess += max(0, held + made + node.temporary_nbytes - self.budget)
            for value in node.outputs:
                if value in stays or (value in last and value not in permanent):
                    held += nbytes[value]
                    mine.add(value)
            for value in node.inputs:
                if last[value] == index and value in mine and value not in stays:
                    held -= nbytes[value]
        return excess

    def apply(self, move: Move) -> None:
        """Makes `move`, and takes out what it makes superfluous."""
        schedule = self.schedule
        graph = schedule.rules.graph
        new = schedule.insert(move.nodes, move.run)
        gone: list[int] = []
        outputs = [v for index in move.nodes for v in graph.nodes[index].outputs]
        for run in schedule.useless(outputs, schedule.places[new[0]]):
            gone += schedule.remove(run)
        excess = self.excess()
        for index, run in zip(move.nodes, new, strict=True):
            later = next((r for r in schedule.runs[index] if schedule.places[r] > schedule.places[run]), None)
            if later is not None:
                gone += remove_if(schedule, later, lambda: self.excess() <= excess)
        self.gaps.refresh(sorted(schedule.touched([*move.nodes, *gone])))
        seconds = schedule.rules.seconds
        self.seconds += sum(seconds[index] for index in move.nodes) - sum(seconds[index] for index in gone)

    def excess(self) -> int:
        """Bytes times steps over budget."""
        return int(np.maximum(self.schedule.profile - self.budget, 0).sum())


def _preference(rules: Rules, node: Node) -> float:
    return min((PREFERENCE.get(rules.graph.values[v].decision, 1.0) for v in node.outputs), default=1.0)


def remove_if(schedule: EditableSchedule, run: int, accepts: Callable[[], bool]) -> list[int]:
    """Takes out a repetition, if nothing speaks against it, and returns the nodes that went: none if it stays.

    Args:
        schedule: the sequence.
        run: not the first run of its node.
        accepts: asked afterwards, whether the schedule may stay like this.
    """
    outputs = schedule.rules.graph.nodes[schedule.node[run]].outputs
    gone = schedule.remove(run)
    allowed = not any(v in schedule.rules.unsaved and schedule.crosses_boundary(v) for v in outputs)
    if allowed and accepts():
        return gone
    schedule.restore(schedule.gone)
    return []


def prune(schedule: EditableSchedule, budget: int, parent: EditableSchedule | None = None) -> list[int]:
    """Takes out repetitions, the dearest first, as long as the peak stays at most `budget` bytes.

    Args:
        schedule: the sequence.
        budget: bytes.
        parent: a pruned schedule that this one was copied from. What had to stay there is looked at again only where less
            memory is held now.

    Returns:
        The nodes that went.
    """
    found: list[int] = []
    seconds = schedule.rules.seconds
    for _ in range(PASSES):
        repeated = [r for runs in schedule.runs for r in runs[1:]]
        if parent is not None:
            repeated = _worth_another_look(schedule, parent, repeated)
        repeated.sort(key=lambda r: (-seconds[schedule.node[r]], r))
        before = len(found)
        for run in repeated:
            index = schedule.node[run]
            if index >= 0 and schedule.runs[index][0] != run and _may_remove(schedule, run, budget):
                found += remove_if(schedule, run, lambda: bool(schedule.profile.max() <= budget))
        if len(found) == before:
            break
    return found


def _may_remove(schedule: EditableSchedule, run: int, budget: int) -> bool:
    """Whether the copies that would live on without a repetition may have room: no edit, and seldom wrongly no."""
    nodes, permanent, nbytes, place = (
        schedule.rules.graph.nodes,
        schedule.rules.permanent,
        schedule.nbytes,
        schedule.places,
    )
    position = place[run]
    changes: list[tuple[int, int]] = []
    ends: list[int] = []
    for value in nodes[schedule.node[run]].outputs:
        if value not in permanent and schedule.is_read_after(value, position):
            ends.append(schedule.end(value, position) + 1)
            changes.append((ends[-1], nbytes[value]))
    if not ends:
        return True
    first = min(ends)
    held = schedule.profile[first:position]
    highest = int(held.argmax()) if len(held) else 0
    if not len(held) or held[highest] + sum([change for _, change in changes]) <= budget:
        return True
    stack = [run]
    while stack:
        last = stack.pop()
        for value in nodes[schedule.node[last]].inputs:
            if value in permanent:
                continue
            events = schedule.events[value]
            before = schedule.index(value, place[last]) - 1
            if before < 0 or (before + 2 < len(events) and not schedule.makes(events[before + 2], value)):
                continue  # not made before, or read after
            maker = events[before]
            changes.append((place[maker] + 1, -nbytes[value]))
            if schedule.makes(maker, value) and schedule.runs[schedule.node[maker]][0] != maker:
                stack.append(maker)
    if held[highest] + sum([change for start, change in changes if start <= first + highest]) > budget:
        return False  # one run is enough to say no, and mostly it does
    held = held.copy()
    for start, change in changes:
        held[max(start - first, 0) :] += change
    return int(held.max(initial=0)) <= budget


def _worth_another_look(schedule: EditableSchedule, parent: EditableSchedule, repeated: Sequence[int]) -> list[int]:
    """Those of `repeated` that are new, or for which copies would have to live on where memory has become free."""
    old = len(parent.place)
    held = parent.profile[parent.place[np.minimum(schedule.at, old - 1)]]
    less = np.concatenate([[0], np.cumsum((schedule.at >= old) | (schedule.profile < held))])
    found = []
    for run in repeated:
        position = schedule.places[run]
        outputs = schedule.rules.graph.nodes[schedule.node[run]].outputs
        ends = [schedule.end(v, position) for v in outputs if v not in schedule.rules.permanent]
        if run >= old or less[position] > less[min(ends, default=0)]:
            found.append(run)
    return found
