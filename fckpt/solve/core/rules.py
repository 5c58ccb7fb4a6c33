"""Shared by all solvers: what must run, what may be saved, and how a set of saved values becomes a schedule.

`replay` makes the schedule that M. Kusumoto, T. Inoue, G. Watanabe, T. Akiba, M. Koyama, "A Graph Theoretic Framework
of Recomputation Algorithms for Memory-Efficient Backpropagation", NeurIPS 2019, https://arxiv.org/abs/1905.11722, call
canonical, but lazily: a value that was not saved is recomputed when the backward pass first reads it, from whatever is
live. With `leaf`, `replay` frees recomputed values again, except at cuts that repeatedly halve the recomputed part: the
logarithmic memory of A. Griewank, "Achieving logarithmic growth of temporal and spatial complexity in reverse automatic
differentiation", 1992, https://doi.org/10.1080/10556789208805505, on graphs instead of chains.

Complexity: linear in the number of computations of the resulting order.
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
    """A function from a graph and a budget to a schedule."""

    def __call__(self, graph: Graph, budget: int | None) -> Schedule:
        """Returns a schedule whose simulated peak is at most `budget` bytes.

        Args:
            graph: one training step.
            budget: the largest simulated peak, in bytes; None leaves the peak to the solver.

        Raises:
            BudgetError: the solver finds no schedule that fits. With its `least_bytes` as the budget, the solver
                succeeds.
        """
        ...


class Order(NamedTuple):
    """The nodes that both passes compute, in order. `schedule_of` adds the steps that free values."""

    forward: list[int]
    backward: list[int]


class Rules:
    """What every schedule of a graph must respect, with the policy's decisions taken into account."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.permanent = graph.held.union(graph.outputs, graph.gradients)
        """Values that are never freed once they are made."""
        self.pinned = [_is_pinned(graph, i) for i in range(len(graph.nodes))]
        """By node: whether it never runs twice. Outputs that the backward pass needs are therefore saved."""
        self.unsaved = frozenset(
            value.id for value in graph.values if value.decision == "must_recompute" and self._may_vanish(value.id)
        )
        """Values that must not live across the boundary between the passes."""
        early = lambda n: n.id < graph.boundary and (n.writes or n.random)
        musts = [n.id for n in graph.nodes if n.once or early(n)]
        self.forward_roots = musts + [p for v in graph.outputs if (p := graph.values[v].producer) is not None]
        """Nodes that must run in the forward pass."""
        late = {n.id for n in graph.nodes[graph.boundary :] if n.random and not n.once}
        ends = {p for v in graph.gradients if (p := graph.values[v].producer) is not None and p >= graph.boundary}
        needed = ancestors(graph, ends | late)
        self.backward = [i for i in needed if graph.nodes[i].backward or i in ends or i in late]
        """The nodes of the backward pass, in recorded order. Other nodes run when one of these reads their values."""
        self.seconds = _weights(graph)
        """By node: the cost of one run."""
        self.nbytes = [v.nbytes for v in graph.values]
        """By value."""
        self.profiler = Profiler(graph, self.permanent)
        """Computes the memory profile of an order."""

    def _may_vanish(self, value: int) -> bool:
        producer = self.graph.values[value].producer
        return producer is not None and value not in self.permanent and not self.pinned[producer]


def _is_pinned(graph: Graph, index: int) -> bool:
    node = graph.nodes[index]
    if node.once:
        return True
    return index < graph.boundary and any(graph.values[v].decision == "must_save" for v in node.outputs)


def _weights(graph: Graph) -> list[float]:
    # without measured times, FLOPs or the number of nodes still distinguish a matmul from a copy
    for weights in ([n.seconds for n in graph.nodes], [float(n.flops) for n in graph.nodes]):
        if any(weights):
            return weights
    return [1.0] * len(graph.nodes)


def ancestors(graph: Graph, roots: Iterable[int], stop: Collection[int] = frozenset()) -> list[int]:
    """Returns the nodes on which `roots` depend, including `roots`, in recorded order.

    Args:
        graph: the graph.
        roots: nodes.
        stop: values that are already live; their producers are not needed.
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
    """Returns the schedule that saves `saved` for the backward pass, and recomputes all other values when needed.

    Args:
        graph: one training step.
        saved: values to save. Values that the backward pass does not need are not saved. Outputs, values with the
            decision must save, and outputs of nodes that run once are always saved; values with the decision must
            recompute are never saved.
    """
    return schedule_of(graph, *replay(Rules(graph), saved))


def replay(
    rules: Rules, saved: Collection[int], backward_order: Sequence[int] | None = None, leaf: int | None = None
) -> Order:
    """Returns the order that saves `saved` and recomputes all other values just in time.

    Args:
        rules: the rules of the graph.
        saved: values to save, as in `from_saved`.
        backward_order: the nodes of the backward pass, in an order that respects their dependencies; None for the
            recorded order.
        leaf: if more than `leaf` nodes are recomputed in a row, hold only the results of about the last `leaf` of them
            and the values that live across cuts that halve the part before: less memory, more time. None holds all
            results.
    """
    graph = rules.graph
    live = _live_at_boundary(rules, saved)
    at_boundary = bytes(live)
    backward: list[int] = []
    for index in rules.backward if backward_order is None else backward_order:
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
    """Returns the nodes to run for the values `missing`, and marks in `live` which of their results stay."""
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
    """Returns the results of `nodes` that live across the cuts `leaf`, 2 `leaf`, 4 `leaf`, ... nodes before the end."""
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
    """Returns the simulated peak of `schedule_of(graph, *order)` in bytes, without building the schedule."""
    return int(profile_of(rules, order).max(initial=0))


def seconds_of(rules: Rules, order: Order) -> float:
    """Returns the time of all computations of `order`, by `Rules.seconds`."""
    return sum(rules.seconds[i] for i in (*order.forward, *order.backward))


def profile_of(rules: Rules, order: Order) -> np.ndarray:
    """Returns the bytes held while each computation of `order` runs: int64, one per computation."""
    return rules.profiler.profile(order.forward, order.backward)


def within_budget(graph: Graph, schedule: Schedule, budget: int | None, solver: str) -> Schedule:
    """Returns `schedule` if its simulated peak is at most `budget`; for solvers that make only one schedule.

    Raises:
        BudgetError: the schedule does not fit.
    """
    timeline = simulate(graph, schedule)
    if budget is not None and timeline.peak_nbytes > budget:
        raise over_budget(graph, schedule, budget, solver, timeline)
    return schedule


def fastest(rules: Rules, plans: Iterable[Order], budget: int | None, solver: str) -> Schedule:
    """Returns the schedule of the fastest of `plans` that fits; for solvers whose plans do not depend on the budget.

    Raises:
        BudgetError: none of the plans fits.
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
    """Returns the `BudgetError` for a solver whose smallest schedule is `schedule`; it says where the peak is.

    Args:
        graph: one training step.
        schedule: the schedule with the smallest peak.
        budget: the requested bytes.
        solver: the solver's name.
        timeline: the simulation of the schedule, if it is known.
        least_peak: a lower bound on the peak of every plan, if it is known.
    """
    timeline = timeline or simulate(graph, schedule)
    step = (*schedule.forward, *schedule.backward)[timeline.peak_step]
    node = graph.nodes[step.node if isinstance(step, Compute) else graph.values[step.value].producer or 0]
    least = timeline.peak_nbytes
    if least_peak is None:
        proof = ""
    elif least_peak == least:
        proof = " No plan at all needs less."
    else:
        proof = f" No plan at all needs less than {format_bytes(least_peak)} ({least_peak} bytes)."
    return BudgetError(
        f"no plan fits {format_bytes(budget)} ({budget} bytes): the least that the solver {solver!r} finds is "
        f"{format_bytes(least)} ({least} bytes), which node {node.id} ({node.op}{node.place}) needs while it runs. "
        f"Give at least that, or a smaller batch.{proof}",
        least,
    )
