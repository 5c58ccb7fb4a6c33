"""Whether torch's kernel of an operation gives a result the same bits at every place of a tensor.

A kernel of torch on a CPU runs vector instructions, and other code for the last elements. For special numbers the two
may differ: of -0.0 and 0.0, `maximum` takes the second in one, and the first in the other. A compiled kernel cannot
have the bits of both.
"""

from __future__ import annotations

import itertools

from fckpt._call.levels import below_autograd
from fckpt._fuse.data import repeated, same_bits, special_numbers
from fckpt._fuse.kernel import Kernel
from fckpt._trace.operations import Call, TensorSpec, tensors_of

__all__ = ["is_uniform"]

_ELEMENTS = 131
"""A vector loop of torch takes at most 128 elements (of one byte) at once, so the last three are left over."""
_known: dict[str, bool] = {}


def is_uniform(call: Call, specs: tuple[TensorSpec, ...]) -> bool:
    """Whether an elementwise operation gives the same result for the same numbers at all places.

    It runs on small tensors that repeat one number each, for all combinations of special numbers. That takes
    milliseconds, once per process for each operation with its types and its arguments that are no tensors.

    Args:
        call: the operation.
        specs: the specs of the tensors, by number.
    """
    read = list(dict.fromkeys(tensors_of(call)))
    made = [t for t in call.outputs if t is not None]
    small = {t: _small(specs[t], t) for t in (*read, *made)}
    kernel = Kernel.numbered([call], small, read, made, (), [None], exact=True)
    if kernel.signature not in _known:
        with below_autograd():
            _known[kernel.signature] = _is_uniform(kernel)
    return _known[kernel.signature]


def _small(spec: TensorSpec, value: int) -> TensorSpec:
    whole = bool(spec.shape)  # a tensor without dimensions stays one: it is a number for most operations
    return TensorSpec((_ELEMENTS,) * whole, (1,) * whole, spec.dtype, spec.device, value)


def _is_uniform(kernel: Kernel) -> bool:
    inputs = [kernel.specs[t] for t in kernel.inputs]
    for numbers in itertools.product(*[special_numbers(s.dtype) for s in inputs]):
        try:
            made = kernel.run(repeated(inputs, numbers))
        except RuntimeError:  # torch refuses some numbers: it is not known what the others give
            return False
        if not all(same_bits(t, t.flatten()[0].expand_as(t).contiguous()) for t in made):
            return False
    return True
