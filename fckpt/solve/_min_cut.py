"""Chooses what to save by a minimum cut between the forward pass and the values that the backward pass reads.

H. He, "Min-cut optimal(*) recomputation (i.e. activation checkpointing) with AOTAutograd", 2022,
https://dev-discuss.pytorch.org/t/467, and H. He, S. Yu, "Transcending Runtime-Memory Tradeoffs in Checkpointing by
being Fusion Aware", MLSys 2023: the method of `torch.compile`. Recomputing a node has a price, and saving a value has a
price; a recomputed node needs its inputs, and the backward pass needs what it reads. The cheapest choice is a minimum
cut.

Without a budget, as in torch: recomputing cheap nodes is free, recomputing expensive nodes is forbidden, and the fewest
bytes are saved. Optimal in the bytes saved between the passes, under that rule. With a budget: the price of a byte is a
Lagrange multiplier; seconds plus price times bytes are minimised, and the least price whose plan fits is searched.
Optimal in seconds for the bytes that the plan saves, if everything is recomputed at most once; not optimal for the
peak.

    torch                       here
    banned nodes                `expensive`

Complexity: one maximum flow (see `flow`) per price. Left out: torch's bans by distance and fusion, which concern its
code generator.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Schedule, schedule_of
from fckpt.solve.core.flow import FlowNetwork
from fckpt.solve.core.rules import Order, Rules, fastest, peak_of, replay
from fckpt.solve.core.starts import save_everything

__all__ = ["PRICES", "cheapest", "min_cut", "near_budget"]

PRICES = tuple(10.0 ** (k / 4) for k in range(-12, 13))
"""Prices of a byte that are always tried, in units of the mean: all seconds divided by all bytes."""
BISECTIONS = 6


def min_cut(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the schedule that saves the cheapest cut.

    Args:
        graph: one training step.
        budget: bytes; None saves the fewest bytes without recomputing expensive nodes.

    Raises:
        BudgetError: no price of a byte gives a schedule that fits.
    """
    rules = Rules(graph)
    if budget is None:
        return schedule_of(graph, *replay(rules, _saved(rules, *_as_torch(rules))))
    priced = [cheapest(rules, price) for price in PRICES]
    ends = (cheapest(rules, 0.0), cheapest(rules, float("inf")))
    return fastest(rules, [*ends, *priced, *near_budget(rules, priced, budget)], budget, "min_cut")


def near_budget(rules: Rules, priced: Sequence[Order], budget: int) -> list[Order]:
    """Returns plans for prices between the highest price that does not fit and the least price that does, by bisection.

    Args:
        rules: the rules of the graph.
        priced: the plans for all `PRICES`.
        budget: bytes.
    """
    first = next((k for k, plan in enumerate(priced) if peak_of(rules, plan) <= budget), 0)
    low, high = PRICES[max(0, first - 1)], PRICES[first]
    plans: list[Order] = []
    for _ in range(BISECTIONS if low < high else 0):
        middle = (low * high) ** 0.5
        plans.append(cheapest(rules, middle))
        low, high = (low, middle) if peak_of(rules, plans[-1]) <= budget else (middle, high)
    return plans


def cheapest(rules: Rules, price: float) -> Order:
    """Returns the order with the least seconds plus `price` times bytes saved, if nothing runs more than twice.

    Args:
        rules: the rules of the graph.
        price: the price of a byte, in mean seconds per byte of the graph's forward pass.
    """
    graph = rules.graph
    if price == 0.0:
        return save_everything(rules)
    if price == float("inf"):
        return replay(rules, ())
    seconds = np.array([0.0 if n.id >= graph.boundary else rules.seconds[n.id] for n in graph.nodes])
    nbytes = np.array([float(v.nbytes) for v in graph.values])
    made = [v for node in graph.nodes[: graph.boundary] for v in node.outputs]
    mean = (seconds.sum() or 1.0) / (nbytes[made].sum() or 1.0)
    return replay(rules, _saved(rules, seconds, price * mean * nbytes))


def _as_torch(rules: Rules) -> tuple[np.ndarray, np.ndarray]:
    """Returns torch.compile's costs and prices: recomputing is free or forbidden, saving a value costs its bytes."""
    graph, values = rules.graph, rules.graph.values
    work = [float(n.flops) for n in graph.nodes] if any(n.flops for n in graph.nodes) else rules.seconds
    touched = [sum(values[v].nbytes for v in (*n.inputs, *n.outputs)) for n in graph.nodes]
    intense = sum(work) / (sum(touched) or 1)  # matmuls are above the mean, memory-bound operations below
    cost = np.zeros(len(graph.nodes))
    price = np.array([float(v.nbytes) for v in values])
    for node in graph.nodes[: graph.boundary]:
        decisions = {values[v].decision for v in node.outputs}
        if "prefer_recompute" in decisions:
            price[[v for v in node.outputs if values[v].decision == "prefer_recompute"]] = np.inf
        elif "must_recompute" not in decisions:
            expensive = "prefer_save" in decisions or work[node.id] > intense * touched[node.id]
            cost[node.id] = np.inf if expensive else 0.0
    return cost, price


def _saved(rules: Rules, cost: np.ndarray, price: np.ndarray) -> list[int]:
    """Returns the values that a minimum cut saves.

    The network has the arcs source -> node (the node's cost), node -> value (the value's price), value -> node that
    reads it, and value -> sink if the backward pass reads it (infinite). Recomputed nodes and needed values are on the
    sink's side.

    Args:
        rules: the rules of the graph.
        cost: by node: of recomputing it.
        price: by value: of saving it.
    """
    graph = rules.graph
    nodes = [n for n in graph.nodes if not n.backward]
    count, sink = len(graph.nodes), len(graph.nodes) + len(graph.values)
    source = sink + 1
    needed = {v for i in rules.backward for v in graph.nodes[i].inputs if graph.nodes[i].backward}
    needed.update(v for i in rules.backward if not graph.nodes[i].backward for v in graph.nodes[i].outputs)
    arcs: list[tuple[int, int, float]] = []
    for node in nodes:
        late = node.id >= graph.boundary
        arcs.append((source, node.id, np.inf if rules.pinned[node.id] else 0.0 if late else cost[node.id]))
        for value in node.outputs:
            if value not in graph.outputs:
                may_save = not late and value not in rules.unsaved
                arcs.append((node.id, count + value, price[value] if may_save else np.inf))
                if value in needed:
                    arcs.append((count + value, sink, np.inf))
        arcs += [(count + v, node.id, np.inf) for v in node.inputs if v not in rules.permanent]
    if not arcs:
        return []
    tails, heads, prices = (np.array(column) for column in zip(*arcs, strict=True))
    known = float(prices[np.isfinite(prices)].sum()) or 1.0
    # reversed arcs: among equal minimum cuts, this finds the one that recomputes least
    again = FlowNetwork(sink, heads, tails).cut(prices, known).near
    return [v for n in nodes if not again[n.id] for v in n.outputs if again[count + v]]
