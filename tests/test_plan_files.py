"""Plans on disk, and the errors of budgets, policies and plans."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_equal, leaf, seeded
from planned import (
    DOTS,
    EVERYTHING,
    NOTHING,
    X,
    measured,
    model,
    step,
)
from torch import Tensor, nn

import fckpt
from fckpt import policies


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, nn.Module, Tensor]:
    net, x = model("mlp")
    path = tmp_path / "step.plan.json"
    fckpt.plan(net, x, budget=0.8).save(path)
    return path, net, x


def test_a_plan_that_was_saved_runs_and_is_not_solved_again(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, net, x = saved
    plan = fckpt.Plan.load(path)
    original = fckpt.plan(net, x, budget=0.8)
    assert (plan.schedule, plan.graph, plan.budget_bytes) == (original.schedule, original.graph, original.budget_bytes)
    assert str(plan) == str(original)
    assert list(path.parent.iterdir()) == [path]
    monkeypatch.setattr("fckpt.planner.make_plan", lambda *args: pytest.fail("solved"))
    planned = fckpt.remat(net, plan=plan)
    assert measured(planned, x) <= plan.peak_bytes
    expected = seeded(lambda: step(copy.deepcopy(net), x))
    assert_equal(seeded(lambda: step(fckpt.remat(copy.deepcopy(net), plan=plan), x)), expected)


def test_a_plan_is_refused_by_another_function_and_other_shapes(saved: Any) -> None:
    path, net, x = saved
    plan = fckpt.Plan.load(path)
    with pytest.raises(fckpt.PlanError, match=r"another computation.*fckpt\.plan"):
        fckpt.remat(net, plan=plan)(x[:5])
    with pytest.raises(fckpt.PlanError, match="another computation"):
        fckpt.remat(nn.Sequential(nn.Linear(32, 32), nn.GELU()), plan=plan)(x)
    with pytest.raises(fckpt.PlanError, match="another computation"):
        fckpt.remat(net.double(), plan=plan)(x.double())


def edited(change: Callable[[Any], Any]) -> Callable[[str], str]:
    def edit(text: str) -> str:
        data = json.loads(text)
        return json.dumps(change(data) or data)

    return edit


DAMAGE: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "truncated": lambda text: text[: len(text) // 2],
    "no json": lambda text: "plan",
    "a list": lambda text: "[]",
    "a number": lambda text: "3",
    "null": lambda text: "null",
    "another format": edited(lambda d: d.update(format=99)),
    "another fingerprint": edited(lambda d: d.update(fingerprint="0" * 64)),
    "no fingerprint": edited(lambda d: d.pop("fingerprint") and None),
    "no schedule": edited(lambda d: d.pop("schedule") and None),
    "a schedule that is a text": edited(lambda d: d.update(schedule="none")),
    "a step less": edited(lambda d: d["schedule"]["backward"].pop(0) and None),
    "a node less": edited(lambda d: d["graph"]["nodes"].pop() and None),
    "another size": edited(lambda d: d["graph"]["values"][3].update(nbytes=1)),
    "a negative size": edited(lambda d: d["graph"]["values"][3].update(nbytes=-1)),
    "a size that is a text": edited(lambda d: d["graph"]["values"][3].update(nbytes="much")),
    "a value that is not there": edited(lambda d: d["graph"].update(outputs=[10**6])),
    "a graph that is a list": edited(lambda d: d.update(graph=[])),
    "nodes that are numbers": edited(lambda d: d["graph"].update(nodes=[1, 2])),
    "another torch that is a number": edited(lambda d: d.update(schedule={})),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_no_plan(saved: Any, damage: str) -> None:
    path = saved[0]
    path.write_text(DAMAGE[damage](path.read_text()))
    with pytest.raises(fckpt.PlanError, match=r"step\.plan\.json"):
        fckpt.Plan.load(path)


def test_a_file_that_is_binary_or_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        fckpt.Plan.load("nowhere.plan.json")


def test_a_binary_file_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "step.plan.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(fckpt.PlanError, match=r"step\.plan\.json"):
        fckpt.Plan.load(path)


@pytest.mark.parametrize("budget", ["8 parsecs", "", "0", "-1GiB", 0, -1, 0.0, 1.5, -0.5, float("nan"), float("inf")])
def test_a_budget_that_is_no_size_is_refused_at_once(budget: Any) -> None:
    with pytest.raises(fckpt.ArgumentValueError):
        fckpt.remat(torch.sin, budget=budget)
    with pytest.raises(fckpt.ArgumentValueError):
        fckpt.plan(torch.sin, leaf(X), budget=budget)


@pytest.mark.parametrize("budget", [True, object(), b"1", [1], torch.tensor(3)])
def test_a_budget_of_another_type_is_refused_at_once(budget: Any) -> None:
    with pytest.raises(fckpt.ArgumentTypeError):
        fckpt.remat(torch.sin, budget=budget)


@pytest.mark.parametrize("policy", ["dots_saveable", 3, object()])
def test_a_policy_that_is_none_is_refused_at_once(policy: Any) -> None:
    with pytest.raises(fckpt.ArgumentTypeError, match="policy"):
        fckpt.remat(torch.sin, policy=policy)


@pytest.mark.parametrize("answer", ["yes", 2, 0.5, [], policies])
def test_a_policy_that_answers_nonsense_is_refused_with_the_operation(answer: Any) -> None:
    with pytest.raises(fckpt.ArgumentTypeError, match=r"aten\.sin.*Decision"):
        fckpt.remat(torch.sin, policy=lambda node: answer)(leaf(X))


def test_a_solver_that_does_not_exist_is_refused_at_once() -> None:
    with pytest.raises(fckpt.ArgumentValueError, match=r"no solver 'fastest'.*auto"):
        fckpt.remat(torch.sin, budget=0.5, solver="fastest")
    with pytest.raises(fckpt.ArgumentValueError, match="no solver"):
        fckpt.plan(torch.sin, leaf(X), budget=0.5, solver="fastest")


def test_a_plan_comes_alone_and_is_a_plan() -> None:
    plan = fckpt.plan(torch.sin, leaf(X))
    with pytest.raises(fckpt.ArgumentValueError, match="plan"):
        fckpt.remat(torch.sin, plan=plan, budget=0.5)
    with pytest.raises(fckpt.ArgumentValueError, match="plan"):
        fckpt.remat(torch.sin, plan=plan, policy=DOTS)
    with pytest.raises(fckpt.ArgumentTypeError, match="plan"):
        fckpt.remat(torch.sin, plan="step.plan.json")  # type: ignore[arg-type]


def test_a_name_that_does_not_occur_is_warned_of() -> None:
    fn = lambda x: fckpt.checkpoint_name(x.sin(), "sine").exp().tanh()
    with pytest.warns(fckpt.PolicyWarning, match="'sine'"):
        fckpt.remat(fn, policy=policies.save_only_these_names("sinus"))(leaf(X))


def test_an_argument_or_an_output_that_is_changed_before_backward() -> None:
    for policy in (EVERYTHING, NOTHING):
        region = fckpt.remat(lambda x, w: (x * w).tanh().exp(), policy=policy)
        w, x = leaf(X), leaf(X)
        out = region(x, w)
        with torch.no_grad():
            w.mul_(2)
        with pytest.raises(fckpt.MutationError):
            out.sum().backward()
        out = region(x, w)
        with torch.no_grad():
            out.detach().mul_(2)  # backward needs it: the gradient of exp
        with pytest.raises(fckpt.MutationError, match="output"):
            out.sum().backward()


def test_a_closed_over_tensor_that_is_changed_before_backward() -> None:
    w = leaf(X)
    for policy in (EVERYTHING, NOTHING):
        out = fckpt.remat(lambda x: (x * w).tanh().exp(), policy=policy)(leaf(X))
        with torch.no_grad():
            w.mul_(2)
        with pytest.raises(fckpt.MutationError):
            out.sum().backward()


def test_a_function_that_writes_its_argument() -> None:
    for fn in (lambda x, y: y.mul_(2) * x.sin(), lambda x, y: (y[0].zero_(), x.sin().exp())[1]):
        with pytest.raises(fckpt.MutationError, match=r"args\[1\]"):
            fckpt.remat(fn, policy=NOTHING)(leaf(X), X.clone())
