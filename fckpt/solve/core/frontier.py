"""The timeline that the exact programs share: a stage per node, in which it runs for the first time.

P. Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020,
https://arxiv.org/abs/1910.02653, "frontier-advancing stages": the order in which nodes run for the first time is
given. Stage t ends with the t-th of them; before it, in the same order, any earlier nodes may run again, each
at most once per stage. So the whole plan is said by which nodes run in which stage, or by what is held between stages.
What this leaves out is other orders, and to run a node twice within one stage.

Stages belong to the pass of their first run: what runs again before the first node of the backward pass does so in the
backward pass, cotangents being there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fckpt.solve.core.rules import Order, Rules, ancestors
from fckpt.solve.core.starts import save_everything

__all__ = ["Frontier"]


class Frontier:
    """The stages of one graph. A node's *position* is the number of the stage that it ends."""

    def __init__(self, rules: Rules):
        graph, plain = rules.graph, save_everything(rules)
        self.rules = rules
        self.sequence = list(dict.fromkeys((*plain.forward, *plain.backward)))
        """By position: the node that the stage ends with."""
        self.split = len(plain.forward)
        """The first stage of the backward pass."""
        self.position = {index: t for t, index in enumerate(self.sequence)}
        made = {v for index in self.sequence for v in graph.nodes[index].outputs}
        self.choices = sorted(
            v for v in made if v not in rules.permanent and (graph.values[v].nbytes or v in rules.unsaved)
        )
        """Values that may be let go and made again. Others stay once they are made: they must, or take no bytes."""
        self.reads: dict[int, list[int]] = {v: [] for v in self.choices}
        """By choice: the positions of the nodes that read it."""
        for t, index in enumerate(self.sequence):
            for value in graph.nodes[index].inputs:
                if value in self.reads:
                    self.reads[value].append(t)
        self.last = list(range(len(self.sequence)))
        """By position: the last stage that the node may be of use to."""
        for t in range(len(self.sequence) - 1, -1, -1):
            for value in graph.nodes[self.sequence[t]].outputs:
                for reader in self.reads.get(value, ()):
                    self.last[t] = max(self.last[t], self.last[reader])
        self.standing = self._standing()
        """By stage: the bytes that are there whatever is held, but for what its own node makes."""

    def _standing(self) -> list[int]:
        graph, held = self.rules.graph, 0
        found = []
        for t, index in enumerate(self.sequence):
            if t == self.split:
                held += sum(graph.values[v].nbytes for v in graph.cotangents)
            found.append(held)
            held += sum(graph.values[v].nbytes for v in graph.nodes[index].outputs if v in self.rules.permanent)
        return found

    def made(self, value: int) -> int:
        """Returns the position of the node that makes `value`, one of the choices."""
        producer = self.rules.graph.values[value].producer
        assert producer is not None
        return self.position[producer]

    def may_hold(self, value: int, stage: int) -> bool:
        """Whether `value` may be held, to some end, from the end of the stage before `stage` into it."""
        barred = stage == self.split and value in self.rules.unsaved
        until = max((self.last[t] for t in self.reads[value]), default=-1)
        return self.made(value) < stage <= until and not barred

    def may_repeat(self, position: int, stage: int) -> bool:
        """Whether the node at `position` may run again, to some end, in `stage`."""
        return position < stage <= self.last[position] and not self.rules.pinned[self.sequence[position]]

    def takes(self, position: int) -> int:
        """Returns the bytes that the node at `position` allocates: results, or second copies of them, temporaries."""
        node = self.rules.graph.nodes[self.sequence[position]]
        return node.temporary_nbytes + sum(self.rules.graph.values[v].nbytes for v in node.outputs)

    def size(self) -> int:
        """Returns about how many variables a program has that says for each stage what runs and what is held when."""
        reads = [len(v) for v in self.rules.graph.consumers]
        steps = [
            1 + sum(1 + reads[v] for v in self.rules.graph.nodes[i].outputs if v in self.reads) for i in self.sequence
        ]
        return sum(n * (last - t + 1) for t, (n, last) in enumerate(zip(steps, self.last, strict=True)))

    def order(self, again: Sequence[Collection[int]]) -> Order:
        """Returns the plan that runs the positions `again`, by stage, each before the stage's own node."""
        order = Order([], [])
        for t, positions in enumerate(again):
            order[t >= self.split].extend(self.sequence[k] for k in (*sorted(positions), t))
        return order

    def holding(self, held: Sequence[Collection[int]]) -> Order:
        """Returns the plan that holds what `held` says, and of all such plans repeats the least.

        Args:
            held: by stage: the choices that are held at its end.

        This is the paper's closed form for R when S is given: what is to be held at the end of a stage and was not at
        its start is made in it, and so is all that is missing for that and for the stage's own node. What pinned nodes
        make is held as long as it is of use.
        """
        graph, again = self.rules.graph, []
        live: set[int] = set()
        stays: set[int] = set()
        for t, index in enumerate(self.sequence):
            fresh = {self.made(v) for v in held[t] if v not in live and v not in stays and self.made(v) < t}
            needed = ancestors(graph, [index, *(self.sequence[k] for k in fresh)], live | stays)
            again.append({self.position[i] for i in needed if i != index})
            pinned = self.rules.pinned[index]
            stays.update(v for v in graph.nodes[index].outputs if pinned or v not in self.reads)
            live = set(held[t])
        return self.order(again)
