"""What a traced Python function does besides computing, none of which a plan would repeat: found, and refused.

This is for functions that are traced by running their Python code. What a captured function does (see `_capture`) is
replayed at every call.
"""

from __future__ import annotations

import builtins
import contextlib
import datetime
import functools
import gc
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import torch

from fckpt._call.facts import is_library
from fckpt._call.modules import storage_of
from fckpt._capture.reads import Reads
from fckpt._capture.sources import current
from fckpt._trace.recorder import WAY_OUT, Recorder
from fckpt.errors import TraceError

__all__ = ["impure_calls_refused", "refuse_what_stays"]

_CLOCKS = {
    getattr(time, name) for name in dir(time) if name.startswith(("time", "perf_counter", "monotonic", "process"))
}
_IMPURE = {
    builtins.print: "prints",
    builtins.input: "asks the user",
    builtins.open: "opens a file",
    os.urandom: "draws random bytes",
    os.getenv: "reads the environment",
    uuid.uuid4: "draws random bytes",
    **{f: "reads a clock" for f in _CLOCKS if callable(f) and not isinstance(f, type)},
}

_ASKS = {
    os.getpid: "asks for its process",
    os.getcwd: "asks for the working directory",
    os.listdir: "looks at files",
    os.scandir: "looks at files",
    os.stat: "looks at files",
    builtins.globals: "looks up its globals by name",
    datetime.datetime.now: "reads a clock",
    datetime.datetime.utcnow: "reads a clock",
    datetime.date.today: "reads a clock",
    torch.get_num_threads: "asks for the number of threads",
    torch.get_num_interop_threads: "asks for the number of threads",
    threading.get_ident: "asks for its thread",
}
"""What a library may ask for its own purposes, and the user's code may not."""


@contextlib.contextmanager
def impure_calls_refused(reads: Reads) -> Iterator[None]:
    """Raises `TraceError` if the body calls what a plan could not repeat: a clock, a file, the terminal.

    Calls that torch or fckpt make are let by. Functions that are called are noted in `reads`.
    """
    found: list[str] = []
    before = sys.getprofile()

    def look(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            reads.note(frame)
        elif event == "c_call" and not found and (does := _impure(argument, frame)):
            found.append(f"{current()}: the function {does} here (`{argument.__name__}`)")

    # A collection runs functions of others (`gc.callbacks`, which hypothesis has, or a monitor): not the traced one's.
    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    if found:
        raise TraceError(
            f"{found[0]}, which a plan would not do again: it runs the operations of the function, not its Python "
            f"code. Do it outside of the function. {WAY_OUT}"
        )


def _impure(called: Any, frame: Any) -> str:
    """Says what is wrong with a call from a frame; empty if nothing is."""
    try:
        does, asks = _IMPURE.get(called, ""), _ASKS.get(called, "")
    except TypeError:  # it cannot be hashed
        return ""
    if asks and is_library(str(frame.f_globals.get("__name__", ""))):
        return ""
    return (does or asks) if (does or asks) and _is_from_user(frame) else ""


def _is_from_user(frame: Any) -> bool:
    if any(getattr(callback, "__code__", None) is frame.f_code for callback in gc.callbacks):
        return False  # the collector may run anywhere, and calls what anybody left with it
    name = frame.f_globals.get("__name__", "").partition(".")[0]
    return name not in ("torch", "fckpt", "contextlib", "warnings", "linecache", "tokenize", "traceback", "logging")


def refuse_what_stays(recorder: Recorder) -> None:
    """Raises `TraceError` if tensors of a trace are still alive after it, in a cache say; they are taken out first."""
    if not recorder.alive():
        return
    gc.collect()
    addresses = recorder.alive()
    if not addresses:
        return
    held = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and storage_of(t) in addresses]
    names: set[str] = set()
    while held:
        names.add(_removed(held.pop(), held))
    names -= {""}
    if not names:
        return  # held by torch itself: a cache of autocast, say, which goes with its block
    raise TraceError(
        f"the function keeps tensors that it computes: {', '.join(sorted(names))}. A plan runs the function's "
        "operations, not its Python code, so it would keep nothing there. Return them, or fill the cache before. "
        f"{WAY_OUT}"
    )


def _removed(value: Any, ours: list[torch.Tensor], depth: int = 3) -> str:
    """Takes a tensor, or a tuple with it, out of the container that holds it; returns what that was, if anything."""
    for holder in gc.get_referrers(value):
        if isinstance(holder, dict):
            for key in [key for key, held in list(holder.items()) if held is value]:
                del holder[key]
                return f"under the key {key!r}"
        elif isinstance(holder, list) and holder is not ours:
            holder[:] = [held for held in holder if held is not value]
            return "in a list"
        elif isinstance(holder, functools._lru_cache_wrapper):
            holder.cache_clear()
            return f"in the cache of {getattr(holder, '__name__', 'a function')}"
        elif isinstance(holder, set):
            holder.discard(value)
            return "in a set"
        elif isinstance(holder, tuple) and depth and (found := _removed(holder, ours, depth - 1)):
            return found
    return ""
