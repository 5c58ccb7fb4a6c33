"""Specs: how they fit trees and meshes, and DTensors at the boundary."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fckpt
from fckpt import P
from fckpt.errors import ArgumentTypeError, ArgumentValueError, MeshWarning, TraceError


def test_specs_are_equal_where_they_mean_the_same():
    assert P("data") == P("data", None) == P(("data",)) != P(None, "data")
    assert hash(P()) == hash(P(None, None)) and P(("a", "b")).axes == ("a", "b")
    with pytest.raises(ArgumentTypeError, match=r"P: each dimension takes an axis, a tuple of axes, or None, not 3"):
        P(3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("in_specs", "args", "text"),
    [
        (
            (P("model"),),
            (torch.ones(2),),
            r"P\('model'\) of args\[0\] names 'model', but the axes of the mesh are 'data'",
        ),
        ((P("data", "data"),), (torch.ones(2, 2),), r"names an axis twice"),
        ((P(None, "data"),), (torch.ones(2),), r"has 2 dimensions, but args\[0\] is float32\[2\]"),
        (({"w": P()},), ({"v": torch.ones(2)},), r"must be a tree prefix of args.*keys at key path tree\[0\]"),
        (
            ({"w": 0},),
            ({"w": torch.ones(2)},),
            r"the spec of args\[0\]\['w'\] must be a P \(P\(\) if it is replicated\), not 0",
        ),
        ((P(), P()), (torch.ones(2),), r"in_specs has 2 entries for 1 positional arguments"),
    ],
)
def test_specs_that_do_not_fit(in_specs: Any, args: Any, text: str):
    def program() -> Any:
        mesh = fckpt.init_mesh({"data": 2})
        return fckpt.shard_map(lambda *args: args[0], mesh, in_specs=in_specs, out_specs=P("data"))(*args)

    with pytest.raises((ArgumentTypeError, ArgumentValueError), match=text):
        fckpt.sim({"data": 2}).run(program)


def test_parts_that_are_no_parts():
    with pytest.raises(
        ArgumentValueError, match=r"dimension 0 of tree\['x'\], float32\[3\], cannot be divided evenly by"
    ):
        fckpt.sim({"data": 2}).run(lambda: fckpt.shard({"x": torch.ones(3)}, P("data")))


def test_parts_of_parts_make_the_whole():
    x = torch.arange(48.0).reshape(4, 12)
    spec = P("a", ("b", "c"))
    program = lambda: (fckpt.shard(x, spec), fckpt.unshard(fckpt.shard(x, spec), spec))
    found = fckpt.sim({"a": 2, "b": 3, "c": 2}).run(program)
    assert all(part.shape == (2, 2) and torch.equal(whole, x) for part, whole in found)


def test_dtensors_are_taken_where_they_are_placed_as_the_spec_says():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = fckpt.init_mesh({"data": 1})
    devices = init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
    x = distribute_tensor(torch.arange(4.0), devices, [Shard(0)])
    twice = lambda spec: fckpt.shard_map(lambda x: 2 * x, mesh, in_specs=spec, out_specs=P("data"))
    found = twice(P("data"))(x)
    assert type(found) is torch.Tensor and torch.equal(found, 2 * torch.arange(4.0))
    with pytest.raises(ArgumentValueError, match=r"placements \[Shard\(dim=0\)\], but P\(\) means .*redistribute"):
        twice(P())(x)
    assert torch.equal(twice(P())(x.redistribute(placements=[Replicate()])), found)


def test_the_parts_of_a_dtensor_lie_in_the_order_of_its_mesh():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = fckpt.init_mesh({"a": 1, "b": 1})
    x = distribute_tensor(
        torch.arange(4.0), init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b")), [Shard(0), Shard(0)]
    )
    same = lambda *axes: fckpt.shard_map(lambda x: x, mesh, in_specs=P(axes), out_specs=P(axes))(x)
    assert torch.equal(same("a", "b"), torch.arange(4.0))
    with pytest.raises(ArgumentValueError, match=r"in the order of its mesh, \('a', 'b'\), but P\(\('b', 'a'\)\) has"):
        same("b", "a")


def test_what_varies_is_followed_through_views_and_in_place_work():
    def program(fix: bool) -> Any:
        mesh = fckpt.init_mesh({"data": 2})

        def step(x: torch.Tensor) -> dict[str, torch.Tensor]:
            total = torch.zeros(2)
            total[:1].add_(x.sum())  # varies from here on
            return {"total": fckpt.psum(total, "data") if fix else total}

        return fckpt.shard_map(step, mesh, in_specs=P("data"), out_specs=P())(torch.ones(2))

    assert torch.equal(fckpt.sim({"data": 2}).run(program, True)[0]["total"], torch.tensor([4.0, 0.0]))
    with pytest.raises(ArgumentValueError, match=r"output\['total'\] varies over 'data', but its spec P\(\)"):
        fckpt.sim({"data": 2}).run(program, False)


def test_a_sum_of_what_is_alike_is_a_warning():
    def program() -> Any:
        mesh = fckpt.init_mesh({"data": 2})
        twice = lambda x: fckpt.pmean(fckpt.pmean(x, "data"), "data")
        return fckpt.shard_map(twice, mesh, in_specs=P("data"), out_specs=P())(torch.ones(2))

    with pytest.warns(
        MeshWarning, match=r"over 'data' sums a value that is the same on all ranks along that axis: .* by 2"
    ):
        fckpt.sim({"data": 2}).run(program)


@pytest.mark.parametrize("wrap", [fckpt.remat, lambda fn: fckpt.remat(fn, budget=10**6)])
@pytest.mark.filterwarnings("error")
def test_what_is_summed_in_a_region_is_looked_at_as_outside_of_one(wrap: Any):
    def program(fn: Any, spec: P) -> Any:
        mesh = fckpt.init_mesh({"data": 2})
        mapped = fckpt.shard_map(wrap(fn), mesh, in_specs=(P(), spec), out_specs=P())
        return fckpt.grad(mapped)(torch.ones(2), torch.ones(2))

    total = lambda w, x: fckpt.psum((x * w).sin().sum(), "data")
    assert [g.shape for g in fckpt.sim({"data": 2}).run(program, total, P("data"))] == [(2,)] * 2
    with pytest.raises(MeshWarning, match="'data' sums a value that is the same"):
        fckpt.sim({"data": 2}).run(program, total, P())
    with pytest.raises(ArgumentValueError, match="varies over 'data'"):
        fckpt.sim({"data": 2}).run(program, lambda w, x: (x * w).sin().sum(), P("data"))


def test_over_an_axis_of_one_rank_nothing_varies_and_every_sum_is_as_good():
    def program() -> torch.Tensor:
        mesh = fckpt.init_mesh({"data": 1})
        total = lambda x: x.sum() + fckpt.psum(torch.ones(()), "data")
        return fckpt.shard_map(total, mesh, in_specs=P("data"), out_specs=P())(torch.ones(2))

    assert fckpt.sim({"data": 1}).run(program) == [torch.tensor(3.0)]


def test_what_depends_on_data_cannot_be_checked_and_may_be_run_unchecked():
    def program(check: str) -> Any:
        mesh = fckpt.init_mesh({"data": 2})
        fn = lambda x: x if x.sum() > 0 else -x
        return fckpt.shard_map(fn, mesh, in_specs=P("data"), out_specs=P("data"), check=check)(torch.ones(2))

    with pytest.raises(TraceError, match=r'control flow depends on the data of tensors.* Pass check="off"'):
        fckpt.sim({"data": 2}).run(program, "static")
    assert torch.equal(fckpt.sim({"data": 2}).run(program, "off")[0], torch.ones(2))


def test_pmap_does_not_believe_what_it_is_told():
    mean = fckpt.pmap(lambda x, k: x.sum() * k, in_axes=(0, None), out_axes=None, static_broadcasted_argnums=1)
    with pytest.raises(ArgumentValueError, match="output varies over 'data'"):
        fckpt.sim({"data": 2}).run(lambda: mean(torch.ones(2), 3))
    with pytest.raises(ArgumentValueError, match="counts dimensions from 0"):
        fckpt.sim({"i": 2}).run(lambda: fckpt.pmap(lambda x: x, in_axes=-1, axis_name="i")(torch.ones(2)))


def test_pmap_takes_trees_of_dimensions():
    fn = lambda x, k: {"x": x["a"] * k, "sum": fckpt.psum(x["a"].sum(), "i")}
    axes = {"in_axes": ({"a": 1}, None), "out_axes": {"x": 1, "sum": None}}
    mapped = fckpt.pmap(fn, axis_name="i", static_broadcasted_argnums=1, **axes)
    for found in fckpt.sim({"i": 2}).run(lambda: mapped({"a": torch.ones(2, 3)}, 2)):
        assert torch.equal(found["x"], torch.full((2, 3), 2.0)) and found["sum"] == 12


def test_the_mesh_must_be_that_of_the_ranks():
    with pytest.raises(ArgumentValueError, match=r"\{'data': 3\} does not fit the number of ranks, 2"):
        fckpt.sim({"data": 2}).run(lambda: fckpt.init_mesh({"data": 3}))
    with pytest.raises(ArgumentValueError, match=r"of which one may be -1"):
        fckpt.sim({"data": 2}).run(lambda: fckpt.init_mesh({"a": -1, "b": -1}))
    with pytest.raises(ArgumentValueError, match=r"sim: shape must have one axis or more, of sizes of 1 or more"):
        fckpt.sim({"data": 0})
