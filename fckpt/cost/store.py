"""Measured costs on disk: one append-only file per device and settings, with one line per operation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fckpt._call import ambient
from fckpt.cost.calls import OpCost, valid
from fckpt.errors import TraceError

__all__ = ["Store", "cache_folder", "environment", "remove_oldest"]

FORMAT = 3  # part of the file names: to be increased when the measurements change
MOST_FILES = 32
MOST_BYTES = 64 * 2**20
"""The number of files that stay, and their size in bytes. The files that were used last stay."""
MOST_BYTES_EACH = 16 * 2**20
"""Of a larger file, only the second half of its lines is read and stays."""
_ABANDONED = 3600.0
"""Seconds after which a temporary file belongs to a process that was killed."""


def environment(device: torch.device) -> str:
    """Returns the name of a device with the settings on which the cost of an operation depends.

    Raises:
        TraceError: nothing can be measured on the device.
    """
    if device.type == "meta":
        raise TraceError(
            "operations on the device meta take no time and no memory, and cannot be measured. Put the tensors on a "
            "device with memory, or let fckpt.plan plan for a device that is not here."
        )
    settings = ambient.capture()[2:]
    if device.type == "cpu":
        name = f"{_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    else:
        module = torch.get_device_module(device)
        name = module.get_device_name(device) if hasattr(module, "get_device_name") else str(device)
    return f"{name}, torch {torch.__version__}, {settings}"


@functools.cache
def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        fields = [line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line]
        known = {key.strip(): value.strip() for key, value in fields}
        # Virtual machines may report one name for all models, so the model numbers are included.
        if name := " ".join(known[key] for key in ("model name", "cpu family", "model") if key in known):
            return name
    return platform.processor() or platform.machine()


def cache_folder() -> Path:
    """Returns the folder in FCKPT_CACHE, or `fckpt` in the platform's folder for users' caches."""
    named = os.environ.get("FCKPT_CACHE")
    if named:
        return Path(named)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "fckpt" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "fckpt"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fckpt"


class Store:
    """A store of costs by environment and signature.

    Processes may share the files: each line is written by a single append, which is atomic, and the last line for an
    operation counts. Each line has a checksum; a file with invalid lines is rewritten without them. If there is too
    much, the oldest lines and files are removed. If the folder is not writable, nothing is stored, and no error is
    raised. All stores of a process share what they have read, and read a file again only if another process has
    changed it.
    """

    def __init__(self) -> None:
        self._read: dict[str, dict[str, OpCost]] = {}

    def get(self, where: str, key: str) -> OpCost | None:
        """Returns the stored cost of an operation, or None. A store looks at each file once."""
        if where not in self._read:
            self._read[where] = _load(_path(where))
        return self._read[where].get(key)

    def put(self, where: str, key: str, cost: OpCost) -> None:
        """Stores a cost."""
        if " at 0x" in key:
            return  # an address may have another meaning later
        self._read.setdefault(where, {})[key] = cost
        with contextlib.suppress(OSError):
            path = _path(where)
            path.parent.mkdir(parents=True, exist_ok=True)
            before, (known, costs) = _version(path), _READ.get(path, (_MISSING, {}))
            # The first newline ends an incomplete line that another process may have left.
            line = f"\n{_line(key, cost)}\n".encode()
            with open(path, "ab", buffering=0) as file:
                file.write(line)
            after = _version(path)
            alone = before.number in (after.number, 0) and after.nbytes == before.nbytes + len(line)
            if alone and known == before and costs is self._read[where]:
                _READ[path] = after, costs
            if before == _MISSING:
                remove_oldest("costs", MOST_FILES, MOST_BYTES)


def _path(where: str) -> Path:
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", where)[:60].strip("-")
    return cache_folder() / f"costs-{FORMAT}-{readable}-{hashlib.sha256(where.encode()).hexdigest()[:16]}.jsonl"


def _line(key: str, cost: OpCost) -> str:
    entry = {"signature": key, **dataclasses.asdict(cost)}
    return json.dumps({**entry, "checksum": _checksum(entry)})


def _checksum(entry: dict[str, Any]) -> str:
    """Returns a checksum of an entry: a number that was changed by hand, or by a fault, would break a budget."""
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()[:16]


class _Version(NamedTuple):
    """Changes when a file changes."""

    number: int
    nbytes: int
    changed: int


_MISSING = _Version(0, 0, 0)
_READ: dict[Path, tuple[_Version, dict[str, OpCost]]] = {}
"""By file: its version, and the costs in it, to which stores add theirs."""


def _version(path: Path) -> _Version:
    try:
        found = path.stat()
    except OSError:
        return _MISSING
    return _Version(found.st_ino, found.st_size, found.st_mtime_ns)


def _load(path: Path) -> dict[str, OpCost]:
    version = _version(path)  # before the file is read: a later change is another version
    known, costs = _READ.get(path, (_MISSING, {}))
    if version == _MISSING or known != version:
        costs = _parsed_file(path)
        _READ[path] = version, costs
        with contextlib.suppress(OSError):  # the time of the last change stays, which is a part of the version
            os.utime(path, ns=(time.time_ns(), version.changed))
    return costs


def _parsed_file(path: Path) -> dict[str, OpCost]:
    try:
        lines = path.read_bytes().decode(errors="replace").splitlines()
    except OSError:
        return {}
    found: dict[str, OpCost] = {}
    corrupt = False
    large = sum(map(len, lines)) > MOST_BYTES_EACH
    for line in filter(None, lines[len(lines) // 2 :] if large else lines):
        try:
            key, cost = _parsed(json.loads(line))
            found[key] = cost
        except (ValueError, TypeError, KeyError, RecursionError):
            corrupt = True
    if corrupt or large:
        _rewrite(path, found)
    return found


def _parsed(entry: dict[str, Any]) -> tuple[str, OpCost]:
    content = {**entry}
    if content.pop("checksum") != _checksum(content):
        raise ValueError("not the cost that was written")
    key, seconds, flops, nbytes = (entry[k] for k in ("signature", "seconds", "flops", "temporary_nbytes"))
    cost = OpCost(seconds, flops, nbytes, tuple(entry["storages"]))
    if not (isinstance(key, str) and isinstance(entry["storages"], list) and valid(cost)):
        raise ValueError("not a cost")
    return key, cost


def _rewrite(path: Path, costs: dict[str, OpCost]) -> None:
    # Lines that another process appends in the meantime are lost, and measured again later.
    with contextlib.suppress(OSError):
        text = "".join(f"{_line(key, cost)}\n" for key, cost in costs.items())
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix="costs-", suffix=".tmp", delete=False) as file:
            file.write(text)
        shutil.copymode(path, file.name)  # other users may share the folder
        os.replace(file.name, path)


def remove_oldest(kind: str, most_files: int, most_nbytes: int) -> None:
    """Removes files from the folder until few enough stay, and temporary files of processes that were killed.

    Args:
        kind: the first part of the files' names, `costs` or `plans`.
        most_files: the number of files that may stay. Those stay that were used last.
        most_nbytes: the size in bytes that all of them may have together.
    """
    files = []
    for path in cache_folder().glob(f"{kind}-*"):
        with contextlib.suppress(OSError):  # another process has removed it
            found = path.stat()
            files.append((max(found.st_atime, found.st_mtime), found.st_size, path))
    kept = 0
    for i, (used, nbytes, path) in enumerate(sorted(files, reverse=True)):
        kept += nbytes
        abandoned = path.suffix == ".tmp" and used < time.time() - _ABANDONED
        if i >= most_files or kept > most_nbytes or abandoned:
            with contextlib.suppress(OSError):
                path.unlink()
