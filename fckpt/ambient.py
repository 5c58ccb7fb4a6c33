"""What surrounds a call and changes its result: autocast, determinism flags, default dtype and device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

__all__ = ["Ambient", "capture", "restored"]

Ambient = tuple[Any, ...]

idle_level = -1
"""The level of forward mode that is open without anybody using it; see `fckpt.spmd.simulation`."""


@lru_cache(maxsize=1)
def _device_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None or accelerator.type == "cpu" else ("cpu", accelerator.type)


def capture() -> Ambient:
    """Reads the settings in force, as one comparable value."""
    autocast: Any = None
    if torch._C._is_any_autocast_enabled():
        autocast = (
            torch.is_autocast_cache_enabled(),
            *((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _device_types()),
        )
    # A `with torch.device(...)` block and `set_default_device` are torch function modes.
    device = torch.get_default_device() if torch._C._len_torch_function_stack() else None
    return (
        autocast,
        device,
        torch.get_default_dtype(),
        torch._C._get_deterministic_algorithms(),
        torch._C._get_deterministic_algorithms_warn_only(),
        torch._C._get_cudnn_deterministic(),
        torch._C._get_cudnn_benchmark(),
        torch._C._get_float32_matmul_precision(),
    )


@contextlib.contextmanager
def restored(then: Ambient) -> Iterator[None]:
    """Puts the settings of `then` in force for the body."""
    now = capture()
    with contextlib.ExitStack() as stack:
        if then[0] != now[0]:
            cache, settings = (then[0][0], then[0][1:]) if then[0] else (True, ())
            settings = settings or tuple((d, False, None) for d in _device_types())
            for device, enabled, dtype in settings:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))
        if then[1] is not None and then[1] != now[1]:
            stack.enter_context(then[1])
        try:
            _set_flags(then)
            yield
        finally:
            _set_flags(now)


def _set_flags(ambient: Ambient) -> None:
    _, _, dtype, deterministic, warn_only, cudnn_deterministic, cudnn_benchmark, precision = ambient
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch._C._set_cudnn_deterministic(cudnn_deterministic)
    torch._C._set_cudnn_benchmark(cudnn_benchmark)
    torch._C._set_float32_matmul_precision(precision)
