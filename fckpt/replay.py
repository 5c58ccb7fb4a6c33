"""One more run of a region's function, which collects what its forward did not keep, and compares it with the forward.

Saved-tensor hooks see the values that autograd saves, in the order of the forward. A value is compared as far as that
is cheap: shape, dtype, how often it was changed in place, and on the CPU some bytes spread over it. Backward gets a
value only while it is what it was when it was saved, as in plain autograd.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

from fckpt import tree
from fckpt.conditions import Again, may_be_statistics, with_attributes
from fckpt.errors import ImpureFunctionError, MutationError, RandomStateError
from fckpt.modules import storage_of
from fckpt.rng import SHARED

if TYPE_CHECKING:
    from fckpt.arguments import Arguments

__all__ = ["FEW", "MANY", "Found", "Inputs", "Replay", "Saved", "as_in_forward", "ends_of", "recompute_mode"]

_autograd = torch._C._autograd
_push, _pop = _autograd._push_saved_tensors_default_hooks, _autograd._pop_saved_tensors_default_hooks


class _Stop(BaseException):
    """Ends a replay that has all it needs. No `Exception`, so that `except Exception` in `fn` lets it by."""


class Inputs:
    """Tells which saved tensors are inputs, parameters, or views of these."""

    __slots__ = ("index", "storages", "tensors")

    def __init__(self, tensors: list[torch.Tensor]):
        self.tensors = tensors
        self.index = {id(t): i for i, t in enumerate(tensors)}
        self.storages: set[int] | None = None

    def kept(self, tensor: torch.Tensor) -> bool:
        """Whether backward has `tensor` at hand without a replay (other than as an input itself)."""
        if tensor.requires_grad and tensor.is_leaf:
            return True
        if not tensor._is_view():
            return False
        base = tensor._base
        if base is not None and base.requires_grad and base.is_leaf:
            return True
        if self.storages is None:
            self.storages = {s for t in self.tensors if (s := storage_of(t))}
        return storage_of(tensor) in self.storages


Ends = list[Any]

FEW, MANY = 16, 512
"""How many words of a value are compared; many where other threads may have drawn from the same generator."""


class Saved(NamedTuple):
    """What is compared of a saved value.

    A saved value that was computed from what requires grad requires grad itself; what does not is a mask or another
    by-product, or the result of the operation that saves it. (Asking for `grad_fn` would give every node of the graph
    a Python object, and torch takes a chain of those down by recursion.)
    """

    shape: torch.Size
    dtype: torch.dtype
    version: int
    words: int
    sample: tuple[int, ...]
    """About so many words of its memory, from its first to its last."""

    @staticmethod
    def of(tensor: torch.Tensor, words: int) -> Saved:
        """Notes what is compared of `tensor`, `words` words of its memory among it."""
        return Saved._make((_shape(tensor), tensor.dtype, tensor._version, words, _sample(tensor, words)))

    def __str__(self) -> str:
        bits = f", beginning with the bytes {_hex(self.sample[0])}" if self.sample else ""
        return (
            f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}, changed in place {self.version} times{bits}"
        )


def _shape(tensor: torch.Tensor) -> torch.Size:
    if tensor.is_nested and tensor.layout is torch.strided:  # has sizes, one for each component
        return torch.Size(tensor._nested_tensor_size().flatten().tolist())
    return tensor.shape


def _hex(word: int) -> str:
    return word.to_bytes(_WORD, sys.byteorder).hex()


_WORD = 8


def _sample(tensor: torch.Tensor, words: int) -> tuple[int, ...]:
    """About `words` words spread over the memory of a value on the CPU, which most impure functions change.

    Spread, because the head of a value may be all zeros (after relu, say). Where other threads may draw from the same
    generator masks are read, too.
    """
    if not (tensor.requires_grad or (words == MANY and tensor.dim() != 1)):  # 1-d: perhaps statistics
        return ()
    if not words or type(tensor) is not torch.Tensor or not tensor.is_cpu:
        return ()
    count = tensor.numel() * tensor.element_size() // _WORD
    if not count or tensor.layout is not torch.strided or not (tensor.is_contiguous() or _is_dense(tensor)):
        return ()
    if is_functorch_wrapped_tensor(tensor) or tensor._is_zerotensor():
        return ()
    address = torch._C._data_address(tensor)
    if not address:  # no memory: a tangent that is zero, say
        return ()
    step = count // words | 1  # odd: an even one would often meet the same columns in every row
    return tuple(_words(count).from_address(address)[::step])


@functools.lru_cache(maxsize=256)
def _words(count: int) -> Any:
    return ctypes.c_uint64 * count


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a permuted tensor fill its memory without gaps."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return reach + 1 == tensor.numel()


class Found(NamedTuple):
    """A value that a replay has computed, and how often it had been changed in place when it was saved."""

    tensor: torch.Tensor
    version: int

    def checked(self) -> torch.Tensor:
        """Returns the value for backward.

        Raises:
            MutationError: a later operation has changed it in place, which plain autograd refuses, too.
        """
        if self.tensor._version != self.version:
            raise overwritten(self.tensor.shape, self.tensor.dtype, self.version, self.tensor._version)
        return self.tensor


def overwritten(shape: Sequence[int], dtype: torch.dtype, then: int, now: int) -> MutationError:
    """The error for a saved value that the function itself overwrote."""
    return MutationError(
        f"a value that backward needs (shape {list(shape)}, {dtype}) was changed in place by a later operation of the "
        f"rematerialised function (version {then} -> {now}). Plain PyTorch refuses its gradient as well: let that "
        "operation return a new tensor (exp for exp_, x + y for x += y)."
    )


class Replay:
    """One more run of a segment's function, which collects what its forward did not keep."""

    __slots__ = (
        "count",
        "expected",
        "found",
        "inputs",
        "may_stop",
        "results",
        "scratch",
        "stopped",
        "threaded",
        "unfilled",
        "words",
    )

    def __init__(
        self,
        expected: list[Saved],
        results: Ends | None,
        *,
        unfilled: set[int],
        may_stop: bool,
        threaded: bool,
    ):
        """Prepares a run.

        Args:
            expected: what the forward saved.
            results: what it returned; None while it still runs.
            unfilled: which saved values an operation may have filled after it saved them.
            may_stop: whether the run may end with the last saved value.
            threaded: whether other threads may have drawn from the same generators.
        """
        self.expected = expected
        self.results = results
        self.found: dict[int, Found] = {}
        self.count = 0
        self.stopped = False
        self.unfilled = unfilled
        self.threaded = threaded
        self.may_stop = may_stop
        self.scratch: frozenset[int] = frozenset()
        self.inputs: Inputs

    def run(
        self,
        again: Again,
        arguments: Arguments,
        tensors: list[torch.Tensor],
        tangents: list[torch.Tensor | None] | None,
    ) -> None:
        with _NOTHING if tangents is None or forward_ad._current_level >= 0 else forward_ad.dual_level():
            if tangents is not None:
                tensors = [_as_dual(t, tangent) for t, tangent in zip(tensors, tangents, strict=True)]
            self.inputs = Inputs(tensors)
            self.scratch = again.scratch
            args, kwargs = arguments.rebuild(tensors, again.statics)
            _push(self.pack, _identity)
            try:
                results = ends_of(again.fn(*args, **kwargs))
            except BaseException:
                # Whatever surfaces after the stop is its echo: TorchScript, for one, rewraps exceptions.
                if not self.stopped:
                    raise
                return
            finally:
                _pop()
        if self.results is not None:
            self._compare(results, self.results)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        inputs = self.inputs
        if id(tensor) in inputs.index or inputs.kept(tensor):
            return tensor
        number = self.count
        self.count += 1
        if number >= len(self.expected):
            return tensor
        saved = Saved.of(tensor, self.expected[number].words)
        if saved != self.expected[number] and not self._is_excused(tensor, number, saved):
            if self.threaded:
                raise RandomStateError(SHARED)
            raise ImpureFunctionError(
                f"saved value {number} of a rematerialised function {_difference(self.expected[number], saved)}: "
                f"{_NOT_PURE}"
            )
        value = tensor.detach()
        self.found[number] = Found(value, saved.version)
        # Autograd saves an operation's inputs before it computes, so the last operation need not run, unless
        # it is to fill what it saved.
        if number == len(self.expected) - 1 and self.may_stop and tensor.requires_grad:
            self.stopped = True
            raise _Stop
        return value

    def _is_excused(self, tensor: torch.Tensor, number: int, now: Saved) -> bool:
        """Whether a difference means nothing: `tensor` is a buffer's copy, yet to be filled, or never wholly filled.

        By-products that nothing differentiates (`ctc_loss` saves one with gaps) are read only to tell whether other
        threads drew from the generator between the draws of this one.
        """
        then = self.expected[number]
        if not (tensor.requires_grad or self.threaded) and now[:3] == then[:3]:
            return True
        base = tensor if tensor._base is None else tensor._base
        return now[:2] == then[:2] and (id(base) in self.scratch or (now[2] == then[2] and number in self.unfilled))

    def _compare(self, results: Ends, then: Ends) -> None:
        if len(results) != len(then):
            what = f"returned {len(then)} leaves in forward and {len(results)}"
            raise ImpureFunctionError(f"a rematerialised function {what} in its recompute: {_NOT_PURE}")
        for i, (before, now) in enumerate(zip(then, results, strict=True)):
            if before != now:
                raise ImpureFunctionError(
                    f"output {i} of a rematerialised function was {_describe_end(before)} in forward and is "
                    f"{_describe_end(now)} in its recompute: {_NOT_PURE}"
                )
        if self.count != len(self.expected):
            what = f"saved {len(self.expected)} values in forward and {self.count}"
            raise ImpureFunctionError(f"a rematerialised function {what} in its recompute: {_NOT_PURE}")


_NOT_PURE = (
    "the function is not pure. Its result must depend on its arguments alone; look for changing globals, counters, "
    "caches, parameters whose requires_grad was switched, or a mode (a TorchDispatchMode, say) around one of the runs."
)


def _difference(then: Saved, now: Saved) -> str:
    if then[:3] == now[:3] and then.sample[:1] == now.sample[:1]:
        a, b = next((a, b) for a, b in zip(then.sample, now.sample, strict=False) if a != b)
        return f"had the bytes {_hex(a)} somewhere in forward and has {_hex(b)} there in its recompute"
    return f"was {then} in forward and is {now} in its recompute"


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def ends_of(result: Any) -> Ends:
    """What the leaves of a result are, in order: (shape, dtype) of a tensor, else the type."""
    leaves = [result] if isinstance(result, torch.Tensor) else tree.flatten(result)[0]
    return [(_shape(x), x.dtype) if isinstance(x, torch.Tensor) else type(x) for x in leaves]


def _describe_end(end: Any) -> str:
    return end.__name__ if isinstance(end, type) else f"{str(end[1]).removeprefix('torch.')}{list(end[0])}"


def as_in_forward(tensor: torch.Tensor, needs_grad: bool) -> torch.Tensor:
    if may_be_statistics(tensor) and not needs_grad:
        return with_attributes(tensor.clone(), tensor)  # for the recompute to write into
    if tensor.requires_grad == needs_grad:
        return tensor
    return with_attributes(tensor.detach().requires_grad_(needs_grad), tensor)


def _as_dual(tensor: torch.Tensor, tangent: torch.Tensor | None) -> torch.Tensor:
    if tangent is None:
        return tensor
    return forward_ad.make_dual(forward_ad.unpack_dual(tensor).primal, tangent)


class recompute_mode:
    """Autograd recording, as in the forward, whatever transform or mode backward is called under."""

    __slots__ = ("disabled", "grad", "legacy", "levels")

    def __enter__(self) -> None:
        self.levels = None
        if torch._C._are_functorch_transforms_active():
            self.levels = temporarily_clear_interpreter_stack()
            self.levels.__enter__()
        # `is_grads_batched` runs backward under the older vmap, which forbids random operations.
        self.legacy = torch._C._ExcludeDispatchKeyGuard(_LEGACY_VMAP)
        self.legacy.__enter__()
        self.disabled = None
        if not _autograd._saved_tensors_hooks_is_enabled():
            self.disabled = _autograd._saved_tensors_hooks_get_disabled_error_message()
            _autograd._saved_tensors_hooks_enable()
        self.grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)

    def __exit__(self, *error: Any) -> None:
        torch._C._set_grad_enabled(self.grad)
        if self.disabled is not None:
            _autograd._saved_tensors_hooks_disable(self.disabled)
        self.legacy.__exit__(*error)
        if self.levels is not None:
            self.levels.__exit__(*error)


_NOTHING = nullcontext()
_VMAP_MODE: Any = torch._C._parse_dispatch_key("VmapMode")
_LEGACY_VMAP = torch._C.DispatchKeySet(_VMAP_MODE)
