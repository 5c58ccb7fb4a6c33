"""Errors say what was given, why it cannot work, and what to do instead; all are FckptErrors."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad
from torch.utils.checkpoint import checkpoint

import fckpt
from fckpt import errors

X = torch.ones(3)


def raises(kind: type[Exception], match: str) -> Any:
    assert issubclass(kind, fckpt.FckptError)
    return pytest.raises(kind, match=match)


@pytest.mark.parametrize(
    ("fn", "match"),
    [
        (3, "takes a function or an nn.Module, not int"),
        (X, r"remat\(fn\)\(x\), not remat\(fn\(x\)\)"),
        (nn.Linear, r"got the class Linear; it takes an instance: remat\(Linear\(...\)\)"),
        ("sin", "not str"),
        (asyncio.sleep, "sleep is an async function"),
    ],
)
def test_wrong_types_of_fn(fn: Any, match: str) -> None:
    with raises(fckpt.ArgumentTypeError, match) as caught:
        fckpt.remat(fn)
    assert isinstance(caught.value, TypeError)


def test_wrong_static_arguments() -> None:
    fn = lambda a, b: a
    with raises(
        fckpt.ArgumentValueError,
        r"static_argnums=2 is out of range: .* takes 2 positional arguments \(a, b\)",
    ):
        fckpt.remat(fn, static_argnums=2)
    with raises(fckpt.ArgumentValueError, "out of range"):
        fckpt.remat(fn, static_argnums=(0, -3))
    for wrong in (1.5, "a", (0, "a"), True, {"a": 1}):
        with raises(fckpt.ArgumentTypeError, "static_argnums must be an int or a tuple of ints"):
            fckpt.remat(fn, static_argnums=wrong)  # type: ignore[call-overload]
    with raises(fckpt.ArgumentTypeError, "static_argnames must be a str"):
        fckpt.remat(fn, static_argnames=3)  # type: ignore[call-overload]
    assert torch.equal(fckpt.remat(fn, static_argnums=-1)(X, "anything"), X)


def loss(w: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        w = w.tanh() * w
    return w.sum()


LAYER = nn.Linear(3, 1)
STEP = LAYER, torch.optim.SGD(LAYER.parameters()), lambda model, x: model(x).sum()
WRONG: dict[str, tuple[Any, str]] = {
    "remat, solver": (lambda: fckpt.remat(loss, budget=0.9, solver=None), "solver is named by a str, not NoneType"),  # type: ignore[call-overload]
    "plan, solver": (
        lambda: fckpt.plan(loss, LEAF, budget=0.9, solver=loss),
        "named by a str, not function: .*register",
    ),  # type: ignore[arg-type]
    "step, solver": (lambda: fckpt.step(*STEP, budget=0.9, solver=3), "named by a str, not int"),  # type: ignore[arg-type]
    "step, norm": (lambda: fckpt.step(*STEP, clip_norm=True), "clip_norm must be a number above 0"),
    "costs, int": (lambda: fckpt.plan(loss, LEAF, costs=3), "costs are a source such as"),  # type: ignore[arg-type]
    "costs, class": (lambda: fckpt.plan(loss, LEAF, costs=fckpt.cost.Analytic), "costs are a source such as"),
    "costs, result": (lambda: fckpt.plan(loss, LEAF, costs=lambda *_: None), "a lambda returned NoneType"),  # type: ignore[arg-type, return-value]
    "outputs, float": (lambda: fckpt.plan(loss, LEAF, outputs=1.5), "outputs are ints or str"),  # type: ignore[arg-type]
    "outputs, None": (lambda: fckpt.plan(loss, LEAF, outputs=[None]), "outputs are ints or str"),  # type: ignore[list-item]
    "largest": (lambda: fckpt.largest(loss, 3, budget="1MiB"), "make_args must be a function of a size"),  # type: ignore[arg-type]
    "estimate": (lambda: fckpt.estimate(LAYER, None, 3, X), "loss_fn must be a function"),  # type: ignore[arg-type]
    "peak": (lambda: fckpt.measure_peak(3), "takes a function without arguments, not int"),  # type: ignore[arg-type]
    "device, name": (lambda: fckpt.measure_peak(list, device="foo"), "the device 'foo' cannot be measured"),
    "device, type": (lambda: fckpt.measure_peak(list, device=[1]), r"the device '\[1\]' cannot be"),  # type: ignore[arg-type]
    "device, meta": (lambda: fckpt.measure_peak(list, device="meta"), "the device 'meta' cannot be measured"),
    "device, none": (lambda: fckpt.measure_peak(list, device="cuda:99"), "'cuda:99' cannot be measured"),
    "load": (lambda: fckpt.Plan.load(None), "the path of a plan is a str or a pathlib.Path"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("call", "match"), WRONG.values(), ids=WRONG)
def test_wrong_types_of_arguments(call: Any, match: str) -> None:
    with pytest.raises((fckpt.ArgumentTypeError, fckpt.ArgumentValueError), match=match):
        call()


def test_unhashable_static_leaves() -> None:
    def draws(x: torch.Tensor, s: Any) -> torch.Tensor:  # Dynamo captures no function that draws from a generator
        return x * torch.rand(3, generator=GENERATOR)

    with raises(fckpt.ArgumentTypeError, r"args\[1\]\['a'\] is a ndarray, which cannot be hashed.*as_tensor"):
        fckpt.remat(draws, budget=1.0)(LEAF, {"a": np.ones(2)})
    with raises(fckpt.ArgumentTypeError, r"kwargs\['s'\] is a set"):
        fckpt.remat(draws, budget=1.0)(LEAF, s={1})
    with raises(fckpt.ArgumentTypeError, r"args\[1\] is a list, which cannot be hashed"):
        fckpt.remat(draws, budget=1.0, static_argnums=1)(LEAF, [1])
    for static in ({1}, np.ones(2), {"a": bytearray(b"a")}):
        assert torch.equal(fckpt.remat(lambda x, s: x * len(s))(X, static), X * len(static))
    assert torch.equal(fckpt.remat(lambda x, s: x * len(s), static_argnums=1)(X, [1]), X)


GENERATOR = torch.Generator()
LEAF = X.clone().requires_grad_()


def changing(first: Any, then: Any) -> Any:
    calls = 0

    def fn(x: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        return (first if calls == 1 else then)(x)

    return fckpt.remat(fn)


def test_recompute_of_another_shape_or_structure() -> None:
    """Under torch.func the outputs themselves are compared; in plain autograd, what was saved."""
    shape = lambda: changing(lambda x: x.sin().exp(), lambda x: x.sin().exp()[:2])
    with raises(fckpt.ImpureFunctionError, r"output 0 .* was torch.float32\[3\] in forward and is torch.float32\[2\]"):
        grad(lambda x: shape()(x).sum())(X)
    structure = lambda: changing(lambda x: (x.sin().exp(),), lambda x: [x.sin().exp()])
    with raises(fckpt.ImpureFunctionError, r"returned \(\*,\) in forward and \[\*\] in its recompute"):
        grad(lambda x: structure()(x)[0].sum())(X)

    x = X.clone().requires_grad_()
    with raises(fckpt.ImpureFunctionError, r"saved value 0 .* float32\[3\], .* float32\[2\], .*not pure"):
        changing(lambda x: x.sin().exp().sin(), lambda x: x[:2].sin().exp().sin())(x).sum().backward()
    with raises(fckpt.ImpureFunctionError, "saved 2 values in forward and 1 in its recompute"):
        changing(lambda x: x.sin().exp().tanh(), lambda x: x.sin().exp())(x).sum().backward()


class Opaque(dict):  # type: ignore[type-arg]
    """A dict subclass that no registry knows."""


def test_outputs_that_hide_tensors() -> None:
    fn = lambda x: Opaque(y=x.sin().exp())
    with raises(fckpt.OpaqueOutputError, "returned an object of type Opaque, which holds tensors.*register"):
        grad(lambda x: fckpt.remat(fn)(x)["y"].sum())(X)
    x = X.clone().requires_grad_()
    fckpt.remat(fn)(x)["y"].sum().backward()  # plain autograd sees into any object
    assert x.grad is not None


def test_grad_and_vjp() -> None:
    with raises(fckpt.ArgumentValueError, r"returned float32\[3\]"):
        fckpt.grad(torch.sin)(X)
    with raises(fckpt.ArgumentTypeError, r"int64\[\] at its root"):
        fckpt.grad(lambda n: n.sum())(torch.tensor(1))
    with raises(fckpt.ArgumentTypeError, r"got for argument 0: a int at \['a'\]"):
        fckpt.grad(lambda t: t["x"].sum())({"a": 1, "x": X})
    with raises(fckpt.ArgumentValueError, "argnums=1 is out of range"):
        fckpt.grad(torch.sum, argnums=1)(X)
    with raises(fckpt.ArgumentTypeError, "must return a pair"):
        fckpt.grad(torch.sum, has_aux=True)(X)
    _, pull = fckpt.vjp(lambda x: (x, x), X)
    with raises(fckpt.ArgumentValueError, "cotangents have the structure"):
        pull(X)


def test_sequential() -> None:
    fns = [lambda p, x: x] * 4
    with raises(fckpt.ArgumentTypeError, "functions or modules, at least one and not both; got Linear, function"):
        fckpt.sequential([nn.Linear(1, 1), fns[0]])  # type: ignore[list-item]
    with raises(fckpt.ArgumentTypeError, "got nothing"):
        fckpt.sequential([])
    with raises(fckpt.ArgumentValueError, r"segments=5 does not fit a chain of 4: 1 <= segments <= 4"):
        fckpt.sequential(fns, 5)
    with raises(fckpt.ArgumentValueError, r"segments=\(1, 2\) sum to 3, but the chain has 4 links"):
        fckpt.sequential(fns, (1, 2))
    with raises(fckpt.ArgumentTypeError, '"sqrt"'):
        fckpt.sequential(fns, "cube")  # type: ignore[call-overload]
    with raises(fckpt.ArgumentValueError, "got parameters for 2 functions; the chain has 4"):
        fckpt.sequential(fns)([1, 2], X)


def test_modules() -> None:
    with raises(fckpt.ArgumentTypeError, "from_module takes an nn.Module, not function"):
        fckpt.from_module(lambda x: x)  # type: ignore[arg-type]


def test_a_solver_without_a_budget() -> None:
    with pytest.raises(fckpt.ArgumentValueError, match=r"solver='greedy' needs a budget.*budget="):
        fckpt.remat(torch.sin, solver="greedy")
    with pytest.raises(fckpt.ArgumentValueError, match="budget="):
        fckpt.remat(torch.sin, solver="greedy", policy=fckpt.policies.nothing_saveable)


def test_a_checkpoint_inside_a_planned_function() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda h: h.sin().exp(), x, use_reentrant=False).sum()

    x, y = torch.randn(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    with torch.no_grad():
        y.copy_(x)
    fckpt.remat(fn, budget=1.0)(x).backward()  # the plan decides for the whole function
    fn(y).backward()
    assert x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)

    def differentiates(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(fn(x), x, create_graph=True)[0].sum()

    with pytest.raises(fckpt.TraceError, match=r"torch.utils.checkpoint inside.*preserve_rng_state=False"):
        fckpt.remat(differentiates, budget=1.0)(x)


def test_a_batch_normalisation_that_reads_its_counter() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))
    with pytest.raises(fckpt.TraceError, match="momentum=None"):
        fckpt.remat(net, budget=1.0)(torch.randn(5, 4))


def test_attention_without_dropout_in_a_checkpoint() -> None:
    attention = torch.nn.functional.scaled_dot_product_attention
    fn = lambda x: checkpoint(lambda h: attention(h, h, h, is_causal=True), x, use_reentrant=False).square().sum()
    x = torch.randn(2, 2, 4, 8, requires_grad=True)
    found = [torch.autograd.grad(f(x), x)[0] for f in (fn, fckpt.remat(fn, budget=1.0))]
    assert torch.equal(*found)


def test_a_policy_warning_points_at_the_users_line() -> None:
    region = fckpt.remat(lambda x: x.sin().exp().sum(), policy=fckpt.policies.save_only_these_names("nobody"))
    with pytest.warns(fckpt.PolicyWarning, match="'nobody'") as caught:
        region(torch.randn(3, requires_grad=True))
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))], ids=["copy", "pickle"])
def test_errors_go_from_one_process_to_another(copied: Any) -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert fckpt.BudgetError in kinds
    for kind in kinds:
        error = kind("too much", 3) if kind in (fckpt.BudgetError, fckpt.RankFailure) else kind("too much")
        error.add_note("in the second step")
        other = copied(error)
        assert type(other) is kind and str(other) == "too much"
        assert vars(other) == vars(error) and vars(error)["__notes__"]


CHECKPOINTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda h: torch.nn.functional.dropout(h.sin(), 0.5).exp(),
    "of a module": nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()),
    "attention": lambda h: torch.nn.functional.scaled_dot_product_attention(h, h, h, dropout_p=0.5),
    "noise": lambda h: (h + torch.randn_like(h)).tanh(),
    "nested": lambda h: checkpoint(lambda g: torch.dropout(g.exp(), 0.5, True), h, use_reentrant=False).sin(),
    "nested and own": lambda h: torch.dropout(
        checkpoint(lambda g: torch.dropout(g.exp(), 0.5, True), h, use_reentrant=False), 0.5, True
    ),
    "heads": lambda h: torch.nn.functional.multi_head_attention_forward(
        *[h[None]] * 3, 4, 2, torch.eye(12, 4), None, None, None, False, 0.5, torch.eye(4), None, need_weights=False
    )[0],
}


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_a_checkpoint_inside_that_draws(name: str) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        inside = checkpoint(CHECKPOINTED[name], x, use_reentrant=False)
        return (torch.nn.functional.dropout(inside, 0.5) * x).square().sum()

    planned = fckpt.remat(fn, budget=1.0)
    with pytest.warns(fckpt.BudgetWarning, match=r"fraction of the peak without torch.utils.checkpoint") as caught:
        planned(torch.randn(6, 4))
    assert [warning.filename for warning in caught] == [__file__]
    for region in (planned, fckpt.remat(fn, budget="1MiB")):
        for seed in range(2):
            x = torch.randn(6, 4, requires_grad=True)
            found = []
            for f in (fn, region):
                torch.manual_seed(seed)
                found.append([*torch.autograd.grad(f(x), x), torch.rand(3)])
            assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        (nn.BatchNorm1d(4), {}),
        (nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4)), {}),
        (nn.Dropout(0.5), {"preserve_rng_state": False}),
    ],
    ids=["writes", "writes and draws", "draws again"],
)
def test_a_checkpoint_inside_that_does_something_again_is_refused(layer: nn.Module, options: Any) -> None:
    """Dynamo's operator for it leaves that to a compiler."""
    net = nn.Sequential(nn.Linear(4, 4), layer, nn.Tanh())
    fn = lambda x: checkpoint(net, x, use_reentrant=False, **options).square().sum()
    for given in ({"budget": 10**6}, {"policy": fckpt.policies.dots_saveable}):
        with pytest.raises(fckpt.TraceError, match=r"torch.utils.checkpoint inside.*gradient_checkpointing_disable"):
            fckpt.remat(fn, **given)(torch.randn(6, 4))


LIBRARY = torch.library.Library("fckpt_messages", "FRAGMENT")
LIBRARY.define("double(Tensor x) -> Tensor")
LIBRARY.impl("double", lambda x: x * 2, "CPU")


@torch.library.custom_op("fckpt_messages::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def message(fn: Any, *args: Any) -> str:
    with pytest.raises(fckpt.TraceError) as caught:
        fckpt.remat(fn, budget=1.0)(*args)
    return str(caught.value)


@pytest.mark.parametrize("operation", [triple, torch.ops.fckpt_messages.double])
def test_a_custom_operation_without_layouts(operation: Any) -> None:
    text = message(lambda x: operation(x).sin(), X)
    assert "a custom operation without `register_fake`" in text and "reaches" not in text


def test_a_module_that_is_converted_inside() -> None:
    layer = nn.Linear(3, 3)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return layer.to(torch.float64)(x.double())

    text = message(fn, X)
    assert "converts a module" in text and "Convert the module before the call" in text and ".grad" not in text


def test_the_obstacle_to_a_capture_comes_before_what_the_python_code_reaches() -> None:
    deep = {"a": {"b": {"c": {"d": {"e": {"f": [1]}}}}}}
    norm = nn.BatchNorm1d(3, momentum=None)
    text = message(lambda x: norm(x) * len(deep), X.expand(4, 3))
    assert text.startswith("the function cannot be captured: ") and text.index("batchnorm.py") < text.index("reaches")


def test_reasons_are_not_repeated() -> None:
    weight = nn.Parameter(X)

    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return x * weight

    with torch.no_grad():
        text = message(fn, X)
    assert text.count("nothing is traced then") == 1 and "Nor could it be captured" not in text
