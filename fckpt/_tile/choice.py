"""Choice of the stretches to cut into tiles, and into how many.

A stretch begins with the node that needs the most memory in every schedule (`least_peaks`). It grows over the producers
and consumers of its large values, as long as they can be cut along the same rows. It is cut into the fewest tiles with
which it needs no more than a target or, if the target is out of reach, into the fewest beyond which more tiles do not
help. This repeats with the node that then needs the most, until all nodes need less than the target, or that node
cannot be cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fckpt._tile.exact import gathers_exactly, inexact
from fckpt._tile.gathered import gathered, is_gatherable
from fckpt._tile.rewriting import Rewriting
from fckpt._tile.slices import Slices
from fckpt._tile.stretches import Gathered, Step, Stretch, Untileable
from fckpt._tile.views import Views
from fckpt._tile.ways import SUM, Way, ways
from fckpt._trace.operations import Call, Trace, tensors_of
from fckpt.solve.proofs.bounds import least_peaks

__all__ = ["COUNTS", "Limits", "chosen"]

COUNTS = (2, 4, 8, 16, 32)
"""Numbers of tiles to try."""
LARGE = 4
"""A stretch grows over values that are at most this many times smaller than the largest value of its first node."""
USEFUL = 0.98
"""More tiles must lower the memory of a stretch below this fraction to be taken."""


@dataclass(frozen=True)
class Limits:
    """Limits of a choice, so that planning stays quick."""

    stretches: int = 48
    nodes: int = 6_000
    """Of the rewritten graph."""
    members: int = 48
    """Nodes of one stretch."""


def chosen(trace: Trace, target: float, *, exact: bool, limits: Limits = Limits()) -> list[Step]:
    """Returns steps that rewrite a trace so that its operations need at most `target` bytes, as far as tiles can do it.

    Args:
        trace: a trace. If its graph has costs, temporaries count.
        target: bytes.
        exact: whether to take only tiles with the bits of the whole operation.
        limits: how much to rewrite.
    """
    choice = _Choice(trace, target, exact, limits)
    choice.run()
    return choice.steps


@dataclass
class _Choice:
    """A rewriting under construction."""

    trace: Trace
    target: float
    exact: bool
    limits: Limits
    steps: list[Step] = field(default_factory=list)
    tiles: set[int] = field(default_factory=set)
    """The nodes that are tiles."""
    counts: dict[tuple[object, ...], int] = field(default_factory=dict)
    """By kind of stretch: its number of tiles."""

    def run(self) -> None:
        for _ in range(self.limits.stretches):
            peaks = least_peaks(self.trace.graph)
            worst = max(peaks, key=lambda n: peaks[n], default=-1)
            if worst < 0 or peaks[worst] <= self.target or worst in self.tiles:
                return
            if not self._cut(worst, peaks[worst]):
                return

    def _cut(self, node: int, peak: int) -> bool:
        """Cuts a stretch from `node` on; returns whether that lowers the memory that the node needs."""
        loss = next(self._losses(node), None)
        if loss is not None and (not self.exact or gathers_exactly(self.trace, loss)):
            more = self._gather(loss)
            node += more if node >= loss else 0
        best: tuple[int, int, Rewriting] | None = None
        for number, _ in enumerate(self._ways(node)):
            for made in self._rewritings(node, number):
                found = (made[0], made[1].slices.stretch.count, made[1])
                if best is None or found[0] < USEFUL * best[0]:
                    best = found
        if best is None or best[0] >= USEFUL * peak:
            return False
        self._take(best[2])
        return len(self.trace.graph.nodes) <= self.limits.nodes

    def _ways(self, node: int) -> list[Way]:
        call = _calls(self.trace).get(node)
        return [] if call is None else ways(call, self.trace.tensors)

    def _losses(self, node: int) -> Iterator[int]:
        """Yields the losses that a stretch from `node` on would otherwise have to make a whole value for."""
        graph, calls = self.trace.graph, _calls(self.trace)
        for number, _ in enumerate(self._ways(node)):
            for member in _grown(self.trace, node, number, set(), self.limits.members):
                for v in graph.nodes[member].outputs:
                    for reader in graph.consumers[v]:
                        if reader in calls and is_gatherable(calls[reader], self.trace):
                            yield reader

    def _gather(self, loss: int) -> int:
        """Rewrites a loss; returns the number of new nodes before it."""
        before = len(self.trace.graph.nodes)
        self.trace = gathered(self.trace, loss)
        self.steps.append(Gathered(loss))
        more = len(self.trace.graph.nodes) - before
        self.tiles = {n + more if n >= loss else n for n in self.tiles}
        return more

    def _rewritings(self, node: int, number: int) -> Iterator[tuple[int, Rewriting]]:
        """Yields the rewriting of the stretch from `node` on, with the bytes that it then needs; none if impossible."""
        barred: set[tuple[int, int]] = set()
        while True:
            members = _grown(self.trace, node, number, barred, self.limits.members, sums=not self.exact)
            found = self._counted(members) if node in members else None
            if found is None:
                return
            wrong = inexact(found[1]) if self.exact else []
            if not wrong:
                yield found
                return
            barred |= {(n, members[n]) for n in wrong}

    def _counted(self, members: dict[int, int]) -> tuple[int, Rewriting] | None:
        """Returns the rewriting of a stretch with the best number of tiles, and the bytes that it then needs."""
        nodes = self.trace.graph.nodes
        kind = tuple((nodes[n].op, nodes[n].arguments, way) for n, way in members.items())
        known = self.counts.get(kind)
        best: tuple[int, Rewriting] | None = None
        for count in COUNTS if known is None else (known,):
            try:
                rewriting = Rewriting(Slices(self.trace, Stretch(tuple(sorted(members.items())), count)))
                peaks = least_peaks(rewriting.trace().graph)
            except Untileable:
                break
            if not rewriting.removed:
                return None
            needed = max(peaks.get(n, 0) for old in members for n in rewriting.moved[old])
            if best is not None and needed > USEFUL * best[0]:
                break
            best = needed, rewriting
            if needed <= self.target:
                break
        if best is not None:
            self.counts[kind] = best[1].slices.stretch.count
        return best

    def _take(self, rewriting: Rewriting) -> None:
        self.tiles = {m for n in (*self.tiles, *rewriting.slices.ways) for m in rewriting.moved[n]}
        self.trace = rewriting.trace_made
        self.steps.append(rewriting.slices.stretch)


def _calls(trace: Trace) -> dict[int, Call]:
    """Returns the call of each node that consists of one call and can run several times."""
    found: dict[int, Call] = {}
    several = set()
    for call in trace.calls:
        if call.node is not None:
            several.update({call.node} if call.node in found else ())
            found[call.node] = call
    free = lambda n: not (n.random or n.once or n.writes or n.in_place)
    return {n: c for n, c in found.items() if n not in several and free(trace.graph.nodes[n])}


def _grown(
    trace: Trace, node: int, number: int, barred: set[tuple[int, int]], most: int, *, sums: bool = True
) -> dict[int, int]:
    """Returns the nodes of a stretch that starts with a node cut in a way, each with the number of its way."""
    for share in (LARGE, 2, 1):
        growth = _Growth(trace, node, number, barred, share, sums)
        if growth.run(most):
            return dict(sorted(growth.members.items()))
    return {} if (node, number) in barred else {node: number}


class _Growth:
    """A growing stretch."""

    def __init__(
        self, trace: Trace, node: int, number: int, barred: set[tuple[int, int]], share: int, sums: bool
    ) -> None:
        self.trace, self.graph = trace, trace.graph
        self.views, self.calls = Views(trace), _calls(trace)
        self.barred, self.sums = barred, sums
        self.members: dict[int, int] = {}
        self.made: dict[int, int] = {}
        """By result of the stretch: the dimension that is cut, or `SUM`."""
        self.reads: dict[int, list[tuple[int, int]]] = {}
        """By result outside of the stretch: the views of it that are read, with the dimension that is cut."""
        first = self.graph.nodes[node]
        self.least = max(self.graph.values[v].nbytes for v in (*first.inputs, *first.outputs)) / share
        found = ways(self.calls[node], trace.tensors)[number]
        if (node, number) not in barred and (sums or not found.sums):
            self._join(node, number, found)

    def run(self, most: int) -> bool:
        """Grows until nothing can join; returns whether the stretch has at most so many nodes."""
        refused: set[int] = set()
        while len(self.members) <= most:
            todo = [n for n in self._neighbours() if n not in refused]
            if not todo:
                return True
            for n in todo:
                way = self._way(n)
                if way is None:
                    refused.add(n)
                else:
                    self._join(n, *way)
                    break
        return False

    def _is_large(self, tensor: int) -> bool:
        value = self.trace.tensors[tensor].value
        return value >= 0 and self.graph.values[value].nbytes >= self.least

    def _neighbours(self) -> list[int]:
        """Returns the nodes outside of the stretch that make or read its large values."""
        found = set()
        for t, dim in self.made.items():
            if dim != SUM and self._is_large(t):
                found.update(self.graph.consumers[self.trace.tensors[t].value])
        for t in self.reads:
            producer = self.graph.values[self.trace.tensors[t].value].producer if self._is_large(t) else None
            found.update(() if producer is None else (producer,))
        return sorted(n for n in found if n not in self.members and n in self.calls)

    def _way(self, node: int) -> tuple[int, Way] | None:
        """Returns the way in which a node fits the stretch: all large values between them are cut along the rows."""
        call = self.calls[node]
        for number, way in enumerate(ways(call, self.trace.tensors)):
            if (node, number) in self.barred or (way.sums and not self.sums):
                continue
            outputs = [t for t in call.outputs if t is not None]
            rows = self.made | dict(zip(outputs, way.makes, strict=True))
            links = [
                self.views.rows_in(t, rows) == dim
                for t, dim in zip(tensors_of(call), way.reads, strict=True)
                if self.views.base(t) in self.made and self._is_large(self.views.base(t))
            ]
            for t in outputs:
                if self._is_large(t):
                    links += [self.views.rows_in(view, rows) == dim for view, dim in self.reads.get(t, ())]
            if links and all(links):
                return number, way
        return None

    def _join(self, node: int, number: int, way: Way) -> None:
        call = self.calls[node]
        self.members[node] = number
        outputs = [t for t in call.outputs if t is not None]
        self.made |= dict(zip(outputs, way.makes, strict=True))
        for t in outputs:
            self.reads.pop(t, None)
        for t, dim in zip(tensors_of(call), way.reads, strict=True):
            base = self.views.base(t)
            if dim is not None and base not in self.made and self.trace.tensors[base].value >= 0:
                self.reads.setdefault(base, []).append((t, dim))
