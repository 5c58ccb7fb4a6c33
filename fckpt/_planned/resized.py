"""Programs for new sizes, made from programs of other sizes: milliseconds, of which most are for the trace.

`families` adapts known schedules to the graph of a new size. Mostly that means to take the fastest that fits, as it is.
For a trace with symbols (`_trace/sized.py`), nothing of that needs the graph: what a schedule holds is a sum of bytes
(`graph/outline.py`), its code is written, and all other properties of a program are the same at all sizes. The graph is
only made if something reads it, for example if the size comes again and is solved in the background.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fckpt._planned.making import nbytes_within
from fckpt._planned.plan import Budget, Plan
from fckpt._planned.program import Program
from fckpt._trace.operations import Trace
from fckpt.cost.calls import CostSource
from fckpt.cost.pricing import Prices
from fckpt.cost.pricing import prices as prices_of
from fckpt.graph.outline import Outline
from fckpt.graph.schedule import plain_schedule
from fckpt.graph.simulation import Timeline
from fckpt.solve._adapt import FULL

__all__ = ["Resized"]

_STRUCTURES = 32
"""The number of traces with symbols whose programs are known: the first ones are forgotten."""
_MOST = 16
"""The number of programs of a trace with symbols, with different schedules: the latest ones."""

ALIKE = 0.995
"""Fractions of budgets that differ by less are taken to be equal."""

CLOSE = 0.01
"""A schedule is taken as it is, although much of the budget is left, if the plain function, or a schedule that needs
slightly more than the budget, is faster by at most this fraction of the time of a step."""
ABOVE = 1.1
"""A schedule needs slightly more than the budget if it needs at most this multiple."""


class _Known(NamedTuple):
    """A program, and what its schedule holds as a function of sizes."""

    program: Program
    outline: Outline
    full: float
    """The least fraction of a budget that the schedule took where planning ended with it, and at most `FULL`."""


class _Structure(NamedTuple):
    """What is known of a trace with symbols."""

    plain: Outline
    """The plain function."""
    known: list[_Known]
    """Programs with different schedules, the latest first."""


class Resized:
    """The programs of one function whose traces were made for given sizes by traces with symbols."""

    def __init__(self) -> None:
        self._structures: dict[Any, _Structure] = {}
        """By trace with symbols, the latest last."""

    def add(self, program: Program) -> None:
        """Adds a program, if programs of other sizes can be made from it."""
        sized, plan = program.trace.sized, program.plan
        if sized is None or program.kernels != "aten" or plan.budget_bytes is None:
            return
        graph, found = program.graph, self._structures.pop(sized, None)
        plain, known = found or _Structure(Outline(graph.eager, plain_schedule(graph)), [])
        same = next((other for other in known if _is_same(other.program, program)), None)
        outline, full = (Outline(graph, program.schedule), FULL) if same is None else (same.outline, same.full)
        latest = _Known(program, outline, min(full, plan.peak_bytes / plan.budget_bytes * ALIKE))
        others = [other for other in known if other is not same]
        structure = _Structure(plain, [latest, *others][:_MOST])
        self._structures = dict([*self._structures.items(), (sized, structure)][-_STRUCTURES:])

    def knows(self, traced: Trace) -> bool:
        """Whether there are programs of other sizes."""
        return traced.sized in self._structures and not traced.regions

    def program(self, traced: Trace, budget: Budget, costs: CostSource) -> Program | None:
        """Returns a program for a trace whose structure is known; None if no schedule is good enough as it is.

        Args:
            traced: the trace.
            budget: the budget.
            costs: the source of costs.
        """
        prices = prices_of(traced, costs)
        plain, known = self._structures[traced.sized]
        if not plain.is_valid(prices.nbytes):
            return None
        nbytes = nbytes_within(budget, lambda: _timeline(plain, prices).peak_nbytes)
        valid = [each for each in known if each.outline.is_valid(prices.nbytes)]
        found = [(_timeline(each.outline, prices), each) for each in valid]
        within = [pair for pair in found if pair[0].peak_nbytes <= nbytes]
        if not within:
            return None
        timeline, (program, _, full) = min(within, key=lambda pair: pair[0].seconds)
        if timeline.overhead > CLOSE and timeline.peak_nbytes < full * nbytes:
            above = [other.overhead for other, _ in found if nbytes < other.peak_nbytes <= ABOVE * nbytes]
            if not above or timeline.overhead > min(above) + CLOSE:
                return None
        graph = traced.graph.deferred(lambda: prices.parts(traced.graph))
        plan = Plan(graph, program.schedule, "auto", nbytes, str(torch.__version__))
        vars(plan)["timeline"] = timeline  # otherwise simulated at its first use
        return program.at(traced, plan)


def _is_same(one: Program, other: Program) -> bool:
    """Whether two programs have the same schedule and write over the same values."""
    over = [[(node.overwrites, node.accumulates) for node in program.graph.nodes] for program in (one, other)]
    return one.schedule == other.schedule and over[0] == over[1]


def _timeline(outline: Outline, prices: Prices) -> Timeline:
    return outline.timeline(prices.seconds, prices.temporary_nbytes, prices.replayed_nbytes, prices.nbytes)
