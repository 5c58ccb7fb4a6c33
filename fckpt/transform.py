"""Recompute under torch.func: a differentiable node at every level of the transform stack.

`torch.func.grad`, `vjp`, `jvp` and `vmap` each push a level; a tensor is wrapped once per level that tracks it.
Saved-tensor hooks do not exist there. So a rematerialised function runs as it stands in the levels at hand,
with what autograd saves thrown away, and its outputs are then attached, level by level, to a node that holds
the inputs alone. The node's backward evaluates the function's vector-Jacobian product, which is itself such
a function (of inputs and cotangents) and is attached in the same way. So every order of derivative is
rematerialised.

While levels are taken off, a function becomes another one: under vmap `Batched(p)`, under jvp `Dual(p)`, in
backward `Pullback(p)`. These, and `UserCall` at the bottom, are the primitives of this file.

Reference: R. Frostig, M. Johnson, D. Maclaurin, A. Paszke, A. Radul, "Decomposing reverse-mode automatic
differentiation" (2021), https://arxiv.org/abs/2105.09469, for transposition as a transform; the level
structure is functorch's.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch._C._functorch import (
    TransformType,
    _add_batch_dim,
    _unwrap_batched,
    _unwrap_for_grad,
    _wrap_for_grad,
    get_interpreter_stack,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    maybe_get_level,
    peek_interpreter_stack,
    unwrap_if_dead,
)
from torch._functorch.pyfunctorch import coerce_cinterpreter
from torch._functorch.utils import enable_single_level_autograd_function
from torch._functorch.vmap import restore_vmap
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.overrides import TorchFunctionMode

from fckpt import tree
from fckpt.arguments import Arguments
from fckpt.conditions import BufferHabits, Conditions, Observation, may_be_statistics, version
from fckpt.errors import ImpureFunctionError, MutationError, OpaqueOutputError
from fckpt.segment import HooksUnavailable

__all__ = ["run_nodes"]

Flat = list[Any]  # tensors, or None where there is none
_autograd = torch._C._autograd


class Primitive(Protocol):
    """A pure function of a flat list of tensors."""

    def __call__(self, *operands: torch.Tensor) -> Flat: ...


def run_nodes(
    fn: Callable[..., Any], arguments: Arguments, habits: BufferHabits, *, discard: bool = True
) -> Any:
    """Calls `fn` on `arguments` and attaches the outputs to nodes that recompute, at all levels.

    Args:
        fn: the user's function.
        arguments: its arguments.
        habits: kept from call to call, see `conditions`.
        discard: whether what autograd saves in the forward can be thrown away as it is saved. It cannot when
            `fn` differentiates inside; then it lives to the end of the forward.

    Raises:
        HooksUnavailable: `discard` was asked for and is impossible; all is as if `fn` had not been called.
        OpaqueOutputError: `fn` returned tensors inside an object that is no pytree.
    """
    call = UserCall(fn, arguments, habits)
    outputs = call.first(discard)
    operands = call.inputs + [resolved for _, resolved in call.lifted]
    attached = attach(call, [unwrap_if_dead(x) for x in operands], outputs)
    call.inputs = []
    return call.assemble(attached, arguments.tensors)


# -- the user's function ---------------------------------------------------------------------------------


class UserCall:
    """One call of the user's function. Its operands are the distinct input tensors, then those closed over."""

    def __init__(self, fn: Callable[..., Any], arguments: Arguments, habits: BufferHabits):
        self.fn = fn
        self.arguments = arguments
        self.inputs: list[torch.Tensor] = list(arguments.tensors)
        self.versions = [(base, version(base)) for base in map(_base, self.inputs)]
        self.count = len(self.inputs)
        self.habits = habits
        self.lifted: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Closed-over tensors that are differentiated: (as the function knows it, as seen from outside)."""
        self.conditions: Conditions
        self.spec: tree.TreeSpec
        self.leaves: list[Any] = []
        """What the function returned: tensors replaced by ('out', i) and ('in', i), other leaves as they are."""
        self.shapes: list[tuple[torch.Size, torch.dtype]] = []

    def first(self, discard: bool) -> Flat:
        """The forward run, in the present levels: returns the outputs, still tracked."""
        observation = Observation(self.fn, self.arguments.statics + self.inputs, self.habits)
        args, kwargs = self.arguments.rebuild(self.inputs)
        recorder = _Recorder(self.inputs)
        try:
            with _discard_saved() if discard else nullcontext(), recorder:
                result = self.fn(*args, **kwargs)
        except _Discarded:
            observation.undo()
            raise HooksUnavailable from None
        except RuntimeError as error:
            if not discard or "saved tensor hooks" not in str(error):
                raise
            observation.undo()
            raise HooksUnavailable from error
        self.conditions = observation.conditions()
        for i, (base, then) in enumerate(self.versions):
            if version(base) != then:
                raise MutationError(
                    f"{self.arguments.path(i)} was changed in place by the rematerialised function itself; its "
                    "recompute would change it again. Return the new value instead of writing into the argument "
                    "(`fckpt.from_module` does so for a module's buffers)."
                )
        self.lifted = list(recorder.lifted.values())
        known = {id(x): ("in", i) for i, x in enumerate(self.inputs)}
        leaves, self.spec = tree.flatten(result)
        outputs = self._number(leaves, known)
        self.leaves = leaves
        self.shapes = [(x.shape, x.dtype) for x in outputs]
        return outputs

    @staticmethod
    def _number(leaves: list[Any], known: dict[int, tuple[str, int]]) -> Flat:
        """Replaces the tensors in `leaves` by their numbers; returns the distinct new ones."""
        outputs: Flat = []
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                if id(leaf) not in known:
                    known[id(leaf)] = ("out", len(outputs))
                    outputs.append(leaf)
                leaves[position] = known[id(leaf)]
            elif _hides_tensors(leaf):
                raise OpaqueOutputError(
                    f"a rematerialised function returned a {type(leaf).__name__}, which holds tensors and is no "
                    "pytree, so torch.func cannot differentiate through it. Return a tuple or a dict, or "
                    "register the type with optree.register_pytree_node."
                )
        return outputs

    def __call__(self, *operands: torch.Tensor) -> Flat:
        """The recompute: the same outputs from other operands."""
        for i, (base, then) in enumerate(self.versions):
            if version(base) != then:
                raise MutationError(
                    f"{self.arguments.path(i)} of a rematerialised function was changed in place between forward and "
                    f"backward (version {then} -> {version(base)}). Run backward before changing it, or change a copy."
                )
        inputs = [x.clone() if may_be_statistics(x) else x for x in operands[: self.count]]
        args, kwargs = self.arguments.rebuild(inputs)
        substitutes = {id(t): x for (t, _), x in zip(self.lifted, operands[self.count :], strict=True)}
        with self.conditions.restored(lambda: True), _Substitution(substitutes):
            result = self.fn(*args, **kwargs)
        leaves, spec = tree.flatten(result)
        if spec != self.spec:
            raise ImpureFunctionError(
                f"a rematerialised function returned {self.spec} in forward and {spec} in its recompute: it is not "
                "pure. Its result must depend on its arguments alone."
            )
        known = {id(x): ("in", i) for i, x in enumerate(inputs)}
        tensors = [substitutes.get(id(x), x) if isinstance(x, torch.Tensor) else x for x in leaves]
        outputs = self._number(tensors, known)
        for i, x in enumerate(outputs):
            if i >= len(self.shapes) or (x.shape, x.dtype) != self.shapes[i]:
                then = f"{self.shapes[i][1]}{list(self.shapes[i][0])}" if i < len(self.shapes) else "nothing"
                raise ImpureFunctionError(
                    f"output {i} of a rematerialised function was {then} in forward and is {x.dtype}{list(x.shape)} "
                    "in its recompute: it is not pure. Its result must depend on its arguments alone."
                )
        return outputs

    def assemble(self, outputs: Flat, inputs: Sequence[torch.Tensor]) -> Any:
        """Puts tensors back in the places of their numbers."""
        sources = {"out": outputs, "in": inputs}
        leaves = [sources[x[0]][x[1]] if _is_number(x) else x for x in self.leaves]
        return tree.unflatten(self.spec, leaves)


def _base(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without its wrappers: in-place work shows in the version of this one."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def _is_number(leaf: Any) -> bool:
    return type(leaf) is tuple and len(leaf) == 2 and leaf[0] in ("out", "in")


def _hides_tensors(leaf: Any) -> bool:
    if isinstance(leaf, (bool, int, float, complex, str, bytes, torch.nn.Module)) or callable(leaf):
        return False
    attributes = leaf.values() if isinstance(leaf, dict) else getattr(leaf, "__dict__", {}).values()
    return any(isinstance(value, torch.Tensor) for value in attributes)


class _Discarded(Exception):
    pass


@contextmanager
def _discard_saved() -> Any:
    """Autograd records the body (so that it picks the same kernels) and keeps no tensor of it."""
    message = None
    if not _autograd._saved_tensors_hooks_is_enabled():
        message = _autograd._saved_tensors_hooks_get_disabled_error_message()
        _autograd._saved_tensors_hooks_enable()

    def unpack(_: None) -> torch.Tensor:
        raise _Discarded

    _autograd._push_saved_tensors_default_hooks(lambda tensor: None, unpack)
    try:
        yield
    finally:
        _autograd._pop_saved_tensors_default_hooks()
        if message is not None:
            _autograd._saved_tensors_hooks_disable(message)


# -- closed-over tensors ---------------------------------------------------------------------------------


class _Scopes(threading.local):
    """The functions being run or run again in this thread, outermost first."""

    def __init__(self) -> None:
        self.stack: list[_Scope] = []


_scopes = _Scopes()


class _Scope(TorchFunctionMode):
    """Sees every torch function called while a function runs."""

    def __enter__(self) -> _Scope:
        self.parent = _scopes.stack[-1] if _scopes.stack else None
        _scopes.stack.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _scopes.stack.pop()

    def resolve(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for a closed-over tensor here."""
        return tensor if self.parent is None else self.parent.resolve(tensor)


class _Recorder(_Scope):
    """Finds, while a function runs, the differentiated tensors that it closes over.

    Such a tensor is tracked by some level and neither an input nor made inside: it is a leaf that was not
    seen to become one inside, or its history began before the function did (autograd numbers its nodes).
    """

    def __init__(self, inputs: Sequence[torch.Tensor]):
        super().__init__()
        self.inside = {id(x) for x in inputs}
        self.alive: list[Any] = []
        self.lifted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.start = torch.autograd._get_sequence_nr()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._visit(args)
        if kwargs:
            self._visit(kwargs.values())
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.requires_grad_ or func is _SET_REQUIRES_GRAD:
            self.inside.add(id(args[0]))
            self.alive.append(args[0])
        return result

    def _visit(self, values: Any) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                key = id(value)
                if key not in self.inside and key not in self.lifted:
                    resolved = self.resolve(value)
                    if self.foreign(resolved):
                        self.lifted[key] = (value, resolved)
            elif type(value) in (list, tuple):
                self._visit(value)
            elif type(value) is dict:
                self._visit(value.values())

    def foreign(self, tensor: torch.Tensor) -> bool:
        while True:
            if id(tensor) in self.inside:
                return False
            if tensor.requires_grad:
                node = tensor.grad_fn
                if node is None or node._sequence_nr() < self.start:
                    return True
            if not is_functorch_wrapped_tensor(tensor):
                return False
            tensor = get_unwrapped(tensor)


class _Substitution(_Scope):
    """Puts other tensors in the places of closed-over ones, while a function runs."""

    def __init__(self, substitutes: dict[int, torch.Tensor]):
        super().__init__()
        self.substitutes = substitutes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.substitutes:
            args = tuple(self._replace(a) for a in args)
            kwargs = {k: self._replace(v) for k, v in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))

    def _replace(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.substitutes.get(id(value), value)
        if type(value) in (list, tuple):
            return type(value)(self._replace(v) for v in value)
        return value

    def resolve(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self.substitutes:
            return self.substitutes[id(tensor)]
        return super().resolve(tensor)


_SET_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]


# -- the primitives --------------------------------------------------------------------------------------


class Batched:
    """`primitive` under vmap, as a function of the batches."""

    def __init__(self, primitive: Primitive, dims: Sequence[int | None], size: int, randomness: str):
        self.primitive = primitive
        self.dims = tuple(dims)
        self.size = size
        self.randomness = randomness
        self.out_dims: tuple[int | None, ...] = ()

    def __call__(self, *operands: torch.Tensor) -> Flat:
        batched = restore_vmap(
            lambda *xs: tuple(self.primitive(*xs)), self.dims, self.size, self.randomness
        )
        outputs, out_dims = batched(*operands)
        self.out_dims = tuple(out_dims)
        return list(outputs)


class Dual:
    """`primitive` under jvp: from its operands, and the tangents of those in `moving`, to outputs and tangents."""

    def __init__(self, primitive: Primitive, count: int, moving: Sequence[int]):
        self.primitive = primitive
        self.count = count
        self.moving = tuple(moving)

    def __call__(self, *operands: torch.Tensor) -> Flat:
        primals, tangents = operands[: self.count], operands[self.count :]
        outputs: Flat = []
        differentiable: list[int] = []

        def moved(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            full = list(primals)
            for i, x in zip(self.moving, xs, strict=True):
                full[i] = x
            outputs[:] = self.primitive(*full)
            differentiable[:] = [i for i, x in enumerate(outputs) if _is_differentiable(x)]
            return tuple(outputs[i] for i in differentiable)

        values, derivatives = torch.func.jvp(moved, tuple(primals[i] for i in self.moving), tangents)
        outputs = [None if x is None else unwrap_if_dead(x) for x in outputs]
        out_tangents: Flat = [None] * len(outputs)
        for i, value, derivative in zip(differentiable, values, derivatives, strict=True):
            outputs[i], out_tangents[i] = value, derivative
        return outputs + out_tangents


def _is_differentiable(x: torch.Tensor | None) -> bool:
    return x is not None and (x.is_floating_point() or x.is_complex())


class _Layer:
    """A vmap around the cotangents of a `Pullback`, whose inputs it leaves alone."""

    def __init__(self, dims: Sequence[int | None], size: int, randomness: str):
        self.dims = tuple(dims)
        self.size = size
        self.randomness = randomness
        self.out_dims: tuple[int | None, ...] = ()

    def around(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def batched(*cotangents: torch.Tensor) -> tuple[Any, ...]:
            outputs, dims = restore_vmap(fn, self.dims, self.size, self.randomness)(*cotangents)
            self.out_dims = tuple(dims)
            return outputs

        return batched


class Pullback:
    """The vector-Jacobian product of `primitive`: from its operands and cotangents to gradients.

    The inputs are recomputed from once, outside of the vmaps in `layers`, which batch cotangents alone (as
    `jacrev` does); so random operations are drawn once, as in the forward.
    """

    def __init__(
        self,
        primitive: Primitive,
        outputs: Sequence[int],
        needs: Sequence[bool],
        *,
        plain: bool,
        create_graph: bool,
        layers: tuple[_Layer, ...] = (),
    ):
        self.primitive = primitive
        self.outputs = tuple(outputs)
        """Which outputs have a cotangent."""
        self.needs = tuple(needs)
        """Which operands of `primitive` need a gradient."""
        self.plain = plain
        """Whether plain autograd recorded the forward. Its formulas are then used, else torch.func's."""
        self.create_graph = create_graph
        """The grad mode of the backward that asks; some formulas depend on it."""
        self.layers = layers

    def layered(self, dims: Sequence[int | None], size: int, randomness: str) -> Pullback | None:
        """This pullback under one more vmap, if that batches cotangents only."""
        count = len(self.needs)
        if any(d is not None for d in dims[:count]):
            return None
        layers = (*self.layers, _Layer(dims[count:], size, randomness))
        return Pullback(
            self.primitive, self.outputs, self.needs, plain=self.plain, create_graph=self.create_graph, layers=layers
        )

    @property
    def out_dims(self) -> tuple[int | None, ...]:
        return self.layers[-1].out_dims

    def __call__(self, *operands: torch.Tensor) -> Flat:
        count = len(self.needs)
        inputs, cotangents = operands[:count], operands[count:]
        wanted = [i for i, need in enumerate(self.needs) if need]
        pull = self._plain(inputs, wanted, operands) if self.plain else self._functional(inputs, wanted)
        for layer in self.layers:
            pull = layer.around(pull)
        return list(pull(*cotangents))

    def _functional(self, inputs: Sequence[torch.Tensor], wanted: list[int]) -> Callable[..., Any]:
        def chosen(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            full = list(inputs)
            for i, x in zip(wanted, xs, strict=True):
                full[i] = x
            outputs = self.primitive(*full)
            return tuple(outputs[i] for i in self.outputs)

        _, vjp = torch.func.vjp(chosen, *(inputs[i] for i in wanted))
        retain = bool(self.layers)
        return lambda *cts: vjp(cts, retain_graph=retain, create_graph=self.create_graph)

    def _plain(
        self, inputs: Sequence[torch.Tensor], wanted: list[int], operands: Sequence[torch.Tensor]
    ) -> Callable[..., Any]:
        tracked = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
        with torch.enable_grad():
            xs = list(inputs)
            for i in wanted:
                # An alias, so that inputs that depend on one another have gradients of their own.
                same = tracked and xs[i].requires_grad
                xs[i] = torch.ops.aten.alias(xs[i]) if same else xs[i].detach().requires_grad_()
            outputs = self.primitive(*xs)

        def pull(*cts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            pairs = [
                (outputs[i], ct) for i, ct in zip(self.outputs, cts, strict=True) if outputs[i].requires_grad
            ]
            if not pairs:
                return tuple(None for _ in wanted)
            return torch.autograd.grad(
                [y for y, _ in pairs],
                [xs[i] for i in wanted],
                [ct for _, ct in pairs],
                allow_unused=True,
                retain_graph=bool(self.layers) or tracked or None,
                create_graph=tracked or self.create_graph,
            )

        return pull


# -- levels ----------------------------------------------------------------------------------------------


def bind(primitive: Primitive, operands: Sequence[torch.Tensor], floor: int) -> Flat:
    """Evaluates `primitive` and attaches its outputs.

    Levels above `floor` are newer than the forward that `primitive` belongs to. It is evaluated below them.
    """
    return _descend(primitive, operands, None, floor)


_FORWARD = sys.maxsize  # a floor above all levels: of the forward itself, no level is new


def attach(primitive: Primitive, operands: Sequence[torch.Tensor], outputs: Flat) -> Flat:
    """Returns `outputs`, which `primitive` made of `operands`, with a node behind them at every level."""
    return _descend(primitive, operands, outputs, _FORWARD)


def _descend(primitive: Primitive, operands: Sequence[torch.Tensor], outputs: Flat | None, floor: int) -> Flat:
    top = peek_interpreter_stack()
    if outputs is None and (top is None or top.level() <= floor):
        outputs = _evaluate(primitive, operands)
    if outputs is not None and not any(_tracked(x) for x in operands):
        return outputs
    if top is None:
        assert outputs is not None
        flags = [x is not None and x.requires_grad for x in outputs] if floor == _FORWARD else None
        return _node(primitive, operands, [x if x is None else x.detach() for x in outputs], flags, 0, floor)
    interpreter = coerce_cinterpreter(top)
    descend = {
        TransformType.Grad: _descend_grad,
        TransformType.Vmap: _descend_vmap,
        TransformType.Jvp: _descend_jvp,
    }[interpreter.key()]
    return descend(interpreter, primitive, operands, outputs, floor)


def _evaluate(primitive: Primitive, operands: Sequence[torch.Tensor]) -> Flat:
    """Evaluates `primitive` in the present levels, unrecorded."""
    # Grad mode alone does not keep a pullback unrecorded: in backward, autograd sets it as it needs. Detached
    # operands do, but lose their tangents, so under jvp the record is made and dropped.
    if all(c.key() != TransformType.Jvp for c in get_interpreter_stack() or ()):
        operands = [x.detach() for x in operands]
    with torch.no_grad():
        return primitive(*operands)


def _tracked(tensor: torch.Tensor) -> bool:
    while not tensor.requires_grad:
        if not is_functorch_wrapped_tensor(tensor):
            return False
        tensor = get_unwrapped(tensor)
    return True


def _map(fn: Callable[[torch.Tensor], Any], flat: Flat) -> Flat:
    return [None if x is None else fn(x) for x in flat]


def _descend_grad(
    interpreter: Any, primitive: Primitive, operands: Sequence[torch.Tensor], outputs: Flat | None, floor: int
) -> Flat:
    level = interpreter.level()
    flags = None
    if outputs is not None:
        if floor == _FORWARD:
            flags = [x is not None and maybe_get_level(x) == level and x.requires_grad for x in outputs]
        outputs = _map(lambda x: _unwrap_for_grad(x, level), outputs)
    inner = [_unwrap_for_grad(x, level) for x in operands]
    with interpreter.lower():
        below = _descend(primitive, inner, outputs, floor)
    return _node(primitive, operands, _map(lambda x: _wrap_for_grad(x, level), below), flags, level, floor)


def _descend_vmap(
    interpreter: Any, primitive: Primitive, operands: Sequence[torch.Tensor], outputs: Flat | None, floor: int
) -> Flat:
    level, size, randomness = interpreter.level(), interpreter.batch_size(), interpreter.randomness()
    values, dims = _unbatch(operands, level)
    layered = None
    if level > floor:
        # The forward was not under this vmap: what it drew, it drew once.
        randomness = "same"
        if isinstance(primitive, Pullback):
            layered = primitive.layered(dims, size, randomness)
    batched = layered or Batched(primitive, dims, size, randomness)
    out_dims: Sequence[int | None] | None = None
    if outputs is not None:
        outputs, out_dims = _unbatch(outputs, level)
    with interpreter.lower():
        below = _descend(batched, values, outputs, floor)
    if out_dims is None:
        out_dims = batched.out_dims
    return [x if d is None else _add_batch_dim(x, d, level) for x, d in zip(below, out_dims, strict=True)]


def _unbatch(flat: Sequence[Any], level: int) -> tuple[Flat, list[int | None]]:
    pairs = [(None, None) if x is None else _unwrap_batched(x, level) for x in flat]
    return [value for value, _ in pairs], [dim for _, dim in pairs]


def _descend_jvp(
    interpreter: Any, primitive: Primitive, operands: Sequence[torch.Tensor], outputs: Flat | None, floor: int
) -> Flat:
    level = interpreter.level()
    primals, tangents = _undual(operands, level)
    moving = [i for i, t in enumerate(tangents) if t is not None]
    if moving:
        primitive = Dual(primitive, len(primals), moving)
    if outputs is not None:
        values, derivatives = _undual(outputs, level)
        outputs = values + derivatives if moving else values
    with interpreter.lower():
        below = _descend(primitive, primals + [tangents[i] for i in moving], outputs, floor)
    count = len(below) // 2 if moving else len(below)
    values = _map(lambda x: _wrap_for_grad(x, level), below[:count])
    for i, tangent in enumerate(below[count:]):
        if tangent is not None:
            values[i] = forward_ad.make_dual(values[i], _wrap_for_grad(tangent, level))
    return values


def _undual(flat: Sequence[Any], level: int) -> tuple[Flat, Flat]:
    primals: Flat = []
    tangents: Flat = []
    for x in flat:
        primal, tangent = x, None
        if x is not None and maybe_get_level(x) == level:
            primal, tangent = forward_ad.unpack_dual(x)
        primals.append(None if primal is None else _unwrap_for_grad(primal, level))
        tangents.append(None if tangent is None else _unwrap_for_grad(tangent, level))
    return primals, tangents


# -- the node --------------------------------------------------------------------------------------------


def _node(
    primitive: Primitive,
    operands: Sequence[torch.Tensor],
    outputs: Flat,
    flags: list[bool] | None,
    level: int,
    floor: int,
) -> Flat:
    if not torch.is_grad_enabled():
        return outputs
    if level:
        # What is not of this level is a constant here, whether or not a lower level tracks it.
        operands = [x if maybe_get_level(x) == level else _wrap_for_grad(x, level) for x in operands]
    if not any(x.requires_grad for x in operands):
        return outputs
    with enable_single_level_autograd_function():
        return list(_Recompute.apply(primitive, level, floor, outputs, flags, *operands))


class _Recompute(_SingleLevelFunction):
    """The node: saves its operands, and evaluates the pullback of its primitive on them."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        primitive: Primitive,
        level: int,
        floor: int,
        outputs: Flat,
        flags: list[bool] | None,
        *operands: torch.Tensor,
    ) -> tuple[Any, ...]:
        ctx.primitive = primitive
        ctx.level = level
        ctx.floor = floor
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands)
        if flags is not None:
            ctx.mark_non_differentiable(*(x for x, flag in zip(outputs, flags, strict=True) if x is not None and not flag))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        saved = _saved_tensors(ctx)
        needs = ctx.needs_input_grad[5:]
        given = [i for i, ct in enumerate(cotangents) if ct is not None]
        grads: Flat = [None] * len(saved)
        if given:
            level = ctx.level
            alive = level == 0 or any(maybe_get_level(x) == level for x in saved)
            pullback = Pullback(
                ctx.primitive, given, needs, plain=level == 0, create_graph=torch.is_grad_enabled()
            )
            operands = [unwrap_if_dead(x) for x in (*saved, *(ct for ct in cotangents if ct is not None))]
            found = iter(bind(pullback, operands, min(ctx.floor, level if alive else level - 1)))
            grads = [next(found) if need else None for need in needs]
        return (None, None, None, None, None, *grads)


def _saved_tensors(ctx: Any) -> tuple[torch.Tensor, ...]:
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise MutationError(
            "an argument of a rematerialised function was changed in place between forward and backward: its "
            "recompute would see other values. Run backward before changing it, or change a copy."
        ) from error
