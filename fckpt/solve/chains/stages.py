"""A training step as a chain of stages, for solvers that plan chains only.

The forward pass of the order that saves everything is cut at several positions. A stage is the part between two cuts,
with its part of the backward pass. Any set of values may live across a cut: a single value is best (the output of a
residual block), several also work (U-Net's skip connections, the masks of a transformer). A value that lives across
several consecutive cuts belongs to the set of each, but is in memory once: `Costs.beside` is the additional memory of
one set beside another.

A solver for chains returns `Step`s, and `Stages.order` turns them into an `Order` of the graph: it runs the stages'
nodes, skips computations whose results nothing reads, and leaves freeing to `schedule_of`. The order is legal whatever
the steps, and holds at most what the steps hold.

    Beaumont et al. 2019, Griewank & Walther 2000     here
    F with nothing saved, F_ck, F_all, B              Step: "none", "checkpoint", "all", "backward"
    x_s                                               Costs.beside[:, s]: the values that live across the cut before s
    x-bar, u_F, u_B of F_all and B                    Option, by stage: a stage may be saved in several ways
    delta_t, the gradients' cotangents                Costs.arriving[t]: held when the backward pass reaches stage t

Complexity: linear in the size of the graph, times the number of options. Left out: stages that share nodes, as in a
graph whose branches are themselves chains.
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
    """"none", "checkpoint" and "all" run the stage forward. "none" saves only what the next stage reads; "checkpoint"
    also saves what the stage itself reads; "all" also saves what the stage's backward reads. "backward" runs the
    stage's backward."""
    stage: int
    option: int = 0
    """The index of the stage's option that "all" and "backward" use."""


class Option(NamedTuple):
    """A way to save a stage for its backward."""

    saved_nbytes: int
    """The bytes that the forward leaves, including the next stage's input, but not the stage's input."""
    forward_seconds: float
    backward_seconds: float
    """Includes the recomputations within the stage."""
    forward_nbytes: int
    """The peak while the forward runs, not counting the stage's input."""
    backward_nbytes: int
    """The peak while the backward runs, including arriving values, but not the stage's input."""


@dataclass(frozen=True)
class Costs:
    """The costs of a chain: everything that a solver for chains reads. Stages are numbered from 0."""

    forward_seconds: Sequence[float]
    """By stage: the time of a forward that saves only the next stage's input."""
    forward_nbytes: Sequence[int]
    """By stage: the peak of that forward, not counting the stage's input."""
    beside: np.ndarray
    """[s, t]: bytes of the input of stage t that are not in the input of the earlier stage s. Square."""
    arriving: Sequence[int]
    """By stage: the other bytes held when the backward pass reaches the stage: cotangents and gradients."""
    options: Sequence[Sequence[Option]]
    """By stage: the ways to save it if later stages follow."""
    leaves: Sequence[Sequence[Option]]
    """By stage: the ways to save it if its own backward follows directly, so that it need not make the next stage's
    input."""


class Stages:
    """A graph as a chain of stages."""

    def __init__(
        self,
        rules: Rules,
        backward_order: Sequence[int] | None = None,
        cuts: int | Sequence[int] = 99,
        choices: Iterable[Collection[int]] = (),
    ):
        """Cuts the forward pass into stages, and assigns the nodes of the backward pass to stages.

        Args:
            rules: the rules of the graph.
            backward_order: the nodes of the backward pass, in an order that is preserved within each stage; None for
                the recorded order.
            cuts: the largest number of cuts, made where few bytes live; or the positions of the cuts, as in
                `CutPoints`.
            choices: sets of values to save when a stage is saved; other values that the stage's backward reads are
                recomputed within it. A stage has one option for each set, after the option that saves everything that
                its backward reads.
        """
        graph = self.graph = rules.graph
        self.rules = rules
        whole = self.whole = save_everything(rules, backward_order)
        points = CutPoints(rules, whole.forward)
        ends = [*(points.low(cuts) if isinstance(cuts, int) else cuts), len(whole.forward) - 1]
        self.forward = [whole.forward[a + 1 : b + 1] for a, b in pairwise([-1, *ends])]
        """By stage: its nodes of the forward pass."""
        outputs = [(v, i) for i, part in enumerate(self.forward) for j in part for v in graph.nodes[j].outputs]
        self.fixed = {v for v, _ in outputs if v in points.fixed}
        """Values of the forward pass that stay once they are made, whatever the plan."""
        self.made = {v: i for v, i in outputs if v not in self.fixed}
        """By value of the forward pass that is not fixed: the stage that makes it."""
        read = ((v, i) for i, part in enumerate(self.forward) for j in part for v in graph.nodes[j].inputs)
        self.reach = self.made | {v: i for v, i in read if v in self.made}
        """By the same values: the last stage that reads it in the forward pass, or the stage that makes it."""
        mine = {i for part in self.forward for i in part}
        self.backward = self._phases([i for i in whole.backward if i not in mine])
        """By stage: its nodes of the backward pass, which runs from the last stage to the first."""
        self.end: dict[int, int] = {}
        """By value that the backward pass reads: the stage that reads it last, which has the lowest number."""
        for i in reversed(range(len(self))):
            self.end.update((v, i) for j in self.backward[i] for v in graph.nodes[j].inputs)
        self.arriving = self._arriving()
        """By stage: the values that its backward, or the backward of an earlier stage, receives from later stages."""
        self.saves = [self._saves(i, choices) for i in range(len(self))]
        """By stage and option: the values saved for the backward pass."""
        self.option_nodes = [
            [self._option_nodes(i, saved) for saved in options] for i, options in enumerate(self.saves)
        ]
        """By stage and option: the nodes of its backward, including the nodes recomputed within it."""
        self.twin = list(range(len(self)))
        """By stage: the first stage with equal costs and equally many options, or the stage itself."""
        self.onward: list[set[int]] = [set() for _ in self.forward]
        """By stage: the values that it makes and that later stages read in the forward pass."""
        for value, first in self.made.items():
            if self.reach[value] > first:
                self.onward[first].add(value)

    def __len__(self) -> int:
        return len(self.forward)

    def _phases(self, nodes: Sequence[int]) -> list[list[int]]:
        """Returns, by stage, the nodes of the backward pass that run after all later stages are finished.

        A node that reads values that the stage makes or reads runs as soon as its cotangents are live, and so does a
        node that makes less than it reads (an addition); another node (a product with a parameter) waits until its
        result is needed.
        """
        graph, last = self.graph, len(self) - 1
        before: dict[int, set[int]] = {}
        for i in nodes:
            before[i] = {p for v in graph.nodes[i].inputs if (p := graph.values[v].producer) in before}
        for first, second in pairwise(i for i in nodes if graph.nodes[i].random):  # random nodes keep their order
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
            used = {v for i in self._option_nodes(stage, saved) for v in self.graph.nodes[i].inputs}
            found[frozenset(saved & (used | awaited))] = None
        return list(found)

    def _made(self, stage: int) -> set[int]:
        """Returns the values that a stage makes and that are not fixed."""
        return {v for i in self.forward[stage] for v in self.graph.nodes[i].outputs if v in self.made}

    def awaited(self, stage: int) -> set[int]:
        """Returns the values of a stage that backward passes of earlier stages read and that are not fixed."""
        return {v for v in self._made(stage) if self.end.get(v, stage) < stage}

    def add(self, stage: int, again: list[int]) -> None:
        """Adds an option to a stage; call it before `costs` is used.

        Args:
            stage: the stage.
            again: the nodes of its backward, in order, including the nodes of its forward that run again, possibly
                several times. The values that they read and do not make are saved.
        """
        made, saved = self._made(stage), self.awaited(stage)
        there: set[int] = set()
        for index in again:
            saved.update(v for v in self.graph.nodes[index].inputs if v in made and v not in there)
            there.update(self.graph.nodes[index].outputs)
        if (frozenset(saved), again) not in zip(self.saves[stage], self.option_nodes[stage], strict=True):
            self.saves[stage].append(frozenset(saved))
            self.option_nodes[stage].append(again)

    def _option_nodes(self, stage: int, saved: Collection[int]) -> list[int]:
        """Returns the nodes of the stage's backward, each after the missing nodes whose outputs were not saved."""
        there = set(saved)
        found: list[int] = []
        for index in self.backward[stage]:
            fetched = self._within(stage, self.graph.nodes[index].inputs, there)
            there.update(v for i in fetched for v in self.graph.nodes[i].outputs)
            found += [*fetched, index]
        return found

    def _within(self, stage: int, values: Iterable[int], there: Collection[int] = ()) -> list[int]:
        """Returns the nodes of the stage's forward that make `values` from its inputs and the values `there`."""
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
        """The costs of the chain."""
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
        """Returns the options of each stage, if its forward also makes the values `onward`."""
        found: list[list[Option]] = []
        for i, twin in enumerate(self.twin):
            if twin == i:
                found.append([self._option(i, k, onward[i]) for k in range(len(self.saves[i]))])
            else:  # equal, except for the arriving values
                more = self._nbytes(self.arriving[i]) - self._nbytes(self.arriving[twin])
                found.append([o._replace(backward_nbytes=o.backward_nbytes + more) for o in found[twin]])
        return found

    def _option(self, stage: int, number: int, onward: set[int]) -> Option:
        saved = self.saves[stage][number]
        forward = self._within(stage, saved | onward)
        return Option(
            saved_nbytes=self._nbytes(saved | onward),
            forward_seconds=self._seconds(forward),
            backward_seconds=self._seconds(self.option_nodes[stage][number]),
            forward_nbytes=self._peak(forward, saved | onward),
            backward_nbytes=self.backward_peaks[stage][number],
        )

    @functools.cached_property
    def backward_peaks(self) -> dict[int, list[int]]:
        """By stage that is its own twin, and by option: the peak of its backward.

        It counts the values that the backward makes, and the saved and arriving values.
        """
        stays = [set(), *self.arriving]
        return {
            i: [
                self._peak(n, stays[i], s | self.arriving[i])
                for s, n in zip(self.saves[i], self.option_nodes[i], strict=True)
            ]
            for i in set(self.twin)
        }

    def _nbytes(self, values: Iterable[int]) -> int:
        nbytes = self.rules.nbytes
        return sum([nbytes[v] for v in values])  # a list: summing it is twice as fast, and this is called often

    def _seconds(self, nodes: Iterable[int]) -> float:
        return sum(self.rules.seconds[i] for i in nodes)

    def _peak(self, nodes: Sequence[int], stays: Collection[int], present: Collection[int] = ()) -> int:
        """Returns the peak of `nodes`, counting the values that they make and the values `present`.

        A value that is made several times is freed after the last use of each copy.

        Args:
            nodes: a part of a schedule, in order.
            stays: values held until the end of the part.
            present: values that are live at the start and are freed after their last use, unless they stay. Other
                inputs are not counted, and neither are fixed values, which are held in any case.
        """
        graph, permanent, nbytes = self.graph, self.rules.permanent, self.rules.nbytes
        ends: list[list[int]] = []
        """By position, from the last: the values read or made there whose copy is not read later."""
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
        """Returns the computations of the steps, without computations whose results nothing reads.

        Args:
            steps: forward through all stages, then the backward of the last stage, and so on to the backward of the
                first. What a step reads was made by an earlier step, and is held from the last step that makes it.
        """
        order = Order([], [])
        for step in steps:
            if step.kind == "backward":
                order.backward.extend(self.option_nodes[step.stage][step.option])
            else:
                order[bool(order.backward)].extend(self.forward[step.stage])
        return self._useful(order.forward, self._fetched(order.backward))

    @functools.cached_property
    def must(self) -> set[int]:
        """Nodes that must run once, even if nothing reads their outputs."""
        nodes, rules = self.graph.nodes, self.rules
        ends = (i for i in rules.backward if nodes[i].random or not rules.permanent.isdisjoint(nodes[i].outputs))
        return {*rules.forward_roots, *ends}

    @functools.cached_property
    def recomputable(self) -> list[list[int]]:
        """By node: the outputs for which it may run again."""
        pinned, permanent = self.rules.pinned, self.rules.permanent
        return [[] if pinned[n.id] else [v for v in n.outputs if v not in permanent] for n in self.graph.nodes]

    def _fetched(self, backward: list[int]) -> list[int]:
        """Adds recomputations of the values that must not be saved, directly before the backward pass reads them."""
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
        """Removes runs whose outputs are made again before they are read, and forbidden recomputations."""
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
            for value in node.outputs if first[index] == k else self.recomputable[index]:
                if needed[value]:
                    wanted = True
            if wanted:
                for value in node.outputs:
                    needed[value] = 0
                for value in node.inputs:
                    needed[value] = 1
                order[k >= split].append(index)
        return Order(order.forward[::-1], order.backward[::-1])
