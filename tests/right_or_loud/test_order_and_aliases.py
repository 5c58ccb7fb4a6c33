"""The order of mappings and of hooks, and outputs that alias one another or an input."""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import TORCH, assert_equal
from judge import Session, judge
from torch import Tensor, nn

import fckpt


def chained(x: Tensor, weights: Any) -> Tensor:
    for w in weights:
        x = torch.tanh(x @ w).sin().exp() * 0.3
    return x


@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize("part", ["values", "items", "keys"])
def test_the_order_of_a_dict_that_is_an_argument(kind: Any, part: str) -> None:
    def scenario(session: Session) -> None:
        a, b, x = session.leaf(32, 32), session.leaf(32, 32), session.leaf(96, 32)
        read: dict[str, Callable[[Any], Any]] = {
            "values": lambda p: p.values(),
            "items": lambda p: [w for _, w in p.items()],
            "keys": lambda p: [p[k] for k in p],
        }
        f = session.region(lambda p, x: chained(x, read[part](p)))
        session.step(lambda: f(kind(a=a, b=b), x), times=2)
        session.step(lambda: f(kind(b=b, a=a), x))
        session.step(lambda: f(kind(a=a, b=b), x), times=2)

    assert judge(scenario).kept


def test_the_order_of_keyword_arguments() -> None:
    def scenario(session: Session) -> None:
        a, b, x = session.leaf(32, 32), session.leaf(32, 32), session.leaf(96, 32)
        f = session.region(lambda x, **weights: chained(x, weights.values()))
        session.step(lambda: f(x, a=a, b=b), times=2)
        session.step(lambda: f(x, b=b, a=a))

    assert judge(scenario).kept


def test_the_order_of_a_dict_within_an_argument_and_of_one_that_is_closed_over() -> None:
    def scenario(session: Session) -> None:
        a, b, x = session.leaf(32, 32), session.leaf(32, 32), session.leaf(96, 32)
        held = {"a": a, "b": b}
        f = session.region(lambda state, x: chained(chained(x, state["layers"][0].values()), held.values()))
        session.step(lambda: f({"layers": [{"a": a, "b": b}]}, x), times=2)
        session.step(lambda: f({"layers": [{"b": b, "a": a}]}, x), times=2)
        held["a"] = held.pop("a")
        session.step(lambda: f({"layers": [{"b": b, "a": a}]}, x))

    assert judge(scenario).kept


def test_the_order_of_modules_that_are_swapped() -> None:
    def scenario(session: Session) -> None:
        x = session.leaf(96, 32)
        net = nn.Sequential(OrderedDict(a=nn.Linear(32, 32), b=nn.Linear(32, 32), c=nn.Tanh()))
        session.watch(net=net)
        f = session.region(net)
        session.step(lambda: f(x), times=2)
        net._modules["a"] = net._modules.pop("a")
        session.step(lambda: f(x))

    assert judge(scenario, budget=0.9).kept


def test_the_order_of_a_dict_that_is_returned() -> None:
    def scenario(session: Session) -> None:
        x, w = session.leaf(96, 32), session.leaf(32, 32)
        names = ["b", "a"]
        f = session.region(lambda x: {name: chained(x, [w]) * i for i, name in enumerate(names)})
        session.step(lambda: f(x), times=2)
        names.reverse()
        session.step(lambda: f(x))

    assert judge(scenario, budget=0.9).kept


def unrecorded(fn: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return fn()


ALIASES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a slice": lambda h, x: (h, h[:2]),
    "a transpose": lambda h, x: (h, h.t()),
    "a reshape": lambda h, x: (h, h.view(-1)),
    "the same": lambda h, x: (h, h),
    "a detached": lambda h, x: (h, h.detach()),
    "an expanded": lambda h, x: (h, h[:1].expand(4, -1)),
    "overlapping slices": lambda h, x: (h[:4], h[2:6]),
    "chunks": lambda h, x: h.chunk(4),
    "unbound": lambda h, x: h.unbind(0)[:3],
    "split": lambda h, x: h.split([16, 80]),
    "the input": lambda h, x: (x, h),
    "a view of the input": lambda h, x: (x.view(-1), h),
    "a slice without grad": lambda h, x: (h, unrecorded(lambda: h[:2])),
    "a slice without grad of what is not returned": lambda h, x: (h.sin(), unrecorded(lambda: h[:2])),
    "chunks without grad": lambda h, x: (h * 2, *unrecorded(lambda: h.chunk(2))),
    "a view of the input without grad": lambda h, x: (h, unrecorded(lambda: x[:2])),
    "real and imaginary": lambda h, x: (torch.view_as_complex(h.view(96, 16, 2)).abs(), h.view(-1)),
}
CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda out: None,
    "first": lambda out: out[0].mul_(3),
    "second": lambda out: out[1].add_(1),
    "both": lambda out: (out[0].mul_(3), out[1].add_(1)),
    "a view of it": lambda out: out[0][..., 0].zero_(),
    "without grad": lambda out: out[0].data.mul_(2),
}


def _pairs() -> list[tuple[str, str]]:
    some, all_of_them = ("nothing", "first", "second"), ("a slice", "chunks", "the input")
    return [(a, c) for a in ALIASES for c in CHANGES if c in some or a in all_of_them]


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("alias", "change"), _pairs())
def test_outputs_that_alias(alias: str, change: str) -> None:
    """What plain PyTorch refuses, a plan refuses too."""

    def scenario(session: Session) -> None:
        x, w = session.leaf(96, 32), session.leaf(32, 32)
        f = session.region(lambda x: ALIASES[alias](chained(x, [w, w, w]), x))

        def run() -> Any:
            inner = x * 1
            out = f(inner)
            CHANGES[change](out)
            return out

        session.step(run, lambda out: sum((t.sin().sum() for t in out if t.requires_grad), torch.zeros(())), peak=False)
        second = lambda out: out[1].sin().sum() if out[1].requires_grad else out[0].sum()
        session.step(run, second, times=2, peak=False)  # memory outside of the region

    verdict = judge(scenario, budget=0.9)
    assert change != "nothing" or verdict.outcome == "equal", verdict.error


@pytest.mark.parametrize("written", ["argument", "view of it", "buffer", "data"])
def test_what_a_function_writes_into(written: str) -> None:
    def scenario(session: Session) -> None:
        x, w = session.leaf(96, 32), session.leaf(32, 32)
        state = torch.zeros(96, 32)
        session.watch(state=state)

        def fn(x: Tensor, state: Tensor) -> Tensor:
            h = chained(x, [w, w])
            if written == "argument":
                state.mul_(0.9).add_(h.detach())
            elif written == "view of it":
                state[3:5].copy_(h[3:5].detach())
            elif written == "data":
                state.data.copy_(h.data)
            else:
                with torch.no_grad():
                    state.lerp_(h, 0.5)
            return (h * state.clone()).sin()

        f = session.region(fn)
        session.step(lambda: f(x, state))

    verdict = judge(scenario, budget=0.9)
    assert verdict.outcome in ("equal", "MutationError"), verdict.error


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.shared = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.rows = nn.ParameterList([torch.randn(8) for _ in range(5)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shared(self.norm(self.linear(x)))
        return self.shared(x).sin() @ torch.stack(list(self.rows)).t()


def stack() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.GELU())])


def noise(log: list[Any], name: str, grad: Tensor) -> Tensor:
    log.append(name)
    return grad + torch.randn_like(grad)


def noise_afterwards(log: list[Any], name: str, parameter: Tensor) -> None:
    assert parameter.grad is not None
    log.append(name)
    parameter.grad += torch.randn_like(parameter.grad)


@pytest.mark.parametrize("make", [stack, Residual])
@pytest.mark.parametrize("kind", [noise, noise_afterwards])
@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("where", ["captured", "argument", "module"])
@pytest.mark.sweep(1)
def test_hooks_of_parameters_run_in_the_order_of_plain_autograd(make: Any, kind: Any, each: int, where: str) -> None:
    def outcome(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        net, log, x = make(), [], torch.randn(6, 8, requires_grad=True)
        for name, parameter in [("x", x), *net.named_parameters()][::each]:
            if kind is noise:
                parameter.register_hook(functools.partial(noise, log, name))
            else:
                parameter.register_post_accumulate_grad_hook(functools.partial(noise_afterwards, log, name))
        if where == "captured":
            run = wrap(lambda x: net(x).square().mean())
        elif where == "argument":
            parameters = dict(net.named_parameters())
            given = wrap(lambda p, x: torch.func.functional_call(net, p, (x,)).square().mean())
            run = functools.partial(given, parameters)
        else:
            inner = wrap(net)
            run = lambda x: inner(x).square().mean()
        for _ in range(2):
            run(x).backward()
        return [log, [p.grad for p in net.parameters()], x.grad, torch.get_rng_state()]

    assert_equal(outcome(lambda fn: fckpt.remat(fn, budget=1.0)), outcome(lambda fn: fn))


class Reversed(torch.autograd.Function):
    """The identity, with the gradient reversed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return -cotangents[0]


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Flatten(0)
        self.flat.register_full_backward_hook(lambda module, given, made: (3 * given[0],))

    def forward(self, x: Tensor) -> Tensor:
        return self.flat(x)


def doubled(x: Tensor) -> Tensor:
    x.register_hook(lambda cotangent: 2 * cotangent)
    return x


def hidden(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


BETWEEN: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
    "an argument reversed": lambda x, w: (Reversed.apply(x), hidden(x, w)),
    "a part of an argument reversed": lambda x, w: (x[1:], Reversed.apply(x[:2]), hidden(x, w)),
    "a part of what is reversed": lambda x, w: (Reversed.apply(x)[1:], hidden(x, w).t()),
    "a value and its reversal": lambda x, w: (h := hidden(x, w), Reversed.apply(h)),
    "a reversal first": lambda x, w: (Reversed.apply(h := hidden(x, w))[0], h[1], h),
    "two reversals": lambda x, w: (Reversed.apply(w), Reversed.apply(x), hidden(x, w)),
    "a view with a hook": lambda x, w: (h := hidden(x, w), doubled(h.view_as(h))),
    "parts with hooks": lambda x, w: tuple(map(doubled, hidden(x, w).split(2))),
    "an argument's view with a hook": lambda x, w: (doubled(w.t()), hidden(x, w)),
    "a hook on the way": lambda x, w: (h := hidden(x, w), doubled(h[1:]).t()),
    "a detached value beside": lambda x, w: ((h := hidden(x, w)).detach(), Reversed.apply(h)),
}


@pytest.mark.filterwarnings("ignore::fckpt.errors.BudgetWarning", "ignore::fckpt.errors.GradientWarning")
@pytest.mark.parametrize("options", [{"budget": 1.0}, {"policy": fckpt.policies.nothing_saveable}], ids=str)
@pytest.mark.parametrize("name", BETWEEN)
def test_users_code_between_an_output_and_what_it_views(name: str, options: Any) -> None:
    if TORCH < (2, 12) and name == "parts with hooks":
        pytest.skip("Dynamo of torch 2.11 captures a graph that lacks a size it refers to")
    leaves = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
    planned = fckpt.remat(BETWEEN[name], **options)
    for _ in range(2):
        found = []
        for fn in (BETWEEN[name], planned):
            results = fn(*leaves)
            loss = torch.stack([(t * (i + 2)).sum() for i, t in enumerate(results)]).sum()
            found.append([*results, *torch.autograd.grad(loss, leaves)])
        assert_equal(*found)


@pytest.mark.filterwarnings("ignore::fckpt.errors.BudgetWarning")
def test_hooks_of_a_module_beside_its_input() -> None:
    module, x, w = Hooked(), torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    fn = lambda x: (h := x @ w, module(h))
    found = []
    for f in (fn, fckpt.remat(fn, budget=1.0)):
        first, second = f(x)
        found.append(torch.autograd.grad(first.sum() + second.square().sum(), (x, w)))
    assert_equal(*found)


@pytest.mark.parametrize("name", ["a value and its reversal", "a view with a hook"])
@pytest.mark.parametrize("which", [0, 1])
def test_writes_to_outputs_with_users_code_between_are_refused(name: str, which: int) -> None:
    leaves = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
    results = fckpt.remat(BETWEEN[name], budget=1.0)(*leaves)
    with pytest.raises(RuntimeError, match="being modified inplace"):
        results[which].mul_(2)


def views_first(h: Tensor) -> Any:
    return h[1:], h[:, 2:], h.exp()


def view_of_returned(h: Tensor) -> Any:
    return h, h[1:], h.exp()


def views_of_a_view(h: Tensor) -> Any:
    y = h.t()
    return y[1:], y[:2], h[:, 2:]


def views_last(h: Tensor) -> Any:
    y = h.exp()
    return y, h[1:], h[:, 2:]


def only_views(h: Tensor) -> Any:
    return h[1:], h[:, 2:], h[:2]


def one_view(h: Tensor) -> Any:
    return h[1:], h.exp(), h.sin()


@pytest.mark.parametrize("options", [{"budget": 1.0}, {"policy": fckpt.policies.everything_saveable}])
@pytest.mark.parametrize(
    ("fn", "warned"),
    [
        (views_first, True),
        (view_of_returned, True),
        (views_of_a_view, True),
        (views_last, False),
        (only_views, False),
        (one_view, False),
    ],
)
@pytest.mark.parametrize("compute", [torch.mul, torch.add, torch.div])
def test_gradients_of_views_that_are_added_up_first_give_a_warning(
    compute: Any, fn: Callable[[Tensor], Any], warned: bool, options: dict[str, Any]
) -> None:
    draws = torch.Generator().manual_seed(0)
    x, w = (torch.randn(4, 8, generator=draws) for _ in range(2))
    planned = fckpt.remat(lambda x, w: fn(compute(x, w)), **options)

    def gradient(f: Callable[..., Any]) -> Tensor | None:
        leaf = w.clone().requires_grad_()
        sum(t.sin().sum() for t in f(x, leaf)).backward()  # type: ignore[union-attr]
        return leaf.grad

    expected = gradient(lambda x, w: fn(compute(x, w)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [gradient(planned) for _ in range(2)]
    told = [m for m in caught if m.category is fckpt.GradientWarning and "returns views" in str(m.message)]
    assert len(told) == warned
    for grad in found:
        if warned:
            torch.testing.assert_close(grad, expected)
        else:
            assert_equal(grad, expected)
