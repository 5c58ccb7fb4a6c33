"""Captured tensors under torch.func: which of them a function uses, and whether its recompute can replace them.

A function can read tensors from cells, globals and attributes. Under torch.func such a tensor can belong to a level
that differentiates it, so it becomes an additional operand of the function. A walk through the closure finds the places
of captured tensors (`closure`); a torch function mode observes which of them the function uses. A recompute could not
replace a tensor that is used but was not found, so that is an error, at the latest in the recompute. It never leads to
a silent zero gradient.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._C._functorch import (
    get_dynamic_layer_stack_depth,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    maybe_get_level,
)
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from fckpt._call.ambient import function_modes
from fckpt._call.levels import layers
from fckpt.errors import ClosureError, region_name

__all__ = ["UseRecorder", "Watch", "unwatched"]


class UseRecorder(TorchFunctionMode):
    """Observes which captured tensors a function uses while it runs.

    Raises:
        ClosureError: the function uses a differentiated tensor that is not an input, not in `reachable` and not made
            inside: the tensor's history began before the function did (autograd numbers its nodes), or the tensor is a
            leaf that was not seen to become one.
    """

    def __init__(self, fn: Any, inputs: Sequence[torch.Tensor], reachable: dict[int, torch.Tensor]):
        super().__init__()
        self.fn = fn
        self.reachable = reachable
        self.used: dict[int, torch.Tensor] = {}
        """The reachable tensors that were used, by id."""
        self.others: dict[int, weakref.ref[torch.Tensor]] = {}
        """Tensors of a transform that were neither found nor seen to be made; most of them were made inside, unseen."""
        self.differentiated = False
        """Whether the function has run a backward pass."""
        self.inside: dict[int, weakref.ref[torch.Tensor]] = {}
        self._made(list(inputs))
        self.start = torch.autograd._get_sequence_nr()
        self.depth = get_dynamic_layer_stack_depth()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DIFFERENTIATE:
            self.differentiated = True
            self._check_graph([*args, *(kwargs or {}).values()])
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.requires_grad_ or func is _SET_REQUIRES_GRAD:
            self.visit([self._outer(args[0])])  # an inner transform may differentiate a tensor from outside
            self._made(args[0])
        elif result is None or _has_tensor(result):
            # Otherwise no data flows from the arguments: a query of a shape, for example.
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
        return reference is not None and reference() is tensor  # otherwise another object has the id by now

    def _outer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns `tensor` without the wrappers of transforms that the function itself applies."""
        while is_functorch_wrapped_tensor(tensor) and maybe_get_level(tensor) > self.depth:
            tensor = get_unwrapped(tensor)
        return tensor

    def visit(self, values: Iterable[Any]) -> None:
        """Records the tensors in `values` that come from outside the function."""
        for value in values:
            if isinstance(value, torch.Tensor):
                if self._is_inside(value):
                    continue
                value = self._outer(value)
                if id(value) in self.reachable:
                    self.used[id(value)] = value
                elif not self._is_inside(value):
                    if self._is_foreign(value):
                        raise _closure_error(value, self.fn)
                    if is_functorch_wrapped_tensor(value):
                        self.others[id(value)] = weakref.ref(value)
            elif type(value) in (list, tuple):
                self.visit(value)
            elif type(value) is dict:
                self.visit(value.values())

    def check_closed_over(self, closed_over: Container[int]) -> None:
        """Raises `ClosureError` for a differentiated tensor that was used but is no longer in its place."""
        for key, tensor in self.used.items():
            if key not in closed_over and self._is_foreign(tensor):
                raise _closure_error(tensor, self.fn)

    def _is_foreign(self, tensor: torch.Tensor) -> bool:
        while not tensor.requires_grad:
            if not is_functorch_wrapped_tensor(tensor):
                return False
            tensor = get_unwrapped(tensor)
            if self._is_inside(tensor):
                return False
        node = tensor.grad_fn
        return node is None or node._sequence_nr() < self.start

    def _check_graph(self, values: Iterable[Any]) -> None:
        """Raises `ClosureError` if the function differentiates a graph recorded outside of it, which its recompute does
        not have.
        """
        for value in values:
            if isinstance(value, (list, tuple)):
                self._check_graph(value)
            elif isinstance(value, torch.Tensor) and not self._is_inside(value):
                node = value.grad_fn
                if node is not None and node._sequence_nr() < self.start:
                    raise ClosureError(
                        f"{region_name(self.fn)} differentiates a result that was computed outside of it (it calls "
                        "autograd.grad on a captured tensor, or a function that an outer vjp returned). Under "
                        "torch.func a recompute cannot repeat that. Differentiate outside of the rematerialised "
                        "function, or compute the result inside."
                    )


class Watch(TorchFunctionMode):
    """Raises `ClosureError` if a recompute uses a tensor of the forward that it should have replaced."""

    def __init__(self, fn: Any, stale: dict[int, weakref.ref[torch.Tensor]], operands: Sequence[torch.Tensor]):
        super().__init__()
        self.fn = fn
        own = {id(x) for operand in operands for x in layers(operand)}
        self.stale = {key: ref for key, ref in stale.items() if key not in own}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._check(args)
        if kwargs:
            self._check(kwargs.values())
        return func(*args, **(kwargs or {}))

    def _check(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                for tensor in layers(value):
                    reference = self.stale.get(id(tensor))
                    if reference is not None and reference() is tensor:
                        raise _closure_error(value, self.fn)
            elif type(value) in (list, tuple):
                self._check(value)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Disables the modes above for the body: a capture of the function would capture them, too."""
    modes = _get_current_function_mode_stack()
    with function_modes([mode for mode in modes if not isinstance(mode, (UseRecorder, Watch))]):
        yield


def _closure_error(tensor: torch.Tensor, fn: Any) -> ClosureError:
    return ClosureError(
        f"{region_name(fn)} uses a captured tensor (shape {list(tensor.shape)}, {tensor.dtype}) that fckpt did not "
        "find in the function's closure, so the recompute could not replace it. Under torch.func pass the tensor as an "
        "argument; or hold it in a variable, a module, or an attribute or container at most eight levels deep."
    )


_SET_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]  # a getset descriptor
_DIFFERENTIATE = frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward})


def _has_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    return isinstance(value, (list, tuple)) and any(_has_tensor(v) for v in value)
