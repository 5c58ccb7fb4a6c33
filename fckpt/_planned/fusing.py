"""Compiled kernels for a plan: blocks within its budget, and one more solution with the prices of blocks.

A solver knows the time that each operation takes alone. In a block, an operation takes less time, and recomputing it
directly before its use may be free. So the graph is planned once more with the times that operations take in blocks:
the plan of `auto` is adapted to them, as to other sizes, and other solvers solve again. The second plan is used if its
steps take less time in total.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable

from fckpt._fuse.option import Kernels
from fckpt._planned.families import settled
from fckpt._planned.making import make_plan
from fckpt._planned.plan import Plan
from fckpt._trace.operations import Trace
from fckpt.errors import FckptError
from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Compute, FusedBlock, FusedSchedule, Schedule
from fckpt.solve._adapt import adapt

__all__ = ["with_blocks"]

_Fuse = Callable[[Schedule], FusedSchedule | None]
_GAIN = 0.02
"""The share of its time that another schedule must save by the prices of blocks before its kernels are compiled."""


def with_blocks(trace: Trace, plan: Plan, kernels: Kernels, within: int | None) -> Plan:
    """Returns a plan with compiled blocks, if there are any that are faster than their operations.

    Args:
        trace: the trace, cut into the tiles of the plan.
        plan: the plan.
        kernels: "exact" or "fused".
        within: a budget in bytes, within which another schedule may be solved for; None to keep the schedule of the
            plan, and to hold blocks to the peak that the plan states.
    """
    from fckpt._fuse.blocks import fused  # compiles, and imports what that needs

    limit = plan.peak_bytes if within is None else within
    fuse = lambda schedule: fused(trace, plan.graph, schedule, limit, kernels)
    found = dataclasses.replace(plan, fused=fuse(plan.schedule), kernels=kernels)
    return found if found.fused is None or within is None else _planned_again(found, within, fuse)


def _planned_again(plan: Plan, nbytes: int, fuse: _Fuse) -> Plan:
    """Returns the plan that is made with the prices of blocks, or the plan itself if its blocks are faster."""
    assert plan.fused is not None
    if plan.timeline.recomputed_nodes == 0:
        return plan
    cheaper = _with_block_prices(plan.graph, plan.fused)
    found: Plan | None = None
    if plan.solver == "auto":
        found = settled(cheaper, nbytes, functools.partial(adapt, known=[plan.schedule]))
    else:
        with contextlib.suppress(FckptError):  # a plan from a file may name a solver of the user
            found = make_plan(cheaper, nbytes, plan.solver, plan.torch_version)
    alone = lambda schedule: sum(cheaper.nodes[s.node].seconds for s in _computed(schedule))
    if found is None or alone(found.schedule) > (1 - _GAIN) * alone(plan.schedule):
        return plan
    other = dataclasses.replace(plan, schedule=found.schedule, fused=fuse(found.schedule))
    faster = other.fused is not None and _seconds(other.graph, other.fused) < _seconds(plan.graph, plan.fused)
    return other if faster and other.peak_bytes <= nbytes else plan


def _computed(schedule: Schedule | FusedSchedule) -> list[Compute]:
    return [step for step in (*schedule.forward, *schedule.backward) if isinstance(step, Compute)]


def _blocks(schedule: FusedSchedule) -> list[FusedBlock]:
    return [step for step in (*schedule.forward, *schedule.backward) if isinstance(step, FusedBlock)]


def _with_block_prices(graph: Graph, schedule: FusedSchedule) -> Graph:
    """Returns the graph with the times that operations take in blocks; the latest block of an operation counts.

    In the schedule of a pass, that is the recomputation, whose price the solver asks for.
    """
    shares: dict[int, float] = {}
    for block in _blocks(schedule):
        shares.update((n, block.kernel.share) for n in block.nodes)
    nodes = [dataclasses.replace(n, seconds=n.seconds * shares.get(n.id, 1.0)) for n in graph.nodes]
    return graph.with_costs(nodes, graph.values)


def _seconds(graph: Graph, schedule: FusedSchedule) -> float:
    """Returns the time of all steps, counting a block as its compiled kernel."""
    alone = sum(graph.nodes[s.node].seconds for s in _computed(schedule))
    return alone + sum(graph.nodes[n].seconds * b.kernel.share for b in _blocks(schedule) for n in b.nodes)
