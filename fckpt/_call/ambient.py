"""Ambient settings: process-wide state that changes the result of a call, such as autocast and determinism flags."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

__all__ = [
    "Ambient",
    "autocast",
    "autocast_as",
    "capture",
    "errors_unlogged",
    "function_modes",
    "has_function_modes",
    "interfering_mode",
    "of_backward",
    "of_plans",
    "put_back",
    "restored",
    "unobserved",
    "users_function_modes",
    "without_modes",
]

Ambient = tuple[Any, ...]

without_modes = _disable_current_modes
"""Context manager that disables all dispatch modes for its body."""


def has_function_modes() -> bool:
    """Whether any torch function mode is active."""
    return torch._C._len_torch_function_stack() > 0


def users_function_modes() -> list[TorchFunctionMode]:
    """Returns the active torch function modes that are neither torch's nor fckpt's."""
    modes = _get_current_function_mode_stack() if has_function_modes() else []
    return [mode for mode in modes if type(mode).__module__.partition(".")[0] not in ("torch", "fckpt")]


@lru_cache(maxsize=1)
def _device_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None or accelerator.type == "cpu" else ("cpu", accelerator.type)


@contextlib.contextmanager
def function_modes(modes: Sequence[TorchFunctionMode]) -> Iterator[None]:
    """Activates exactly these torch function modes within the body, the innermost last."""
    before = _get_current_function_mode_stack()
    _exchange(modes)
    try:
        yield
    finally:
        _exchange(before)


def _exchange(modes: Sequence[TorchFunctionMode]) -> None:
    for _ in range(torch._C._len_torch_function_stack()):
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


def autocast() -> Ambient | None:
    """Returns the autocast settings as one comparable value; None if autocast is off."""
    if not torch._C._is_any_autocast_enabled():
        return None
    return (
        torch.is_autocast_cache_enabled(),
        *((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _device_types()),
    )


@contextlib.contextmanager
def autocast_as(then: Ambient | None) -> Iterator[None]:
    """Runs the body under the autocast settings `then`, a result of `autocast`."""
    with contextlib.ExitStack() as stack:
        if then != autocast():
            cache, settings = (then[0], then[1:]) if then else (True, ())
            settings = settings or tuple((d, False, None) for d in _device_types())
            for device, enabled, dtype in settings:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))
        yield


def interfering_mode() -> Any:
    """Returns an active dispatch mode of the user that may change the results of operations; None if there is none.

    Modes that only observe are not returned: PyTorch's modes, such as FlopCounterMode, and modes with the attribute
    `fckpt_looks_on = True`.
    """
    if not torch._C._len_torch_dispatch_stack():
        return None
    for mode in _get_current_dispatch_mode_stack():
        own = type(mode).__module__.partition(".")[0] in ("torch", "fckpt")
        if not own and not getattr(mode, "fckpt_looks_on", False):
            return mode
    return None


def unobserved() -> contextlib.AbstractContextManager[Any]:
    """Disables the user's dispatch modes for operations that the plain function would not run."""
    if torch._C._len_torch_dispatch_stack():
        modes = _get_current_dispatch_mode_stack()
        if all(getattr(mode, "_mode_key", None) is None for mode in modes):  # PyTorch's own modes stay
            return _disable_current_modes()
    return contextlib.nullcontext()


def capture() -> Ambient:
    """Returns all ambient settings as one comparable value."""
    # A `with torch.device(...)` block and `set_default_device` are torch function modes.
    device = None
    if torch._C._len_torch_function_stack():
        with torch._C._DisableFuncTorch():  # torch makes a tensor to find the device, which fails at some levels
            device = torch.get_default_device()
    return (
        autocast(),
        device,
        torch.get_default_dtype(),
        torch._C._get_deterministic_algorithms(),
        torch._C._get_deterministic_algorithms_warn_only(),
        torch._C._get_cudnn_deterministic(),
        torch._C._get_cudnn_benchmark(),
        torch._C._get_float32_matmul_precision(),
        _flushes_denormals(),
        *[read() for read, _ in _KERNELS],
        tuple(torch._C._get_sdp_priority_order()),
    )


def of_backward(settings: Ambient) -> Ambient:
    """Returns the part of `settings`, a result of `capture`, on which the operations of a backward pass depend.

    Autograd runs them under the settings at the time of the backward pass. Autocast is not among them: plans are made
    for it. A backend of attention is not either: the forward pass has chosen it.
    """
    return settings[3 : 9 + _UP_TO_ATTENTION]


def _flushes_denormals() -> bool:
    """Whether this thread rounds denormal numbers to zero, see `torch.set_flush_denormal`. Torch has no getter."""
    return _SMALLEST_NORMAL * _HALF == 0.0


_SMALLEST_NORMAL, _HALF = sys.float_info.min, 0.5


def of_plans() -> Ambient:
    """Returns the settings on which a plan depends: the ambient ones, and the number of threads, with which the
    temporary memory of some kernels grows.
    """
    return capture(), torch.get_num_threads()


_KERNELS = [
    (getattr(torch._C, f"_get_{read}"), getattr(torch._C, f"_set_{write}"))
    for read, write in (
        ("mkldnn_enabled", "mkldnn_enabled"),
        ("mkldnn_deterministic", "mkldnn_deterministic"),
        ("cudnn_enabled", "cudnn_enabled"),
        ("nnpack_enabled", "nnpack_enabled"),
        ("flash_sdp_enabled", "sdp_use_flash"),
        ("mem_efficient_sdp_enabled", "sdp_use_mem_efficient"),
        ("math_sdp_enabled", "sdp_use_math"),
        ("cudnn_sdp_enabled", "sdp_use_cudnn"),
        ("overrideable_sdp_enabled", "sdp_use_overrideable"),
    )
    if hasattr(torch._C, f"_get_{read}") and hasattr(torch._C, f"_set_{write}")
]
"""Getter and setter of each flag that enables a kernel."""
_UP_TO_ATTENTION = sum("sdp" not in write.__name__ for _, write in _KERNELS)
"""The number of the first of these flags that are not about attention."""


@contextlib.contextmanager
def restored(then: Ambient) -> Iterator[None]:
    """Runs the body under the settings `then`, a result of `capture`."""
    now = capture()
    with contextlib.ExitStack() as stack:
        stack.enter_context(autocast_as(then[0]))
        if then[1] is not None and then[1] != now[1]:
            stack.enter_context(then[1])
        try:
            _set_flags(then)
            yield
        finally:
            _set_flags(now)


def put_back(then: Ambient) -> None:
    """Restores the process-wide settings of `then`. Autocast and the default device belong to a thread, and are not
    restored.
    """
    if capture()[2:] != then[2:]:
        _set_flags(then)


def _set_flags(ambient: Ambient) -> None:
    _, _, dtype, deterministic, warn_only, cudnn_deterministic, cudnn_benchmark, precision, *rest = ambient
    flushes, *kernels, order = rest
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch._C._set_cudnn_deterministic(cudnn_deterministic)
    torch._C._set_cudnn_benchmark(cudnn_benchmark)
    torch._C._set_float32_matmul_precision(precision)
    if flushes != _flushes_denormals():
        torch.set_flush_denormal(flushes)
    for (_, write), flag in zip(_KERNELS, kernels, strict=True):
        write(flag)
    if order != tuple(torch._C._get_sdp_priority_order()):
        torch._C._set_sdp_priority_order(list(order))


@contextlib.contextmanager
def errors_unlogged(name: str) -> Iterator[None]:
    """Keeps one of torch's loggers from printing the stacks of errors that this thread raises within the body."""
    here, logger = threading.get_ident(), logging.getLogger(name)
    without_stacks = lambda record: not record.exc_info or record.thread != here
    logger.addFilter(without_stacks)
    try:
        yield
    finally:
        logger.removeFilter(without_stacks)
