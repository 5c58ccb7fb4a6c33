"""Changes of objects that Dynamo would repeat in another way than Python: functions that make them are not captured.

* An attribute that is deleted and set again comes last in `vars`; Dynamo only sets it.
* An object whose `__dict__` is replaced, or is also reached as a dict or through another object, has two models.
* An object with `__del__` is also made, and deleted, during the capture.
* Dynamo changes a list, a dict or a set by methods that a subclass may override.

Seen on torch 2.11 and 2.13: `SideEffects`.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import DeletedVariable
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew
from torch._dynamo.variables.dicts import ConstDictVariable

from fckpt._call.facts import attribute, is_user_class
from fckpt._capture.containers import container_of
from fckpt._capture.patching import patched

__all__ = ["objects_like_pythons"]

_CONTAINERS = (list, dict, set, collections.deque)
_HARMLESS = {
    "__class_getitem__", "__dict__", "__doc__", "__init__", "__init_subclass__", "__module__", "__new__", "__reduce__",
    "__reduce_ex__", "__repr__", "__str__", "__weakref__", "__hash__", "__orig_bases__", "__parameters__", "__slots__",
    "__annotations__", "__getstate__", "__setstate__", "__format__", "__sizeof__",
}  # fmt: skip
"""What a subclass of a container may define without that Dynamo's changes differ from Python's."""


def _storing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def store(this: Any, item: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "__dict__":
            raise LookupError("the function replaces the `__dict__` of an object")
        deleted = isinstance(this.store_attr_mutations.get(item, {}).get(name), DeletedVariable)
        if deleted and not isinstance(value, DeletedVariable) and not isinstance(item.mutation_type, _NEW):
            raise LookupError(f"the function deletes the attribute {name}, and sets it again")
        return original(this, item, name, value, *args, **kwargs)

    return store


_NEW = (AttributeMutationNew, ValueMutationNew)


def _making(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(this: Any, *args: Any, **kwargs: Any) -> Any:
        for kind in (getattr(value, "value", value) for value in (*args, *kwargs.values())):
            if isinstance(kind, type) and is_user_class(kind) and hasattr(kind, "__del__"):
                raise LookupError(f"the function makes a {kind.__name__}, which has a method `__del__`")
        return original(this, *args, **kwargs)

    return make


class _Asked:
    """The keys for which dicts have been asked, by id of Dynamo's variable; None if for more than single keys.

    Hugging Face's configurations ask their `__dict__` for one key at each access, which torch 2.11 takes for a dict.
    """

    def __init__(self) -> None:
        self._keys: dict[int, set[Any] | None] = {}

    def keys(self, variable: Any) -> set[Any] | None:
        return self._keys.get(id(variable))

    def calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call_method(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            known = self._keys.setdefault(id(variable), set())
            single = name in ("get", "__getitem__", "__contains__") and args and args[0].is_python_constant()
            if known is not None and single:
                known.add(args[0].as_python_constant())
            else:
                self._keys[id(variable)] = None
            return original(variable, tx, name, args, kwargs)

        return call_method

    def whole(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def read(variable: Any, *args: Any, **kwargs: Any) -> Any:
            self._keys[id(variable)] = None
            return original(variable, *args, **kwargs)

        return read

    def writing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def write(effects: Any, *args: Any, **kwargs: Any) -> Any:
            _check(effects, self)
            return original(effects, *args, **kwargs)

        return write


def _check(effects: Any, asked: _Asked) -> None:
    """Raises `LookupError` if an object or a container that Dynamo would change has two models, or own methods."""
    reached: dict[int, list[tuple[bool, set[Any] | None]]] = {}
    for address, item in list(effects.id_to_variable.items()):  # a look may add to it
        if isinstance(item.mutation_type, _NEW):
            continue
        value = attribute(item, "value")
        changed = _is_changed(effects, item)
        attributes = attribute(value, "__dict__") if is_user_class(type(value)) else None
        reached.setdefault(address, []).append((changed, asked.keys(item)))
        if type(attributes) is dict:
            names = set(effects.store_attr_mutations.get(item, ())) if changed else None
            reached.setdefault(id(attributes), []).append((changed, names))
        if changed and (name := _overridden(type(value))):
            raise LookupError(f"the function changes a {type(value).__name__}, which has a method `{name}` of its own")
    if any(len(found) > 1 and _conflict(found) for found in reached.values()):
        raise LookupError("the function changes an object whose `__dict__` it also reaches in another way")


def _conflict(found: list[tuple[bool, set[Any] | None]]) -> bool:
    """Whether one model of an object is changed, and another one is read where it matters, or changed too.

    Args:
        found: by model, whether it is changed, and the names that are changed or read, if they are known.
    """
    changed = [names for is_changed, names in found if is_changed]
    others = [names for is_changed, names in found if not is_changed]
    if len(changed) != 1:
        return bool(changed)
    (written,) = changed
    return written is None or any(names is None or names & written for names in others)


def _is_changed(effects: Any, item: Any) -> bool:
    base = container_of(item)
    return effects.is_modified(item) or (base is not None and base.mutation_type and effects.is_modified(base))


@functools.lru_cache(maxsize=1024)
def _overridden(kind: type) -> str:
    """Returns the name of a method of a container that a user's subclass defines; empty if there is none."""
    base = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
    if base is None:
        return ""
    own = {name for cls in kind.__mro__ if is_user_class(cls) for name in vars(cls)} - _HARMLESS
    return next((name for name in sorted(own) if hasattr(base, name)), "")


@contextlib.contextmanager
def objects_like_pythons() -> Iterator[None]:
    """Ends a capture by Dynamo, within the body, at such changes."""
    asked = _Asked()
    with (
        patched(ConstDictVariable, "call_method", asked.calling),
        patched(ConstDictVariable, "unpack_var_sequence", asked.whole),
        patched(ConstDictVariable, "as_python_constant", asked.whole),
        patched(SideEffects, "store_attr", _storing),
        patched(SideEffects, "track_object_new", _making),
        patched(SideEffects, "track_new_user_defined_object", _making),
        patched(SideEffects, "codegen_update_mutated", asked.writing),
    ):
        yield
