"""Compilation of a kernel by torch's inductor; all its private names are here.

`compile_fx_inner` is the part of `torch.compile` that compiles a graph of operations, below Dynamo and autograd. Inputs
whose memory a kernel may write over are declared as AOTAutograd declares the donated buffers of a backward graph: in
the tracing context, which a compilation with `is_backward` reads. (torch 2.13; 2.11 has the same names.)
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from fckpt._fuse.kernel import Kernel

__all__ = ["compiled", "has_compiler"]

_SETTINGS = {"size_asserts": False, "compile_threads": 1, "fallback_random": True}
"""Sizes are constants, from the trace. Worker processes would outlive the compilation."""
_EXACT_SETTINGS = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}
"""With these, a Triton kernel rounds as torch's kernels on a GPU: a product and a sum are rounded apart, a quotient is
rounded once, and denormals are not flushed to zero."""


def has_compiler(device: torch.device) -> bool:
    """Whether inductor finds what compiles for a device, a C++ compiler or Triton. Looking for one may take seconds."""
    from torch._inductor import cpp_builder, exc

    if device.type == "cuda":
        return find_spec("triton") is not None
    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return False
    return True


def compiled(kernel: Kernel) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """Returns the compiled kernel: a function of the list of inputs, which it empties.

    The function does not check the inputs: with other layouts than in `Kernel.specs` it would read wild memory.

    Raises:
        Exception: inductor cannot compile the operations.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = FakeTensorMode()
    with mode:
        given = [_empty(kernel, t) for t in kernel.inputs]
        graph = make_fx(functools.partial(_body, kernel), decomposition_table=select_decomp_table())(*given)
    output = next(node for node in graph.graph.nodes if node.op == "output")
    output.meta["user_visible_output_idxs"] = list(range(len(kernel.outputs)))
    output.meta["original_output_strides"] = [kernel.specs[t].stride for t in kernel.outputs]
    context = TracingContext(mode)
    context.fw_metadata = types.SimpleNamespace(bw_donated_idxs=list(kernel.donated))  # type: ignore[assignment]  # the only field it reads
    settings = {**_SETTINGS, **_EXACT_SETTINGS} if kernel.exact else _SETTINGS
    limit = sys.getrecursionlimit()
    try:
        with tracing(context), config.patch(settings):
            made: Any = compile_fx_inner(graph, given, is_backward=True)
    finally:
        sys.setrecursionlimit(limit)  # inductor raises it for good; code that is captured may have read it
    return _with_masks(kernel, made.current_callable)


# A loop that loads or stores bools is 5 to 50 times slower than one that converts bytes to floats and back (inductor of
# torch 2.13 on AVX-512). So masks go in and out as bytes, which are views of the same memory. On a GPU that makes no
# difference.


def _body(kernel: Kernel, *inputs: torch.Tensor) -> list[torch.Tensor]:
    given = [
        t.to(torch.float32) != 0 if kernel.specs[n].dtype is torch.bool else t
        for t, n in zip(inputs, kernel.inputs, strict=True)
    ]
    return [t.to(torch.float32).to(torch.uint8) if t.dtype is torch.bool else t for t in kernel.run(given)]


def _with_masks(kernel: Kernel, run: Callable[..., Any]) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """Returns a function that passes masks to `run` as bytes, and its results that are masks as bools."""
    read, made = (
        [i for i, t in enumerate(tensors) if kernel.specs[t].dtype is torch.bool]
        for tensors in (kernel.inputs, kernel.outputs)
    )
    if not read and not made:
        return run

    def with_masks(given: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        for i in read:
            given[i] = given[i].view(torch.uint8)
        results = list(run(given))
        for i in made:
            results[i] = results[i].view(torch.bool)
        return results

    return with_masks


def _empty(kernel: Kernel, tensor: int) -> torch.Tensor:
    spec = kernel.specs[tensor]
    dtype = torch.uint8 if spec.dtype is torch.bool else spec.dtype
    return torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=spec.device)
