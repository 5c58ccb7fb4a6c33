"""Stand-ins: the tensors of a trace, which have sizes, strides, a device and a storage, but no memory.

A stand-in that outlives its trace, in a cache of the user for example, raises an error when it is used.

Seen on torch 2.11 and 2.13: `torch._C._construct_storage_from_data_pointer`, `torch._C._set_throw_on_mutable_data_ptr`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fckpt._call.modules import is_plain_type
from fckpt._capture.sources import current
from fckpt.errors import TraceError

__all__ = [
    "WAY_OUT",
    "StandIn",
    "as_computed",
    "check_dense",
    "check_operation",
    "prepare_fake_tensors",
    "seems",
    "set_lazy",
    "storage_without_memory",
    "viewing",
]

WAY_OUT = "fckpt.remat without policy and budget takes any function; nothing is traced then."


class StandIn(torch.Tensor):
    """A tensor of a trace: it has no memory, and can only be used during the trace."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # a C function

    named: torch.device | None = None
    """The device that the tensor says it is on, in a trace for a device that is not here; see `named_device`."""

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]  # an attribute in torch's stubs
        return self.named or torch.Tensor.device.__get__(self)

    @property
    def is_cuda(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # an attribute in torch's stubs
        return self.device.type == "cuda"

    @property
    def is_meta(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # an attribute in torch's stubs
        return self.device.type == "meta"

    def get_device(self) -> int:
        return torch.Tensor.get_device(self) if self.named is None else self.named.index

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TraceError(
            f"{func} is given a tensor without data, which a trace has left behind: a function that was traced for a "
            "plan has put the tensor into a cache, a list or an attribute. Clear that place, and return tensors "
            f"instead. {WAY_OUT}"
        )


def seems(stand_in: torch.Tensor, kind: type[torch.Tensor]) -> None:
    """Sets the type of a stand-in to `torch.Tensor` or a parameter, because code may test `type(x) is torch.Tensor`.

    Operations on the stand-in are still dispatched to Python, and raise an error after the trace. A stand-in with a
    named device keeps the type `StandIn`, which holds the name.
    """
    if type(stand_in) is not StandIn or stand_in.named is None:
        stand_in.__class__ = kind


def check_dense(tensor: torch.Tensor) -> None:
    """Raises `TraceError` for a tensor that cannot be traced: sparse, nested, of a subclass, or fake CUDA."""
    kind = type(tensor)
    if kind not in (FakeTensor, StandIn) and not is_plain_type(kind):
        raise TraceError(
            f"a tensor of the class {kind.__qualname__} cannot be traced: budgets and policies support torch.Tensor, "
            "nn.Parameter, and subclasses of nn.Parameter that redefine nothing of torch.Tensor and have no slots. "
            f"{WAY_OUT}"
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested sizes" if tensor.is_nested else f"layout {tensor.layout}"
        raise TraceError(
            f"a {kind.__name__} with {layout} cannot be traced: budgets and policies support dense "
            f"torch.Tensors only. {WAY_OUT}"
        )
    if type(tensor) is FakeTensor and tensor.device.type == "cuda" and not torch.cuda.is_available():
        raise TraceError(
            "fake CUDA tensors cannot be traced on a machine without CUDA (autograd would end the process). To plan "
            'for a GPU, name it: fckpt.plan(fn, *args, device="cuda", costs="H100").'
        )


def check_operation(func: Any) -> None:
    """Raises `TraceError` for an operation that cannot be traced.

    A quantized tensor without data is a float for torch. Operations of `torch.distributed` write what other processes
    send to their arguments.
    """
    name = str(func.name())
    if func.namespace == "c10d":
        raise TraceError(
            f"{current()}: the function communicates with other processes ({name}), which a plan cannot repeat. "
            f"Communicate outside of the function, or use the collectives of fckpt.shard_map (fckpt.psum). {WAY_OUT}"
        )
    if "quantize" in name and "fake_quant" not in name and "dequantize" not in name:
        raise TraceError(
            f"the function makes a quantized tensor ({name}), which cannot be traced: budgets and policies support "
            f"dense torch.Tensors only. Use `torch.fake_quantize_per_tensor_affine`, which rounds floats. {WAY_OUT}"
        )


class _Computed(torch.autograd.Function):
    """Identity that turns a tensor into a non-leaf that requires grad, without recording an operation."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: list[torch.Tensor]) -> torch.Tensor:
        return tensor[0]


_anchor = torch.zeros((), requires_grad=True)


def as_computed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that requires grad and is not a leaf, on the storage of `tensor`."""
    with torch.enable_grad():
        return _Computed.apply(_anchor, [tensor])


@functools.cache
def prepare_fake_tensors() -> None:
    """Enters torch's mode for fake tensors once in the process. On a CUDA build without a device, the first entry
    replaces a table of torch, which ends the process if another thread is running an operation.
    """
    with FakeTensorMode():
        pass


def storage_without_memory(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Returns a storage of this size on a device, without memory."""
    if device.type == "meta":
        return torch.UntypedStorage(nbytes, device="meta")
    return torch._C._construct_storage_from_data_pointer(0, device, nbytes)  # type: ignore[attr-defined]  # without a stub


def viewing(storage: torch.UntypedStorage, fake: torch.Tensor, named: torch.device | None = None) -> torch.Tensor:
    """Returns a tensor on `storage` with the layout of `fake`. If `fake` is on the meta device, the tensor says that it
    is on `named`.
    """
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        tensor = torch.empty(0, dtype=fake.dtype, device=fake.device)
        tensor.set_(storage, int(fake.storage_offset()), tuple(fake.shape), fake.stride())
        tensor = torch.Tensor._make_subclass(StandIn, tensor)
    if named is not None and fake.device.type == "meta":
        tensor.named = named
    else:
        seems(tensor, torch.Tensor)
    set_lazy(tensor, conj=fake.is_conj(), neg=fake.is_neg())
    if fake.device.type != "meta":
        torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor


def set_lazy(tensor: torch.Tensor, *, conj: bool, neg: bool) -> None:
    """Makes a new tensor a lazy conjugate, or a lazy negative, of what its memory holds."""
    if conj:
        torch._C._set_conj(tensor, True)
    if neg:
        torch._C._set_neg(tensor, True)
