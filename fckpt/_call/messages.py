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

__all__ = ["Messages", "reuse_message"]

Make = Callable[[], torch.Tensor]
_answer: ContextVar[Callable[[Hashable, Make], torch.Tensor] | None] = ContextVar("answer", default=None)


def reuse_message(key: Hashable, make: Make) -> torch.Tensor:
    """Returns what `make` returns, or did in the first run of the function that is running again.

    Args:
        key: what is asked for; the same only if the results have the same shape and dtype.
        make: makes it, as a tensor that nothing tracks.
    """
    answer = _answer.get()
    return make() if answer is None else answer(key, make)


class Messages:
    """What was kept of one call."""

    __slots__ = ("results",)

    def __init__(self) -> None:
        self.results: list[tuple[Hashable, torch.Tensor, int]] = []
        """Key, result and its version, in order."""

    def recording(self) -> _Answering:
        """The body is the first run."""
        self.results, outer = [], _answer.get()

        def answer(key: Hashable, make: Make) -> torch.Tensor:
            result = outer(key, make) if outer else make()
            alias = result.detach()
            self.results.append((key, alias, alias._version))
            return result

        return _Answering(answer)

    def reusing(self) -> _Answering:
        """The body is a later run."""
        remaining, outer = iter(self.results), _answer.get()

        def answer(key: Hashable, make: Make) -> torch.Tensor:
            known, alias, version = next(remaining, (None, None, 0))
            if alias is not None and known == key and alias._version == version:
                return alias.detach()
            return outer(key, make) if outer else make()

        return _Answering(answer)


class _Answering:
    """Has a answer asked in its body, if the levels in force are those of reverse mode."""

    __slots__ = ("answer", "token")

    def __init__(self, answer: Callable[[Hashable, Make], torch.Tensor]):
        self.answer = answer

    def __enter__(self) -> None:
        self.token: Token[Any] = _answer.set(self.answer if only_reverse() else None)

    def __exit__(self, *error: object) -> None:
        _answer.reset(self.token)
