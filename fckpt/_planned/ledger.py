"""What happened in the calls of one planned function: counts, seconds, and the budgets that were not kept."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from fckpt._units import format_bytes
from fckpt.errors import BudgetWarning, GradientWarning, PlanWarning, users_stacklevel

__all__ = ["Ledger", "Stats"]


class _Reason(NamedTuple):
    """Why a budget is not kept in a call, and what the warning says of it."""

    why: str
    way_out: str = "Put the budget around the outermost function, the transform included."
    does: str = "is rematerialised as a whole"
    is_plain: bool = False
    """Whether the call takes no more than the plain function by itself does; derivatives of other kinds may."""


_REASONS = {
    "saved-tensor hooks": _Reason(
        "it runs inside of another rematerialised region, torch.utils.checkpoint or other saved-tensor hooks, which "
        "decide about what is saved",
        way_out="Put the budget around the outer function instead.",
        is_plain=True,
    ),
    "forward mode": _Reason("forward-mode derivatives run through it"),
    "vmap": _Reason("a vmap is around the transform that differentiates it, in a way that no plan covers"),
    "batched backward": _Reason(
        "its backward pass is batched or differentiated by an outer transform (jacrev, hessian, is_grads_batched)"
    ),
    "second derivative": _Reason(
        "a second derivative is taken through its backward pass (create_graph=True, or grad of grad)"
    ),
    "dispatch mode": _Reason(
        "a TorchDispatchMode is in force, which may change what operations return, and would see other operations than "
        "in the plain function",
        way_out="Leave the mode out, or set fckpt_looks_on = True in its class if it changes nothing.",
        is_plain=True,
    ),
    "other strides": _Reason(
        "its backward pass is given gradients that lie otherwise in memory than the plan assumed, and the function "
        "cannot be traced again",
        way_out="Return a loss, or contiguous tensors.",
        does="runs by its plan, with nothing written over anything",
    ),
    "torch.compile": _Reason(
        "it runs inside of a function that torch.compile compiles, where the compiler plans",
        way_out="Compile without the budget, or use the budget without torch.compile.",
    ),
    "untraceable": _Reason(
        "it cannot be traced into a graph", way_out="Put the budget around a part of it that can be traced."
    ),
    "nothing to differentiate": _Reason(
        "nothing that it is given or closes over requires grad, so it runs as it stands",
        way_out="Use torch.no_grad() for inference, or put the budget around the function that is differentiated.",
        does="runs as it stands",
        is_plain=True,
    ),
}
"""By the name under which `stats` counts it."""


@dataclass(frozen=True)
class Stats:
    """What `fckpt.stats` returns: counts over all calls of one rematerialised function."""

    calls: int = 0
    """Calls that were to be planned: with grad mode on, outside of other planned functions."""
    plans: int = 0
    """Plans that a solver made."""
    programs: int = 0
    """Traces made ready to run: one for each signature, and for each set of outputs that was differentiated."""
    captures: int = 0
    """How often the function's Python code was captured, because it was new or something that it read had changed."""
    hits: int = 0
    """Calls that found a program and ran it: nothing was captured, traced or solved."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """Calls, and backward passes, that could not run by a plan, by reason."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds spent on capturing, tracing and solving."""


class Ledger:
    """The counts of one region, and which warnings it has given."""

    def __init__(self) -> None:
        self.stats = Stats(fallbacks={}, seconds={"capture": 0.0, "trace": 0.0, "solve": 0.0})
        self._warned: set[str] = set()
        self._in_a_row = self._hits = 0
        self.promised: int | float | str | None = None
        self.name = "a rematerialised function"
        self.expected: Callable[[], int | None] = lambda: None
        """Returns the peak in bytes that a call may reach without a plan, if that is known."""

    def count(self, what: str) -> None:
        """Counts one more call, plan, program, capture or hit."""
        self.stats = dataclasses.replace(self.stats, **{what: getattr(self.stats, what) + 1})

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds the seconds that the body takes."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.stats.seconds[what] += time.perf_counter() - start

    def falls_back(self, reason: str, detail: str = "", *, quiet: bool = False) -> None:
        """Notes that a call does not run by a plan, and warns the first time for each reason.

        Args:
            reason: a key of the table of reasons.
            detail: what else is known of the cause.
            quiet: whether to count only.
        """
        self.stats.fallbacks[reason] = self.stats.fallbacks.get(reason, 0) + 1
        if quiet or self.promised is None or reason in self._warned:
            return
        self._warned.add(reason)
        found, budget = _REASONS[reason], self.promised
        expected = self.expected() if found.is_plain else None
        instead = "" if expected is None else f", in up to {format_bytes(expected)}, the peak of the plain function"
        promised = (
            f"{budget:g} of the plain peak"
            if isinstance(budget, float)
            else (budget if isinstance(budget, str) else format_bytes(budget))
        )
        warnings.warn(
            f"the budget of {self.name}, {promised}, is not kept in this call: {found.why}"
            f"{f' ({detail})' if detail else ''}. The function {found.does}{instead}. {found.way_out} "
            'To make this an error: warnings.simplefilter("error", fckpt.BudgetWarning).',
            BudgetWarning,
            stacklevel=users_stacklevel(),
        )

    def shares_casts(self, names: Sequence[str]) -> None:
        """Warns, the first time, that regions share leaves which autocast would have cast once for all of them."""
        if "casts" in self._warned:
            return
        self._warned.add("casts")
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warnings.warn(
            f"{self.name} takes {names[0]}{more}, as a planned call before it did in the same block of autocast. Plain "
            "PyTorch casts such a tensor once, and adds up its gradients in the lower precision; planned calls cast it "
            "each for itself, and its gradients add up in the higher one: they are nearer to the true gradient, and "
            "not bit for bit those of the plain function. Put one region around all uses, or pass "
            "cache_enabled=False to torch.autocast, with which plain PyTorch does as planned calls do.",
            GradientWarning,
            stacklevel=users_stacklevel(),
        )

    def captured_again(self, why: str) -> None:
        """Warns at the third capture in a row: what the function reads changes from call to call."""
        self._in_a_row = 1 if self._hits != self.stats.hits else self._in_a_row + 1
        self._hits = self.stats.hits
        if self._in_a_row == 3:
            warnings.warn(
                f"{self.name} is captured for the third time in a row, which takes as long as many steps. What it read "
                f"has changed: {why or 'no guard says what'}. Pass what changes as a tensor, or keep it out of the "
                "function.",
                PlanWarning,
                stacklevel=users_stacklevel(),
            )
