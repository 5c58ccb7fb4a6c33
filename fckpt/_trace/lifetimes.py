"""Lifetimes of storages during a trace, which equal the lifetimes in the plain function.

A trace runs the function and its backward pass on tensors that only the function and autograd hold. So each storage is
freed at the same point as in a plain run: a saved value after the autograd node that saved it, a cotangent after the
node that consumed it, a temporary of a derivative formula at the end of its C++ expression, and a local variable with
its frame. These points cannot be derived from the dependences between operations.

One thing is known only later: autocast holds the casts of parameters that it caches to the end of its block, which may
come before the backward pass, as PyTorch recommends, or after it. In a trace, the block is open all the time. So it is
recorded from which time on nothing but the cache holds a cast.

Seen on torch 2.11 and 2.13: the Python object of a storage lives as long as the storage itself, and that of a tensor as
long as the tensor; a tensor that only the cache holds has two uses, by the cache and by its Python object; autocast is
off while it casts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fckpt._call.casts import remembers_casts_of

__all__ = ["Lifetimes", "Sums", "nodes_behind"]


class Lifetimes:
    """The time at which each version of a storage ended. A time is the number of calls recorded before it."""

    def __init__(self, calls: Sized):
        self.ended: dict[int, int] = {}
        """By version that has ended: the time of its end."""
        self.casts = _Casts(calls)
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

    def end_casts(self) -> None:
        """Notes that the block of autocast has ended before the backward pass, which is over."""
        for version, time in self.casts.alone().items():
            self.ended.setdefault(version, time)


class _Casts:
    """The casts that autocast caches, and the times from which on it alone holds them."""

    def __init__(self, calls: Sized):
        self._calls = calls
        self._tensors: dict[int, tuple[weakref.ref[torch.Tensor], StorageWeakRef]] = {}
        """By version of a storage: the cast."""
        self._read: set[int] | None = None
        """The casts that the backward pass has read so far and that more than the cache holds; None in the forward."""
        self._alone: dict[int, int] = {}

    def called(self, func: Any, args: Any, result: Any, made: int, read: Iterable[int]) -> None:
        """Notes a call, with the version of a storage that it made last and those that it reads."""
        if self._read is not None:
            self._read.update(self._tensors.keys() & read)
            self._read -= self._look(self._read)
        elif func is torch.ops.aten._to_copy.default and _is_cached(args[0]):
            self._tensors[made] = (weakref.ref(result), StorageWeakRef(result.untyped_storage()))

    def start_backward(self) -> None:
        """Notes the end of the forward pass."""
        self._look(self._tensors)
        self._read = set()

    def alone(self) -> dict[int, int]:
        """Returns, by version of a cast that autocast still caches, the time from which on nothing else holds it.

        The times are those of a backward pass, and not earlier than its beginning.
        """
        self._look(self._tensors)
        return {version: time for version, time in self._alone.items() if self._tensors[version][0]() is not None}

    def _look(self, casts: Iterable[int]) -> set[int]:
        """Notes which of these casts only the cache holds now, or nothing; returns them."""
        found = {version for version in casts if _is_alone(*self._tensors[version])}
        for version in found:
            self._alone.setdefault(version, len(self._calls))
        return found


def _is_cached(tensor: Any) -> bool:
    """Whether autocast caches the result of the current call, if that casts `tensor`. Others may be taken for such."""
    # Torch may convert a number, too.
    return isinstance(tensor, torch.Tensor) and remembers_casts_of(tensor) and not torch._C._is_any_autocast_enabled()


def _is_alone(cast: weakref.ref[torch.Tensor], storage: StorageWeakRef) -> bool:
    """Whether nothing but the cache of autocast holds a cast, neither itself nor a view of it."""
    tensor: Any = cast()
    return tensor is None or (tensor._use_count() == 2 and torch._C._storage_Use_Count(storage.cdata) == 2)


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

    def is_one(self, func: Any, args: Sequence[Any]) -> bool:
        """Whether the current call is made by the engine, after a node's formula, and runs in place in a plain run.

        The engine adds in place if nothing else holds the memory of the first gradient. The base of a view holds it:
        the gradient of a linear layer's weight is one. Below a dispatch mode, the engine never adds in place.
        """
        if self._done is None or func is not torch.ops.aten.add.Tensor:
            return False
        return torch._C._current_autograd_node() is self._done and not args[0]._is_view()

    def release(self) -> None:
        """Drops the reference to the last autograd node."""
        self._done = None
