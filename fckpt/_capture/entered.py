"""Context managers within a captured graph: they are exited if the graph ends with an error.

Dynamo writes a `with` block as two calls, one that enters and one that exits. If a call between the two raises an
error, the second one is never made. So the calls that enter are noted while a graph runs, and after an error their
exits are made in reverse order, as Python makes them. Settings that the graph changes by the same function in both
directions (grad mode, backends of attention) are read before the graph runs, and set back.

Seen on torch 2.11 and 2.13: the names of these functions, and what their exits take.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._C import _functorch

from fckpt._call import ambient

__all__ = ["Entered", "entered_exited", "enters"]

_EXITS: dict[str, Callable[[Any], Any]] = {
    "_enter_inference_mode": lambda guard: guard.__exit__(None, None, None),
    "_enter_autocast": torch.amp._exit_autocast,
    "_grad_increment_nesting": lambda level: _functorch._grad_decrement_nesting(),
    "_vmap_increment_nesting": lambda level: _functorch._vmap_decrement_nesting(),
    "_jvp_increment_nesting": lambda level: _functorch._jvp_decrement_nesting(),
    "_func_increment_nesting": lambda level: _functorch._func_decrement_nesting(),
    "_enter_dual_level": lambda level: torch._C._exit_dual_level(level=level),
    "pop_dynamic_layer_stack": _functorch.push_dynamic_layer_stack,
    "_exchange_device": lambda device: torch._C._cuda_maybeExchangeDevice(device),
    "_accelerator_exchangeDevice": torch._C._accelerator_maybeExchangeDevice,
    "_record_function_enter_new": lambda handle: torch.ops.profiler._record_function_exit._RecordFunction(handle),
}
"""By name of a function that enters: the function that exits, of the result of the first."""
_EXITING = {
    "_exit_inference_mode": "_enter_inference_mode",
    "_exit_autocast": "_enter_autocast",
    "_grad_decrement_nesting": "_grad_increment_nesting",
    "_vmap_decrement_nesting": "_vmap_increment_nesting",
    "_jvp_decrement_nesting": "_jvp_increment_nesting",
    "_func_decrement_nesting": "_func_increment_nesting",
    "_exit_dual_level": "_enter_dual_level",
    "push_dynamic_layer_stack": "pop_dynamic_layer_stack",
    "_maybe_exchange_device": "_exchange_device",
    "_accelerator_maybeExchangeDevice": "_accelerator_exchangeDevice",
    "_record_function_exit": "_record_function_enter_new",
}
"""By name of a function that exits: the function that enters."""
_SETTERS = {
    "_set_grad_enabled",
    "_set_fwd_grad_enabled",
    "_sdpa_kernel",
    "_saved_tensors_hooks_disable",
    "_saved_tensors_hooks_enable",
    "set_inplace_requires_grad_allowed",
}
"""Functions that both enter and exit, by setting a value."""


def enters(graph: fx.Graph) -> bool:
    """Whether a graph enters a context manager or changes a setting."""
    return any(_name(node.target) in _EXITS.keys() | _SETTERS for node in graph.nodes if node.op == "call_function")


class Entered:
    """The context managers that a graph has entered and not exited, and the settings from before it ran."""

    def __init__(self) -> None:
        self._open: list[tuple[str, Any]] = []
        self._settings = _settings()

    def note(self, target: Any, result: Any) -> None:
        """Records a call of the graph."""
        name = _name(target)
        if name in _EXITS:
            self._open.append((name, result))
        elif name in _EXITING:
            last = max(i for i, (entered, _) in enumerate(self._open) if entered == _EXITING[name])
            del self._open[last]

    def exit(self) -> None:
        """Exits everything."""
        while self._open:
            name, result = self._open.pop()
            _EXITS[name](result)
        _set(self._settings)


@contextlib.contextmanager
def entered_exited() -> Iterator[Entered]:
    """Yields what is to be told of each call of a graph, and exits what the graph has entered if the body fails."""
    entered = Entered()
    try:
        yield entered
    except BaseException:
        entered.exit()
        raise


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", "")).partition(".")[0]


def _settings() -> tuple[Any, ...]:
    enabled = torch._C._autograd._saved_tensors_hooks_is_enabled()
    return (
        torch.is_grad_enabled(),
        torch._C._is_fwd_grad_enabled(),
        _functorch.get_inplace_requires_grad_allowed(),
        None if enabled else torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        ambient.capture(),
    )


def _set(then: tuple[Any, ...]) -> None:
    grad, forward_grad, in_place, message, settings = then
    torch._C._set_grad_enabled(grad)
    torch._C._set_fwd_grad_enabled(forward_grad)
    _functorch.set_inplace_requires_grad_allowed(in_place)
    if message is None:
        torch._C._autograd._saved_tensors_hooks_enable()
    else:
        torch._C._autograd._saved_tensors_hooks_disable(message)
    ambient.put_back(settings)
