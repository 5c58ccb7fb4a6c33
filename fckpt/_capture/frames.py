"""How long the function's frames hold each tensor, which decides the peak of the plain function.

A graph has no variables: by itself, it would free each tensor after its last use. The plain function frees a tensor
when nothing refers to it any more: a local variable refers to it until its frame ends or the variable changes, and the
call of a module refers to its arguments until it returns. Dynamo evaluates each frame, so these points can be recorded.

The same holds for the frames of both functions of an `autograd.Function`, which are graphs of their own.

Left out: results that the function never uses, which Dynamo leaves out too; frames within `torch.utils.checkpoint` and
other operators that call functions; attributes, items and variables shared with functions defined inside that are
overwritten while something refers to them.

In torch 2.11 and 2.13, frames keep their variables in `symbolic_locals`, and Dynamo copies the graph of the `backward`
of an `autograd.Function`, with `Node.meta`. In torch 2.11, its `forward` returns the results of all of its calls, which
count as long as its own result: the plain peak is too high there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import fx
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import TensorVariable, UnspecializedNNModuleVariable, VariableTracker

from fckpt._capture.containers import BASES
from fckpt._capture.patching import patched

__all__ = ["Frames"]

_PARTS = ("items", *BASES, "func", "args", "keywords", "obj", "iterable", "closure", "defaults", "kwdefaults")
"""The fields in which Dynamo's variables have what they refer to: containers, `functools.partial`, bound methods,
iterators, and functions defined inside."""
_TRACED = "fckpt_traced"
"""In the metadata of a call: the call as Dynamo added it to a graph, which it may have copied since."""
_DEPTH = 4
"""How many levels of containers and objects are searched for tensors."""


class Frames:
    """The last call during which a frame held each tensor."""

    def __init__(self) -> None:
        self._calls: list[fx.Node] = []
        """For each moment at which variables released tensors, in order: the call that was added to the graph last."""
        self._ends: dict[fx.Node, int] = {}
        """By tensor: the position in `_calls` of its last release."""

    def released(self, variables: Iterable[Any], output: Any) -> None:
        """Notes that variables release their tensors now.

        Args:
            variables: the variables, as Dynamo represents them.
            output: Dynamo's object that holds the graph made so far.
        """
        # torch 2.11's reversed nodes are iterable, but no iterator
        last = next(iter(reversed(output.graph.nodes)), None)
        if last is None:
            return
        if not self._calls or self._calls[-1] is not last:
            self._calls.append(last)
            last.meta[_TRACED] = last
        for variable in variables:
            for node in _tensors(variable, output.side_effects.store_attr_mutations, _DEPTH):
                self._ends[node] = len(self._calls) - 1
                node.meta[_TRACED] = node

    def mark(self, output: Any) -> int:
        """Returns the position in `_calls` of all that is noted from now on."""
        last = next(iter(reversed(output.graph.nodes)), None)
        if last is not None:
            self._calls.append(last)  # again, so that what was noted before has another position
            last.meta[_TRACED] = last
        return len(self._calls) - (last is not None)

    def since(self, start: int) -> list[tuple[fx.Node, list[fx.Node]]]:
        """Returns what was noted since a position: calls, and the tensors that were last released during each."""
        found: list[tuple[fx.Node, list[fx.Node]]] = [(call, []) for call in self._calls[start:]]
        for node, position in self._ends.items():
            if position >= start:
                found[position - start][1].append(node)
        return found

    def repeat(
        self, released: list[tuple[fx.Node, list[fx.Node]]], before: fx.Node, copies: dict[fx.Node, fx.Node]
    ) -> None:
        """Notes for copies of calls what was noted for the calls.

        Args:
            released: what `since` returned.
            before: the last call before the copies.
            copies: the copies, and other nodes in whose place others are used, by original.
        """
        for call, nodes in released:
            call = copies.get(call, before)
            self._calls.append(call)
            call.meta[_TRACED] = call
            for node in nodes:
                node = copies.get(node, node)
                self._ends[node] = len(self._calls) - 1
                node.meta[_TRACED] = node

    def ends(self, graph: fx.Graph) -> dict[fx.Node, fx.Node]:
        """Returns, for each call whose result a frame holds, the last call of `graph` during which it does so."""
        # The others are of functions that operators of the graph call, of the function that calls it, or were removed.
        kept = {node.meta.pop(_TRACED, node): node for node in graph.nodes}
        last: fx.Node | None = None
        calls: list[fx.Node | None] = []
        for call in self._calls:
            last = kept.get(call, last)
            calls.append(last)
        found = {kept[node]: calls[position] for node, position in self._ends.items() if node in kept}
        return {node: end for node, end in found.items() if end is not None}

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Records the frames of the captures within the body."""
        with (
            patched(InstructionTranslatorBase, "run", self._run),
            patched(UnspecializedNNModuleVariable, "call_function", self._call),
        ):
            yield

    def _run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(frame: Any) -> None:
            frame.symbolic_locals = _Variables(frame.symbolic_locals, self, frame.output)
            original(frame)
            self.released(frame.symbolic_locals.values(), frame.output)

        return run

    def _call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call_function(module: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            result = original(module, tx, args, kwargs)
            self.released([*args, *kwargs.values()], tx.output)
            return result

        return call_function


class _Variables(dict[str, Any]):
    """The variables of a frame by name, which notes when one changes."""

    def __init__(self, variables: dict[str, Any], frames: Frames, output: Any):
        super().__init__(variables)
        self._frames, self._output = frames, output

    def __setitem__(self, name: str, value: Any) -> None:
        self._release(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self._release(name)
        super().__delitem__(name)

    def _release(self, name: str) -> None:
        if name in self:
            self._frames.released([self[name]], self._output)


def _tensors(variable: Any, attributes: dict[Any, dict[str, Any]], depth: int) -> Iterator[fx.Node]:
    """Yields the calls whose results a variable refers to."""
    if isinstance(variable, TensorVariable):
        yield variable.proxy.node
    elif depth and isinstance(variable, VariableTracker):
        fields = vars(variable)  # not getattr: an argument that was not read yet would be read, and guarded
        parts = [fields.get(name) for name in _PARTS]
        generator = fields.get("inline_tracer")
        if generator is not None and not generator.generator_exhausted:
            parts.append(generator.symbolic_locals)
        for part in [*parts, attributes.get(variable)]:
            for each in part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else [part]:
                yield from _tensors(each, attributes, depth - 1)
