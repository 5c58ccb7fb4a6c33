"""Isolation of simulated ranks: each rank runs on copies of the Python state that a program can reach.

Processes have separate globals, modules, tensors and caches; threads do not. So for each rank except the first, a
simulation copies what the program closes over and what it is passed, if it can change: tensors, modules, containers,
objects, generators, iterators, locks, variables, globals, and functions with a cache. Some places exist only once
(attributes of classes, globals that methods name, the contents of compiled modules). One rank runs at a time, so at the
start of each turn of a rank these places get the values that the rank left there at the end of its previous turn. At
the end of the run, the items that ranks have added to copies of the caller's containers are added to these containers,
as if the ranks had run one after another.

The static check of a mapped function also runs on such copies, so that it has no side effects (`Rehearsal`).
"""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import copy
import functools
import io
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from fckpt import _tree as trees
from fckpt._call.closure import Closure, closure_of, method_globals
from fckpt._call.facts import is_user_class
from fckpt._call.modules import INTERNAL
from fckpt._call.places import (
    ABSENT,
    SEQUENCES,
    Slot,
    content,
    entries,
    is_inert,
    present,
    put,
    replaced,
    tensors_in,
)
from fckpt._call.shadow import shadow
from fckpt._call.snapshots import Snapshot
from fckpt.errors import ArgumentTypeError

__all__ = ["Isolated", "Rehearsal"]

StandIn = Callable[[torch.Tensor, dict[int, Any]], torch.Tensor | None]
"""Returns the tensor that replaces a tensor, or None to share the original. The dict is the memo of `copy.deepcopy`."""


class Isolated:
    """One copy of a program for each rank."""

    def __init__(self, program: Callable[..., Any], args: Any, kwargs: Any, ranks: int):
        reached = _Writable([program, [*args], dict(kwargs)])
        self.containers = reached.containers
        self.before = [_noted(held) for held in self.containers]
        self.programs: list[Callable[[], Any]] = [functools.partial(program, *args, **kwargs)]
        """By rank: its program. Rank 0 runs on the caller's objects."""
        self.copies: list[dict[int, Any]] = []
        """For each rank except rank 0: its copies, by the id of the original."""
        twins = [reached.twin(_own_tensor, refuses=True) for _ in range(1, ranks)]
        for [own, mine, words], made, _ in twins:
            self.programs.append(functools.partial(own, *mine, **words))
            self.copies.append(made)
        self.places = _Places(reached.kinds, twins[0][2] if twins else [])
        self.values = [self.places.now(), *(self.places.filled(left, made) for _, made, left in twins)]
        """By rank: the values that it left in the places that exist once, at the end of its last turn."""
        self.starts = [[_noted(held) for held in self._own_containers(rank)] for rank in range(1, ranks)]

    def enter(self, rank: int) -> None:
        """Begins a turn of a rank."""
        self.places.put(self.values[rank])

    def leave(self, rank: int) -> None:
        """Ends a turn of a rank."""
        self.values[rank] = self.places.now()

    def collect(self) -> None:
        """Ends the run: adds the items that ranks have added to their containers to the caller's containers."""
        self.enter(0)
        for rank, starts in enumerate(self.starts, 1):
            own_containers = self._own_containers(rank)
            for held, before, own, start in zip(self.containers, self.before, own_containers, starts, strict=True):
                if own is not held:
                    _add(held, before, own, start)

    def _own_containers(self, rank: int) -> list[Any]:
        """Returns the containers of a rank, or their contents at its last turn; the caller's if they are shared."""
        left = self.places.contents(self.values[rank])
        made = self.copies[rank - 1]
        return [left.get(id(held), made.get(id(held), held)) for held in self.containers]


class Rehearsal:
    """A copy of a function that runs on other tensors without side effects."""

    def __init__(self, fn: Callable[..., Any], stand_in: Callable[[torch.Tensor], torch.Tensor]):
        reached = _Writable([fn])
        self.tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By id: the captured tensors, and the tensors that replace them."""

        def noted(x: torch.Tensor, memory: dict[int, Any]) -> torch.Tensor:
            memory[id(x)] = new = stand_in(x)
            self.tensors[id(x)] = x, new
            return new

        [self.fn], made, left = reached.twin(noted, refuses=False)
        self._places = _Places(reached.kinds, left)
        self._values = self._places.filled(left, made)

    @contextlib.contextmanager
    def prepared(self) -> Iterator[Callable[..., Any]]:
        """Context manager: yields the function, which may be called in the body only."""
        before = self._places.now()
        self._places.put(self._values)
        try:
            yield self.fn
        finally:
            self._places.put(before)


# ---- the state that a program can reach ------------------------------------------------------------


class _Writable:
    """The objects that can be reached from some roots, and the places that could be written to."""

    def __init__(self, roots: list[Any]):
        self.roots = roots
        found = self.found = closure_of(roots[:1], roots[1:])
        modules: dict[int, Any] = {}
        kinds: set[type] = set()
        while True:
            parts = [part for module in found.modules for part in module.modules() if id(part) not in modules]
            new = (found.kinds.keys() | {type(part) for part in parts if is_user_class(type(part))}) - kinds
            if not parts and not new:
                break
            modules |= {id(part): part for part in parts}
            kinds |= new
            named = [(vars(part), name) for part in parts for name in vars(part) if name not in INTERNAL]
            named += [place for kind in new for place in method_globals(kind)]
            found.extend(closure_of([], attributes=named))
        every: list[type] = [*kinds, *map(type, kinds)]
        bases = [base for kind in every for base in kind.__mro__]
        self.kinds = dict.fromkeys(base for base in bases if is_user_class(base))
        self.slots = [*_slots(found), *_slots_of_modules([vars(part) for part in modules.values()])]
        held = [held for state in (found.own, found.given) for held in _containers(state)]
        self.containers = [*{id(container): container for container in held}.values()]

    def twin(self, stand_in: StandIn, *, refuses: bool) -> tuple[list[Any], dict[int, Any], list[Slot]]:
        """Copies the roots and everything that they could write to, with other tensors.

        Args:
            stand_in: returns the other tensors.
            refuses: whether an object that holds a replaced tensor, and cannot be copied, is an error.

        Returns:
            The copies of the roots; all copies, by the id of the original; and the values for the places that exist
            once.
        """
        made: dict[int, Any] = {}
        slots = _own(self.slots, self.found, stand_in, refuses)
        roots, left = shadow(self.roots, slots, made)
        return roots, made, left


def _slots(found: Closure) -> list[Slot]:
    """Returns the places that a program could write to."""
    slots = list(found.slots)
    for state in (found.own, found.given):
        slots += state.lists
        slots += [(held, None, then) for held, then in state.values if not isinstance(held, frozenset)]
        for held, then in state.dicts:
            slots += [(held, _WHOLE, ABSENT), *((held, key, value) for key, value in then.items())]
        slots += [slot for slot in state.places if _is_there(slot)]
    return slots


def _slots_of_modules(parts: list[dict[str, Any]]) -> Iterator[Slot]:
    for attributes in parts:
        yield attributes, _WHOLE, ABSENT
        for held in (attributes, attributes["_parameters"], attributes["_buffers"]):
            for name, value in held.items():
                if value is not None and name not in INTERNAL:
                    yield held, name, value


class _Whole:
    """A key that occurs in no dict. It marks a dict whose entries are all copied for each rank."""


_WHOLE = _Whole()


def _is_there(slot: Slot) -> bool:
    """Whether a place exists. The name of a Python builtin, for example, is not in the globals of a program."""
    holder, name, _ = slot
    return not isinstance(holder, (type, dict)) or (isinstance(holder, dict) and name in holder)


def _own_tensor(x: torch.Tensor, memory: dict[int, Any]) -> torch.Tensor | None:
    """Returns a copy of a leaf tensor. Returns None for a tensor with a grad_fn, which all ranks share.

    Raises:
        ArgumentTypeError: the tensor has hooks, which could write to objects that all ranks share.
    """
    if not x.is_leaf:
        return None
    if x._backward_hooks or getattr(x, "_post_accumulate_grad_hooks", None):
        raise ArgumentTypeError(
            f"sim: the program uses {trees.describe(x)}, made outside of it, which has hooks. Each rank gets a copy of "
            "the tensor, and hooks cannot be copied. Make the tensor and its hooks in the program, as processes do."
        )
    return copy.deepcopy(x, memory)


def _own(slots: list[Slot], found: Closure, stand_in: StandIn, refuses: bool) -> list[Slot]:
    """Returns the same places with copies as their values."""
    memory: dict[int, Any] = {}
    new = {id(g): g.clone_state() if isinstance(g, torch.Generator) else copy.deepcopy(g) for g in found.generators}
    values = [part for _, _, value in slots for part in (value if isinstance(value, tuple) else (value,))]
    for value in values:
        for tensor in tensors_in(value):
            if id(tensor) not in new and (other := stand_in(tensor, memory)) is not None:
                new[id(tensor)] = other
        if isinstance(value, functools._lru_cache_wrapper) and id(value) not in new:
            new[id(value)] = _with_cache(value.__wrapped__, value.cache_parameters())
        elif id(value) not in new and (other := _moving(value, memory, refuses)) is not None:
            new[id(value)] = other
    for value in values:
        if id(value) not in new and _is_closed(value) and _reaches(value, new):
            if isinstance(value, torch.optim.Optimizer) and "step" not in vars(value):
                new[id(value)] = copy.deepcopy(value, memory)
            elif refuses:
                raise ArgumentTypeError(
                    f"sim: the program uses {type(value).__name__}, made outside of it, which cannot be copied for "
                    "each rank, but holds tensors that are copied. Make it in the program, as processes do."
                )
    return [(holder, key, replaced(value, new)) for holder, key, value in slots]


def _moving(value: Any, memory: dict[int, Any], refuses: bool) -> Any:
    """Returns a copy of an iterator, a lock or a weak dict, which have hidden state; None for all other objects.

    Raises:
        ArgumentTypeError: an iterator cannot be copied. Unless `refuses`, the error is raised later, by the first
            `next` on the returned iterator.
    """
    if isinstance(value, _LOCKS):
        return threading.RLock() if isinstance(value, _LOCKS[1]) else threading.Lock()
    if isinstance(value, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
        return copy.copy(value)
    shared = isinstance(value, io.IOBase) or is_user_class(type(value))  # processes share files as well
    if shared or not isinstance(value, collections.abc.Iterator):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # itertools cannot be copied from Python 3.14 on
            return copy.deepcopy(value, memory)
    except Exception:
        what = f"{type(value).__name__} {getattr(value, '__qualname__', '')}".strip()
        error = ArgumentTypeError(
            f"sim: the program uses {what}, made outside of it, of which each rank needs a copy, but which cannot be "
            "copied. Make it in the program, as processes do."
            if refuses
            else f"shard_map: the mapped function takes the next item of {what}, which the static check would consume, "
            'and which cannot be copied. Take the item before the call and pass it as an argument, or pass check="off".'
        )
    if refuses:
        raise error
    return _raising(error)


def _raising(error: Exception) -> Iterator[Any]:
    raise error
    yield  # makes it a generator


_LOCKS = (type(threading.Lock()), type(threading.RLock()))


def _is_closed(value: Any) -> bool:
    """Whether a value is an object of a library class, such as an optimizer."""
    kind = type(value)
    return (
        not is_inert(kind)
        and kind.__module__.partition(".")[0] != "fckpt"
        and not is_user_class(kind)
        and not isinstance(value, (*_LOOKED_INTO, torch.Tensor, torch.nn.Module, type))
        and type(getattr(value, "__dict__", None)) is dict
        and not callable(value)
    )


_LOOKED_INTO = (dict, list, tuple, set, frozenset, collections.deque)
_MOST = 10_000


def _reaches(value: Any, new: dict[int, Any]) -> bool:
    """Whether an object holds an object that is copied."""
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
    """Returns `fn` with a new cache, which is made at the first call."""
    remembering: Callable[..., Any] | None = None

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal remembering
        if remembering is None:
            remembering = functools.lru_cache(**parameters)(fn)
        return remembering(*args, **kwargs)

    return call


# ---- places that exist once ------------------------------------------------------------------------


class _Places:
    """Places that exist once, such as attributes of classes. The values of a rank are put there for its turn."""

    def __init__(self, kinds: Iterable[type], left: Sequence[Slot]):
        self.kinds = [*kinds]
        whole = {id(holder): holder for holder, key, _ in left if key is _WHOLE}
        self.dicts = [*whole.values()]
        single = {(id(holder), key): (holder, key) for holder, key, _ in left if id(holder) not in whole}
        self.single = [*single.values()]

    def now(self) -> tuple[list[dict[str, Any]], list[dict[Any, Any]], list[Any]]:
        """Returns the current values."""
        held = [content(holder, key) for holder, key in self.single]
        return [_data(kind) for kind in self.kinds], [entries(holder) for holder in self.dicts], held

    def put(self, values: tuple[list[dict[str, Any]], list[dict[Any, Any]], list[Any]]) -> None:
        """Puts other values there."""
        attributes, dicts, held = values
        for kind, wanted in zip(self.kinds, attributes, strict=True):
            now = _data(kind)
            for name in now.keys() - wanted.keys():
                delattr(kind, name)
            for name, value in wanted.items():
                if now.get(name, ABSENT) is not value:
                    setattr(kind, name, value)
        for holder, wanted in zip(self.dicts, dicts, strict=True):
            for key in [key for key in entries(holder) if key not in wanted]:
                put(holder, key, ABSENT)
            for key, value in wanted.items():
                if content(holder, key) is not value:
                    put(holder, key, value)
        for (holder, key), value in zip(self.single, held, strict=True):
            if not present((holder, key, value)):
                put(holder, key, value)

    def filled(self, left: Sequence[Slot], made: dict[int, Any]) -> Any:
        """Returns the current values, with copies in place of the originals."""
        attributes, dicts, held = self.now()
        memory = dict(made)
        attributes = [{name: _copied(value, memory) for name, value in own.items()} for own in attributes]
        at = {id(holder): own for holder, own in zip(self.dicts, dicts, strict=True)}
        where = {(id(holder), key): i for i, (holder, key) in enumerate(self.single)}
        for holder, key, value in left:
            if id(holder) not in at:
                held[where[id(holder), key]] = value
            elif key is not _WHOLE:
                at[id(holder)][key] = value
        return attributes, dicts, held

    def contents(self, values: Any) -> dict[int, Any]:
        """Returns the contents of containers in `values`, by the id of the container."""
        found = {id(holder): own for holder, own in zip(self.dicts, values[1], strict=True)}
        pairs = zip(self.single, values[2], strict=True)
        return found | {id(holder): own for (holder, key), own in pairs if key is None}


def _data(kind: type) -> dict[str, Any]:
    """Returns the attributes of a class that are data, without functions and properties."""
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("__") and not isinstance(value, type) and not hasattr(type(value), "__get__")
    }


def _copied(value: Any, memory: dict[int, Any]) -> Any:
    """Returns a copy of the value of a class attribute, or the value itself if it cannot be copied."""
    if not isinstance(value, (*_LOOKED_INTO, torch.Tensor)):
        return memory.get(id(value), value)
    try:
        return copy.deepcopy(value, memory)
    except Exception:
        return value


# ---- the items that ranks add to containers --------------------------------------------------------


def _containers(state: Snapshot) -> Iterator[Any]:
    yield from (held for held, _, _ in state.lists)
    yield from (held for held, _ in state.values if isinstance(held, set))
    yield from (held for held, _ in state.dicts)


def _noted(held: Any) -> Any:
    return dict(held) if isinstance(held, dict) else tuple(held)


def _add(held: Any, before: Any, own: Any, start: Any) -> None:
    """Adds the items that a rank has added to its copy of a container to the container."""
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
