"""`nn.Module` to pure function, and modules whose forward is rematerialised."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from fckpt.errors import ArgumentTypeError

__all__ = ["Functional", "check_plannable", "from_module", "remat_module"]


class Functional(NamedTuple):
    """A module as a pure function, with its parameters and buffers: what `from_module` returns."""

    apply: Callable[..., tuple[Any, dict[str, torch.Tensor]]]
    """`apply(params, buffers, *args, **kwargs) -> (output, new_buffers)`."""
    params: dict[str, torch.Tensor]
    """The parameters by name. They share the module's memory, and do not require grad."""
    buffers: dict[str, torch.Tensor]
    """The buffers by name. They share the module's memory."""


def from_module(model: nn.Module) -> Functional:
    """Turns a module into a pure function over its parameters and buffers.

    The function never writes into what it is given: buffers that the forward changes (BatchNorm's statistics)
    come back as `new_buffers`. It may be rematerialised, differentiated and vmapped like any function. The
    module's own state stays as it is; whether it trains or evaluates is read at each call.

    Args:
        model: any module. Tied parameters appear once, under their first name.

    Returns:
        (apply, params, buffers).

    Raises:
        ArgumentTypeError: `model` is no module.

    Example:
        >>> import torch, fckpt
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        >>> apply, params, buffers = fckpt.from_module(model)
        >>> out, new_buffers = apply(params, buffers, torch.randn(5, 3))
        >>> int(buffers["1.num_batches_tracked"]), int(new_buffers["1.num_batches_tracked"])
        (0, 1)
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"from_module takes an nn.Module, not {type(model).__name__}.")

    def apply(
        params: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        new_buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        output = torch.func.functional_call(model, (params, new_buffers), args, kwargs)
        return output, new_buffers

    params = {name: parameter.detach() for name, parameter in model.named_parameters()}
    # Not the module's own, which a plan would take for one with those that it closes over: the next call brings others.
    buffers = {name: buffer.detach() for name, buffer in model.named_buffers()}
    return Functional(apply, params, buffers)


def remat_module(module: nn.Module, make_region: Callable[[], Any]) -> nn.Module:
    """Returns a module of the same class and state whose forward goes through a region.

    The two share one `__dict__`: parameters, buffers, submodules, hooks and the training flag are the same
    objects, and `state_dict` keys are unchanged. Hooks run outside of the region, once a call. A forward that was
    replaced on `module` runs inside the region; one that is replaced on the result, around it.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise ArgumentTypeError(
            "remat cannot give a TorchScript module a new forward. Wrap a call of it instead: "
            "remat(lambda *args: scripted(*args))."
        )
    own = _class_of(type(module))
    return _twin(own, own, module, make_region)


def check_plannable(module: nn.Module) -> None:
    """Checks that a plan for `module` would do what its forward does.

    Raises:
        ArgumentTypeError: it is or holds a module whose forward reduces, gathers or scatters beside what is computed.
    """
    for name, part in module.named_modules():
        kind = _beside(type(part))
        if kind is None:
            continue
        where = f"{name!r} is" if name else "it is"
        if kind == "sharded":
            way = (
                "leave out budget, policy and plan (remat(module) alone works), or plan each block before it is sharded"
            )
        else:
            way = f"put it around the planned module: {kind}(remat(model, budget=...))"
        raise ArgumentTypeError(
            f"remat cannot plan this {type(module).__name__}: {where} a {type(part).__name__}, whose forward "
            f"communicates in ways that a trace does not show, so a plan would train without it. Instead {way}."
        )


def _beside(kind: type) -> str | None:
    """The name of a wrapper that communicates beside its forward, if a class is one."""
    for base in kind.__mro__:
        if issubclass(base, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            return "DDP" if issubclass(base, nn.parallel.DistributedDataParallel) else "DataParallel"
        if base.__module__.startswith("torch.distributed.fsdp"):
            return "sharded"
    return None


class _Forward:
    """The `forward` of a rematerialised module: a place of its own, as the modules share their attributes."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is None:
            return self.function
        replaced = module._fckpt_replaced
        if replaced is not None:
            return replaced
        if torch.compiler.is_compiling():  # Dynamo makes no methods (torch 2.13)
            return functools.partial(self.function, module)
        return types.MethodType(self.function, module)

    def __set__(self, module: Any, value: Any) -> None:
        module._fckpt_replaced = value

    def __delete__(self, module: Any) -> None:
        module._fckpt_replaced = None


class _Compiled:
    """What `compile()` made of a rematerialised module: apart from what it made of the module itself."""

    def __get__(self, module: Any, owner: Any = None) -> Any:
        return None if module is None else module._fckpt_compiled

    def __set__(self, module: Any, value: Any) -> None:
        module._fckpt_compiled = value


class _Become:
    """The class that a lazy module takes when its first call has told its sizes; the module inside takes it."""

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is not None and isinstance(module, _Rematerialised):
            inner = module._fckpt_inner  # type: ignore[attr-defined]
            if type(inner).cls_to_become is not None:
                inner.__class__ = type(inner).cls_to_become
        return None


class _Rematerialised:
    """First base of a rematerialised module's class; the module's own class is the second."""

    __slots__ = ()

    _compiled_call_impl = _Compiled()

    def extra_repr(self) -> str:
        inner = super().extra_repr()  # type: ignore[misc]
        return f"{inner}, remat" if inner else "remat"

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_fckpt_"):  # what is a module there is no submodule
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        return _innermost(self) is _innermost(other)

    def __hash__(self) -> int:
        return object.__hash__(_innermost(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = remat_module, (self._fckpt_inner, self._fckpt_make)  # type: ignore[attr-defined]
        replaced = self._fckpt_replaced  # type: ignore[attr-defined]
        return made if replaced is None else (*made, {"forward": replaced})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._fckpt_replaced = state["forward"]

    def _replicate_for_data_parallel(self) -> Any:
        inner = self._fckpt_inner._replicate_for_data_parallel()  # type: ignore[attr-defined]
        return _twin(type(self), self._fckpt_own, inner, self._fckpt_make)  # type: ignore[attr-defined, arg-type]

    def _fckpt_forward(self) -> Callable[..., Any]:
        """What runs in the region."""
        inner: Any = self._fckpt_inner  # type: ignore[attr-defined]
        compiled = vars(inner).get("_compiled_call_impl")
        if compiled is not None and not _has_hooks(inner) and not hasattr(self._fckpt_region, "planner"):  # type: ignore[attr-defined]
            return compiled
        if type(self) is self._fckpt_own or type(inner) is not self._fckpt_class or "forward" in vars(inner):  # type: ignore[attr-defined]
            return inner.forward
        # The class of the result was changed (by `parametrize`, say): attributes are found through it alone.
        return types.MethodType(type(inner).forward, self)


def _twin(kind: type, own: type, module: nn.Module, make_region: Callable[[], Any]) -> nn.Module:
    twin = object.__new__(kind)
    object.__setattr__(twin, "__dict__", vars(module))
    for name, value in (
        ("inner", module), ("class", type(module)), ("own", own), ("make", make_region), ("region", make_region()),
        ("replaced", None), ("compiled", None),
    ):  # fmt: skip
        object.__setattr__(twin, f"_fckpt_{name}", value)
    return twin


def _innermost(module: Any) -> Any:
    while isinstance(module, _Rematerialised):
        module = module._fckpt_inner  # type: ignore[attr-defined]
    return module


def _has_hooks(module: nn.Module) -> bool:
    return any(vars(module)[name] for name in _HOOKS)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@functools.cache
def _class_of(cls: type[nn.Module]) -> type[nn.Module]:
    # The name stays, because wrapping policies and weight initialisers select classes by it.
    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._fckpt_region(self._fckpt_forward(), args, kwargs)

    body = {
        "forward": _Forward(forward),
        "__slots__": (
            "_fckpt_class", "_fckpt_compiled", "_fckpt_inner", "_fckpt_make", "_fckpt_own", "_fckpt_region",
            "_fckpt_replaced",
        ),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }  # fmt: skip
    if issubclass(cls, LazyModuleMixin):
        body["cls_to_become"] = _Become()
    bases = (cls,) if issubclass(cls, _Rematerialised) else (_Rematerialised, cls)
    meta: Any = type(cls)
    return meta(cls.__name__, bases, body)
