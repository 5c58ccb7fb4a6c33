"""The primitives of `attached`: a function after levels of torch.func have been taken off it.

Each is a pure function of a flat list of tensors: the user's function itself, the same under vmap or jvp, and its
vector-Jacobian product.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch._C._functorch import _unwrap_for_grad, _wrap_for_grad, is_functorch_wrapped_tensor, unwrap_if_dead
from torch._functorch.eager_transforms import _create_differentiable, grad_increment_nesting
from torch._functorch.vmap import restore_vmap

from fckpt import _tree as tree
from fckpt._call.arguments import Arguments
from fckpt._call.conditions import BufferWrites, Conditions, Observation, may_be_statistics
from fckpt._call.levels import EXCLUDE_LEGACY_VMAP, transforms_active, unseen, unwrapped, version
from fckpt._call.messages import Messages
from fckpt._call.places import Slot, replaced, tensors_in
from fckpt._call.results import Flat, Rebuilt, Returned, is_number, numbered
from fckpt._recompute.closed_over import UseRecorder, Watch
from fckpt._recompute.gradients_inside import Gradients
from fckpt._recompute.registrations import Registrations, handles_made, on_new_tensors
from fckpt._recompute.saved_tensors import HooksUnavailable, allow_hooks, disallow_hooks, pop, push
from fckpt.errors import ImpureFunctionError, MutationError, region_name

__all__ = ["Batched", "Dual", "Planned", "Primitive", "Pullback", "UserCall"]


class Primitive(Protocol):
    """A pure function of a flat list of tensors."""

    def __call__(self, *operands: torch.Tensor) -> Flat: ...


class Planned(Protocol):
    """Computes the outputs and gradients of one call by a plan, each once; returns None if it cannot (any more)."""

    @property
    def summed(self) -> Mapping[int, bool]:
        """The operands whose gradients are sums of several contributions, each with whether a contribution of others
        may change the bits of the sum even if it comes last.
        """
        ...

    @property
    def as_computed(self) -> bool:
        """Whether the gradients of leaves are as the backward pass computes them: several may be one tensor."""
        ...

    def used_elsewhere(self, operand: int) -> None:
        """Is called if others have contributed to the gradient of such an operand."""
        ...

    def forward(self, operands: Sequence[torch.Tensor]) -> Flat | None: ...

    def backward(
        self,
        operands: Sequence[torch.Tensor],
        given: Sequence[int],
        cotangents: Sequence[torch.Tensor],
        *,
        recorded: bool,
        wrapped: bool,
        receivers: Sequence[torch.Tensor],
    ) -> Flat | None: ...

    def give_up(self, reason: str) -> None: ...


class UserCall:
    """One call of the user's function. Its operands are the distinct input tensors, followed by the captured tensors it
    uses.
    """

    def __init__(self, fn: Callable[..., Any], arguments: Arguments, buffer_writes: BufferWrites):
        self.fn = [fn]
        """In a list, so that the function is itself in a place: it may be a method of a tensor."""
        self.arguments = arguments
        self.inputs: list[torch.Tensor] = list(arguments.tensors)
        with unseen():
            self.versions = [(weakref.ref(base), version(base)) for base in map(unwrapped, self.inputs)]
        self.count = len(self.inputs)
        self.buffer_writes = buffer_writes
        self.messages = Messages()
        self.views: dict[int, torch.Tensor] = {}
        """Outputs that exist already, by the id of their `Rebuilt`."""
        self.closed_over: list[torch.Tensor] = []
        """The captured tensors that the function uses."""
        self.slots: list[Slot] = []
        """The places in the closure that hold operands."""
        self.numbers: dict[int, int] = {}
        """The number of each of these operands, by the id of the tensor; the slots keep the tensors alive."""
        self.delivered: Sequence[int] = ()
        """The operands that are leaves, in the order in which plain autograd gives them their gradients, if known."""
        self.planned: Planned | None = None
        """The execution of a plan, which runs instead of the function where it can."""
        self.registers = False
        """Whether the function registers hooks."""
        self.stale: dict[int, weakref.ref[torch.Tensor]] = {}
        """Tensors of the forward that a recompute must not use."""
        self.conditions: Conditions
        self.spec: tree.TreeSpec
        self.leaves: list[Any] = []
        """The leaves of the result: tensors are replaced by ('out', i) and ('in', i), other leaves are unchanged."""
        self.shapes: list[tuple[torch.Size, torch.dtype]] = []

    def first(self, discard: bool) -> Flat:
        """Runs the forward under the active levels; returns the outputs, still tracked."""
        observation = Observation(self.fn, self.arguments.statics, self.inputs, self.buffer_writes)
        args, kwargs = self.arguments.given
        gradients = Gradients((*self.inputs, *observation.held()) if not transforms_active() else ())
        recorder = UseRecorder(self.fn[0], self.inputs, observation.reachable())
        handles = handles_made()
        try:
            with _discard_saved() if discard else nullcontext(), recorder, self.messages.recording():
                result = self.fn[0](*args, **kwargs)
        except _Discarded:
            observation.undo()
            raise HooksUnavailable from None
        except RuntimeError as error:
            if not discard or "saved tensor hooks" not in str(error):
                raise
            observation.undo()
            raise HooksUnavailable from error
        self.registers = handles_made() != handles
        gradients.check(self.fn[0], differentiated=recorder.differentiated)
        conditions = observation.conditions()
        for i, _, _ in self._changed():
            raise self.arguments.written(i, self.fn[0])
        leaves, self.spec = tree.flatten(result)
        recorder.visit(leaves)
        with unseen():
            places = {id(x) for _, _, value in conditions.slots for x in tensors_in(value)}
            self.closed_over = [x for key, x in recorder.used.items() if key in places]
            self.settle(conditions)
            recorder.check_closed_over(self.numbers)
            self.stale |= recorder.others
        known = {id(x): ("in", i) for i, x in enumerate(self.inputs)}
        outputs = numbered(leaves, known, self.fn[0])
        self.leaves = leaves
        self.shapes = [(x.shape, x.dtype) for x in outputs]
        return outputs

    def plan(self, closed_over: list[torch.Tensor], returned: Returned, delivered: Sequence[int]) -> None:
        """Sets the attributes that `first` determines; the caller computes the outputs and sets `planned`.

        Args:
            closed_over: the captured tensors that the function uses and does not write.
            returned: the structure of its result.
            delivered: the operands that are leaves, in the order in which they get their gradients.
        """
        self.closed_over = closed_over
        self.delivered = delivered
        self.spec, leaves, self.shapes = returned
        self.leaves = list(leaves)

    def settle(self, conditions: Conditions) -> None:
        """Sets the conditions of the forward, once it has ended."""
        self.conditions = conditions
        self.fn[0] = conditions.fn
        operands = [*self.inputs, *self.closed_over]
        numbers = {id(x): i for i, x in enumerate(operands)}
        for slot in conditions.slots:
            _, _, value = slot
            found = (value,) if isinstance(value, torch.Tensor) else tensors_in(value)
            if keys := [id(x) for x in found if id(x) in numbers]:
                self.slots.append(slot)
                for key in keys:
                    self.numbers[key] = numbers[key]
        stale = [x for x in operands if x.requires_grad or is_functorch_wrapped_tensor(x)]
        self.stale = {id(x): weakref.ref(x) for x in stale}

    def _changed(self) -> list[tuple[int, int, int]]:
        """Returns the inputs that were changed in place since the call: (index, version then, version now)."""
        with unseen():
            bases = [(then, ref()) for ref, then in self.versions]
            pairs = [(then, then if base is None else version(base)) for then, base in bases]
        return [(i, then, now) for i, (then, now) in enumerate(pairs) if then != now]

    def __call__(self, *operands: torch.Tensor) -> Flat:
        """Recomputes the outputs from other operands."""
        if self.planned is not None:
            outputs = self.planned.forward(operands)
            if outputs is not None:
                return outputs
        for i, then, now in self._changed():
            raise MutationError(
                f"{self.arguments.path(i)} of {region_name(self.fn[0])} was changed in place between forward and "
                f"backward (version {then} -> {now}). Run backward before changing it, or change a copy."
            )
        inputs = [x.clone() if may_be_statistics(x) else x for x in operands[: self.count]]
        # The operands also replace the captured tensors in their places.
        present = [*inputs, *operands[self.count :]]
        new = {key: present[number] for key, number in self.numbers.items()}
        closed = [(holder, key, replaced(value, new)) for holder, key, value in self.slots]
        watch = Watch(self.fn[0], self.stale, [*operands, *present])
        with (
            self._hooks_once(present) if self.registers else nullcontext(),
            self.conditions.restored(lambda: True, closed) as again,
            watch,
            self.messages.reusing(),
        ):
            args, kwargs = self.arguments.rebuild(inputs, again.statics)
            result = again.fn(*args, **kwargs)
        leaves, spec = tree.flatten(result)
        if spec != self.spec:
            raise ImpureFunctionError(
                f"{region_name(self.fn[0])} returned {self.spec} in forward and {spec} in its recompute: {_NOT_PURE}"
            )
        known = {id(x): ("in", i) for i, x in enumerate(inputs)}
        outputs = self._whole(leaves, numbered(leaves, known, self.fn[0]))
        for i, x in enumerate(outputs):
            if i >= len(self.shapes) or (x.shape, x.dtype) != self.shapes[i]:
                then = f"{self.shapes[i][1]}{list(self.shapes[i][0])}" if i < len(self.shapes) else "nothing"
                raise ImpureFunctionError(
                    f"output {i} of {region_name(self.fn[0])} was {then} in forward and is {x.dtype}{list(x.shape)} in "
                    f"its recompute: {_NOT_PURE}"
                )
        return outputs

    @contextmanager
    def _hooks_once(self, present: Sequence[torch.Tensor]) -> Any:
        """Removes the hooks that a recompute registers on tensors and modules from outside of it.

        Hooks on operands would run before the gradients of the operands are complete; the forward has registered them.
        """
        captured = [x for _, _, value in self.conditions.slots for x in tensors_in(value)]
        hooks, accepts = Registrations(), on_new_tensors([*present, *captured])
        try:
            with hooks:
                yield
            if hooks.on_modules_in_backward():
                raise MutationError(
                    f"{region_name(self.fn[0])} registers a backward hook on a module while it runs, and its recompute "
                    "would run the hook of its forward as well. Register the hook before the call."
                )
        finally:
            hooks.remove(accepts)

    def view_inputs(self, inputs: Sequence[torch.Tensor]) -> None:
        """Makes the outputs that are views of inputs.

        This happens before the function runs, so that autograd accumulates their gradients after the gradients of
        computed outputs. That is the order for a plain function that returns views of its inputs beside a result.
        """
        made: dict[Any, Any] = {}
        for x in self.leaves:
            if isinstance(x, Rebuilt) and x.source[0] == "in" and id(x) not in self.views:
                self.views[id(x)] = x.of(inputs[x.source[1]], made)

    def assemble(self, outputs: Flat, inputs: Sequence[torch.Tensor]) -> Any:
        """Replaces the numbers in the leaves by tensors; returns the result."""
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
        """Returns the tensors that a plan treats as outputs: for views, the tensors that they are views of."""
        if not any(isinstance(x, Rebuilt) for x in self.leaves):
            return outputs
        found: dict[int, Any] = {}
        for planned, leaf in zip(self.leaves, leaves, strict=True):
            if isinstance(planned, Rebuilt):
                if planned.source[0] == "out" and planned.tracked:
                    view = outputs[leaf[1]]
                    is_view = planned.steps and view._base is not None
                    found.setdefault(planned.source[1], view._base if is_view else view)
            elif is_number(planned) and planned[0] == "out":
                found[planned[1]] = outputs[leaf[1]]
        return [found[i] for i in range(len(self.shapes))]


_NOT_PURE = "the function is not pure. Its result must depend only on its arguments."


class _Discarded(Exception):
    pass


@contextmanager
def _discard_saved() -> Any:
    """Discards everything that autograd saves in the body. Autograd still records, so that the same kernels run."""
    message = allow_hooks()

    def unpack(_: None) -> torch.Tensor:
        raise _Discarded

    push(lambda tensor: None, unpack)
    try:
        yield
    finally:
        pop()
        disallow_hooks(message)


class Batched:
    """`primitive` under vmap, as a function of batched tensors."""

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
    """`primitive` under jvp: from operands, and tangents of the operands in `moving`, to outputs and tangents."""

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
    """A vmap over the cotangents of a `Pullback`, but not over its inputs."""

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

    The primitive is recomputed once, outside of the vmaps in `layers`, which batch only cotangents (as `jacrev` does).
    So random numbers are drawn once, as in the forward.
    """

    def __init__(
        self,
        primitive: Primitive,
        outputs: Sequence[int],
        needs: Sequence[bool],
        *,
        plain: bool,
        wrapped: bool,
        create_graph: bool,
        computed: Sequence[bool],
        receivers: Sequence[torch.Tensor],
        layers: tuple[_Layer, ...] = (),
    ):
        self.primitive = primitive
        self.outputs = tuple(outputs)
        """The outputs that have a cotangent."""
        self.needs = tuple(needs)
        """Whether each operand of `primitive` needs a gradient."""
        self.plain = plain
        """Whether plain autograd recorded the forward. If so, its derivative formulas are used; otherwise torch.func's.
        """
        self.wrapped = wrapped
        """Whether the backward pass runs at a level of torch.func, which is still open."""
        self.create_graph = create_graph
        """The grad mode of the backward pass; some derivative formulas depend on it."""
        self.computed = tuple(computed)
        """Whether autocast casts each operand of `primitive` anew for each operation, see `Layout.computed`."""
        self.receivers = receivers
        """The operands as they get their gradients from autograd; none where torch.func takes the gradients."""
        self.layers = layers

    def layered(self, dims: Sequence[int | None], size: int, randomness: str) -> Pullback | None:
        """Returns this pullback under one more vmap, if it batches only cotangents; otherwise None."""
        count = len(self.needs)
        if any(d is not None for d in dims[:count]):
            return None
        layers = (*self.layers, _Layer(dims[count:], size, randomness))
        return Pullback(
            self.primitive,
            self.outputs,
            self.needs,
            plain=self.plain,
            wrapped=self.wrapped,
            create_graph=self.create_graph,
            computed=self.computed,
            receivers=self.receivers,
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
            how = {"recorded": self.create_graph, "wrapped": self.wrapped}
            grads = planned.backward(inputs, self.outputs, cotangents, receivers=self.receivers, **how)
            if grads is not None:
                return [grad for grad, need in zip(grads, self.needs, strict=True) if need]
        wanted = [i for i, need in enumerate(self.needs) if need]
        if self.wrapped and not self.layers and not any(map(is_functorch_wrapped_tensor, operands)):
            return self._at_a_level(inputs, wanted, cotangents)
        pull = self._plain(inputs, wanted, operands) if self.plain else self._functional(inputs, wanted)
        for layer in self.layers:
            pull = layer.around(pull)
        return list(pull(*cotangents))

    def _at_a_level(
        self, inputs: Sequence[torch.Tensor], wanted: list[int], cotangents: Sequence[torch.Tensor]
    ) -> Flat:
        """Evaluates the product at a level of torch.func that is open until the end: formulas depend on that."""
        with grad_increment_nesting() as level, torch.enable_grad():
            seen = [_wrap_for_grad(x, level) for x in inputs]
            for i in wanted:
                seen[i] = _create_differentiable(seen[i], level)
            outputs = self.primitive(
                *(x.view_as(x) if flag else x for x, flag in zip(seen, self.computed, strict=True))
            )
            pairs = [(outputs[i], _wrap_for_grad(ct, level)) for i, ct in zip(self.outputs, cotangents, strict=True)]
            pairs = [(y, ct) for y, ct in pairs if y is not None and y.requires_grad]
            found: Sequence[torch.Tensor | None] = [None] * len(wanted)
            if pairs:
                ys, cts = [y for y, _ in pairs], [ct for _, ct in pairs]
                xs = [seen[i] for i in wanted]
                found = torch.autograd.grad(ys, xs, cts, create_graph=self.create_graph, allow_unused=True)
            grads = [
                torch.zeros_like(inputs[i]) if grad is None else _unwrap_for_grad(grad, level)
                for i, grad in zip(wanted, found, strict=True)
            ]
        return grads

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
                # An alias, so that inputs that depend on one another have separate gradients.
                if self.computed[i] or (same and dependent):
                    xs[i] = torch.ops.aten.alias(xs[i])
            with torch._C._ExcludeDispatchKeyGuard(EXCLUDE_LEGACY_VMAP):  # `is_grads_batched` forbids random numbers
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
