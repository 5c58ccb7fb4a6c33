"""Conversion of bytes and seconds to and from text: "8GiB" to 8589934592 and back."""

from __future__ import annotations

import math
import re

from fckpt.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["format_bytes", "format_seconds", "parse_bytes"]

_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = {unit.lower(): nbytes for unit, nbytes in (_BINARY | _DECIMAL).items()}
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def parse_bytes(value: int | str) -> int:
    """Parses a number of bytes.

    Args:
        value: a number of bytes, or a number with one of the units B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB,
            TiB (powers of 1024), case-insensitive. Fractions of a byte are truncated.

    Raises:
        ArgumentTypeError: `value` is neither an int nor a str.
        ArgumentValueError: `value` is not positive, or not a number with a unit.

    Example:
        >>> parse_bytes("1.5 KiB"), parse_bytes("4GB"), parse_bytes(7)
        (1536, 4000000000, 7)
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ArgumentTypeError(f'bytes are an int or a str like "4GiB", not {type(value).__name__}: {value!r}.')
    if isinstance(value, int):
        nbytes = value
    else:
        match = _TEXT.fullmatch(value)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            known = ", ".join([*_DECIMAL, *_BINARY])
            raise ArgumentValueError(f'{value!r} is not a number of bytes. Write "512MiB" or "4GB". Units: {known}.')
        nbytes = math.floor(float(match[1]) * unit)
    if nbytes <= 0:
        raise ArgumentValueError(f"a number of bytes must be positive, not {value!r}.")
    return nbytes


def format_bytes(nbytes: int | float) -> str:
    """Formats bytes in binary units with three or four digits.

    Example:
        >>> format_bytes(0), format_bytes(1536), format_bytes(5 * 2**30)
        ('0 B', '1.50 KiB', '5.00 GiB')
    """
    size, unit = float(nbytes), "B"
    for name, factor in _BINARY.items():
        if abs(nbytes) >= factor:
            size, unit = nbytes / factor, name
    return f"{nbytes:.0f} B" if unit == "B" else f"{size:.{_decimals(size)}f} {unit}"


def format_seconds(seconds: float) -> str:
    """Formats a duration with a suitable unit.

    Example:
        >>> format_seconds(0.00125), format_seconds(3.0), format_seconds(90.0)
        ('1.25 ms', '3.00 s', '1 min 30 s')
    """
    if seconds >= 60:
        return f"{int(seconds // 60)} min {seconds % 60:.0f} s"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= factor or unit == "us":
            size = seconds / factor
            return f"{size:.{_decimals(size)}f} {unit}"
    raise AssertionError


def _decimals(size: float) -> int:
    return 2 if abs(size) < 10 else 1 if abs(size) < 100 else 0
