"""Linear maps between ranks, as differentiable torch operations.

Each collective is a linear map on whole tensors, and its transpose is a linear map of this table. The torch operations
that compute the maps are nodes of a traced graph. They name a mesh and its axes, or groups along the axes, so the graph
is the same on every rank. The public functions in `collectives.py` add dimensions, tiles and pytrees around the maps.

    `Linear.kind`       torch operation         transpose           public function
    psum                all_reduce "sum"        psum                `psum`
    psum_invariant      all_reduce "sum"        pvary               `psum(out="invariant")`; Megatron's g
    pvary               identity                psum_invariant      `pvary`; Megatron's f
    replicated          identity                divide              output of `shard_map`
    divide              x / ranks               pmean               -
    pmean               all_reduce "sum" / n    divide              -
    all_gather          all_gather              psum_scatter        `all_gather`
    psum_scatter        reduce_scatter          all_gather          `psum_scatter`
    all_to_all          all_to_all              all_to_all          `all_to_all`
    ppermute            permute                 ppermute, inverse   `ppermute`

The torch operations are named as in torch.distributed, and the kinds as in JAX. `pmax` and `pmin` are not linear, and
have no derivative.

The conventions follow JAX's `pmap`: each rank calls `grad` on what it computes itself, and the transpose of a
psum is a psum. R. Frostig, M. Johnson, D. Maclaurin, A. Paszke, A. Radul, "Decomposing reverse-mode automatic
differentiation", 2021, https://arxiv.org/abs/2105.09469; "Efficient transposition of replication-inducing collectives",
JAX enhancement proposal 17111, https://docs.jax.dev/en/latest/jep/17111-shmap-transpose.html.

This file uses no private parts of torch; see `c10d.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fckpt._call.messages import reuse_message
from fckpt.errors import ArgumentValueError
from fckpt.spmd.mesh import Along, Mesh, transport_of

__all__ = ["Linear", "apply", "extreme", "rank_number"]

# ---- torch operations ------------------------------------------------------------------------------

_library = torch.library.Library("fckpt", "DEF")
"""The operations are registered while this object lives."""


def _operation(schema: str, shape: Callable[..., torch.Tensor]) -> Callable[[Callable[..., Any]], Any]:
    """Registers a torch operation. `shape` returns an empty tensor like the result, for fake tensors."""

    def register(compute: Callable[..., torch.Tensor]) -> Any:
        name = schema.partition("(")[0]
        _library.define(schema)
        _library.impl(name, compute, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fckpt::{name}", shape, lib=_library)
        return getattr(torch.ops.fckpt, name)

    return register


def _same(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _stacked(x: torch.Tensor, along: str, size: int, mesh: str) -> torch.Tensor:
    return x.new_empty((size, *x.shape))


def _first(x: torch.Tensor, along: str, mesh: str) -> torch.Tensor:
    return x.new_empty(x.shape[1:])


@_operation("all_reduce(Tensor x, str reduction, str along, str mesh) -> Tensor", _same)
def _all_reduce(x: torch.Tensor, reduction: str, along: str, mesh: str) -> torch.Tensor:
    return transport_of(mesh).all_reduce(x.contiguous(), reduction, Along.of(along))


@_operation("all_gather(Tensor x, str along, int size, str mesh) -> Tensor", _stacked)
def _all_gather(x: torch.Tensor, along: str, size: int, mesh: str) -> torch.Tensor:
    return transport_of(mesh).all_gather(x.contiguous(), Along.of(along))


@_operation("reduce_scatter(Tensor x, str along, str mesh) -> Tensor", _first)
def _reduce_scatter(x: torch.Tensor, along: str, mesh: str) -> torch.Tensor:
    return transport_of(mesh).reduce_scatter(x.contiguous(), Along.of(along))


@_operation("all_to_all(Tensor x, str along, str mesh) -> Tensor", _same)
def _all_to_all(x: torch.Tensor, along: str, mesh: str) -> torch.Tensor:
    return transport_of(mesh).all_to_all(x.contiguous(), Along.of(along))


@_operation("permute(Tensor x, int[] sources, str along, str mesh) -> Tensor", _same)
def _permute(x: torch.Tensor, sources: Sequence[int], along: str, mesh: str) -> torch.Tensor:
    return transport_of(mesh).permute(x.contiguous(), sources, Along.of(along))


def _no_dims(axes: str, device: torch.device, mesh: str) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


@_operation("axis_index(str axes, Device device, str mesh) -> Tensor", _no_dims)
def rank_number(axes: str, device: torch.device, mesh: str) -> torch.Tensor:
    """Returns the number of this rank along `axes`, as a tensor of no dimensions."""
    return torch.tensor(Mesh.of_key(mesh).index(transport_of(mesh).rank, axes.split(",")), device=device)


# ---- linear maps -----------------------------------------------------------------------------------


class Linear(NamedTuple):
    """A linear map between ranks, on tensors of any shape."""

    kind: str
    """The first column of the table above."""
    along: Along
    mesh: Mesh
    sources: tuple[int, ...] = ()
    """For ppermute: for each destination the number of its source, or -1."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the map. A recompute does not send the message of a reduction or an exchange again."""
        if self.kind in ("psum", "psum_invariant", "pmean", "psum_scatter", "all_to_all"):
            return reuse_message((self, x.shape, x.dtype), lambda: self._sent(x))
        return self._sent(x)

    def _sent(self, x: torch.Tensor) -> torch.Tensor:
        along, key = str(self.along), self.mesh.key
        match self.kind:
            case "psum" | "psum_invariant":
                return _all_reduce(x, "sum", along, key)
            case "pvary" | "replicated":
                return x.view_as(x)
            case "divide":
                return x / self.mesh.reach(self.along)
            case "pmean":
                return _all_reduce(x, "sum", along, key) / self.mesh.reach(self.along)
            case "all_gather":
                return _all_gather(x, along, self.mesh.reach(self.along), key)
            case "psum_scatter":
                return _reduce_scatter(x, along, key)
            case "all_to_all":
                return _all_to_all(x, along, key)
            case _:
                return _permute(x, self.sources, along, key)

    @property
    def transpose(self) -> Linear:
        """The map of the cotangents."""
        inverse = [-1] * len(self.sources)
        for target, source in enumerate(self.sources):
            if source >= 0:
                inverse[source] = target
        return self._replace(kind=_TRANSPOSES.get(self.kind, self.kind), sources=tuple(inverse))


_TRANSPOSES = {
    "psum_invariant": "pvary",
    "pvary": "psum_invariant",
    "replicated": "divide",
    "divide": "pmean",
    "pmean": "divide",
    "all_gather": "psum_scatter",
    "psum_scatter": "all_gather",
}
"""Kinds that are not their own transpose."""


def apply(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """Applies a linear map; differentiable and batched under autograd and torch.func."""
    return _Apply.apply(x, linear)


class _Apply(torch.autograd.Function):
    """A `Linear` map under autograd and all transforms of torch.func."""

    @staticmethod
    def forward(x: torch.Tensor, linear: Linear) -> torch.Tensor:
        return linear(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.linear = inputs[1]

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        return _Apply.apply(cotangents[0], ctx.linear.transpose), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *operands: Any) -> Any:
        x, linear = operands
        return _Apply.apply(x.movedim(in_dims[0], -1), linear), -1

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _Apply.apply(tangents[0], ctx.linear)


def extreme(x: torch.Tensor, reduction: str, along: str, mesh: str) -> torch.Tensor:
    """Returns the elementwise "max" or "min" over the ranks, which has no derivative."""
    return _Extreme.apply(x, reduction, along, mesh)


class _Extreme(torch.autograd.Function):
    """The elementwise "max" or "min" over the ranks. Its derivatives raise."""

    @staticmethod
    def forward(x: torch.Tensor, reduction: str, along: str, mesh: str) -> torch.Tensor:
        key = (reduction, along, mesh, x.shape, x.dtype)
        return reuse_message(key, lambda: _all_reduce(x, reduction, along, mesh))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.reduction = inputs[1]

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        raise _no_derivative(ctx.reduction)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *operands: Any) -> Any:
        return _Extreme.apply(*operands), in_dims[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _no_derivative(ctx.reduction)


def _no_derivative(reduction: str) -> ArgumentValueError:
    name = f"p{reduction}"
    return ArgumentValueError(f"{name} has no derivative. Call it on x.detach(), or use psum or pmean, which have one.")
