"""Local search: removes some recomputations of a feasible plan, repairs it in another way, and keeps better plans.

A large neighbourhood search (P. Shaw, "Using Constraint Programming and Local Search Methods to Solve Vehicle Routing
Problems", 1998, https://doi.org/10.1007/3-540-49481-2_30) on an `EditableSchedule`. A trial removes some neighbouring
recomputations, so that values live longer and the profile exceeds the budget. `Repair` reduces the profile again, with
prices multiplied by random factors, so that it finds other moves than before, and `prune` removes recomputations that
are then not needed. Slightly worse plans are accepted as well, to leave local optima. All numbers that are compared are
exact.

Complexity: a trial costs one copy of the schedule and a few moves. Random numbers come from a seed, and effort is
counted in moves weighed, not in seconds, so a search is reproducible.
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
"""The numbers of neighbouring recomputations that a trial removes."""
NOISE = (0.0, 0.1, 0.3, 0.6)
"""Standard deviations of the logarithm of the random price factors."""
HEAT = 5e-4
"""A fraction of the step's time: a plan that is worse by this much is accepted with probability 1/e."""
CANDIDATES = 16
"""The number of candidates that a repair examines for a move."""
LONG = 5000
"""For computations beyond this number, copying 30 of them takes as long as weighing one move."""
SIMULATED = 14
"""The number of computations that are simulated in the time that weighing one move takes."""
PATIENCE = 150
"""After this many trials without improvement, the search continues from another start."""


class Search:
    """The best plan found so far, and the state of the search."""

    def __init__(
        self,
        rules: Rules,
        starts: Sequence[Order],
        budget: int,
        seed: int = 0,
        accepts: Callable[[Order], bool] | None = None,
    ):
        """Prepares to search from feasible plans, the fastest first.

        Args:
            rules: the rules of the graph.
            starts: the plans.
            budget: bytes.
            seed: of the random numbers.
            accepts: a further condition that all plans must meet, which takes as long as a simulation.
        """
        self.accepts = accepts
        self.rules, self.starts, self.budget = rules, starts, budget
        self.random, self.noise = random.Random(seed), np.random.default_rng(seed)
        self.found = [starts[0]]
        """The best plan so far, last in a list after its predecessors."""
        self.least = seconds_of(rules, starts[0])
        self.heat = HEAT * self.least
        self.moves = 0
        """The number of moves weighed: the effort so far."""

    def run(
        self,
        moves: int,
        enough: float,
        watch: Callable[[int, int], object] | None = None,
        idle_moves: float = float("inf"),
    ) -> None:
        """Searches until the given number of moves have been weighed, or a plan takes at most `enough` seconds.

        Args:
            moves: the largest number of moves.
            enough: seconds.
            watch: called after each trial with the number of moves weighed, and with `moves`.
            idle_moves: the largest number of moves without a better plan.
        """
        better = self.moves

        for start in self.starts:
            self._set_current(start)
            idle = 0
            while idle < PATIENCE:
                if self.moves >= moves or self.least <= enough or self.moves - better > idle_moves:
                    return
                if self._trial():
                    idle, better = 0, self.moves
                else:
                    idle += 1
                if watch is not None:
                    watch(self.moves, moves)

    def _set_current(self, order: Order) -> None:
        self.schedule = EditableSchedule(self.rules, order)
        prune(self.schedule, self.budget)
        if not self._accepted(self.schedule):
            self.schedule = EditableSchedule(self.rules, order)
        self.gaps = Gaps(self.schedule)
        self.seconds = self._time(self.schedule)
        self._note()

    def _note(self) -> bool:
        better = self.seconds < self.least * (1 - 1e-9)
        if better:
            self.least = self.seconds
            self.found.append(self.schedule.order())
        return better

    def _accepted(self, schedule: EditableSchedule) -> bool:
        if self.accepts is None:
            return True
        self.moves += len(schedule.at) // SIMULATED
        return self.accepts(schedule.order())

    def _time(self, schedule: EditableSchedule) -> float:
        seconds = self.rules.seconds
        return sum(seconds[i] for i in schedule.node if i >= 0)

    def _trial(self) -> bool:
        """Changes the plan at random, and keeps an accepted change. Returns whether it is the best plan so far."""
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
        if not self._accepted(schedule):
            return False
        self.schedule, self.gaps, self.seconds = schedule, gaps, seconds
        better = self._note()
        if len(schedule.at) > 1.5 * sum(index >= 0 for index in schedule.node):
            self._set_current(schedule.order())
        return better

    def _remove_some(self, schedule: EditableSchedule) -> list[int]:
        """Removes some neighbouring recomputations from `schedule`, whatever its peak; returns the removed nodes."""
        recomputed = sorted((r for runs in schedule.runs for r in runs[1:]), key=schedule.places.__getitem__)
        if not recomputed:
            return []
        width = self.random.choice(WIDTHS)
        start = self.random.randrange(len(recomputed)) - width // 2
        chosen = recomputed[max(0, start) : start + width]
        if self.random.random() < 0.3:
            chosen = [r for r in chosen if self.random.random() < 0.5]
        gone: list[int] = []
        for run in chosen:
            index = schedule.node[run]
            if index >= 0 and schedule.runs[index][0] != run:
                gone += remove_if(schedule, run, lambda: True)
        return gone
