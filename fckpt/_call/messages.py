"""Results of cross-rank communication. A recompute reuses them instead of sending the messages again.

A recompute asks for the same results in the same order as the forward. So the forward records the result of each
reduction or exchange over other ranks, and the recompute receives the recorded result. This is valid only if both runs
execute the same operations, which is so under reverse mode. Under `vmap` and in forward mode a recompute sends its
messages again, and so it does for a result that has been changed in place since. All ranks run the same program, so all
ranks decide the same way.
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
    """Calls `make`; during a recompute, returns the result that the forward recorded instead.

    Args:
        key: identifies the message. Messages with equal keys have results of the same shape and dtype.
        make: sends the message; returns its result as a tensor that neither autograd nor torch.func tracks.
    """
    answer = _answer.get()
    return make() if answer is None else answer(key, make)


class Messages:
    """The results of the messages that one call has sent."""

    __slots__ = ("results",)

    def __init__(self) -> None:
        self.results: list[tuple[Hashable, torch.Tensor, int]] = []
        """(key, result, version of the result) of each message, in order."""

    def recording(self) -> _Answering:
        """Returns a context manager for the forward, which records the results."""
        self.results, outer = [], _answer.get()

        def answer(key: Hashable, make: Make) -> torch.Tensor:
            result = outer(key, make) if outer else make()
            alias = result.detach()
            self.results.append((key, alias, alias._version))
            return result

        return _Answering(answer)

    def reusing(self) -> _Answering:
        """Returns a context manager for a recompute, which reuses the recorded results."""
        remaining, outer = iter(self.results), _answer.get()

        def answer(key: Hashable, make: Make) -> torch.Tensor:
            known, alias, version = next(remaining, (None, None, 0))
            if alias is not None and known == key and alias._version == version:
                return alias.detach()
            return outer(key, make) if outer else make()

        return _Answering(answer)


class _Answering:
    """Context manager whose body gets the results of `reuse_message` from `answer`, if only reverse-mode levels are
    active.
    """

    __slots__ = ("answer", "token")

    def __init__(self, answer: Callable[[Hashable, Make], torch.Tensor]):
        self.answer = answer

    def __enter__(self) -> None:
        self.token: Token[Any] = _answer.set(self.answer if only_reverse() else None)

    def __exit__(self, *error: object) -> None:
        _answer.reset(self.token)
