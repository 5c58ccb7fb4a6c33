"""A stretch of a trace, checked: what each of its nodes reads and makes, and where its tiles begin and end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fckpt._tile.stretches import Stretch, Untileable
from fckpt._tile.views import Views
from fckpt._tile.ways import SUM, Way, ways
from fckpt._trace.operations import Call, Trace, tensors_of

__all__ = ["Read", "Slices"]

ALIGNED = 16
"""Tiles of more rows than this have a multiple of this number of rows."""


@dataclass(frozen=True)
class Read:
    """A tensor that an operation of a stretch reads."""

    tensor: int
    dim: int | None
    """The dimension that is cut; None if every tile reads the whole tensor."""
    base: int | None
    """The result inside the stretch whose tiles are read, `tensor` being a view of it; None if the whole is read."""


class Slices:
    """A stretch of a trace, checked: what each of its nodes reads and makes, and where the tiles begin and end."""

    def __init__(self, trace: Trace, stretch: Stretch):
        self.trace, self.stretch = trace, stretch
        self.specs = trace.tensors
        self.views = Views(trace)
        self.calls = _calls_of(trace, [node for node, _ in stretch.ways])
        self.ways: dict[int, Way] = {}
        self.made: dict[int, int] = {}
        """By result of the stretch: the dimension that is cut, or `SUM`."""
        for node, number in stretch.ways:
            found = ways(self.calls[node], self.specs)
            if number >= len(found):
                raise Untileable(f"{trace.graph.nodes[node].op} cannot be cut in way {number}")
            self.ways[node] = way = found[number]
            self.made |= dict(zip([t for t in self.calls[node].outputs if t is not None], way.makes, strict=True))
        self.values = {self.specs[t].value: t for t in self.made}
        if len(self.values) < len(self.made) or -1 in self.values:
            raise Untileable("results share memory")
        self.reads = {node: self._reads(node) for node in self.ways}
        self.unit = self._unit()
        self.bounds = self._bounds(stretch.count)

    def slice_of(self, tensor: int, dim: int, tile: int) -> tuple[int, int]:
        """Returns the first row of a tile, and the one behind its last, in a dimension of a tensor."""
        times = self.specs[tensor].shape[dim] // self.unit
        return self.bounds[tile] * times, self.bounds[tile + 1] * times

    def _reads(self, node: int) -> list[Read]:
        found = []
        for tensor, dim in zip(tensors_of(self.calls[node]), self.ways[node].reads, strict=True):
            if self.specs[tensor].conj or self.specs[tensor].neg:
                raise Untileable("it reads a lazy conjugate")
            inside = dim is not None and self.views.rows_in(tensor, self.made) == dim
            found.append(Read(tensor, dim, self.views.base(tensor) if inside else None))
        return found

    def _unit(self) -> int:
        """Returns the number of rows that cannot be divided further: every size is a multiple of it."""
        sizes = [self.specs[t].shape[dim] for t, dim in self.made.items() if dim != SUM]
        sizes += [
            self.specs[r.tensor].shape[r.dim] for reads in self.reads.values() for r in reads if r.dim is not None
        ]
        unit = min(sizes, default=0)
        if unit < 2 or any(size % unit for size in sizes):
            raise Untileable(f"its dimensions of rows have the sizes {sorted(set(sizes))}")
        return unit

    def _bounds(self, count: int) -> list[int]:
        if count < 2 or self.unit < count:
            raise Untileable(f"{self.unit} rows cannot be cut into {count} tiles")
        step = math.ceil(self.unit / count)
        if step > ALIGNED:
            step = math.ceil(step / ALIGNED) * ALIGNED
        return [*range(0, self.unit, step), self.unit]


def _calls_of(trace: Trace, nodes: Sequence[int]) -> dict[int, Call]:
    """Returns the call of each node, all of which must consist of one pure call."""
    wanted, found = set(nodes), dict[int, Call]()
    for call in trace.calls:
        if call.node in wanted:
            if call.node in found:
                raise Untileable("an operation consists of several calls")
            found[call.node] = call
    for i in wanted:
        node = trace.graph.nodes[i] if i < len(trace.graph.nodes) else None
        if node is None or i not in found or node.random or node.once or node.writes or node.in_place:
            raise Untileable(f"node {i} cannot run several times")
    return found
