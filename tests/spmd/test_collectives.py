"""Collectives under every transform, against the same computation on all ranks' tensors stacked in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fckpt
from fckpt.errors import ArgumentTypeError, ArgumentValueError, RankFailure
from fckpt.spmd import (
    Mesh,
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
    pvary,
    sim,
    use_mesh,
)

F64 = torch.float64
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
"""Sums over ranks come in another order when all ranks are one tensor."""


def on_ranks(shape: dict[str, int], fn: Callable[[], Any]) -> list[Any]:
    """What `fn()` returns on each rank of a simulated mesh."""
    simulation = sim(shape, timeout_seconds=20)

    def program() -> Any:
        with use_mesh(simulation.mesh):
            return fn()

    return simulation.run(program)


# ---- random programs -------------------------------------------------------------------------------


class Step(NamedTuple):
    """One step of a program, for one rank's tensor (n k,) and for those of all ranks (n, n k)."""

    name: str
    local: Callable[[torch.Tensor, int], torch.Tensor]
    stacked: Callable[[torch.Tensor], torch.Tensor]
    factor: float = 1.0
    """What becomes of the length, times the number of ranks, or by it."""


def total(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0, keepdim=True).expand_as(x)


def shifted(x: torch.Tensor) -> torch.Tensor:
    return x.roll(1, 0)


def pairs(n: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % n) for i in range(n)]


def own_tiles(x: torch.Tensor) -> torch.Tensor:
    """By rank, its part of a vector that all have: (n, n k) to (n, k)."""
    n = len(x)
    tiles = x.unflatten(1, (n, -1))
    return torch.stack([tiles[i, i] for i in range(n)])


STEPS = [
    Step("sin", lambda x, n: x.sin(), lambda x: x.sin()),
    Step(
        "by rank",
        lambda x, n: x * (1 + axis_index("i").to(F64)),
        lambda x: x * (1 + torch.arange(len(x), dtype=F64))[:, None],
    ),
    Step("psum", lambda x, n: psum(x, "i"), total),
    Step("pmean", lambda x, n: pmean(x, "i"), lambda x: total(x) / len(x)),
    Step("ppermute", lambda x, n: ppermute(x, "i", pairs(n)), shifted),
    Step(
        "all_gather",
        lambda x, n: all_gather(x, "i", tiled=True),
        lambda x: x.reshape(1, -1).expand(len(x), -1),
        factor=1,
    ),
    Step("psum_scatter", lambda x, n: psum_scatter(x, "i", tiled=True), lambda x: own_tiles(total(x)), factor=-1),
    Step(
        "all_to_all",
        lambda x, n: all_to_all(x, "i", split=0, concat=0, tiled=True),
        lambda x: x.unflatten(1, (len(x), -1)).transpose(0, 1).flatten(1),
    ),
]


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, list[Step]]:
    """A number of ranks, and steps: of those that lengthen and those that shorten, never more of the latter."""
    n, steps, longer = draw(st.sampled_from([1, 2, 3])), [], 0
    for _ in range(draw(st.integers(1, 4))):
        step = draw(st.sampled_from([s for s in STEPS if s.name != "psum_scatter" or longer > 0]))
        longer += {"all_gather": 1, "psum_scatter": -1}.get(step.name, 0)
        steps.append(step)
    return n, steps


def locally(steps: list[Step], n: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def fn(x: torch.Tensor) -> torch.Tensor:
        for step in steps:
            x = step.local(x, n)
        return (x * torch.linspace(1, 2, x.shape[-1], dtype=F64)).cos()

    return fn


def stacked(steps: list[Step]) -> Callable[[torch.Tensor], torch.Tensor]:
    def fn(x: torch.Tensor) -> torch.Tensor:
        for step in steps:
            x = step.stacked(x)
        return (x * torch.linspace(1, 2, x.shape[-1], dtype=F64)).cos()

    return fn


TRANSFORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "value": (lambda f, x: f(x), lambda f, x: f(x)),
    "grad": (
        lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
        lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    ),
    "fckpt.grad of remat": (
        lambda f, x: fckpt.grad(lambda x: fckpt.remat(f)(x).sum())(x),
        lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    ),
    "backward": (
        lambda f, x: torch.autograd.grad(f(y := x.clone().requires_grad_()).sum(), y)[0],
        lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    ),
    "jvp": (
        lambda f, x: torch.func.jvp(f, (x,), (x + 1,))[1],
        lambda f, x: torch.func.jvp(f, (x,), (x + 1,))[1],
    ),
    "grad of grad": (
        lambda f, x: torch.func.grad(lambda x: torch.func.grad(lambda x: f(x).sum())(x).square().sum())(x),
        lambda f, x: torch.func.grad(lambda x: torch.func.grad(lambda x: f(x).sum())(x).square().sum())(x),
    ),
    "vmap": (
        lambda f, x: torch.func.vmap(f)(torch.stack([x, x.cos()]))[1],
        lambda f, x: f(x.cos()),
    ),
    "vmap of grad": (
        lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()), in_dims=1)(torch.stack([x, x.cos()], 1))[1],
        lambda f, x: torch.func.grad(lambda x: f(x).sum())(x.cos()),
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@settings(max_examples=15, deadline=None)
@given(program=programs())
def test_programs_are_what_they_are_on_all_ranks_at_once(name: str, program: tuple[int, list[Step]]):
    n, steps = program
    whole = torch.linspace(-1, 1, n * n * 2, dtype=F64).reshape(n, n * 2)
    transform, reference = TRANSFORMS[name]
    found = on_ranks({"i": n}, lambda: transform(locally(steps, n), whole[int(axis_index("i"))]))
    torch.testing.assert_close(torch.stack(found), reference(stacked(steps), whole), **CLOSE)


# ---- what each does --------------------------------------------------------------------------------


def rank_tensor() -> torch.Tensor:
    return torch.arange(4.0) + 10 * axis_index("i")


def test_dims_and_tiles():
    x = torch.arange(24.0).reshape(2, 3, 4)
    gathered = on_ranks({"i": 2}, lambda: all_gather(x + axis_index("i"), "i", dim=1))
    assert torch.equal(gathered[0], torch.stack([x, x + 1], 1))
    tiled = on_ranks({"i": 2}, lambda: all_gather(x + axis_index("i"), "i", dim=-1, tiled=True))
    assert torch.equal(tiled[1], torch.cat([x, x + 1], -1))
    assert torch.equal(on_ranks({"i": 2}, lambda: psum_scatter(x, "i", dim=2, tiled=True))[1], 2 * x[..., 2:])
    assert torch.equal(on_ranks({"i": 2}, lambda: psum_scatter(x, "i"))[1], 2 * x[1])
    swapped = on_ranks({"i": 2}, lambda: all_to_all(x + 100 * axis_index("i"), "i", split=2, concat=1, tiled=True))
    assert torch.equal(swapped[1], torch.cat([x[..., 2:], x[..., 2:] + 100], 1))
    stacked_ = on_ranks({"i": 2}, lambda: all_to_all(x + 100 * axis_index("i"), "i", split=0, concat=1))
    assert torch.equal(stacked_[1], torch.stack([x[1], x[1] + 100], 1))


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("concat", range(-3, 3))
@pytest.mark.parametrize("split", range(-3, 3))
def test_all_to_all_of_any_dimensions(split: int, concat: int, tiled: bool):
    x = torch.arange(8.0).reshape(2, 2, 2)
    mine = lambda: x + 100 * axis_index("i")
    found = on_ranks({"i": 2}, lambda: all_to_all(mine(), "i", split=split, concat=concat, tiled=tiled))
    for rank, result in enumerate(found):
        parts = [(x + 100 * other).chunk(2, split)[rank] for other in range(2)]
        expected = torch.cat(parts, concat) if tiled else torch.stack([p.squeeze(split) for p in parts], concat)
        assert torch.equal(result, expected)


def test_all_to_all_pulls_back_to_its_inverse():
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    send = lambda x: all_to_all(x, "i", split=0, concat=-1)
    weights = lambda: (1.0 + axis_index("i")) * torch.ones(3, 4, 2, dtype=torch.float64)
    found = on_ranks({"i": 2}, lambda: torch.func.vjp(send, x)[1](weights())[0])
    expected = torch.stack([torch.full((3, 4), 1.0), torch.full((3, 4), 2.0)]).double()
    assert all(torch.equal(gradient, expected) for gradient in found)


def test_booleans_are_summed_as_integers():
    flags = lambda: torch.tensor([True, False, True]) & (axis_index("i") < 2)
    total = on_ranks({"i": 3}, lambda: {"sum": psum(flags(), "i"), "mean": pmean(flags(), "i")})[0]
    assert total["sum"].tolist() == [2, 0, 2] and total["sum"].dtype == torch.int64
    assert total["mean"].tolist() == pytest.approx([2 / 3, 0, 2 / 3])
    assert on_ranks({"i": 3}, lambda: psum_scatter(flags(), "i", tiled=True))[2].tolist() == [2]


def test_leaves_that_need_no_gradient_stay_so():
    def program() -> Any:
        tree = {"w": torch.ones(2, requires_grad=True), "x": torch.ones(3), "b": torch.ones((), requires_grad=True)}
        return {name: leaf.requires_grad for name, leaf in psum(tree, "i").items()}

    assert on_ranks({"i": 2}, program) == [{"w": True, "x": False, "b": True}] * 2


def test_errors_name_what_was_called():
    x, z = torch.ones(2), torch.ones(2, dtype=torch.complex64)
    with pytest.raises(ArgumentValueError, match=r"^pmean"):
        pmean(x, "i")
    for name, call in {
        "pmax: complex": lambda: pmax(z, "i"),
        "pmin: complex": lambda: pmin(z, "i"),
        "pmean takes tensors": lambda: pmean("text", "i"),
        "ppermute: each pair must be": lambda: ppermute(x, "i", [0, 1]),  # type: ignore[list-item]
        "ppermute: pairs must be a list": lambda: ppermute(x, "i", 5),  # type: ignore[arg-type]
        "all_gather: a dimension must be an int": lambda: all_gather(x, "i", dim=None),  # type: ignore[arg-type]
        "all_to_all: a dimension must be an int": lambda: all_to_all(x, "i", split="0", concat=0),  # type: ignore[arg-type]
        "psum takes dense tensors": lambda: psum({"w": torch.eye(2).to_sparse()}, "i"),
    }.items():
        with pytest.raises((ArgumentTypeError, RankFailure), match=name):
            on_ranks({"i": 2}, call)
    with pytest.raises(ArgumentTypeError, match="init_mesh: shape must be a dict"):
        fckpt.init_mesh(2)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="sim: shape must be a dict"):
        fckpt.sim(2)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="fake_mesh: shape must be a dict"):
        fckpt.fake_mesh({"data": True})


def test_axes_of_a_grid_alone_and_together():
    shape = {"a": 2, "b": 3}
    number = lambda: axis_index(("a", "b")).double()
    assert [x.item() for x in on_ranks(shape, lambda: psum(number(), "b"))] == [3.0] * 3 + [12.0] * 3
    assert [x.item() for x in on_ranks(shape, lambda: psum(number(), ("a", "b")))] == [15.0] * 6
    assert on_ranks(shape, lambda: all_gather(number(), ("b", "a")))[2].tolist() == [0, 3, 1, 4, 2, 5]
    assert on_ranks(shape, lambda: (axis_size("a"), axis_size(("a", "b"))))[0] == (2, 6)
    assert [int(x) for x in on_ranks(shape, lambda: axis_index(("b", "a")))] == [0, 2, 4, 1, 3, 5]


def test_largest_and_smallest_have_no_derivative():
    assert on_ranks({"i": 3}, lambda: pmax(rank_tensor(), "i"))[0].tolist() == [20, 21, 22, 23]
    assert on_ranks({"i": 3}, lambda: pmin(rank_tensor(), "i"))[2].tolist() == [0, 1, 2, 3]
    assert on_ranks({"i": 2}, lambda: torch.func.vmap(lambda x: pmax(x, "i"))(rank_tensor()))[0].tolist() == [
        10,
        11,
        12,
        13,
    ]
    for transform in (
        lambda: torch.func.grad(lambda x: pmax(x, "i").sum())(rank_tensor()),
        lambda: torch.func.jvp(lambda x: pmin(x, "i"), (rank_tensor(),), (rank_tensor(),)),
    ):
        with pytest.raises(ArgumentValueError, match=r"p(max|min) has no derivative. Call it on x.detach\(\)"):
            on_ranks({"i": 1}, transform)


def test_a_tree_travels_in_one_message_by_dtype(monkeypatch: pytest.MonkeyPatch):
    from fckpt.spmd.threads import Thread

    sent: list[torch.Size] = []
    real = Thread.all_reduce
    monkeypatch.setattr(Thread, "all_reduce", lambda self, x, *rest: sent.append(x.shape) or real(self, x, *rest))
    tree = {"a": torch.ones(2, 3), "b": [torch.ones(()), torch.ones(4, dtype=torch.int64)], "c": 2}
    found = on_ranks({"i": 2}, lambda: psum(tree, "i"))[0]
    assert sorted(map(tuple, sent)) == [(4,), (4,), (7,), (7,)]
    assert found["c"] == 4 and torch.equal(found["a"], 2 * tree["a"]) and found["b"][0].shape == ()
    assert found["b"][1].dtype == torch.int64


def test_batched_and_unbatched_leaves_together():
    x, y = torch.arange(6.0).reshape(3, 2), torch.arange(2.0)
    fn = lambda: torch.func.vmap(lambda x, y: psum({"x": x, "y": y}, "i"), in_dims=(0, None))(x, y)
    found = on_ranks({"i": 2}, fn)[0]
    assert torch.equal(found["x"], 2 * x)
    assert torch.equal(found["y"], (2 * y).expand(3, 2))


def test_invariant_sums_pull_back_as_they_are_and_pvary_sums():
    x = torch.tensor(2.0)
    through = lambda out: torch.func.grad(lambda x: psum(x * (1.0 + axis_index("i")), "i", out=out))(x)
    assert [g.item() for g in on_ranks({"i": 2}, lambda: through("replicated"))] == [2.0, 4.0]
    assert [g.item() for g in on_ranks({"i": 2}, lambda: through("invariant"))] == [1.0, 2.0]
    varied = lambda: torch.func.grad(lambda x: psum(pvary(x, "i") * (1.0 + axis_index("i")), "i", out="invariant"))(x)
    assert [g.item() for g in on_ranks({"i": 2}, varied)] == [3.0, 3.0]


def test_remat_repeats_a_collective(monkeypatch: pytest.MonkeyPatch):
    from fckpt.spmd.threads import Thread

    calls: list[str] = []
    real = Thread.all_gather
    monkeypatch.setattr(Thread, "all_gather", lambda self, *rest: calls.append("gather") or real(self, *rest))
    fn = lambda x: (all_gather(x, "i", tiled=True) ** 2).sum()
    on_ranks({"i": 2}, lambda: fckpt.grad(fn)(rank_tensor()))
    assert len(calls) == 2
    on_ranks({"i": 2}, lambda: fckpt.grad(fckpt.remat(fn))(rank_tensor()))
    assert len(calls) == 2 + 4


# ---- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda x: psum(x, "j"), ArgumentValueError, r"psum: the mesh has no axis 'j'. It has 'i'."),
        (lambda x: psum(x, 3), ArgumentTypeError, r"psum: an axis must be a str or a tuple of strs, not 3."),
        (lambda x: psum(x, ("i", "i")), ArgumentValueError, r"must be one or more of 'i', each at most once"),
        (lambda x: psum(x, "i", out="R"), ArgumentValueError, r"out must be 'replicated' or 'invariant', not 'R'"),
        (lambda x: psum({"a": ["b"]}, "i"), ArgumentTypeError, r"psum takes tensors, but tree\['a'\]\[0\] is str: 'b'"),
        (
            lambda x: psum_scatter(x[:3], "i", tiled=True),
            ArgumentValueError,
            r"dimension 0 of length 3 cannot be divided",
        ),
        (lambda x: psum_scatter(x, "i"), ArgumentValueError, r"is 4 long, but there are 2 ranks .* Pass tiled=True"),
        (
            lambda x: all_gather(x, "i", dim=3),
            ArgumentValueError,
            r"dimension 3 does not exist in a tensor with 2 dimensions",
        ),
        (lambda x: ppermute(x, "i", [(0, 2)]), ArgumentValueError, r"\(0, 2\) must be two indices from 0 to 1 along i"),
        (lambda x: ppermute(x, "i", [(0, 1), (1, 1)]), ArgumentValueError, r"contains a source or a destination twice"),
        (
            lambda x: psum(x, "i", axis_index_groups=[[0]]),
            ArgumentValueError,
            r"must contain every index from 0 to 1 along i exactly once, .*, unlike \[\[0\]\]",
        ),
        (lambda x: psum(x, "i", axis_index_groups=[[0, 1], []]), ArgumentValueError, r"must contain every index"),
        (lambda x: psum(x, "i", axis_index_groups=[0, 1]), ArgumentTypeError, r"must be lists of indices, such as"),
        (lambda x: psum(x.to(torch.uint16), "i"), ArgumentTypeError, r"psum: torch cannot reduce .*uint16.*x.long\(\)"),
        (lambda x: fckpt.pmin(x.to(torch.float8_e5m2), "i"), ArgumentTypeError, r"pmin: .*float8_e5m2.* x.float\(\)"),
        (lambda x: fckpt.fake_mesh({"a:b": 2}), ArgumentValueError, r"without commas, colons or '=', not 'a:b'"),
    ],
)
def test_errors(call: Callable[[torch.Tensor], Any], kind: type[Exception], text: str):
    with pytest.raises(kind, match=text):
        on_ranks({"i": 2}, lambda: call(torch.ones(4)))


def test_groups_of_different_sizes_sum_and_do_not_gather():
    groups = [[0], [2, 1]]
    x = torch.arange(2.0)
    sums = on_ranks({"i": 3}, lambda: psum(x + axis_index("i"), "i", axis_index_groups=groups))
    assert [s.tolist() for s in sums] == [[0, 1], [3, 5], [3, 5]]
    with pytest.raises(ArgumentValueError, match="all_gather: all groups must have the same size"):
        on_ranks({"i": 3}, lambda: all_gather(x, "i", axis_index_groups=groups))
    with pytest.raises(ArgumentTypeError, match="groups of different sizes, leaves must be tensors, not the number 1"):
        on_ranks({"i": 3}, lambda: psum(1, "i", axis_index_groups=groups))


def test_what_groups_sum_varies_still():
    """A mapped function whose sum is of half of the ranks has not the same result on all."""
    mesh = lambda: fckpt.init_mesh({"i": 4})
    half = lambda x: psum(x, "i", axis_index_groups=[[0, 1], [2, 3]])
    run = lambda fn: fckpt.sim({"i": 4}).run(
        lambda: fckpt.shard_map(fn, mesh(), in_specs=fckpt.P("i"), out_specs=fckpt.P())(axis_index("i") + torch.ones(1))
    )
    with pytest.raises(ArgumentValueError, match="output varies over 'i'"):
        run(half)
    assert [x.tolist() for x in run(lambda x: psum(half(x), "i") / 2)] == [[10.0]] * 4
    assert [x.tolist() for x in run(lambda x: psum(x, "i", axis_index_groups=[[0, 1, 2, 3]]))] == [[10.0]] * 4


def test_without_a_mesh():
    with pytest.raises(
        ArgumentValueError, match=r"psum: no mesh is in use. Call it in a function that fckpt.shard_map"
    ):
        psum(torch.ones(1), "i")
    with use_mesh(Mesh({"nowhere": 2})), pytest.raises(ArgumentValueError, match="does not belong to the mesh"):
        psum(torch.ones(1), "nowhere")


def test_ranks_that_do_different_things_are_told_apart():
    def swapped() -> Any:
        first, second = (psum, all_gather) if int(axis_index("i")) != 2 else (all_gather, psum)
        return first(torch.ones(2), "i"), second(torch.ones(2), "i")

    with pytest.raises(RankFailure, match=r"rank 2 calls all_gather over i of \(2,\) float32 as collective number 1"):
        on_ranks({"i": 3}, swapped)
    with pytest.raises(RankFailure, match=r"rank 1 has returned, while rank \d waits in all_reduce sum over i"):
        on_ranks({"i": 3}, lambda: None if int(axis_index("i")) == 1 else psum(torch.ones(2), "i"))
    with pytest.raises(RankFailure, match=r"rank 0 calls all_reduce sum over i of \(3,\)"):
        on_ranks({"i": 3}, lambda: psum(torch.ones(3 if int(axis_index("i")) == 0 else 2), "i"))

    def failing() -> Any:
        if int(axis_index("i")) == 1:
            raise KeyError("mine")
        return psum(torch.ones(2), "i")

    with pytest.raises(KeyError, match="mine") as caught:
        on_ranks({"i": 3}, failing)
    assert caught.value.__notes__ == ["on rank 1 of Mesh({'i': 3})"]
