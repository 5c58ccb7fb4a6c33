"""Functions with their own derivative formula: the `apply` of a `torch.autograd.Function`.

Dynamo keeps the formula in the graph only for a call whose arguments require grad as far as it sees. It evaluates the
Python code of `forward` for all other calls, which autograd would then differentiate by the formulas of the operations
inside. Four cases need care:

* Below levels of torch.func, tensors that an outer level differentiates do not seem to require grad (within a `vmap`,
  for example), and a class has rules for these levels, which Dynamo does not follow. The same holds for the forward
  mode. A function that calls such a class there is not captured.
* The `backward` of a class may call another class, or change grad mode (`once_differentiable` does). Dynamo evaluates
  it with grad mode off, but a second derivative would need the formula of the other class, and the mode. That is not
  captured either.
* If no argument requires grad, `forward` still runs with grad mode off: what it computes from other tensors (a
  parameter that it reads, a list of tensors) does not require grad.
* A torch function mode sees what `forward` calls, and for Dynamo what `backward` calls too.

Seen on torch 2.11 and 2.13: `AutogradFunctionVariable.call_apply`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.variables.ctx_manager import GradModeVariable
from torch._dynamo.variables.higher_order_ops import AutogradFunctionApplyVariable
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch._dynamo.variables.tensor import TensorVariable

from fckpt._call.levels import has_forward_mode, transforms_active
from fckpt._capture.patching import patched

__all__ = ["own_formulas_used"]


@contextlib.contextmanager
def own_formulas_used(below: bool) -> Iterator[None]:
    """Ends a capture by Dynamo, within the body, where it would lose the formula of an `autograd.Function`.

    Args:
        below: whether the function is called below levels of torch.func, which are not active during the capture.
    """
    backwards: list[Any] = []

    def applying(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def apply(this: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
            name = this.fn_cls.__qualname__
            if below or transforms_active() or has_forward_mode():
                raise LookupError(f"the autograd.Function `{name}` is called below a transform, for which it has rules")
            if backwards:
                raise LookupError(f"the `backward` of an autograd.Function calls another one, `{name}`")
            required = [_requires_grad(v) for v in (*args, *kwargs.values())]
            if not torch.is_grad_enabled() or any(required):
                return original(this, tx, args, kwargs)
            mode = GradModeVariable.create(tx, False)
            mode.enter(tx)
            try:
                return original(this, tx, args, kwargs)
            finally:
                mode.exit(tx)

        return apply

    def tracing(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def trace(this: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            modes = tx.symbolic_torch_function_state.mode_stack
            held = list(modes)
            modes.clear()
            backwards.append(this)
            try:
                return original(this, tx, *args, **kwargs)
            finally:
                backwards.pop()
                modes.extend(held)

        return trace

    def entering(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def enter(this: Any, tx: Any) -> Any:
            if backwards:
                raise LookupError("the `backward` of an autograd.Function changes grad mode")
            return original(this, tx)

        return enter

    with (
        patched(GradModeVariable, "enter", entering),
        patched(AutogradFunctionVariable, "call_apply", applying),
        patched(AutogradFunctionApplyVariable, "trace_backward_graph", tracing),
    ):
        yield


def _requires_grad(variable: Any) -> bool:
    """Whether a tensor requires grad. If it does so since an in-place operation on an alias, Dynamo is told so."""
    value = variable.realize()
    if not isinstance(value, TensorVariable):
        return False
    value.requires_grad = value.requires_grad is not False or value.as_proxy().node.meta["example_value"].requires_grad
    return bool(value.requires_grad)
