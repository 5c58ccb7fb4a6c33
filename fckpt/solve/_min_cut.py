"""Chooses what to save by a minimum cut between what is computed in the forward pass and what the backward pass reads.

H. He, "Min-cut optimal(*) recomputation (i.e. activation checkpointing) with AOTAutograd", 2022,
https://dev-discuss.pytorch.org/t/467, and H. He, S. Yu, "Transcending Runtime-Memory Tradeoffs in Checkpointing by
being Fusion Aware", MLSys 2023: what `torch.compile` does. A node is computed again at a price, a value is saved at a
price, a node that is computed again needs its inputs, the backward pass needs what it reads; the cheapest choice is a
minimum cut.

Without a budget, as in torch: what is cheap to compute is free and the rest forbidden, and the fewest bytes are saved.
Optimal in bytes saved between the passes, for that choice. With a budget: the price of a byte is a Lagrange multiplier,
seconds plus price times bytes are least, and the least price with a peak that fits is sought. Optimal in seconds for
the bytes that it happens to save, if everything is computed again at most once; not for the peak.

    torch                       here
    banned nodes                `dear`

Complexity: one maximum flow (see `flow`) per price. Left out: torch's bans by distance and fusion, which are about
its code generator.
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
"""Prices of a byte that are always tried, in units of the mean: all seconds per all bytes."""
BISECTIONS = 6


def min_cut(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the schedule that saves the cheapest cut.

    Args:
        graph: one training step.
        budget: bytes; None saves as little as can be without computing dear nodes again.

    Raises:
        BudgetError: no price of a byte leads to a peak that fits.
    """
    rules = Rules(graph)
    if budget is None:
        return schedule_of(graph, *replay(rules, _saved(rules, *_as_torch(rules))))
    priced = [cheapest(rules, price) for price in PRICES]
    ends = (cheapest(rules, 0.0), cheapest(rules, float("inf")))
    return fastest(rules, [*ends, *priced, *near_budget(rules, priced, budget)], budget, "min_cut")


def near_budget(rules: Rules, priced: Sequence[Order], budget: int) -> list[Order]:
    """Returns plans at prices between the last one with a peak over budget and the next one.

    Args:
        rules: of the graph.
        priced: the plans of all `PRICES`.
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
    """Returns the plan with the fewest seconds plus `price` times bytes saved, nothing being computed three times.

    Args:
        rules: of the graph.
        price: of a byte, in mean seconds per byte of the graph's forward pass.
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
    """What torch.compile has instead of prices: nodes are free or infinitely dear, values cost their bytes."""
    graph, values = rules.graph, rules.graph.values
    work = [float(n.flops) for n in graph.nodes] if any(n.flops for n in graph.nodes) else rules.seconds
    touched = [sum(values[v].nbytes for v in (*n.inputs, *n.outputs)) for n in graph.nodes]
    intense = sum(work) / (sum(touched) or 1)  # matmuls lie above the mean, what memory bounds lies below
    cost = np.zeros(len(graph.nodes))
    price = np.array([float(v.nbytes) for v in values])
    for node in graph.nodes[: graph.boundary]:
        decisions = {values[v].decision for v in node.outputs}
        if "prefer_recompute" in decisions:
            price[[v for v in node.outputs if values[v].decision == "prefer_recompute"]] = np.inf
        elif "must_recompute" not in decisions:
            dear = "prefer_save" in decisions or work[node.id] > intense * touched[node.id]
            cost[node.id] = np.inf if dear else 0.0
    return cost, price


def _saved(rules: Rules, cost: np.ndarray, price: np.ndarray) -> list[int]:
    """Returns the values that a minimum cut saves.

    Args:
        rules: of the graph.
        cost: by node, of computing it again.
        price: by value, of saving it.

    The network: source -> node (its cost), node -> value (its price), value -> node that reads it and value -> sink if
    the backward pass reads it (infinite). What is computed again, or needed, is on the side of the sink.
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
    tails, heads, prices = (np.array(column) for column in zip(*arcs, strict=True))
    known = float(prices[np.isfinite(prices)].sum()) or 1.0
    # from the sink backwards: of equal cuts the one that computes the least again
    again = FlowNetwork(sink, heads, tails).cut(prices, known).near
    return [v for n in nodes if not again[n.id] for v in n.outputs if again[count + v]]
