"""Imports that wait until they are needed.

Some libraries register classes with abstract base classes when they are imported, which changes results of
`isinstance`, so captures guard against it. Libraries that fckpt imports do not change the results for the user's code.
"""

from __future__ import annotations

import abc
import importlib
import sys
from typing import Any

__all__ = ["late", "registrations"]

_own = 0


def late(name: str) -> Any:
    """Returns a module, which is imported now if it has not been."""
    global _own
    if name not in sys.modules:
        before = _count()
        importlib.import_module(name)
        _own += _count() - before
    return importlib.import_module(name)  # another thread may be importing it: this waits


def registrations() -> int:
    """Returns a number that grows whenever a class is registered with an abstract base class, except by `late`."""
    return _count() - _own


def _count() -> int:
    token: Any = abc.get_cache_token()
    return token
