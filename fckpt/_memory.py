"""Peak memory of a call, read from the allocator: exact on the CPU, `max_memory_allocated` on CUDA."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from fckpt.errors import ArgumentTypeError, ArgumentValueError, MeasurementError

__all__ = ["PeakMemory", "collector_paused", "measure_operation", "measure_peak", "undisturbed"]


@dataclass(frozen=True)
class PeakMemory:
    """Memory that the allocator held during a call, in bytes above what it held when the call began."""

    peak_bytes: int
    """The most bytes held at once."""
    retained_bytes: int
    """The bytes still held when the call returned, including its result."""


def measure_peak(fn: Callable[[], Any], device: torch.device | str = "cpu") -> PeakMemory:
    """Runs `fn()` once and returns the most bytes that `device`'s allocator held at once.

    On the CPU, `torch.profiler` records every allocation and release, including temporaries of kernels, so the result
    is exact to the byte and reproducible. Memory that libraries allocate without torch's allocator (oneDNN, BLAS
    scratch) is not counted. On CUDA the result is `torch.cuda.max_memory_allocated() - memory_allocated()` at the call,
    which is a multiple of 512 bytes. Only one thread measures at a time; others wait.

    Args:
        fn: called without arguments.
        device: the device whose allocator is measured.

    Returns:
        Peak and remaining bytes, above what was held at the call.

    Raises:
        ArgumentTypeError: `fn` cannot be called.
        ArgumentValueError: there is no such device here, or it has no allocator.
        MeasurementError: this thread is recording already: `torch.profiler` is running, or another `measure_peak`.

    Example:
        >>> import torch
        >>> x = torch.ones(256)                  # 1024 bytes, held before the call: not counted
        >>> measure_peak(lambda: x.exp().sin()).peak_bytes
        2048
    """
    if not callable(fn):
        raise ArgumentTypeError(f"measure_peak takes a function without arguments, not {type(fn).__name__}.")
    device, module = _with_module(device)
    gc.collect()
    if device.type == "cpu":
        return _measure_cpu(fn)
    module.synchronize(device)
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    result = fn()
    module.synchronize(device)
    peak, after = module.max_memory_allocated(device), module.memory_allocated(device)
    del result
    return PeakMemory(peak - before, after - before)


def _with_module(device: Any) -> tuple[torch.device, Any]:
    """Returns a device and the part of torch that knows its allocator."""
    try:
        found = torch.device(device)
        module = torch.get_device_module(found)
        if found.type == "cpu" or (module.is_available() and (found.index or 0) < module.device_count()):
            return found, module
    except (RuntimeError, TypeError):  # it is no device, or a device without memory, such as meta
        pass
    raise ArgumentValueError(f"the memory of the device {str(device)!r} cannot be measured: this machine has none.")


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the garbage collector within the body.

    Each of its runs looks at every object of the program, a tenth of a second or more once a library is imported, and
    it frees memory and calls callbacks at any point.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_recording = threading.Lock()
"""Two recordings at once crash the process (torch 2.11 and 2.13)."""


def _measure_cpu(fn: Callable[[], Any]) -> PeakMemory:
    # The profiler's library prints each start and stop to stderr; it reads its log level at the first start.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.profiler import ProfilerActivity, profile

    if torch.autograd._profiler_enabled():
        raise MeasurementError(
            "memory on the CPU is measured by torch.profiler, which is recording already (a profiler, or an outer "
            "measure_peak) and would lose what it has recorded. Measure outside of it."
        )
    with _recording, profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recording:
        result = fn()
    held = peak = 0
    # Deltas are summed: the event's own running total starts from earlier recordings.
    for event in recording.profiler.kineto_results.events():  # type: ignore[union-attr]  # set once the recording has ended
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            held += event.nbytes()
            peak = max(peak, held)
    del result
    return PeakMemory(peak, held)


_Result = TypeVar("_Result")


def undisturbed(fn: Callable[[], _Result]) -> _Result:
    """Returns `fn()`. If a profiler is recording in this thread, `fn` runs in another one, where it may measure."""
    if not torch.autograd._profiler_enabled():
        return fn()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.copy_context().run, fn).result()


def measure_operation(fn: Callable[[], Any]) -> PeakMemory:
    """Returns the memory of a short call on the CPU, as `measure_peak` does in five times the time.

    The profiler of older versions of torch records each thread by itself, so other threads may record meanwhile.
    """
    torch.autograd._enable_profiler_legacy(_config())
    try:
        result = fn()
    finally:
        records = torch.autograd._disable_profiler_legacy()
    held = peak = 0
    for event in [event for thread in records for event in thread if event.kind() == "memory_alloc"]:
        held += event.cpu_memory_usage()
        peak = max(peak, held)
    del result
    return PeakMemory(peak, held)


@functools.cache
def _config() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the class is deprecated
        return torch.autograd.profiler_legacy.profile(profile_memory=True).config()
