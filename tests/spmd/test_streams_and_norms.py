"""Random streams by axis, and gradients clipped by the norm of what is in parts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fckpt
from fckpt import P
from fckpt.errors import ArgumentTypeError, ArgumentValueError

GRID = {"data": 2, "model": 3}


def seeds(axes: dict[str, int], *data: Any) -> list[int]:
    return fckpt.sim(axes).run(lambda: fckpt.fold_in(7, *data))


# ---- streams ---------------------------------------------------------------------------------------


def test_seeds_differ_along_axes_that_are_named_and_along_no_others():
    by_data, by_both = seeds(GRID, "data"), seeds(GRID, ("data", "model"))
    assert by_data == [by_data[0]] * 3 + [by_data[3]] * 3 and by_data[0] != by_data[3]
    assert len(set(by_both)) == 6 and by_both == seeds(GRID, "data", "model")
    assert seeds(GRID) == [7] * 6 and len(set(seeds(GRID, 1) + seeds(GRID, 2))) == 2


def test_seeds_are_the_same_on_another_mesh():
    by_data = seeds(GRID, 5, "data")
    assert seeds({"data": 4}, 5, "data")[:2] == by_data[::3]
    assert seeds({"model": 2, "data": 2}, 5, "data") == [by_data[0], by_data[3]] * 2
    assert fckpt.fold_in(7, 5, 1) == by_data[3]  # an index is a number


def test_streams_are_far_from_one_another():
    found = [fckpt.fold_in(seed, step) for seed in range(50) for step in range(50)]
    assert len(set(found)) == 2500 and all(0 <= seed < 2**63 for seed in found)
    ones = sum(seed.bit_count() for seed in found) / len(found) / 63
    assert abs(ones - 0.5) < 0.01
    torch.Generator().manual_seed(max(found))


@pytest.mark.parametrize("bad", [torch.tensor(1), 1.5, True, None], ids=repr)
def test_what_no_seed_is_made_of(bad: Any):
    with pytest.raises(ArgumentTypeError, match=r"fold_in: takes ints and names of axes, not"):
        fckpt.fold_in(1, bad)
    with pytest.raises(ArgumentTypeError, match=r"fold_in"):
        fckpt.fold_in(bad)


def test_axes_that_are_not_there():
    with pytest.raises(ArgumentValueError, match=r"fold_in: the mesh has no axis 'rows'"):
        seeds(GRID, "rows")
    with pytest.raises(ArgumentValueError, match=r"fold_in: no mesh is in use"):
        fckpt.fold_in(1, "data")


def dropped(spec: P, *axes: str, own: bool) -> Any:
    """A mapped function that drops by streams that differ along some axes."""

    def program() -> torch.Tensor:
        mesh = fckpt.init_mesh(GRID)
        generator = torch.Generator().manual_seed(fckpt.fold_in(3, *axes))
        torch.manual_seed(fckpt.fold_in(3, *axes))

        def fn(x: torch.Tensor) -> torch.Tensor:
            return x * torch.rand(4, generator=generator) if own else F.dropout(x, 0.5)

        return fckpt.shard_map(fn, mesh, in_specs=(P(),), out_specs=spec)(torch.ones(4))

    return fckpt.sim(GRID).run(program)


@pytest.mark.parametrize("own", [False, True], ids=["the generator of all", "a generator"])
def test_the_check_knows_along_which_axes_numbers_differ(own: bool):
    found = dropped(P(("data",)), "data", own=own)
    assert all(torch.equal(found[i], found[3 * (i // 3)]) for i in range(6)) and not torch.equal(found[0], found[3])
    dropped(P(), own=own)
    with pytest.raises(ArgumentValueError, match=r"varies over 'data'"):
        dropped(P(), "data", own=own)
    with pytest.raises(ArgumentValueError, match=r"varies over 'model'"):
        dropped(P("data"), "data", "model", own=own)


# ---- norms -----------------------------------------------------------------------------------------

SPECS = {"up": P("data", "model"), "down": P(None, "model"), "bias": P(), "turned": P(("model", "data")), "none": P()}


def gradients() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, dtype=torch.float64, generator=generator)
    return {"up": draw(4, 6), "down": draw(2, 3), "bias": draw(5), "turned": draw(12), "none": None}


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
@pytest.mark.parametrize("mapped", [False, True])
def test_gradients_are_clipped_as_in_one_process(norm_type: float, max_norm: float, mapped: bool):
    whole = gradients()
    expected = [x.clone().requires_grad_() for x in whole.values() if x is not None]
    for x in expected:
        x.grad = x.detach().clone()
    norm = torch.nn.utils.clip_grad_norm_(expected, max_norm, norm_type)

    def program() -> Any:
        mesh = fckpt.init_mesh(GRID)
        clip = lambda grads: fckpt.clip_grad_norm(grads, max_norm, SPECS, mesh, norm_type=norm_type)
        if mapped:
            clip = fckpt.shard_map(clip, mesh, in_specs=(SPECS,), out_specs=(SPECS, P()))
        clipped, norm = clip(fckpt.shard(whole, SPECS, mesh))
        return fckpt.unshard(clipped, SPECS, mesh), norm

    for clipped, found in fckpt.sim(GRID).run(program):
        torch.testing.assert_close(found, norm, rtol=1e-12, atol=0)
        assert clipped["none"] is None and list(clipped) == list(whole)
        got = [x for x in clipped.values() if x is not None]
        for x, y in zip(got, expected, strict=True):
            torch.testing.assert_close(x, y.grad, rtol=1e-12, atol=0)  # sums of parts are rounded otherwise


@pytest.mark.parametrize(
    ("grads", "max_norm", "error", "text"),
    [
        ({"w": torch.ones(2)}, 0.0, ArgumentValueError, "max_norm and norm_type must be above 0, not 0.0"),
        ({"w": torch.ones(2)}, math.nan, ArgumentValueError, "max_norm and norm_type must be above 0"),
        ({"w": None}, 1.0, ArgumentValueError, "the tree of gradients contains no tensor"),
        (
            {"w": torch.ones(2), "step": torch.tensor(3)},
            1.0,
            ArgumentTypeError,
            r"grads\['step'\] is int64\[\], not a gradient",
        ),
    ],
)
def test_what_cannot_be_clipped(grads: Any, max_norm: float, error: Any, text: str):
    with pytest.raises(error, match=f"clip_grad_norm: {text}"):
        fckpt.sim(GRID).run(lambda: fckpt.clip_grad_norm(grads, max_norm, P()))
