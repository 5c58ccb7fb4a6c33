"""Settings, modes and derivatives around a region: the recompute is what the forward was, or an error says so."""

from __future__ import annotations

import contextlib
import cProfile
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal, leaf
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import fckpt

W = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)) / 2
X = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(2))


def attention(w: Tensor, x: Tensor) -> Tensor:
    h = (x @ w)[:, None]
    return torch.tanh(F.scaled_dot_product_attention(h, h.sin(), h.cos(), is_causal=True)).exp()


def linear(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(torch.tanh(x @ w) @ w).exp().sin()


def convolution(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(F.conv1d(x.tanh(), w[:, None].expand(8, 16, 8)[..., :3].contiguous())).exp()


@contextlib.contextmanager
def without_mkldnn() -> Iterator[None]:
    torch._C._set_mkldnn_enabled(False)  # what `torch.backends.mkldnn.flags` does, which warns about other devices
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


math_only = lambda: sdpa_kernel(SDPBackend.MATH)
SETTINGS: dict[str, tuple[Callable[..., Tensor], Callable[[], Any]]] = {
    "attention kernels": (attention, math_only),
    "mkldnn": (convolution, without_mkldnn),
    "autocast": (linear, lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "autocast of attention": (attention, lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "nothing": (linear, contextlib.nullcontext),
}


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("functional", [False, True])
def test_settings_of_one_pass(name: str, when: str, functional: bool) -> None:
    fn, setting = SETTINGS[name]

    def gradients(fn: Any) -> list[Tensor]:
        first, second = (setting, contextlib.nullcontext) if when == "forward" else (contextlib.nullcontext, setting)
        if functional:
            with first():
                out, vjp = torch.func.vjp(fn, W, X)
            with second():
                return [out, *vjp(torch.ones_like(out))]
        w, x = leaf(W), leaf(X)
        with first():
            out = fn(w, x)
        with second():
            out.float().sum().backward()
        return [out, w.grad, x.grad]  # type: ignore[list-item]

    before = fckpt._call.ambient.capture()
    assert_equal(gradients(fckpt.remat(fn)), gradients(fn))
    assert before == fckpt._call.ambient.capture()


class Quantised(TorchDispatchMode):
    """Changes what sine returns."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is torch.ops.aten.sin.default else out


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_dispatch_mode_around_one_pass(when: str) -> None:
    fn = lambda w, x: torch.tanh((x @ w).sin()).exp().sin()
    first, second = (Quantised, contextlib.nullcontext) if when == "forward" else (contextlib.nullcontext, Quantised)
    for region in (fn, fckpt.remat(fn)):
        w, x = leaf(W), leaf(X)
        with first():
            out = region(w, x)
        with second():
            if region is fn:
                out.sum().backward()
                continue
            with pytest.raises(fckpt.ImpureFunctionError, match="a mode"):
                out.sum().backward()


def test_a_dispatch_mode_around_both_passes() -> None:
    fn, got = lambda w, x: torch.tanh((x @ w).sin()).exp().sin(), []
    for region in (fn, fckpt.remat(fn)):
        w, x = leaf(W), leaf(X)
        with Quantised():
            region(w, x).sum().backward()
        got.append([w.grad, x.grad])
    assert_equal(got[1], got[0])


class Profiler:
    """Sets itself as the profiler of the thread: a function of Python, as `sys.setprofile` takes it."""

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        pass

    def __enter__(self) -> None:
        sys.setprofile(self)

    def __exit__(self, *error: object) -> None:
        assert sys.getprofile() is self
        sys.setprofile(None)


class Counted(cProfile.Profile):
    """A profile that has seen what was called after the region."""

    def __exit__(self, *error: object) -> None:
        called_at_the_end()
        super().__exit__(*error)
        assert any(getattr(row.code, "co_name", "") == "called_at_the_end" for row in self.getstats())


def called_at_the_end() -> None:
    pass


def recorded() -> Any:
    return torch.profiler.profile(acc_events=True)  # torch 2.11 warns without this option


def looking_for_nan() -> Any:
    return torch.autograd.set_detect_anomaly(True)


@pytest.mark.parametrize("watching", [Profiler, Counted, recorded, looking_for_nan])
@pytest.mark.parametrize("captured", [True, False])
def test_a_profiler_or_anomaly_mode_around_the_first_planned_call(watching: Callable[[], Any], captured: bool) -> None:
    """Without `captured`, Dynamo does not capture the function: its Python code is traced under `sys.setprofile`."""
    before = sys.getprofile()
    generator = torch.Generator()

    def fn(w: Tensor, x: Tensor) -> Tensor:
        return linear(w, x * (1 if captured else torch.rand(8, generator=generator)))

    got = []
    for region in (fn, fckpt.remat(fn, budget=0.9)):
        w, x = leaf(W), leaf(X)
        generator.manual_seed(0)
        with watching():
            region(w, x).sum().backward()
        sys.setprofile(before)
        got.append([w.grad, x.grad])
    assert_equal(got[1], got[0])


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "tanh": linear,
    "silu": lambda w, x: F.silu(F.silu(x @ w) @ w),
    "layer norm": lambda w, x: F.layer_norm(x @ w, (8,)).tanh(),
    "softmax": lambda w, x: (x @ w).softmax(-1) @ w,
    "in place": lambda w, x: (x @ w).sin().mul_(2).tanh(),
    "convolution": convolution,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("nested", [False, True])
def test_third_derivatives_of_recorded_backwards(name: str, nested: bool) -> None:
    fn = FUNCTIONS[name]
    region = fckpt.remat(fn)
    if nested:
        region = fckpt.remat(lambda w, x: fckpt.remat(fn)(w, x))

    def derivatives(fn: Any) -> list[Tensor]:
        w, x, found = leaf(W), leaf(X), []
        out = fn(w, x).sin().sum()
        for _ in range(2):
            grads = torch.autograd.grad(out, (w, x), create_graph=True)
            found += [g.detach().clone() for g in grads]
            out = sum(g.sin().sum() for g in grads)  # type: ignore[assignment]
        out.backward()
        return [*found, w.grad, x.grad]  # type: ignore[list-item]

    assert_equal(derivatives(region), derivatives(fn))
