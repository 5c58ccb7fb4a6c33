"""Exhaustive search for the optimum of small graphs with a given order of first runs, independent of the solvers.

First runs are in the order of the plan that saves everything; between two of them any earlier nodes may run again, in
the same order and each at most once. Dijkstra's algorithm over states (number of first runs, position in that order
since the last first run, live values, recomputations by node if they are limited).
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator
from itertools import combinations
from random import Random
from typing import NamedTuple

from graphs import Builder, Layer, differentiated

from fckpt.graph import Graph, Node
from fckpt.solve.core.rules import Rules
from fckpt.solve.core.starts import save_everything


class State(NamedTuple):
    stage: int
    place: int
    live: frozenset[int]
    repeated: tuple[int, ...]


def optimum(graph: Graph, budget: int | None, *, most: int | None = None) -> float | None:
    """Returns the least time of any such plan within `budget` bytes; None if no plan fits.

    Args:
        graph: one training step.
        budget: bytes.
        most: the largest number of recomputations of a node; None for any number.
    """
    return _Search(graph, most).run(budget, by_peak=False)


def least_peak(graph: Graph, *, most: int | None = None) -> float:
    """Returns the least peak of any such plan."""
    found = _Search(graph, most).run(None, by_peak=True)
    assert found is not None
    return found


class _Search:
    def __init__(self, graph: Graph, most: int | None):
        self.graph = graph
        self.rules = Rules(graph)
        base = save_everything(self.rules)
        self.order = list(dict.fromkeys((*base.forward, *base.backward)))
        self.split = len(base.forward)
        self.most = most

    def run(self, budget: int | None, *, by_peak: bool) -> float | None:
        start = State(0, 0, frozenset(), (0,) * len(self.order) if self.most is not None else ())
        costs: dict[State, float] = {start: 0.0}
        queue: list[tuple[float, int, State]] = [(0.0, 0, start)]
        pushed = 0
        while queue:
            cost, _, state = heapq.heappop(queue)
            if cost > costs[state]:
                continue
            if state.stage == len(self.order):
                return cost
            for after, seconds, peak in self.steps(state):
                if budget is not None and peak > budget:
                    continue
                total = max(cost, float(peak)) if by_peak else cost + seconds
                if total < costs.get(after, float("inf")):
                    pushed += 1
                    costs[after] = total
                    heapq.heappush(queue, (total, pushed, after))
        return None

    def steps(self, state: State) -> Iterator[tuple[State, float, int]]:
        """Yields the possible next states, with their time and the bytes held meanwhile."""
        graph = self.graph
        readable = {*state.live, *graph.inputs}
        held = sum(graph.values[v].nbytes for v in state.live)
        if state.stage >= self.split:
            readable.update(graph.cotangents)
            held += sum(graph.values[v].nbytes for v in graph.cotangents)
        for place in range(state.place, state.stage + 1):
            first = place == state.stage
            index = self.order[place]
            node = graph.nodes[index]
            if not readable.issuperset(node.inputs):
                continue
            if not first and (self.rules.pinned[index] or state.live.issuperset(node.outputs)):
                continue
            repeated = state.repeated
            if not first and self.most is not None:
                if repeated[place] == self.most:
                    continue
                repeated = (*repeated[:place], repeated[place] + 1, *repeated[place + 1 :])
            peak = held + node.temporary_nbytes + sum(graph.values[v].nbytes for v in node.outputs)
            fresh = state.live.isdisjoint(node.outputs)
            made = state.live.union(node.outputs)
            loose = [v for v in (*node.inputs, *node.outputs) if v not in self.rules.permanent]
            for count in range(len(loose) + 1):
                for freed in combinations(loose, count):
                    over = node.overwritten(freed) if fresh else None
                    saved = 0 if over is None else graph.values[over].nbytes
                    live = made.difference(freed)
                    if first and place + 1 == self.split and not live.isdisjoint(self.rules.unsaved):
                        continue
                    after = State(state.stage + first, 0 if first else place + 1, live, repeated)
                    yield after, self.rules.seconds[index], peak - saved


def tight(seed: int, count: int = 4) -> Graph:
    """Returns a random training step in which recomputations can lower the peak.

    Args:
        seed: the seed of the random numbers.
        count: nodes of the forward pass; the backward pass has about as many.
    """
    random = Random(seed)
    build = Builder()
    inputs = [build.value(random.randint(1, 9))]
    known, layers = list(inputs), []
    for _ in range(count):
        reads = sorted({known[-1], random.choice(known[-3:])})
        sizes = [random.choice([2, 3, 5, 9]) for _ in range(random.choice([1, 1, 2]))]
        cost, temporary = float(random.randint(0, 5)), random.choice([0, 0, 3])
        flags = {random.choice(["random", "once"]): True} if random.random() < 0.1 else {}
        outputs = build.node("op", reads, sizes, cost, temporary, **flags)
        saved = [v for v in (*reads, *outputs) if random.random() < 0.6]
        layers.append(Layer(reads, outputs, saved, cost, random.choice([0, 2])))
        known += outputs
    graph = differentiated(build, layers, inputs, known[-1:])
    nodes = tuple(_overwriting(random, graph, node) for node in graph.nodes)
    made = [v for node in graph.nodes[: graph.boundary] for v in node.outputs]
    values = list(graph.values)
    for v in made:
        if random.random() < 0.1:
            values[v] = dataclasses.replace(values[v], decision=random.choice(["must_save", "must_recompute"]))
    return dataclasses.replace(graph, nodes=nodes, values=tuple(values))


def _overwriting(random: Random, graph: Graph, node: Node) -> Node:
    if len(node.outputs) != 1 or node.once or random.random() < 0.5:
        return node
    nbytes = graph.values[node.outputs[0]].nbytes
    same = (v for v in node.inputs if graph.values[v].nbytes == nbytes and graph.values[v].producer is not None)
    return dataclasses.replace(node, overwrites=tuple(same))
