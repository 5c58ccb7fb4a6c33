"""An editable schedule: a sequence of computations with its exact memory profile, updated with every edit.

It corresponds to `schedule_of`: every value is freed after its last use before it is made again. Computations can be
inserted and removed. An edit changes only the values that it concerns: a few slices of the profile, and one shift of
the positions after it. Ten thousand edits of a sequence of ten thousand computations take seconds.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from fckpt.solve.core.rules import Order, Rules, profile_of

__all__ = ["EditableSchedule"]


class EditableSchedule:
    """A sequence of runs that can be edited.

    A *run* is one computation of a node. The number of a run stays the same while its position changes; a removed run
    keeps its position, which is then empty. The *events* of a value are the runs that make it or read it.
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
        """By run: its node, or -1 if the run was removed."""
        self.at = np.arange(count, dtype=np.int64)
        """By position: the run."""
        self.place = np.arange(count, dtype=np.int64)
        """By run: the position."""
        self._places: list[int] | None = None
        self.profile = profile_of(rules, order)
        """By position: the bytes held while the run there is executed."""
        self.runs: list[list[int]] = [[] for _ in graph.nodes]
        """By node: its runs, in order."""
        self.events: list[list[int]] = [[] for _ in graph.values]
        """By value: its events in order; only the runs that make it if the value is permanent, none for inputs."""
        self.around = [(*n.outputs, *(v for v in n.inputs if v not in rules.permanent)) for n in graph.nodes]
        """By node: the values with events that it makes or reads."""
        for run, index in enumerate(sequence):
            self.runs[index].append(run)
            for value in self.around[index]:
                self.events[value].append(run)
        self.own = [self._own(run) for run in range(count)]
        """By run: the bytes held in addition to values: temporaries, and second copies that are dropped."""
        self.saved = [self._saves(run) for run in range(count)]
        """By run: the bytes saved because its output overwrites an input."""

    def copy(self) -> EditableSchedule:
        """Returns an independent copy with the same runs."""
        twin = copy.copy(self)
        twin.node, twin.runs, twin.events = [*self.node], [*self.runs], [*self.events]
        twin.own, twin.saved = [*self.own], [*self.saved]
        twin.at, twin.place, twin.profile = self.at.copy(), self.place.copy(), self.profile.copy()
        return twin

    @property
    def places(self) -> list[int]:
        """`place` as a list: lookups of single numbers are twice as fast as in the array."""
        places = self._places
        if places is None:
            places = self._places = self.place.tolist()
        return places

    def _saves(self, run: int) -> int:
        index = self.node[run]
        if index < 0:
            return 0
        node = self.rules.graph.nodes[index]
        if not node.overwrites:
            return 0
        position = self.places[run]
        dies = any(v not in self.rules.permanent and not self.is_read_after(v, position) for v in node.overwrites)
        if not dies or (node.outputs[0] in self.rules.permanent and self.runs[index][0] != run):
            return 0
        return self.nbytes[node.outputs[0]]

    def is_read_after(self, value: int, position: int) -> bool:
        """Whether the copy of `value` that the run at `position` makes or reads is read later."""
        events = self.events[value]
        following = self.index(value, position) + 1
        return following < len(events) and not self.makes(events[following], value)

    def _save(self, runs: Iterable[int]) -> None:
        """Recomputes the bytes that `runs` save by overwriting."""
        for run in runs:
            saved = self._saves(run)
            self.profile[self.place[run]] += self.saved[run] - saved
            self.saved[run] = saved

    def _own(self, run: int) -> int:
        index, permanent = self.node[run], self.rules.permanent
        node = self.rules.graph.nodes[index]
        copies = sum(self.nbytes[v] for v in node.outputs if v in permanent) if self.runs[index][0] != run else 0
        return node.temporary_nbytes + copies

    def touched(self, nodes: Iterable[int]) -> list[int]:
        """Returns the values with events that `nodes` make or read, without duplicates."""
        return list(dict.fromkeys(v for index in nodes for v in self.around[index]))

    def order(self) -> Order:
        """Returns the order of the remaining runs."""
        sequence = [self.node[r] for r in self.at.tolist()]
        forward = [i for i in sequence[: self.split] if i >= 0]
        return Order(forward, [i for i in sequence[self.split :] if i >= 0])

    def makes(self, run: int, value: int) -> bool:
        """Whether `run` makes `value`, as opposed to reading it."""
        return self.node[run] == self.producer[value]

    def index(self, value: int, position: int) -> int:
        """Returns the number of events of `value` before `position`."""
        return bisect_left(self.events[value], position, key=self.places.__getitem__)

    def is_live(self, value: int, position: int) -> bool:
        """Whether `value` can be read directly before `position`."""
        rules = self.rules
        events = self.events[value]
        if not events:
            return value in rules.graph.held and (self.producer[value] is None) and self._came(value, position)
        if value in rules.permanent:
            return self.places[events[0]] < position
        i = self.index(value, position)
        return 0 < i < len(events) and not self.makes(events[i], value)

    def _came(self, value: int, position: int) -> bool:
        return position >= self.split or value not in self.rules.graph.cotangents

    def end(self, value: int, position: int) -> int:
        """Returns the position at which the last copy of `value` before `position` is freed; -1 if there is none."""
        i = self.index(value, position)
        return self.places[self.events[value][i - 1]] if i else -1

    def lives(self, value: int, low: int = 0, high: int | None = None) -> Iterator[tuple[int, int]]:
        """Yields the first and the last position at which each copy of `value` is held.

        Args:
            value: the value.
            low: only copies made from this position on, and the last copy made before it.
            high: only copies made up to this position.
        """
        events, place = self.events[value], self.places
        high = len(self.at) if high is None else high
        if value in self.rules.permanent:
            if events:
                yield place[events[0]], len(self.at) - 1
            return
        i = max(self.index(value, low) - 1, 0) if low else 0
        while i > 0 and not self.makes(events[i], value):
            i -= 1
        first = last = -1
        for run in islice(events, i, None):
            if self.makes(run, value):
                if first >= 0:
                    yield first, place[last]
                first = place[run]
                if first > high:
                    return
            last = run
        if first >= 0:
            yield first, place[last]

    def _count(self, values: Iterable[int], sign: int, low: int, high: int) -> list[int]:
        """Adds or subtracts copies in the profile; returns the runs at whose ends an output may overwrite them."""
        ends = []
        for value in values:
            change = sign * self.nbytes[value]
            if change:
                for first, last in self.lives(value, low, high):
                    self.profile[first : last + 1] += change
                    run = int(self.at[last])
                    index = self.node[run]
                    if index >= 0 and value in self.rules.graph.nodes[index].overwrites:
                        ends.append(run)
        return ends

    def before(self, run: int) -> int:
        """Returns the bytes held directly before `run`, according to the current profile."""
        index = self.node[run]
        held = int(self.profile[self.place[run]]) - self.own[run] + self.saved[run]
        if index < 0:
            return held
        first = self.runs[index][0] == run
        made = self.rules.graph.nodes[index].outputs
        return held - sum(self.nbytes[v] for v in made if first or v not in self.rules.permanent)

    def insert(self, nodes: Sequence[int], run: int) -> list[int]:
        """Runs `nodes` again, in this order, directly before `run`; returns the new runs.

        None of the nodes may read or make an output of `run`.
        """
        touched = self.touched(nodes)
        position = self.places[run]
        ends = self._count(touched, -1, position, position)
        held = self.before(run)
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
        self.profile = np.insert(self.profile, position, [held + self.own[fresh] for fresh in new])
        self.split += len(nodes) * (position < self.split)
        ends += self._count(touched, +1, position, position + len(nodes) - 1)
        self._save({*ends, *new})
        return new

    def _enter(self, run: int, index: int) -> None:
        self.runs[index] = self._with(self.runs[index], run)
        for value in self.around[index]:
            self.events[value] = self._with(self.events[value], run)

    def _with(self, runs: list[int], run: int) -> list[int]:
        # lists are replaced, not modified, because copies of the schedule share them
        i = bisect_left(runs, self.places[run], key=self.places.__getitem__)
        return [*runs[:i], run, *runs[i:]]

    def remove(self, run: int) -> list[int]:
        """Removes `run` and all runs that become useless; returns their nodes, in the order of removal.

        Readers of its outputs then read the copies made before, which live longer.
        """
        gone = []
        stack = [run]
        while stack:
            run = stack.pop()
            index = self.node[run]
            if index < 0:
                continue
            touched = self.around[index]
            position = self.places[run]
            ends = self._count(touched, -1, position, position)
            self.profile[position] -= self.own[run]
            self.node[run] = -1
            self.runs[index] = [r for r in self.runs[index] if r != run]
            for value in touched:
                self.events[value] = [r for r in self.events[value] if r != run]
            ends += self._count(touched, +1, position, position)
            self._save({run, *ends})
            gone.append((run, index))
            stack += self.useless(self.rules.graph.nodes[index].inputs, position)
        self.gone = gone
        return [index for _, index in gone]

    def restore(self, gone: Sequence[tuple[int, int]]) -> None:
        """Undoes `remove`, if nothing else was changed since.

        Args:
            gone: the removed runs and their nodes: `self.gone` after `remove`.
        """
        for run, index in reversed(gone):
            touched = self.around[index]
            position = self.places[run]
            ends = self._count(touched, -1, position, position)
            self.node[run] = index
            self._enter(run, index)
            self.profile[position] += self.own[run]
            ends += self._count(touched, +1, position, position)
            self._save({run, *ends})

    def useless(self, values: Iterable[int], position: int) -> list[int]:
        """Returns the last runs before `position` that make `values`, if nothing reads their outputs."""
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

    def _has_use(self, run: int, index: int) -> bool:
        node = self.rules.graph.nodes[index]
        first = self.runs[index][0] == run
        if first and (node.once or node.random or node.writes):
            return True
        for value in node.outputs:
            if value in self.rules.permanent:
                if first:
                    return True
                continue
            if self.is_read_after(value, self.places[run]):
                return True
        return False

    def crosses_boundary(self, value: int) -> bool:
        """Whether a copy of `value` lives from the forward pass into the backward pass."""
        return any(first < self.split <= last for first, last in self.lives(value))
