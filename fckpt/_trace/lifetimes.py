"""Lifetimes of storages during a trace, which equal the lifetimes in the plain function.

A trace runs the function and its backward pass on tensors that only the function and autograd hold. So each storage is
freed at the same point as in a plain run: a saved value after the autograd node that saved it, a cotangent after the
node that consumed it, a temporary of a derivative formula at the end of its C++ expression, and a local variable with
its frame. These points cannot be derived from the dependences between operations.

Seen on torch 2.11 and 2.13: the Python object of a storage lives as long as the storage itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import torch

__all__ = ["Lifetimes", "Sums", "nodes_behind"]


class Lifetimes:
    """The time at which each version of a storage ended. A time is the number of calls recorded before it."""

    def __init__(self, calls: Sized):
        self.ended: dict[int, int] = {}
        """By version that has ended: the time of its end."""
        self._calls = calls
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []

    def watch(self, storage: torch.UntypedStorage, version: Callable[[], int]) -> None:
        """Observes a storage through a weak reference; `version` returns the present version of the storage."""
        calls, ended = self._calls, self.ended  # using `self` in `gone` would make a reference cycle

        def gone(_: Any) -> None:
            ended[version()] = len(calls)

        self._storages.append(weakref.ref(storage, gone))

    def end(self, version: int) -> None:
        """Notes that a version ends now, because the next version overwrites it."""
        self.ended[version] = len(self._calls)


def nodes_behind(results: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yields every autograd node behind `results`, without those that accumulate gradients in leaves."""
    todo = [t.grad_fn for t in results if t.grad_fn is not None]
    known = set(todo)
    while todo:
        node = todo.pop()
        yield node
        new = {n for n, _ in node.next_functions if n is not None} - known
        known |= new
        todo += [n for n in new if n.name() != "torch::autograd::AccumulateGrad"]


class Sums:
    """Detector of the additions with which autograd's engine accumulates gradients between two nodes."""

    def __init__(self) -> None:
        self._done: Any = None  # the autograd node whose formula ended last

    def mark(self, results: Iterable[torch.Tensor], prepare: Callable[[Any], None]) -> None:
        """Calls `prepare` with every autograd node behind `results`, and adds a hook to each that notes when its
        formula has ended.
        """
        reference = weakref.ref(self)

        def ended(*_: Any) -> None:
            sums = reference()
            if sums is not None:
                sums._done = torch._C._current_autograd_node()

        for node in nodes_behind(results):
            prepare(node)
            node.register_hook(ended)

    def is_one(self, func: Any) -> bool:
        """Whether the current call is made by the engine, after a node's formula.

        In a plain run, the engine adds in place if it holds the only reference. Below a dispatch mode it never does.
        """
        wanted = self._done is not None and func is torch.ops.aten.add.Tensor
        return wanted and torch._C._current_autograd_node() is self._done

    def release(self) -> None:
        """Drops the reference to the last autograd node."""
        self._done = None
