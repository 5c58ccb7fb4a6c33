"""Random programs of collectives, for ranks and for one process that has the parts of all ranks stacked in front."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fckpt
from fckpt import P

F64 = torch.float64
AXES = ("a", "b")


@dataclass(frozen=True)
class Program:
    """Steps on a matrix: each is the name of a function below, and what it is told."""

    mesh: tuple[int, int]
    shape: tuple[int, int]
    """Of a rank's part."""
    steps: tuple[tuple[Any, ...], ...]

    @property
    def axes(self) -> dict[str, int]:
        return dict(zip(AXES, self.mesh, strict=True))

    def inputs(self) -> tuple[Tensor, Tensor]:
        """A number that all ranks have, and what each rank has, stacked."""
        generator = torch.Generator().manual_seed(zlib.crc32(repr(self).encode()))
        draw = lambda *shape: torch.randn(shape, dtype=F64, generator=generator)
        return draw(1), draw(*self.mesh, *self.shape)


def extent(program: Program, axes: tuple[str, ...]) -> int:
    return math.prod(program.axes[axis] for axis in axes)


# ---- on a rank -------------------------------------------------------------------------------------


def on_a_rank(program: Program, w: Tensor, x: Tensor) -> Tensor:
    """What a rank makes of its part."""
    for name, *told in program.steps:
        x = RANK[name](x, w, *told)
    return (torch.sin(x) * _weights(x)).sum()


RANK: dict[str, Any] = {
    "sin": lambda x, w: torch.sin(x),
    "scale": lambda x, w: x * w,
    "number": lambda x, w, axes: x * (1.5 + fckpt.axis_index(axes)),
    "psum": lambda x, w, axes, groups=None: fckpt.psum(x, axes, axis_index_groups=groups),
    "pmean": lambda x, w, axes, groups=None: fckpt.pmean(x, axes, axis_index_groups=groups),
    "all_gather": lambda x, w, axes, dim, groups=None, size=None: fckpt.all_gather(
        x, axes, dim=dim, tiled=True, size=size, axis_index_groups=groups
    ),
    "psum_scatter": lambda x, w, axes, dim, groups=None, pad=False: fckpt.psum_scatter(
        x, axes, dim=dim, tiled=True, pad=pad, axis_index_groups=groups
    ),
    "all_to_all": lambda x, w, axes, split, concat, groups=None: fckpt.all_to_all(
        x, axes, split=split, concat=concat, tiled=True, axis_index_groups=groups
    ),
    "ppermute": lambda x, w, axis, pairs: fckpt.ppermute(x, axis, pairs),
}


# ---- stacked ---------------------------------------------------------------------------------------


def stacked(program: Program, w: Tensor, x: Tensor) -> Tensor:
    """What all ranks make of their parts: a number for each. `w` has a number for each rank, too."""
    for name, *told in program.steps:
        x = STACKED[name](program, x, w, *told)
    return (torch.sin(x) * _weights(x[0, 0])).sum((2, 3))


def _weights(x: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, x.numel(), dtype=F64).view(x.shape)


def _in_front(x: Tensor, axes: tuple[str, ...]) -> Tensor:
    """The ranks along `axes` as one dimension in front, those along others next."""
    dims = [AXES.index(axis) for axis in axes]
    others = [i for i in range(2) if i not in dims]
    return x.permute(*dims, *others, 2, 3).flatten(0, len(dims) - 1)


def _back(program: Program, x: Tensor, axes: tuple[str, ...]) -> Tensor:
    dims = [AXES.index(axis) for axis in axes]
    order = [*dims, *(i for i in range(2) if i not in dims)]
    x = x.unflatten(0, [program.axes[axis] for axis in axes])
    return x.permute(*(order.index(i) for i in range(2)), 2, 3)


def _over(program: Program, x: Tensor, axes: Any, fn: Any, groups: Any = None) -> Tensor:
    axes = (axes,) if isinstance(axes, str) else axes
    ranks, by_number = _in_front(x, axes), {}
    for group in groups or [range(extent(program, axes))]:
        by_number |= dict(zip(group, fn(ranks[list(group)], len(group)), strict=True))
    return _back(program, torch.stack([by_number[i] for i in range(len(ranks))]), axes)


def _tiled(x: Tensor, dim: int) -> Tensor:
    """The parts in front, one after another along a dimension of the matrix, the last but `1 - dim`."""
    return x.movedim(0, dim - 3).flatten(dim - 3, dim - 2)


def _split(x: Tensor, n: int, dim: int, pad: bool = False) -> Tensor:
    """The parts of a dimension of the matrix, in front."""
    if pad:
        missing = -x.shape[dim - 2] % n
        x = torch.nn.functional.pad(x, (0, 0, 0, missing) if dim == 0 else (0, missing))
    return x.unflatten(dim - 2, (n, x.shape[dim - 2] // n)).movedim(dim - 3, 0)


STACKED: dict[str, Any] = {
    "sin": lambda p, x, w: torch.sin(x),
    "scale": lambda p, x, w: x * w[:, :, None, None],
    "number": lambda p, x, w, axes: _over(
        p, x, axes, lambda x, n: x * (1.5 + torch.arange(n).view(n, *[1] * (x.dim() - 1)))
    ),
    "psum": lambda p, x, w, axes, groups=None: _over(
        p, x, axes, lambda x, n: x.sum(0, keepdim=True).expand_as(x), groups
    ),
    "pmean": lambda p, x, w, axes, groups=None: _over(
        p, x, axes, lambda x, n: x.mean(0, keepdim=True).expand_as(x), groups
    ),
    "all_gather": lambda p, x, w, axes, dim, groups=None, size=None: _over(
        p,
        x,
        axes,
        lambda x, n: (
            _tiled(x, dim)
            .narrow(dim - 2, 0, size or len(x) * x.shape[dim - 2])
            .expand(n, *x.shape[1:-2], *(size or n * k if i == dim else k for i, k in enumerate(x.shape[-2:])))
        ),
        groups,
    ),
    "psum_scatter": lambda p, x, w, axes, dim, groups=None, pad=False: _over(
        p, x, axes, lambda x, n: _split(x.sum(0), n, dim, pad), groups
    ),
    "all_to_all": lambda p, x, w, axes, split, concat, groups=None: _over(
        p, x, axes, lambda x, n: torch.stack([_tiled(part, concat) for part in _split(x, n, split)]), groups
    ),
    "ppermute": lambda p, x, w, axis, pairs: _over(p, x, axis, lambda x, n: _sent(x, pairs)),
}


def _sent(x: Tensor, pairs: Any) -> Tensor:
    sources = {target: source for source, target in pairs}
    return torch.stack([x[sources[i]] if i in sources else torch.zeros_like(x[i]) for i in range(len(x))])


# ---- gradients -------------------------------------------------------------------------------------


def found(program: Program, wrap: str = "plain") -> dict[str, Tensor]:
    """What this rank finds: the value of its part, and gradients taken inside and outside of a mapped function."""
    mesh = fckpt.init_mesh(program.axes)
    w, whole = program.inputs()
    layout = P(*AXES)
    part = fckpt.shard(whole, layout, mesh)[0, 0]
    fn = {"plain": lambda f: f, "remat": fckpt.remat, "budget": lambda f: fckpt.remat(f, budget=10**8)}[wrap](
        lambda w, x: on_a_rank(program, w, x)
    )
    inside = fckpt.shard_map(
        lambda w, x: fckpt.grad_and_value(fn, argnums=(0, 1))(w, x[0, 0]),
        mesh,
        in_specs=(P(), layout),
        out_specs=((P(), P()), P()),
        check="off",  # what a rank finds for itself differs from rank to rank
    )
    (w_inside, x_inside), value = inside(w, part[None, None])
    total = fckpt.shard_map(lambda w, x: fckpt.psum(fn(w, x[0, 0]), AXES), mesh, in_specs=(P(), layout), out_specs=P())
    leaves = w.clone().requires_grad_(), part[None, None].clone().requires_grad_()
    w_outside, x_outside = torch.autograd.grad(total(*leaves), leaves, materialize_grads=True)
    return {
        "value": value.detach(), "w inside": w_inside, "x inside": x_inside,
        "w outside": w_outside, "x outside": x_outside[0, 0],
    }  # fmt: skip


def expected(program: Program) -> list[dict[str, Tensor]]:
    """The same for all ranks, computed in one process."""
    w, x = program.inputs()
    own = w.expand(*program.mesh).clone().requires_grad_()
    x = x.requires_grad_()
    values = stacked(program, own, x)
    total = values.sum() + 0 * x.sum()  # where it depends on nothing, gradients are 0
    w_grads, x_grads = torch.autograd.grad(total, (own, x), materialize_grads=True)
    ranks = [(i, j) for i in range(program.mesh[0]) for j in range(program.mesh[1])]
    return [
        {
            "value": values[i, j].detach(), "w inside": w_grads[i, j].view(1), "x inside": x_grads[i, j],
            "w outside": w_grads.sum().view(1), "x outside": x_grads[i, j],
        }
        for i, j in ranks
    ]  # fmt: skip


def all_found(programs: list[Program], wrap: str) -> list[dict[str, Tensor]]:
    """What this rank finds of several programs, in a process."""
    return [found(program, wrap) for program in programs]
