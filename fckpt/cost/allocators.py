"""How torch's allocators count the memory of a tensor.

The allocator for CUDA rounds sizes up to multiples of 512 bytes. It takes a tensor of more than 1 MiB from a larger
free block and, unless its segments are expandable, divides the block only if more than 1 MiB is left over. Source:
`c10/cuda/CUDACachingAllocator.cpp` of torch; seen on an H100 with torch 2.11.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from fckpt.errors import BudgetWarning, users_stacklevel

__all__ = ["granularity", "warn_of_whole_blocks"]


def granularity(device: torch.device) -> int:
    """Returns the bytes to a multiple of which torch's allocator for this device rounds up."""
    return 512 if device.type == "cuda" else 1


def warn_of_whole_blocks(devices: Iterable[torch.device]) -> None:
    """Warns, once, if the allocator of one of the devices may count more memory than a plan."""
    if torch.cuda.is_initialized() and any(device.type == "cuda" for device in devices):
        _warn_of_whole_blocks()


@functools.cache
def _warn_of_whole_blocks() -> None:
    if _has_expandable_segments():
        return
    warnings.warn(
        "torch's allocator for CUDA may hold up to 1 MiB more than it was asked for, for a tensor of more than 1 MiB. "
        "A plan does not count that, so a peak may exceed its budget by some tenths of a percent. Start the program "
        "with PYTORCH_ALLOC_CONF=expandable_segments:True, and budgets hold to the byte. (Said once.)",
        BudgetWarning,
        stacklevel=users_stacklevel(),
    )


def _has_expandable_segments() -> bool:
    try:
        found: Any = torch.cuda.memory._snapshot()
        return bool(found["allocator_settings"]["expandable_segments"])
    except (RuntimeError, LookupError, TypeError):  # another allocator, or another version of torch
        return False
