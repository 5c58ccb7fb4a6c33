"""Operations that read the opaque output of another operation, and so are identified and measured as pairs.

The backward of an RNN reads the workspace of its forward, the backward of attention reads a generator's state, and the
backward of an embedding bag reads the offsets of the bags. Synthetic contents of such tensors could crash the process,
or make a kernel read out of bounds.
"""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fckpt._trace.operations import OPAQUE, Call, Ref, TensorSpec
from fckpt.cost.calls import named, signature

__all__ = ["code_of", "makers_of", "opaque_operands", "paired_signature", "workspace_maker"]


def opaque_operands(call: Call) -> list[int]:
    """Returns the opaque tensors that a call reads."""
    given = named(call)
    return [given[name].tensor for name in sorted(OPAQUE.intersection(given)) if isinstance(given[name], Ref)]


def makers_of(calls: Sequence[Call]) -> dict[int, Call]:
    """Returns, by tensor, the call that computes it. Views are not included."""
    return {t: call for call in calls if call.node is not None for t in call.outputs if t is not None}


def workspace_maker(call: Call, makers: Mapping[int, Call]) -> Call | None:
    """Returns the single operation that made all opaque tensors of a call; None if there is no such operation."""
    opaque = opaque_operands(call)
    found = {id(maker): maker for t in opaque if (maker := makers.get(t)) is not None}
    return next(iter(found.values())) if len(found) == 1 and all(t in makers for t in opaque) else None


def paired_signature(call: Call, specs: Sequence[TensorSpec], maker: Call | None) -> str:
    """Formats the signature of a call, followed by the signature of the operation whose workspace it reads."""
    return signature(call, specs) + (f" after {signature(maker, specs)}" if maker is not None else "")


def code_of(op: Any) -> str:
    """Returns a hash of the code of a function, which distinguishes functions with one name; empty for torch's."""
    if isinstance(op, torch._ops.OpOverload):
        return ""
    code = getattr(op, "__code__", None) or getattr(type(op).__call__, "__code__", None)
    return "" if code is None else f" as {hashlib.sha256(marshal.dumps(code)).hexdigest()[:16]}"
