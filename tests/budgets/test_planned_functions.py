"""A planned function gives the numbers of the plain one, under every transform and wherever the plain one can stand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import ways
from helpers import assert_equal, leaf, seeded
from planned import DOTS, EVERYTHING, NOTHING, PLANNERS, X, idle_policies, model
from sampling import todays
from torch import Tensor

import fckpt

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
