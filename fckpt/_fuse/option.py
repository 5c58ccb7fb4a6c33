"""The option `kernels`: which kernels run a plan."""

from __future__ import annotations

from typing import Any, Literal

from fckpt.errors import ArgumentValueError

__all__ = ["Kernels", "check_kernels"]

Kernels = Literal["aten", "exact", "fused"]


def check_kernels(kernels: Any, *, planned: bool) -> Kernels:
    """Returns the option `kernels` if it is valid.

    Args:
        kernels: the option.
        planned: whether there is a plan, which compiled kernels need.

    Raises:
        ArgumentValueError: it is not "aten", "exact" or "fused", or there is no plan to run with compiled kernels.
    """
    if kernels not in ("aten", "exact", "fused"):
        raise ArgumentValueError(f'kernels must be "aten", "exact" or "fused", not {kernels!r}.')
    if kernels != "aten" and not planned:
        raise ArgumentValueError(
            f"kernels={kernels!r} needs a plan to compile kernels for: pass budget=... or policy=..."
        )
    return kernels
