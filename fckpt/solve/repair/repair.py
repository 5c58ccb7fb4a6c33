"""Local moves on an editable schedule: free an idle value and recompute it later, or remove a recomputation.

`Repair` is peak-driven, like XLA's HloRematerialization (https://github.com/openxla/xla,
xla/hlo/transforms/simplifiers/hlo_rematerialization.h, `kPeakPriority`): it works on the highest position of the
profile. Unlike XLA it considers time: the score of a move is its cost in seconds, divided by the excess that it removes
(bytes over budget, summed over positions). `prune` does the opposite. Both are heuristics without a guarantee, but all
numbers that they compare are exact.

Complexity: a move costs a few slices of the profile, and there are about as many moves as values to free. Narrow moves
come first, and wider moves if none of them helps: if nodes have several inputs, the set of everything that can be
recomputed is many times larger than the useful part.

Left out: moving a computation without recomputing it (the order comes from `starts`), and random restarts.
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
"""The number of generations of missing ancestors that a move may recompute."""
PASSES = 2
"""The number of times `prune` examines all recomputations: one that was needed may become removable after others are
removed."""
TOLERANCE = 1.02
"""A move whose score is at most this many times the best possible score is accepted without examining the other
candidates."""
FORGET = 0.75
"""All scores are computed again whenever the excess has fallen to this fraction of its earlier value."""
PATIENCE = 50
"""The repair is abandoned after this many moves that do not reduce the excess. Gains are exact, except for overwritten
inputs, and for values that were to live longer before a further generation turned out to make them."""
NODES = 8
"""A move of this many nodes takes about twice as long to weigh as a move of a few."""
NARROW, WIDE = 32, 64
"""The largest number of nodes of a move at first; it is doubled whenever no move helps, up to the second number."""
PREFERENCE = {"prefer_save": 1.001, "prefer_recompute": 0.999}
"""Factors on the price of recomputing a value, by the decision of a policy: tie-breakers."""


class Move(NamedTuple):
    """Computes `nodes` directly before `run`."""

    nodes: list[int]
    run: int


class MoveWeights:
    """Prices and sizes of nodes, by which moves are weighed. They depend on the graph only."""

    def __init__(self, rules: Rules):
        graph, seconds = rules.graph, rules.seconds
        self.least_price = 1e-9 * sum(seconds) / max(1, len(seconds)) or 1e-9
        self.prices = np.array([_preference(rules, n) * seconds[n.id] for n in graph.nodes]) + self.least_price
        """By node: the price of one run, with the preferences of the policy."""
        self.producer = np.array([-1 if v.producer is None else v.producer for v in graph.values], dtype=np.int64)
        """By value: the node that makes it, or -1."""
        self.taken = [sum(rules.nbytes[v] for v in n.outputs) for n in graph.nodes]
        """By node: the bytes of all its outputs, held while it runs."""
        made = [sum(rules.nbytes[v] for v in n.outputs if v not in rules.permanent) for n in graph.nodes]
        self.made = np.array(made, dtype=np.int64)
        """By node: the bytes of its outputs that are not permanent, held until they are freed."""


class Gaps:
    """The gaps in which values are idle, from an event to the next read. A row is invalid once its events change."""

    def __init__(self, schedule: EditableSchedule):
        self.schedule = schedule
        self.weights = MoveWeights(schedule.rules)
        self.rows: list[list[int]] = [[] for _ in schedule.nbytes]
        self.count = 0
        self.value = np.zeros(1024, dtype=np.int64)
        self.first = np.zeros(1024, dtype=np.int64)
        self.second = np.zeros(1024, dtype=np.int64)
        self.score = np.zeros(1024)
        """The price per excess removed, times the number of positions over budget, when last computed; 0 if never
        computed."""
        self.refresh(range(len(schedule.nbytes)))

    def copy(self, schedule: EditableSchedule) -> Gaps:
        """Returns an independent copy for a copy of the schedule; all scores are to be computed again."""
        twin = copy.copy(self)
        twin.schedule, twin.rows = schedule, [*self.rows]
        twin.value, twin.first, twin.second = self.value.copy(), self.first.copy(), self.second.copy()
        twin.score = np.zeros_like(self.score)
        return twin

    def refresh(self, values: Iterable[int]) -> None:
        """Updates the rows of `values`; the scores of unchanged gaps stay."""
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
                self.first[row] = self.second[row] = 0  # contains no position
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
        """Returns the rows of the gaps that contain `position`."""
        count, place = self.count, self.schedule.place
        return np.flatnonzero((place[self.first[:count]] < position) & (place[self.second[:count]] > position))

    def sums(self, rows: np.ndarray, amount: np.ndarray) -> np.ndarray:
        """Returns, for each of `rows`, the sum of an `amount` per position over the gap."""
        total = np.concatenate([[0], np.cumsum(amount)])
        place = self.schedule.place
        return total[place[self.second[rows]]] - total[place[self.first[rows]] + 1]


class Repair:
    """Reduces the peak of an editable schedule to a budget."""

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
            schedule: the schedule.
            budget: bytes.
            gaps: the gaps of the schedule, if they are known.
            factor: by node: a factor on its price.
            max_candidates: the number of candidates examined for a move, unless none of them helps; None examines every
                candidate that may be the best.
        """
        self.schedule = schedule
        self.budget = budget
        self.max_candidates = max_candidates
        self.seconds = 0.0
        """The time of added recomputations minus the time of removed ones."""
        self.width = NARROW
        """The largest number of nodes of a move."""
        self.effort = 0
        """The approximate number of moves weighed; a move of many nodes counts more than once."""
        self.gaps = Gaps(schedule) if gaps is None else gaps
        self.weights = self.gaps.weights
        self.prices = self.weights.prices if factor is None else self.weights.prices * factor
        """By node: the price of one run in this repair."""
        self.over_before: list[int] = []
        """By position, and at the end: the number of earlier positions over the budget, as of the last call of
        `best`."""
        self._clear()

    def _clear(self) -> None:
        """Clears the caches that belong to one run."""
        self.ends: dict[int, int] = {}
        """By value: the position at which its last copy before the run is freed; -1 if there is none."""
        self.free_from: dict[int, int | None] = {}
        """By value: the position from which its memory is free before the run; None if it is not live at the run."""
        self.prices_here: dict[int, float] = {}
        """By node: the price of running it before the run."""

    def run(self, limit: float = float("inf"), effort: float = float("inf")) -> bool:
        """Applies moves until the peak is at most the budget.

        Args:
            limit: abandon the repair if all recomputations together take more seconds than this.
            effort: abandon the repair after weighing this many moves.

        Returns:
            Whether the peak is at most the budget; also False if no move helps.
        """
        if not len(self.schedule.profile):
            return True
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
        """Returns the move with the least price per excess removed, among the moves that free a value at `position`."""
        gaps = self.gaps
        rows = gaps.rows_around(position)
        if not len(rows):
            return None
        over = self.schedule.profile > self.budget
        steps = gaps.sums(rows, over)
        self.over_before = [0, *np.cumsum(over).tolist()]
        if np.isinf(gaps.score[rows]).all():
            gaps.score[rows] = 0.0  # moves that did not help may help now
        # Old scores are divided by the remaining positions over budget, and computed again only for the best rows.
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
        """Returns, for each of `rows`, a lower bound on the price per excess removed."""
        gaps, schedule = self.gaps, self.schedule
        producer = self.weights.producer[gaps.value[rows]]
        excess = gaps.sums(rows, np.maximum(schedule.profile - self.budget, 0))
        gain = np.minimum(self.weights.made[producer] * steps, excess)
        last = np.array([schedule.runs[index][-1] for index in producer.tolist()])
        later = schedule.place[last] > schedule.place[gaps.second[rows]]
        return np.where(later, self.weights.least_price, self.prices[producer]) / gain

    def evaluate(self, value: int, run: int) -> tuple[float, Move | None]:
        """Returns the best move that recomputes `value` before `run`, and its price per excess removed."""
        self.effort += 1
        self._clear()
        best: tuple[float, Move | None] = (np.inf, None)
        for nodes, extended in self.closures(value, run):
            self.effort += 1 + len(nodes) // NODES
            changes = self.changes(nodes, extended, run)
            most = self.most_gain(changes, run)
            if most > 0:  # otherwise the move cannot help
                price = sum([self.price(index, run) for index in nodes])
                if price / most < best[0]:
                    gain = self.gain(nodes, extended, changes, run)
                    if gain > 0 and price / gain < best[0]:
                        best = (price / gain, Move(nodes, run))
        return best

    def closures(self, value: int, run: int) -> Iterator[tuple[list[int], list[int]]]:
        """Yields sets of nodes to run again to make `value` before `run`, and values that must live longer for them."""
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
        """Whether `value` cannot be recomputed, or can live on until `position` at no cost."""
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
        """Returns the position at which the last copy of `value` before `position` is freed, or -1; cached per run."""
        end = self.ends.get(value)
        if end is None:
            end = self.ends[value] = self.schedule.end(value, position)
        return end

    def free_behind(self, value: int, position: int) -> int | None:
        """Returns `behind`, or None if `value` is not live at `position`; cached per run."""
        if value not in self.free_from:
            self.free_from[value] = self.behind(value, position) if self.schedule.is_live(value, position) else None
        return self.free_from[value]

    def behind(self, value: int, position: int) -> int:
        """Returns where the memory of the last copy of `value` is free: at its end if it is overwritten there."""
        end = self.end(value, position)
        index = self.schedule.node[self.schedule.at[end]] if end >= 0 else -1
        return end + (index < 0 or value not in self.schedule.rules.graph.nodes[index].overwrites)

    def price(self, index: int, run: int) -> float:
        """Returns the price of running node `index` before `run`; cached per run."""
        if index not in self.prices_here:
            self.prices_here[index] = self._price(index, run)
        return self.prices_here[index]

    def _price(self, index: int, run: int) -> float:
        """Returns the price of running node `index` before `run`: nearly 0 if a later run becomes useless."""
        schedule = self.schedule
        position = schedule.places[run]
        later = next((r for r in schedule.runs[index] if schedule.places[r] > position), None)
        if later is None:
            return float(self.prices[index])
        if int(schedule.profile[position : schedule.places[later]].max()) + self.weights.made[index] <= self.budget:
            return self.weights.least_price
        return float(self.prices[index])

    def changes(self, nodes: list[int], extended: list[int], run: int) -> dict[int, tuple[int, int]]:
        """Returns, by value, from which position its bytes held change if `nodes` run before `run`, and the change."""
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
        """Returns an upper bound on the excess that `changes` remove: their effect at positions over the budget."""
        before = self.over_before
        all_before = before[self.schedule.places[run]]
        return sum([change * (before[start] - all_before) for start, change in changes.values()])

    def gain(self, nodes: list[int], extended: list[int], changes: dict[int, tuple[int, int]], run: int) -> int:
        """Returns the reduction of the excess if `nodes` run before `run`.

        If the excess is not reduced, the result is at most 0 and at least the exact gain.
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
        """Returns the excess while `nodes` run beside `held` bytes; `extended` values die at their last use."""
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
        """Applies `move`, and removes runs that become useless."""
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
        """Returns the bytes over the budget, summed over positions."""
        return int(np.maximum(self.schedule.profile - self.budget, 0).sum())


def _preference(rules: Rules, node: Node) -> float:
    return min((PREFERENCE.get(rules.graph.values[v].decision, 1.0) for v in node.outputs), default=1.0)


def remove_if(schedule: EditableSchedule, run: int, accepts: Callable[[], bool]) -> list[int]:
    """Removes a recomputation if that is allowed and accepted, and returns the removed nodes; none if it stays.

    Args:
        schedule: the schedule.
        run: a run that is not the first run of its node.
        accepts: called after the removal; whether the schedule may stay like this.
    """
    outputs = schedule.rules.graph.nodes[schedule.node[run]].outputs
    gone = schedule.remove(run)
    allowed = not any(v in schedule.rules.unsaved and schedule.crosses_boundary(v) for v in outputs)
    if allowed and accepts():
        return gone
    schedule.restore(schedule.gone)
    return []


def prune(schedule: EditableSchedule, budget: int, parent: EditableSchedule | None = None) -> list[int]:
    """Removes recomputations, the most expensive first, as long as the peak stays at most `budget` bytes.

    Args:
        schedule: the schedule.
        budget: bytes.
        parent: a pruned schedule from which this one was copied. Recomputations that were needed there are examined
            again only where less memory is held now.

    Returns:
        The removed nodes.
    """
    found: list[int] = []
    seconds = schedule.rules.seconds
    for _ in range(PASSES):
        recomputed = [r for runs in schedule.runs for r in runs[1:]]
        if parent is not None:
            recomputed = _worth_another_look(schedule, parent, recomputed)
        recomputed.sort(key=lambda r: (-seconds[schedule.node[r]], r))
        before = len(found)
        for run in recomputed:
            index = schedule.node[run]
            if index >= 0 and schedule.runs[index][0] != run and _may_remove(schedule, run, budget):
                found += remove_if(schedule, run, lambda: bool(schedule.profile.max() <= budget))
        if len(found) == before:
            break
    return found


def _may_remove(schedule: EditableSchedule, run: int, budget: int) -> bool:
    """Whether the copies that live on without the recomputation may fit; no edit is made, and a wrong no is rare."""
    nodes, permanent = schedule.rules.graph.nodes, schedule.rules.permanent
    nbytes, place = schedule.nbytes, schedule.places
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
                continue  # not made before, or read later
            maker = events[before]
            changes.append((place[maker] + 1, -nbytes[value]))
            if schedule.makes(maker, value) and schedule.runs[schedule.node[maker]][0] != maker:
                stack.append(maker)
    if held[highest] + sum([change for start, change in changes if start <= first + highest]) > budget:
        return False  # one position is enough to decide no, and usually does
    held = held.copy()
    for start, change in changes:
        held[max(start - first, 0) :] += change
    return int(held.max(initial=0)) <= budget


def _worth_another_look(schedule: EditableSchedule, parent: EditableSchedule, recomputed: Sequence[int]) -> list[int]:
    """Returns the recomputations that are new, or without which copies would live where memory has become free."""
    old = len(parent.place)
    held = parent.profile[parent.place[np.minimum(schedule.at, old - 1)]]
    less = np.concatenate([[0], np.cumsum((schedule.at >= old) | (schedule.profile < held))])
    found = []
    for run in recomputed:
        position = schedule.places[run]
        outputs = schedule.rules.graph.nodes[schedule.node[run]].outputs
        ends = [schedule.end(v, position) for v in outputs if v not in schedule.rules.permanent]
        if run >= old or less[position] > less[min(ends, default=0)]:
            found.append(run)
    return found
