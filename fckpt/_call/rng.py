"""Generator states: read at the call, reset for a recompute, and restored after it.

Every generator that a function may use implicitly is covered: torch's default generators (on the CPU and on the devices
in use), Python's `random`, `numpy.random`, and generator objects among the arguments or in the closure. The states of
generators that the function did not use are dropped at the end of the call, so a function without randomness stores and
replays nothing.
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

from fckpt._memory import collector_paused
from fckpt.errors import RandomStateError

__all__ = ["SHARED", "GeneratorState", "RandomState", "generator_types", "unshared"]


def _memory_of(value: object) -> bytes:
    """Returns the memory of a CPython object after its header, which changes whenever its C state does."""
    return ctypes.string_at(id(value) + _HEADER, type(value).__basicsize__ - _HEADER)


_HEADER = 2 * ctypes.sizeof(ctypes.c_void_p)  # reference count and type
_CPYTHON = sys.implementation.name == "cpython"


_reading = threading.RLock()


class GeneratorState:
    """The present state of a generator, held outside of torch's allocator, so that a budget does not count it.

    A state on the CPU is first held by a copy of the generator, because torch allocates a tensor (5 KB) to read it.

    torch holds the lock of the generator while it copies the state. If the garbage collector ran then, it could hand
    Python's lock to a thread that waits for the lock of the generator, and both threads would wait forever.
    """

    __slots__ = ("_copy", "_data")

    def __init__(self, generator: torch.Generator):
        self._copy: torch.Generator | None = None
        self._data = b""
        with _reading, collector_paused():
            if generator.device.type == "cpu":
                self._copy = generator.clone_state()
            else:
                self._data = _bytes_of(generator)

    def read(self) -> bytes:
        """Returns the state as bytes. The first time, torch allocates memory on the CPU for a moment."""
        copy = self._copy
        if copy is not None:
            with collector_paused():
                self._data, self._copy = _bytes_of(copy), None
        return self._data

    def set(self, generator: torch.Generator) -> None:
        """Sets a generator to this state."""
        generator.set_state(torch.frombuffer(bytearray(self.read()), dtype=torch.uint8))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GeneratorState) and self.read() == other.read()


def _bytes_of(generator: torch.Generator) -> bytes:
    state = generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


class _Torch:
    """A `torch.Generator`."""

    __slots__ = ("generator",)

    def __init__(self, generator: torch.Generator):
        self.generator = generator

    def get(self) -> GeneratorState:
        return GeneratorState(self.generator)

    def set(self, state: GeneratorState) -> None:
        state.set(self.generator)

    @staticmethod
    def same(a: GeneratorState, b: GeneratorState) -> bool:
        return a == b


class _Cached:
    """A generator whose state is slow to read (5 us for `random`, 30 us for `numpy.random`) and is read twice per call.

    Reading its raw memory takes less than 1 us and shows whether the state that was read last is still current.
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
        # The generator draws normal numbers in pairs, and stores the second one of a pair in a Python attribute.
        return (_memory_of(self.generator), self.generator.gauss_next) if self.readable else None  # type: ignore[attr-defined]  # without a stub

    def read(self) -> Any:
        return self.generator.getstate()

    def set(self, state: Any) -> None:
        self.generator.setstate(state[1])

    @staticmethod
    def same(a: Any, b: Any) -> bool:
        return a is b or a[1] == b[1]


class _NumpyGlobal(_Cached):
    """The global RandomState of `numpy.random`: the words and the position of its Mersenne twister, and the object."""

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
_PYTHON = _Python(random.random.__self__)
_numpy_global: _NumpyGlobal | None = None


def generator_types() -> tuple[type, ...]:
    """Returns the types of generators that `RandomState.capture` accepts; NumPy's types only if NumPy is imported."""
    numpy = _numpy_random()
    return _GENERATOR_TYPES if numpy is None else (*_GENERATOR_TYPES, numpy.Generator, numpy.RandomState)


def _numpy_random() -> Any:
    """Returns `numpy.random` if it is completely imported (another thread may be importing it), else None."""
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
    """Counts how often generators were reset for a replay: by this thread, and by all threads."""

    total = 0
    running = 0
    lock = threading.Lock()

    def __init__(self) -> None:
        self.own = 0
        self.own_running = 0
        self.alone = False
        """Whether no other thread uses the same generators while this thread runs."""

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
        """Returns how often other threads have reset generators; -1 while another thread replays."""
        if self.alone:
            return 0
        with _Rewinds.lock:
            return -1 if _Rewinds.running != self.own_running else _Rewinds.total - self.own


_rewinds = _Rewinds()


def _threaded() -> bool:
    """Whether other threads may draw from the same generators at the same time."""
    return threading.active_count() > 1 and not _rewinds.alone


@contextlib.contextmanager
def unshared() -> Iterator[None]:
    """Declares that no other thread draws from the same generators in the body, because each thread has separate
    generators.
    """
    before, _rewinds.alone = _rewinds.alone, True
    try:
        yield
    finally:
        _rewinds.alone = before


# Replays of several threads wait for one another, but not forever, because a function may itself wait for a thread.
_exclusive = threading.RLock()
_PATIENCE = 10.0  # seconds


class RandomState:
    """The generator states at one call: `capture` before the call, `drawn` after it, `replay` around each recompute.

    All threads of a process share the generators. If other threads run, draws of other threads are detected by
    comparing final generator states, and replays in other threads by a counter.
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
        """(source, state before the call, state after it) of each generator."""
        self.threaded = threaded
        """Whether other threads may draw from the same generators."""
        self.disturbed = disturbed
        """Whether another thread replayed during the call, so that the states read around this call are meaningless."""
        self.others = others

    @staticmethod
    def capture(devices: Iterable[torch.device] = (), generators: Iterable[Any] = ()) -> RandomState:
        """Reads the states of the CPU and global generators, of the default generators of `devices`, and of
        `generators`.
        """
        others = _rewinds.others()  # read before the states, so that a replay in between is detected
        sources = _global_sources(devices)
        sources += [_source(g) for g in generators]
        return RandomState([(s, s.get(), None) for s in sources], others)

    def drawn(self) -> RandomState:
        """Returns the states of the generators that were used since `capture`."""
        states = []
        for source, before, _ in self.states:
            after = source.get()
            if not source.same(before, after):
                states.append((source, before, after))
        if self.others < 0 or self.others != _rewinds.others():  # read after the states, for the same reason
            return RandomState(self.states, threaded=True, disturbed=True)
        return RandomState(states, threaded=bool(states) and _threaded())

    def moved(self) -> bool:
        """Whether any of the generators was used since `capture`."""
        return any(not source.same(before, source.get()) for source, before, _ in self.states)

    def assumed(self, drawn: bool) -> RandomState:
        """Returns what `drawn` would return for torch's generators, given whether the call draws.

        Reading their states would allocate memory that a plan counts.
        """
        states = [state for state in self.states if isinstance(state[0], _Torch)] if drawn else []
        return RandomState(states)

    def rewind(self) -> None:
        """Resets every generator to its state before the call, permanently."""
        for source, before, _ in self.states:
            source.set(before)

    @contextlib.contextmanager
    def replay(self, completed: Callable[[], bool]) -> Iterator[None]:
        """Runs the body with the states before the call, then restores the present states.

        Args:
            completed: called after the body; returns whether the body ran to its end, rather than being stopped early.

        Raises:
            RandomStateError: the body may have drawn other numbers than the call, because another thread uses the same
                generator. This is checked only for a body that ran to its end.
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
            # If the generator is at its start state, the body drew nothing from it, and another thread moved it during
            # the call.
            if not source.same(now, after) and not source.same(now, before):
                raise RandomStateError(SHARED)


SHARED = (
    "another thread drew from the same random generator while a rematerialised function ran, so the function's random "
    "numbers cannot be drawn again and its gradient would be wrong. All threads of a process share torch's default CPU "
    "generator: run such steps in separate processes, or draw the random tensors outside of `remat` and pass them as "
    "arguments."
)
