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

__all__ = ["GENERATOR_TYPES", "RandomState", "generator_types"]


class _Torch:
    """A `torch.Generator`."""

    __slots__ = ("generator",)

    def __init__(self, generator: torch.Generator):
        self.generator = generator

    def get(self) -> Any:
        return self.generator.get_state()

    def set(self, state: Any) -> None:
        self.generator.set_state(state)

    @staticmethod
    def same(a: Any, b: Any) -> bool:
        return bool(torch.equal(a, b))


class _Python:
    """A `random.Random`."""

    __slots__ = ("generator",)

    def __init__(self, generator: random.Random):
        self.generator = generator

    def get(self) -> Any:
        return self.generator.getstate()

    def set(self, state: Any) -> None:
        self.generator.setstate(state)

    @staticmethod
    def same(a: Any, b: Any) -> bool:
        # The position within the block of 624 words moves with every draw; a whole new block changes its
        # words. Comparing all of them would cost more than the rest of the capture.
        return a[1][-1] == b[1][-1] and a[1][:2] == b[1][:2] and a[2] == b[2]


class _NumpyGlobal:
    """`numpy.random`'s global RandomState.

    Reading its state costs 30 us, twice a call. Its raw memory (the Mersenne twister's 624 words and
    position, and the object itself, which holds the second half of the last normal pair) is read in under
    1 us and tells whether the state last read is still true.
    """

    _HEADER = 2 * ctypes.sizeof(ctypes.c_void_p)  # reference count and type of the Python object
    _TWISTER = 625 * 4

    def __init__(self, numpy: Any):
        self.numpy = numpy
        self.rand = numpy.random.mtrand._rand
        self.bits = self.rand._bit_generator
        readable = type(self.bits).__name__ == "MT19937" and sys.implementation.name == "cpython"
        self.address = self.bits.ctypes.state_address if readable else None
        self.last: tuple[bytes, Any] = (b"", None)

    def get(self) -> Any:
        if self.address is None:
            return b"", self.numpy.random.get_state()
        size = type(self.rand).__basicsize__ - self._HEADER
        raw = ctypes.string_at(self.address, self._TWISTER)
        raw += ctypes.string_at(id(self.rand) + self._HEADER, size)
        if raw != self.last[0]:
            self.last = (raw, self.numpy.random.get_state())
        return self.last

    def set(self, state: Any) -> None:
        self.numpy.random.set_state(state[1])

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


GENERATOR_TYPES: tuple[type, ...] = (torch.Generator, random.Random)
_CPU = _Torch(torch.default_generator)
_PYTHON = _Python(random.random.__self__)  # type: ignore[attr-defined]
_numpy_global: _NumpyGlobal | None = None


def generator_types() -> tuple[type, ...]:
    """The types whose instances `RandomState.capture` accepts (NumPy's once NumPy is imported)."""
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return GENERATOR_TYPES
    return (*GENERATOR_TYPES, numpy.Generator, numpy.RandomState)


def _source(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return _Torch(generator)
    return _Python(generator) if isinstance(generator, random.Random) else _NumpyGenerator(generator)


def _global_sources(devices: Iterable[torch.device]) -> list[Any]:
    global _numpy_global
    sources: list[Any] = [_CPU, _PYTHON]
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        if _numpy_global is None or _numpy_global.bits is not numpy.random.mtrand._rand._bit_generator:
            _numpy_global = _NumpyGlobal(numpy)
        sources.append(_numpy_global)
    for device in devices:
        module = torch.get_device_module(device)
        generators = getattr(module, "default_generators", None)
        if generators:
            index = device.index if device.index is not None else module.current_device()
            sources.append(_Torch(generators[index]))
    return sources


class RandomState:
    """The generator states at one call: `capture` before it, `drawn` after it, `replay` around reruns."""

    __slots__ = ("states", "threaded")

    def __init__(self, states: list[tuple[Any, Any, Any]], threaded: bool = False):
        self.states = states
        """(source, state before, state after) of each source."""
        self.threaded = threaded
        """Whether other threads may draw from the same sources."""

    @staticmethod
    def capture(devices: Iterable[torch.device] = (), generators: Iterable[Any] = ()) -> RandomState:
        """Reads the states; `devices` besides the CPU, `generators` besides the global ones."""
        sources = _global_sources(devices)
        sources += [_source(g) for g in generators]
        return RandomState([(s, s.get(), None) for s in sources])

    def drawn(self) -> RandomState:
        """Returns the part of this state that was drawn from since `capture`."""
        states = []
        for source, before, _ in self.states:
            after = source.get()
            if not source.same(before, after):
                states.append((source, before, after))
        return RandomState(states, bool(states) and threading.active_count() > 1)

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
            RandomStateError: the body ran to its end and drew something else than the call did, which
                happens when another thread draws from the same generator meanwhile.
        """
        present = [(source, source.get()) for source, _, _ in self.states]
        self.rewind()
        try:
            yield
            if self.threaded and completed():
                self._verify()
        finally:
            for source, state in present:
                source.set(state)

    def _verify(self) -> None:
        if all(source.same(source.get(), after) for source, _, after in self.states):
            return
        raise RandomStateError(
            "another thread drew from the same random generator while a rematerialised function ran, so its "
            "random numbers cannot be drawn again and its gradient would be wrong. torch's default CPU "
            "generator is shared by all threads of a process: run such steps in processes of their own, or "
            "draw the random tensors outside of `remat` and pass them as arguments."
        )
