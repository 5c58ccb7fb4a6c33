"""Traces as functions of sizes: a call of a new size gets its trace without tracing.

A graph is traced once on tensors with symbolic sizes (`sizes.py`). All shapes, strides, bytes and numbers of that trace
are expressions of the symbols. They are written as Python source, which makes the trace for given sizes: a thousand
operations take milliseconds. The guards that torch recorded on the symbols say for which sizes this trace is that of
the function. As a check of torch's reasoning, the result is compared with traces that were made for fixed sizes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fckpt._capture.symbols import FloatPrinter, symbol
from fckpt._trace.operations import (
    Call,
    General,
    Layout,
    Ref,
    TensorSpec,
    Trace,
    arguments_of,
    places_of,
    plain_cotangents,
)
from fckpt.graph.graph import Node, Value, changed

__all__ = ["SizedTrace", "Symbols", "Unsized", "same_trace", "sizes_of"]

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Symbols:
    """The symbols that stand for some of the sizes of a call, and its layouts and numbers with them."""

    def __init__(self, layouts: Sequence[Layout], numbers: dict[int, int], classes: Sequence[Sequence[int]]):
        """Makes a symbol for each class of sizes.

        Args:
            layouts: the layouts of the operands of a call, whose sizes are hints.
            numbers: the numbers of the call by position among its inputs.
            classes: positions among the `sizes_of` the call, by class; the sizes of a class are always equal.
        """
        self.env = ShapeEnv(duck_shape=False)
        sizes: list[Any] = list(sizes_of(layouts, numbers))
        dims = len(sizes) - len(numbers)
        self.names: list[str] = []
        """By class: the name of its symbol."""
        self.least: list[int | None] = []
        """By class: the least size for which torch's reasoning is valid; None for a number that is no size."""
        for i, members in enumerate(classes):
            is_dim = any(position < dims for position in members)
            node = symbol(self.env, f"size{i}", sizes[members[0]], is_dim)
            self.names.append(str(node.node.expr))
            self.least.append(2 if is_dim else None)
            for position in members:
                sizes[position] = node
        self.layouts: list[Layout] = []
        """The layouts, with symbols."""
        position = 0
        for layout in layouts:
            shape = tuple(sizes[position : position + len(layout.shape)])
            position += len(shape)
            self.layouts.append(layout._replace(shape=shape, stride=_strides(layout, shape)))
        self.numbers = dict(zip(numbers, sizes[dims:], strict=True))
        """The numbers, with symbols."""


def sizes_of(layouts: Sequence[Layout], numbers: dict[int, int]) -> tuple[int, ...]:
    """Returns the sizes of a call: those of all dimensions of all operands, then the numbers."""
    return (*[size for layout in layouts for size in layout.shape], *numbers.values())


def _strides(layout: Layout, shape: Sequence[Any]) -> tuple[Any, ...]:
    """Returns strides in which each stride that spans the dimensions inside is the product of their sizes."""
    strides: list[Any] = list(layout.stride)
    extent, symbolic = 1, None
    for dim in sorted(range(len(strides)), key=lambda d: (layout.stride[d], -d)):
        if symbolic is not None and layout.stride[dim] == extent:
            strides[dim] = symbolic
        if layout.stride[dim]:
            extent, symbolic = layout.stride[dim] * layout.shape[dim], strides[dim] * shape[dim]
    return tuple(strides)


class Unsized(Exception):
    """The trace is not a function of the sizes."""


class SizedTrace:
    """A trace as a function of the sizes of its operands, and of numbers."""

    def __init__(self, trace: Trace, symbols: Symbols):
        """Compiles a trace with symbolic sizes.

        Raises:
            Unsized: the trace is valid for fixed sizes only, or depends on the data of tensors.
        """
        env = symbols.env
        self._trace = trace
        self._texts = {trace.graph.nodes[c.node].arguments: i for i, c in enumerate(trace.calls) if c.node is not None}
        """The arguments of nodes as texts with symbols, each with the position of a call."""
        writer = _Writer()
        fields = {
            "tensors": writer.text(trace.tensors),
            "calls": writer.text(trace.calls),
            "leaves": writer.text(trace.leaves),
            "backward": writer.text(trace.backward),
        }
        values = writer.text(trace.graph.values)
        nbytes = "".join([writer.text(value.nbytes) + ", " for value in trace.graph.values])
        conditions = _conditions(env, symbols)
        made = ", ".join(f"{name!r}: {text}" for name, text in fields.items())
        arguments, numbers = ", ".join(symbols.names), ", ".join(writer.numbers)
        found = ", ".join(f"{name}={name}" for name in writer.numbers)
        source = f"def numbers({arguments}):\n{writer.assignments()}    return dict({found})\n"
        source += f"def made({numbers}):\n    return {{{made}}}\n"
        source += f"def values({numbers}):\n    return {values}\n"
        source += f"def nbytes({numbers}):\n    return ({nbytes})\n"
        source += f"def holds({arguments}):\n    return {' and '.join(conditions)}\n"
        scope = writer.scope
        exec(compile(source, "<fckpt sizes>", "exec"), scope)
        self._numbers: Callable[..., dict[str, Any]] = scope["numbers"]
        self._made: Callable[..., dict[str, Any]] = scope["made"]
        self._values: Callable[..., tuple[Value, ...]] = scope["values"]
        self._nbytes: Callable[..., tuple[int, ...]] = scope["nbytes"]
        self._holds: Callable[..., bool] = scope["holds"]
        named = self._made(**{name: _named(name, value) for name, value in writer.numbers.items()})
        self.calls: tuple[Call, ...] = named["calls"]
        """The calls, for texts only: numbers that depend on sizes are written as names."""
        self.tensors: tuple[TensorSpec, ...] = named["tensors"]
        """The tensors of these calls, for texts only."""
        self._templates: dict[frozenset[int], str] = {}
        """By the cotangents whose strides are omitted: the texts of `_texts`, with names of numbers to fill in."""

    def at(self, sizes: Sequence[int]) -> Trace | None:
        """Returns the trace for these values of the symbols; None if it is not valid for them."""
        try:
            if not self._holds(*sizes):
                return None
            numbers = self._numbers(*sizes)
        except (ArithmeticError, ValueError):  # a division by 0, or the root of a negative number
            return None
        made = self._made(**numbers)
        graph = self._trace.graph.deferred(lambda: (self._nodes(made["tensors"], numbers), self._values(**numbers)))
        general = General(self, tuple(sizes), made["calls"], self._nbytes(**numbers))
        return changed(self._trace, graph=graph, general=general, **made)

    def _nodes(self, tensors: Sequence[TensorSpec], numbers: dict[str, Any]) -> list[Node]:
        texts = self._arguments(tensors, numbers)
        return [changed(node, arguments=texts[node.arguments]) for node in self._trace.graph.nodes]

    def _arguments(self, tensors: Sequence[TensorSpec], numbers: dict[str, Any]) -> dict[str, str]:
        """Returns the arguments of nodes at some sizes, by their texts with symbols."""
        plain = frozenset(plain_cotangents(tensors, self._trace.outputs, self._trace.cotangents))
        if plain not in self._templates:
            texts = _SEPARATOR.join([arguments_of(self.calls[i], self.tensors, plain) for i in self._texts.values()])
            self._templates[plain] = re.sub(f"{_MARK}(.*?){_MARK}", r"%(\1)s", texts.replace("%", "%%"))
        return dict(zip(self._texts, (self._templates[plain] % numbers).split(_SEPARATOR), strict=True))


_MARK, _SEPARATOR = "\0", "\1"
"""Characters that texts do not contain: strings are written with escapes."""


class _Named:
    """Something that is written as a name."""

    name = ""

    def __repr__(self) -> str:
        return f"{_MARK}{self.name}{_MARK}"

    __str__ = __repr__


class _NamedInt(_Named, int):
    pass


class _NamedFloat(_Named, float):
    pass


def _named(name: str, value: torch.SymInt | torch.SymFloat | torch.SymBool) -> _Named:
    """Returns a number of the type of `value` that is written as a name."""
    found = _NamedInt() if isinstance(value, torch.SymInt) else _NamedFloat()
    found = _Named() if isinstance(value, torch.SymBool) else found
    found.name = name
    return found


def same_trace(one: Trace, other: Trace, computed: Collection[int] = ()) -> bool:
    """Whether two traces of a function run the same operations, on the same parts of the same storages.

    The leaves of the results at positions in `computed` are not compared: these numbers are computed at each call.

    The views may have other numbers: with fixed sizes, a view that is made in two ways has one number if the two happen
    to have the same sizes.
    """
    return _essence(one, computed) == _essence(other, computed)


def _essence(trace: Trace, computed: Collection[int]) -> tuple[Any, ...]:
    def placed(value: Any) -> Any:
        if isinstance(value, Ref):
            return spec(value.tensor)
        if isinstance(value, dict):
            return {k: placed(v) for k, v in value.items()}
        return type(value)(map(placed, value)) if type(value) in (tuple, list) else value

    def spec(number: int | None) -> Any:
        if number is None:
            return None
        found = trace.tensors[number]  # with symbols, strides of dimensions of size 1 are not those of the kernels
        return dataclasses.replace(found, stride=places_of(found.shape, found.stride))

    calls = [
        (c.op, placed(c.args), placed(c.kwargs), [*map(spec, c.outputs)], [*map(spec, sum(c.replaced, ()))], c.node)
        for c in trace.calls
        if c.node is not None
    ]
    ends = [[*map(spec, ts)] for ts in (trace.operands, trace.outputs, trace.cotangents, trace.gradients)]
    versions = [(spec(t), operand) for t, operand in trace.versions]
    backward = trace.backward._replace(observed=())
    leaves = [leaf for i, leaf in enumerate(trace.leaves) if i not in computed]
    nodes = tuple([changed(node, arguments="") for node in trace.graph.nodes])  # `calls` has the arguments
    graph = dataclasses.replace(trace.graph, nodes=nodes)
    return graph, calls, ends, versions, leaves, trace.flags, backward, trace.regions


class _Writer:
    """Writer of Python expressions for data with symbolic numbers inside."""

    def __init__(self) -> None:
        self.scope: dict[str, Any] = {"math": math, "torch": torch}
        self._constants: dict[int, str] = {}  # by id of an object, which the scope keeps alive: its name
        self._names: dict[Any, str] = {}  # by expression: the variable with its value
        self.numbers: dict[str, torch.SymInt | torch.SymFloat | torch.SymBool] = {}
        """The numbers by the name of their variable."""
        self._printer = FloatPrinter()

    def assignments(self) -> str:
        """Returns the lines that compute the numbers."""
        return "".join(f"    {name} = {self._printer.doprint(e)}\n" for e, name in self._names.items())

    def text(self, value: Any) -> str:
        """Returns an expression for a value."""
        return self._symbolic(value) or self._constant(value)

    def _symbolic(self, value: Any) -> str:
        """Returns an expression for a value with symbolic numbers; empty if it has none."""
        if isinstance(value, _SYMBOLIC):
            return self._number(value)
        if isinstance(value, (TensorSpec, Call, Value)):
            found = [(name, self._symbolic(part)) for name, part in vars(value).items()]
            fields = ", ".join([f"{name}={text}" for name, text in found if text])
            return f"{self._constant(changed)}({self._constant(value)}, {fields})" if fields else ""
        if isinstance(value, dict):
            return self._joined("{", [(f"{self._constant(k)}: ", v) for k, v in value.items()], "}")
        if isinstance(value, slice):
            return self._made(slice, [value.start, value.stop, value.step])
        if type(value) in (tuple, list):
            first, last = ("(", ",)") if type(value) is tuple else ("[", "]")
            return self._joined(first, [("", v) for v in value], last)
        if isinstance(value, tuple):  # a named tuple, or torch.Size
            parts = self._symbolic(tuple(value))
            return parts and f"{self._constant(getattr(value, '_make', type(value)))}({parts})"
        return ""

    def _made(self, kind: Any, parts: list[Any]) -> str:
        return self._joined(f"{self._constant(kind)}(", [("", part) for part in parts], ")")

    def _joined(self, first: str, parts: list[tuple[str, Any]], last: str) -> str:
        texts = [self._symbolic(value) for _, value in parts]
        if not any(texts):
            return ""
        found = [key + (text or self._constant(v)) for text, (key, v) in zip(texts, parts, strict=True)]
        return first + ", ".join(found) + last

    def _constant(self, value: Any) -> str:
        if value is None or type(value) in (int, bool):
            return repr(value)
        if id(value) not in self._constants:
            self._constants[id(value)] = name = f"c{len(self._constants)}"
            self.scope[name] = value
        return self._constants[id(value)]

    def _number(self, value: Any) -> str:
        expression = value.node.expr
        if expression.is_number:
            raise Unsized
        _check_exact(expression)
        if expression not in self._names:
            self._names[expression] = name = f"n{len(self._names)}"
            self.numbers[name] = value
        return self._names[expression]


def _conditions(env: ShapeEnv, symbols: Symbols) -> list[str]:
    """Returns the conditions under which what torch found for symbolic sizes is true.

    Raises:
        Unsized: they depend on more than the symbols, or a symbol has only one value.
    """
    import sympy

    known = set(symbols.names)
    facts = [guard.expr for guard in env.guards]
    facts += [sympy.Eq(symbol, other) for symbol, other in env.replacements.items()]
    if any(env.deferred_runtime_asserts.values()):
        raise Unsized
    printer = FloatPrinter()
    conditions = [f"{name} >= {least}" for name, least in zip(symbols.names, symbols.least, strict=True) if least]
    for fact in facts:
        _check_exact(fact)
        if fact is sympy.false or not known.issuperset(map(str, fact.free_symbols)):
            raise Unsized
        conditions.append(f"({printer.doprint(fact)})")
    if any(other.is_number for other in env.replacements.values()):
        raise Unsized
    return conditions or ["True"]


def _check_exact(expression: Any) -> None:
    """Raises `Unsized` for sums and products of floats, which sympy may have put in another order."""
    import sympy

    for part in sympy.preorder_traversal(expression):
        if isinstance(part, (sympy.Add, sympy.Mul, sympy.Pow)) and not all(arg.is_integer for arg in part.args):
            raise Unsized
