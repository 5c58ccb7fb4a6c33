"""A function and example arguments to the graph of its forward and backward pass.

The function runs once on tensors without memory, with autograd recording, and autograd runs its backward pass; below
autograd, `record.py` writes down every operation. What a function closes over becomes an input like its arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode

from fckpt import _tree as tree
from fckpt._call import ambient
from fckpt._call.arguments import Arguments, argument_written
from fckpt._call.closure import Snapshot
from fckpt._call.levels import below_all, unwrapped
from fckpt._call.modules import storage_of
from fckpt._call.places import Slot, content, moved, placed, put, replaced
from fckpt._call.results import is_number, numbered
from fckpt._capture.function import BatchedGraph, GraphFunction
from fckpt._capture.marks import marks_answered
from fckpt._capture.reads import Reads
from fckpt._capture.sources import current, failing_module, is_users
from fckpt._trace.aliases import apart
from fckpt._trace.assemble import Assembly
from fckpt._trace.effects import impure_calls_refused, refuse_what_stays
from fckpt._trace.operations import Backward, Batch, Call, Layout, Ref, TensorSpec, Trace, is_dense, strides_of
from fckpt._trace.recorder import WAY_OUT, Recorder, check_dense
from fckpt._trace.vmap_of_grad import Levels, under_vmap
from fckpt.errors import ArgumentValueError, TraceError
from fckpt.policies.named import names_recorded

__all__ = [
    "Call",
    "HigherOrderError",
    "Layout",
    "Ref",
    "TensorSpec",
    "Trace",
    "check_dense",
    "followed",
    "inlined",
    "is_followed",
    "is_tracing",
    "trace",
]


_LIKELY = Backward()


def trace(
    fn: Callable[..., Any],
    arguments: Arguments,
    closure: Sequence[torch.Tensor],
    slots: Sequence[Slot],
    layouts: Sequence[Layout],
    origins: Sequence[str] = (),
    state: Snapshot | None = None,
    backward: Backward = _LIKELY,
    batch: Batch | None = None,
    reads: Reads | None = None,
) -> Trace:
    """Traces one call of `fn` and its backward pass, with the autocast state of the caller.

    Args:
        fn: any function whose control flow does not depend on the data of tensors.
        arguments: those of the call.
        closure: the tensors that `fn` closes over.
        slots: the places where they lie.
        layouts: shapes, strides and so on of the operands: arguments, then closure.
        origins: names for the operands.
        state: the places that `fn` may assign to, attributes, parameters and buffers of modules among them.
        backward: the backward pass; its outputs are numbers of distinct new tensors, None for `likely_differentiated`.
        batch: the `vmap` outside of the transform that differentiates; layouts are those of the batches.
        reads: notes which of the user's Python code runs.

    Raises:
        TraceError: the function's course depends on the data of tensors; it uses a tensor that is neither passed nor
            among `closure`, or puts one elsewhere than into its result.
        MutationError: it changes an argument in place.
    """
    recorder = Recorder()
    traced = _traced(
        fn,
        arguments,
        closure,
        slots,
        layouts,
        origins,
        state or Snapshot(),
        backward,
        batch,
        reads or Reads(),
        recorder,
    )
    if not isinstance(fn, (GraphFunction, BatchedGraph)):  # which do nothing but call torch
        refuse_what_stays(recorder)
    return traced


def _traced(
    fn: Callable[..., Any],
    arguments: Arguments,
    closure: Sequence[torch.Tensor],
    slots: Sequence[Slot],
    layouts: Sequence[Layout],
    origins: Sequence[str],
    state: Snapshot,
    backward: Backward,
    batch: Batch | None,
    reads: Reads,
    recorder: Recorder,
) -> Trace:
    tensors = [*arguments.tensors, *closure]
    with _active.set_to(recorder), _tracing(recorder), _user_errors(), contextlib.ExitStack() as stack:
        stand_ins = [recorder.stand_in(_untracked(layout) if batch else layout) for layout in layouts]
        numbers = [recorder.number(t) for t in stand_ins]
        count = len(arguments.tensors)
        for i, operand in enumerate(stand_ins[:count]):
            recorder.refuse_writes(
                operand, functools.partial(argument_written, origins[i] if i < len(origins) else arguments.path(i))
            )
        levels = None if batch is None else stack.enter_context(under_vmap(batch))
        tracked = [layout.requires_grad for layout in layouts]
        computed = [layout.computed for layout in layouts]
        operands = stand_ins if levels is None else levels.wrapped(stand_ins, tracked, computed)
        del stand_ins
        new = {id(t): operand for t, operand in zip(tensors, operands, strict=True)}
        args, kwargs = arguments.rebuild(operands[:count])
        closed = [(holder, key, replaced(value, new)) for holder, key, value in slots]
        with placed(closed), names_recorded(recorder.name), marks_answered(recorder):
            before = state.again()
            graph = isinstance(fn, (GraphFunction, BatchedGraph))
            if not graph:
                for tensor, operand in zip(tensors, operands, strict=True):
                    vars(operand).update(vars(tensor))
            with contextlib.ExitStack() as python:
                if not graph:
                    # What is compiled inside runs uncompiled: torch would remember for good that it failed here.
                    python.enter_context(torch.compiler.set_stance("force_eager"))
                    python.enter_context(impure_calls_refused(reads))
                result = fn(*args, **kwargs)
            _check_places(closed, before, recorder)
        finished = _Finished(result, operands, numbers, layouts, count, recorder, levels)
        _check_updates(operands, numbers, recorder, tensors)
        recorder.start_backward()
        with contextlib.nullcontext() if graph else impure_calls_refused(reads):
            finished.differentiate(backward)
    traced = finished.trace([*origins, *[""] * (len(operands) - len(origins))])
    return dataclasses.replace(traced, given=tuple(map(weakref.ref, tensors)))


def _check_places(slots: Sequence[Slot], before: Snapshot, recorder: Recorder) -> None:
    """Raises `TraceError` if the function put tensors anywhere: they have no memory. What was there is put back."""

    def owned(value: Any) -> bool:
        if type(value) in weakref.ProxyTypes:  # what it stands for lies elsewhere, or is gone
            return False
        if isinstance(value, (list, tuple)):
            return any(map(owned, value))
        if isinstance(value, dict):
            return any(map(owned, value.values()))
        return isinstance(value, torch.Tensor) and recorder.owns(unwrapped(value))

    names = [_named(holder, key) for holder, key, _ in moved(slots) if owned(content(holder, key))]
    changes = before.changes()
    for change in changes:
        put(*change)
    names += [_named(holder, key) for holder, key, _ in changes]
    if names:
        raise TraceError(
            f"the function assigns {', '.join(sorted(set(names)))} while it runs. A plan runs its operations, not its "
            f"Python code, so it would assign nothing. Return the value instead. {WAY_OUT}"
        )


def _named(holder: Any, key: Any) -> str:
    if key is None:
        return "a variable" if type(holder) is types.CellType else f"an item of a {type(holder).__name__}"
    return f"{holder.__name__}.{key}" if isinstance(holder, type) else str(key)


def _check_updates(
    operands: Sequence[torch.Tensor], numbers: Sequence[int], recorder: Recorder, tensors: Sequence[torch.Tensor]
) -> None:
    """Raises `TraceError` for a closed-over tensor that is changed in place in a way that a plan cannot follow."""
    written = [recorder.values[number] in recorder.written for number in numbers]
    storages = [storage_of(t) for t in tensors] if any(written) else []
    for i, storage in enumerate(storages):
        if written[i] and storage and storages.count(storage) > 1:
            raise TraceError(
                "the function changes a closed-over tensor in place that shares memory with another one that it uses. "
                f"Close over one of them. {WAY_OUT}"
            )
        if written[i] and operands[i].requires_grad:
            raise TraceError(
                "the function changes a closed-over tensor in place that it is also differentiated for (an embedding "
                f"with max_norm, say), which a plan cannot follow. {WAY_OUT}"
            )


class _Active(threading.local):
    """The recorder at work in this thread."""

    recorder: Recorder | None = None
    followed: bool = False

    @contextlib.contextmanager
    def set_to(self, recorder: Recorder) -> Iterator[None]:
        before, self.recorder = self.recorder, recorder
        try:
            yield
        finally:
            self.recorder = before


_active = _Active()


def is_tracing() -> bool:
    """Whether this thread is tracing a function."""
    return _active.recorder is not None


@contextlib.contextmanager
def followed() -> Iterator[None]:
    """Has rematerialised functions run as they stand in the body, which keeps nothing and follows what they do."""
    before, _active.followed = _active.followed, True
    try:
        yield
    finally:
        _active.followed = before


def is_followed() -> bool:
    """Whether this thread is in the body of `followed`."""
    return _active.followed


def inlined(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], policy: Any) -> Any:
    """Calls a rematerialised function inside of one that is being traced: its operations become the outer's.

    What `policy` says of the values that stay inside is noted; None has nothing to say.
    """
    recorder = _active.recorder
    assert recorder is not None
    first = len(recorder.calls)
    result = fn(*args, **kwargs)
    recorder.note_region(first, [t for t in tree.leaves(result) if isinstance(t, torch.Tensor)], policy)
    return result


@contextlib.contextmanager
def _tracing(recorder: Recorder) -> Iterator[None]:
    with below_all(), _seeds_refused(), recorder, torch.enable_grad(), _NoData(recorder):
        yield


class _NoData(TorchFunctionMode):
    """Refuses what would read memory that the tensors of a trace do not have."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and self.recorder.owns(unwrapped(args[0])):
            raise TraceError(
                f"{current()}: the function looks at the data of a tensor here (`{func.__name__}`), so its "
                f"operations are not the same for all data and cannot be planned ahead. {WAY_OUT}"
            )
        return func(*args, **(kwargs or {}))


_READS = {
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.tolist,
    torch.Tensor.data_ptr,
    torch.Tensor.__dlpack__,
}


class _SeedGuard:
    """Stands for the default generator while a function is traced: it may be asked, and not be set."""

    def __init__(self, generator: torch.Generator):
        self.generator = generator
        self.thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name in ("manual_seed", "set_state", "seed") and threading.get_ident() == self.thread:
            frame, inside = sys._getframe(1), False
            while frame is not None and not inside:
                inside, frame = frame.f_code.co_filename == torch.utils.checkpoint.__file__, frame.f_back
            if inside:
                raise TraceError(
                    "the function uses torch.utils.checkpoint inside, which decides for itself what is computed again. "
                    "Leave it out (a plan decides for the whole function), put fckpt.remat in its place, or tell it "
                    f"preserve_rng_state=False if nothing in it is random. {WAY_OUT}"
                )
            raise TraceError(
                f"{current()}: the function sets the random generator (`{name}`), which a plan cannot repeat. Set "
                f"it before the call, or pass a torch.Generator. {WAY_OUT}"
            )
        return getattr(self.generator, name)


@contextlib.contextmanager
def _seeds_refused() -> Iterator[None]:
    generator = torch.random.default_generator
    torch.random.default_generator = _SeedGuard(generator)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.random.default_generator = generator


_NO_DATA = (
    "Cannot access data pointer",
    "its data is not allocated yet",
    "unallocated storage",
    "invalid python storage",
)


class HigherOrderError(TraceError):
    """The function uses an operator that takes functions: nothing can be traced, in whatever way."""


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    """Turns what fake tensors cannot answer into an error that names the user's line."""
    try:
        yield
    except Exception as error:
        kind = type(error).__name__
        if isinstance(error, NotImplementedError) and "HigherOrderOperator" in str(error):
            name = str(error).partition("HigherOrderOperator ")[2].partition(" ")[0] or "an operator"
            raise HigherOrderError(
                f"{_line_of(error)}: the function uses `{name}` of torch's, which takes functions as arguments. A plan "
                "cannot tell which operations it will run. Write the branch or the loop in Python, or put the budget "
                f"around a part without it. {WAY_OUT}"
            ) from error
        hidden = isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_DATA)
        if not hidden and not any(word in kind for word in ("DataDependent", "DynamicOutputShape", "UnsupportedFake")):
            raise
        line = _line_of(error)
        raise TraceError(
            f"{line}: the function looks at the data of a tensor here ({kind}: {_first_line(error)}), so its "
            f"operations are not the same for all data and cannot be planned ahead. {WAY_OUT}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _line_of(error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    if not frames:
        return "in the traced function"
    last = frames[-1]
    module = failing_module(error)
    inside = f"{last.name} of {module}" if module else last.name
    return f"{last.filename}:{last.lineno}, in {inside} ({(last.line or '').strip()})"


def likely_differentiated(results: Sequence[torch.Tensor]) -> list[int]:
    """Returns which outputs a loss is probably made of: the one number among them, else all that require grad.

    It decides which backward pass is planned before the first one has been seen. A model that returns its loss beside
    logits and hidden states is differentiated for the loss.
    """
    tracked = [i for i, t in enumerate(results) if t.requires_grad]
    numbers = [i for i in tracked if results[i].dim() == 0]
    return numbers if len(numbers) == 1 else tracked


class _Finished:
    """What comes out of the forward run, and what backward makes of it."""

    def __init__(
        self,
        result: Any,
        operands: list[torch.Tensor],
        numbers: list[int],
        layouts: Sequence[Layout],
        count: int,
        recorder: Recorder,
        levels: Levels | None,
    ):
        self.recorder = recorder
        self.levels = levels
        self.operands = operands
        self.operand_numbers = numbers
        self.layouts = layouts
        self.leaves, self.spec = tree.flatten(result)
        known = {id(t): ("in", i) for i, t in enumerate(operands[:count])}
        results: list[torch.Tensor] = numbered(self.leaves, known)
        # Under a vmap, results are batches of their own, whatever they look at.
        self.results = apart(self.leaves, results, operands, count, recorder) if levels is None else results
        self.flags = tuple(t.requires_grad for t in self.results)
        found = [self._below(t) for t in self.results]
        self.outputs = tuple(recorder.number(t) for t, _ in found)
        self.out_dims = tuple(dim for _, dim in found)
        self.grad_dims: tuple[int | None, ...] = ()
        self.cotangents: tuple[int | None, ...] = ()
        self.gradients: tuple[int | None, ...] = ()

    def _below(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """A tensor below the levels of the trace, and its batch dimension."""
        return (tensor, None) if self.levels is None else self.levels.below(tensor)

    def differentiate(self, backward: Backward) -> None:
        """Runs a backward pass."""
        recorder = self.recorder
        differentiated = backward.outputs if backward.chosen is None else self._chosen(backward.chosen)
        if differentiated is None:
            differentiated = tuple(likely_differentiated(self.results))
        given = dict(zip(differentiated, backward.strides or (), strict=False))
        strides: list[tuple[int, ...]] = []
        cotangents: list[torch.Tensor | None] = []
        for i, (t, _) in enumerate(map(self._below, self.results)):
            own = strides_of(t.shape, t.stride())
            same = given.get(i, own) == own
            layout = Layout(tuple(t.shape), t.stride() if same else given[i], t.dtype, t.device, False, False)
            cotangents.append(recorder.stand_in(layout) if i in differentiated else None)
            strides += [given.get(i, own)] if i in differentiated else []
            del t
        self.backward = Backward(differentiated, backward.autocast, tuple(strides))
        self.cotangents = tuple(None if ct is None else recorder.number(ct) for ct in cotangents)
        if self.levels is not None:
            pairs = list(zip(cotangents, self.out_dims, strict=True))
            cotangents = [None if ct is None else self.levels.batched(ct, dim) for ct, dim in pairs]
            del pairs
        wanted = [t for t in self.operands if t.requires_grad]
        pairs = [(y, ct) for y, ct in zip(self.results, cotangents, strict=True) if ct is not None]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if wanted and pairs:
            ys, cts = [y for y, _ in pairs], [ct for _, ct in pairs]
            recorder.sums.mark(ys)
            self.results.clear()
            pairs.clear()
            with ambient.autocast_as(backward.autocast):
                found = torch.autograd.grad(ys, wanted, cts, allow_unused=True)
            del ys
            recorder.release()
        grads = iter(found)
        taken = {recorder.values[t] for t in self.outputs}
        gradients: list[int | None] = []
        dims: list[int | None] = []
        for operand, layout in zip(self.operands, self.layouts, strict=True):
            grad, dim = next(grads) if operand.requires_grad else None, None
            if grad is not None:
                grad, dim = self._below(grad)
            dims.append(dim)
            if grad is not None and layout.accumulates and self.levels is None:
                grad = self._own(grad, layout, taken)
            gradients.append(None if grad is None else recorder.number(grad))
        self.gradients, self.grad_dims = tuple(gradients), tuple(dims)

    def _chosen(self, chosen: Sequence[int | str]) -> tuple[int, ...]:
        """The outputs that the user says a loss is made of."""
        pairs = [(name, leaf) for name, leaf in zip(self.spec.names(), self.leaves, strict=True) if is_number(leaf)]
        try:
            leaves = [pairs[i] for i in tree.selected(chosen, [name for name, _ in pairs])]
        except LookupError as error:
            raise ArgumentValueError(f"outputs: {error}.") from error
        for name, (kind, number) in leaves:
            if kind != "out" or not self.results[number].requires_grad:
                raise ArgumentValueError(f"outputs: {name or 'the result'!r} depends on nothing that requires grad.")
        return tuple(sorted({number for _, (_, number) in leaves}))

    def _own(self, grad: torch.Tensor, layout: Layout, taken: set[int]) -> torch.Tensor:
        """The gradient as `.grad` can take it over: a storage of its own, laid out like the leaf.

        Autograd would make a copy of it otherwise, unseen by the plan.
        """
        recorder = self.recorder
        storage = recorder.version(grad)
        given = [*self.operand_numbers, *(ct for ct in self.cotangents if ct is not None)]
        shared = storage in taken or storage in {recorder.values[t] for t in given}
        stride = _strides_of_grad(layout)
        if shared or grad.stride() != stride or grad.untyped_storage().nbytes() != grad.nbytes:
            grad = torch.empty_strided(layout.shape, stride, dtype=grad.dtype, device=grad.device).copy_(grad)
            storage = recorder.version(grad)
        taken.add(storage)
        return grad

    def trace(self, origins: Sequence[str]) -> Trace:
        return Assembly(self, origins).trace()


def _untracked(layout: Layout) -> Layout:
    return layout._replace(requires_grad=False, computed=False)


def _strides_of_grad(layout: Layout) -> tuple[int, ...]:
    """The leaf's own strides where its elements fill its memory, else those of a contiguous tensor."""
    if not is_dense(layout.shape, layout.stride):
        return tuple(torch._prims_common.make_contiguous_strides_for(layout.shape))
    return tuple(layout.stride)
