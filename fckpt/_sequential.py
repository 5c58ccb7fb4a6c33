"""`sequential`: a chain of functions or modules, rematerialised segment by segment."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

from torch import nn

from fckpt._remat import remat
from fckpt.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["segment_lengths", "sequential"]

Segments = int | Sequence[int] | Literal["sqrt"]


@overload
def sequential(
    fns: nn.Sequential | Sequence[nn.Module], segments: Segments = ..., *, remat_last: bool = ...
) -> nn.Sequential: ...
@overload
def sequential(
    fns: Sequence[Callable[[Any, Any], Any]], segments: Segments = ..., *, remat_last: bool = ...
) -> Callable[[Sequence[Any], Any], Any]: ...


def sequential(fns: Any, segments: Segments = "sqrt", *, remat_last: bool = False) -> Any:
    """Composes `fns` into a chain that is rematerialised in segments: only the value between two segments is saved.

    Like `torch.utils.checkpoint.checkpoint_sequential`, but also for pure functions, and with segments of any lengths.

    Args:
        fns: functions `fn(params, x) -> x`, or modules (a list or an `nn.Sequential`).
        segments: the number of segments, of lengths as equal as possible (longer ones first); or the length of each,
            with sum `len(fns)`; or "sqrt", about the square root of `len(fns)` segments.
        remat_last: whether the last segment is rematerialised, too. Its backward runs first, right after its forward,
            so this saves memory only if another computation follows the chain.

    Returns:
        For functions, `apply(params_list, x)`, with one entry of `params_list` per function. For modules, an
        `nn.Sequential` of the same modules, with the same `state_dict` keys. If `fns` is an `nn.Sequential`, the two
        share the modules: one that is replaced in either is replaced in both, and `train()` and `eval()` of either
        reach all of them (but not the flag `training` of the other chain itself). A list is taken as it is now.

    Raises:
        ArgumentTypeError: `fns` is empty, contains both modules and functions, or contains anything else.
        ArgumentValueError: `segments` does not fit `fns`; when called: `params_list` does not fit `fns`.

    Example:
        >>> import torch, fckpt
        >>> layers = [lambda w, x: torch.tanh(x @ w)] * 6
        >>> params = [torch.eye(3) for _ in layers]
        >>> fckpt.sequential(layers, segments=(2, 3, 1))(params, torch.zeros(1, 3))
        tensor([[0., 0., 0.]])

    References:
        T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training deep nets with sublinear memory cost" (2016),
        https://arxiv.org/abs/1604.06174, section 4.3, for sqrt(n) segments.
    """
    links = list(fns._modules.values()) if isinstance(fns, nn.Sequential) else list(fns)
    modules = [isinstance(link, nn.Module) for link in links]
    if not links or not all(callable(link) for link in links) or any(modules) != all(modules):
        kinds = ", ".join(sorted({type(link).__name__ for link in links})) or "nothing"
        raise ArgumentTypeError(f"sequential takes functions or modules, at least one and not both; got {kinds}.")
    lengths = segment_lengths(len(links), segments)
    if modules[0]:
        return _SequentialModule(fns if isinstance(fns, nn.Sequential) else nn.Sequential(*links), lengths, remat_last)
    return _chain(links, lengths, remat_last)


def segment_lengths(count: int, segments: Segments) -> tuple[int, ...]:
    """Returns the length of each segment of a chain of `count` links; see `sequential`."""
    if segments == "sqrt":
        segments = max(1, round(math.sqrt(count)))
    if isinstance(segments, (bool, str)):
        raise ArgumentTypeError(f'segments must be an int, a tuple of lengths or "sqrt", not {segments!r}.')
    if isinstance(segments, int):
        if not 1 <= segments <= count:
            raise ArgumentValueError(f"segments={segments} does not fit a chain of {count}: 1 <= segments <= {count}.")
        return tuple(count // segments + (i < count % segments) for i in range(segments))
    lengths = tuple(segments)
    if not all(isinstance(n, int) and n > 0 for n in lengths):
        raise ArgumentTypeError(f"segments={lengths!r} must hold positive ints, the length of each segment.")
    if sum(lengths) != count:
        raise ArgumentValueError(f"segments={lengths} sum to {sum(lengths)}, but the chain has {count} links.")
    return lengths


def _chain(
    fns: list[Callable[[Any, Any], Any]], lengths: tuple[int, ...], remat_last: bool
) -> Callable[[Sequence[Any], Any], Any]:
    segments = []
    start = 0
    for i, length in enumerate(lengths):
        segment = _segment(fns[start : start + length])
        last = i == len(lengths) - 1
        segments.append((slice(start, start + length), segment if last and not remat_last else remat(segment)))
        start += length

    def apply(params_list: Sequence[Any], x: Any) -> Any:
        if len(params_list) != len(fns):
            raise ArgumentValueError(f"got parameters for {len(params_list)} functions; the chain has {len(fns)}.")
        for part, segment in segments:
            x = segment(params_list[part], x)
        return x

    return apply


def _segment(fns: list[Callable[[Any, Any], Any]]) -> Callable[[Sequence[Any], Any], Any]:
    def segment(params_list: Sequence[Any], x: Any) -> Any:
        for fn, params in zip(fns, params_list, strict=True):
            x = fn(params, x)
        return x

    return segment


class _SequentialModule(nn.Sequential):
    """An `nn.Sequential` whose segments are rematerialised."""

    def __init__(self, chain: nn.Sequential, lengths: tuple[int, ...], remat_last: bool):
        super().__init__()
        self._modules = chain._modules  # the same dict, so that a module that is replaced is replaced in both
        self.training = chain.training
        self.lengths = lengths
        self.remat_last = remat_last
        # In a list, which torch does not treat as submodules, so that the names of the modules do not change.
        self._segments: list[nn.Module] = []
        self._segmented: list[nn.Module] = []

    def forward(self, input: Any) -> Any:
        modules = list(self._modules.values())
        if len(modules) != len(self._segmented) or any(
            a is not b for a, b in zip(modules, self._segmented, strict=True)
        ):
            self._split(modules)
        for segment in self._segments:
            input = segment(input)
        return input

    def _split(self, modules: list[Any]) -> None:
        if len(modules) != sum(self.lengths):
            raise ArgumentValueError(
                f"this chain was split into segments of {self.lengths} and now has {len(modules)} modules: make a "
                "new one with fckpt.sequential."
            )
        self._segmented, self._segments = modules, []
        start = 0
        for i, length in enumerate(self.lengths):
            segment = nn.Sequential(*modules[start : start + length])
            last = i == len(self.lengths) - 1
            self._segments.append(segment if last and not self.remat_last else remat(segment))
            start += length
