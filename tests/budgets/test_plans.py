"""What a budget and a policy promise: the peak, and the same numbers, under every transform."""

from __future__ import annotations

import copy
import gc
import json
import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import ways
from helpers import assert_equal, leaf, seeded
from planned import (
    DOTS,
    EVERYTHING,
    MODELS,
    NOTHING,
    PLANNERS,
    X,
    idle_policies,
    least_of,
    measured,
    model,
    step,
)
from sampling import todays
from torch import Tensor

import fckpt
from fckpt import policies, solve
from fckpt._memory import measure_peak
from fckpt.solve._save_all import save_all


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_keeps_to_every_budget_and_is_what_was_predicted(name: str) -> None:
    net, x = model(name)
    most, least = fckpt.plan(net, x).peak_bytes, least_of(name)
    assert least < 0.8 * most
    for share in (0.0, 0.3, 0.8, 1.0):
        budget = int(least + share * (most - least))
        planned = fckpt.remat(net, budget=budget)
        peak = measured(planned, x)
        [(_, known)] = planned._fckpt_region.planner.captures
        [programs] = known.values()
        predicted = programs.likely().timeline.peak_nbytes
        if share == 0.3:
            assert fckpt.plan(net, x, budget=budget).peak_bytes == predicted
        print(f"{name}: budget {budget}, predicted {predicted}, measured {peak}")
        assert peak <= budget
        assert 0.98 * predicted <= peak <= predicted <= budget


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", MODELS)
def test_under_every_budget_all_numbers_are_those_of_the_plain_model(name: str) -> None:
    net, x = model(name)
    least = least_of(name)
    expected = seeded(lambda: step(copy.deepcopy(net), x))
    for budget in (least, int(1.2 * least), 1.0):
        assert_equal(seeded(lambda: step(fckpt.remat(copy.deepcopy(net), budget=budget), x)), expected)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", MODELS)
def test_the_least_budget_is_enough_and_below_a_plan_fits_or_is_refused(name: str) -> None:
    net, x = model(name)
    least = least_of(name)
    assert fckpt.plan(net, x, budget=least).peak_bytes <= least  # nothing forbids better than known
    for budget in (least - 1, least // 2):
        try:  # what is made for a budget may fit below the least for which a plan is known
            assert fckpt.plan(net, x, budget=budget).peak_bytes <= budget
        except fckpt.BudgetError as error:
            assert error.least_bytes == least
    with pytest.raises(fckpt.BudgetError):
        fckpt.remat(net, budget=least // 2)(x)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", [EVERYTHING, NOTHING, DOTS, ~DOTS], ids=repr)
def test_under_every_policy_all_numbers_are_those_of_the_plain_model(name: str, policy: policies.Policy) -> None:
    net, x = model(name)
    expected = seeded(lambda: step(copy.deepcopy(net), x))
    assert_equal(seeded(lambda: step(fckpt.remat(copy.deepcopy(net), policy=policy), x)), expected)


@pytest.mark.parametrize(
    ("solver", "budget"),
    # What the two cuts of seconds against bytes can reach depends on measured seconds; 0.98 they always reach.
    [("save_all", 1.0), ("greedy", 0.85), ("min_cut", 0.98), ("knapsack", 0.98), ("auto", 0.85)],
)
def test_every_solver_gives_the_same_numbers(solver: str, budget: float) -> None:
    net, x = model("transformer")
    expected = seeded(lambda: step(copy.deepcopy(net), x))
    planned = fckpt.remat(copy.deepcopy(net), budget=budget, solver=solver)
    assert_equal(seeded(lambda: step(planned, x)), expected)


def test_a_budget_that_is_a_text_or_a_share_is_the_same_budget_in_bytes() -> None:
    net, x = model("mlp")
    plain = fckpt.plan(net, x)
    assert fckpt.plan(net, x, budget=0.75).budget_bytes == int(0.75 * plain.baseline_peak_bytes)
    assert fckpt.plan(net, x, budget="1MiB").budget_bytes == 2**20
    assert plain.peak_bytes == plain.baseline_peak_bytes == measured(net, x)
    assert plain.overhead == 0.0


def test_the_end_of_the_forward_pass_is_within_the_budget() -> None:
    """Where the most is held, and generators are looked at."""

    def chain(x: Tensor) -> Tensor:
        for _ in range(40):
            x = x.tanh()
        return x.sum()

    x = torch.randn(256, requires_grad=True)
    plan = fckpt.plan(chain, x)
    region = fckpt.remat(chain, plan=plan)
    region(x).backward()
    x.grad = None
    assert fckpt.measure_peak(lambda: region(x).backward()).peak_bytes <= plan.peak_bytes


def test_a_policy_and_a_budget_hold_together() -> None:
    net, x = model("mlp")
    budget = int(1.3 * least_of("mlp"))
    planned = fckpt.remat(copy.deepcopy(net), policy=~DOTS, budget=budget)
    rows = [row for row in fckpt.saved_residuals(planned, x) if row.kind == "intermediate"]
    assert rows
    assert not any("mm at" in row.origin for row in rows)
    assert measured(planned, x) <= budget
    expected = seeded(lambda: step(copy.deepcopy(net), x))
    assert_equal(seeded(lambda: step(fckpt.remat(copy.deepcopy(net), policy=~DOTS, budget=budget), x)), expected)


def test_pareto_goes_from_the_least_budget_to_the_plain_peak() -> None:
    net, x = model("convolutions")
    curve = fckpt.pareto(net, x, points=5)
    assert curve[0].peak_bytes <= least_of("convolutions")
    assert curve[-1].overhead == 0.0
    assert curve[-1].peak_bytes <= fckpt.plan(net, x).baseline_peak_bytes
    for a, b in pairwise(curve):
        assert a.peak_bytes < b.peak_bytes
        assert a.overhead > b.overhead
    planned = fckpt.remat(net, plan=curve[0].plan)
    assert measured(planned, x) <= curve[0].peak_bytes


Fn = ways.Fn
Wrap = Callable[[Fn], Fn]


def inside(outer: Wrap, inner: Wrap) -> Wrap:
    def wrapped(fn: Fn) -> Fn:
        part = inner(fn)
        return outer(lambda params, x: torch.sin(part(params, torch.cos(x))))

    return wrapped


def closed_over(wrap: Wrap) -> Wrap:
    return lambda fn: lambda params, x: wrap(lambda x: fn(params, x))(x)  # type: ignore[arg-type, call-arg]


def forms(wrap: Wrap) -> dict[str, tuple[Wrap, Wrap]]:
    """Ways to place regions, each with what to compare it with."""
    as_it_is: Wrap = lambda fn: fn
    nested = inside(as_it_is, as_it_is)
    return {
        "alone": (wrap, as_it_is),
        "closed_over": (closed_over(wrap), as_it_is),
        "within_a_plain_region": (inside(fckpt.remat, wrap), nested),
        "within_a_planned_region": (inside(wrap, wrap), nested),
        "around_a_plain_region": (inside(wrap, fckpt.remat), nested),
    }


PROGRAMS_OF_WAYS = [ways.mlp, ways.dropout_mlp, ways.branching]
# In second derivatives a planned function is one node: sums are regrouped, as under torch.func.
REGROUPED = ways.REGROUPED | {
    "backward_create_graph",
    "double_backward",
    "triple_backward",
    "autograd_functional_hessian",
}


@pytest.mark.sweep(4)
@idle_policies
@pytest.mark.filterwarnings("ignore:the budget of .*is not kept:fckpt.BudgetWarning")
@pytest.mark.parametrize("program", PROGRAMS_OF_WAYS)
@pytest.mark.parametrize("form", forms(fckpt.remat))
@pytest.mark.parametrize("planner", PLANNERS)
def test_every_transform_of_a_planned_function(planner: str, form: str, program: Fn) -> None:
    if planner == "dots_saveable" and form not in ("alone", "within_a_planned_region"):
        pytest.skip("like nothing_saveable")
    wrap, plain = forms(PLANNERS[planner])[form]
    names = set(ways.WAYS)
    if program is ways.dropout_mlp:
        names -= ways.RANDOM_FORBIDDEN
    if program is ways.branching:
        names = {"backward", "double_backward", "func_grad", "func_jvp", "func_jacrev", "autograd_grad", "no_grad"}
    # A third of the ways, of each case another: every way meets every form, planner and program on some of them.
    shift = [*PLANNERS].index(planner) + [*forms(fckpt.remat)].index(form) + PROGRAMS_OF_WAYS.index(program)
    for name in todays(sorted(names), 3, shift):
        run = ways.WAYS[name]
        expected, state = seeded(lambda: run(plain(program)))
        actual, ends = seeded(lambda: run(wrap(program)))
        if name in REGROUPED:
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, msg=lambda m: f"{name}: {m}")
        else:
            assert_equal(actual, expected)
        assert torch.equal(ends, state), f"{name}: the generator ends elsewhere"


def both(fn: Callable[..., Any], *args: Any, cotangents: Callable[[Tensor], Tensor] = torch.cos, **kwargs: Any) -> None:
    """Compares outputs, flags, strides and gradients of `fn` and its planned forms."""

    def run(f: Callable[..., Any]) -> Any:
        own, named = leaf_floats(args), leaf_floats(kwargs)
        leaves = torch.utils._pytree.tree_leaves(f(*own, **named))
        tensors = [y for y in leaves if isinstance(y, Tensor)]
        tracked = [y for y in tensors if y.requires_grad]
        torch.autograd.backward(tracked, [cotangents(y.detach()) for y in tracked])
        looks = [(y.requires_grad, y.stride()) if isinstance(y, Tensor) else y for y in leaves]
        found = [
            t.grad for t in torch.utils._pytree.tree_leaves((own, named)) if isinstance(t, Tensor) and t.requires_grad
        ]
        return tensors, looks, [g is None for g in found], [g for g in found if g is not None]

    expected = seeded(lambda: run(fn))
    for planner in PLANNERS.values():
        region = planner(fn)
        for _ in range(2):  # the second call has its plan
            assert_equal(seeded(lambda: run(region)), expected)


def leaf_floats(tree: Any) -> Any:
    """Copies of tensors, of those of floating point as leaves that require grad, each once and with its strides."""
    known: dict[int, Tensor] = {}

    def copied(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        if id(t) not in known:
            own = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t)
            known[id(t)] = own.requires_grad_(t.is_floating_point() or t.is_complex())
        return known[id(t)]

    return torch.utils._pytree.tree_map(copied, tree)


IMAGE = torch.randn(2, 3, 6, 6).contiguous(memory_format=torch.channels_last)

PROGRAMS: dict[str, Callable[[], Any]] = {
    "a tree with static leaves": lambda: both(
        lambda t, *, k, mode, flag, nothing: {
            "y": t["a"].sin().exp() * (2 if flag else 3) + k[0].sum(),
            "rest": (mode, nothing, flag, 3),
        },
        {"a": X, "unused": X.cos()},
        k=[X.sin()],
        mode="train",
        flag=True,
        nothing=None,
    ),
    "one tensor passed twice": lambda: both(lambda a, b: a.sin() * b.exp().sin(), X, X),
    "an input returned": lambda: both(lambda a, b: (a, a.sin().exp() * b, b), X, X.cos()),
    "an input returned alone": lambda: both(lambda a: (a, 3), X),
    "views of an input": lambda: both(lambda a: (a.t(), a[0], a.view(-1), a.t().sin().exp()), X),
    "outputs that are views of one another": lambda: both(lambda a: (lambda y: (y, y[1:], y.t()))(a.sin().exp()), X),
    "one output twice": lambda: both(lambda a: (lambda y: [y, {"again": y}])(a.sin().exp()), X),
    "integer and boolean outputs": lambda: both(lambda a: (a.argmax(1), a > 0, a.sin().sort(1)), X),
    "an output without gradient": lambda: both(lambda a: (a.sin().detach(), a.cos().sin()), X),
    "only outputs without gradient": lambda: both(lambda a: a.sin().detach(), X),
    "a constant output": lambda: both(lambda a: (a.sin().exp(), torch.ones(2), torch.tensor(3.0)), X),
    "an unused input": lambda: both(lambda a, b: a.sin().exp(), X, X),
    "an expanded output": lambda: both(lambda a: a.sin().sum(0).expand(5, 4), X),
    "a transposed output": lambda: both(lambda a: a.sin().exp().t(), X),
    "a zero-size input": lambda: both(lambda a: a.sin().exp().sum(0), X[:0]),
    "a scalar": lambda: both(lambda a: a.sin().exp(), X.sum()),
    "complex": lambda: both(lambda a: (a.exp() * a.conj()).sin(), torch.complex(X, X.cos())),
    "complex to real": lambda: both(lambda a: a.exp().abs().sin(), torch.complex(X, X.cos())),
    "conjugate views": lambda: both(lambda a: (a.sin().conj(), a.sin().imag), torch.complex(X, X.cos())),
    "a conjugate view of an argument": lambda: both(lambda a: (a.conj(), a.sin().conj()), torch.complex(X, X.cos())),
    "float32": lambda: both(lambda a: a.sin().exp(), X.float()),
    "bfloat16": lambda: both(lambda a: a.sin().exp() * 2, X.bfloat16()),
    "mixed precision": lambda: both(lambda a: a.float().sin().double().exp(), X),
    "channels last": lambda: both(lambda a, w: F.conv2d(a, w, padding=1).relu().tanh(), IMAGE, torch.randn(4, 3, 3, 3)),
    "channels last through normalisation": lambda: both(lambda a: F.group_norm(a.sin(), 3).tanh(), IMAGE),
    "a transposed argument": lambda: both(lambda a: (a.sin() @ a.t()).tanh(), X.t()),
    "an expanded argument": lambda: both(lambda a: a.sum(1).sin().exp(), X[:, :1]),
    "in-place work on own tensors": lambda: both(lambda a: a.sin().mul_(2).add_(a).relu_().exp().tanh(), X),
    "in-place work on a view": lambda: both(
        lambda a: (lambda y: (y[0].mul_(2), y[:, 1].zero_(), y.exp())[2])(a.sin()), X
    ),
    "an index assignment": lambda: both(
        lambda a, i: (lambda y: (y.__setitem__(i, a[i] * 2), y.sin())[1])(a.clone()), X, torch.tensor([0, 2])
    ),
    "an integer index": lambda: both(lambda a, i: a.sin()[i].exp(), X, torch.tensor([0, 0, 2])),
    "unbind and chunk": lambda: both(lambda a: [y.sin() for y in (*a.exp().unbind(0), *a.cos().chunk(2, 1))], X),
    "several results of one operation": lambda: both(lambda a: torch.linalg.svd(a.sin())[1].exp(), X),
    "dropout and noise": lambda: both(lambda a: F.dropout(a.sin(), 0.4) * torch.rand_like(a) + torch.randn(4), X),
    "multinomial": lambda: both(lambda a: a[:, torch.multinomial(torch.ones(4), 2)].sin().exp(), X),
    "rrelu": lambda: both(lambda a: F.rrelu(a.sin(), training=True).exp(), X),
    "a gradient inside": lambda: both(lambda a: torch.func.grad(lambda z: z.sin().exp().sum())(a).sin(), X),
    "a map inside": lambda: both(lambda a: torch.func.vmap(lambda r: r.sin() * r.sum())(a).exp(), X),
    "no_grad inside": lambda: both(lambda a: a.sin() * no_grad(lambda: a.exp().sum()), X),
    "an autograd function": lambda: both(lambda a: Doubled.apply(a.sin()).exp(), X),
    "a gather and a scatter": lambda: both(
        lambda a, i: torch.zeros(3, 4, dtype=a.dtype).scatter_add(0, i, a.sin()).gather(0, i).exp(),
        X,
        torch.randint(0, 3, (3, 4)),
    ),
    "a constant that is closed over": lambda: both(lambda a: (a * torch.tensor([1.0, 2, 3, 4])).sin().exp(), X),
    "arange and masks": lambda: both(
        lambda a: a.sin().masked_fill(torch.arange(4) > torch.arange(3)[:, None], -1.0).softmax(1), X
    ),
}


def no_grad(fn: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return fn()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * g * ctx.saved_tensors[0].cos().cos()


@idle_policies
@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_planned_function_is_bitwise_the_plain_one_with(name: str) -> None:
    PROGRAMS[name]()


@pytest.mark.parametrize("lazy", [lambda z: z.conj(), lambda z: z.conj().imag], ids=["conjugate", "negative"])
def test_the_peak_has_the_copies_of_lazy_arguments(lazy: Callable[[Tensor], Tensor]) -> None:
    """Each operation copies them."""
    x, w = lazy(torch.randn(64, 64, dtype=torch.complex64)), torch.ones(64, requires_grad=True)
    fn = lambda x, w: ((x * w).abs().sqrt() * (x * x).abs()).sum()

    def run(f: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        loss = f(x, w)
        return loss.detach(), *torch.autograd.grad(loss, w)

    region = fckpt.remat(fn, budget=1.0)
    assert_equal(run(region), run(fn))
    assert fckpt.measure_peak(lambda: run(region)).peak_bytes == fckpt.plan(fn, x, w, budget=1.0).peak_bytes


@idle_policies
@pytest.mark.parametrize(
    "cotangents",
    [
        lambda y: torch.ones((), dtype=y.dtype).expand(y.shape),
        lambda y: y.t().contiguous().t() if y.dim() == 2 else y,
        lambda y: torch.zeros_like(y),
        lambda y: y.new_ones(*y.shape, 2)[..., 0],
    ],
    ids=["expanded", "transposed", "zero", "strided"],
)
def test_cotangents_of_other_layouts(cotangents: Callable[[Tensor], Tensor]) -> None:
    both(lambda a: a.sin().exp(), X, cotangents=cotangents)
    both(lambda a: a.t().sin() @ a.exp(), X, cotangents=cotangents)
    both(lambda a: a.sin().reshape(-1)[1::2].exp(), X, cotangents=cotangents)
    both(lambda a: a.as_strided((2, 2), (1, 2)).sin().exp().t(), X, cotangents=cotangents)
    both(lambda a, w: F.conv2d(a, w, padding=1), IMAGE, torch.randn(4, 3, 3, 3), cotangents=cotangents)
    both(lambda a: F.layer_norm(a.sin(), (4,)).t(), X, cotangents=cotangents)
    both(lambda a: a.sin().reshape(2, 6), X, cotangents=cotangents)
    both(lambda a: a.exp().view(2, 2, 3).flatten(1).unflatten(1, (3, 2)), X, cotangents=cotangents)
    both(lambda a, w: (a @ w).sin().reshape(2, 6), X, torch.randn(4, 4).double(), cotangents=cotangents)


@idle_policies
def test_outputs_that_only_partly_get_a_cotangent() -> None:
    fn = lambda a: (a.sin().exp(), a.cos().exp(), a.argmax())
    for planner in PLANNERS.values():
        for used in ((0,), (1,), (0, 1)):
            a, b = leaf(X), leaf(X)
            torch.autograd.backward([fn(a)[i].sum() for i in used])
            torch.autograd.backward([planner(fn)(b)[i].sum() for i in used])
            assert_equal(b.grad, a.grad)
        a, b = leaf(X), leaf(X)
        one, two = planner(fn)(b)[:2]
        one.sum().backward(retain_graph=True)
        two.sum().backward()  # in two passes
        fn(a)[0].sum().backward()
        fn(a)[1].sum().backward()
        assert_equal(b.grad, a.grad)


def test_a_policy_plans_no_call_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fckpt._planned.tracing.trace", lambda *args: pytest.fail("traced"))
    region = fckpt.remat(lambda a: a.sin().exp(), policy=NOTHING)
    assert_equal(region(X), X.sin().exp())
    with torch.no_grad():
        assert not region(leaf(X)).requires_grad
    with torch.inference_mode():
        region(leaf(X))


@idle_policies
def test_it_is_a_decorator_with_arguments_also_on_methods() -> None:
    class Holder:
        def __init__(self) -> None:
            self.weight = leaf(X)
            self.scale = 2.0

        @fckpt.remat(policy=NOTHING)
        def run(self, x: Tensor, *, power: int) -> Tensor:
            """Runs."""
            return (x * self.weight).sin().exp() * self.scale**power

    holder = Holder()
    assert Holder.run.__name__ == "run"
    assert Holder.run.__doc__ == "Runs."
    for scale in (2.0, 3.0):
        holder.scale = scale
        holder.weight.grad = None
        x = leaf(X)
        holder.run(x, power=2).sum().backward()
        y, w = leaf(X), leaf(X)
        ((y * w).sin().exp() * scale**2).sum().backward()
        assert_equal((x.grad, holder.weight.grad), (y.grad, w.grad))


def test_static_arguments_are_part_of_the_signature() -> None:
    class Config:
        def __init__(self, n: int):
            self.n = n

    region = fckpt.remat(lambda x, c: x.sin().exp() * c.n, policy=NOTHING, static_argnums=1)
    for config in (Config(2), Config(3)):
        x, y = leaf(X), leaf(X)
        region(x, config).sum().backward()
        (y.sin().exp() * config.n).sum().backward()
        assert_equal(x.grad, y.grad)


def test_a_planned_module_is_a_drop_in() -> None:
    net, x = model("convolutions")
    planned = fckpt.remat(net, budget=0.9)
    assert type(planned).__name__ == "ConvNet"
    assert list(planned.state_dict()) == list(net.state_dict())
    assert all(a is b for a, b in zip(planned.parameters(), net.parameters(), strict=True))
    planned(x).backward()
    again = copy.deepcopy(planned)
    again.load_state_dict(net.state_dict())
    net.zero_grad()
    planned(x).backward()
    again(x).backward()
    assert_equal([p.grad for p in again.parameters()], [p.grad for p in net.parameters()])
    planned.load_state_dict(net.state_dict())


def test_a_planned_function_is_pure_under_functional_call() -> None:
    net, x = model("mlp")
    planned = fckpt.remat(net, policy=DOTS)
    params = {k: p.detach().clone() for k, p in net.named_parameters()}
    run = lambda m: torch.func.grad(lambda p: torch.func.functional_call(m, p, (x,)))(params)
    assert_equal(run(planned), run(net))
    assert_equal(run(planned), run(net))
    batched = torch.stack([x, x.cos()])
    each = lambda m: torch.func.vmap(torch.func.grad(lambda p, r: torch.func.functional_call(m, p, (r,))), (None, 0))
    assert_equal(each(planned)(params, batched), each(net)(params, batched))


@pytest.mark.parametrize("planner", PLANNERS)
def test_autocast_on_and_off_have_plans_of_their_own(planner: str) -> None:
    w = torch.randn(4, 4)
    region = PLANNERS[planner](lambda x, w: torch.tanh(torch.tanh(x @ w) @ w))
    plain = lambda x, w: torch.tanh(torch.tanh(x @ w) @ w)

    def run(f: Callable[..., Tensor], enabled: bool) -> Any:
        a, b = leaf((X.float(), w))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out = f(a, b)
        out.float().square().sum().backward()
        return out, a.grad, b.grad

    for enabled in (True, False, True):
        assert_equal(run(region, enabled), run(plain, enabled))
    assert run(region, True)[0].dtype is torch.bfloat16


# The graph breaks, so Dynamo looks at x * 2; it hides this warning, unless warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_planned_function_within_a_compiled_one() -> None:
    torch._dynamo.reset()
    region = fckpt.remat(lambda x: x.sin().exp().tanh(), policy=NOTHING)
    compiled = torch.compile(lambda x: region(x * 2) + 1, backend="eager")
    x, y = leaf(X), leaf(X)
    compiled(x).sum().backward()
    ((y * 2).sin().exp().tanh() + 1).sum().backward()
    assert_equal(x.grad, y.grad)


def test_hooks_that_store_elsewhere_are_kept_to() -> None:
    region = fckpt.remat(lambda x: x.sin().exp().tanh(), policy=EVERYTHING)
    x, y = leaf(X), leaf(X)
    with torch.autograd.graph.save_on_cpu():
        out = region(x)
    out.sum().backward()
    y.sin().exp().tanh().sum().backward()
    assert_equal(x.grad, y.grad)


@pytest.mark.skipif("FCKPT_KERNELS" in os.environ, reason="with kernels, a plan has another peak than its schedule")
def test_a_solvers_word_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = model(next(iter(MODELS)))
    monkeypatch.setattr(solve, "_SOLVERS", {**solve._SOLVERS, "careless": lambda graph, _: save_all(graph)})
    most = fckpt.plan(net, x, budget=1.0, solver="save_all").peak_bytes
    assert fckpt.plan(net, x, budget=most, solver="careless").peak_bytes == most
    for call in (
        lambda: fckpt.plan(net, x, budget=most - 1, solver="careless"),
        lambda: fckpt.remat(net, budget=most - 1, solver="careless")(x),
    ):
        with pytest.raises(fckpt.BudgetError, match="'careless' returned a plan that needs") as error:
            call()
        assert error.value.least_bytes == most


def with_hidden(w: Tensor, x: Tensor) -> dict[str, Any]:
    hidden = [x]
    for _ in range(5):
        hidden.append((hidden[-1] @ w).tanh().exp())
    return {"loss": hidden[-1].sum(), "logits": hidden[-1], "hidden": tuple(hidden[1:3])}


@pytest.mark.parametrize("outputs", ["loss", "logits", "hidden", ["loss", "hidden.1"], -1, [0, 2]], ids=str)
def test_a_plan_for_the_outputs_that_are_named(outputs: Any) -> None:
    w, x = torch.randn(8, 8, requires_grad=True), torch.randn(64, 8)
    plan = fckpt.plan(with_hidden, w, x, budget=0.95, outputs=outputs)
    assert plan.loss_of and fckpt.Plan.from_json(json.dumps(plan.to_json())).loss_of == plan.loss_of
    assert plan.loss_of[0] in str(plan).splitlines()[-1]
    found = fckpt.check(with_hidden, w, x, budget=plan.budget_bytes, outputs=outputs)
    assert found and found.peak_bytes <= plan.budget_bytes
    assert fckpt.pareto(with_hidden, w, x, points=2, outputs=outputs)[-1].plan.loss_of == plan.loss_of


def with_views(w: Tensor, x: Tensor) -> tuple[Any, ...]:
    hidden = x @ w
    return hidden[1:], {"other": hidden[:, 2:], "detached": hidden.detach()}, hidden.exp(), x[1:], hidden[0]


@pytest.mark.filterwarnings("ignore:with_views returns views:fckpt.GradientWarning")
@pytest.mark.parametrize(
    ("outputs", "loss_of"),
    [
        (0, ("0 float32[64, 8]",)),
        ("1.other", ("0 float32[64, 8]",)),
        (-1, ("0 float32[64, 8]",)),
        ("2", ("2 float32[64, 8]",)),
        ([0, "2"], ()),
    ],
    ids=str,
)
def test_a_chosen_view_counts_as_what_it_views(outputs: Any, loss_of: tuple[str, ...]) -> None:
    w, x = torch.randn(8, 8, requires_grad=True), torch.randn(64, 8)
    plan = fckpt.plan(with_views, w, x, outputs=outputs)
    assert plan.loss_of == loss_of
    assert fckpt.check(with_views, w, x, budget=fckpt.plan(with_views, w, x).peak_bytes, outputs=outputs)


@pytest.mark.parametrize("outputs", ["1.detached", "3"])
def test_a_chosen_view_that_has_no_gradient(outputs: str) -> None:
    w, x = torch.randn(8, 8, requires_grad=True), torch.randn(64, 8)
    with pytest.raises(ValueError, match=f"{outputs}' depends on nothing that requires grad"):
        fckpt.plan(with_views, w, x, outputs=outputs)


def test_what_a_plan_takes_for_the_loss() -> None:
    w, x = torch.randn(8, 8, requires_grad=True), torch.randn(64, 8)
    assert fckpt.plan(with_hidden, w, x).loss_of == ("float32[]",)  # the one number
    assert fckpt.plan(lambda w, x: with_hidden(w, x)["loss"], w, x).loss_of == ()
    with pytest.raises(ValueError, match="'logit' is not a tensor of the result"):
        fckpt.plan(with_hidden, w, x, outputs="logit")
    with pytest.raises(ValueError, match="requires grad"):
        fckpt.plan(lambda w, x: (w.sum(), x + 1), w, x, outputs=1)


def test_warnings_name_the_function() -> None:
    x = torch.randn(3)
    for options, expected in (({}, "budget of exponential,"), ({"name": "the head"}, "budget of the head,")):

        def exponential(x: Tensor) -> Tensor:
            return x.sin().exp()

        with pytest.warns(fckpt.BudgetWarning, match=expected):
            torch.func.jvp(fckpt.remat(exponential, budget=1.0, **options), (x,), (x,))
    with pytest.raises(TypeError, match="name must be a str"):
        fckpt.remat(exponential, name=3)  # type: ignore[call-overload]


@pytest.mark.parametrize("options", [{"budget": 10**9}, {"policy": fckpt.policies.everything_saveable}, {}], ids=repr)
def test_what_a_forward_pass_kept_goes_with_its_results(options: dict[str, Any]):
    """Without waiting for Python's collector of cycles, which knows nothing of memory."""
    layer, x = torch.nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    region = fckpt.remat(lambda x: torch.tanh(layer(torch.tanh(layer(x)))).sum(), **options)
    region(x).backward()

    def calls() -> None:
        for _ in range(20):
            region(x)

    gc.disable()
    try:
        assert measure_peak(calls).retained_bytes == 0
    finally:
        gc.enable()
