"""Writes parts of tensors to the files of a checkpoint, and reads them."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    Metadata,
    SavePlan,
)
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.checkpoint import planner as items
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION

from fckpt.errors import ArgumentTypeError, CheckpointError, FckptError, RankFailure
from fckpt.spmd.files import as_plain, parts_of, summed, verify, write_metadata
from fckpt.spmd.mesh import Mesh, transport_of
from fckpt.spmd.parts import Box, Leaf

__all__ = ["read", "written"]

# ---- writing ---------------------------------------------------------------------------------------


def written(
    path: str | os.PathLike[str], files: FileSystemWriter, leaves: dict[str, Leaf], mesh: Mesh
) -> Callable[[], None]:
    """Returns a function that writes this rank's parts and, together with the other ranks, completes the checkpoint.

    All ranks call `written` at the same point of their programs. The function that it returns may run in any thread.

    Raises:
        ArgumentTypeError: a leaf is neither a tensor with data nor plain data.
    """
    rank = transport_of(mesh.key).rank if mesh.names else 0
    later = transport_of(mesh.key).later if mesh.names else lambda _: lambda mine: [mine]
    exchange, conclude = later(f"the files of {path}"), later(f"the end of {path}")
    for leaf in leaves.values():
        if leaf.is_tensor and leaf.value.is_meta:
            raise ArgumentTypeError(f"save: {leaf.where} has no data (device='meta'). Save a tensor with data.")
    plain = {name: _pickled(leaf) for name, leaf in leaves.items() if not leaf.is_tensor}
    todo = _write_items(leaves, mesh, rank)
    whole = {name: _of_whole(leaf, mesh) for name, leaf in leaves.items()}

    def write() -> None:
        error: BaseException | None = None
        mine: dict[str, Any] = {"error": "", "parts": []}
        done = ""
        try:
            plan = files.prepare_local_plan(SavePlan(todo))
            plan = files.prepare_global_plan([SavePlan([])] * rank + [plan])[rank]
            mine["parts"] = summed(files, files.write_data(plan, _PartWriter(leaves, plain, mesh, rank)).wait())
        except Exception as caught:
            error, mine["error"] = caught, f"{type(caught).__name__}: {caught}"
        said = [json.loads(text) for text in exchange(json.dumps(mine))]
        failed = next((number for number, one in enumerate(said) if one["error"]), None)
        if failed is None and rank == 0:
            try:
                parts = parts_of([part for one in said for part in one["parts"]])
                names = {name: (name,) for name in leaves}
                write_metadata(files, Metadata(whole, names, parts, version=CURRENT_DCP_VERSION))
            except Exception as caught:
                error, done = caught, f"{type(caught).__name__}: {caught}"
        end = conclude(done)[0]
        if error is not None:
            error.add_note(f"on rank {rank}, in save of {path}")
            raise error
        if failed is not None or end:
            text = said[failed]["error"] if failed is not None else end
            raise RankFailure(f"save: rank {failed or 0} could not write to {path}: {text}", failed or 0)

    return write


class _PartWriter(DefaultSavePlanner):
    """Gives torch's writer the data of this rank's parts; `plain` has the bytes of leaves that are not tensors."""

    def __init__(self, leaves: dict[str, Leaf], plain: dict[str, bytes], mesh: Mesh, rank: int):
        super().__init__()
        self._leaves, self._plain, self._mesh, self._rank = leaves, plain, mesh, rank

    def resolve_data(self, write_item: Any) -> Any:
        name = write_item.index.fqn
        if name in self._plain:
            return io.BytesIO(self._plain[name])
        return self._leaves[name].part(self._mesh, self._rank).contiguous()


def _pickled(leaf: Leaf) -> bytes:
    """Returns the bytes to write for a leaf that is not a tensor.

    Raises:
        ArgumentTypeError: `load` would refuse to read the bytes.
    """
    found = io.BytesIO()
    try:
        torch.save(leaf.value, found)
        as_plain(io.BytesIO(found.getvalue()))
    except Exception as error:
        raise ArgumentTypeError(
            f"save: {leaf.where} is {type(leaf.value).__name__}, which is neither a tensor nor plain data (numbers, "
            "strings, bytes, None): loading it would execute code in the file. Convert it: a NumPy number x to "
            "float(x), an array x to torch.from_numpy(x), other objects to numbers and tensors."
        ) from error
    return found.getvalue()


def _write_items(leaves: dict[str, Leaf], mesh: Mesh, rank: int) -> list[items.WriteItem]:
    """Returns torch's instructions to write the parts that this rank writes."""
    found = []
    for number, (name, leaf) in enumerate(leaves.items()):
        owners = leaf.owners(mesh, rank)
        empty = leaf.is_tensor and 0 in leaf.box(mesh, rank).sizes and 0 not in leaf.shape
        if owners[number % len(owners)] == rank and not empty:  # ranks take turns
            found.append(_write_item(name, leaf, mesh, rank))
    return found


def _write_item(name: str, leaf: Leaf, mesh: Mesh, rank: int) -> items.WriteItem:
    """Returns torch's instruction to write this rank's part of a leaf."""
    if not leaf.is_tensor:
        return items.WriteItem(torchs.MetadataIndex(name), items.WriteItemType.BYTE_IO)
    box = leaf.box(mesh, rank)
    data = items.TensorWriteData(
        torchs.ChunkStorageMetadata(*box), torchs.TensorProperties.create_from_tensor(leaf.value), leaf.shape
    )
    index = torchs.MetadataIndex(name, box.offsets)
    return items.WriteItem(index, items.WriteItemType.SHARD, tensor_data=data)


def _of_whole(leaf: Leaf, mesh: Mesh) -> Any:
    """Returns the metadata of a leaf: the whole tensor and its parts."""
    if not leaf.is_tensor:
        return torchs.BytesStorageMetadata()
    boxes = dict.fromkeys(leaf.box(mesh, rank) for rank in range(mesh.size))
    chunks = [torchs.ChunkStorageMetadata(*box) for box in boxes if 0 not in box.sizes or 0 in leaf.shape]
    return torchs.TensorStorageMetadata(torchs.TensorProperties.create_from_tensor(leaf.value), leaf.shape, chunks)


# ---- reading ---------------------------------------------------------------------------------------


def read(files: FileSystemReader, leaves: dict[str, Leaf], there: dict[str, Any], mesh: Mesh) -> list[Any]:
    """Reads this rank's parts into the tensors of new leaves, and returns the values of all leaves.

    Raises:
        CheckpointError: a file is damaged, or contains data that is never part of a checkpoint.
    """
    rank = transport_of(mesh.key).rank if mesh.names else 0
    todo: list[items.ReadItem] = []
    wanted: dict[Any, str] = {}
    for name, leaf in leaves.items():
        found = _read_items(name, leaf, there[name], mesh, rank)
        todo += found
        for item in found:
            wanted[item.storage_index] = leaf.where
            if item.storage_index not in files.storage_data:
                raise CheckpointError(
                    f"load: a part of {leaf.where} is missing in {files.path}. Load another checkpoint."
                )
    verify(files, wanted)
    reader = _PartReader(leaves, files.path)
    try:
        files.read_data(LoadPlan(todo), reader).wait()
    except (FckptError, OSError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"load: a file in {files.path} is damaged or not part of a checkpoint ({type(error).__name__}: {error})."
        ) from error
    return [leaf.value if leaf.is_tensor else reader.plain[name] for name, leaf in leaves.items()]


class _PartReader(DefaultLoadPlanner):
    """Puts what torch's reader finds in the checkpoint at `path` into the tensors of the leaves, and into `plain`."""

    def __init__(self, leaves: dict[str, Leaf], path: Any):
        super().__init__()
        self._leaves, self._path = leaves, path
        self.plain: dict[str, Any] = {}
        """The values of leaves that are not tensors."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        name = read_item.dest_index.fqn
        try:
            self.plain[name] = as_plain(value)
        except pickle.UnpicklingError as error:
            said = str(error).partition(chr(10))[0]
            raise CheckpointError(
                f"load: {self._leaves[name].where} is not plain data in {self._path}, and was not unpickled, because "
                f"that could execute code in the file ({said})."
            ) from None

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        found = self._leaves[read_item.dest_index.fqn].value.detach()
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            found = found.narrow(dim, start, length)
        return found

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        pass


def _read_items(name: str, leaf: Leaf, there: Any, mesh: Mesh, rank: int) -> list[items.ReadItem]:
    """Returns torch's instructions to read a leaf, one for each piece.

    Raises:
        CheckpointError: pieces are missing, or overlap.
    """
    if not leaf.is_tensor:
        index, none = torchs.MetadataIndex(name), torch.Size()
        return [items.ReadItem(items.LoadItemType.BYTE_IO, index, none, index, none, none)]
    mine = leaf.box(mesh, rank)
    chunks = [Box(chunk.offsets, chunk.sizes) for chunk in there.chunks]
    pieces = [(chunk, piece) for chunk in chunks if (piece := mine.common(chunk)) is not None]
    if not _fill([piece for _, piece in pieces], mine):
        raise CheckpointError(f"load: parts of {leaf.where} are missing or overlap. Load another checkpoint.")
    return [
        items.ReadItem(
            items.LoadItemType.TENSOR,
            torchs.MetadataIndex(name, mine.offsets),
            piece.within(mine),
            torchs.MetadataIndex(name, chunk.offsets),
            piece.within(chunk),
            piece.sizes,
        )
        for chunk, piece in pieces
    ]


def _fill(pieces: Sequence[Box], box: Box) -> bool:
    """Whether each element of a box is in exactly one of the pieces."""
    if sum(math.prod(piece.sizes) for piece in pieces) != math.prod(box.sizes):
        return False
    if len(pieces) < 2:
        return True
    starts = np.array([piece.offsets for piece in pieces])
    ends = starts + np.array([piece.sizes for piece in pieces])
    both = ((starts[:, None] < ends) & (starts < ends[:, None])).all(-1)
    return int(both.sum()) == len(pieces)  # each piece overlaps itself only
