"""A training step seen as a chain of stages, for solvers that know chains only.

The forward pass of the plan that saves everything is cut at some places; a stage is what lies between two cuts, with
the part of the backward pass that belongs to it. What crosses a cut may be any set of values: one is best (the output
of a residual block), several will do (U-Net's skips, the masks of a transformer). A value that crosses a row of cuts is
in all their sets, and lies in memory once: `Costs.beside` says what a set takes beside another.

A solver for chains returns `Step`s, `Stages.order` makes them an `Order` of the graph. It runs the stages' nodes,
leaves out what nothing reads, and leaves the rest to `schedule_of`, which frees what has had its last use. Whatever the
steps, the order is legal; what it holds is what the steps said, or less.

    Beaumont et al. 2019, Griewank & Walther 2000     here
    F with nothing permanent, F_ck, F_all, B               Step: "none", "checkpoint", "all", "backward"
    x_s                                               Costs.beside[:, s]: what crosses into stage s
    x-bar, u_F, u_B of F_all and B                    Option, by stage: there are several ways to save a stage
    delta_t, the gradients' cotangents                Costs.arriving[t]: what is held when backward comes to stage t

Complexity: linear in the graph, times the number of options. Left out: stages that share nodes, as in a graph whose
branches are chains of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from fckpt.solve.core.cuts import CutPoints
from fckpt.solve.core.rules import Order, Rules, ancestors
from fckpt.solve.core.starts import save_everything

__all__ = ["Costs", "Option", "Stages", "Step"]


class Step(NamedTuple):
    """One operation on a stage."""

    kind: Literal["none", "checkpoint", "all", "backward"]
    """Forward, keeping nothing but what the next stage reads; or what the stage reads as well; or what its backward
    reads as well. Or its backward."""
    stage: int
    option: int = 0
    """Which of the stage's options "all" and "backward" take."""


class Option(NamedTuple):
    """A way to save a stage for its backward."""

    saved_nbytes: int
    """What the forward leaves, the next stage's input among it, but not the stage's own."""
    forward_seconds: float
    backward_seconds: float
    """With what the backward computes again within the stage."""
    forward_nbytes: int
    """The most that is held while the forward runs, above the stage's input."""
    backward_nbytes: int
    """The most that is held while the backward runs, above the stage's input: what arrives is part of it."""


@dataclass(frozen=True)
class Costs:
    """A chain in numbers: all that a solver for chains looks at. Stages are numbered from 0."""

    forward_seconds: Sequence[float]
    """By stage: of a forward that keeps nothing but the next stage's input."""
    forward_nbytes: Sequence[int]
    """By stage: the most that is held while that runs, above the stage's input."""
    beside: np.ndarray
    """[s, t]: bytes of the input of stage t that are not in the input of the earlier stage s. Square."""
    arriving: Sequence[int]
    """By stage: what else is held when the backward pass comes to it: cotangents and gradients."""
    options: Sequence[Sequence[Option]]
    """By stage: ways to save it when later stages follow."""
    leaves: Sequence[Sequence[Option]]
    """The same for a forward that is followed by its own backward, and need not make the next stage's input."""


class Stages:
    """A graph as a chain."""

    def __init__(
        self,
        rules: Rules,
        order: Sequence[int] | None = None,
        cuts: int | Sequence[int] = 99,
        choices: Iterable[Collection[int]] = (),
    ):
        """Cuts the forward pass into stages, and finds what belongs to each.

        Args:
            rules: of the graph.
            order: the nodes of the backward pass; None for the recorded order. Within a stage it is permanent.
            cuts: how many there may be, where little is live; or at which places, as in `CutPoints`.
            choices: sets of values to save where a stage is saved; what its backward reads besides is computed again
                within it. A stage has an option for each, after the one that saves all that its backward reads.
        """
        graph = self.graph = rules.graph
        self.rules = rules
        whole = self.whole = save_everything(rules, order)
        points = CutPoints(rules, whole.forward)
        ends = [*(points.low(cuts) if isinstance(cuts, int) else cuts), len(whole.forward) - 1]
        self.forward = [whole.forward[a + 1 : b + 1] for a, b in pairwise([-1, *ends])]
        """By stage: its nodes of the forward pass."""
        outputs = [(v, i) for i, part in enumerate(self.forward) for j in part for v in graph.nodes[j].outputs]
        self.fixed = {v for v, _ in outputs if v in points.fixed}
        """Values of the forward pass that are there to the end once they are made, whatever the plan."""
        self.made = {v: i for v, i in outputs if v not in self.fixed}
        """By value of the forward pass, unless it is fixed: the stage that makes it."""
        read = ((v, i) for i, part in enumerate(self.forward) for j in part for v in graph.nodes[j].inputs)
        self.reach = self.made | {v: i for v, i in read if v in self.made}
        """By the same values: the last stage that reads it in the forward pass, or the one that makes it."""
        mine = {i for part in self.forward for i in part}
        self.backward = self._phases([i for i in whole.backward if i not in mine])
        """By stage: its nodes of the backward pass, which runs from the last stage to the first."""
        self.end: dict[int, int] = {}
        """By value that the backward pass reads: the last, and so earliest, stage that does."""
        for i in reversed(range(len(self))):
            self.end.update((v, i) for j in self.backward[i] for v in graph.nodes[j].inputs)
        self.arriving = self._arriving()
        """By stage: the values that its backward, or that of an earlier stage, gets from later stages."""
        self.saves = [self._saves(i, choices) for i in range(len(self))]
        """By stage and option: the values that it saves for the backward pass."""
        self.again = [[self._again(i, saved) for saved in options] for i, options in enumerate(self.saves)]
        """By stage and option: the nodes of its backward, with those that are computed again within it."""
        self.twin = list(range(len(self)))
        """By stage: the first one that is like it, with as many options that hold and take as much, or itself."""
        self.onward: list[set[int]] = [set() for _ in self.forward]
        """By stage: the values that it makes and later ones read in the forward pass."""
        for value, first in self.made.items():
            if self.reach[value] > first:
                self.onward[first].add(value)

    def __len__(self) -> int:
        return len(self.forward)

    def _phases(self, nodes: Sequence[int]) -> list[list[int]]:
        """Returns, by stage, those of the backward pass's `nodes` that run when all later stages are done with.

        A node that reads what the stage makes or gets runs as soon as its cotangents are there, and so does one that
        makes less than it reads (an addition); another (a product with a parameter) waits until it is needed.
        """
        graph, last = self.graph, len(self) - 1
        before: dict[int, set[int]] = {}
        for i in nodes:
            before[i] = {p for v in graph.nodes[i].inputs if (p := graph.values[v].producer) in before}
        for first, second in pairwise(i for i in nodes if graph.nodes[i].random):  # those keep their order
            before[second].add(first)
        soonest: dict[int, int] = {}
        for i in nodes:
            reaches = [self.reach[v] for v in graph.nodes[i].inputs if v in self.reach]
            soonest[i] = min([last, *reaches, *(soonest[p] for p in before[i])])
        found: list[list[int]] = [[] for _ in self.forward]
        needed: dict[int, int] = {}
        for i in reversed(nodes):
            node = graph.nodes[i]
            latest = max((self.made[v] for v in node.inputs if v in self.made), default=-2)
            arrives = [v for v in node.inputs if graph.values[v].producer in before]
            waits = latest < soonest[i] - 1 and self._nbytes(node.outputs) >= self._nbytes(arrives)
            phase = min(soonest[i], max(latest, needed.get(i, soonest[i]))) if waits else soonest[i]
            needed.update((p, max(needed.get(p, 0), phase)) for p in before[i])
            found[phase].append(i)
        return [part[::-1] for part in found]

    def _arriving(self) -> list[set[int]]:
        graph, permanent = self.graph, self.rules.permanent
        home = self.made | {v: i for i, part in enumerate(self.backward) for j in part for v in graph.nodes[j].outputs}
        found: list[set[int]] = [set(graph.cotangents) for _ in self.forward]
        for value, i in home.items():
            end = 0 if value in permanent else self.end.get(value, i)
            for stage in range(end, i):
                found[stage].add(value)
        return found

    def _saves(self, stage: int, choices: Iterable[Collection[int]]) -> list[frozenset[int]]:
        """Returns the sets of values that the options of a stage save."""
        made, awaited = self._made(stage), self.awaited(stage)
        read = {v for v in made if self.end.get(v, stage + 1) <= stage}
        found = {frozenset(read): None}
        for choice in choices:
            saved = awaited.union(made.intersection(choice))
            used = {v for i in self._again(stage, saved) for v in self.graph.nodes[i].inputs}
            found[frozenset(saved & (used | awaited))] = None
        return list(found)

    def _made(self, stage: int) -> set[int]:
        """Returns the values that a stage makes, unless they are fixed."""
        return {v for i in self.forward[stage] for v in self.graph.nodes[i].outputs if v in self.made}

    def awaited(self, stage: int) -> set[int]:
        """Returns the values that a stage makes and backward passes of earlier stages read, unless they are fixed."""
        return {v for v in self._made(stage) if self.end.get(v, stage) < stage}

    def add(self, stage: int, again: list[int]) -> None:
        """Adds an option, before there are costs.

        Args:
            stage: which.
            again: the nodes of its backward, in order, with those of its forward that run again, maybe several times.
                What they read and have not made is saved.
        """
        made, saved = self._made(stage), self.awaited(stage)
        there: set[int] = set()
        for index in again:
            saved.update(v for v in self.graph.nodes[index].inputs if v in made and v not in there)
            there.update(self.graph.nodes[index].outputs)
        if (frozenset(saved), again) not in zip(self.saves[stage], self.again[stage], strict=True):
            self.saves[stage].append(frozenset(saved))
            self.again[stage].append(again)

    def _again(self, stage: int, saved: Collection[int]) -> list[int]:
        """Returns the nodes of the stage's backward, and before them what they read that was not saved."""
        there = set(saved)
        found: list[int] = []
        for index in self.backward[stage]:
            fetched = self._within(stage, self.graph.nodes[index].inputs, there)
            there.update(v for i in fetched for v in self.graph.nodes[i].outputs)
            found += [*fetched, index]
        return found

    def _within(self, stage: int, values: Iterable[int], there: Collection[int] = ()) -> list[int]:
        """Returns the nodes of the stage's forward that make `values` of what comes into it, and of what is `there`."""
        found: set[int] = set()
        stack = list(values)
        while stack:
            value = stack.pop()
            producer = self.graph.values[value].producer
            if self.made.get(value) == stage and value not in there and producer not in found:
                assert producer is not None
                found.add(producer)
                stack += self.graph.nodes[producer].inputs
        return sorted(found)

    @functools.cached_property
    def costs(self) -> Costs:
        """The chain in numbers."""
        beside = np.zeros((len(self), len(self)), dtype=np.int64)
        for value, first in self.made.items():
            beside[: first + 1, first + 1 : self.reach[value] + 1] += self.graph.values[value].nbytes
        passing = {i: self._within(i, self.onward[i]) for i in set(self.twin)}
        seconds = {i: self._seconds(part) for i, part in passing.items()}
        peaks = {i: self._peak(part, self.onward[i]) for i, part in passing.items()}
        return Costs(
            forward_seconds=[seconds[i] for i in self.twin],
            forward_nbytes=[peaks[i] for i in self.twin],
            beside=beside,
            arriving=[self._nbytes(values) for values in self.arriving],
            options=self._options(self.onward),
            leaves=self._options([set() for _ in self.forward]),
        )

    def _options(self, onward: Sequence[set[int]]) -> list[list[Option]]:
        """Returns the ways to save each stage, where the forward makes `onward` as well."""
        found: list[list[Option]] = []
        for i, twin in enumerate(self.twin):
            if twin == i:
                found.append([self._option(i, k, onward[i]) for k in range(len(self.saves[i]))])
            else:  # but for what passes by, that is the same
                more = self._nbytes(self.arriving[i]) - self._nbytes(self.arriving[twin])
                found.append([o._replace(backward_nbytes=o.backward_nbytes + more) for o in found[twin]])
        return found

    def _option(self, stage: int, number: int, onward: set[int]) -> Option:
        saved = self.saves[stage][number]
        forward = self._within(stage, saved | onward)
        return Option(
            saved_nbytes=self._nbytes(saved | onward),
            forward_seconds=self._seconds(forward),
            backward_seconds=self._seconds(self.again[stage][number]),
            forward_nbytes=self._peak(forward, saved | onward),
            backward_nbytes=self.backward_peaks[stage][number],
        )

    @functools.cached_property
    def backward_peaks(self) -> dict[int, list[int]]:
        """By stage that is like none before it, and option: the most bytes that its backward holds of what it makes,
        saved and gets.
        """
        stays = [set(), *self.arriving]
        return {
            i: [
                self._peak(n, stays[i], s | self.arriving[i]) for s, n in zip(self.saves[i], self.again[i], strict=True)
            ]
            for i in set(self.twin)
        }

    def _nbytes(self, values: Iterable[int]) -> int:
        nbytes = self.rules.nbytes
        return sum([nbytes[v] for v in values])  # a list, because this is called often, and sums it twice as fast

    def _seconds(self, nodes: Iterable[int]) -> float:
        return sum(self.rules.seconds[i] for i in nodes)

    def _peak(self, nodes: Sequence[int], stays: Collection[int], present: Collection[int] = ()) -> int:
        """Returns the most bytes that `nodes` hold of what they make and of what is `present`.

        Args:
            nodes: a part of a schedule, in order.
            stays: what is held to its end.
            present: what is there when it begins, and goes with its last use unless it stays. Whatever else is read is
                not counted, nor what is fixed, because it is there anyway.

        What is made several times goes with its last use before it is made again.
        """
        graph, permanent, nbytes = self.graph, self.rules.permanent, self.rules.nbytes
        ends: list[list[int]] = []
        """By place, from the last: what is read or made there, and not read later before it is made again."""
        wanted = set(stays)
        for index in reversed(nodes):
            node = graph.nodes[index]
            ends.append([v for v in (*node.inputs, *node.outputs) if v not in wanted])
            wanted.difference_update(node.outputs)
            wanted.update(node.inputs)
        live = set(present)
        held = peak = self._nbytes(live)
        for index in nodes:
            node = graph.nodes[index]
            new = [v for v in node.outputs if v not in live and v not in self.fixed]
            live.update(new)
            gone = {v for v in ends.pop() if v in live and v not in permanent}
            over = node.overwritten(gone) if new and node.overwrites else None
            saved = 0 if over is None else nbytes[over]
            peak = max(peak, held + self._nbytes(node.outputs) + node.temporary_nbytes - saved)
            held += self._nbytes(new) - self._nbytes(gone)
            live -= gone
        return peak

    def order(self, steps: Iterable[Step]) -> Order:
        """Returns what the steps compute, without what nothing reads.

        Args:
            steps: forward through all stages, then the backward of the last, and so on until the first. What a step
                reads has been made by one before it, and is held from the last one that makes it.
        """
        order = Order([], [])
        for step in steps:
            if step.kind == "backward":
                order.backward.extend(self.again[step.stage][step.option])
            else:
                order[bool(order.backward)].extend(self.forward[step.stage])
        return self._useful(order.forward, self._fetched(order.backward))

    @functools.cached_property
    def must(self) -> set[int]:
        """Nodes that run once whatever is read."""
        nodes, rules = self.graph.nodes, self.rules
        ends = (i for i in rules.backward if nodes[i].random or not rules.permanent.isdisjoint(nodes[i].outputs))
        return {*rules.forward_roots, *ends}

    @functools.cached_property
    def repeated(self) -> list[list[int]]:
        """By node: the results for which it may run again."""
        pinned, permanent = self.rules.pinned, self.rules.permanent
        return [[] if pinned[n.id] else [v for v in n.outputs if v not in permanent] for n in self.graph.nodes]

    def _fetched(self, backward: list[int]) -> list[int]:
        """Adds to the backward pass what makes again the values that must not be saved, where it reads them."""
        if not self.rules.unsaved:
            return backward
        there = set(range(len(self.graph.values))) - self.rules.unsaved
        found: list[int] = []
        for index in backward:
            missing = {self.graph.values[v].producer for v in self.graph.nodes[index].inputs if v not in there}
            for i in [*ancestors(self.graph, (p for p in missing if p is not None), there), index]:
                found.append(i)
                there.update(self.graph.nodes[i].outputs)
        return found

    def _useful(self, forward: list[int], backward: list[int]) -> Order:
        """Leaves out runs that make nothing that is read before it is made again, and forbidden repetitions."""
        nodes, split = self.graph.nodes, len(forward)
        sequence = [*forward, *backward]
        first = [-1] * len(nodes)
        for k in reversed(range(len(sequence))):
            first[sequence[k]] = k
        needed = bytearray(len(self.graph.values))
        order = Order([], [])
        for k in reversed(range(len(sequence))):
            index = sequence[k]
            node = nodes[index]
            wanted = first[index] == k and index in self.must
            for value in node.outputs if first[index] == k else self.repeated[index]:
                if needed[value]:
                    wanted = True
            if wanted:
                for value in node.outputs:
                    needed[value] = 0
                for value in node.inputs:
                    needed[value] = 1
                order[k >= split].append(index)
        return Order(order.forward[::-1], order.backward[::-1])
