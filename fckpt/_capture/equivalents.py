"""Code that Dynamo does not evaluate, for which it has an equivalent.

* `x.requires_grad = value` is `x.requires_grad_(value)`.
* `h.requires_grad_()` of an intermediate is an operation of the graph; Dynamo refuses a result computed from `h`,
  because AOTAutograd, which does not see the graph, would lose the operation.
* A `functools.cached_property` sets an attribute, which is repeated like any other; Python's code for it takes a lock
  (until Python 3.11) and writes to the `__dict__` of the object.
* `n.__class__` of a number is its type: Dynamo lets no type be it.
* Names of torch's classes, such as `type(module.weight).__module__`, are constants.
* An attribute that a container does not have is an error, also if nothing uses it: Dynamo reads it only when it is
  used. Here it ends the capture.

Seen on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.misc import GetAttrVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import BaseTorchVariable

from fckpt._call.facts import attribute
from fckpt._capture.patching import instructions_patched, lookups_patched, patched

__all__ = ["equivalents_evaluated"]

_NAMES = ("__module__", "__name__", "__qualname__")
_CONTAINERS = (list, tuple, dict, set, frozenset, range, slice)


def _storing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def store(tx: Any, inst: Any) -> Any:
        value, holder = tx.stack[-2:]
        if inst.argval != "requires_grad" or not isinstance(holder := holder.realize(), TensorVariable):
            return original(tx, inst)
        tx.popn(2)
        holder.call_method(tx, "requires_grad_", [value], {})
        return None

    return store


def _loading(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load(tx: Any, inst: Any) -> Any:
        result = original(tx, inst)
        if inst.argval in _NAMES and tx.stack and isinstance(found := tx.stack[-1], GetAttrVariable):
            known = found.obj.realize()
            if isinstance(known, BaseTorchVariable) and isinstance(known.value, type):
                tx.stack[-1] = ConstantVariable.create(getattr(known.value, inst.argval))
        elif inst.argval == "__class__" and tx.stack and isinstance(found := tx.stack[-1], GetAttrVariable):
            with contextlib.suppress(NotImplementedError):  # something of Dynamo that has no type
                tx.stack[-1] = VariableTracker.build(tx, found.obj.realize().python_type())
        elif tx.stack and isinstance(found := tx.stack[-1], GetAttrVariable):
            known = found.obj.realize()
            with contextlib.suppress(NotImplementedError):  # something of Dynamo that has no type
                kind = known.python_type()
                if kind in _CONTAINERS and not hasattr(kind, found.name):
                    raise LookupError(f"a {kind.__name__} has no attribute {found.name!r}")
        return result

    return load


def _reading(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(this: Any, tx: Any, name: str) -> Any:
        held = inspect.getattr_static(type(attribute(this, "value")), name, None)
        if type(held) is not functools.cached_property:
            return original(this, tx, name)
        with patched(functools.cached_property, "__get__", lambda _: _get_cached):
            return original(this, tx, name)

    return read


def _unchecked(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: None


def _get_cached(self: Any, instance: Any, owner: Any = None) -> Any:
    if instance is None:
        return self
    value = self.func(instance)
    object.__setattr__(instance, self.attrname, value)
    return value


@contextlib.contextmanager
def equivalents_evaluated() -> Iterator[None]:
    """Makes Dynamo evaluate the equivalents within the body."""
    checked = "_check_requires_grad_intermediate_outputs"  # torch 2.13
    with (
        patched(OutputGraph, checked, _unchecked) if hasattr(OutputGraph, checked) else contextlib.nullcontext(),
        instructions_patched({"STORE_ATTR": _storing, "LOAD_ATTR": _loading}),
        lookups_patched(_reading, lambda original: original),
    ):
        yield
