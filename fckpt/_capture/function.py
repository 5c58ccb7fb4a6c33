"""A captured graph as a function of one call's arguments, with the other inputs as captured tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._functorch import _add_batch_dim, _unwrap_batched
from torch._functorch.vmap import restore_vmap

from fckpt._call.levels import below_all, unseen, unwrapped
from fckpt._call.modules import storage_of
from fckpt._capture.graphs import FlatGraph

__all__ = ["BatchedGraph", "GraphFunction", "OutDims", "Same"]


@dataclass(frozen=True, slots=True)
class Same:
    """Placeholder in a result for an input that the function returns unchanged."""

    number: int
    """The position of the input."""


class GraphFunction:
    """The graph bound to the inputs of one call, as a pure function of the arguments among them."""

    def __init__(self, graph: FlatGraph, is_argument: Sequence[bool], inputs: Sequence[Any]):
        """Binds a graph to inputs.

        Args:
            graph: the captured graph.
            is_argument: by input, whether the caller passed it.
            inputs: all inputs of the call.
        """
        self.graph = graph
        self.inputs = [*inputs, *graph.constants]
        tensors = [i for i in range(len(self.inputs)) if i not in graph.numbers]
        self.passed = [i for i in tensors if i < len(inputs) and is_argument[i]]
        """The positions of the arguments among the inputs."""
        self.held: dict[int, torch.Tensor] = {i: self.inputs[i] for i in tensors if i not in {*self.passed}}
        """The captured tensors, by position among the inputs. A recompute replaces the entries of this dict."""
        self.slots = [(self.held, i, tensor) for i, tensor in self.held.items()]

    @property
    def arguments(self) -> list[torch.Tensor]:
        """The tensors that the caller passed."""
        return [self.inputs[i] for i in self.passed]

    def blueprint(self) -> GraphFunction:
        """Returns the same function bound to stand-in tensors without data, so that it keeps no tensor of this call.

        The stand-ins of tensors that share memory share memory too.
        """
        bases: dict[int, torch.Tensor] = {}
        with below_all(), unseen():
            inputs = [_stand_in(x, bases) if isinstance(x, torch.Tensor) else x for x in self.inputs]
        made = object.__new__(GraphFunction)
        made.graph, made.inputs, made.passed = self.graph, inputs, self.passed
        made.held = {i: inputs[i] for i in self.held}
        made.slots = [(made.held, i, tensor) for i, tensor in made.held.items()]
        return made

    def with_numbers(self, numbers: dict[int, Any]) -> GraphFunction:
        """Returns the same function with other numbers among the inputs, by position."""
        changed = copy.copy(self)
        changed.inputs = [numbers.get(i, value) for i, value in enumerate(self.inputs)]
        return changed

    def __call__(self, *arguments: torch.Tensor) -> list[Any]:
        """Runs the graph. A result that is one of the inputs is returned as `Same`."""
        return self.run(arguments, self.held.values())

    def run(self, arguments: Iterable[torch.Tensor], held: Iterable[torch.Tensor]) -> list[Any]:
        """Runs the graph on the given arguments and captured tensors."""
        given = list(self.inputs)
        for i, tensor in zip(self.passed, arguments, strict=True):
            given[i] = tensor
        for i, tensor in zip(self.held, held, strict=True):
            given[i] = tensor
        known = {id(x): i for i, x in enumerate(given) if isinstance(x, torch.Tensor)}
        return [Same(known[id(x)]) if id(x) in known else x for x in self.graph(given)]

    def finished(self, results: Sequence[Any]) -> list[Any]:
        """Replaces `Same` by the inputs, and inserts the results that are numbers computed from input numbers."""
        numbers = self.graph.numeric(self.inputs[: len(self.inputs) - len(self.graph.constants)])
        found = [self.inputs[x.number] if type(x) is Same else x for x in results]
        for position, number in numbers.items():
            found[position] = number
        return found

    def returned_operands(self, results: Sequence[Any]) -> set[int]:
        """Returns the operands (arguments, then captured tensors) that are returned unchanged, as `Same`."""
        places = {input_: i for i, input_ in enumerate((*self.passed, *self.held))}
        return {places[x.number] for x in results if type(x) is Same and x.number in places}

    def release(self) -> None:
        """Drops the references to the arguments. A recompute receives them again."""
        for i in self.passed:
            self.inputs[i] = None


class OutDims:
    """The batch dimensions of a batched function's results, appended to the results."""

    __slots__ = ("dims",)

    def __init__(self, dims: tuple[int | None, ...]):
        self.dims = dims


class BatchedGraph:
    """A captured graph under `vmap`, as a function of the batched tensors."""

    def __init__(self, inner: GraphFunction | BatchedGraph, level: int, size: int, randomness: str):
        """Takes a call of `inner` under the `vmap` of `level`, and unwraps the tensors of the call from that level."""
        self.inner = inner
        self.size = size
        self.randomness = randomness
        with unseen():
            pairs = [_unwrap_batched(t, level) for t in (*inner.arguments, *inner.held.values())]
        self.dims = tuple(dim for _, dim in pairs)
        values = [value for value, _ in pairs]
        count = len(inner.arguments)
        self.passed = inner.passed
        self.arguments = values[:count]
        self.held = dict(zip(inner.held, values[count:], strict=True))
        self.slots = [(self.held, i, tensor) for i, tensor in self.held.items()]

    @property
    def key(self) -> tuple[Any, ...]:
        """The part of the cache key of a trace that this `vmap` adds to the key of the inner function."""
        return (self.dims, self.size, self.randomness)

    def blueprint(self) -> BatchedGraph:
        """See `GraphFunction.blueprint`."""
        made = object.__new__(BatchedGraph)
        made.inner, made.passed = self.inner.blueprint(), self.passed
        made.dims, made.size, made.randomness = self.dims, self.size, self.randomness
        made.arguments, made.held = list(made.inner.arguments), dict(made.inner.held)
        made.slots = [(made.held, i, tensor) for i, tensor in made.held.items()]
        return made

    def __call__(self, *arguments: torch.Tensor) -> list[Any]:
        """Runs the graph on batched tensors; the last result is `OutDims`."""
        return self.run(arguments, self.held.values())

    def run(self, arguments: Iterable[torch.Tensor], held: Iterable[torch.Tensor]) -> list[Any]:
        """See `GraphFunction.run`."""
        count = len(self.passed)
        found: list[Any] = []

        def tensors_of(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            found[:] = self.inner.run(xs[:count], xs[count:])
            return tuple(x for x in found if isinstance(x, torch.Tensor))

        tensors, dims = restore_vmap(tensors_of, self.dims, self.size, self.randomness)(*arguments, *held)
        batches = iter(tensors)
        return [*(next(batches) if isinstance(x, torch.Tensor) else x for x in found), OutDims(tuple(dims))]

    @staticmethod
    def wrapped(results: Sequence[Any], level: int) -> list[Any]:
        """Wraps results as the given level of `vmap` expects them."""
        dims = iter(results[-1].dims)
        return [
            x if not isinstance(x, torch.Tensor) or (dim := next(dims)) is None else _add_batch_dim(x, dim, level)
            for x in results[:-1]
        ]

    def release(self) -> None:
        """Drops the references to the arguments. A recompute receives them again."""
        self.arguments = []
        self.inner.release()


def _stand_in(tensor: torch.Tensor, bases: dict[int, torch.Tensor]) -> torch.Tensor:
    storage = storage_of(unwrapped(tensor)) or id(tensor)
    if storage not in bases:
        bases[storage] = torch.empty(0, device="meta")
    return bases[storage].detach()
