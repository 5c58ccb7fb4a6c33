"""Blocks that repeat: Dynamo evaluates the first one, and its calls are copied for those that are like it.

A transformer calls dozens of blocks that differ only in their parameters. Most of the time of a capture goes into
evaluating the same code again and again. `Repeated` records, at the first call of a block, what Dynamo reads, which
guards it makes, and which calls it adds to the graph (`block_records.py`). At the call of another block of the class,
the record is used with the places of the first block (`layers.0.attn.weight`) replaced by those of the other one
(`layers.1.attn.weight`), if evaluating the other block could not go another way (`block_copies.py`):

* the code does nothing but what is known to be the same for equal blocks (`simple_code.py`);
* the blocks are twins: they have corresponding objects in the same places (`twins.py`);
* all that was read of the first block has its counterpart in the other one, and numbers and strings are equal;
* all guards that concern the first block hold for the other one, and are made for it too;
* what was read outside is no part of either block, and Dynamo has seen all of it: see `twins.is_plain`;
* the arguments have the same structure: tensors of equal layouts, equal constants, and tuples of these;
* the grad mode and other settings are the same, the block changes nothing that exists outside of it, and objects that
  the function has changed hold no object that the capture has made.

All other blocks are evaluated, like any other code. Seen on torch 2.13, whose `torch.compiler.nested_compile_region`
treats functions that the user marks in a similar way. Torch 2.11 lacks what is needed, and evaluates each block.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._C._functorch import get_dynamic_layer_stack_depth
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import ConstantVariable, TensorVariable, UnspecializedNNModuleVariable
from torch._dynamo.variables.base import (
    AttributeMutationExisting,
    AttributeMutationNew,
    ValueMutationExisting,
    ValueMutationNew,
    VariableTracker,
)
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import BaseListVariable

from fckpt._capture.block_copies import CHECKS, BlockCopy
from fckpt._capture.block_records import BlockRecord, Unlike, last_call, structure_of_call
from fckpt._capture.frames import Frames
from fckpt._capture.patching import patched
from fckpt._capture.simple_code import code_watched

__all__ = ["Repeated"]

_MOST = 8
"""The most blocks of one class that are recorded."""


class Repeated:
    """The blocks that one capture has evaluated."""

    def __init__(self, frames: Frames, noted: Callable[[], int]):
        """Begins without blocks.

        Args:
            frames: the record of how long frames hold tensors.
            noted: returns how many facts the capture has noted besides Dynamo's guards. Copies would lack them, so a
                block that adds one is not copied.
        """
        self._frames = frames
        self._noted = noted
        self._output: Any = None
        self._known: dict[type, list[BlockRecord]] = {}
        self._running: list[BlockRecord] = []
        self._changes = 0
        """How many changes of objects that existed before Dynamo has evaluated."""
        self._modified: tuple[int, dict[int, Any]] = (-1, {})
        """The objects that existed before and have been changed, and how many changes there were."""

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Records and copies blocks within the body."""
        if not CHECKS:
            yield
            return
        try:
            with (
                patched(UnspecializedNNModuleVariable, "call_function", self._calling),
                patched(VariableBuilder, "__call__", self._reading),
                patched(SideEffects, "mutation", self._changing),
                patched(SideEffects, "store_attr", self._changing),
                code_watched(lambda: bool(self._running), self._refuse, self._read),
            ):
                yield
        finally:
            self._forget(None)  # objects of the call must not stay alive

    def _forget(self, output: Any) -> None:
        self._output, self._known, self._running, self._modified = output, {}, [], (-1, {})

    def _refuse(self) -> None:
        """Notes that the blocks that are being evaluated may not be copied."""
        for record in self._running:
            record.is_simple = False

    def _read(self, source: Any) -> None:
        """Notes a place whose value code has got, which Dynamo may have read before."""
        for record in self._running:
            record.touched.add(source)

    def _reading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(builder: Any, value: Any) -> Any:
            for record in self._running:
                record.reads.setdefault(builder.source, value)
            return original(builder, value)

        return read

    def _changing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def change(effects: Any, item: Any, *args: Any, **kwargs: Any) -> Any:
            made = isinstance(item.mutation_type, (AttributeMutationNew, ValueMutationNew))
            if not made or isinstance(item, TensorVariable):
                self._changes += 1
            return original(effects, item, *args, **kwargs)

        return change

    def _calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call_function(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            if not _is_block(variable, tx):
                return original(variable, tx, args, kwargs)
            if self._output is not tx.output:  # Dynamo has started again
                self._forget(tx.output)
            known = self._known.setdefault(type(variable.value), [])
            try:
                around = self._surroundings(tx)
            except Unlike:
                return original(variable, tx, args, kwargs)
            for record in known:
                with contextlib.suppress(Unlike):
                    if record.around != around:
                        raise Unlike
                    copy = BlockCopy(record, variable, tx, args, kwargs, self._modified[1])
                    for running in self._running:
                        running.add(copy.reads, record.outside)
                    return copy.made(self._frames)
            begun = None
            with contextlib.suppress(Unlike):
                if len(known) < _MOST:
                    begun = BlockRecord(variable, around, structure_of_call(args, kwargs))
            if begun is None:
                return original(variable, tx, args, kwargs)
            start, last, noted = self._frames.mark(tx.output), last_call(tx.output.graph), self._noted()
            self._running.append(begun)
            try:
                result = original(variable, tx, args, kwargs)
            finally:
                self._running.remove(begun)
            with contextlib.suppress(Unlike):
                if self._noted() != noted or self._surroundings(tx) != around:
                    raise Unlike
                begun.finish(tx, last, structure_of_call(args, kwargs), result, self._frames.since(start))
                known.append(begun)
            return result

        return call_function

    def _surroundings(self, tx: Any) -> tuple[Any, ...]:
        """Returns the settings on which the evaluation of any code depends, and a count of changes.

        Raises:
            Unlike: blocks may depend on more.
        """
        effects = tx.output.side_effects
        if self._modified[0] != self._changes:
            self._modified = self._changes, _modified(effects)
        if not _hold_constants(effects, self._modified[1].values()):
            raise Unlike
        if getattr(tx.symbolic_torch_function_state, "mode_stack", ()):
            raise Unlike
        devices = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
        return (
            self._changes,
            len(effects.tensor_hooks),
            len(effects.save_for_backward),
            len(tx.output.random_calls),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_cache_enabled(),
            *devices,
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            get_dynamic_layer_stack_depth(),
            torch._C._is_torch_function_enabled(),
            torch._C._is_torch_function_mode_enabled(),
        )


def _is_block(variable: Any, tx: Any) -> bool:
    """Whether a module is a numbered item of a container, or has a numbered name, and has modules itself."""
    if variable.source is None or tx.output.current_tracer is not tx.output.root_tracer:
        return False
    numbered = _NUMBERED.search(variable.source.name)
    return numbered is not None and next(variable.value.children(), None) is not None


_NUMBERED = re.compile(r"\._modules\['[^']*\d[^']*'\]$")


def _modified(effects: Any) -> dict[int, Any]:
    """Returns Dynamo's variables of the objects that existed before and that the function has changed, by id."""
    kinds = (AttributeMutationExisting, ValueMutationExisting)
    held = list(effects.id_to_variable.items())
    return {key: item for key, item in held if isinstance(item.mutation_type, kinds) and effects.is_modified(item)}


def _hold_constants(effects: Any, changed: Iterable[Any]) -> bool:
    """Whether objects that have been changed hold nothing new but constants and empty containers.

    Others, which the capture has made, could be reached and changed in ways that are not seen.
    """
    found: list[Any] = []
    cache: dict[int, Any] = {}
    for item in changed:
        for value in effects.store_attr_mutations.get(item, {}).values():
            VariableTracker.visit(found.append, value, cache, effects)
        if isinstance(item.mutation_type, ValueMutationExisting):
            return False
    empty = lambda value: isinstance(value, (ConstDictVariable, BaseListVariable)) and not value.items
    return all(isinstance(value, ConstantVariable) or empty(value) for value in found)
