"""A plan: what to keep and what to compute again, with its price, to print, save and use again."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import html
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fckpt import solve
from fckpt._units import format_bytes, parse_bytes
from fckpt.errors import ArgumentTypeError, ArgumentValueError, BudgetError, FckptError, PlanError
from fckpt.graph.graph import Graph, checked
from fckpt.graph.identity import fingerprint
from fckpt.graph.schedule import Schedule, plain_schedule
from fckpt.graph.simulation import Timeline, simulate
from fckpt.report.progress import Line
from fckpt.report.summary import summary_line, summary_table
from fckpt.report.table import Residual, residuals
from fckpt.report.timeline import memory_svg
from fckpt.solve.proofs.bounds import Bound, least_peak
from fckpt.solve.proofs.certificate import quick, tighter

__all__ = ["Plan", "check_budget", "make_plan", "plain_plan"]

FORMAT = 3
PROVEN = 1e-7
"""Differences of overheads that are rounding: bounds from integer programs are proven up to about 1e-9."""
Budget = int | float | str


@dataclass(frozen=True, repr=False)
class Plan:
    """One traced call, and the schedule that a solver found for it.

    `print(plan)` shows it, a notebook draws it, `save` and `load` keep it, `fckpt.remat(fn, plan=plan)` runs it.
    """

    graph: Graph
    schedule: Schedule
    solver: str
    budget_bytes: int | None
    """What the plan was made for; None if only a policy decided."""
    torch_version: str
    loss_of: tuple[str, ...] = ()
    """The tensors of the result that it is differentiated for, `loss float32[]`; empty if for all of them."""

    @functools.cached_property
    def timeline(self) -> Timeline:
        """What the plan does to memory, step by step."""
        return simulate(self.graph, self.schedule)

    @functools.cached_property
    def baseline(self) -> Timeline:
        """The same for the plain function, which computes everything once."""
        return simulate(self.graph.eager, plain_schedule(self.graph))

    @property
    def peak_bytes(self) -> int:
        """The most bytes that forward and backward hold at once, above what was held at the call."""
        return self.timeline.peak_nbytes

    @property
    def baseline_peak_bytes(self) -> int:
        """The same for the plain function. A float budget is a fraction of it."""
        return self.baseline.peak_nbytes

    @property
    def overhead(self) -> float:
        """The time spent on computing again, as a fraction of the plain function's time."""
        return self.timeline.overhead

    @functools.cached_property
    def bound(self) -> Bound:
        """What no plan within the same budget can beat; takes from milliseconds to two seconds, once."""
        budget = self.peak_bytes if self.budget_bytes is None else self.budget_bytes
        return tighter(self.graph, max(budget, self.peak_bytes), effort=quick(self.graph))

    @property
    def lower_bound(self) -> float:
        """A proven lower bound on the overhead of every plan within the budget, in any order."""
        rest = self.timeline.seconds - self.timeline.recomputed_seconds
        least = max(0.0, self.bound.seconds / rest - 1) if rest else 0.0
        return self.overhead if abs(self.overhead - least) <= PROVEN else least

    @property
    def gap(self) -> float:
        """By how much the overhead may be above the least that is possible; 0 only if that is proven."""
        return self.overhead - self.lower_bound

    @functools.cached_property
    def least_peak_bytes(self) -> int:
        """A proven lower bound on the peak of every plan, however much it computes again."""
        return least_peak(self.graph)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the graph's structure: plans with the same one fit the same traced calls."""
        return fingerprint(self.graph)

    @functools.cached_property
    def residuals(self) -> list[Residual]:
        """What is held between the passes."""
        return residuals(self.graph, self.schedule, lambda name: getattr(torch, name, name))

    def __str__(self) -> str:
        """One line, and a table of what is kept and what is computed again."""
        table = summary_table(
            self.graph,
            self.schedule,
            self.timeline,
            self.baseline,
            solver=self.solver,
            budget=self.budget_bytes,
            gap=self.gap,
        )
        return f"{table}\nFor a loss of {', '.join(self.loss_of)} alone." if self.loss_of else table

    def __repr__(self) -> str:
        known = self.gap if "bound" in vars(self) else None  # a look in a debugger should not take seconds
        line = summary_line(self.timeline, self.baseline, solver=self.solver, budget=self.budget_bytes, gap=known)
        return f"<Plan: {line}>"

    def _repr_html_(self) -> str:
        """The memory over time, before and after, as notebooks show it."""
        steps = (len(plain_schedule(self.graph).forward), len(self.schedule.forward))
        svg = memory_svg(self.baseline, self.timeline, self.budget_bytes, forward_steps=steps)
        return f"{svg}<pre>{html.escape(str(self))}</pre>"

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as plain data."""
        data = {
            "format": FORMAT,
            "torch": self.torch_version,
            "solver": self.solver,
            "budget_bytes": self.budget_bytes,
            "fingerprint": self.fingerprint,
            "graph": self.graph.to_json(),
            "schedule": self.schedule.to_json(),
            "loss_of": list(self.loss_of),
        }
        return {**data, "checksum": checksum(data)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file, `step.plan.json` by custom."""
        target = Path(path)
        temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(self.to_json()))
        temporary.replace(target)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Reads a plan that `save` wrote.

        Raises:
            PlanError: the file is corrupt, of another format, or does not add up.
        """
        return Plan.from_json(Path(path).read_bytes(), path)

    @staticmethod
    def from_json(text: str | bytes, path: Any = "the text") -> Plan:
        """Reads a plan from the JSON text of `to_json`; `path` is where it comes from. Errors are those of `load`."""
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise PlanError(f"{path} has the plan format {data['format']!r}; this fckpt reads format {FORMAT}.")
            plan = _read(data)
            needed = plan.peak_bytes  # and validates the schedule
            if plan.budget_bytes is not None and needed > plan.budget_bytes:
                raise PlanError(
                    f"{path} is damaged: its plan needs {format_bytes(needed)}, and was made for a budget of "
                    f"{format_bytes(plan.budget_bytes)}. Make it anew with fckpt.plan."
                )
            if plan.fingerprint != data["fingerprint"]:
                raise PlanError(f"{path} is damaged: its graph does not have the fingerprint that it was saved with.")
            if data["checksum"] != checksum(data):
                raise PlanError(f"{path} is damaged: it does not have the checksum that it was saved with.")
        except PlanError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, FckptError) as error:
            raise PlanError(f"{path} is no plan of fckpt, or it is damaged: {error}") from error
        except RecursionError as error:
            raise PlanError(f"{path} is no plan of fckpt: it is nested too deeply.") from error
        return plan


def checksum(data: dict[str, Any]) -> str:
    """Returns a hash of all that `Plan.to_json` writes: times and temporaries too, which a fingerprint leaves out."""
    rest = {k: v for k, v in data.items() if k != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _read(data: dict[str, Any]) -> Plan:
    """A plan out of plain data, its fields checked and not yet its sense."""
    budget = data["budget_bytes"]
    return Plan(
        Graph.from_json(data["graph"]),
        Schedule.from_json(data["schedule"]),
        checked(data["solver"], "solver", str),
        None if budget is None else checked(budget, "budget_bytes", int, positive=True),
        checked(data["torch"], "torch", str),
        tuple([checked(text, "loss_of", str) for text in data.get("loss_of", [])]),
    )


def check_budget(budget: Any) -> Budget:
    """Returns `budget` if it can be one.

    Raises:
        ArgumentTypeError: it is no int, float or str.
        ArgumentValueError: it is no size, or a float that is no fraction of the plain peak.
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        raise ArgumentTypeError(
            f'a budget is a number of bytes (an int, or "4GiB"), or a float for a fraction of the plain peak, not '
            f"{type(budget).__name__}: {budget!r}."
        )
    if isinstance(budget, float):
        if not 0 < budget <= 1:
            raise ArgumentValueError(
                f"a float budget is a fraction of the plain function's peak, above 0 and at most 1, not {budget!r}. "
                'Bytes are ints, or text like "4GiB".'
            )
        return budget
    return parse_bytes(budget)


def plain_plan(graph: Graph, torch_version: str) -> Plan:
    """Returns what the plain function does, as a plan."""
    plan = Plan(graph.eager, plain_schedule(graph), "save_all", None, torch_version)
    return dataclasses.replace(plan, budget_bytes=plan.peak_bytes)


def make_plan(
    graph: Graph, budget: Budget | None, solver: str, torch_version: str, time_limit: float | None = None
) -> Plan:
    """Solves a priced graph. On a terminal, a line says how far it is.

    Args:
        graph: with costs, and with a policy's decisions if there are any.
        budget: see `check_budget`; None to follow the decisions alone.
        solver: the name of a solver.
        torch_version: noted in the plan.
        time_limit: seconds, for solvers that search as long as they are told to; None leaves it to them.

    Raises:
        BudgetError: nothing fits, or the plan that the solver returned does not.
        ArgumentValueError: a time limit for a solver that takes none, or one that is no time.
    """
    if budget is None:
        return Plan(graph, solve.get("policy")(graph, None), "policy", None, torch_version)
    if isinstance(budget, float):
        nbytes = int(simulate(graph.eager, plain_schedule(graph)).peak_nbytes * budget)
    else:
        nbytes = parse_bytes(budget)
    if time_limit is not None and not 0 < time_limit < float("inf"):
        raise ArgumentValueError(f"a time limit is a number of seconds above 0, not {time_limit!r}.")
    chosen = solve.get(solver)
    if chosen is not solve.auto:
        if time_limit is not None:
            raise ArgumentValueError(f"the solver {solver!r} takes no time limit; 'auto' does.")
        return _within(Plan(graph, chosen(graph, nbytes), solver, nbytes, torch_version), nbytes)
    with Line() as line:

        def tell(what: str, done: int, of: int) -> None:
            if of:
                line.update(done, of, f"{what}: {{}} of {{}}")
            else:
                line.say(f"{what}: {done}" if done else what)

        schedule = solve.auto(graph, nbytes, time_limit=time_limit, watch=tell)
    return _within(Plan(graph, schedule, solver, nbytes, torch_version), nbytes)


def _within(plan: Plan, nbytes: int) -> Plan:
    """Returns the plan, whoever made it, unless it breaks its promise."""
    if plan.peak_bytes <= nbytes:
        return plan
    raise BudgetError(
        f"the solver {plan.solver!r} returned a plan that needs {format_bytes(plan.peak_bytes)} where the budget is "
        f"{format_bytes(nbytes)}. Name that budget or another solver; a solver should raise a BudgetError itself.",
        plan.peak_bytes,
    )
