"""The constraint program of Moccasin: at most C retention intervals per value.

B. Bartan, H. Li, H. Teague, C. Lott, B. Dilkina, "Moccasin: Efficient Tensor Rematerialization for Neural Networks",
ICML 2023, https://arxiv.org/abs/2304.14463.

A node runs at most C times: first at the end of its own stage (see `frontier`), then in later stages. The output of a
run lives for an interval, its *retention interval*. At every event the intervals take at most the budget, and every
input of a run lies in one of the input's intervals. There are O(C nodes) intervals, where Checkmate has O(nodes^2)
binary variables. The program is solved in two phases: the first minimises max(footprint, budget), to find a feasible
plan; the second starts there and minimises the seconds.

Optimal, if CP-SAT finishes within its limit, among plans with first runs in the plain order, at most one run of a node
per stage, and at most C - 1 recomputations of each node; C is 2 in `moccasin`, as in the paper, and 3 in `moccasin3`. C
= 2 is not enough for low budgets. Prices are rounded to a millionth of the most expensive node's price.

    C                       `most`
    (s, e, a) of v, i       start[k, i] of the node, end[v, i] of each value, present[k, i]
    j (j + 1) / 2 + k       `_event`: stage j, position k
    M                       `footprint`, the capacity of the cumulative constraint
    tau                     `target` of the first phase

Beyond the paper: several values per node, temporaries, values that must stay, nodes that run once, and outputs that
overwrite inputs. An interval may end wherever a reader of its value may have run, which excludes no useful plan; the
authors' code uses logarithmically spaced interval lengths instead, which does. The paper's reservoir constraints are
clauses here: each read is served by one of the intervals.

Complexity: exponential. Graphs of more than `LARGEST` nodes are refused. The search is bounded by CP-SAT's
deterministic time, not by a clock, and its workers take turns: the plan is the same on every machine, for one version
of OR-Tools. Left out: paging, and free orders.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from typing import Any

from fckpt.errors import ArgumentValueError, FckptError
from fckpt.graph.graph import Graph, Node
from fckpt.graph.schedule import Schedule, schedule_of
from fckpt.solve.core.frontier import Frontier
from fckpt.solve.core.rules import Order, Rules, fastest, peak_of
from fckpt.solve.core.starts import save_everything

__all__ = ["DependencyError", "moccasin", "moccasin3"]

LARGEST = 400
"""The largest number of nodes: on larger graphs, CP-SAT finds nothing within minutes."""
EFFORT = 30.0
"""CP-SAT's deterministic time per phase; one unit takes two to four seconds."""
FEW = 80
"""On graphs of at most this many nodes, CP-SAT uses one search strategy, which is faster. On larger graphs it uses two,
without which it would find no plans."""
PRICE = 10**6
"""The price of the most expensive node in the program's integers."""


class DependencyError(FckptError, ImportError):
    """An optional package that the call needs is not installed."""


def moccasin(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the fastest schedule found that fits and recomputes no node more than once.

    Args:
        graph: one training step.
        budget: bytes; None saves everything.

    Raises:
        BudgetError: no schedule that is found fits.
        ArgumentValueError: the graph has more than 400 nodes.
        DependencyError: OR-Tools is not installed.
    """
    return _fastest(graph, budget, 2, "moccasin")


def moccasin3(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the fastest schedule found that fits and recomputes no node more than twice.

    Args:
        graph: one training step.
        budget: bytes; None saves everything.

    Raises:
        BudgetError: no schedule that is found fits.
        ArgumentValueError: the graph has more than 400 nodes.
        DependencyError: OR-Tools is not installed.
    """
    return _fastest(graph, budget, 3, "moccasin3")


def _library(solver: str) -> Any:
    try:
        return importlib.import_module("ortools.sat.python.cp_model")
    except ImportError as error:
        raise DependencyError(
            f"the solver {solver!r} needs OR-Tools, which is not installed: pip install 'fckpt[cpsat]'."
        ) from error


def _fastest(graph: Graph, budget: int | None, most: int, solver: str) -> Schedule:
    library = _library(solver)
    rules = Rules(graph)
    plain = save_everything(rules)
    if budget is None or peak_of(rules, plain) <= budget:
        return schedule_of(graph, *plain)
    if len(graph.nodes) > LARGEST:
        raise ArgumentValueError(
            f"the solver {solver!r} takes graphs of at most {LARGEST} nodes, not {len(graph.nodes)}. "
            f"Take 'auto' or 'moments'."
        )
    frontier = Frontier(rules)
    least = plain
    for target in (budget, 0):  # the plan for 0 does not depend on the budget, so the least budget does not either
        program = _ConstraintProgram(library, frontier, most)
        least = program.smallest(target) or plain
        if peak_of(rules, least) <= budget:
            return fastest(rules, [order for order in (program.fastest(budget), least) if order], budget, solver)
    return fastest(rules, [least], budget, solver)  # raises BudgetError


class _ConstraintProgram:
    """The constraint program of one graph. A run is a position (see `frontier`) and the number of earlier runs."""

    def __init__(self, library: Any, frontier: Frontier, most: int):
        self.library = library
        self.model: Any = library.CpModel()
        self.solver: Any = None
        self.frontier = frontier
        self.most = most
        self.graph = graph = frontier.rules.graph
        count = len(frontier.sequence)
        self.stages = [[t for t in range(k, count) if t == k or frontier.may_recompute(k, t)] for k in range(count)]
        """By position: the stages in which the node may run."""
        self.runs = [(k, i) for k in range(count) for i in self._numbers(k)]
        self.dawn, self.horizon = _event(frontier.split, 0), _event(count, 0)
        """The events at which the backward pass begins, and at which it has ended."""
        self.unit = math.gcd(*(v.nbytes for v in graph.values), *(n.temporary_nbytes for n in graph.nodes)) or 1
        self.variables: list[Any] = []
        self.intervals: list[Any] = []
        self.demands: list[int] = []
        self.start: dict[tuple[int, int], Any] = {}
        self.present: dict[tuple[int, int], Any] = {}
        self.end: dict[tuple[int, int], Any] = {}
        """By value and run of its node."""
        for k, i in self.runs:
            self._run(k, i)
        for value in frontier.choices:
            self._hold(value)
        for run in self.runs:
            self._read(*run)
            self._take(*run)
        cotangents = sum(graph.values[v].nbytes for v in graph.cotangents)
        self._occupy(self._at(self.dawn), self._at(self.horizon), self._at(1), cotangents)
        self.footprint = self._within(0, sum(self.demands))
        self.model.add_cumulative(self.intervals, self.demands, self.footprint)

    def _hinted(self, variable: Any) -> Any:
        self.variables.append(variable)
        return variable

    def _flag(self) -> Any:
        return self._hinted(self.model.new_bool_var(""))

    def _within(self, low: int, high: int) -> Any:
        return self._hinted(self.model.new_int_var(low, high, ""))

    def _among(self, events: Iterable[int]) -> Any:
        domain = self.library.Domain.from_values(sorted(set(events)))
        return self._hinted(self.model.new_int_var_from_domain(domain, ""))

    def _at(self, number: int) -> Any:
        return self.model.new_constant(number)

    def _run(self, k: int, i: int) -> None:
        """Adds run i of the node at position k: the first run ends its own stage, later runs are in later stages."""
        if not i:
            self.start[k, i], self.present[k, i] = self._at(_event(k, k)), self._at(1)
            return
        start = self.start[k, i] = self._among(_event(t, k) for t in self.stages[k][i:])
        here = self.present[k, i] = self._flag()
        self.model.add_implication(here, self.present[k, i - 1])
        self.model.add(start > self.start[k, i - 1]).only_enforce_if(here)

    def _hold(self, value: int) -> None:
        """Adds a value's retention intervals: each ends directly after a reader or its start, before the next one."""
        model, k = self.model, self.frontier.made(value)
        positions = {k, *self.frontier.reads[value]}
        ends = {_event(t, c) + 1 for c in positions for t in self.stages[c]}
        barred = k < self.frontier.split and value in self.frontier.rules.unsaved
        for i in self._numbers(k):
            end, start, here = self._among(ends), self.start[k, i], self.present[k, i]
            self.end[value, i] = end
            model.add(end > start).only_enforce_if(here)
            if i:
                model.add(self.end[value, i - 1] <= start).only_enforce_if(here)
            if barred:
                late = self._flag()
                model.add(end <= self.dawn).only_enforce_if(~late)
                model.add(start >= self.dawn).only_enforce_if(late)

    def _numbers(self, k: int) -> range:
        return range(min(self.most, len(self.stages[k])))

    def _read(self, k: int, i: int) -> None:
        """Requires that every input of a run lies in an interval of its value."""
        model, start = self.model, self.start[k, i]
        for value in self.graph.nodes[self.frontier.sequence[k]].inputs:
            if value not in self.frontier.reads:
                continue
            served = []
            for run in self._lives(value):
                flag = self._flag()
                model.add_implication(flag, self.present[run])
                model.add(self.start[run] < start).only_enforce_if(flag)
                model.add(self.end[value, run[1]] > start).only_enforce_if(flag)
                served.append(flag)
            model.add_bool_or([*served, ~self.present[k, i]])

    def _lives(self, value: int) -> list[tuple[int, int]]:
        k = self.frontier.made(value)
        return [(k, i) for i in self._numbers(k)]

    def _take(self, k: int, i: int) -> None:
        """Adds the bytes of a run: its outputs' intervals, and the memory that is free again when the run ends."""
        node = self.graph.nodes[self.frontier.sequence[k]]
        here, start, passing = self.present[k, i], self.start[k, i], node.temporary_nbytes
        begin = self._overwriting(node, k, i)
        for value in node.outputs:
            nbytes = self.graph.values[value].nbytes
            if value in self.frontier.reads:
                self._occupy(begin, self.end[value, i], here, nbytes)
            elif i:
                passing += nbytes  # a second copy of a permanent value, dropped when the run ends
            else:
                self._occupy(begin, self._at(self.horizon), here, nbytes)
        self._occupy(start, start + 1, here, passing)

    def _occupy(self, start: Any, end: Any, here: Any, nbytes: int) -> None:
        if nbytes:
            size = self._within(0, self.horizon)
            self.intervals.append(self.model.new_optional_interval_var(start, size, end, here, ""))
            self.demands.append(nbytes // self.unit)

    def _overwriting(self, node: Node, k: int, i: int) -> Any:
        """Returns the event from which the output needs additional memory: the next event if it overwrites an input."""
        over = [v for v in node.overwrites if v in self.frontier.reads]
        if not over or (i and node.outputs[0] not in self.frontier.reads):
            return self.start[k, i]
        model, shift, begin = self.model, self._flag(), self._within(0, self.horizon)
        model.add(begin == self.start[k, i] + shift)
        dying = []
        for value in over:
            for run in self._lives(value):
                flag = self._flag()
                model.add_implication(flag, self.present[run])
                model.add(self.end[value, run[1]] == begin).only_enforce_if(flag)
                dying.append(flag)
        model.add_bool_or([*dying, ~shift])
        return begin

    def smallest(self, budget: int) -> Order | None:
        """First phase: returns the order with the least max(footprint, `budget`) that is found."""
        target = self.model.new_int_var(budget // self.unit, max(sum(self.demands), budget // self.unit), "")
        self.model.add(target >= self.footprint)
        self.model.minimize(target)
        return self._solve()

    def fastest(self, budget: int) -> Order | None:
        """Second phase: returns the order with the least time that is found, starting from the result of `smallest`."""
        model, sequence, seconds = self.model, self.frontier.sequence, self.frontier.rules.seconds
        for variable in self.variables:
            model.add_hint(variable, self.solver.value(variable))
        model.add(self.footprint <= budget // self.unit)
        scale = PRICE / (max(seconds[index] for index in sequence) or 1.0)
        prices = {k: round(scale * seconds[index]) + 1 for k, index in enumerate(sequence)}
        model.minimize(sum(prices[k] * self.present[k, i] for k, i in self.runs if i))
        return self._solve()

    def _solve(self) -> Order | None:
        self.solver = self.library.CpSolver()
        parameters = self.solver.parameters
        several = len(self.frontier.sequence) > FEW
        parameters.num_workers = 2 if several else 1
        parameters.interleave_search = several  # workers take turns, so the result does not depend on their speed
        parameters.random_seed = 0
        parameters.max_deterministic_time = EFFORT
        status = self.solver.solve(self.model)
        if status not in (self.library.OPTIMAL, self.library.FEASIBLE):
            return None
        again: list[set[int]] = [set() for _ in self.frontier.sequence]
        for k, i in self.runs:
            if i and self.solver.value(self.present[k, i]):
                again[_stage(self.solver.value(self.start[k, i]))].add(k)
        return self.frontier.order(again)


def _event(stage: int, position: int) -> int:
    return stage * (stage + 1) // 2 + position


def _stage(event: int) -> int:
    return (math.isqrt(8 * event + 1) - 1) // 2
