"""What a function under `functools.lru_cache` holds. Only the garbage collector has access to its entries."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from typing import Any

__all__ = ["entries_of", "is_cache", "is_packaged", "key_for", "results_in"]


def is_cache(value: Any) -> bool:
    """Whether a value is a function under `functools.lru_cache`."""
    return isinstance(value, functools._lru_cache_wrapper)


def is_packaged(cache: Any) -> bool:
    """Whether a cache is of an installed package. What those hold are facts about themselves and the machine."""
    code = getattr(cache.__wrapped__, "__code__", None)
    return code is not None and "-packages" in code.co_filename


def entries_of(cache: Any) -> dict[Any, Any]:
    """Returns the entries of a cache by its own keys. The values of a cache with a limit are links."""
    held = [v for v in gc.get_referents(cache) if type(v) is dict and v is not vars(cache)]
    return held[-1]  # the results come before


def key_for(cache: Any, args: Any, kwargs: Any) -> Any:
    """Returns the key of an entry, as another cache makes it: only functools knows the form of keys."""
    other = functools.lru_cache(None, cache.cache_parameters()["typed"])(lambda *args, **kwargs: None)
    other(*args, **kwargs)
    return next(iter(entries_of(other)))


def results_in(cache: Any) -> Iterator[Any]:
    """Yields the results that a cache holds, and the items of tuples among them."""
    own = entries_of(cache)
    others = {id(own), id(vars(cache)), *map(id, own)}  # the collector also sees the keys
    todo = [v for v in (*gc.get_referents(cache), *own.values()) if id(v) not in others]
    for value in todo:  # grows meanwhile
        if isinstance(value, tuple):
            todo += value
        else:
            yield value
