"""The cost of messages: the alpha-beta model, for each axis of the mesh.

A message of B bytes takes alpha + B / beta seconds over a link. To gather or scatter B bytes, n ranks in a ring each
send n - 1 messages of B / n bytes; an all-reduce sends twice as many. R. Thakur, R. Rabenseifner, W. Gropp,
"Optimization of collective communication operations in MPICH", 2005, https://doi.org/10.1177/1094342005051521.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fckpt._trace.operations import Call, TensorSpec
from fckpt.cost import OpCost, register_cost
from fckpt.spmd.mesh import Along, Mesh, transport_of

__all__ = ["Link"]


@dataclass(frozen=True)
class Link:
    """The latency and bandwidth of messages between neighbouring ranks along an axis.

    Example:
        >>> import fckpt
        >>> fckpt.fake_mesh({"data": 64, "model": 8}, links={"data": fckpt.Link(1e-5, 5e10)}).size
        512
    """

    latency_seconds: float
    bytes_per_second: float


GLOO = Link(1e-4, 1e9)
"""A rough value for processes on one machine."""
NVLINK = Link(1e-5, 2e11)
"""A rough value for GPUs in one machine."""
ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""How often the data travels around the ring."""


def _cost(call: Call, specs: Sequence[TensorSpec]) -> OpCost:
    name = str(call.op).split(".")[1]
    along, key = Along.of(call.args[2 if name in ("all_reduce", "permute") else 1]), call.args[-1]
    transport = transport_of(key)
    sent, output = specs[call.args[0].tensor], specs[_first(call.outputs)]
    nbytes = max(sent.nbytes, output.nbytes)
    mesh = Mesh.of_key(key)
    seconds = 0.0
    for n, link in _rings(along, mesh, [transport.link(axis) for axis in along.axes]):
        if name == "permute":
            seconds += link.latency_seconds + nbytes / link.bytes_per_second
        else:
            seconds += ROUNDS[name] * (n - 1) * (link.latency_seconds + nbytes / n / link.bytes_per_second)
    temporary = 0
    if name in ("all_reduce", "reduce_scatter") and transport.adds(sent.dtype, along):
        temporary = 2 * nbytes + 2 * -(-nbytes // mesh.reach(along))
    return OpCost(seconds, 0, temporary)


def _rings(along: Along, mesh: Mesh, links: Sequence[Link]) -> list[tuple[int, Link]]:
    """Returns the size and the link of each ring around which the data travels, one ring per axis.

    A group is one ring, with the link of the slowest axis.
    """
    if along.groups:
        return [(mesh.reach(along), min(links, key=lambda link: link.bytes_per_second))]
    return [(mesh.shape[axis], link) for axis, link in zip(along.axes, links, strict=True)]


def _first(outputs: Sequence[int | None]) -> int:
    return next(i for i in outputs if i is not None)


register_cost("fckpt::axis_index", lambda call, specs: OpCost(1e-6, 0, 0))  # the rank is known, so nothing is computed
for _name in (*ROUNDS, "permute"):
    register_cost(f"fckpt::{_name}", _cost)
