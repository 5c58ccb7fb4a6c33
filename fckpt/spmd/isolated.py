"""Simulated ranks that do not see each other's Python state: each runs on copies of what a program finds.

A process has its own globals, modules, tensors and caches; a thread has not. So a simulation copies, for each rank but
the first, what the program closes over and is passed, as far as it could change: tensors, modules, containers, objects,
generators, variables, globals, and functions with a cache. When the run is over, what ranks have added to the caller's
containers is there, as if they had run one after another. What cannot be copied is shared, see `shadow.py`.
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fckpt.closure import Closure, Snapshot, class_attributes, closure_of, is_user_class
from fckpt.errors import ArgumentTypeError, MeshWarning, users_stacklevel
from fckpt.modules import INTERNAL
from fckpt.places import ABSENT, INERT, SEQUENCES, Slot, replaced, tensors_in
from fckpt.shadow import shadow

__all__ = ["Isolated"]


class Isolated:
    """A program for each rank, and what they have in common after all."""

    def __init__(self, program: Callable[..., Any], args: Any, kwargs: Any, ranks: int):
        roots = [program, [*args], dict(kwargs)]
        found = closure_of([program], roots[1:])
        parts = [vars(part) for module in found.modules for part in module.modules()]
        if parts:
            named = [(held, name) for held in parts for name in held if name not in INTERNAL]
            found = closure_of([program], roots[1:], attributes=named)
        slots = [*_slots(found), *_slots_of_modules(parts)]
        self.containers = [*(held for state in (found.own, found.given) for held in _containers(state))]
        self.before = [_noted(held) for held in self.containers]
        self.shared = _shared(slots)
        self.programs: list[Callable[[], Any]] = [functools.partial(program, *args, **kwargs)]
        """By rank: what it runs. The first one runs on what the caller has."""
        self.copies: list[list[Any]] = []
        """By rank but the first: its containers."""
        for _ in range(1, ranks):
            made: dict[int, Any] = {}
            [own, mine, words], _left = shadow(roots, _own(slots, found), made)
            self.programs.append(functools.partial(own, *mine, **words))
            self.copies.append([made.get(id(held), held) for held in self.containers])
        self.starts = [[_noted(held) for held in held_by_rank] for held_by_rank in self.copies]

    def collect(self) -> None:
        """Adds to the caller's containers what ranks have added to theirs."""
        for copies, starts in zip(self.copies, self.starts, strict=True):
            for held, before, own, start in zip(self.containers, self.before, copies, starts, strict=True):
                if own is not held:
                    _add(held, before, own, start)

    def tell(self) -> None:
        """Warns of what ranks have shared, and one of them has changed."""
        names = sorted({f"{holder.__name__}.{key}" for holder, key, _ in self.shared.changes()})
        if self.programs[1:] and names:
            warnings.warn(
                f"the program changes {', '.join(names)}, which the ranks of this simulation share: attributes of "
                "classes are not copied. In processes each rank has its own. Keep what changes in an object.",
                MeshWarning,
                stacklevel=users_stacklevel(),
            )


def _slots(found: Closure) -> list[Slot]:
    """The places that a program could write to."""
    slots = list(found.slots)
    for state in (found.own, found.given):
        slots += state.lists
        slots += [(held, None, then) for held, then in state.values if not isinstance(held, frozenset)]
        for held, then in state.dicts:
            slots += [(held, _NOTHING, ABSENT), *((held, key, value) for key, value in then.items())]
        slots += [slot for slot in state.places if not isinstance(slot[0], type) and _is_there(slot)]
    return slots


def _slots_of_modules(parts: list[dict[str, Any]]) -> Iterator[Slot]:
    for attributes in parts:
        yield attributes, _NOTHING, ABSENT
        for held in (attributes, attributes["_parameters"], attributes["_buffers"]):
            for name, value in held.items():
                if value is not None and name not in INTERNAL:
                    yield held, name, value


_NOTHING = object()
"""A key that no dict has."""


def _is_there(slot: Slot) -> bool:
    """Whether something lies in a place: a name of Python's own does not lie among the globals of a program."""
    return not isinstance(slot[0], dict) or slot[1] in slot[0]


def _own(slots: list[Slot], found: Closure) -> list[Slot]:
    """The same places, with copies for one rank in them."""
    memo: dict[int, Any] = {}
    new = {id(g): g.clone_state() if isinstance(g, torch.Generator) else copy.deepcopy(g) for g in found.generators}
    values = [part for _, _, value in slots for part in (value if isinstance(value, tuple) else (value,))]
    for value in values:
        for tensor in tensors_in(value):
            if id(tensor) not in new and tensor.is_leaf:  # others hang on a graph, which is nobody's own
                new[id(tensor)] = copy.deepcopy(tensor, memo)
        if isinstance(value, functools._lru_cache_wrapper) and id(value) not in new:
            new[id(value)] = _with_cache(value.__wrapped__, value.cache_parameters())
    for value in values:
        if id(value) not in new and _is_closed(value) and _reaches(value, new):
            if not isinstance(value, torch.optim.Optimizer) or "step" in vars(value):
                raise ArgumentTypeError(
                    f"sim: the program uses {type(value).__name__}, made outside of it, which holds tensors that each "
                    "rank has a copy of, and cannot be copied itself. Make it in the program, as processes do."
                )
            new[id(value)] = copy.deepcopy(value, memo)
    return [(holder, key, replaced(value, new)) for holder, key, value in slots]


def _is_closed(value: Any) -> bool:
    """Whether something is an object of a library's: an optimizer, say."""
    kind = type(value)
    return (
        kind not in INERT
        and kind.__module__.partition(".")[0] != "fckpt"
        and not is_user_class(kind)
        and not isinstance(value, (*_LOOKED_INTO, torch.Tensor, torch.nn.Module, type, types.ModuleType))
        and type(getattr(value, "__dict__", None)) is dict
        and not callable(value)
    )


_LOOKED_INTO = (dict, list, tuple, set, frozenset, collections.deque)
_MOST = 10_000


def _reaches(value: Any, new: dict[int, Any]) -> bool:
    """Whether an object holds something that is copied."""
    todo, seen = [value], {id(value)}
    while todo and len(seen) < _MOST:
        held = todo.pop()
        below = [*held, *held.values()] if isinstance(held, dict) else held
        for item in below if isinstance(held, _LOOKED_INTO) else vars(held).values():
            if id(item) in new:
                return True
            if id(item) not in seen and (isinstance(item, _LOOKED_INTO) or _is_closed(item)):
                seen.add(id(item))
                todo.append(item)
    return False


def _with_cache(fn: Callable[..., Any], parameters: Any) -> Callable[..., Any]:
    """Returns a function that remembers its results from its first call on."""
    remembering: Callable[..., Any] | None = None

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal remembering
        if remembering is None:
            remembering = functools.lru_cache(**parameters)(fn)
        return remembering(*args, **kwargs)

    return call


def _shared(slots: list[Slot]) -> Snapshot:
    """The attributes of the user's classes that a program finds."""
    found = Snapshot()
    classes = {value if isinstance(value, type) else type(value) for _, _, value in slots}
    for kind in classes:
        if is_user_class(kind):
            found.places += [(base, name, vars(base).get(name)) for base, name in class_attributes(kind)]
    return found


# ---- what ranks leave ------------------------------------------------------------------------------


def _containers(state: Snapshot) -> Iterator[Any]:
    yield from (held for held, _, _ in state.lists)
    yield from (held for held, _ in state.values if isinstance(held, set))
    yield from (held for held, _ in state.dicts)


def _noted(held: Any) -> Any:
    return dict(held) if isinstance(held, dict) else tuple(held)


def _add(held: Any, before: Any, own: Any, start: Any) -> None:
    """Adds to a container what a rank has added to its copy."""
    if isinstance(held, dict):
        held.update({key: value for key, value in own.items() if key not in start and key not in held})
    elif isinstance(held, SEQUENCES):
        kept = all(map(_same, held, before)) and len(held) >= len(before)
        if kept and len(own) >= len(start) and all(map(_same, own, start)):
            held.extend(itertools.islice(own, len(start), None))
    else:
        held.update(item for item in own if item not in start)


def _same(a: Any, b: Any) -> bool:
    return a is b
