"""Recompute under plain autograd: a segment of the graph that saves its inputs and replays for the rest.

The forward runs as it stands, with autograd recording, so values, output flags, views and gradients of
closed-over tensors are those of plain PyTorch. Saved-tensor hooks put a number in the place of every
intermediate that autograd would save. The first number that backward asks for makes the function run
again on the saved inputs; that run collects the intermediates and stops as soon as it has the last one.

That hooks can do this is PyTorch's find (`torch.utils.checkpoint`, use_reentrant=False). What differs here:
inputs that backward does not need are not held; a segment whose saved values are all inputs or parameters
is never replayed; what is replayed is compared with what the forward saved, as far as that is free (shape,
dtype, version, and on the CPU the first bytes); generators and buffers are restored.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

from fckpt import tree
from fckpt.arguments import Arguments
from fckpt.closure import Slot, placed, replaced, tensors_in
from fckpt.conditions import BufferHabits, Conditions, Observation, may_be_statistics, version
from fckpt.errors import ImpureFunctionError, MutationError, RandomStateError
from fckpt.kept import Kept
from fckpt.rng import SHARED

__all__ = ["HooksUnavailable", "run_segment"]

_autograd = torch._C._autograd
_push, _pop = _autograd._push_saved_tensors_default_hooks, _autograd._pop_saved_tensors_default_hooks


class HooksUnavailable(Exception):
    """The function uses a reverse-mode transform of torch.func inside, which forbids saved-tensor hooks."""


class _Stop(BaseException):
    """Ends a replay that has all it needs. No `Exception`, so that `except Exception` in `fn` lets it by."""


class _Held:
    """A saved tensor that needs no replay: input `index`, or else a parameter, or a view of either."""

    __slots__ = ("index", "tensor", "version")

    def __init__(self, index: int, tensor: Any, version: int):
        self.index = index
        self.tensor = tensor
        self.version = version


class _Inputs:
    """Tells which saved tensors are inputs, parameters, or views of these."""

    __slots__ = ("index", "storages", "tensors")

    def __init__(self, tensors: list[torch.Tensor]):
        self.tensors = tensors
        self.index = {id(t): i for i, t in enumerate(tensors)}
        self.storages: set[int] | None = None

    def kept(self, tensor: torch.Tensor) -> bool:
        """Whether backward has `tensor` at hand without a replay (other than as an input itself)."""
        if tensor.requires_grad and tensor.is_leaf:
            return True
        if not tensor._is_view():
            return False
        base = tensor._base
        if base is not None and base.requires_grad and base.is_leaf:
            return True
        if self.storages is None:
            self.storages = {s for t in self.tensors if (s := _storage(t))}
        return _storage(tensor) in self.storages


def _storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # sparse and other layouts have none
        return 0


Ends = list[Any]
Signature = tuple[torch.Size, torch.dtype, int, bytes]

# A saved value that was computed from what requires grad requires grad itself; what does not is a mask or
# another by-product, or the result of the operation that saves it. (Asking for `grad_fn` would give every
# node of the graph a Python object, and torch takes a chain of those down by recursion.)


def _signature(tensor: torch.Tensor, probe: int) -> Signature:
    """What is compared of a saved value."""
    return (tensor.shape, tensor.dtype, tensor._version, _first_bytes(tensor, probe))


_FEW, _MANY = 8, 4096


def _first_bytes(tensor: torch.Tensor, limit: int) -> bytes:
    """The first bytes of a value on the CPU: reading eight is free, and most impure functions change them.

    Where other threads may draw from the same generator many are read, of masks too.
    """
    if not (tensor.requires_grad or (limit == _MANY and tensor.dim() != 1)):  # 1-d: perhaps statistics
        return b""
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return b""
    size = tensor.numel() * tensor.element_size()
    if size < _FEW or not tensor.is_contiguous():
        return b""
    return ctypes.string_at(torch._C._data_address(tensor), min(size, limit))


def _describe(signature: Signature) -> str:
    shape, dtype, changes, probe = signature
    bits = f", beginning with the bytes {probe[:8].hex()}" if probe else ""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}, changed in place {changes} times{bits}"


def run_segment(fn: Callable[..., Any], arguments: Arguments, habits: BufferHabits) -> Any:
    """Calls `fn` on `arguments`; what autograd would save of its inside is recomputed in backward.

    Returns:
        What `fn` returns.

    Raises:
        HooksUnavailable: see there. Generators and buffers are then as if `fn` had not been called.
        MutationError: `fn` changed an argument in place that its recompute needs.
    """
    return _Segment(fn, arguments, habits).forward()


def _check_hooks_enabled() -> None:
    if _autograd._saved_tensors_hooks_is_enabled():
        return
    message = _autograd._saved_tensors_hooks_get_disabled_error_message()
    if "torch.func" not in message:
        raise HooksUnavailable  # the user's `disable_saved_tensors_hooks`
    # torch.func disables hooks while it differentiates, and nothing does so now: a failed torch.compile has
    # leaked the setting, for the whole process (seen up to torch 2.13).
    _autograd._saved_tensors_hooks_enable()


class _Segment:
    __slots__ = (
        "__weakref__",
        "arguments",
        "bare",
        "closed",
        "conditions",
        "fn",
        "held",
        "inputs",
        "kept",
        "lock",
        "needs_grad",
        "observation",
        "operation",
        "outer",
        "probe",
        "results",
        "saved",
        "stores",
        "tangents",
        "unfilled",
        "used",
        "versions",
    )

    def __init__(self, fn: Callable[..., Any], arguments: Arguments, habits: BufferHabits):
        self.fn = fn
        self.arguments = arguments
        tensors = arguments.tensors
        self.inputs: _Inputs | None = _Inputs(tensors)  # None once the forward has ended
        self.versions = [version(t) for t in tensors]
        self.needs_grad = [t.requires_grad for t in tensors]
        self.used: set[int] = set()
        self.probe = _MANY if threading.active_count() > 1 else _FEW
        self.operation = -1
        self.bare: list[int] = []
        self.unfilled: set[int] = set()
        """The saved values that an operation may have filled after it saved them."""
        self.saved: list[Signature] = []
        self.results: Ends = []
        self.kept = Kept()
        self.conditions: Conditions | None = None
        self.closed: list[tuple[Slot, dict[int, int]]] = []
        """The places where the function closes over inputs, and which inputs: by the id of the tensor."""
        self.stores: dict[int, dict[int, torch.Tensor]] = {}
        self.lock = threading.RLock()
        self.tangents: list[torch.Tensor | None] | None = None
        if forward_ad._current_level >= 0:
            self.tangents = [forward_ad.unpack_dual(t).tangent for t in tensors]
            self.probe = 0  # formulas of forward mode fill in tangents after they are saved
        # Hooks in force outside (an enclosing segment's, or the user's) decide how the inputs are held.
        self.outer = _autograd._top_saved_tensors_default_hooks(True)
        self.held: list[Any] = tensors
        if self.outer is not None:
            # Now rather than later: an enclosing replay that ends with this segment need not run it. What
            # requires grad comes last, because a replay may stop only at such a value.
            self.held = [None] * len(tensors)
            for i in sorted(range(len(tensors)), key=lambda i: tensors[i].requires_grad):
                self.held[i] = self.outer[0](tensors[i])
        self.observation: Observation | None = Observation([fn], arguments.statics, tensors, habits)

    def forward(self) -> Any:
        assert self.observation is not None
        _check_hooks_enabled()
        args, kwargs = self.arguments.rebuild(self.arguments.tensors)
        _push(self.pack, self.unpack)
        try:
            with self.kept.recorded():
                result = self.fn(*args, **kwargs)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error) or "torch.func" not in str(error):
                raise
            self.observation.undo()
            raise HooksUnavailable from error
        finally:
            _pop()
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
            self.closed = _closed_over(self.conditions.slots, self.inputs.index)
            self.results = _ends(result)
        else:
            del self.fn, self.kept  # nothing will be replayed
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
        if not inputs.kept(tensor):
            number = len(self.saved)
            self._note_operation(number, tensor)
            self.saved.append(_signature(tensor, self.probe))
            return number
        if self.outer is None or tensor.is_leaf:
            return _Held(-1, tensor, tensor._version)
        return _Held(-2, self.outer[0](tensor), 0)

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
                store[~index] = unpack(self.held[index])
            return store[~index]

    def _replayed(self, number: int) -> torch.Tensor:
        task = torch._C._current_graph_task_id()
        with self.lock:
            if task < 0 or self.inputs is not None:
                return self._replay()[number]
            store = self.stores.get(task, _EMPTY)
            if number not in store:
                found = self._replay()
                if len(found) == 1:
                    return found[number]
                store = self._store(task)
                store.update(found)
            return store.pop(number)

    def _store(self, task: int) -> dict[int, torch.Tensor]:
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

    def _replay(self) -> dict[int, torch.Tensor]:
        # A backward inside the forward finds the segment half done; its conditions are those so far.
        conditions = self.conditions
        if conditions is None:
            assert self.observation is not None
            conditions = self.observation.conditions()
        replay = _Replay(self, conditions)
        with _recompute_mode():
            tensors = [
                _as_in_forward(self._input(i, then), needs)
                for i, (then, needs) in enumerate(zip(self.versions, self.needs_grad, strict=True))
            ]
            closed = placed(self._inputs_placed(tensors)) if self.closed else _NOTHING
            with conditions.restored(lambda: not replay.stopped), closed, self.kept.repeated():
                replay.run(self.fn, self.arguments, tensors, self.tangents)
        return replay.found

    def _inputs_placed(self, tensors: list[torch.Tensor]) -> list[Slot]:
        """The function's closure with the tensors that stand for inputs in the replay."""
        return [
            (holder, key, replaced(value, {known: tensors[i] for known, i in indices.items()}))
            for (holder, key, value), indices in self.closed
        ]


def _closed_over(slots: list[Slot], inputs: dict[int, int]) -> list[tuple[Slot, dict[int, int]]]:
    pairs = [(slot, {id(t): inputs[id(t)] for t in tensors_in(slot[2]) if id(t) in inputs}) for slot in slots]
    return [(slot, indices) for slot, indices in pairs if indices]


class _Replay:
    """One more run of a segment's function, which collects what its forward did not keep."""

    __slots__ = (
        "complete",
        "count",
        "expected",
        "found",
        "inputs",
        "may_stop",
        "probe",
        "results",
        "scratch",
        "stopped",
        "threaded",
        "unfilled",
    )

    def __init__(self, segment: _Segment, conditions: Conditions):
        self.complete = segment.inputs is None
        self.expected = segment.saved
        self.results = segment.results
        self.found: dict[int, torch.Tensor] = {}
        self.count = 0
        self.stopped = False
        self.probe = segment.probe
        self.unfilled = segment.unfilled
        # Under threads a replay that draws random numbers runs to its end, to be able to verify them. So does
        # one whose last operation saved something (`bare`) that it may be yet to fill.
        self.threaded = conditions.random.threaded
        self.may_stop = not (segment.bare or self.threaded)
        self.scratch = conditions.scratch
        self.inputs: _Inputs

    def run(
        self,
        fn: Callable[..., Any],
        arguments: Arguments,
        tensors: list[torch.Tensor],
        tangents: list[torch.Tensor | None] | None,
    ) -> None:
        with _NOTHING if tangents is None or forward_ad._current_level >= 0 else forward_ad.dual_level():
            if tangents is not None:
                tensors = [_as_dual(t, tangent) for t, tangent in zip(tensors, tangents, strict=True)]
            self.inputs = _Inputs(tensors)
            args, kwargs = arguments.rebuild(tensors)
            _push(self.pack, _identity)
            try:
                results = _ends(fn(*args, **kwargs))
            except BaseException:
                # Whatever surfaces after the stop is its echo: TorchScript, for one, rewraps exceptions.
                if not self.stopped:
                    raise
                return
            finally:
                _pop()
        if self.complete:
            self._compare(results)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        inputs = self.inputs
        if id(tensor) in inputs.index or inputs.kept(tensor):
            return tensor
        number = self.count
        self.count += 1
        if number >= len(self.expected):
            return tensor
        signature = _signature(tensor, self.probe)
        if signature != self.expected[number] and not self._is_excused(tensor, number, signature):
            if self.threaded:
                raise RandomStateError(SHARED)
            raise ImpureFunctionError(
                f"saved value {number} of a rematerialised function was {_describe(self.expected[number])} in "
                f"forward and is {_describe(signature)} in its recompute: {_NOT_PURE}"
            )
        value = self.found[number] = tensor.detach()
        # Autograd saves an operation's inputs before it computes, so the last operation need not run, unless
        # it is to fill what it saved.
        if number == len(self.expected) - 1 and self.may_stop and tensor.requires_grad:
            self.stopped = True
            raise _Stop
        return value

    def _is_excused(self, tensor: torch.Tensor, number: int, now: Signature) -> bool:
        """Whether a difference means nothing: `tensor` is a buffer's copy, or yet to be filled."""
        then = self.expected[number]
        base = tensor if tensor._base is None else tensor._base
        return now[:2] == then[:2] and (id(base) in self.scratch or (now[2] == then[2] and number in self.unfilled))

    def _compare(self, results: Ends) -> None:
        if len(results) != len(self.results):
            what = f"returned {len(self.results)} leaves in forward and {len(results)}"
            raise ImpureFunctionError(f"a rematerialised function {what} in its recompute: {_NOT_PURE}")
        for i, (then, now) in enumerate(zip(self.results, results, strict=True)):
            if then != now:
                raise ImpureFunctionError(
                    f"output {i} of a rematerialised function was {_describe_end(then)} in forward and is "
                    f"{_describe_end(now)} in its recompute: {_NOT_PURE}"
                )
        if self.count != len(self.expected):
            what = f"saved {len(self.expected)} values in forward and {self.count}"
            raise ImpureFunctionError(f"a rematerialised function {what} in its recompute: {_NOT_PURE}")


_NOT_PURE = (
    "the function is not pure. Its result must depend on its arguments alone; look for changing globals, counters, "
    "caches, or parameters whose requires_grad was switched between forward and backward."
)


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _ends(result: Any) -> Ends:
    """What the leaves of a result are, in order: (shape, dtype) of a tensor, else the type."""
    leaves = [result] if isinstance(result, torch.Tensor) else tree.flatten(result)[0]
    return [(x.shape, x.dtype) if isinstance(x, torch.Tensor) else type(x) for x in leaves]


def _describe_end(end: Any) -> str:
    return end.__name__ if isinstance(end, type) else f"{str(end[1]).removeprefix('torch.')}{list(end[0])}"


def _as_in_forward(tensor: torch.Tensor, needs_grad: bool) -> torch.Tensor:
    if may_be_statistics(tensor) and not needs_grad:
        return tensor.clone()  # for the recompute to write into
    if tensor.requires_grad == needs_grad:
        return tensor
    return tensor.detach().requires_grad_(needs_grad)


def _as_dual(tensor: torch.Tensor, tangent: torch.Tensor | None) -> torch.Tensor:
    if tangent is None:
        return tensor
    return forward_ad.make_dual(forward_ad.unpack_dual(tensor).primal, tangent)


class _recompute_mode:
    """Autograd recording, as in the forward, whatever transform or mode backward is called under."""

    __slots__ = ("disabled", "grad", "legacy", "levels")

    def __enter__(self) -> None:
        self.levels = None
        if torch._C._are_functorch_transforms_active():
            self.levels = temporarily_clear_interpreter_stack()
            self.levels.__enter__()
        # `is_grads_batched` runs backward under the older vmap, which forbids random operations.
        self.legacy = torch._C._ExcludeDispatchKeyGuard(_LEGACY_VMAP)
        self.legacy.__enter__()
        self.disabled = None
        if not _autograd._saved_tensors_hooks_is_enabled():
            self.disabled = _autograd._saved_tensors_hooks_get_disabled_error_message()
            _autograd._saved_tensors_hooks_enable()
        self.grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)

    def __exit__(self, *error: Any) -> None:
        torch._C._set_grad_enabled(self.grad)
        if self.disabled is not None:
            _autograd._saved_tensors_hooks_disable(self.disabled)
        self.legacy.__exit__(*error)
        if self.levels is not None:
            self.levels.__exit__(*error)


_NOTHING = nullcontext()
_EMPTY: dict[int, torch.Tensor] = {}
_VMAP_MODE: Any = torch._C._parse_dispatch_key("VmapMode")
_LEGACY_VMAP = torch._C.DispatchKeySet(_VMAP_MODE)
