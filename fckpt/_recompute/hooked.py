"""Regions under plain autograd: saved-tensor hooks, and a replay of the function in the backward pass.

The forward runs unchanged, with autograd recording, so values, output flags, views and the gradients of captured
tensors are those of plain PyTorch. Saved-tensor hooks replace every intermediate that autograd would save by a number.
The first number that the backward pass unpacks starts a replay: the function runs again on the saved inputs, the replay
collects the intermediates, and it stops as soon as it has the last one.

PyTorch introduced this use of hooks (`torch.utils.checkpoint`, use_reentrant=False). The differences here: an input
that the backward pass does not need is not saved; a region that saved only inputs and parameters is never replayed; a
replay is compared with the forward (see `replay`); a saved value that the function overwrites is an error, as in plain
autograd; generators and buffers are restored.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from fckpt._call.arguments import Arguments
from fckpt._call.conditions import BufferWrites, Conditions, Observation
from fckpt._call.levels import version
from fckpt._call.messages import Messages
from fckpt._call.places import Slot, replaced, tensors_in
from fckpt._recompute.gradients_inside import Gradients
from fckpt._recompute.registrations import HooksRemoved, handles_made
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
from fckpt.errors import MutationError, region_name

__all__ = ["run_segment"]


class _Held:
    """A saved tensor that needs no replay: input `index`, a parameter, or a view of one of these."""

    __slots__ = ("index", "tensor", "version")

    def __init__(self, index: int, tensor: Any, version: int):
        self.index = index
        self.tensor = tensor
        self.version = version


def run_segment(fn: Callable[..., Any], arguments: Arguments, buffer_writes: BufferWrites) -> Any:
    """Calls `fn` on `arguments`; its intermediates are recomputed in the backward pass instead of saved.

    Returns:
        The result of `fn`.

    Raises:
        HooksUnavailable: `fn` uses torch.func inside. Generators and buffers are then as if `fn` had not been called.
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
        "differentiated",
        "fn",
        "gradients",
        "handles",
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
        self.inputs: Inputs | None = Inputs(tensors)  # None after the forward
        self.versions = [version(t) for t in tensors]
        self.needs_grad = [t.requires_grad for t in tensors]
        self.used: set[int] = set()
        self.words = FEW
        self.shared = threading.active_count() > 1
        """Whether other threads may draw from the same generators."""
        self.operation = -1
        self.bare: list[int] = []
        self.unfilled: set[int] = set()
        """The saved values that an operation may have filled after saving them."""
        self.saved: list[Saved] = []
        self.counters: list[torch.Tensor | None] = []
        """The version counters of the saved values, until the end of the forward."""
        self.stale: dict[int, int] = {}
        """The saved values that had been changed in place by the end of the forward, and their versions then."""
        self.results: LeafKinds = []
        self.messages = Messages()
        self.conditions: Conditions | None = None
        self.closed: list[tuple[Slot, dict[int, int]]] = []
        """The places of captured tensors that are also inputs, and their input numbers by the id of the tensor."""
        self.stores: dict[int, dict[int, Found]] = {}
        self.lock = threading.RLock()
        self.tangents: list[torch.Tensor | None] | None = None
        if forward_ad._current_level >= 0:
            self.tangents = [forward_ad.unpack_dual(t).tangent for t in tensors]
            self.words, self.shared = 0, False  # forward-mode formulas fill in tangents after they are saved
        self.outer = top()
        self.held: list[Any] = tensors if self.outer is None else _packed(tensors, self.outer[0])
        self.observation: Observation | None = Observation([fn], arguments.statics, tensors, buffer_writes)
        self.gradients: Gradients | None = Gradients((*tensors, *self.observation.held()))  # None after the forward
        self.differentiated = False
        """Whether a backward pass has run inside of the forward."""
        self.handles = handles_made()
        """The number of hooks before the forward; after the forward, how many it has registered."""

    def forward(self) -> Any:
        assert self.observation is not None
        check_hooks_allowed()
        args, kwargs = self.arguments.given
        push(self.pack, self.unpack)
        try:
            with self.messages.recording(), self.observation.data_writes():
                result = self.fn(*args, **kwargs)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error) or "torch.func" not in str(error):
                raise
            self._check_gradients()
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
            self.handles = handles_made() - self.handles
            needed = range(len(tensors))
            for i, tensor in enumerate(tensors):
                if version(tensor) != self.versions[i]:
                    raise self.arguments.written(i, self.fn)
            self._check_gradients()
            self.conditions = self.observation.conditions()
            self.fn = self.conditions.fn
            self.closed = _closed_over_inputs(self.conditions.slots, self.inputs.index)
            self.results = leaf_kinds_of(result)
            self._note_stale()
        else:
            del self.fn, self.messages  # nothing will be replayed
        self.held = [held if i in needed else None for i, held in enumerate(self.held)]
        self.arguments.release()
        self.inputs = self.observation = self.gradients = None

    def _check_gradients(self) -> None:
        assert self.gradients is not None
        self.gradients.check(self.fn, differentiated=self.differentiated)

    # -- forward: values that autograd saves

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
        """Returns how many words to compare if other threads may draw: many for small values, and after a draw."""
        assert self.observation is not None
        if tensor.numel() <= FEW:
            return MANY
        if self.words == FEW and self.observation.random.moved():
            self.words = MANY
        return self.words

    def _note_stale(self) -> None:
        """Finds the saved values that the function itself changed later, which a replay that stops early would not
        notice.
        """
        for number, (saved, counter) in enumerate(zip(self.saved, self.counters, strict=True)):
            if counter is not None and counter._version != saved.version:
                self.stale[number] = counter._version
        self.counters = []

    def _note_operation(self, number: int, tensor: torch.Tensor) -> None:
        """Records the values that an operation saves before it fills them, along with an input: rrelu's noise, for
        example.
        """
        operation = torch.autograd._get_sequence_nr()  # the sequence number of the operation's node, plus one
        if operation != self.operation:
            self.operation, self.bare = operation, []
        if tensor.requires_grad:
            self.unfilled.update(self.bare)
        else:
            self.bare.append(number)

    # -- backward: values that autograd unpacks

    def unpack(self, packed: int | _Held) -> torch.Tensor:
        self.differentiated = self.differentiated or self.inputs is not None
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

    def _check(self, tensor: torch.Tensor, then: int, what: Callable[[], str]) -> None:
        if version(tensor) != then:
            raise MutationError(
                f"{what()} of {region_name(getattr(self, 'fn', None))}, shape {list(tensor.shape)}, {tensor.dtype}, "
                f"was changed in place between forward and backward (version {then} -> {version(tensor)}). Run "
                "backward before changing it (for example before optimizer.step()), or change a copy."
            )

    def _fetched(self, index: int, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Returns an input that the enclosing segment recomputes; requested once per backward pass."""
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
            raise overwritten(self.fn, saved.shape, saved.dtype, saved.version, self.stale[number])
        task = torch._C._current_graph_task_id()
        with self.lock:
            if task < 0 or self.inputs is not None:
                return self._replay()[number].checked(self.fn)
            store = self.stores.get(task, _EMPTY)
            if number not in store:
                found = self._replay()
                if len(found) == 1:
                    return found[number].checked(self.fn)
                store = self._store(task)
                store.update(found)
            return store.pop(number).checked(self.fn)

    def _store(self, task: int) -> dict[int, Found]:
        """Returns the values held during a backward pass: saved values until they are unpacked, and inputs (key ~i)."""
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
        # A backward pass inside the forward finds the segment incomplete; it uses the conditions so far.
        conditions, inside = self.conditions, self.conditions is None
        if conditions is None:
            assert self.observation is not None
            conditions = self.observation.conditions()
        # With other threads, a replay that draws random numbers runs to its end, to verify them, unless the forward
        # itself has not ended. So does one that differentiates inside, because it may clear gradients afterwards; and
        # one whose last operation saved a tensor (`bare`) that it may still fill.
        threaded = conditions.random.threaded
        replay = Replay(
            self.saved,
            self.results if self.inputs is None else None,
            unfilled=self.unfilled,
            may_stop=not (self.bare or ((threaded or self.differentiated) and not inside)),
            threaded=threaded,
        )
        with recompute_mode():
            tensors = [
                as_in_forward(self._input(i, then), needs)
                for i, (then, needs) in enumerate(zip(self.versions, self.needs_grad, strict=True))
            ]
            held = (*tensors, *[t for t, _ in conditions.watched]) if self.differentiated else ()
            gradients = Gradients(held)
            placing = self._inputs_placed(tensors) if self.closed else ()
            # The forward has registered its hooks, and the graph of the replay is not differentiated again.
            registers = handles_made() != self.handles if inside else self.handles
            completed = lambda: not (replay.stopped or inside)
            with (
                HooksRemoved() if registers else _NOTHING,
                conditions.restored(completed, placing) as again,
                self.messages.reusing(),
            ):
                replay.run(again, self.arguments, tensors, self.tangents)
            gradients.check(self.fn, differentiated=self.differentiated)
        return replay.found

    def _inputs_placed(self, tensors: list[torch.Tensor]) -> list[Slot]:
        """Returns the places of captured inputs, with the tensors that replace the inputs in the replay."""
        return [
            (holder, key, replaced(value, {known: tensors[i] for known, i in indices.items()}))
            for (holder, key, value), indices in self.closed
        ]


def _packed(inputs: Sequence[torch.Tensor], pack: Callable[[torch.Tensor], Any]) -> list[Any]:
    """Saves the inputs as outer hooks decide: those of an enclosing segment, or the user's.

    This happens before the forward, so that an enclosing replay that ends with this segment need not run it. Inputs
    that require grad are packed last, because a replay can stop only at such a value.
    """
    held: list[Any] = [None] * len(inputs)
    for i in sorted(range(len(inputs)), key=lambda i: inputs[i].requires_grad):
        held[i] = pack(inputs[i])
    return held


def _counter(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns an empty tensor that shares the version counter of `tensor`, and can outlive `tensor` at no cost."""
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
_NOTHING = contextlib.nullcontext()
_EMPTY: dict[int, Found] = {}
