"""The class `Plan`: a traced call with a schedule for it, which can be printed, saved, loaded and run."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import html
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fckpt._fuse.option import Kernels, check_kernels
from fckpt._tile.stretches import Gathered, Step, step_from_json, step_to_json
from fckpt._units import format_bytes
from fckpt.errors import ArgumentTypeError, ArgumentValueError, FckptError, PlanError
from fckpt.graph.graph import Graph, checked, checked_texts
from fckpt.graph.identity import fingerprint
from fckpt.graph.schedule import Compute, FusedBlock, FusedSchedule, Schedule, plain_schedule
from fckpt.graph.simulation import Timeline, simulate
from fckpt.report.summary import summary_line, summary_table
from fckpt.report.table import Residual, residuals
from fckpt.report.timeline import memory_svg
from fckpt.solve.proofs.bounds import Bound, least_peak
from fckpt.solve.proofs.certificate import quick, tighter

__all__ = ["Budget", "Plan"]

FORMAT = 3
PROVEN = 1e-7
"""Differences of overheads up to this number are rounding errors: integer programs prove bounds up to about 1e-9."""
Budget = int | float | str


@dataclass(frozen=True, repr=False)
class Plan:
    """One traced call, with the schedule that a solver found for it.

    `print(plan)` shows a table, and a notebook shows the memory over time. `save` and `load` write and read files.
    `fckpt.remat(fn, plan=plan)` runs the plan.
    """

    graph: Graph
    schedule: Schedule
    solver: str
    budget_bytes: int | None
    """The budget of the plan; None if only a policy decided."""
    torch_version: str
    loss_of: tuple[str, ...] = ()
    """The tensors of the result for which the backward pass runs, `loss float32[]`; empty if it runs for all."""
    tiles: tuple[Step, ...] = ()
    """How operations are cut into tiles; `graph` is the graph with them."""
    tile: bool | str = False
    """The option with which `tiles` were chosen: "exact" if they have the bits of the whole operations."""
    untiled: Graph | None = None
    """The graph without tiles, if there are tiles."""
    kernels: Kernels = "aten"
    """The kernels that run the plan. They are compiled where it runs."""
    fused: FusedSchedule | None = dataclasses.field(default=None, compare=False)
    """The schedule with blocks that run as compiled kernels; None if there are none, or for a plan from a file.
    Timeline and peak include these blocks; times are the times of torch's own kernels."""
    remade: Callable[[Plan, tuple[Any, ...], dict[str, Any]], Plan] | None = dataclasses.field(
        default=None, compare=False
    )
    """Makes the plan of a call with other arguments, see `at`; None for a plan from a file, which has no function."""

    @functools.cached_property
    def timeline(self) -> Timeline:
        """The memory of the plan, step by step."""
        return simulate(self.graph, self.schedule if self.fused is None else self.fused)

    @functools.cached_property
    def baseline(self) -> Timeline:
        """The memory of the plain function, step by step; it computes everything once."""
        return simulate(self._plain.eager, plain_schedule(self._plain))

    @property
    def _plain(self) -> Graph:
        """The graph of the plain function."""
        return self.graph if self.untiled is None else self.untiled

    @property
    def _plain_seconds(self) -> float:
        """The time of the plain function."""
        if self.untiled is None:
            return self.timeline.seconds - self.timeline.recomputed_seconds
        return self.untiled.seconds

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the plan holds at once in forward and backward, above those held at the call."""
        return self.timeline.peak_nbytes

    @property
    def baseline_peak_bytes(self) -> int:
        """The most bytes that the plain function holds at once. A float budget is a fraction of this number."""
        return self.baseline.peak_nbytes

    @property
    def overhead(self) -> float:
        """The time of all recomputations, as a fraction of the plain function's time.

        With tiles, what they gain or lose counts too: the overhead is negative if the plan is faster than the function.
        """
        return self._beside_plain.overhead

    @property
    def _beside_plain(self) -> Timeline:
        """The timeline, in which all time beyond that of the plain function counts as recomputation."""
        if self.untiled is None:
            return self.timeline
        more = self.timeline.seconds - self.untiled.seconds
        return dataclasses.replace(self.timeline, recomputed_seconds=more)

    @functools.cached_property
    def bound(self) -> Bound:
        """The bound behind `lower_bound`. Its first use takes between milliseconds and two seconds."""
        budget = self.peak_bytes if self.budget_bytes is None else self.budget_bytes
        return tighter(self.graph, max(budget, self.peak_bytes), effort=quick(self.graph))

    @property
    def lower_bound(self) -> float:
        """A proven lower bound on the overhead of every plan within the budget, in any order.

        If there are tiles, it holds for plans with these tiles.
        """
        rest = self._plain_seconds
        least = self.bound.seconds / rest - 1 if rest else 0.0
        least = max(0.0, least) if self.untiled is None else least
        return self.overhead if abs(self.overhead - least) <= PROVEN else least

    @property
    def gap(self) -> float:
        """The overhead minus `lower_bound`. The plan is proven optimal if the gap is 0."""
        return self.overhead - self.lower_bound

    @functools.cached_property
    def least_peak_bytes(self) -> int:
        """A proven lower bound on the peak of every plan, with any amount of recomputation, and with these tiles."""
        return least_peak(self.graph)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the graph: plans with equal fingerprints are plans for the same computation."""
        return fingerprint(self.graph)

    @functools.cached_property
    def residuals(self) -> list[Residual]:
        """The residuals: the memory that is held between the forward and the backward pass."""
        return residuals(self.graph, self.schedule, lambda name: getattr(torch, name, name))

    def __str__(self) -> str:
        """Returns a summary line, and a table of saved and recomputed operations."""
        table = summary_table(
            self.graph,
            self.schedule,
            self._beside_plain,
            self.baseline,
            solver=self.solver,
            budget=self.budget_bytes,
            gap=self.gap,
        )
        lines = [table, *([self._tiles_text()] if self.tiles else [])]
        lines += [] if self.kernels == "aten" else [self._kernels_text()]
        return "\n".join([*lines, *self.loss_lines])

    @property
    def loss_lines(self) -> list[str]:
        """The line that says what the plan takes for the loss; no line if there are no other outputs."""
        return [f"For a loss of {', '.join(self.loss_of)} alone."] if self.loss_of else []

    def _kernels_text(self) -> str:
        """Describes the blocks: `With kernels='exact', 12 of 30 operations run in 4 compiled kernels.`"""
        if self.fused is None:
            return f"It runs with kernels={self.kernels!r}, compiled at the first call, if they are faster."
        blocks = [s for s in (*self.fused.forward, *self.fused.backward) if isinstance(s, FusedBlock)]
        number, steps = sum(len(b.nodes) for b in blocks), [*self.schedule.forward, *self.schedule.backward]
        of = sum(isinstance(s, Compute) for s in steps)
        return f"With kernels={self.kernels!r}, {number} of {of} operations run in {len(blocks)} fused blocks."

    def _tiles_text(self) -> str:
        """Describes the tiles in a sentence: `7 operations are cut into 8 tiles, with the bits of the whole ones.`"""
        cut = [step for step in self.tiles if not isinstance(step, Gathered)]
        counts = sorted({step.count for step in cut})
        number = sum(len(step.ways) for step in cut)
        many = " or ".join(map(str, counts))
        bits = "with the bits of the whole operations" if self.tile == "exact" else "and sums may be in another order"
        return f"{number} operations are cut into {many} tiles, {bits}. Lower bounds hold for plans with these tiles."

    def __repr__(self) -> str:
        known = self.gap if "bound" in vars(self) else None  # a debugger should not wait for the bound
        line = summary_line(self._beside_plain, self.baseline, solver=self.solver, budget=self.budget_bytes, gap=known)
        return f"<Plan: {line}>"

    def svg(self) -> str:
        """Returns a picture of the memory over the steps, plain and planned, as an `<svg>` element.

        A strip below the curves marks the steps in which the plan recomputes.

        Example:
            >>> import torch, fckpt
            >>> plan = fckpt.plan(lambda w: w.sin().exp().sum(), torch.ones(8, requires_grad=True), budget=1.0)
            >>> plan.svg().startswith("<svg ")
            True
        """
        steps = (len(plain_schedule(self._plain).forward), len((self.fused or self.schedule).forward))
        return memory_svg(self.baseline, self.timeline, self.budget_bytes, forward_steps=steps)

    def _repr_html_(self) -> str:
        """Returns the picture and the summary, which notebooks show."""
        return f"{self.svg()}<pre>{html.escape(str(self))}</pre>"

    def at(self, *args: Any, **kwargs: Any) -> Plan:
        """Returns the plan of the same function for arguments of other sizes, within the same budget.

        The call is traced and priced as by `fckpt.plan`. The schedule of this plan is adapted to the new sizes, which
        takes a fraction of the time of the solver. The solver runs only if no adapted schedule fits. The plan of the
        plain function, or of a policy, becomes that of the plain function or of the policy.

        Args:
            args: arguments with the structure of the plan's own arguments, and tensors of other sizes.
            kwargs: likewise.

        Raises:
            PlanError: the plan was read from a file, or the function runs other operations at these sizes.
            BudgetError: no plan for these sizes fits the budget.

        Example:
            >>> import torch, fckpt
            >>> def loss(w, x):
            ...     for _ in range(20):
            ...         x = torch.tanh(x @ w)
            ...     return x.sum()
            >>> w = torch.randn(16, 16, requires_grad=True)
            >>> plan = fckpt.plan(loss, w, torch.randn(1024, 16), budget="700KiB")
            >>> longer = plan.at(w, torch.randn(2048, 16))
            >>> longer.peak_bytes <= plan.budget_bytes, longer.overhead > plan.overhead
            (True, True)
        """
        if self.remade is None:
            raise PlanError(
                "this plan was read from a file or made for a call of fckpt.remat, and does not hold its function, "
                "which is traced for other sizes: make the plan with fckpt.plan."
            )
        return self.remade(self, args, kwargs)

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as plain data, which `from_json` reads."""
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
        if self.untiled is not None:
            steps = [step_to_json(step) for step in self.tiles]
            data |= {"tiles": steps, "tile": self.tile, "untiled": self.untiled.to_json()}
        if self.kernels != "aten":
            data["kernels"] = self.kernels
        return {**data, "checksum": checksum(data)}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles what `save` would write: neither the function, which `at` needs, nor compiled kernels."""
        return Plan.from_json, (self.to_json(),)

    def __copy__(self) -> Plan:
        return self  # it cannot change

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file, by convention `step.plan.json`."""
        target = Path(path)
        temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(self.to_json()))
        temporary.replace(target)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Reads a plan that `save` wrote.

        Raises:
            ArgumentTypeError: the path is no path.
            PlanError: the file is damaged or inconsistent, or has another format.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise ArgumentTypeError(f"the path of a plan is a str or a pathlib.Path, not {type(path).__name__}.")
        return Plan.from_json(Path(path).read_bytes(), path)

    @staticmethod
    def from_json(data: dict[str, Any] | str | bytes, path: Any = "the text") -> Plan:
        """Reads a plan from the result of `to_json`, or from its JSON text.

        Args:
            data: the plan.
            path: the origin of `data`, for error messages.

        Raises:
            PlanError: the data are damaged or inconsistent, or have another format.
        """
        try:
            read: dict[str, Any] = data if isinstance(data, dict) else json.loads(data)
            if read["format"] != FORMAT:
                raise PlanError(f"{path} has the plan format {read['format']!r}; this fckpt reads format {FORMAT}.")
            plan = _plan_from(read)
            needed = plan.peak_bytes  # and validates the schedule
            if plan.budget_bytes is not None and needed > plan.budget_bytes:
                raise PlanError(
                    f"{path} is damaged: its plan needs {format_bytes(needed)}, and was made for a budget of "
                    f"{format_bytes(plan.budget_bytes)}. Make the plan again with fckpt.plan."
                )
            if plan.fingerprint != read["fingerprint"]:
                raise PlanError(f"{path} is damaged: its graph does not have the fingerprint that it was saved with.")
            if read["checksum"] != checksum(read):
                raise PlanError(f"{path} is damaged: it does not have the checksum that it was saved with.")
        except PlanError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, FckptError) as error:
            raise PlanError(f"{path} is not a plan of fckpt, or it is damaged: {error}") from error
        except RecursionError as error:
            raise PlanError(f"{path} is not a plan of fckpt: it is nested too deeply.") from error
        return plan


def checksum(data: dict[str, Any]) -> str:
    """Returns a hash of the whole result of `Plan.to_json`, including the times and temporaries of operations."""
    rest = {k: v for k, v in data.items() if k != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _plan_from(data: dict[str, Any]) -> Plan:
    """Returns a plan from plain data. Checks the types of the fields, but not their consistency."""
    budget = data["budget_bytes"]
    return Plan(
        Graph.from_json(data["graph"]),
        Schedule.from_json(data["schedule"]),
        checked(data["solver"], "solver", str),
        None if budget is None else checked(budget, "budget_bytes", int, positive=True),
        checked(data["torch"], "torch", str),
        checked_texts(data.get("loss_of", []), "loss_of"),
        tuple([step_from_json(step) for step in data.get("tiles", [])]),
        _tile_from(data.get("tile", False)),
        Graph.from_json(data["untiled"]) if "untiled" in data else None,
        check_kernels(data.get("kernels", "aten"), planned=True),
    )


def _tile_from(value: Any) -> bool | str:
    if not isinstance(value, bool) and value != "exact":
        raise ArgumentValueError(f"tile is {value!r}")
    return value
