"""The memory of a schedule as a function of the bytes of nodes and values.

Graphs that differ in sizes only have the same schedules. What a schedule holds at each step is then a sum over the same
values, whatever their sizes. An outline writes these sums down once, and adds them up for new sizes in a fraction of
the time that `simulate` takes, which checks every step again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Compute, Schedule, with_freed
from fckpt.graph.simulation import Timeline, simulate

__all__ = ["Outline"]


class Outline:
    """A schedule, as sums over the bytes of nodes and values."""

    def __init__(self, graph: Graph, schedule: Schedule):
        """Writes down the sums for a graph.

        Raises:
            ScheduleError: the schedule is not valid for the graph.
        """
        simulated = simulate(graph, schedule)
        nodes = graph.nodes
        pairs = [(v, out) for node in nodes for v in (*node.overwrites, *node.accumulates) for out in node.outputs]
        self._over, self._out = _ints([v for v, _ in pairs]), _ints([out for _, out in pairs])
        live, gone = set(graph.held), set[int]()
        overwritten, counts = set[int](), [0] * len(nodes)
        steps = [*with_freed(schedule.forward), *with_freed(schedule.backward)]
        self._count, self._boundary = len(steps), len(schedule.forward)
        made: list[tuple[int, int]] = []  # pairs of a step and a value: made at the step
        held: list[tuple[int, int]] = []  # held after the step
        dropped: list[tuple[int, int]] = []  # no longer held after the step
        replaced: list[tuple[int, int]] = []  # no longer held during the step
        run: list[tuple[int, int]] = []  # pairs of a step and a node
        again: list[tuple[int, int]] = []  # likewise, where the node has run before
        for place, (step, freed) in enumerate(steps):
            if not isinstance(step, Compute):
                if step.value not in gone:
                    live.discard(step.value)
                    if step.value in overwritten:
                        overwritten.discard(step.value)
                    else:
                        dropped.append((place, step.value))
                continue
            node = nodes[step.node]
            (again if counts[node.id] else run).append((place, node.id))
            if not counts[node.id]:
                live.difference_update(node.writes)
                gone.update(node.writes)
            counts[node.id] += 1
            new = [v for v in node.outputs if v not in live and v not in gone]
            over = node.overwritten(freed) if new and node.overwrites else None
            if over is not None:
                replaced.append((place, over))
                overwritten.add(over)
            made += [(place, v) for v in node.outputs]
            held += [(place, v) for v in new]
            live.update(new)
        self._made, self._held, self._dropped, self._replaced, self._run, self._again = map(
            _columns, (made, held, dropped, replaced, run, again)
        )
        self._computes = np.zeros(self._count, bool)
        self._computes[self._run[0]] = self._computes[self._again[0]] = True
        self._cotangents = _ints(graph.cotangents)
        self._recomputed_steps = tuple([place for place, _ in again])
        self.recomputes = bool(again)
        """Whether the schedule runs a node twice."""
        found = self.timeline(
            [node.seconds for node in nodes],
            [node.temporary_nbytes for node in nodes],
            [node.replayed_nbytes for node in nodes],
            [value.nbytes for value in graph.values],
        )
        assert found.live_nbytes == simulated.live_nbytes, "an outline differs from the simulation"

    def is_valid(self, nbytes: Sequence[int]) -> bool:
        """Whether the nodes may write over their inputs with values of these sizes as they may in the graph."""
        sizes = np.asarray(nbytes)
        return bool((sizes[self._over] == sizes[self._out]).all())

    def timeline(
        self, seconds: Sequence[float], temporary: Sequence[int], replayed: Sequence[int], nbytes: Sequence[int]
    ) -> Timeline:
        """Returns the timeline that `simulate` returns for a graph with these costs.

        Args:
            seconds: the time of a node, by node.
            temporary: `Node.temporary_nbytes`, by node.
            replayed: `Node.replayed_nbytes`, by node.
            nbytes: `Value.nbytes`, by value, for which `is_valid` is true.
        """
        sizes, times, own = np.asarray(nbytes, np.int64), np.asarray(seconds), np.asarray(temporary, np.int64)
        over = self._sums(self._replaced, sizes)
        after = np.cumsum(self._sums(self._held, sizes) - self._sums(self._dropped, sizes) - over)
        before = np.concatenate(([0], after))[:-1]
        own = self._sums(self._run, own) + self._sums(self._again, np.maximum(own, np.asarray(replayed, np.int64)))
        profile = np.where(self._computes, before - over + self._sums(self._made, sizes) + own, after)
        profile[self._boundary :] += sizes[self._cotangents].sum()
        forward = int(after[self._boundary - 1]) if self._boundary else 0
        recomputed = float(times[self._again[1]].sum())
        live = tuple(profile.tolist()) or (0,)
        peak = max(live)
        return Timeline(
            live_nbytes=live,
            peak_nbytes=peak,
            peak_step=live.index(peak),
            forward_nbytes=forward,
            seconds=float(times[self._run[1]].sum()) + recomputed,
            recomputed_seconds=recomputed,
            recomputed_nodes=len(self._recomputed_steps),
            recomputed_steps=self._recomputed_steps,
        )

    def _sums(self, pairs: Any, amounts: Any) -> Any:
        """Returns, by step, the sum of the amounts that belong to it."""
        found = np.zeros(self._count, np.int64)
        np.add.at(found, pairs[0], amounts[pairs[1]])
        return found


def _ints(values: Sequence[Any]) -> Any:
    return np.asarray(values, np.int64)


def _columns(pairs: Sequence[tuple[int, int]]) -> Any:
    return _ints(pairs).reshape(-1, 2).T
