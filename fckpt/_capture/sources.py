"""Where an operation comes from: the module that was running, by its path in the model, and the user's line.

The recorder of a trace asks `current()` at every operation. Whoever runs the function says what is running: `named`,
for Python code that calls modules; `Located`, for a graph of torch.fx, whose nodes remember module and line; or
`running`, for anything else.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.fx
from torch import nn

from fckpt._call.closure import closure_of

__all__ = ["Located", "Names", "Source", "current", "failing_module", "is_users", "named", "running", "source_of"]


class Source(NamedTuple):
    """Where an operation comes from."""

    module: str = ""
    """The path of the module that was running, `encoder.layer.3.mlp`; nothing outside of modules."""
    line: str = ""
    """The user's line, `model.py:12 (forward)`."""

    def __str__(self) -> str:
        return ", in ".join(part for part in (self.line, self.module) if part)


class _State(threading.local):
    """What is running in this thread."""

    stack: tuple[Source, ...] = ()
    failed: tuple[int, str] = (0, "")
    """The id of an exception, and the module that it came from."""


_state = _State()


@contextlib.contextmanager
def running(module: str, line: str = "") -> Iterator[None]:
    """Says that what runs in the body is in `module`, and, if that is known, on `line`."""
    before = _state.stack
    _state.stack = (*before, Source(module, line))
    try:
        yield
    except Exception as error:
        if _state.failed[0] != id(error):  # else it came from a module within
            _state.failed = id(error), module
        raise
    finally:
        _state.stack = before


def current() -> Source:
    """Returns where the operation that is running comes from; the line is looked for if nobody said it."""
    module, line = _state.stack[-1] if _state.stack else Source()
    return Source(module, line or _user_line())


def failing_module(error: BaseException) -> str:
    """Returns the module that an exception was raised in, if it was raised in one."""
    number, module = _state.failed
    return module if number == id(error) else ""


# -- names -------------------------------------------------------------------------------------------------------


class Names:
    """The paths of the modules and tensors that a function reaches.

    A function that reaches one model, as a bound `forward` or a loss around it, calls its parts `encoder.layer.3`. If
    there are more, the variables that hold them come first: `model.encoder.layer.3`, `critic.0`.
    """

    def __init__(self, fn: Callable[..., Any], statics: Iterable[Any] = ()):
        found = {id(m): m for m in closure_of([fn], statics).modules}
        inner = {id(m) for root in found.values() for m in root.modules() if m is not root}
        roots = [m for i, m in found.items() if i not in inner]
        large = [m for m in roots if next(m.children(), None) is not None or next(m.parameters(), None) is not None]
        variables = _variables(fn)
        self.modules: dict[int, str] = {}
        """By id of a module."""
        self.tensors: dict[int, str] = {}
        """By id of a parameter or buffer."""
        for root in roots:
            prefix = variables.get(id(root)) or type(root).__name__
            if len(large) == 1 and root is large[0]:
                prefix = ""
            self._add(root, prefix)
        self._roots = roots  # ids are theirs as long as they live

    def _add(self, root: nn.Module, prefix: str) -> None:
        for path, module in root.named_modules():
            self.modules[id(module)] = _joined(prefix, path)
        for named in (root.named_parameters(), root.named_buffers()):
            for path, tensor in named:
                self.tensors[id(tensor)] = _joined(prefix, path)


def _joined(prefix: str, path: str) -> str:
    return f"{prefix}.{path}" if prefix and path else prefix or path


def _variables(fn: Any) -> dict[int, str]:
    """The names of what a function's variables hold, by id; those of its object's attributes, for a method."""
    found: dict[int, str] = {}
    if isinstance(fn, types.MethodType):
        if not isinstance(fn.__self__, nn.Module):
            found |= {id(value): name for name, value in getattr(fn.__self__, "__dict__", {}).items()}
        fn = fn.__func__
    while isinstance(fn, types.FunctionType):
        scope = fn.__globals__
        found |= {id(scope[name]): name for name in fn.__code__.co_names if name in scope}
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not assigned yet
                found[id(cell.cell_contents)] = name
        fn = getattr(fn, "__wrapped__", None)
    return found


_patching = threading.RLock()


@contextlib.contextmanager
def named(names: Names) -> Iterator[None]:
    """Follows the calls of modules that this thread makes in the body, by the paths in `names`."""
    thread = threading.get_ident()

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = names.modules.get(id(self))
        if path is None or threading.get_ident() != thread:
            return before(self, *args, **kwargs)
        with running(path):
            return before(self, *args, **kwargs)

    # Hooks for all modules would do as well, but others can see them: guards on hooks, torch.compile, a user's own.
    with _patching:
        before = nn.Module.__call__
        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = before  # type: ignore[method-assign]
            _state.failed = (0, "")


# -- graphs of torch.fx ------------------------------------------------------------------------------------------


class Located(torch.fx.Interpreter):
    """Runs a graph of torch.fx, and says of each operation which module and line its node was recorded in."""

    def __init__(self, graph: torch.fx.GraphModule, names: Names | None = None):
        super().__init__(graph)
        self.names = names
        self.extra_traceback = False

    def run_node(self, n: torch.fx.Node) -> Any:
        """Runs a node."""
        with running(*source_of(n.meta, self.names)):
            return super().run_node(n)


def source_of(meta: dict[str, Any], names: Names | None = None) -> Source:
    """Reads where a node of torch.fx comes from out of its `nn_module_stack` and `stack_trace`.

    Args:
        meta: of the node.
        names: of the function that the graph was recorded from. Without, paths are those in the graph.
    """
    module = ""
    for key, entry in reversed((meta.get("nn_module_stack") or {}).items()):
        number = str(key).partition("@")[0]  # Dynamo's keys are ids of modules, and "@1" a second call
        known = names.modules.get(int(number)) if names is not None and number.isdigit() else None
        module = known if known is not None else re.sub(r"^[LG]\['[^']*'\]\.?", "", entry[0])
        break
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', meta.get("stack_trace") or "")
    users = [frame for frame in frames if is_users(frame[0])]
    if not users:
        return Source(module)
    file, number, function = users[-1]
    return Source(module, f"{os.path.basename(file)}:{number} ({function})")


# -- lines -------------------------------------------------------------------------------------------------------

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def is_users(filename: str) -> bool:
    """Whether a file is neither torch's, nor Python's, nor ours."""
    pythons = filename.startswith(_PYTHON) and "-packages" not in filename
    return not (pythons or filename.startswith((_HERE, _TORCH, "<frozen")))


def _user_line() -> str:
    """The innermost line that is neither torch's nor ours: `model.py:12 (forward)`."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if is_users(code.co_filename):
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} ({code.co_name})"
        frame = frame.f_back
    return ""
