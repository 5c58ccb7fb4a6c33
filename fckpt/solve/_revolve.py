"""Binomial checkpointing: the fewest forward steps to reverse a chain of equal stages with a given number of snapshots.

A. Griewank, A. Walther, "Algorithm 799: revolve: an implementation of checkpointing for the reverse or adjoint mode of
computational differentiation", ACM TOMS 26(1), 2000, https://doi.org/10.1145/347837.347846.

    the paper            here
    l, s                 `length`, `snapshots`; the state from which the chain starts is one of the snapshots
    r                    the r with beta(s, r - 1) < l <= beta(s, r): no step is advanced more than r times
    beta(s, r)           `comb(s + r, s)`: the longest chain that s snapshots and r advances of each step reverse
    t(l, s)              r l - beta(s + 1, r - 1): the advances. The run of a stage directly before its own reversal,
                         which saves everything, is not counted
    advance, youturn     `Step`: "none" or "checkpoint"; "all" and "backward"

Optimal in forward steps, for stages of equal time whose inputs take equal memory, among all schedules that hold at most
`snapshots` inputs. On a graph (see `stages`) all stages are treated as equal, several numbers of snapshots are tried,
and the simulated peak decides. It is a baseline for `rotor`, which considers the sizes of the stages.

Complexity: O(t(l, s)). Left out: multi-stage snapshots on disk, and chains whose length is not known in advance.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import comb

from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Schedule
from fckpt.solve.chains.stages import Stages, Step
from fckpt.solve.core.rules import Order, Rules, fastest
from fckpt.solve.core.starts import backward_orders

__all__ = ["binomial", "binomial_orders", "revolve"]

POINTS = 24
"""The largest number of values of `snapshots` that are tried."""


def revolve(graph: Graph, budget: int | None = None) -> Schedule:
    """Returns the fastest binomial schedule that fits, for several numbers of snapshots.

    Args:
        graph: one training step.
        budget: bytes; None takes a snapshot of every stage.

    Raises:
        BudgetError: no number of snapshots gives a schedule that fits.
    """
    return fastest(rules := Rules(graph), binomial_orders(rules), budget, "revolve")


def binomial_orders(rules: Rules) -> Iterator[Order]:
    """Yields binomial orders, from one snapshot in total to one for each stage."""
    stages = Stages(rules, backward_orders(rules)[-1])
    length = len(stages)
    for snapshots in sorted({round(length ** (k / POINTS)) for k in range(POINTS + 1)}):
        yield stages.order(binomial(length, snapshots))


def binomial(length: int, snapshots: int, first: int = 0) -> Iterator[Step]:
    """Yields the steps that reverse stages `first`, ..., `first + length - 1`.

    Args:
        length: the number of stages.
        snapshots: how many inputs of stages may be held at once, including the input of `first`; at least 1 if there is
            more than one stage.
        first: the first stage, whose input is live.
    """
    while length > 1:
        ahead = _ahead(length, snapshots)
        yield Step("checkpoint", first)
        yield from (Step("none", i) for i in range(first + 1, first + ahead))
        yield from binomial(length - ahead, snapshots - 1, first + ahead)
        length = ahead
    yield Step("all", first)
    yield Step("backward", first)


def _ahead(length: int, snapshots: int) -> int:
    """Returns how many stages to advance before the next snapshot: the largest optimal number."""
    r = 0
    while comb(snapshots + r, snapshots) < length:
        r += 1
    return min(comb(snapshots + r - 1, snapshots), length - comb(snapshots + r - 2, snapshots - 1))
