"""Where other checkpoints are silently wrong: here each is right, or an error says so."""

from __future__ import annotations

import contextlib
import functools
import gc
import linecache
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal, leaf, seeded
from torch import Tensor, nn
from torch.func import grad
from torch.overrides import TorchFunctionMode

import fckpt

X = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def backward(fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    x = leaf(X)
    fn(x).sum().backward()
    return x.grad  # type: ignore[no-any-return]


def functional(fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return grad(lambda x: fn(x).sum())(X)


WAYS = [backward, functional]


@pytest.mark.parametrize("way", WAYS)
def test_early_stop_with_rrelu_last(way: Any) -> None:
    """pytorch#193671: the last saved value is noise that is saved before it is drawn."""
    fn = lambda x: F.rrelu(torch.sin(x) * 2, training=True)
    expected, state = seeded(lambda: way(fn))
    actual, state_after = seeded(lambda: way(fckpt.remat(fn)))
    assert_equal(actual, expected)
    assert torch.equal(state, state_after)


def test_random_numbers_under_threads_are_right_or_an_error() -> None:
    """Threads share torch's CPU generator: a recompute would draw what another thread drew."""
    wrong: list[str] = []
    outcomes = {"right": 0, "error": 0}
    barrier = threading.Barrier(4)

    def masks_agree(x: torch.Tensor) -> None:
        out = fckpt.remat(lambda x: F.dropout(torch.sin(x).exp(), 0.5))(x)
        out.sum().backward()
        # The derivative of a dropped value is zero, and of a kept one it is not.
        if not torch.equal(out == 0, x.grad == 0):
            wrong.append("silently wrong")

    def work() -> None:
        for _ in range(50):
            barrier.wait(timeout=5)
            try:
                masks_agree(torch.randn(64, 64, requires_grad=True))
                outcomes["right"] += 1
            except (fckpt.RandomStateError, fckpt.ImpureFunctionError):
                outcomes["error"] += 1

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    assert sum(outcomes.values()) == 200


def test_no_garbage_is_collected_while_torch_holds_the_lock_of_a_generator() -> None:
    """The collector may switch threads, and a thread that waits for the lock would keep Python's lock."""
    lines = set()

    def note(phase: str, info: dict[str, int]) -> None:
        frame = sys._getframe(1)
        lines.add(linecache.getline(frame.f_code.co_filename, frame.f_lineno))

    before = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        x = torch.ones(8, requires_grad=True)
        for _ in range(20):
            fckpt.remat(lambda x: F.dropout(x.sin(), 0.5).exp())(x).sum().backward()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)
    assert lines
    assert not any("get_state()" in line for line in lines)


def test_a_thread_that_draws_between_is_noticed() -> None:
    drew = threading.Event()

    def fn(x: torch.Tensor) -> torch.Tensor:
        h = F.dropout(torch.sin(x).exp(), 0.5)
        if not drew.is_set():
            other = threading.Thread(target=lambda: (torch.rand(3), drew.set()))
            other.start()
            other.join()
        return F.dropout(h.sin().exp(), 0.5)

    idle = threading.Event()
    waiting = threading.Thread(target=idle.wait)
    waiting.start()
    try:
        with pytest.raises(fckpt.RandomStateError, match="another thread drew"):
            backward(fckpt.remat(fn))
    finally:
        idle.set()
        waiting.join()


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.sin else result


@pytest.mark.parametrize("cause", ["mode", "requires_grad"])
def test_values_that_differ_are_not_put_down_to_threads_alone(cause: str) -> None:
    """The other thread only waits."""
    w = torch.randn(8, 8, requires_grad=True)
    fn = lambda x: F.dropout(torch.sin(x @ w).exp(), 0.5).sin().sum()
    idle = threading.Event()
    waiting = threading.Thread(target=idle.wait)
    waiting.start()
    try:
        with Doubling() if cause == "mode" else contextlib.nullcontext():
            loss = fckpt.remat(fn)(torch.randn(8, 8, requires_grad=True))
        w.requires_grad_(cause == "mode")
        with pytest.raises(
            fckpt.FckptError, match=r"^saved value .*not pure.*requires_grad was switched.*FunctionMode"
        ):
            loss.backward()
    finally:
        idle.set()
        waiting.join()


def test_another_function_of_the_same_shape_in_the_recompute_is_an_error() -> None:
    """Sin in forward, cos in the recompute: torch's checkpoint returns a wrong gradient."""
    calls = 0

    def fn(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return (torch.sin(x) if calls == 1 else torch.cos(x)).exp().sin()

    with pytest.raises(fckpt.ImpureFunctionError, match=r"beginning with the bytes.*not pure"):
        backward(fckpt.remat(fn))


def test_another_constant_in_the_recompute_is_an_error() -> None:
    factors = iter([2.0, 3.0])
    with pytest.raises(fckpt.ImpureFunctionError, match="beginning with the bytes"):
        backward(fckpt.remat(lambda x: (x * next(factors)).exp().sin()))


def test_a_function_that_changes_where_nothing_is_saved_keeps_its_gradient() -> None:
    """The graph is that of the forward: what the recompute does beyond the saved values cannot matter."""
    calls = 0

    def fn(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return torch.sin(x) if calls == 1 else torch.cos(x)

    assert_equal(backward(fckpt.remat(fn)), X.cos())


@pytest.mark.parametrize("way", WAYS)
def test_python_and_numpy_randomness(way: Any) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        scale = random.random() + random.gauss(0, 1) + np.random.rand() + float(np.random.randn())
        return (x * scale).sin().exp() * random.choice([1.0, 2.0])

    def run(f: Any) -> Any:
        random.seed(3)
        np.random.seed(3)
        grads = [way(f) for _ in range(3)]  # an odd number of normals each: half a pair stays in the cache
        return grads, random.random(), float(np.random.randn()), random.gauss(0, 1)

    assert_equal(run(fckpt.remat(fn)), run(fn))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("passed", ["argument", "closure", "object"])
def test_generators_of_the_user(way: Any, passed: str) -> None:
    def draw(x: torch.Tensor, g: torch.Generator, n: np.random.Generator, p: random.Random) -> torch.Tensor:
        mask = torch.rand(x.shape[-1], generator=g, dtype=x.dtype) * n.random() * p.random()
        return (x * mask).sin().exp()

    def run(make: Any) -> Any:
        generators = (torch.Generator().manual_seed(5), np.random.default_rng(5), random.Random(5))
        if passed == "argument":
            region = make(draw)
            fn = lambda x: region(x, *generators)
        elif passed == "closure":
            fn = make(lambda x: draw(x, *generators))
        else:

            class Holder:
                def __init__(self) -> None:
                    self.kept = {"generators": list(generators)}

                def call(self, x: torch.Tensor) -> torch.Tensor:
                    return draw(x, *self.kept["generators"])

            fn = make(Holder().call)
        grads = [way(fn), way(fn)]
        return grads, generators[0].get_state(), float(generators[1].random()), generators[2].random()

    assert_equal(run(fckpt.remat), run(lambda fn: fn))


def test_generator_that_is_an_attribute_of_a_module() -> None:
    class Noisy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * torch.rand(6, generator=self.generator, dtype=x.dtype)).sin().exp()

    assert_equal(backward(fckpt.remat(Noisy())), backward(Noisy()))


def test_generators_end_where_the_plain_function_leaves_them() -> None:
    fn = lambda x: F.dropout(F.dropout(x.sin(), 0.3).exp(), 0.5)
    for way in WAYS:
        _, expected = seeded(lambda way=way: (way(fn), torch.rand(3)))
        _, actual = seeded(lambda way=way: (way(fckpt.remat(fn)), torch.rand(3)))
        assert torch.equal(actual, expected)


# -- mutation -----------------------------------------------------------------------------------------------


def test_closed_over_tensor_that_changes_between_forward_and_backward_is_an_error() -> None:
    scale = torch.ones(6, dtype=torch.float64)
    for fn in (
        lambda x: (x + scale).sin().exp(),
        lambda x, tree={"s": [scale]}: (x + tree["s"][0]).sin().exp(),
    ):
        out = fckpt.remat(fn)(leaf(X)).sum()
        scale.add_(1)
        with pytest.raises(fckpt.MutationError, match="captured tensor"):
            out.backward()


MUTABLE_GLOBAL = torch.ones(6, dtype=torch.float64)


def test_global_tensor_that_changes_between_forward_and_backward_is_an_error() -> None:
    out = fckpt.remat(lambda x: (x + MUTABLE_GLOBAL).sin().exp())(leaf(X)).sum()
    MUTABLE_GLOBAL.add_(1)
    with pytest.raises(fckpt.MutationError, match="captured tensor"):
        out.backward()


def test_parameter_that_an_optimizer_changes_before_backward_is_an_error() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    region = fckpt.remat(net)
    region(X).sum().backward()
    out = region(X).sum()
    optimizer.step()
    with pytest.raises(fckpt.MutationError, match=r"before optimizer\.step\(\)"):
        out.backward()


@pytest.mark.parametrize("functional_call", [False, True])
def test_argument_that_changes_between_forward_and_backward_is_an_error(functional_call: bool) -> None:
    fn = fckpt.remat(lambda x, s: (x * s).sin().exp())
    scale = torch.ones(6, dtype=torch.float64)
    if functional_call:
        _, pull = torch.func.vjp(lambda x: fn(x, scale), X)
        scale.add_(1)
        with pytest.raises(fckpt.MutationError, match="changed in place"):
            pull(X)
    else:
        out = fn(leaf(X), scale).sum()
        scale.add_(1)
        with pytest.raises(fckpt.MutationError, match=r"args\[1\] of the rematerialised lambda"):
            out.backward()


def test_argument_that_the_function_itself_changes_is_an_error() -> None:
    def fn(x: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
        state["count"].add_(1)
        return (x * state["count"]).sin().exp()

    with pytest.raises(fckpt.MutationError, match=r"args\[1\]\['count'\] was changed in place by"):
        backward(lambda x: fckpt.remat(fn)(x, {"count": torch.zeros(6, 6, dtype=torch.float64)}))


# -- leaks --------------------------------------------------------------------------------------------------


def test_a_failed_compile_does_not_disable_regions() -> None:
    """torch.compile(torch.func.grad(f)) may fail and leave saved-tensor hooks disabled for the whole process."""
    disable = torch._C._autograd._saved_tensors_hooks_disable
    fn = lambda x: torch.sin(x).exp().sin()
    try:
        disable("torch.func.{grad, vjp, jacrev, hessian} don't yet support saved tensor hooks. Please open an issue.")
        assert_equal(backward(fckpt.remat(fn)), backward(fn))
    finally:
        torch._C._autograd._saved_tensors_hooks_enable()


def test_hooks_that_the_user_disables_are_respected() -> None:
    fn = lambda x: torch.sin(x).exp().sin()
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert_equal(backward(fckpt.remat(fn)), backward(fn))
        assert not torch._C._autograd._saved_tensors_hooks_is_enabled()


def test_an_exception_in_the_function_leaves_nothing_behind() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        x.sin().exp()
        raise ValueError("mine")

    for way in WAYS:
        with pytest.raises(ValueError, match="mine"):
            way(fckpt.remat(fn))
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert_equal(way(fckpt.remat(torch.sin)), X.cos())


def test_except_exception_in_the_function_does_not_swallow_the_early_stop() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        try:
            return (x.sin().exp() @ x).exp()
        except Exception:
            return x

    assert_equal(backward(fckpt.remat(fn)), backward(fn))


def test_determinism_flags_and_default_dtype_are_those_of_the_forward() -> None:
    seen = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append((torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()))
        return x.sin().exp() * torch.ones(()).exp()

    x = leaf(X)
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)
    try:
        out = fckpt.remat(fn)(x).sum()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
    out.backward()
    assert seen == [(True, torch.float64)] * 2
    assert (torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()) == (False, torch.float32)


def test_default_device_is_that_of_the_forward() -> None:
    devices = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        devices.append(torch.empty(1).device.type)
        return x.sin().exp()

    x = leaf(X)
    with torch.device("meta"):
        out = fckpt.remat(fn)(x).sum()
    out.backward()
    assert devices == ["meta", "meta"]


def test_backward_under_autocast_recomputes_without_it() -> None:
    x, w = leaf(X.float()), leaf(X.float())
    out = fckpt.remat(lambda x: (x @ w).exp().sin())(x).sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out.backward()
    y, v = leaf(X.float()), leaf(X.float())
    plain = (y @ v).exp().sin().sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain.backward()
    assert_equal((x.grad, w.grad), (y.grad, v.grad))


def test_backward_in_many_threads_of_one_retained_graph() -> None:
    x = leaf(X)
    out = fckpt.remat(lambda x: x.sin().exp().sin().exp())(x).sum()
    expected = backward(lambda x: x.sin().exp().sin().exp())
    results: list[torch.Tensor] = []

    def work() -> None:
        for _ in range(20):
            results.extend(torch.autograd.grad(out, x, retain_graph=True))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    assert_equal(results, [expected] * 80)


def test_closed_over_tensor_that_the_function_changes_itself_is_an_error() -> None:
    total = torch.ones(2, 3)

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x) * total.clone()
        total.mul_(3)
        return y * 2

    with pytest.raises(fckpt.MutationError, match="register the tensor as a buffer"):
        fckpt.remat(fn)(torch.ones(2, 3, requires_grad=True))


def gradient_of_a_copy(net: nn.ModuleList, x: Tensor, **options: Any) -> Tensor:
    copy = x.detach().requires_grad_()
    net[0](copy).square().mean().backward(**{k: [copy] for k in options})
    return torch.tanh(net[1](copy.grad)).square().mean()


def cleared_gradients(net: nn.ModuleList, x: Tensor) -> Tensor:
    value = gradient_of_a_copy(net, x)
    net[0].zero_grad()
    return value


@pytest.mark.parametrize("passed", ["captured", "arguments"])
@pytest.mark.parametrize("transform", [False, True])
def test_a_backward_pass_inside_that_adds_to_gradients_outside_is_an_error(passed: str, transform: bool) -> None:
    net = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def run(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        value = gradient_of_a_copy(net, x)
        return value + torch.func.grad(lambda y: y.sin().sum())(x).sum() if transform else value

    given = dict(net.named_parameters()) if passed == "arguments" else {}
    region = fckpt.remat(run)
    for _ in range(2):
        with pytest.raises(fckpt.MutationError, match=r"changed `.grad` of a tensor from outside"):
            region(given, torch.randn(8, 4))


@pytest.mark.parametrize("run", [cleared_gradients, functools.partial(gradient_of_a_copy, inputs=True)])
def test_a_backward_pass_inside_that_leaves_gradients_outside_as_they_are(run: Any) -> None:
    net, x = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), torch.randn(8, 4)

    def gradients(fn: Any) -> list[Any]:
        net.zero_grad()
        for _ in range(2):
            fn(net, x).backward()
        return [p.grad for p in net[1].parameters()]

    assert_equal(gradients(run), gradients(fckpt.remat(run)))


def test_gradients_that_a_recompute_clears_are_an_error() -> None:
    net, x = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), torch.randn(8, 4)
    loss = fckpt.remat(cleared_gradients)(net, x)
    net[0](x).sum().backward()  # as for a part of the loss outside of the region
    with pytest.raises(fckpt.MutationError, match=r"changed `.grad`"):
        loss.backward()
