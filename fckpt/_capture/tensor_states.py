"""The state of a tensor besides its layout: its place in memory, its version, its hooks, its part in autograd.

Two tensors of the same layout may have different states. The stand-in tensors of a trace have other states than the
tensors of a call, and Dynamo treats a state as a constant, without a guard. Programs rarely read these states. Dynamo
does not capture a function that does, and the tracer raises an error with the line. A function that reads the strides
of a result is not captured either: Dynamo's stand-ins may have other ones. Seen on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["STATES", "state_reads_refused"]

_ATTRIBUTES = ("_backward_hooks", "_base", "_version", "is_leaf", "output_nr", "retains_grad")
_METHODS = ("_is_view", "is_conj", "is_neg", "is_set_to", "is_shared", "storage", "storage_offset", "untyped_storage")
STATES: dict[Any, str] = {
    **{vars(torch._C.TensorBase)[name].__get__: name for name in _ATTRIBUTES},
    **{getattr(torch.Tensor, name): name for name in _METHODS},
    torch.is_conj: "is_conj",
    torch.is_neg: "is_neg",
}
"""By function, as a mode of torch sees it: the name of the attribute or method that reads the state of a tensor."""
_NAMES = {*_ATTRIBUTES, *_METHODS}


@contextlib.contextmanager
def state_reads_refused() -> Iterator[None]:
    """Ends a capture by Dynamo, within the body, at code that reads such a state."""
    # Dynamo is imported with the first plan, and the table above earlier.
    from torch._dynamo.output_graph import SubgraphTracer
    from torch._dynamo.variables.tensor import TensorVariable

    from fckpt._capture.patching import patched

    def checked(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def create_proxy(this: Any, kind: str, target: Any, args: Any, *rest: Any, **options: Any) -> Any:
            name = args[1] if target is getattr else target if kind == "call_method" else STATES.get(target)
            if name in _NAMES:
                _refuse(name)
            return original(this, kind, target, args, *rest, **options)

        return create_proxy

    def of_inputs(name: str) -> Callable[..., Any]:
        def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def read(this: Any, *args: Any, **kwargs: Any) -> Any:
                if this.source is None:  # a result, whose stand-in may have other strides: see `_trace.real_layouts`
                    _refuse(name)
                return original(this, *args, **kwargs)

            return read

        return wrapped

    def of_results_only(name: str) -> Callable[..., Any]:
        def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def read(this: Any, *args: Any, **kwargs: Any) -> Any:
                if this.source is not None:  # no guard says whether another tensor is a leaf
                    _refuse(name)
                return original(this, *args, **kwargs)

            return read

        return wrapped

    def of_results(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def requires_grad(this: Any, tx: Any) -> Any:
            if this.source is None:  # Dynamo does not see that `base[0].add_(x)` changes it for `base`
                this.requires_grad = this.proxy.node.meta["example_value"].requires_grad
            return original(this, tx)

        return requires_grad

    def requiring(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def requires_grad_(this: Any, *args: Any, **kwargs: Any) -> Any:
            example = this.proxy.node.meta.get("example_value")
            if isinstance(example, torch.Tensor) and example._is_view() and example.is_leaf:
                raise LookupError("the function makes a leaf of a view that requires grad only since its base does")
            return original(this, *args, **kwargs)

        return requires_grad_

    refused = lambda name: lambda original: lambda *args, **kwargs: _refuse(name)
    with (
        patched(SubgraphTracer, "create_proxy", checked),
        patched(TensorVariable, "method_attr_requires_grad", of_results),
        patched(TensorVariable, "method_requires_grad_", requiring),
        patched(TensorVariable, "method_stride", of_inputs("stride")),
        patched(TensorVariable, "method_is_contiguous", of_inputs("is_contiguous")),
        patched(TensorVariable, "method_untyped_storage", refused("untyped_storage")),
        patched(TensorVariable, "method_attr_grad_fn", of_results_only("grad_fn")),
        patched(TensorVariable, "method_attr__version", refused("_version")),
    ):
        yield


def _refuse(name: str) -> None:
    raise LookupError(f"the function reads `{name}` of a tensor")
