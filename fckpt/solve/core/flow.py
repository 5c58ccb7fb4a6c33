"""Minimum cuts with proven values, in networks whose prices of arcs change while the arcs stay the same.

E. A. Dinic, "Algorithm for solution of a problem of maximum flow in networks with power estimation", 1970, as
implemented by `scipy.sparse.csgraph.maximum_flow` for 32-bit capacities. Prices are floats; they are scaled and rounded
down, so that the value of a flow in the rounded network is at most the price of any cut of the real network. The caller
passes the price of a known cut: higher prices cannot matter, so all 30 bits are used for the range below it.

Complexity: O(vertices^2 arcs) in the worst case, near-linear on the graphs of training steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fckpt._late import late

__all__ = ["FlowNetwork", "MinimumCut"]

WHOLE = 2**30 - 1
"""The scaled price of the known cut."""


class MinimumCut(NamedTuple):
    """A minimum cut, up to rounding."""

    price: float
    """At most the price of the true minimum cut."""
    near: np.ndarray
    """By vertex: whether it is on the source's side."""


class FlowNetwork:
    """A network of arcs between numbered vertices. Vertex `count` is the source, vertex `count + 1` the sink."""

    def __init__(self, count: int, tails: np.ndarray, heads: np.ndarray):
        """Builds the network.

        Args:
            count: the number of vertices, not counting source and sink.
            tails: by arc, the vertex at which it begins; int.
            heads: by arc, the vertex at which it ends; int. No two arcs have both vertices in common.
        """
        csr_array = late("scipy.sparse").csr_array  # imported late: scipy takes 0.4 s, and not every plan needs it
        self.count = count
        numbers = np.arange(1, len(tails) + 1, dtype=np.int32)
        self.matrix: Any = csr_array((numbers, (tails, heads)), shape=(count + 2, count + 2))
        self.place = self.matrix.data - 1

    def cut(self, prices: np.ndarray, known: float) -> MinimumCut:
        """Returns a minimum cut, up to rounding.

        Args:
            prices: by arc; infinite if the arc may not be cut.
            known: an upper bound on the price of the minimum cut, above 0.
        """
        graphs = late("scipy.sparse.csgraph")
        scale = WHOLE / known
        rounded = np.floor(np.minimum(prices * scale, WHOLE + 1.0)).astype(np.int32)
        self.matrix.data = rounded[self.place]
        found = graphs.maximum_flow(self.matrix, self.count, self.count + 1)
        left = self.matrix - found.flow
        left.eliminate_zeros()
        near = np.zeros(self.count + 2, dtype=bool)
        near[graphs.breadth_first_order(left, self.count, return_predecessors=False)] = True
        return MinimumCut(found.flow_value / scale, near)
