"""How long the memory of a trace's tensors lives: what a plain run holds, and when.

A trace runs the function, and autograd's engine its backward pass, on tensors that nobody but they hold. So memory goes
when that of a plain run would: a saved value after the node of autograd that saved it, a cotangent after the node that
it was handed to, what a derivative's formula makes on the way at the end of the C++ expression, a variable of the
function with its frame. No dependence between operations tells any of that.

Seen on torch 2.11 and 2.13: the Python object of a storage lives as long as the storage itself, whoever holds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sized
from typing import Any

import torch

__all__ = ["Lifetimes", "Sums"]


class Lifetimes:
    """When each version of a storage ended. Time is the number of calls that were recorded before."""

    def __init__(self, calls: Sized):
        self.ended: dict[int, int] = {}
        """By version that has ended: the time."""
        self._calls = calls
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []

    def watch(self, storage: torch.UntypedStorage, version: Callable[[], int]) -> None:
        """Follows a storage, held weakly, to its end; `version` tells which of its versions that is the end of."""
        calls, ended = self._calls, self.ended  # and not `self`, which holds the reference that holds the function

        def gone(_: Any) -> None:
            ended[version()] = len(calls)

        self._storages.append(weakref.ref(storage, gone))

    def end(self, version: int) -> None:
        """Notes that a version ends here: the next one is written over it."""
        self.ended[version] = len(self._calls)


class Sums:
    """Tells where autograd's engine adds a gradient to what it has, which no formula does."""

    def __init__(self) -> None:
        self._done: Any = None  # the node of autograd whose formula ended last

    def mark(self, results: Iterable[torch.Tensor]) -> None:
        """Has every node of autograd behind `results` say when its formula has ended."""
        reference = weakref.ref(self)

        def ended(*_: Any) -> None:
            sums = reference()
            if sums is not None:
                sums._done = torch._C._current_autograd_node()

        todo = [t.grad_fn for t in results if t.grad_fn is not None]
        known = set(todo)
        while todo:
            node = todo.pop()
            node.register_hook(ended)
            new = {n for n, _ in node.next_functions if n is not None} - known
            known |= new
            todo += [n for n in new if n.name() != "torch::autograd::AccumulateGrad"]

    def is_one(self, func: Any) -> bool:
        """Whether the present call comes from the engine, after a node's formula.

        The engine adds in place, if nobody else holds what it has; below a dispatch mode it never does.
        """
        wanted = self._done is not None and func is torch.ops.aten.add.Tensor
        return wanted and torch._C._current_autograd_node() is self._done

    def release(self) -> None:
        """Lets go of what it knows."""
        self._done = None
