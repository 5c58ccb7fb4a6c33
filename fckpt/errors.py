"""The errors of fckpt. Each says what was given, why it cannot work, and what to do instead."""

from __future__ import annotations

__all__ = [
    "ArgumentTypeError",
    "ArgumentValueError",
    "ClosureError",
    "FckptError",
    "ImpureFunctionError",
    "MutationError",
    "OpaqueOutputError",
    "RandomStateError",
]


class FckptError(Exception):
    """Base of every error that fckpt raises."""


class ArgumentTypeError(FckptError, TypeError):
    """An argument has a type that cannot be used here."""


class ArgumentValueError(FckptError, ValueError):
    """An argument has the right type and a value that cannot be used here."""


class ClosureError(FckptError, RuntimeError):
    """A function closes over a differentiated tensor in a way that its recompute cannot follow."""


class ImpureFunctionError(FckptError, RuntimeError):
    """A function computed something else when it ran again for the backward pass."""


class MutationError(FckptError, RuntimeError):
    """A tensor that the recompute needs was changed in place."""


class RandomStateError(FckptError, RuntimeError):
    """Random numbers of the forward pass cannot be drawn again."""


class OpaqueOutputError(FckptError, TypeError):
    """A function returned tensors inside an object that is no pytree."""
