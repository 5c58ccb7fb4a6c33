"""Donated arguments: results in the memory of the old values, never before the last read of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from networks import ACTIVATIONS, Params, loss_of, network, weights
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.utils._pytree import tree_leaves, tree_map

import fckpt
from fckpt.errors import ScheduleError
from fckpt.graph.graph import Graph
from fckpt.graph.schedule import Compute, Schedule
from fckpt.graph.simulation import simulate

X = torch.linspace(-1, 1, 32 * 16).reshape(32, 16)
PROFILE = settings(max_examples=15, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
Update = Callable[[Tensor, Any, Tensor], tuple[Tensor, Any]]


def sgd(p: Tensor, state: Any, g: Tensor) -> tuple[Tensor, Any]:
    return p - 0.1 * g, state


def momentum(p: Tensor, state: Any, g: Tensor) -> tuple[Tensor, Any]:
    m = 0.9 * state["m"] + g
    return p - 0.1 * (g + 0.9 * m), {**state, "m": m}


def adamw(p: Tensor, state: Any, g: Tensor) -> tuple[Tensor, Any]:
    m, v = torch.lerp(state["m"], g, 0.1), 0.99 * state["v"] + 0.01 * g * g
    return (p * 0.999).addcdiv(m, v.sqrt() + 1e-8, value=-0.01), {"m": m, "v": v}


def clipped(p: Tensor, state: Any, g: Tensor) -> tuple[Tensor, Any]:
    return sgd(p, state, g.clamp(-0.01, 0.01))


UPDATES: list[Update] = [sgd, momentum, adamw, clipped]


def step_of(layers: list[int], update: Update, *, by_norm: bool = False, tied: bool = False) -> Callable[..., Any]:
    run = network(layers + layers[:1] * tied, skips=True)
    loss = loss_of(lambda params, x: run([*params, *params[:1]] if tied else params, x))

    def step(params: Params, state: list[Any], x: Tensor) -> Any:
        grads, value = grad_and_value(loss)(params, x)
        if by_norm:
            norm = torch.stack([g.norm() for g in grads]).norm()
            grads = [g * (1 / (norm + 1)).clamp(max=1.0) for g in grads]
        pairs = [update(p, s, g) for p, s, g in zip(params, state, grads, strict=True)]
        return value, [p for p, _ in pairs], [s for _, s in pairs]

    return step


def fresh(layers: int) -> tuple[Params, list[Any], Tensor]:
    params = weights(layers)
    return params, [{"m": torch.rand_like(p), "v": torch.rand_like(p)} for p in params], X


def copied(tree: Any) -> Any:
    return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, tree)


def peak_of(fn: Callable[..., Any], *args: Any) -> int:
    held: list[Any] = []
    return fckpt.measure_peak(lambda: held.append(fn(*args))).peak_bytes


def scaled_step(params: Params, state: list[Any], scale: Tensor, x: Tensor) -> Any:
    """A step with loss scaling: it leaves everything as it was, and halves the scale, if a gradient is not finite."""
    loss = loss_of(network([0, 1, 0], skips=True))
    grads, value = grad_and_value(lambda params, x: loss(params, x) * scale)(params, x)
    finite = torch.stack([g.isfinite().all() for g in grads]).all()
    pairs = [momentum(p, s, g / scale) for p, s, g in zip(params, state, grads, strict=True)]
    kept = lambda new, old: torch.where(finite, new, old)
    moments = [{**s, "m": kept(new["m"], s["m"])} for (_, new), s in zip(pairs, state, strict=True)]
    new = [kept(p, old) for (p, _), old in zip(pairs, params, strict=True)]
    return value / scale, new, moments, torch.where(finite, scale * 2, scale / 2)


@pytest.mark.parametrize("budget", [0.8, 1.0])
def test_loss_scaling_skips_a_step_without_finite_gradients(budget: float) -> None:
    params, state, _ = fresh(3)
    planned = fckpt.remat(scaled_step, budget=budget, donate_argnums=(0, 1, 2))
    mine, given = copied((params, state, torch.tensor(8.0))), (params, state, torch.tensor(8.0))
    for x, skipped in ((X, False), (X * torch.inf, True), (-X, False)):
        expected, before = scaled_step(*given, x), copied(mine)
        _, *result = planned(*mine, x)
        same = lambda one, other: all(map(torch.equal, tree_leaves(one), tree_leaves(other)))
        assert same(result, expected[1:])
        assert same(result[:2], before[:2]) == skipped
        assert [t.data_ptr() for t in tree_leaves(result[0])] == [t.data_ptr() for t in tree_leaves(mine[0])]
        mine, given = tuple(result), tuple(expected[1:])
    assert given[2] == 16.0


@PROFILE
@given(
    st.lists(st.integers(0, len(ACTIVATIONS) - 1), min_size=1, max_size=5),
    st.sampled_from(UPDATES),
    st.sampled_from([(), (0,), (1,), (0, 1)]),
    st.sampled_from([1.0, 0.5, 1e-9]),
    st.booleans(),
    st.booleans(),
)
def test_random_steps(
    layers: list[int], update: Update, donated: tuple[int, ...], budget: float, by_norm: bool, tied: bool
) -> None:
    """Three steps have the numbers of the plain function, in the memory of the first parameters and state."""
    step, args = step_of(layers, update, by_norm=by_norm, tied=tied), fresh(len(layers))
    make = lambda budget: fckpt.remat(step, budget=budget, donate_argnums=donated)
    planned = make(budget)
    try:
        planned(*copied(args))
    except fckpt.BudgetError as error:
        planned = make(error.least_bytes)
        planned(*copied(args))
    expected, actual = copied(args), copied(args)
    before = [id(t) for n in donated for t in tree_leaves(actual[n])]
    for _ in range(3):
        value, *rest = step(*expected)
        expected = (*rest, X)
        loss, *rest = planned(*actual)
        actual = (*rest, X)
        assert torch.equal(loss, value)
        assert all(map(torch.equal, tree_leaves(expected), tree_leaves(actual)))
    assert [id(t) for n in donated for t in tree_leaves(actual[n])] == before
    [plan] = planned._fckpt_region.planner.plans.values()
    assert peak_of(planned, *actual) == plan.peak_bytes <= plan.budget_bytes


def test_updates_need_no_memory() -> None:
    step, (params, state, _) = step_of([0] * 10, adamw), fresh(10)
    args, least = (params, state, X[:2]), []
    for donated in ((), (0, 1)):
        plan = fckpt.plan(step, *args, budget=0.2 if donated else 1.0, donate_argnums=donated)
        least.append(plan.peak_bytes / sum(p.nbytes for p in args[0]))
    assert least[0] > 3 and least[1] < 1  # without: new parameters, m and v


def test_a_check_gives_the_old_values_back() -> None:
    step, args = step_of([0, 1, 2], adamw), fresh(3)
    before = copied(args)
    assert fckpt.check(fckpt.remat(step, budget=0.5, donate_argnums=(0, 1)), *args)
    assert all(map(torch.equal, tree_leaves(args), tree_leaves(before)))


def test_names_decorator_and_inference_of_a_region() -> None:
    @fckpt.remat(budget=1.0, donate_argnames="weight")
    def negated(*, weight: Tensor) -> Tensor:
        return weight.neg()

    weight = torch.ones(4)
    assert negated(weight=weight) is weight and torch.equal(weight, -torch.ones(4))
    assert fckpt.plan(negated, weight=weight).baseline_peak_bytes == weight.nbytes


def test_a_returned_argument_keeps_its_value() -> None:
    weight = torch.randn(4, 4)
    before = weight.clone()
    view, new = fckpt.remat(lambda w: (w[:2], w * 2), budget=1.0, donate_argnums=0)(weight)
    assert torch.equal(view, before[:2]) and torch.equal(new, 2 * before) and torch.equal(weight, before)
    with pytest.raises(fckpt.ArgumentValueError, match="the function also returns it itself"):
        fckpt.remat(lambda w: (w, w * 2), budget=1.0, donate_argnums=0)(weight)


def test_writes_of_the_function_itself() -> None:
    def step(params: Params, x: Tensor) -> Tensor:
        grads, value = grad_and_value(loss_of(network([0, 0, 0], skips=False)))(params, x)
        for p, g in zip(params, grads, strict=True):
            p.mul_(0.99)
            p.sub_(0.1 * g)
        return value

    plain = weights(3)
    planned = copied(plain)
    with pytest.raises(fckpt.MutationError, match=r"args\[0\]\[0\] was changed in place"):
        fckpt.remat(step, budget=0.7)(planned, X)
    donating = fckpt.remat(step, budget=0.7, donate_argnums=0)
    for _ in range(3):
        assert torch.equal(donating(planned, X), step(plain, X))
        assert all(map(torch.equal, planned, plain))


def test_parameters_are_updated_in_place() -> None:
    step, (params, state, x) = step_of([0, 1], sgd), fresh(2)
    modules = [torch.nn.Parameter(p.clone()) for p in params]
    with torch.no_grad():
        fckpt.remat(step, budget=1.0, donate_argnums=0)(modules, state, x)
    assert all(map(torch.equal, modules, step(params, state, x)[1]))


def test_what_cannot_be_donated() -> None:
    step, (params, state, x) = step_of([0, 0], sgd), fresh(2)
    donating = fckpt.remat(step, budget=1.0, donate_argnums=(0, 1))
    with pytest.raises(fckpt.ArgumentValueError, match=r"args\[0\]\[1\] is donated, but is differentiated"):
        donating([params[0], params[1].requires_grad_()], state, x)
    params[1].requires_grad_(False)
    with pytest.raises(fckpt.ArgumentValueError, match=r"is donated, but shares memory with args\[0\]\[1\]"):
        donating([params[0], params[0].T], state, x)
    with pytest.raises(fckpt.ArgumentValueError, match=r"is donated, but shares memory with args\[2\]"):
        donating([x[:16], params[1]], state, x)
    with pytest.raises(fckpt.ArgumentValueError, match="is donated, but is differentiated from outside"):
        vmap(donating, in_dims=(0, None, None))([p[None] for p in params], state, x)
    held = params[0][:]
    with pytest.raises(fckpt.ArgumentValueError, match=r"args\[0\] is donated, but shares memory with a tensor"):
        fckpt.remat(lambda p: p + held, budget=1.0, donate_argnums=0)(params[0])
    with pytest.raises(fckpt.ArgumentValueError, match="donated arguments need a budget"):
        fckpt.remat(step, donate_argnums=0)
    with pytest.raises(fckpt.ArgumentValueError, match="donate_argnums=3 is out of range"):
        fckpt.remat(step, budget=1.0, donate_argnums=3)
    assert all(map(torch.equal, params, copied(params)))


# -- the judge ---------------------------------------------------------------------------------------


def _plan() -> fckpt.Plan:
    return fckpt.plan(step_of([0, 1, 2], momentum), *fresh(3), budget=0.6, donate_argnums=(0, 1))


PLAN = _plan()


def _writers(graph: Graph) -> list[int]:
    return [node.id for node in graph.nodes if node.writes]


@PROFILE
@given(st.data())
def test_a_read_after_the_overwrite_is_refused(data: st.DataObject) -> None:
    """Any computation that reads an old value, put behind the write over it, makes a schedule that is refused."""
    graph, schedule = PLAN.graph, PLAN.schedule
    assert _writers(graph)
    steps = list(schedule.backward)
    writer = data.draw(st.sampled_from(_writers(graph)))
    [old] = graph.nodes[writer].writes
    reader = data.draw(st.sampled_from([n for n in graph.consumers[old] if n != writer]))
    place = next(i for i, step in enumerate(steps) if type(step) is Compute and step.node == writer)
    behind = data.draw(st.integers(place + 1, len(steps)))
    made = [Compute(n) for n in _needed(graph, reader)]
    with pytest.raises(ScheduleError, match=r"has written over value|runs twice"):
        simulate(graph, Schedule(schedule.forward, (*steps[:behind], *made, *steps[behind:])))


def _needed(graph: Graph, node: int) -> list[int]:
    """Returns a node and all nodes that it depends on, in order."""
    found, todo = {node}, [node]
    while todo:
        for value in graph.nodes[todo.pop()].inputs:
            producer = graph.values[value].producer
            if producer is not None and producer not in found:
                found.add(producer)
                todo.append(producer)
    return sorted(found)


def test_a_write_runs_once() -> None:
    writer = _writers(PLAN.graph)[0]
    steps = [step for step in PLAN.schedule.backward if type(step) is not Compute or step.node != writer]
    with pytest.raises(ScheduleError, match=r"does not run|not live|without the gradient"):
        simulate(PLAN.graph, Schedule(PLAN.schedule.forward, tuple(steps)))
