"""Trees of parts in files, and out of them again on another number of ranks: `fckpt.save` and `fckpt.load`.

Every rank writes what it holds, and reads what it needs, of tensors that are whole in the file. A spec says where a
part belongs, so that a file knows nothing of the mesh that wrote it. Leaves have the names that torch gives them in a
nested state dict (`params.blocks.0.w`): `torch.distributed.checkpoint` reads and writes the same files.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import warnings
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist

from fckpt import _tree as trees
from fckpt.errors import ArgumentTypeError, ArgumentValueError, MeshWarning, RankFailure, users_stacklevel
from fckpt.spmd.mesh import Mesh, first_difference, mesh_in_use, transport_of
from fckpt.spmd.parts import Leaf, described, leaves_of
from fckpt.spmd.saving import Saving, finish
from fckpt.spmd.specs import check_even

__all__ = ["load", "save"]

Place = str | os.PathLike[str]


@overload
def save(
    path: Place, tree: Any, specs: Any = None, mesh: Mesh | None = None, *, wait: Literal[True] = True
) -> None: ...


@overload
def save(path: Place, tree: Any, specs: Any = None, mesh: Mesh | None = None, *, wait: Literal[False]) -> Saving: ...


def save(path: Place, tree: Any, specs: Any = None, mesh: Mesh | None = None, *, wait: bool = True) -> Saving | None:
    """Writes a tree of parts, such as parameters and the state of an optimizer, that `load` reads on any mesh.

    All ranks call it, outside of mapped functions. A checkpoint is whole or it is none: one that was interrupted, or
    that a rank could not write, leaves those before it as they are.

    Args:
        path: a new folder, which all ranks see, or an address that fsspec knows.
        tree: a pytree with this rank's part of each tensor. Other leaves (a count of steps, a learning rate) are plain
            data, and the same on all ranks.
        specs: as for `shard`: a `P` for each, or a tree that ends before. Without a mesh, none.
        mesh: default: the one in use. Without one, a single process writes whole tensors.
        wait: whether to return when the checkpoint is whole. Else tensors are copied to the memory of the CPU, and may
            change as soon as save returns; the next save, and the end of the program, wait.

    Returns:
        With `wait=False` a `Saving`, whose `wait()` returns when the checkpoint is whole.

    Raises:
        ArgumentTypeError, ArgumentValueError: the specs do not fit; two leaves have one name; a leaf is neither a
            tensor nor plain data; there is a checkpoint in this folder; the mesh is missing.
        RankFailure: a rank saves another tree, could not write, has failed, or does not come.
        Exception: this rank could not write, or the saving before failed.

    Warns:
        MeshWarning: ranks have different tensors, where the spec says that they have the same. One of them is saved.

    Example:
        >>> import tempfile, torch, fckpt
        >>> folder = tempfile.mkdtemp() + "/step-1"
        >>> fckpt.save(folder, {"w": torch.arange(4.0), "step": 1})
        >>> fckpt.load(folder, {"w": torch.zeros(4), "step": 0})
        {'w': tensor([0., 1., 2., 3.]), 'step': 1}

    References:
        `torch.distributed.checkpoint`, whose format it is, https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
    """
    from fckpt.spmd import files, transfer  # they import much of torch.distributed

    finish()
    mesh = _mesh("save", specs, mesh)
    with _watched(mesh):
        leaves = leaves_of("save", tree, specs, mesh)
        folder = files.writer(path)
        if files.exists(folder):
            raise ArgumentValueError(f"save: there is a checkpoint in {path}. Name a new folder, one for each step.")
        _agree("save", [str(path), *(leaf.said for leaf in leaves.values())], mesh)
        _warn_of_differences(leaves, mesh)
        if not wait:
            leaves = {name: leaf.copied() for name, leaf in leaves.items()}
        write = transfer.written(path, folder, leaves, mesh)
        if wait:
            return write()
    return Saving(str(path), write)


def load(path: Place, tree: Any, specs: Any = None, mesh: Mesh | None = None) -> Any:
    """Returns what `save` wrote, this rank's part of each tensor.

    The mesh and the specs need not be those of `save`, nor the number of ranks. All ranks call it. What is read is
    compared with the checksums that were saved with it; files that torch wrote have none.

    Args:
        path: where it is.
        tree: a pytree like the one that is wanted, with tensors of the shapes, dtypes and devices of this rank's parts.
            It may be a part of what was saved. A tensor without data (device="meta") comes to the default device.
        specs: as for `shard`, where the parts belong. Without a mesh, none.
        mesh: default: the one in use. Without one, a single process reads whole tensors.

    Returns:
        A new tree; that in `tree` is not changed. Nothing in a file is executed.

    Raises:
        ArgumentTypeError, ArgumentValueError: there is no checkpoint, or a leaf is not in it, or is something else
            there; the specs do not fit, or the mesh is missing.
        CheckpointError: a file is damaged, or is not what a checkpoint is made of. It names the file and the leaf.
        RankFailure: a rank has failed, or does not come.

    Example:
        >>> import tempfile, torch, fckpt
        >>> from fckpt import P
        >>> folder = tempfile.mkdtemp() + "/step-1"
        >>> fckpt.save(folder, torch.arange(6.0))
        >>> fckpt.sim({"data": 3}).run(lambda: fckpt.load(folder, torch.empty(2), P("data")))
        [tensor([0., 1.]), tensor([2., 3.]), tensor([4., 5.])]
    """
    from fckpt.spmd import files, transfer

    finish()
    mesh = _mesh("load", specs, mesh)
    with _watched(mesh):
        leaves = leaves_of("load", tree, specs, mesh)
        folder = files.reader(path)
        if not files.exists(folder):
            raise ArgumentValueError(
                f"load: there is no checkpoint in {path}. One that was not written to the end is none: load the last "
                "before it."
            )
        _agree("load", [str(path), *leaves], mesh)
        there = files.read_metadata(folder).state_dict_metadata
        for name, leaf in leaves.items():
            _check(path, name, leaf, there, mesh)
        found = transfer.read(folder, {name: leaf.empty() for name, leaf in leaves.items()}, there, mesh)
    return trees.unflatten(trees.flatten(tree)[1], found)


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


def _warn_of_differences(leaves: dict[str, Leaf], mesh: Mesh) -> None:
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

    rank = transport_of(mesh.key).rank
    mine = json.dumps([leaf.digest(mesh, rank) for leaf in leaves.values()])
    differing = json.loads(transport_of(mesh.key).share("data of a tree", mine, answer))
    if differing:
        warnings.warn(
            f"save: ranks have different data, where the specs say that they have the same: {'; '.join(differing)}. "
            "That of one of them is saved. Name the axes along which they differ, or reduce them (fckpt.pmean).",
            MeshWarning,
            stacklevel=users_stacklevel(),
        )


def _check(path: Place, name: str, leaf: Leaf, there: dict[str, Any], mesh: Mesh) -> None:
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
    dtype, shape = there[name].properties.dtype, leaf.shape
    if [*size] != [*shape]:
        for dim, axes in enumerate(() if leaf.spec.shape else leaf.spec.dims[: len(size)]):
            check_even(
                "load", f"{leaf.where} in {path}", torch.empty(size, dtype=dtype, device="meta"), dim, axes, mesh
            )
        raise ArgumentValueError(
            f"load: {leaf.where} is {described(size, dtype)} in {path}, but {trees.describe(leaf.value)} by "
            f"{leaf.spec} is a part of {described(shape, leaf.value.dtype)}. Pass parts of tensors of the shape that "
            "was saved."
        )
    if dtype != leaf.value.dtype:
        raise ArgumentTypeError(
            f"load: {leaf.where} is {dtype} in {path}, not {leaf.value.dtype}. Pass a tensor of that dtype, and "
            "convert what comes."
        )


def _watched(mesh: Mesh) -> contextlib.AbstractContextManager[None]:
    return transport_of(mesh.key).watch(foreseen=True) if mesh.names else contextlib.nullcontext()
