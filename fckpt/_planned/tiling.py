"""Plans with tiles: which rewriting of a trace gives the fastest plan within a budget.

The plan without tiles is the first candidate. Further candidates cut operations until none needs more than a share of
the budget (`SHARES`), as far as possible; each is priced and bounded like any graph. Candidates are solved in the order
of their bounds, until no other can be faster than the plan found. If saving everything fits, nothing is cut.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from fckpt._planned.making import nbytes_of
from fckpt._planned.plan import Budget, Plan
from fckpt._tile.choice import Limits, chosen
from fckpt._tile.exact import is_exact
from fckpt._tile.rewriting import rewritten
from fckpt._tile.stretches import Step, Untileable
from fckpt._trace.operations import Trace
from fckpt._units import format_bytes
from fckpt.errors import ArgumentValueError, BudgetError, PlanError
from fckpt.graph.graph import Graph
from fckpt.graph.identity import difference
from fckpt.solve.proofs.bounds import least_peak, lower_bound

__all__ = ["Tile", "check_tile", "hinted", "tiled_as_planned", "tiled_or_hinted"]

Tile = bool | Literal["exact"]

SHARES = (0.9, 0.6, 0.35)
"""The share of the budget that no operation of a candidate needs more than, as far as tiles can do it."""
FASTER = 1e-3
"""The fraction of its time by which a plan must be faster than one with fewer tiles, to be taken instead."""
ROUNDING = 1e-9
_QUICK = Limits(stretches=4, nodes=3_000)
"""The effort for the hint of a `BudgetError`."""
_QUICK_SECONDS = 0.25
"""A hint about exact tiles needs tests of kernels, which are run if the whole step takes at most so long."""


def check_tile(tile: Any, budget: Any) -> Tile:
    """Returns the option `tile` if it is valid.

    Raises:
        ArgumentValueError: it is not False, True or "exact", or there is no budget.
    """
    if tile is not True and tile is not False and tile != "exact":
        raise ArgumentValueError(f'tile must be False, True or "exact", not {tile!r}.')
    if tile and budget is None:
        raise ArgumentValueError(f"tile={tile!r} needs a budget: operations are cut into tiles to fit it.")
    return tile


def tiled_or_hinted(
    traced: Trace,
    graph: Graph,
    price: Callable[[Trace], Graph],
    budget: Budget | None,
    make: Callable[[Graph, Any], Plan],
    tile: Tile,
) -> Plan:
    """Returns the fastest plan found within a budget, with tiles if they are wanted and help.

    Args:
        traced: the trace.
        graph: the graph of the trace with costs and the decisions of policies.
        price: returns such a graph.
        budget: see `make_plan`; a float is a fraction of the plain peak of the call, without tiles.
        make: solves a graph within a budget.
        tile: "exact" for tiles with the bits of the whole operations only; True for any; False for none.

    Raises:
        BudgetError: no plan fits. Without tiles, the message says what they could do, if that is quickly known.
    """
    if not tile or budget is None:
        try:
            return make(graph, budget)
        except BudgetError as error:
            raise hinted(error, traced, graph, least_peak(graph), ("exact", True)) from None
    nbytes = nbytes_of(budget, graph)
    candidates = [_Candidate((), graph, lower_bound(graph, nbytes).seconds)]
    if candidates[0].least_seconds <= graph.seconds * (1 + ROUNDING):
        plan = _plan(candidates[0], nbytes, make)
        if isinstance(plan, Plan) and plan.overhead <= 0:
            return plan
    for steps in _candidates(dataclasses.replace(traced, graph=graph), nbytes, tile):
        cut = price(rewritten(traced, steps))
        candidates.append(_Candidate(tuple(steps), cut, lower_bound(cut, nbytes).seconds))
    found = _best(candidates, nbytes, make)
    if isinstance(found, BudgetError):
        least = min(least_peak(c.graph) for c in candidates)
        raise hinted(found, traced, graph, least, (True,)) if tile == "exact" else found
    best, steps = found
    return dataclasses.replace(best, tiles=steps, tile=tile, untiled=graph) if steps else best


class _Candidate(NamedTuple):
    """A rewriting, with the graph that it makes."""

    steps: tuple[Step, ...]
    graph: Graph
    least_seconds: float
    """The seconds that every schedule within the budget takes; infinite if none exists."""


def _plan(candidate: _Candidate, nbytes: int, make: Callable[[Graph, Any], Plan]) -> Plan | BudgetError:
    try:
        return make(candidate.graph, nbytes)
    except BudgetError as error:
        return error


def _best(
    candidates: Sequence[_Candidate], nbytes: int, make: Callable[[Graph, Any], Plan]
) -> tuple[Plan, tuple[Step, ...]] | BudgetError:
    """Returns the fastest plan; candidates that cannot be faster than a known plan are not solved.

    If nothing fits, the error names the least budget that would do.
    """
    best: tuple[Plan, tuple[Step, ...]] | None = None
    errors: list[BudgetError] = []
    for candidate in sorted(candidates, key=lambda c: (c.least_seconds, len(c.steps))):
        hopeless = candidate.least_seconds == math.inf
        if (best is not None and candidate.least_seconds >= _limit(best[0])) or (hopeless and errors):
            break
        made = _plan(candidate, nbytes, make)
        if isinstance(made, BudgetError):
            errors.append(made)
        elif best is None or made.timeline.seconds < _limit(best[0]):
            best = made, candidate.steps
    if best is not None:
        return best
    known = [c for c in candidates if least_peak(c.graph) < min(e.least_bytes for e in errors)]
    if known and all(c.least_seconds == math.inf for c in candidates):  # the one that needs least was not solved yet
        made = _plan(min(known, key=lambda c: least_peak(c.graph)), nbytes, make)
        errors += [made] if isinstance(made, BudgetError) else []
    return min(errors, key=lambda error: error.least_bytes)


def _limit(plan: Plan) -> float:
    """Returns the seconds below which another plan is faster by more than rounding."""
    return (1 - FASTER) * plan.timeline.seconds


def _candidates(traced: Trace, nbytes: int, tile: Tile) -> Iterator[list[Step]]:
    known: list[list[Step]] = [[]]
    for share in SHARES:
        steps = chosen(traced, share * nbytes, exact=tile == "exact")
        if steps not in known:
            known.append(steps)
            yield steps


def tiled_as_planned(plan: Plan, traced: Trace) -> Trace:
    """Returns the trace of a call, cut into tiles as in a plan.

    Raises:
        PlanError: the call is another computation, or its kernels do not give the bits that exact tiles promise.
    """
    try:
        made = rewritten(traced, plan.tiles)
        how = difference(plan.graph, made.graph)
        exact = plan.tile != "exact" or is_exact(traced, plan.tiles)
    except Untileable as error:
        raise PlanError(f"the operations of this call cannot be cut into tiles as in the plan: {error}.") from error
    if how is not None:
        raise PlanError(f"the plan was made for another computation, cut into tiles: {how}.")
    if not exact:
        raise PlanError(
            "the plan was made with tile='exact', but the kernels of this machine do not give equal bits for its "
            "tiles. Make a plan here with fckpt.plan."
        )
    return made


def hinted(error: BudgetError, traced: Trace, graph: Graph, least: int, tiles: Sequence[Tile]) -> BudgetError:
    """Returns a `BudgetError` that also says how much less a plan may need with tiles, if that is quickly known.

    It looks for that when its message is read: many of these errors are caught, for their least bytes alone.

    Args:
        error: the error.
        traced: the trace.
        graph: its graph without tiles, with costs.
        least: a bound on the peak of every plan that was tried.
        tiles: the options to try, in order; each is named if it needs less than those before it.
    """
    if len(graph.nodes) > _QUICK.nodes:
        return error
    return BudgetError(str(error), error.least_bytes, lambda: _hint(traced, graph, least, tiles))


def _hint(traced: Trace, graph: Graph, least: int, tiles: Sequence[Tile]) -> str:
    """The end of the message of a `BudgetError`: see `hinted`."""
    costed = dataclasses.replace(traced, graph=graph)
    found: list[str] = []
    for tile in tiles:
        if tile == "exact" and graph.seconds > _QUICK_SECONDS:
            continue
        steps = chosen(costed, 0.0, exact=tile == "exact", limits=_QUICK)
        needed = least_peak(rewritten(costed, steps).graph) if steps else least
        if needed < 0.9 * least:
            found.append(f"{format_bytes(needed)} with tile={tile!r}")
            least = needed
    return f" Cut into tiles, the largest operations need less: at least {', '.join(found)}." if found else ""
