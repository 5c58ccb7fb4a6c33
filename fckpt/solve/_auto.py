"""The default: many plans to start from, the best of them repaired, then improved by local search.

1. Saving everything, in the order of the backward pass that has the lowest peak. If it fits, it is optimal.
2. Starts: that plan; those of integer programs about its peak, and about what overflows then (`moments`); those that
   come up while the bound is proven (`certificate`); minimum cuts (`min_cut`); segments (`chen`), nested ones too
   (`seeds`); optimal chain schedules (`rotor`), which need few bytes, and of blocks that were planned once each where
   the graph repeats itself (`hierarchy`).
3. Those that are fast or lie near the budget are repaired and pruned until they fit (`repair`), until too much has been
   tried in vain. If none does, the smallest of all are brought down as far as repairs can, binomial schedules
   (`revolve`) too; first of all where the smallest known is over the budget by 2 %, since mostly nothing fits then.
4. Local search from the best of them, and from the next when that comes to nothing (`search`).

It stops at a plan that `certificate` proves to be within `GOOD_ENOUGH` of the optimum, and asks it for a better one,
which on smaller graphs is the optimum, and repairs the first start to the end. None is promised otherwise: the
certificate says how far it may be. The least budget is the least peak over all starts, and repairs of the smallest with
ever lower budgets; it does not depend on the budget asked.

Of a graph of more than `LARGE` nodes that repeats itself, blocks are all that is planned: their plans are repaired and
pruned, and searched where the limit leaves moves for it, which the usual one does not above 24,000.

Complexity: the starts take near-linear time in the size of the graph, and small integer programs. The search is given a
number of moves, not seconds, so that a plan depends on the graph, its times, the budget, the limit and the seed alone.

Left out: repairs and the search change blocks that are alike one by one; large graphs without repetitions are planned
like small ones.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator

from fckpt.errors import users_stacklevel
from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Schedule, schedule_of
from fckpt.solve._chen import segment_orders
from fckpt.solve._greedy import fit, lowered
from fckpt.solve._hierarchy import Chain, ChainSolver
from fckpt.solve._min_cut import PRICES, cheapest, near_budget
from fckpt.solve._moments import ProgramEffort, moment_orders, usual_effort
from fckpt.solve._policy import policy
from fckpt.solve._revolve import binomial_orders
from fckpt.solve._rotor import Curve, curves
from fckpt.solve._save_all import save_all
from fckpt.solve.core.rules import Order, Rules, over_budget, peak_of, seconds_of
from fckpt.solve.core.starts import backward_orders, save_everything_orders, segmented
from fckpt.solve.proofs.bounds import least_peak
from fckpt.solve.proofs.certificate import PROOF, certified, quick
from fckpt.solve.repair.search import Search

__all__ = ["auto"]

GOOD_ENOUGH = 1e-4
"""A part of the whole time, by which a plan may miss the bound and yet end the search."""
OPTIMAL = 1e-6
"""The same, by which it may miss it and yet be taken for the best there is."""
NEAREST = 2
"""How many starts are repaired of those that fit, and of those that do not."""
HOPELESS = 1.5
"""A repair ends where repetitions take so many times as long as those of the best plan before."""
PACE = 12000.0
"""Moves that a slow core weighs in a second: they make an effort of a time limit, that can be repeated anywhere."""
BESIDE = 10.0
"""Seconds at that pace, after which a repair ends where there is a plan already."""
HEAD_START = 400
"""Nodes for which it finds starts in a second."""
LARGE = 20_000
"""Nodes above which blocks are all that is planned of a graph that repeats itself."""
FAR = 1.02
"""The smallest plan is looked for first where all that are known before repairs take so many times the budget."""
RICH = 5.0
"""Seconds: a limit above it gives the integer programs of `moments` more rows than they take there."""
USUAL = ((100, 5.0), (200, 60.0))
"""For how many nodes it takes a second, and up to how many seconds, unless it is told otherwise; the most counts."""


_Plan = tuple[int, float, Order]
"""Bytes at its peak, seconds, and what is computed."""


def auto(
    graph: Graph,
    budget: int | None = None,
    *,
    time_limit: float | None = None,
    seed: int = 0,
    watch: Callable[[str, int, int], object] | None = None,
) -> Schedule:
    """Returns the fastest schedule that is found within `budget`.

    Args:
        graph: one training step.
        budget: bytes; None does what the decisions of a policy say, and without any saves everything.
        time_limit: the seconds that it may take on a slow core, about. They count moves, so that the same limit leads
            to the same plan on any machine. Starts are found whatever the limit. Default: one for every 100 nodes up
            to 5, and then for every 200 up to 60; it ends earlier if nothing gets better.
        seed: of the random numbers of the search.
        watch: is told what is done, how much of it, and of how much, from time to time. The latter is 0 where it is not
            known, and then it is told of what takes more than a second alone.

    Raises:
        BudgetError: none is found.

    Warns:
        UserWarning: it was interrupted (`KeyboardInterrupt`), and returns the best plan so far.
    """
    if budget is None:
        decided = any(value.decision for value in graph.values)
        return policy(graph) if decided else save_all(graph)
    rules = Rules(graph)
    everything = save_everything_orders(rules)
    if peak_of(rules, everything[0]) <= budget:
        return schedule_of(graph, *everything[0])
    starts: list[Order] = []
    found = starts
    tell = watch if watch is not None else _nobody
    slow = tell if len(graph.nodes) > HEAD_START else _nobody
    try:
        slow("proving a bound", 0, 0)
        limit = _usual(len(graph.nodes)) if time_limit is None else time_limit
        bound, certificates = certified(graph, budget, effort=quick(graph))
        effort = usual_effort(graph, max(1.0, (time_limit or 0.0) / RICH))
        enough = bound.seconds + GOOD_ENOUGH * graph.seconds
        slow("looking for plans to start from", 0, 0)
        ready = _starts(rules, everything, certificates)
        for start in ready.fitted(budget, effort, enough):
            starts.append(start)  # an interrupt leaves those that are there
            slow("plans to start from", len(starts), 0)
        starts.sort(key=lambda order: seconds_of(rules, order))
        search = Search(rules, starts, budget, seed)
        found = search.found
        moves = PACE * (limit - len(graph.nodes) / HEAD_START)
        search.run(max(0, round(moves)), enough, lambda done, of: tell("moves weighed", done, of))
        missed = min(seconds_of(rules, order) for order in found) - bound.seconds
        if OPTIMAL * graph.seconds < missed <= GOOD_ENOUGH * graph.seconds:
            found.extend(ready.last(budget))
    except KeyboardInterrupt:
        if not found:
            raise
        warnings.warn(
            "fckpt was interrupted while it looked for a plan, and takes the best that it has found.",
            stacklevel=users_stacklevel(),
        )
    return schedule_of(graph, *min(found, key=lambda order: seconds_of(rules, order)))


def _nobody(*_: object) -> None:
    """Is told, and forgets."""


def _usual(nodes: int) -> float:
    return max(min(nodes / count, most) for count, most in USUAL)


def _starts(rules: Rules, saving: list[Order], certificates: list[Order]) -> _Starts:
    if len(rules.graph.nodes) > LARGE and (chain := Chain(rules)).repeats:
        return _OfBlocks(rules, saving, certificates, chain)
    return _Starts(rules, saving, certificates)


class _Starts:
    """Plans to start from."""

    def __init__(self, rules: Rules, saving: list[Order], certificates: list[Order]):
        self.rules = rules
        self.saving = saving
        self.certificates = certificates
        self.least_peak = least_peak(rules.graph)
        self.patience = PACE * _usual(len(rules.graph.nodes))
        """How many moves are weighed in vain, and twice as many to bring plans down, before the rest is left out."""

    @functools.cached_property
    def priced(self) -> list[Order]:
        """Minimum cuts at several prices."""
        return [cheapest(self.rules, price) for price in PRICES]

    @functools.cached_property
    def chains(self) -> list[Curve]:
        """Optimal schedules of chains."""
        return curves(self.rules)

    @functools.cached_property
    def blocks(self) -> list[Curve]:
        """Optimal schedules of chains of blocks, where many of them are alike."""
        chain = Chain(self.rules)
        return ChainSolver().curves(chain) if chain.repeats else []

    @functools.cached_property
    def cut(self) -> list[_Plan]:
        """Saving all, and segments, nested ones too, with the recorded order of the backward pass."""
        return _known(self.rules, (*self.saving, *segmented(self.rules)))

    @functools.cached_property
    def common(self) -> list[_Plan]:
        """Those that do not depend on a budget."""
        return [*self.cut, *_known(self.rules, (*segment_orders(self.rules), *self.priced))]

    @functools.cached_property
    def spread(self) -> list[_Plan]:
        """Some of the chains, down to the smallest."""
        return _known(self.rules, (order for curve in (*self.blocks, *self.chains) for order in curve.spread()))

    @functools.cached_property
    def binomials(self) -> list[_Plan]:
        """Those that need the fewest bytes."""
        return _known(self.rules, binomial_orders(self.rules))

    @functools.cached_property
    def least(self) -> Order:
        """The plan with the lowest peak."""
        return min(self._smallest(), key=lambda order: peak_of(self.rules, order))

    def fitted(self, budget: int, effort: ProgramEffort, enough: float) -> Iterator[Order]:
        """Yields plans within `budget`, at least one.

        Args:
            budget: bytes.
            effort: on the integer programs of `moments`.
            enough: once a kind of starts has led to a plan that takes no more seconds, the kinds after it are left
                out; infinite if it is proven that there is none.

        Raises:
            BudgetError: there is none.
        """
        rules, limit, fastest, wasted = self.rules, float("inf"), float("inf"), 0
        possible = self.least_peak <= budget and enough < float("inf")
        if not possible or self._is_far(budget):  # before programs are solved for what cannot be
            self._check(budget)
        for orders in self._kinds(budget, effort) if possible else ():
            for order in orders:
                if wasted > self.patience and peak_of(rules, order) > budget:
                    continue
                most = PACE * BESIDE if fastest < float("inf") else float("inf")
                plan, moves = fit(rules, order, budget, limit, most)
                if plan is None:
                    wasted += moves
                else:
                    fastest = min(fastest, seconds_of(rules, plan))
                    limit = HOPELESS * (fastest - seconds_of(rules, self.saving[0]))
                    yield plan
            if fastest <= enough:
                return
        if fastest == float("inf"):
            self._check(budget)
            yield fit(rules, self.least, budget)[0] or self.least

    def _is_far(self, budget: int) -> bool:
        """Whether all plans that are known as they are take more than `FAR` budgets."""
        return all(peak > FAR * budget for peak, _, _ in self._as_they_are())

    def _as_they_are(self) -> Iterator[_Plan]:
        """Yields what is known before any repair, the dearest to find last."""
        yield from _known(self.rules, (*self.certificates, *self.priced))
        yield from self.common
        yield from self.spread
        yield from self.binomials

    def last(self, budget: int) -> list[Order]:
        """Returns what the integer program that proves the bound leads to at its end, and saving all, repaired."""
        rules = self.rules
        effort = quick(rules.graph)._replace(branches=PROOF.branches, gap=PROOF.gap)
        plans = [plan for plan in certified(rules.graph, budget, effort=effort).plans if peak_of(rules, plan) <= budget]
        repaired, _ = fit(rules, self.saving[0], budget)
        return plans if repaired is None else [*plans, repaired]

    def _check(self, budget: int) -> None:
        """Raises `BudgetError` if even the plan with the lowest peak takes more than the budget."""
        if peak_of(self.rules, self.least) > budget:
            least = schedule_of(self.rules.graph, *self.least)
            raise over_budget(self.rules.graph, least, budget, "auto", least_peak=self.least_peak)

    def _smallest(self) -> Iterator[Order]:
        """Yields plans that repairs have brought down as far as they could."""
        weighed = 0
        done: list[Order] = []
        for order in self._low():
            if order not in done:
                plan, moves = lowered(self.rules, order)
                weighed += moves
                done.append(order)
                yield plan
            if weighed > 2 * self.patience:
                return  # before the next is looked for

    def _low(self) -> Iterator[Order]:
        """Yields plans to bring down: the smallest, and last the one of `greedy`, which may come down further."""
        yield from self._lowest()
        orders = backward_orders(self.rules)[1:]
        others = _known(self.rules, (plan for order in orders for plan in segmented(self.rules, order)))
        yield min([*self.cut, *others], key=lambda plan: plan[0])[2]

    def _kinds(self, budget: int, effort: ProgramEffort) -> Iterator[Iterable[Order]]:
        """Yields kinds of starts, each chosen by itself: plans of blocks lie so near that others would have no room."""
        yield self._made(budget, effort)
        yield self._others(budget)
        yield _near(self._blocks_around(budget), budget)

    def _made(self, budget: int, effort: ProgramEffort) -> Iterator[Order]:
        """Yields starts made for the budget."""
        yield from self.certificates
        yield from moment_orders(self.rules, self.saving, budget, effort)

    def _others(self, budget: int) -> Iterator[Order]:
        """Yields the fastest of the others that fit, those just above the budget that are faster, and saving all."""
        made = (*_around(self.chains, budget), *near_budget(self.rules, self.priced, budget))
        yield from _near([*self.common, *_known(self.rules, made)], budget)
        yield from self.saving

    def _blocks_around(self, budget: int) -> list[_Plan]:
        """Returns the schedules of chains of blocks next to the budget."""
        return _known(self.rules, _around(self.blocks, budget))

    def _lowest(self) -> Iterator[Order]:
        """Yields the smallest of those that do not depend on a budget."""
        for plans in ([*self.common, *self.spread], self.binomials):
            yield from (order for _, _, order in _by_peak(plans)[:NEAREST])


class _OfBlocks(_Starts):
    """The same for large graphs that repeat themselves: nothing is planned but blocks."""

    def __init__(self, rules: Rules, saving: list[Order], certificates: list[Order], chain: Chain):
        super().__init__(rules, saving, certificates)
        self._chain = chain

    @functools.cached_property
    def chains(self) -> list[Curve]:
        return []

    @functools.cached_property
    def blocks(self) -> list[Curve]:
        return ChainSolver().curves(self._chain)

    @functools.cached_property
    def priced(self) -> list[Order]:
        return []

    @functools.cached_property
    def common(self) -> list[_Plan]:
        return _known(self.rules, self.saving)

    def _low(self) -> Iterator[Order]:
        return self._lowest()

    def _kinds(self, budget: int, effort: ProgramEffort) -> Iterator[Iterable[Order]]:
        yield self.certificates
        plans = self._blocks_around(budget)
        yield _near(plans, budget)
        if all(peak > budget for peak, _, _ in plans):
            yield self.saving

    def last(self, budget: int) -> list[Order]:
        return []  # to repair saving all takes longer than all the rest


def _known(rules: Rules, orders: Iterable[Order]) -> list[_Plan]:
    return [(peak_of(rules, order), seconds_of(rules, order), order) for order in orders]


def _around(chains: list[Curve], budget: int) -> Iterator[Order]:
    """Yields the schedules of chains next to the budget."""
    return (order for curve in chains for order in curve.around(budget))


def _near(plans: Iterable[_Plan], budget: int) -> Iterator[Order]:
    """Yields the fastest plans that fit, and the smallest of those that are faster."""
    ranked = _by_peak(plans)
    inside = sorted((plan for plan in ranked if plan[0] <= budget), key=lambda plan: plan[1])[:NEAREST]
    fastest = inside[0][1] if inside else float("inf")
    outside = [plan for plan in ranked if plan[0] > budget and plan[1] < fastest][:NEAREST]
    yield from (order for _, _, order in (*inside, *outside))


def _by_peak(plans: Iterable[_Plan]) -> list[_Plan]:
    """Returns plans by rising peak; of those that have peak and seconds in common, the first."""
    found: dict[tuple[int, float], Order] = {}
    for peak, seconds, order in plans:
        found.setdefault((peak, seconds), order)
    return [(*key, found[key]) for key in sorted(found)]
