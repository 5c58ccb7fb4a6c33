"""`nn.Module` to pure function, and modules whose forward is rematerialised."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from fckpt.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["Functional", "from_module", "remat_module"]


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
    objects, and `state_dict` keys are unchanged. Hooks run outside of the region, once a call.
    """
    cls = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        raise ArgumentTypeError(
            "remat cannot give a TorchScript module a new forward. Wrap a call of it instead: "
            "remat(lambda *args: scripted(*args))."
        )
    if "forward" in vars(module):
        raise ArgumentValueError(
            f"this {cls.__name__} had its forward replaced on the instance, which would bypass remat. Apply remat "
            "first and replace forward on its result."
        )
    rematerialised = object.__new__(_class_of(cls))
    object.__setattr__(rematerialised, "__dict__", vars(module))
    object.__setattr__(rematerialised, "_fckpt_inner", module)
    object.__setattr__(rematerialised, "_fckpt_make", make_region)
    object.__setattr__(rematerialised, "_fckpt_region", make_region())
    return rematerialised


class _Rematerialised:
    """First base of a rematerialised module's class; the module's own class is the second."""

    __slots__ = ()

    def extra_repr(self) -> str:
        inner = super().extra_repr()  # type: ignore[misc]
        return f"{inner}, remat" if inner else "remat"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return remat_module, (self._fckpt_inner, self._fckpt_make)  # type: ignore[attr-defined]


@functools.cache
def _class_of(cls: type[nn.Module]) -> type[nn.Module]:
    # The name stays, because wrapping policies and weight initialisers select classes by it.
    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._fckpt_region(self._fckpt_inner.forward, args, kwargs)

    body = {
        "forward": forward,
        "__slots__": ("_fckpt_inner", "_fckpt_make", "_fckpt_region"),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    bases = (cls,) if issubclass(cls, _Rematerialised) else (_Rematerialised, cls)
    return type(cls.__name__, bases, body)
