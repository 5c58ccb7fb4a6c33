"""Settings of torch that a planned function changes or asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import assert_equal
from torch import Tensor

import fckpt

BUDGET = 10**9


def seen() -> tuple[Any, ...]:
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_autocast_enabled("cpu"),
        torch.is_anomaly_enabled(),
    )


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    then = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    yield
    torch.set_default_dtype(then[0])
    torch.set_float32_matmul_precision(then[1])
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_autocast_enabled("cpu", False)
    torch.autograd.set_detect_anomaly(False)


def dtype_within(x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    ones = torch.ones(3)
    torch.set_default_dtype(torch.float32)
    return x * ones


def dtype_left(x: Tensor) -> Tensor:
    y = x * torch.ones(3)
    torch.set_default_dtype(torch.float64)
    return y


def grad_mode_left(x: Tensor) -> Tensor:
    y = x.sin()
    torch.set_grad_enabled(False)
    return y


def deterministic(x: Tensor) -> Tensor:
    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())
    return x.sin()


def precision(x: Tensor) -> Tensor:
    torch.set_float32_matmul_precision("high" if torch.get_float32_matmul_precision() == "highest" else "highest")
    return x.sin()


def autocast_left(x: Tensor) -> Tensor:
    torch.set_autocast_enabled("cpu", True)
    return (x @ x.mT).float()


def anomalies_left(x: Tensor) -> Tensor:
    torch.autograd.set_detect_anomaly(True)
    return x.sin()


WRITES = [dtype_within, dtype_left, grad_mode_left, deterministic, precision, autocast_left, anomalies_left]


@pytest.mark.parametrize("fn", WRITES)
def test_a_function_that_changes_a_setting_is_refused(fn: Callable[[Tensor], Tensor]) -> None:
    before, planned = seen(), fckpt.remat(fn, budget=BUDGET)
    for _ in range(2):
        with pytest.raises(fckpt.TraceError, match=r"the function (sets|changes)"):
            planned(torch.ones(2, 3, requires_grad=True))
        assert seen() == before


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.exp()
    return x * scale


def set_back(x: Tensor) -> Tensor:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    scale = x.exp()
    torch.set_grad_enabled(before)
    return x * scale


def cast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ x.mT).float()


@torch.no_grad()
def decorated(x: Tensor) -> Tensor:
    return x.exp()


SET_BACK = [without_gradient, set_back, cast, lambda x: x * decorated(x)]


@pytest.mark.parametrize("fn", SET_BACK)
def test_modes_that_are_set_back(fn: Callable[[Tensor], Tensor]) -> None:
    planned = fckpt.remat(fn, budget=BUDGET)
    for _ in range(2):
        x, y, before = torch.ones(2, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True), seen()
        out = planned(x)
        assert seen() == before
        assert_equal((out, torch.autograd.grad(out.sum(), x)), (want := fn(y), torch.autograd.grad(want.sum(), y)))
    assert fckpt.stats(planned).captures == 1


ASKED: dict[str, Callable[[], Any]] = {
    "grad mode": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "precision": torch.get_float32_matmul_precision,
    "default dtype": torch.get_default_dtype,
}
CALLS: list[Callable[[], Any]] = [
    contextlib.nullcontext,
    torch.no_grad,
    torch.inference_mode,
    lambda: torch.use_deterministic_algorithms(True),
    lambda: torch.set_float32_matmul_precision("high"),
    lambda: torch.set_default_dtype(torch.float64),
    torch.no_grad,
]


@pytest.mark.filterwarnings("ignore:.*is captured for the:fckpt.PlanWarning")
@pytest.mark.parametrize("name", ASKED)
def test_a_setting_that_a_function_asks_for(name: str) -> None:
    usual = ASKED[name]()
    fn = lambda x: x.sin() * (5 if ASKED[name]() == usual else 7)
    planned = fckpt.remat(fn, budget=BUDGET)
    for change in CALLS:
        with change() or contextlib.nullcontext():
            want = fn(torch.ones(3))
            if name == "inference mode" and torch.is_inference_mode_enabled():
                with pytest.raises(fckpt.TraceError, match="asks for the inference mode"):
                    planned(torch.ones(3))
                continue
            assert_equal(planned(torch.ones(3)), want)


def no_saved_tensor_hooks() -> Any:
    return torch.autograd.graph.disable_saved_tensors_hooks("disabled here")


WITHIN: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "sdpa_kernel": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "saved-tensor hooks": no_saved_tensor_hooks,
    "dual_level": torch.autograd.forward_ad.dual_level,
    "device": lambda: torch.device("cpu"),
}


def ambient_state() -> tuple[Any, ...]:
    with contextlib.ExitStack() as stack:
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        allowed = True
        try:
            stack.enter_context(hooks)
        except RuntimeError:
            allowed = False
    attention = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()
    level = torch.autograd.forward_ad.enter_dual_level()
    torch.autograd.forward_ad.exit_dual_level(level=level)
    return (*seen(), torch.is_inference_mode_enabled(), attention, allowed, level, float(torch.ones(3).sum()))


def selected(h: Tensor) -> Tensor:
    return h[h > 0].sum()


def raising(h: Tensor) -> Tensor:
    return torch.linalg.cholesky(h) + h.reshape(5, 5)  # the shape does not fit


def flat(h: Tensor) -> Tensor:
    return h.detach().view(-1).sum()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("transform", ["", "jvp", "vmap", "grad"])
@pytest.mark.parametrize("last", [selected, raising, flat])
@pytest.mark.parametrize("context", WITHIN)
def test_contexts_are_exited_if_a_call_is_refused_or_raises(
    context: str, last: Callable[[Tensor], Tensor], transform: str
) -> None:
    def within(x: Tensor, w: Tensor) -> Tensor:
        with WITHIN[context](), torch.autocast("cpu", enabled=False):
            return last(x) + last(torch.tanh(x @ w))

    def fn(x: Tensor, w: Tensor) -> Any:
        if transform == "jvp":
            return torch.func.jvp(lambda x: within(x, w), (x,), (x,))
        if transform == "vmap":
            return torch.func.vmap(within, in_dims=(0, None))(x[None], w)
        return torch.func.grad(within)(x, w) if transform == "grad" else within(x, w)

    x, w = torch.randn(6, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True)
    before = ambient_state()
    with contextlib.suppress(fckpt.TraceError, RuntimeError):  # `raising` raises an error in a plain call
        fckpt.remat(fn, budget=1.0)(x, w)
    assert ambient_state() == before


def test_a_view_of_an_argument_in_inference_mode_is_refused() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.inference_mode():
            x.detach().abs().max()
        return x.sin()

    with pytest.raises(fckpt.TraceError, match=r"inference mode.*view.*Use `torch.no_grad\(\)`"):
        fckpt.remat(fn, budget=1.0)(torch.ones(3, requires_grad=True))
