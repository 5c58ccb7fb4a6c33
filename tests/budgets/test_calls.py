"""A budget for calls that nothing differentiates from outside: steps, higher derivatives inside, inference."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from networks import ACTIVATIONS, Fn, Params, loss_of, network, weights
from sampling import SLOW
from torch import Tensor, nn
from torch.func import grad, grad_and_value, hessian, jacrev, jvp, vmap
from torch.utils._pytree import tree_leaves

import fckpt
from fckpt.graph.graph import Graph
from fckpt.graph.simulation import simulate

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

X = torch.linspace(-1, 1, 96 * 16).reshape(96, 16)


def sgd(run: Fn) -> Fn:
    def step(params: Params, x: Tensor) -> Any:
        grads, value = grad_and_value(loss_of(run))(params, x)
        return value, [p - 0.1 * g for p, g in zip(params, grads, strict=True)]

    return step


def momentum(run: Fn) -> Fn:
    def step(params: Params, x: Tensor) -> Any:
        state = [torch.full_like(p, 0.5) for p in params]
        grads = grad(loss_of(run))(params, x)
        state = [0.9 * m + g for m, g in zip(state, grads, strict=True)]
        return [p - 0.1 * m for p, m in zip(params, state, strict=True)], state

    return step


def product_with_hessian(run: Fn) -> Fn:
    def product(params: Params, x: Tensor) -> Any:
        ones = [torch.ones_like(p) for p in params]
        return jvp(lambda p: grad(loss_of(run))(p, x), (params,), (ones,))[1]

    return product


def penalty(run: Fn) -> Fn:
    def of_gradient(params: Params, x: Tensor) -> Tensor:
        return sum((g.square().sum() for g in grad(loss_of(run))(params, x)), torch.zeros(()))

    return grad(of_gradient)


def per_sample(run: Fn) -> Fn:
    return vmap(grad(lambda params, x: loss_of(run)(params, x[None])), in_dims=(None, 0))


def meta_learning(run: Fn) -> Fn:
    def after_a_step(params: Params, x: Tensor) -> Tensor:
        inner = grad(loss_of(run))(params, x[:48])
        return loss_of(run)([p - 0.1 * g for p, g in zip(params, inner, strict=True)], x[48:])

    return grad(after_a_step)


def residual_of_an_equation(run: Fn) -> Fn:
    def residual(params: Params, x: Tensor) -> Tensor:
        u = lambda x: run(params, x[None]).sum()
        laplacian = vmap(lambda x: torch.diagonal(hessian(u)(x)).sum())(x[:6])
        return (laplacian + vmap(u)(x[:6]).sin()).square().mean()

    return grad(residual)


def of_autograd(run: Fn) -> Fn:
    def gradients(params: Params, x: Tensor) -> Any:
        params = [p.detach().requires_grad_() for p in params]
        return torch.autograd.grad(loss_of(run)(params, x), params)

    return gradients


def noisy(run: Fn) -> Fn:
    def step(params: Params, x: Tensor) -> Any:
        return sgd(lambda p, x: F.dropout(run(p, x), 0.3))(params, F.dropout(x, 0.5) + torch.randn_like(x))

    return step


def inference(run: Fn) -> Fn:
    return run


CALLS = {
    f.__name__: f
    for f in (sgd, momentum, product_with_hessian, penalty, per_sample, meta_learning, of_autograd, noisy, inference)
}
PROFILE = settings(
    max_examples=200 if SLOW else 12, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def seeded(fn: Fn, *args: Any) -> tuple[list[Tensor], Tensor]:
    """Returns the tensors of a result, and the state in which the call leaves the generator."""
    torch.manual_seed(1)
    return [t for t in tree_leaves(fn(*args)) if isinstance(t, Tensor)], torch.get_rng_state()


def peak_of(fn: Fn, *args: Any) -> int:
    held: list[Any] = []
    return fckpt.measure_peak(lambda: held.append(fn(*args))).peak_bytes


def kept(fn: Fn, budget: int | float, *args: Any) -> fckpt.Plan:
    """Checks the bits and bytes of a call by a plan, and returns the plan."""
    planned = fckpt.remat(fn, budget=budget)
    expected, after = seeded(fn, *args)
    planned(*args)  # plans
    actual, state = seeded(planned, *args)
    assert all(map(torch.equal, expected, actual)) and len(expected) == len(actual)
    assert torch.equal(state, after)
    [plan] = planned._fckpt_region.planner.plans.values()  # type: ignore[attr-defined]
    assert peak_of(planned, *args) == plan.peak_bytes <= plan.budget_bytes
    assert fckpt.stats(planned).fallbacks == {}
    return plan


@PROFILE
@given(
    st.sampled_from(sorted(CALLS)),
    st.lists(st.integers(0, len(ACTIVATIONS) - 1), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from([1.0, 0.7, 0.5, "least"]),
)
def test_any_call(kind: str, layers: list[int], skips: bool, budget: float | str) -> None:
    fn, params = CALLS[kind](network(layers, skips)), weights(len(layers))
    if budget == "least":
        budget = 1e-9
    try:
        plan = kept(fn, budget, params, X)
    except fckpt.BudgetError as error:
        plan = kept(fn, error.least_bytes, params, X)
    plain = peak_of(fn, params, X)
    assert plan.baseline_peak_bytes <= 1.1 * plain
    if kind not in ("product_with_hessian", "inference"):  # Python's variables may hold results longer than the graph
        assert plan.baseline_peak_bytes == pytest.approx(plain, rel=0.01)


@pytest.mark.parametrize("kind", ["sgd", "momentum", "penalty", "meta_learning", "of_autograd", "noisy"])
def test_half_of_the_plain_peak(kind: str) -> None:
    fn, params = CALLS[kind](network([0, 1, 2, 3, 0, 1], skips=False)), weights(6)
    plan = kept(fn, peak_of(fn, params, X) // 2, params, X)
    assert plan.peak_bytes <= plan.baseline_peak_bytes / 2


def test_the_residual_of_an_equation() -> None:
    fn, params = residual_of_an_equation(network([0, 3, 0], skips=False)), weights(3)
    kept(fn, 0.5, params, X)


def test_a_gradient_is_freed_by_its_update() -> None:
    params = weights(12)
    plan = fckpt.plan(sgd(network([0] * 12, skips=False)), params, X[:4], budget=0.7)
    gradients = sum(p.nbytes for p in params)
    assert plan.baseline_peak_bytes > 1.7 * gradients  # gradients and new parameters
    assert plan.overhead == 0 and plan.peak_bytes < 1.3 * gradients


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_grad_mode_off(mode: Any) -> None:
    run, params = network([0, 0, 0, 0], skips=True), [w.requires_grad_() for w in weights(4)]
    with mode():
        plain = peak_of(run, params, X)
        planned = fckpt.remat(run, budget=plain * 3 // 4)
        assert torch.equal(planned(params, X), run(params, X))
        assert planned(params, X).is_inference() == (mode is torch.inference_mode)
        assert peak_of(planned, params, X) <= plain * 3 // 4
        with pytest.raises(fckpt.BudgetError, match=r"no plan fits 1\.00 KiB"):
            fckpt.remat(run, budget=1024)(params, X)


def test_a_fraction_is_one_of_the_training_peak() -> None:
    """So a loss that trains within a fraction of its peak is evaluated within it as well."""
    run, params = loss_of(network([0] * 8, skips=False)), [w.requires_grad_() for w in weights(8)]
    planned = fckpt.remat(run, budget=0.4)
    planned(params, X).backward()
    with torch.no_grad():
        assert torch.equal(planned(params, X), run(params, X))
        with pytest.raises(fckpt.BudgetError):
            fckpt.remat(run, budget=0.1)(params, X)
    found = fckpt.stats(planned)
    assert (found.captures, found.plans, found.fallbacks) == (2, 2, {})


def test_a_module_with_grad_mode_off_runs_as_it_is() -> None:
    model = fckpt.remat(nn.Sequential(nn.Linear(16, 16), nn.Tanh()), budget=0.9)
    with torch.no_grad():
        model(X)
    assert fckpt.stats(model).calls == 0


def test_a_policy_has_nothing_to_say() -> None:
    planned = fckpt.remat(sgd(network([0], skips=False)), policy=fckpt.policies.dots_saveable)
    planned(weights(1), X)
    assert fckpt.stats(planned).fallbacks == {"nothing to differentiate": 1}


def test_statistics_change_once() -> None:
    norm, run = nn.BatchNorm1d(16, affine=False), network([0, 0], skips=False)

    def step(params: Params, x: Tensor) -> Any:
        return sgd(run)(params, norm(x))

    plan = kept(step, 0.7, weights(2), X)
    assert norm.num_batches_tracked == 4 and plan.graph.boundary > 0


def test_a_call_under_vmap() -> None:
    run, params = network([0] * 4, skips=True), weights(4)
    planned = fckpt.remat(lambda x: run(params, x), budget=0.7)
    batch = torch.stack([X, 2 * X])
    assert torch.equal(vmap(planned)(batch), vmap(lambda x: run(params, x))(batch))
    assert fckpt.stats(planned).fallbacks == {}


def test_a_call_inside_a_transform_that_tracks_none_of_its_operands() -> None:
    run, params = network([0] * 4, skips=True), weights(4)
    planned = fckpt.remat(lambda x: run(params, x), budget=0.7)
    outer = lambda f: jacrev(lambda y: (y * f(X)).sum())(torch.ones(()))
    assert torch.equal(outer(planned), outer(lambda x: run(params, x)))


def test_a_result_that_requires_grad_by_itself_is_refused() -> None:
    with pytest.raises(fckpt.TraceError, match="returns a tensor that requires grad, although its gradient"):
        fckpt.remat(lambda x: x.sin().requires_grad_(), budget=1.0)(X)


def test_results_that_are_arguments_or_views() -> None:
    def fn(x: Tensor) -> Any:
        return {"same": x, "view": x[:3], "new": x.sin()[2:], "number": 3}

    found = fckpt.remat(fn, budget=1.0)(X)
    assert found["same"] is X and found["number"] == 3
    assert found["view"].data_ptr() == X.data_ptr()
    assert torch.equal(found["new"], X.sin()[2:])


def test_looking(tmp_path: Path) -> None:
    step, params = sgd(network([0, 1, 2, 3], skips=False)), weights(4)
    check = fckpt.check(step, params, X, budget=0.5)
    assert check and check.compared == 11 and check.peak_bytes <= check.plain_peak_bytes / 2
    curve = fckpt.pareto(step, params, X, points=3)
    assert curve[0].peak_bytes < curve[-1].peak_bytes
    plan = fckpt.plan(step, params, X, budget=0.5)
    plan.save(tmp_path / "step.plan.json")
    planned = fckpt.remat(step, plan=fckpt.Plan.load(tmp_path / "step.plan.json"))
    assert all(map(torch.equal, tree_leaves(planned(params, X)), tree_leaves(step(params, X))))
    assert fckpt.stats(planned).programs == 1


# -- solvers -----------------------------------------------------------------------------------------


@pytest.mark.sweep(3)
@pytest.mark.parametrize("solver", fckpt.solve.names())
@pytest.mark.parametrize("kind", ["sgd", "inference"])
def test_solvers(solver: str, kind: str) -> None:
    """Every solver plans such graphs: with an inner backward pass as its second half, or all nodes in one half."""
    count = 4 if solver != "brute" else {"sgd": 1, "inference": 4}[kind]
    run = network([0] * count, skips=True)
    plan = fckpt.plan(run if kind == "inference" else _gradient(run), weights(count), X)
    assert bool(plan.graph.boundary) == (kind == "sgd") and not plan.graph.cotangents
    for graph in (plan.graph, _only_forward(plan.graph)):
        schedule = fckpt.solve.get(solver)(graph, plan.baseline_peak_bytes)
        assert simulate(graph, schedule).peak_nbytes <= plan.baseline_peak_bytes


def _gradient(run: Fn) -> Fn:
    return grad(lambda params, x: run(params, x).sum())


def _only_forward(graph: Graph) -> Graph:
    """Returns the same call with all nodes in the first half."""
    nodes = tuple(dataclasses.replace(n, backward=False) for n in graph.nodes)
    ends = (*graph.outputs, *graph.gradients)
    return dataclasses.replace(graph, nodes=nodes, outputs=ends, gradients=(), boundary=len(nodes))


@pytest.mark.parametrize("solver", sorted({*fckpt.solve.names()} - {"brute"}))
def test_solvers_without_anything_to_do(solver: str) -> None:
    for fn in (lambda x: x, lambda x: 3, lambda x: x.sum()):
        graph = fckpt.plan(fn, X).graph
        simulate(graph, fckpt.solve.get(solver)(graph, 8))


def test_more_threads_need_another_plan() -> None:
    """The temporaries of some kernels grow with the number of threads."""
    w, b, x = (torch.rand(*shape, requires_grad=True) for shape in ((2048,), (2048,), (16, 2048)))
    fn = lambda x: torch.nn.functional.layer_norm(torch.sin(x), (2048,), w, b).square().sum()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        budget = fckpt.plan(fn, x, budget=1.0, solver="greedy").peak_bytes
        region = fckpt.remat(fn, budget=budget, solver="greedy")
        region(x).backward()
        torch.set_num_threads(4)
        with pytest.raises(fckpt.BudgetError):
            region(x)
        torch.set_num_threads(1)
        region(x).backward()
        assert fckpt.stats(region).plans == 1
    finally:
        torch.set_num_threads(before)
