"""Tracing of calls: what a call passes and captures, and the trace of a captured graph or of Python code."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fckpt._call.arguments import Arguments
from fckpt._call.closure import Unguarded
from fckpt._call.conditions import Observation
from fckpt._call.levels import below_all, is_wrapped, unseen, unwrapped
from fckpt._call.modules import HOOKS
from fckpt._call.places import Slot, placed, replaced, tensors_in
from fckpt._call.rng import RandomState
from fckpt._call.snapshots import Snapshot
from fckpt._capture.function import GraphFunction
from fckpt._capture.reads import Reads
from fckpt._capture.sources import Names, named
from fckpt._trace.memories import memory_of
from fckpt._trace.named_device import NamedDevice, fakes_on_cpu
from fckpt._trace.operations import Backward, Batch, Layout, Trace, generators_in
from fckpt._trace.stand_ins import WAY_OUT, check_dense
from fckpt._trace.trace import trace
from fckpt.errors import TraceError

if TYPE_CHECKING:
    from fckpt._trace.sized import Symbols

__all__ = [
    "REACHES",
    "TRACING",
    "CapturedTensors",
    "GraphTracer",
    "as_on_cpu",
    "below_levels",
    "graph_tracer",
    "released",
    "traced_call",
    "unguarded_error",
]


class GraphTracer(Protocol):
    """Traces a captured graph with a given backward pass, for fixed sizes or for symbols."""

    def __call__(self, backward: Backward, symbols: Symbols | None = None) -> Trace: ...


TRACING = threading.RLock()
"""Held while tracing (stand-ins temporarily replace captured tensors and torch's default generator), while inspecting
closures, and while timing operations."""


class CapturedTensors:
    """The captured tensors of a call, each once, and the places that hold them."""

    def __init__(self, observation: Observation, inputs: Sequence[torch.Tensor], passed: Sequence[torch.Tensor] = ()):
        """Collects the captured tensors.

        Args:
            observation: the observation of the call.
            inputs: the tensors of the arguments.
            passed: further tensors that do not count as captured, wherever they are held.
        """
        buffers: list[Slot] = [(holder, name, tensor) for holder, name, _, tensor, _ in observation.buffers]
        self.slots = [*observation.slots, *observation.installed, *buffers]
        found = [t for _, _, value in observation.slots for t in tensors_in(value)]
        found += [tensor for _, _, tensor in (*observation.installed, *buffers)]
        numbers = {id(t): -1 for t in passed} | {id(t): i for i, t in enumerate(inputs)}
        count = len(numbers)
        self.tensors: list[torch.Tensor] = []
        order: list[int] = []
        for tensor in found:
            number = numbers.get(id(tensor))
            if number is None:
                number = numbers[id(tensor)] = count + len(self.tensors)
                self.tensors.append(tensor)
            order.append(number)
        self.state = Snapshot()
        """The places that the function may assign to: attributes of modules, containers and objects in its closure."""
        modules = [d for m in observation.modules for d in (m, *[m[k] for k in ("_parameters", "_buffers", *HOOKS)])]
        self.state.dicts = [(d, d) for d in modules]
        for snapshot in observation.state:
            if isinstance(snapshot, Snapshot):
                self.state.extend(snapshot)
        self.order = tuple(order)
        """By place: the number of the tensor that it holds."""
        self.random = observation.random
        """The states, before the call, of the random generators that the function can access."""


@contextlib.contextmanager
def released(lock: Any) -> Iterator[None]:
    """Releases a reentrant lock within the body, however often it is held, as `Condition.wait` does."""
    state = lock._release_save() if lock._is_owned() else None
    try:
        yield
    finally:
        if state is not None:
            lock._acquire_restore(state)


REACHES = "the function reaches"
"""The beginning of the message about objects whose changes cannot be detected."""


def unguarded_error(value: Unguarded) -> TraceError:
    """Returns the error for an object in a closure whose changes cannot be detected."""
    return TraceError(
        f"{REACHES} {value.what}, and a plan cannot tell whether it has changed. Pass what the function "
        f"needs of it as an argument, or as a tensor. {WAY_OUT}"
    )


def traced_call(
    fn: Callable[..., Any],
    arguments: Arguments,
    captured: CapturedTensors,
    layouts: Sequence[Layout],
    backward: Backward,
    reads: Reads | None = None,
    donated: Sequence[int] = (),
    target: NamedDevice | None = None,
) -> Trace:
    """Traces the Python code of a call, below all levels of torch.func, and a backward pass."""
    if target is None:
        _check_traceable((*arguments.tensors, *captured.tensors))
    names = Names(fn, arguments.statics)
    origins = [arguments.path(i) for i in range(len(arguments.tensors))]
    origins += [names.tensors.get(id(t)) or _origin(captured.slots, t) for t in captured.tensors]
    with named(names):
        where = (captured.tensors, captured.slots, layouts, origins, captured.state)
        try:
            traced = trace(fn, arguments, *where, backward, reads=reads, donated=donated, target=target)
        except BaseException:  # the function may run again, as in a plain call
            RandomState(_drawn_elsewhere(captured.random)).rewind()
            raise
    _check_random(captured.random)
    _check_generators(traced, captured.random)
    return traced


def graph_tracer(
    function: GraphFunction,
    names: Sequence[str],
    layouts: Sequence[Layout],
    batch: Batch | None = None,
    donated: Sequence[int] = (),
    target: NamedDevice | None = None,
) -> GraphTracer:
    """Returns a function that traces a captured graph with a given backward pass; it keeps no tensor alive.

    Args:
        function: the graph with the inputs of a call.
        names: the names of the inputs.
        layouts: the layouts of the operands: arguments, then captured tensors.
        batch: the `vmap` outside of the transform that differentiates, if any.
        donated: the positions of donated arguments.
        target: the device to trace for, if it is not the device of the inputs.
    """
    tensors = [*function.arguments, *function.held.values()]
    if target is None:
        _check_traceable(tensors)
    given = tuple(map(memory_of, tensors))
    blueprint = function.blueprint()
    arguments, closure = Arguments(tuple(blueprint.arguments), {}), list(blueprint.held.values())
    origins = [names[i] if i < len(names) else "a constant" for i in (*function.passed, *function.held)]

    def traced(backward: Backward, symbols: Symbols | None = None) -> Trace:
        if symbols is not None:
            where = (closure, blueprint.slots, symbols.layouts, origins, None, backward)
            return trace(blueprint.with_numbers(symbols.numbers), arguments, *where, sizes=symbols.env)
        where = (closure, blueprint.slots, layouts, origins, None, backward, batch)
        made = trace(blueprint, arguments, *where, donated=donated, target=target)
        return dataclasses.replace(made, given=given)

    return traced


def _check_traceable(tensors: Iterable[torch.Tensor]) -> None:
    """Raises `TraceError` if one of the tensors cannot be traced."""
    for tensor in tensors:
        check_dense(tensor)


def _check_random(random: RandomState) -> None:
    """Raises `TraceError` if the traced function drew from a generator other than torch's, or seeded a generator."""
    states = _drawn_elsewhere(random)
    if states:
        RandomState(states).rewind()
        raise TraceError(
            "the function draws from Python's or NumPy's random generators, or seeds a torch.Generator: a plan would "
            "repeat the numbers of its trace. Draw before the call and pass the result, or draw with torch.rand and "
            f"similar functions. {WAY_OUT}"
        )


def _drawn_elsewhere(random: RandomState) -> list[Any]:
    """Returns the states, before the call, of the generators other than torch's from which the function drew."""
    drawn = random.drawn()
    states = [state for state in drawn.states if getattr(state[0], "generator", None) is not torch.default_generator]
    return [] if drawn.disturbed else states


def _check_generators(traced: Trace, random: RandomState) -> None:
    """Raises `TraceError` if the traced function drew from a torch.Generator that the function created."""
    known = {getattr(getattr(state[0], "generator", None), "_cdata", None) for state in random.states}
    for call in traced.calls:
        if any(g._cdata not in known for g in generators_in(call.args, call.kwargs)):
            raise TraceError(
                "the function draws from a torch.Generator that it makes: a plan would continue to draw from the "
                "generator of its trace. Make the generator outside of the function, and pass it or close over it. "
                f"{WAY_OUT}"
            )


def _origin(slots: list[Slot], tensor: torch.Tensor) -> str:
    for holder, key, value in slots:
        if any(t is tensor for t in tensors_in(value)):
            return f"closed-over {key!r}" if isinstance(holder, dict) else "a captured tensor"
    return ""


@contextlib.contextmanager
def below_levels(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yields the arguments without wrappers of torch.func, and removes the wrappers from the closure within the body.

    Each wrapper is replaced by a view of its innermost tensor, with the shape that the function sees. The view has the
    wrong data, which does not matter for a capture.
    """

    def unwrapped(tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        with below_all(), unseen():
            return {id(t): _without_levels(t) for t in tensors if is_wrapped(t)}

    with _replacing(fn, args, kwargs, unwrapped) as given:
        yield given


@contextlib.contextmanager
def as_on_cpu(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yields the arguments with fake CPU tensors in place of tensors without memory, and does so in the closure within
    the body.

    Python code that asks for the device of a tensor gets one for which the libraries have settings; the trace then puts
    the named device in its place.
    """
    with _replacing(fn, args, kwargs, fakes_on_cpu) as given:
        yield given


@contextlib.contextmanager
def _replacing(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    others: Callable[[Sequence[torch.Tensor]], dict[int, torch.Tensor]],
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yields the arguments with other tensors in place of some, and replaces captured tensors within the body.

    Args:
        fn: the function.
        args: its arguments.
        kwargs: its arguments by name.
        others: returns the other tensors by the id of the tensor that each replaces.
    """
    arguments = Arguments(args, kwargs)
    observation = Observation([fn], arguments.statics, arguments.tensors, {})
    captured = CapturedTensors(observation, arguments.tensors)
    new = others((*arguments.tensors, *captured.tensors))
    moved: list[Slot] = []
    for holder, key, value in captured.slots:
        other = replaced(value, new)
        if other is not value:
            moved.append((holder, key, other))
    with placed(moved):
        yield arguments.rebuild([new.get(id(t), t) for t in arguments.tensors])


def _without_levels(tensor: torch.Tensor) -> torch.Tensor:
    from fckpt._capture.wrapped import mark_static  # imports Dynamo, as the capture will

    bottom = unwrapped(tensor).detach()
    view = bottom.as_strided(tensor.shape, tensor.stride()) if bottom.layout is torch.strided else bottom
    bare = view.data  # not a view for autograd: Dynamo would guard the sizes of a base
    mark_static(bare)  # other sizes need another capture, see `WrappedTensors`
    return bare.requires_grad_(tensor.requires_grad)
