"""Closed-over tensors under torch.func: found while a function runs, replaced while it runs again.

A function may reach tensors otherwise than through its arguments: cells, globals, attributes. Under torch.func
such a tensor can belong to a level that differentiates it. It then becomes one more operand of the function.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch._C._functorch import (
    get_dynamic_layer_stack_depth,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    maybe_get_level,
)
from torch.overrides import TorchFunctionMode

__all__ = ["Recorder", "Substitution", "resolved"]


class _Scopes(threading.local):
    """The functions being run or run again in this thread, outermost first."""

    def __init__(self) -> None:
        self.stack: list[_Scope] = []


_scopes = _Scopes()


def resolved(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """What stands for these tensors in the function that is being run."""
    return [_scopes.stack[-1].resolve(t) for t in tensors] if _scopes.stack else tensors


class _Scope(TorchFunctionMode):
    """Sees every torch function called while a function runs."""

    def __enter__(self) -> _Scope:
        self.parent = _scopes.stack[-1] if _scopes.stack else None
        _scopes.stack.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _scopes.stack.pop()

    def resolve(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for a closed-over tensor here."""
        return tensor if self.parent is None else self.parent.resolve(tensor)

    def original(self, tensor: torch.Tensor) -> torch.Tensor:
        """What `tensor` stands for, in enclosing functions that are being run again."""
        return tensor if self.parent is None else self.parent.original(tensor)


class Recorder(_Scope):
    """Finds, while a function runs, the differentiated tensors that it closes over.

    Such a tensor belongs to some level and is neither an input nor made inside: it is a leaf that was not seen
    to become one inside, or its history began before the function did (autograd numbers its nodes).
    """

    def __init__(self, inputs: Sequence[torch.Tensor]):
        super().__init__()
        self.inside: dict[int, weakref.ref[torch.Tensor]] = {}
        self._made(list(inputs))
        self.lifted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.originals: dict[int, torch.Tensor] = {}
        self.start = torch.autograd._get_sequence_nr()
        self.depth = get_dynamic_layer_stack_depth()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.requires_grad_ or func is _SET_REQUIRES_GRAD:
            self.visit([self._outer(args[0])])  # what a transform inside differentiates may come from outside
            self._made(args[0])
        elif result is None or _has_tensor(result):
            # Or else nothing flows from the arguments: a query for a shape, say.
            self.visit(args)
            if kwargs:
                self.visit(kwargs.values())
            self._made(result)
        return result

    def _made(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.inside[id(value)] = weakref.ref(value)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                self._made(inner)

    def _is_inside(self, tensor: torch.Tensor) -> bool:
        reference = self.inside.get(id(tensor))
        return reference is not None and reference() is tensor  # or else the id has passed on

    def _outer(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` without the wrappers of transforms that the function applies inside."""
        while is_functorch_wrapped_tensor(tensor) and maybe_get_level(tensor) > self.depth:
            tensor = get_unwrapped(tensor)
        return tensor

    def visit(self, values: Any) -> None:
        """Lifts those of `values` that come from outside."""
        for value in values:
            if isinstance(value, torch.Tensor):
                if self._is_inside(value):
                    continue
                value = self._outer(value)
                key = id(value)
                if key not in self.lifted and not self._is_inside(value):
                    resolved = self.resolve(value)
                    if self.foreign(resolved):
                        self.lifted[key] = (value, resolved)
                        self.originals[key] = self.original(value)
            elif type(value) in (list, tuple):
                self.visit(value)
            elif type(value) is dict:
                self.visit(value.values())

    def foreign(self, tensor: torch.Tensor) -> bool:
        # A batch or a dual number is lifted although nothing differentiates it: its level will be another one
        # when the function runs again.
        wrapped = is_functorch_wrapped_tensor(tensor)
        while True:
            if self._is_inside(tensor):
                return False
            if tensor.requires_grad:
                node = tensor.grad_fn
                return node is None or node._sequence_nr() < self.start
            if not is_functorch_wrapped_tensor(tensor):
                return wrapped
            tensor = get_unwrapped(tensor)


class Substitution(_Scope):
    """Puts other tensors in the places of closed-over ones, while a function runs."""

    def __init__(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]):
        super().__init__()
        self.pairs = pairs
        self.substitutes = {id(known): substitute for known, substitute in pairs}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.substitutes:
            args = tuple(self._replace(a) for a in args)
            kwargs = {k: self._replace(v) for k, v in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))

    def _replace(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.substitutes.get(id(value), value)
        if type(value) in (list, tuple):
            return type(value)(self._replace(v) for v in value)
        return value

    def resolve(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self.substitutes:
            return self.substitutes[id(tensor)]
        return super().resolve(tensor)

    def original(self, tensor: torch.Tensor) -> torch.Tensor:
        for known, substitute in self.pairs:
            if substitute is tensor:
                return super().original(known)
        return super().original(tensor)


_SET_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]


def _has_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    return isinstance(value, (list, tuple)) and any(_has_tensor(v) for v in value)
