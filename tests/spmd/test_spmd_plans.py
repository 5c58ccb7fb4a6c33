"""Plans of functions with collectives: one for all ranks, and messages among what is decided."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fckpt
from fckpt import P
from fckpt._planned.plan import Plan
from fckpt._planned.planner import Planner
from fckpt.cost import Analytic, profiles
from fckpt.errors import BudgetError, RankFailure

F64 = torch.float64


def weights(count: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(32, 32, dtype=F64, generator=generator) / 6 for _ in range(count)]


def loss(ws: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for w in ws:
        x = torch.tanh(x @ fckpt.all_gather(w, "data", tiled=True))
    return x.square().mean() / fckpt.axis_size("data")


def gradients(fn: Any) -> list[torch.Tensor]:
    mesh = fckpt.init_mesh({"data": -1})
    mapped = fckpt.shard_map(
        lambda w, x: fckpt.grad(fn)(w, x), mesh, in_specs=(P("data"), P("data")), out_specs=P("data")
    )
    return fckpt.unshard(
        mapped(fckpt.shard(weights(), P("data"), mesh), torch.ones(16, 32, dtype=F64)), P("data"), mesh
    )


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """All plans that are made."""
    found: list[Plan] = []
    real = Planner.plan

    def plan(self: Planner, *args: Any) -> Plan:
        found.append(real(self, *args))
        return found[-1]

    monkeypatch.setattr(Planner, "plan", plan)
    return found


def test_all_ranks_have_one_plan_and_the_gradients_are_the_same_bit_for_bit(plans: list[Plan]):
    program = lambda: (gradients(loss), gradients(fckpt.remat(loss, budget=0.7)))
    for plain, planned in fckpt.sim({"data": 2}).run(program):
        assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))
    assert len(plans) == 2 and plans[0].schedule == plans[1].schedule
    assert plans[0].overhead > 0 and plans[0].peak_bytes <= 0.7 * plans[0].baseline_peak_bytes
    gathers = [node for node in plans[0].graph.nodes if node.op == "fckpt.all_gather.default"]
    assert len(gathers) == 4 and all(node.seconds >= 1e-4 for node in gathers)  # the latency of the default link


def test_the_smallest_budget_counts(plans: list[Plan]):
    def program() -> Any:
        budget = "200KiB" if int(fckpt.axis_index("data")) else "90KiB"
        return gradients(fckpt.remat(loss, budget=budget))

    fckpt.sim({"data": 2}).run(program)
    assert [plan.budget_bytes for plan in plans] == [90 * 1024] * 2


def test_without_messages_too_all_ranks_have_one_plan(plans: list[Plan]):
    def local(ws: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for w in ws:
            x = torch.tanh(x @ w)
        return x.square().mean()

    def program() -> Any:
        budget = "200KiB" if int(fckpt.axis_index("data")) else "80KiB"  # so might measured times differ
        mesh = fckpt.init_mesh({"data": -1})
        found = []
        for fn in (local, fckpt.remat(local, budget=budget)):
            step = lambda ws, x, fn=fn: fckpt.pmean(fckpt.grad(fn)(ws, x), "data")
            mapped = fckpt.shard_map(step, mesh, in_specs=(P(), P("data")), out_specs=P())
            found.append(mapped(weights(), torch.ones(64, 32, dtype=F64)))
        return found

    for plain, planned in fckpt.sim({"data": 2}).run(program):
        assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))
    assert plans[0].schedule == plans[1].schedule
    assert [plan.budget_bytes for plan in plans] == [80 * 1024] * 2


def test_what_does_not_fit_is_an_error_on_all_ranks():
    def program() -> Any:
        with pytest.raises(BudgetError) as caught:
            gradients(fckpt.remat(loss, budget=1000))
        return caught.value.least_bytes

    first, second = fckpt.sim({"data": 2}).run(program)
    assert first == second > 1000


def test_a_rank_that_plans_something_else_is_named():
    def program() -> Any:
        other = int(fckpt.axis_index("data")) == 1
        fn = lambda ws, x: loss(ws, x.cos() if other else x)
        with pytest.raises(RankFailure, match=r"rank 1 plans another function than the other ranks") as caught:
            parts = fckpt.shard(weights(), P("data"))
            fckpt.grad(fckpt.remat(fn, policy=fckpt.policies.dots_saveable))(parts, torch.ones(16, 32, dtype=F64))
        return caught.value.rank

    assert fckpt.sim({"data": 4}).run(program) == [1, 1, 1, 1]


@pytest.mark.parametrize(("name", "rounds"), [("all_gather", 1), ("psum", 2)])
def test_messages_are_priced_by_the_links_of_their_axis(name: str, rounds: int):
    link = fckpt.Link(1e-3, 1e6)
    mesh = fckpt.fake_mesh({"data": 512, "model": 2}, links={"data": link})
    x = torch.ones(100, requires_grad=True)
    fn = lambda x: getattr(fckpt, name)(x, "data").sum()
    with fckpt.use_mesh(mesh):
        plan = fckpt.plan(fn, x, budget=1.0, costs=Analytic(profiles["A100"]))
    (node,) = [n for n in plan.graph.nodes if n.op.startswith("fckpt.") and not n.backward]
    nbytes = 400 * (512 if name == "all_gather" else 1)
    assert node.seconds == pytest.approx(rounds * 511 * (1e-3 + nbytes / 512 / 1e6))


def test_dear_messages_are_kept_and_cheap_ones_sent_again():
    def sent_again(link: fckpt.Link) -> int:
        mesh = fckpt.fake_mesh({"data": 8}, links={"data": link})
        ws = [torch.zeros(128, 1024, requires_grad=True) for _ in range(4)]
        fn = lambda ws, x: loss(ws, x)
        with fckpt.use_mesh(mesh):
            plan = fckpt.plan(fn, ws, torch.zeros(1024, 1024), budget=0.75, costs=Analytic(profiles["A100"]))
        return sum(plan.graph.nodes[i].op == "fckpt.all_gather.default" for i in recomputed(plan))

    assert sent_again(fckpt.Link(1e-7, 1e13)) > sent_again(fckpt.Link(1.0, 1e6))


def recomputed(plan: Plan) -> list[int]:
    """The nodes that the schedule computes again, as often as it does."""
    runs = [step.node for step in (*plan.schedule.forward, *plan.schedule.backward) if type(step).__name__ == "Compute"]
    seen: set[int] = set()
    return [i for i in runs if i in seen or seen.add(i)]


def test_a_fake_mesh_sends_nothing():
    refused = pytest.raises(fckpt.ArgumentValueError, match="a fake mesh carries no messages")
    with fckpt.use_mesh(fckpt.fake_mesh({"data": 512})), refused:
        fckpt.psum(torch.ones(1), "data")


def test_a_mapped_function_is_planned_for_512_ranks_and_only_planned():
    mesh = fckpt.fake_mesh({"data": 512}, links={"data": fckpt.Link(1e-6, 1e11)})
    mapped = fckpt.shard_map(
        lambda ws, x: fckpt.psum(loss(ws, x), "data", out="invariant"),
        mesh,
        in_specs=(P("data"), P("data")),
        out_specs=P(),
    )
    ws = [torch.zeros(2, 1024, requires_grad=True) for _ in range(4)]
    x = torch.zeros(1024, 1024)
    price = Analytic(profiles["A100"])
    plain, planned = (fckpt.plan(mapped, ws, x, budget=budget, costs=price) for budget in (1.0, 0.7))
    assert planned.peak_bytes <= 0.7 * planned.baseline_peak_bytes == 0.7 * plain.baseline_peak_bytes
    messages = [node.seconds for node in plain.graph.nodes if node.op.startswith("fckpt.")]
    assert len(messages) == 9 and sum(messages) < plain.timeline.seconds < planned.timeline.seconds
    with pytest.raises(fckpt.ArgumentValueError, match="a fake mesh carries no messages"):
        mapped(ws, x)
