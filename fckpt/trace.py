"""A function and example arguments to the graph of its forward and backward pass.

The function runs once on fake tensors (shapes without data), with autograd recording, and autograd runs its
backward pass; below autograd, every operation is written down. In-place work is made functional on the way by
PyTorch's functionalization, views and aliases are known by their storage, and what a function closes over becomes
an input like its arguments. All tracing, and the private interfaces of torch that it takes, is in this file.

Seen on torch 2.11 and 2.13: `torch._enable_functionalization`, `torch._from_functional_tensor`, `torch._sync`,
`torch._functionalize_has_data_mutation`; `aten.native_batch_norm` writes statistics that its schema does not name.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fckpt import tree
from fckpt.arguments import Arguments
from fckpt.assemble import Assembly
from fckpt.closure import Slot, content, moved, placed, replaced
from fckpt.conditions import unwrapped
from fckpt.errors import TraceError
from fckpt.operations import Call, Layout, Recorded, Ref, TensorSpec, Trace, is_dense
from fckpt.policies import names_recorded
from fckpt.primitives import numbered

__all__ = ["Call", "Layout", "Ref", "TensorSpec", "Trace", "check_dense", "inlined", "is_tracing", "trace"]

aten = torch.ops.aten


def trace(
    fn: Callable[..., Any],
    arguments: Arguments,
    closure: Sequence[torch.Tensor],
    slots: Sequence[Slot],
    layouts: Sequence[Layout],
    origins: Sequence[str] = (),
    state: Sequence[Any] = (),
) -> Trace:
    """Traces one call of `fn` and its backward pass, with the autocast state of the caller.

    Args:
        fn: any function whose control flow does not depend on the data of tensors.
        arguments: those of the call.
        closure: the tensors that `fn` closes over.
        slots: the places where they lie.
        layouts: shapes, strides and so on of the operands: arguments, then closure.
        origins: names for the operands.
        state: the dicts and lists that `fn` closes over, attributes, parameters and buffers of modules among them.

    Raises:
        TraceError: the function's course depends on the data of tensors; it uses a tensor that is neither passed nor
            among `closure`, or puts one elsewhere than into its result.
        MutationError: it changes an argument in place.
    """
    tensors = [*arguments.tensors, *closure]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False  # what comes from its cache may have less storage (aten.copy of a row, torch 2.13)
    recorder = _Recorder()
    with _active.set_to(recorder), _tracing(mode, recorder), _user_errors():
        operands = [_stand_in(layout, recorder) for layout in layouts]
        numbers = [recorder.adopt(_bare(t)) for t in operands]
        count = len(arguments.tensors)
        new = {id(t): operand for t, operand in zip(tensors, operands, strict=True)}
        args, kwargs = arguments.rebuild(operands[:count])
        closed = [(holder, key, replaced(value, new)) for holder, key, value in slots]
        with placed(closed), names_recorded(recorder.name):
            before = [(held, held.copy()) for held in state]
            result = fn(*args, **kwargs)
            _check_places(closed, before)
        finished = _Ends(result, operands, numbers, layouts, count, recorder)
        finished.note_updates(operands, arguments)
        _check_updates(finished.updates, numbers, tensors)
        recorder.start_backward()
        finished.differentiate()
    written = {number for number, _ in finished.updates}
    for number, gradient in zip(numbers, finished.gradients, strict=True):
        if number in written and gradient is not None:
            raise TraceError(
                "the function changes a closed-over tensor in place that it is also differentiated for (an embedding "
                f"with max_norm, say), which a plan cannot follow. {_WAY_OUT}"
            )
    return finished.trace([*origins, *[""] * (len(operands) - len(origins))])


_TRACEABLE = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
_WAY_OUT = "fckpt.remat without policy and budget takes any function; nothing is traced then."


def _check_places(slots: Sequence[Slot], before: list[tuple[Any, Any]]) -> None:
    """Raises `TraceError` if the function put tensors anywhere: they are fake ones. What was there is put back."""
    names = [str(key or "a variable") for holder, key, _ in moved(slots) if _has_fake(content(holder, key))]
    for container, then in before:
        if isinstance(container, dict):
            for key in [k for k, v in container.items() if then.get(k, _ABSENT) is not v and _has_fake(v)]:
                names.append(str(key))
                if key in then:
                    container[key] = then[key]
                else:
                    del container[key]
        elif _has_fake(container) and not _has_fake(then):
            names.append("an item of a list")
            container[:] = then
    if names:
        raise TraceError(
            f"the function assigns {', '.join(sorted(set(names)))} while it runs. A plan runs its operations, not its "
            f"Python code, so it would assign nothing. Return the value instead. {_WAY_OUT}"
        )


_ABSENT = object()


def _has_fake(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_fake, value))
    if isinstance(value, dict):
        return any(map(_has_fake, value.values()))
    return isinstance(value, torch.Tensor) and (isinstance(value, FakeTensor) or torch._is_functional_tensor(value))


def _check_updates(updates: list[tuple[int, int]], numbers: list[int], tensors: Sequence[torch.Tensor]) -> None:
    """Raises `TraceError` if a tensor that is changed in place shares memory with another: they are traced apart."""
    if not updates:
        return
    storages = [_storage(t) for t in tensors]
    written = {number for number, _ in updates}
    for number, storage in zip(numbers, storages, strict=True):
        if number in written and storage is not None and storages.count(storage) > 1:
            raise TraceError(
                "the function changes a closed-over tensor in place that shares memory with another one that it uses. "
                f"Close over one of them. {_WAY_OUT}"
            )


def _storage(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return None


class _Active(threading.local):
    """The recorder at work in this thread."""

    recorder: _Recorder | None = None

    @contextlib.contextmanager
    def set_to(self, recorder: _Recorder) -> Iterator[None]:
        before, self.recorder = self.recorder, recorder
        try:
            yield
        finally:
            self.recorder = before


_active = _Active()


def is_tracing() -> bool:
    """Whether this thread is tracing a function."""
    return _active.recorder is not None


def inlined(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], policy: Any) -> Any:
    """Calls a rematerialised function inside of one that is being traced: its operations become the outer's.

    What `policy` says of the values that stay inside is noted; None has nothing to say.
    """
    recorder = _active.recorder
    assert recorder is not None
    first = len(recorder.calls)
    result = fn(*args, **kwargs)
    if policy is not None and recorder.boundary is None:
        bare = [_bare(unwrapped(t)) for t in tree.leaves(result) if isinstance(t, torch.Tensor)]
        returned = {recorder.values[recorder.adopt(t)] for t in bare}
        recorder.regions.append((range(first, len(recorder.calls)), returned, policy))
    return result


def check_dense(tensor: torch.Tensor) -> None:
    """Raises `TraceError` for a tensor that no plan can deal with."""
    if tensor.layout is not torch.strided or type(tensor) not in _TRACEABLE:
        raise TraceError(
            f"a {type(tensor).__name__} with layout {tensor.layout} cannot be traced: budgets and policies know dense "
            f"torch.Tensors. {_WAY_OUT}"
        )
    if tensor.device.type == "cuda" and not torch.cuda.is_available():
        raise TraceError(
            "fake CUDA tensors cannot be traced where there is no CUDA (autograd would end the process). Use tensors "
            'on the meta device, and costs=fckpt.cost.Analytic(fckpt.cost.profiles["H100"]), for a plan for a GPU.'
        )


def _stand_in(layout: Layout, recorder: _Recorder) -> torch.Tensor:
    with recorder.paused():
        tensor = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=layout.device)
    recorder.adopt(_bare(tensor))
    return tensor.requires_grad_(layout.requires_grad)


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """The fake tensor inside of a functional one, after all pending in-place work on it."""
    if not torch._is_functional_tensor(tensor):
        return tensor
    torch._sync(tensor)
    return torch._from_functional_tensor(tensor)


@contextlib.contextmanager
def _tracing(mode: FakeTensorMode, recorder: _Recorder) -> Iterator[None]:
    torch._enable_functionalization(reapply_views=True)
    try:
        with temporarily_clear_interpreter_stack(), _seeds_refused(), mode, recorder, torch.enable_grad(), _NoData():
            yield
    finally:
        torch._disable_functionalization()


class _NoData(TorchFunctionMode):
    """Refuses what would read memory that the tensors of a trace do not have."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and torch._is_functional_tensor(args[0]):
            raise TraceError(
                f"{_user_line()}: the function looks at the data of a tensor here (`{func.__name__}`), so its "
                f"operations are not the same for all data and cannot be planned ahead. {_WAY_OUT}"
            )
        return func(*args, **(kwargs or {}))


_READS = {
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.tolist,
    torch.Tensor.data_ptr,
    torch.Tensor.__dlpack__,
}


class _SeedGuard:
    """Stands for the default generator while a function is traced: it may be asked, and not be set."""

    def __init__(self, generator: torch.Generator):
        self.generator = generator
        self.thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name in ("manual_seed", "set_state", "seed") and threading.get_ident() == self.thread:
            frame, inside = sys._getframe(1), False
            while frame is not None and not inside:
                inside, frame = frame.f_code.co_filename == torch.utils.checkpoint.__file__, frame.f_back
            if inside:
                raise TraceError(
                    "the function uses torch.utils.checkpoint inside, which decides for itself what is computed again. "
                    "Leave it out (a plan decides for the whole function), put fckpt.remat in its place, or tell it "
                    f"preserve_rng_state=False if nothing in it is random. {_WAY_OUT}"
                )
            raise TraceError(
                f"{_user_line()}: the function sets the random generator (`{name}`), which a plan cannot repeat. Set "
                f"it before the call, or pass a torch.Generator. {_WAY_OUT}"
            )
        return getattr(self.generator, name)


@contextlib.contextmanager
def _seeds_refused() -> Iterator[None]:
    generator = torch.random.default_generator
    torch.random.default_generator = _SeedGuard(generator)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.random.default_generator = generator


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    """Turns what fake tensors cannot answer into an error that names the user's line."""
    try:
        yield
    except Exception as error:
        kind = type(error).__name__
        hidden = isinstance(error, RuntimeError) and "its data is not allocated yet" in str(error)
        if not hidden and not any(word in kind for word in ("DataDependent", "DynamicOutputShape", "UnsupportedFake")):
            raise
        line = _line_of(error)
        raise TraceError(
            f"{line}: the function looks at the data of a tensor here ({kind}: {_first_line(error)}), so its "
            f"operations are not the same for all data and cannot be planned ahead. {_WAY_OUT}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def _is_users(filename: str) -> bool:
    return not filename.startswith((_HERE, _TORCH, "<frozen")) and f"{os.sep}contextlib.py" not in filename


def _line_of(error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    if not frames:
        return "in the traced function"
    last = frames[-1]
    return f"{last.filename}:{last.lineno}, in {last.name} ({(last.line or '').strip()})"


def _user_line() -> str:
    """The innermost line that is neither torch's nor ours: `model.py:12 (forward)`."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if _is_users(code.co_filename):
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} ({code.co_name})"
        frame = frame.f_back
    return ""


class _Recorder(TorchDispatchMode):
    """Writes down the operations below autograd and functionalization."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Recorded] = []
        self.tensors: list[torch.Tensor] = []  # alive, so that ids and storages are not used again
        self.numbers: dict[int, int] = {}
        self.values: list[int] = []  # by tensor
        self.storages: dict[int, int] = {}
        self.constants: dict[int, torch.Tensor] = {}
        self.names: dict[int, list[str]] = {}
        self.lines: dict[int, str] = {}
        self.boundary: int | None = None
        self.autograd_nodes: list[Any] = []
        self.regions: list[tuple[range, set[int], Any]] = []
        """Rematerialised functions inside: their calls, the storages that they return, their policies."""
        self.on = True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.on = False
        try:
            yield
        finally:
            self.on = True

    def start_backward(self) -> None:
        self.boundary = len(self.calls)

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Notes what `checkpoint_name` calls a tensor."""
        number = self.numbers.get(id(_bare(tensor)))
        if number is not None:
            names = self.names.setdefault(self.values[number], [])
            if name not in names:
                names.append(name)

    def adopt(self, tensor: torch.Tensor) -> int:
        """Numbers a tensor, and its storage if that is new."""
        number = self.numbers.get(id(tensor))
        if number is None:
            number = self.numbers[id(tensor)] = len(self.tensors)
            check_dense(tensor)
            self.tensors.append(tensor)
            storage = tensor.untyped_storage()._cdata
            self.values.append(self.storages.setdefault(storage, len(self.storages)))
        return number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.on or func.namespace == "prim" or not _holds_tensor(result):
            return result
        if func._schema.is_mutable:
            raise TraceError(f"{_user_line()}: {func} writes in place in a way that cannot be traced. {_WAY_OUT}")
        sent = self._refs(args, func), {k: self._refs(v, func) for k, v in kwargs.items()}
        if func is aten.lift_fresh.default:
            self._same_storage(args[0], result)
        known = len(self.storages)
        outputs = tuple(self.adopt(t) if isinstance(t, torch.Tensor) else None for t in _flat(result))
        is_view = len(self.storages) == known and torch.Tag.nondeterministic_seeded not in func.tags
        self.calls.append(Recorded(func, *sent, outputs, is_view, self._source()))
        return result

    def _same_storage(self, constant: torch.Tensor, lifted: torch.Tensor) -> None:
        # The fake one has a storage of its own; run on real tensors, the operation returns its argument.
        if id(lifted) not in self.numbers:
            self.storages[lifted.untyped_storage()._cdata] = self.values[self.numbers[id(constant)]]

    def _source(self) -> str:
        if self.boundary is None:
            line = _user_line()
            self.lines[torch.autograd._get_sequence_nr() - 1] = line
            return line
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        if not self.autograd_nodes or self.autograd_nodes[-1] is not node:
            self.autograd_nodes.append(node)
        return self.lines.get(node._sequence_nr(), "")

    def _refs(self, value: Any, func: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self.numbers:
                self._constant(value, func)
            return Ref(self.numbers[id(value)])
        if isinstance(value, (list, tuple)):
            return type(value)(self._refs(v, func) for v in value)
        return value

    def _constant(self, tensor: torch.Tensor, func: Any) -> None:
        data = tensor.constant if isinstance(tensor, FakeTensor) else tensor
        if data is None or data.requires_grad or (func is not aten.lift_fresh.default and data.dim() > 0):
            raise TraceError(
                f"{_user_line()}: {func} uses a tensor of shape {list(tensor.shape)} that is neither passed to the "
                "function nor found in its closure. Pass it as an argument, or hold it in a variable, a module, or an "
                f"attribute or container not deeper than four levels. {_WAY_OUT}"
            )
        self.constants[self.adopt(tensor)] = data

    def release(self) -> None:
        """Lets go of autograd's nodes from the outputs on: a long chain at once would exhaust the stack."""
        self.autograd_nodes.reverse()
        while self.autograd_nodes:
            self.autograd_nodes.pop()


def _flat(result: Any) -> list[Any]:
    if isinstance(result, (list, tuple)):
        return [inner for part in result for inner in _flat(part)]
    return [result]


def _holds_tensor(result: Any) -> bool:
    return any(isinstance(x, torch.Tensor) for x in _flat(result))


class _Ends:
    """What comes out of the forward run, and what backward makes of it."""

    def __init__(
        self,
        result: Any,
        operands: list[torch.Tensor],
        numbers: list[int],
        layouts: Sequence[Layout],
        count: int,
        recorder: _Recorder,
    ):
        self.recorder = recorder
        self.operands = operands
        self.operand_numbers = numbers
        self.layouts = layouts
        self.leaves, self.spec = tree.flatten(result)
        known = {id(t): ("in", i) for i, t in enumerate(operands[:count])}
        self.results: list[torch.Tensor] = numbered(self.leaves, known)
        self.flags = tuple(t.requires_grad for t in self.results)
        self.outputs = tuple(recorder.adopt(_bare(t)) for t in self.results)
        self.cotangents: tuple[int | None, ...] = ()
        self.gradients: tuple[int | None, ...] = ()
        self.updates: list[tuple[int, int]] = []

    def differentiate(self) -> None:
        """Runs the backward pass."""
        recorder = self.recorder
        cotangents: list[torch.Tensor | None] = []
        for t, flag in zip(self.results, self.flags, strict=True):
            layout = Layout(tuple(t.shape), t.stride(), t.dtype, t.device, False, False)
            cotangents.append(_stand_in(layout, recorder) if flag else None)
        self.cotangents = tuple(None if ct is None else recorder.adopt(_bare(ct)) for ct in cotangents)
        wanted = [t for t in self.operands if t.requires_grad]
        pairs = [(y, ct) for y, ct in zip(self.results, cotangents, strict=True) if ct is not None]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if wanted and pairs:
            ys, cts = [y for y, _ in pairs], [ct for _, ct in pairs]
            self.results.clear()
            pairs.clear()
            found = torch.autograd.grad(ys, wanted, cts, allow_unused=True)
            del ys
            recorder.release()
        grads = iter(found)
        taken: set[int] = set(self.outputs)
        gradients: list[int | None] = []
        for operand, layout in zip(self.operands, self.layouts, strict=True):
            grad = next(grads) if operand.requires_grad else None
            if grad is not None and layout.accumulates:
                grad = self._own(grad, layout, taken)
            gradients.append(None if grad is None else recorder.adopt(_bare(grad)))
        self.gradients = tuple(gradients)

    def _own(self, grad: torch.Tensor, layout: Layout, taken: set[int]) -> torch.Tensor:
        """The gradient as `.grad` can take it over: a storage of its own, laid out like the leaf.

        Autograd would make a copy of it otherwise, unseen by the plan.
        """
        recorder = self.recorder
        bare = _bare(grad)
        storage = recorder.values[recorder.adopt(bare)]
        given = [*self.operand_numbers, *(ct for ct in self.cotangents if ct is not None)]
        shared = storage in taken or storage in {recorder.values[t] for t in given}
        stride = _strides_of_grad(layout)
        if shared or bare.stride() != stride or bare.untyped_storage().nbytes() != bare.nbytes:
            grad = torch.empty_strided(layout.shape, stride, dtype=grad.dtype, device=grad.device).copy_(grad)
            storage = recorder.values[recorder.adopt(_bare(grad))]
        taken.add(storage)
        return grad

    def note_updates(self, operands: Sequence[torch.Tensor], arguments: Arguments) -> None:
        """Finds closed-over tensors that were changed in place (statistics): (operand, its new value)."""
        for i, operand in enumerate(operands):
            if torch._functionalize_has_data_mutation(operand):  # type: ignore[attr-defined]
                if i < len(arguments.tensors):
                    raise arguments.written(i)
                self.updates.append((self.operand_numbers[i], self.recorder.adopt(_bare(operand))))

    def trace(self, origins: Sequence[str]) -> Trace:
        return Assembly(self, origins).trace()


def _strides_of_grad(layout: Layout) -> tuple[int, ...]:
    """The leaf's own strides where its elements fill its memory, else those of a contiguous tensor."""
    if not is_dense(layout.shape, layout.stride):
        return tuple(torch._prims_common.make_contiguous_strides_for(layout.shape))
    return tuple(layout.stride)
