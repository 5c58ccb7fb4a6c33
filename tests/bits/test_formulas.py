"""Gradients by a plan are those of the formulas that autograd uses in the same place without one, and so are values.

Autograd chooses formulas by whether tensors are subclasses (as all are below a dispatch mode), whether the backward
pass runs at a level of torch.func, and whether it is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal, leaf
from torch import Tensor

import fckpt

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
ONE_ZERO = X.clone()
ONE_ZERO[1, 2] = 0
TWO_ZEROS = ONE_ZERO.clone()
TWO_ZEROS[1, 3] = 0
NAN = X.clone()
NAN[2, 3] = float("nan")
MASK = X > 0

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "prod": lambda x: (x * 1.5).prod(),
    "prod of a column": lambda x: (x * 1.5)[:1, :1].prod(),
    "prod along a dimension": lambda x: (x * 1.5).prod(-1),
    "prod that keeps the dimension": lambda x: (x * 1.5).prod(0, keepdim=True),
    "prod of a transpose": lambda x: (x * 1.5).t().prod(),
    "cumprod": lambda x: (x * 1.5).cumprod(-1),
    "masked_fill": lambda x: (x * x).masked_fill(MASK, (x * 1.5).sum()).sin() * x,
    "masked_fill_": lambda x: (x * x).masked_fill_(MASK, (x * 1.5).sum()).sin() * x,
    "masked_fill of a row": lambda x: (x * x).masked_fill(MASK[0], (x * 1.5).sum()).sin() * x,
    "max": lambda x: (x * 1.5).max(),
    "min": lambda x: (x * 1.5).min(),
    "median": lambda x: (x * 1.5).median(),
    "nanmedian": lambda x: (x * 1.5).nanmedian(),
    "max of ties": lambda x: (x * 1.5).round().max() * x.sum(),
    "silu": lambda x: F.silu(x * 1.5),
    "mish": lambda x: F.mish(x * 1.5),
    "group_norm": lambda x: F.group_norm(x[None] * 1.5, 3),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x * 1.5, x.sigmoid().detach()),
    "det": lambda x: torch.linalg.det(x[:, :6] * 1.5),
    "det of several": lambda x: torch.linalg.det(torch.stack([x[:, :6], x[:, 1:7] * 1.5])),
    "slogdet": lambda x: torch.linalg.slogdet(x[:, :6] * 1.5)[1],
    "solve": lambda x: torch.linalg.solve(x[:, :6] * 1.5, x),
}
DATA = {"random": X, "one zero": ONE_ZERO, "two zeros": TWO_ZEROS, "nan": NAN}


def signs(tree: Any) -> list[Tensor]:
    return [torch.signbit(t.nan_to_num(nan=0.5)).byte() for t in optree.tree_leaves(tree)]


def by_autograd(fn: Any, x: Tensor, factor: float, **options: Any) -> Any:
    x = leaf(x)
    y = fn(x)
    return y, torch.autograd.grad(y, x, torch.full_like(y, factor), **options)


def by_grad(fn: Any, x: Tensor, factor: float) -> Any:
    return torch.func.grad_and_value(lambda x: fn(x).sum() * factor)(x)


def by_vjp(fn: Any, x: Tensor, factor: float) -> Any:
    y, pullback = torch.func.vjp(fn, x)
    return y, pullback(torch.full_like(y, factor))


def by_vmap_of_grad(fn: Any, x: Tensor, factor: float) -> Any:
    return torch.func.vmap(torch.func.grad(lambda x: fn(x).sum() * factor))(torch.stack([x, 0.5 * x]))


def by_second_derivative(fn: Any, x: Tensor, factor: float) -> Any:
    return torch.func.grad(lambda x: (torch.func.grad(lambda x: fn(x).sum() * factor)(x) * X).sum())(x)


WAYS: dict[str, Callable[..., Any]] = {
    "autograd": by_autograd,
    "autograd, recorded": lambda fn, x, factor: by_autograd(fn, x, factor, create_graph=True),
    "grad": by_grad,
    "vjp": by_vjp,
    "vmap of grad": by_vmap_of_grad,
    "second derivative": by_second_derivative,
}


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.filterwarnings("ignore::fckpt.BudgetWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_formulas_are_those_of_the_plain_function(name: str, way: str) -> None:
    fn = FUNCTIONS[name]
    planned = fckpt.remat(fn, policy=fckpt.policies.nothing_saveable)
    for x in DATA.values():
        for factor in (1.0, -3.0, float("inf")):
            try:
                expected = WAYS[way](fn, x, factor)
            except RuntimeError:  # singular, or refused under vmap
                continue
            got = WAYS[way](planned, x, factor)
            assert_equal(got, expected)
            assert_equal(signs(got), signs(expected))


@pytest.mark.parametrize("name", ["masked_fill", "max", "median", "silu"])
def test_formulas_of_a_gradient_inside(name: str) -> None:
    fn = FUNCTIONS[name]

    def penalty(x: Tensor) -> Tensor:
        h = x.sin()
        (g,) = torch.autograd.grad(fn(h).sum(), h, create_graph=True)
        return g.square().sum()

    def first(x: Tensor) -> Tensor:
        h = (x.detach() * 2).requires_grad_()
        (g,) = torch.autograd.grad(fn(h).sum(), h)
        return (g * x).sum()

    for program in (first,) if name in ("max", "median") else (penalty, first):  # plain refuses the other one
        planned = fckpt.remat(program, policy=fckpt.policies.nothing_saveable)
        assert_equal(by_autograd(planned, X, 2.0), by_autograd(program, X, 2.0))


@pytest.mark.parametrize("name", ["prod", "cumprod"])
def test_a_recorded_gradient_inside_by_a_formula_that_reads_data_is_refused(name: str) -> None:
    def penalty(x: Tensor) -> Tensor:
        h = x.sin()
        (g,) = torch.autograd.grad(FUNCTIONS[name](h).sum(), h, create_graph=True)
        return g.square().sum()

    planned = fckpt.remat(penalty, policy=fckpt.policies.nothing_saveable)
    with pytest.raises(fckpt.TraceError, match=f"differentiates `{name}` inside.*torch.func.grad"):
        planned(leaf(X))

    def with_func(x: Tensor) -> Tensor:
        return torch.func.grad(lambda h: FUNCTIONS[name](h).sum())(x.sin()).square().sum()

    planned = fckpt.remat(with_func, policy=fckpt.policies.nothing_saveable)
    assert_equal(by_autograd(planned, X, 2.0), by_autograd(with_func, X, 2.0))


@pytest.mark.parametrize("name", ["prod", "prod along a dimension", "masked_fill"])
@pytest.mark.parametrize("data", DATA)
def test_a_budget_holds_whatever_the_data(name: str, data: str) -> None:
    """Formulas that read data allocate more for some data: the plan is for the most."""
    x = DATA[data].repeat(50, 10).contiguous()
    mask = x > 2.5 if data == "random" else x > -9
    fn = {**FUNCTIONS, "masked_fill": lambda x: (x * x).masked_fill(mask, (x * 1.5).sum()).sin() * x}[name]

    def step(f: Any) -> Any:
        f(given).backward()
        given.grad = None

    given, loss = leaf(x), lambda x: fn(x).sum()
    plan = fckpt.plan(loss, given, budget=1.0)
    planned = fckpt.remat(loss, budget=1.0)
    step(planned)
    assert fckpt.measure_peak(lambda: step(planned)).peak_bytes <= plan.baseline_peak_bytes


def _of_dual(x: Tensor, w: Tensor, tangent: Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        y = torch.autograd.forward_ad.make_dual(x, tangent) * w
        return torch.autograd.forward_ad.unpack_dual(torch.cat([y, w])).tangent


FORWARD_MODE: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "product": lambda x, w, t: torch.func.jvp(lambda a: a * w.sin(), (x,), (t,))[1],
    "returned": lambda x, w, t: torch.func.jvp(lambda a: (a * 2, w * 1), (x,), (t,))[1],
    "matrix product": lambda x, w, t: torch.func.jvp(lambda a: torch.addmm(w, a, w) / w.exp() - w, (x,), (t,))[1],
    "of a gradient": lambda x, w, t: torch.func.jvp(torch.func.grad(lambda a: (a * w).tanh().sum()), (x,), (t,)),
    "jacobian": lambda x, w, t: torch.func.jacfwd(lambda a: (a * w).sum(0))(x),
    "dual": _of_dual,
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", FORWARD_MODE)
def test_forward_mode_inside_skips_products_with_tangents_of_constants(name: str) -> None:
    """Torch has no memory for such tangents, and `0 * inf` is then not NaN."""
    fn = FORWARD_MODE[name]
    x, w, t = (torch.randn(4, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    x[0], t[1] = float("inf"), 0.0
    x.requires_grad_(), w.requires_grad_()
    plain, ours = optree.tree_leaves(fn(x, w, t)), optree.tree_leaves(fckpt.remat(fn, budget=1.0)(x, w, t))
    for a, b in zip(plain, ours, strict=True):
        assert torch.equal(a.detach().contiguous().view(torch.int32), b.detach().contiguous().view(torch.int32))


SYMMETRIC = torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(0))
SYMMETRIC = SYMMETRIC @ SYMMETRIC.mT + torch.eye(6)

SPECTRA: dict[str, Callable[[Tensor], Tensor]] = {
    "svdvals": torch.linalg.svdvals,
    "eigvals": lambda x: torch.linalg.eigvals(x).abs(),
    "eigvalsh": torch.linalg.eigvalsh,
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x, 2),
    "norm": lambda x: torch.linalg.norm(x, "nuc", dim=(1, 2)),
    "torch.norm": lambda x: torch.norm(x, "nuc", dim=(1, 2)),
    "a method": lambda x: x.norm("nuc", dim=(1, 2)),
    "cond": torch.linalg.cond,
    "cond by name": lambda x: torch.linalg.cond(x, "nuc"),
    "matrix_rank": lambda x: torch.linalg.matrix_rank(x, hermitian=True).float(),
    "svd without vectors": lambda x: torch.svd(x, compute_uv=False)[1],
    "svd": lambda x: torch.linalg.svd(x, full_matrices=False)[1],
    "eigh": lambda x: torch.linalg.eigh(x)[0],
    "pinv": lambda x: torch.linalg.pinv(x, hermitian=True),
    "an operation": torch.ops.aten.linalg_svdvals.default,
    "a batch": torch.func.vmap(torch.linalg.svdvals),
    "a gradient": lambda x: torch.func.grad(lambda y: torch.linalg.svdvals(y).sum())(x),
    "data at a level": lambda x: torch.func.grad(lambda s: (torch.linalg.svdvals(x) * s).sum())(torch.ones(())),
}


def without_grad(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with torch.no_grad():
            return fn(*args)

    return call


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch, for `cond` by name in a batch
@pytest.mark.parametrize("where", ["data", "no_grad inside", "no_grad around", "differentiated", "level", "batches"])
@pytest.mark.parametrize("name", SPECTRA)
def test_values_are_computed_without_vectors_where_no_gradient_is_needed(name: str, where: str) -> None:
    scale, x = leaf(torch.tensor(1.3)), SYMMETRIC.clone().requires_grad_(where not in ("data", "batches"))
    inner = without_grad(SPECTRA[name]) if where == "no_grad inside" else SPECTRA[name]
    fn = lambda x: inner(x) * scale
    planned = fckpt.remat(fn, budget=1.0)

    def outcome(fn: Callable[..., Any]) -> Any:
        if where == "no_grad around":
            return without_grad(fn)(x)
        if where == "level":
            return torch.func.grad_and_value(lambda s: (fn(x) * s).sum())(torch.ones(()))
        if where == "batches":
            return torch.func.vmap(lambda y: fn(y[None]))(x)
        result = fn(x)
        return result, torch.autograd.grad(
            result.sum(), [scale, x][: 1 + (where == "differentiated")], allow_unused=True
        )

    for _ in range(2):
        assert_equal(outcome(planned), outcome(fn))


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_lstm_without_grad(frozen: bool, around: bool) -> None:
    torch.manual_seed(0)
    lstm = torch.nn.LSTM(16, 8, 2, batch_first=True, bidirectional=True).requires_grad_(not frozen)
    scale = leaf(torch.tensor(1.3))
    fn = lambda x: without_grad(lstm)(x)[0] * scale
    planned = fckpt.remat(fn, budget=1.0)
    for size in (3, 4, 5, 6, 7):  # the later ones by a trace with symbolic sizes
        x = torch.randn(size, 2 * size, 16)
        outcome = lambda fn, x=x: without_grad(fn)(x) if around else (y := fn(x), torch.autograd.grad(y.sum(), [scale]))
        assert_equal(outcome(planned), outcome(fn))


@pytest.mark.parametrize("product", ["a parameter", "a layer", "attention", "a recurrent layer"])
def test_products_without_grad_with_what_requires_it(product: str) -> None:
    torch.manual_seed(0)
    weight, layer = leaf(torch.randn(16, 8)), torch.nn.Linear(16, 40)
    attention, recurrent = torch.nn.MultiheadAttention(16, 2), torch.nn.RNN(16, 8)
    fn = {
        "a parameter": lambda x: weight.t() @ x.transpose(1, 2),
        "a layer": lambda x: layer(x[:, None].expand(-1, 2, -1, -1)),
        "attention": lambda x: attention(x, x, x)[0],
        "a recurrent layer": lambda x: recurrent(x)[0],
    }[product]
    planned = fckpt.remat(fn, budget=1.0)
    for _ in range(3):
        x = torch.randn(3, 17, 16).transpose(0, 1)
        assert_equal(without_grad(planned)(x), without_grad(fn)(x))


TARGETS = torch.arange(256) % 64
WEIGHTS = torch.linspace(0, 1, 64)


@pytest.mark.parametrize("way", ["autograd", "grad"])
@pytest.mark.parametrize("shape", [(256, 64), (4, 64, 64)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_weighted_cross_entropy_with_ignored_targets(reduction: Any, shape: tuple[int, ...], way: str) -> None:
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    options: Any = {"weight": WEIGHTS, "ignore_index": 3, "label_smoothing": 0.1, "reduction": reduction}
    fn = lambda x: F.cross_entropy(x * 1.5, TARGETS.view(shape[0], *shape[2:]), **options)
    planned = fckpt.remat(fn, policy=fckpt.policies.nothing_saveable)
    assert_equal(WAYS[way](planned, scores, 1.0), WAYS[way](fn, scores, 1.0))
