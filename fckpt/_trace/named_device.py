"""Tracing for a device that is not here: the operations that a CUDA device runs, recorded on the meta device.

Most functions of torch run the same operations on every device. Some look at the device of their arguments and choose:
attention, batch normalisation, dropout. The stand-ins of such a trace are on the meta device, where torch's autograd
works without CUDA, but in Python their `device` is the named device. During the trace, and for its stand-ins only, the
functions that choose are replaced by what torch runs on CUDA. Functions whose operations cannot be known without the
device, such as cuDNN's recurrent networks with their packed weights, raise a `TraceError`.

Source: `aten/src/ATen/native` of torch: `Dropout.cpp`, `Normalization.cpp`, `layer_norm.cpp`, `SoftMax.cpp`,
`WeightNorm.cpp`, `RNN.cpp`, `GridSampler.cpp`, `transformers/attention.cpp`. Seen on torch 2.13: a kernel for
`AutogradMeta` comes before the composite one; `torch.library._scoped_library`.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from fckpt._trace.attention_backends import Attention, backend_of
from fckpt._trace.stand_ins import WAY_OUT, StandIn
from fckpt.errors import ArgumentValueError, FckptError, TraceError

__all__ = ["DevicesMoved", "NamedDevice", "cuda_kernels", "device_named", "fakes_on_cpu", "named_device"]

aten = torch.ops.aten


class NamedDevice(NamedTuple):
    """A device for which a call is planned on another machine."""

    device: torch.device
    capability: tuple[int, int]
    """The compute capability of a CUDA device."""


def device_named(device: torch.device | str) -> torch.device:
    """Returns a device of torch.

    Raises:
        ArgumentValueError: torch has no such device.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentValueError(f"device must be a device of torch, not {device!r}.") from error


def named_device(found: torch.device, capability: tuple[int, int] | None) -> NamedDevice:
    """Returns the device to plan for.

    Args:
        found: a CUDA device, with or without an index.
        capability: its compute capability; None to ask the device if it is here, or else for 8.0.

    Raises:
        ArgumentValueError: the device is of a type whose kernels are not known here.
    """
    if found.type != "cuda":
        raise ArgumentValueError(
            "fckpt can plan for device='cuda' where there is none, and otherwise for the device of the tensors, not "
            f"for device={str(found)!r}: leave device out, and pass tensors that are on the device."
        )
    if capability is None and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(found)
    return NamedDevice(torch.device("cuda", found.index or 0), capability or (8, 0))


def fakes_on_cpu(tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Returns fake CPU tensors to use in place of tensors that are fake or not on the CPU, by id."""
    hidden = [t for t in tensors if isinstance(t, FakeTensor) or t.device.type != "cpu"]
    mode = next((t.fake_mode for t in hidden if isinstance(t, FakeTensor)), None) or FakeTensorMode()
    return {id(t): _fake_on_cpu(t, mode) for t in hidden}


def _fake_on_cpu(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    with mode, torch.no_grad():
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(fake, tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def cuda_kernels(target: NamedDevice) -> Iterator[None]:
    """Makes torch's functions that choose by device choose as on the named device, for its stand-ins, in the body."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, kernel in _CHOSEN.items():
            library.impl(name, _for_stand_ins(_overload(name), kernel, target), "AutogradMeta")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=_NO_AUTOCAST)
            try:
                yield
            except UserWarning as warning:
                raise TraceError(
                    f"torch switches autocast for {target.device.type} off where there is no such device, so a plan "
                    "would not have its casts. Convert the model and its inputs (model.to(torch.bfloat16)), or make "
                    f"the plan on the device. {WAY_OUT}"
                ) from warning
            except RuntimeError as error:
                if isinstance(error, FckptError) or not all(
                    re.search(rf"\b{d}\b", str(error)) for d in ("cpu", "meta")
                ):
                    raise
                raise TraceError(
                    "the function makes a tensor on the CPU and uses it together with tensors on "
                    f"{target.device.type}, which would fail on the device too: make it on the device of the others "
                    f"(device=x.device). Torch says, with meta for {target.device.type}: {str(error).splitlines()[0]}"
                ) from error


_NO_AUTOCAST = "CUDA is not available or torch_xla is imported. Disabling autocast."
"""Torch's warning of an autocast context for a device that is not here, the same in torch 2.11 and 2.13."""


class DevicesMoved(TorchFunctionMode):
    """A mode in which functions that name a device of this kind get the named device, with its index.

    Torch would ask CUDA for the index. In a captured graph, functions that name the CPU, where the call was captured,
    get the named device too.
    """

    def __init__(self, target: NamedDevice, captured: bool, recorder: Any):
        super().__init__()
        self.device, self.recorder = target.device, recorder
        self.kinds = (target.device.type, "cpu") if captured else (target.device.type,)

    def _moved(self, value: Any, named: bool = False) -> Any:
        if named and isinstance(value, str):
            value = torch.device(value)
        is_moved = isinstance(value, torch.device) and value.type in self.kinds
        return self.device if is_moved else value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            func, args, kwargs = torch.Tensor.to, (args[0], self.device), {}
        moves = func is torch.Tensor.to
        kwargs = {k: self._moved(v, k == "device") for k, v in (kwargs or {}).items()}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == self.device:
            return self._constant(func, args, kwargs)
        return func(*[self._moved(value, moves) for value in args], **kwargs)

    def _constant(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Makes a tensor of Python numbers, which the device gets without an operation."""
        if args and isinstance(args[0], torch.Tensor):
            return func(*args, **kwargs)
        del kwargs["device"]
        self.recorder.names_constants = True
        try:
            return func(*args, **kwargs)
        finally:
            self.recorder.names_constants = False


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _for_stand_ins(op: Any, kernel: Callable[..., Any], target: NamedDevice) -> Callable[..., Any]:
    """Returns a kernel that calls `kernel` for stand-ins of the named device, and torch's own for other tensors."""

    def chosen(first: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(first, StandIn) and first.named == target.device:
            found = kernel(target, first, *args, **kwargs)
            if found is not NotImplemented:
                return found
        return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, first, *args, **kwargs)

    return chosen


def _dropout(target: NamedDevice, input: Any, p: float, train: bool) -> Any:
    if train and 0 < p < 1 and input.numel():
        return torch.native_dropout(input, p, train)[0]
    return NotImplemented


_CUDNN_ROWS = {(True, True): 131_070, (True, False): 262_136, (False, True): 880_801, (False, False): 65_535}
"""The largest batch of cuDNN's batch normalisation: by whether there are two dimensions, and whether it trains."""


def _batch_norm(
    target: NamedDevice,
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    if not input.numel():
        return NotImplemented
    statistics = (running_mean is None) + (running_var is None)
    cudnn = bool(
        torch.backends.cudnn.enabled
        and cudnn_enabled
        and weight is not None
        and bias is not None
        and input.dtype is not torch.bfloat16
        and weight.dtype is not torch.bfloat16
        and (input.dtype is not torch.float16 or weight.dtype is torch.float32)
        and (statistics == 0 or (statistics == 2 and training))
        and input.dim() >= 2
        and input.shape[0] <= _CUDNN_ROWS[input.dim() == 2, bool(training)]
        and input.numel() < 2**31 - 1
    )
    if not cudnn:
        return torch.native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)[0]
    last = input.is_contiguous(memory_format=torch.channels_last) and not input.is_contiguous()
    input = input.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    return aten.cudnn_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)[0]


def _attention(
    target: NamedDevice,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    call = Attention(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    backend = backend_of(call, target.capability)
    if backend is SDPBackend.FLASH_ATTENTION:
        width = query.shape[-1]
        scale = width**-0.5 if scale is None else scale
        q, k, v = (functional.pad(t, (0, -width % 8)) if width % 8 else t for t in call.operands)
        out = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
        return aten.slice.Tensor(out, -1, 0, width) if width % 8 else out
    mask = _additive(attn_mask, query.dtype, -65504.0 if backend is SDPBackend.CUDNN_ATTENTION else -torch.inf)
    if backend is SDPBackend.CUDNN_ATTENTION:
        kernel, rest = aten._scaled_dot_product_cudnn_attention, (dropout_p, is_causal, False)
    elif backend is SDPBackend.EFFICIENT_ATTENTION:
        kernel, rest = aten._scaled_dot_product_efficient_attention, (dropout_p, is_causal)
        mask = None if mask is None else _aligned(mask, (*query.shape[:3], key.shape[2]))
    else:
        composed = aten._scaled_dot_product_attention_math
        kwargs = {"scale": scale, "enable_gqa": enable_gqa}
        return composed(query, key, value, mask, dropout_p, is_causal, None, **kwargs)[0]
    return kernel(query, key, value, mask, call.differentiated, *rest, scale=scale)[0]


class _RMSNorm(torch.autograd.Function):
    """CUDA's kernels of the root mean square norm, which torch's dispatcher composes of others on the meta device."""

    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any, shape: list[int], eps: float | None) -> Any:
        result, rstd = _recorded(aten._fused_rms_norm.default, input, shape, weight, eps)
        ctx.save_for_backward(input, weight, rstd)
        ctx.shape = shape
        return result

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]  # torch passes `ctx`
        input, weight, rstd = ctx.saved_tensors
        mask = [bool(needed) for needed in ctx.needs_input_grad[:2]]
        found = _recorded(aten._fused_rms_norm_backward.default, grad, input, ctx.shape, rstd, weight, mask)
        return (*found, None, None)


def _recorded(op: Any, *args: Any) -> Any:
    """Calls an operation below torch's dispatcher: the recorder gets it whole."""
    return op._op_dk(torch._C.DispatchKey.Python, *args)


def _rms_norm(
    target: NamedDevice, input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Any:
    if torch.torch_version.TorchVersion(torch.__version__) < (2, 12):  # its dispatcher cannot leave autograd here
        return _refused("RMS norms, with this version of torch,")(target)
    last = input.dim() in (4, 5) and not input.is_contiguous()
    formats = (torch.channels_last, torch.channels_last_3d)
    if input.is_complex() or (last and input.is_contiguous(memory_format=formats[input.dim() - 4])):
        return NotImplemented
    if weight is not None and weight.dtype is not input.dtype:
        return NotImplemented
    return _RMSNorm.apply(input, weight, list(normalized_shape), eps)


def _additive(mask: Any, dtype: torch.dtype, hidden: float) -> Any:
    """Returns a mask to add to the scores, with `hidden` where a mask of booleans is false."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, aten.scalar_tensor.default(hidden, dtype=dtype, device=mask.device))


def _aligned(mask: Any, shape: tuple[int, ...]) -> Any:
    """Returns a mask of the whole shape, with rows that begin at multiples of 16 elements."""
    if mask.stride(-1) != 1 or any(step % 16 for step in mask.stride()[:-1]):
        last = mask.shape[-1]
        mask = functional.pad(mask, (0, 16 - last % 16))[..., :last]
    return mask.expand(shape)


def _half_to_float(name: str) -> Callable[..., Any]:
    """Returns the kernel of a softmax that reads float16 and returns float32, without a copy of its argument."""

    def kernel(target: NamedDevice, input: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
        if input.dtype is torch.float16 and dtype is torch.float32:
            return getattr(aten, name)(input, dim, True)
        return NotImplemented

    return kernel


def _weight_norm(target: NamedDevice, v: Any, g: Any, dim: int = 0) -> Any:
    if dim in (0, v.dim() - 1):
        return aten._weight_norm_interface(v.contiguous(), g.contiguous(), dim)[0]
    return NotImplemented


def _lstm_cell(
    target: NamedDevice, input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> Any:
    gates = [torch.matmul(input, w_ih.t()), torch.matmul(hx[0], w_hh.t())]
    return aten._thnn_fused_lstm_cell(*gates, hx[1], b_ih, b_hh)[:2]


def _grid_sampler(target: NamedDevice, input: Any, grid: Any, mode: int, padding: int, align_corners: bool) -> Any:
    if input.dim() == 4 and mode == padding == 0 and align_corners:
        return _refused("calls of grid_sample with bilinear interpolation, padding of zeros and align_corners=True")(
            target
        )
    return NotImplemented


def _refused(what: str) -> Callable[..., Any]:
    def kernel(target: NamedDevice, *args: Any, **kwargs: Any) -> Any:
        raise TraceError(
            f"{what} run other operations on {target.device.type} than here, which fckpt cannot trace without the "
            f"device. Make the plan on the device, without device=. {WAY_OUT}"
        )

    return kernel


_RECURRENT = _refused("recurrent networks (nn.LSTM, nn.GRU, nn.RNN, and nn.GRUCell)")
_CHOSEN: dict[str, Callable[..., Any]] = {
    "dropout": _dropout,
    "batch_norm": _batch_norm,
    "rms_norm": _rms_norm,
    "scaled_dot_product_attention": _attention,
    "softmax.int": _half_to_float("_softmax"),
    "log_softmax.int": _half_to_float("_log_softmax"),
    **dict.fromkeys(
        [
            *(f"{kind}.{how}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for how in ("input", "data")),
            "gru_cell",
        ],
        _RECURRENT,
    ),
    **dict.fromkeys(["ctc_loss.IntList", "ctc_loss.Tensor"], _refused("CTC losses")),
    "grid_sampler": _grid_sampler,
    "lstm_cell": _lstm_cell,
    "_weight_norm": _weight_norm,
}
"""The functions that choose by device, with their choice on CUDA. NotImplemented stands for the choice of others."""
