"""Costs from running each operation on the real device, on made-up data, with nothing left behind but a cache."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fckpt.cost.analytic import Analytic, flops_of
from fckpt.cost.calls import OpCost, refs, registered, signature
from fckpt.cost.profiles import profile_of
from fckpt.cost.store import Store, environment
from fckpt.cost.synthetic import FILLS, arguments
from fckpt.memory import _measure_cpu
from fckpt.trace import Call, TensorSpec

__all__ = ["Measured"]

_SECONDS_PER_OP = 0.01  # 1000 distinct operations in 30 s, with one profiled run each
_PATIENCE = 0.5  # seconds; what takes longer is not run for warming up
_LAUNCHES = 10  # of a kernel on an accelerator, between two waits


class Measured:
    """Prices by running: seconds are the least of a few runs, temporaries are read off the allocator.

    Runs happen one after the other on tensors of the given shapes, strides, dtypes and devices, and in the settings in
    force (threads, determinism, TF32): random numbers from [0, 1), indices that are in range. Generators, autograd,
    autocast and transforms around the call are left alone. On CUDA the peak statistics of the allocator are reset.
    Data stays in the processor's caches from run to run, so that small operations look faster than in a program.

    Temporaries on CPU are exact to the byte for what goes through torch's allocator; scratch memory that oneDNN and
    BLAS allocate by themselves is not seen, as in `fckpt.measure_peak`.

    Args:
        cache: whether to keep measurements on disk, in the folder that the environment variable FCKPT_CACHE names,
            else in `fckpt` under the user's cache folder. They are kept by device, number of threads, version of
            torch, settings, and `signature`.
        repeats: how often to run an operation at most after the first time; slow ones run less.

    Attributes:
        failures: what could not run, by operation, and why; it was estimated by `Analytic` for the same device.

    Example:
        >>> from fckpt.trace import Ref
        >>> x = TensorSpec((8, 8), (8, 1), torch.float32, torch.device("cpu"), value=0)
        >>> out = TensorSpec((8, 8), (8, 1), torch.float32, torch.device("cpu"), value=1)
        >>> call = Call(torch.ops.aten.mm.default, (Ref(0), Ref(0)), {}, (1,), 0)
        >>> cost = Measured(cache=False)(call, [x, out])
        >>> cost.flops, cost.temporary_nbytes
        (1024, 0)
    """

    def __init__(self, *, cache: bool = True, repeats: int = 10):
        self.repeats = max(1, repeats)
        self.failures: dict[str, str] = {}
        self._known: dict[tuple[str, str], OpCost] = {}
        self._store = Store() if cache else None

    def __call__(self, call: Call, specs: Sequence[TensorSpec]) -> OpCost:
        """Returns the cost of `call` on the device of its tensors."""
        known = registered(call, specs)
        if known is not None:
            return known
        device = _device(call, specs)
        where, key = environment(device), signature(call, specs)
        cost = self._known.get((where, key)) or (self._store.get(where, key) if self._store else None)
        if cost is None:
            cost = self._measure(call, specs, device)
            if cost is None:
                with _isolated(device):
                    profile = profile_of(device)
                cost = Analytic(profile)(call, specs)
            elif self._store:
                self._store.put(where, key, cost)
        self._known[where, key] = cost
        return cost

    def _measure(self, call: Call, specs: Sequence[TensorSpec], device: torch.device) -> OpCost | None:
        reasons: list[str] = []
        for fill in FILLS:
            try:
                with _isolated(device):
                    args, kwargs = arguments(call, specs, fill)
                    seconds, temporary = _run(lambda a=args, k=kwargs: call.op(*a, **k), device, self.repeats)
                return OpCost(seconds, flops_of(call, specs), temporary)
            except Exception as error:  # whatever a kernel raises on data that it was not made for
                lines = str(error).splitlines() or [""]
                reasons.append(f"{type(error).__name__}: {lines[0]}")
        self.failures.setdefault(str(call.op), reasons[0])
        return None


def _device(call: Call, specs: Sequence[TensorSpec]) -> torch.device:
    """The accelerator that a call uses, else the CPU."""
    used = [ref.tensor for ref in refs((call.args, call.kwargs))] + [i for i in call.outputs if i is not None]
    devices = [specs[i].device for i in used]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _index(device: torch.device) -> int:
    return torch.get_device_module(device).current_device() if device.index is None else device.index


@contextlib.contextmanager
def _isolated(device: torch.device) -> Iterator[None]:
    """Takes what is around the call out of force, and puts generators back to where they were."""
    indices = [] if device.type == "cpu" else [_index(device)]
    kind = "cuda" if device.type == "cpu" else device.type
    with (
        torch._C._DisableFuncTorch(),
        torch._C._DisableAutocast(),
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch.no_grad(),
        torch.random.fork_rng(indices, device_type=kind),
        _no_collection(),
    ):
        yield


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps cyclic garbage from being freed while it is recorded what an operation frees."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _run(run: Callable[[], Any], device: torch.device, repeats: int) -> tuple[float, int]:
    """The least seconds of a few runs, and the temporary bytes of one."""
    first = _timed(run, device, 1)
    if first < _PATIENCE:
        first = _timed(run, device, 1)  # the first run of a kernel may load and choose it
    start = time.perf_counter()
    temporary = _temporaries(run, device)
    if first > _SECONDS_PER_OP:
        # As good a second run as any, where recording takes no share of it to speak of.
        return min(first, time.perf_counter() - start), temporary
    launches = 1 if device.type == "cpu" else _LAUNCHES
    least, spent = float("inf"), 0.0
    for _ in range(repeats):
        seconds = _timed(run, device, launches)
        least, spent = min(least, seconds), spent + seconds * launches
        if spent > _SECONDS_PER_OP:
            break
    return least, temporary


def _timed(run: Callable[[], Any], device: torch.device, launches: int) -> float:
    """Seconds of one run, the release of its results included."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(launches):
        run()
    _wait(device)
    return (time.perf_counter() - start) / launches


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def _temporaries(run: Callable[[], Any], device: torch.device) -> int:
    """Most bytes held while it runs, less what it returns."""
    if device.type == "cpu":
        if torch.autograd._profiler_enabled():
            raise RuntimeError("the memory of an operation cannot be measured while torch.profiler records")
        found = _measure_cpu(run)
        return found.peak_bytes - found.retained_bytes
    module = torch.get_device_module(device)
    module.reset_peak_memory_stats(device)
    result = run()
    temporary = module.max_memory_allocated(device) - module.memory_allocated(device)
    del result
    return temporary
