"""Files of results: the machine that they were measured on, and a small form of JSON."""

from __future__ import annotations

import gzip
import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

DIGITS = 7
"""Significant digits of floats in a file. Integers, such as bytes, are exact."""


# ---- files ---------------------------------------------------------------------------------------


def write_json(path: Path, document: Mapping[str, Any], digits: int = DIGITS) -> None:
    """Writes `document` in its small form, and creates the folder if necessary.

    Floats are rounded to `digits` significant digits. A list of dicts with equal keys is written as `{"columns": [...],
    "rows": [[...], ...]}`. A file whose name ends in ".gz" is compressed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_small(document, digits), separators=(",", ":"))
    text = text.replace(',{"', ',\n{"').replace('],["', '],\n["') + "\n"
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode())


def read_json(path: Path) -> Any:
    """Reads what `write_json` wrote: dicts and lists as before, floats rounded."""
    content = path.read_bytes()
    return _original(json.loads(gzip.decompress(content) if path.suffix == ".gz" else content))


def rounded(value: float, digits: int = DIGITS) -> float:
    """Rounds to a number of significant digits."""
    return float(f"{value:.{digits}g}")


def _small(value: Any, digits: int) -> Any:
    if isinstance(value, float):
        return rounded(value, digits)
    if isinstance(value, Mapping):
        return {str(key): _small(item, digits) for key, item in value.items()}
    if not isinstance(value, list | tuple):
        return value
    if len(value) < 2 or not _are_alike(value):
        return [_small(item, digits) for item in value]
    columns, cells = zip(*(_column(name, [row[name] for row in value], digits) for name in value[0]), strict=True)
    return {"columns": columns, "rows": [*zip(*cells, strict=True)]}


def _are_alike(values: Sequence[Any]) -> bool:
    return all(isinstance(value, dict) and value and [*value] == [*values[0]] for value in values)


def _column(name: str, values: list[Any], digits: int) -> tuple[str | list[str], list[Any]]:
    """Returns the heading of a column, and its cells. Dicts with equal keys have the keys in the heading."""
    dicts = [value for value in values if value is not None]
    if dicts and _are_alike(dicts):
        return [name, *dicts[0]], [value and [_small(item, digits) for item in value.values()] for value in values]
    return name, [_small(value, digits) for value in values]


def _original(value: Any) -> Any:
    if isinstance(value, list):
        return [_original(item) for item in value]
    if not isinstance(value, dict):
        return value
    if [*value] == ["columns", "rows"]:
        return [dict(map(_cell, value["columns"], row)) for row in value["rows"]]
    return {key: _original(item) for key, item in value.items()}


def _cell(column: str | list[str], cell: Any) -> tuple[str, Any]:
    found = _original(cell)
    if isinstance(column, str):
        return column, found
    return column[0], found and dict(zip(column[1:], found, strict=True))


# ---- the machine ---------------------------------------------------------------------------------


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Returns what absolute times depend on: processor, cores, GPU, versions, date."""
    machine = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    if device.type == "cuda":
        machine |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return machine


def machine_line(machine: Mapping[str, Any]) -> str:
    """Returns the result of `describe_machine` as one line."""
    gpu = "" if machine["device"] == "cpu" else f"{machine['device']}, CUDA {machine.get('cuda')}, host "
    return (
        f"{gpu}{machine['cpu']}, {machine['cores']} cores ({machine['torch_threads']} threads), "
        f"torch {machine['torch']}, Python {machine['python']}, {machine['date']}"
    )


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines: Sequence[str] = info.read_text().splitlines() if info.exists() else ()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def device_slug(device: torch.device) -> str:
    """Returns the device as a part of a file name: `cpu`, `nvidia-h100-80gb-hbm3`."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return "-".join(name.lower().split())
