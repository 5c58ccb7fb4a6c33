"""Functions of torch in a trace with symbolic sizes, where torch's own code needs sizes that are numbers.

They run the operations that torch runs for numbers; a trace with symbols is compared with traces for fixed sizes
(`sized.py`). Seen on torch 2.11 and 2.13: what indexing, `torch.lstm` and `F.interpolate` do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fckpt._capture.classes import original_of

__all__ = ["SymbolicFunctions"]

aten = torch.ops.aten


class SymbolicFunctions(TorchFunctionMode):
    """A mode in which these functions take symbolic sizes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = original_of(func)
        run: Any = _FUNCTIONS.get(func, func)
        return run(*args, **(kwargs or {}))


# -- indexing: a full slice is no operation


def _item(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    return tensor[_ending(tensor, index)]


def _ending(tensor: torch.Tensor, index: Any) -> Any:
    """Returns an index in which full slices end at the size of their dimension."""
    parts = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(part, slice) for part in parts):
        return index
    taken = [_dims_of(part) for part in parts]
    dim, ended = 0, []
    for part, count in zip(parts, taken, strict=True):
        if part is ...:
            count = tensor.dim() - sum(taken)
        full = isinstance(part, slice) and (part.start or 0, part.stop, part.step or 1) == (0, None, 1)
        ended.append(slice(0, tensor.shape[dim]) if full else part)
        dim += count
    return tuple(ended) if isinstance(index, tuple) else ended[0]


def _dims_of(part: Any) -> int:
    """Returns the number of dimensions that a part of an index takes, except an ellipsis."""
    if isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8):
        return part.dim()
    return 0 if part is None or part is ... or isinstance(part, bool) else 1


# -- nn.LSTM: one operation per layer and direction, as on a CPU with oneDNN. Without oneDNN (other devices and dtypes,
# nn.GRU, nn.RNN), the steps of a sequence are operations of their own, and a trace is valid for one length only.

_KIND = 2
"""oneDNN's number for this kind of network."""


def _lstm(
    x: torch.Tensor,
    state: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Does what `torch.lstm` does with oneDNN; see `nn.LSTM`.

    Args:
        x: the sequences.
        state: the hidden states and the cell states of all layers and directions.
        weights: the weights and biases of all layers and directions.
        has_biases: whether there are biases.
        layers: the number of layers.
        dropout: the probability of dropout between layers.
        train: whether there is dropout.
        bidirectional: whether each layer runs in both directions.
        batch_first: whether the first dimension of `x` is that of the batch.

    Returns:
        the outputs, the last hidden states, and the last cell states.
    """
    x = (x.transpose(0, 1) if batch_first else x).contiguous()
    hidden, cell = (t.contiguous() for t in state)
    directions, per_layer = 1 + bidirectional, 4 if has_biases else 2
    hiddens: list[torch.Tensor] = []
    cells: list[torch.Tensor] = []
    for layer in range(layers):
        outputs: list[torch.Tensor] = []
        for direction in range(directions):
            i = len(hiddens)
            own, states = weights[i * per_layer : (i + 1) * per_layer], (hidden.select(0, i), cell.select(0, i))
            biases = own[2:] if has_biases else [*map(_zeros, own[::-1])][::-1]  # the last first, as a compiler does
            output, last_hidden, last_cell, _ = torch.ops.aten.mkldnn_rnn_layer.default(
                x, *own[:2], *biases, *states, direction > 0, [], _KIND, hidden.shape[2], layers, has_biases,
                bidirectional, batch_first, train,
            )  # fmt: skip
            outputs.append(output)
            hiddens.append(last_hidden)
            cells.append(last_cell)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    return x.transpose(0, 1) if batch_first else x, torch.stack(hiddens), torch.stack(cells)


def _zeros(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.zeros.default(
        list(weight.shape), dtype=weight.dtype, layout=torch.strided, device=weight.device
    )


# -- F.interpolate


def _interpolate(
    x: torch.Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> torch.Tensor:
    resized = _RESIZED.get((mode, x.dim() - 2, antialias))
    if resized is None or (size is None) == (scale_factor is None):
        return F.interpolate(x, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    given = scale_factor if size is None else size
    each = given if isinstance(given, (list, tuple)) else [given] * (x.dim() - 2)
    scales = [None] * len(each) if size is not None or recompute_scale_factor else each
    new = each if size is not None else [_scaled(old, scale) for old, scale in zip(x.shape[2:], each, strict=True)]
    corners = () if mode.startswith("nearest") else (bool(align_corners),)
    return resized(x, new, *corners, *scales)


def _scaled(size: Any, scale: float) -> Any:
    return size * int(scale) if scale == int(scale) else torch.sym_int(size * scale)


_RESIZED: dict[tuple[str, int, bool], Callable[..., torch.Tensor]] = {
    ("nearest", 1, False): aten.upsample_nearest1d.default,
    ("nearest", 2, False): aten.upsample_nearest2d.default,
    ("nearest", 3, False): aten.upsample_nearest3d.default,
    ("nearest-exact", 1, False): aten._upsample_nearest_exact1d.default,
    ("nearest-exact", 2, False): aten._upsample_nearest_exact2d.default,
    ("nearest-exact", 3, False): aten._upsample_nearest_exact3d.default,
    ("linear", 1, False): aten.upsample_linear1d.default,
    ("bilinear", 2, False): aten.upsample_bilinear2d.default,
    ("bilinear", 2, True): aten._upsample_bilinear2d_aa.default,
    ("bicubic", 2, False): aten.upsample_bicubic2d.default,
    ("bicubic", 2, True): aten._upsample_bicubic2d_aa.default,
    ("trilinear", 3, False): aten.upsample_trilinear3d.default,
}
"""By mode, number of dimensions that are resized, and antialiasing."""

_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.__getitem__: _item,
    torch._VF.lstm: _lstm,
    F.interpolate: _interpolate,
}
