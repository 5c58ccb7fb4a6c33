"""Trees of parts in files, and out of them again on another number of ranks: `torch.distributed.checkpoint`.

Every rank writes what it holds, and reads what it needs, of tensors that are whole in the file. A spec says where a
part belongs, so that a file knows nothing of the mesh that wrote it. Leaves have the names that torch gives them in a
nested state dict (`params.blocks.0.w`): its own functions read and write the same files.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import threading
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fckpt import tree as trees
from fckpt.errors import ArgumentTypeError, ArgumentValueError, MeshWarning, RankFailure, users_stacklevel
from fckpt.spmd.mesh import Mesh, first_difference, mesh_in_use, simulated, transport_of
from fckpt.spmd.specs import P, check_even, in_order, local, placements, shard, specs_of, unshard

__all__ = ["load", "save"]

Place = str | os.PathLike[str]


def save(path: Place, tree: Any, specs: Any = None, mesh: Mesh | None = None) -> None:
    """Writes a tree of parts, such as parameters and the state of an optimizer, that `load` reads on any mesh.

    All ranks call it, outside of mapped functions. Nobody may change the tensors before it returns.

    Args:
        path: a new folder, which all ranks see, or an address that fsspec knows.
        tree: a pytree with this rank's part of each tensor. Other leaves (a count of steps, a learning rate) are the
            same on all ranks, and are pickled.
        specs: as for `shard`: a `P` for each, or a tree that ends before. Without a mesh, none.
        mesh: default: the one in use. Without one, a single process writes whole tensors.

    Raises:
        ArgumentTypeError, ArgumentValueError: the specs do not fit; two leaves have one name; there is a checkpoint in
            this folder; the mesh is missing.
        RankFailure: a rank saves another tree, has failed, or does not come.

    Warns:
        MeshWarning: ranks have different tensors, where the spec says that they have the same. One of them is saved.

    Example:
        >>> import tempfile, torch, fckpt
        >>> folder = tempfile.mkdtemp() + "/step-1"
        >>> fckpt.save(folder, {"w": torch.arange(4.0), "step": 1})
        >>> fckpt.load(folder, {"w": torch.zeros(4), "step": 0})
        {'w': tensor([0., 1., 2., 3.]), 'step': 1}

    References:
        `torch.distributed.checkpoint`, https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
    """
    from torch.distributed import checkpoint

    mesh = _mesh("save", specs, mesh)
    with _watched(mesh):
        leaves = _leaves("save", tree, specs, mesh)
        if _exists(path):
            raise ArgumentValueError(f"save: there is a checkpoint in {path}. Name a new folder, one for each step.")
        _agree("save", [str(path), *(leaf.said(mesh) for leaf in leaves.values())], mesh)
        _warn_of_differences(leaves, mesh)
        whole = {name: _whole(leaf, mesh) for name, leaf in leaves.items()}
        write: Callable[..., Any] = lambda **options: checkpoint.save(whole, checkpoint_id=path, **options)
        if simulated() is None:
            _run("save", path, mesh, write)
        else:  # rank 0 writes, while the others wait
            transport_of(mesh.key).share("a file", "", lambda _: str(_run("save", path, mesh, write)))


def load(path: Place, tree: Any, specs: Any = None, mesh: Mesh | None = None) -> Any:
    """Returns what `save` wrote, this rank's part of each tensor.

    The mesh and the specs need not be those of `save`, nor the number of ranks. All ranks call it.

    Args:
        path: where it is.
        tree: a pytree like the one that is wanted, with tensors of the shapes, dtypes and devices of this rank's parts.
            It may be a part of what was saved. A tensor without data (device="meta") comes to the default device.
        specs: as for `shard`, where the parts belong. Without a mesh, none.
        mesh: default: the one in use. Without one, a single process reads whole tensors.

    Returns:
        A new tree; that in `tree` is not changed. Files are unpickled: load only what you trust.

    Raises:
        ArgumentTypeError, ArgumentValueError: there is no checkpoint, or a leaf is not in it, or is something else
            there; the specs do not fit, or the mesh is missing.
        RankFailure: a rank has failed, or does not come.

    Example:
        >>> import tempfile, torch, fckpt
        >>> from fckpt import P
        >>> folder = tempfile.mkdtemp() + "/step-1"
        >>> fckpt.save(folder, torch.arange(6.0))
        >>> fckpt.sim({"data": 3}).run(lambda: fckpt.load(folder, torch.empty(2), P("data")))
        [tensor([0., 1.]), tensor([2., 3.]), tensor([4., 5.])]
    """
    from torch.distributed import checkpoint

    mesh = _mesh("load", specs, mesh)
    with _watched(mesh):
        leaves = _leaves("load", tree, specs, mesh)
        if "://" not in str(path) and not _exists(path):
            raise ArgumentValueError(
                f"load: there is no checkpoint in {path}. One that was not written to the end is none: load the last "
                "before it."
            )
        _agree("load", [str(path), *leaves], mesh)
        new = {name: leaf.empty() for name, leaf in leaves.items()}
        whole = {name: _whole(leaf, mesh) for name, leaf in new.items()}
        options = {"checkpoint_id": path, "planner": _planner(path, leaves, mesh)}
        _run("load", path, mesh, lambda **more: checkpoint.load(whole, **options, **more))
        found = [_part(leaf, whole[name], mesh) for name, leaf in new.items()]
    return trees.unflatten(trees.flatten(tree)[1], found)


# ---- leaves ----------------------------------------------------------------------------------------


class _Leaf(NamedTuple):
    """A leaf of a tree, and where it lies."""

    where: str
    value: Any
    spec: P

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, torch.Tensor)

    def shape(self, mesh: Mesh) -> torch.Size:
        """Returns that of the whole tensor."""
        dims = [*self.spec.dims, *[()] * self.value.dim()]
        return torch.Size(size * mesh.count(axes) for size, axes in zip(self.value.shape, dims, strict=False))

    def empty(self) -> _Leaf:
        """Returns one like it, to be read into."""
        if not self.is_tensor:
            return self
        device = torch.get_default_device() if self.value.is_meta else self.value.device
        new = torch.empty_like(self.value, device=device)
        return self._replace(value=new.requires_grad_(self.value.requires_grad))

    def said(self, mesh: Mesh) -> str:
        """Describes what must be the same on all ranks."""
        if self.is_tensor:
            return f"{self.where} of {_described(self.shape(mesh), self.value.dtype)} by {self.spec}"
        plain = isinstance(self.value, (bool, int, float, complex, str))
        return f"{self.where} = {self.value!r}" if plain else f"{self.where}, {type(self.value).__name__}"

    def digest(self, mesh: Mesh) -> int:
        """Returns a number for the data of a tensor that other ranks have, too; else 0."""
        if not self.is_tensor or mesh.count(self.spec.axes) == mesh.size:
            return 0
        data = self.value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return zlib.crc32(data.numpy())


def _described(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{[*shape]}"


def _leaves(function: str, tree: Any, specs: Any, mesh: Mesh) -> dict[str, _Leaf]:
    """Returns the leaves of a tree by name."""
    specs = specs_of(function, "tree", P() if specs is None else specs, tree, mesh)
    values, spec = trees.flatten(local(function, tree, specs, mesh, "tree"))
    found: dict[str, _Leaf] = {}
    for name, path, value, p in zip(spec.names(), spec.paths(), values, specs, strict=True):
        leaf = _Leaf(f"tree{path}", value, p)
        if hasattr(value, "state_dict"):
            raise ArgumentTypeError(
                f"{function}: {leaf.where} is {type(value).__name__}: pass its state_dict(), a tree of tensors."
            )
        if name in found:
            raise ArgumentValueError(
                f"{function}: {leaf.where} and {found[name].where} would both be {name!r} in the file. Rename a key."
            )
        found[name] = leaf
    if "" in found:
        found["tree"] = found.pop("")
    return found


def _whole(leaf: _Leaf, mesh: Mesh) -> Any:
    """Returns what torch writes, or reads into: the whole tensor, of which a process may have a part only."""
    if not leaf.is_tensor:
        return leaf.value
    value = leaf.value.detach()
    if not mesh.names:
        return value
    if simulated() is not None:
        return unshard(value, leaf.spec, mesh)
    from torch.distributed.tensor import DTensor

    names = mesh.names
    if not all(in_order(axes, names) for axes in leaf.spec.dims):
        names = (*leaf.spec.axes, *(name for name in names if name not in leaf.spec.axes))
    carrier: Any = transport_of(mesh.key)
    device_mesh = carrier.device_mesh(value.device.type, names)
    shape = leaf.shape(mesh)
    stride = torch.empty(shape, device="meta").stride()
    where = placements(leaf.spec, names)
    return DTensor.from_local(value, device_mesh, where, run_check=False, shape=shape, stride=stride)


def _part(leaf: _Leaf, whole: Any, mesh: Mesh) -> Any:
    """Returns what this rank has read."""
    if not leaf.is_tensor:
        return whole
    if simulated() is not None:
        leaf.value.detach().copy_(shard(whole, leaf.spec, mesh))
    return leaf.value  # torch has read into it


# ---- what is checked -------------------------------------------------------------------------------


def _mesh(function: str, specs: Any, mesh: Mesh | None) -> Mesh:
    """Returns the mesh; one without axes for a process on its own."""
    mesh = mesh or mesh_in_use()
    if mesh is not None:
        if specs is None and mesh.size > 1:
            raise ArgumentTypeError(
                f"{function}: on {mesh} each tensor has a spec: how its parts lie, or P() where all ranks agree."
            )
        return mesh
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if specs is not None or ranks > 1:
        what = "specs" if specs is not None else f"{ranks} processes"
        raise ArgumentValueError(f"{function}: there are {what}, but no mesh. Pass it: mesh=fckpt.init_mesh(...).")
    return Mesh({})


def _exists(path: Place) -> bool:
    """Whether there is a whole checkpoint in a folder."""
    return Path(path, ".metadata").exists()


def _agree(function: str, lines: list[str], mesh: Mesh) -> None:
    """Makes sure that all ranks have the same to say.

    Raises:
        RankFailure: one has not.
    """
    if mesh.size == 1:
        return

    def answer(said: Sequence[str]) -> str:
        return json.dumps(first_difference({rank: json.loads(text) for rank, text in enumerate(said)}))

    odd = json.loads(transport_of(mesh.key).share(f"{function} of a tree", json.dumps(lines), answer))
    if odd is not None:
        rank, _, mine, usual = odd
        raise RankFailure(f"{function}: rank {rank} has {mine}, where others have {usual}.", rank)


def _warn_of_differences(leaves: dict[str, _Leaf], mesh: Mesh) -> None:
    """Warns of tensors that differ between ranks where their specs say that they do not."""
    if mesh.size == 1:
        return

    def answer(said: Sequence[str]) -> str:
        digests = [json.loads(text) for text in said]
        differing = []
        for i, leaf in enumerate(leaves.values()):
            known = {(mesh.index(rank, leaf.spec.axes), mine[i]) for rank, mine in enumerate(digests)}
            if leaf.is_tensor and len(known) > mesh.count(leaf.spec.axes):
                differing.append(f"{leaf.where}, by {leaf.spec}")
        return json.dumps(differing)

    mine = json.dumps([leaf.digest(mesh) for leaf in leaves.values()])
    differing = json.loads(transport_of(mesh.key).share("data of a tree", mine, answer))
    if differing:
        warnings.warn(
            f"save: ranks have different data, where the specs say that they have the same: {'; '.join(differing)}. "
            "That of one of them is saved. Name the axes along which they differ, or reduce them (fckpt.pmean).",
            MeshWarning,
            stacklevel=users_stacklevel(),
        )


def _planner(path: Place, leaves: dict[str, _Leaf], mesh: Mesh) -> Any:
    """Returns what torch asks before it reads."""
    from torch.distributed.checkpoint import DefaultLoadPlanner

    class Planner(DefaultLoadPlanner):
        def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
            for name, leaf in leaves.items():
                _check(path, name, leaf, metadata.state_dict_metadata, mesh)
            super().set_up_planner(state_dict, metadata, is_coordinator)

    return Planner()


def _check(path: Place, name: str, leaf: _Leaf, there: dict[str, Any], mesh: Mesh) -> None:
    """Makes sure that what is in a file under this name is what is wanted."""
    if name not in there:
        near = difflib.get_close_matches(name, there, n=3, cutoff=0.0)
        raise ArgumentValueError(
            f"load: {leaf.where} is not in {path}: it has no {name!r}, but {', '.join(map(repr, near))}. Leave it out "
            "of the tree, or call it what it is called there."
        )
    size = getattr(there[name], "size", None)
    if (size is not None) != leaf.is_tensor:
        what, other = ("a tensor", "none") if leaf.is_tensor else ("no tensor", "one")
        raise ArgumentTypeError(f"load: {leaf.where} is {what}, but {other} in {path}.")
    if size is None:
        return
    dtype, shape = there[name].properties.dtype, leaf.shape(mesh)
    if [*size] != [*shape]:
        for dim, axes in enumerate(leaf.spec.dims[: len(size)]):
            check_even(
                "load", f"{leaf.where} in {path}", torch.empty(size, dtype=dtype, device="meta"), dim, axes, mesh
            )
        raise ArgumentValueError(
            f"load: {leaf.where} is {_described(size, dtype)} in {path}, but {trees.describe(leaf.value)} by "
            f"{leaf.spec} is a part of {_described(shape, leaf.value.dtype)}. Pass parts of tensors of the shape that "
            "was saved."
        )
    if dtype != leaf.value.dtype:
        raise ArgumentTypeError(
            f"load: {leaf.where} is {dtype} in {path}, not {leaf.value.dtype}. Pass a tensor of that dtype, and "
            "convert what comes."
        )


# ---- torch -----------------------------------------------------------------------------------------

_alone = threading.Lock()
"""What belongs to the process, as filters of warnings do, is for one simulated rank at a time."""


def _watched(mesh: Mesh) -> contextlib.AbstractContextManager[None]:
    return transport_of(mesh.key).watch(foreseen=True) if mesh.names else contextlib.nullcontext()


def _run(function: str, path: Place, mesh: Mesh, work: Callable[..., Any]) -> None:
    """Has torch write or read.

    Raises:
        Exception: what went wrong on the first rank where something did.
    """
    from torch.distributed.checkpoint import CheckpointException

    try:
        if mesh.names and simulated() is None:
            carrier: Any = transport_of(mesh.key)
            carrier.run(f"{function} {path}", work)
        else:
            with _alone, warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                work(no_dist=True)
    except CheckpointException as error:  # a BaseException, of which nobody else knows
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        cause.add_note(f"on rank {rank}, in {function} of {path}")
        raise cause from None
