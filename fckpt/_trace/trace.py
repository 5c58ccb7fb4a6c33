"""Tracing: from a function and example arguments to the graph of its forward and backward pass.

The function runs once, on tensors without memory and with autograd recording; then autograd runs its backward pass.
Below autograd, `recorder.py` records every operation. Captured tensors become inputs of the graph, like arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fckpt import _tree as tree
from fckpt._call.ambient import errors_unlogged
from fckpt._call.arguments import Arguments, argument_written
from fckpt._call.levels import below_all
from fckpt._call.places import Slot, placed, replaced
from fckpt._call.snapshots import Snapshot
from fckpt._capture.function import BatchedGraph, GraphFunction
from fckpt._capture.marks import marks_answered
from fckpt._capture.reads import Reads
from fckpt._memory import collector_paused
from fckpt._recompute.gradients_inside import refuse_accumulated
from fckpt._recompute.registrations import Registrations
from fckpt._trace.aliases import NEW_LEAF
from fckpt._trace.assemble import Assembly
from fckpt._trace.donation import written_over_donated
from fckpt._trace.effects import (
    arguments_unchanged,
    check_assignments,
    check_writes,
    impure_calls_refused,
    refuse_leftover_tensors,
    remove_leftover_tensors,
    seeding_refused,
    undone_on_error,
    with_attributes_of,
)
from fckpt._trace.fast_paths import overrides_answered
from fckpt._trace.late import LateReads, late_code_watched, refuse_hooks
from fckpt._trace.memories import memory_of
from fckpt._trace.named_device import DevicesMoved, NamedDevice, cuda_kernels
from fckpt._trace.operations import Backward, Batch, Layout, Trace
from fckpt._trace.parameters import parameters_made
from fckpt._trace.recorder import Recorder
from fckpt._trace.registered import registered_code_watched
from fckpt._trace.results import Results
from fckpt._trace.settings import settings_unchanged
from fckpt._trace.stand_ins import WAY_OUT
from fckpt._trace.symbolic_functions import SymbolicFunctions
from fckpt._trace.untraceable import DataReadsRefused, errors_located
from fckpt._trace.updates import with_early_updates
from fckpt._trace.vmap_of_grad import under_vmap
from fckpt._trace.zeros import with_memory
from fckpt.errors import TraceError
from fckpt.policies.names import names_recorded

__all__ = ["followed", "inlined", "is_followed", "is_tracing", "trace"]

_LIKELY = Backward()


@collector_paused()  # it would also call functions that are not the traced function's (`gc.callbacks`)
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
    donated: Sequence[int] = (),
    target: NamedDevice | None = None,
    sizes: Any = None,
) -> Trace:
    """Traces one call of `fn` and its backward pass, with the autocast state of the caller.

    Args:
        fn: a function whose control flow does not depend on the data of tensors.
        arguments: the arguments of the call.
        closure: the captured tensors of `fn`.
        slots: the places that hold the captured tensors.
        layouts: the layouts of the operands: arguments, then captured tensors.
        origins: names for the operands.
        state: the places that `fn` may assign to, including attributes, parameters and buffers of modules.
        backward: the backward pass. Its outputs are numbers of distinct new tensors; None for `likely_differentiated`.
        batch: the `vmap` outside of the transform that differentiates; if given, `layouts` describe the batches.
        reads: records which of the user's Python code runs.
        donated: the positions of arguments over which results are written; see `donation`.
        target: the device to trace for, if it is not the device of the tensors; see `named_device`.
        sizes: the environment of the symbolic sizes in `layouts`, if there are any; see `sized`.

    Raises:
        TraceError: the control flow of the function depends on the data of tensors, or the function uses a tensor that
            is neither passed nor in `closure`, or it stores a tensor anywhere but in its result.
        MutationError: the function changes an argument in place.
    """
    if target is not None:
        layouts = [layout._replace(device=target.device) for layout in layouts]
    recorder = Recorder(None if target is None else target.device, sizes)
    captured = isinstance(fn, (GraphFunction, BatchedGraph))  # such a graph only calls torch
    try:
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
            donated,
            target,
        )
    except BaseException:
        if not captured:
            remove_leftover_tensors(recorder)  # a cache would give them to the next call
        raise
    if not captured:
        refuse_leftover_tensors(recorder)
    return traced


def _holds_only(holder: Any, fn: Callable[..., Any]) -> bool:
    """Whether `holder` is the list in which a closure holds its function, see `closure_of`."""
    return type(holder) is list and len(holder) == 1 and holder[0] is fn


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
    donated: Sequence[int],
    target: NamedDevice | None,
) -> Trace:
    tensors = [*arguments.tensors, *closure]
    names = [*origins, *[""] * (len(tensors) - len(origins))]
    enabled = torch.is_grad_enabled() or any(layout.requires_grad for layout in layouts)
    wrapped = batch is not None or any(layout.transformed or layout.at_level for layout in layouts)
    graph, inference = isinstance(fn, (GraphFunction, BatchedGraph)), torch.is_inference_mode_enabled()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_recording(recorder, wrapped, enabled, target))
        if recorder.sizes is not None:
            stack.enter_context(SymbolicFunctions())
        stand_ins = [recorder.stand_in(_untracked(layout) if batch else layout) for layout in layouts]
        numbers = [recorder.number(t) for t in stand_ins]
        count = len(arguments.tensors)
        _protect(stand_ins[:count], arguments, origins, donated, recorder)
        levels = None if batch is None else stack.enter_context(under_vmap(batch))
        tracked = [layout.is_tracked for layout in layouts]
        computed = [layout.computed for layout in layouts]
        operands = stand_ins if levels is None else levels.wrapped(stand_ins, tracked, computed)
        del stand_ins
        new = {id(t): operand for t, operand in zip(tensors, operands, strict=True)}
        args, kwargs = arguments.rebuild(operands[:count])
        closed = [(holder, key, replaced(value, new)) for holder, key, value in slots]
        place: Any = next((holder for holder, key, _ in slots if key is None and _holds_only(holder, fn)), [fn])
        with placed(closed), names_recorded(recorder.name), marks_answered(recorder):
            before = state.again()
            carried = {} if backward.then is None else backward.then.begun(operands)
            moved = contextlib.nullcontext() if target is None else DevicesMoved(target, graph, recorder)
            python = (
                registered_code_watched(fn) if graph else _python_code(reads, tensors, operands, recorder, inference)
            )
            with undone_on_error(before), reads.holding(before):
                hooks = Registrations()
                unchanged = contextlib.nullcontext() if graph else arguments_unchanged(args, kwargs)
                with python, moved, hooks, unchanged:
                    result = place[0](*args, **kwargs)  # a partial or a bound method may itself hold tensors
                refuse_hooks(hooks, [*operands, *tensors], result)
                check_assignments(closed, before, recorder)
                _refuse_switched(operands, tracked, names)
                refuse_accumulated(fn, operands)
        if donated:
            kept = fn.returned_operands(result) if isinstance(fn, GraphFunction) else set()
            result = written_over_donated(result, operands, [n for n in donated if n not in kept], recorder)
        result = tree.map_leaves(with_memory, result) if recorder.zeros.made else result
        results = Results(result, operands, numbers, layouts, count, recorder, levels)
        _refuse_lost_grad(results, layouts)
        check_writes(operands, numbers, recorder, tensors)
        recorder.start_backward()
        late: list[LateReads] = []
        with registered_code_watched(fn) if graph else late_code_watched(reads, before.again(), slots, late):
            results.differentiate(backward, carried)
    assembly = Assembly(recorder, results.interface(), names)
    traced = assembly.trace()
    if recorder.ending is not None:
        traced = with_early_updates(traced, assembly.nodes_before(recorder.ending))
    return dataclasses.replace(traced, given=tuple(map(memory_of, tensors)), late=tuple(late))


@contextlib.contextmanager
def _recording(recorder: Recorder, wrapped: bool, enabled: bool, target: NamedDevice | None) -> Iterator[None]:
    """Records the body, with grad mode on or off as in the plain call, for the device `target` if one is named."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_active.set_to(recorder))
        if target is not None:
            stack.enter_context(cuda_kernels(target))
            stack.enter_context(recorder.fake)  # torch would start CUDA for `device="cuda"` in another mode
        # Anomaly mode looks for NaN in gradients, which have no data here.
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        stack.enter_context(torch.inference_mode(False))  # switches grad mode on
        stack.enter_context(torch.set_grad_enabled(enabled))
        stack.enter_context(errors_unlogged("torch._subclasses.fake_tensor"))  # the caller gets the error itself
        reads = DataReadsRefused(recorder, wrapped)
        with below_all(), seeding_refused(), recorder, reads, errors_located():
            yield


def _protect(
    operands: Sequence[torch.Tensor],
    arguments: Arguments,
    origins: Sequence[str],
    donated: Sequence[int],
    recorder: Recorder,
) -> None:
    """Makes a write over an argument an error, unless the argument is donated."""
    for i, operand in enumerate(operands):
        if i in donated:
            recorder.donate(operand)
        else:
            origin = origins[i] if i < len(origins) else arguments.path(i)
            recorder.refuse_writes(operand, functools.partial(argument_written, origin))


@contextlib.contextmanager
def _python_code(
    reads: Reads,
    tensors: Sequence[torch.Tensor],
    operands: Sequence[torch.Tensor],
    recorder: Recorder,
    inference: bool,
) -> Iterator[None]:
    """Lets the user's Python code run within a trace: without compiled functions and impure calls."""
    # Compiled functions inside run uncompiled: torch would cache the failure of compiling them here.
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(parameters_made(recorder))
        stack.enter_context(overrides_answered(recorder))
        stack.enter_context(settings_unchanged())
        stack.enter_context(impure_calls_refused(reads, inference))
        stack.enter_context(with_attributes_of(tensors, operands))
        yield


def _refuse_switched(operands: Sequence[torch.Tensor], tracked: Sequence[bool], names: Sequence[str]) -> None:
    for operand, before, name in zip(operands, tracked, names, strict=True):
        if operand.is_leaf and operand.requires_grad != before:
            raise TraceError(
                f"the function leaves `requires_grad` of {f'`{name}`' if name else 'a tensor'} at {not before}, where "
                f"it was {before} before the call, which a plan would not repeat. Set it before the call of the "
                f"function, or set it back within the function. {WAY_OUT}"
            )


def _refuse_lost_grad(results: Results, layouts: Sequence[Layout]) -> None:
    differentiable = results.differentiable or [True] * len(layouts)
    if any(results.flags) and not any(x.requires_grad and led for x, led in zip(layouts, differentiable, strict=True)):
        if any(layout.unrecorded for layout in layouts):
            raise TraceError(
                "the function switches grad mode on, and returns a tensor that requires grad, in a call with grad mode "
                f"off: a plan would lose that. Detach the result, or switch grad mode on around the call. {WAY_OUT}"
            )
        raise TraceError(
            "the function returns a tensor that requires grad, although its gradient leads to nothing that is passed "
            f"to it: a plan would lose that. Detach the result. {WAY_OUT}"
        )
    if results.levels is None and any(t.is_leaf for t in results.made()):
        raise TraceError(NEW_LEAF)


class _Active(threading.local):
    """The tracing state of the current thread."""

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
    """Makes rematerialised functions run without rematerialisation within the body, whose caller follows operations."""
    before, _active.followed = _active.followed, True
    try:
        yield
    finally:
        _active.followed = before


def is_followed() -> bool:
    """Whether this thread is in the body of `followed`."""
    return _active.followed


def inlined(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], policy: Any) -> Any:
    """Calls a rematerialised function within a trace, so that its operations join the trace of the outer function.

    The recorder notes `policy` for the values that stay inside the inner function; None stands for no policy.
    """
    recorder = _active.recorder
    assert recorder is not None
    first = len(recorder.calls)
    result = fn(*args, **kwargs)
    recorder.note_region(first, [t for t in tree.leaves(result) if isinstance(t, torch.Tensor)], policy)
    return result


def _untracked(layout: Layout) -> Layout:
    return layout._replace(requires_grad=False, computed=False, unrecorded=False)
