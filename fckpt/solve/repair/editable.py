"""A sequence of computations under edit, with its exact memory profile.

A `Tape` is what `schedule_of` makes of a sequence (every value is freed after its last use before it is made again),
kept up to date while computations are put in and taken out. An edit touches the values that it is about: a few slices
of the profile, and one shift of the positions behind it, so some ten thousand edits of a sequence of some ten thousand
computations are a matter of seconds.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from fckpt.solve.core.rules import Order, Rules, profile_of

__all__ = ["Tape"]


class Tape:
    """The sequence.

    A *moment* is one computation; its number stays the same while its position moves. Moments that are taken out
    keep their position, empty. *Events* of a value are the moments that make it or read it.
    """

    def __init__(self, rules: Rules, order: Order):
        graph = rules.graph
        self.rules = rules
        self.nbytes = rules.nbytes
        self.producer = [v.producer for v in graph.values]
        sequence = [*order.forward, *order.backward]
        count = len(sequence)
        self.split = len(order.forward)
        """The position at which the backward pass begins."""
        self.node = sequence
        """By moment: its node, or -1 where it was taken out."""
        self.at = np.arange(count, dtype=np.int64)
        """By position: the moment."""
        self.place = np.arange(count, dtype=np.int64)
        """By moment: the position."""
        self._places: list[int] | None = None
        self.memory = profile_of(rules, order)
        """By position: the bytes held while it runs."""
        self.runs: list[list[int]] = [[] for _ in graph.nodes]
        """By node: its moments, in order."""
        self.events: list[list[int]] = [[] for _ in graph.values]
        """By value: its events in order; makes only for values that are kept to the end, none for inputs."""
        self.around = [(*n.outputs, *(v for v in n.inputs if v not in rules.kept)) for n in graph.nodes]
        """By node: the values with events that it makes or reads."""
        for moment, index in enumerate(sequence):
            self.runs[index].append(moment)
            for value in self.around[index]:
                self.events[value].append(moment)
        self.own = [self._own(moment) for moment in range(count)]
        """By moment: what it holds besides values, temporaries and copies that are dropped."""
        self.saved = [self._saves(moment) for moment in range(count)]
        """By moment: what it does not hold, because it writes its output over an input."""

    def copy(self) -> Tape:
        """Returns a tape of its own, with the same moments."""
        twin = copy.copy(self)
        twin.node, twin.runs, twin.events = [*self.node], [*self.runs], [*self.events]
        twin.own, twin.saved = [*self.own], [*self.saved]
        twin.at, twin.place, twin.memory = self.at.copy(), self.place.copy(), self.memory.copy()
        return twin

    @property
    def places(self) -> list[int]:
        """By moment: the position, of one's own, where numbers are looked up one by one: twice as fast as an array."""
        places = self._places
        if places is None:
            places = self._places = self.place.tolist()
        return places

    def _saves(self, moment: int) -> int:
        index = self.node[moment]
        if index < 0:
            return 0
        node = self.rules.graph.nodes[index]
        if not node.overwrites:
            return 0
        position = self.places[moment]
        dies = any(v not in self.rules.kept and not self.is_read_after(v, position) for v in node.overwrites)
        if not dies or (node.outputs[0] in self.rules.kept and self.runs[index][0] != moment):
            return 0
        return self.nbytes[node.outputs[0]]

    def is_read_after(self, value: int, position: int) -> bool:
        """Whether the copy of `value` that the computation at `position` makes or reads is read later."""
        events = self.events[value]
        following = self.index(value, position) + 1
        return following < len(events) and not self.makes(events[following], value)

    def _save(self, moments: Iterable[int]) -> None:
        """Takes up anew what `moments` save."""
        for moment in moments:
            saved = self._saves(moment)
            self.memory[self.place[moment]] += self.saved[moment] - saved
            self.saved[moment] = saved

    def _own(self, moment: int) -> int:
        index, kept = self.node[moment], self.rules.kept
        node = self.rules.graph.nodes[index]
        copies = sum(self.nbytes[v] for v in node.outputs if v in kept) if self.runs[index][0] != moment else 0
        return node.temporary_nbytes + copies

    def touched(self, nodes: Iterable[int]) -> list[int]:
        """The values with events that `nodes` make or read, each once."""
        return list(dict.fromkeys(v for index in nodes for v in self.around[index]))

    def order(self) -> Order:
        """Returns the sequence."""
        sequence = [self.node[m] for m in self.at.tolist()]
        forward = [i for i in sequence[: self.split] if i >= 0]
        return Order(forward, [i for i in sequence[self.split :] if i >= 0])

    def makes(self, moment: int, value: int) -> bool:
        """Whether `moment` makes `value`, rather than reads it."""
        return self.node[moment] == self.producer[value]

    def index(self, value: int, position: int) -> int:
        """How many events of `value` lie before `position`."""
        return bisect_left(self.events[value], position, key=self.places.__getitem__)

    def is_live(self, value: int, position: int) -> bool:
        """Whether `value` can be read just before `position`."""
        rules = self.rules
        events = self.events[value]
        if not events:
            return value in rules.graph.held and (self.producer[value] is None) and self._came(value, position)
        if value in rules.kept:
            return self.places[events[0]] < position
        i = self.index(value, position)
        return 0 < i < len(events) and not self.makes(events[i], value)

    def _came(self, value: int, position: int) -> bool:
        return position >= self.split or value not in self.rules.graph.cotangents

    def end(self, value: int, position: int) -> int:
        """Where the last copy of `value` before `position` is freed; -1 if there is none."""
        i = self.index(value, position)
        return self.places[self.events[value][i - 1]] if i else -1

    def lives(self, value: int, low: int = 0, high: int | None = None) -> Iterator[tuple[int, int]]:
        """Yields the first and last positions at which copies of `value` are held.

        Args:
            value: the value.
            low: only the last copy made before this position, and those made from there on;
            high: and up to this position.
        """
        events, place = self.events[value], self.places
        high = len(self.at) if high is None else high
        if value in self.rules.kept:
            if events:
                yield place[events[0]], len(self.at) - 1
            return
        i = max(self.index(value, low) - 1, 0) if low else 0
        while i > 0 and not self.makes(events[i], value):
            i -= 1
        first = last = -1
        for moment in islice(events, i, None):
            if self.makes(moment, value):
                if first >= 0:
                    yield first, place[last]
                first = place[moment]
                if first > high:
                    return
            last = moment
        if first >= 0:
            yield first, place[last]

    def _count(self, values: Iterable[int], sign: int, low: int, high: int) -> list[int]:
        """Counts or discounts lives; returns the moments at which they end and an output may be written over them."""
        ends = []
        for value in values:
            change = sign * self.nbytes[value]
            if change:
                for first, last in self.lives(value, low, high):
                    self.memory[first : last + 1] += change
                    moment = int(self.at[last])
                    index = self.node[moment]
                    if index >= 0 and value in self.rules.graph.nodes[index].overwrites:
                        ends.append(moment)
        return ends

    def before(self, moment: int) -> int:
        """The bytes held just before `moment`, counted or not as its profile stands."""
        index = self.node[moment]
        held = int(self.memory[self.place[moment]]) - self.own[moment] + self.saved[moment]
        if index < 0:
            return held
        first = self.runs[index][0] == moment
        made = self.rules.graph.nodes[index].outputs
        return held - sum(self.nbytes[v] for v in made if first or v not in self.rules.kept)

    def insert(self, nodes: Sequence[int], moment: int) -> list[int]:
        """Runs `nodes` again, in this order, just before `moment`; returns their moments.

        None of them reads or makes what `moment` makes.
        """
        touched = self.touched(nodes)
        position = self.places[moment]
        ends = self._count(touched, -1, position, position)
        held = self.before(moment)
        new = list(range(len(self.node), len(self.node) + len(nodes)))
        self.node += nodes
        self.place[self.at[position:]] += len(nodes)
        self.place = np.concatenate([self.place, np.arange(position, position + len(nodes))])
        self._places = None
        self.at = np.insert(self.at, position, new)
        for fresh, index in zip(new, nodes, strict=True):
            self._enter(fresh, index)
        self.own += [self._own(fresh) for fresh in new]
        self.saved += [0] * len(new)
        self.memory = np.insert(self.memory, position, [held + self.own[fresh] for fresh in new])
        self.split += len(nodes) * (position < self.split)
        ends += self._count(touched, +1, position, position + len(nodes) - 1)
        self._save({*ends, *new})
        return new

    def _enter(self, moment: int, index: int) -> None:
        self.runs[index] = self._with(self.runs[index], moment)
        for value in self.around[index]:
            self.events[value] = self._with(self.events[value], moment)

    def _with(self, moments: list[int], moment: int) -> list[int]:
        # lists are replaced and not changed, because copies of the tape share them
        i = bisect_left(moments, self.places[moment], key=self.places.__getitem__)
        return [*moments[:i], moment, *moments[i:]]

    def remove(self, moment: int) -> list[int]:
        """Takes out `moment` and what then has no use; returns the nodes, in the order in which they went.

        What read its results reads the copies made before, which live longer.
        """
        gone = []
        stack = [moment]
        while stack:
            moment = stack.pop()
            index = self.node[moment]
            if index < 0:
                continue
            touched = self.around[index]
            position = self.places[moment]
            ends = self._count(touched, -1, position, position)
            self.memory[position] -= self.own[moment]
            self.node[moment] = -1
            self.runs[index] = [m for m in self.runs[index] if m != moment]
            for value in touched:
                self.events[value] = [m for m in self.events[value] if m != moment]
            ends += self._count(touched, +1, position, position)
            self._save({moment, *ends})
            gone.append((moment, index))
            stack += self.useless(self.rules.graph.nodes[index].inputs, position)
        self.gone = gone
        return [index for _, index in gone]

    def restore(self, gone: Sequence[tuple[int, int]]) -> None:
        """Undoes `remove`, nothing else having happened since.

        Args:
            gone: the moments and nodes that were taken out, `self.gone` after it.
        """
        for moment, index in reversed(gone):
            touched = self.around[index]
            position = self.places[moment]
            ends = self._count(touched, -1, position, position)
            self.node[moment] = index
            self._enter(moment, index)
            self.memory[position] += self.own[moment]
            ends += self._count(touched, +1, position, position)
            self._save({moment, *ends})

    def useless(self, values: Iterable[int], position: int) -> list[int]:
        """The last moments before `position` that make `values`, where nothing reads what they make."""
        found = []
        for value in values:
            producer = self.producer[value]
            if producer is None:
                continue
            runs = self.runs[producer]
            i = bisect_left(runs, position, key=self.places.__getitem__)
            if i and not self._has_use(runs[i - 1], producer):
                found.append(runs[i - 1])
        return found

    def _has_use(self, moment: int, index: int) -> bool:
        node = self.rules.graph.nodes[index]
        first = self.runs[index][0] == moment
        if first and (node.once or node.random or node.writes):
            return True
        for value in node.outputs:
            if value in self.rules.kept:
                if first:
                    return True
                continue
            if self.is_read_after(value, self.places[moment]):
                return True
        return False

    def crosses_boundary(self, value: int) -> bool:
        """Whether a copy of `value` lives from the forward into the backward pass."""
        return any(first < self.split <= last for first, last in self.lives(value))
