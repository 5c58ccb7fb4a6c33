"""The integer program of P. Jain, A. Jain, A. Nrusimha, A. Gholami, P. Abbeel, K. Keutzer, I. Stoica, J. E. Gonzalez,
"Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020,
https://arxiv.org/abs/1910.02653, and its rounded linear relaxation.

A stage per node (see `frontier`); in each, any earlier nodes run again, once at most. The program says which (R), what
is held from stage to stage (S), and bounds the bytes while each of them runs (U). Optimal among all plans of that form,
with first runs in the order of the plan that saves everything, where HiGHS ends by itself: the relative gap left is
`GAP` of the repetitions' time. `checkmate_lp` is the paper's approximation: the linear relaxation within a part of the
budget, S held where its column is at least a threshold, R from S in closed form, the fastest that fits by simulation.
`checkmate` takes the integer program if it is small, and rounds otherwise.

    T, C_i, M_i             len(frontier.sequence), prices, bytes of values
    R[t,i], S[t,i]          runs[i, t]; held[v, t], by value, as a node may make several
    U[t,k]                  the row of `_step` that holds `peak` against `held` and what stands anyway
    FREE[t,i,k]             what `state` of a value loses at the step of k
    R <= R + S of parents   `_read`
    S <= R + S before       `_make`, `_end`

The paper bounds FREE by each later reader in turn. Here the state of a value between two steps is a column, at least
what its next reader takes and the state after it; FREE is a difference. The integer optimum is the same, and the
relaxation is tighter, with fewer rows. Each stage's own step is written out over the values once more, which tells
HiGHS that it is a knapsack. Beyond the paper: several values per node, temporaries, what must be held or must not cross
into the backward pass, outputs written over inputs; all of it exact.

Complexity: exponential; O(nodes * (nodes + reads)) columns and rows. The nodes of the search tree bound the search,
not a clock: see `SMALL` for the time. Left out: the noise that the paper adds to prices to break ties, other orders.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from fckpt.errors import ArgumentValueError
from fckpt.graph.graph import Graph, Node
from fckpt.graph.schedule import Schedule, schedule_of
from fckpt.solve.core.frontier import Frontier
from fckpt.solve.core.rules import Order, Rules, over_budget, peak_of, seconds_of
from fckpt.solve.core.starts import save_everything

__all__ = ["checkmate", "checkmate_lp"]

SMALL = 16_000
"""The most columns with which `checkmate` solves the integer program: some 75 nodes that may all run again."""
LARGE = 100_000
"""The most columns of any program: some 200 nodes. A relaxation takes a second with 12,000, and 40 with 77,000."""
GAP = 1e-4
"""How far from the optimum, as a part of the repetitions' time, the integer program may stop."""
NODES = 2000
"""The most nodes of its search tree."""
TOLERANCE = 1e-5
"""What the budget is lowered by, where the integer program overstepped it within HiGHS's tolerance."""
ALLOWANCES = (0.9, 0.95, 0.98, 1.0)
"""The parts of the budget that the relaxation gets; the paper has the first."""
THRESHOLDS = tuple(k / 10 for k in range(1, 10))


def checkmate(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the fastest schedule that fits, of those with first runs in the base order; on large graphs a good one.

    Args:
        graph: one training step.
        budget: bytes; None saves everything.

    Raises:
        BudgetError: none is found that fits.
        ArgumentValueError: the graph is too large for its program.
    """
    return _planned(graph, budget, "checkmate", SMALL)


def checkmate_lp(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the fastest schedule that fits, of those to which the linear relaxation is rounded.

    Args:
        graph: one training step.
        budget: bytes; None saves everything.

    Raises:
        BudgetError: none of them fits.
        ArgumentValueError: the graph is too large for its program.
    """
    return _planned(graph, budget, "checkmate_lp", 0)


def _planned(graph: Graph, budget: int | None, solver: str, small: int) -> Schedule:
    rules = Rules(graph)
    plain = save_everything(rules)
    if budget is None or peak_of(rules, plain) <= budget:
        return schedule_of(graph, *plain)
    frontier = Frontier(rules)
    size = frontier.size()
    if size > LARGE:
        raise ArgumentValueError(
            f"the solver {solver!r} takes programs of about {LARGE} variables at most, and that of this graph of "
            f"{len(graph.nodes)} nodes has {size}. Take 'auto' or 'moments'."
        )
    program = _IntegerProgram(frontier, peak_of(rules, plain))
    ways = [program.exact, program.rounded] if size <= small else [program.rounded]
    found = next((fits for way in ways if (fits := _fitting(rules, way(budget), budget))), [])
    if not found:  # what is known to be small does not depend on the budget, and so neither does the least of it
        known = [frontier.holding([()] * len(frontier.sequence)), *ways[0](None)]
        found = _fitting(rules, known, budget)
        if not found:
            least = min(known, key=lambda order: peak_of(rules, order))
            raise over_budget(graph, schedule_of(graph, *least), budget, solver)
    return schedule_of(graph, *min(found, key=lambda order: seconds_of(rules, order)))


def _fitting(rules: Rules, orders: Iterable[Order], budget: int) -> list[Order]:
    return [order for order in orders if peak_of(rules, order) <= budget]


class _IntegerProgram:
    """The program of one graph. Bytes are counted in units, so that numbers are about one."""

    def __init__(self, frontier: Frontier, unit: int):
        self.frontier = frontier
        self.graph = frontier.rules.graph
        self.unit = float(max(unit, 1))
        seconds = [frontier.rules.seconds[index] for index in frontier.sequence]
        scale = max(seconds, default=0.0) or 1.0
        self.prices = [s / scale + 1e-7 for s in seconds]
        self.cost: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self.entries: tuple[list[int], list[int], list[float]] = ([], [], [])
        self.zero, self.one, self.peak, self.held_bytes = (self._column() for _ in range(4))
        self.runs: dict[tuple[int, int], int] = {}
        """By position and stage: whether the node runs again."""
        self.held_at: dict[tuple[int, int], int] = {}
        """By value and stage: whether it is held at its beginning."""
        self.state: dict[int, int] = {}
        """By value: whether it is held, at the step that is being built."""
        self.steps: dict[int, int] = {}
        """By value: in how many steps it is still read or made in the stage that is being built."""
        for stage in range(len(frontier.sequence)):
            self._stage(stage)

    def _column(self, cost: float = 0.0) -> int:
        self.cost.append(cost)
        return len(self.cost) - 1

    def _row(self, entries: Iterable[tuple[int, float]], least: float = 0.0, most: float = np.inf) -> None:
        for column, coefficient in entries:
            self.entries[0].append(len(self.low))
            self.entries[1].append(column)
            self.entries[2].append(coefficient)
        self.low.append(least)
        self.high.append(most)

    def _nbytes(self, value: int) -> float:
        return self.graph.values[value].nbytes / self.unit

    def _stage(self, stage: int) -> None:
        frontier = self.frontier
        again = [k for k in range(stage) if frontier.may_repeat(k, stage)]
        for k in again:
            self.runs[k, stage] = self._column(self.prices[k])
        present = {*again, stage}
        came = [v for v in frontier.choices if frontier.made(v) <= stage]
        self.state = {v: self.held_at.get((v, stage), self.zero) for v in came}
        self.steps = {v: sum(k in present for k in (frontier.made(v), *frontier.reads[v])) for v in came}
        idle = [v for v in came if not self.steps[v] and self.state[v] != self.zero]
        for k in (*again, stage):
            self._step(k, stage)
        changes = []
        for v in idle:
            before, after = self.state[v], self._end(v, stage)
            self._row([(before, 1.0), (after, -1.0)])
            changes += [(after, self._nbytes(v)), (before, -self._nbytes(v))]
        self._change(changes)

    def _end(self, value: int, stage: int) -> int:
        """The state at the end of a stage."""
        if not self.frontier.may_hold(value, stage + 1):
            return self.zero
        column = self.held_at[value, stage + 1] = self._column()
        return column

    def _step(self, k: int, stage: int) -> None:
        """The node at position `k` runs, or does not."""
        node = self.graph.nodes[self.frontier.sequence[k]]
        run = self.runs.get((k, stage), self.one)
        before = dict(self.state)
        touched = [v for v in (*node.inputs, *node.outputs) if v in self.state]
        for v in touched:
            self.steps[v] -= 1
            self.state[v] = self._column() if self.steps[v] else self._end(v, stage)
            relate = self._read if v in node.inputs else self._make
            relate(before[v], run, self.state[v])
        limit = [(self.peak, 1.0), (run, -self.frontier.takes(k) / self.unit)]
        if (over := self._overwriting(node, before, run, k == stage)) is not None:
            limit.append((over, self._nbytes(node.outputs[0])))
        standing = self.frontier.standing[stage] / self.unit
        self._row([*limit, (self.held_bytes, -1.0)], standing)
        if k == stage:  # once more, as a knapsack
            self._row([*limit, *((c, -self._nbytes(v)) for v, c in before.items() if c != self.zero)], standing)
        changes = [(self.state[v], self._nbytes(v)) for v in touched] + [(before[v], -self._nbytes(v)) for v in touched]
        self._change(changes)

    def _read(self, before: int, run: int, after: int) -> None:
        self._row([(before, 1.0), (run, -1.0)])
        self._row([(before, 1.0), (after, -1.0)])

    def _make(self, before: int, run: int, after: int) -> None:
        self._row([(before, 1.0), (run, 1.0)], -np.inf, 1.0)  # to hold what is made anew helps nobody
        self._row([(before, 1.0), (run, 1.0), (after, -1.0)])

    def _overwriting(self, node: Node, before: dict[int, int], run: int, first: bool) -> int | None:
        """Whether the node writes its output over an input that dies there; None if it never can."""
        over = [v for v in node.overwrites if v in before]
        if not over or not (first or node.outputs[0] in self.state):
            return None
        column = self._column()
        self._row([(run, 1.0), (column, -1.0)])
        self._row([(column, -1.0), *((before[v], 1.0) for v in over), *((self.state[v], -1.0) for v in over)])
        return column

    def _change(self, changes: list[tuple[int, float]]) -> None:
        before, self.held_bytes = self.held_bytes, self._column()
        self._row([(before, 1.0), *changes, (self.held_bytes, -1.0)], 0.0, 0.0)

    def _solved(self, budget: float | None, *, whole: bool) -> np.ndarray | None:
        """The columns with the least time within `budget` bytes, or with the least peak; None if none are found."""
        import scipy.optimize  # takes 0.4 s
        from scipy.sparse import csr_array

        optimize: Any = scipy.optimize  # its bounds are annotated as floats, and may be arrays
        count = len(self.cost)
        rows, columns, coefficients = self.entries
        matrix = csr_array((coefficients, (rows, columns)), shape=(len(self.low), count))
        low, high, cost = np.zeros(count), np.ones(count), np.array(self.cost)
        low[self.one], high[self.zero] = 1.0, 0.0
        high[self.peak] = np.inf if budget is None else budget / self.unit
        if budget is None:
            cost[:] = 0.0
            cost[self.peak] = 1.0
        integrality = np.zeros(count)
        if whole:
            integrality[[*self.runs.values(), *self.held_at.values()]] = 1.0
        found = optimize.milp(
            cost,
            integrality=integrality,
            bounds=optimize.Bounds(low, high),
            constraints=optimize.LinearConstraint(matrix, np.array(self.low), np.array(self.high)),
            options={"mip_rel_gap": GAP, "node_limit": NODES},
        )
        return found.x

    def exact(self, budget: int | None) -> list[Order]:
        """Returns the plan of the integer program, if HiGHS finds one."""
        order = None
        for part in (1.0, 1.0 - TOLERANCE):  # a second time if it used what numbers of floating point leave open
            found = self._solved(None if budget is None else part * budget, whole=True)
            order = None if found is None else self._order_holding(found, 0.5)
            if order is None or budget is None or peak_of(self.frontier.rules, order) <= budget:
                break
        return [] if order is None else [order]

    def rounded(self, budget: int | None) -> list[Order]:
        """Returns what the relaxation is rounded to, at several allowances and thresholds."""
        limits = [None] if budget is None else [allowance * budget for allowance in ALLOWANCES]
        solved = [found for limit in limits if (found := self._solved(limit, whole=False)) is not None]
        return [self._order_holding(found, threshold) for found in solved for threshold in THRESHOLDS]

    def _order_holding(self, found: np.ndarray, threshold: float) -> Order:
        held: list[set[int]] = [set() for _ in self.frontier.sequence]
        for (value, stage), column in self.held_at.items():
            if found[column] >= threshold:
                held[stage - 1].add(value)
        return self.frontier.holding(held)
