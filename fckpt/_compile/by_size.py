"""A function that was compiled for symbolic sizes, under a budget that is checked whenever it may be exceeded.

When torch meets a second size, it compiles the function once for all sizes, and does not ask its backend again. The
peak that was measured for the sizes of that call says nothing about larger ones. So the function is measured again at
the first call with sizes that exceed those measured before. If it exceeds the budget there, it is compiled for these
sizes alone. Smaller sizes take less memory, because the same kernels run.

A budget that is a fraction of the plain peak shrinks with the sizes, while the gradients of parameters do not. So at
smaller sizes the function is measured again as well, unless its peak at larger sizes is within the budget for still
smaller ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fckpt._compile.compilation import Compilation
from fckpt._compile.joint import size_of

__all__ = ["CompiledBySize"]

MOST = 8
"""The most sizes for which a function is compiled again, as many as torch's own `recompile_limit`."""
_DO = (
    "Name a larger budget, pad the inputs to fewer sizes, or use fckpt.remat without torch.compile, where a budget "
    "holds for all sizes."
)
_MANY = f"and has been compiled for {MOST} other sizes before. {_DO}"
_NUMBERS = (
    "and cannot be compiled for these sizes alone, because it reads numbers from tensors, or has a Python float among "
    f"its arguments that changes between calls (a tensor would do as well). {_DO}"
)


Sizes = tuple[int, ...]


@dataclass
class _Range:
    """Sizes for which the function keeps the budget, because its peak at the most is within the budget at the least."""

    least: Sizes
    most: Sizes
    peak: int
    limit: int

    def holds(self, sizes: Sizes) -> bool:
        return _are_within(self.least, sizes) and _are_within(sizes, self.most)

    def extend(self, sizes: Sizes, peak: int, limit: int) -> bool:
        """Extends the range to sizes for which the peak and the budget were measured, and returns whether it can."""
        if _are_within(self.most, sizes) and peak <= self.limit:
            self.most, self.peak = sizes, peak
        elif _are_within(sizes, self.least) and self.peak <= limit:
            self.least, self.limit = sizes, limit
        else:
            return False
        return True


class CompiledBySize:
    """The functions that were compiled from one graph: one for all sizes, and others for sizes that need them."""

    def __init__(self, compilation: Compilation, function: Callable[..., Any]) -> None:
        """Begins with the function for all sizes, which was measured with the compilation's inputs."""
        first = tuple([size_of(value) for value in compilation.inputs if isinstance(value, torch.SymInt)])
        self._compilation = compilation.at(())  # without the example inputs, which may be freed
        self._function = function
        self._ranges: list[_Range] = []
        """The sizes for which the function for all sizes keeps the budget."""
        self._own: dict[Sizes, Callable[..., Any]] = {}
        """The functions for sizes at which the function for all sizes exceeds the budget."""
        if compilation.is_kept and compilation.measured is not None:
            self._keep(first, *compilation.measured)
        else:
            self._own[first] = function

    def __call__(self, *args: Any) -> Any:
        """Calls the function for the sizes among the arguments."""
        sizes = tuple([value for value in args if type(value) is int])
        function = self._own.get(sizes)
        if function is None:
            kept = any(known.holds(sizes) for known in self._ranges)
            function = self._function if kept else self._made(sizes, args)
        return function(*args)

    def _keep(self, sizes: Sizes, peak: int, limit: int) -> None:
        """Notes sizes at which the function for all sizes keeps the budget."""
        if not any(known.extend(sizes, peak, limit) for known in self._ranges):
            least = sizes if self._compilation.is_fraction else (0,) * len(sizes)
            self._ranges.append(_Range(least, sizes, peak, limit))

    def _made(self, sizes: Sizes, args: Sequence[Any]) -> Callable[..., Any]:
        """Returns the function for sizes at which the budget may be exceeded, as far as is known."""
        here = self._compilation.at(args)
        measured = here.peak_and_limit(self._function)
        if measured is None:
            return self._function
        peak, limit = measured
        if peak <= limit:
            self._keep(sizes, peak, limit)
            return self._function
        if not here.can_be_fixed:
            here.warn(peak, limit, _NUMBERS)
            self._own[sizes] = self._function
        elif len(self._own) < MOST:
            function = here.fixed().compiled()
            self._own[sizes] = lambda *args: function(*[value for value in args if type(value) is not int])
        else:
            here.warn(peak, limit, _MANY)
            self._own[sizes] = self._function
        return self._own[sizes]


def _are_within(sizes: Sizes, known: Sizes) -> bool:
    return all(a <= b for a, b in zip(sizes, known, strict=True))
