"""The programs for one signature of calls, and which backward pass to expect before one has run."""

from __future__ import annotations

from collections.abc import Callable

from fckpt._planned.program import Program
from fckpt._planned.tracing import TRACING
from fckpt._trace.operations import Backward, Observed

__all__ = ["Experience", "Programs"]

_MOST_BACKWARD = 32  # backward passes per signature: with other outputs, or other strides of cotangents
_MOST_OBSERVED = 8  # kinds of results per function


class Experience:
    """The latest backward passes of a function that were not the likely ones; calls with a new signature expect them.

    Without it, a function that is not differentiated for its loss, and meets new sizes or numbers at each step, would
    be planned for the wrong outputs at each step.
    """

    def __init__(self) -> None:
        self._observed: dict[tuple[bool, ...], Observed] = {}

    def likely(self) -> Backward:
        """Returns the backward pass to expect of a new signature."""
        return Backward(observed=tuple(self._observed.values()))

    def add(self, program: Program) -> None:
        """Notes a backward pass that runs, by its program."""
        trace = program.trace
        shapes = tuple([trace.tensors[t].shape for t in trace.outputs])
        known = {flags: seen for flags, seen in self._observed.items() if flags != trace.flags}
        latest = Observed(trace.flags, shapes, program.backward)
        self._observed = dict([(trace.flags, latest), *known.items()][:_MOST_OBSERVED])


class Programs:
    """The planned programs for one signature of calls, one for each kind of backward pass."""

    def __init__(
        self, make: Callable[[Backward], Program], improved: Callable[[Program], Program], experience: Experience
    ):
        """Prepares to make programs.

        Args:
            make: returns a program for a kind of backward pass.
            improved: returns the program that replaces a program, or the same program. It is called at each call.
            experience: what calls with other signatures have shown.
        """
        self._make = make
        self._improved = improved
        self._experience = experience
        self._last: Program | None = None
        self._made: dict[Backward, Program] = {}
        self._has_seen = self._varies = False

    @property
    def certain(self) -> bool:
        """Whether a backward pass has run, and all backward passes after the first one were like it."""
        return self._has_seen and not self._varies

    def seen(self) -> None:
        """Notes that a backward pass has run."""
        self._has_seen = True

    def likely(self) -> Program:
        """Returns the program for the latest backward pass or, before the first one, for the likely backward pass."""
        if self._last is None:
            with TRACING:
                if self._last is None:
                    made = self._make(self._experience.likely())
                    self._made[made.backward] = self._last = made
                    return made
        last = self._last  # another thread may replace it now
        better = self._improved(last)
        if better is not last:
            self._made[better.backward] = self._last = better
        return better

    def differentiating(self, backward: Backward) -> Program:
        """Returns the program for a backward pass, and makes it the likely program from now on."""
        for ignored in ({"wrapped": None}, {"stored": None}, {"wrapped": None, "stored": None}):
            either = backward._replace(**ignored)  # for a program that does not depend on it
            if backward not in self._made and either in self._made:
                backward = either
        if backward not in self._made:
            with TRACING:
                if backward not in self._made:
                    while len(self._made) >= _MOST_BACKWARD:
                        del self._made[next(iter(self._made))]
                    self._made[backward] = self._make(backward)
        self._varies = self._varies or self._has_seen
        self._last = self._made[backward]
        self._experience.add(self._last)
        return self._last
