"""Copies of the calls of a recorded block, for another block of which everything that was read is the same.

See `repeated_blocks.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection
from typing import Any

from torch import fx
from torch._dynamo import guards as dynamo_guards
from torch._dynamo.guards import install_guard
from torch._dynamo.source import Source
from torch._dynamo.utils import get_fake_value
from torch._dynamo.variables.base import ValueMutationNew
from torch._dynamo.variables.builder import VariableBuilder, wrap_fx_proxy
from torch._dynamo.variables.lists import ListVariable

from fckpt._call.modules import INTERNAL
from fckpt._capture.block_records import BlockRecord, Unlike, compared, is_of_class, last_call, structure_of_call
from fckpt._capture.frames import Frames
from fckpt._capture.twins import Twins, exactly, is_constant, is_plain

__all__ = ["CHECKS", "BlockCopy"]

CHECKS: dict[str, Any] = getattr(dynamo_guards, "GUARD_VALUE_DISPATCH", {})
"""By kind of guard: functions that compare the values of two places. Torch 2.11 has none."""


class BlockCopy:
    """A copy of a recorded block's calls, for another block."""

    def __init__(self, record: BlockRecord, variable: Any, tx: Any, args: Any, kwargs: Any, modified: Collection[int]):
        """Checks that the other block is like the recorded one.

        Args:
            record: the record.
            variable: the other block, as Dynamo represents it.
            tx: Dynamo's evaluation of the caller.
            args: the positional arguments.
            kwargs: the keyword arguments.
            modified: the ids of the objects that existed before and have been changed.

        Raises:
            Unlike: it is not.
        """
        self._record, self._tx = record, tx
        self.place: Source = variable.source
        arguments = structure_of_call(args, kwargs)
        if arguments.structure != record.arguments.structure:
            raise Unlike
        self._copies: dict[fx.Node, fx.Node] = dict(zip(record.arguments.given, arguments.given, strict=True))
        """By recorded call or input: what takes its place."""
        self._twins = Twins(record.module, variable.value)
        if not self._twins.alike or not self._twins.own.isdisjoint(modified):
            raise Unlike
        self._moved: dict[Source, Source] = {record.place: self.place}
        root = tx.output.root_tx
        self._scope = {"G": root.f_globals, "L": root.f_locals}
        self._locals: dict[str, Any] = {}
        self._values: dict[Source, Any] = {}
        record.prepare(tx.output, self._value)
        if not record.may_be_copied:
            raise Unlike
        read = {**{source: self._value(source) for source in record.inputs.values()}, **record.reads}
        self.reads: dict[Source, Any] = {}
        """The places that are read in the other block, with their values."""
        for source, value in read.items():
            place = self._move(source)
            self.reads[place] = other = self._value(place)
            if not self._twins.correspond(value, other) or (value is other and not self._is_seen(source, value)):
                raise Unlike
        outside = [*record.outside, *map(self._value, record.arguments.places)]
        if any(map(self._twins.concern, outside)):
            raise Unlike
        self._guards = [made for guard in record.guards if (made := self._guard(guard)) is not None]

    def _move(self, source: Source) -> Source:
        """Returns the place that has the same role in the other block."""
        found = self._moved.get(source)
        if found is None:
            fields = [(field.name, getattr(source, field.name)) for field in dataclasses.fields(source)]
            inner = {name: self._move(value) for name, value in fields if isinstance(value, Source)}
            same = all(value is getattr(source, name) for name, value in inner.items())
            found = source if same else dataclasses.replace(source, **inner)
            self._moved[source] = found
        return found

    @staticmethod
    def _is_seen(source: Any, value: Any) -> bool:
        """Whether Dynamo has seen all that was read of an object that both blocks refer to."""
        return getattr(source, "member", None) in INTERNAL or is_of_class(source) or is_plain(value)

    def _value(self, source: Source) -> Any:
        try:
            return source.get_value(self._scope, self._locals, self._values)
        except Exception as error:  # the other block lacks something
            raise Unlike from error

    def _guard(self, guard: Any) -> Any:
        """Returns a guard for the other block; None if another one covers it.

        Raises:
            Unlike: it does not hold, or it is not known whether it does.
        """
        source, kind, create = guard.originating_source, guard.create_fn_name(), guard.create_fn
        value, other = self._value(source), self._value(self._move(source))
        if value is other and is_of_class(source):  # the blocks have one class
            return None
        if kind == "DUPLICATE_INPUT":
            if not all(self._value(self._move(place)) is other for place in compared(guard)):
                raise Unlike
        elif kind == "TENSOR_MATCH":
            if source not in self._record.inputs.values() or not self._twins.correspond(value, other):
                raise Unlike
            return None  # made with the input
        else:
            check: Any = CHECKS.get(kind)
            if not hasattr(check, "eval_fn") or (is_constant(value) and exactly(value) != exactly(other)):
                raise Unlike
            if not check.eval_fn(other, check.get_metadata_fn(guard, value)):
                raise Unlike
        if isinstance(create, functools.partial):
            moved = lambda value: self._move(value) if isinstance(value, Source) else value
            keywords = {name: moved(value) for name, value in create.keywords.items()}
            create = functools.partial(create.func, *map(moved, create.args), **keywords)
        made = self._move(source).make_guard(create)
        made.user_stack = guard.user_stack
        return made

    def made(self, frames: Frames) -> Any:
        """Adds the copies to the graph, and returns the result of the call.

        Args:
            frames: the record of how long frames hold tensors.
        """
        record, output, copies = self._record, self._tx.output, self._copies
        install_guard(*self._guards)
        output.guard_on_key_order.update(self._move(source) for source in record.ordered if not is_of_class(source))
        for node, source in record.inputs.items():
            place = self._move(source)
            copies[node] = VariableBuilder(self._tx, place)(self._value(place)).as_proxy().node
        before = last_call(output.graph)
        for node in record.calls:
            copies[node] = copy = output.graph.node_copy(node, lambda n: copies.get(n, n))
            copy.meta = self._metadata(node.meta)
            if node in record.evaluated:
                copy.meta["example_value"] = get_fake_value(copy, self._tx, allow_non_graph_fake=True)
            elif "example_value" in node.meta:
                copy.meta["example_value"] = node.meta["example_value"]
        frames.repeat(record.released, before, copies)
        return self._result(record.result)

    def _metadata(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Returns what fckpt reads of a call's metadata, with the modules of the other block."""
        found = {name: meta[name] for name in ("source_fn_stack", "stack_trace") if name in meta}
        if stack := meta.get("nn_module_stack"):
            old, new = _path(self._record.place), _path(self.place)
            found["nn_module_stack"] = {
                self._key(key): (new + path.removeprefix(old) if path.startswith(old) else path, cls)
                for key, (path, cls) in stack.items()
            }
        return found

    def _key(self, key: str) -> str:
        """Returns Dynamo's key of the corresponding module: its id and, after an @, the number of the call."""
        number, *call = key.split("@")
        partner = self._twins.partner(int(number)) if number.isdigit() else None
        return key if partner is None else "@".join([str(id(partner)), *call])

    def _result(self, result: Any) -> Any:
        if isinstance(result, fx.Node):
            node = self._copies[result]
            example = node.meta.pop("example_value")
            return wrap_fx_proxy(
                tx=self._tx, proxy=fx.Proxy(node, self._tx.output.current_tracer), example_value=example
            )
        if isinstance(result, tuple):
            kind, items = result
            options = {"mutation_type": ValueMutationNew()} if kind is ListVariable else {}
            return kind([self._result(item) for item in items], **options)
        return result


def _path(source: Source) -> str:
    """Returns the path of a module as Dynamo writes it into the metadata of calls."""
    return re.sub(r"\._(?:modules|parameters|buffers)\[(['\"])([^'\"\]]+)\1\]", r".\2", source.name)
