"""The kernel that a CUDA device runs for `scaled_dot_product_attention`, by torch's own rules.

Torch tries its fused kernels in an order of preference, and runs the first one whose conditions hold: on dtypes, sizes,
strides, the mask, the generation of the device and the settings of `torch.nn.attention.sdpa_kernel`. Only a build of
torch with CUDA can evaluate these rules, so they are written down here.

Source: `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` of torch, `priority_order` and `can_use_*_attention`.
Look again with each version of torch. Assumed: cuDNN later than 9.15.0, which torch's wheels for CUDA 13 bring; then
torch prefers cuDNN's kernel on compute capability 9.0 and 10.x. `sdpa_kernel(SDPBackend.FLASH_ATTENTION)` chooses
otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend

__all__ = ["Attention", "backend_of"]


class Attention(NamedTuple):
    """The arguments of `scaled_dot_product_attention` that its choice of a kernel depends on."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    grouped: bool
    """Whether several heads of the query may share one head of the key (`enable_gqa`)."""

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value

    @property
    def differentiated(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.operands)


def backend_of(call: Attention, capability: tuple[int, int]) -> SDPBackend:
    """Returns the kernel that torch chooses on a CUDA device of this compute capability."""
    usable = {
        SDPBackend.CUDNN_ATTENTION: _cudnn,
        SDPBackend.FLASH_ATTENTION: _flash,
        SDPBackend.EFFICIENT_ATTENTION: _efficient,
    }
    for backend in _order(capability):
        if backend in usable and usable[backend](call, capability):
            return backend
        if backend is SDPBackend.MATH:
            break
    return SDPBackend.MATH


_DEFAULT = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.CUDNN_ATTENTION,
)


_ANY_DROPOUT = torch.torch_version.TorchVersion(torch.__version__) < (2, 12)
"""Whether cuDNN drops out with any probability, not only multiples of 1/16 (seen on an H100 with torch 2.11)."""


def _order(capability: tuple[int, int]) -> Sequence[SDPBackend]:
    known = {int(b.value): b for b in SDPBackend.__members__.values()}
    order = tuple(known[n] for n in torch._C._get_sdp_priority_order() if n in known)
    fused = tuple(b for b in order if b in _DEFAULT)
    if fused == _DEFAULT and (capability == (9, 0) or capability[0] == 10):
        return (SDPBackend.CUDNN_ATTENTION, *_DEFAULT[:3])
    return order


def _cudnn(call: Attention, capability: tuple[int, int]) -> bool:
    width, last = call.query.shape[-1], call.value.shape[-1]
    return (
        torch._C._get_cudnn_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
        and (8, 0) <= capability <= (12, 1)
        and _is_half(call, capability)
        and _is_dense(call, ignore_singletons=True)
        and _heads_match(call)
        and _mask_fits(call)
        and (_ANY_DROPOUT or call.dropout * 16 == int(call.dropout * 16))
        and max(call.query.shape[:2]) <= 65535
        and max(width, last) <= 128
        and width % 8 == last % 8 == 0
        and call.key.shape[2] != 1
        and not (call.dropout and call.query.shape[2] == 1)
    )


def _flash(call: Attention, capability: tuple[int, int]) -> bool:
    width = call.query.shape[-1]
    small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    wide = call.differentiated and small and not (width <= 192 or (not call.dropout and width > 224))
    return (
        torch._C._get_flash_sdp_enabled()
        and (8, 0) <= capability <= (12, 1)
        and call.mask is None
        and _is_half(call, capability)
        and _is_dense(call, ignore_singletons=True)
        and _heads_match(call)
        and {t.shape[-1] for t in call.operands} == {width}
        and width <= 256
        and not wide
        and not (call.causal and call.query.shape[-2] != call.key.shape[-2])
    )


def _efficient(call: Attention, capability: tuple[int, int]) -> bool:
    query, key, value = call.operands
    half = query.dtype in (torch.float16, torch.bfloat16)
    if query.dtype not in (torch.float16, torch.float32) and not (half and capability >= (8, 0)):
        return False
    cores = capability >= (8, 0) or (capability >= (7, 0) and half)
    aligned = max(4 if capability >= (8, 0) else 1, (128 // (16 if half else 32)) if cores else 1)
    offsets = [t.storage_offset() * t.element_size() % (aligned * t.element_size()) for t in call.operands]
    return (
        torch._C._get_mem_efficient_sdp_enabled()
        and (5, 0) <= capability <= (12, 1)
        and _is_dense(call, ignore_singletons=False)
        and not call.grouped
        and _heads_match(call)
        and len({t.dtype for t in call.operands}) == 1
        and query.shape[-1] == key.shape[-1] > 0
        and query.shape[-1] % aligned == 0 < value.shape[-1]
        and value.shape[-1] % aligned == 0
        and (capability < (8, 0) or not any(offsets))
    )


def _is_half(call: Attention, capability: tuple[int, int]) -> bool:
    allowed = (torch.float16, torch.bfloat16) if capability >= (8, 0) else (torch.float16,)
    return call.query.dtype in allowed and len({t.dtype for t in call.operands}) == 1


def _is_dense(call: Attention, *, ignore_singletons: bool) -> bool:
    """Whether the operands have four dimensions, no empty sequence, and adjacent elements in the last dimension."""
    if any(t.dim() != 4 for t in call.operands) or 0 in (call.query.shape[2], call.key.shape[2]):
        return False
    tensors = [*call.operands, *([] if call.mask is None else [call.mask])]
    return all(t.stride(-1) == 1 or (ignore_singletons and t.shape[-1] == 1) for t in tensors)


def _heads_match(call: Attention) -> bool:
    (batch, heads), key, value = (tuple(t.shape[:2]) for t in call.operands)
    if call.grouped:
        return batch == key[0] == value[0] and key[1] == value[1] and heads % max(1, key[1]) == 0
    return (batch, heads) == key == value


def _mask_fits(call: Attention) -> bool:
    mask = call.mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    whole = (*call.query.shape[:3], call.key.shape[2])
    return all(size in (1, n) for size, n in zip(reversed(mask.shape), reversed(whole), strict=False))
