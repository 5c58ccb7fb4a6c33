"""Errors for side effects of a traced Python function, which a plan would not repeat.

These checks apply to functions that are traced by running their Python code. The side effects of a captured function
are replayed at every call (see `_capture`).
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import cProfile
import datetime
import functools
import gc
import operator
import os
import random
import sys
import threading
import time
import types
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch.nn.parallel import DistributedDataParallel

from fckpt import _tree as tree
from fckpt._call.facts import is_library
from fckpt._call.levels import unwrapped
from fckpt._call.modules import is_plain_type, storage_of
from fckpt._call.places import ABSENT, Slot, content, moved, put
from fckpt._call.snapshots import Snapshot
from fckpt._capture.sources import current
from fckpt._trace.recorder import CHECKPOINT_INSIDE, Recorder
from fckpt._trace.settings import SETTERS, sets
from fckpt._trace.stand_ins import WAY_OUT, seems
from fckpt.errors import TraceError

__all__ = [
    "ASSIGNS",
    "check_assignments",
    "check_writes",
    "impure_calls_refused",
    "named_place",
    "refuse_leftover_tensors",
    "remove_leftover_tensors",
    "seeding_refused",
    "undone_on_error",
]

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

_READS = {
    builtins.globals: "reads its globals by name",
    datetime.datetime.now: "reads a clock",
    datetime.datetime.utcnow: "reads a clock",
    datetime.date.today: "reads a clock",
    torch.get_num_threads: "reads the number of threads",
    torch.get_num_interop_threads: "reads the number of threads",
    threading.get_ident: "reads its thread id",
    sys.getrefcount: "counts references",
    sys.getrecursionlimit: "reads the recursion limit",
    sys.getallocatedblocks: "counts allocated blocks",
    sys.getswitchinterval: "reads the switch interval",
    sys.gettrace: "asks for the trace function",
    torch.is_anomaly_enabled: "asks for the detection of anomalies",
    torch.is_anomaly_check_nan_enabled: "asks for the detection of anomalies",
}
"""Calls that are allowed in libraries and refused in user code, also where user code makes them through Python's own
modules."""
_SYSTEM = {
    "posix": "asks the operating system",
    "nt": "asks the operating system",
    "time": "reads a clock",
    "gc": "asks the garbage collector",
    "resource": "reads the use of resources",
    "signal": "reads or sets signal handlers",
    **dict.fromkeys(("_socket", "select", "fcntl", "syslog", "_posixsubprocess"), "asks the operating system"),
    **dict.fromkeys(("_locale", "pwd", "grp"), "reads settings of the system"),
}
"""What functions in C of Python's own modules do, which are refused in the same way."""
_CONSTANT = {os.fspath, os.cpu_count, os.uname, time.sleep, gc.collect}
"""Functions of these modules whose results never change, or matter to nothing."""
_UNSEEN = frozenset(
    ("torch", "fckpt", "contextlib", "warnings", "linecache", "tokenize", "traceback", "logging", "importlib")
    + ("dataclasses", "reprlib")
)
"""Modules whose calls do not matter to the result: messages, imports, and texts of objects."""


_OF_TORCH = {
    **SETTERS,
    torch.is_warn_always_enabled.__code__: "asks for the settings of warnings",
    torch.initial_seed.__code__: "reads the random seed",
    **{
        getattr(torch.cuda, name).__code__: "asks how much memory is taken"
        for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "mem_get_info", "memory_stats")
    },
}
"""Functions of torch that user code may not call, by their code."""
_PYTHONS: Any = random.seed.__self__
_SEED = random.Random.seed.__code__
"""To seed the generator is a side effect even if the generator is in the same state already."""
_WRAPPERS = {DistributedDataParallel.forward.__code__: "DistributedDataParallel"}
"""Code that communicates beside its operations, from hooks on gradients."""


class Noting(Protocol):
    """What records the calls of functions, see `Reads`."""

    def note(self, frame: types.FrameType) -> None: ...


@contextlib.contextmanager
def impure_calls_refused(
    reads: Noting, inference: bool = False, within: Callable[[Any], bool] = lambda frame: True
) -> Iterator[None]:
    """Raises `TraceError` if the body reads a clock, opens a file, prints, or makes another call with a side effect.

    Calls made by torch or fckpt are allowed.

    Args:
        reads: records all functions that are called.
        inference: whether the call is in inference mode, in which nothing is traced.
        within: whether a frame matters.
    """
    found: list[str] = []
    restore = _profiler_restorer()

    def look(frame: Any, event: str, argument: Any) -> None:
        if not within(frame):
            return
        if event == "call":
            reads.note(frame)
            if frame.f_code in _WRAPPERS and not found:
                wrapper = _WRAPPERS[frame.f_code]
                found.append(f"{current()}: the function calls a {wrapper} module here, which communicates by itself")
            elif frame.f_code in _OF_TORCH and not found and _is_for_user(frame.f_back):
                found.append(f"{current()}: the function {_OF_TORCH[frame.f_code]} here (`{frame.f_code.co_name}`)")
            elif frame.f_code is _SEED and not found and frame.f_locals.get("self") is _PYTHONS:
                found.append(f"{current()}: the function seeds Python's random generator here")
        elif event == "c_call" and inference and argument is torch.is_inference_mode_enabled and not found:
            found.append(f"{current()}: the function asks for the inference mode here (`{argument.__name__}`)")
        elif event == "c_call" and not found and (does := _impure(argument, frame)):
            found.append(f"{current()}: the function {does} here (`{argument.__name__}`)")

    sys.setprofile(look)
    try:
        yield
    finally:
        restore()
    if found:
        raise TraceError(
            f"{found[0]}, which a plan would not do again: a plan runs the operations of the function, not its Python "
            f"code. Do it outside of the function. {WAY_OUT}"
        )


def _profiler_restorer() -> Callable[[], object]:
    """Returns what sets the profiler of this thread again.

    Raises:
        TraceError: another profiler than `sys.setprofile` knows or cProfile is running.
    """
    before = sys.getprofile()
    if before is None or callable(before):
        return lambda: sys.setprofile(before)
    if isinstance(before, cProfile.Profile):  # written in C: `sys.getprofile` returns it, and `sys.setprofile` fails
        return before.enable
    raise TraceError(
        f"a {type(before).__name__} profiles this thread and cannot be set again after the function was traced. Call "
        "the function once before you profile it."
    )


def _impure(called: Any, frame: Any) -> str:
    """Returns what a call from a frame does that a plan would not repeat; empty if nothing."""
    try:
        does, asks = _IMPURE.get(called, ""), _READS.get(called, "")
        module = str(getattr(called, "__module__", ""))
        asks = asks or ("" if called in _CONSTANT else _SYSTEM.get(module, "")) or sets(called)
    except TypeError:  # not hashable
        return ""
    if called is sys.getrecursionlimit and is_library(_package(frame)):
        return ""  # `inspect.signature`, for example, protects itself from cycles
    if not asks and getattr(called, "__name__", "") == "locked":
        asks = "asks whether a lock is taken"
    return (does if _is_from_user(frame) else "") or (asks if asks and _is_for_user(frame) else "")


def _is_from_user(frame: Any) -> bool:
    if any(getattr(callback, "__code__", None) is frame.f_code for callback in gc.callbacks):
        return False  # the garbage collector may run at any point, and calls these callbacks
    return _package(frame) not in _UNSEEN


def _is_for_user(frame: Any) -> bool:
    """Whether a frame is of user code, or of a module of Python that user code called."""
    while frame is not None and is_library(_package(frame)):
        if not _is_from_user(frame) or _package(frame) not in sys.stdlib_module_names:
            return False
        frame = frame.f_back
    return frame is not None


def _package(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def refuse_leftover_tensors(recorder: Recorder) -> None:
    """Raises `TraceError` if tensors of a trace outlive it, in a cache for example. Removes those tensors first."""
    if not recorder.alive():
        return
    gc.collect()
    names = remove_leftover_tensors(recorder)
    if not names:
        return  # held by torch, for example in the cache of autocast, which is freed at the end of its block
    raise TraceError(
        f"the function keeps tensors that it computes: {', '.join(sorted(names))}. A plan runs the function's "
        "operations, not its Python code, so it would keep nothing there. Return them, or fill the cache before. "
        f"{WAY_OUT}"
    )


def remove_leftover_tensors(recorder: Recorder) -> set[str]:
    """Removes the tensors of a trace from all containers and caches; returns descriptions of these."""
    addresses = recorder.alive()
    if not addresses:
        return set()
    held: list[Any] = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and storage_of(t) in addresses]
    names: set[str] = set()
    for _ in range(_DEPTH):
        values, tuples = {id(value) for value in held}, list[Any]()
        for holder in gc.get_referrers(*held):  # of all at once: each call looks at every object of the program
            if isinstance(holder, tuple):
                tuples.append(holder)
            elif holder is not held:
                names.add(_removed(values, holder))
        held = tuples
        if not held:
            break
    return names - {""}


_DEPTH = 4
"""Tensors, tuples that hold them, tuples that hold such tuples, and so on."""


def _removed(values: set[int], holder: Any) -> str:
    """Removes objects with these addresses from a container; returns a description of it, empty if it has none.

    Methods of the container that are not Python's, such as those of Hugging Face's results, are not called.
    """
    if isinstance(holder, dict):
        kind: Any = collections.OrderedDict if isinstance(holder, collections.OrderedDict) else dict
        keys = [key for key, held in list(kind.items(holder)) if id(held) in values]
        for key in keys:
            kind.__delitem__(holder, key)
        return f"under the key {keys[0]!r}" if keys else ""
    if isinstance(holder, list):
        list.__setitem__(holder, slice(None), [held for held in list.__iter__(holder) if id(held) not in values])
        return "in a list"
    if isinstance(holder, functools._lru_cache_wrapper):
        holder.cache_clear()
        return f"in the cache of {getattr(holder, '__name__', 'a function')}"
    if isinstance(holder, set):
        set.difference_update(holder, [held for held in set.__iter__(holder) if id(held) in values])
        return "in a set"
    return ""


# -- assignments and writes ----------------------------------------------------------------------


def check_assignments(slots: Sequence[Slot], before: Snapshot, recorder: Recorder) -> None:
    """Raises `TraceError` if the function assigned to captured places."""

    def owned(value: Any) -> bool:
        if type(value) in weakref.ProxyTypes:  # the referent is held elsewhere, or is dead
            return False
        if isinstance(value, (list, tuple)):
            return any(map(owned, value))
        if isinstance(value, dict):
            return any(map(owned, value.values()))
        return isinstance(value, torch.Tensor) and recorder.owns(unwrapped(value))

    variable = lambda holder: type(holder) is types.CellType
    names = [
        named_place(holder, key) for holder, key, _ in moved(slots) if variable(holder) or owned(content(holder, key))
    ]
    names += [named_place(holder, key) for holder, key, _ in before.changes()]
    names += [f"the order of {', '.join(map(str, then))}" for _, then in before.reordered()]
    names += [f"the class of a {kind.__name__}" for _, kind in before.reclassed()]
    if names:
        raise _assigns(names)


ASSIGNS = "the function assigns"
"""The beginning of the message about assignments, which a captured function may make."""


def _assigns(names: Iterable[str]) -> TraceError:
    return TraceError(
        f"{ASSIGNS} {', '.join(sorted(set(names)))} while it runs. A plan runs its operations, not its "
        f"Python code, so it would assign nothing. Return the value instead. {WAY_OUT}"
    )


@contextlib.contextmanager
def with_attributes_of(tensors: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> Iterator[None]:
    """Gives operands the Python attributes of the tensors for which they stand.

    Raises:
        TraceError: the body assigns such an attribute.
    """
    given = []
    for tensor, operand in zip(tensors, operands, strict=True):
        vars(operand).update(vars(tensor))
        if isinstance(tensor, torch.nn.Parameter):
            vars(operand)["_is_param"] = True  # what `isinstance` looks for
        if type(tensor) is not torch.Tensor and is_plain_type(type(tensor)):
            seems(operand, type(tensor))
        given.append(vars(operand).copy())
    yield
    names: set[str] = set()
    for operand, then in zip(operands, given, strict=True):
        now = vars(operand)
        names.update(name for name in {**then, **now} if then.get(name, ABSENT) is not now.get(name, ABSENT))
    if names:
        raise _assigns(names)


@contextlib.contextmanager
def undone_on_error(before: Snapshot) -> Iterator[None]:
    """Restores the contents of captured places if the body raises an error: the caller may run the function plainly."""
    try:
        yield
    except BaseException:
        for change in reversed(before.changes()):  # of several values that a place had, the first comes last
            put(*change)
        for value, kind in before.reclassed():
            object.__setattr__(value, "__class__", kind)
        for held, then in before.reordered():
            kind: Any = collections.OrderedDict if isinstance(held, collections.OrderedDict) else dict
            for key in then:
                kind.__setitem__(held, key, kind.pop(held, key))
        raise


@contextlib.contextmanager
def arguments_unchanged(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Raises `TraceError` if the body changes a list or another container among the arguments of a call."""
    given = {
        **{f"args[{i}]": value for i, value in enumerate(args)},
        **{f"kwargs[{k!r}]": v for k, v in kwargs.items()},
    }
    before = {path: (*tree.flatten(value), tree.key_orders(value)) for path, value in given.items()}
    yield
    for path, (leaves, spec, orders) in before.items():
        now, structure = tree.flatten(given[path])
        same = structure == spec and tree.key_orders(given[path]) == orders
        if not same or not all(map(operator.is_, now, leaves)):
            raise TraceError(
                f"the function changes {path}, or a container in it, while it runs. A plan runs its operations, not "
                f"its Python code, so it would change nothing. Return the new value instead. {WAY_OUT}"
            )


def named_place(holder: Any, key: Any) -> str:
    """Names a place for messages."""
    if key is None:
        return "a variable" if type(holder) is types.CellType else f"an item of a {type(holder).__name__}"
    return f"{holder.__name__}.{key}" if isinstance(holder, type) else str(key)


def check_writes(
    operands: Sequence[torch.Tensor], numbers: Sequence[int], recorder: Recorder, tensors: Sequence[torch.Tensor]
) -> None:
    """Raises `TraceError` if a captured tensor is changed in place in a way that a plan cannot reproduce."""
    written = [recorder.values[number] in recorder.written for number in numbers]
    storages = [storage_of(t) for t in tensors] if any(written) else []
    for i, storage in enumerate(storages):
        if written[i] and storage and storages.count(storage) > 1:
            raise TraceError(
                "the function changes a captured tensor in place that shares memory with another tensor that it "
                f"uses. Close over only one of the two. {WAY_OUT}"
            )
        if written[i] and operands[i].requires_grad and torch.is_grad_enabled():
            raise TraceError(
                "the function changes a captured tensor in place that requires grad (an embedding with max_norm, "
                "for example), which a plan cannot reproduce. Change it before or after the call of the function."
            )


# -- random seeds ----------------------------------------------------------------------


class _UnseedableGenerator:
    """A stand-in for the default generator during a trace, which can be read but raises `TraceError` when it is set."""

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
                    f"{CHECKPOINT_INSIDE} If nothing in it is random, preserve_rng_state=False will do. {WAY_OUT}"
                )
            raise TraceError(
                f"{current()}: the function sets the random generator (`{name}`), which a plan cannot repeat. Set "
                f"the generator before the call, or pass a torch.Generator. {WAY_OUT}"
            )
        return getattr(self.generator, name)


@contextlib.contextmanager
def seeding_refused() -> Iterator[None]:
    """Raises `TraceError` if the body seeds the default generator or sets its state."""
    generator = torch.random.default_generator
    torch.random.default_generator = _UnseedableGenerator(generator)
    try:
        yield
    finally:
        torch.random.default_generator = generator
