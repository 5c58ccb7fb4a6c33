"""The default solver: repairs the best of many starts, then improves it by local search.

1. If saving everything fits, in the order of the backward pass with the lowest peak, that plan is optimal.
2. Starts: that plan; plans of integer programs about its peak, and about what exceeds the budget then (`moments`);
   plans found while the lower bound is proven (`certificate`); minimum cuts (`min_cut`); segments (`chen`), also nested
   (`starts`); optimal schedules of chains (`rotor`), which reach small peaks; and, if the graph repeats itself, optimal
   schedules of chains of blocks, where each distinct block is planned once (`hierarchy`).
3. Starts that are fast or close to the budget are repaired and pruned until they fit (`repair`), until the repairs that
   fail have taken too much effort. If none fits, the starts with the smallest peaks, including binomial schedules
   (`revolve`), are lowered as far as repairs can. If the smallest known peak is more than 2 % over the budget, this
   comes first, because then usually nothing fits.
4. Local search starts from the best plan, and from the next one if that does not help (`search`).

The solver stops at a plan that `certificate` proves to be within `GOOD_ENOUGH` of the optimum, or within `SOON_ENOUGH`
on graphs that are not small. On small graphs, it then asks `certificate` for a better plan, which is often the optimum,
and repairs the first start without limits. Otherwise optimality is not guaranteed; the certificate says how far from it
the plan may be. The least budget is the least peak over all starts, and over repairs of the smallest starts for
successively lower budgets; it does not depend on the requested budget.

For a graph of more than `LARGE` nodes that repeats itself, only chains of blocks are planned: their plans are repaired
and pruned, and searched if the limit leaves moves for the search; the default limit does not above 24,000 nodes.

Complexity: finding starts takes near-linear time in the size of the graph, plus small integer programs. The search is
limited in moves, not in seconds, so that a plan depends only on the graph, its times, the budget, the limit and the
seed.

Left out: repairs and the search change equal blocks one by one; large graphs without repetitions are planned like small
ones.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf

from fckpt.errors import users_stacklevel
from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Schedule, schedule_of
from fckpt.solve._greedy import fit
from fckpt.solve._known_orders import STARTS_PER_SIDE, KnownOrders, by_peak, known_orders
from fckpt.solve._min_cut import near_budget
from fckpt.solve._moments import ProgramEffort, moment_orders, usual_effort
from fckpt.solve._policy import policy
from fckpt.solve._rotor import Curve
from fckpt.solve._save_all import save_all
from fckpt.solve.core.rules import Order, over_budget, peak_of, seconds_of
from fckpt.solve.core.starts import Start, measured
from fckpt.solve.proofs.certificate import PROOF, certified, quick
from fckpt.solve.repair.search import Search

__all__ = ["auto", "orders_of"]

GOOD_ENOUGH = 1e-4
"""On small graphs, or with a time limit, the search ends at a plan that exceeds the lower bound by at most this
fraction of the step's time."""
SOON_ENOUGH = 2.5e-3
"""The same for other graphs: what is left would not pay for the seconds of looking for it."""
PROGRAM_GAIN = 5e-4
"""Programs on graphs that are not small must lead to plans that are faster by this fraction of the step's time."""
SMALL = 150
"""The number of nodes of a small graph."""
OPTIMAL = 1e-6
"""A plan that exceeds the lower bound by at most this fraction of the step's time counts as optimal."""

MOVES_PER_SECOND = 12_000.0
"""Moves that a slow core weighs per second. It converts a time limit into a reproducible effort."""
IDLE_MOVES = 2 * MOVES_PER_SECOND
"""Without a time limit, the search ends after this many moves without a better plan."""
NODES_PER_SECOND = 400
"""Nodes of a graph for which starts are found per second."""
EXTRA_REPAIR_SECONDS = 10.0
"""The limit of one repair if a feasible plan is known already."""
PROGRAM_SECONDS = 5.0
"""A time limit above this gives the integer programs of `moments` proportionally more rows."""
DEFAULT_SECONDS = ((100, 5.0), (200, 60.0))
"""Default time limit: the larger of nodes/100 s, at most 5 s, and nodes/200 s, at most 60 s."""


@dataclass(frozen=True)
class _Limits:
    """Effort limits of one call: moves and rows instead of seconds, so that plans do not depend on the machine."""

    missing: float
    """The fraction of the step's time by which a plan may exceed the lower bound."""
    program_gain: float
    """The fraction of the step's time by which a program must lead to a faster plan for further programs to be
    solved."""
    search_moves: int
    """Moves that the local search weighs."""
    idle_moves: float
    """Moves without a better plan after which the search ends."""
    failed_repair_moves: float
    """Moves weighed by failed repairs, after which infeasible starts are skipped. Lowering peaks takes at most twice as
    many."""
    programs: ProgramEffort
    """The limits of the integer programs of `moments`."""
    extra_repair_moves: float = MOVES_PER_SECOND * EXTRA_REPAIR_SECONDS
    """Moves of one repair if a feasible plan is known already."""
    recompute_ratio: float = 1.5
    """A repair is abandoned when its recomputations take this many times as long as those of the best plan."""
    far_ratio: float = 1.02
    """Peaks are lowered first if all peaks known before repairs exceed this many times the budget."""

    @classmethod
    def of(cls, graph: Graph, time_limit: float | None) -> _Limits:
        """Returns the limits for a time limit in seconds; None is the default time limit."""
        count = len(graph.nodes)
        default = max(min(count / rate, most) for rate, most in DEFAULT_SECONDS)
        seconds = default if time_limit is None else time_limit
        thorough = time_limit is not None or count <= SMALL
        return cls(
            missing=GOOD_ENOUGH if thorough else SOON_ENOUGH,
            program_gain=-inf if thorough else PROGRAM_GAIN,
            search_moves=max(0, round(MOVES_PER_SECOND * (seconds - count / NODES_PER_SECOND))),
            idle_moves=IDLE_MOVES if time_limit is None else inf,
            failed_repair_moves=MOVES_PER_SECOND * default,
            programs=usual_effort(graph, max(1.0, (time_limit or 0.0) / PROGRAM_SECONDS)),
        )


def auto(
    graph: Graph,
    budget: int | None = None,
    *,
    time_limit: float | None = None,
    seed: int = 0,
    watch: Callable[[str, int, int], object] | None = None,
) -> Schedule:
    """Returns the fastest schedule found within `budget`.

    Args:
        graph: one training step.
        budget: bytes; None follows the decisions of a policy and, without any decisions, saves everything.
        time_limit: approximate seconds on a slow core, converted into a number of moves, so that the same limit gives
            the same plan on every machine. Starts are found whatever the limit. Default: one second per 100 nodes, at
            most 5, or one per 200 nodes, at most 60, whichever is more. The search ends earlier at a plan that is
            nearly optimal, or when it no longer finds better plans.
        seed: the seed of the search's random numbers.
        watch: called from time to time with what is being done, how much of it is done, and how much there is to do.
            The last number is 0 if it is not known; such steps are reported only if they take more than a second.

    Raises:
        BudgetError: no schedule is found that fits.

    Warns:
        UserWarning: the search was interrupted (`KeyboardInterrupt`), and the best plan so far is returned.
    """
    if budget is None:
        decided = any(value.decision for value in graph.values)
        return policy(graph) if decided else save_all(graph)
    limits = _Limits.of(graph, time_limit)
    known = orders_of(graph)
    key = (budget, time_limit, seed)
    if key not in known.found:
        known.found[key] = _solved(known, budget, limits, seed, watch or _ignore)
    return known.found[key]


def orders_of(graph: Graph) -> KnownOrders:
    """Returns the orders of a graph from which plans start; see `remembering`."""
    return known_orders(graph, lambda: KnownOrders(graph, 2 * _Limits.of(graph, None).failed_repair_moves))


def _solved(
    known: KnownOrders, budget: int, limits: _Limits, seed: int, tell: Callable[[str, int, int], object]
) -> Schedule:
    rules, graph = known.rules, known.graph
    if peak_of(rules, known.plain[0]) <= budget:
        return schedule_of(graph, *known.plain[0])
    fitted: list[Order] = []
    found = fitted
    tell_if_slow = tell if len(graph.nodes) > NODES_PER_SECOND else _ignore
    try:
        tell_if_slow("proving a bound", 0, 0)
        bound, certificates = certified(graph, budget, effort=quick(graph))
        enough = bound.seconds + limits.missing * graph.seconds
        tell_if_slow("looking for plans to start from", 0, 0)
        starts = _Starts(known, budget, limits, certificates)
        for order in starts.feasible(enough):
            fitted.append(order)  # one by one, so that an interrupt keeps the plans found so far
            tell_if_slow("plans to start from", len(fitted), 0)
        fitted.sort(key=lambda order: seconds_of(rules, order))
        search = Search(rules, fitted, budget, seed)
        found = search.found
        report = lambda done, of: tell("moves weighed", done, of)
        search.run(limits.search_moves, enough, report, limits.idle_moves)
        missed = min(seconds_of(rules, order) for order in found) - bound.seconds
        if OPTIMAL * graph.seconds < missed <= GOOD_ENOUGH * graph.seconds and limits.missing == GOOD_ENOUGH:
            found.extend(starts.last())
    except KeyboardInterrupt:
        if not found:
            raise
        warnings.warn(
            "fckpt was interrupted while it searched for a plan, and uses the best plan found so far.",
            stacklevel=users_stacklevel(),
        )
    return schedule_of(graph, *min(found, key=lambda order: seconds_of(rules, order)))


def _ignore(*_: object) -> None:
    """Accepts a report of progress and does nothing."""


class _Starts:
    """The starts of one graph for one budget, in families that are computed only if they are needed."""

    def __init__(self, known: KnownOrders, budget: int, limits: _Limits, certificates: list[Order]) -> None:
        """Chooses the families.

        Args:
            known: the orders of the graph that do not depend on the budget.
            budget: bytes.
            limits: the limits of repairs and programs.
            certificates: the orders that were found while the lower bound was proven.
        """
        self.known, self.rules, self.budget, self.limits = known, known.rules, budget, limits
        self.certificates = certificates
        self.families: tuple[Callable[[], Iterable[Order]], ...] = (
            (self._of_certificates, self._of_blocks, self._of_plain)
            if known.blocks_only
            else (self._of_certificates, self._of_programs, self._of_cuts_and_chains, self._of_blocks)
        )
        """Each family has its own choice of starts near the budget: plans of blocks are so close to each other that
        they would leave no room for other starts."""

    @functools.cached_property
    def blocks_near_budget(self) -> list[Start]:
        """The schedules of the chain of blocks next to the budget."""
        return measured(self.rules, _around(self.known.blocks, self.budget))

    # ---- families -------------------------------------------------------------------------------------

    def _of_certificates(self) -> Iterable[Order]:
        return self.certificates

    def _of_programs(self) -> Iterator[Order]:
        """Yields the starts that integer programs make for the budget."""
        yield from moment_orders(self.rules, self.known.plain, self.budget, self.limits.programs)

    def _of_cuts_and_chains(self) -> Iterator[Order]:
        """Yields the fastest feasible starts, the smallest infeasible ones that are faster, and saving everything."""
        near = (
            *_around(self.known.chains, self.budget),
            *near_budget(self.rules, self.known.minimum_cuts, self.budget),
        )
        yield from self._nearest([*self.known.common, *measured(self.rules, near)])
        yield from self.known.plain

    def _of_blocks(self) -> Iterator[Order]:
        return self._nearest(self.blocks_near_budget)

    def _of_plain(self) -> Iterable[Order]:
        """Returns the orders that save everything if no schedule of the blocks is feasible."""
        return self.known.plain if all(start.peak_nbytes > self.budget for start in self.blocks_near_budget) else ()

    def _nearest(self, starts: Iterable[Start]) -> Iterator[Order]:
        """Yields the fastest feasible starts, and the smallest infeasible ones that are faster."""
        ranked, count = by_peak(starts), STARTS_PER_SIDE
        inside = sorted((s for s in ranked if s.peak_nbytes <= self.budget), key=lambda start: start.seconds)[:count]
        fastest = inside[0].seconds if inside else inf
        outside = [s for s in ranked if s.peak_nbytes > self.budget and s.seconds < fastest][:count]
        yield from (start.order for start in (*inside, *outside))

    # ---- feasible orders ------------------------------------------------------------------------------

    def feasible(self, enough: float) -> Iterator[Order]:
        """Yields orders within the budget, at least one.

        Args:
            enough: seconds. Once a start has led to an order that takes at most this long, later starts are skipped;
                infinite if it is proven that no order fits.

        Raises:
            BudgetError: no order is found that fits.
        """
        rules, budget, limit, fastest, wasted = self.rules, self.budget, inf, inf, 0
        possible = self.known.least_peak <= budget and enough < inf
        if not possible or self._is_far():  # before integer programs are solved in vain
            self._check()
        for family in self.families if possible else ():
            for start in family():
                if wasted > self.limits.failed_repair_moves and peak_of(rules, start) > budget:
                    continue
                most = self.limits.extra_repair_moves if fastest < inf else inf
                order, moves = fit(rules, start, budget, limit, most)
                before = fastest
                if order is None:
                    wasted += moves
                else:
                    fastest = min(fastest, seconds_of(rules, order))
                    limit = self.limits.recompute_ratio * (fastest - seconds_of(rules, self.known.plain[0]))
                    yield order
                    if fastest <= enough:
                        return
                if family == self._of_programs and before - fastest < self.limits.program_gain * rules.graph.seconds:
                    break  # what is missing is memory for recomputations, of which programs know nothing
        if fastest == inf:
            self._check()
            yield fit(rules, self.known.least, budget)[0] or self.known.least

    def last(self) -> list[Order]:
        """Returns feasible orders from the integer program that proves the bound, and from an unlimited repair."""
        if self.known.blocks_only:
            return []  # repairing the plan that saves everything would take longer than all other steps
        rules = self.rules
        effort = quick(rules.graph)._replace(branches=PROOF.branches, gap=PROOF.gap)
        proved = certified(rules.graph, self.budget, effort=effort).plans
        orders = [order for order in proved if peak_of(rules, order) <= self.budget]
        repaired, _ = fit(rules, self.known.plain[0], self.budget)
        return orders if repaired is None else [*orders, repaired]

    def _is_far(self) -> bool:
        """Whether the peaks of all orders that are known before repairs are far over the budget."""
        return all(start.peak_nbytes > self.limits.far_ratio * self.budget for start in self._unrepaired())

    def _unrepaired(self) -> Iterator[Start]:
        """Yields all orders that are known before repairs; methods that take longest come last."""
        yield from measured(self.rules, (*self.certificates, *self.known.minimum_cuts))
        yield from self.known.common
        yield from self.known.spread
        yield from self.known.binomials

    def _check(self) -> None:
        """Raises `BudgetError` if the order with the lowest peak exceeds the budget."""
        if peak_of(self.rules, self.known.least) > self.budget:
            graph = self.rules.graph
            raise over_budget(
                graph, schedule_of(graph, *self.known.least), self.budget, "auto", least_peak=self.known.least_peak
            )


def _around(chains: list[Curve], budget: int) -> Iterator[Order]:
    """Yields the schedules of chains next to the budget."""
    return (order for curve in chains for order in curve.around(budget))
