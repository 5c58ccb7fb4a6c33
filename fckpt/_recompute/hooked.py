"""Recompute under plain autograd: a segment of the graph that saves its inputs and replays for the rest.

The forward runs as it stands, with autograd recording, so values, output flags, views and gradients of
closed-over tensors are those of plain PyTorch. Saved-tensor hooks put a number in the place of every
intermediate that autograd would save. The first number that backward asks for makes the function run
again on the saved inputs; that run collects the intermediates and stops as soon as it has the last one.

That hooks can do this is PyTorch's find (`torch.utils.checkpoint`, use_reentrant=False). What differs here:
inputs that backward does not need are not held; a segment whose saved values are all inputs or parameters
is never replayed; what is replayed is compared with what the forward saved (see `replay`); what plain autograd
refuses, because the function overwrote what backward needs, is refused; generators and buffers are restored.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from fckpt._call.arguments import Arguments
from fckpt._call.conditions import BufferWrites, Conditions, Observation
from fckpt._call.levels import version
from fckpt._call.messages import Messages
from fckpt._call.places import Slot, replaced, tensors_in
from fckpt._recompute.replay import (
    FEW,
    MANY,
    Found,
    Inputs,
    LeafKinds,
    Replay,
    Saved,
    as_in_forward,
    leaf_kinds_of,
    overwritten,
    recompute_mode,
)
from fckpt._recompute.saved_tensors import HooksUnavailable, check_hooks_allowed, pop, push, top
from fckpt.errors import MutationError

__all__ = ["run_segment"]


class _Held:
    """A saved tensor that needs no replay: input `index`, or else a parameter, or a view of either."""

    __slots__ = ("index", "tensor", "version")

    def __init__(self, index: int, tensor: Any, version: int):
        self.index = index
        self.tensor = tensor
        self.version = version


def run_segment(fn: Callable[..., Any], arguments: Arguments, buffer_writes: BufferWrites) -> Any:
    """Calls `fn` on `arguments`; what autograd would save of its inside is recomputed in backward.

    Returns:
        What `fn` returns.

    Raises:
        HooksUnavailable: see there. Generators and buffers are then as if `fn` had not been called.
        MutationError: `fn` changed an argument in place that its recompute needs.
    """
    segment = _Segment(fn, arguments, buffer_writes)
    if segment.observation is not None and segment.observation.lazy:
        args, kwargs = arguments.given  # the first call of a lazy module is not rematerialised
        return fn(*args, **kwargs)
    return segment.forward()


class _Segment:
    __slots__ = (
        "__weakref__",
        "arguments",
        "bare",
        "closed",
        "conditions",
        "counters",
        "fn",
        "held",
        "inputs",
        "lock",
        "messages",
        "needs_grad",
        "observation",
        "operation",
        "outer",
        "results",
        "saved",
        "shared",
        "stale",
        "stores",
        "tangents",
        "unfilled",
        "used",
        "versions",
        "words",
    )

    def __init__(self, fn: Callable[..., Any], arguments: Arguments, buffer_writes: BufferWrites):
        self.fn = fn
        self.arguments = arguments
        tensors = arguments.tensors
        self.inputs: Inputs | None = Inputs(tensors)  # None once the forward has ended
        self.versions = [version(t) for t in tensors]
        self.needs_grad = [t.requires_grad for t in tensors]
        self.used: set[int] = set()
        self.words = FEW
        self.shared = threading.active_count() > 1
        """Whether other threads may draw from the same generators."""
        self.operation = -1
        self.bare: list[int] = []
        self.unfilled: set[int] = set()
        """The saved values that an operation may have filled after it saved them."""
        self.saved: list[Saved] = []
        self.counters: list[torch.Tensor | None] = []
        """What tells, until the forward has ended, how often the saved values were changed in place."""
        self.stale: dict[int, int] = {}
        """Which of them had been changed in place by then, and how often."""
        self.results: LeafKinds = []
        self.messages = Messages()
        self.conditions: Conditions | None = None
        self.closed: list[tuple[Slot, dict[int, int]]] = []
        """The places where the function closes over inputs, and which inputs: by the id of the tensor."""
        self.stores: dict[int, dict[int, Found]] = {}
        self.lock = threading.RLock()
        self.tangents: list[torch.Tensor | None] | None = None
        if forward_ad._current_level >= 0:
            self.tangents = [forward_ad.unpack_dual(t).tangent for t in tensors]
            self.words, self.shared = 0, False  # formulas of forward mode fill in tangents after they are saved
        # Hooks in force outside (an enclosing segment's, or the user's) decide how the inputs are held.
        self.outer = top()
        self.held: list[Any] = tensors
        if self.outer is not None:
            # Now rather than later: an enclosing replay that ends with this segment need not run it. What
            # requires grad comes last, because a replay may stop only at such a value.
            self.held = [None] * len(tensors)
            for i in sorted(range(len(tensors)), key=lambda i: tensors[i].requires_grad):
                self.held[i] = self.outer[0](tensors[i])
        self.observation: Observation | None = Observation([fn], arguments.statics, tensors, buffer_writes)

    def forward(self) -> Any:
        assert self.observation is not None
        check_hooks_allowed()
        args, kwargs = self.arguments.given
        push(self.pack, self.unpack)
        try:
            with self.messages.recording():
                result = self.fn(*args, **kwargs)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error) or "torch.func" not in str(error):
                raise
            self.observation.undo()
            raise HooksUnavailable from error
        finally:
            pop()
        self._finish(result)
        return result

    def _finish(self, result: Any) -> None:
        assert self.inputs is not None and self.observation is not None
        tensors = self.inputs.tensors
        needed: Any = self.used
        if self.saved:
            needed = range(len(tensors))
            for i, tensor in enumerate(tensors):
                if version(tensor) != self.versions[i]:
                    raise self.arguments.written(i)
            self.conditions = self.observation.conditions()
            self.fn = self.conditions.fn
            self.closed = _closed_over_inputs(self.conditions.slots, self.inputs.index)
            self.results = leaf_kinds_of(result)
            self._note_stale()
        else:
            del self.fn, self.messages  # nothing will be replayed
        self.held = [held if i in needed else None for i, held in enumerate(self.held)]
        self.arguments.release()
        self.inputs = self.observation = None

    # -- what autograd saves in the forward

    def pack(self, tensor: torch.Tensor) -> int | _Held:
        inputs = self.inputs
        assert inputs is not None
        index = inputs.index.get(id(tensor))
        if index is not None:
            self.used.add(index)
            return _Held(index, None, tensor._version)
        if not inputs.provides(tensor):
            number = len(self.saved)
            self._note_operation(number, tensor)
            words = self._words(tensor) if self.shared else self.words
            self.saved.append(Saved.of(tensor, words))
            self.counters.append(_counter(tensor))
            return number
        if self.outer is None or tensor.is_leaf:
            return _Held(-1, tensor, tensor._version)
        return _Held(-2, self.outer[0](tensor), 0)

    def _words(self, tensor: torch.Tensor) -> int:
        """How many words are compared where other threads may draw: many of what is small, or drawn from."""
        assert self.observation is not None
        if tensor.numel() <= FEW:
            return MANY
        if self.words == FEW and self.observation.random.moved():
            self.words = MANY
        return self.words

    def _note_stale(self) -> None:
        """Finds the saved values that the function itself changed later: a replay that stops early would not see it."""
        for number, (saved, counter) in enumerate(zip(self.saved, self.counters, strict=True)):
            if counter is not None and counter._version != saved.version:
                self.stale[number] = counter._version
        self.counters = []

    def _note_operation(self, number: int, tensor: torch.Tensor) -> None:
        """Some operations save, along with an input, a tensor that they are yet to fill: rrelu its noise."""
        operation = torch.autograd._get_sequence_nr()  # that of the operation's node plus one
        if operation != self.operation:
            self.operation, self.bare = operation, []
        if tensor.requires_grad:
            self.unfilled.update(self.bare)
        else:
            self.bare.append(number)

    # -- what it asks for in backward

    def unpack(self, packed: int | _Held) -> torch.Tensor:
        if isinstance(packed, int):
            return self._replayed(packed)
        if packed.index >= 0:
            return self._input(packed.index, packed.version)
        if packed.index == -2:
            assert self.outer is not None
            return self.outer[1](packed.tensor)
        self._check(packed.tensor, packed.version, lambda: "a parameter (or a view of one, or of an argument)")
        return packed.tensor

    def _input(self, index: int, then: int) -> torch.Tensor:
        if self.inputs is not None:
            return self.inputs.tensors[index]
        if self.outer is not None:
            return self._fetched(index, self.outer[1])
        self._check(self.held[index], then, lambda: self.arguments.path(index))
        return self.held[index]

    @staticmethod
    def _check(tensor: torch.Tensor, then: int, what: Callable[[], str]) -> None:
        if version(tensor) != then:
            raise MutationError(
                f"{what()} of a rematerialised function, shape {list(tensor.shape)}, {tensor.dtype}, was changed in "
                f"place between forward and backward (version {then} -> {version(tensor)}). Run backward before "
                "changing it (before optimizer.step(), say), or change a copy."
            )

    def _fetched(self, index: int, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """An input that the enclosing segment recomputes: asked for once in a backward pass."""
        task = torch._C._current_graph_task_id()
        if task < 0:
            return unpack(self.held[index])
        with self.lock:
            store = self._store(task)
            if ~index not in store:
                tensor = unpack(self.held[index])
                store[~index] = Found(tensor, tensor._version)
            return store[~index].tensor

    def _replayed(self, number: int) -> torch.Tensor:
        if number in self.stale:
            saved = self.saved[number]
            raise overwritten(saved.shape, saved.dtype, saved.version, self.stale[number])
        task = torch._C._current_graph_task_id()
        with self.lock:
            if task < 0 or self.inputs is not None:
                return self._replay()[number].checked()
            store = self.stores.get(task, _EMPTY)
            if number not in store:
                found = self._replay()
                if len(found) == 1:
                    return found[number].checked()
                store = self._store(task)
                store.update(found)
            return store.pop(number).checked()

    def _store(self, task: int) -> dict[int, Found]:
        """What is kept for the rest of a backward pass: saved values until they are asked for, and inputs (~i)."""
        if task not in self.stores:
            self.stores[task] = {}
            reference = weakref.ref(self)

            def forget() -> None:
                segment = reference()
                if segment is not None:
                    segment.stores.pop(task, None)

            torch.autograd.Variable._execution_engine.queue_callback(forget)
        return self.stores[task]

    def _replay(self) -> dict[int, Found]:
        # A backward inside the forward finds the segment half done; its conditions are those so far.
        conditions = self.conditions
        if conditions is None:
            assert self.observation is not None
            conditions = self.observation.conditions()
        # Under threads a replay that draws random numbers runs to its end, to be able to verify them. So does one whose
        # last operation saved something (`bare`) that it may be yet to fill.
        threaded = conditions.random.threaded
        replay = Replay(
            self.saved,
            self.results if self.inputs is None else None,
            unfilled=self.unfilled,
            may_stop=not (self.bare or threaded),
            threaded=threaded,
        )
        with recompute_mode():
            tensors = [
                as_in_forward(self._input(i, then), needs)
                for i, (then, needs) in enumerate(zip(self.versions, self.needs_grad, strict=True))
            ]
            placing = self._inputs_placed(tensors) if self.closed else ()
            with conditions.restored(lambda: not replay.stopped, placing) as again, self.messages.reusing():
                replay.run(again, self.arguments, tensors, self.tangents)
        return replay.found

    def _inputs_placed(self, tensors: list[torch.Tensor]) -> list[Slot]:
        """The function's closure with the tensors that stand for inputs in the replay."""
        return [
            (holder, key, replaced(value, {known: tensors[i] for known, i in indices.items()}))
            for (holder, key, value), indices in self.closed
        ]


def _counter(tensor: torch.Tensor) -> torch.Tensor | None:
    """An empty tensor that shares the version counter of `tensor`, and so outlives it at no cost."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    alias = tensor.detach()
    alias.data = _NO_MEMORY if alias.device.type == "cpu" else torch.empty(0, device=alias.device)
    return alias


def _closed_over_inputs(slots: list[Slot], inputs: dict[int, int]) -> list[tuple[Slot, dict[int, int]]]:
    found = []
    for slot in slots:
        _, _, value = slot
        indices = {id(t): inputs[id(t)] for t in tensors_in(value) if id(t) in inputs}
        if indices:
            found.append((slot, indices))
    return found


_NO_MEMORY = torch.empty(0)
_EMPTY: dict[int, Found] = {}
