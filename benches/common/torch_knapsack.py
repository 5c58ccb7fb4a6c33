"""The knapsacks of `torch.compile` as solvers: torch's own functions, on the graphs of fckpt.

`torch._functorch._activation_checkpointing.knapsack` (seen in torch 2.13) chooses what to save for a fraction of the
saved bytes, `activation_memory_budget`. The resulting peak is not known in advance. So several fractions are tried
here, and the fastest plan whose simulated peak is within the budget is returned. Runtimes are the seconds of the graph;
torch uses FLOPs by default. What the knapsack does not save is recomputed lazily (`fckpt.solve.core.rules.replay`).
Torch partitions its graph again instead, and may save cheaper values on the way.
"""

from __future__ import annotations

from collections.abc import Callable

from torch._functorch._activation_checkpointing import knapsack as torchs

from fckpt import solve
from fckpt.graph import Graph, Schedule
from fckpt.solve._knapsack import choices
from fckpt.solve.core.rules import Rules, fastest, replay

__all__ = ["TORCHS", "solver", "torch_dp", "torch_greedy", "torch_ilp"]

FRACTIONS = 20
"""The number of fractions that are tried, from all of the saved bytes to nothing."""

Knapsack = Callable[[list[float], list[float], float], tuple[float, list[int], list[int]]]


def torch_dp(graph: Graph, budget: int | None = None) -> Schedule:
    """Plans with torch's default, dynamic programming over rounded weights."""
    return _fastest(graph, budget, torchs.dp_knapsack, "torch_dp")


def torch_greedy(graph: Graph, budget: int | None = None) -> Schedule:
    """Plans by choosing values in the order of their seconds per byte."""
    return _fastest(graph, budget, torchs.greedy_knapsack, "torch_greedy")


def torch_ilp(graph: Graph, budget: int | None = None) -> Schedule:
    """Plans with an integer program."""
    return _fastest(graph, budget, torchs.ilp_knapsack, "torch_ilp")


def _fastest(graph: Graph, budget: int | None, knapsack: Knapsack, name: str) -> Schedule:
    rules = Rules(graph)
    items = [v for v in choices(rules) if graph.values[v].nbytes]
    total = sum(graph.values[v].nbytes for v in items) or 1
    weights = [graph.values[v].nbytes / total for v in items]
    runtimes = [rules.seconds[graph.values[v].producer or 0] for v in items]
    plans = []
    for step in range(FRACTIONS + 1 if budget is not None else 1):
        _, saved, _ = knapsack(weights, runtimes, 1 - step / FRACTIONS) if items else (0, [], [])
        plans.append(replay(rules, [items[i] for i in saved]))
    return fastest(rules, plans, budget, name)


TORCHS: dict[str, solve.Solver] = {f.__name__: f for f in (torch_dp, torch_greedy, torch_ilp)}
"""By name."""


def solver(name: str) -> solve.Solver:
    """Returns one of these solvers, or one of fckpt."""
    return TORCHS.get(name) or solve.get(name)
