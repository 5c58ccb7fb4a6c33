"""The files of a checkpoint, with a checksum for every part. Reading them never executes code in the files.

The format is `torch.distributed.checkpoint`'s: one file per rank with the parts that the rank wrote, and
`.metadata`, a pickle with the position of every part. fckpt adds two things, which torch ignores: the CRC-32 of every
part, next to its position, and the CRC-32 of `.metadata`, after the end of the pickle. Unpickling `.metadata` allows
only the classes that torch writes. Leaves that are not tensors are read with `weights_only=True`.

CRC-32: W. Peterson, D. Brown, "Cyclic codes for error detection", 1961, https://doi.org/10.1109/JRPROC.1961.287814.
It detects every single flipped bit, and misses other damage with a probability of one in four billion. It is not a
signature: it does not protect against deliberate changes.
"""

from __future__ import annotations

import enum
import io
import os
import pathlib
import pickle
import re
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StorageWriterTransforms

from fckpt.errors import CheckpointError, FckptError

__all__ = ["as_plain", "exists", "parts_of", "read_metadata", "reader", "summed", "verify", "write_metadata", "writer"]

METADATA = ".metadata"
TRAILER = re.compile(rb"fckpt crc32 ([0-9a-f]{8})\n\Z")


def writer(path: str | os.PathLike[str]) -> FileSystemWriter:
    """Returns a writer of parts for a folder or an fsspec URL."""
    found = _made(path, FileSystemWriter, "FsspecWriter")
    found.transforms = _Sums()
    return found


def reader(path: str | os.PathLike[str]) -> FileSystemReader:
    """Returns a reader of parts for a folder or an fsspec URL."""
    return _made(path, FileSystemReader, "FsspecReader")


def _made(path: str | os.PathLike[str], local: Callable[..., Any], remote: str) -> Any:
    if "://" not in str(path):
        return local(path)
    from torch.distributed.checkpoint import _fsspec_filesystem

    return getattr(_fsspec_filesystem, remote)(path)


def exists(files: FileSystemWriter | FileSystemReader) -> bool:
    """Whether there is a complete checkpoint: `.metadata` is written last."""
    return files.fs.exists(files.fs.concat_path(files.path, METADATA))


# ---- checksums -------------------------------------------------------------------------------------


class _Sums(_StorageWriterTransforms):
    """Computes the checksums of the parts while they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.crc32: dict[Any, int] = {}

    def transform_save_stream(self, write_item: Any, raw_stream: Any) -> tuple[Any, list[str]]:
        stream, descriptors = super().transform_save_stream(write_item, raw_stream)
        return _Summed(stream, self.crc32, write_item.index), descriptors


class _Summed(io.RawIOBase):
    """The stream of one part, which writes its checksum to `sums[index]`."""

    def __init__(self, stream: Any, sums: dict[Any, int], index: Any):
        self.stream, self.sums, self.index = stream, sums, index
        sums[index] = 0

    def write(self, data: Any, /) -> int:
        self.sums[self.index] = zlib.crc32(data, self.sums[self.index])
        return self.stream.write(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self.stream.close()


def summed(files: FileSystemWriter, results: Sequence[Any]) -> list[list[Any]]:
    """Returns the positions and checksums of the parts that this rank has written, as lists that fit into JSON."""
    sums = files.transforms.crc32  # type: ignore[attr-defined]  # `writer` made it
    found = [(result.index, result.storage_data, sums[result.index]) for result in results]
    return [
        [index.fqn, index.offset, info.relative_path, info.offset, info.length, crc32] for index, info, crc32 in found
    ]


def parts_of(summed: Sequence[Sequence[Any]]) -> dict[torchs.MetadataIndex, _StorageInfo]:
    """Converts the lists of `summed` to the form that metadata has."""
    found = {}
    for name, where, file, offset, length, crc32 in summed:
        info = _StorageInfo(file, offset, length)
        info.crc32 = crc32  # type: ignore[attr-defined]  # fckpt's addition, see the docstring
        found[torchs.MetadataIndex(name, None if where is None else torch.Size(where))] = info
    return found


def verify(files: FileSystemReader, wanted: dict[Any, str]) -> None:
    """Compares parts with their checksums. Checkpoints that torch wrote contain no checksums.

    Args:
        files: the reader of the checkpoint.
        wanted: for the index of each part, its path in the user's tree.

    Raises:
        CheckpointError: a checksum differs, or a file is missing.
    """
    for index, where in wanted.items():
        info = files.storage_data[index]
        crc32 = getattr(info, "crc32", None)
        if crc32 is None:
            continue
        file = files.fs.concat_path(files.path, info.relative_path)
        if not files.fs.exists(file):
            raise CheckpointError(f"load: {file}, which contains {where}, is missing. {_OTHER}")
        with files.fs.create_stream(file, "rb") as stream:
            found = 0
            for data in _chunks(stream, info.offset, info.length):
                found = zlib.crc32(data, found)
        if found != crc32:
            raise CheckpointError(
                f"load: {where} is damaged in {file}: its data does not have the checksum that was saved. {_OTHER}"
            )


_OTHER = "Load another checkpoint, or another copy of this one."
_CHUNK_BYTES = 1 << 22


def _chunks(stream: Any, offset: int, length: int) -> Iterator[bytes]:
    stream.seek(offset)
    while length > 0 and (data := stream.read(min(length, _CHUNK_BYTES))):
        length -= len(data)
        yield data


# ---- metadata --------------------------------------------------------------------------------------


def write_metadata(files: FileSystemWriter, metadata: torchs.Metadata) -> None:
    """Writes `.metadata` atomically, which completes the checkpoint."""
    metadata.storage_meta = files.storage_meta()
    data = pickle.dumps(metadata)
    final = files.fs.concat_path(files.path, METADATA)
    new = files.fs.concat_path(files.path, f"{METADATA}.tmp")
    with files.fs.create_stream(new, "wb") as stream:
        stream.write(data + b"fckpt crc32 %08x\n" % zlib.crc32(data))
        stream.flush()
        if isinstance(stream, (io.BufferedWriter, io.FileIO)):
            os.fsync(stream.fileno())
    files.fs.rename(new, final)


def read_metadata(files: FileSystemReader) -> torchs.Metadata:
    """Reads `.metadata`: the contents of a checkpoint and the position of each part. Stores the positions in `files`.

    Raises:
        CheckpointError: `.metadata` is damaged, or contains data that is never part of a checkpoint.
    """
    place = files.fs.concat_path(files.path, METADATA)
    with files.fs.create_stream(place, "rb") as stream:
        data: bytes = stream.read()
    trailer = TRAILER.search(data)
    if trailer is not None:
        data = data[: trailer.start()]
        if zlib.crc32(data) != int(trailer[1], 16):
            raise CheckpointError(f"load: {place} is damaged: it does not have the checksum that was saved. {_OTHER}")
    try:
        found = _Unpickler(io.BytesIO(data)).load()
        _look_through(found, trailer is not None)
    except FckptError as error:
        raise CheckpointError(f"load: {place} {error}") from None
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"load: {place} is damaged, or is not the metadata of a checkpoint ({said}). {_OTHER}"
        ) from error
    files.storage_data = found.storage_data
    return found


def _checked(found: bool, what: str) -> None:
    """Raises a CheckpointError that says `what`, unless `found`."""
    if not found:
        raise CheckpointError(f"is damaged, or is not the metadata of a checkpoint ({what}). {_OTHER}")


def _look_through(found: Any, ours: bool) -> None:
    """Checks that metadata has the types that are written, and names only files in its folder."""
    _checked(type(found) is torchs.Metadata and type(found.state_dict_metadata) is dict, "it describes no tensors")
    _checked(type(found.storage_data) is dict, "it has no positions of parts")
    for name, entry in found.state_dict_metadata.items():
        _checked(type(name) is str, f"{name!r} is not a name")
        if type(entry) is not torchs.BytesStorageMetadata:
            _checked(type(entry) is torchs.TensorStorageMetadata, f"{name!r} is {type(entry).__name__}")
            _checked(isinstance(entry.properties.dtype, torch.dtype), f"{name!r} has no dtype")
            for chunk in entry.chunks:
                within = zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
                _checked(
                    all(0 <= a <= a + n <= size for a, n, size in within),
                    f"a part of {name!r} is outside of the tensor",
                )
    for index, info in found.storage_data.items():
        _checked(type(index) is torchs.MetadataIndex and type(info) is _StorageInfo, "a part has no position")
        file = pathlib.PurePath(info.relative_path)
        inside = not file.is_absolute() and ".." not in file.parts and "://" not in info.relative_path
        _checked(inside, f"{info.relative_path!r} is outside of its folder")
        _checked(info.offset >= 0 and info.length >= 0, f"{index.fqn!r} has a negative position")
        _checked(not ours or type(getattr(info, "crc32", None)) is int, f"{index.fqn!r} has no checksum")
        _checked(ours or not hasattr(info, "crc32"), "it is truncated")


class _Unpickler(pickle.Unpickler):
    """An unpickler that allows only the classes that torch writes into metadata."""

    def find_class(self, module: str, name: str, /) -> Any:
        if module == torchs.__name__ and name in _OF_METADATA:
            return getattr(torchs, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        found = _OTHERS.get((module.partition("._")[0] if module.startswith("pathlib") else module, name))
        if found is None:
            raise CheckpointError(
                f"would execute {module}.{name}, which is not part of a checkpoint, so it was not loaded. Do not use "
                "this file."
            )
        return found


_OF_METADATA = {
    name
    for name, value in vars(torchs).items()
    if isinstance(value, type)
    and value.__module__ == torchs.__name__
    and (hasattr(value, "__dataclass_fields__") or issubclass(value, enum.Enum))
}
_OTHERS: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("collections", "OrderedDict"): OrderedDict,
    **{
        ("pathlib", kind): pathlib.PurePath for kind in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}


# ---- leaves that are not tensors -------------------------------------------------------------------


def as_plain(data: BinaryIO) -> Any:
    """Reads plain data (numbers, strings, lists and so on) that `torch.save` wrote.

    Raises:
        pickle.UnpicklingError: the data contains other objects.
    """
    return torch.load(data, weights_only=True)
