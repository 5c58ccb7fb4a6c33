"""Peak memory of a call, read off the allocator: exact on CPU, `max_memory_allocated` on CUDA."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["PeakMemory", "measure_peak"]


@dataclass(frozen=True)
class PeakMemory:
    """What the allocator held during a call, in bytes above what it held when the call began."""

    peak_bytes: int
    """Most bytes held at once."""
    retained_bytes: int
    """Bytes still held when the call returned, its result included."""


def measure_peak(fn: Callable[[], Any], device: torch.device | str = "cpu") -> PeakMemory:
    """Runs `fn()` once and returns the most bytes that `device`'s allocator held at once.

    On CPU every allocation and release is recorded by `torch.profiler`, kernel temporaries
    included, so the number is exact to the byte and repeats; what libraries allocate behind the
    allocator's back (oneDNN, BLAS scratch) is not seen. On CUDA it is
    `torch.cuda.max_memory_allocated() - memory_allocated()` at the call, which rounds to 512 bytes. Threads that
    measure wait for one another.

    Args:
        fn: called without arguments.
        device: whose allocator to watch.

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


_recording = threading.Lock()
"""Two recordings at once take the process down (torch 2.11 and 2.13)."""


def _measure_cpu(fn: Callable[[], Any]) -> PeakMemory:
    # The profiler's library announces each start and stop on stderr; it reads its level at the first.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.profiler import ProfilerActivity, profile

    with _recording, profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recording:
        result = fn()
    held = peak = 0
    # Deltas are summed: the event's own running total starts from earlier recordings.
    for event in recording.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            held += event.nbytes()
            peak = max(peak, held)
    del result
    return PeakMemory(peak, held)
