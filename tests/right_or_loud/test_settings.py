"""Settings around a planned call that change what is computed, hooks and patches that come later."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal
from judge import Session, judge
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fckpt
from fckpt._capture import captured


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in parts)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Halving(TorchDispatchMode):
    """A user's mode that changes what an operation computes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is torch.ops.aten.tanh.default else out


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.tanh else out


@contextlib.contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def default_dtype() -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SETTINGS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast without a cache": lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
    "another autocast": lambda: torch.autocast("cpu", dtype=torch.float16),
    "mkldnn off": lambda: torch.backends.mkldnn.flags(enabled=False),
    "math attention": lambda: sdpa_kernel([SDPBackend.MATH]),
    "deterministic": deterministic,
    "default dtype": default_dtype,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "a dispatch mode": Halving,
    "a function mode": Doubling,
    "saved on the host": lambda: torch.autograd.graph.save_on_cpu(),
    "anomalies": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "a device": lambda: torch.device("cpu"),
    "multithreading off": lambda: torch.autograd.set_multithreading_enabled(False),
}
MAY_REFUSE = {"a dispatch mode", "inference"}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("first", ["without", "within"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_that_is_switched_between_calls(setting: str, first: str) -> None:
    def scenario(session: Session) -> None:
        net = nn.Sequential(Attention(), nn.Tanh(), Attention())
        x = session.leaf(2, 48, 32)
        session.watch(net=net)
        f = session.region(lambda x: torch.tanh(net(x)).add(torch.ones(32)).sum(dtype=torch.float32))

        def within() -> Any:
            with SETTINGS[setting]():
                return f(x)

        order = [lambda: f(x), within] if first == "without" else [within, lambda: f(x)]
        for run in (*order, *order):
            session.step(run, times=1, peak=False)

    verdict = judge(scenario, budget=0.8)
    if setting not in MAY_REFUSE:
        assert verdict.outcome == "equal", verdict.error


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("budget", [1.0, "1MiB"])
@pytest.mark.parametrize("trained", [False, True])
def test_evaluation_leaves_the_modes_as_they_are(mode: Callable[[], Any], budget: Any, trained: bool) -> None:
    """A fraction of the plain peak needs a trace, in which gradients are taken."""
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    f = fckpt.remat(lambda x: net(x).square().mean(), budget=budget)
    if trained:
        f(torch.randn(3, 6)).backward()
    for size in (3, 4, 5, 3):
        with mode():
            x = torch.randn(size, 6)
            loss = f(x)
            assert torch.equal(loss, net(x).square().mean())
            assert not loss.requires_grad
            assert not torch.is_grad_enabled()
            assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
        assert torch.is_grad_enabled()
    f(torch.randn(3, 6)).backward()


class Shifting(TorchFunctionMode):
    """Has a number that may change."""

    def __init__(self, shift: float = 1.0) -> None:
        super().__init__()
        self.shift = shift

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out + self.shift if func in (torch.tanh, torch.zeros) else out


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("backward", ["within", "outside"])
def test_a_function_mode_applies_once(backward: str, device: bool) -> None:
    """The captured graph contains what the mode did."""

    def scenario(session: Session) -> None:
        w, x = session.leaf(32, 32), session.leaf(48, 32)
        f = session.region(lambda w, x: (torch.tanh(x @ w).sin() + torch.zeros(32)).exp().sum())

        def run() -> Any:
            with torch.device("cpu") if device else contextlib.nullcontext():
                loss = f(w, x)
                if backward == "within":
                    loss.backward()
            return loss.detach() if backward == "within" else loss

        for mode in (Shifting(), None, Shifting(2.0), Shifting()):

            def around(mode: Any = mode) -> Any:
                with mode or contextlib.nullcontext():
                    return run()

            session.step(around, times=2, peak=False)

    assert judge(scenario, budget=0.9).outcome == "equal"


class Hidden(Shifting):
    """Holds its state where no fact describes it."""

    def __init__(self) -> None:
        super().__init__()
        self.held = object()


@pytest.mark.parametrize("device", [False, True])
def test_function_modes_around_code_that_is_traced_by_running_it(device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise captured.CaptureError("not now")

    monkeypatch.setattr(captured, "capture", refuse)

    def scenario(session: Session) -> None:
        w, x = session.leaf(32, 32), session.leaf(48, 32)
        f = session.region(lambda w, x: (torch.tanh(x @ w).sin() + torch.zeros(32)).exp().sum())

        for mode in (Shifting(), None, Shifting(2.0), Shifting()):

            def around(mode: Any = mode) -> Any:
                with torch.device("cpu") if device else contextlib.nullcontext(), mode or contextlib.nullcontext():
                    return f(w, x)

            session.step(around, times=2, peak=False)

    assert judge(scenario, budget=1.0).outcome == "equal"
    with Hidden(), pytest.raises(fckpt.TraceError, match="state of the torch function mode Hidden"):
        fckpt.remat(lambda x: x.tanh().sum(), budget=1.0)(torch.ones(4, requires_grad=True))


@pytest.mark.parametrize("forward", ["autocast", "plain"])
def test_a_backward_under_other_settings_than_the_forward(forward: str) -> None:
    """Plain autograd casts as backward finds it."""

    def scenario(session: Session) -> None:
        net = nn.Sequential(Attention(), nn.Tanh(), nn.Linear(32, 32))
        x = session.leaf(2, 48, 32)
        session.watch(net=net)
        f = session.region(lambda x: net(x).float().sum())

        def run() -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=forward == "autocast"):
                loss = f(x)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=forward != "autocast"):
                loss.backward()
            return loss.detach()

        session.step(run, lambda loss: loss)

    assert judge(scenario, budget=0.8).outcome == "equal"


def is_that(module: nn.Module, other: nn.Module) -> bool:
    """Whether a hook is called for a module: a rematerialised one is another object with the same `__dict__`."""
    return vars(module) is vars(other)


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda m: m.register_forward_hook(lambda module, args, out: out * 2),
    "forward pre": lambda m: m.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "forward, with kwargs": lambda m: m.register_forward_hook(lambda mod, a, k, out: out * 2, with_kwargs=True),
    "backward": lambda m: m.register_full_backward_hook(lambda module, grad_in, out: (grad_in[0] * 2,)),
    "backward pre": lambda m: m.register_full_backward_pre_hook(lambda module, out: (out[0] * 2,)),
    "of a parameter": lambda m: m.weight.register_hook(lambda g: g * 2),
    "after accumulation": lambda m: m.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2)),
    "global forward": lambda m: nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out * 2 if is_that(module, m) else out
    ),
    "global pre": lambda m: nn.modules.module.register_module_forward_pre_hook(
        lambda module, args: (args[0] * 2,) if is_that(module, m) else args
    ),
    "global backward": lambda m: nn.modules.module.register_module_full_backward_hook(
        lambda module, grad_in, out: (grad_in[0] * 2,) if is_that(module, m) else grad_in
    ),
}
MAY_BE_REFUSED = {"backward", "backward pre", "global backward"}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("place", ["inside", "outermost"])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_that_come_and_go(kind: str, place: str) -> None:
    def scenario(session: Session) -> None:
        inner = nn.Linear(32, 32)
        net = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), inner, nn.GELU()) if place == "inside" else inner
        x = session.leaf(96, 32)
        session.watch(net=net)
        f = session.region(net)
        session.step(lambda: f(x), times=2, peak=False)
        handle = HOOKS[kind](inner)
        session.undo(handle.remove)
        session.step(lambda: f(x), times=2, peak=False)
        handle.remove()
        session.step(lambda: f(x), times=2, peak=False)

    verdict = judge(scenario, budget=0.9)
    if kind not in MAY_BE_REFUSED:
        assert verdict.outcome == "equal", verdict.error


def test_hooks_fire_at_every_call() -> None:
    """What a hook counts or remembers is what it counts plainly."""

    def scenario(session: Session) -> None:
        net = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        log: dict[str, Any] = {"forward": 0, "grads": 0}

        def count(module: nn.Module, args: Any, out: Tensor) -> None:
            log["forward"] += 1

        def count_gradients(grad: Tensor) -> None:
            log["grads"] += 1

        net[1].register_forward_hook(count)
        net[2].weight.register_hook(count_gradients)
        x = session.leaf(96, 32)
        session.watch(net=net, log=log)
        f = session.region(net)
        session.step(lambda: f(x))

    assert judge(scenario, budget=0.9).outcome == "equal"


PATCHES: dict[str, tuple[Any, str, Any]] = {
    "torch.nn.functional": (F, "gelu", lambda x: x * 3),
    "math": (math, "sqrt", lambda x: 3.0),
    "torch": (torch, "tanh", lambda x: x * 3),
    "Tensor": (Tensor, "sin", lambda x: x * 3),
    "a layer of torch": (nn.Linear, "forward", lambda self, x: x * 3),
    "a call of a layer": (nn.LayerNorm, "__call__", lambda self, x: x * 3),
}


@pytest.mark.parametrize("patch", PATCHES)
def test_functions_of_libraries_that_are_patched(patch: str) -> None:
    def scenario(session: Session) -> None:
        linear, norm = nn.Linear(32, 32), nn.LayerNorm(32)
        x = session.leaf(96, 32)
        session.watch(linear=linear, norm=norm)
        f = session.region(lambda x: (F.gelu(torch.tanh(norm(linear(x)))).sin() * math.sqrt(4.0)).exp())
        session.step(lambda: f(x), times=2, peak=False)
        owner, name, new = PATCHES[patch]
        had, old = name in vars(owner), getattr(owner, name)
        setattr(owner, name, new)
        session.undo(lambda: setattr(owner, name, old) if had else delattr(owner, name))
        session.step(lambda: f(x), times=2, peak=False)

    verdict = judge(scenario, budget=0.9)
    assert verdict.outcome in ("equal", "TraceError"), verdict.error


STREAMS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "random.Random": (lambda: random.Random(3), lambda r: r.random()),
    "NumPy's Generator": (lambda: np.random.default_rng(3), lambda r: float(r.random())),
    "NumPy's RandomState": (lambda: np.random.RandomState(3), lambda r: float(r.rand())),
    "Python's": (lambda: random, lambda r: r.random()),
    "NumPy's": (lambda: np.random, lambda r: float(r.rand())),
    "a torch.Generator": (
        lambda: torch.Generator().manual_seed(3),
        lambda r: torch.rand((), generator=r),  # type: ignore[dict-item,return-value]
    ),
}


@pytest.mark.parametrize("place", ["closure", "submodule"])
@pytest.mark.parametrize("stream", STREAMS)
def test_random_streams_are_drawn_at_every_call_or_refused(stream: str, place: str) -> None:
    make, draw = STREAMS[stream]

    def scenario(session: Session) -> None:
        rng, x, w = make(), session.leaf(96, 32), session.leaf(32, 32)

        class Noisy(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.tanh(x @ w).sin() * draw(rng)

        if stream == "a torch.Generator":
            session.watch(rng=rng)
        net = nn.Sequential(Noisy(), nn.GELU())
        f = session.region(net if place == "submodule" else lambda x: F.gelu(torch.tanh(x @ w).sin() * draw(rng)))
        session.step(lambda: f(x), peak=False)

    judge(scenario, budget=0.9)


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


ELSEWHERE: dict[str, tuple[Callable[[], Any], Callable[[Tensor], Tensor], float]] = {
    "oneDNN": (lambda: torch.backends.mkldnn.flags(enabled=False), lambda x: F.gelu(x).square().mean(), 1.0),
    "oneDNN and a convolution": (
        lambda: torch.backends.mkldnn.flags(enabled=False),
        lambda x: F.conv1d(x[:, None], torch.linspace(-1, 1, 9).view(3, 1, 3)).tanh().exp().mean(),
        1.0,
    ),
    "denormal numbers": (flushed, lambda x: ((x * 0.1).tanh() * (x * 0.1)).sum() * 1e38, 1e-38),
}


@pytest.mark.parametrize("options", [{"budget": 1.0}, {"policy": fckpt.policies.nothing_saveable}, {}], ids=str)
@pytest.mark.parametrize("within", ["forward", "backward", "both"])
@pytest.mark.parametrize("setting", ELSEWHERE)
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_settings_of_one_pass(setting: str, within: str, options: dict[str, Any]) -> None:
    block, fn, scale = ELSEWHERE[setting]
    x = (torch.randn(8, 40) * scale).requires_grad_()
    region = fckpt.remat(fn, **options)

    def grads(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        with block() if within != "backward" else contextlib.nullcontext():
            loss = call(x)
        with block() if within != "forward" else contextlib.nullcontext():
            return [loss.detach(), *torch.autograd.grad(loss, x)]

    grads(fckpt.remat(fn))
    loud = within != "both" and "budget" in options
    for _ in range(2):
        with pytest.warns(fckpt.BudgetWarning, match="under other settings") if loud else contextlib.nullcontext():
            found = grads(region)
        loud = False
        assert_equal(found, grads(fn))
