"""The objects that guards recognise by their addresses.

Another object may get the address of a guarded one that has been deleted. Dynamo therefore registers a finalizer for
each such object, which drops the compiled code. It drops nothing for a capture whose guards are checked explicitly;
and because classes and functions live long, the finalizers would keep the guards of each capture until the program
ends. In their place, a capture has weak references, which end with it. Seen on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.guards import CheckFunctionManager

from fckpt._capture.patching import patched

__all__ = ["Identities"]


class Identities:
    """The objects that the guards of one capture recognise by their addresses."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Any]] = {}
        self._deleted: list[str] = []

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Records the objects whose addresses go into guards that are made within the body."""

        def recording(original: Callable[..., int]) -> Callable[..., int]:
            @functools.wraps(original)
            def id_ref(manager: Any, value: Any, place: str) -> int:
                with contextlib.suppress(TypeError):  # values such as True, which are never deleted
                    manager._weakrefs[id(value)] = weakref.ref(value)
                    self._add(value)
                return id(value)

            return id_ref

        with patched(CheckFunctionManager, "id_ref", recording):
            yield

    def _add(self, value: Any) -> None:
        deleted, name = self._deleted, getattr(value, "__name__", f"an object of {type(value).__name__}")
        if id(value) not in self._known:
            self._known[id(value)] = weakref.ref(value, lambda _: deleted.append(name))

    def hold(self) -> bool:
        """Whether no such object has been deleted."""
        return not self._deleted

    def changed(self) -> str:
        """Returns a description of a deleted object; empty if there is none."""
        return f"{self._deleted[0]} was deleted" if self._deleted else ""
