"""Python code of custom operations that runs while a function is traced: derivative formulas, rules for `vmap`, and
kernels that consist of other operations (`register_autograd`, `register_vmap`, `CompositeImplicitAutograd`).

A plan runs the operations of such code, so what the code reads must be guarded. A captured graph has no guards on it:
if it may read variables, the function is traced by running its Python code instead, see `reads.py` and `late.py`. These
guards include what only the registered function holds. Functions that infer layouts (`register_fake`) compute no
values, and are left out.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fckpt._call.facts import is_library
from fckpt._capture.function import BatchedGraph, GraphFunction
from fckpt._capture.reads import is_beneath_operation, is_faking, receiver
from fckpt._capture.variables import changeable, variable_read
from fckpt._trace.effects import impure_calls_refused
from fckpt._trace.operations import is_built_in
from fckpt._trace.stand_ins import WAY_OUT
from fckpt.errors import TraceError

__all__ = ["registered_code_watched"]

_OPERATIONS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


class _Watch:
    """Notes a variable that the user's code may read while a captured graph is traced."""

    def __init__(self) -> None:
        self.found = ""

    def note(self, frame: types.FrameType) -> None:
        """Looks at the function that is called."""
        scope = frame.f_globals
        if self.found or is_library(str(scope.get("__name__", ""))) or is_faking(frame):
            return
        read = _held(frame) or variable_read(frame.f_code, scope, None)
        if read:
            code = frame.f_code
            self.found = f"`{code.co_qualname}` ({code.co_filename}:{code.co_firstlineno}) reads `{read}`"


@contextlib.contextmanager
def registered_code_watched(fn: Callable[..., Any]) -> Iterator[None]:
    """Watches the Python code of custom operations while a captured graph is traced in the body.

    Raises:
        TraceError: the code may read variables.
    """
    if not _has_custom_operations(fn):
        yield
        return
    watch = _Watch()
    with impure_calls_refused(watch, within=is_beneath_operation):
        yield
    if watch.found:
        raise TraceError(
            f"{watch.found}, and a captured graph has no guard on what the code of custom operations reads. {WAY_OUT}"
        )


def _has_custom_operations(fn: Any) -> bool:
    while isinstance(fn, BatchedGraph):
        fn = fn.inner
    assert isinstance(fn, GraphFunction)
    modules = [m for m in fn.graph.module.modules() if isinstance(m, torch.fx.GraphModule)]
    targets = {node.target for m in modules for node in m.graph.nodes if isinstance(node.target, _OPERATIONS)}
    return not all(map(is_built_in, targets))


def _held(frame: types.FrameType) -> str:
    """Returns the name of an object whose method is called, or of a variable in a cell of the function."""
    code, values = frame.f_code, frame.f_locals
    if receiver(frame) is not None:
        return code.co_varnames[0]
    return changeable([(name, values[name]) for name in code.co_freevars if name in values], code)
