"""Attributes with values of other types than int, some of which only look equal. See `places`."""

from __future__ import annotations

import datetime
import enum
import fractions
import math
import pathlib
import re
from decimal import Decimal
from typing import Any

import numpy as np
import torch

from places import registry

PLACES, Place = registry()


class Value(Place, abstract=True):
    """An attribute of an object."""

    def __init__(self) -> None:
        self.number: Any = 2

    def read(self) -> Any:
        return self.number

    def write(self, number: int) -> None:
        self.number = number


class NumPyScalar(Value):
    def __init__(self) -> None:
        self.number = np.float32(2)

    def write(self, number: int) -> None:
        self.number = np.float32(number)


class NumPyInteger(Value):
    def __init__(self) -> None:
        self.number = np.int64(2)

    def write(self, number: int) -> None:
        self.number = np.int64(number)


class NumPyArray(Place):
    def __init__(self) -> None:
        self.array = np.array([0.0, 2.0])

    def read(self) -> Any:
        return float(self.array[1])

    def write(self, number: int) -> None:
        self.array[1] = number


class NumPyArrayAsTensor(NumPyArray):
    def read(self) -> Any:
        return torch.from_numpy(self.array)[1]


class ZeroDimensionalArray(Value):
    def __init__(self) -> None:
        self.number = np.array(2.0)

    def read(self) -> Any:
        return self.number.item()

    def write(self, number: int) -> None:
        self.number[...] = number


class TorchSize(Value):
    def __init__(self) -> None:
        self.number = torch.Size([2, 4])

    def read(self) -> Any:
        return self.number[0]

    def write(self, number: int) -> None:
        self.number = torch.Size([number, 4])


class Range(Value):
    def __init__(self) -> None:
        self.number = range(2)

    def read(self) -> Any:
        return len(list(self.number))

    def write(self, number: int) -> None:
        self.number = range(number)


class Slice(Value):
    def __init__(self) -> None:
        self.number = slice(0, 2)

    def read(self) -> Any:
        return self.number.stop

    def write(self, number: int) -> None:
        self.number = slice(0, number)


class DecimalNumber(Value):
    def __init__(self) -> None:
        self.number = Decimal(2)

    def read(self) -> Any:
        return float(self.number)

    def write(self, number: int) -> None:
        self.number = Decimal(number)


class FractionNumber(Value):
    def __init__(self) -> None:
        self.number = fractions.Fraction(2)

    def read(self) -> Any:
        return float(self.number)

    def write(self, number: int) -> None:
        self.number = fractions.Fraction(number)


class Float(Value):
    def __init__(self) -> None:
        self.number = 2.0

    def write(self, number: int) -> None:
        self.number = number + 0.5


class SignOfZero(Value):
    """Equal to what it was, and yet another number."""

    def __init__(self) -> None:
        self.number = 0.0

    def read(self) -> Any:
        return math.copysign(2.0, self.number)

    def write(self, number: int) -> None:
        self.number = -0.0


class KindOfNumber(Value):
    """2 becomes 2.0, which is equal and computes another type."""

    def read(self) -> Any:
        return 2 if isinstance(self.number, int) else 3

    def write(self, number: int) -> None:
        self.number = 2.0


class Text(Value):
    def __init__(self) -> None:
        self.number = "two"

    def read(self) -> Any:
        return 3 if self.number == "three" else 2

    def write(self, number: int) -> None:
        self.number = "three"


class Bytes(Value):
    def __init__(self) -> None:
        self.number = b"\x02"

    def read(self) -> Any:
        return self.number[0]

    def write(self, number: int) -> None:
        self.number = bytes([number])


class NoneOrNumber(Value):
    def __init__(self) -> None:
        self.number = None

    def read(self) -> Any:
        return 2 if self.number is None else self.number


class Complex(Value):
    def __init__(self) -> None:
        self.number = 2 + 1j

    def read(self) -> Any:
        return self.number.real

    def write(self, number: int) -> None:
        self.number = number + 1j


class Mode(enum.Enum):
    TWO = 2
    THREE = 3


class EnumMember(Value):
    def __init__(self) -> None:
        self.number = Mode.TWO

    def read(self) -> Any:
        return self.number.value

    def write(self, number: int) -> None:
        self.number = Mode.THREE


class EnumComparison(EnumMember):
    def read(self) -> Any:
        return 3 if self.number is Mode.THREE else 2


class DtypeAttribute(Value):
    def __init__(self) -> None:
        self.number = torch.float32

    def read(self) -> Any:
        return torch.ones((), dtype=self.number) / 3

    def write(self, number: int) -> None:
        self.number = torch.float64


class SignOfZeroInTuple(Value):
    def __init__(self) -> None:
        self.number = (0.0, 1)

    def read(self) -> Any:
        return math.copysign(2.0, self.number[0])

    def write(self, number: int) -> None:
        self.number = (-0.0, 1)


class KindOfNumberInTuple(Value):
    def __init__(self) -> None:
        self.number = (1.0, 1)

    def read(self) -> Any:
        return 3 if self.number[0] is True else 2

    def write(self, number: int) -> None:
        self.number = (True, 1)


class TimeDelta(Value):
    def __init__(self) -> None:
        self.number = datetime.timedelta(seconds=2)

    def read(self) -> Any:
        return self.number.total_seconds()

    def write(self, number: int) -> None:
        self.number = datetime.timedelta(seconds=number)


class PathOfLength(Value):
    def __init__(self) -> None:
        self.number = pathlib.PurePosixPath("ab")

    def read(self) -> Any:
        return len(self.number.name)

    def write(self, number: int) -> None:
        self.number = pathlib.PurePosixPath("a" * number)


class Pattern(Value):
    def __init__(self) -> None:
        self.number = re.compile("a{2}")

    def read(self) -> Any:
        return len(self.number.match("a" * 10).group(0))

    def write(self, number: int) -> None:
        self.number = re.compile(f"a{{{number}}}")


class Bytearray(Value):
    def __init__(self) -> None:
        self.number = bytearray(b"2")

    def read(self) -> Any:
        return int(self.number[0]) - 48

    def write(self, number: int) -> None:
        self.number[0] = 48 + number


class TextKind(str):
    """A str of a class of its own."""


class TextSubclass(Value):
    def __init__(self) -> None:
        self.number = TextKind("ab")

    def read(self) -> Any:
        return len(self.number)

    def write(self, number: int) -> None:
        self.number = TextKind("a" * number)


class FloatKind(float):
    """A float of a class of its own."""


class FloatSubclass(Value):
    def __init__(self) -> None:
        self.number = FloatKind(2)

    def read(self) -> Any:
        return float(self.number)

    def write(self, number: int) -> None:
        self.number = FloatKind(number)
