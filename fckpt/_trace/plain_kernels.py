"""Kernels that torch chooses by how a function runs: a trace contains the kernels of a plain run.

* `torch.linalg.svdvals`, `eigvalsh`, `eigvals`, and the norms of matrices that are computed from these, compute
  singular vectors or eigenvectors too if a gradient may be needed. The values then differ in their last bits. Where a
  trace or a level of torch.func sees the tensors, torch always takes a gradient to be needed.
* The mean of a weighted cross entropy with label smoothing is divided by the sum of the weights of all targets that
  are not ignored. Torch selects these in a plain run; where a trace or a level of torch.func sees the weights, it
  replaces the others by zeros, and the sum is rounded in another order.
* The layers of `nn.LSTM` on a CPU run another kernel of oneDNN if grad mode is off. A plan runs its operations with
  grad mode on.

Seen on torch 2.11 and 2.13: the functions of torch that ask, `mkldnn_rnn_layer`, `isTensorSubclassLike` in
`LossNLL.cpp`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as functional

from fckpt._call.levels import has_forward_mode, is_wrapped, wraps_all
from fckpt._capture.sources import current
from fckpt._trace.formulas import operation
from fckpt._trace.operations import mapped
from fckpt._trace.stand_ins import WAY_OUT
from fckpt.errors import TraceError

__all__ = ["PlainKernels", "decides"]

aten = torch.ops.aten


class PlainKernels:
    """The function of torch that runs in a trace, as far as it decides which kernels a plain run has."""

    def __init__(self) -> None:
        self._vectors: bool | None = None
        """Whether the function computes vectors in a plain run, if no gradient is needed; None if that is not known."""
        self._weights: _Weights | None = None
        """The weights of the cross entropy that runs."""

    @contextlib.contextmanager
    def within(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], wrapped: bool) -> Iterator[None]:
        """Notes that `func` runs in the body; `wrapped` says whether the trace is of a call at a level of torch.func.

        A level that differentiates wraps all tensors, and one that batches wraps those with a batch dimension. A batch
        level runs `torch.linalg.cond` with a norm by name once per element, without wrappers.
        """
        before = self._vectors, self._weights
        found: list[torch.Tensor] = []
        mapped([*args, *kwargs.values()], found.append)
        looped = func is torch.linalg.cond and any(isinstance(v, str) for v in (*args, *kwargs.values()))
        always = wrapped or wraps_all() or (any(map(is_wrapped, found)) and not looped)
        self._vectors = always or not _has_values_only(func, args, kwargs)
        self._weights = _Weights() if func is functional.cross_entropy and not always else None
        try:
            yield
        finally:
            self._vectors, self._weights = before

    def of(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Returns an operation of a trace, and its arguments that have a position, as a plain run has them.

        Raises:
            TraceError: it is not known which operation a plain run has.
        """
        if func is aten.mkldnn_rnn_layer.default:
            return (func if torch.is_grad_enabled() else _lstm_layer.default), args
        if self._weights is not None:
            return self._weights.of(func, args)
        if func not in _SPECTRA or self._vectors or _needs_gradient(args[0]):
            return func, args
        position, default, values = _SPECTRA[func]
        if position is not None and args[position : position + 1] not in ((), (True,)):
            return func, args
        if self._vectors is None:
            if torch._C._current_autograd_node() is not None:  # a derivative formula, which uses the vectors
                return func, args
            raise TraceError(
                f"{current()}: a function here computes {func}, and a plan cannot tell whether it does so without a "
                "plan: torch computes no vectors where a function needs only singular values or eigenvalues, and no "
                f"gradient. Call torch.linalg.svd, eigh, eig, svdvals, eigvalsh or eigvals in its place. {WAY_OUT}"
            )
        return values, args if position is None else (*args, *default[len(args) :])[:position] + (False,)


class _Weights:
    """The weights of targets in a cross entropy, which are gathered, masked, and summed up."""

    def __init__(self) -> None:
        self._gathered = False
        self._ignored: Any = None
        """Which of the targets are ignored, once the weights are masked."""

    def of(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Returns an operation of the cross entropy, and its arguments that have a position, as in a plain run."""
        if func is aten.gather.default:
            self._gathered = True
        elif func is aten.masked_fill_.Scalar and self._gathered:
            self._ignored = args[1]
        elif func is aten.sum.default and self._ignored is not None:
            func, args = _sum_of_others.default, (*args, self._ignored)
            self._gathered, self._ignored = False, None
        return func, args


@operation("sum_of_others(Tensor x, Tensor mask) -> Tensor", lambda x, mask: x.new_empty(()))
def _sum_of_others(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.masked_select(~mask).sum()


def _needs_gradient(tensor: torch.Tensor) -> bool:
    if torch.is_grad_enabled() and tensor.requires_grad:
        return True
    if not has_forward_mode():
        return False
    with torch._C._DisableTorchDispatch():
        return torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None


_TENSOR: Any = torch.Tensor
_SVD = {torch.svd, _TENSOR.svd}
_VALUES = {
    torch.linalg.cond,
    torch.linalg.eigvals,
    torch.linalg.eigvalsh,
    torch.linalg.matrix_norm,
    torch.linalg.matrix_rank,
    torch.linalg.norm,
    torch.linalg.svdvals,
    torch.norm,
    torch.nuclear_norm,
    _TENSOR.norm,
}
"""Functions that need singular values or eigenvalues only."""

_BOTH = {
    torch.linalg.eig,
    torch.linalg.eigh,
    torch.linalg.pinv,
    torch.linalg.svd,
    torch.lobpcg,
    torch.pca_lowrank,
    torch.pinverse,
    torch.svd_lowrank,
    _TENSOR.pinverse,
}
"""Functions that need vectors too."""

_VALUES_BY_NAME = {
    "linalg_cond",
    "linalg_eigvals",
    "linalg_eigvalsh",
    "linalg_matrix_norm",
    "linalg_matrix_rank",
    "linalg_norm",
    "linalg_svdvals",
    "nuclear_norm",
}


def decides(func: Any) -> bool:
    """Whether `func` may run other kernels in a trace than in a plain run."""
    return (
        func is functional.cross_entropy
        or func in _VALUES
        or func in _BOTH
        or func in _SVD
        or isinstance(func, _OPERATIONS)
    )


_OPERATIONS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def _has_values_only(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if isinstance(func, _OPERATIONS):
        name = str(func).removeprefix("aten.").partition(".")[0]
        return name in _VALUES_BY_NAME or (name == "svd" and not _computes_vectors(args, kwargs))
    return func in _VALUES or (func in _SVD and not _computes_vectors(args, kwargs))


def _computes_vectors(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call of `torch.svd` computes vectors."""
    return kwargs.get("compute_uv", args[2] if len(args) > 2 else True)


@operation(
    "eigvals(Tensor x) -> (Tensor, Tensor)",
    lambda x: (x.new_empty(x.shape[:-1], dtype=x.dtype.to_complex()), x.new_empty(0)),
)
def _eigvals(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return aten._linalg_eigvals.default(x), x.new_empty(0)


def _shapes_of_layer(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    return *aten.mkldnn_rnn_layer.default(x, *args)[:3], x.new_empty(0)


@operation(
    "lstm_layer_without_grad(Tensor x, Tensor w0, Tensor w1, Tensor w2, Tensor w3, Tensor hx, Tensor cx, bool reverse, "
    "int[] batch_sizes, int mode, SymInt hidden_size, int num_layers, bool has_biases, bool bidirectional, "
    "bool batch_first, bool train) -> (Tensor, Tensor, Tensor, Tensor)",
    _shapes_of_layer,
)
def _lstm_layer(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return *aten.mkldnn_rnn_layer.default(x, *args)[:3], x.new_empty(0)


_SPECTRA: dict[Any, tuple[int | None, tuple[Any, ...], Any]] = {
    aten._linalg_eigh.default: (2, (None, "L"), aten._linalg_eigh.default),
    aten._linalg_svd.default: (2, (None, False), aten._linalg_svd.default),
    aten.linalg_eig.default: (None, (), _eigvals.default),
}
"""By operation that computes vectors: the position of the argument that says so, the defaults of those before it, and
the operation for values only."""
