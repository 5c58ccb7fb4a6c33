"""The simulator of schedules: the bytes that are live at every step, and what is recomputed.

While a node runs, everything that was live before, its outputs and its temporaries are held; an output that overwrites
an input needs no additional memory. The simulated peak is therefore the allocator's peak, as far as the graph's sizes
are exact. The simulator trusts no solver: it checks every step.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fckpt.errors import ScheduleError
from fckpt.graph.graph import Graph, Node
from fckpt.graph.schedule import Compute, FusedBlock, FusedSchedule, FusedStep, Schedule, with_freed

__all__ = ["Timeline", "simulate"]


@dataclass(frozen=True)
class Timeline:
    """Memory and time of a schedule, as simulated."""

    live_nbytes: tuple[int, ...]
    """By step, forward then backward: the bytes held while the step runs (for a `Free`: after it)."""
    peak_nbytes: int
    peak_step: int
    forward_nbytes: int
    """The bytes held between the passes, including outputs."""
    seconds: float
    """The time of all computations."""
    recomputed_seconds: float
    """The part of `seconds` spent on nodes that had been computed before."""
    recomputed_nodes: int
    """The number of recomputations."""
    recomputed_steps: tuple[int, ...] = ()
    """The steps that recompute a node, as positions in `live_nbytes`."""

    @property
    def overhead(self) -> float:
        """The time of recomputations as a fraction of all other computation time."""
        rest = self.seconds - self.recomputed_seconds
        return self.recomputed_seconds / rest if rest else 0.0


def simulate(graph: Graph, schedule: Schedule | FusedSchedule) -> Timeline:
    """Simulates `schedule` on `graph`, without running anything. A block takes the time of its nodes.

    Raises:
        ScheduleError: a step reads or frees a value that is not live, or runs a backward node in the forward pass;
            random nodes run for the first time out of order; a node that must run once does not; a step reads a value
            after a node has written over it; an output is freed, or missing at the end of its pass.
    """
    run = _Run(graph)
    for step, freed in with_freed(schedule.forward):
        run.step(step, freed, backward=False)
    run.end_of_forward()
    forward_nbytes = run.held_nbytes
    run.held_nbytes += sum(graph.values[v].nbytes for v in graph.cotangents)
    run.live.update(graph.cotangents)
    for step, freed in with_freed(schedule.backward):
        run.step(step, freed, backward=True)
    run.end()
    profile = run.profile or [0]
    peak = max(profile)
    return Timeline(
        live_nbytes=tuple(profile),
        peak_nbytes=peak,
        peak_step=profile.index(peak),
        forward_nbytes=forward_nbytes,
        seconds=run.seconds,
        recomputed_seconds=run.recomputed_seconds,
        recomputed_nodes=len(run.recomputed_steps),
        recomputed_steps=tuple(run.recomputed_steps),
    )


class _Run:
    """The state of a simulation between two steps."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.live = set(graph.inputs)
        self.made = set(graph.inputs)
        self.held_nbytes = 0
        self.overwritten: set[int] = set()
        """Values that are about to be freed and whose bytes already belong to another value."""
        self.profile: list[int] = []
        self.counts = [0] * len(graph.nodes)
        self.last_random = -1
        self.seconds = 0.0
        self.recomputed_seconds = 0.0
        self.recomputed_steps: list[int] = []
        self.permanent = graph.held.union(graph.outputs, graph.gradients)
        self.gone: dict[int, int] = {}
        """By value that a node has overwritten for good: that node."""

    def step(self, step: FusedStep, freed: Collection[int], *, backward: bool) -> None:
        if isinstance(step, Compute):
            self.compute(step.node, freed, backward)
        elif isinstance(step, FusedBlock):
            self.block(step, freed, backward)
        else:
            self.free(step.value)

    def compute(self, index: int, freed: Collection[int], backward: bool) -> None:
        graph = self.graph
        if not 0 <= index < len(graph.nodes):
            raise ScheduleError(f"step {len(self.profile)} computes node {index} of {len(graph.nodes)}.")
        node, again = graph.nodes[index], self.counts[index] > 0
        writes = () if again else node.writes
        self.check(node, writes, backward)
        if writes:
            self.live.difference_update(writes)
            self.gone.update(dict.fromkeys(writes, index))
        new = [v for v in node.outputs if v not in self.live and v not in self.gone]
        over = node.overwritten(freed) if new and node.overwrites else None
        if over is not None:  # its bytes now belong to the output
            self.held_nbytes -= graph.values[over].nbytes
            self.overwritten.add(over)
        made = sum([graph.values[v].nbytes for v in node.outputs])
        temporary = max(node.temporary_nbytes, node.replayed_nbytes) if again else node.temporary_nbytes
        self.profile.append(self.held_nbytes + made + temporary)
        self.held_nbytes += made if len(new) == len(node.outputs) else sum([graph.values[v].nbytes for v in new])
        self.live.update(new)
        self.made.update(new)
        self.count(index, backward)

    def check(self, node: Node, writes: Collection[int], backward: bool) -> None:
        """Raises an error if a node cannot run, because values are missing or the backward pass is to come.

        Args:
            node: the node.
            writes: the values that this run of the node writes over.
            backward: whether the backward pass has begun.
        """
        if self.live.issuperset(node.inputs) and not writes and (backward or not node.backward):
            return
        missing = [v for v in node.inputs if v not in self.live]
        missing += [v for v in writes if v in self.gone or v not in self.made]
        at = f"step {len(self.profile)} computes node {node.id} ({node.op})"
        if missing and missing[0] in self.gone:
            raise ScheduleError(f"{at}, but node {self.gone[missing[0]]} has written over value {missing[0]}.")
        if missing:
            raise ScheduleError(f"{at}, but value {missing[0]} is not live.")
        if node.backward and not backward:
            raise ScheduleError(f"{at} before the backward pass.")

    def block(self, block: FusedBlock, freed: Collection[int], backward: bool) -> None:
        at, inside = f"step {len(self.profile)} computes a block", set[int]()
        for index in block.nodes:
            node = self.graph.nodes[index]
            missing = [v for v in node.inputs if v not in inside and v not in self.live]
            if missing:
                raise ScheduleError(f"{at}, but value {missing[0]} is not live.")
            if node.backward and not backward:
                raise ScheduleError(f"{at} of node {index} ({node.op}) before the backward pass.")
            if node.once or node.random or node.writes:
                raise ScheduleError(f"{at} of node {index} ({node.op}), which must run alone.")
            inside.update(node.outputs)
        if not inside.issuperset(block.makes) or not self.live.union(self.gone).isdisjoint(block.makes):
            raise ScheduleError(f"{at} for values {block.makes}, which it does not make or which are live.")
        if not set(freed).difference(self.permanent).intersection(self.live).issuperset(block.overwrites):
            raise ScheduleError(f"{at} over values {block.overwrites}, which are not freed after it.")
        self.held_nbytes -= sum(self.graph.values[v].nbytes for v in block.overwrites)
        self.overwritten.update(block.overwrites)
        made = sum(self.graph.values[v].nbytes for v in block.makes)
        self.profile.append(self.held_nbytes + made + block.temporary_nbytes)
        self.held_nbytes += made
        self.live.update(block.makes)
        self.made.update(block.makes)
        for index in block.nodes:
            self.count(index, backward)

    def count(self, index: int, backward: bool) -> None:
        node = self.graph.nodes[index]
        self.seconds += node.seconds
        if self.counts[index]:
            if node.once or (node.writes and node.backward):
                raise ScheduleError(f"node {index} ({node.op}) runs twice, but must run once.")
            self.recomputed_seconds += node.seconds
            self.recomputed_steps.append(len(self.profile) - 1)
        elif node.random:
            if index < self.last_random:
                raise ScheduleError(f"random node {index} ({node.op}) runs after random node {self.last_random}.")
            if backward and index < self.graph.boundary:
                raise ScheduleError(f"random node {index} ({node.op}) of the forward pass first runs in backward.")
            self.last_random = index
        self.counts[index] += 1

    def free(self, value: int) -> None:
        if value in self.gone:  # its bytes were freed when it was overwritten
            self.profile.append(self.held_nbytes)
            return
        if value not in self.live:
            raise ScheduleError(f"step {len(self.profile)} frees value {value}, which is not live.")
        if value in self.permanent:
            raise ScheduleError(f"step {len(self.profile)} frees value {value}, which must stay to the end.")
        self.live.discard(value)
        if value in self.overwritten:
            self.overwritten.discard(value)
        else:
            self.held_nbytes -= self.graph.values[value].nbytes
        self.profile.append(self.held_nbytes)

    def end_of_forward(self) -> None:
        for value in self.graph.outputs:
            if value not in self.live:
                raise ScheduleError(f"the forward pass ends without the output {value}.")
        for node in self.graph.nodes:
            first = (node.writes and not node.backward) or (node.random and node.id < self.graph.boundary)
            if not self.counts[node.id] and (node.once or first):
                raise ScheduleError(f"node {node.id} ({node.op}) must run in the forward pass.")

    def end(self) -> None:
        for value in self.graph.gradients:
            if value not in self.live:
                raise ScheduleError(f"the backward pass ends without the gradient {value}.")
        for node in self.graph.nodes:
            if node.writes and not self.counts[node.id]:
                raise ScheduleError(f"node {node.id} ({node.op}) writes to memory of the caller, but does not run.")
