"""Exhaustive search for the optimum of small graphs; the tests compare other solvers with it.

Dijkstra's algorithm over states (pass, live values, nodes computed so far). Optimal among all schedules: any order and
any number of recomputations, in both passes. The problem is Checkmate's (P. Jain et al., 2020,
https://arxiv.org/abs/1910.02653), extended by a free order, temporaries, nodes with several outputs, and outputs that
overwrite inputs.

Complexity: exponential; graphs of more than `MOST` nodes are refused. Nothing is left out.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import NamedTuple

from fckpt.errors import ArgumentValueError
from fckpt.graph.graph import Graph, Node
from fckpt.graph.schedule import Schedule, schedule_of
from fckpt.solve.core.rules import Order, Rules, over_budget

__all__ = ["MOST", "brute"]

MOST = 12


class _State(NamedTuple):
    backward: bool
    live: int
    done: int


def brute(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the schedule with the least time among all schedules whose peak is at most `budget` bytes.

    Raises:
        BudgetError: no schedule fits. Its `least_bytes` is the least peak of any schedule.
        ArgumentValueError: the graph has more than 12 nodes.
    """
    if len(graph.nodes) > MOST:
        raise ArgumentValueError(f"the solver 'brute' takes graphs of at most {MOST} nodes, not {len(graph.nodes)}.")
    search = _Search(graph)
    order = search.best(budget)
    if order is not None:
        return schedule_of(graph, *order)
    least = search.best(None, by_peak=True)
    assert budget is not None and least is not None
    raise over_budget(graph, schedule_of(graph, *least), budget, "brute")


class _Search:
    """The search. Sets of values and of nodes are the bits of ints."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.rules = Rules(graph)
        self.outputs, self.gradients, self.unsaved = (
            _mask(ids) for ids in (graph.outputs, graph.gradients, self.rules.unsaved)
        )
        self.cotangents = _mask(graph.cotangents)
        self.required = _mask(n.id for n in graph.nodes if n.once or n.writes or (n.random and n.id < graph.boundary))
        self.random = _mask(n.id for n in graph.nodes if n.random)
        self.held = _mask(graph.inputs)

    def best(self, budget: int | None, by_peak: bool = False) -> Order | None:
        """Returns the order with the least time or, if `by_peak`, with the least peak; None if no order fits."""
        start = _State(False, self.held, 0)
        costs: dict[_State, float] = {start: 0.0}
        came: dict[_State, tuple[_State, int]] = {}
        queue: list[tuple[float, _State]] = [(0.0, start)]
        while queue:
            cost, state = heapq.heappop(queue)
            if cost > costs[state]:
                continue
            if state.backward and not self.gradients & ~state.live:
                return self._path(came, state)
            for index, after, peak in self._steps(state):
                if budget is not None and peak > budget:
                    continue
                price = self.rules.seconds[index] if index >= 0 else 0.0
                total = max(cost, float(peak)) if by_peak else cost + price
                if total < costs.get(after, float("inf")):
                    costs[after] = total
                    came[after] = (state, index)
                    heapq.heappush(queue, (total, after))
        return None

    def _path(self, came: dict[_State, tuple[_State, int]], state: _State) -> Order:
        order = Order([], [])
        while state in came:
            before, index = came[state]
            if index >= 0:
                order[before.backward].append(index)
            state = before
        return Order(order.forward[::-1], order.backward[::-1])

    def _steps(self, state: _State) -> Iterator[tuple[int, _State, int]]:
        """Yields each possible next node (-1: the backward pass begins), the next state, and the bytes held."""
        missing = self.outputs & ~state.live or self.required & ~state.done
        if not state.backward and not missing and not state.live & self.unsaved:
            yield -1, _State(True, state.live | self.cotangents, state.done), 0
        held = sum(v.nbytes for v in self.graph.values if state.live >> v.id & 1 and not self.held >> v.id & 1)
        for node in self.graph.nodes:
            if not self._may_run(node, state):
                continue
            peak = held + node.temporary_nbytes + sum(self.graph.values[v].nbytes for v in node.outputs)
            fresh = not state.live & _mask(node.outputs)
            live, done = state.live | _mask(node.outputs), state.done | 1 << node.id
            # it is enough to free values directly after a run that reads or makes them
            touched = [v for v in (*node.inputs, *node.outputs) if v not in self.rules.permanent]
            for count in range(len(touched) + 1):
                for freed in combinations(touched, count):
                    over = node.overwritten(freed) if fresh else None
                    saved = 0 if over is None else self.graph.values[over].nbytes
                    yield node.id, _State(state.backward, live & ~_mask(freed), done), peak - saved

    def _may_run(self, node: Node, state: _State) -> bool:
        makes_nothing = not _mask(node.outputs) & ~state.live
        if makes_nothing and not self.required & ~state.done & 1 << node.id:
            return False
        if _mask(node.inputs) & ~state.live or (node.backward and not state.backward):
            return False
        if state.done >> node.id & 1:
            return not self.rules.pinned[node.id]
        if state.backward and (node.once or (node.random and node.id < self.graph.boundary)):
            return False
        return not node.random or not (state.done & self.random) >> node.id  # random nodes keep their order


def _mask(bits: Iterable[int]) -> int:
    found = 0
    for bit in bits:
        found |= 1 << bit
    return found
