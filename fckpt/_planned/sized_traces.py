"""Traces of calls of new sizes, made without tracing.

The first few sizes of a captured graph are traced one by one. Then the graph is traced once with symbols for the sizes
that differed (`_trace/sized.py`), and later sizes get their traces from that, in milliseconds. A size for which it is
not valid (a size of 1, for example, or two sizes that are now equal) is traced as before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fckpt._capture.function import BatchedGraph, GraphFunction
from fckpt._planned.tracing import GraphTracer
from fckpt._trace.memories import memory_of
from fckpt._trace.operations import Backward, Batch, Layout, Trace, strides_of
from fckpt.cost.by_size import CostsBySize
from fckpt.graph.graph import changed

if TYPE_CHECKING:
    from fckpt._trace.sized import SizedTrace

__all__ = ["SizedTraces"]

_ENOUGH = 3
"""The number of sizes that are traced before a trace with symbols is made."""
_ATTEMPTS = 4
"""The number of traces with symbols of one structure."""
_KINDS = 8
"""The number of kinds of backward passes of one structure that are traced with symbols."""
_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
_STRUCTURES = 32
"""The number of structures that are kept. If there are more, the least recently used structure is forgotten."""


class _Call(NamedTuple):
    """A call that was traced for its own sizes."""

    sizes: tuple[int, ...]
    """See `sizes_of`."""
    layouts: Sequence[Layout]
    numbers: dict[int, int]
    trace: Trace


class _General(NamedTuple):
    """A trace with symbols."""

    trace: SizedTrace
    classes: list[list[int]]
    """By symbol: the positions in `sizes_of` a call that it stands for."""
    fixed: dict[int, int]
    """The sizes at the other positions."""
    guessed: bool
    """Whether the backward pass was guessed from the outputs alone."""

    def values(self, sizes: Sequence[int]) -> list[int] | None:
        """Returns the values of the symbols for a call; None if no values make the sizes of the call."""
        if any(sizes[position] != size for position, size in self.fixed.items()):
            return None
        if any(len({sizes[position] for position in members}) > 1 for members in self.classes):
            return None
        return [sizes[members[0]] for members in self.classes]


class _Structure:
    """What is known of calls that differ in sizes only."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph  # stays alive, so that its id is unique
        self.costs = CostsBySize()
        self.calls: dict[Any, list[_Call]] = {}
        """The latest calls that were traced, with different sizes, by kind of backward pass."""
        self.general: list[_General] = []
        """The traces with symbols, for different backward passes and sets of sizes that differ."""
        self.left: dict[Any, int] = {}
        """By kind of backward pass: the number of further traces with symbols. One that fails counts twice: another
        would probably fail too."""

    def add(self, call: _Call, tracer: GraphTracer, backward: Backward) -> None:
        """Adds a call that was traced, with its tracer and backward pass; traces with symbols if enough are known."""
        kind = call.trace.backward._replace(strides=None, observed=())
        calls = [*(other for other in self.calls.pop(kind, ()) if other.sizes != call.sizes), call][-_ENOUGH:]
        self.calls = dict([*self.calls.items(), (kind, calls)][-_KINDS:])
        left = self.left.get(kind, _ATTEMPTS if len(self.left) < _KINDS else 0)
        if len(calls) < _ENOUGH or left <= 0:
            return
        columns = list(zip(*[known.sizes for known in calls], strict=True))
        fixed: dict[int, int] = {}
        classes: dict[tuple[int, ...], list[int]] = {}
        for position, column in enumerate(columns):
            if len(set(column)) == 1:
                fixed[position] = column[0]
            else:
                classes.setdefault(column, []).append(position)
        # Torch treats sizes of 0 and 1, and equal sizes, in other ways than most: they are bad examples.
        examples = zip(calls, zip(*classes, strict=True), strict=True)
        example, sizes = max(reversed(list(examples)), key=lambda pair: len({0, 1, *fixed.values(), *pair[1]}))
        if len(set(sizes)) < len(sizes) or min(sizes) < 2:
            return
        computed = self.graph.computed
        made = _general(calls, example, fixed, list(classes.values()), tracer, backward, computed)
        if made is None:
            self.left[kind] = left - 2
        else:
            self.left[kind] = left - 1
            self.general.append(made)


class SizedTraces:
    """The traces with symbols of one function."""

    def __init__(self, count: Callable[[], None]) -> None:
        """Prepares to trace. `count` is called for each call that gets its trace without tracing."""
        self._count = count
        self._known: dict[Any, _Structure] = {}

    def tracer(
        self,
        function: GraphFunction | BatchedGraph,
        key: tuple[Any, ...],
        layouts: Sequence[Layout],
        tracer: GraphTracer,
        batch: Batch | None,
        donated: tuple[int, ...],
    ) -> Callable[[Backward], Trace]:
        """Returns a function that returns the trace of a call for a backward pass, without tracing if possible.

        Args:
            function: the captured graph, bound to the inputs of the call.
            key: everything on which the trace depends besides numbers and layouts.
            layouts: the layouts of the operands.
            tracer: traces the call.
            batch: the `vmap` outside of the transform that differentiates, if any.
            donated: the positions of donated arguments.
        """
        if isinstance(function, BatchedGraph) or batch is not None or donated:
            return tracer
        if any(layout.transformed or layout.at_level for layout in layouts):
            return tracer
        given = {i: function.inputs[i] for i in function.graph.decisive}
        numbers = {i: number for i, number in given.items() if type(number) is int}
        others = tuple([(i, type(n), None if i in numbers else n) for i, n in given.items()])
        alike = tuple([(len(layout.shape), *layout[2:]) for layout in layouts])
        place = (id(function.graph), key, others, alike)
        structure = self._known.pop(place, None) or _Structure(function.graph)
        self._known = dict([*self._known.items(), (place, structure)][-_STRUCTURES:])
        tensors = tuple(map(memory_of, [*function.arguments, *function.held.values()]))

        def traced(backward: Backward) -> Trace:
            from fckpt._trace.sized import sizes_of  # imports sympy, as the capture has

            sizes = sizes_of(layouts, numbers)
            for general in structure.general:
                found = _found(general, sizes, layouts, backward)
                if found is not None:
                    self._count()
                    return changed(found, given=tensors, other_sizes=structure.costs)
            made = dataclasses.replace(tracer(backward), other_sizes=structure.costs)
            if backward.then is None:
                structure.add(_Call(sizes, layouts, numbers, made), tracer, backward)
            return made

        return traced


def _found(general: _General, sizes: Sequence[int], layouts: Sequence[Layout], backward: Backward) -> Trace | None:
    """Returns the trace of a call; None if the trace with symbols does not give it."""
    values = general.values(sizes)
    found = None if values is None else general.trace.at(values)
    if found is None or not _same_backward(found, backward, general.guessed):
        return None
    specs = [found.tensors[t] for t in found.operands]
    same = all(spec.stride == layout.stride for spec, layout in zip(specs, layouts, strict=True))
    return found if same else None


def _same_backward(trace: Trace, asked: Backward, guessed: bool) -> bool:
    """Whether a trace has the backward pass that is asked for."""
    if asked.outputs is None:
        observed = next((o for o in asked.observed if o.flags == trace.flags), None)
        if observed is None:
            return guessed and asked._replace(observed=()) == Backward()
        specs = [trace.tensors[t] for t in trace.outputs]
        asked = observed.expected([s.shape for s in specs], [strides_of(s.shape, s.stride) for s in specs])
        asked = asked._replace(recorded=trace.backward.recorded)
    made = trace.backward
    wrapped = made.wrapped if made.wrapped is None or asked.wrapped is None else asked.wrapped
    stored = asked.stored
    if made.stored is None or (stored is None and made.stored):  # no difference, or what is assumed
        stored = made.stored
    return asked._replace(observed=(), wrapped=wrapped, stored=stored) == made._replace(observed=())


def _general(
    calls: Sequence[_Call],
    example: _Call,
    fixed: dict[int, int],
    classes: list[list[int]],
    tracer: GraphTracer,
    backward: Backward,
    computed: Collection[int],
) -> _General | None:
    """Traces a call with symbols for the sizes that differ between calls; None if that does not work.

    Args:
        calls: calls that were traced for their own sizes.
        example: the call whose sizes are examples for the symbols.
        fixed: see `_General`.
        classes: see `_General`.
        tracer: traces a call with symbols.
        backward: the backward pass of the latest call.
        computed: see `same_trace`.
    """
    from fckpt._capture.symbols import (
        convolutions_unguarded,
        environments_released,
        floats_in_order,
        large_expressions_refused,
        symbols_remembered,
    )
    from fckpt._trace.sized import SizedTrace, Symbols, same_trace

    try:
        with environments_released():
            symbols = Symbols(example.layouts, example.numbers, classes)
            remembered, refused = symbols_remembered(), large_expressions_refused()
            unguarded, in_order = convolutions_unguarded(), floats_in_order(symbols.env)
            with warnings.catch_warnings(), _unlogged(), remembered, refused, unguarded, in_order:
                warnings.simplefilter("ignore")
                traced = tracer(backward, symbols)
            guessed = backward.outputs is None and all(o.flags != traced.flags for o in backward.observed)
            made = _General(SizedTrace(traced, symbols), classes, fixed, guessed)
        for call in calls:
            values = made.values(call.sizes)
            found = None if values is None else made.trace.at(values)
            if found is not None and not same_trace(found, call.trace, computed):
                return None
    except Exception:  # torch does not know how to compute some size: each size is traced by itself
        return None
    return made


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Keeps torch from printing the errors that it meets with symbolic sizes."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
