"""The conditions of a call: everything besides its arguments that determines its result.

These are generator states, ambient settings, module buffers and captured tensors. They are observed before and after
the forward. A recompute runs on a copy of the function with the observed values (see `shadow`). So it sees what the
forward saw, and generators and buffers end where the plain function leaves them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fckpt._call import ambient
from fckpt._call.closure import Closure, closure_of, method_globals
from fckpt._call.data_writes import DataWrites, names_data
from fckpt._call.levels import transforms_active, unseen, unwrapped, version
from fckpt._call.modules import BufferKey, BufferWrites, ModuleParts, ModuleState, add_parts, open_closures, parts_of
from fckpt._call.places import Slot, frozen, placed, present, replaced, tensors_in
from fckpt._call.rng import RandomState, generator_types
from fckpt._call.shadow import shadow
from fckpt._call.snapshots import Snapshot
from fckpt.errors import ImpureFunctionError, MutationError, region_name

__all__ = [
    "Again",
    "BufferWrites",
    "Conditions",
    "Observation",
    "Written",
    "may_be_statistics",
    "with_attributes",
]


class Observation:
    """The state that is read right before a function runs; `conditions` completes it right after."""

    __slots__ = (
        "ambient",
        "buffer_writes",
        "buffers",
        "copies",
        "facts",
        "fn",
        "installed",
        "kinds",
        "modules",
        "parts",
        "random",
        "slots",
        "state",
        "statics",
        "unwritten",
        "versions",
    )

    def __init__(
        self,
        fn: list[Callable[..., Any]],
        statics: Sequence[Any],
        inputs: Sequence[torch.Tensor],
        buffer_writes: BufferWrites,
        *,
        facts: bool = False,
    ):
        """Observes the function in the list `fn`, which is about to run; `buffer_writes` persists between calls.

        With `facts`, values in the closure other than tensors are recorded for `settings`.
        """
        self.facts: list[Any] = []
        self.ambient = ambient.capture()
        with unseen():
            self._observe(fn, statics, inputs, buffer_writes, self.facts if facts else None)

    def _observe(
        self,
        fn: list[Callable[..., Any]],
        statics: Sequence[Any],
        inputs: Sequence[torch.Tensor],
        buffer_writes: BufferWrites,
        facts: list[Any] | None,
    ) -> None:
        self.fn = fn
        self.statics = statics
        closure = closure_of(fn, statics, facts=facts)
        self.kinds: dict[type, None] = {}
        """The user's classes of objects that the function uses, except module classes."""
        parts = self.parts = [parts_of(module) for module in closure.modules]
        self.state: list[Snapshot | ModuleState] = [closure.own, closure.given]
        """Values in the closure other than tensors: in the function's cells, in static arguments, in modules."""
        self._observe_open(closure, facts)
        if facts is None:
            self._observe_classes(closure)
        else:
            self._observe_hooks(closure, facts)
            self._observe_generators(closure)
        self.kinds |= closure.kinds
        self.state += [part.state() for part in parts]
        generators = closure.generators + [g for part in parts for g in part.generators]
        self.modules = [m for part in parts for m in part.modules]
        """The attributes of each module."""
        self.slots: list[Slot] = closure.slots
        """The places of captured tensors, except those inside modules."""
        self.installed = _installed(parts)
        held = [t for _, _, value in self.slots for t in tensors_in(value)]
        self.versions = [(t, version(t)) for t in map(unwrapped, held)]
        tensors = (*inputs, *held, *[tensor for _, _, tensor in self.installed])
        devices = {device for device in {t.device for t in tensors} if device.type not in ("cpu", "meta")}
        self.buffer_writes = buffer_writes
        self.buffers = [] if self.lazy else [buffer for part in parts for buffer in part.buffers()]
        if facts is not None:
            own = [vars(t) for t in (*tensors, *[tensor for _, _, _, tensor, _ in self.buffers])]
            closure_of([], attributes=[(held, name) for held in own for name in held], facts=facts)
        planned = facts is not None  # a plan writes once, and saves copies itself where it may need them
        self.unwritten = [] if self.lazy or planned else self._versions_of_parameters()
        self.copies = [None if planned else self._copy(key, tensor) for _, _, key, tensor, _ in self.buffers]
        self.random = RandomState.capture(devices, generators)

    def data_writes(self) -> contextlib.AbstractContextManager[object]:
        """Raises an error if the body, which runs the function, changes a captured tensor through `.data`."""
        classes = (frozenset(self.kinds), *(part.classes for part in self.parts))
        if transforms_active() or not names_data(self.fn[0], classes):
            return contextlib.nullcontext()
        buffers = {id(tensor) for _, _, _, tensor, _ in self.buffers}
        own = [("", t) for t, _ in self.versions if id(t) not in buffers and not may_be_statistics(t)]
        return DataWrites(self.fn[0], [*own, *((name, t) for name, t, _ in self.unwritten)])

    def _versions_of_parameters(self) -> list[tuple[str, torch.Tensor, int]]:
        """Returns the parameters that the function must not write, with their names and versions.

        An embedding with a largest norm scales its weight, which has no further effect in a recompute.
        """
        scaling = {id(m["_parameters"]) for m in self.modules if m.get("max_norm") is not None}
        installed = [(name, unwrapped(t)) for holder, name, t in self.installed if id(holder) not in scaling]
        return [(name, tensor, version(tensor)) for name, tensor in installed]

    def _observe_open(self, closure: Closure, facts: list[Any] | None, start: int = 0) -> None:
        """Records what attributes of modules refer to, which the cache of modules does not cover."""
        for further in open_closures(self.parts, facts, start):
            closure.slots += further.slots
            closure.generators += further.generators
            self.kinds |= further.kinds
            self.state.append(further.given)

    def _observe_hooks(self, closure: Closure, facts: list[Any]) -> None:
        """Records what the hooks of modules refer to."""
        hooks = [hook for part in self.parts for hook in part.hooks()]
        if hooks:
            further = closure_of(hooks, facts=facts)
            closure.slots += further.slots
            closure.generators += further.generators
            self.state.append(further.own)

    def _observe_generators(self, closure: Closure) -> None:
        """Finds the random generators in globals that methods refer to; a trace records what else they read there."""
        named = [place for part in self.parts for place in part.named]
        named += [place for kind in closure.kinds for place in method_globals(kind)]
        kinds = generator_types()
        closure.generators += [held for scope, name in named if isinstance(held := scope.get(name), kinds)]

    def _observe_classes(self, closure: Closure) -> None:
        """Records the globals that methods refer to, and the class attributes of the modules."""
        known, start = set[type](), 0
        while start < len(self.parts) or closure.kinds.keys() - known:
            named = [place for part in self.parts[start:] for place in part.named]
            start = len(self.parts)
            named += [place for kind in closure.kinds.keys() - known for place in method_globals(kind)]
            known |= closure.kinds.keys()
            outside = closure_of([], attributes=named)
            closure.slots += outside.slots
            closure.generators += outside.generators
            closure.own.extend(outside.given)
            closure.kinds |= outside.kinds
            add_parts(self.parts, outside.modules)
            self._observe_open(closure, None, start)
        closure.own.places += [(c, name, vars(c).get(name)) for part in self.parts for c, name in part.constants]

    def _copy(self, key: BufferKey, tensor: torch.Tensor) -> torch.Tensor | None:
        """Copies a buffer, if the function writes and reads it or may do so; otherwise returns None."""
        written = self.buffer_writes.get(key)
        # A normalisation layer of torch in training mode writes its statistics but never reads them.
        _, _, _, statistics = key
        if written is False or (written and statistics):
            return None
        return tensor.detach().clone()

    @property
    def lazy(self) -> bool:
        """Whether this is the first call of a lazy module, which creates its parameters."""
        return any(part.lazy() for part in self.parts if part._lazy)

    def reachable(self) -> dict[int, torch.Tensor]:
        """Returns the captured tensors that were found, by id."""
        found = {id(t): t for _, _, value in (*self.slots, *self.installed) for t in tensors_in(value)}
        return found | {id(tensor): tensor for _, _, _, tensor, _ in self.buffers}

    def held(self) -> list[torch.Tensor]:
        """Returns the captured tensors and the parameters of modules."""
        return [*[t for t, _ in self.versions], *[t for _, _, t in self.installed]]

    def settings(self) -> tuple[Any, ...]:
        """Returns everything but tensors that determines what the function does: facts about its closure and its
        modules.
        """
        places = tuple(key for _, key, *_ in (*self.slots, *self.installed, *self.buffers))
        return (tuple(self.facts), tuple(part.settings() for part in self.parts), places)

    def conditions(self, draws: bool | None = None, lost: str = "") -> Conditions:
        """Returns the conditions of the run that has just ended, reduced to those that the run used.

        Args:
            draws: whether the run drew random numbers, if that is known.
            lost: the message of the error that a recompute raises if it needs a buffer's value that was not copied.
        """
        with unseen():
            return self._conditions(self.random.drawn() if draws is None else self.random.assumed(draws), lost)

    def _conditions(self, random: RandomState, lost: str) -> Conditions:
        # The recompute finds tensors where the forward found them. What else the function changes, it changes again.
        slots = [slot for slot in self.slots if present(slot) or tensors_in(slot[2])]
        buffers = {id(unwrapped(tensor)) for _, _, _, tensor, _ in self.buffers}
        for tensor, then in self.versions:
            if version(tensor) != then and id(tensor) not in buffers:
                raise MutationError(
                    f"{region_name(self.fn[0])} changed a captured tensor in place (shape {list(tensor.shape)}, "
                    f"{tensor.dtype}): its recompute would change it again. Return the new value, or register the "
                    "tensor as a buffer of a module."
                )
        for name, tensor, then in self.unwritten:
            if version(tensor) != then:
                raise MutationError(
                    f"{region_name(self.fn[0])} changed the parameter `{name}` (shape {list(tensor.shape)}) in place: "
                    "its recompute would change it again. Change it before or after the call"
                    + (" of the function." if tensor.requires_grad else ", or give a budget: a plan changes it once.")
                )
        held = [t for _, _, value in slots for t in tensors_in(value)] + [tensor for _, _, tensor in self.installed]
        watched = [(t, version(t)) for t in map(unwrapped, held) if id(t) not in buffers]
        written: list[Written] = []
        for (holder, name, key, tensor, before), copy in zip(self.buffers, self.copies, strict=True):
            _, _, _, statistics = key
            # Batch normalisation writes without incrementing the version, so values are compared, if they are known.
            changed = (
                statistics
                or self.buffer_writes.get(key, False)
                or holder.get(name) is not tensor
                or version(unwrapped(tensor)) != before
                or (copy is not None and not torch.equal(copy, tensor))
            )
            unforeseen = changed and copy is None and not statistics
            self.buffer_writes[key] = changed
            if changed:
                why = (lost or _unforeseen(name, self.fn[0])) if unforeseen else ""
                written.append(Written(holder, name, tensor, tensor if copy is None else copy, why))
            else:
                self.installed.append((holder, name, tensor))
                watched.append((unwrapped(tensor), before))
        own = self.state[0]
        assert isinstance(own, Snapshot)
        own.forget_changes()  # the recompute leaves alone what the function itself changes (a counter, a log)
        fn, slots = frozen(self.fn[0], slots)
        statistics = [t for t, _ in self.versions if may_be_statistics(t)]
        slots += self.installed
        return Conditions(
            fn, self.fn, self.statics, self.ambient, random, watched, written, slots, self.state, statistics
        )

    def undo(self) -> None:
        """Undoes the changes of an aborted run to generators and buffers."""
        self.random.rewind()
        with torch.no_grad():
            for (holder, name, (_, _, _, statistics), tensor, _), copy in zip(self.buffers, self.copies, strict=True):
                if copy is not None:
                    holder[name] = tensor.copy_(copy)
                elif statistics:
                    raise MutationError(
                        f"{region_name(self.fn[0])} used a reverse-mode transform of torch.func for the first time, "
                        f"after it had written its buffer {name!r}, so the call cannot be restarted. Call it again."
                    )


def _unforeseen(name: str, fn: Callable[..., Any]) -> str:
    return (
        f"{region_name(fn)} wrote the buffer {name!r}, which it had not written in an earlier call of the same kind, "
        "so the value before this call was not saved. It is saved from now on: run forward and backward again."
    )


class Written(NamedTuple):
    """A buffer that the forward wrote."""

    buffers: dict[str, Any]
    name: str
    tensor: torch.Tensor
    before: torch.Tensor
    """Its value before the forward."""
    lost: str = ""
    """The error message if that value is needed but not known; empty if it is known."""

    def stand_in(self) -> torch.Tensor:
        """Returns a copy of the value before the forward, for a recompute to write into."""
        if self.lost:
            raise MutationError(self.lost)
        return copy_of(self.before, self.tensor)


Versions = dict[int, tuple[torch.Tensor, int]]


class Again(NamedTuple):
    """The function that a recompute calls, with its static arguments."""

    fn: Callable[..., Any]
    statics: Sequence[Any]
    """The static arguments, copied where they have to differ."""
    scratch: frozenset[int]
    """The ids of the copies of buffers that the function writes."""
    versions: Versions
    """By id of a copy of another captured tensor: the copy, and the version of the tensor. A copy begins at 0."""


class Conditions:
    """The conditions of one run of a function; see the docstring of this module."""

    __slots__ = (
        "ambient", "fn", "random", "root", "slots", "state", "statics", "statistics", "watched", "written",
    )  # fmt: skip

    def __init__(
        self,
        fn: Callable[..., Any],
        root: list[Callable[..., Any]],
        statics: Sequence[Any],
        ambient_then: ambient.Ambient,
        random: RandomState,
        watched: list[tuple[torch.Tensor, int]],
        written: list[Written],
        slots: list[Slot],
        state: list[Snapshot | ModuleState],
        statistics: list[torch.Tensor],
    ):
        self.fn = fn
        """The function, copied onto new cells."""
        self.root = next((holder for holder, _, _ in slots if holder is root), None)
        """The list that held the function, if it is a place of tensors (the function may be a method of a tensor)."""
        self.statics = statics
        self.ambient = ambient_then
        self.random = random
        self.statistics = statistics
        """Captured tensors outside modules that the function may write without incrementing their version."""
        self.watched = watched
        """Captured tensors and their versions."""
        self.written = written
        """The buffers that the forward wrote."""
        self.slots = slots
        """The places of all other captured tensors: cells, parameters, buffers that are not written."""
        self.state = state
        """The other values in the closure."""

    def check(self) -> None:
        """Raises `MutationError` if a captured tensor has been changed in place since the run."""
        with unseen():
            changed = [(t, then) for t, then in self.watched if version(t) != then]
        for tensor, then in changed:
            raise MutationError(
                f"a captured tensor of {region_name(self.fn)} (shape {list(tensor.shape)}, {tensor.dtype}) was changed "
                f"in place between forward and backward (version {then} -> {version(tensor)}): the recompute would see "
                "other values. Run backward before changing the tensor (for example before optimizer.step()), or pass "
                "a copy as an argument."
            )

    @contextlib.contextmanager
    def settings_restored(self, completed: Callable[[], bool]) -> Iterator[None]:
        """Restores ambient settings and generators of the forward for the body, and the present ones after it.

        Args:
            completed: called after the body; returns whether the forward was run again to its end.
        """
        with contextlib.ExitStack() as stack:
            if self.ambient != ambient.capture():
                stack.enter_context(ambient.restored(self.ambient))
            if self.random.states:
                stack.enter_context(self.random.replay(completed))
            yield

    @contextlib.contextmanager
    def restored(self, completed: Callable[[], bool], placing: Sequence[Slot] = ()) -> Iterator[Again]:
        """Restores the conditions of the forward for a recompute, and the present ones after it.

        Args:
            completed: called after the body; returns whether the recompute ran to its end.
            placing: places in which the recompute is to find other tensors.

        Yields:
            The function and its static arguments, copied where they have to differ.
        """
        self.check()
        with unseen():
            changes, scratch, versions = self._changes(placing)
            fn = next((value[0] for holder, _, value in changes if holder is self.root), self.fn)
            roots, left = [fn, *self.statics], []
            if changes:
                roots, left = shadow(
                    roots, [(holder, key, value) for holder, key, value in changes if holder is not self.root]
                )
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.settings_restored(completed))
            if left:
                stack.enter_context(placed(left))
            stack.enter_context(_same_flags(t for t, _ in self.watched))
            yield Again(roots[0], roots[1:], scratch, versions)

    def _changes(self, placing: Sequence[Slot]) -> tuple[list[Slot], frozenset[int], Versions]:
        """Returns the places whose values must differ for a recompute, and what `Again` says about the copies."""
        # `functional_call` replaces the tensors of a module during a call that may be over by now; a loop variable may
        # have moved on; a flag may have been switched.
        changes = [slot for slot in self.slots if not present(slot)]
        for state in self.state:
            changes += state.changes()
        _check_dispatch(changes, self.fn)
        stand_ins = [(buffer, buffer.stand_in()) for buffer in self.written]
        new = {id(buffer.tensor): t for buffer, t in stand_ins}  # replaced in every other place, too
        versions: Versions = {}
        if self.statistics and not transforms_active():
            # Within transforms, writing to a captured tensor is an error anyway.
            copies = [(t, copy_of(t, t)) for t in self.statistics if id(t) not in new]
            new |= {id(t): copy for t, copy in copies}
            versions = {id(copy): (copy, version(unwrapped(t))) for t, copy in copies}
        if new:
            for holder, key, value in self.slots:
                other = replaced(value, new)
                if other is not value:
                    changes.append((holder, key, other))
        changes += placing
        changes += [(buffer.buffers, buffer.name, t) for buffer, t in stand_ins]
        return changes, frozenset(id(t) for _, t in stand_ins), versions


@contextlib.contextmanager
def _same_flags(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Restores `requires_grad` of leaves after the body.

    A function may freeze parameters and thaw them at its end, which a recompute does not reach if it may stop earlier.
    """
    before = [(t, t.requires_grad) for t in tensors if t.is_leaf]
    try:
        yield
    finally:
        for tensor, flag in before:
            if tensor.requires_grad != flag:
                tensor.requires_grad_(flag)


def _installed(parts: Sequence[ModuleParts]) -> list[Slot]:
    """Returns the places of the parameters of modules, except sharded ones."""
    return [
        (parameters, name, parameter)
        for part in parts
        if not part.sharded
        for parameters in part.parameters
        for name, parameter in parameters.items()
        if parameter is not None
    ]


def _check_dispatch(changes: Sequence[Slot], fn: Any) -> None:
    """Raises `ImpureFunctionError` if a function was registered with `functools.singledispatch` since the forward.

    The dispatcher caches its choices in a place that no copy replaces, so a recompute would spoil later calls.
    """
    for holder, key, _ in changes:
        if isinstance(key, type) and type(holder) is dict and object in holder and all(map(callable, holder.values())):
            raise ImpureFunctionError(
                f"between forward and backward, a function for {key.__name__} was registered with a singledispatch "
                f"function that {region_name(fn)} calls. Register it before the call, or run backward first."
            )


def copy_of(tensor: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor's values, with the attributes that have been set on `live`."""
    return with_attributes(tensor.detach().clone(), live)


def with_attributes(new: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """Copies the attributes that have been set on `live` to `new`, and returns it."""
    if vars(live):
        vars(new).update(vars(live))
    return new


def may_be_statistics(tensor: torch.Tensor) -> bool:
    """Whether `tensor` may hold statistics that batch normalisation writes without incrementing the version."""
    may_be = tensor.dim() == 1 and not tensor.requires_grad and tensor.is_floating_point()
    return may_be and not _is_emptied(tensor)


def _is_emptied(tensor: torch.Tensor) -> bool:
    """Whether the memory of `tensor` was given back, as `fully_shard` does: reading it would crash."""
    try:
        return tensor.untyped_storage().nbytes() == 0 < tensor.numel()
    except (NotImplementedError, RuntimeError):  # a tensor of a transform has no storage
        return False
