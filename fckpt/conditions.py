"""The conditions of a call: all that decides what a function computes, besides its arguments.

Random generators, autocast and determinism settings, the buffers of modules, and the closed-over tensors.
They are observed around the forward run and put back around each recompute, so that the recompute sees what
the forward saw and leaves no trace: generators end, and buffers stand, where the plain function leaves them.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from fckpt import ambient
from fckpt.closure import PLAIN, Slot, closure_of, fact, frozen, placed, present, tensors_in
from fckpt.errors import MutationError
from fckpt.rng import RandomState, generator_types

__all__ = ["BufferHabits", "Conditions", "Observation", "may_be_statistics", "unseen", "unwrapped", "version"]

# Reading an attribute of a tensor, too, calls the torch function modes in force: those of an enclosing region, which
# notes or refuses it. What fckpt does to tensors itself is none of their business.
unseen = torch._C.DisableTorchFunction

BufferKey = tuple[int, str, bool, bool]
BufferHabits = dict[BufferKey, bool]
"""Which buffers a function was seen to write: (id of the buffers dict, name, training, is statistics)."""


def version(tensor: torch.Tensor) -> int:
    """How often `tensor` was changed in place (0 where torch does not count: inference tensors)."""
    return 0 if tensor.is_inference() else tensor._version


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without the wrappers of torch.func: in-place work always shows in the version of this one."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


class _ModuleParts:
    """The dicts that hold a module tree's buffers and parameters, found once: the walk costs 1 us a module."""

    __slots__ = (
        "_buffers", "_children", "_hooks", "_names", "_owners", "_settings", "_sizes", "_structure", "_types",
        "_values", "generators", "modules", "open", "parameters",
    )  # fmt: skip

    def __init__(self, module: nn.Module):
        kinds = generator_types()
        modules = self.modules = [vars(m) for m in module.modules()]
        self._types = tuple(type(m) for m in module.modules())
        self._buffers = [(m, m._buffers) for m in module.modules() if m._buffers]
        self.parameters = [m["_parameters"] for m in modules if m["_parameters"]]
        self.generators = [v for m in modules for v in m.values() if isinstance(v, kinds)]
        own = [(m, k, v) for m in modules for k, v in m.items() if k not in _INTERNAL]
        self.open = [(m, k) for m, k, v in own if not _is_closed(v)]
        """Attributes that may hold tensors and modules."""
        # All others hold a rate, a stride, an activation. They are read and compared at every call, by identity and
        # without a line of Python for each: there are thousands.
        closed = [(m, k) for m, k, v in own if _is_closed(v)]
        closed += [(m, k) for m in modules for k in ("training", *_HOOKS)]
        self._owners = [m for m, _ in closed]
        self._names = [k for _, k in closed]
        self._hooks = [m[k] for m in modules for k in _HOOKS]
        self._children = [m["_modules"] for m in modules]
        self._sizes = [*modules, *self._children]
        self._structure = self._read_structure()
        self._values = self._read()
        self._settings: _Settings | None = None

    def valid(self) -> bool:
        """Whether the tree still has the same modules, and attributes that hold tensors in the same places."""
        if self._structure != self._read_structure():
            return False
        values = self._read()
        if not all(map(operator.is_, values, self._values)):
            changed = [v for v, then in zip(values, self._values, strict=True) if v is not then]
            if not all(map(_is_closed, changed)):
                return False
            self._values, self._settings = values, None
        return True

    def _read(self) -> list[Any]:
        return list(map(dict.get, self._owners, self._names))

    def _read_structure(self) -> tuple[list[int], list[Any], list[str]]:
        children = itertools.chain.from_iterable(map(dict.values, self._children))
        return list(map(len, self._sizes)), list(children), [k for _, buffers in self._buffers for k in buffers]

    def settings(self) -> _Settings:
        """What decides, besides tensors, what the modules do: their classes, attributes and hooks."""
        if self._settings is None:
            self._settings = _Settings((self._types, tuple(self._names), tuple(map(fact, self._values))))
        if not any(self._hooks):
            return self._settings
        return _Settings((self._settings, *((i, *d) for i, d in enumerate(self._hooks) if d)))

    def buffers(self) -> list[tuple[dict[str, Any], str, BufferKey, torch.Tensor, int]]:
        """The buffers: (dict, name, key, tensor, its version)."""
        return [
            (buffers, name, (id(buffers), name, owner.training, norm), tensor, version(unwrapped(tensor)))
            for owner, buffers in self._buffers
            for norm in (_is_norm(owner),)
            for name, tensor in buffers.items()
            if tensor is not None
        ]


class _Settings:
    """Facts by the thousand, hashed once."""

    __slots__ = ("facts", "hash")

    def __init__(self, facts: tuple[Any, ...]):
        self.facts = facts
        self.hash = hash(facts)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Settings) and self.facts == other.facts)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


_parts: weakref.WeakKeyDictionary[nn.Module, _ModuleParts] = weakref.WeakKeyDictionary()


def _parts_of(module: nn.Module) -> _ModuleParts:
    parts = _parts.get(module)
    if parts is None or not parts.valid():
        parts = _parts[module] = _ModuleParts(module)
    return parts


class Observation:
    """What is read right before a function runs; `conditions` completes it right after."""

    __slots__ = (
        "ambient",
        "buffers",
        "containers",
        "copies",
        "facts",
        "fn",
        "habits",
        "installed",
        "modules",
        "parts",
        "random",
        "slots",
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
        closure = closure_of(fn, statics, facts=facts)
        parts = self.parts = [_parts_of(module) for module in closure.modules]
        self.containers = closure.containers
        attributes = [(m, k) for part in parts for m, k in part.open]
        if attributes:
            further = closure_of([], attributes=attributes, facts=facts)
            closure.slots += further.slots
            closure.generators += further.generators
            self.containers += further.containers
            parts += [_parts_of(module) for module in further.modules]
        generators = closure.generators + [g for part in parts for g in part.generators]
        self.modules = [(m, m["training"]) for part in parts for m in part.modules]
        self.slots: list[Slot] = closure.slots
        """Where tensors lie that the function closes over, those in modules apart."""
        self.installed: list[Slot] = [
            (parameters, name, p)
            for part in parts
            for parameters in part.parameters
            for name, p in parameters.items()
            if p is not None
        ]
        held = [t for slot in self.slots for t in tensors_in(slot[2])]
        self.versions = [(t, version(t)) for t in map(unwrapped, held)]
        tensors = (*inputs, *held, *[slot[2] for slot in self.installed])
        devices = {device for device in {t.device for t in tensors} if device.type not in ("cpu", "meta")}
        self.habits = habits
        self.buffers = [buffer for part in parts for buffer in part.buffers()]
        self.copies = [self._copy(buffer[2], buffer[3]) for buffer in self.buffers]
        self.random = RandomState.capture(devices, generators)

    def _copy(self, key: BufferKey, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value before the run, of a buffer that is written and read, or not yet known not to be."""
        written = self.habits.get(key)
        # A torch normalisation layer in training writes its statistics and never reads them.
        if written is False or (written and key[3]):
            return None
        return tensor.detach().clone()

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
        # What the function itself puts elsewhere (a counter, a log) is left to it.
        slots = [slot for slot in self.slots if present(slot)]
        for tensor, then in self.versions:
            if version(tensor) != then:
                raise MutationError(
                    "the rematerialised function changed a tensor that it closes over in place (shape "
                    f"{list(tensor.shape)}, {tensor.dtype}): its recompute would change it again. Return the new "
                    "value, or register the tensor as a buffer of a module."
                )
        held = [t for slot in slots for t in tensors_in(slot[2])] + [slot[2] for slot in self.installed]
        watched = [(t, version(t)) for t in map(unwrapped, held)]
        written = []
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
                written.append((buffers, name, tensor if copy is None else copy, unforeseen))
            else:
                self.installed.append((buffers, name, tensor))
                watched.append((unwrapped(tensor), before))
        fn, slots = frozen(self.fn[0], slots)
        slots += self.installed
        return Conditions(fn, self.ambient, random, watched, written, slots, self.modules)

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


class Conditions:
    """What surrounded one run of a function: see the module's docstring."""

    __slots__ = (
        "ambient", "fn", "modules", "random", "scratch", "slots", "statistics", "watched", "written",
    )  # fmt: skip

    def __init__(
        self,
        fn: Callable[..., Any],
        ambient_then: ambient.Ambient,
        random: RandomState,
        watched: list[tuple[torch.Tensor, int]],
        written: list[tuple[dict[str, Any], str, torch.Tensor, bool]],
        slots: list[Slot],
        modules: list[tuple[dict[str, Any], bool]],
    ):
        self.fn = fn
        """The function, with cells of its own."""
        self.ambient = ambient_then
        self.random = random
        self.statistics = [t for t, _ in watched if may_be_statistics(t)]
        self.watched = watched
        """Closed-over tensors and their versions."""
        self.scratch: set[int] = set()
        """The ids of what stands in for the written buffers during a recompute."""
        self.written = written
        """Buffers that the run wrote: (dict, name, value before, whether that is not known though needed)."""
        self.slots = slots
        """Where the run found other tensors: its cells and the like, parameters, the other buffers."""
        self.modules = modules
        """The modules' attributes, and whether they were training."""

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

    def restored(self, completed: Callable[[], bool]) -> contextlib.AbstractContextManager[None]:
        """Puts the conditions back for a recompute, and the present ones after it.

        Args:
            completed: tells, after the body, whether the recompute ran to its end.
        """
        self.check()
        # `functional_call` puts other tensors into a module for the time of a call, which may be over; and the
        # variable of a loop has moved on.
        moved = [slot for slot in self.slots if not present(slot)]
        flipped = [(m, training) for m, training in self.modules if m["training"] is not training]
        elsewhere = self.ambient != ambient.capture()
        if not (self.random.states or self.written or self.statistics or moved or flipped or elsewhere):
            return _NOTHING
        return self._restored(completed, moved, flipped, elsewhere)

    @contextlib.contextmanager
    def _restored(
        self, completed: Callable[[], bool], moved: list[Any], flipped: list[Any], elsewhere: bool
    ) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if elsewhere:
                stack.enter_context(ambient.restored(self.ambient))
            if self.random.states:
                stack.enter_context(self.random.replay(completed))
            if flipped:
                stack.enter_context(placed([(m, "training", training) for m, training in flipped]))
            if moved:
                stack.enter_context(placed(moved))
            if self.written:
                stack.enter_context(self._scratch_buffers())
            if self.statistics and not torch._C._are_functorch_transforms_active():
                # Within transforms, writing to a captured tensor is an error anyway.
                stack.enter_context(self._unwritten(self.statistics))
            yield

    @contextlib.contextmanager
    def _scratch_buffers(self) -> Iterator[None]:
        for _, name, _, unforeseen in self.written:
            if unforeseen:
                raise MutationError(
                    f"the rematerialised module wrote its buffer {name!r} in a call like one that had left it alone, "
                    "so the value before this call was not kept. From now on it is: run forward and backward again."
                )
        stand_ins = [(buffers, name, value.detach().clone()) for buffers, name, value, _ in self.written]
        self.scratch.update(id(t) for _, _, t in stand_ins)
        try:
            with placed(stand_ins):
                yield
        finally:
            self.scratch.clear()

    @contextlib.contextmanager
    def _unwritten(self, tensors: list[torch.Tensor]) -> Iterator[None]:
        values = [t.detach().clone() for t in tensors]
        try:
            yield
        finally:
            for tensor, value in zip(tensors, values, strict=True):
                tensor.data.copy_(value)  # .data: no new version


def may_be_statistics(tensor: torch.Tensor) -> bool:
    """Whether batch normalisation could write into `tensor`, which it does without counting a version."""
    return tensor.dim() == 1 and not tensor.requires_grad and tensor.is_floating_point()


def _is_norm(module: nn.Module) -> bool:
    """Whether `module` now writes statistics that its forward does not read."""
    return module.training and type(module).forward in _NORM_FORWARDS and bool(module.track_running_stats)


_NORM_FORWARDS = {
    nn.modules.batchnorm._BatchNorm.forward,
    nn.modules.instancenorm._InstanceNorm.forward,
    nn.SyncBatchNorm.forward,
}


def _is_closed(value: Any) -> bool:
    """Whether `value` holds no tensor, and cannot."""
    if type(value) is tuple:
        return len(value) < 20 and all(map(_is_closed, value))
    if type(value) is types.FunctionType:
        return not value.__closure__
    return type(value) in PLAIN or isinstance(value, (torch.dtype, torch.device, type, types.BuiltinFunctionType))


_INTERNAL = frozenset(vars(nn.Module()))
_NOTHING = contextlib.nullcontext()
