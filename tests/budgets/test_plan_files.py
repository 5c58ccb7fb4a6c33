"""Plans on disk, and the errors of budgets, policies and plans."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_equal, leaf, seeded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
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
from fckpt import Plan, policies
from fckpt._planned.plan import checksum
from fckpt.graph import Compute, Free, Graph, Schedule
from fckpt.graph.identity import fingerprint


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
    monkeypatch.setattr("fckpt._planned.planner.make_plan", lambda *args: pytest.fail("solved"))
    planned = fckpt.remat(net, plan=plan)
    assert measured(planned, x) <= plan.peak_bytes
    expected = seeded(lambda: step(copy.deepcopy(net), x))
    assert_equal(seeded(lambda: step(fckpt.remat(copy.deepcopy(net), plan=plan), x)), expected)


def test_a_plan_can_be_read_from_plain_data_and_from_text(saved: Any) -> None:
    plan = fckpt.Plan.load(saved[0])
    data = plan.to_json()
    assert Plan.from_json(data) == Plan.from_json(json.dumps(data)) == Plan.from_json(json.dumps(data).encode()) == plan
    with pytest.raises(fckpt.PlanError, match="damaged"):
        Plan.from_json({**data, "budget_bytes": 1})


def test_schedules_with_other_kinds_of_steps_are_different() -> None:
    computed, freed = Schedule((Compute(0), Compute(0)), ()), Schedule((Compute(0), Free(0)), ())
    assert computed != freed and len({computed, freed}) == 2
    assert freed == Schedule.from_json(freed.to_json()) and len({freed, Schedule.from_json(freed.to_json())}) == 1


def test_a_plan_is_refused_by_another_function_and_other_shapes(saved: Any) -> None:
    path, net, x = saved
    plan = fckpt.Plan.load(path)
    with pytest.raises(fckpt.PlanError, match=r"another computation.*fckpt\.plan"):
        fckpt.remat(net, plan=plan)(x[:5])
    with pytest.raises(fckpt.PlanError, match="another computation"):
        fckpt.remat(nn.Sequential(nn.Linear(32, 32), nn.GELU()), plan=plan)(x)
    with pytest.raises(fckpt.PlanError, match=r"number of gradients .* require grad"):
        fckpt.remat(net, plan=plan)(x.clone().requires_grad_(not x.requires_grad))
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
    "an input with a producer": lambda text: resigned(
        edited(lambda d: d["graph"]["values"][d["graph"]["inputs"][1]].update(producer=1))(text)
    ),
    "a value that is not there": edited(lambda d: d["graph"].update(outputs=[10**6])),
    "a graph that is a list": edited(lambda d: d.update(graph=[])),
    "nodes that are numbers": edited(lambda d: d["graph"].update(nodes=[1, 2])),
    "another torch that is a number": edited(lambda d: d.update(schedule={})),
    "nested deeply": lambda text: "[" * 100_000 + "]" * 100_000,
    "nested deeply, within": lambda text: text.replace(
        '"solver"', '"more": ' + "[" * 10**5 + "]" * 10**5 + ', "solver"'
    ),
    "a size less": edited(lambda d: d["graph"]["nodes"][0].update(temporary_nbytes=0, seconds=1.0)),
}


def resigned(text: str) -> str:
    """The same data, as if it had been saved so."""
    data = json.loads(text)
    return json.dumps({**data, "checksum": checksum(data)})


def field(part: str, **new: Any) -> Callable[[str], str]:
    """Gives fields of the plan, the graph, the first node or the fourth value other contents."""

    def change(data: Any) -> None:
        graph = data["graph"]
        {"plan": data, "graph": graph, "node": graph["nodes"][0], "value": graph["values"][3]}[part].update(new)

    return edited(change)


NO_INTS: list[Any] = ["1", -1, 1.5, True, None, [], {}, float("nan"), float("inf")]
NO_SECONDS: list[Any] = ["1", -1.0, True, None, float("nan"), float("inf")]
NO_TEXTS: list[Any] = [1, None, ["aten.mm.default"], {}]
NO_LISTS: list[Any] = [1, "1", None, {}, [-1], [0.5], ["0"], [10**6], [0, 0]]
NO_FLAGS: list[Any] = [0, 1, "true", None]
FIELDS: dict[tuple[str, str], list[Any]] = {
    ("plan", "budget_bytes"): [b for b in NO_INTS if b is not None] + [0, 1],
    ("plan", "solver"): NO_TEXTS,
    ("plan", "torch"): NO_TEXTS,
    ("plan", "loss_of"): [1, "loss", None, {}, [1], [None]],
    ("plan", "tile"): [1, 0, None, "some", []],
    ("plan", "tiles"): [1, None, "tiles", [1], ["gathered"], [{}], [{"gathered": -1}]],
    ("plan", "untiled"): [1, None, "graph", {}, []],
    ("plan", "kernels"): [1, None, "fast", []],
    ("graph", "boundary"): [*NO_INTS, 10**6, 10**30],
    ("graph", "inputs"): NO_LISTS,
    ("graph", "cotangents"): NO_LISTS,
    ("graph", "outputs"): NO_LISTS,
    ("graph", "gradients"): NO_LISTS,
    ("node", "id"): [*NO_INTS, 1],
    ("node", "op"): NO_TEXTS,
    ("node", "inputs"): NO_LISTS,
    ("node", "outputs"): NO_LISTS,
    ("node", "backward"): NO_FLAGS,
    ("node", "random"): NO_FLAGS,
    ("node", "once"): NO_FLAGS,
    ("node", "seconds"): NO_SECONDS,
    ("node", "flops"): NO_INTS,
    ("node", "temporary_nbytes"): [*NO_INTS, 2**40],
    ("node", "replayed_nbytes"): NO_INTS,
    ("node", "source"): NO_TEXTS,
    ("node", "module"): NO_TEXTS,
    ("node", "in_place"): NO_FLAGS,
    ("node", "writes"): [*NO_LISTS, [3]],
    ("node", "arguments"): NO_TEXTS,
    ("node", "overwrites"): [*NO_LISTS, [3]],
    ("node", "accumulates"): [*NO_LISTS, [3]],
    ("node", "colour"): ["red"],
    ("value", "id"): [*NO_INTS, 1],
    ("value", "nbytes"): [*NO_INTS, 2**40],
    ("value", "producer"): [p for p in NO_INTS if p is not None] + [10**6],
    ("value", "origin"): NO_TEXTS,
    ("value", "names"): [1, "h", None, [1]],
    ("value", "shape"): [1, "1", None, [-1], [0.5]],
    ("value", "dtype"): NO_TEXTS,
    ("value", "decision"): ["save", 1, None, []],
    ("value", "held_to"): [h for h in NO_INTS if h is not None] + [0, 10**6],
}


@pytest.mark.parametrize(("part", "name"), FIELDS)
def test_every_field_is_checked(saved: Any, part: str, name: str) -> None:
    text = saved[0].read_text()
    json.loads(resigned(text))
    Plan.from_json(resigned(text))
    for content in FIELDS[part, name]:
        with pytest.raises(fckpt.PlanError, match="the text"):
            Plan.from_json(resigned(field(part, **{name: content})(text)))


def test_a_plan_above_its_own_budget_is_refused(saved: Any) -> None:
    text = saved[0].read_text()
    needed = Plan.from_json(text).peak_bytes
    assert Plan.from_json(resigned(field("plan", budget_bytes=needed)(text))).budget_bytes == needed
    with pytest.raises(fckpt.PlanError, match=r"needs .* made for a budget of .*fckpt\.plan"):
        Plan.from_json(resigned(field("plan", budget_bytes=needed - 1)(text)))


JSON = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 60), st.integers(), st.floats(), st.text(max_size=5),
    st.lists(st.integers(-1, 40), max_size=4), st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)  # fmt: skip


def mutated(data: Any, draw: Any) -> Any:
    """The data with one place of it changed, left out or moved."""
    path, here = [], data
    while isinstance(here, (dict, list)) and here and (not path or draw(st.integers(0, 5))):
        path.append(draw(st.sampled_from(sorted(here) if isinstance(here, dict) else range(len(here)))))
        here = here[path[-1]]
    place = data
    for key in path[:-1]:
        place = place[key]
    what = draw(st.sampled_from(["replace", "remove", "swap", "nudge"]))
    other = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    if what == "replace":
        place[path[-1]] = draw(JSON)
    elif what == "remove":
        del place[path[-1]]
    elif what == "swap":
        place[path[-1]], place[other] = place[other], place[path[-1]]
    elif type(here) is int:
        place[path[-1]] = here + draw(st.sampled_from([-1, 1]))
    return data


def stepped(planned: Callable[..., Tensor], w: Tensor, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    out = planned(w, x)
    return [out, *torch.autograd.grad(out, w)]


def noisy(w: Tensor, x: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.dropout(torch.tanh(x @ w), 0.1, True) + x
    return x.sum()


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_mutated_file_is_no_plan_or_one_that_runs_right(data: st.DataObject) -> None:
    w, x = leaf(torch.linspace(-1, 1, 16).view(4, 4)), torch.linspace(0, 1, 12).view(3, 4)
    changed = json.loads(_noisy_plan())
    for _ in range(data.draw(st.integers(1, 2))):
        mutated(changed, data.draw)
    if data.draw(st.booleans()) and "graph" in changed:  # as one who means it would save it
        with contextlib.suppress(Exception):
            changed["fingerprint"] = Graph.from_json(changed["graph"]) and fingerprint(
                Graph.from_json(changed["graph"])
            )
    changed["checksum"] = checksum(changed)
    try:
        plan = Plan.from_json(json.dumps(changed))
        got = stepped(fckpt.remat(noisy, plan=plan), w, x)
    except fckpt.PlanError:
        return
    assert plan.budget_bytes is None or plan.peak_bytes <= plan.budget_bytes
    assert_equal(got, stepped(noisy, w, x))


@functools.cache
def _noisy_plan() -> str:
    w, x = leaf(torch.ones(4, 4)), torch.ones(3, 4)
    return json.dumps(fckpt.plan(noisy, w, x, budget=1.0).to_json())


CONVOLUTIONS: dict[str, tuple[dict[str, Any], str]] = {
    # sizes in and out are those of Conv2d(4, 4, 3, padding=1)
    "dilation": ({"padding": 2, "dilation": 2}, r"padding \[1, 1\] in the plan, and \[2, 2\] here"),
    "transposed": ({"padding": 1}, r"transposed False in the plan, and True here"),
    "groups": ({"padding": 1, "groups": 2}, "weight float32.* in the plan, and float32"),
    "no bias": ({"padding": 1, "bias": False}, "bias float32.* in the plan, and None here|operations"),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_plan_of_another_convolution_is_refused_and_the_error_says_what_differs(name: str) -> None:
    options, said = CONVOLUTIONS[name]
    kind = nn.ConvTranspose2d if name == "transposed" else nn.Conv2d
    image = torch.randn(1, 4, 8, 8)
    made = lambda net: nn.Sequential(net, nn.Tanh(), nn.Flatten(), nn.Linear(256, 1))
    plan = fckpt.plan(made(nn.Conv2d(4, 4, 3, padding=1)), image, budget=1.0)
    with pytest.raises(fckpt.PlanError, match=f"another computation.*(convolution.*)?({said})"):
        fckpt.remat(made(kind(4, 4, 3, **options)), plan=plan)(image)


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        (lambda x: x.sin().cumsum(0).sum(), lambda x: x.sin().cumsum(1).sum(), "cumsum.* has dim 0 in the plan, and 1"),
        (lambda x: torch.norm(x.sin(), 2), lambda x: torch.norm(x.sin(), 3), "norm|operations"),
        (
            lambda x: x.sin().sort(0)[0].sum(),
            lambda x: x.sin().sort(0, True)[0].sum(),
            "descending left out in the plan, and True",
        ),
        (
            lambda x: x.sin().exp().sum(),
            lambda x: x.sin().tan().sum(),
            r"operation 1 is aten\.exp\.default in the plan",
        ),
        (lambda x: x.sin().sum(), lambda x: x.sin().exp().sum(), r"it has \d operations, this call has \d"),
        (lambda x: x.sin().sum(), lambda x: x[:2].sin().sum(), r"has self float64\[3,4\]\(4,1\) in the plan"),
    ],
)
def test_the_plan_of_another_operation_is_refused(first: Any, then: Any, said: str) -> None:
    plan = fckpt.plan(first, leaf(X), budget=1.0)
    assert_equal(fckpt.remat(first, plan=plan)(leaf(X)), first(X))
    with pytest.raises(fckpt.PlanError, match=f"another computation.*({said})"):
        fckpt.remat(then, plan=plan)(leaf(X))


def test_numbers_that_no_memory_depends_on_may_be_others() -> None:
    fn = lambda x, scale, p: (torch.dropout(x * scale, p, True) + scale).exp().sum()
    plan = fckpt.plan(fn, leaf(X), 2.0, 0.1, budget=1.0)
    planned = fckpt.remat(fn, plan=plan)
    for scale, p in ((2.0, 0.1), (3.0, 0.4)):
        assert_equal(seeded(lambda: planned(leaf(X), scale, p)), seeded(lambda: fn(leaf(X), scale, p)))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_no_plan(saved: Any, damage: str) -> None:
    path = saved[0]
    path.write_text(DAMAGE[damage](path.read_text()))
    with pytest.raises(fckpt.PlanError, match=r"step\.plan\.json"):
        fckpt.Plan.load(path)


def test_a_pickled_plan_is_the_one_that_save_writes() -> None:
    w = leaf(torch.eye(4))
    plan = fckpt.plan(lambda w: (w.tanh() * w).exp().sum(), w, budget=1.0)
    again = pickle.loads(pickle.dumps(plan))
    assert again.to_json() == plan.to_json()
    with pytest.raises(fckpt.PlanError, match="does not hold its function"):
        again.at(w)
    assert copy.deepcopy(plan).at(w).peak_bytes == copy.copy(plan).at(w).peak_bytes == plan.peak_bytes


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
