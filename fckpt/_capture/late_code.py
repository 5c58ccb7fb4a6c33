"""Python code that runs in the backward pass: hooks of tensors, and `backward` of an `autograd.Function`.

Dynamo evaluates it with the forward, so it would see what variables were then, and change them too early. A function
whose hooks, or whose `backward`, may read variables is not captured, nor is one whose `backward` may get None. It is
traced by running it, see `_trace/late.py`. Seen on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.variables import NestedUserFunctionVariable, TensorVariable, UserFunctionVariable
from torch._dynamo.variables.higher_order_ops import AutogradFunctionApplyVariable
from torch._dynamo.variables.misc import AutogradFunctionContextVariable

from fckpt._capture.patching import patched
from fckpt._capture.variables import variable_read

__all__ = ["late_readers_refused"]


def _registering(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def register(this: Any, tx: Any, name: str, hook: Any) -> Any:
        if not this.source:  # a hook on a tensor from outside is registered at each call, and runs as it is
            _check_hook(hook.realize())
        return original(this, tx, name, hook)

    return register


def _check_hook(hook: Any) -> None:
    if type(hook) is UserFunctionVariable:
        found = variable_read(hook.fn.__code__, hook.fn.__globals__, hook.fn.__closure__)
    elif type(hook) is NestedUserFunctionVariable:
        code = hook.get_code()
        found = ", ".join(code.co_freevars) or variable_read(code, hook.get_globals(), None)
    else:
        raise LookupError(f"a hook of a tensor is a {hook.python_type_name()}, which may read variables")
    if found:
        raise LookupError(f"the hook `{hook.get_name()}` reads `{found}` in the backward pass")


def _applying(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def trace(this: Any, *args: Any, **kwargs: Any) -> Any:
        fn: Any = getattr(this.bwd_fn, "__func__", this.bwd_fn)
        if type(fn) is types.FunctionType and (found := variable_read(fn.__code__, fn.__globals__, fn.__closure__)):
            raise LookupError(f"`{fn.__qualname__}` reads `{found}` in the backward pass")
        return original(this, *args, **kwargs)

    return trace


def _of_context(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(this: Any, tx: Any, name: str) -> Any:
        if name == "set_materialize_grads":  # Dynamo always passes zeros to `backward`, and never None
            raise LookupError("an autograd.Function calls `ctx.set_materialize_grads`")
        return original(this, tx, name)

    return read


@contextlib.contextmanager
def late_readers_refused() -> Iterator[None]:
    """Ends a capture by Dynamo, within the body, at code that would read variables in the backward pass."""
    with (
        patched(TensorVariable, "_method_register_hook", _registering),
        patched(AutogradFunctionApplyVariable, "trace_backward_graph", _applying),
        patched(AutogradFunctionContextVariable, "var_getattr", _of_context),
    ):
        yield
