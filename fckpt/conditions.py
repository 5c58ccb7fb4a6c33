"""The conditions of a call: all that decides what a function computes, besides its arguments.

Random generators, autocast and determinism settings, the buffers of modules, and the closed-over tensors.
They are observed around the forward run. A recompute runs on copies that hold them (see `shadow`), so that it sees what
the forward saw and leaves no trace: generators end, and buffers stand, where the plain function leaves them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fckpt import ambient
from fckpt.closure import Snapshot, closure_of, method_globals
from fckpt.errors import MutationError
from fckpt.modules import BufferHabits, BufferKey, ModuleState, parts_of, unwrapped, version
from fckpt.places import Slot, frozen, placed, present, replaced, tensors_in
from fckpt.rng import RandomState
from fckpt.shadow import shadow

__all__ = [
    "Again",
    "BufferHabits",
    "Conditions",
    "Observation",
    "Written",
    "may_be_statistics",
    "unseen",
    "unwrapped",
    "version",
    "with_attributes",
]

# Reading an attribute of a tensor, too, calls the torch function modes in force: those of an enclosing region, which
# notes or refuses it. What fckpt does to tensors itself is none of their business.
unseen = torch._C.DisableTorchFunction


class Observation:
    """What is read right before a function runs; `conditions` completes it right after."""

    __slots__ = (
        "ambient",
        "buffers",
        "copies",
        "facts",
        "fn",
        "habits",
        "installed",
        "modules",
        "parts",
        "random",
        "slots",
        "state",
        "statics",
        "versions",
    )

    def __init__(
        self,
        fn: list[Callable[..., Any]],
        statics: Sequence[Any],
        inputs: Sequence[torch.Tensor],
        habits: BufferHabits,
        *,
        facts: bool = False,
    ):
        """Observes the function in the list `fn`, about to run; `habits` is kept from call to call.

        With `facts`, what it closes over besides tensors is noted for `settings`.
        """
        self.facts: list[Any] = []
        self.ambient = ambient.capture()
        with unseen():
            self._observe(fn, statics, inputs, habits, self.facts if facts else None)

    def _observe(
        self,
        fn: list[Callable[..., Any]],
        statics: Sequence[Any],
        inputs: Sequence[torch.Tensor],
        habits: BufferHabits,
        facts: list[Any] | None,
    ) -> None:
        self.fn = fn
        self.statics = statics
        closure = closure_of(fn, statics, facts=facts)
        parts = self.parts = [parts_of(module) for module in closure.modules]
        self.state: list[Snapshot | ModuleState] = [closure.own, closure.given]
        """What lies in the closure besides tensors: in the function's cells and the like, in arguments, in modules."""
        attributes = [(m, k) for part in parts for m, k in part.open]
        if attributes:
            further = closure_of([], attributes=attributes, facts=facts)
            closure.slots += further.slots
            closure.generators += further.generators
            self.state.append(further.given)
            parts += [parts_of(module) for module in further.modules]
        if facts is None:
            self._observe_classes(closure)
        elif hooks := [hook for part in parts for hook in part.hooks()]:
            further = closure_of(hooks, facts=facts)
            closure.slots += further.slots
            closure.generators += further.generators
            self.state.append(further.own)
        self.state += [part.state() for part in parts]
        generators = closure.generators + [g for part in parts for g in part.generators]
        self.modules = [(m, m["training"]) for part in parts for m in part.modules]
        self.slots: list[Slot] = closure.slots
        """Where tensors lie that the function closes over, those in modules apart."""
        self.installed: list[Slot] = [
            (parameters, name, p)
            for part in parts
            if not part.sharded
            for parameters in part.parameters
            for name, p in parameters.items()
            if p is not None
        ]
        held = [t for slot in self.slots for t in tensors_in(slot[2])]
        self.versions = [(t, version(t)) for t in map(unwrapped, held)]
        tensors = (*inputs, *held, *[slot[2] for slot in self.installed])
        devices = {device for device in {t.device for t in tensors} if device.type not in ("cpu", "meta")}
        self.habits = habits
        self.buffers = [] if self.lazy else [buffer for part in parts for buffer in part.buffers()]
        self.copies = [self._copy(buffer[2], buffer[3]) for buffer in self.buffers]
        self.random = RandomState.capture(devices, generators)

    def _observe_classes(self, closure: Any) -> None:
        """Notes the globals that methods name, and the attributes of the modules' classes."""
        named, known = [place for part in self.parts for place in part.named], set[type]()
        while named or closure.kinds.keys() - known:
            named += [place for kind in closure.kinds.keys() - known for place in method_globals(kind)]
            known |= closure.kinds.keys()
            outside = closure_of([], attributes=named)
            closure.slots += outside.slots
            closure.generators += outside.generators
            closure.own.extend(outside.given)
            closure.kinds |= outside.kinds
            named = []
        closure.own.places += [(c, name, vars(c).get(name)) for part in self.parts for c, name in part.constants]

    def _copy(self, key: BufferKey, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value before the run, of a buffer that is written and read, or not yet known not to be."""
        written = self.habits.get(key)
        # A torch normalisation layer in training writes its statistics and never reads them.
        if written is False or (written and key[3]):
            return None
        return tensor.detach().clone()

    @property
    def lazy(self) -> bool:
        """Whether the call is the first of a lazy module, which makes its parameters."""
        return any(part.lazy() for part in self.parts if part._lazy)

    def reachable(self) -> dict[int, torch.Tensor]:
        """The closed-over tensors that were found, by id."""
        found = {id(t): t for slot in (*self.slots, *self.installed) for t in tensors_in(slot[2])}
        return found | {id(buffer[3]): buffer[3] for buffer in self.buffers}

    def settings(self) -> tuple[Any, ...]:
        """What decides, besides tensors, what the function does: found in its closure, and set on its modules."""
        places = tuple(slot[1] for slot in (*self.slots, *self.installed, *self.buffers))
        return (tuple(self.facts), tuple(part.settings() for part in self.parts), places)

    def conditions(self, draws: bool | None = None) -> Conditions:
        """Returns the conditions of the run that has just ended, without what it turned out not to use.

        Args:
            draws: whether it drew random numbers, if that is known.
        """
        with unseen():
            return self._conditions(self.random.drawn() if draws is None else self.random.assumed(draws))

    def _conditions(self, random: RandomState) -> Conditions:
        slots = [slot for slot in self.slots if present(slot)]
        buffers = {id(unwrapped(buffer[3])) for buffer in self.buffers}
        for tensor, then in self.versions:
            if version(tensor) != then and id(tensor) not in buffers:
                raise MutationError(
                    "the rematerialised function changed a tensor that it closes over in place (shape "
                    f"{list(tensor.shape)}, {tensor.dtype}): its recompute would change it again. Return the new "
                    "value, or register the tensor as a buffer of a module."
                )
        held = [t for slot in slots for t in tensors_in(slot[2])] + [slot[2] for slot in self.installed]
        watched = [(t, version(t)) for t in map(unwrapped, held) if id(t) not in buffers]
        written: list[Written] = []
        for (buffers, name, key, tensor, before), copy in zip(self.buffers, self.copies, strict=True):
            # Batch normalisation writes without counting a version, so values are compared, where known.
            changed = (
                key[3]
                or self.habits.get(key, False)
                or buffers.get(name) is not tensor
                or version(unwrapped(tensor)) != before
                or (copy is not None and not torch.equal(copy, tensor))
            )
            unforeseen = changed and copy is None and not key[3]
            self.habits[key] = changed
            if changed:
                lost = _unforeseen(name) if unforeseen else ""
                written.append(Written(buffers, name, tensor, tensor if copy is None else copy, lost))
            else:
                self.installed.append((buffers, name, tensor))
                watched.append((unwrapped(tensor), before))
        own = self.state[0]
        assert isinstance(own, Snapshot)
        own.forget_changes()  # what the function itself puts elsewhere (a counter, a log) is left to it
        fn, slots = frozen(self.fn[0], slots)
        statistics = [t for t, _ in self.versions if may_be_statistics(t)]
        slots += self.installed
        return Conditions(
            fn, self.fn, self.statics, self.ambient, random, watched, written, slots, self.state, statistics
        )

    def undo(self) -> None:
        """Takes back what an aborted run did to generators and buffers."""
        self.random.rewind()
        with torch.no_grad():
            for (buffers, name, key, tensor, _), copy in zip(self.buffers, self.copies, strict=True):
                if copy is not None:
                    buffers[name] = tensor.copy_(copy)
                elif key[3]:
                    raise MutationError(
                        f"a rematerialised function used a reverse-mode transform of torch.func for the first time, "
                        f"after its buffer {name!r} had been written; it cannot start over. Call it again."
                    )


def _unforeseen(name: str) -> str:
    return (
        f"the rematerialised module wrote its buffer {name!r} in a call like one that had left it alone, "
        "so the value before this call was not kept. From now on it is: run forward and backward again."
    )


class Written(NamedTuple):
    """A buffer that a run wrote."""

    buffers: dict[str, Any]
    name: str
    tensor: torch.Tensor
    before: torch.Tensor
    """Its value before the run."""
    lost: str = ""
    """Why that value is not known, where it is needed; empty if it is known."""

    def stand_in(self) -> torch.Tensor:
        """Returns a copy of the value before the run, for a recompute to write into."""
        if self.lost:
            raise MutationError(self.lost)
        return copy_of(self.before, self.tensor)


class Again(NamedTuple):
    """What a recompute calls."""

    fn: Callable[..., Any]
    statics: Sequence[Any]
    """The static arguments."""
    scratch: frozenset[int]
    """The ids of what stands in for the buffers that the function writes."""


class Conditions:
    """What surrounded one run of a function: see the module's docstring."""

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
        """The function, with cells of its own."""
        self.root = next((slot[0] for slot in slots if slot[0] is root), None)
        """The list in which the function lay: a place like others where it holds tensors (is a method of one)."""
        self.statics = statics
        self.ambient = ambient_then
        self.random = random
        self.statistics = statistics
        """Closed-over tensors, those of modules apart, into which the function may write without a trace."""
        self.watched = watched
        """Closed-over tensors and their versions."""
        self.written = written
        """The buffers that the run wrote."""
        self.slots = slots
        """Where the run found other tensors: its cells and the like, parameters, the other buffers."""
        self.state = state
        """What else it found there."""

    def check(self) -> None:
        """Raises `MutationError` when a closed-over tensor has changed in place since the run."""
        with unseen():
            changed = [(t, then) for t, then in self.watched if version(t) != then]
        for tensor, then in changed:
            raise MutationError(
                f"a tensor that the rematerialised function closes over (shape {list(tensor.shape)}, "
                f"{tensor.dtype}) was changed in place between forward and backward (version {then} -> "
                f"{version(tensor)}): the recompute would see other values. Run backward before changing "
                "it (before optimizer.step(), say), or pass a copy as an argument."
            )

    @contextlib.contextmanager
    def restored(self, completed: Callable[[], bool], placing: Sequence[Slot] = ()) -> Iterator[Again]:
        """Puts the conditions back for a recompute, and the present ones after it.

        Args:
            completed: tells, after the body, whether the recompute ran to its end.
            placing: places in which the recompute is to find other tensors.

        Yields:
            The function and its static arguments, copied as far as they have to differ.
        """
        self.check()
        with unseen():
            changes, scratch = self._changes(placing)
            fn = next((value[0] for holder, _, value in changes if holder is self.root), self.fn)
            roots, left = [fn, *self.statics], []
            if changes:
                roots, left = shadow(roots, [slot for slot in changes if slot[0] is not self.root])
        with contextlib.ExitStack() as stack:
            if self.ambient != ambient.capture():
                stack.enter_context(ambient.restored(self.ambient))
            if self.random.states:
                stack.enter_context(self.random.replay(completed))
            if left:
                stack.enter_context(placed(left))
            yield Again(roots[0], roots[1:], scratch)

    def _changes(self, placing: Sequence[Slot]) -> tuple[list[Slot], frozenset[int]]:
        """Where a recompute must find something else than what lies there now, and the ids of scratch buffers."""
        # `functional_call` puts other tensors into a module for the time of a call, which may be over; the variable of
        # a loop has moved on; a flag has been switched.
        changes = [slot for slot in self.slots if not present(slot)]
        for state in self.state:
            changes += state.changes()
        stand_ins = [(buffer, buffer.stand_in()) for buffer in self.written]
        new = {id(buffer.tensor): t for buffer, t in stand_ins}  # wherever else they lie
        if self.statistics and not torch._C._are_functorch_transforms_active():
            # Within transforms, writing to a captured tensor is an error anyway.
            new |= {id(t): copy_of(t, t) for t in self.statistics if id(t) not in new}
        if new:
            pairs = [(slot, replaced(slot[2], new)) for slot in self.slots]
            changes += [(slot[0], slot[1], value) for slot, value in pairs if value is not slot[2]]
        changes += placing
        changes += [(buffer.buffers, buffer.name, t) for buffer, t in stand_ins]
        return changes, frozenset(id(t) for _, t in stand_ins)


def copy_of(tensor: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor's values, with the attributes that somebody has given to `live`."""
    return with_attributes(tensor.detach().clone(), live)


def with_attributes(new: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """Gives `new` the attributes that somebody has given to `live`, and returns it."""
    if vars(live):
        vars(new).update(vars(live))
    return new


def may_be_statistics(tensor: torch.Tensor) -> bool:
    """Whether batch normalisation could write into `tensor`, which it does without counting a version."""
    return tensor.dim() == 1 and not tensor.requires_grad and tensor.is_floating_point()
