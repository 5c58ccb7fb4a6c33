"""Proven lower bounds on the peak of every schedule, and on the seconds of every schedule within a budget.

A *moment* is the first run of a node d. By then every node on which d depends has run, and no node that depends on d
has. A value that is not in memory then and is read later must be made again, and the values in memory must fit. This
holds for every schedule, so the optimum of

    min  sum of T_n R[n]                      over the nodes n
    S[v] + R[p(v)] >= 1                       v is read by a first run after d, or must be live at the end
    R[n] <= S[v] + R[p(v)]                    v is read by n
    sum of M_v S[v] <= room                   room = budget - the bytes held at d by every schedule

is a lower bound on the time of all recomputations, in any order and with any number of them. S says which values are
held at d, R which nodes run after d, and p(v) is the node that makes v. T_n is the time of n if it has certainly run by
d, and 0 if its first run may come later. The nodes at which the budget can bind are candidate moments; the best bound
counts. It is found in two ways:

* With a price on bytes instead of the last row, the problem is a minimum cut (H. Everett, "Generalized Lagrange
  multiplier method for solving problems of optimum allocation of resources", 1963,
  https://doi.org/10.1287/opre.11.3.399). The bound is concave in the price, and each cut is a line above it; the next
  price is where two lines meet, as in W. Dinkelbach, "On nonlinear fractional programming", 1967,
  https://doi.org/10.1287/mnsc.13.7.492. About five cuts find the best price.
* As an integer program (HiGHS, in `scipy.optimize.milp`), for the best moments of smaller graphs, where the integrality
  matters. Its bound is valid even if the search stops early.

The problem is Checkmate's (P. Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor
Rematerialization", 2020, https://arxiv.org/abs/1910.02653), with a free order, and with everything that a `Graph`
describes: temporaries, several outputs, outputs that overwrite inputs, and a policy's requirements.

    above                       here
    T, M                        `Problem.recompute_seconds`, `Value.nbytes`
    S                           p(v) is on the source's side of the cut, v is not
    R                           n is on the sink's side

Complexity: a few maximum flows for each of at most about 150 moments; integer programs with a bounded number of
branches, for graphs of up to about 1,000 nodes. Left out: recomputations also need memory while they run, and
recomputations before one moment add to those after another. Both cause a gap at low budgets.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import Any, NamedTuple

import numpy as np

from fckpt._late import late
from fckpt.graph.graph import Graph, Node
from fckpt.solve.core.flow import FlowNetwork
from fckpt.solve.core.rules import Order, Rules, ancestors, profile_of
from fckpt.solve.core.starts import save_everything

__all__ = [
    "Bound",
    "Moment",
    "MomentBound",
    "Problem",
    "SingleMoments",
    "least_peak",
    "least_peaks",
    "lower_bound",
    "proven_seconds",
    "single_moments",
]

GRID = 100
"""The number of moments examined across the part of the sequence that is over the budget."""
ZOOM = 16
"""The number of moments examined in each refinement around the best moment."""
MINIMUM_CUTS = 30
"""The largest number of minimum cuts for one moment. Five are usual."""
PROGRAMS = 3
"""The largest number of integer programs."""
COLUMNS = 2000
"""The largest number of columns of all integer programs. In larger programs, integrality hardly raises the bound."""
BRANCHES = 20
"""The largest number of branches of one integer program. A count, not a time, so that bounds do not depend on the
machine."""
GAP = 1e-4
"""A bound is not improved further if its possible gain is below this fraction of the least time."""
UNIT = 1e6
"""The least time, in the units of an integer program's objective."""
TOLERANCE = 1e-6
"""The error of an integer program's bound per column, in that unit."""


@dataclass(frozen=True)
class Bound:
    """A lower bound: no schedule of the graph within the budget takes less time."""

    seconds: float
    """The time of all computations, including recomputations, by `Rules.seconds`; infinite if nothing fits."""
    scope: str
    """The schedules covered: "any", or "given" for schedules whose first runs keep the given order."""
    method: str
    """The method of proof: "one run each", "least peak", "minimum cut", "integer program", or "several moments"."""


def least_peak(graph: Graph) -> int:
    """Returns a proven lower bound in bytes on the peak of every schedule.

    It is the largest of three: the bytes held at the end; for each node, its inputs, outputs and the values that must
    be held at its first run; and for each node, the moment when the last of its inputs is made: that producer's inputs
    and outputs, plus the node's other inputs.
    """
    peaks = _Peaks(graph)
    return max((peaks.at_end(), *map(peaks.at, peaks.required), *map(peaks.ahead_of, peaks.required)))


def least_peaks(graph: Graph) -> dict[int, int]:
    """Returns, by node that every schedule runs, the bytes that every schedule holds at its first run."""
    peaks = _Peaks(graph)
    return {i: peaks.at(i) for i in peaks.required}


def lower_bound(graph: Graph, budget: int, order: Order | None = None) -> Bound:
    """Returns a proven lower bound on the seconds of every schedule whose peak is at most `budget`.

    Args:
        graph: one training step.
        budget: bytes.
        order: restricts the claim to schedules whose first runs are in this order, which may raise the bound. None
            covers all schedules.
    """
    return single_moments(Problem(graph, order), budget).bound


class SingleMoments(NamedTuple):
    """The bound that single moments prove."""

    bound: Bound
    strongest: MomentBound | None
    """The bound of the moment whose minimum cuts prove most; None if no recomputation is proven."""


def single_moments(problem: Problem, budget: int) -> SingleMoments:
    """Returns the bound of `lower_bound`, and the moment from which a proof with several moments starts."""
    scope = "any" if problem.order is None else "given"
    if least_peak(problem.graph) > budget:
        return SingleMoments(Bound(math.inf, scope, "least peak"), None)
    bounds = sorted(_moment_bounds(problem, budget), key=lambda bound: -bound.value)
    found, method = 0.0, "one run each"
    if bounds and bounds[0].value > 0.0:
        found, method = bounds[0].value, "minimum cut"
    columns = 0
    for bound in bounds[:PROGRAMS]:
        columns += bound.moment.columns
        if bound.most - found > GAP * problem.least and columns <= COLUMNS:
            value = _by_program(problem, bound.moment, budget)
            found, method = max((found, method), (value, "integer program"))
    return SingleMoments(
        Bound(float(problem.least + found), scope, method), bounds[0] if 0.0 < found < math.inf else None
    )


class _Peaks:
    """The bytes that every schedule holds at each node's first run.

    Only some values are tracked: values that are never freed, and values of nodes that run only once, which stay while
    something will read them. Sets of these values are the bits of ints.
    """

    def __init__(self, graph: Graph):
        self.graph, rules = graph, Rules(graph)
        forward = set(ancestors(graph, rules.forward_roots))
        self.required = sorted(forward.union(ancestors(graph, _producers(graph, graph.gradients))))
        self.permanent = rules.permanent
        ends = [v for i in self.required for v in graph.nodes[i].outputs if v in rules.permanent]
        once = [v for i in self.required if rules.pinned[i] for v in graph.nodes[i].outputs if v not in rules.permanent]
        self.bits = {v: 1 << k for k, v in enumerate([*ends, *once])}
        self.nbytes = np.array([graph.values[v].nbytes for v in self.bits], dtype=np.int64)
        self.ends = (1 << len(ends)) - 1
        self.late = [i for i in self.required if graph.nodes[i].backward]
        self.forward = self._set(v for i in forward for v in graph.nodes[i].outputs)
        self.cotangents = sum(graph.values[v].nbytes for v in graph.cotangents) if self.late else 0
        self.made, self.wanted = self._made(), self._wanted(forward)

    def _set(self, values: Iterable[int]) -> int:
        return reduce(or_, (self.bits.get(v, 0) for v in values), 0)

    def _made(self) -> dict[int, int]:
        """Returns, by node, the values made before its first run."""
        made: dict[int, int] = {}
        drawn = 0  # the values made before the next random node
        for i in self.required:
            node = self.graph.nodes[i]
            sources = _producers(self.graph, node.inputs)
            made[i] = reduce(or_, (made[p] | self._set(self.graph.nodes[p].outputs) for p in sources), 0)
            made[i] |= (self.forward if node.backward else 0) | (drawn if node.random else 0)
            drawn = made[i] | self._set(node.outputs) if node.random else drawn
        return made

    def _wanted(self, forward: Collection[int]) -> dict[int, int]:
        """Returns, by node, the values read by first runs after its own."""
        late = self._set(v for i in self.late for v in self.graph.nodes[i].inputs)
        wanted = {i: late if i in forward else 0 for i in self.required}
        drawn = 0  # the values read after the previous random node
        for i in reversed(self.required):
            node = self.graph.nodes[i]
            wanted[i] |= drawn if node.random else 0
            reads = wanted[i] | self._set(node.inputs)
            for p in _producers(self.graph, node.inputs):
                wanted[p] |= reads
            drawn = reads if node.random else drawn
        return wanted

    def at_end(self) -> int:
        return self._weight(self.ends) + self.cotangents

    def at(self, index: int) -> int:
        """Returns the bytes that every schedule holds when a node first runs."""
        node = self.graph.nodes[index]
        held = self.made[index] & (self.ends | self.wanted[index])
        return self._while(node, (), held, late=node.backward)

    def ahead_of(self, index: int) -> int:
        """Returns the bytes that every schedule holds when a node's last input is made, before the node's first run."""
        node, graph = self.graph.nodes[index], self.graph
        held = self.ends | self.wanted[index] | self._set(node.inputs)
        found = []
        for p in _producers(graph, node.inputs):
            rest = [v for v in node.inputs if v not in graph.nodes[p].outputs]
            late = any(graph.nodes[q].backward for q in (p, *_producers(graph, rest)))
            made = self.made[p] | (self.forward if late else 0)
            found.append(self._while(graph.nodes[p], rest, made & held, late=late))
        return min(found, default=0)

    def _while(self, node: Node, beside: Collection[int], held: int, *, late: bool) -> int:
        """Returns the bytes held while a node runs, with the values `beside` it and the set `held`."""
        values = self.graph.values
        over = (
            v for v in node.overwrites if v not in self.permanent and v not in beside and not self.bits.get(v, 0) & held
        )
        saved = max((values[v].nbytes for v in over), default=0)
        touched = {v for v in (*node.inputs, *node.outputs, *beside) if values[v].producer is not None}
        plain = sum(values[v].nbytes for v in touched if v not in self.bits)
        cotangents = self.cotangents if late else 0
        return self._weight(held | self._set(touched)) + plain + cotangents + node.temporary_nbytes - saved

    def _weight(self, held: int) -> int:
        if not held:
            return 0
        data = np.frombuffer(held.to_bytes((held.bit_length() + 7) // 8, "little"), dtype=np.uint8)
        return int(self.nbytes[np.flatnonzero(np.unpackbits(data, bitorder="little"))].sum())


class _Certain:
    """The order of first runs that is certain in every schedule.

    It follows from dependencies and from two further rules. Random nodes keep their order. The backward pass begins,
    which is a separate vertex here, after everything that must run in the forward pass, and before any node that needs
    a cotangent.
    """

    def __init__(self, rules: Rules, order: Order | None):
        csr_array = late("scipy.sparse").csr_array  # imported late: scipy takes 0.4 s, and only bounds and cuts need it
        graph = rules.graph
        self.begins = len(graph.nodes)
        forward = ancestors(graph, rules.forward_roots)
        required = sorted({*forward, *ancestors(graph, _producers(graph, graph.gradients))})
        self.forward, self.required = _mask(self.begins, forward), _mask(self.begins, required)
        pairs = {(p, i) for i in required for p in _producers(graph, graph.nodes[i].inputs)}
        pairs.update(pairwise(i for i in required if graph.nodes[i].random))
        pairs.update((i, self.begins) for i in forward)
        pairs.update((self.begins, i) for i in required if graph.nodes[i].backward)
        if order is not None:
            pairs.update(pairwise(i for i in dict.fromkeys((*order.forward, *order.backward)) if self.required[i]))
        tails, heads = np.array(sorted(pairs), dtype=np.int32).reshape(-1, 2).T
        ones, shape = np.ones(len(tails), dtype=np.int8), (self.begins + 1, self.begins + 1)
        self.later: Any = csr_array((ones, (tails, heads)), shape=shape)
        self.earlier: Any = csr_array((ones, (heads, tails)), shape=shape)

    def after(self, node: int) -> np.ndarray:
        """Returns, by node, whether its first run is after that of `node`. Last entry: whether backward begins then."""
        return self._nodes_along(self.later, node)

    def before(self, node: int) -> np.ndarray:
        """Returns, by node, whether its first run is before that of `node`. Last entry: whether backward has begun."""
        return self._nodes_along(self.earlier, node)

    def _nodes_along(self, arcs: Any, node: int) -> np.ndarray:
        breadth_first_order = late("scipy.sparse.csgraph").breadth_first_order
        found = _mask(self.begins + 1, breadth_first_order(arcs, node, return_predecessors=False))
        found[node] = False
        return found


class Moment(NamedTuple):
    """What is certain when a node runs for the first time."""

    node: int
    nbytes: int
    """The bytes that every schedule holds then."""
    before: np.ndarray
    """By node: whether it has run."""
    runs: np.ndarray
    """By node: whether R[n] is a variable, because the node may run later."""
    choice: np.ndarray
    """By value: whether S[v] is a variable, because the value may or may not be held."""
    needed: np.ndarray
    """By value: whether S[v] is a variable and the value must be live later."""

    @property
    def columns(self) -> int:
        return int(self.choice.sum()) + int(self.runs.sum())


class Problem:
    """A graph as arrays, for proofs of lower bounds."""

    def __init__(self, graph: Graph, order: Order | None = None):
        self.graph, self.rules, self.order = graph, Rules(graph), order
        self.certain = _Certain(self.rules, order)
        forward, backward = save_everything(self.rules) if order is None else order
        first = dict.fromkeys(forward)
        self.first_runs = Order(list(first), [i for i in dict.fromkeys(backward) if i not in first])
        """An order that runs every node once."""
        self.producer = np.array([-1 if v.producer is None else v.producer for v in graph.values], dtype=np.int64)
        self.nbytes = np.array([v.nbytes for v in graph.values], dtype=np.int64)
        self.seconds = np.array(self.rules.seconds, dtype=float)
        self.pinned = np.array(self.rules.pinned, dtype=bool)
        self.ends = _mask(len(graph.values), self.rules.permanent - graph.held)
        arcs = [(v, n.id) for n in graph.nodes if self.certain.required[n.id] for v in n.inputs]
        self.read, self.reader = np.array(arcs, dtype=np.int64).reshape(-1, 2).T
        self.twice = self._twice()
        """By node: whether it must run in both passes, because the policy forbids saving its values."""
        self.least = math.fsum([*self.seconds[self.certain.required], *self.seconds[self.twice]])
        """The seconds that every schedule takes."""

    def _twice(self) -> np.ndarray:
        graph, unsaved = self.graph, self.rules.unsaved
        stack = [n.id for n in graph.nodes if n.backward and self.certain.required[n.id]]
        found = set(stack)
        while stack:
            again = _producers(graph, unsaved.intersection(graph.nodes[stack.pop()].inputs)) - found
            found |= again
            stack += again
        return _mask(len(graph.nodes), found) & self.certain.forward

    def moment(self, index: int) -> Moment:
        """Returns what is certain when node `index` runs for the first time."""
        node, before, after = self.graph.nodes[index], self.certain.before(index), self.certain.after(index)[:-1]
        late, before = bool(before[-1]), before[:-1]
        runs = self.certain.required & ~after
        runs[index] = False
        made = self.producer >= 0
        present = self.ends & before[self.producer]
        over = [v for v in node.overwrites if v not in self.rules.permanent]
        gone = over if len(over) == 1 else []  # takes no bytes unless it is held; several are discounted below
        present[[v for v in (*node.inputs, *node.outputs) if v not in gone]] = True
        present &= made
        choice = made & runs[self.producer] & ~present
        needed = self.ends.copy()
        needed[self.read[after[self.reader]]] = True
        nbytes = int(self.nbytes[present].sum()) + node.temporary_nbytes
        nbytes -= int(self.nbytes[over[0]]) if len(over) > 1 else 0
        nbytes += int(self.nbytes[list(self.graph.cotangents)].sum()) if late else 0
        return Moment(index, nbytes, before, runs, choice, choice & needed)

    def recompute_seconds(self, moment: Moment) -> np.ndarray:
        """Returns, by node, the cost in seconds of running after the moment; infinite if it may not run again."""
        again = np.where(moment.before & ~self.twice, self.seconds, 0.0)
        again[moment.before & self.pinned] = np.inf
        return again


def _producers(graph: Graph, values: Iterable[int]) -> set[int]:
    return {p for v in values if (p := graph.values[v].producer) is not None}


def _mask(count: int, chosen: Collection[int] | np.ndarray) -> np.ndarray:
    found = np.zeros(count, dtype=bool)
    found[np.fromiter(chosen, dtype=np.int64, count=len(chosen))] = True
    return found


class MomentBound(NamedTuple):
    """The bound that minimum cuts at one moment prove."""

    moment: Moment
    value: float
    """A lower bound on the seconds of recomputations; infinite if nothing fits."""
    most: float
    """An upper bound on what the moment can prove."""
    price: float | None = None
    """The price of a byte with which `value` was proven."""


def _moment_bounds(problem: Problem, budget: int) -> list[MomentBound]:
    """Returns bounds at moments where saving everything exceeds the budget; others need no recomputation."""
    order = problem.first_runs
    profile = zip(profile_of(problem.rules, order).tolist(), (*order.forward, *order.backward), strict=True)
    over = [(nbytes, i) for nbytes, i in profile if nbytes > budget and problem.certain.required[i]]
    if not over:
        return []
    found: dict[int, MomentBound] = {}
    best = max(range(len(over)), key=lambda k: over[k][0])
    reach, step = float(len(over)), max(1.0, len(over) / GRID)
    while True:
        tries = range(-math.ceil(reach / step), math.ceil(reach / step) + 1)
        for k in dict.fromkeys([best, *(best + round(t * step) for t in tries)]):
            if 0 <= k < len(over) and k not in found:
                found[k] = _priced(problem, problem.moment(over[k][1]), budget, found.get(best))
                best = k if found[k].value > found[best].value else best
        if step == 1.0:
            return list(found.values())
        reach, step = step, max(1.0, 2 * step / ZOOM)


class _Line(NamedTuple):
    """The seconds and bytes of a choice: a line over the price of a byte."""

    seconds: float
    nbytes: int

    def at(self, price: float) -> float:
        return self.seconds + price * self.nbytes


class _MinimumCuts:
    """The choices at a moment as minimum cuts.

    The network has the arcs source -> node (the node's time), node -> value (the price of the value's bytes), value ->
    node that reads it, and value -> sink if the value must be live later (infinite).
    """

    def __init__(self, problem: Problem, moment: Moment):
        nodes = len(problem.graph.nodes)
        source = nodes + len(problem.graph.values)
        self.nodes, self.values = np.flatnonzero(moment.runs), np.flatnonzero(moment.choice)
        needed = np.flatnonzero(moment.needed)
        reads = moment.choice[problem.read] & moment.runs[problem.reader]
        self.made, self.value_numbers = problem.producer[self.values], nodes + self.values
        tails = [np.full(len(self.nodes), source), self.made, nodes + problem.read[reads], nodes + needed]
        heads = [self.nodes, self.value_numbers, problem.reader[reads], np.full(len(needed), source + 1)]
        self.network = FlowNetwork(source, np.concatenate(tails), np.concatenate(heads))
        self.fixed = np.full(len(tails[2]) + len(needed), np.inf)
        self.again, self.nbytes = problem.recompute_seconds(moment)[self.nodes], problem.nbytes[self.values]
        self.barred = np.isinf(self.again)
        self.everything = _Line(0.0, int(problem.nbytes[needed].sum()))
        self.nothing = _Line(float(self.again[~self.barred].sum()), 0)

    def least(self, price: float, known: float, *, seconds: bool = True) -> tuple[float, _Line]:
        """Returns a lower bound on seconds plus price times bytes over all choices, and a choice that is close to it.

        Args:
            price: the price of a byte.
            known: seconds plus price times bytes of some choice, above 0.
            seconds: whether seconds count.
        """
        again = self.again if seconds else np.where(self.barred, np.inf, 0.0)
        value, near = self.network.cut(np.concatenate([again, price * self.nbytes, self.fixed]), known)
        held = near[self.made] & ~near[self.value_numbers]
        return value, _Line(float(self.again[~near[self.nodes]].sum()), int(self.nbytes[held].sum()))


def _priced(problem: Problem, moment: Moment, budget: int, best: MomentBound | None) -> MomentBound:
    """Returns the bound for the best price of a byte, or a weaker one if the moment cannot improve on `best`.

    `low` and `high` are choices for a low and a high price; `low` holds too much, `high` fits.
    """
    room, cuts = budget - moment.nbytes, _MinimumCuts(problem, moment)
    low, high = cuts.everything, cuts.nothing
    if room < 0:
        return MomentBound(moment, math.inf, math.inf)
    if low.nbytes <= room:
        return MomentBound(moment, 0.0, 0.0)
    if cuts.barred.any():
        least, high = cuts.least(1.0, low.nbytes, seconds=False)
        if high.nbytes > room:
            found = math.inf if least > room else 0.0
            return MomentBound(moment, found, found)
    found, at, known = 0.0, None, best.value if best else 0.0
    price = best.price if best else None
    for _ in range(MINIMUM_CUTS):
        meeting = (high.seconds - low.seconds) / (low.nbytes - high.nbytes)
        if meeting <= 0.0 or high.at(meeting) - meeting * room <= known:
            break
        price = meeting if price is None else price
        value, line = cuts.least(price, min(low.at(price), high.at(price)))
        if value - price * room > found:
            found, at = value - price * room, price
        if price == meeting and line in (low, high):
            break
        low, high = (line, high) if line.nbytes > room else (low, line)
        price = None
    return MomentBound(moment, found, high.seconds, at)


def _by_program(problem: Problem, moment: Moment, budget: int) -> float:
    """Returns the bound that the integer program of a moment proves on the seconds of recomputations."""
    optimize, csr_array = late("scipy.optimize"), late("scipy.sparse").csr_array
    values, nodes = np.flatnonzero(moment.choice), np.flatnonzero(moment.runs)
    state, run = np.full(len(problem.producer), -1), np.full(len(problem.pinned), -1)
    state[values], run[nodes] = np.arange(len(values)), len(values) + np.arange(len(nodes))
    read = moment.choice[problem.read] & moment.runs[problem.reader]
    used, reader, needed = problem.read[read], problem.reader[read], np.flatnonzero(moment.needed)
    there = np.concatenate([used, needed])  # S + R >= R[reader], or 1
    rows = np.arange(len(there))
    room = budget - moment.nbytes
    entries = [
        (rows, state[there], np.ones(len(there))),
        (rows, run[problem.producer[there]], np.ones(len(there))),
        (rows[: len(used)], run[reader], -np.ones(len(used))),
        (np.full(len(values), len(there)), state[values], problem.nbytes[values] / max(room, 1)),
    ]
    row, column, entry = (np.concatenate(parts) for parts in zip(*entries, strict=True))
    low = np.concatenate([np.zeros(len(used)), np.ones(len(needed)), [-np.inf]])
    high = np.concatenate([np.full(len(there), np.inf), [room / max(room, 1)]])
    matrix = csr_array((entry, (row, column)), shape=(len(there) + 1, len(values) + len(nodes)))
    again = problem.recompute_seconds(moment)[nodes]
    barred = np.isinf(again)
    unit = UNIT / problem.least
    answer = optimize.milp(
        np.concatenate([np.zeros(len(values)), np.where(barred, 0.0, again * unit)]),
        # integral S make R integral as well
        integrality=np.concatenate([np.ones(len(values)), np.zeros(len(nodes))]),
        bounds=optimize.Bounds(0.0, np.concatenate([np.ones(len(values)), 1.0 - barred])),
        constraints=optimize.LinearConstraint(matrix, low, high),
        options={"node_limit": BRANCHES, "mip_rel_gap": GAP},
    )
    return proven_seconds(problem, answer, len(values) + len(nodes))


def proven_seconds(problem: Problem, answer: Any, columns: int) -> float:
    """Returns the seconds that HiGHS proves for an integer program, minus the possible rounding error.

    Args:
        problem: the problem; its least time is `UNIT` in the program.
        answer: the result of `scipy.optimize.milp`.
        columns: the number of columns of the program.
    """
    value = answer.mip_dual_bound
    if value is None or not math.isfinite(value):
        return 0.0
    return max(0.0, value - TOLERANCE * (1 + columns + value)) * problem.least / UNIT
