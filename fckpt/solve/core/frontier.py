"""Stages of the exact programs: one stage per node, which ends with the node's first run.

P. Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020,
https://arxiv.org/abs/1910.02653, "frontier-advancing stages": the order of first runs is given. Stage t ends with the
t-th first run; before it, earlier nodes may run again within the stage, in the same order, each at most once per stage.
A plan is therefore determined by which nodes run in which stage, or by which values are held between stages. Plans with
another order of first runs, and plans that run a node twice within one stage, are not covered.

A stage belongs to the pass of its first run. A recomputation before the first node of the backward pass is part of the
backward pass, in which the cotangents are present.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fckpt.solve.core.rules import Order, Rules, ancestors
from fckpt.solve.core.starts import save_everything

__all__ = ["Frontier"]


class Frontier:
    """The stages of one graph. The *position* of a node is the number of the stage that ends with it."""

    def __init__(self, rules: Rules):
        graph, plain = rules.graph, save_everything(rules)
        self.rules = rules
        self.sequence = list(dict.fromkeys((*plain.forward, *plain.backward)))
        """By position: the node with which the stage ends."""
        self.split = len(plain.forward)
        """The first stage of the backward pass."""
        self.position = {index: t for t, index in enumerate(self.sequence)}
        made = {v for index in self.sequence for v in graph.nodes[index].outputs}
        self.choices = sorted(
            v for v in made if v not in rules.permanent and (graph.values[v].nbytes or v in rules.unsaved)
        )
        """Values that may be freed and made again. Other values stay once they are made: they must stay, or take no
        bytes."""
        self.reads: dict[int, list[int]] = {v: [] for v in self.choices}
        """By choice: the positions of the nodes that read it."""
        for t, index in enumerate(self.sequence):
            for value in graph.nodes[index].inputs:
                if value in self.reads:
                    self.reads[value].append(t)
        self.last = list(range(len(self.sequence)))
        """By position: the last stage in which a run of the node can be useful."""
        for t in range(len(self.sequence) - 1, -1, -1):
            for value in graph.nodes[self.sequence[t]].outputs:
                for reader in self.reads.get(value, ()):
                    self.last[t] = max(self.last[t], self.last[reader])
        self.standing = self._standing()
        """By stage: the bytes that are held whatever the plan, without the outputs of the stage's own node."""

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
        """Returns the position of the node that makes `value`, which is one of the choices."""
        producer = self.rules.graph.values[value].producer
        assert producer is not None
        return self.position[producer]

    def may_hold(self, value: int, stage: int) -> bool:
        """Returns whether holding `value` from stage `stage - 1` into `stage` is allowed and can be useful."""
        barred = stage == self.split and value in self.rules.unsaved
        until = max((self.last[t] for t in self.reads[value]), default=-1)
        return self.made(value) < stage <= until and not barred

    def may_recompute(self, position: int, stage: int) -> bool:
        """Returns whether running the node at `position` again in `stage` is allowed and can be useful."""
        return position < stage <= self.last[position] and not self.rules.pinned[self.sequence[position]]

    def takes(self, position: int) -> int:
        """Returns the bytes that the node at `position` allocates: outputs or second copies of them, temporaries."""
        node = self.rules.graph.nodes[self.sequence[position]]
        return node.temporary_nbytes + sum(self.rules.graph.values[v].nbytes for v in node.outputs)

    def size(self) -> int:
        """Returns about how many variables a program has that decides, by stage, what runs and what is held."""
        reads = [len(v) for v in self.rules.graph.consumers]
        steps = [
            1 + sum(1 + reads[v] for v in self.rules.graph.nodes[i].outputs if v in self.reads) for i in self.sequence
        ]
        return sum(n * (last - t + 1) for t, (n, last) in enumerate(zip(steps, self.last, strict=True)))

    def order(self, again: Sequence[Collection[int]]) -> Order:
        """Returns the order that runs the positions `again`, given by stage, each before the stage's own node."""
        order = Order([], [])
        for t, positions in enumerate(again):
            order[t >= self.split].extend(self.sequence[k] for k in (*sorted(positions), t))
        return order

    def holding(self, held: Sequence[Collection[int]]) -> Order:
        """Returns the order that holds the values in `held` and, among all such orders, recomputes least.

        This is the paper's closed form for R, given S. A value that is to be held at the end of a stage and was not
        held at its start is made in the stage, and so is everything missing for such a value and for the stage's own
        node. Outputs of pinned nodes are held as long as they are useful.

        Args:
            held: by stage: the choices that are held at its end.
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
