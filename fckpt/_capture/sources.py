"""The source of an operation: the path of the running module in the model, and the user's line.

The recorder of a trace calls `current()` at every operation. The code that runs the function reports what is running,
with `named` for Python code that calls modules, and with `running` for anything else. Nodes of a torch.fx graph store
module and line, which `source_of` reads.
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

__all__ = ["TORCH", "Names", "Source", "current", "failing_module", "is_users", "named", "running", "source_of"]


class Source(NamedTuple):
    """The source of one operation."""

    module: str = ""
    """The path of the running module, `encoder.layer.3.mlp`; empty outside of modules."""
    line: str = ""
    """The user's line, `model.py:12 (forward)`."""

    def __str__(self) -> str:
        return ", in ".join(part for part in (self.line, self.module) if part)


class _State(threading.local):
    """The sources that are running in this thread."""

    stack: tuple[Source, ...] = ()
    failed: tuple[int, str] = (0, "")
    """The id of the latest exception, and the module that raised it."""


_state = _State()


@contextlib.contextmanager
def running(module: str, line: str = "") -> Iterator[None]:
    """Declares that the body runs in `module` and, if given, on `line`."""
    before = _state.stack
    _state.stack = (*before, Source(module, line))
    try:
        yield
    except Exception as error:
        if _state.failed[0] != id(error):  # otherwise an inner module raised it
            _state.failed = id(error), module
        raise
    finally:
        _state.stack = before


def current() -> Source:
    """Returns the source of the running operation. Finds the line on the call stack if none was declared."""
    module, line = _state.stack[-1] if _state.stack else Source()
    return Source(module, line or _user_line())


def failing_module(error: BaseException) -> str:
    """Returns the path of the module that raised an exception; empty if no module raised it."""
    number, module = _state.failed
    return module if number == id(error) else ""


# -- names -------------------------------------------------------------------------------------------------------


class Names:
    """The paths of the modules and tensors that a function can access.

    If the function accesses one model (a bound `forward`, or a loss function around a model), paths start in the model:
    `encoder.layer.3`. If it accesses several, paths start with the variable that holds the model:
    `model.encoder.layer.3`, `critic.0`.
    """

    def __init__(self, fn: Callable[..., Any], statics: Iterable[Any] = ()):
        found = {id(m): m for m in closure_of([fn], statics).modules}
        inner = {id(m) for root in found.values() for m in root.modules() if m is not root}
        roots = [m for i, m in found.items() if i not in inner]
        large = [m for m in roots if next(m.children(), None) is not None or next(m.parameters(), None) is not None]
        variables = _variables(fn)
        self.modules: dict[int, str] = {}
        """Paths by id of a module."""
        self.tensors: dict[int, str] = {}
        """Paths by id of a parameter or buffer."""
        for root in roots:
            prefix = variables.get(id(root)) or type(root).__name__
            if len(large) == 1 and root is large[0]:
                prefix = ""
            self._add(root, prefix)
        self._roots = roots  # keeps the modules alive, so that their ids stay valid

    def _add(self, root: nn.Module, prefix: str) -> None:
        for path, module in root.named_modules():
            self.modules[id(module)] = _joined(prefix, path)
        for named in (root.named_parameters(), root.named_buffers()):
            for path, tensor in named:
                self.tensors[id(tensor)] = _joined(prefix, path)


def _joined(prefix: str, path: str) -> str:
    return f"{prefix}.{path}" if prefix and path else prefix or path


def _variables(fn: Any) -> dict[int, str]:
    """Returns the names of a function's variables (and of a method's object's attributes), by id of their values."""
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
    """Reports, with `running`, the module calls that this thread makes in the body, by the paths in `names`."""
    thread = threading.get_ident()

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = names.modules.get(id(self))
        if path is None or threading.get_ident() != thread:
            return before(self, *args, **kwargs)
        with running(path):
            return before(self, *args, **kwargs)

    # Global module hooks would also work, but guards on hooks, torch.compile and the user's code would see them.
    with _patching:
        before = nn.Module.__call__
        nn.Module.__call__ = call
        try:
            yield
        finally:
            nn.Module.__call__ = before
            _state.failed = (0, "")


# -- graphs of torch.fx ------------------------------------------------------------------------------------------


def source_of(meta: dict[str, Any], names: Names | None = None) -> Source:
    """Reads the source of a torch.fx node from its `nn_module_stack` and `stack_trace`.

    Args:
        meta: the metadata of the node.
        names: the names of the function that the graph was recorded from. If None, module paths are taken from the
            graph.
    """
    module = ""
    for key, entry in reversed((meta.get("nn_module_stack") or {}).items()):
        number = str(key).partition("@")[0]  # Dynamo's keys are module ids; "@1" denotes a second call
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

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # the package
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
"""The folder of torch's code."""


def is_users(filename: str) -> bool:
    """Whether a file belongs neither to torch, nor to Python, nor to fckpt."""
    pythons = filename.startswith(_PYTHON) and "-packages" not in filename
    return not (pythons or filename.startswith((_HERE, TORCH, "<frozen")))


def _user_line() -> str:
    """Returns the innermost line on the call stack of the user's code: `model.py:12 (forward)`."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if is_users(code.co_filename):
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} ({code.co_name})"
        frame = frame.f_back
    return ""
