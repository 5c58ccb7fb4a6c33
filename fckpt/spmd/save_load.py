"""`fckpt.save` and `fckpt.load`: trees of parts to files, and back on any number of ranks.

Every rank writes its parts, and reads the parts that it needs. A checkpoint describes whole tensors: specs give the
position of each part, so a checkpoint does not depend on the mesh that wrote it. Leaves are named as in torch's
nested state dicts (`params.blocks.0.w`), and `torch.distributed.checkpoint` reads and writes the same files.
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
    """Writes a tree of parts, such as parameters and optimizer state, to a checkpoint that `load` reads on any mesh.

    All ranks call `save`, outside of mapped functions. A checkpoint becomes visible only when it is complete. If saving
    is interrupted, or a rank cannot write, there is no checkpoint in the folder, and earlier checkpoints are unchanged.

    Args:
        path: a new folder, which all ranks can reach, or an fsspec URL.
        tree: a pytree with this rank's part of each tensor. Other leaves (a step count, a learning rate) must be plain
            data, the same on all ranks.
        specs: as for `shard`: a `P`, or a tree of `P`s that is a tree prefix of `tree`. None without a mesh.
        mesh: default: the mesh in use. Without a mesh, a single process writes whole tensors.
        wait: whether to return only when the checkpoint is complete. If False, `save` copies the tensors to CPU memory
            and returns, and the tensors may be changed. The next save and the end of the program wait.

    Returns:
        With `wait=False` a `Saving`, whose `wait()` returns when the checkpoint is complete.

    Raises:
        ArgumentTypeError, ArgumentValueError: the specs do not fit; two leaves have the same name; a leaf is neither a
            tensor nor plain data; the folder already contains a checkpoint; the mesh is missing.
        RankFailure: a rank saves another tree, could not write, has failed, or does not arrive.
        Exception: this rank could not write, or the previous saving failed.

    Warns:
        MeshWarning: tensors that are replicated according to their specs differ between ranks. One of them is saved.

    Example:
        >>> import tempfile, torch, fckpt
        >>> folder = tempfile.mkdtemp() + "/step-1"
        >>> fckpt.save(folder, {"w": torch.arange(4.0), "step": 1})
        >>> fckpt.load(folder, {"w": torch.zeros(4), "step": 0})
        {'w': tensor([0., 1., 2., 3.]), 'step': 1}

    References:
        The format of `torch.distributed.checkpoint`, https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
    """
    from fckpt.spmd import files, transfer  # importing these is slow: they import much of torch.distributed

    finish()
    mesh = _mesh("save", specs, mesh)
    with _watched(mesh):
        leaves = leaves_of("save", tree, specs, mesh)
        folder = files.writer(path)
        if files.exists(folder):
            raise ArgumentValueError(
                f"save: there is a checkpoint in {path} already. Pass a new folder, one for each step."
            )
        _agree("save", [str(path), *(leaf.said for leaf in leaves.values())], mesh)
        _warn_of_differences(leaves, mesh)
        if not wait:
            leaves = {name: leaf.copied() for name, leaf in leaves.items()}
        write = transfer.written(path, folder, leaves, mesh)
        if wait:
            return write()
    return Saving(str(path), write)


def load(path: Place, tree: Any, specs: Any = None, mesh: Mesh | None = None) -> Any:
    """Reads this rank's part of each tensor from a checkpoint that `save` wrote.

    All ranks call `load`. The mesh, the specs and the number of ranks may differ from those at `save`. The data is
    compared with the checksums in the checkpoint; checkpoints written by torch contain no checksums.

    Args:
        path: the folder of the checkpoint.
        tree: a pytree like the wanted one, with tensors that have the shapes, dtypes and devices of this rank's parts.
            It may be a subset of the saved tree. A tensor without data (device="meta") is loaded to the default device.
        specs: as for `shard`: how the parts are divided now. None without a mesh.
        mesh: default: the mesh in use. Without a mesh, a single process reads whole tensors.

    Returns:
        A new tree. The tensors in `tree` are not changed. No code in the files is executed.

    Raises:
        ArgumentTypeError, ArgumentValueError: there is no checkpoint; a leaf is not in it, or has another type, shape
            or dtype there; the specs do not fit; the mesh is missing.
        CheckpointError: a file is damaged, or is not part of a checkpoint. The error names the file and the leaf.
        RankFailure: a rank has failed, or does not arrive.

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
                f"load: there is no checkpoint in {path}, or writing it was interrupted. Load an earlier checkpoint."
            )
        _agree("load", [str(path), *leaves], mesh)
        there = files.read_metadata(folder).state_dict_metadata
        for name, leaf in leaves.items():
            _check(path, name, leaf, there, mesh)
        found = transfer.read(folder, {name: leaf.empty() for name, leaf in leaves.items()}, there, mesh)
    return trees.unflatten(trees.flatten(tree)[1], found)


# ---- checks ----------------------------------------------------------------------------------------


def _mesh(function: str, specs: Any, mesh: Mesh | None) -> Mesh:
    """Returns the mesh to use; for a single process without a mesh, a mesh without axes."""
    mesh = mesh or mesh_in_use()
    if mesh is not None:
        if specs is None and mesh.size > 1:
            raise ArgumentTypeError(
                f"{function}: on {mesh} each tensor needs a spec. Pass specs, with P() for replicated tensors."
            )
        return mesh
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if specs is not None or ranks > 1:
        what = "specs" if specs is not None else f"{ranks} processes"
        raise ArgumentValueError(f"{function}: there are {what}, but no mesh. Pass mesh=fckpt.init_mesh(...).")
    return Mesh({})


def _agree(function: str, lines: list[str], mesh: Mesh) -> None:
    """Checks that all ranks have the same lines.

    Raises:
        RankFailure: a rank has other lines.
    """
    if mesh.size == 1:
        return

    def answer(said: Sequence[str]) -> str:
        return json.dumps(first_difference({rank: json.loads(text) for rank, text in enumerate(said)}))

    odd = json.loads(transport_of(mesh.key).share(f"{function} of a tree", json.dumps(lines), answer))
    if odd is not None:
        rank, _, mine, usual = odd
        raise RankFailure(f"{function}: rank {rank} has {mine}, where other ranks have {usual}.", rank)


def _warn_of_differences(leaves: dict[str, Leaf], mesh: Mesh) -> None:
    """Warns of tensors that differ between ranks although their specs say that they are replicated."""
    if mesh.size == 1:
        return

    def answer(said: Sequence[str]) -> str:
        digests = [json.loads(text) for text in said]
        differing = []
        for i, leaf in enumerate(leaves.values()):
            known = {(mesh.index(rank, leaf.spec.axes), mine[i]) for rank, mine in enumerate(digests)}
            if leaf.is_tensor and len(known) > mesh.count(leaf.spec.axes):
                differing.append(f"{leaf.where}, with {leaf.spec}")
        return json.dumps(differing)

    rank = transport_of(mesh.key).rank
    mine = json.dumps([leaf.digest(mesh, rank) for leaf in leaves.values()])
    differing = json.loads(transport_of(mesh.key).share("data of a tree", mine, answer))
    if differing:
        warnings.warn(
            f"save: tensors differ between ranks, but the specs say that they are replicated: {'; '.join(differing)}. "
            "The data of one rank is saved. Name the axes along which a tensor varies in its spec, or reduce the "
            "tensor (fckpt.pmean).",
            MeshWarning,
            stacklevel=users_stacklevel(),
        )


def _check(path: Place, name: str, leaf: Leaf, there: dict[str, Any], mesh: Mesh) -> None:
    """Checks that the entry with this name in a checkpoint has the type, shape and dtype of the leaf."""
    if name not in there:
        near = difflib.get_close_matches(name, there, n=3, cutoff=0.0)
        raise ArgumentValueError(
            f"load: {leaf.where} is not in {path}: the checkpoint has no {name!r}, but {', '.join(map(repr, near))}. "
            "Remove the leaf from the tree, or rename its keys to a name in the checkpoint."
        )
    size = getattr(there[name], "size", None)
    if (size is not None) != leaf.is_tensor:
        what, other = ("a tensor", "plain data") if leaf.is_tensor else ("plain data", "a tensor")
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
            f"load: {leaf.where} is {described(size, dtype)} in {path}, but {trees.describe(leaf.value)} with "
            f"{leaf.spec} is a part of {described(shape, leaf.value.dtype)}. Pass parts of tensors of the saved shape."
        )
    if dtype != leaf.value.dtype:
        raise ArgumentTypeError(
            f"load: {leaf.where} is {dtype} in {path}, not {leaf.value.dtype}. Pass a tensor of the saved dtype, and "
            "convert the loaded tensor."
        )


def _watched(mesh: Mesh) -> contextlib.AbstractContextManager[None]:
    return transport_of(mesh.key).watch(foreseen=True) if mesh.names else contextlib.nullcontext()
