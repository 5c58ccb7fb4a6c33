"""Statistics and warnings of one planned function: counts, seconds, and calls that did not run by a plan."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from fckpt._planned.making import nbytes_within
from fckpt._planned.plan import Budget
from fckpt._units import format_bytes, parse_bytes
from fckpt.errors import BudgetWarning, GradientWarning, PlanWarning, users_stacklevel

__all__ = ["Ledger", "Stats"]


class _Reason(NamedTuple):
    """A reason why a call does not run by a plan, with the parts of its warning."""

    why: str
    way_out: str = "Put the budget around the outermost function, the transform included."
    does: str = "is rematerialised as a whole"
    is_plain: bool = False
    """Whether the call takes at most the memory of the plain function. Other kinds of derivatives may take more."""


_REASONS = {
    "saved-tensor hooks": _Reason(
        "it runs inside of another rematerialised region, torch.utils.checkpoint or other saved-tensor hooks, which "
        "decide what is saved",
        way_out="Put the budget around the outer function instead.",
        is_plain=True,
    ),
    "forward mode": _Reason("forward-mode derivatives run through it"),
    "vmap": _Reason("a vmap is around the transform that differentiates it, in a way that plans do not support"),
    "batched backward": _Reason(
        "its backward pass is batched or differentiated by an outer transform (jacrev, hessian, is_grads_batched)"
    ),
    "second derivative": _Reason(
        "a second derivative is taken through its backward pass (create_graph=True, or grad of grad)",
        way_out="Derivatives beyond the first may differ from the plain ones by rounding. Put the budget around the "
        "outermost function, the transform included.",
    ),
    "dispatch mode": _Reason(
        "a TorchDispatchMode is active, which may change what operations return, and would see other operations than "
        "in the plain function",
        way_out="Do not use the mode here, or set fckpt_looks_on = True in its class if it changes no results.",
        is_plain=True,
    ),
    "layout of gradients": _Reason(
        "the gradient of a leaf is returned by torch.autograd.grad, or seen by a hook, in another layout than "
        "loss.backward() gives it, and the function cannot be traced again",
        way_out="Use loss.backward(), and register_post_accumulate_grad_hook instead of register_hook.",
    ),
    "copies for hooks": _Reason(
        "a hook sees a gradient in the layout in which it is computed, and autograd then copies it for .grad",
        way_out="Use register_post_accumulate_grad_hook instead of register_hook.",
        does="runs by its plan",
    ),
    "settings": _Reason(
        "its backward pass runs under other settings of torch than its forward pass (deterministic algorithms, oneDNN, "
        "cuDNN, precision of matrix products, denormal numbers)",
        way_out="Run forward and backward under the same settings.",
    ),
    "other strides": _Reason(
        "its backward pass receives gradients with other strides than the plan assumed, and the function cannot be "
        "traced again",
        way_out="Return a loss, or contiguous tensors.",
        does="runs by its plan, but overwrites no operands",
    ),
    "forward again": _Reason(
        "its backward pass is a second one, or one for other outputs than those that the forward pass was planned for, "
        "so the forward pass runs again while the caller holds the first results and gradients",
        way_out="Return only what is differentiated, and call the function once for each backward pass.",
        does="runs by its plan",
    ),
    "conditions": _Reason(
        "a branch of the function depends on the data of its arguments, and computing the condition before the call "
        "takes more memory than the plan",
        way_out="Pass what decides the branch as a Python value (is_causal=True, for example).",
        does="runs by its plan",
    ),
    "raises an error": _Reason(
        "its backward pass raises an error while it is traced, which a plain backward pass is to raise as well",
        way_out="Make the backward pass run without an error.",
    ),
    "untraceable": _Reason(
        "it cannot be traced into a graph", way_out="Put the budget around a part of it that can be traced."
    ),
    "lazy module": _Reason(
        "it is the first call of a lazy module, which creates its parameters",
        way_out="Run the module once before training, without gradients.",
        does="runs like the plain function",
    ),
    "recorded": _Reason(
        "torch.jit.trace, make_fx or torch.func.functionalize records it, and a recorded recompute would draw other "
        "random numbers",
        way_out="Put the budget around the recorded function.",
        does="becomes a part of the recorded graph",
        is_plain=True,
    ),
    "meta tensors": _Reason(
        "some of its arguments and captured tensors are on the device meta, and others are not",
        way_out="Put all tensors on one device.",
        does="runs like the plain function",
        is_plain=True,
    ),
    "nothing to differentiate": _Reason(
        "none of its arguments and captured tensors requires grad",
        way_out="Use torch.no_grad() for inference, or put the budget around the function that is differentiated.",
        does="runs like the plain function",
        is_plain=True,
    ),
}
"""By the name under which `Stats.fallbacks` counts the reason."""


@dataclass(frozen=True)
class Stats:
    """Counts over all calls of one rematerialised function, which `fckpt.stats` returns."""

    calls: int = 0
    """Calls to which the budget, policy or plan applies: with grad mode on, outside of other planned functions."""
    plans: int = 0
    """Plans made, by a solver or from plans of other sizes, or read from disk."""
    read: int = 0
    """Those of the plans that were read from disk, without running a solver."""
    adapted: int = 0
    """Those of the plans that were made from plans of other sizes, without running a solver."""
    quick: int = 0
    """Those of the plans that were found quickly for a first call, while a worker process runs the solver."""
    improved: int = 0
    """Adapted and quick plans that a faster plan has replaced, which was solved in the background."""
    programs: int = 0
    """Planned programs: traces that were lowered, one per signature and per set of differentiated outputs."""
    sized: int = 0
    """Programs among these whose sizes were inserted into a trace with symbolic sizes, so that nothing was traced."""
    captures: int = 0
    """Captures of the function's Python code: the first one, and one each time that a guard failed."""
    replayed: int = 0
    """Calls that ran as CUDA graphs, see the option `cuda_graphs` of `remat`."""
    hits: int = 0
    """Calls that ran an existing planned program, without capturing, tracing or solving."""
    fallbacks: dict[str, int] = field(default_factory=dict)
    """Calls and backward passes that could not run by a plan, or exceeded it, by reason."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds spent on capturing, tracing, pricing, solving and lowering, and on compiling and trying kernels if there
    are any."""


STAGES = ("capture", "trace", "price", "solve", "lower")
"""The stages of planning whose seconds are counted."""
clock = time.perf_counter
"""Reads the time of the stages."""

_SIZES = re.compile(r"size mismatch|stride mismatch|\.size\(\)|\.stride\(\)")


def _promised(budget: Budget, plain: int | None) -> str:
    if not isinstance(budget, float):
        return format_bytes(parse_bytes(budget))
    share = f"{budget:g} of the plain peak"
    return share if plain is None else f"{share} ({format_bytes(nbytes_within(budget, lambda: plain))})"


class Ledger:
    """The counts of one region, and the warnings that it has issued."""

    def __init__(self) -> None:
        self.stats = Stats(fallbacks={}, seconds=dict.fromkeys(STAGES, 0.0))
        self._warned: set[str] = set()
        self._in_a_row = {False: 0, True: 0}
        self.reused = False
        """Whether a call has used an earlier capture since the latest one."""
        self.promised: Budget | None = None
        self.name = "a rematerialised function"
        self.expected: Callable[[], int | None] = lambda: None
        """Returns the peak in bytes of a call without a plan; None if it is unknown."""

    def count(self, what: str) -> None:
        """Increments one of the counts: `calls`, `plans`, `programs`, `captures`, `hits`, and so on."""
        stats = object.__new__(Stats)  # `dataclasses.replace` would take as long as all guards of a small call
        vars(stats).update(vars(self.stats))
        vars(stats)[what] += 1
        self.stats = stats

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds the seconds that the body takes to the entry `what`."""
        start = clock()
        try:
            yield
        finally:
            self.stats.seconds[what] = self.stats.seconds.get(what, 0.0) + clock() - start

    def falls_back(self, reason: str, detail: str = "", *, nbytes: int | None = None, quiet: bool = False) -> None:
        """Counts a call that does not run by a plan, or exceeds it, and warns the first time for each reason.

        Args:
            reason: a key of `_REASONS`.
            detail: more about the cause, for the warning.
            nbytes: the peak of the call in bytes, at most; None if it is unknown.
            quiet: whether to count without a warning.
        """
        self.stats.fallbacks[reason] = self.stats.fallbacks.get(reason, 0) + 1
        if quiet or self.promised is None or reason in self._warned:
            return
        self._warned.add(reason)
        found, plain = _REASONS[reason], self.expected()
        expected = plain if found.is_plain else nbytes
        if expected is not None:
            peak = f", in up to {format_bytes(expected)}{', the peak of the plain function' if found.is_plain else ''}"
        elif plain is not None:
            peak = f"; it is not known how much memory that takes (a plain step: up to {format_bytes(plain)})"
        else:
            peak = "; it is not known how much memory that takes"
        warnings.warn(
            f"the budget of {self.name}, {_promised(self.promised, plain)}, is not kept in this call: {found.why}"
            f"{f' ({detail})' if detail else ''}. The function {found.does}{peak}. {found.way_out} "
            'To make this an error: warnings.simplefilter("error", fckpt.BudgetWarning).',
            BudgetWarning,
            stacklevel=users_stacklevel(),
        )

    def computes_before(self, nbytes: int, peak: int) -> None:
        """Warns if conditions that are computed before a call take more bytes than the plan at its peak."""
        if nbytes > peak:
            self.falls_back("conditions", nbytes=nbytes)

    def shares_casts(self, names: Sequence[str]) -> None:
        """Warns, once, that several regions use the same leaf tensor, which autocast would have cast only once."""
        if "casts" in self._warned:
            return
        self._warned.add("casts")
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warnings.warn(
            f"{self.name} takes {names[0]}{more}, and so did an earlier planned call in the same block of autocast. "
            "Plain PyTorch casts such a tensor once, and adds up its gradients in the lower precision. Each planned "
            "call casts the tensor separately, so its gradients add up in the higher precision: they are more "
            "accurate, but not bit for bit those of the plain function. Put one region around all uses, or pass "
            "cache_enabled=False to torch.autocast, so that plain PyTorch casts at each use too.",
            GradientWarning,
            stacklevel=users_stacklevel(),
        )

    @property
    def warned_of_sums(self) -> bool:
        """Whether the warning of `adds_later` has been given."""
        return "sums" in self._warned

    def adds_later(self, name: str) -> None:
        """Warns, once, that others contributed to the gradient of an operand before the sum of a planned call."""
        if self.warned_of_sums:
            return
        self._warned.add("sums")
        warnings.warn(
            f"{self.name} uses {name} more than once, and {name} is used outside of the call as well (by another call "
            "or through a view that the call returned, for example). A planned call adds up its own contributions to a "
            "gradient before autograd adds them to those of others; plain autograd adds one after the other. So this "
            "gradient may differ from that of the plain function in the last bits. To avoid that, put the budget "
            "around all uses.",
            GradientWarning,
            stacklevel=users_stacklevel(),
        )

    def adds_views_first(self) -> None:
        """Warns, once, that the gradients of views that a call returned were added up before the call's own."""
        if "views" in self._warned:
            return
        self._warned.add("views")
        warnings.warn(
            f"{self.name} returns views of a tensor from which it computes other results. With a plan, the gradients "
            "of these views are added up before those of the other results; plain autograd may add them in another "
            "order. So gradients may differ from those of the plain function in the last bits. To avoid that, put the "
            "budget around all uses of the views, or return copies of them (`.clone()`).",
            GradientWarning,
            stacklevel=users_stacklevel(),
        )

    def told_compiled(self, lines: Sequence[str]) -> None:
        """Warns, once, that lines of a library are told that they are compiled."""
        if not lines or "told compiled" in self._warned:
            return
        self._warned.add("told compiled")
        more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
        warnings.warn(
            f"{self.name} can be captured only as compiled code: torch.compiler.is_compiling() is True for "
            f"{lines[0]}{more}. A library may run other operations there than in a plain call, which may differ in the "
            "last bits and in memory. fckpt.check compares a planned step with a plain one.",
            GradientWarning,
            stacklevel=users_stacklevel(),
        )

    def plans_without_checkpoint(self, fraction: float) -> None:
        """Warns, once, that a budget is a fraction of the peak without checkpoints, not of the plain peak."""
        if "checkpoint" in self._warned:
            return
        self._warned.add("checkpoint")
        warnings.warn(
            f"{self.name} uses torch.utils.checkpoint inside, with random numbers (dropout). The plan takes its place "
            f"and decides about recomputation for the whole function. The budget {fraction} is a fraction of the peak "
            "without torch.utils.checkpoint, so the peak may be above that of the plain call. Give the budget in "
            "bytes, or remove the checkpoints (`model.gradient_checkpointing_disable()` for Hugging Face).",
            BudgetWarning,
            stacklevel=users_stacklevel(),
        )

    def captured_again(self, *whys: str) -> None:
        """Warns at the third capture in a row, which means that values that the function reads keep changing.

        Captures because of sizes are counted separately, and the eighth is one too many: a size of 0 or 1, and a size
        with which the Python code takes another branch, have one capture each. So do training and evaluation without
        gradients. The first capture of a kind (inside of a transform of torch.func, for example) has nothing that
        changed.

        Args:
            whys: why each earlier capture does not hold, the latest first. If one holds but for the sizes, that is the
                reason.
        """
        found = [why for why in whys if why and "grad_mode" not in why]
        if not found:
            return
        why = next(filter(_SIZES.search, found), found[0])
        if self.reused:
            self._in_a_row = {False: 0, True: 0}
        self.reused = False
        about_sizes = bool(_SIZES.search(why))
        self._in_a_row[about_sizes] += 1
        again, ordinal = (7, "eighth") if about_sizes else (2, "third")
        if self._in_a_row[about_sizes] == again:
            warnings.warn(
                f"{self.name} is captured for the {ordinal} time in a row, which takes as long as many steps. "
                f"Something that it reads has changed: {why}. Pass what changes as a tensor, "
                "or keep it out of the function.",
                PlanWarning,
                stacklevel=users_stacklevel(),
            )
