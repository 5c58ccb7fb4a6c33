"""Plans of graphs that write over their inputs: parameters that a step updates, donated arguments.

Solvers do not consider such writes. They get the graph without the rule that nothing may read a value after it was
overwritten, and schedule a write directly after the computation of what it writes, as in program order. `settled` then
moves the write behind the last computation that reads the old value, and `simulate` checks the schedule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from fckpt._planned.plan import Plan
from fckpt._planned.solving import solved
from fckpt._units import format_bytes
from fckpt.errors import BudgetError
from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Compute, Schedule, schedule_of
from fckpt.graph.simulation import simulate
from fckpt.solve._auto import orders_of
from fckpt.solve._greedy import fit, lowered
from fckpt.solve._known_orders import KnownOrders, remembering
from fckpt.solve.core.rules import Order, Rules, peak_of
from fckpt.solve.core.starts import backward_orders, save_everything
from fckpt.solve.repair.search import Search

__all__ = ["settled", "settled_within", "solved_with_writes", "without_recomputation", "writes_late"]

_STARTS = 12
_LOWERED = 12
"""The number of orders whose peaks are lowered to find the lowest one."""
_SEARCH_MOVES = 24_000
"""The moves that the search weighs for faster plans whose updates wait: about two seconds."""


def writes_late(graph: Graph) -> bool:
    """Whether a node of the backward half writes over an input."""
    return any(node.backward and node.writes for node in graph.nodes)


def settled(graph: Graph, schedule: Schedule) -> Schedule:
    """Returns a schedule in which each update runs after all computations that read the parameter, recomputes included.

    What reads the result of a computation that is moved is moved with it. Other computations keep their order.
    """
    order = [step.node for step in schedule.backward if isinstance(step, Compute)]
    last: dict[int, int] = {}
    for place, index in enumerate(order):
        last.update(dict.fromkeys(graph.nodes[index].inputs, place))
    placed: list[tuple[int, bool, int]] = []
    moved: dict[int, int] = {}  # by value whose producer is moved: the place behind which it runs
    for place, index in enumerate(order):
        node = graph.nodes[index]
        behind = [last[v] for v in node.writes] if node.backward else []
        target = max([place, *behind, *(moved[v] for v in node.inputs if v in moved)])
        if target > place:
            moved.update(dict.fromkeys(node.outputs, target))
        placed.append((target, target > place, index))  # behind the node at `target`
    forward = [step.node for step in schedule.forward if isinstance(step, Compute)]
    return schedule_of(graph, forward, [index for _, _, index in sorted(placed, key=lambda p: p[:2])])


def _relaxed(graph: Graph) -> Graph:
    """Returns the graph without the rule that nothing may read a parameter after its update.

    So that solvers, which may reorder the backward pass, still run an update after the other nodes of the backward pass
    that read the parameter, the update reads their results.
    """
    before: list[int] = []  # by node: the nodes on which it depends, as bits
    nodes = []
    for node in graph.nodes:
        needed = 0
        for producer in (graph.values[v].producer for v in node.inputs):
            needed |= 0 if producer is None else before[producer] | 1 << producer
        before.append(needed)
        if node.backward and node.writes:
            readers = [n for v in node.writes for n in graph.consumers[v] if graph.boundary <= n < node.id]
            others = [graph.nodes[n].outputs[0] for n in readers if not needed >> n & 1]
            node = dataclasses.replace(node, writes=(), inputs=tuple(dict.fromkeys((*node.inputs, *others))))
        nodes.append(node)
    return dataclasses.replace(graph, nodes=tuple(nodes))


def without_recomputation(graph: Graph) -> Schedule:
    """Returns the schedule with the lowest peak of a few that recompute nothing.

    All updates that could run earlier wait for a node of the backward pass, because the temporaries of an update may
    be larger than its gradient. Later updates run as early as they may.
    """
    rules = Rules(_relaxed(graph))
    updates = {node.id for node in graph.nodes if node.backward and node.writes}
    orders = [list(order) for order in backward_orders(rules)]
    found = []
    for order in orders:
        size = len(order)
        for start in dict.fromkeys(size * i // _STARTS for i in range(_STARTS + 1)):
            waiting = [i for i in order[:start] if i in updates]
            moved = [*[i for i in order[:start] if i not in updates], *waiting, *order[start:]]
            found.append(save_everything(rules, moved))
    return settled(graph, schedule_of(graph, *min(found, key=lambda order: peak_of(rules, order))))


def settled_within(graph: Graph, nbytes: int, find: Callable[[Graph, int], Schedule | None]) -> Schedule | None:
    """Returns a schedule within a budget in which each update runs after all computations that read the parameter.

    Args:
        graph: a graph with writes over inputs in its backward half.
        nbytes: the budget.
        find: returns a schedule of a graph without such writes within a budget, or None.
    """
    relaxed = _relaxed(graph)
    for size in (nbytes, *_smaller(nbytes)):
        found = find(relaxed, size)
        if found is None:
            return None
        schedule = settled(graph, found)
        if simulate(graph, schedule).peak_nbytes <= nbytes:
            return schedule
    return None


def _smaller(nbytes: int) -> tuple[int, ...]:
    """Returns smaller budgets to try, for plans whose peaks rise when updates wait."""
    return int(nbytes * 0.99), int(nbytes * 0.95)


@remembering()
def solved_with_writes(
    graph: Graph, nbytes: int, solver: str, torch_version: str, time_limit: float | None = None
) -> Plan:
    """Solves a priced graph with writes over inputs in its backward half.

    Args:
        graph: the graph.
        nbytes: the budget.
        solver: the name of a solver.
        torch_version: the version of torch, which the plan records.
        time_limit: see `solved`.

    Raises:
        BudgetError: no plan fits the budget. Its `least_bytes` do not depend on the budget.
    """
    relaxed = _relaxed(graph)
    solve = lambda nbytes: solved(relaxed, nbytes, solver, torch_version, time_limit)
    plan_of = lambda schedule: Plan(graph, schedule, solver, nbytes, torch_version)
    why: BudgetError | None = None
    try:
        for size in (nbytes, *_smaller(nbytes)):
            found = plan_of(settled(graph, solve(max(1, size)).schedule))
            if found.peak_bytes <= nbytes:
                return found
    except BudgetError as error:
        why = error
    if solver == "auto":
        found = plan_of(smallest_within(graph, relaxed, nbytes))
    else:
        found = plan_of(settled(graph, solve(_least_of(solve) if why is None else why.least_bytes).schedule))
    least = found.peak_bytes
    if least <= nbytes:
        return found
    if why is not None and least == why.least_bytes:
        raise why
    raise BudgetError(
        f"no plan fits {format_bytes(nbytes)} ({nbytes} bytes): the least that the solver {solver!r} finds is "
        f"{format_bytes(least)} ({least} bytes), because updates wait for recomputations that read the old values. "
        "Give at least that, or a smaller batch.",
        least,
    )


def _least_of(solve: Callable[[int], Plan]) -> int:
    """Returns the least budget for which a solver finds a plan."""
    try:
        return solve(1).peak_bytes
    except BudgetError as error:
        return error.least_bytes


# ---- the lowest peak -----------------------------------------------------------------------------


class _Settled(NamedTuple):
    """An order of computations in which no update is too early."""

    peak_nbytes: int
    order: Order
    schedule: Schedule


def _settled(graph: Graph, order: Order) -> _Settled:
    schedule = settled(graph, schedule_of(graph, *order))
    return _Settled(simulate(graph, schedule).peak_nbytes, _order_of(schedule), schedule)


def _order_of(schedule: Schedule) -> Order:
    forward, backward = ([s.node for s in p if isinstance(s, Compute)] for p in (schedule.forward, schedule.backward))
    return Order(forward, backward)


def smallest_within(graph: Graph, relaxed: Graph, nbytes: int) -> Schedule:
    """Returns the schedule with the lowest peak that is found, made faster as far as a budget allows.

    Args:
        graph: the graph, with its writes.
        relaxed: the graph without them.
        nbytes: the budget. If the lowest peak is above it, it is not considered.
    """
    known = orders_of(relaxed)
    best = _smallest(graph, known)
    if best.peak_nbytes > nbytes:
        return best.schedule
    fitted = fit(known.rules, best.order, nbytes)[0]
    starts = [best] if fitted is None else [_settled(graph, fitted), best]
    fits = lambda order: _settled(graph, order).peak_nbytes <= nbytes
    search = Search(known.rules, [s.order for s in starts if s.peak_nbytes <= nbytes], nbytes, accepts=fits)
    search.run(_SEARCH_MOVES, 0.0, idle_moves=_SEARCH_MOVES / 2)
    return _settled(graph, search.found[-1]).schedule


def _smallest(graph: Graph, known: KnownOrders) -> _Settled:
    """Returns the order with the lowest peak that is found.

    The solver's smallest orders often need no more with their updates settled. Otherwise the smallest of all orders are
    settled, lowered by repairs, and settled again, as long as their peaks fall.
    """
    rules = known.rules
    found = [_settled(graph, order) for order in known.smallest]
    best = min(found, key=_peak)
    if best.peak_nbytes <= peak_of(rules, known.least):
        return best
    starts = sorted([*known.common, *known.spread, *known.binomials], key=lambda start: start.peak_nbytes)
    for start in starts:
        found.sort(key=_peak)
        del found[_LOWERED:]
        if start.peak_nbytes >= found[-1].peak_nbytes and len(found) == _LOWERED:
            break
        found.append(_settled(graph, start.order))
    for start in found:
        last = start
        while True:
            following = _settled(graph, lowered(rules, last.order)[0])
            if following.peak_nbytes >= last.peak_nbytes:
                break
            last = following
        best = min(best, last, key=_peak)
    return best


def _peak(order: _Settled) -> int:
    return order.peak_nbytes
