"""Conversion of a module to a pure function, and modules whose forward is rematerialised."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from fckpt.errors import ArgumentTypeError

__all__ = ["Functional", "check_plannable", "from_module", "remat_module"]


class Functional(NamedTuple):
    """The result of `from_module`: a module as a pure function, with its parameters and buffers."""

    apply: Callable[..., tuple[Any, dict[str, torch.Tensor]]]
    """`apply(params, buffers, *args, **kwargs) -> (output, new_buffers)`."""
    params: dict[str, torch.Tensor]
    """The parameters by name. They share memory with the module and do not require grad."""
    buffers: dict[str, torch.Tensor]
    """The buffers by name. They share memory with the module."""


def from_module(model: nn.Module) -> Functional:
    """Converts a module to a pure function of its parameters and buffers.

    The function never writes to its arguments: buffers that the forward changes (BatchNorm's statistics) are returned
    as `new_buffers`. The function can be rematerialised, differentiated and vmapped like any other. The state of the
    module does not change; its training flag is read at each call.

    Args:
        model: any module. Tied parameters appear once, under their first name.

    Returns:
        (apply, params, buffers).

    Raises:
        ArgumentTypeError: `model` is not a module.

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
    # Detached, because a plan would treat the module's own buffers as captured tensors; the next call passes other
    # tensors.
    buffers = {name: buffer.detach() for name, buffer in model.named_buffers()}
    return Functional(apply, params, buffers)


def remat_module(module: nn.Module, make_region: Callable[[], Any]) -> nn.Module:
    """Returns a module of the same class and state whose forward runs in a region.

    Both modules share one `__dict__`: parameters, buffers, submodules, hooks and the training flag are the same
    objects, and `state_dict` keys are unchanged. Hooks run outside of the region, once per call. A forward that was
    replaced on `module` runs inside the region; a forward that is replaced on the result runs around the region.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise ArgumentTypeError(
            "remat cannot give a TorchScript module a new forward. Wrap a call of it instead: "
            "remat(lambda *args: scripted(*args))."
        )
    own = _class_of(type(module))
    return _twin(own, own, module, make_region)


def check_plannable(module: nn.Module, *, step: bool = False) -> None:
    """Checks that a plan for `module` would reproduce its forward.

    Args:
        module: the module.
        step: whether the plan is that of a whole training step.

    Raises:
        ArgumentTypeError: `module` is or contains a wrapper, such as DDP or FSDP, whose forward communicates outside of
            the traced computation.
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
        if step:
            way = "plan its blocks with remat before they are sharded" if kind == "sharded" else way
            way += ", and call backward and the optimizer as usual"
        what = "fckpt.step" if step else "remat"
        raise ArgumentTypeError(
            f"{what} cannot plan this {type(module).__name__}: {where} a {type(part).__name__}, whose forward "
            f"communicates outside of the traced computation, so a planned step would not communicate. Instead {way}."
        )


def _beside(kind: type) -> str | None:
    """Returns the name of a wrapper that communicates outside of its forward, if the class is one; otherwise None."""
    for base in kind.__mro__:
        if issubclass(base, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            return "DDP" if issubclass(base, nn.parallel.DistributedDataParallel) else "DataParallel"
        if base.__module__.startswith("torch.distributed.fsdp"):
            return "sharded"
    return None


class _Forward:
    """Descriptor for the `forward` of a rematerialised module, stored apart from the attributes that the two modules
    share.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is None:
            return self.function
        replaced = module._fckpt_replaced
        if replaced is not None:
            return replaced
        if torch.compiler.is_compiling():  # Dynamo cannot create bound methods
            return functools.partial(self.function, module)
        return types.MethodType(self.function, module)

    def __set__(self, module: Any, value: Any) -> None:
        module._fckpt_replaced = value

    def __delete__(self, module: Any) -> None:
        module._fckpt_replaced = None


class _Compiled:
    """Descriptor for the result of `compile()`, which the original module must not share."""

    def __get__(self, module: Any, owner: Any = None) -> Any:
        return None if module is None else module._fckpt_compiled

    def __set__(self, module: Any, value: Any) -> None:
        module._fckpt_compiled = value


class _Become:
    """Descriptor for `cls_to_become`, the class of a lazy module after its first call: sets it on the inner module."""

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is not None and isinstance(module, _Rematerialised):
            inner = module._fckpt_inner
            if type(inner).cls_to_become is not None:
                inner.__class__ = type(inner).cls_to_become
        return None


class _Rematerialised:
    """First base class of a rematerialised module; the second is the original class."""

    __slots__ = ()

    if TYPE_CHECKING:  # at run time, the class attribute `__annotations__` must be that of the original class
        _fckpt_inner: Any
        _fckpt_own: Any
        _fckpt_class: Any
        _fckpt_make: Any
        _fckpt_region: Any
        _fckpt_replaced: Any

    _compiled_call_impl = _Compiled()

    def extra_repr(self) -> str:
        inner = super().extra_repr()  # type: ignore[misc]  # of the module's class
        return f"{inner}, remat" if inner else "remat"

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_fckpt_"):  # not registered as a submodule
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __eq__(self, other: object) -> bool:
        return _innermost(self) is _innermost(other)

    def __hash__(self) -> int:
        return object.__hash__(_innermost(self))

    def __copy__(self) -> Any:
        made = remat_module(copy.copy(self._fckpt_inner), self._fckpt_make)
        object.__setattr__(made, "_fckpt_replaced", self._fckpt_replaced)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = remat_module, (self._fckpt_inner, self._fckpt_make)
        replaced = self._fckpt_replaced
        return made if replaced is None else (*made, {"forward": replaced})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._fckpt_replaced = state["forward"]

    def _replicate_for_data_parallel(self) -> Any:
        inner = self._fckpt_inner._replicate_for_data_parallel()
        return _twin(type(self), self._fckpt_own, inner, self._fckpt_make)

    def _fckpt_forward(self) -> Callable[..., Any]:
        """Returns the function that runs in the region."""
        inner: Any = self._fckpt_inner
        compiled = vars(inner).get("_compiled_call_impl")
        if compiled is not None and not _has_hooks(inner) and not hasattr(self._fckpt_region, "planner"):
            return compiled
        if type(self) is self._fckpt_own or type(inner) is not self._fckpt_class or "forward" in vars(inner):
            return inner.forward
        # The class of the rematerialised module was changed (by `parametrize`, for example), so the forward must find
        # attributes through that class.
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
        module = module._fckpt_inner
    return module


def _has_hooks(module: nn.Module) -> bool:
    return any(vars(module)[name] for name in _HOOKS)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@functools.cache
def _class_of(cls: type[nn.Module]) -> type[nn.Module]:
    # The class name is unchanged, because wrapping policies and weight initialisers select classes by name.
    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._fckpt_region(self._fckpt_forward(), args, kwargs)

    # A class makes new modules for users who have one of its modules only: `type(model).from_pretrained(folder)`. These
    # are plain, as only `remat` knows how to rematerialise them.
    @functools.wraps(cls.__init__)
    def new(kind: type, *args: Any, **kwargs: Any) -> Any:
        if kind is made:
            return cls(*args, **kwargs)
        if cls.__new__ is object.__new__:  # which takes no arguments
            return object.__new__(kind)
        return cls.__new__(kind, *args, **kwargs)  # of a subclass, such as the one that parametrizations make

    body = {
        "__new__": new,
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
    made = meta(cls.__name__, bases, body)
    return made
