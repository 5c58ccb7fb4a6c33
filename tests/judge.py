"""The judge of stateful tests: runs a scenario twice, plainly and rematerialised, and compares all that a user can see.

A scenario is a function of a `Session`. It makes regions with `session.region(fn)`, names what is compared with
`session.watch(...)`, and trains with `session.step(run)`; between steps it may change whatever it likes. The first run
has plain regions, the second has `fckpt.remat(fn, budget=...)` in their places. `judge` raises `Silent` where the
second run differs from the first without an error, or holds more than its budget without a `BudgetWarning`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from helpers import DEVICE, generator_state
from snapshots import differences, fakes_in, snapshot
from torch import Tensor, nn

import fckpt


class _NoBudgetWarning(UserWarning):
    """Stands for `fckpt.BudgetWarning` where there is none."""


BudgetWarning: type[Warning] = getattr(fckpt, "BudgetWarning", _NoBudgetWarning)
SLACK = 256 if DEVICE.type == "cpu" else 8 * 512
"""Bytes beside the region: the loss, its cotangent and other scalars. An accelerator's allocator rounds each up."""
WITHIN = 1.01
"""A fraction is one of a plain peak that is predicted within one percent."""

Run = Callable[[], Any]
Pick = Callable[[Any], Tensor]


class Silent(AssertionError):
    """A rematerialised run differs from the plain run, and nothing said so."""


@dataclass
class Record:
    """What one call of a step left behind."""

    name: str
    seen: dict[str, Any]
    peak_bytes: int | None = None
    error: Exception | None = None
    warned: bool = False
    """Whether a `BudgetWarning` has been issued in this call, or earlier for the reason for which this call falls back.
    """
    is_last: bool = False
    """Whether it is the last of its step, which should find all planned."""


@dataclass
class Verdict:
    """How a scenario went where nothing was silent."""

    error: fckpt.FckptError | None
    """The error that ended the rematerialised run."""
    budget: Any
    """The budget in force: the one asked for, or the least feasible."""
    over: list[str]
    """Steps whose peak was above the budget; a `BudgetWarning` said so."""
    warned: list[str]
    """The texts of the `BudgetWarning`s."""
    stats: list[Any] = field(default_factory=list)
    """`fckpt.stats` of each region, where the library has it."""
    plain_bytes: int | None = None
    """The first peak that was measured plainly."""
    unmeasured: list[str] = field(default_factory=list)
    """Last calls of steps whose peaks are only known plainly, because something was captured or planned once more."""

    @property
    def outcome(self) -> str:
        """`"equal"`, or the name of the error."""
        return type(self.error).__name__ if self.error else "equal"

    @property
    def kept(self) -> bool:
        """Whether all results are equal and all peaks within the budget."""
        return self.error is None and not self.over

    @property
    def kept_by_plans(self) -> bool:
        """Whether it is kept, in bytes that plain calls exceed, and all calls ran by plans, with known peaks."""
        planned = not self.unmeasured and bool(self.stats) and all(s.plans and not s.fallbacks for s in self.stats)
        return self.kept and planned and self.plain_bytes is not None and self.budget < self.plain_bytes


def plain(fn: Any, **options: Any) -> Any:
    """Stands for `remat` in a plain run."""
    return fn


class Session:
    """One run of a scenario."""

    def __init__(self, remat: Callable[..., Any], options: dict[str, Any], seed: int):
        self.remat, self.options, self.seed = remat, options, seed
        self.is_plain = remat is plain
        self.regions: list[Any] = []
        self.watched: dict[str, Any] = {}
        self.records: list[Record] = []
        self.warned: list[str] = []
        self._undo: list[Callable[[], Any]] = []
        self._generator = torch.Generator().manual_seed(seed)

    def region(self, fn: Any, **options: Any) -> Any:
        """Returns `fn`, or `fn` rematerialised; `options` are those of `remat`, beside the judge's."""
        made = self.remat(fn, **{**self.options, **options})
        self.regions.append(made)
        return made

    def leaf(self, *shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
        """Makes a tensor of random numbers that requires grad, whose gradient is compared."""
        made = torch.randn(*shape, generator=self._generator, device="cpu").to(dtype) / max(1, shape[-1]) ** 0.5
        made = made.to(DEVICE)
        made.requires_grad_(grad)
        self.watched[f"leaf{len(self.watched)}"] = made
        return made

    def watch(self, **things: Any) -> None:
        """Compares these after every call: tensors with their gradients, modules, other objects by what they hold."""
        self.watched.update(things)

    def undo(self, action: Callable[[], Any]) -> None:
        """Runs `action` at the end of the run, for what a scenario changes outside of itself."""
        self._undo.append(action)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Lets pass what a rematerialised run refuses within the body."""
        try:
            yield
        except fckpt.FckptError:
            if self.is_plain:
                raise

    def step(self, run: Run, pick: Pick | None = None, *, times: int = 3, peak: bool = True) -> None:
        """Runs forward and backward several times, and measures all but the first of them.

        The first call of a kind may plan, and the second may meet caches that the first has filled.

        Args:
            run: the forward pass.
            pick: the loss of what `run` returns; by default its sum, of all its floating-point tensors.
            times: how many calls.
            peak: whether the peak is one of the region, so that the budget holds for it.
        """
        for i in range(times):
            record = Record(f"call {len(self.records)}", {}, is_last=i == times - 1)
            self.records.append(record)
            self._call(record, run, pick or total, measured=peak and (i > 0 or times == 1))
            if record.error is not None:
                raise _Ended

    def _call(self, record: Record, run: Run, pick: Pick, measured: bool) -> None:
        _seed(self.seed + len(self.records))
        self._forget_gradients()
        result: list[Any] = []

        def forward_and_backward() -> None:
            out = run()
            loss = pick(out)
            if loss.requires_grad:
                loss.backward()
            result.append((out, loss.detach()))

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            before, fallbacks = self._effort(), self._fallbacks()
            try:
                if measured:
                    held = fckpt.measure_peak(forward_and_backward, DEVICE).peak_bytes
                    record.peak_bytes = held if self._effort() == before else None
                else:
                    forward_and_backward()
            except Exception as error:
                record.error = error
        said = [str(w.message) for w in caught if issubclass(w.category, BudgetWarning)]
        self.warned += said
        record.warned = bool(said) or bool(self.warned and self._fallbacks() != fallbacks)
        if record.error is None:
            out, loss = result[0]
            record.seen = {"output": snapshot(out), "loss": snapshot(loss), **self._visible()}
            del out, loss, result

    def _effort(self) -> Any:
        """How often was captured and planned: a call that plans may hold more than its plan.

        And how often nothing was there to differentiate: a budget is not for such calls, as docs/concepts.md says.
        """
        stats = [stats_of(region) for region in self.regions]
        idle = "nothing to differentiate"
        return [(s.captures, s.plans, s.fallbacks.get(idle, 0)) for s in stats if s is not None]

    def _fallbacks(self) -> Any:
        """How often regions did not run by a plan, by reason. Each reason is warned of once."""
        return [dict(s.fallbacks) for s in map(stats_of, self.regions) if s is not None]

    def _forget_gradients(self) -> None:
        for thing in self.watched.values():
            for tensor in thing.parameters() if isinstance(thing, nn.Module) else [thing]:
                if isinstance(tensor, Tensor):
                    tensor.grad = None

    def _visible(self) -> dict[str, Any]:
        fakes = [path for name, thing in self.watched.items() for path in fakes_in(thing, name)]
        if fakes:
            raise Silent(f"fake tensors stay in {fakes[:3]}")
        return {
            **{name: snapshot(thing, gradients=True) for name, thing in self.watched.items()},
            "modes": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")],
            "modes of functions": torch._C._len_torch_function_stack(),
            "torch's generator": torch.get_rng_state(),
            "the device's generator": generator_state(),
            "Python's generator": random.getstate(),
            "NumPy's generator": snapshot(np.random.get_state()),
        }


class _Ended(Exception):
    """Ends a run at its first error."""


def total(out: Any) -> Tensor:
    """Adds up all floating-point tensors of a result that can be differentiated."""
    tensors = [t for t in leaves_of(out) if t.is_floating_point() and t.requires_grad]
    return torch.stack([t.float().sum() for t in tensors]).sum() if len(tensors) != 1 else tensors[0].sum()


def leaves_of(out: Any) -> Iterator[Tensor]:
    """The tensors of a result: of containers, mappings and objects with attributes."""
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, dict):
        for value in out.values():
            yield from leaves_of(value)
    elif isinstance(out, list | tuple):
        for value in out:
            yield from leaves_of(value)
    elif hasattr(out, "__dict__"):
        yield from leaves_of(vars(out))


Scenario = Callable[[Session], None]


def judge(
    scenario: Scenario, *, budget: Any = 0.6, fraction: bool = False, seed: int = 0, remat: Any = None, **options: Any
) -> Verdict:
    """Runs a scenario plainly and rematerialised.

    Args:
        scenario: what is run, twice, from equal seeds. It makes all its state itself.
        budget: of every region, a fraction of the first peak that is measured plainly. Where it is infeasible, the
            least feasible one takes its place. None leaves it out.
        fraction: whether `remat` is given the fraction itself, and not the bytes. What a plan takes for the plain peak
            is the real one where a region returns its loss; else it depends on what is done with the results.
        seed: of the first call; each call has the next.
        remat: stands for `fckpt.remat`.
        options: further ones of `remat`. The solver is a fast one unless they say otherwise.

    Returns:
        What happened.

    Raises:
        Silent: a difference without an error, or a peak above the budget without a warning.
    """
    expected = _run(scenario, plain, {}, seed)
    peaks = [record.peak_bytes for record in expected.records if record.peak_bytes]
    if isinstance(budget, float) and not fraction:
        budget = int(budget * peaks[0]) if peaks else 2**20
    for attempt in itertools.count():
        given = {"solver": "greedy", **options, "budget": budget} if budget is not None else options
        actual = _run(scenario, remat or fckpt.remat, given, seed)
        error = actual.records[-1].error if actual.records else None
        if not isinstance(error, fckpt.BudgetError) or attempt == 3:
            break
        budget = error.least_bytes
    return _compared(expected, actual, budget, peaks[0] if peaks else None)


def _run(scenario: Scenario, remat: Callable[..., Any], options: dict[str, Any], seed: int) -> Session:
    session = Session(remat, options, seed)
    _seed(seed)
    try:
        with DEVICE if DEVICE.type != "cpu" else contextlib.nullcontext():
            scenario(session)
    except _Ended:
        pass
    except fckpt.FckptError as error:  # raised by `remat` itself, or by what a scenario does beside steps
        session.records.append(Record("beside the steps", {}, error=error))
    finally:
        for action in reversed(session._undo):
            action()
    return session


def _compared(expected: Session, actual: Session, budget: Any, plain_bytes: int | None) -> Verdict:
    error = actual.records[-1].error if actual.records else None
    over, unmeasured = [], []
    for want, got in itertools.zip_longest(expected.records, actual.records):
        if got is not None and isinstance(got.error, fckpt.FckptError):
            break
        if want is None or got is None:
            raise Silent(f"{len(expected.records)} calls plainly, {len(actual.records)} rematerialised")
        if want.error is not None or got.error is not None:
            _compare_errors(want, got)
            error = None  # both raise
            break
        found = differences(want.seen, got.seen)
        if found:
            raise Silent(f"{want.name} of {len(expected.records)}: {found[0]}; {len(found)} differences")
        if want.is_last and want.peak_bytes is not None and got.peak_bytes is None:
            unmeasured.append(got.name)
        if budget is not None and want.peak_bytes is not None and got.peak_bytes is not None:
            allowed = budget if isinstance(budget, int) else budget * want.peak_bytes * WITHIN
            if got.peak_bytes > allowed + SLACK:
                text = f"{got.name}: {got.peak_bytes} bytes of {int(allowed)} allowed, {want.peak_bytes} plainly"
                if not got.warned:
                    raise Silent(f"budget {budget}: {text}, without a BudgetWarning")
                over.append(text)
    stats = [s for s in map(stats_of, actual.regions) if s is not None]
    error = error if isinstance(error, fckpt.FckptError) else None
    return Verdict(error, budget, over, actual.warned, stats, plain_bytes, unmeasured)


def _compare_errors(want: Record, got: Record) -> None:
    if want.error is None:
        assert got.error is not None
        if isinstance(got.error, RecursionError):
            got.error.__traceback__ = None  # pytest would compare the locals of a thousand frames
        raise Silent(f"{got.name}: {type(got.error).__name__}, which is no FckptError: {got.error}") from got.error
    if got.error is None:
        raise Silent(f"{got.name}: plainly {type(want.error).__name__} ({want.error}), and nothing by a plan")


def stats_of(region: Any) -> Any:
    """`fckpt.stats` of a region; None where there is none."""
    stats = getattr(fckpt, "stats", None)
    try:
        return None if stats is None else stats(region)
    except fckpt.FckptError:  # a plain function
        return None


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


_fresh = itertools.count()


@contextmanager
def fresh(path: Path) -> Iterator[ModuleType]:
    """Imports a file anew, under another name each time: its classes, constants and caches are the caller's alone."""
    name = f"{path.stem}_{next(_fresh)}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[name]
