"""Optimal persistent schedules for chains of unequal stages, by dynamic programming.

O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova, "Optimal checkpointing for heterogeneous chains: how to
train deep neural networks with limited memory", 2019, https://inria.hal.science/hal-02352969. A stage runs forward and
saves nothing, its input, or everything that its backward reads; a checkpoint is held until its backward has used it
("persistent"). The choice between several ways to save a stage is X. Zhao et al., "Rockmate", 2023,
https://proceedings.mlr.press/v202/zhao23b.html.

    C(s,t,m) = the least time to bring the gradient from after stage t to before stage s with m bytes, not counting the
               input of stage s, which is live
    C(s,s,m) = min over options k that fit:  f_k + b_k
    C(s,t,m) = min of: over s < j <= t    f_s + ... + f_(j-1) + C(j,t,m - x_j) + C(s,j-1,m)     a checkpoint before j
                       over options k     f_k + C(s+1,t,m - saved_k) + b_k                      stage s is saved

    the paper               here
    x_j                     `Costs.beside[s, j]`: a value that lives across both cuts is held once
    x-bar, u_F + .., u_B    `Option`: peaks simulated on the stage, including temporaries and cotangents

The two published implementations of the paper disagree about the memory that a leaf of the recursion needs; here the
forward and the backward of the leaf are simulated instead. Memory is counted in slots, rounded up.

Optimal among persistent schedules, for chains, in this model of memory, up to the rounding to slots. On a graph (see
`stages`) the model is approximate: stages are not divided, and values are counted until the end of a stage. Therefore
several memory limits of the table are tried, and the simulated peak decides.

Complexity: O(stages^3 slots) time, O(stages^2 slots) memory; a table holds the plans for all smaller limits. Left out:
schedules that drop checkpoints and make them again, which may be faster; offloading (POFO, 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Schedule, schedule_of
from fckpt.solve._min_cut import cheapest
from fckpt.solve.chains.stages import Costs, Option, Stages, Step
from fckpt.solve.core.rules import Order, Rules, fastest, peak_of
from fckpt.solve.core.starts import backward_orders, save_everything_orders

__all__ = ["Curve", "Table", "best", "curves", "rotor", "tables"]

SLOTS = 500
GRAINS = (12, 24, 60, 100)
"""The numbers of stages, at most, into which a graph is cut. With few stages the cuts are good ones; with many, plans
for small budgets exist: the last number is for these."""
PRICES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Prices of a byte for the minimum cuts that determine the options of stages; see `min_cut`."""
LOW = 0.4
"""Each chain has a table up to this fraction of the peak of saving everything; all chains but the last also have a
table up to the full peak."""
POINTS = 20
"""The number of plans of a table that `Curve.spread` returns."""


class ChainPart(NamedTuple):
    """The stages from `first` to `last`, with a memory limit in slots."""

    first: int
    last: int
    limit: int


def _seconds(option: Option) -> float:
    return option.forward_seconds + option.backward_seconds


class Table:
    """The least times for all parts of a chain and all memory limits."""

    def __init__(self, costs: Costs, top: int, slots: int = SLOTS):
        """Fills the table.

        Args:
            costs: the costs of the chain's stages.
            top: the highest limit in bytes.
            slots: the number of slots into which `top` is divided.
        """
        self.costs = costs
        self.unit = max(1, -(-top // slots))
        self.slots = top // self.unit
        self.length = len(costs.forward_seconds)
        self.prefix = np.concatenate([[0.0], np.cumsum(costs.forward_seconds)])
        self.beside = -(-costs.beside // self.unit)
        self.arriving = np.array(costs.arriving, dtype=np.int64)
        reaching = costs.beside + np.array(costs.forward_nbytes, dtype=np.int64)
        self.sweep = np.maximum.accumulate(np.triu(reaching), axis=1)
        """[s, j]: the peak while stages s, ..., j run, not counting the input of stage s."""
        self.best = np.full((self.length, self.length, self.slots + 1), np.inf)
        """[s, t, m]: the paper's C."""
        right = np.empty_like(self.best)
        for first in reversed(range(self.length)):
            self._fill(first, right)

    def _fill(self, first: int, right: np.ndarray) -> None:
        """Fills the entries of all parts that begin with stage `first`, given the parts that begin later."""
        best, end = self.best, self.slots + 1
        for option in self.costs.leaves[first]:
            low = self._slots(self._nbytes(first, first, option))
            best[first, first, low:] = np.minimum(best[first, first, low:], _seconds(option))
        for option in self.costs.options[first]:
            shift = self._slots(option.saved_nbytes)
            for last in range(first + 1, self.length):
                low = max(shift, self._slots(self._nbytes(first, last, option)))
                if low < end:
                    found = best[first + 1, last, low - shift : end - shift] + _seconds(option)
                    best[first, last, low:] = np.minimum(best[first, last, low:], found)
        self._start(first, right)
        for last in range(first + 1, self.length):
            found = right[first + 1 : last + 1, last] + best[first, first:last]
            np.minimum(best[first, last], found.min(axis=0), out=best[first, last])

    def _start(self, first: int, right: np.ndarray) -> None:
        """Sets right[j, t, m] to the least time from stage `first` to a checkpoint before j, plus stages j to t."""
        end = self.slots + 1
        for split in range(first + 1, self.length):
            shift = min(end, int(self.beside[first, split]))
            part = right[split, split:]
            part[:, :shift] = np.inf
            np.add(
                self.best[split, split:, : end - shift], self.prefix[split] - self.prefix[first], out=part[:, shift:]
            )
            low = -(-(self.arriving[split:] + self.sweep[first, split - 1]) // self.unit)
            part[np.arange(end) < low[:, None]] = np.inf

    def _slots(self, nbytes: int) -> int:
        return -(-nbytes // self.unit)

    def _nbytes(self, first: int, last: int, option: Option) -> int:
        """Returns the memory to run stage `first` both ways while the gradient is first after stage `last`."""
        return max(self.costs.arriving[last] + option.forward_nbytes, option.backward_nbytes)

    @property
    def seconds(self) -> np.ndarray:
        """The time of the best schedule, by memory limit in units of `unit` bytes; infinite if no schedule fits."""
        return self.best[0, -1]

    def limits(self) -> np.ndarray:
        """Returns the limits, in units, at which the best schedule becomes faster, from the least feasible limit on."""
        before = np.concatenate([[np.inf], self.seconds[:-1]])
        return np.flatnonzero(self.seconds < before)

    def steps(self, limit: int) -> list[Step]:
        """Returns the best schedule for a feasible memory limit in units."""
        found: list[Step] = []
        stack: list[Step | ChainPart] = [ChainPart(0, self.length - 1, limit)]
        while stack:
            item = stack.pop()
            if isinstance(item, Step):
                found.append(item)
            else:
                stack += reversed(self._split(item))
        return found

    def _split(self, part: ChainPart) -> list[Step | ChainPart]:
        """Returns the steps and parts of which the best schedule of a part consists."""
        first, last, limit = part
        leaf = first == last
        saving = []
        for option in (self.costs.leaves if leaf else self.costs.options)[first]:
            left = limit - (0 if leaf else self._slots(option.saved_nbytes))
            fits = left >= 0 and self._slots(self._nbytes(first, last, option)) <= limit
            rest = 0.0 if leaf else self.best[first + 1, last, left]
            saving.append(rest + _seconds(option) if fits else np.inf)
        k = int(np.argmin(saving))
        if leaf:
            return [Step("all", first, k), Step("backward", first, k)]
        splits = np.arange(first + 1, last + 1)
        left = limit - self.beside[first, splits]
        sweep = -(-(self.arriving[last] + self.sweep[first, splits - 1]) // self.unit)
        seconds = self.best[splits, last, np.maximum(left, 0)] + self.best[first, splits - 1, limit]
        seconds += self.prefix[splits] - self.prefix[first]
        seconds[(left < 0) | (sweep > limit)] = np.inf
        split = int(splits[seconds.argmin()])
        if saving[k] <= seconds.min():
            after = ChainPart(first + 1, last, limit - self._slots(self.costs.options[first][k].saved_nbytes))
            return [Step("all", first, k), after, Step("backward", first, k)]
        ahead = [Step("none", i) for i in range(first + 1, split)]
        right = ChainPart(split, last, limit - int(self.beside[first, split]))
        return [Step("checkpoint", first), *ahead, right, ChainPart(first, split - 1, limit)]


class Curve:
    """The plans of one table for one chain, from the smallest to the fastest."""

    def __init__(self, stages: Stages, table: Table):
        self.stages = stages
        self.table = table
        self.limits: list[int] = table.limits().tolist()

    def order(self, limit: int) -> Order:
        return self.stages.order(self.table.steps(limit))

    def spread(self) -> list[Order]:
        """Returns `POINTS` plans that do not depend on a budget."""
        chosen = np.linspace(0, len(self.limits) - 1, min(POINTS, len(self.limits))).astype(int)
        return [self.order(self.limits[k]) for k in chosen]

    def around(self, budget: int) -> list[Order]:
        """Returns the plan with the highest limit that fits and the plan above it, if peaks increase with limits."""
        found: dict[int, Order] = {}
        low, high = -1, len(self.limits)
        while high - low > 1:
            middle = (low + high) // 2
            found[middle] = self.order(self.limits[middle])
            if peak_of(self.stages.rules, found[middle]) <= budget:
                low = middle
            else:
                high = middle
        return [found[k] for k in (low, high) if k in found]


def rotor(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the fastest schedule that fits, for chains with several numbers of stages.

    Args:
        graph: one training step.
        budget: bytes; None saves everything.

    Raises:
        BudgetError: no schedule that is found fits.
    """
    rules = Rules(graph)
    found = curves(rules)
    if budget is None:
        return schedule_of(graph, *found[0].order(found[0].limits[-1]))
    return best(rules, found, budget, "rotor", save_everything_orders(rules))


def best(rules: Rules, found: Sequence[Curve], budget: int, solver: str, others: Sequence[Order] = ()) -> Schedule:
    """Returns the fastest schedule of several chains that fits.

    Args:
        rules: the rules of the graph.
        found: the chains' plans.
        budget: bytes.
        solver: the solver's name, for the error message.
        others: plans to consider if no plan near the budget fits.

    Raises:
        BudgetError: no plan fits.
    """
    plans = [order for curve in found for order in curve.around(budget)]
    if all(peak_of(rules, order) > budget for order in plans):  # then plans for any budget decide
        plans = [*others, *(order for curve in found for order in curve.spread())]
    return fastest(rules, plans, budget, solver)


def curves(rules: Rules) -> list[Curve]:
    """Returns the plans of tables for chains with several numbers of stages, for low limits and for all limits."""
    found: list[Curve] = []
    order = backward_orders(rules)[-1]
    choices = [_saved_by(rules.graph, cheapest(rules, price)) for price in PRICES]
    lengths: set[int] = set()
    for grain in GRAINS:
        stages = Stages(rules, order, grain - 1, choices)
        if len(stages) not in lengths:
            lengths.add(len(stages))
            found += tables(stages)[0 if grain < GRAINS[-1] else 1 :]
    return found


def tables(stages: Stages, slots: int = SLOTS, budget: int | None = None) -> list[Curve]:
    """Returns the plans of two tables for a chain: one for all memory limits, and one for low limits.

    Args:
        stages: the chain, with plans of its stages.
        slots: the number of slots of a table.
        budget: bytes; if given, only the finer table that reaches as far is filled.
    """
    tops = [_plain_nbytes(stages.costs, slots), int(LOW * peak_of(stages.rules, stages.whole))]
    if budget is not None:
        tops = [min((top for top in tops if top >= budget), default=tops[0])]
    return [Curve(stages, Table(stages.costs, top, slots)) for top in tops]


def _plain_nbytes(costs: Costs, slots: int) -> int:
    """Returns a limit that suffices to save every stage completely, in spite of rounding up to slots."""
    whole = [options[0] for options in costs.options]
    most = max(max(max(costs.arriving) + option.forward_nbytes, option.backward_nbytes) for option in whole)
    held = sum(option.saved_nbytes for option in whole)
    return -(-(held + most) * slots // (slots - len(whole) - 1))


def _saved_by(graph: Graph, order: Order) -> set[int]:
    """Returns the values that an order saves for its backward pass."""
    made: set[int] = set()
    saved: set[int] = set()
    for index in order.backward:
        saved.update(v for v in graph.nodes[index].inputs if v not in made)
        made.update(graph.nodes[index].outputs)
    return saved
