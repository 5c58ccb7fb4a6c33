"""Peak memory of a call, read from the allocator: exact on the CPU, `max_memory_allocated` on CUDA."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["PeakMemory", "collector_paused", "measure_peak"]


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

    Example:
        >>> import torch
        >>> x = torch.ones(256)                  # 1024 bytes, held before the call: not counted
        >>> measure_peak(lambda: x.exp().sin()).peak_bytes
        2048
    """
    device = torch.device(device)
    gc.collect()
    if device.type == "cpu":
        return _measure_cpu(fn)
    module = torch.get_device_module(device)
    module.synchronize(device)
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    result = fn()
    module.synchronize(device)
    peak, after = module.max_memory_allocated(device), module.memory_allocated(device)
    del result
    return PeakMemory(peak - before, after - before)


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
