"""Blocks: runs of consecutive computations of a schedule that become compiled kernels, without a higher peak.

A group is a run of consecutive computations that a kernel may contain. Within a group, operations that read one
another's results, or the same tensor, form a block; blocks run one after the other. Values that are made and freed
within the group have no memory. But values that the group frees are held until their block has run, and all results of
a block exist at once. If that would lift the peak above the limit, the group is split into two. The simulator computes
the peak from the memory that each kernel needed in its trial.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fckpt._call.levels import below_autograd
from fckpt._fuse.data import forget
from fckpt._fuse.kernel import Kernel
from fckpt._fuse.operations import fusible
from fckpt._fuse.option import Kernels
from fckpt._fuse.trial import Compiled, compile_ahead, guarded, tried
from fckpt._trace.in_place import out_of_place
from fckpt._trace.operations import Call, Trace, is_dense, tensors_of
from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Compute, Free, FusedBlock, FusedSchedule, FusedStep, Schedule, Step, with_freed
from fckpt.graph.simulation import simulate

__all__ = ["Runnable", "fused"]


@dataclass(frozen=True)
class Runnable:
    """A compiled kernel with the tensors of a trace that it reads and makes."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    run: Callable[[list[Any]], Sequence[Any]]
    """Runs the compiled kernel or, for tensors with other strides than in the trace, its operations one by one."""
    share: float = 1.0
    """The time of the compiled kernel as a fraction of the time of its operations, as measured in one trial."""


class _Member(NamedTuple):
    """A computation of a group, and what the schedule frees directly after it."""

    node: int
    freed: tuple[int, ...]


class _Group(NamedTuple):
    """A run of consecutive computations that a kernel may contain."""

    members: tuple[_Member, ...]


_Item = Step | _Group
_Try = Callable[[Kernel], Compiled | None]


def fused(trace: Trace, graph: Graph, schedule: Schedule, limit: int, kernels: Kernels) -> FusedSchedule | None:
    """Returns a schedule with compiled blocks, or None if there is nothing to compile.

    Args:
        trace: the trace.
        graph: its graph.
        schedule: the schedule.
        limit: the most bytes that a block may need, with everything that is live.
        kernels: "exact" for kernels that give the bits of torch's, "fused" for any.
    """
    blocks = _Blocks(trace, graph, exact=kernels == "exact")
    passes = [blocks.groups(schedule.forward), blocks.groups(schedule.backward)]
    passes = blocks.fitting(passes, limit, _unmeasured)  # so that nothing is compiled for nothing
    try:
        passes = blocks.fitting(passes, limit, tried)
    finally:
        forget()
    steps = [blocks.steps(items, tried) for items in passes]
    if not any(isinstance(step, FusedBlock) for half in steps for step in half):
        return None
    return FusedSchedule(tuple(steps[0]), tuple(steps[1]))


def _unmeasured(kernel: Kernel) -> Compiled:
    """Returns what a kernel will presumably need: it writes over every input that dies, and has no temporaries."""
    left, over = list(kernel.donated), []
    for i, t in enumerate(kernel.outputs):
        nbytes = _nbytes(kernel, t)
        j = next((j for j in left if _nbytes(kernel, kernel.inputs[j]) == nbytes), None)
        if j is not None:
            left.remove(j)
            over.append((i, j))
    return Compiled(kernel.run, tuple(over), 0, 1.0)


def _nbytes(kernel: Kernel, tensor: int) -> int:
    return kernel.specs[tensor].nbytes


class _Blocks:
    """Finder of the blocks of one trace."""

    def __init__(self, trace: Trace, graph: Graph, *, exact: bool):
        self.trace, self.graph, self.exact = trace, graph, exact
        self.producers = trace.producers()
        calls: dict[int, list[Call]] = {}
        for call in trace.calls:
            if call.node is not None:
                calls.setdefault(call.node, []).append(call)
        with below_autograd():
            self.calls = {
                node: (out_of_place(found[0], trace.tensors) if found[0].replaced else None) or found[0]
                for node, found in calls.items()
                if len(found) == 1
            }
        self.fusible = {node for node in self.calls if self._is_fusible(node)}
        self.live: set[int] = set(graph.inputs) | set(graph.cotangents)

    def _is_fusible(self, node: int) -> bool:
        call = self.calls[node]
        values = [self.trace.tensors[t].value for t in call.outputs if t is not None]
        own = len(set(values)) == len(values) and set(values) == set(self.graph.nodes[node].outputs)
        return own and fusible(self.graph.nodes[node], call, self.trace.tensors, exact=self.exact)

    # -- groups

    def groups(self, steps: Sequence[Step]) -> list[_Item]:
        """Returns the steps, with groups in place of runs of computations that a kernel may contain.

        The steps of the forward pass come first, then those of the backward pass.
        """
        found: list[_Item] = []
        group: list[_Member] = []
        touched: set[int] = set()
        for step, freed in with_freed(steps):
            if isinstance(step, Free):
                if not group:
                    found.append(step)
                self.live.discard(step.value)
                continue
            node = self.graph.nodes[step.node]
            if group and (step.node not in self.fusible or not touched.isdisjoint(node.outputs)):
                found.append(_Group(tuple(group)))
                group, touched = [], set()
            if step.node in self.fusible and self.live.isdisjoint(node.outputs):
                group.append(_Member(step.node, tuple(sorted(freed))))
                touched.update(node.inputs, node.outputs, freed)
            else:
                found += [_Group(tuple(group))] if group else []
                group, touched = [], set()
                found.append(step)
            self.live.update(node.outputs)
        return [*found, _Group(tuple(group))] if group else found

    def fitting(self, passes: list[list[_Item]], limit: int, attempt: _Try) -> list[list[_Item]]:
        """Returns the passes with groups split until no block needs more than the limit."""
        while True:
            if attempt is tried:
                compile_ahead(self.kernels(passes))
            steps = [[self.arranged(item, attempt) for item in items] for items in passes]
            flat = [[step for part in half for step in part] for half in steps]
            profile = iter(simulate(self.graph, FusedSchedule(tuple(flat[0]), tuple(flat[1]))).live_nbytes)
            split: list[list[_Item]] = []
            changed = False
            for items, parts in zip(passes, steps, strict=True):
                half: list[_Item] = []
                for item, part in zip(items, parts, strict=True):
                    most = max((next(profile) for _ in part), default=0)
                    if isinstance(item, _Group) and len(item.members) > 1 and most > limit:
                        middle, changed = len(item.members) // 2, True
                        half += [_Group(item.members[:middle]), _Group(item.members[middle:])]
                    else:
                        half.append(item)
                split.append(half)
            passes = split
            if not changed:
                return passes

    def kernels(self, passes: Iterable[Iterable[_Item]]) -> list[Kernel]:
        """Returns the kernels of all groups."""
        found: list[Kernel] = []
        for item in itertools.chain(*passes):
            self.arranged(item, found.append)  # returns None: no kernel is used
        return found

    def steps(self, items: Iterable[_Item], attempt: _Try) -> list[FusedStep]:
        """Returns the steps of a pass."""
        return [step for item in items for step in self.arranged(item, attempt)]

    # -- one group

    def arranged(self, item: _Item, attempt: _Try) -> list[FusedStep]:
        """Returns the steps of a group: blocks where kernels are used, single computations elsewhere."""
        if not isinstance(item, _Group):
            return [item]
        group = item.members
        freed = {v for member in group for v in member.freed}
        units: list[tuple[tuple[_Member, ...], FusedBlock | None]] = []
        for unit in self.units(group):
            block = self.block(unit, freed, group, attempt) if len(unit) > 1 else None
            units += [(unit, block)] if block is not None else [((m,), None) for m in unit]
        if not any(block for _, block in units):
            return [s for m in group for s in (Compute(m.node), *map(Free, m.freed))]
        order = {member.node: i for i, member in enumerate(group)}
        units.sort(key=lambda u: order[u[0][0].node])
        last = {v: i for i, (unit, _) in enumerate(units) for m in unit for v in self.touched(m.node)}
        hidden = {v for unit, block in units if block for m in unit for v in self.graph.nodes[m.node].outputs} - {
            v for _, block in units if block for v in block.makes
        }
        steps: list[FusedStep] = [Free(v) for v in freed if v not in last]
        for i, (unit, block) in enumerate(units):
            steps.append(Compute(unit[0].node) if block is None else block)
            dying = dict.fromkeys(v for m in unit for v in (*self.touched(m.node), *m.freed))
            steps += [Free(v) for v in dying if v in freed and last.get(v) == i and v not in hidden]
        return steps

    def touched(self, node: int) -> tuple[int, ...]:
        return (*self.graph.nodes[node].inputs, *self.graph.nodes[node].outputs)

    def units(self, group: Sequence[_Member]) -> list[tuple[_Member, ...]]:
        """Returns the connected parts of a group: operations with an edge between them, or with a common operand."""
        parent = list(range(len(group)))

        def root(i: int) -> int:
            while parent[i] != i:
                parent[i] = parent[parent[i]]
                i = parent[i]
            return i

        seen: dict[Any, int] = {}
        for i, member in enumerate(group):
            node = self.graph.nodes[member.node]
            size = self.size(member.node)
            for value in node.inputs:
                for key in (value, (value, size)):  # made here; or read here by an operation of the same size
                    if key in seen:
                        parent[root(i)] = root(seen[key])
                seen.setdefault((value, size), i)
            seen.update(dict.fromkeys(node.outputs, i))
        found: dict[int, list[_Member]] = {}
        for i, member in enumerate(group):
            found.setdefault(root(i), []).append(member)
        return [tuple(unit) for unit in found.values()]

    def size(self, node: int) -> int:
        made = next(t for t in self.calls[node].outputs if t is not None)
        return math.prod(self.trace.tensors[made].shape)

    def block(
        self, unit: tuple[_Member, ...], freed: set[int], group: Sequence[_Member], attempt: _Try
    ) -> FusedBlock | None:
        """Returns the block of a unit of a group that frees these values; None if its kernel is not used."""
        nodes = [m.node for m in unit]
        others = [m.node for m in group if m.node not in set(nodes)]
        elsewhere = {v for node in others for v in self.touched(node)}
        calls, inputs = self.body(nodes)
        tensors = self.trace.tensors
        outputs = [t for n in nodes for t in self.calls[n].outputs if t is not None and tensors[t].value not in freed]
        if not outputs:
            return None
        of_value: dict[int, list[int]] = {}
        for t in inputs:
            of_value.setdefault(tensors[t].value, []).append(t)
        dying = freed.difference(elsewhere, self.graph.held, self.graph.outputs, self.graph.gradients)
        donated = [of_value[v][0] for v in dying if len(of_value.get(v, ())) == 1 and self.is_whole(of_value[v][0])]
        over = self.overwritten(unit, calls)
        kernel = Kernel.numbered(calls, tensors, inputs, outputs, donated, over, exact=self.exact)
        made = attempt(kernel)
        if made is None:
            return None
        run = Runnable(tuple(inputs), tuple(outputs), guarded(kernel, made.run), made.share)
        over_values = tuple(tensors[inputs[j]].value for _, j in made.over)
        return FusedBlock(
            tuple(nodes), tuple(tensors[t].value for t in outputs), over_values, made.temporary_nbytes, run
        )

    def body(self, nodes: Sequence[int]) -> tuple[list[Call], list[int]]:
        """Returns the calls of nodes, with the views of their results that they read, and the other tensors read."""
        calls: list[Call] = []
        inputs: list[int] = []
        known: set[int] = set()
        made = {v for node in nodes for v in self.graph.nodes[node].outputs}

        def need(tensor: int) -> None:
            if tensor in known:
                return
            call = self.producers.get(tensor)
            if call is not None and call.node is None and self.trace.tensors[tensor].value in made:
                for t in tensors_of(call):
                    need(t)
                calls.append(call)
                known.update(t for t in call.outputs if t is not None)
            else:
                inputs.append(tensor)
                known.add(tensor)

        for node in nodes:
            call = self.calls[node]
            for t in tensors_of(call):
                need(t)
            calls.append(call)
            known.update(t for t in call.outputs if t is not None)
        return calls, inputs

    def overwritten(self, unit: tuple[_Member, ...], calls: Sequence[Call]) -> list[int | None]:
        """Returns, by call, the tensor that the schedule without blocks writes the result over."""
        freed = {m.node: m.freed for m in unit}
        found: list[int | None] = []
        for call in calls:
            over = None if call.node is None else self.graph.nodes[call.node].overwritten(freed[call.node])
            refs = [t for t in tensors_of(call) if over is not None and self.trace.tensors[t].value == over]
            found.append(refs[0] if refs else None)
        return found

    def is_whole(self, tensor: int) -> bool:
        """Whether a tensor fills its storage."""
        spec = self.trace.tensors[tensor]
        whole = self.graph.values[spec.value].nbytes == spec.nbytes
        return spec.offset == 0 and is_dense(spec.shape, spec.stride) and whole
