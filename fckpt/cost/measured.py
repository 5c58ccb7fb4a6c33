"""Measured costs: each operation runs on the real device, on synthetic data, without side effects except a cache."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fckpt._call.ambient import without_modes
from fckpt._call.levels import below_autograd, out_of_reach
from fckpt._call.rng import GeneratorState, RandomState
from fckpt._memory import collector_paused, measure_operation, undisturbed
from fckpt._trace.operations import Call, TensorSpec, statistics_of, tensors_of
from fckpt.cost.analytic import Analytic, flops_of
from fckpt.cost.calls import OpCost, is_custom, is_pure, packet, registered
from fckpt.cost.devices import profile_of, profiles
from fckpt.cost.pairs import code_of, opaque_operands, paired_signature, workspace_maker
from fckpt.cost.store import Store, environment
from fckpt.cost.synthetic import EXTREMES, FILLS, PRODUCTS, arguments, made_up

__all__ = ["Measured", "isolated"]

_SECONDS_PER_OP = 0.01  # so that 1000 distinct operations take 30 s, including one profiled run each
_PATIENCE = 0.5  # seconds; an operation that takes longer gets no warm-up run
_LAUNCHES = 10  # launches of a kernel on an accelerator between two synchronisations


class Measured:
    """Cost source that runs operations: seconds are the least of a few runs, and the allocator reports temporaries.

    Each operation runs on tensors of the given shapes, strides, dtypes and devices, under the current settings
    (threads, determinism, TF32). The data are random numbers from [0, 1) and valid indices; tensors that the caller
    already holds are read instead, if they are known. An operation that reads the workspace of another operation (the
    backward of an RNN) runs after that operation. An operation whose allocations may depend on its data (a write with a
    mask) also runs on extreme data, and the largest result counts. Custom operations run only if they are declared pure
    (`register_pure`).

    Random generators, autograd, autocast and surrounding transforms are not affected. On CUDA, the peak statistics of
    the allocator are reset. Data stays in the processor's caches between runs, so small operations appear faster than
    they are in a training step.

    On CPU, temporaries are exact to the byte for memory from torch's allocator. Scratch memory that oneDNN and BLAS
    allocate themselves is not counted, as in `fckpt.measure_peak`.

    Args:
        cache: whether to store measurements on disk: in the folder that the environment variable FCKPT_CACHE names, or
            else in `fckpt` under the user's cache folder. The key consists of the device, the number of threads, the
            version of torch, the settings, and the `signature`.
        repeats: the maximum number of runs after the first one; slow operations run less often.

    Attributes:
        failures: by operation that could not run: the reason. `Analytic` estimated it for the same device.
        refused: by custom operation that was not run: the reason. `Analytic` estimated it too.

    Example:
        >>> from fckpt._trace.operations import Ref
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
        self.refused: dict[str, str] = {}
        self._known: dict[tuple[str, str], OpCost] = {}
        self._store = Store() if cache else None

    def __call__(
        self,
        call: Call,
        specs: Sequence[TensorSpec],
        makers: Mapping[int, Call] | None = None,
        held: Mapping[int, torch.Tensor] | None = None,
        seconds: float | None = None,
    ) -> OpCost:
        """Returns the cost of `call` on the device of its tensors.

        Args:
            call: the operation.
            specs: the specs of the tensors, by number.
            makers: by tensor, the call that makes it, if known.
            held: existing tensors, by number. They are only read.
            seconds: the time of the call, if it is known; then only its memory is measured.
        """
        known = registered(call, specs)
        if known is not None:
            return known
        if not is_pure(call):
            self.refused.setdefault(str(call.op), "it is a custom operation")
            return self._estimated(call, specs, _device(call, specs))
        maker = workspace_maker(call, makers or {})
        # The kernels of custom operations may be edited without a change of their names. At sizes whose time is known,
        # the memory of an operation is measured sooner than it is looked up.
        if is_custom(call.op) or seconds is not None:
            cost = undisturbed(lambda: self._measure(call, specs, maker, held or {}, seconds))
            return cost or self._estimated(call, specs, _device(call, specs))
        return self._remembered(call, specs, maker, held or {})

    def _remembered(
        self, call: Call, specs: Sequence[TensorSpec], maker: Call | None, held: Mapping[int, torch.Tensor]
    ) -> OpCost:
        device = _device(call, specs)
        where, key = environment(device), paired_signature(call, specs, maker) + code_of(call.op)
        cost = self._known.get((where, key)) or (self._store.get(where, key) if self._store else None)
        if cost is None:
            cost = undisturbed(lambda: self._measure(call, specs, maker, held, None))
            if cost is None:
                cost = self._estimated(call, specs, device)
            elif self._store:
                self._store.put(where, key, cost)
        self._known[where, key] = cost
        return cost

    def _estimated(self, call: Call, specs: Sequence[TensorSpec], device: torch.device) -> OpCost:
        # The CPU of this machine is not measured for an estimate: that would take 128 MiB, within someone's budget.
        with isolated(device):
            profile = profiles["cpu"] if device.type == "cpu" else profile_of(device)
        return Analytic(profile)(call, specs)

    def _measure(
        self,
        call: Call,
        specs: Sequence[TensorSpec],
        maker: Call | None,
        held: Mapping[int, torch.Tensor],
        seconds: float | None,
    ) -> OpCost | None:
        reasons: list[str] = []
        device = _device(call, specs)
        if maker is None and opaque_operands(call):
            reasons.append("it reads the workspace of another operation, which cannot be synthesised")
        fills = FILLS if device.type == "cpu" else FILLS[:-1]  # an index out of range ends the use of a GPU
        for fill, given in [] if reasons else _tries(call, held, fills):
            try:
                with isolated(device), _as_planned(call.op):
                    # Each of the two functions frees its arguments before the other makes new ones.
                    cost = self._run_with(call, specs, seconds, fill, given, maker, device)
                    worst = self._at_worst(call, specs, fill, given, maker, device)
                return dataclasses.replace(cost, temporary_nbytes=max(cost.temporary_nbytes, worst))
            except Exception as error:  # a kernel may raise any exception on unexpected data
                lines = str(error).splitlines() or [""]
                reasons.append(f"{type(error).__name__}: {lines[0]}")
        self.failures.setdefault(str(call.op), reasons[0])
        return None

    def _run_with(self, call: Call, specs: Sequence[TensorSpec], seconds: float | None, *how: Any) -> OpCost:
        fill, given, maker, device = how
        run = _prepared(call, specs, fill, given, maker)
        if seconds is None:
            seconds, temporary, storages = _run(run, device, self.repeats)
        else:
            temporary, storages = _temporaries(run, device)
        return OpCost(seconds, flops_of(call, specs), temporary, storages)

    @staticmethod
    def _at_worst(call: Call, specs: Sequence[TensorSpec], fill: str, *rest: Any) -> int:
        """Returns the most temporary bytes on extreme data, if the allocations of a kernel may depend on its data."""
        given, maker, device = rest
        most = 0
        for extreme in EXTREMES if _looks_at_data(call, specs) else ():
            if extreme != fill:
                with contextlib.suppress(Exception):  # the kernel may reject extreme data: it accepted the usual data
                    most = max(most, _temporaries(_prepared(call, specs, extreme, given, maker), device)[0])
        return most


def _tries(
    call: Call, held: Mapping[int, torch.Tensor], fills: Sequence[str]
) -> list[tuple[str, Mapping[int, torch.Tensor]]]:
    """Returns ways to make the arguments of a call, in order: from existing tensors if possible, then synthetic."""
    schema = getattr(call.op, "_schema", None)
    ways: list[tuple[str, Mapping[int, torch.Tensor]]] = [(fill, {}) for fill in fills]
    if schema is None or schema.is_mutable or call.replaced or statistics_of(call.op, call.args):
        return ways
    read = {*tensors_of(call)}
    known = {i: held[i] for i in read if i in held}
    return [("usual", known), *ways] if known else ways


def _prepared(
    call: Call, specs: Sequence[TensorSpec], fill: str, given: Mapping[int, torch.Tensor], maker: Call | None
) -> Callable[[], Any]:
    """Returns a function that runs the call. If the call reads a workspace, runs the operation that makes it first."""
    if maker is not None:
        shared = made_up(maker, specs, fill, given)
        args, kwargs = arguments(maker, specs, fill, shared)
        results = maker.op(*args, **kwargs)
        flat = results if isinstance(results, (list, tuple)) else [results]
        made = {i: t for i, t in zip(maker.outputs, flat, strict=True) if i is not None}
        given = {**given, **shared, **made}
    args, kwargs = arguments(call, specs, fill, given)
    return lambda: call.op(*args, **kwargs)


_BLIND = {"aten.embedding_dense_backward"}
"""Operations with indices whose kernels on the CPU allocate the same memory whatever the indices are."""


def _looks_at_data(call: Call, specs: Sequence[TensorSpec]) -> bool:
    """Whether the allocations of a kernel may depend on the contents of masks, indices or factors."""
    if packet(call) in PRODUCTS:
        return True
    if torch.Tag.pointwise in getattr(call.op, "tags", ()):
        return False
    if packet(call) in _BLIND and _device(call, specs).type == "cpu":
        return False
    operands = {*tensors_of(call)}
    return any(not (specs[i].dtype.is_floating_point or specs[i].dtype.is_complex) for i in operands)


def _device(call: Call, specs: Sequence[TensorSpec]) -> torch.device:
    """Returns the accelerator that a call uses, or the CPU if it uses none."""
    used = tensors_of(call) + [i for i in call.outputs if i is not None]
    devices = [specs[i].device for i in used]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _index(device: torch.device) -> int:
    return torch.get_device_module(device).current_device() if device.index is None else device.index


class _Isolated(threading.local):
    """The device for which the code of this thread is isolated; None outside of `isolated`."""

    device: torch.device | None = None


_ISOLATED = _Isolated()


@contextlib.contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Disables surrounding transforms, modes and autograd within the body, and restores random generators after it.

    To isolate several measurements at once takes less time: within the body, this function does nothing more for the
    same device.
    """
    outside = _ISOLATED.device
    if outside == device:
        yield
        return
    others = RandomState.capture()  # of Python and NumPy: a custom operation may draw from any generator
    with (
        out_of_reach(),
        without_modes(),
        torch.no_grad(),
        _generators_restored(device),
        warnings.catch_warnings(),
        collector_paused(),  # only the operation frees memory
    ):
        warnings.simplefilter("ignore")
        _ISOLATED.device = device
        try:
            yield
        finally:
            _ISOLATED.device = outside
            others.drawn().rewind()


@contextlib.contextmanager
def _generators_restored(device: torch.device) -> Iterator[None]:
    """Restores torch's generators of the CPU and of a device after the body.

    Unlike torch's `fork_rng`, it holds no tensor with the state of the CPU meanwhile, which a budget would count.
    """
    if device.type != "cpu":
        with torch.random.fork_rng([_index(device)], device_type=device.type):
            yield
        return
    state = GeneratorState(torch.default_generator)
    try:
        yield
    finally:
        state.set(torch.default_generator)


@contextlib.contextmanager
def _as_planned(op: Any) -> Iterator[None]:
    """Sets the dispatch state of planned calls: below autograd, with grad mode on (an RNN needs it for a workspace)."""
    if not isinstance(op, torch._ops.OpOverload):
        yield
        return
    with below_autograd():
        yield


def _run(run: Callable[[], Any], device: torch.device, repeats: int) -> tuple[float, int, tuple[int, ...]]:
    """Returns the least seconds of a few runs, the temporary bytes, and the bytes of each result."""
    first = _timed(run, device, 1)
    if first < _PATIENCE:
        first = _timed(run, device, 1)  # the first run may include loading and choosing a kernel
    start = time.perf_counter()
    temporary, storages = _temporaries(run, device)
    if first > _SECONDS_PER_OP:
        # The profiled run counts as a second timing, because recording takes a negligible fraction of its time.
        return min(first, time.perf_counter() - start), temporary, storages
    launches = 1 if device.type == "cpu" else _LAUNCHES
    least, spent = float("inf"), 0.0
    for _ in range(repeats):
        seconds = _timed(run, device, launches)
        least, spent = min(least, seconds), spent + seconds * launches
        if spent > _SECONDS_PER_OP:
            break
    return least, temporary, storages


def _timed(run: Callable[[], Any], device: torch.device, launches: int) -> float:
    """Returns the seconds of one run, including the release of its results."""
    wait(device)
    start = time.perf_counter()
    for _ in range(launches):
        run()
    wait(device)
    return (time.perf_counter() - start) / launches


def wait(device: torch.device) -> None:
    """Waits until an accelerator has done what it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def _temporaries(run: Callable[[], Any], device: torch.device) -> tuple[int, tuple[int, ...]]:
    """Returns the most bytes held during a run minus the bytes of its results, and the bytes of each result."""
    sizes: list[int] = []

    def sized() -> Any:
        result = run()
        flat = result if isinstance(result, (list, tuple)) else [result]
        seen: set[int] = set()
        for t in flat:
            memory = t.untyped_storage() if isinstance(t, torch.Tensor) else None
            sizes.append(0 if memory is None or memory._cdata in seen else memory.nbytes())
            seen.add(0 if memory is None else memory._cdata)
        return result

    if device.type == "cpu":
        found = measure_operation(sized)
        return found.peak_bytes - found.retained_bytes, tuple(sizes)
    module = torch.get_device_module(device)
    module.reset_peak_memory_stats(device)
    result = sized()
    temporary = module.max_memory_allocated(device) - module.memory_allocated(device)
    del result
    return temporary, tuple(sizes)
