"""Updates of single parameters by the own code of a `torch.optim` optimizer, and what they cost.

A *sibling* is an optimizer of the same class with one parameter. It reads the present options of the parameter's group
at each update (so that schedules of learning rates need no new trace) and shares the state of the real optimizer. So an
update has the bits of the optimizer by construction. Where the optimizer would update all parameters by kernels for
lists of tensors (`foreach`, its default on CUDA), a sibling calls these kernels with lists of one: they round otherwise
than the kernels for single tensors.

Seen on torch 2.11 and 2.13: `Optimizer._init_group(group, *lists)` makes the state of parameters that have a gradient;
`step` undecorated is the plain algorithm.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import optim
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fckpt._call.levels import below_autograd
from fckpt._memory import undisturbed
from fckpt._trace.allocations import Allocations, rounded
from fckpt._trace.operations import Call, TensorSpec
from fckpt._trace.updates import runs
from fckpt.cost.calls import OpCost, named, register_cost
from fckpt.cost.measured import _run, _temporaries, isolated
from fckpt.cost.store import Store, environment
from fckpt.errors import ArgumentTypeError, ArgumentValueError, TraceError

__all__ = ["Updates", "bytes_of_updates"]

_NAMES = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD", "Adafactor",
    "Muon",
)  # fmt: skip
_CLASSES = tuple(getattr(optim, name) for name in _NAMES if hasattr(optim, name))
"""The optimizers whose update of a parameter depends on that parameter, its gradient and its state alone."""
_NO_STATE: dict[str, Any] = {}
_WAY_OUT = "Use fckpt.remat for forward and backward, and call the optimizer as usual."


def _check_class(optimizer: optim.Optimizer) -> None:
    kind: Any = type(optimizer)
    same = lambda c: inspect.unwrap(kind.step) is inspect.unwrap(c.step) and kind._init_group is c._init_group
    if not any(isinstance(optimizer, c) and same(c) for c in _CLASSES):
        names = ", ".join(c.__name__ for c in _CLASSES)
        raise ArgumentTypeError(
            f"a step cannot divide {kind.__name__} into updates of single parameters; it can for {names}. {_WAY_OUT}"
        )


def _check_hooks(optimizer: Any) -> None:
    kind = type(optimizer)
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ArgumentValueError(
            f"the step of this {kind.__name__} was replaced by {step!r}, which updates of single parameters would "
            f"leave out (a GradScaler or a wrapper of a library, perhaps). {_WAY_OUT}"
        )
    if "zero_grad" in vars(optimizer) or kind.zero_grad is not optim.Optimizer.zero_grad:
        raise ArgumentValueError(
            f"this {kind.__name__} has its own zero_grad, which a step does not call, as it stores no gradients. "
            f"{_WAY_OUT}"
        )
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        raise ArgumentValueError(f"the optimizer has step hooks, which a step cannot call in between. {_WAY_OUT}")


def _check_options(optimizer: optim.Optimizer) -> None:
    for i, group in enumerate(optimizer.param_groups):
        for name in ("foreach", "differentiable", "capturable"):
            if group.get(name):
                raise ArgumentValueError(
                    f"param_groups[{i}] has {name}=True. A step updates each parameter as its gradient comes: leave "
                    f"{name} out."
                )


def _check_memory(optimizer: optim.Optimizer) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if len({p.untyped_storage()._cdata for p in parameters}) == len(parameters):
        return
    seen: set[int] = set()
    for parameter in parameters:
        memory = parameter.untyped_storage()._cdata
        if parameter.numel() and memory in seen:
            raise ArgumentValueError(
                f"two parameters of the optimizer share memory (one of shape {list(parameter.shape)}): the update of "
                "one would change the other. Pass each tensor once."
            )
        seen.add(memory)


class Updates:
    """The updates of an optimizer's parameters, numbered in the order of its groups, and the sums of gradients."""

    def __init__(self, optimizer: optim.Optimizer):
        if not isinstance(optimizer, optim.Optimizer):
            name = type(optimizer).__name__
            raise ArgumentTypeError(f"optimizer must be a torch.optim.Optimizer, not {name}: {optimizer!r}.")
        self.optimizer = optimizer
        self._step: Any = None
        self._sibling_now: Any = object.__new__(type(optimizer))
        """The sibling that makes all updates of a step, one after the other."""
        self._coming: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        """By parameter without its whole state: memory for what the optimizer makes at the first update."""
        self._code: Any = None
        """The methods of the optimizer's class that were found to be supported."""
        self._seen: Any = None
        self._signatures: list[Any] = []
        """By parameter: everything on which its state and the cost of its update depend."""
        self._layouts: dict[Any, dict[str, _Layout]] = {}
        self._costs: dict[Any, tuple[OpCost, int]] = {}
        self._store = Store()
        self._missing: list[int] = []
        """The parameters, at the last call of `key`, whose state the optimizer has yet to make."""
        self.sums: list[torch.Tensor] = []
        """The gradients of earlier microbatches, in the order of `Ending.carried`, then the sum of the losses."""
        self.refresh()

    def refresh(self) -> None:
        """Reads parameters and options again: groups may have been added, and options changed.

        Raises:
            ArgumentTypeError: the updates of the optimizer's parameters are not independent.
            ArgumentValueError: it has an unsupported option, or hooks, or a parameter in two places.
        """
        kind: Any = type(self.optimizer)
        code = kind.step, getattr(kind, "_init_group", None)
        if code != self._code:
            _check_class(self.optimizer)
            self._code, self._step = code, inspect.unwrap(kind.step)
        _check_hooks(self.optimizer)
        groups = self.optimizer.param_groups
        vars(self._sibling_now).update(vars(self.optimizer))
        self.parameters = [p for group in groups for p in group["params"]]
        if any(map(is_lazy, self.parameters)):
            raise ArgumentValueError(
                "the model has a lazy module (nn.LazyLinear, for example), which creates its parameters in its first "
                "call. Call the model once before the step is made."
            )
        self.group_of = [group for group in groups for _ in group["params"]]
        self.numbers = {id(p): i for i, p in enumerate(self.parameters)}
        layouts = [(p.shape, p.stride(), p.dtype, p.device) for p in self.parameters]
        found = tuple(map(_options, groups)), layouts, list(self.numbers)
        if found != self._seen:
            _check_options(self.optimizer)  # an option that is not supported is another one than before
            self._seen = found
            chosen = map(_foreach, groups)
            self._foreach = [one for one, group in zip(chosen, groups, strict=True) for _ in group["params"]]
            """By parameter: the option `foreach` of its sibling."""
            options = [known for known, group in zip(found[0], groups, strict=True) for _ in group["params"]]
            self._signatures = list(zip(layouts, options, strict=True))
            self._after: dict[int, dict[str, _Layout]] = {}
        _check_memory(self.optimizer)

    def key(self) -> Any:
        """Returns everything but the parameters on which the memory of updates depends."""
        known, dtypes = self.optimizer.state, []
        self._missing = []
        for number, parameter in enumerate(self.parameters):
            has, layouts = known.get(parameter, _NO_STATE), self._state_after(number)
            state = [t if isinstance(t := has.get(k), torch.Tensor) else layout for k, layout in layouts.items()]
            dtypes.append(tuple([t.dtype for t in state]))
            if _Layout in map(type, state):
                self._missing.append(number)
        counts = tuple([len(group["params"]) for group in self.optimizer.param_groups])
        return type(self.optimizer), self._seen[0], tuple(dtypes), counts

    def _entry(self, parameter: torch.Tensor) -> dict[str, Any]:
        return self.optimizer.state.get(parameter, {})

    # -- the state

    def prepare(self, numbers: Collection[int]) -> None:
        """Makes the state that the optimizer would make at its first step, for the parameters with these numbers."""
        for number in self._missing:
            if number not in numbers:
                continue
            parameter = self.parameters[number]
            if parameter in self._coming or self._is_whole(number):
                continue
            layout = self._state_after(number)
            if not self._entry(parameter):
                self._initialise(self._sibling(number), parameter)
            has = self._entry(parameter)
            missing = {name: t.made() for name, t in layout.items() if not torch.is_tensor(has.get(name))}
            if missing:
                self._coming[parameter] = missing

    def _is_whole(self, number: int) -> bool:
        has = self._entry(self.parameters[number])
        return all(torch.is_tensor(has.get(name)) for name in self._state_after(number))

    def _state_after(self, number: int) -> dict[str, _Layout]:
        """Returns the layouts of a parameter's state after its first update."""
        if number in self._after:
            return self._after[number]
        key = self._signatures[number]
        if key not in self._layouts:
            parameter = self.parameters[number]
            made = torch.zeros_like(parameter).requires_grad_()
            with below_autograd():
                sibling = self._unused(number, made)
                self._run(sibling, made, torch.zeros_like(made))
            state = sibling.state.get(made, {})
            self._layouts[key] = {k: _Layout(t) for k, t in state.items() if torch.is_tensor(t)}
        self._after[number] = self._layouts[key]
        return self._layouts[key]

    def _unused(self, number: int, made: torch.Tensor) -> Any:
        """Returns a sibling that has not updated `made` yet, a tensor like the parameter with this number."""
        sibling = self._sibling(number, made, {})
        try:
            self._initialise(sibling, made)
        except KeyError:  # torch 2.11: Adagrad's constructor makes all of its state
            sibling = self._sibling(number, made, self._copied_state(number))
        return sibling

    def _copied_state(self, number: int) -> dict[str, Any]:
        known = self._entry(self.parameters[number])
        return {k: t.clone() if isinstance(t, torch.Tensor) else t for k, t in known.items()}

    @staticmethod
    def _initialise(sibling: Any, parameter: torch.Tensor) -> None:
        """Lets the optimizer make the state that does not depend on the gradient."""
        count = len(inspect.signature(type(sibling)._init_group).parameters) - 2
        parameter.grad = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        try:
            with torch.no_grad():
                sibling._init_group(sibling.param_groups[0], *([] for _ in range(count)))
        finally:
            parameter.grad = None

    # -- the updates

    def _sibling(self, number: int, parameter: torch.Tensor | None = None, state: Any = None) -> Any:
        """Returns an optimizer of the same class with the options of one parameter."""
        sibling: Any = object.__new__(type(self.optimizer))
        vars(sibling).update(vars(self.optimizer))
        own = self.parameters[number] if parameter is None else parameter
        sibling.param_groups = [{**self.group_of[number], "params": [own], "foreach": self._foreach[number]}]
        if state is not None:
            sibling.state = type(self.optimizer.state)(dict)
            if state:
                sibling.state[own] = state
        return sibling

    def _run(self, sibling: Any, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        parameter.grad = gradient
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)  # entering and leaving `no_grad` would take three times as long
        try:
            self._step(sibling)
        finally:
            torch.set_grad_enabled(before)
            parameter.grad = None

    def update(self, number: int, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Updates the parameter with this number, in place."""
        own = self.parameters[number]
        assert own.data_ptr() == parameter.data_ptr()
        sibling = self._sibling_now
        sibling.param_groups = [{**self.group_of[number], "params": [own], "foreach": self._foreach[number]}]
        self._run(sibling, own, gradient)
        if coming := self._coming.pop(own, None):
            _moved(self.optimizer.state[own], coming)

    def taken(self) -> list[torch.Tensor]:
        """Returns the sums that earlier microbatches left, and forgets them."""
        found, self.sums = self.sums, []
        return found

    # -- the cost

    def cost(self, number: int) -> OpCost:
        """Returns the cost of the update of the parameter with this number; of a later update, not of its first one."""
        return self._cost(number)[0]

    def first_nbytes(self, number: int) -> int:
        """Returns the temporary bytes of the next update of a parameter, which may be its first one."""
        later, first = self._cost(number)
        return later.temporary_nbytes if self._is_whole(number) else max(first, later.temporary_nbytes)

    @property
    def is_first(self) -> bool:
        """Whether the next updates take more memory than later ones, because they make a part of the state."""
        return any(self.first_nbytes(i) > self.cost(i).temporary_nbytes for i in self._missing)

    def _cost(self, number: int) -> tuple[OpCost, int]:
        key = self._signatures[number], self._other_types(number)
        if key not in self._costs:
            self._costs[key] = self._remembered(number)
        return self._costs[key]

    def _other_types(self, number: int) -> tuple[tuple[str, torch.dtype], ...]:
        """Returns the types of the state that the optimizer would not make now, as after `model.double()`."""
        has, made = self._entry(self.parameters[number]), self._state_after(number)
        known = {name: t for name in made if torch.is_tensor(t := has.get(name))}
        return tuple([(name, t.dtype) for name, t in known.items() if t.dtype is not made[name].dtype])

    def _remembered(self, number: int) -> tuple[OpCost, int]:
        """Returns the result of `_measured` from disk; if it is not there, measures and stores it."""
        kind, where = type(self.optimizer), environment(self.parameters[number].device)
        if not kind.__module__.startswith("torch.optim."):  # the class may be edited without a change of its name
            return undisturbed(lambda: self._measured(number))
        signature = self._signatures[number], *self._other_types(number)
        keys = [f"{when} update of {kind.__name__}: {signature}" for when in ("any later", "first")]
        later, first = [self._store.get(where, key) for key in keys]
        if later is None or first is None:
            later, nbytes = undisturbed(lambda: self._measured(number))
            self._store.put(where, keys[0], later)
            self._store.put(where, keys[1], first := OpCost(0.0, 0, nbytes))
        return later, first.temporary_nbytes

    def _measured(self, number: int) -> tuple[OpCost, int]:
        """Returns the cost of a later update, and the temporary bytes of the first one."""
        parameter = self.parameters[number]
        device = parameter.device
        with isolated(device), below_autograd():
            made = torch.rand_like(parameter).requires_grad_()
            gradient = torch.rand_like(parameter)
            if self._other_types(number):
                sibling = self._sibling(number, made, self._copied_state(number))
            else:
                sibling = self._unused(number, made)
            has = sibling.state.get(made, {})
            layout = self._state_after(number)
            coming = {name: t.made() for name, t in layout.items() if not torch.is_tensor(has.get(name))}

            def first() -> None:
                self._run(sibling, made, gradient)
                _moved(sibling.state[made] if coming else {}, coming)

            def later() -> None:
                self._run(sibling, made, gradient)

            try:
                at_first, _ = _temporaries(first, device)
            except Exception as error:
                raise TraceError(
                    f"{type(self.optimizer).__name__} raises an error when it updates a parameter of shape "
                    f"{list(parameter.shape)} and {parameter.dtype}: {type(error).__name__}: {error}. A plain "
                    "`optimizer.step()` raises it as well, for example if the model was converted to another dtype "
                    "after the optimizer had made its state. Make the optimizer after the conversion."
                ) from error
            soon, _ = _temporaries(later, device)
            _age([sibling.state.get(made, {})])
            later()
            seconds, temporary, _ = _run(later, device, 10)
        return OpCost(seconds, 4 * parameter.numel(), max(soon, temporary)), at_first


_LATE = 1e9
"""A number of steps at which every optimizer does all that it ever does: ASGD averages from step 1e6 on by default."""


def _age(states: Iterable[dict[str, Any]]) -> None:
    """Makes the next update a late one: RAdam and ASGD compute more after some steps, ASGD one update later."""
    for state in states:
        if torch.is_tensor(step := state.get("step")):
            step.fill_(_LATE)
        elif step is not None:
            state["step"] = type(step)(_LATE)


def _foreach(group: dict[str, Any]) -> bool | None:
    """Returns the option `foreach` of a sibling: None on a GPU, where the optimizer's default is not False."""
    if group.get("fused"):
        return False
    default = group.get("foreach") is None and all(p.device.type != "cpu" for p in group["params"])
    return None if default else False


class _Layout:
    """The layout of a tensor of an optimizer's state."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.device = torch.empty_like(tensor, device="meta"), tensor.device
        self.dtype = tensor.dtype

    def made(self) -> torch.Tensor:
        """Returns memory with this layout."""
        return torch.empty_like(self.tensor, device=self.device)


def _moved(state: dict[str, Any], coming: dict[str, torch.Tensor]) -> None:
    """Moves the state that the optimizer has made at its first update to the memory that was set aside for it."""
    for name, memory in coming.items():
        memory.copy_(state[name])
        state[name] = memory


def _options(group: dict[str, Any]) -> Any:
    """Returns what the memory of an update depends on in the options of a group."""
    return tuple([(k, _kind(v, k)) for k, v in group.items() if k != "params"])


def _kind(value: Any, name: str) -> Any:
    """Returns what the memory of an update depends on in an option: whether a number is zero, but not its value."""
    if torch.is_tensor(value):
        return (value.dtype, value.device, value.shape)
    if name in ("lr", "initial_lr", "max_lr", "min_lr") or isinstance(value, str):
        return None
    if isinstance(value, (tuple, list)):
        return tuple(_kind(v, "") for v in value)
    return bool(value) if isinstance(value, (bool, int, float)) else type(value)


def _cost(call: Call, specs: Sequence[TensorSpec]) -> OpCost:
    return runs().cost(named(call)["number"])


def _free(call: Call, specs: Sequence[TensorSpec]) -> OpCost:
    return OpCost(1e-6, 0, 0)


register_cost("fckpt_step::update", _cost)
register_cost("fckpt_step::carried", _free)
register_cost("fckpt_step::held", _free)


def bytes_of_updates(optimizer: optim.Optimizer, kind: str, grain: int) -> tuple[int, int]:
    """Returns the bytes of an optimizer's state after its first step, and the most temporaries of its later steps.

    The optimizer's own code runs on copies of the parameters: on the meta device or, if it reads data, on the CPU, for
    one parameter after the other.

    Args:
        optimizer: any optimizer whose step needs no closure.
        kind: the type of the device of its parameters. On CUDA, torch updates all parameters at once by default.
        grain: the allocator rounds sizes up to a multiple of this many bytes.

    Raises:
        ArgumentTypeError: the step does not run on copies.
    """
    groups = optimizer.param_groups
    try:
        return _stepped(optimizer, groups, kind, "meta", grain)
    except (RuntimeError, NotImplementedError):
        pass  # it reads data
    except TypeError as error:
        raise ArgumentTypeError(
            f"the step of {type(optimizer).__name__} does not run without a closure ({error}), so its state is not "
            "known before the first step. Pass optimizer=None, and add its state."
        ) from error
    found = [
        _stepped(optimizer, [{**group, "params": [p]}], kind, "cpu", grain) for group in groups for p in group["params"]
    ]
    return sum(state for state, _ in found), max((update for _, update in found), default=0)


def _stepped(
    optimizer: optim.Optimizer, groups: Sequence[dict[str, Any]], kind: str, device: str, grain: int
) -> tuple[int, int]:
    """Returns the results of `bytes_of_updates` for copies of these groups on a device."""
    copy: Any = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer))
    copy.state = type(optimizer.state)(dict)
    copy.param_groups = [{**group, "params": [_copied(p, device) for p in group["params"]]} for group in groups]
    for group in copy.param_groups:
        if "foreach" in group and group["foreach"] is None:
            group["foreach"] = kind == "cuda" and not group.get("fused")
    step = inspect.unwrap(type(optimizer).step)
    counted = Allocations({device, "cpu"} if kind == "cpu" else {device}, grain)
    with torch.no_grad(), counted:
        step(copy)
        counted.forget()
        before = counted.held
        step(copy)
        _age(copy.state.values())
        for _ in range(2):
            step(copy)
    tensors = [t for state in copy.state.values() for t in state.values() if torch.is_tensor(t)]
    there = {t.untyped_storage()._cdata: t for t in tensors if t.device.type in counted.kinds}
    return sum(rounded(t.untyped_storage().nbytes(), grain) for t in there.values()), counted.peak - before


def _copied(parameter: torch.Tensor, device: str) -> torch.Tensor:
    made = torch.zeros_like(parameter, device=device).requires_grad_()
    made.grad = torch.zeros_like(made) if parameter.requires_grad else None
    return made
