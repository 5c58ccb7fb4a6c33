"""Data on which kernels are tried: usual numbers, tiny numbers, and special values such as NaN."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from fckpt._trace.operations import TensorSpec
from fckpt.cost.calls import extent

__all__ = ["forget", "made_up", "repeated", "same_bits", "special_numbers"]

_MOST = 1_000_003  # random numbers, for each dtype
_APART = 127_031  # places between the first numbers of two tensors...
_SHIFT = 41_017  # ...and of two seeds
_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


def made_up(specs: Sequence[TensorSpec], kind: str, seed: int = 0) -> list[torch.Tensor]:
    """Makes tensors with the given layouts; those that share a storage in the trace share one here.

    Large tensors repeat the same numbers. All tensors take their numbers from one list by dtype, at different places.

    Args:
        specs: the specs of the tensors.
        kind: "usual" for normally distributed numbers; "tiny" for such numbers times 1e-20, so that products are
            denormal or 0; "any" for a mixture with infinities, NaN, zeros, denormals and random bits, and with large
            integers.
        seed: other seeds give other numbers.
    """
    found: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    for place, value in enumerate(dict.fromkeys(s.value for s in specs)):
        kin = [s for s in specs if s.value == value]
        types = {s.dtype for s in kin}
        count = max(s.offset + extent(s) for s in kin)
        for dtype in types:  # a storage that is read as two types (a view of bits) is not shared here
            start = (place * _APART + seed * _SHIFT) % _MOST
            numbers = _numbers(dtype, kind, specs[0].device)
            times = -(-(start + count) // _MOST)
            found[value, dtype] = (numbers if times == 1 else numbers.repeat(times))[start : start + count].clone()
    return [found[s.value, s.dtype].as_strided(s.shape, s.stride, s.offset) for s in specs]


def forget() -> None:
    """Frees the lists of random numbers, which are held for the next kernels otherwise."""
    _numbers.cache_clear()


@functools.lru_cache(16)
def _numbers(dtype: torch.dtype, kind: str, device: torch.device) -> torch.Tensor:
    """Returns `_MOST` numbers, which must not be written to."""
    count = _MOST
    generator = torch.Generator(device).manual_seed(0)
    drawn: dict[str, Any] = {"generator": generator, "device": generator.device}
    if dtype is torch.bool:
        return torch.rand(count, **drawn) < 0.5
    if not dtype.is_floating_point:
        small = torch.randint(0, 8, (count,), **drawn, dtype=dtype)
        if kind != "any":
            return small
        limits = torch.iinfo(dtype)  # the largest int64 are not exact as floats
        large = torch.randint(limits.min, limits.max, (count,), **drawn, dtype=torch.int64).to(dtype)
        return torch.where(torch.rand(count, **drawn) < 0.5, large, small)
    usual = torch.randn(count, **drawn, dtype=torch.float64)
    if kind == "tiny":
        return (usual * 1e-20).to(dtype)
    usual = usual.to(dtype)
    if kind == "usual":
        return usual
    info, bits = torch.finfo(dtype), _BITS[dtype]
    limits = torch.iinfo(bits)
    special = [0.0, -0.0, 1.0, -1.0, 2.0, 0.5, float("inf"), -float("inf"), float("nan"), info.max, info.min, info.tiny]
    special += [info.tiny / 2, -info.tiny / 4, info.smallest_normal * info.eps, info.eps, 1 + info.eps, 3.0, -6.0]
    specials = torch.tensor(special, dtype=torch.float64, device=generator.device).to(dtype)
    any_bits = torch.randint(limits.min, limits.max, (count,), **drawn, dtype=bits).view(dtype)
    chosen = torch.randint(0, 4, (count,), **drawn)
    some = specials[torch.randint(0, len(special), (count,), **drawn)]
    return torch.where(chosen == 0, any_bits, torch.where(chosen == 1, some, usual))


def special_numbers(dtype: torch.dtype) -> list[Any]:
    """Returns numbers on which codes for one operation may differ; those on which they do most often come first."""
    if dtype is torch.bool:
        return [False, True]
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return [0, 1, -1, limits.max, limits.min, 2, 3, -7]
    return [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.0, -1.0, torch.finfo(dtype).tiny / 2]


def repeated(specs: Sequence[TensorSpec], numbers: Sequence[Any]) -> list[torch.Tensor]:
    """Makes tensors with the given layouts that repeat one number each.

    Args:
        specs: the specs of the tensors.
        numbers: by tensor, the number.
    """
    whole = [
        torch.full((s.offset + extent(s),), number, dtype=s.dtype, device=s.device)
        for s, number in zip(specs, numbers, strict=True)
    ]
    return [t.as_strided(s.shape, s.stride, s.offset) for s, t in zip(specs, whole, strict=True)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits; any NaN equals any other, whose bits depend on the order of operands."""
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    bits = _BITS[a.dtype]
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())
