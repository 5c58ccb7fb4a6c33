"""Errors and warnings of fckpt. Each message says what was given, why it cannot work, and what to do instead."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = [
    "ArgumentTypeError",
    "ArgumentValueError",
    "BudgetError",
    "BudgetWarning",
    "CacheWarning",
    "CheckpointError",
    "ClosureError",
    "FckptError",
    "GradientWarning",
    "ImpureFunctionError",
    "KernelWarning",
    "MeasurementError",
    "MeshWarning",
    "MutationError",
    "OpaqueOutputError",
    "PlanError",
    "PlanWarning",
    "PolicyWarning",
    "RandomStateError",
    "RankFailure",
    "ScheduleError",
    "TraceError",
    "name_of",
    "region_name",
    "users_stacklevel",
]


class FckptError(Exception):
    """Base of every error that fckpt raises."""


class ArgumentTypeError(FckptError, TypeError):
    """An argument has a type that is not accepted."""


class ArgumentValueError(FckptError, ValueError):
    """An argument has the right type but a value that is not accepted."""


class ClosureError(FckptError, RuntimeError):
    """A function captures a differentiated tensor that its recompute cannot replace."""


class BudgetError(FckptError, ValueError):
    """No plan fits the budget."""

    def __init__(self, message: str, least_bytes: int, more: Callable[[], str] | None = None):
        super().__init__(message)
        self.least_bytes = least_bytes
        """The least budget for which a plan is known: planning with it succeeds."""
        self._more = more

    def adding(self, text: str) -> BudgetError:
        """Returns the error with more text in its message."""
        return BudgetError(f"{self.args[0]}{text}", self.least_bytes, self._more)

    def __str__(self) -> str:
        """Returns the message. Its end, which may take seconds to find, is found when it is first read."""
        more, self._more = self._more, None
        if more is not None:
            self.args = (f"{self.args[0]}{more()}",)
        return super().__str__()

    def __reduce__(self) -> tuple[Any, ...]:  # by default, unpickling passes only the message
        return type(self), (str(self), self.least_bytes), self.__dict__


class PlanError(FckptError, ValueError):
    """A plan was made for another function, other arguments or another version; or its file is corrupt."""


class ScheduleError(FckptError, ValueError):
    """A schedule reads a value that is not in memory, or omits a required step."""


class TraceError(FckptError, RuntimeError):
    """A function cannot be traced into a graph."""


class ImpureFunctionError(FckptError, RuntimeError):
    """A function computed a different result when it ran again for the backward pass."""


class MutationError(FckptError, RuntimeError):
    """A tensor that the recompute needs was changed in place."""


class MeasurementError(FckptError, RuntimeError):
    """Memory cannot be measured now, because a profiler is recording or a CUDA graph is captured."""


class RandomStateError(FckptError, RuntimeError):
    """The random numbers of the forward pass cannot be drawn again."""


class OpaqueOutputError(FckptError, TypeError):
    """A function returned tensors inside an object that is not a pytree."""


class RankFailure(FckptError, RuntimeError):
    """A rank of a mesh failed, stopped responding, or ran a different operation from the other ranks."""

    def __init__(self, message: str, rank: int):
        super().__init__(message)
        self.rank = rank
        """The rank that failed."""

    def __reduce__(self) -> tuple[Any, ...]:  # see `BudgetError`
        return type(self), (*self.args, self.rank), self.__dict__


class CheckpointError(FckptError, RuntimeError):
    """A file of a checkpoint is damaged or does not belong to a checkpoint."""


class CacheWarning(UserWarning):
    """A model's cache is switched off because its blocks are rematerialised."""


class GradientWarning(UserWarning):
    """Gradients may differ from those of the plain function in the last bits: the message says why, and what to do."""


class KernelWarning(UserWarning):
    """A kernel cannot be compiled, so torch's own kernels run instead."""


class MeshWarning(UserWarning):
    """A function on a mesh does unnecessary work, or probably not what is intended."""


class BudgetWarning(UserWarning):
    """A call exceeds its budget or may do so: the message says why, what was promised, and what to do."""


class PlanWarning(UserWarning):
    """A function is planned again at many calls."""


class PolicyWarning(UserWarning):
    """A policy has no effect, or uses a name that does not occur."""


def name_of(fn: Any) -> str:
    """Returns the name of a function or a module in messages."""
    name = getattr(fn, "__qualname__", None)
    if not isinstance(name, str) or not name:  # a module may answer for any name
        name = type(fn).__name__
    return name.rpartition("<locals>.")[2] if name != "<lambda>" and not name.endswith(".<lambda>") else "a lambda"


def region_name(fn: Any) -> str:
    """Returns the words for a rematerialised function in messages: "the rematerialised function 'block'"."""
    if fn is None or type(fn).__module__.partition(".")[0] == "fckpt":  # not known, or a captured graph
        return "the rematerialised function"
    name = name_of(fn)
    return "the rematerialised lambda" if name == "a lambda" else f"the rematerialised function {name!r}"


def users_stacklevel() -> int:
    """Returns the `stacklevel` that makes a warning of the caller point at the line that called fckpt."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_on_the_way(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    return level


def _is_on_the_way(module: str) -> bool:
    """Whether code of a Python module stands between the user's line and fckpt."""
    return module.partition(".")[0] == "fckpt" or module == "torch.nn.modules.module"
