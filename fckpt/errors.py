"""The errors of fckpt. Each says what was given, why it cannot work, and what to do instead."""

from __future__ import annotations

import sys
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
    "users_stacklevel",
]


class FckptError(Exception):
    """Base of every error that fckpt raises."""


class ArgumentTypeError(FckptError, TypeError):
    """An argument has a type that cannot be used here."""


class ArgumentValueError(FckptError, ValueError):
    """An argument has the right type and a value that cannot be used here."""


class ClosureError(FckptError, RuntimeError):
    """A function closes over a differentiated tensor in a way that its recompute cannot follow."""


class BudgetError(FckptError, ValueError):
    """No plan fits the budget."""

    def __init__(self, message: str, least_bytes: int):
        super().__init__(message)
        self.least_bytes = least_bytes
        """The least budget for which a plan is known: planning with it succeeds."""

    def __reduce__(self) -> tuple[Any, ...]:  # by default an exception is made again of its message alone
        return type(self), (*self.args, self.least_bytes), self.__dict__


class PlanError(FckptError, ValueError):
    """A plan does not belong to this function, these arguments or this version; or its file is corrupt."""


class ScheduleError(FckptError, ValueError):
    """A schedule reads what is not there, or leaves undone what it must do."""


class TraceError(FckptError, RuntimeError):
    """A function cannot be traced into a graph."""


class ImpureFunctionError(FckptError, RuntimeError):
    """A function computed something else when it ran again for the backward pass."""


class MutationError(FckptError, RuntimeError):
    """A tensor that the recompute needs was changed in place."""


class RandomStateError(FckptError, RuntimeError):
    """Random numbers of the forward pass cannot be drawn again."""


class OpaqueOutputError(FckptError, TypeError):
    """A function returned tensors inside an object that is no pytree."""


class RankFailure(FckptError, RuntimeError):
    """A rank of a mesh failed, does not answer, or does something else than the others."""

    def __init__(self, message: str, rank: int):
        super().__init__(message)
        self.rank = rank
        """The one that it is about."""

    def __reduce__(self) -> tuple[Any, ...]:  # see `BudgetError`
        return type(self), (*self.args, self.rank), self.__dict__


class CheckpointError(FckptError, RuntimeError):
    """A file of a checkpoint is damaged, or is not what a checkpoint is made of."""


class CacheWarning(UserWarning):
    """A model's cache is switched off where its blocks are rematerialised."""


class GradientWarning(UserWarning):
    """Gradients are not, bit for bit, those of the plain function: the message says why, and what to do."""


class MeshWarning(UserWarning):
    """A function on a mesh does what it need not, or what is probably not meant."""


class BudgetWarning(UserWarning):
    """A budget is not kept in a call: the message says why, what was promised, and what to do."""


class PlanWarning(UserWarning):
    """A function is planned again and again."""


class PolicyWarning(UserWarning):
    """A policy does nothing, or names what does not occur."""


def users_stacklevel() -> int:
    """Returns the `stacklevel` with which a warning of the caller points at the line that called fckpt."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "fckpt":
        frame, level = frame.f_back, level + 1
    return level
