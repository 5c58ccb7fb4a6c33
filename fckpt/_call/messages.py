"""Results that a rematerialised function keeps, though all else is computed again: those that took a message.

A function that runs again asks for the same results in the same order. So the first run writes down what came of a
reduction over other ranks, and a later one is handed it in place of another message. That holds while both runs do the
same, operation by operation: under reverse mode. Batched, or with tangents beside it, a function sends again; so it
does where a result was changed in place since. All ranks run the same program, and decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextvars import ContextVar, Token
from typing import Any

import torch

from fckpt._call.levels import only_reverse

__all__ = ["Kept", "kept"]

Make = Callable[[], torch.Tensor]
_giver: ContextVar[Callable[[Hashable, Make], torch.Tensor] | None] = ContextVar("giver", default=None)


def kept(key: Hashable, make: Make) -> torch.Tensor:
    """Returns what `make` returns, or did in the first run of the function that is running again.

    Args:
        key: what is asked for; the same only if the results have the same shape and dtype.
        make: makes it, as a tensor that nothing tracks.
    """
    giver = _giver.get()
    return make() if giver is None else giver(key, make)


class Kept:
    """What was kept of one call."""

    __slots__ = ("results",)

    def __init__(self) -> None:
        self.results: list[tuple[Hashable, torch.Tensor, int]] = []
        """Key, result and its version, in order."""

    def recorded(self) -> _Giving:
        """The body is the first run."""
        self.results, outer = [], _giver.get()

        def giver(key: Hashable, make: Make) -> torch.Tensor:
            result = outer(key, make) if outer else make()
            alias = result.detach()
            self.results.append((key, alias, alias._version))
            return result

        return _Giving(giver)

    def repeated(self) -> _Giving:
        """The body is a later run."""
        remaining, outer = iter(self.results), _giver.get()

        def giver(key: Hashable, make: Make) -> torch.Tensor:
            known, alias, version = next(remaining, (None, None, 0))
            if alias is not None and known == key and alias._version == version:
                return alias.detach()
            return outer(key, make) if outer else make()

        return _Giving(giver)


class _Giving:
    """Has a giver asked in its body, if the levels in force are those of reverse mode."""

    __slots__ = ("giver", "token")

    def __init__(self, giver: Callable[[Hashable, Make], torch.Tensor]):
        self.giver = giver

    def __enter__(self) -> None:
        self.token: Token[Any] = _giver.set(self.giver if only_reverse() else None)

    def __exit__(self, *error: object) -> None:
        _giver.reset(self.token)
