"""Generator states: captured when a function is called, put back while it runs again, restored after.

Everything that a function may draw from without saying so is covered: torch's default generators (CPU
and the devices in use), Python's `random` and `numpy.random`, and the generator objects that the function
was handed or closes over. What was not drawn from is dropped when the call ends, so that functions
without randomness keep nothing and replay nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from fckpt.errors import RandomStateError

__all__ = ["SHARED", "RandomState", "generator_types", "set_state", "state_of", "unshared"]


def _memory_of(value: object) -> bytes:
    """The raw memory of a CPython object behind its header: changes whenever its C state does."""
    return ctypes.string_at(id(value) + _HEADER, type(value).__basicsize__ - _HEADER)


_HEADER = 2 * ctypes.sizeof(ctypes.c_void_p)  # reference count and type
_CPYTHON = sys.implementation.name == "cpython"


def state_of(generator: torch.Generator) -> bytes:
    """Reads a generator's state into memory that is not torch's, so that no budget has to count it."""
    state = generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


def set_state(generator: torch.Generator, state: bytes) -> None:
    """Sets a generator to what `state_of` read."""
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class _Torch:
    """A `torch.Generator`."""

    __slots__ = ("generator",)

    def __init__(self, generator: torch.Generator):
        self.generator = generator

    def get(self) -> bytes:
        return state_of(self.generator)

    def set(self, state: bytes) -> None:
        set_state(self.generator, state)

    @staticmethod
    def same(a: bytes, b: bytes) -> bool:
        return a == b


class _Cached:
    """A generator whose state takes long to read (5 us `random`, 30 us `numpy.random`), twice a call.

    Its raw memory is read in under 1 us and tells whether the state that was read last is still true.
    """

    def __init__(self) -> None:
        self.last: tuple[Any, Any] = (None, None)

    def raw(self) -> Any:
        raise NotImplementedError

    def read(self) -> Any:
        raise NotImplementedError

    def get(self) -> Any:
        raw = self.raw()
        if raw is None or raw != self.last[0]:
            self.last = (raw, self.read())
        return self.last


class _Python(_Cached):
    """A `random.Random`."""

    def __init__(self, generator: random.Random):
        super().__init__()
        self.generator = generator
        self.readable = _CPYTHON and type(generator) is random.Random

    def raw(self) -> Any:
        # The second half of the last normal pair is a Python attribute.
        return (_memory_of(self.generator), self.generator.gauss_next) if self.readable else None  # type: ignore[attr-defined]

    def read(self) -> Any:
        return self.generator.getstate()

    def set(self, state: Any) -> None:
        self.generator.setstate(state[1])

    @staticmethod
    def same(a: Any, b: Any) -> bool:
        return a is b or a[1] == b[1]


class _NumpyGlobal(_Cached):
    """`numpy.random`'s global RandomState: the Mersenne twister's words and position, and the object itself."""

    _TWISTER = 625 * 4

    def __init__(self, numpy: Any):
        super().__init__()
        self.numpy = numpy
        self.rand = numpy.mtrand._rand
        self.bits = self.rand._bit_generator
        readable = _CPYTHON and type(self.bits).__name__ == "MT19937"
        self.address = self.bits.ctypes.state_address if readable else None

    def raw(self) -> Any:
        if self.address is None:
            return None
        return ctypes.string_at(self.address, self._TWISTER), _memory_of(self.rand)

    def read(self) -> Any:
        return self.numpy.get_state()

    def set(self, state: Any) -> None:
        self.numpy.set_state(state[1])

    @staticmethod
    def same(a: Any, b: Any) -> bool:
        return a is b or (a[1][2:] == b[1][2:] and bool((a[1][1] == b[1][1]).all()))


class _NumpyGenerator:
    """A `numpy.random.Generator` or `RandomState` object."""

    __slots__ = ("bits",)

    def __init__(self, generator: Any):
        self.bits = getattr(generator, "bit_generator", None) or generator._bit_generator

    def get(self) -> Any:
        return self.bits.state

    def set(self, state: Any) -> None:
        self.bits.state = state

    @staticmethod
    def same(a: Any, b: Any) -> bool:
        return repr(a) == repr(b)


_GENERATOR_TYPES: tuple[type, ...] = (torch.Generator, random.Random)
_CPU = _Torch(torch.default_generator)
_PYTHON = _Python(random.random.__self__)  # type: ignore[attr-defined]
_numpy_global: _NumpyGlobal | None = None


def generator_types() -> tuple[type, ...]:
    """The types whose instances `RandomState.capture` accepts (NumPy's once NumPy is imported)."""
    numpy = _numpy_random()
    return _GENERATOR_TYPES if numpy is None else (*_GENERATOR_TYPES, numpy.Generator, numpy.RandomState)


def _numpy_random() -> Any:
    """`numpy.random`, if somebody has imported it (to the end: another thread may be at it)."""
    numpy = sys.modules.get("numpy.random")
    return numpy if numpy is not None and hasattr(numpy, "RandomState") and hasattr(numpy, "Generator") else None


def _source(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return _Torch(generator)
    return _Python(generator) if isinstance(generator, random.Random) else _NumpyGenerator(generator)


def _global_sources(devices: Iterable[torch.device]) -> list[Any]:
    global _numpy_global
    sources: list[Any] = [_CPU, _PYTHON]
    numpy = _numpy_random()
    if numpy is not None:
        if _numpy_global is None or _numpy_global.bits is not numpy.mtrand._rand._bit_generator:
            _numpy_global = _NumpyGlobal(numpy)
        sources.append(_numpy_global)
    for device in devices:
        module = torch.get_device_module(device)
        generators = getattr(module, "default_generators", None)
        if generators:
            index = device.index if device.index is not None else module.current_device()
            sources.append(_Torch(generators[index]))
    return sources


class _Rewinds(threading.local):
    """How often this thread has set generators back; beside it, how often all threads have."""

    total = 0
    running = 0
    lock = threading.Lock()

    def __init__(self) -> None:
        self.own = 0
        self.own_running = 0
        self.alone = False
        """Whether no other thread draws while this one runs."""

    def begin(self) -> None:
        with _Rewinds.lock:
            _Rewinds.total += 1
            _Rewinds.running += 1
        self.own += 1
        self.own_running += 1

    def end(self) -> None:
        with _Rewinds.lock:
            _Rewinds.running -= 1
        self.own_running -= 1

    def others(self) -> int:
        """A number that changes when another thread sets generators back; -1 while one has them set back."""
        if self.alone:
            return 0
        with _Rewinds.lock:
            return -1 if _Rewinds.running != self.own_running else _Rewinds.total - self.own


_rewinds = _Rewinds()


def _threaded() -> bool:
    """Whether other threads may draw meanwhile."""
    return threading.active_count() > 1 and not _rewinds.alone


@contextlib.contextmanager
def unshared() -> Iterator[None]:
    """Tells that in the body no other thread draws: that somebody sees to it that generators are each thread's own."""
    before, _rewinds.alone = _rewinds.alone, True
    try:
        yield
    finally:
        _rewinds.alone = before


# Replays of several threads wait for each other; not for ever, because a function may itself wait for a thread.
_exclusive = threading.RLock()
_PATIENCE = 10.0  # seconds


class RandomState:
    """The generator states at one call: `capture` before it, `drawn` after it, `replay` around reruns.

    Generators are shared by all threads of a process. Where several threads run, draws of others are noticed
    by where the generators end; that others have set them back meanwhile (for a replay of theirs), by a count.
    """

    __slots__ = ("disturbed", "others", "states", "threaded")

    def __init__(
        self,
        states: list[tuple[Any, Any, Any]],
        others: int = 0,
        threaded: bool = False,
        disturbed: bool = False,
    ):
        self.states = states
        """(source, state before, state after) of each source."""
        self.threaded = threaded
        """Whether other threads may draw from the same sources."""
        self.disturbed = disturbed
        """Whether another thread replayed during the call, so that its states tell nothing."""
        self.others = others

    @staticmethod
    def capture(devices: Iterable[torch.device] = (), generators: Iterable[Any] = ()) -> RandomState:
        """Reads the states; `devices` besides the CPU, `generators` besides the global ones."""
        others = _rewinds.others()  # before the states: what happens in between must show
        sources = _global_sources(devices)
        sources += [_source(g) for g in generators]
        return RandomState([(s, s.get(), None) for s in sources], others)

    def drawn(self) -> RandomState:
        """Returns the part of this state that was drawn from since `capture`."""
        states = []
        for source, before, _ in self.states:
            after = source.get()
            if not source.same(before, after):
                states.append((source, before, after))
        if self.others < 0 or self.others != _rewinds.others():  # after the states, likewise
            return RandomState(self.states, threaded=True, disturbed=True)
        return RandomState(states, threaded=bool(states) and _threaded())

    def moved(self) -> bool:
        """Whether anybody has drawn since `capture`."""
        return any(not source.same(before, source.get()) for source, before, _ in self.states)

    def assumed(self, drawn: bool) -> RandomState:
        """The same, known beforehand for the generators of torch: reading them takes memory that a plan counts."""
        states = [state for state in self.states if isinstance(state[0], _Torch)] if drawn else []
        return RandomState(states)

    def rewind(self) -> None:
        """Sets every source back to its state before the call, for good."""
        for source, before, _ in self.states:
            source.set(before)

    @contextlib.contextmanager
    def replay(self, completed: Callable[[], bool]) -> Iterator[None]:
        """Runs the body on the states before the call, then puts the present states back.

        Args:
            completed: tells, after the body, whether it ran to its end (and was not stopped early).

        Raises:
            RandomStateError: the body draws, and not surely what the call drew, because another thread uses
                the same generator. Only a body that ran to its end can be judged.
        """
        locked = _threaded() and _exclusive.acquire(timeout=_PATIENCE)
        others = _rewinds.others()
        present = [(source, source.get()) for source, _, _ in self.states]
        try:
            if self.disturbed:
                yield
                self._verify([(source, state, state) for source, state in present], others)
                return
            _rewinds.begin()
            self.rewind()
            try:
                yield
                if self.threaded and completed():
                    self._verify(self.states, others)
            finally:
                for source, state in present:
                    source.set(state)
                _rewinds.end()
        finally:
            if locked:
                _exclusive.release()

    @staticmethod
    def _verify(states: list[tuple[Any, Any, Any]], others: int) -> None:
        ends = [source.get() for source, _, _ in states]
        if others < 0 or others != _rewinds.others():
            raise RandomStateError(SHARED)
        for now, (source, before, after) in zip(ends, states, strict=True):
            # Where it began, it drew nothing, and what moved the generator in the call was somebody else.
            if not source.same(now, after) and not source.same(now, before):
                raise RandomStateError(SHARED)


SHARED = (
    "another thread drew from the same random generator while a rematerialised function ran, so its random "
    "numbers cannot be drawn again and its gradient would be wrong. torch's default CPU generator is shared by "
    "all threads of a process: run such steps in processes of their own, or draw the random tensors outside of "
    "`remat` and pass them as arguments."
)
