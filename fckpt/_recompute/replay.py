"""A replay: a second run of a region's function, which collects the values that the forward did not save.

Saved-tensor hooks see the values that autograd saves, in the same order as in the forward. Each value is compared with
the forward as far as that is cheap: shape, dtype, number of in-place changes, and on the CPU some bytes spread over its
memory. As in plain autograd, the backward pass receives a value only if it has not changed since it was saved.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import forward_ad

from fckpt import _tree as tree
from fckpt._call.conditions import Again, Versions, may_be_statistics, with_attributes
from fckpt._call.contents import WORD, is_dense, words_in
from fckpt._call.levels import EXCLUDE_LEGACY_VMAP, below_all, is_wrapped, transforms_active
from fckpt._call.modules import storage_of
from fckpt._recompute.saved_tensors import allow_hooks, disallow_hooks, pop, push
from fckpt.errors import ImpureFunctionError, MutationError, RandomStateError, region_name

if TYPE_CHECKING:
    from fckpt._call.arguments import Arguments

__all__ = ["FEW", "MANY", "Found", "Inputs", "Replay", "Saved", "as_in_forward", "leaf_kinds_of", "recompute_mode"]


class _Stop(BaseException):
    """Ends a replay that has collected everything. A BaseException, so that `except Exception` in `fn` does not catch
    it.
    """


class Inputs:
    """The input tensors of a region, and whether a saved tensor is an input, a parameter, or a view of one."""

    __slots__ = ("index", "storages", "tensors")

    def __init__(self, tensors: list[torch.Tensor]):
        self.tensors = tensors
        self.index = {id(t): i for i, t in enumerate(tensors)}
        self.storages: set[int] | None = None

    def provides(self, tensor: torch.Tensor) -> bool:
        """Whether the backward pass has `tensor` without a replay, because it is a parameter or a view of one or of an
        input.
        """
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


LeafKinds = list[Any]
"""For each leaf of a result, in order: (shape, dtype) of a tensor, otherwise its type."""

FEW, MANY = 16, 512
"""Words of a value that are compared; MANY if other threads may have drawn from the same generator."""


class Saved(NamedTuple):
    """The properties of a saved value that are compared.

    A saved value that was computed from a tensor that requires grad also requires grad. A saved value that does not is
    a mask or another by-product, or the result of the operation that saves it. (Reading `grad_fn` would give every node
    of the graph a Python object, and torch frees a chain of such nodes by recursion.)
    """

    shape: torch.Size
    dtype: torch.dtype
    version: int
    words: int
    sample: tuple[int, ...]
    """About that many words of its memory, from the first to the last."""

    @staticmethod
    def of(tensor: torch.Tensor, words: int) -> Saved:
        """Reads the properties of `tensor`, with `words` words of its memory."""
        return Saved._make((_shape(tensor), tensor.dtype, tensor._version, words, _sample(tensor, words)))

    def described(self, *, with_version: bool) -> str:
        """Describes the value in an error message; its version matters only if it differs between the runs."""
        version = f", changed in place {self.version} times" if with_version else ""
        bits = f", beginning with the bytes {_hex(self.sample[0])}" if self.sample else ""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{version}{bits}"


def _shape(tensor: torch.Tensor) -> torch.Size:
    if tensor.is_nested and tensor.layout is torch.strided:  # has one size per component
        return torch.Size(tensor._nested_tensor_size().flatten().tolist())
    return tensor.shape


def _hex(word: int) -> str:
    return word.to_bytes(WORD, sys.byteorder).hex()


def _sample(tensor: torch.Tensor, words: int) -> tuple[int, ...]:
    """Returns about `words` words spread over the memory of a value on the CPU, which most impure functions change.

    If other threads may draw from the same generator, masks are read as well.
    """
    if not (tensor.requires_grad or (words == MANY and tensor.dim() != 1)):  # 1-d: possibly statistics
        return ()
    if not words or type(tensor) is not torch.Tensor or not tensor.is_cpu:
        return ()
    count = tensor.numel() * tensor.element_size() // WORD
    if not count or tensor.layout is not torch.strided:
        return ()
    if not (tensor.is_contiguous() or is_dense(tensor.shape, tensor.stride())):
        return ()
    if is_wrapped(tensor) or tensor._is_zerotensor():
        return ()
    address = torch._C._data_address(tensor)  # 0 if there is no memory: a zero tangent, for example
    return words_in(address, count, words) if address else ()


class Found(NamedTuple):
    """A value that a replay has computed, and its version when it was saved."""

    tensor: torch.Tensor
    version: int

    def checked(self, fn: Any) -> torch.Tensor:
        """Returns the value for the backward pass of `fn`.

        Raises:
            MutationError: a later operation has changed the value in place, which plain autograd rejects, too.
        """
        if self.tensor._version != self.version:
            raise overwritten(fn, self.tensor.shape, self.tensor.dtype, self.version, self.tensor._version)
        return self.tensor


def overwritten(fn: Any, shape: Sequence[int], dtype: torch.dtype, then: int, now: int) -> MutationError:
    """Returns the error for a saved value that the function `fn` itself overwrote."""
    return MutationError(
        f"a value that backward needs (shape {list(shape)}, {dtype}) was changed in place by a later operation of "
        f"{region_name(fn)} (version {then} -> {now}). Plain PyTorch raises an error for it as well: use an operation "
        "that returns a new tensor (exp for exp_, x + y for x += y)."
    )


class Replay:
    """A second run of a segment's function, which collects the values that its forward did not save."""

    __slots__ = (
        "count",
        "expected",
        "fn",
        "found",
        "inputs",
        "may_stop",
        "results",
        "scratch",
        "stopped",
        "threaded",
        "unfilled",
        "versions",
    )

    def __init__(
        self,
        expected: list[Saved],
        results: LeafKinds | None,
        *,
        unfilled: set[int],
        may_stop: bool,
        threaded: bool,
    ):
        """Prepares a replay.

        Args:
            expected: the values that the forward saved.
            results: the kinds of the leaves that the forward returned; None while the forward still runs.
            unfilled: the saved values that an operation may have filled after saving them.
            may_stop: whether the replay may end with the last saved value.
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
        self.versions: Versions = {}
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
            self.fn = again.fn
            self.scratch, self.versions = again.scratch, again.versions
            args, kwargs = arguments.rebuild(tensors, again.statics)
            push(self.pack, _identity)
            try:
                results = leaf_kinds_of(again.fn(*args, **kwargs))
            except BaseException:
                # An exception after `_Stop` is a consequence of it: TorchScript, for example, wraps exceptions.
                if not self.stopped:
                    raise
                return
            finally:
                pop()
        if self.results is not None:
            self._compare(results, self.results)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        inputs = self.inputs
        if id(tensor) in inputs.index or inputs.provides(tensor):
            return tensor
        number = self.count
        self.count += 1
        if number >= len(self.expected):
            return tensor
        saved = Saved.of(tensor, self.expected[number].words)
        found = Found(tensor.detach(), saved.version)
        if self.versions:
            _, before = self.versions.get(id(_base(tensor)), (None, 0))
            saved = saved._replace(version=saved.version + before)
        if saved != self.expected[number] and not self._is_excused(tensor, number, saved):
            what = f"saved value {number} of {region_name(self.fn)} {_difference(self.expected[number], saved)}"
            if self.threaded and saved[:3] == self.expected[number][:3]:
                raise RandomStateError(f"{what}. {_THREADED}")
            raise ImpureFunctionError(f"{what}: {_NOT_PURE}")
        self.found[number] = found
        # Autograd saves an operation's inputs before it computes, so the last operation need not run, unless it still
        # has to fill a tensor that it saved.
        if number == len(self.expected) - 1 and self.may_stop and tensor.requires_grad:
            self.stopped = True
            raise _Stop
        return found.tensor

    def _is_excused(self, tensor: torch.Tensor, number: int, now: Saved) -> bool:
        """Whether a difference is harmless: `tensor` is the copy of a buffer, still to be filled, or is never
        completely filled.

        By-products that are not differentiated (`ctc_loss` saves one with gaps) are read only to detect whether other
        threads drew from the generator between the draws of this one.
        """
        then = self.expected[number]
        if not (tensor.requires_grad or self.threaded) and now[:3] == then[:3]:
            return True
        return now[:2] == then[:2] and (
            id(_base(tensor)) in self.scratch or (now[2] == then[2] and number in self.unfilled)
        )

    def _compare(self, results: LeafKinds, then: LeafKinds) -> None:
        if len(results) != len(then):
            what = f"returned {len(then)} leaves in forward and {len(results)}"
            raise ImpureFunctionError(f"{region_name(self.fn)} {what} in its recompute: {_NOT_PURE}")
        for i, (before, now) in enumerate(zip(then, results, strict=True)):
            if before != now:
                raise ImpureFunctionError(
                    f"output {i} of {region_name(self.fn)} was {_describe_leaf(before)} in forward and is "
                    f"{_describe_leaf(now)} in its recompute: {_NOT_PURE}"
                )
        if self.count != len(self.expected):
            what = f"saved {len(self.expected)} values in forward and {self.count}"
            raise ImpureFunctionError(f"{region_name(self.fn)} {what} in its recompute: {_NOT_PURE}")


_NOT_PURE = (
    "the function is not pure. Its result must depend only on its arguments; look for globals that change, counters, "
    "caches (parametrize.cached() belongs inside of the function), parameters whose requires_grad was switched, a mode "
    "(a TorchDispatchMode or TorchFunctionMode) around only one run, or an operation whose results differ from run to "
    "run without fckpt too (torch.linalg.lstsq)."
)

_THREADED = (
    "The function draws random numbers while other threads run. Either another thread drew from the same generator: "
    "all threads of a process share torch's default CPU generator, so run such steps in separate processes, or draw "
    f"the random tensors outside of `remat` and pass them as arguments. Or {_NOT_PURE} Saved-tensor hooks that change "
    "values (such as a compression) have this effect too."
)


def _difference(then: Saved, now: Saved) -> str:
    if then[:3] == now[:3] and then.sample[:1] == now.sample[:1]:
        a, b = next((a, b) for a, b in zip(then.sample, now.sample, strict=False) if a != b)
        return f"contained the bytes {_hex(a)} in forward and contains {_hex(b)} in their place in its recompute"
    with_version = then.version != now.version
    before, after = (saved.described(with_version=with_version) for saved in (then, now))
    return f"was {before} in forward and is {after} in its recompute"


def _base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def leaf_kinds_of(result: Any) -> LeafKinds:
    """Returns the kind of each leaf of a result, in order: (shape, dtype) of a tensor, otherwise the type."""
    leaves = [result] if isinstance(result, torch.Tensor) else tree.flatten(result)[0]
    return [(_shape(x), x.dtype) if isinstance(x, torch.Tensor) else type(x) for x in leaves]


def _describe_leaf(kind: Any) -> str:
    if isinstance(kind, type):
        return kind.__name__
    shape, dtype = kind
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


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
    """Context manager for a recompute: autograd records, as in the forward, whatever transform or mode backward runs
    under.
    """

    __slots__ = ("disallowed", "grad", "legacy", "levels")

    def __enter__(self) -> None:
        self.levels = None
        if transforms_active():
            self.levels = below_all()
            self.levels.__enter__()
        # `is_grads_batched` runs backward under the legacy vmap, which forbids random operations.
        self.legacy = torch._C._ExcludeDispatchKeyGuard(EXCLUDE_LEGACY_VMAP)
        self.legacy.__enter__()
        self.disallowed = allow_hooks()
        self.grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)

    def __exit__(self, *error: Any) -> None:
        torch._C._set_grad_enabled(self.grad)
        disallow_hooks(self.disallowed)
        self.legacy.__exit__(*error)
        if self.levels is not None:
            self.levels.__exit__(*error)


_NOTHING = nullcontext()
