"""The memory of operands, from which operations can read while they are measured, as long as the operands live."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fckpt._call.levels import is_wrapped, out_of_reach
from fckpt._call.modules import is_plain_type

__all__ = ["Memory", "memory_of"]

Memory = Callable[[], torch.Tensor | None]
"""Returns a view of the memory of an operand; None if it no longer exists, or is not to be read."""


def memory_of(tensor: torch.Tensor) -> Memory:
    """Returns the memory of a plain floating point tensor. Integer tensors are synthesised, for reproducible costs.

    A weak reference to the tensor itself would keep `torch.utils.swap_tensors` from exchanging parameters, which
    `module.double()` and `load_state_dict` do under `torch.__future__.set_swap_module_params_on_conversion(True)`.
    """
    plain = is_plain_type(type(tensor)) and not is_wrapped(tensor)
    if not (plain and tensor.is_floating_point() and tensor.layout is torch.strided) or tensor.is_neg():
        return lambda: None
    storage = StorageWeakRef(tensor.untyped_storage())
    layout = tensor.storage_offset(), tensor.shape, tensor.stride()
    dtype = tensor.dtype

    def view() -> torch.Tensor | None:
        found = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
        if found is None:
            return None
        with out_of_reach(), torch.no_grad():
            return torch.empty(0, dtype=dtype, device=found.device).set_(found, *layout)

    return view
