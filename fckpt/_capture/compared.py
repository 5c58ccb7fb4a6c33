"""Numbers and strings in classes that Dynamo's guards compare by value.

The guards of `classes.py` compare attributes of classes by identity. For a number or a string that Dynamo guards as
well, that is too much: a counter in a class would end each capture.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch._dynamo.source import DictGetItemSource, TypeDictSource

from fckpt._call.places import PLAIN
from fckpt._capture.wrapped import name_of, reader

__all__ = ["compared_constants"]


def compared_constants(
    guards: Iterable[Any], inputs: Iterable[Any], scope: dict[str, Any], places: dict[str, Any], folded: set[str]
) -> set[tuple[int, str]]:
    """Returns (id of a class, name) of the numbers and strings in classes of which Dynamo guards the value.

    Their identity need not be guarded as well. A number that is an input of the graph, such as a counter, may change.

    Args:
        guards: Dynamo's guards.
        inputs: the sources of the graph's inputs.
        scope: the globals of the entry, to which Dynamo's expressions refer as `G`.
        places: the arguments of the entry, to which they refer as `L`.
        folded: names of attributes that Dynamo has read without a guard as well.
    """
    found = set()
    values = [guard.originating_source for guard in guards if guard.create_fn_name() in _COMPARING]
    for source in {*values, *inputs}:
        base, name = getattr(source, "base", None), getattr(source, "member", None)
        if isinstance(source, DictGetItemSource) and isinstance(base, TypeDictSource):
            base, name = base.base, source.index
        if base is None or not isinstance(name, str) or name in folded:
            continue
        try:
            (holder,) = reader([name_of(base)], scope)(places)
        except Exception:  # an expression that only Dynamo's own guards can evaluate
            continue
        if not isinstance(holder, type) and name in getattr(holder, "__dict__", ()):
            continue  # an attribute of the object hides that of the class
        lineage = holder.__mro__ if isinstance(holder, type) else type(holder).__mro__
        owner = next((cls for cls in lineage if name in vars(cls)), None)
        if owner is not None and type(vars(owner)[name]) in PLAIN:
            found.add((id(owner), name))
    return found


_COMPARING = ("CONSTANT_MATCH", "EQUALS_MATCH")
