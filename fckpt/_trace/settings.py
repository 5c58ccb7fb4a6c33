"""Settings of torch for the whole program that a traced function changes: its operations would not do so again.

The operations of a trace run under the settings of the call. A function that sets, for example, the default dtype is
refused, also if it sets it back: an operation in between depends on it. Grad mode may be changed and set back.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch

from fckpt._call import ambient
from fckpt._trace.stand_ins import WAY_OUT
from fckpt.errors import TraceError

__all__ = ["SETTERS", "sets", "settings_unchanged"]

SETTERS: dict[types.CodeType, str] = {
    getattr(torch, name).__code__: f"sets {what}"
    for name, what in {
        "set_default_dtype": "the default dtype",
        "set_default_tensor_type": "the default dtype",
        "set_default_device": "the default device",
        "use_deterministic_algorithms": "whether algorithms are deterministic",
        "set_deterministic_debug_mode": "whether algorithms are deterministic",
        "set_float32_matmul_precision": "the precision of matrix products",
        "set_warn_always": "whether warnings are repeated",
    }.items()
}
"""Functions of torch in Python, by their code: what they do. User code may not call them."""


def sets(called: Any) -> str:
    """Returns what a function in C does if it sets a setting of torch; otherwise empty."""
    name = str(getattr(called, "__name__", ""))
    if not name.startswith(("set_", "_set_")) or name == "_set_grad_enabled":
        return ""
    return "changes a setting of torch" if getattr(torch, name, getattr(torch._C, name, None)) is called else ""


@contextlib.contextmanager
def settings_unchanged() -> Iterator[None]:
    """Sets the settings back after the body.

    Raises:
        TraceError: the body has left other settings.
    """
    then, threads, always = ambient.capture(), torch.get_num_threads(), torch.is_warn_always_enabled()
    modes = _modes()
    try:
        yield
        names = [name for name, value in _modes().items() if modes[name] != value]
        if ambient.capture() != then or threads != torch.get_num_threads():
            names.append("settings of torch")
    finally:
        _put_back(then)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        torch.set_warn_always(always)
    if names:
        raise TraceError(
            f"the function changes {' and '.join(names)}, and does not set it back before it returns. A plan runs the "
            f"operations of the function, not its Python code, so it would change nothing. Set it before the call. "
            f"{WAY_OUT}"
        )


def _modes() -> dict[str, bool]:
    return {"the grad mode": torch.is_grad_enabled(), "the detection of anomalies": torch.is_anomaly_enabled()}


def _put_back(then: ambient.Ambient) -> None:
    ambient.put_back(then)
    now = ambient.capture()
    if now[0] != then[0]:
        for device, enabled, dtype in then[0][1:] if then[0] else [(d, False, None) for d, *_ in now[0][1:]]:
            torch.set_autocast_enabled(device, enabled)
            if dtype is not None:
                torch.set_autocast_dtype(device, dtype)
    if now[1] != then[1]:
        torch.set_default_device(then[1])
