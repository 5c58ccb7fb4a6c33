"""Cuts of the forward pass: where it can be divided, and which values live across each position.

Cutting the forward pass at several positions gives segments, or the stages of a chain. The values that live across a
cut are what the later part needs from the earlier part. `chen`, `starts` and `stages` all cut where few bytes live, and
differ in how the cuts are spread: at a given number of cuts, as far apart as possible (`CutPoints.low`); so that the
bytes made are divided evenly (`CutPoints.even`); or after a given number of bytes (in `chen`).

Complexity: linear in the size of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fckpt.solve.core.rules import Rules

__all__ = ["CutPoints", "Span"]


class Span(NamedTuple):
    """The part of the forward pass across which a value lives."""

    first: int
    """The position of the node that makes the value."""
    last: int
    """The position of its last reader."""
    value: int


class CutPoints:
    """The values that live across each position of the forward pass. Position i is directly after the i-th node."""

    def __init__(self, rules: Rules, forward: Sequence[int]):
        graph = self.graph = rules.graph
        self.nodes = forward
        self.length = len(forward)
        self.fixed = rules.permanent.union(v for n in graph.nodes if rules.pinned[n.id] for v in n.outputs)
        """Values that stay once they are made, whatever the plan."""
        place = {index: i for i, index in enumerate(forward)}
        self.spans: list[Span] = []
        """The values that live across at least one position."""
        for i, index in enumerate(forward):
            for value in graph.nodes[index].outputs:
                last = max((place[c] for c in graph.consumers[value] if c in place), default=i)
                if last > i and value not in self.fixed:
                    self.spans.append(Span(i, last, value))
        nbytes = [graph.values[span.value].nbytes for span in self.spans]
        self.live = self._totals(nbytes)
        """By position: the bytes that live across it."""
        self.count = self._totals([1] * len(self.spans))
        """By position: the number of values that live across it."""
        self.made = np.cumsum([sum(graph.values[v].nbytes for v in graph.nodes[i].outputs) for i in forward])
        """By position: the bytes made before it."""

    def _totals(self, weights: Sequence[int]) -> np.ndarray:
        """Returns, by position, the total weight of the spans across it; `weights` are by span."""
        change = np.zeros(self.length + 1, dtype=np.int64)
        for span, weight in zip(self.spans, weights, strict=True):
            change[span.first] += weight
            change[span.last] -= weight
        return np.cumsum(change)[: self.length]

    def low(self, most: int) -> list[int]:
        """Returns at most `most` positions across which few bytes live, spread as far apart as that number requires.

        Values that no backward node reads, and that only a recomputation would need, count twice.
        """
        graph = self.graph
        read = [any(graph.nodes[c].backward for c in graph.consumers[span.value]) for span in self.spans]
        pairs = zip(self.spans, read, strict=True)
        live = self._totals([graph.values[span.value].nbytes * (1 if late else 2) for span, late in pairs])
        ranking = np.argsort(live[:-1], kind="stable").tolist()
        apart = 1
        while most > 0:
            taken = np.zeros(self.length, dtype=bool)
            for place in ranking:
                if not taken[max(0, place - apart + 1) : place + apart].any():
                    taken[place] = True
            if taken.sum() <= most:
                return np.flatnonzero(taken).tolist()
            apart += max(1, apart // 4)
        return []

    def even(self, most: int) -> list[int]:
        """Returns at most `most` positions across which few bytes live, and that divide the bytes made about evenly."""
        parts, found = most + 1, set[int]()
        for k in range(1, parts if self.length else 1):
            wanted = [self.made[-1] * (k + d) / parts for d in (-0.34, 0.34)]
            low, high = np.searchsorted(self.made, wanted).tolist()
            found.add(low + int(self.live[low : max(high, low + 1)].argmin()))
        return sorted(found)

    def values_across(self, cuts: Sequence[int]) -> list[int]:
        """Returns the values that live across any of `cuts`, which are in ascending order."""
        at = np.array([*cuts, self.length], dtype=np.int64)
        following = at[np.searchsorted(at, [span.first for span in self.spans])]
        return [span.value for span, cut in zip(self.spans, following, strict=True) if cut < span.last]
