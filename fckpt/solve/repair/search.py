"""Local search: takes some repetitions out of a plan that fits, repairs it by other means, and keeps what is better.

A large neighbourhood search (P. Shaw, "Using Constraint Programming and Local Search Methods to Solve Vehicle Routing
Problems", 1998, https://doi.org/10.1007/3-540-49481-2_30) on a `EditableSchedule`. Some neighbouring repetitions are taken out, so
that values live on and the profile overflows. `repair` brings it down again, with prices that are off by a random
factor, so that it finds other ways than before, and `prune` takes out what is then not needed. A little worse is
accepted as well, to leave valleys. Every number that is compared is exact.

Complexity: a trial costs one copy of the schedule and a few moves. Random numbers come from a seed, and effort is counted
in moves weighed, not in seconds, so that a search can be repeated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from fckpt.solve.core.rules import Order, Rules, seconds_of
from fckpt.solve.repair.editable import EditableSchedule
from fckpt.solve.repair.repair import Gaps, Repair, prune, remove_if

__all__ = ["Search"]

WIDTHS = (1, 2, 4, 8, 16, 32)
"""How many neighbouring repetitions are taken out at once."""
NOISE = (0.0, 0.1, 0.3, 0.6)
"""Standard deviations of the logarithm of what prices are multiplied by."""
HEAT = 5e-4
"""A part of the whole time: what is worse by this is accepted in one of e trials."""
CANDIDATES = 16
"""How many candidates a repair looks at for a move."""
LONG = 5000
"""Of sequences beyond it, copying takes as long as weighing a move for every 30 computations."""
PATIENCE = 150
"""After so many trials in vain the search goes on from another start."""


class Search:
    """The best plan so far, and where the search stands."""

    def __init__(self, rules: Rules, starts: Sequence[Order], budget: int, seed: int = 0):
        """Prepares to search from plans that fit, the fastest first."""
        self.rules, self.starts, self.budget = rules, starts, budget
        self.random, self.noise = random.Random(seed), np.random.default_rng(seed)
        self.found = [starts[0]]
        """The best plan so far, as a list, and its predecessors before it."""
        self.least = seconds_of(rules, starts[0])
        self.heat = HEAT * self.least
        self.moves = 0
        """How many moves have been weighed: the effort so far."""

    def run(self, moves: int, enough: float, watch: Callable[[int, int], object] | None = None) -> None:
        """Searches until so many moves have been weighed, or a plan takes no more than `enough` seconds.

        Args:
            moves: how many.
            enough: seconds.
            watch: is told, after each trial, how many moves of how many have been weighed.
        """
        for start in self.starts:
            self._set_current(start)
            idle = 0
            while idle < PATIENCE:
                if self.moves >= moves or self.least <= enough:
                    return
                idle = 0 if self._trial() else idle + 1
                if watch is not None:
                    watch(self.moves, moves)

    def _set_current(self, order: Order) -> None:
        self.schedule = EditableSchedule(self.rules, order)
        prune(self.schedule, self.budget)
        self.gaps = Gaps(self.schedule)
        self.seconds = self._time(self.schedule)
        self._note()

    def _note(self) -> bool:
        better = self.seconds < self.least * (1 - 1e-9)
        if better:
            self.least = self.seconds
            self.found.append(self.schedule.order())
        return better

    def _time(self, schedule: EditableSchedule) -> float:
        seconds = self.rules.seconds
        return sum(seconds[i] for i in schedule.node if i >= 0)

    def _trial(self) -> bool:
        """Changes the plan at random, and keeps the change if it is good. Returns whether it is the best so far."""
        schedule = self.schedule.copy()
        gaps = self.gaps.copy(schedule)
        self.moves += 1 + len(schedule.at) // 200 + max(0, len(schedule.at) - LONG) // 30
        gaps.refresh(schedule.touched(self._remove_some(schedule)))
        spread = self.random.choice(NOISE)
        factor = np.exp(spread * self.noise.standard_normal(len(self.rules.seconds))) if spread else None
        repair = Repair(schedule, self.budget, gaps, factor, CANDIDATES)
        fits = repair.run()
        self.moves += repair.effort
        if not fits:
            return False
        gaps.refresh(schedule.touched(prune(schedule, self.budget, self.schedule)))
        seconds = self._time(schedule)
        worse = seconds - self.seconds
        if worse > 0 and self.random.random() >= np.exp(-worse / self.heat):
            return False
        self.schedule, self.gaps, self.seconds = schedule, gaps, seconds
        better = self._note()
        if len(schedule.at) > 1.5 * sum(index >= 0 for index in schedule.node):
            self._set_current(schedule.order())
        return better

    def _remove_some(self, schedule: EditableSchedule) -> list[int]:
        """Takes some neighbouring repetitions out of `schedule`, whatever it comes to; returns the nodes that went."""
        repeated = sorted((r for runs in schedule.runs for r in runs[1:]), key=schedule.places.__getitem__)
        if not repeated:
            return []
        width = self.random.choice(WIDTHS)
        start = self.random.randrange(len(repeated)) - width // 2
        chosen = repeated[max(0, start) : start + width]
        if self.random.random() < 0.3:
            chosen = [r for r in chosen if self.random.random() < 0.5]
        gone: list[int] = []
        for run in chosen:
            index = schedule.node[run]
            if index >= 0 and schedule.runs[index][0] != run:
                gone += remove_if(schedule, run, lambda: True)
        return gone
