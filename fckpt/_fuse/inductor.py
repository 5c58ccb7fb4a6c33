"""Compilation of a kernel by torch's inductor; all its private names are here.

`compile_fx_inner` is the part of `torch.compile` that compiles a graph of operations, below Dynamo and autograd. Inputs
whose memory a kernel may write over are declared as AOTAutograd declares the donated buffers of a backward graph: in
the tracing context, which a compilation with `is_backward` reads. (torch 2.13; 2.11 has the same names.)
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from importlib.util import find_spec
from typing import Any

import torch

from fckpt._fuse.kernel import Kernel

__all__ = ["Run", "compilation", "has_compiler"]

Run = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""A compiled kernel: a function of the list of inputs, which it empties."""

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


def compilation(kernel: Kernel, workers: Executor | None = None) -> Callable[[], Run]:
    """Begins to compile a kernel.

    Args:
        kernel: the kernel.
        workers: threads that wait for the C++ compiler, so that several kernels are compiled at once; None to compile
            now.

    Returns:
        A function that waits for the compiler, and returns the compiled kernel: a function of the list of inputs, which
        it empties. The compiled kernel does not check the inputs: with other layouts than in `Kernel.specs` it would
        read wild memory.

    Raises:
        Exception: inductor cannot compile the operations. The returned function raises the errors of the compiler.
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
        with tracing(context), config.patch(settings), _built_by(workers):
            made: Any = compile_fx_inner(graph, given, is_backward=True)
    finally:
        sys.setrecursionlimit(limit)  # inductor raises it for good; code that is captured may have read it
    run = made.current_callable

    def finished() -> Run:
        _wait_for_loops(run)
        return _with_masks(kernel, run)

    return finished


class _Loop:
    """A loop of a kernel, which is a C++ function, while the compiler works on it."""

    def __init__(self, wait: Callable[[], Callable[..., None]]):
        self.wait = wait

    def __call__(self, *args: Any) -> None:
        self.wait()(*args)


@contextlib.contextmanager
def _built_by(workers: Executor | None) -> Iterator[None]:
    """Lets worker threads wait for the C++ compiler in the body.

    With `compile_threads`, inductor waits at the end of each kernel for all loops of that kernel.
    """
    if workers is None:
        yield
        return
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    def cpp_pybinding(_: Any, argtypes: list[str], source: str) -> _Loop:
        return _Loop(CppPythonBindingsCodeCache.load_pybinding_async(argtypes, source, submit_fn=workers.submit))

    own = AsyncCompile.cpp_pybinding
    AsyncCompile.cpp_pybinding = cpp_pybinding
    try:
        yield
    finally:
        AsyncCompile.cpp_pybinding = own


def _wait_for_loops(run: Any) -> None:
    """Waits for the loops of a kernel, and puts the C++ functions in their place."""
    scope = getattr(run, "__func__", run).__globals__
    for name, loop in list(scope.items()):
        if isinstance(loop, _Loop):
            scope[name] = loop.wait()


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
