"""What all solvers share: what must run and what may be permanent, and how a set of saved values becomes a schedule.

`replay` is the schedule that M. Kusumoto, T. Inoue, G. Watanabe, T. Akiba, M. Koyama, "A Graph Theoretic Framework of
Recomputation Algorithms for Memory-Efficient Backpropagation", NeurIPS 2019, https://arxiv.org/abs/1905.11722, call
canonical, made lazy: a value that was not saved is computed again when it is first read in the backward pass, from
whatever is there. With `leaf` it forgets again what it computed, save at points that halve the way back: the
logarithmic memory of A. Griewank, "Achieving logarithmic growth of temporal and spatial complexity in reverse automatic
differentiation", 1992, https://doi.org/10.1080/10556789208805505, on graphs instead of chains.

Complexity: linear in the computations that come out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from fckpt._units import format_bytes
from fckpt.errors import BudgetError
from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Compute, Schedule, schedule_of
from fckpt.graph.simulation import Timeline, simulate
from fckpt.solve.core.profile import Profiler

__all__ = [
    "Order",
    "Rules",
    "Solver",
    "ancestors",
    "fastest",
    "from_saved",
    "over_budget",
    "peak_of",
    "profile_of",
    "replay",
    "seconds_of",
    "within_budget",
]


class Solver(Protocol):
    """Decides what is computed and freed, and when."""

    def __call__(self, graph: Graph, budget: int | None) -> Schedule:
        """Returns a schedule whose simulated peak is at most `budget` bytes.

        Args:
            graph: one training step.
            budget: the bytes that the simulated peak may reach; None leaves it to the solver.

        Raises:
            BudgetError: the solver knows no schedule that fits. At its `least_bytes` the solver succeeds.
        """
        ...


class Order(NamedTuple):
    """The nodes that both passes compute, in order. `schedule_of` says when their values are freed."""

    forward: list[int]
    backward: list[int]


class Rules:
    """What every schedule of a graph must respect, and what the policy's decisions make of it."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.permanent = graph.held.union(graph.outputs, graph.gradients)
        """Values that are not freed once they are made."""
        self.pinned = [_is_pinned(graph, i) for i in range(len(graph.nodes))]
        """By node: whether it never runs twice. What the backward pass needs of it is therefore saved."""
        self.unsaved = frozenset(
            value.id for value in graph.values if value.decision == "must_recompute" and self._may_vanish(value.id)
        )
        """Values that must not live across the boundary."""
        musts = [n.id for n in graph.nodes if n.once or n.writes or (n.random and n.id < graph.boundary)]
        self.forward_roots = musts + [p for v in graph.outputs if (p := graph.values[v].producer) is not None]
        """Nodes that must run in the forward pass."""
        late = {n.id for n in graph.nodes[graph.boundary :] if n.random and not n.once}
        ends = {p for v in graph.gradients if (p := graph.values[v].producer) is not None and p >= graph.boundary}
        needed = ancestors(graph, ends | late)
        self.backward = [i for i in needed if graph.nodes[i].backward or i in ends or i in late]
        """Nodes that the backward pass is made of, in recorded order. Others run when these read their values."""
        self.seconds = _weights(graph)
        """By node: what it costs to run."""
        self.nbytes = [v.nbytes for v in graph.values]
        """By value."""
        self.profiler = Profiler(graph, self.permanent)
        """Tells the profile of any sequence."""

    def _may_vanish(self, value: int) -> bool:
        producer = self.graph.values[value].producer
        return producer is not None and value not in self.permanent and not self.pinned[producer]


def _is_pinned(graph: Graph, index: int) -> bool:
    node = graph.nodes[index]
    if node.once:
        return True
    return index < graph.boundary and any(graph.values[v].decision == "must_save" for v in node.outputs)


def _weights(graph: Graph) -> list[float]:
    # without times, FLOPs or the count of nodes still tell a matmul from a copy
    for weights in ([n.seconds for n in graph.nodes], [float(n.flops) for n in graph.nodes]):
        if any(weights):
            return weights
    return [1.0] * len(graph.nodes)


def ancestors(graph: Graph, roots: Iterable[int], stop: Collection[int] = frozenset()) -> list[int]:
    """Returns the nodes that `roots` need, themselves included, in recorded order.

    Args:
        graph: the graph.
        roots: nodes.
        stop: values that are there already, whose producers are not needed.
    """
    found = set(roots)
    stack = list(found)
    while stack:
        for value in graph.nodes[stack.pop()].inputs:
            producer = graph.values[value].producer
            if producer is not None and producer not in found and value not in stop:
                found.add(producer)
                stack.append(producer)
    return sorted(found)


def from_saved(graph: Graph, saved: Collection[int]) -> Schedule:
    """Returns the schedule that keeps `saved` for the backward pass and computes everything else again when needed.

    Args:
        graph: one training step.
        saved: values. Those that nothing needs in the backward pass are not permanent; outputs, and what must be saved
            by its decision or because its node runs once, are permanent whether they are named or not; what must be
            recomputed is not permanent.
    """
    return schedule_of(graph, *replay(Rules(graph), saved))


def replay(rules: Rules, saved: Collection[int], order: Sequence[int] | None = None, leaf: int | None = None) -> Order:
    """Returns what is computed when `saved` is permanent, and everything else is computed again just in time.

    Args:
        rules: of the graph.
        saved: the values to keep, as in `from_saved`.
        order: the nodes of the backward pass, in an order that respects what they read; None for the recorded one.
        leaf: after more than so many computations in a row, only the results of about the last `leaf` and of points
            that halve the way before them are permanent for later: less memory, more time. None keeps all.
    """
    graph = rules.graph
    live = _live_at_boundary(rules, saved)
    at_boundary = bytes(live)
    backward: list[int] = []
    for index in rules.backward if order is None else order:
        node = graph.nodes[index]
        if all(live[v] for v in node.outputs):
            continue
        if missing := [v for v in node.inputs if not live[v]]:
            backward += _fetch(graph, missing, live, leaf)
        backward.append(index)
        for value in node.outputs:
            live[value] = 1
    if missing := [v for v in graph.gradients if not live[v]]:
        backward += _fetch(graph, missing, live, leaf)
    used = {v for i in backward for v in graph.nodes[i].inputs if at_boundary[v]}
    used.update(v for v in graph.gradients if at_boundary[v])
    sources = [p for v in used if (p := graph.values[v].producer) is not None]
    return Order(ancestors(graph, [*rules.forward_roots, *sources]), backward)


def _live_at_boundary(rules: Rules, saved: Collection[int]) -> bytearray:
    graph = rules.graph
    live = bytearray(len(graph.values))
    for value in (*graph.inputs, *graph.cotangents, *graph.outputs):
        live[value] = 1
    for value in saved:
        producer = graph.values[value].producer
        if value not in rules.unsaved and producer is not None and not graph.nodes[producer].backward:
            live[value] = 1
    for node in graph.nodes:
        if rules.pinned[node.id]:
            for value in node.outputs:
                live[value] = 1
    return live


def _fetch(graph: Graph, missing: list[int], live: bytearray, leaf: int | None) -> list[int]:
    """Returns the nodes to run for `missing`, and marks in `live` what of their results stays."""
    found: set[int] = set()
    stack = list(missing)
    while stack:
        producer = graph.values[stack.pop()].producer
        assert producer is not None
        if producer not in found:
            found.add(producer)
            stack += [v for v in graph.nodes[producer].inputs if not live[v]]
    nodes = sorted(found)
    if leaf is not None and len(nodes) > leaf:
        for value in _across_cuts(graph, nodes, leaf):
            live[value] = 1
    for index in nodes[-(leaf or len(nodes)) :]:
        for value in graph.nodes[index].outputs:
            live[value] = 1
    return nodes


def _across_cuts(graph: Graph, nodes: list[int], leaf: int) -> set[int]:
    """The results of `nodes` that are read across points `leaf`, 2 `leaf`, 4 `leaf`, ... nodes before their end."""
    cuts = [len(nodes) - leaf]
    while 2 * leaf < len(nodes):
        leaf *= 2
        cuts.append(len(nodes) - leaf)
    place = {index: i for i, index in enumerate(nodes)}
    found = set()
    for i, index in enumerate(nodes):
        for value in graph.nodes[index].inputs:
            producer = graph.values[value].producer
            if producer in place and any(place[producer] < cut <= i for cut in cuts):
                found.add(value)
    return found


def peak_of(rules: Rules, order: Order) -> int:
    """Returns the simulated peak of `schedule_of(graph, *order)` in bytes, without building it."""
    return int(profile_of(rules, order).max(initial=0))


def seconds_of(rules: Rules, order: Order) -> float:
    """Returns the time of all computations of `order`, by the weights of `rules`."""
    return sum(rules.seconds[i] for i in (*order.forward, *order.backward))


def profile_of(rules: Rules, order: Order) -> np.ndarray:
    """Returns the bytes held while each computation of `order` runs: int64, one per computation."""
    return rules.profiler.profile(order.forward, order.backward)


def within_budget(graph: Graph, schedule: Schedule, budget: int | None, solver: str) -> Schedule:
    """Returns `schedule` if its simulated peak is at most `budget`; for solvers that know but one schedule.

    Raises:
        BudgetError: it does not fit.
    """
    timeline = simulate(graph, schedule)
    if budget is not None and timeline.peak_nbytes > budget:
        raise over_budget(graph, schedule, budget, solver, timeline)
    return schedule


def fastest(rules: Rules, plans: Iterable[Order], budget: int | None, solver: str) -> Schedule:
    """Returns the schedule of the fastest of `plans` whose peak fits; for solvers whose plans do not depend on budgets.

    Raises:
        BudgetError: none fits.
    """
    found = [(peak_of(rules, order), order) for order in plans]
    fits = [order for peak, order in found if budget is None or peak <= budget]
    if fits:
        return schedule_of(rules.graph, *min(fits, key=lambda order: seconds_of(rules, order)))
    assert budget is not None
    _, least = min(found, key=lambda pair: pair[0])
    raise over_budget(rules.graph, schedule_of(rules.graph, *least), budget, solver)


def over_budget(
    graph: Graph,
    schedule: Schedule,
    budget: int,
    solver: str,
    timeline: Timeline | None = None,
    least_peak: int | None = None,
) -> BudgetError:
    """Returns the error that says that `schedule` is the smallest that `solver` knows, and what binds it.

    Args:
        graph: one training step.
        schedule: the smallest.
        budget: the bytes that were asked for.
        solver: its name.
        timeline: what `simulate` makes of the schedule, if it is known.
        least_peak: the bytes that every plan needs, if they are known.
    """
    timeline = timeline or simulate(graph, schedule)
    step = (*schedule.forward, *schedule.backward)[timeline.peak_step]
    node = graph.nodes[step.node if isinstance(step, Compute) else graph.values[step.value].producer or 0]
    least = timeline.peak_nbytes
    proven = (
        ""
        if least_peak is None
        else f" No plan at all needs less than {format_bytes(least_peak)} ({least_peak} bytes)."
    )
    return BudgetError(
        f"no plan fits {format_bytes(budget)} ({budget} bytes): the least that the solver {solver!r} finds is "
        f"{format_bytes(least)} ({least} bytes), which node {node.id} ({node.op}{node.place}) needs while it runs. "
        f"Give at least that, or a smaller batch.{proven}",
        least,
    )
