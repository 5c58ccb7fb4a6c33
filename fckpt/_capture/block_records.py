"""Records of how Dynamo evaluates a block: what it reads, which guards it makes, which calls it adds to the graph.

See `repeated_blocks.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._dynamo.source import Source, TypeDictSource, TypeMROSource, TypeSource
from torch._dynamo.variables import SymNodeVariable, TensorVariable
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from fckpt._call.modules import storage_of
from fckpt._capture import marks
from fckpt._capture.twins import exactly, is_constant, is_plain, layout

__all__ = ["BlockRecord", "CallArguments", "Unlike", "compared", "is_of_class", "last_call", "structure_of_call"]

_MARKS = (marks.begin, marks.end, marks.name)
Released = list[tuple[fx.Node, list[fx.Node]]]
"""The calls during which frames released tensors: see `Frames.since`."""


class Unlike(Exception):
    """Raised where a block cannot be copied, or is not like the recorded one."""


class CallArguments(NamedTuple):
    """The arguments of a call."""

    structure: Any
    """All on which code can depend that gets the arguments."""
    given: list[fx.Node]
    """The tensors and numbers among them that the capture has computed."""
    places: list[Source]
    """Where Dynamo finds the other tensors and the constants, which existed before the call."""


class BlockRecord:
    """What Dynamo did at the call of one block."""

    def __init__(self, variable: Any, around: tuple[Any, ...], arguments: CallArguments):
        """Begins a record.

        Args:
            variable: the block, as Dynamo represents it.
            around: the settings, and counts of changes: see `Repeated`.
            arguments: the arguments of the call.
        """
        self.module = variable.value
        self.place: Source = variable.source
        """Where Dynamo finds the block."""
        self.around = around
        self.arguments = arguments
        self.reads: dict[Source, Any] = {}
        """The places that were read, with their values. After `prepare`, only the places inside of the block."""
        self.outside: list[Any] = []
        """The values that were read elsewhere."""
        self.touched: set[Source] = set()
        """The places whose values the code has got, whether or not Dynamo had read them before."""
        self.is_simple = True
        """Whether the code is known to ask nothing that has another answer in another block."""
        self.inputs: dict[fx.Node, Source] = {}
        """The block's own parameters and buffers among the graph's inputs."""
        self.guards: list[Any] = []
        """The guards that concern the block."""
        self.ordered: list[Source] = []
        """The dicts of the block whose keys are guarded in their order."""
        self.calls: list[fx.Node] = []
        self.evaluated: set[fx.Node] = set()
        """The calls that make the results, or that make or write tensors that share memory with a result or with a
        tensor from elsewhere. A copy evaluates these calls with its own tensors. The results of other calls keep the
        recorded layouts."""
        self.result: Any = None
        """The structure of the result: a call, a constant, or the type and the items of a tuple or a list."""
        self.released: Released = []
        self._is_prepared = False
        self.may_be_copied = False
        """Whether Dynamo has seen all that was read elsewhere."""

    def finish(self, tx: Any, last: fx.Node, arguments: CallArguments, result: Any, released: Released) -> None:
        """Completes the record after the call of the block.

        Args:
            tx: Dynamo's evaluation of the caller.
            last: the last call in the graph before the block.
            arguments: the arguments now.
            result: the result, as Dynamo represents it.
            released: the calls during which frames released tensors.

        Raises:
            Unlike: the block cannot be copied.
        """
        if not self.is_simple or arguments != self.arguments or any(map(self._concerns, arguments.places)):
            raise Unlike
        graph = tx.output.graph
        self.calls = [node for node in _after(last, graph) if node.op != "placeholder"]
        inside = {*self.calls}
        for node in self.calls:
            is_call = node.op in ("call_function", "call_method") and node.target not in _MARKS
            if not is_call or "unbacked_bindings" in node.meta:  # sizes that depend on data
                raise Unlike
        operands = {n for node in self.calls for n in node.all_input_nodes if n not in inside}
        for node in (n for n in graph.nodes if n.op == "placeholder" and n.meta.get("grapharg") is not None):
            source = node.meta["grapharg"].source
            if self._concerns(source):
                if not _is_fixed(node):
                    raise Unlike
                self.inputs[node] = source
            elif node in operands:
                self.outside.append(node.meta["grapharg"].example)
        for node in operands:
            known = node in self.inputs or node in self.arguments.given
            if not known and node.op != "placeholder" and not _is_number(node):
                raise Unlike
        self.result = _result(result)
        results = list(_nodes(self.result))
        if len({*results}) < len(results) or not inside.issuperset(results):
            raise Unlike
        self.evaluated = _decisive(self.calls, [*results, *operands])
        self.released = released

    def add(self, reads: dict[Source, Any], outside: list[Any]) -> None:
        """Adds what a block inside read, whose calls were copied: see `reads` and `outside`."""
        self.reads = {**reads, **self.reads}
        self.outside += outside

    def prepare(self, output: Any, value: Callable[[Source], Any]) -> None:
        """Collects what is needed for copies, before the first one. Most blocks of some networks are never copied.

        Args:
            output: Dynamo's object that holds the graph made so far.
            value: returns what is in a place.
        """
        if self._is_prepared:
            return
        self._is_prepared = True
        places = lambda guard: (guard.originating_source, *compared(guard))
        self.guards = [guard for guard in output.guards if any(map(self._concerns, places(guard)))]
        self.ordered = [source for source in output.guard_on_key_order if self._concerns(source)]
        self.outside += [value for source, value in self.reads.items() if not self._concerns(source)]
        self.reads = {source: value for source, value in self.reads.items() if self._concerns(source)}
        touched = [value(source) for source in self.touched if not self._concerns(source)]
        self.may_be_copied = all(map(is_plain, self.outside)) and not any(hasattr(v, "__next__") for v in touched)
        self.outside += touched  # what code takes from containers among these is one of these too

    def _concerns(self, source: Source) -> bool:
        """Whether what a source reads depends on the block's place."""
        return self.place.name in source.name and _concerns(source, self.place)


def is_of_class(source: Any) -> bool:
    """Whether a place is read through the class of an object."""
    while source is not None and not isinstance(source, (TypeSource, TypeDictSource, TypeMROSource)):
        source = getattr(source, "base", None)
    return source is not None


def last_call(graph: fx.Graph) -> fx.Node:
    """Returns the last node of a graph; its root if it is empty."""
    return next(iter(reversed(graph.nodes)), graph._root)


def compared(guard: Any) -> list[Source]:
    """Returns the other places with which a guard compares its own."""
    create = guard.create_fn
    values = [*create.args, *create.keywords.values()] if isinstance(create, functools.partial) else []
    return [value for value in values if isinstance(value, Source)]


def _concerns(source: Source, place: Source) -> bool:
    if source == place:
        return True
    fields = [getattr(source, field.name) for field in dataclasses.fields(source)]
    return any(isinstance(value, Source) and _concerns(value, place) for value in fields)


# -- graphs ------------------------------------------------------------------------------------------------------


def _after(node: fx.Node, graph: fx.Graph) -> Iterator[fx.Node]:
    while (node := node.next) is not graph._root:
        yield node


def _decisive(calls: Iterable[fx.Node], results: Iterable[fx.Node]) -> set[fx.Node]:
    """See `BlockRecord.evaluated`."""
    shared = {storage for node in results for storage in _storages(node)}
    found = set()
    for node in calls:
        own = _storages(node)
        if own & shared or (not own and any(_storages(n) & shared for n in node.all_input_nodes)):
            found.add(node)
    return found


def _storages(node: fx.Node) -> set[int]:
    return {storage_of(x) for x in tree_leaves(node.meta.get("example_value")) if isinstance(x, torch.Tensor)}


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def _is_fixed(node: fx.Node) -> bool:
    """Whether an input is a tensor whose sizes are no variables."""
    example = node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and all(type(n) is int for n in (*example.shape, *example.stride()))


# -- arguments and results ---------------------------------------------------------------------------------------


def structure_of_call(args: Iterable[Any], kwargs: dict[str, Any]) -> CallArguments:
    """Returns the structure of a call's arguments.

    Raises:
        Unlike: code could depend on more of them than is known.
    """
    made = CallArguments(([], []), [], [])
    positional, named = made.structure
    positional += [_structure(value, made) for value in args]
    named += [(name, _structure(value, made)) for name, value in kwargs.items()]
    return made


def _structure(variable: Any, made: CallArguments) -> Any:
    variable = _realized(variable)
    given = made.given
    if variable.source is not None:
        if not _is_simple(variable):
            raise Unlike
        made.places.append(variable.source)
        return "source", variable.source
    if type(variable) is TensorVariable:
        node = variable.proxy.node
        example = node.meta.get("example_value")
        if not isinstance(example, torch.Tensor) or type(example) not in (torch.Tensor, FakeTensor):
            raise Unlike
        if getattr(example, "constant", None) is not None:  # Dynamo knows the data
            raise Unlike
        given.append(node)
        return "tensor", given.index(node), layout(example), example.grad_fn is None
    if type(variable) is SymNodeVariable:
        given.append(variable.as_proxy().node)
        return "number", given.index(given[-1]), str(variable.sym_num.node.expr)
    if type(variable) is ConstantVariable and is_constant(variable.value):
        return "constant", exactly(variable.value)
    if type(variable) is TupleVariable:  # other containers may be reached elsewhere too, and be changed
        return "tuple", [_structure(item, made) for item in variable.items]
    raise Unlike


def _is_simple(variable: Any) -> bool:
    """Whether a variable stands for a tensor or a constant that existed before."""
    if isinstance(variable, LazyVariableTracker):
        value = variable.peek_value()
        return is_constant(value) or type(value) in (torch.Tensor, torch.nn.Parameter)
    return type(variable) in (TensorVariable, ConstantVariable)


def _result(variable: Any) -> Any:
    variable = _realized(variable)
    if type(variable) is TensorVariable:
        return variable.proxy.node
    if type(variable) is ConstantVariable and variable.source is None and is_constant(variable.value):
        return ConstantVariable.create(variable.value)
    if type(variable) in (TupleVariable, ListVariable) and variable.source is None:
        return type(variable), [_result(item) for item in variable.items]
    raise Unlike


def _nodes(result: Any) -> Iterator[fx.Node]:
    if isinstance(result, tuple):
        for item in result[1]:
            yield from _nodes(item)
    elif isinstance(result, fx.Node):
        yield result


def _realized(variable: Any) -> Any:
    """Returns what a variable stands for, if Dynamo has read it; reading it would make guards."""
    is_lazy: Callable[[Any], bool] = lambda v: isinstance(v, LazyVariableTracker)
    return variable.realize() if is_lazy(variable) and variable.is_realized() else variable
