"""Lowering of a schedule to two Python functions, forward and backward.

The functions are straight-line code with one line per step: an operation on local variables, or an assignment of None
that frees a tensor. So each tensor lives exactly as long as the schedule says, and no interpreter runs between two
operations. Views are made when an operation needs them, and freed with their base.

Arguments that are not tensors are variables too, so traces that differ in sizes only (`_trace/sized.py`) share the code
of a schedule.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

import torch

from fckpt._call.rng import SHARED, GeneratorState, RandomState
from fckpt._trace.in_place import writer_of
from fckpt._trace.operations import (
    Call,
    Ref,
    Trace,
    generators_in,
    indices_of,
    is_random,
    is_tagged_random,
    statistics_of,
    tensors_of,
)
from fckpt._trace.real_layouts import checked
from fckpt._trace.updates import UPDATE, update
from fckpt.errors import PlanError, RandomStateError
from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Compute, FusedBlock, FusedSchedule, FusedStep, Schedule, with_freed

__all__ = ["Lowered", "lower"]


@dataclass(frozen=True)
class Lowered:
    """The two functions that run a schedule."""

    forward: Callable[[list[torch.Tensor]], tuple[list[torch.Tensor], list[Any]]]
    """Maps operands and constants to outputs and residuals. In a graph without cotangents, it runs both passes."""
    backward: Callable[[list[torch.Tensor], list[Any], list[torch.Tensor]], list[torch.Tensor | None]]
    """Maps operands and constants, residuals (a list, which it empties) and cotangents to gradients, by operand."""
    source: str
    """The Python source of both functions."""
    arguments: tuple[Any, ...] = ()
    """The values of the variables `a0`, `a1`, ... in the source."""
    residuals: tuple[str, ...] = ()
    """The names of the residuals in the source."""
    written: _Written | None = field(default=None, repr=False)
    """The code, see `at`."""

    def at(self, trace: Trace) -> Lowered:
        """Returns the functions of the same schedule for a trace that the same trace with symbols made."""
        assert self.written is not None
        return _bound(self.written, trace)

    def is_same(self, other: Lowered) -> bool:
        """Whether another pair of functions does the same."""
        return self.source == other.source and self.arguments == other.arguments


class _Written(NamedTuple):
    """The code of both functions, without arguments of operations that are not tensors."""

    source: str
    code: CodeType
    scope: dict[str, Any]
    """The values of all variables but these arguments."""
    arguments: tuple[tuple[Any, ...], ...]
    """Where the arguments are: the position of a call, the position or keyword of its argument, and positions inside of
    lists and tuples."""
    residuals: tuple[str, ...]


_MOST = 16
"""The number of schedules of one trace with symbols whose code is kept."""
_WRITTEN: weakref.WeakKeyDictionary[Any, dict[Any, _Written]] = weakref.WeakKeyDictionary()
"""By trace with symbols: code by schedule, the latest last."""


def lower(trace: Trace, schedule: Schedule | FusedSchedule, graph: Graph) -> Lowered:
    """Generates the two functions. They run in the dispatch state that the caller sets up.

    Args:
        trace: the trace.
        schedule: a schedule of the graph of the trace, possibly with blocks.
        graph: the graph of the trace, or a variant in which fewer inputs are overwritten.

    Raises:
        PlanError: the schedule does not belong to the trace.
    """
    return _bound(_written(trace, schedule, graph), trace)


def _bound(written: _Written, trace: Trace) -> Lowered:
    """Returns the functions with the arguments of the operations of a trace."""
    arguments = tuple([_argument(trace.calls, path) for path in written.arguments])
    scope = written.scope | {f"a{i}": value for i, value in enumerate(arguments)}
    exec(written.code, scope)
    return Lowered(scope["forward"], scope["backward"], written.source, arguments, written.residuals, written)


def _written(trace: Trace, schedule: Schedule | FusedSchedule, graph: Graph) -> _Written:
    """Returns the code for a schedule, which traces of other sizes may have used before."""
    sized = trace.sized
    if sized is None or isinstance(schedule, FusedSchedule):  # fused kernels are compiled for one size
        return _Writer(trace, schedule, graph).write()
    known = _WRITTEN.setdefault(sized, {})
    key = schedule, tuple([node.overwrites for node in graph.nodes])  # whether sizes are equal may depend on them
    written = known.pop(key, None) or _Writer(trace, schedule, graph).write()
    known[key] = written
    for other in list(known)[:-_MOST]:
        known.pop(other, None)
    return written


def _argument(calls: Sequence[Call], path: tuple[Any, ...]) -> Any:
    position, first, *rest = path
    value = calls[position].kwargs[first] if isinstance(first, str) else calls[position].args[first]
    for index in rest:
        value = value[index]
    return value


def _watch(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> tuple[Any, RandomState]:
    """Runs a custom operation; returns its result, and the previous states of the generators that it drew from."""
    devices = [device] if device.type not in ("cpu", "meta") else []
    state = RandomState.capture(devices, generators_in(args, kwargs))
    result = op(*args, **kwargs)
    return result, state.drawn()


def _rewatch(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, state: RandomState) -> Any:
    """Runs a custom operation again, with the random numbers of the first run."""
    if not state.states:
        return op(*args, **kwargs)
    with state.replay(lambda: True):
        return op(*args, **kwargs)


State = tuple[GeneratorState, GeneratorState | None]
"""A generator's state before a random operation and, if other threads might draw from the generator, after it."""


def _draw(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> tuple[Any, State]:
    """Runs a random operation; returns its result, and the states of the generator before and after it."""
    generator = _generator(kwargs, device)
    before = GeneratorState(generator)
    result = op(*args, **kwargs)
    return result, (before, GeneratorState(generator) if threading.active_count() > 1 else None)


def _redraw(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, state: State) -> Any:
    """Runs a random operation again, with the random numbers of the first run, and restores the generator's state.

    Raises:
        RandomStateError: another thread drew from the same generator during one of the two runs.
    """
    generator = _generator(kwargs, device)
    now = GeneratorState(generator)
    now.read()  # before the operation allocates its results
    state[0].set(generator)
    try:
        result = op(*args, **kwargs)
        if state[1] is not None and GeneratorState(generator) != state[1]:
            raise RandomStateError(SHARED)
        return result
    finally:
        now.set(generator)


def _generator(kwargs: dict[str, Any], device: torch.device) -> torch.Generator:
    if kwargs.get("generator") is not None:
        return kwargs["generator"]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


class _Writer:
    """Generator of the source of both functions."""

    def __init__(self, trace: Trace, schedule: Schedule | FusedSchedule, graph: Graph):
        self.trace = trace
        self.graph = graph
        self.schedule = schedule
        self.scope: dict[str, Any] = {
            "copied": _copied,
            "draw": _draw,
            "redraw": _redraw,
            "watch": _watch,
            "rewatch": _rewatch,
        }
        self.names: dict[int, str] = {}  # by id of an object: its name in the scope
        self.arguments: list[tuple[Any, ...]] = []
        self.positions = {id(call): position for position, call in enumerate(trace.calls)}
        self.producers = trace.producers()
        self.by_node: dict[int, list[Call]] = {}
        for call in trace.calls:
            if call.node is not None:
                self.by_node.setdefault(call.node, []).append(call)
        given = [*trace.operands, *(t for t, _ in trace.constants)]
        self.given = [*enumerate(given), *((operand, t) for t, operand in trace.versions)]
        """The tensors that the functions receive, with their positions. A version of an operand that the function wrote
        has the position of the operand."""
        self.ours = {t for _, t in self.given}
        self.members: dict[int, list[int]] = {}
        for tensor, spec in enumerate(trace.tensors):
            self.members.setdefault(spec.value, []).append(tensor)
        steps = [*schedule.forward, *schedule.backward]
        computed = [step.node for step in steps if isinstance(step, Compute)]
        if any(node not in self.by_node for node in computed):
            raise PlanError("the schedule computes nodes that the traced function does not have.")
        seen: set[int] = set()
        self.repeated = {n for n in computed if n in seen or seen.add(n)}
        self.done: set[int] = set()
        self.lines: list[str] = []
        self.used: set[int] = set()
        self.live: set[int] = set()
        self.states: set[int] = set()  # nodes whose generator state is saved
        self.residuals: list[str] = []

    # -- the functions

    def write(self) -> _Written:
        source = self.text_of_both()
        code = compile(source, "<fckpt plan>", "exec")
        return _Written(source, code, self.scope, tuple(self.arguments), tuple(self.residuals))

    def text_of_both(self) -> str:
        trace = self.trace
        arriving = [ct for ct in trace.cotangents if ct is not None]
        self.begin()
        self.steps(self.schedule.forward)
        if not arriving:
            self.steps(self.schedule.backward)
        for t in trace.outputs:
            self.ensure(t)
            self.used.add(t)
        forward, forward_used = self.lines, self.used
        candidates = self.bases()
        states = sorted(self.states) if arriving else []
        self.begin(candidates)
        self.live.update(arriving)
        if arriving:
            self.steps(self.schedule.backward)
        for t in trace.gradients:
            if t is not None:
                self.ensure(t)
                self.used.add(t)
        backward, backward_used = self.lines, self.used
        # Only tensors that the backward pass uses are residuals: the caller may free an output, for example.
        residuals = [_var(t) for t in candidates if t in backward_used] + [f"s{node}" for node in states]
        self.residuals = residuals
        outputs = [_var(t) for t in trace.outputs]
        takes = [f"{_var(t)} = given[{i}]" for i, t in self.given if t in forward_used]
        forward = [*takes, *forward, f"return {_list(outputs)}, {_list(residuals)}"]
        takes = [f"{_var(t)} = given[{i}]" for i, t in self.given if t in backward_used]
        if residuals:
            takes += [f"{', '.join(residuals)}, = residuals", "residuals.clear()"]
        if arriving:
            takes.append(f"{', '.join(map(_var, arriving))}, = cotangents")
        gradients = ["None" if t is None else _var(t) for t in trace.gradients]
        backward = [*takes, *backward, f"return {_list(gradients)}"]
        return _function("forward(given)", forward) + _function("backward(given, residuals, cotangents)", backward)

    def begin(self, live: Iterable[int] = ()) -> None:
        self.lines: list[str] = []
        self.used = set[int]()
        self.live = {*self.ours, *live}

    def bases(self) -> list[int]:
        """Returns the live tensors that are not views and that only the schedule holds."""
        held = self.trace.graph.held
        return [
            t
            for t in sorted(self.live)
            if self.trace.tensors[t].value not in held and t not in self.ours and self.producers[t].node is not None
        ]

    # -- the steps

    def steps(self, steps: Sequence[FusedStep]) -> None:
        for step, freed in with_freed(steps):
            if isinstance(step, Compute):
                self.compute(step.node, freed)
            elif isinstance(step, FusedBlock):
                self.block(step)
            else:
                self.free(step.value)

    def compute(self, node: int, freed: Collection[int]) -> None:
        again = node in self.done
        self.done.add(node)
        over = self.graph.nodes[node].overwritten(freed)
        calls = self.by_node[node]
        made = [t for call in calls for t in (*call.outputs, *_made(call)) if t is not None]
        if again and made and self.live.issuperset(made):
            return  # all its results are still there
        for call in calls:
            self.run(call, node, over, again)
        if node in self.repeated and self.trace.graph.nodes[node].random and not again:
            self.states.add(node)

    def block(self, block: FusedBlock) -> None:
        kernel = block.kernel
        for t in kernel.inputs:
            self.ensure(t)
        inputs, outputs = _list([self.text(Ref(t)) for t in kernel.inputs]), map(_var, kernel.outputs)
        self.emit(f"{', '.join(outputs)}, = {self.object(kernel.run, 'kernel')}({inputs})")
        self.live.update(kernel.outputs)
        self.done.update(block.nodes)

    def run(self, call: Call, node: int, over: int | None, again: bool) -> None:
        args, copies = list(call.args), []
        if again:  # a recompute does not write the statistics that the first run wrote and that are still there
            for position in statistics_of(call.op, call.args):
                written = call.args[position].tensor
                old = next((old for old, new in call.replaced if new == written), None)
                if written in self.ours:
                    args[position] = None
                elif written in self.live and old is not None:
                    args[position] = _Copy(f"c{written}_")
                    self.ensure(old)
                    self.emit(f"{args[position].name} = copied({self.text(Ref(old))})")
                    copies.append(args[position].name)
        spared = {ref.tensor for ref, arg in zip(call.args, args, strict=True) if isinstance(arg, _Copy)}
        self.replace([pair for pair in call.replaced if pair[1] not in spared], over)
        for t in (*indices_of(args), *indices_of(list(call.kwargs.values()))):
            self.ensure(t)
        fresh = [t for t in call.outputs if t is not None and t not in self.live]
        own = over is None or bool(call.replaced)
        text = self.call(call, args, node, again) if own else self.call_over(call, args, over)
        targets = [_var(t) if t in fresh else "_" for t in call.outputs]
        if not fresh:
            self.emit(text)
        else:
            self.emit(f"{self.targets(call, targets)} = {text}")
        copies += ["_"] if "_" in targets and fresh else []
        if copies:
            self.emit(f"{' = '.join(copies)} = None")
        self.live.update(fresh)

    def replace(self, replaced: Sequence[tuple[int, int]], over: int | None) -> None:
        """Prepares the targets of a call's writes: the memory itself if the call is its last use, otherwise a copy."""
        for old, new in replaced:
            if new in self.ours:
                continue
            if new in self.live:
                raise PlanError("the schedule writes over a tensor twice; it belongs to another function.")
            self.ensure(old)
            self.used.add(old)
            same = over is not None and self.trace.tensors[old].value == over
            self.emit(f"{_var(new)} = {_var(old) if same else f'copied({_var(old)})'}")
            self.live.add(new)

    @staticmethod
    def targets(call: Call, targets: list[str]) -> str:
        returns = call.op._schema.returns
        if len(returns) == 1 and str(returns[0].type) == "Tensor":
            return targets[0]
        if len(returns) == 1:  # a list of tensors
            return f"{', '.join(targets)},"
        return f"{', '.join(targets)}"

    def call(self, call: Call, args: list[Any], node: int, again: bool) -> str:
        # The builtin that `call.op(...)` calls, without its overhead; an update is a Python function anyway.
        run = update if call.op is UPDATE else checked(call.op._op, call, self.trace.tensors)
        op = self.object(run, "op")
        positional, named = self.sent(call, args)
        if node not in self.repeated or not is_random(call.op):
            return f"{op}({', '.join(positional + named)})"
        kwargs = f"dict({', '.join(named)})"
        device = self.object(self.device(call), "device")
        sent = f"{op}, ({', '.join(positional)},), {kwargs}, {device}"
        first, then = ("draw", "redraw") if is_tagged_random(call.op) else ("watch", "rewatch")
        if again:
            return f"{then}({sent}, s{node})"
        # The call returns a tuple of the result and the state.
        self.emit(f"r{node}, s{node} = {first}({sent})")
        return f"r{node}; r{node} = None"

    def device(self, call: Call) -> torch.device:
        """Returns the device on which a call runs."""
        made = [t for t in (*call.outputs, *tensors_of(call)) if t is not None]
        return self.trace.tensors[made[0]].device if made else torch.device("cpu")

    def call_over(self, call: Call, args: list[Any], value: int | None) -> str:
        """Returns the text of a call that writes its result over `value`."""
        op, keyword = writer_of(call.op)
        positional, named = self.sent(call, args)
        if keyword:
            out = next(a for a in args if isinstance(a, Ref) and self.trace.tensors[a.tensor].value == value)
            named.append(f"{keyword}={self.text(out)}")
        return f"{self.object(op._op, 'op')}({', '.join(positional + named)})"

    def free(self, value: int) -> None:
        gone = [t for t in self.members.get(value, ()) if t in self.live and t not in self.ours]
        if gone:
            self.emit(f"{' = '.join(map(_var, gone))} = None")
            self.live.difference_update(gone)

    def ensure(self, tensor: int) -> None:
        """Emits the view calls that make `tensor`, if it is a view that does not exist yet."""
        todo = [tensor]
        while todo:
            t = todo[-1]
            if t in self.live:
                todo.pop()
                continue
            call = self.producers.get(t)
            if call is None or call.node is not None:
                raise PlanError("the schedule reads a tensor before it is computed; it belongs to another function.")
            missing = [x for x in tensors_of(call) if x not in self.live]
            if missing:
                todo += missing
                continue
            positional, named = self.sent(call, call.args)
            targets = self.targets(call, ["_" if x is None else _var(x) for x in call.outputs])
            # A cotangent may have other strides than at the trace, so that `view` would fail and a copy is needed.
            op = torch.ops.aten.reshape.default if call.op is torch.ops.aten.view.default else call.op
            run = self.object(checked(op._op, call, self.trace.tensors), "op")
            self.emit(f"{targets} = {run}({', '.join(positional + named)})")
            self.live.update(x for x in call.outputs if x is not None)

    # -- text

    def emit(self, line: str) -> None:
        self.lines.append(line)

    def sent(self, call: Call, args: Iterable[Any]) -> tuple[list[str], list[str]]:
        """Returns the texts of a call's arguments, positional ones (`args`, which may stand for its own) and others."""
        position = self.positions[id(call)]
        positional = [self.text(a, (position, i)) for i, a in enumerate(args)]
        return positional, [f"{k}={self.text(v, (position, k))}" for k, v in call.kwargs.items()]

    def text(self, value: Any, path: tuple[Any, ...] = ()) -> str:
        """Returns the text of an argument, which is found at `path`, see `_Written.arguments`."""
        if isinstance(value, Ref):
            self.used.add(value.tensor)
            return _var(value.tensor)
        if isinstance(value, _Copy):
            return value.name
        if value is None or type(value) is str:
            return repr(value)
        if type(value) is list:
            return _list(self.text(v, (*path, i)) for i, v in enumerate(value))
        if type(value) is tuple:
            return f"({''.join(self.text(v, (*path, i)) + ', ' for i, v in enumerate(value))})"
        self.arguments.append(path)
        return f"a{len(self.arguments) - 1}"

    def object(self, value: Any, kind: str) -> str:
        name = self.names.get(id(value))
        if name is None:
            name = self.names[id(value)] = f"{kind}{len(self.names)}"
            self.scope[name] = value
        return name


class _Copy(NamedTuple):
    """A variable that holds a copy of a tensor that a call would write over."""

    name: str


def _made(call: Call) -> list[int]:
    return [new for _, new in call.replaced]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same view of a copy of the tensor's whole storage."""
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(tensor.untyped_storage().clone(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _function(signature: str, lines: list[str]) -> str:
    return "\n    ".join([f"def {signature}:", *lines]) + "\n\n"


def _var(tensor: int) -> str:
    return f"t{tensor}_"


def _list(items: Iterable[str]) -> str:
    return f"[{', '.join(items)}]"
