"""Errors that a function raises or catches are Python's, with their texts; what it does before is done, and no more."""

from __future__ import annotations

import copy
import gc
import logging
import random
import signal
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_equal
from torch import Tensor, nn

import fckpt

W = torch.randn(8, 8, requires_grad=True)
X = torch.randn(4, 8)


def test_random_numbers_before_an_error() -> None:
    def fn(x: Tensor) -> Tensor:
        scale = random.random()
        if scale < 2:
            raise KeyError(scale)
        return x

    def run(region: Callable[..., Any]) -> Any:
        random.seed(0)
        with pytest.raises(KeyError):
            region(X)
        return random.random()

    planned = fckpt.remat(fn, budget=1.0)
    assert run(planned) == run(fn) == run(planned)


class Raising(nn.Module):
    """Counts, draws and writes before it raises an error of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.dropout = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.calls, self.limit = 0, 100
        self.log: list[int] = []
        self.kind: type[BaseException] = ValueError

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.dropout(self.norm(self.first(x)))
        self.log.append(len(x))
        if len(x) > self.limit:
            raise self.kind("too many")
        return h.square().mean()


class Own(BaseException):
    pass


@pytest.mark.parametrize("limits", [(100, 2, 100), (2, 100, 100)])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, Own])
def test_what_a_call_does_before_it_raises_an_error_is_done(kind: Any, limits: tuple[int, ...]) -> None:
    def run(net: Any) -> list[Any]:
        net.kind = kind
        torch.manual_seed(0)
        found: list[Any] = []
        for limit in limits:
            net.limit = limit
            try:
                found.append(net(X))
            except kind as error:
                found.append(str(error))
            found += [net.calls, list(net.log), *(b.clone() for b in net.buffers()), torch.get_rng_state()]
        return found

    plain = Raising()
    planned = fckpt.remat(copy.deepcopy(plain), budget=1.0)
    assert_equal(run(planned), run(plain))


def interrupted(*_: Any) -> None:
    raise TimeoutError


@pytest.mark.parametrize("handler", [signal.default_int_handler, interrupted, lambda *_: sys.exit()])
def test_an_interrupt_from_outside_leaves_nothing_behind(handler: Any) -> None:
    plain = Raising()
    net = copy.deepcopy(plain)
    called: list[int] = []

    def forward(x: Tensor) -> Tensor:
        h = net(x)
        called.append(1)
        signal.raise_signal(signal.SIGINT)  # as if someone pressed Ctrl-C now
        return h

    state, before = torch.get_rng_state(), signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises((KeyboardInterrupt, TimeoutError, SystemExit)):
            fckpt.remat(forward, budget=1.0)(X)
    finally:
        signal.signal(signal.SIGINT, before)
    assert_equal([*net.buffers(), torch.get_rng_state(), *called], [*plain.buffers(), state])


class Failing(torch.autograd.Function):
    """Raises an error in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: Any) -> Tensor:
        ctx.kind = kind
        return x * 2

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        if ctx.kind == "shape":
            return cotangents[0][:1], None
        raise ctx.kind("backward")


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, Own, "shape"])
@pytest.mark.parametrize("options", [{"budget": 1.0}, {"policy": fckpt.policies.everything_saveable}], ids=str)
def test_an_error_of_the_backward_pass_is_raised_there(kind: Any, options: Any) -> None:
    raised = RuntimeError if kind == "shape" else kind

    def run(planned: Callable[..., Any] | None) -> list[Any]:
        net, x = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout()), X.clone().requires_grad_()
        fn = lambda x: Failing.apply(net(x), kind).sin().sum()
        torch.manual_seed(0)
        loss = (planned or (lambda fn: fn))(fn)(x)
        with pytest.raises(raised) as error:
            loss.backward()
        return [loss, str(error.value), *net.buffers(), torch.get_rng_state()]

    def planned(fn: Any) -> Any:
        made.append(fckpt.remat(fn, **options))
        return made[-1]

    made: list[Any] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert_equal(run(planned), run(None))
    assert fckpt.stats(made[0]).fallbacks == {"raises an error": 1}
    texts = [str(w.message) for w in found if w.category is fckpt.BudgetWarning]
    assert len(texts) == ("budget" in options) and all("its backward pass raises an error" in text for text in texts)


def test_a_call_whose_backward_pass_raises_an_error_keeps_nothing() -> None:
    def is_kept() -> bool:
        fn = fckpt.remat(lambda x: Failing.apply(x.sin(), "shape").sum(), policy=fckpt.policies.everything_saveable)
        x = X.clone().requires_grad_()
        gone = weakref.ref(x)
        gc.disable()
        try:
            fn(x)
            del x
            return gone() is not None
        finally:
            gc.enable()

    is_kept()  # a first capture imports modules, which keeps frames
    assert not is_kept()


def test_an_error_of_torch_has_its_own_text() -> None:
    fn = lambda x: (x @ torch.ones(9, 9) @ W).sum()
    with pytest.raises(RuntimeError) as want:
        fn(X)
    with pytest.raises(RuntimeError) as got:
        fckpt.remat(fn, budget=1.0)(X)
    assert str(got.value) == str(want.value) and type(got.value) is type(want.value)


def test_a_check_that_fails_says_that_attributes_are_unchanged() -> None:
    class Checked(Raising):
        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            loss = self.first(x).square().mean()
            if not torch.isfinite(loss):
                raise RuntimeError("not finite")
            return loss

    planned = fckpt.remat(Checked(), budget=1.0)
    planned(X)
    with pytest.warns(fckpt.GradientWarning, match="not changed in this call"), pytest.raises(RuntimeError):
        planned(X * float("nan"))


class OwnText(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(first)
        self.second = second

    def __str__(self) -> str:
        return f"{self.args} and {self.second}"


class OwnKey(KeyError):
    pass


RAISED: dict[str, Callable[[], Any]] = {
    "key": lambda: {}["scale"],
    "popped key": lambda: {}.pop("scale"),
    "attribute of None": lambda: None.scale,  # type: ignore[attr-defined]
    "attribute of a list": lambda: [].scale,  # type: ignore[attr-defined]
    "length": lambda: len(5),  # type: ignore[arg-type]
    "index": lambda: [1].index(5),
    "number": lambda: int("x"),
    "division": lambda: 1 // 0,
}


def raising_key() -> None:
    raise KeyError("scale")


def raising_own_key() -> None:
    raise OwnKey("scale")


def raising_own() -> None:
    raise OwnText(1, 2)


def raising_two() -> None:
    raise ValueError("a", "b")


def raising_none() -> None:
    raise ValueError


def raising_system() -> None:
    raise OSError(2, "no file", "name")


RAISED |= {
    f.__name__: f for f in (raising_key, raising_own_key, raising_own, raising_two, raising_none, raising_system)
}
TEXTS: dict[str, Callable[[BaseException], Any]] = {
    "str": str,
    "repr": repr,
    "f-string": lambda e: f"{e}",
    "f-string of repr": lambda e: f"{e!r}",
    "%": lambda e: "%s" % e,  # noqa: UP031
    "% of two": lambda e: "%s %r" % (e, e),  # noqa: UP031
    "format": lambda e: "{} {x}".format(e, x=e),  # noqa: UP032
    "__str__": lambda e: e.__str__(),
    "args": lambda e: e.args,
    "class": lambda e: type(e).__name__,
    "list": lambda e: str([e]),
    "join": lambda e: ", ".join(map(str, [e, 1])),
}


@pytest.mark.parametrize("how", TEXTS)
@pytest.mark.parametrize("name", RAISED)
def test_texts_of_exceptions_are_pythons(name: str, how: str) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Any]:
        note = ""
        try:
            RAISED[name]()
        except Exception as error:
            note = TEXTS[how](error)
        return (x @ W).tanh() * len(note), note

    planned = fckpt.remat(fn, budget=1.0)
    for _ in range(2):
        try:
            got, want = planned(X), fn(X)
        except fckpt.TraceError:
            continue
        assert got[1] == want[1] and type(got[1]) is type(want[1])
        assert_equal(got[0], want[0])


def test_an_exception_that_is_only_caught_is_captured() -> None:
    def fn(x: Tensor) -> Tensor:
        try:
            scale = {"other": 1.0}["scale"]
        except KeyError:
            scale = 2.0
        return (x @ W * scale).tanh()

    planned = fckpt.remat(fn, budget=1.0)
    assert_equal(planned(X), fn(X))
    assert fckpt.stats(planned).captures


@pytest.mark.parametrize("value", [[1.0], {}, (1,), {1}, range(2), "a", 3, X], ids=lambda value: type(value).__name__)
def test_an_attribute_that_is_asked_for_by_reading_it(value: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        try:
            value.shape  # noqa: B018
            scale = 1.0
        except AttributeError:
            scale = 2.0
        return (x @ W * scale).tanh()

    assert_equal(fckpt.remat(fn, budget=1.0)(X), fn(X))


def with_a_set(w: Tensor, x: Tensor) -> Tensor:
    for i in {1, len(x)}:
        x = x * i
    return (x @ w).sum()


@pytest.mark.parametrize("fn", [lambda w, x: (x @ w).sum(), with_a_set])
def test_torch_logs_nothing_about_an_error_of_the_function(fn: Any) -> None:
    records: list[logging.LogRecord] = []
    logger, handler = logging.getLogger("torch._subclasses.fake_tensor"), logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        with pytest.raises((RuntimeError, IndexError)):
            fckpt.remat(lambda x: fn(W, x) + (x @ torch.ones(9, 9)).sum(), budget=1.0)(X)
        assert not records
        logger.error("of someone else", exc_info=ValueError())
        assert len(records) == 1
    finally:
        logger.removeHandler(handler)
