"""A joint graph in the order of a schedule, and its two halves.

A schedule may compute an operation several times. So the joint graph is rewritten with one copy of the operation for
each run, and torch then extracts the forward half and the backward half from it. Inductor does not merge the copies: it
combines equal operations only before the partition.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx
from torch._functorch.partitioners import _extract_fwd_bwd_modules

from fckpt._compile.joint import Joint, is_late_write, is_random, mutates
from fckpt.graph.schedule import Compute, Free, Schedule, Step

__all__ = ["halves"]


def halves(
    module: fx.GraphModule, joint: Joint, schedule: Schedule, num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Returns the forward and the backward half of a joint graph, in the order of a schedule.

    Args:
        module: the joint graph. Its graph is replaced.
        joint: the fckpt graph of the joint graph.
        schedule: a schedule of that graph.
        num_fwd_outputs: the number of results of the forward pass.
    """
    writing = _Writing(module.graph, joint, num_fwd_outputs)
    module.graph = writing.written(schedule)
    module.recompile()
    return _extract_fwd_bwd_modules(
        module, writing.saved, saved_sym_nodes=writing.numbers, num_fwd_outputs=num_fwd_outputs
    )


class _Writing:
    """The new joint graph while it is written."""

    def __init__(self, old: fx.Graph, joint: Joint, num_fwd_outputs: int):
        self.old = old
        self.joint = joint
        self.count = num_fwd_outputs
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        """By operation of the old graph: its newest copy."""
        self.derived: dict[fx.Node, list[fx.Node]] = {}
        """By operation of the old graph: copied operations that read it."""
        self.owned = {m for members in joint.members for m in members}
        self.saved: list[fx.Node] = []
        self.numbers: list[fx.Node] = []

    def written(self, schedule: Schedule) -> fx.Graph:
        """Returns the new graph; the values that the backward half may read are in `saved` and `numbers`."""
        for node in self.old.nodes:
            if node.op == "placeholder":
                self.copied(node)
        output = next(n for n in self.old.nodes if n.op == "output")
        results = list(output.args[0])
        self.steps(schedule.forward)
        self.effects(late=False)
        forward = fx.map_arg(results[: self.count], self.copied)
        self.numbers = [self.copied(n) for n in self.joint.sizes]
        self.saved = [self.copies[n] for n in self.joint.tensors if n in self.copies and n not in self.joint.cotangents]
        self.steps(schedule.backward)
        self.effects(late=True)
        self.graph.output((*forward, *fx.map_arg(results[self.count :], self.copied))).meta = output.meta
        self.graph.lint()
        return self.graph

    def steps(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, Compute):
                self.compute(step.node)
            elif isinstance(step, Free):
                self.forget(self.joint.tensors[step.value])

    def effects(self, late: bool) -> None:
        """Copies writes to inputs, and operations without a result, which are at the end of each pass."""
        for node in self.old.nodes:
            idle = node.op == "call_function" and not node.users and node not in self.owned
            if (idle or mutates(node)) and is_late_write(node, self.joint) == late:
                self.copied(node)

    def compute(self, index: int) -> None:
        """Copies the operations of a node, unless all of its results are there."""
        made = [self.joint.tensors[v] for v in self.joint.graph.nodes[index].outputs]
        if made and all(n in self.copies for n in made):
            return
        for member in self.joint.members[index]:
            self.forget(member)
        for member in self.joint.members[index]:
            self.copied(member)

    def forget(self, node: fx.Node) -> None:
        """Forgets a value and its views, so that later readers read the next copy."""
        self.copies.pop(node, None)
        for reader in self.derived.pop(node, ()):
            if reader not in self.owned:
                self.forget(reader)

    def copied(self, node: fx.Node) -> fx.Node:
        """Returns the newest copy of an operation, and makes one if there is none."""
        found = self.copies.get(node)
        if found is not None:
            return found
        for given in node.all_input_nodes:
            self.copied(given)
        copy = self.copies[node] = self.graph.node_copy(node, lambda n: self.copies[n])
        copy.meta = dict(node.meta)
        if is_random(node) and node not in self.joint.late:  # or torch draws in the backward half too, for nobody
            copy.meta["partitioner_tag"] = "must_be_in_forward"
        for given in node.all_input_nodes:
            self.derived.setdefault(given, []).append(node)
        return copy
