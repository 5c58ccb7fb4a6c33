"""The transport between processes: `torch.distributed`, with a process group for each set of axes.

Private in torch 2.11 and 2.13: `torch.ops._c10d_functional`. Its operations are more stable than torch's public
functions above them, which change between versions. Every message is waited for at once, so no asynchronous result
leaves this file.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fckpt.spmd.guard import Guard, place_of
from fckpt.spmd.links import GLOO, NVLINK, Link
from fckpt.spmd.mesh import Along, Mesh

__all__ = ["Processes"]

T = TypeVar("T")


class Processes:
    """The transport of a process that is a rank of `mesh`.

    All ranks make the process groups of the single axes here, in the same order, and other groups when a collective
    first uses them, which is at the same point of the program on all ranks.
    """

    def __init__(self, mesh: Mesh, timeout_seconds: float, links: Mapping[str, Link]):
        self.mesh, self.timeout = mesh, datetime.timedelta(seconds=timeout_seconds)
        self.rank, self.links = dist.get_rank(), links
        self.guard = _guard(self.rank, mesh.size)
        self.guard.timeout_seconds = timeout_seconds
        self.groups: dict[Along, dist.ProcessGroup] = {}
        for name in mesh.names:
            self.group(Along((name,)))

    def group(self, along: Along) -> dist.ProcessGroup:
        """Returns the group of the ranks `along`."""
        if along not in self.groups:
            chains = {self.mesh.peers(rank, along) for rank in range(self.mesh.size)}
            for ranks in sorted(chains):
                group = dist.new_group(list(ranks), timeout=self.timeout)
                if self.rank in ranks:
                    assert isinstance(group, dist.ProcessGroup)
                    self.groups[along] = group
        return self.groups[along]

    def _order(self, along: Along) -> torch.Tensor | None:
        """Returns the index in the process group, whose ranks are sorted, of each rank `along`; None if in order."""
        ranks = self.mesh.peers(self.rank, along)
        order = [sorted(ranks).index(rank) for rank in ranks]
        return None if order == sorted(order) else torch.tensor(order)

    def link(self, axis: str) -> Link:
        return self.links.get(axis, NVLINK if dist.get_backend() == "nccl" else GLOO)

    def exchange(self, about: str, mine: str) -> list[str]:
        """See `Guard.exchange`."""
        return self.guard.exchange(about, mine)

    def later(self, about: str) -> Callable[[str], list[str]]:
        """See `Guard.later`."""
        return self.guard.later(about)

    def share(self, about: str, mine: str, make: Callable[[Sequence[str]], str]) -> str:
        """See `Guard.share`."""
        return self.guard.share(about, mine, make)

    def watch(self, foreseen: bool) -> contextlib.AbstractContextManager[None]:
        """See `Guard.watch`."""
        device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
        compare = lambda x: self._gathered(x.to(device), Along(self.mesh.names)).cpu()
        return self.guard.watch(lambda x: self.run("the end of a step", lambda: compare(x)), foreseen)

    def agree(self, about: str, calls: list[str]) -> None:
        """See `Guard.agree`."""
        self.guard.agree(about, calls)

    def run(self, what: str, work: Callable[[], T]) -> T:
        """Runs a function that sends messages between all ranks. See `Guard.call`."""
        return self.guard.call(what, work)

    def _gathered(self, x: torch.Tensor, along: Along) -> torch.Tensor:
        """Returns the flattened tensors of all ranks `along`, concatenated in the order of the process group."""
        gather = torch.ops._c10d_functional.all_gather_into_tensor
        return self._sent(gather, x.reshape(-1), along, len(self.mesh.peers(self.rank, along)))

    def _sent(self, operation: Callable[..., torch.Tensor], x: torch.Tensor, along: Along, *rest: Any) -> Any:
        """Starts a message, waits for it, and returns its result."""
        return torch.ops._c10d_functional.wait_tensor(operation(x, *rest, self.group(along).group_name))

    def _called(self, what: str, x: torch.Tensor, along: Along, run: Callable[[], torch.Tensor]) -> Any:
        """Runs a collective of `x`, see `Guard.call`.

        NCCL does not compare the calls beforehand: mismatched calls do not abort its process, and comparing would
        synchronise with the GPU.
        """
        compare = None if dist.get_backend() == "nccl" else lambda digest: self._gathered(digest, along)
        return self.guard.call(_said(what, x, along), run, compare)

    def all_reduce(self, x: torch.Tensor, reduction: str, along: Along) -> torch.Tensor:
        adds, reduce = reduction == "sum" and self.adds(x.dtype, along), torch.ops._c10d_functional.all_reduce

        def call(x: torch.Tensor) -> torch.Tensor:
            run = lambda: self._summed(x, along) if adds else self._sent(reduce, x, along, reduction)
            return self._called(f"all_reduce {reduction}", x, along, run)

        reduced = lambda x: _widened(x, call)
        return _as_real(x, reduced) if reduction == "sum" else _with_nans(x, reduction, reduced)

    def adds(self, dtype: torch.dtype, along: Along) -> bool:
        """Whether to exchange the tensors and add them here in rank order, as in a simulation.

        Gloo adds along a ring that starts at a different rank for each part, and the rounding of a sum of three numbers
        or more depends on the start. Exchanging the tensors sends the same number of bytes.
        """
        rounds = dtype.is_floating_point or dtype.is_complex
        return rounds and self.mesh.reach(along) > 2 and dist.get_backend() == "gloo"

    def _summed(self, x: torch.Tensor, along: Along) -> torch.Tensor:
        """Returns the sum over the ranks `along`, of which each adds one part."""
        size = len(self.mesh.peers(self.rank, along))
        parts = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % size)).view(size, -1)
        mine = _added(self._exchanged(parts, along))
        return self._collected(mine, along).view(-1)[: x.numel()].view(x.shape)

    def all_gather(self, x: torch.Tensor, along: Along) -> torch.Tensor:
        return _as_sent(x, lambda x: self._called("all_gather", x, along, lambda: self._collected(x, along)))

    def _collected(self, x: torch.Tensor, along: Along) -> torch.Tensor:
        """Returns the tensors of all ranks `along`, stacked in their order."""
        found = self._gathered(x, along).view(len(self.mesh.peers(self.rank, along)), *x.shape)
        order = self._order(along)
        return found if order is None else found[order.to(x.device)]

    def reduce_scatter(self, x: torch.Tensor, along: Along) -> torch.Tensor:
        adds, scatter = self.adds(x.dtype, along), torch.ops._c10d_functional.reduce_scatter_tensor

        def run(x: torch.Tensor) -> torch.Tensor:
            if adds:
                return _added(self._exchanged(x, along))
            return self._sent(scatter, self._sorted(x, along).reshape(-1), along, "sum", len(x)).view(x.shape[1:])

        call = lambda x: self._called("reduce_scatter", x, along, lambda: run(x))
        return _as_real(x, lambda x: _widened(x, call))

    def all_to_all(self, x: torch.Tensor, along: Along) -> torch.Tensor:
        return _as_sent(x, lambda x: self._called("all_to_all", x, along, lambda: self._exchanged(x, along)))

    def _exchanged(self, x: torch.Tensor, along: Along) -> torch.Tensor:
        """Returns the parts that all ranks `along` send to this rank, stacked."""
        size, order = len(x), self._order(along)
        parts = [x[0].numel()] * size
        exchange = torch.ops._c10d_functional.all_to_all_single
        found = self._sent(exchange, self._sorted(x, along).reshape(-1), along, parts, parts).view(x.shape)
        return found if order is None else found[order.to(x.device)]

    def _sorted(self, x: torch.Tensor, along: Along) -> torch.Tensor:
        """Returns the parts of `x`, one for each rank, in the order of the process group."""
        order = self._order(along)
        return x if order is None else x[torch.argsort(order).to(x.device)]

    def permute(self, x: torch.Tensor, sources: Sequence[int], along: Along) -> torch.Tensor:
        return _as_sent(x, lambda x: self._permute(x, sources, along))

    def _permute(self, x: torch.Tensor, sources: Sequence[int], along: Along) -> torch.Tensor:
        ranks, group = self.mesh.peers(self.rank, along), self.group(along)
        mine = ranks.index(self.rank)
        result = torch.zeros_like(x)
        todo = []
        if sources[mine] == mine:
            result = x.clone()
        elif sources[mine] >= 0:
            todo.append(dist.P2POp(dist.irecv, result, ranks[sources[mine]], group))
        targets = [ranks[target] for target, source in enumerate(sources) if source == mine != target]
        todo += [dist.P2POp(dist.isend, x, target, group) for target in targets]

        def run() -> torch.Tensor:
            for work in dist.batch_isend_irecv(todo) if todo else ():
                work.wait()
            return result

        return self._called(f"permute {tuple(sources)}", x, along, run)


def _added(parts: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the parts, added in order."""
    result = parts[0].clone()
    for part in parts[1:]:
        result = result + part
    return result


def _as_real(x: torch.Tensor, send: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Sends complex numbers as pairs of real numbers, which all backends support."""
    if not x.is_complex():
        return send(x)
    return torch.view_as_complex(send(torch.view_as_real(x.resolve_conj()).contiguous()))


def _as_sent(x: torch.Tensor, send: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Sends a tensor that is moved but not reduced: as bytes, if backends do not support its dtype."""
    if x.is_complex() or x.dtype in _KNOWN:
        return _as_real(x, send)
    return send(x.contiguous().unsqueeze(-1).view(torch.uint8)).view(x.dtype).squeeze(-1)


_KNOWN = {
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
"""The real dtypes that gloo and NCCL support."""


def _widened(x: torch.Tensor, send: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Reduces 16-bit integers, which backends do not support, as 32-bit integers. Overflow wraps around equally."""
    return send(x.to(torch.int32)).to(x.dtype) if x.dtype is torch.int16 else send(x)


def _with_nans(x: torch.Tensor, reduction: str, send: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Returns the elementwise "max" or "min" over the ranks, and NaN where any rank has NaN.

    Backends ignore NaN, so a mask of the NaNs is reduced in the same message.
    """
    if not x.is_floating_point():
        return send(x)
    worst, sign = (-math.inf, 1) if reduction == "max" else (math.inf, -1)
    nans = x.isnan()
    found, lost = send(torch.stack([x.masked_fill(nans, worst), nans.to(x.dtype) * sign]))
    return found.masked_fill(lost != 0, math.nan)


@functools.cache
def _guard(rank: int, size: int) -> Guard:
    """Returns the guard of this process, shared by all its meshes so that its keys in the store are not reused."""
    return Guard(rank, size)


def _said(what: str, x: torch.Tensor, along: Along) -> str:
    """Describes a call: the collective, the ranks, the tensor, and the line of the user's program."""
    dtype = str(x.dtype).removeprefix("torch.")
    return f"{what} over {along.said} of {tuple(x.shape)} {dtype} at {place_of(sys._getframe(1))}"
