"""What a function becomes when levels of torch.func are taken off it: the primitives of `transform`.

Each is a pure function of a flat list of tensors: the user's function itself, the same under vmap, under jvp,
and its vector-Jacobian product.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch._C._functorch import is_functorch_wrapped_tensor, unwrap_if_dead
from torch._functorch.vmap import restore_vmap

from fckpt import tree
from fckpt.arguments import Arguments
from fckpt.conditions import BufferHabits, Conditions, Observation, may_be_statistics, unseen, unwrapped, version
from fckpt.errors import ImpureFunctionError, MutationError, OpaqueOutputError
from fckpt.kept import Kept
from fckpt.lift import Recorder, Watch
from fckpt.places import Slot, replaced, tensors_in
from fckpt.segment import HooksUnavailable

__all__ = ["Batched", "Dual", "Flat", "Planned", "Primitive", "Pullback", "Rebuilt", "UserCall", "View", "numbered"]

Flat = list[Any]  # tensors, or None where there is none
Ends = tuple[tree.TreeSpec, Sequence[Any], list[tuple[torch.Size, torch.dtype]]]
"""What a function returns: its structure, its leaves as in `UserCall.leaves`, its tensors' shapes and dtypes."""
_autograd = torch._C._autograd


class View(NamedTuple):
    """An operation that makes views, and one of them."""

    number: int
    """Tells calls apart: views of one call are made together."""
    op: Any
    args: tuple[Any, ...]
    """Without the tensor that it views."""
    kwargs: dict[str, Any]
    result: int
    """Which of its results."""


class Rebuilt(NamedTuple):
    """An output that shares memory with an argument or another output: made from that one again, as a view of it."""

    source: tuple[str, int]
    """('out', i) or ('in', i)."""
    tracked: bool
    """Whether it is differentiated through; else it is detached."""
    steps: tuple[View, ...]
    """One after the other."""

    def of(self, tensor: torch.Tensor, made: dict[Any, Any]) -> torch.Tensor:
        """Makes the view; `made` keeps what views of the same call share."""
        with nullcontext() if self.tracked else torch.no_grad():
            if not self.tracked or not self.steps:
                tensor = tensor.view_as(tensor) if self.tracked else tensor.detach()
            path: tuple[Any, ...] = (self.source, self.tracked)
            for number, op, args, kwargs, index in self.steps:
                path = (*path, number)
                if path not in made:
                    made[path] = op(tensor, *args, **kwargs)
                found = made[path]
                tensor = found if isinstance(found, torch.Tensor) else found[index]
                path = (*path, index)
            return tensor


class Primitive(Protocol):
    """A pure function of a flat list of tensors."""

    def __call__(self, *operands: torch.Tensor) -> Flat: ...


class Planned(Protocol):
    """Computes outputs and gradients of one call by a plan, each once; None when it cannot (any more)."""

    def forward(self, operands: Sequence[torch.Tensor]) -> Flat | None: ...

    def backward(
        self, operands: Sequence[torch.Tensor], given: Sequence[int], cotangents: Sequence[torch.Tensor]
    ) -> Flat | None: ...

    def give_up(self, reason: str) -> None: ...


class UserCall:
    """One call of the user's function. Its operands are the distinct input tensors, then those closed over."""

    def __init__(self, fn: Callable[..., Any], arguments: Arguments, habits: BufferHabits):
        self.fn = [fn]
        """A list, so that the function lies in a place like others: it may be a method of a tensor."""
        self.arguments = arguments
        self.inputs: list[torch.Tensor] = list(arguments.tensors)
        with unseen():
            self.versions = [(weakref.ref(base), version(base)) for base in map(unwrapped, self.inputs)]
        self.count = len(self.inputs)
        self.habits = habits
        self.kept = Kept()
        self.views: dict[int, torch.Tensor] = {}
        """Outputs that were made already, by the id of what says how."""
        self.lifted: list[torch.Tensor] = []
        """The closed-over tensors that the function uses."""
        self.slots: list[Slot] = []
        """The places of inputs and lifted tensors in the closure."""
        self.numbers: dict[int, int] = {}
        """Which operand lies there, by the id of the tensor; the slots keep it alive."""
        self.planned: Planned | None = None
        """What runs instead of the function, as far as it can."""
        self.stale: dict[int, weakref.ref[torch.Tensor]] = {}
        """What a recompute must not use any more."""
        self.conditions: Conditions
        self.spec: tree.TreeSpec
        self.leaves: list[Any] = []
        """What the function returned: tensors replaced by ('out', i) and ('in', i), other leaves as they are."""
        self.shapes: list[tuple[torch.Size, torch.dtype]] = []

    def first(self, discard: bool) -> Flat:
        """The forward run, in the present levels: returns the outputs, still tracked."""
        observation = Observation(self.fn, self.arguments.statics, self.inputs, self.habits)
        args, kwargs = self.arguments.given
        recorder = Recorder(self.inputs, observation.reachable())
        try:
            with _discard_saved() if discard else nullcontext(), recorder, self.kept.recorded():
                result = self.fn[0](*args, **kwargs)
        except _Discarded:
            observation.undo()
            raise HooksUnavailable from None
        except RuntimeError as error:
            if not discard or "saved tensor hooks" not in str(error):
                raise
            observation.undo()
            raise HooksUnavailable from error
        conditions = observation.conditions()
        for i, _, _ in self._changed():
            raise self.arguments.written(i)
        leaves, self.spec = tree.flatten(result)
        recorder.visit(leaves)
        with unseen():
            places = {id(x) for slot in conditions.slots for x in tensors_in(slot[2])}
            self.lifted = [x for key, x in recorder.used.items() if key in places]
            self.settle(conditions)
            recorder.check_lifted(self.numbers)
            self.stale |= recorder.others
        known = {id(x): ("in", i) for i, x in enumerate(self.inputs)}
        outputs = numbered(leaves, known)
        self.leaves = leaves
        self.shapes = [(x.shape, x.dtype) for x in outputs]
        return outputs

    def plan(self, lifted: list[torch.Tensor], ends: Ends) -> None:
        """Takes what `first` finds out from somebody else, who computes the outputs and sets `planned`.

        Args:
            lifted: the closed-over tensors that the function uses and does not write.
            ends: what it returns.
        """
        self.lifted = lifted
        self.spec, leaves, self.shapes = ends
        self.leaves = list(leaves)

    def settle(self, conditions: Conditions) -> None:
        """Takes the conditions of the forward run, once it has ended."""
        self.conditions = conditions
        self.fn[0] = conditions.fn
        operands = [*self.inputs, *self.lifted]
        numbers = {id(x): i for i, x in enumerate(operands)}
        for slot in conditions.slots:
            value = slot[2]
            found = (value,) if isinstance(value, torch.Tensor) else tensors_in(value)
            if keys := [id(x) for x in found if id(x) in numbers]:
                self.slots.append(slot)
                for key in keys:
                    self.numbers[key] = numbers[key]
        stale = [x for x in operands if x.requires_grad or is_functorch_wrapped_tensor(x)]
        self.stale = {id(x): weakref.ref(x) for x in stale}

    def _changed(self) -> list[tuple[int, int, int]]:
        """The inputs that were changed in place since the call: (index, version then, version now)."""
        with unseen():
            bases = [(then, ref()) for ref, then in self.versions]
            pairs = [(then, then if base is None else version(base)) for then, base in bases]
        return [(i, then, now) for i, (then, now) in enumerate(pairs) if then != now]

    def __call__(self, *operands: torch.Tensor) -> Flat:
        """The recompute: the same outputs from other operands."""
        if self.planned is not None:
            outputs = self.planned.forward(operands)
            if outputs is not None:
                return outputs
        for i, then, now in self._changed():
            raise MutationError(
                f"{self.arguments.path(i)} of a rematerialised function was changed in place between forward and "
                f"backward (version {then} -> {now}). Run backward before changing it, or change a copy."
            )
        inputs = [x.clone() if may_be_statistics(x) else x for x in operands[: self.count]]
        # Where it closes over tensors it finds the operands, too.
        present = [*inputs, *operands[self.count :]]
        new = {key: present[number] for key, number in self.numbers.items()}
        closed = [(holder, key, replaced(value, new)) for holder, key, value in self.slots]
        watch = Watch(self.stale, [*operands, *present])
        with self.conditions.restored(lambda: True, closed) as again, watch, self.kept.repeated():
            args, kwargs = self.arguments.rebuild(inputs, again.statics)
            result = again.fn(*args, **kwargs)
        leaves, spec = tree.flatten(result)
        if spec != self.spec:
            raise ImpureFunctionError(
                f"a rematerialised function returned {self.spec} in forward and {spec} in its recompute: it is not "
                "pure. Its result must depend on its arguments alone."
            )
        known = {id(x): ("in", i) for i, x in enumerate(inputs)}
        outputs = self._whole(leaves, numbered(leaves, known))
        for i, x in enumerate(outputs):
            if i >= len(self.shapes) or (x.shape, x.dtype) != self.shapes[i]:
                then = f"{self.shapes[i][1]}{list(self.shapes[i][0])}" if i < len(self.shapes) else "nothing"
                raise ImpureFunctionError(
                    f"output {i} of a rematerialised function was {then} in forward and is {x.dtype}{list(x.shape)} "
                    "in its recompute: it is not pure. Its result must depend on its arguments alone."
                )
        return outputs

    def view_inputs(self, inputs: Sequence[torch.Tensor]) -> None:
        """Makes the outputs that are views of inputs.

        Before the function runs, so that autograd adds up their gradients after those of what it computes: the order of
        a function that returns, beside a result, views of what it was given.
        """
        made: dict[Any, Any] = {}
        for x in self.leaves:
            if isinstance(x, Rebuilt) and x.source[0] == "in" and id(x) not in self.views:
                self.views[id(x)] = x.of(inputs[x.source[1]], made)

    def assemble(self, outputs: Flat, inputs: Sequence[torch.Tensor]) -> Any:
        """Puts tensors back in the places of their numbers."""
        sources = {"out": outputs, "in": inputs}
        made: dict[Any, Any] = {}
        views, self.views = self.views, {}
        leaves: list[Any] = []
        for x in self.leaves:
            if isinstance(x, Rebuilt):
                if id(x) not in views:
                    views[id(x)] = x.of(sources[x.source[0]][x.source[1]], made)
                leaves.append(views[id(x)])
            else:
                leaves.append(sources[x[0]][x[1]] if is_number(x) else x)
        return tree.unflatten(self.spec, leaves)

    def _whole(self, leaves: Sequence[Any], outputs: Flat) -> Flat:
        """The tensors that a plan has for outputs: where some are views, what they are views of."""
        if not any(isinstance(x, Rebuilt) for x in self.leaves):
            return outputs
        found: dict[int, Any] = {}
        for planned, leaf in zip(self.leaves, leaves, strict=True):
            if isinstance(planned, Rebuilt):
                if planned.source[0] == "out" and planned.tracked:
                    view = outputs[leaf[1]]
                    found.setdefault(planned.source[1], view if view._base is None else view._base)
            elif is_number(planned) and planned[0] == "out":
                found[planned[1]] = outputs[leaf[1]]
        return [found[i] for i in range(len(self.shapes))]


def numbered(leaves: list[Any], known: dict[int, tuple[str, int]]) -> Flat:
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


def is_number(leaf: Any) -> bool:
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


class Batched:
    """`primitive` under vmap, as a function of the batches."""

    def __init__(self, primitive: Primitive, dims: Sequence[int | None], size: int, randomness: str):
        self.primitive = primitive
        self.dims = tuple(dims)
        self.size = size
        self.randomness = randomness
        self.out_dims: tuple[int | None, ...] = ()

    def __call__(self, *operands: torch.Tensor) -> Flat:
        batched = restore_vmap(lambda *xs: tuple(self.primitive(*xs)), self.dims, self.size, self.randomness)
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

        values, derivatives = torch.func.jvp(moved, tuple(primals[i] for i in self.moving), tangents)[:2]
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
        computed: Sequence[bool],
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
        self.computed = tuple(computed)
        """Which operands of `primitive` autocast casts anew for each operation, see `Layout.computed`."""
        self.layers = layers

    def layered(self, dims: Sequence[int | None], size: int, randomness: str) -> Pullback | None:
        """This pullback under one more vmap, if that batches cotangents only."""
        count = len(self.needs)
        if any(d is not None for d in dims[:count]):
            return None
        layers = (*self.layers, _Layer(dims[count:], size, randomness))
        return Pullback(
            self.primitive,
            self.outputs,
            self.needs,
            plain=self.plain,
            create_graph=self.create_graph,
            computed=self.computed,
            layers=layers,
        )

    @property
    def out_dims(self) -> tuple[int | None, ...]:
        return self.layers[-1].out_dims

    def __call__(self, *operands: torch.Tensor) -> Flat:
        count = len(self.needs)
        inputs, cotangents = operands[:count], operands[count:]
        planned = self.primitive.planned if isinstance(self.primitive, UserCall) else None
        if planned is not None and self.layers:
            planned.give_up("batched backward")
        elif planned is not None:
            grads = planned.backward(inputs, self.outputs, cotangents)
            if grads is not None:
                return [grad for grad, need in zip(grads, self.needs, strict=True) if need]
        wanted = [i for i, need in enumerate(self.needs) if need]
        pull = self._plain(inputs, wanted, operands) if self.plain else self._functional(inputs, wanted)
        for layer in self.layers:
            pull = layer.around(pull)
        return list(pull(*cotangents))

    def _functional(self, inputs: Sequence[torch.Tensor], wanted: list[int]) -> Callable[..., Any]:
        def chosen(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            full = list(inputs)
            for i, x in zip(wanted, xs, strict=True):
                full[i] = x.view_as(x) if self.computed[i] else x
            outputs = self.primitive(*full)
            return tuple(outputs[i] for i in self.outputs)

        vjp = torch.func.vjp(chosen, *(inputs[i] for i in wanted))[1]
        retain = bool(self.layers)
        return lambda *cts: vjp(cts, retain_graph=retain, create_graph=self.create_graph)

    def _plain(
        self, inputs: Sequence[torch.Tensor], wanted: list[int], operands: Sequence[torch.Tensor]
    ) -> Callable[..., Any]:
        tracked = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
        with torch.enable_grad():
            xs = list(inputs)
            dependent = any(self.computed[i] for i in wanted)
            for i in wanted:
                same = tracked and xs[i].requires_grad
                xs[i] = xs[i] if same else xs[i].detach().requires_grad_()
                # An alias, so that inputs that depend on one another have gradients of their own.
                if self.computed[i] or (same and dependent):
                    xs[i] = torch.ops.aten.alias(xs[i])
            outputs = self.primitive(*xs)

        def pull(*cts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            pairs = [(outputs[i], ct) for i, ct in zip(self.outputs, cts, strict=True) if outputs[i].requires_grad]
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
