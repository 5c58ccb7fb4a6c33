"""Snapshots of the Python state that a function can reach: which places have changed since, and what they held."""

from __future__ import annotations

import collections
import itertools
import operator
from typing import Any

import torch

from fckpt._call.facts import LARGE
from fckpt._call.places import ABSENT, FORGOTTEN, Slot, content, entries, present

__all__ = ["Snapshot"]

_DEPTH = 4  # of the tensors in a container


class Snapshot:
    """The values in some places at one time."""

    __slots__ = ("classes", "dicts", "kinds", "lists", "places", "values")

    def __init__(self) -> None:
        self.classes: list[tuple[type, frozenset[str]]] = []
        """Classes, each with the names of its attributes."""
        self.dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        """Dicts, each with a copy."""
        self.lists: list[Slot] = []
        self.values: list[tuple[Any, Any]] = []
        """Sets and arrays, each with a copy. They are compared by value."""
        self.places: list[Slot] = []
        """Other places: globals, `__slots__` of objects, class attributes."""
        self.kinds: list[tuple[Any, type]] = []
        """Objects of the user's classes, each with its class."""

    def extend(self, other: Snapshot) -> None:
        """Adds the contents of `other`."""
        self.classes += other.classes
        self.dicts += other.dicts
        self.lists += other.lists
        self.values += other.values
        self.places += other.places
        self.kinds += other.kinds

    def changes(self) -> list[Slot]:
        """Returns the places whose values have changed, with their former values."""
        changes = [slot for slot in self.places if not present(slot)]
        changes += [slot for slot in self.lists if not present(slot)]
        changes += [slot for held, then in self.values if not present(slot := (held, None, then))]
        for held, then in self.dicts:
            if not _same_entries(held, then):
                pairs = [(key, value) for key, value in then.items() if value is not FORGOTTEN]
                changes += [(held, key, value) for key, value in pairs if dict.get(held, key, ABSENT) is not value]
                changes += [(held, key, ABSENT) for key in held if key not in then]
        for cls, names in self.classes:
            changes += [(cls, name, ABSENT) for name in set(vars(cls)) - names if not name.startswith("__")]
        return changes

    def reordered(self) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
        """Returns the dicts that have the same entries in another order, each with its former entries."""
        same = [(held, then) for held, then in self.dicts if _same_entries(held, then)]
        return [(held, then) for held, then in same if not all(map(operator.is_, entries(held), then))]

    def reclassed(self) -> list[tuple[Any, type]]:
        """Returns the objects that have another class now, each with its former class."""
        return [(value, kind) for value, kind in self.kinds if type(value) is not kind]

    def again(self) -> Snapshot:
        """Returns a snapshot of the same places now."""
        new = Snapshot()
        new.classes = [(cls, frozenset(vars(cls))) for cls, _ in self.classes]
        new.dicts = [(held, entries(held)) for held, _ in self.dicts]
        new.lists = [(held, None, content(held, None)) for held, _, _ in self.lists]
        new.values = [(held, content(held, None)) for held, _ in self.values]
        new.places = [(holder, key, content(holder, key)) for holder, key, _ in self.places]
        new.kinds = [(value, type(value)) for value, _ in self.kinds]
        return new

    def forget_changes(self) -> None:
        """Removes the changed places from the snapshot, except places that held or now hold a tensor."""
        self.places = [slot for slot in self.places if present(slot) or _of_tensors(slot)]
        self.lists = [slot for slot in self.lists if present(slot) or _of_tensors(slot)]
        self.values = [(held, then) for held, then in self.values if present((held, None, then))]
        for held, then in self.dicts:
            if not _same_entries(held, then):
                for key in [*then, *held]:
                    before = then.get(key, ABSENT)
                    if dict.get(held, key, ABSENT) is not before and not _of_tensors((held, key, before)):
                        then[key] = FORGOTTEN


def _of_tensors(slot: Slot) -> bool:
    """Whether a place held a tensor, or holds one now."""
    holder, key, before = slot
    return _has_tensor(before) or _has_tensor(content(holder, key))


def _has_tensor(value: Any, depth: int = _DEPTH) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if depth and isinstance(value, (list, tuple, dict, collections.deque)) and len(value) <= LARGE:
        return any(_has_tensor(v, depth - 1) for v in (value.values() if isinstance(value, dict) else value))
    return False


def _same_entries(held: dict[Any, Any], then: dict[Any, Any]) -> bool:
    now = map(dict.get, itertools.repeat(held), then)
    return len(held) == len(then) and all(map(operator.is_, now, then.values()))
