"""What happened in the calls of one planned function: counts, seconds, and the budgets that were not kept."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fckpt.errors import BudgetWarning, PlanWarning, users_stacklevel
from fckpt.units import format_bytes

__all__ = ["Ledger", "Stats"]

_REASONS = {
    "saved-tensor hooks": "it runs inside of another rematerialised region, torch.utils.checkpoint or other "
    "saved-tensor hooks, which decide about what is saved",
    "forward mode": "forward-mode derivatives run through it",
    "vmap": "a vmap is around the transform that differentiates it, in a way that no plan covers",
    "batched backward": "its backward pass is batched or differentiated by an outer transform (jacrev, hessian, "
    "is_grads_batched)",
    "second derivative": "a second derivative is taken through its backward pass (create_graph=True, or grad of grad)",
    "dispatch mode": "a TorchDispatchMode is in force, which may change what operations return, and would see other "
    "operations than in the plain function",
    "other strides": "its backward pass is given gradients that lie otherwise in memory than the plan assumed, and "
    "the function cannot be traced again",
    "torch.compile": "it runs inside of a function that torch.compile compiles, where the compiler plans",
    "untraceable": "it cannot be traced into a graph",
    "nothing to differentiate": "nothing that it is given or closes over requires grad, so it runs as it stands",
}
"""Why a budget cannot be kept in a call: the reason as `stats` counts it, and in words."""

_WAY_OUT = {
    "saved-tensor hooks": "Put the budget around the outer function instead.",
    "dispatch mode": "Leave the mode out, or set fckpt_looks_on = True in its class if it changes nothing.",
    "other strides": "Return a loss, or contiguous tensors.",
    "torch.compile": "Compile without the budget, or use the budget without torch.compile.",
    "untraceable": "Put the budget around a part of it that can be traced.",
    "nothing to differentiate": "Use torch.no_grad() for inference, or put the budget around the function that is "
    "differentiated.",
}


_DOES = {
    "nothing to differentiate": "runs as it stands",
    "other strides": "runs by its plan, with nothing written over anything",
}
_PLAIN = {"saved-tensor hooks", "dispatch mode", "nothing to differentiate"}
"""Where a call takes no more than the plain function by itself does; derivatives of other kinds do."""


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
        expected = self.expected() if reason in _PLAIN else None
        instead = "" if expected is None else f", in up to {format_bytes(expected)}, the peak of the plain function"
        budget = self.promised
        promised = (
            f"{budget:g} of the plain peak"
            if isinstance(budget, float)
            else (budget if isinstance(budget, str) else format_bytes(budget))
        )
        does = _DOES.get(reason, "is rematerialised as a whole")
        warnings.warn(
            f"the budget of {self.name}, {promised}, is not kept in this call: {_REASONS[reason]}"
            f"{f' ({detail})' if detail else ''}. The function {does}{instead}. "
            f"{_WAY_OUT.get(reason, 'Put the budget around the outermost function, the transform included.')} "
            'To make this an error: warnings.simplefilter("error", fckpt.BudgetWarning).',
            BudgetWarning,
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
