"""In-place work by a plan is what the user wrote: bits, bytes and errors of the plain function."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal
from torch import Tensor, nn

import fckpt
from fckpt import policies

W = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
X = torch.linspace(-1, 1, 12).reshape(3, 4)
POLICIES = [policies.nothing_saveable, policies.everything_saveable]


def slices(x: Tensor, w: Tensor) -> Tensor:
    out = torch.empty(4, *x.shape)
    for t in range(4):
        x = torch.tanh(x @ w)
        out[t] = x
    return (out.sin() * 2).exp()


def moving_average(x: Tensor, w: Tensor) -> Tensor:
    mean = torch.zeros(3, 4)
    for _ in range(3):
        x = torch.tanh(x @ w)
        with torch.no_grad():
            mean.mul_(0.9).add_(x, alpha=0.1)
    return x.sin() * mean


def constant(x: Tensor, w: Tensor) -> Tensor:
    scale = torch.tensor([0.0, 1.0, 2.0])
    scale[1] = 3.0
    return (x @ w).sin() * scale[1]


def transposed(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w).t()
    h[1:3].mul_(2)
    h.t_()
    return F.dropout(h.t(), 0.3).sin() + x.t()


FUNCTIONS = [slices, moving_average, constant, transposed]


def outcome(fn: Callable[..., Any]) -> list[Tensor]:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    torch.manual_seed(3)
    y = fn(x, w)
    y.sum().backward()
    return [y.detach(), x.grad, w.grad, torch.get_rng_state()]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_in_place_work_has_the_bits_of_the_plain_function(fn: Callable[..., Tensor], policy: Any) -> None:
    region = fckpt.remat(fn, policy=policy)
    for _ in range(2):
        assert_equal(outcome(region), outcome(fn))


@pytest.mark.parametrize("fn", [slices, moving_average], ids=lambda fn: fn.__name__)
def test_in_place_work_has_the_bytes_of_the_plain_function(fn: Callable[..., Tensor]) -> None:
    x, w = torch.randn(3, 4, requires_grad=True), W.clone().requires_grad_()
    cotangent = torch.ones_like(fn(x, w))

    def step(run: Callable[..., Tensor]) -> Callable[[], None]:
        def once() -> None:
            torch.autograd.grad(run(x, w), (x, w), cotangent)

        return once

    plan = fckpt.plan(lambda x, w: fn(x, w), x, w, budget=1.0)
    plain = fckpt.measure_peak(step(fn)).peak_bytes
    held = cotangent.nbytes  # of the caller's, which a plan counts
    assert plan.baseline_peak_bytes == pytest.approx(plain + held, rel=0.01)
    assert not any("scatter" in node.op for node in plan.graph.nodes)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_dropout_of_other_layouts_draws_the_mask_of_the_plain_function(policy: Any) -> None:
    images = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Conv2d(8, 4, 3))
    encoder = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.2)
    for module, data in ((net.to(memory_format=torch.channels_last), images), (encoder, torch.randn(5, 3, 16))):
        found = []
        for run in (module, fckpt.remat(module, policy=policy)):
            module.zero_grad()
            torch.manual_seed(5)
            y = run(data)
            y.square().sum().backward()
            found.append([y.detach(), *(p.grad.clone() for p in module.parameters())])
        assert_equal(found[0], found[1])


# -- outputs that share memory ---------------------------------------------------------------------------------

SHARED: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda x: (lambda h: (h, h[:2]))((x @ W).sin()),
    "views": lambda x: (lambda h: (h.t(), h[:2]))((x @ W).sin()),
    "a view first": lambda x: (lambda h: (h[0], h))((x @ W).sin()),
    "a view between": lambda x: (lambda h: (h.t(), h, h[:2]))((x @ W).sin()),
    "chunk": lambda x: (x @ W).sin().chunk(2),
    "unbind": lambda x: (x @ W).sin().unbind(0),
    "detached": lambda x: (lambda h: (h, h.detach()[:2]))((x @ W).sin()),
    "of an argument": lambda x: (x.t(), x[1], (x @ W).sin()),
}
USES: dict[str, Callable[[Any], Tensor]] = {
    "write first": lambda o: (o[0].mul_(3), (o[1] ** 2).sum() + o[0].sin().sum())[1],
    "write second": lambda o: (o[1].mul_(3), (o[0] ** 2).sum())[1],
    "all": lambda o: sum(((i + 1) * (t**2).sum() for i, t in enumerate(o)), torch.zeros(())),
    "first": lambda o: (o[0] ** 2).sum(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", SHARED)
def test_outputs_that_share_memory_behave_as_in_the_plain_function(name: str, use: str) -> None:
    def run(fn: Callable[..., Any]) -> Any:
        leaf = X.clone().requires_grad_()
        x = leaf * 1
        try:
            loss = USES[use](fn(x))
            loss.backward()
        except RuntimeError as error:
            return str(error)[:40]
        return loss.detach(), leaf.grad, x.detach().clone()

    plain, planned = run(SHARED[name]), run(fckpt.remat(SHARED[name], policy=policies.nothing_saveable))
    assert type(plain) is type(planned)
    if isinstance(plain, str):
        assert plain == planned
    else:
        assert_equal(planned, plain)


# -- other things that a plan has to do alike --------------------------------------------------------------------


@torch.library.custom_op("fckpt_as_written::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand(x.shape) + random.random()


noisy.register_fake(torch.empty_like)
noisy.register_autograd(lambda ctx, grad: grad, setup_context=lambda ctx, inputs, output: None)


@pytest.mark.filterwarnings("ignore:fckpt does not run custom operations on synthetic data")
@pytest.mark.parametrize("options", [{"policy": policies.nothing_saveable}, {"budget": 0.75}], ids=str)
def test_a_custom_operation_that_draws_without_saying_so_is_drawn_again_alike(options: Any) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        h = noisy(x @ w).sin()
        return (h * h.exp() * noisy(h)).sin()

    def run(region: Callable[..., Tensor]) -> list[Any]:
        random.seed(7)
        x, w = torch.ones(64, 64, requires_grad=True), torch.eye(64).requires_grad_()
        torch.manual_seed(7)
        region(x, w).sum().backward()
        return [x.grad, w.grad, torch.rand(2), torch.tensor(random.random())]

    region = fckpt.remat(fn, **options)
    for _ in range(2):
        assert_equal(run(region), run(fn))


def test_conjugated_cotangents_are_taken() -> None:
    fn = lambda x: torch.view_as_complex(x.reshape(4, 2, 2)).sin()
    grads = []
    for run in (fn, fckpt.remat(fn, policy=policies.nothing_saveable)):
        x = torch.linspace(0, 1, 16).reshape(4, 4).requires_grad_()
        torch.view_as_real(run(x).conj().resolve_conj()).sum().backward()
        grads.append(x.grad)
    assert_equal(grads[0], grads[1])


def test_a_buffer_that_changes_before_backward_reads_it_is_an_error() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.scale.mul_(0.9)
            return (x * self.scale).sin()

    x = X.clone().requires_grad_()
    region = fckpt.remat(Scaled(), policy=policies.nothing_saveable)
    first, _ = region(x), region(x)
    with pytest.raises(fckpt.MutationError, match="buffer"):
        first.sum().backward()


def test_a_tensor_that_a_trace_left_behind_raises() -> None:
    kept: list[Tensor] = []

    class Box:
        def keep(self, x: Tensor) -> None:
            kept.append(x)

    box = Box()

    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        box.keep(y.detach())
        return y.exp()

    try:
        fckpt.remat(fn, policy=policies.nothing_saveable)(X.clone().requires_grad_())
    except fckpt.TraceError:
        return
    for tensor in kept:
        if type(tensor) is not Tensor:
            with pytest.raises(fckpt.TraceError, match="left behind"):
                tensor + 1


class Rebound(nn.Module):
    """Puts other memory into its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data = self.mean.data + 1
        return x.sin().exp().sum() * self.mean[0]


@pytest.mark.parametrize("fn", [
    Rebound(),
    lambda x: (x.exp() * (1 if GRADED.grad is None else 2) * torch.rand(2, generator=GENERATOR)[0]).sin(),
    lambda x: (setattr(GRADED, "grad", None), x.exp().sin() * torch.rand(2, generator=GENERATOR)[0])[1],
])  # fmt: skip
def test_what_no_trace_shows_of_a_tensor_is_refused(fn: Any) -> None:
    with pytest.raises(fckpt.TraceError, match=r"replaces the memory|`\.grad`"):
        fckpt.remat(fn, budget=1.0)(X.clone().requires_grad_())


GRADED = torch.ones(2, requires_grad=True)
GENERATOR = torch.Generator()
