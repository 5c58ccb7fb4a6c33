"""Dimensions that ranks cannot divide evenly: parts are filled up, and nobody sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from uneven_programs import from_fsdp

import fckpt
from fckpt import P
from fckpt.errors import ArgumentTypeError, ArgumentValueError

F64 = torch.float64
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}  # sums in another order


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[str, int], P]:
    """A mesh, and a spec with the shape of a matrix."""
    mesh = {name: draw(st.integers(1, 3)) for name in "ab"}
    spec = draw(st.sampled_from([P("a"), P("a", "b"), P(None, ("b", "a")), P(("a", "b")), P()]))
    return mesh, P(*spec.dims, shape=(draw(st.integers(0, 7)), draw(st.integers(0, 7))))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(layouts())
def test_parts_make_the_whole(layout: tuple[dict[str, int], P]) -> None:
    mesh, spec = layout
    assert spec.shape is not None
    x = 1 + torch.arange(spec.shape[0] * spec.shape[1], dtype=F64).view(spec.shape)

    def program() -> Any:
        part = fckpt.shard(x, spec)
        return part, fckpt.part_mask(spec), fckpt.unshard(part, spec)

    found = fckpt.sim(mesh).run(program)
    assert len({part.shape for part, _, _ in found}) == 1
    for part, mask, whole in found:
        assert torch.equal(whole, x) and torch.equal(mask, part != 0)


def test_parts_are_those_of_chunk() -> None:
    x = torch.arange(10.0)
    parts = fckpt.sim({"a": 4}).run(lambda: fckpt.shard(x, P("a", shape=(10,)))[fckpt.part_mask(P("a", shape=(10,)))])
    assert all(torch.equal(part, chunk) for part, chunk in zip(parts, x.chunk(4), strict=True))


# ---- training --------------------------------------------------------------------------------------


def parameters() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, dtype=F64, generator=generator)
    return {"in": {"w": draw(5, 7), "b": draw(7)}, "out": draw(7, 3), "scale": draw(1)}


def loss(p: dict[str, Any], x: Tensor) -> Tensor:
    return ((x @ p["in"]["w"] + p["in"]["b"]).tanh() @ p["out"] * p["scale"]).pow(2).mean()


def steps(p: Any, gradients: Any, count: int = 3) -> Any:
    """Some steps of gradient descent with momentum."""
    momentum = fckpt._tree.map_leaves(torch.zeros_like, p)
    for _ in range(count):
        flat, spec = fckpt._tree.flatten(p)
        grads = fckpt._tree.leaves(gradients(p))
        moved = [0.9 * m + g for m, g in zip(fckpt._tree.leaves(momentum), grads, strict=True)]
        momentum = fckpt._tree.unflatten(spec, moved)
        p = fckpt._tree.unflatten(spec, [w - 0.1 * m for w, m in zip(flat, moved, strict=True)])
    return p


WRAPS: dict[str, Any] = {
    "plain": lambda fn: fn,
    "remat": fckpt.remat,
    "budget": lambda fn: fckpt.remat(fn, budget=10**6),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_training_on_parts_is_training(wrap: str, where: str, ranks: int, tmp_path: Path) -> None:
    x = torch.randn(8, 5, dtype=F64, generator=torch.Generator().manual_seed(1))
    whole = steps(parameters(), lambda p: torch.func.grad(loss)(p, x))

    def program() -> Any:
        mesh = fckpt.init_mesh({"data": ranks})
        specs = fckpt.specs_for(parameters(), P("data"))
        fn = WRAPS[wrap](lambda p, x: loss(fckpt.unshard(p, specs, mesh), x))
        if where == "inside":
            local = lambda p, x: fckpt._tree.map_leaves(lambda g: g / ranks, torch.func.grad(fn)(p, x))
            gradients = fckpt.shard_map(local, mesh, in_specs=(specs, P("data")), out_specs=specs)
        else:
            mean = lambda p, x: fckpt.pmean(fn(p, x), "data")
            mapped = fckpt.shard_map(mean, mesh, in_specs=(specs, P("data")), out_specs=P())
            gradients = fckpt.grad(mapped)
        trained = steps(fckpt.shard(parameters(), specs, mesh), lambda p: gradients(p, fckpt.shard(x, P("data"), mesh)))
        for part, spec in zip(fckpt._tree.leaves(trained), fckpt._tree.leaves(specs), strict=True):
            assert not part[~fckpt.part_mask(spec, mesh)].any()  # padding stays zero
        fckpt.save(tmp_path / "trained", trained, specs, mesh)
        return fckpt.unshard(trained, specs, mesh)

    for found in fckpt.sim({"data": ranks}).run(program):
        torch.testing.assert_close(found, whole, **CLOSE)
    torch.testing.assert_close(fckpt.load(tmp_path / "trained", parameters()), whole, **CLOSE)


def test_a_batch_that_is_divided_unevenly() -> None:
    x = torch.randn(7, 5, dtype=F64, generator=torch.Generator().manual_seed(1))
    spec = P("data", shape=x.shape)
    p = parameters()

    def masked(p: dict[str, Any], x: Tensor) -> Tensor:
        rows = ((x @ p["in"]["w"] + p["in"]["b"]).tanh() @ p["out"] * p["scale"]).pow(2).mean(1)
        return fckpt.psum(rows.where(fckpt.part_mask(P("data", shape=(7,))), 0).sum(), "data") / 7

    def program() -> Any:
        mesh = fckpt.init_mesh({"data": 3})
        mapped = fckpt.shard_map(fckpt.remat(masked, budget=10**6), mesh, in_specs=(P(), spec), out_specs=P())
        return fckpt.grad(mapped)(p, fckpt.shard(x, spec, mesh))

    for found in fckpt.sim({"data": 3}).run(program):
        torch.testing.assert_close(found, torch.func.grad(loss)(p, x), **CLOSE)


# ---- checkpoints and norms -------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, derandomize=True)
@given(layouts(), layouts())
def test_what_is_saved_on_one_mesh_is_loaded_on_another(
    tmp_path_factory: pytest.TempPathFactory, first: Any, second: Any
) -> None:
    folder = tmp_path_factory.mktemp("checkpoints") / "x"
    (mesh, spec), (other, then) = first, second
    x = 1 + torch.arange(spec.shape[0] * spec.shape[1]).view(spec.shape)
    then = P(*then.dims, shape=spec.shape)
    garbage = lambda part: part.where(fckpt.part_mask(spec), -1)  # what fills up a part is saved by nobody
    fckpt.sim(mesh).run(lambda: fckpt.save(folder, {"x": garbage(fckpt.shard(x, spec))}, spec))

    def load() -> Any:
        wanted = fckpt.shard(x, then)
        return wanted, fckpt.load(folder, {"x": torch.full_like(wanted, 9)}, then)["x"]

    assert all(torch.equal(found, wanted) for wanted, found in fckpt.sim(other).run(load))
    assert torch.equal(fckpt.load(folder, {"x": torch.zeros_like(x)})["x"], x)


def test_norms_are_those_of_whole_tensors() -> None:
    x = torch.randn(7, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    spec = P("a", shape=x.shape)

    def program() -> Any:
        part = fckpt.shard(x, spec).where(fckpt.part_mask(spec), 100.0)
        return fckpt.clip_grad_norm([part], 1.0, spec)[1]

    for norm in fckpt.sim({"a": 4}).run(program):
        torch.testing.assert_close(norm, x.norm(), **CLOSE)


def test_parts_of_fsdp_may_be_uneven(tmp_path: Path) -> None:
    """A process of `fully_shard` has as many rows as there are for it, some none."""
    ranks = 3
    found = fckpt.launch(from_fsdp, ranks, str(tmp_path))
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 4)
    state = fckpt.load(tmp_path / "fsdp", {"weight": torch.empty(4, 3), "bias": torch.empty(4)})
    assert torch.equal(state["weight"], layer.weight) and torch.equal(state["bias"], layer.bias)
    expected = (torch.ones(2, 3) @ layer.weight.T + layer.bias).sum()
    expected.backward()
    for rank, (loaded, value, weight_grad) in enumerate(found):
        mine = [*layer.weight.chunk(ranks)][rank : rank + 1] or [layer.weight[:0]]
        assert torch.equal(loaded, mine[0])
        torch.testing.assert_close(value, expected.detach())
        torch.testing.assert_close(weight_grad, [*layer.weight.grad.chunk(ranks), layer.weight[:0]][rank])


# ---- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "error", "text"),
    [
        (lambda: P("a", shape=3), ArgumentTypeError, r"P: shape must have an int for each dimension, unlike 3"),
        (
            lambda: P(None, "a", shape=(3,)),
            ArgumentValueError,
            r"\(3,\) is not the shape of a tensor whose first 2 dimens",
        ),
        (
            lambda: fckpt.shard(torch.ones(3), P("a")),
            ArgumentValueError,
            r"P\(\.\.\., shape=\(3,\)\), or use fckpt.specs_",
        ),
        (
            lambda: fckpt.shard(torch.ones(4), P("a", shape=(3,))),
            ArgumentValueError,
            r"shard: tree is float32\[4\], but P\('a', shape=\(3,\)\) means a tensor of shape \[3\]",
        ),
        (
            lambda: fckpt.unshard(torch.ones(3), P("a", shape=(3,))),
            ArgumentValueError,
            r"unshard: tree is float32\[3\], but .* means a tensor of shape \[3\], of which a part has shape \[2\]",
        ),
        (lambda: fckpt.part_mask(P("a")), ArgumentValueError, r"part_mask: P\('a'\) has no shape"),
        (
            lambda: fckpt.specs_for({"w": torch.ones(3)}, {"v": P("a")}),
            ArgumentValueError,
            r"specs_for: the specs must be a tree prefix of the tree",
        ),
        (
            lambda: fckpt.all_gather(torch.ones(2), "a", tiled=True, size=5),
            ArgumentValueError,
            r"all_gather: 2 parts of length 2 do not make a dimension of length 5: its padded parts have length 3",
        ),
        (
            lambda: fckpt.all_gather(torch.ones(2), "a", size=2),
            ArgumentValueError,
            r"size is the length of .* tiled=True",
        ),
        (lambda: fckpt.psum_scatter(torch.ones(2), "a", pad=True), ArgumentValueError, r"pad applies to .* tiled=True"),
        (lambda: fckpt.psum_scatter(torch.ones(3), "a", tiled=True), ArgumentValueError, r"multiple \(pad=True\)"),
    ],
)
def test_errors(program: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        fckpt.sim({"a": 2}).run(program)
