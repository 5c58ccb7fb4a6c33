"""Operations that take what another one wrote in a form of its own, and so are known and measured as pairs.

The backward of an RNN reads the workspace of its forward, that of attention a generator's state, that of an embedding
bag the offsets of its bags. Made-up contents there end the process, or read memory that is not theirs.
"""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fckpt._trace.operations import Call, Ref, TensorSpec, Trace
from fckpt.cost.calls import named, signature

__all__ = ["code_of", "makers_of", "opaque_operands", "paired_signature", "workspace_maker"]

_OPAQUE = {
    "workspace", "reserve", "reserveSpace", "reservedSpace", "rng_state", "philox_seed", "philox_offset", "cum_seq_q",
    "cum_seq_k", "offset2bag", "bag_size", "maximum_indices",
}  # fmt: skip
"""Names, in the schemas of operations, of tensors whose contents only the operation that made them knows."""


def opaque_operands(call: Call) -> list[int]:
    """Returns the tensors that a call takes and another operation wrote in a form of its own."""
    given = named(call)
    return [given[name].tensor for name in sorted(_OPAQUE.intersection(given)) if isinstance(given[name], Ref)]


def makers_of(trace: Trace) -> dict[int, Call]:
    """Returns the call that computes each tensor of a trace; not that of a view."""
    return {t: call for call in trace.calls if call.node is not None for t in call.outputs if t is not None}


def workspace_maker(call: Call, makers: Mapping[int, Call]) -> Call | None:
    """Returns the operation whose workspace a call takes; None if it takes none, or not from one known operation."""
    opaque = opaque_operands(call)
    found = {id(maker): maker for t in opaque if (maker := makers.get(t)) is not None}
    return next(iter(found.values())) if len(found) == 1 and all(t in makers for t in opaque) else None


def paired_signature(call: Call, specs: Sequence[TensorSpec], maker: Call | None) -> str:
    """Writes the signature of a call, and of the one whose workspace it takes."""
    return signature(call, specs) + (f" after {signature(maker, specs)}" if maker is not None else "")


def code_of(op: Any) -> str:
    """Returns what tells apart two functions of one name: a hash of their code. Torch's operations need none."""
    if isinstance(op, torch._ops.OpOverload):
        return ""
    code = getattr(op, "__code__", None) or getattr(type(op).__call__, "__code__", None)
    return "" if code is None else f" as {hashlib.sha256(marshal.dumps(code)).hexdigest()[:16]}"
