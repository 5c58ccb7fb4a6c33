"""The recorder: a dispatch mode below autograd that records every operation as plain PyTorch dispatches it.

The tensors of a trace have no memory (`stand_ins.py`). For each of them, the recorder has a fake tensor, with which it
determines the results of operations.

The recorder identifies tensors by storage, offset, sizes and strides, not by object identity. It holds no references to
them, so that autograd sees the same ownership as in a plain run. In-place operations are recorded as such: each write
ends one *version* of a storage and begins the next, and views of the old version are created again from the new one.

Seen on torch 2.11 and 2.13: `torch._C._DisableTorchDispatch`; `aten.native_batch_norm` writes statistics that its
schema does not name.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fckpt._call.levels import below_all, unwrapped
from fckpt._call.results import View
from fckpt._capture.sources import Source, current
from fckpt._trace.constant_data import LOOKING, UnknownData, held_data, looked_at, refuse_number
from fckpt._trace.lifetimes import Lifetimes, Sums
from fckpt._trace.operations import (
    EMPTY,
    RESIZES,
    Layout,
    Recorded,
    Ref,
    count_writes,
    draws,
    flat,
    indices_of,
    mapped,
    unflat,
    written_by,
)
from fckpt._trace.plain_kernels import PlainKernels
from fckpt._trace.real_layouts import with_real_layouts
from fckpt._trace.repeated import RepeatedCalls, layouts_key
from fckpt._trace.sizes import hashable, run_in, storage_of_size, viewing_symbolically
from fckpt._trace.stand_ins import (
    WAY_OUT,
    as_computed,
    check_dense,
    check_operation,
    set_lazy,
    storage_without_memory,
    viewing,
)
from fckpt._trace.zeros import Zeros
from fckpt.errors import TraceError

__all__ = ["CHECKPOINT_INSIDE", "Recorder"]

aten = torch.ops.aten

CHECKPOINT_INSIDE = (
    "the function uses torch.utils.checkpoint inside, and draws random numbers there (dropout) or writes buffers "
    "(batch normalisation), which the recompute would do again. Remove it (`gradient_checkpointing_disable()` with "
    "Hugging Face, `set_grad_checkpointing(False)` with timm): a plan decides for the whole function. Or use "
    "fckpt.remat instead."
)


class _Block:
    """A storage, and the views of its present version."""

    __slots__ = ("base", "current", "held", "reference", "stale")

    def __init__(self, reference: Any, base: int, held: bool):
        self.reference = reference
        """A weak reference that keeps the address of the storage from being reused, but not its memory."""
        self.base = base
        """The number of the tensor that the allocating operation returned, in the present version."""
        self.held = held
        """Whether the storage is an operand, a cotangent or the data of a constant, which the trace does not own."""
        self.current: dict[Any, int] = {}
        self.stale: dict[Any, int] = {}


class Recorder(TorchDispatchMode):
    """A dispatch mode that records the operations below autograd, on tensors without memory."""

    def __init__(self, named: torch.device | None = None, sizes: Any = None) -> None:
        """Prepares to record.

        Args:
            named: the device to trace for, if that is another one; its tensors are on the meta device meanwhile.
            sizes: the environment of symbolic sizes, if layouts of operands have such sizes.
        """
        super().__init__()
        self.named, self.sizes = named, sizes
        self.names_constants = False  # whether constants are made on the named device
        self.fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes)
        self.fake.cache_enabled = False  # cached results may have a smaller storage (aten.copy of a row, torch 2.13)
        self.repeated = RepeatedCalls(self.fake)
        self.calls: list[Recorded] = []
        self.lifetimes = Lifetimes(self.calls)
        self.sums = Sums()
        self.zeros = Zeros(self.owns, lambda: not self.in_backward and named is None and sizes is None)
        self.kernels = PlainKernels()
        self.tensors: list[FakeTensor] = []
        """By tensor: a fake tensor with its layout."""
        self.values: list[int] = []
        """By tensor: the version of a storage that it is a view of. Versions are numbered in order of creation."""
        self.count = 0  # of versions
        self.written: dict[int, int] = {}
        """By version of a held storage that the function writes over: the next version."""
        self.updated: set[int] = set()
        """The versions among them that what follows on the backward pass writes over, and those of donated operands."""
        self.constants: dict[int, torch.Tensor] = {}
        self.names: dict[int, list[str]] = {}
        self.sources: dict[int, Source] = {}
        self.boundary: int | None = None
        self.ending: int | None = None
        """The number of calls before those that follow on the backward pass, which may write to operands, if any."""
        self.hooked: set[int] = set()
        """The storages with a tensor on which the function registers a hook, or of which it reads `grad_fn`."""
        self.in_last_backward = False  # whether the last backward pass is about to run
        self.autograd_nodes: list[Any] = []
        self.regions: list[tuple[range, set[int], Any]] = []
        """The rematerialised regions inside: their calls, the versions that they return, their policies."""
        self._open: list[tuple[Any, int]] = []  # the regions that have begun, and the number of calls before each
        self._donated: set[int] = set()  # the storages of donated operands
        self._refused: dict[int, Callable[[], Exception]] = {}  # by storage that must not be written: the error
        self._given: list[weakref.ref[torch.Tensor]] = []  # the stand-ins for tensors that existed before
        self._blocks: dict[int, _Block] = {}
        self._by_fake: dict[int, _Block] = {}
        self._views: dict[int, int] = {}  # by tensor that is a view: the call that made it

    # -- tensors

    def stand_in(self, layout: Layout) -> torch.Tensor:
        """Returns a tensor without memory that stands for an operand or a cotangent."""
        with below_all():  # stand-ins for cotangents are made within the levels of a trace
            device = torch.device("meta") if layout.device == self.named else layout.device
            with self._faking():
                fake = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=device)
            set_lazy(fake, conj=layout.conj, neg=layout.neg)
            tensor = self._fresh(fake, held=True)
            return as_computed(tensor) if layout.computed else tensor.requires_grad_(layout.is_tracked)

    def refuse_writes(self, tensor: torch.Tensor, error: Callable[[], Exception]) -> None:
        """Makes any later write to the storage of a tensor raise `error()`."""
        self._refused[tensor.untyped_storage()._cdata] = error

    def donate(self, tensor: torch.Tensor) -> None:
        """Notes that the caller gives an operand away: the function may write over it."""
        self._donated.add(tensor.untyped_storage()._cdata)

    def number(self, tensor: torch.Tensor) -> int:
        """Returns the number of a tensor, in the present version of its storage.

        Raises:
            TraceError: the tensor does not belong to this trace.
        """
        return self._number_or_refuse(tensor, None)

    def owns(self, tensor: Any) -> bool:
        """Whether `tensor` belongs to this trace, and so has no memory."""
        try:
            storage = tensor.untyped_storage()._cdata
        except (RuntimeError, NotImplementedError):
            return False
        return storage in self._blocks

    def alive(self) -> set[int]:
        """Returns the addresses of the trace's storages that are still alive."""
        return {key for key, block in self._blocks.items() if not block.reference.expired()}

    def version(self, tensor: torch.Tensor) -> int:
        """Returns the present version of the storage of a tensor."""
        return self.values[self.number(tensor)]

    def steps(self, base: torch.Tensor, view: torch.Tensor) -> tuple[View, ...] | None:
        """Returns the steps that make `view` from `base`; None if they are unknown."""
        first, number = self.number(base), self.number(view)
        found: list[View] = []
        while number != first:
            if number not in self._views:
                return None
            call = self.calls[self._views[number]]
            if not call.args or not isinstance(call.args[0], Ref) or any(indices_of(call.args[1:])):
                return None
            found.append(View(self._views[number], call.op, call.args[1:], call.kwargs, call.outputs.index(number)))
            number = call.args[0].tensor
        return tuple(reversed(found))

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Notes the name that `checkpoint_name` gives a tensor."""
        number = self._find(unwrapped(tensor))
        if number is not None:
            names = self.names.setdefault(self.values[number], [])
            if name not in names:
                names.append(name)

    # -- the marks of a captured graph

    def begin(self, region: Any) -> None:
        """Notes the start of a rematerialised region."""
        self._open.append((region, len(self.calls)))

    def end(self, region: Any, outputs: Sequence[torch.Tensor]) -> None:
        """Notes the end of a rematerialised region, and the tensors that it returns."""
        begun, first = self._open.pop()
        assert begun is region
        self.note_region(first, outputs, None if region is None else region.policy)

    def note_region(self, first: int, outputs: Sequence[torch.Tensor], policy: Any) -> None:
        """Notes the policy for the values inside a region, which began at call `first`."""
        if policy is not None and self.boundary is None:
            returned = {self.version(unwrapped(t)) for t in outputs}
            self.regions.append((range(first, len(self.calls)), returned, policy))

    @contextlib.contextmanager
    def checkpointing(self, drawing: bool) -> Iterator[None]:
        """Handles a call of `torch.utils.checkpoint`.

        Raises:
            TraceError: random numbers are drawn in the call, which its recompute would have to repeat, though not
                `drawing`, or buffers are written, which it would write again.
        """
        first, written = len(self.calls), len(self.written)
        yield
        if len(self.written) > written or (not drawing and any(map(draws, self.calls[first:]))):
            raise TraceError(f"{CHECKPOINT_INSIDE} {WAY_OUT}")

    def start_backward(self) -> None:
        """Notes the end of the forward pass."""
        self.boundary = len(self.calls)
        self.lifetimes.casts.start_backward()

    @property
    def in_backward(self) -> bool:
        """Whether the backward pass has begun, and not what follows on it."""
        return self.boundary is not None and self.ending is None

    def start_ending(self) -> None:
        """Notes the end of the backward pass."""
        self.ending = len(self.calls)

    def release(self) -> None:
        """Frees autograd's nodes one by one from the outputs on: freeing a long chain at once exhausts the stack."""
        self.autograd_nodes.reverse()
        while self.autograd_nodes:
            self.autograd_nodes.pop()
        self.sums.release()

    def _find(self, tensor: torch.Tensor) -> int | None:
        check_dense(tensor)
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        if block is None:
            return None
        return self._at(block, _geometry(tensor))

    def _at(self, block: _Block, geometry: Any) -> int:
        """Returns the number of the view of a storage's present version with this geometry, and makes it if needed."""
        found = block.current.get(geometry)
        if found is not None:
            return found
        old = block.stale.get(geometry)
        if old is not None and old in self._views:
            self._again(block, self.calls[self._views[old]])
        if geometry not in block.current:
            self._strided(block, geometry)
        return block.current[geometry]

    def _again(self, block: _Block, call: Recorded) -> None:
        """Records the view call of an older version again, for the present version."""

        def renewed(value: Any) -> Any:
            if isinstance(value, Ref):
                return Ref(self._at(block, _geometry(self.tensors[value.tensor])))
            if isinstance(value, (list, tuple)):
                return type(value)(renewed(v) for v in value)
            return value

        args, kwargs = renewed(call.args), {k: renewed(v) for k, v in call.kwargs.items()}
        outputs = tuple(None if t is None else self._new(self.tensors[t], block) for t in call.outputs)
        self._record_view(Recorded(call.op, args, kwargs, outputs, True, call.source))

    def _strided(self, block: _Block, geometry: Any) -> None:
        """Records a view that was made without a recorded operation (`x.data`, for example)."""
        offset, shape, stride, dtype, conj, neg = geometry
        if self.sizes is not None:
            raise TraceError(f"{current()}: a view with symbolic sizes was made in an unknown way.")
        same = [t for g, t in block.current.items() if g[3:] == (dtype, conj, neg)]
        same = same or [self._at(block, g) for g in list(block.stale) if g[3:] == (dtype, conj, neg)][:1]
        if not same:
            raise TraceError(f"{current()}: a view of a tensor was made in an unknown way. {WAY_OUT}")
        with self._faking():
            fake = self.tensors[same[0]].as_strided(shape, stride, offset)
        args = (Ref(same[0]), list(shape), list(stride), offset)
        self._record_view(Recorded(aten.as_strided.default, args, {}, (self._new(fake, block),), True, ""))

    def _record_view(self, call: Recorded) -> None:
        for t in call.outputs:
            if t is not None:
                self._views[t] = len(self.calls)
        self.calls.append(call)

    def _new(self, fake: Any, block: _Block | None = None) -> int:
        """Assigns a number to a tensor: a view of the present version of `block`, or a new storage if that is None."""
        number = len(self.tensors)
        self.tensors.append(fake)
        if block is None:
            self.values.append(self.count)
            self.count += 1
        else:
            self.values.append(self.values[block.base])
            block.current.setdefault(_geometry(fake), number)
        return number

    def _fresh(self, fake: Any, *, held: bool = False) -> torch.Tensor:
        """Returns a tensor without memory, on a new storage, with the layout of `fake`."""
        nbytes = fake.untyped_storage().nbytes()
        storage = storage_without_memory(nbytes, fake.device) if self.sizes is None else storage_of_size(nbytes)
        tensor = self._viewing(storage, fake)
        self._adopt(tensor, fake, held)
        if held:
            self._given.append(weakref.ref(tensor))
        return tensor

    def _viewing(self, storage: torch.UntypedStorage, fake: Any) -> torch.Tensor:
        if self.sizes is None:
            return viewing(storage, fake, self.named)
        return viewing_symbolically(storage, fake, self.fake)

    def _adopt(self, tensor: torch.Tensor, fake: Any, held: bool) -> int:
        number = self._new(fake)
        storage = tensor.untyped_storage()
        block = _Block(StorageWeakRef(storage), number, held)
        block.current[_geometry(fake)] = number
        self._blocks[storage._cdata] = self._by_fake[fake.untyped_storage()._cdata] = block
        values = self.values
        self.lifetimes.watch(storage, lambda: values[block.base])
        return number

    def _number_or_refuse(self, tensor: torch.Tensor, func: Any) -> int:
        """Returns the number of a tensor; raises `TraceError` if the tensor does not belong to this trace."""
        found = self._find(tensor)
        if found is not None:
            return found
        check_dense(tensor)
        if torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python):
            raise TraceError(f"{current()}: {func or 'the result'} uses a tensor of another trace. {WAY_OUT}")
        raise TraceError(
            f"{current()}: {func or 'the result'} uses a tensor of shape {list(tensor.shape)} that is neither "
            "passed to the function nor found in its closure. Pass it as an argument, or hold it in a variable, a "
            f"module, or an attribute or container not deeper than four levels. {WAY_OUT}"
        )

    def _constant(self, data: torch.Tensor) -> torch.Tensor:
        """Returns the stand-in for a tensor that the function makes of Python numbers.

        Each call copies it from data that the trace holds: it takes memory for as long as the plain function's does.
        """
        device = torch.device("meta") if self.names_constants else data.device
        held = held_data(data, device)
        with self.fake:
            fake = aten.lift_fresh.default(held)
        given = self._fresh(fake, held=True)
        self.constants[len(self.tensors) - 1] = held
        if held.device == device:
            return self.__torch_dispatch__(aten.clone.default, (), (given,))
        return self.__torch_dispatch__(aten._to_copy.default, (), (given,), {"device": self.device_of(device)})

    @contextlib.contextmanager
    def _faking(self) -> Iterator[None]:
        with _disable_current_modes(), self.fake:
            yield

    # -- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("prim", "profiler") or self.zeros.concern(func, args, kwargs):
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        if func is aten.lift_fresh.default:
            return args[0] if self._find(args[0]) is not None else self._constant(args[0])
        if func is aten._efficientzerotensor.default:  # a gradient of zeros without memory, which is not writable
            func = aten.zeros.default
        check_operation(func)
        if self.named is not None:
            func, kwargs = self._on_meta(func, args, kwargs)
        func, args = self.kernels.of(func, args)
        if torch.Tag.inplace_view in func.tags:
            return self._reshaped(func, args, kwargs)
        given: dict[int, torch.Tensor] = {}  # by storage of a fake tensor: an argument with that storage
        numbers: dict[int, int] = {}

        def fake_of(tensor: torch.Tensor) -> Any:
            number = self._number_or_refuse(tensor, func)
            numbers[id(tensor)] = number
            fake = self.tensors[number]
            given.setdefault(fake.untyped_storage()._cdata, tensor)
            return fake

        sent = mapped(args, fake_of), {k: mapped(v, fake_of) for k, v in kwargs.items()}
        written = written_by(func, args, kwargs)
        if func in LOOKING and self.sizes is None and self.named is None:
            with contextlib.suppress(UnknownData):
                refs = [mapped(a, lambda t: Ref(numbers[id(t)])) for a in args]
                return looked_at(func, refs, self.calls, self.constants, self.tensors)
        result = self._ran(func, sent, written)
        found = flat(result)
        if not written and not any(isinstance(t, torch.Tensor) for t in found):
            if all(x is None for x in found):  # an assertion: its only effect is an error
                self._record(func, args, kwargs, numbers, ())
            else:
                refuse_number(func)
            return result
        count_writes(func, written)
        replaced = self._write(written, func) if written else ()
        for tensor in written:
            numbers[id(tensor)] = self._number(tensor)
        return self._returned(func, args, kwargs, numbers, given, result, written, replaced)

    def _ran(self, func: Any, sent: tuple[Any, dict[str, Any]], written: Sequence[torch.Tensor]) -> Any:
        """Runs an operation on fake tensors."""
        if not written:
            return self.repeated(func, *sent)
        key = layouts_key(func, *sent, [])
        result = with_real_layouts(self.fake, func, *sent, run_in(self.fake, func, *sent), key)
        if any(self._of(t).shape != t.shape for t in written):
            raise TraceError(f"{current()}: {func} changes the size of a tensor in place. {WAY_OUT}")
        return result

    def _on_meta(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Returns an operation of a trace for a named device as it runs on the meta device."""
        device = kwargs.get("device")
        if device is None or device.type != self.named.type:  # type: ignore[union-attr]  # only called if there is one
            return func, kwargs
        if func is aten._to_copy.default and getattr(args[0], "named", None) == self.named:
            same = kwargs.get("dtype") in (None, args[0].dtype) and kwargs.get("memory_format") is None
            if same:
                return aten.alias.default, {}  # a move to the device of the tensor returns the tensor
        return func, {**kwargs, "device": torch.device("meta")}

    def device_of(self, value: Any) -> Any:
        """Returns a device as the traced function knows it; any other value as it is."""
        meta = isinstance(value, torch.device) and value.type == "meta"
        return self.named if meta and self.named is not None else value

    def _number(self, tensor: torch.Tensor) -> int:
        number = self._find(tensor)
        assert number is not None
        return number

    def _of(self, tensor: torch.Tensor) -> Any:
        return self.tensors[self._number(tensor)]

    def _returned(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        numbers: dict[int, int],
        given: dict[int, torch.Tensor],
        result: Any,
        written: Sequence[torch.Tensor],
        replaced: tuple[tuple[int, int], ...],
    ) -> Any:
        """Records an operation, and returns tensors without memory instead of its fake results."""
        outputs: list[int | None] = []
        fresh, seen = False, {id(self._of(t)): t for t in reversed(written)}
        made: dict[int, torch.Tensor] = {}

        def tensor_of(fake: Any) -> Any:
            nonlocal fresh
            if not isinstance(fake, torch.Tensor):
                outputs.append(None)
                return fake
            if id(fake) in seen:
                outputs.append(None)
                return seen[id(fake)]
            check_dense(fake)
            key = fake.untyped_storage()._cdata
            block = self._by_fake.get(key)
            if block is None:
                fresh = True
                tensor = made[key] = self._fresh(fake)
                outputs.append(len(self.tensors) - 1)
                return tensor
            owner = given[key] if key in given else made[key]
            tensor = self._viewing(owner.untyped_storage(), fake)
            known = block.current.get(_geometry(fake))
            outputs.append(None if known is not None and key not in made else self._new(fake, block))
            return tensor

        known = len(self.tensors)
        leaves = iter([tensor_of(leaf) for leaf in flat(result)])
        tensors = unflat(result, leaves)
        self.lifetimes.casts.called(
            func, args, tensors, self.values[-1], map(self.values.__getitem__, numbers.values())
        )
        random = torch.Tag.nondeterministic_seeded in func.tags
        is_view = not fresh and not replaced and not random
        if not is_view or len(self.tensors) > known:
            self._record(func, args, kwargs, numbers, tuple(outputs), is_view, replaced)
        return tensors

    def _record(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        numbers: dict[int, int],
        outputs: tuple[int | None, ...],
        is_view: bool = False,
        replaced: tuple[tuple[int, int], ...] = (),
    ) -> None:
        ref = lambda tensor: Ref(numbers[id(tensor)])
        accumulates = self.sums.is_one(func, args)
        args, kwargs = mapped(tuple(args), ref), {k: mapped(v, ref) for k, v in kwargs.items()}
        if func in EMPTY and outputs[0] is not None:  # it does not read the data of its operand
            fake = self.tensors[outputs[0]]
            func, args = aten.empty_strided.default, (list(fake.shape), list(fake.stride()))
            kwargs = {"dtype": fake.dtype, "device": fake.device}
        if self.named is not None:
            args, kwargs = tuple(map(self.device_of, args)), {k: self.device_of(v) for k, v in kwargs.items()}
        module, line = self._source()
        inner = torch._C._current_autograd_node() is not None
        call = Recorded(func, args, kwargs, outputs, is_view, line, replaced, module, accumulates, inner)
        if is_view:
            self._record_view(call)
        else:
            self.calls.append(call)

    def _write(self, written: Sequence[torch.Tensor], func: Any) -> tuple[tuple[int, int], ...]:
        """Begins the next version of each storage that an operation writes; returns pairs of old and new base."""
        replaced = []
        blocks = {t.untyped_storage()._cdata: self._blocks[t.untyped_storage()._cdata] for t in written}
        for key, block in blocks.items():
            if key in self._refused:
                raise self._refused[key]()
            if block.held and self.in_backward:
                raise TraceError(f"the backward pass ({func}) writes over one of its inputs. {WAY_OUT}")
            old = block.base
            self.lifetimes.end(self.values[old])
            block.stale.update(block.current)
            block.current = {}
            block.base = self._new(self.tensors[old])
            block.current[_geometry(self.tensors[old])] = block.base
            if block.held:
                self.written[self.values[old]] = self.values[block.base]
                if self.ending is not None or key in self._donated:
                    self.updated.add(self.values[old])
            replaced.append((old, block.base))
        return tuple(replaced)

    def _reshaped(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Handles an operation that changes the geometry of a tensor in place (`x.t_()`, for example)."""
        if func in RESIZES or any(given() is args[0] for given in self._given):
            raise TraceError(
                f"{current()}: {func} changes the layout of a tensor in place, which a plan does not repeat. {WAY_OUT}"
            )
        tensor = args[0]
        numbers = {id(tensor): self._number(tensor)}
        block, fake = self._blocks[tensor.untyped_storage()._cdata], self._of(tensor)
        functional = getattr(
            getattr(aten, func.overloadpacket.__name__.removesuffix("_"), None), func._overloadname, None
        )
        with torch._C._DisableTorchDispatch():
            result = func(*args, **kwargs)
        if functional is not None and _geometry(tensor) not in block.current:
            with self.fake:
                view = functional(fake, *args[1:], **kwargs)
            if _geometry(view) == _geometry(tensor):
                self._record(functional, args, kwargs, numbers, (self._new(view, block),), True)
        return result

    def _source(self) -> Source:
        if self.boundary is None:
            source = current()
            # The first operation with a sequence number made the autograd node; later ones may have no separate node.
            self.sources.setdefault(torch.autograd._get_sequence_nr() - 1, source)
            return source
        node = torch._C._current_autograd_node()
        if node is None:
            return Source()
        if not self.autograd_nodes or self.autograd_nodes[-1] is not node:
            self.autograd_nodes.append(node)
        return self.sources.get(node._sequence_nr(), Source())


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    place = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    if type(tensor) is FakeTensor and tensor.fake_mode.shape_env is not None:
        place = hashable(place)
    return (*place, tensor.dtype, tensor.is_conj(), tensor.is_neg())
