"""Dynamic Tensor Rematerialization, simulated on the static graph: evict when memory is full, recompute on access.

M. Kirisame, S. Lyubomirsky, A. Haan, J. Brennan, M. He, J. Roesch, T. Chen, Z. Tatlock, "Dynamic Tensor
Rematerialization", ICLR 2021, https://arxiv.org/abs/2006.09616. An online heuristic: it sees one operation at a time,
in the recorded order, and does not know later operations, except that it frees a value when the program no longer
references it (the paper's eager eviction). When it needs memory, it evicts the value with the least

    h(t) = (c(t) + sum of c over e*(t)) / (m(t) s(t)),

the paper's h_DTR with the exact evicted neighbourhood, not the approximation h_eq by union-find. The paper's theorem: a
chain of n equal layers takes O(n) computations in a memory of Omega(sqrt(n)), like the best static plans. Otherwise
there is no guarantee: for any such heuristic there are graphs on which it is slow, and below some budget it thrashes;
the run is then abandoned.

    t       value                                c(t)    rules.seconds of its producer
    m(t)    nbytes                               s(t)    clock - access: staleness, in simulated seconds
    e*(t)   _Run.around: the evicted values needed to recompute t, and the evicted values that need t, each through
            evicted values only; a node that makes several of them counts once

Outputs of nodes that never run twice are not evicted and stay to the end. The resulting order is evaluated like the
orders of other solvers: values are freed after their last use and in-place writes count, so its peak is at most the
memory held in this simulation.

Complexity: one pass over all live values per eviction, and a walk through the evicted neighbourhood of each candidate:
near-quadratic on large graphs at tight budgets. Left out: the run-time overhead of the decisions, the paper's random
sample of sqrt(n) candidates, and banishing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Schedule
from fckpt.solve.core.bisection import bisected
from fckpt.solve.core.rules import Order, Rules
from fckpt.solve.core.starts import save_everything

__all__ = ["dtr"]

THRASHING = 4
"""A run is abandoned once it has computed this many times as many nodes as the plain step."""


def dtr(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the schedule of dynamic tensor rematerialisation with a memory of `budget` bytes.

    Args:
        graph: one training step.
        budget: bytes; None never evicts.

    Raises:
        BudgetError: within this budget there is nothing left to evict, or the heuristic thrashes.
    """
    rules = Rules(graph)
    return bisected(rules, lambda limit: _Run(rules, limit).order(), budget, "dtr")


class _Run:
    """The state of the simulated training step."""

    def __init__(self, rules: Rules, budget: int | None):
        graph = rules.graph
        self.rules, self.graph, self.budget = rules, graph, budget
        self.nbytes = [v.nbytes for v in graph.values]
        self.producer = [v.producer for v in graph.values]
        self.plain = save_everything(rules)
        self.done: list[int] = []
        self.held_nbytes = 0
        self.clock = 0.0
        self.live = np.zeros(len(graph.values), dtype=bool)
        self.live[list(graph.inputs)] = True
        self.made = self.live.copy()
        """By value: whether it has been made. A value that was made and is not live is evicted."""
        self.locks = np.zeros(len(graph.values), dtype=np.int64)
        self.evictable = np.array([self._may_evict(v.id) for v in graph.values], dtype=bool)
        self.access = np.zeros(len(graph.values))
        self.least_staleness = sum(rules.seconds) / max(1, len(rules.seconds)) / 1000 or 1.0
        own = [0.0 if p is None else rules.seconds[p] for p in self.producer]
        self.own = np.array(own)
        self.price = self.own.copy()
        """By value: c(t) plus the sum over e*(t), as last computed; never above the current value."""
        self.stale = np.zeros(len(graph.values), dtype=bool)
        """By value: whether its evicted neighbourhood has changed since `price` was computed."""
        self.uses = [0] * len(graph.values)
        """By value: the number of reads that the program has left."""
        for index in (*self.plain.forward, *self.plain.backward):
            for value in graph.nodes[index].inputs:
                self.uses[value] += 1
        for value in graph.gradients:
            self.uses[value] += 1

    def _may_evict(self, value: int) -> bool:
        producer = self.producer[value]
        return producer is not None and value not in self.rules.permanent and not self.rules.pinned[producer]

    def order(self) -> Order | None:
        """Returns the computed order; None if memory ran out or the run was abandoned."""
        if not all(self.run_recorded(index) for index in self.plain.forward):
            return None
        split = len(self.done)
        for value in self.rules.unsaved:
            if self.live[value]:
                self.drop(value)
        self.held_nbytes += sum(self.nbytes[v] for v in self.graph.cotangents)
        self.live[list(self.graph.cotangents)] = self.made[list(self.graph.cotangents)] = True
        if not all(self.run_recorded(index) for index in self.plain.backward):
            return None
        for value in self.graph.gradients:
            producer = self.producer[value]
            if not self.live[value] and not (producer is not None and self.compute(producer)):
                return None
        return Order(self.done[:split], self.done[split:])

    def run_recorded(self, index: int) -> bool:
        """Runs a node of the recorded program, then frees the values that the program no longer reads."""
        for value in self.graph.nodes[index].inputs:
            self.uses[value] -= 1
        if not self.compute(index):
            return False
        self.let_go((*self.graph.nodes[index].inputs, *self.graph.nodes[index].outputs))
        return True

    def compute(self, index: int) -> bool:
        """Runs a node, after recomputing its missing inputs; returns whether memory sufficed."""
        stack = [index]
        self.locks[list(self.graph.nodes[index].inputs)] += 1
        while stack:
            node = self.graph.nodes[stack[-1]]
            missing = next((v for v in node.inputs if not self.live[v]), None)
            if missing is not None:
                producer = self.producer[missing]
                assert producer is not None
                stack.append(producer)
                self.locks[list(self.graph.nodes[producer].inputs)] += 1
                continue
            if not self.run(stack.pop()):
                return False
            self.locks[list(node.inputs)] -= 1
            if stack:
                self.let_go((*node.inputs, *node.outputs))
        return True

    def run(self, index: int) -> bool:
        """Runs a node whose inputs are live; returns whether memory sufficed."""
        node = self.graph.nodes[index]
        dying = [v for v in node.overwrites if self.evictable[v] and not self.uses[v] and self.locks[v] == 1]
        over = bool(dying) and not self.live[node.outputs[0]]  # the node writes its only output over the dying input
        needed = node.temporary_nbytes + (0 if over else sum(self.nbytes[v] for v in node.outputs))
        while self.budget is not None and self.held_nbytes + needed > self.budget:
            if (victim := self.victim()) is None:
                return False
            self.drop(victim)
        self.done.append(index)
        self.clock += self.rules.seconds[index]
        self.access[[*node.inputs, *node.outputs]] = self.clock
        for value in node.outputs:
            if not self.live[value]:
                self.held_nbytes += self.nbytes[value]
                self.live[value] = True
                if self.made[value]:
                    for other in self.around(value)[1]:
                        self.price[other], self.stale[other] = self.own[other], True
                self.made[value] = self.stale[value] = True
                self.price[value] = self.own[value]
        return len(self.done) <= THRASHING * (len(self.plain.forward) + len(self.plain.backward))

    def let_go(self, values: Iterable[int]) -> None:
        """Frees the members of `values` that neither the program nor a computation in progress will read."""
        for value in values:
            if not self.uses[value] and self.live[value] and self.evictable[value] and not self.locks[value]:
                self.drop(value)

    def drop(self, value: int) -> None:
        self.live[value] = False
        self.held_nbytes -= self.nbytes[value]
        self.stale[list(self.around(value)[1])] = True

    def victim(self) -> int | None:
        """Returns the live value with the least h; None if all live values are in use."""
        candidates = np.flatnonzero(self.live & self.evictable & (self.locks == 0))
        sizes = np.array([self.nbytes[v] for v in candidates.tolist()], dtype=float)
        candidates, sizes = candidates[sizes > 0], sizes[sizes > 0]
        if not len(candidates):
            return None
        weight = sizes * np.maximum(self.clock - self.access[candidates], self.least_staleness)
        scores = self.price[candidates] / weight
        while True:
            i = int(scores.argmin())
            value = int(candidates[i])
            if not self.stale[value]:
                return value
            self.stale[value] = False
            self.price[value] = self.around(value)[0]
            scores[i] = self.price[value] / weight[i]

    def around(self, value: int) -> tuple[float, set[int]]:
        """Returns the price of `value` with its evicted neighbourhood, and the live values adjacent to it."""
        nodes = {self.producer[value]}
        border: set[int] = set()
        for step in (self.parents, self.children):
            seen, stack = {value}, [value]
            while stack:
                for other in step(stack.pop()):
                    if other in seen or not self.made[other]:
                        continue
                    seen.add(other)
                    if self.live[other]:
                        border.add(other)
                    else:
                        stack.append(other)
                        nodes.add(self.producer[other])
        return sum(self.rules.seconds[i] for i in sorted(n for n in nodes if n is not None)), border

    def parents(self, value: int) -> tuple[int, ...]:
        producer = self.producer[value]
        return () if producer is None else self.graph.nodes[producer].inputs

    def children(self, value: int) -> Iterator[int]:
        for index in self.graph.consumers[value]:
            yield from self.graph.nodes[index].outputs
