"""Trials of compiled kernels: a kernel is used only if it gives the right results and is faster than torch's kernels.

A kernel is compiled and tried once per process and signature. A trial checks the layouts (each output must have its own
memory, or be written over an input that dies) and, for exact kernels, the bits, on data with infinities, NaN, zeros of
both signs and denormals, also where whole inputs repeat one such number, so that they meet at every place. It measures
temporary memory and time. The time is measured on usual and on tiny numbers, because on denormals, which vanishing
activations contain, a compiled function may be many times slower than torch's.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from fckpt._call.levels import below_autograd
from fckpt._fuse import inductor
from fckpt._fuse.data import made_up, repeated, same_bits, special_numbers
from fckpt._fuse.kernel import Kernel
from fckpt._trace.operations import strides_of
from fckpt.cost.measured import _temporaries, isolated, wait
from fckpt.errors import KernelWarning, users_stacklevel

__all__ = ["Compiled", "compile_ahead", "guarded", "tried"]

_SECONDS = 0.02  # of alternating runs, for each kind of data
_RUNS = (3, 30)  # the least and the most runs of each
_CLEARLY = 0.5  # one run of each is enough if the compiled kernel takes less than this fraction
_FASTER = 0.97
"""A kernel is used if it takes at most this fraction of the time of torch's kernels on usual numbers..."""
_NOT_SLOWER = 1.1
"""...and at most this fraction on tiny numbers."""
_CHECKED = 4096  # elements of each output that are compared bit for bit, at least
_LEAST_ELEMENTS = 8  # trials per kernel, at most
_REPEATED = (8, 256, 1 << 22)
"""The least and the most trials on repeated numbers, and the elements of an output that all of them make together."""
_NEAR = {
    torch.float64: (1e-6, 1e-8),
    torch.float32: (1e-2, 1e-3),
    torch.float16: (5e-2, 5e-2),
    torch.bfloat16: (1e-1, 1e-1),
}
"""Relative and absolute differences that rounding may cause in the results of a fused kernel, by dtype. They tell a
miscompiled kernel from a usual one; `fckpt.check` measures the differences of a call."""
_JUMPS = 0.02
"""The fraction of results that may differ by more."""


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel that passed its trial."""

    run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    over: tuple[tuple[int, int], ...]
    """Pairs of positions: an output, and the donated input that it is written over."""
    temporary_nbytes: int
    share: float
    """The time of the compiled kernel as a fraction of the time of torch's kernels."""


_MISSING = {
    "cpu": "no C++ compiler was found (the environment variable CXX names one)",
    "cuda": "Triton was not found",
}
_known: dict[tuple[str, int], Compiled | None] = {}
_ahead: dict[tuple[str, int], Callable[[], inductor.Run]] = {}
"""What `compile_ahead` compiled, see `inductor.compilation`; by signature and number of threads."""
_lock = threading.RLock()
_warned: set[str] = set()
_has_compiler: dict[str, bool] = {}


def compile_ahead(kernels: Iterable[Kernel]) -> None:
    """Compiles the kernels that are not known yet, for `tried`; the C++ compiler works on several at once."""
    with _lock:
        new = {key: kernel for kernel in kernels if (key := _key(kernel)) not in _known and key not in _ahead}
        if len(new) < 2 or torch.autograd._profiler_enabled():
            return
        with ThreadPoolExecutor(os.cpu_count()) as workers:
            for key, kernel in new.items():
                with isolated(kernel.device):
                    try:
                        _ahead[key] = _compilation(kernel, workers)
                    except Exception as error:  # see `tried`
                        _ahead[key] = functools.partial(_raise, error)


def tried(kernel: Kernel) -> Compiled | None:
    """Returns the compiled kernel; None if it cannot be compiled, gives other results, or is not faster.

    A failure to compile is warned of, once per process: a `KernelWarning`. While torch.profiler records, temporary
    memory cannot be measured, so no new kernel is used.
    """
    key = _key(kernel)
    with _lock:
        if key not in _known and torch.autograd._profiler_enabled():
            return None
        if key not in _known:
            reason = ""
            with isolated(kernel.device):
                try:
                    finish = _ahead.pop(key, None) or _compilation(kernel)
                    _known[key] = _tried(kernel, finish())
                except _NoCompiler:
                    _known[key], reason = None, _MISSING[kernel.device.type]
                except _Untriable:
                    _known[key] = None
                except Exception as error:  # inductor raises any exception on operations that it cannot compile
                    _known[key] = None
                    reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            if reason:
                _warn(reason)
        return _known[key]


def guarded(kernel: Kernel, run: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
    """Returns a function that runs the compiled kernel on tensors with the strides of the trace.

    The compiled kernel reads raw memory by these strides. Operations may give other strides than the stand-ins of a
    trace had (`softplus_backward`, for example): the operations of the kernel run one by one on such tensors.

    Args:
        kernel: the kernel.
        run: the compiled kernel.
    """
    specs = [kernel.specs[t] for t in kernel.inputs]
    wanted = [strides_of(s.shape, s.stride) for s in specs]
    usable: dict[tuple[tuple[int, ...], ...], bool] = {}
    plain: Callable[[list[Any]], Sequence[Any]] | None = None

    def guarded_run(given: list[Any]) -> Sequence[Any]:
        nonlocal plain
        strides = tuple([t.stride() for t in given])
        good = usable.get(strides)
        if good is None:
            found = [strides_of(s.shape, stride) for s, stride in zip(specs, strides, strict=True)]
            good = usable[strides] = found == wanted
        if good:
            return run(given)
        if plain is None:
            plain = kernel.as_planned()
        return plain(given)

    return guarded_run


class _NoCompiler(Exception):
    pass


class _Untriable(Exception):
    """Torch's own kernels refuse the made-up data: a division of integers by zero, for example."""


def _warn(reason: str) -> None:
    if not _warned:
        _warned.add(reason)
        warnings.warn(
            f"a kernel could not be compiled: {reason}. The operations run with torch's own kernels, as with "
            "kernels='aten'. Further failures are not reported.",
            KernelWarning,
            stacklevel=users_stacklevel(),
        )


def _key(kernel: Kernel) -> tuple[str, int]:
    return kernel.signature, torch.get_num_threads()


def _raise(error: Exception) -> Any:
    raise error


def _compilation(kernel: Kernel, workers: Executor | None = None) -> Callable[[], inductor.Run]:
    """Begins to compile a kernel, if torch's own kernels run on made-up data, see `inductor.compilation`."""
    kind = kernel.device.type
    if kind not in _has_compiler:
        _has_compiler[kind] = False  # also if looking for one fails, in another torch: that should not be repeated
        _has_compiler[kind] = inductor.has_compiler(kernel.device)
    if not _has_compiler[kind]:
        raise _NoCompiler
    with below_autograd():
        _check_triable(kernel)
    return inductor.compilation(kernel, workers)


def _tried(kernel: Kernel, run: inductor.Run) -> Compiled | None:
    with below_autograd():
        over = _layouts(kernel, run)
        has_the_results = _has_the_bits if kernel.exact else _is_near
        if over is None or not has_the_results(kernel, run):
            return None
        inputs = _inputs(kernel, "usual")
        nbytes, _ = _temporaries(lambda: run(list(inputs)), kernel.device)
        return _timed(kernel, Compiled(run, over, max(0, nbytes), 1.0))


def _inputs(kernel: Kernel, kind: str, seed: int = 0) -> list[torch.Tensor]:
    return made_up([kernel.specs[t] for t in kernel.inputs], kind, seed)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _layouts(kernel: Kernel, run: Callable[..., Any]) -> tuple[tuple[int, int], ...] | None:
    """Returns the pairs of an output and the input that it is written over; None if an output is not as traced."""
    inputs = _inputs(kernel, "usual")
    made = list(run(list(inputs)))
    mine = [_storage(t) for t in made]
    if len(made) != len(kernel.outputs) or len(set(mine)) != len(mine):
        return None
    over = []
    for i, (t, number) in enumerate(zip(made, kernel.outputs, strict=True)):
        spec = kernel.specs[number]
        nbytes = t.numel() * t.element_size()
        same = (tuple(t.shape), t.stride(), t.dtype) == (spec.shape, spec.stride, spec.dtype)
        if not same or t.storage_offset() or t.untyped_storage().nbytes() != nbytes:
            return None
        holders = [j for j, given in enumerate(inputs) if _storage(given) == mine[i]]
        if any(j not in kernel.donated for j in holders):
            return None
        over += [(i, j) for j in holders]
    return tuple(over)


def _has_the_bits(kernel: Kernel, run: Callable[..., Any]) -> bool:
    smallest = min(math.prod(kernel.specs[t].shape) for t in kernel.outputs)
    for seed in range(max(1, min(_LEAST_ELEMENTS, _CHECKED // max(1, smallest)))):
        expected = kernel.run(_inputs(kernel, "any", seed))
        if not all(map(same_bits, expected, run(_inputs(kernel, "any", seed)))):
            return False
    least, most, together = _REPEATED
    rounds = min(max(together // max(1, smallest), least), most)
    specs = [kernel.specs[t] for t in kernel.inputs]
    for numbers in itertools.islice(_pairs(kernel), rounds):
        if not all(map(same_bits, kernel.run(repeated(specs, numbers)), run(repeated(specs, numbers)))):
            return False
    return True


def _pairs(kernel: Kernel) -> Iterator[list[Any]]:
    """Yields a number for each input, so that each two inputs meet with each two special numbers."""
    specs = [kernel.specs[t] for t in kernel.inputs]
    held = list(dict.fromkeys(s.value for s in specs))
    numbers = {s.dtype: special_numbers(s.dtype) for s in specs}
    most = max(map(len, numbers.values()))
    pairs = sorted(itertools.product(range(most), repeat=2), key=max)  # the first numbers matter most
    for pair, bit in itertools.product(pairs, range(max(1, (len(held) - 1).bit_length()))):
        which = [pair[held.index(s.value) >> bit & 1] for s in specs]
        yield [numbers[s.dtype][i % len(numbers[s.dtype])] for s, i in zip(specs, which, strict=True)]


def _check_triable(kernel: Kernel) -> None:
    try:
        for kind in ("any", "usual", "tiny"):
            kernel.run(_inputs(kernel, kind))
    except RuntimeError as error:
        raise _Untriable from error


def _is_near(kernel: Kernel, run: Callable[..., Any]) -> bool:
    """Whether nearly all elements of the results are within rounding of those by torch's kernels.

    A few elements may differ by more: rounding before a discontinuous operation such as `floor` can change its result.
    """
    for expected, found in zip(kernel.run(_inputs(kernel, "usual")), run(_inputs(kernel, "usual")), strict=True):
        near = torch.isclose(found.double(), expected.double(), *_NEAR.get(expected.dtype, (0.0, 0.0)), equal_nan=True)
        if (~near).sum() > _JUMPS * near.numel():
            return False
    return True


def _timed(kernel: Kernel, made: Compiled) -> Compiled | None:
    run, plain = guarded(kernel, made.run), kernel.as_planned()
    shares: dict[str, float] = {}
    for kind, most in (("usual", _FASTER), ("tiny", _NOT_SLOWER)):
        originals = _inputs(kernel, kind)
        changing = {*kernel.donated, *(i for i, t in enumerate(kernel.inputs) if t in kernel.over)}
        least, spent, runs = [float("inf")] * 2, 0.0, 0
        clear = False
        while (runs < _RUNS[0] and not clear) or (spent < _SECONDS and runs < _RUNS[1]):
            for which, fn in enumerate((run, plain)):
                given = [t.clone() if i in changing else t for i, t in enumerate(originals)]
                wait(kernel.device)
                start = time.perf_counter()
                results = fn(given)
                wait(kernel.device)
                seconds = time.perf_counter() - start
                del results, given
                least[which], spent = min(least[which], seconds), spent + seconds
            runs, clear = runs + 1, least[0] < _CLEARLY * least[1]
        if least[0] > most * least[1]:
            return None
        shares[kind] = least[0] / least[1]
    return Compiled(made.run, made.over, made.temporary_nbytes, shares["usual"])
