"""The integer program of Checkmate, and its rounded linear relaxation.

P. Jain, A. Jain, A. Nrusimha, A. Gholami, P. Abbeel, K. Keutzer, I. Stoica, J. E. Gonzalez, "Checkmate: Breaking the
Memory Wall with Optimal Tensor Rematerialization", MLSys 2020, https://arxiv.org/abs/1910.02653.

There is one stage per node (see `frontier`); in each stage, earlier nodes may run again, each at most once. The program
decides which nodes run (R) and which values are held from stage to stage (S), and bounds the bytes held while each node
runs (U). Optimal among all plans of this form, with first runs in the order of the plan that saves everything, if HiGHS
finishes: the remaining relative gap is `GAP` of the recomputation time. `checkmate_lp` is the paper's approximation:
solve the linear relaxation for a fraction of the budget, hold a value where its S is at least a threshold, derive R
from S in closed form, and return the fastest plan that fits in simulation. `checkmate` solves the integer program if it
is small, and rounds the relaxation otherwise.

    T, C_i, M_i             len(frontier.sequence), prices, bytes of values
    R[t,i], S[t,i]          runs[i, t]; held_at[v, t], by value, because a node may make several values
    U[t,k]                  the row of `_step` that compares `peak` with `held_bytes` and the standing bytes
    FREE[t,i,k]             the decrease of a value's `state` at the step of k
    R <= R + S of parents   `_read`
    S <= R + S before       `_make`, `_end`

The paper bounds FREE by each later reader in turn. Here the state of a value between two steps is a column, which is at
least its next reader's R and at least the state after that reader; FREE is a difference of states. The integer optimum
is the same, and the relaxation is tighter, with fewer rows. The memory row of each stage's own node is added a second
time, written over the values, so that HiGHS recognises it as a knapsack. Beyond the paper: several values per node,
temporaries, values that must stay or must not live across the boundary between the passes, and outputs that overwrite
inputs; all of these are exact.

Complexity: exponential; O(nodes * (nodes + reads)) columns and rows. The search is bounded by the number of nodes of
the search tree, not by a clock; see `SMALL` for the time. Left out: the noise that the paper adds to prices to break
ties, and other orders of first runs.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fckpt._late import late
from fckpt.errors import ArgumentValueError
from fckpt.graph.graph import Graph, Node
from fckpt.graph.schedule import Schedule, schedule_of
from fckpt.solve.core.frontier import Frontier
from fckpt.solve.core.rules import Order, Rules, fastest, peak_of
from fckpt.solve.core.starts import save_everything

__all__ = ["checkmate", "checkmate_lp"]

SMALL = 16_000
"""The largest number of columns for which `checkmate` solves the integer program: about 75 nodes that may all run
again."""
LARGE = 100_000
"""The largest number of columns of any program: about 200 nodes. A relaxation takes 1 s with 12,000 columns, and 40 s
with 77,000."""
GAP = 1e-4
"""The relative gap, as a fraction of the recomputation time, at which the integer program may stop."""
NODES = 2000
"""The largest number of nodes of HiGHS's search tree."""
TOLERANCE = 1e-5
"""The fraction by which the budget is lowered if the integer program exceeded it within HiGHS's tolerance."""
ALLOWANCES = (0.9, 0.95, 0.98, 1.0)
"""The fractions of the budget for which the relaxation is solved; the paper uses the first."""
THRESHOLDS = tuple(k / 10 for k in range(1, 10))


def checkmate(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the fastest schedule with the plain order of first runs that fits; on large graphs, an approximation.

    Args:
        graph: one training step.
        budget: bytes; None saves everything.

    Raises:
        BudgetError: no schedule that is found fits.
        ArgumentValueError: the graph's program is too large.
    """
    return _planned(graph, budget, "checkmate", SMALL)


def checkmate_lp(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the fastest schedule that fits, among the rounded solutions of the linear relaxation.

    Args:
        graph: one training step.
        budget: bytes; None saves everything.

    Raises:
        BudgetError: no rounded solution fits.
        ArgumentValueError: the graph's program is too large.
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
            f"the solver {solver!r} takes integer programs of at most about {LARGE} variables; this graph "
            f"of {len(graph.nodes)} nodes needs {size}. Take 'auto' or 'moments'."
        )
    program = _IntegerProgram(frontier, peak_of(rules, plain))
    ways = [program.exact, program.rounded] if size <= small else [program.rounded]
    for way in ways:
        plans = way(budget)
        if any(peak_of(rules, order) <= budget for order in plans):
            return fastest(rules, plans, budget, solver)
    # These plans do not depend on the budget, so the least budget in the error does not either.
    return fastest(rules, [frontier.holding([()] * len(frontier.sequence)), *ways[0](None)], budget, solver)


class _IntegerProgram:
    """The integer program of one graph. Bytes are divided by a unit, so that coefficients are about 1."""

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
        """By position and stage: the column that says whether the node runs again."""
        self.held_at: dict[tuple[int, int], int] = {}
        """By value and stage: the column that says whether the value is held at the beginning of the stage."""
        self.state: dict[int, int] = {}
        """By value: the column that says whether the value is held at the step under construction."""
        self.steps: dict[int, int] = {}
        """By value: the number of remaining steps, in the stage under construction, that read or make the value."""
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
        again = [k for k in range(stage) if frontier.may_recompute(k, stage)]
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
        """Returns the column for the state of a value at the end of a stage."""
        if not self.frontier.may_hold(value, stage + 1):
            return self.zero
        column = self.held_at[value, stage + 1] = self._column()
        return column

    def _step(self, k: int, stage: int) -> None:
        """Adds the rows for running, or not running, the node at position `k`."""
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
        if k == stage:  # a second time, as a knapsack
            self._row([*limit, *((c, -self._nbytes(v)) for v, c in before.items() if c != self.zero)], standing)
        changes = [(self.state[v], self._nbytes(v)) for v in touched] + [(before[v], -self._nbytes(v)) for v in touched]
        self._change(changes)

    def _read(self, before: int, run: int, after: int) -> None:
        self._row([(before, 1.0), (run, -1.0)])
        self._row([(before, 1.0), (after, -1.0)])

    def _make(self, before: int, run: int, after: int) -> None:
        self._row([(before, 1.0), (run, 1.0)], -np.inf, 1.0)  # holding a value that is made again is useless
        self._row([(before, 1.0), (run, 1.0), (after, -1.0)])

    def _overwriting(self, node: Node, before: dict[int, int], run: int, first: bool) -> int | None:
        """Returns the column that says whether the node's output overwrites an input; None if it never can."""
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
        """Returns the columns with the least time within `budget` bytes, or with the least peak; None if none."""
        optimize, csr_array = late("scipy.optimize"), late("scipy.sparse").csr_array
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
        """Returns the order of the integer program's solution, if HiGHS finds one."""
        order = None
        for part in (1.0, 1.0 - TOLERANCE):  # again, if the first solution exceeded the budget within the tolerance
            found = self._solved(None if budget is None else part * budget, whole=True)
            order = None if found is None else self._order_holding(found, 0.5)
            if order is None or budget is None or peak_of(self.frontier.rules, order) <= budget:
                break
        return [] if order is None else [order]

    def rounded(self, budget: int | None) -> list[Order]:
        """Returns the orders to which the relaxation is rounded, for several fractions of the budget and thresholds."""
        limits = [None] if budget is None else [allowance * budget for allowance in ALLOWANCES]
        solved = [found for limit in limits if (found := self._solved(limit, whole=False)) is not None]
        return [self._order_holding(found, threshold) for found in solved for threshold in THRESHOLDS]

    def _order_holding(self, found: np.ndarray, threshold: float) -> Order:
        held: list[set[int]] = [set() for _ in self.frontier.sequence]
        for (value, stage), column in self.held_at.items():
            if found[column] >= threshold:
                held[stage - 1].add(value)
        return self.frontier.holding(held)
