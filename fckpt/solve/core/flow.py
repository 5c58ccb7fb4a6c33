"""Minimum cuts with proven values, where the prices of arcs change and the network does not.

E. A. Dinic, "Algorithm for solution of a problem of maximum flow in networks with power estimation", 1970, as
`scipy.sparse.csgraph.maximum_flow` has it, for capacities of 32 bits. Prices are floats: they are scaled and rounded
down, and the value of a flow of the rounded network is at most the price of any cut of the real one. Whoever knows a
cut gives its price: nothing above it can matter, so that all 30 bits are spent on what is below.

Complexity: O(vertices^2 arcs) at worst, near-linear on the graphs of training steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

__all__ = ["FlowNetwork", "MinimumCut"]

WHOLE = 2**30 - 1
"""What the price of the known cut becomes."""


class MinimumCut(NamedTuple):
    """A cut that is least up to rounding."""

    price: float
    """At most the price of the least cut."""
    near: np.ndarray
    """By vertex: whether it is on the source's side."""


class FlowNetwork:
    """Arcs between vertices, from the vertex `count` (the source) to the vertex `count + 1` (the sink)."""

    def __init__(self, count: int, tails: np.ndarray, heads: np.ndarray):
        """Builds it.

        Args:
            count: of the vertices besides the two.
            tails: by arc, where it begins; int.
            heads: by arc, where it ends; int. No two arcs have both in common.
        """
        from scipy.sparse import csr_array  # scipy takes 0.4 s to import, which not every plan needs

        self.count = count
        numbers = np.arange(1, len(tails) + 1, dtype=np.int32)
        self.matrix: Any = csr_array((numbers, (tails, heads)), shape=(count + 2, count + 2))
        self.place = self.matrix.data - 1

    def cut(self, prices: np.ndarray, known: float) -> MinimumCut:
        """Returns a cut that is least up to rounding.

        Args:
            prices: by arc, infinite where it may not be cut.
            known: at least the price of the least cut, above 0.
        """
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        scale = WHOLE / known
        rounded = np.floor(np.minimum(prices * scale, WHOLE + 1.0)).astype(np.int32)
        self.matrix.data = rounded[self.place]
        found = maximum_flow(self.matrix, self.count, self.count + 1)
        left = self.matrix - found.flow
        left.eliminate_zeros()
        near = np.zeros(self.count + 2, dtype=bool)
        near[breadth_first_order(left, self.count, return_predecessors=False)] = True
        return MinimumCut(found.flow_value / scale, near)
