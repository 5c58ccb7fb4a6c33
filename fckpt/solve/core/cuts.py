"""Where the forward pass can be cut: what it reads across each of its places, and how much.

A forward pass that is cut at some places falls into segments, or stages of a chain. What crosses a cut is what a
segment needs of those before it. `chen`, `seeds` and `stages` all cut where little crosses, and differ in how the cuts
are spread: as far apart as their number takes (`low`), so as to part the bytes evenly (`even`), or after so many bytes
(in `chen`).

Complexity: linear in the graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fckpt.solve.core.rules import Rules

__all__ = ["CutPoints"]


class CutPoints:
    """Which values the forward pass reads across each of its places; place i lies right after its i-th node."""

    def __init__(self, rules: Rules, forward: Sequence[int]):
        graph = self.graph = rules.graph
        self.nodes = forward
        self.length = len(forward)
        self.fixed = rules.permanent.union(v for n in graph.nodes if rules.pinned[n.id] for v in n.outputs)
        """Values that are there throughout once they are made, whatever the plan."""
        place = {index: i for i, index in enumerate(forward)}
        self.spans: list[tuple[int, int, int]] = []
        """By value that crosses any place: the place of its node, that of its last reader, and the value."""
        for i, index in enumerate(forward):
            for value in graph.nodes[index].outputs:
                last = max((place[c] for c in graph.consumers[value] if c in place), default=i)
                if last > i and value not in self.fixed:
                    self.spans.append((i, last, value))
        nbytes = [graph.values[value].nbytes for _, _, value in self.spans]
        self.live = self._totals(nbytes)
        """By place: the bytes that cross it."""
        self.count = self._totals([1] * len(self.spans))
        """By place: how many values do."""
        self.made = np.cumsum([sum(graph.values[v].nbytes for v in graph.nodes[i].outputs) for i in forward])
        """By place: the bytes that have been made before it."""

    def _totals(self, weights: Sequence[int]) -> np.ndarray:
        """Returns, by place, the weight of what crosses it; `weights` are by span."""
        change = np.zeros(self.length + 1, dtype=np.int64)
        for (first, last, _), weight in zip(self.spans, weights, strict=True):
            change[first] += weight
            change[last] -= weight
        return np.cumsum(change)[: self.length]

    def low(self, most: int) -> list[int]:
        """Returns at most `most` places with little live, as far apart as it takes.

        What only recomputation would need, and no backward node reads, counts twice.
        """
        graph = self.graph
        read = [any(graph.nodes[c].backward for c in graph.consumers[value]) for _, _, value in self.spans]
        pairs = zip(self.spans, read, strict=True)
        live = self._totals([graph.values[value].nbytes * (1 if late else 2) for (_, _, value), late in pairs])
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
        """Returns at most `most` places with little live that part the bytes made about evenly."""
        parts, found = most + 1, set[int]()
        for k in range(1, parts if self.length else 1):
            wanted = [self.made[-1] * (k + d) / parts for d in (-0.34, 0.34)]
            low, high = np.searchsorted(self.made, wanted).tolist()
            found.add(low + int(self.live[low : max(high, low + 1)].argmin()))
        return sorted(found)

    def values_across(self, cuts: Sequence[int]) -> list[int]:
        """Returns what crosses any of `cuts`, which are in order."""
        at = np.array([*cuts, self.length], dtype=np.int64)
        following = at[np.searchsorted(at, [first for first, _, _ in self.spans])]
        return [value for (_, last, value), cut in zip(self.spans, following, strict=True) if cut < last]
