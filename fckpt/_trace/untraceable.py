"""Errors for functions that cannot be traced, because they read the data of tensors or call higher-order operators."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fckpt._call.levels import is_wrapped, transforms_active, unwrapped
from fckpt._call.modules import storage_of
from fckpt._capture.classes import original_of
from fckpt._capture.sources import current, failing_module, is_users
from fckpt._capture.tensor_states import STATES
from fckpt._trace import formulas
from fckpt._trace.aliases import NEW_LEAF, is_unrecorded
from fckpt._trace.late import refuse_hook_in_c
from fckpt._trace.lifetimes import nodes_behind
from fckpt._trace.plain_kernels import decides
from fckpt._trace.recorder import Recorder
from fckpt._trace.stand_ins import WAY_OUT
from fckpt._trace.vmap_of_grad import at_a_level
from fckpt.errors import TraceError

__all__ = ["LOOKS", "DataReadsRefused", "HigherOrderError", "errors_located"]

_TENSOR: Any = torch.Tensor
_READS = {
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.tolist,
    torch.Tensor.data_ptr,
    torch.Tensor.__dlpack__,
}


_STEP = "For a whole training step, with the optimizer, use fckpt.step."
_REFUSED = {
    _TENSOR.grad.__get__: "reads `.grad` of a tensor, which changes from call to call. Pass the gradient as an "
    f"argument, or differentiate with `torch.autograd.grad`. {_STEP}",
    _TENSOR.grad.__set__: f"sets `.grad` of a tensor, which a plan would not do. {_STEP}",
    _TENSOR.grad.__delete__: f"deletes `.grad` of a tensor, which a plan would not do. {_STEP}",
    _TENSOR.data.__set__: "replaces the memory of a tensor (`tensor.data = ...`), which a plan would not do. Write to "
    "the tensor instead (`tensor.copy_(...)`), or use a new tensor in its place.",
    _TENSOR.retain_grad: "calls `retain_grad()` on a tensor, whose gradient a plan would not store. Return the tensor, "
    "and call `retain_grad()` on what the call returns.",
    _TENSOR.__deepcopy__: "copies a tensor with `copy.deepcopy`. Use `tensor.clone()`.",
}
_TEXTS = {_TENSOR.__repr__, _TENSOR.__format__}
_RECURRENT = torch.nn.modules.rnn.__file__


class DataReadsRefused(TorchFunctionMode):
    """A mode that raises `TraceError` for calls that read the memory or the state of a traced tensor.

    A traced tensor has no memory, and other states than the tensors of a call. The mode also chooses the formulas of
    backward passes inside of the traced function.
    """

    def __init__(self, recorder: Recorder, wrapped: bool):
        super().__init__()
        self.recorder = recorder
        self.wrapped = wrapped
        """Whether the traced function runs at a level of torch.func."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = original_of(func)
        if func in _WATCHED and self.recorder.owns(unwrapped(args[0])):
            at_level = self.wrapped or transforms_active()
            if (func != _IS_LEAF or at_level) and (reason := _refusal(func, sys._getframe(1))):
                raise TraceError(f"{current()}: {reason}")
        if func in _REQUIRING and is_unrecorded(args[0]) and self.recorder.owns(unwrapped(args[0])):
            raise TraceError(NEW_LEAF)
        if func in _REGISTERING:
            refuse_hook_in_c((*args[1:], *(kwargs or {}).values())[0])
        # A function that reads `grad_fn` most likely registers a hook on it.
        if func in _REGISTERING or (func == _GRAD_FN and _is_called_by_user(sys._getframe(1))):
            self.recorder.hooked.add(storage_of(unwrapped(args[0])))
        if self.wrapped and func in _COMPOSED and not transforms_active():
            return at_a_level(func, args, kwargs or {})
        if isinstance(func, torch._ops.HigherOrderOperator) and func.name() in _BRANCHING:
            raise _refused_operator(current(), func.name())
        if func is torch.autograd.grad:
            if not self.recorder.in_last_backward:
                self._choose_formulas(args[0] if args else (kwargs or {})["outputs"])
            self.recorder.in_last_backward = False
        if decides(func):
            with self.recorder.kernels.within(func, args, kwargs or {}, self.wrapped):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _choose_formulas(self, given: torch.Tensor | Sequence[torch.Tensor]) -> None:
        outputs = [given] if isinstance(given, torch.Tensor) else given
        wrapped = self.wrapped or transforms_active()
        saved = wrapped or any(map(is_wrapped, outputs))
        for node in nodes_behind(outputs):
            formulas.choose(node, wrapped=wrapped, saved=saved)


_GRAD_FN = _TENSOR.grad_fn.__get__
_IS_LEAF = _TENSOR.is_leaf.__get__
"""Stand-ins are leaves where the tensors of the call are, except at levels of torch.func."""
_REQUIRING = {_TENSOR.requires_grad_, _TENSOR.requires_grad.__set__}
_REGISTERING = {_TENSOR.register_hook, _TENSOR.register_post_accumulate_grad_hook}
_WATCHED = {*_READS, *_REFUSED, *_TEXTS, *STATES}
_METHODS = (torch._tensor.__file__, torch.overrides.__file__)


def _refusal(func: Any, frame: Any) -> str:
    """Returns the reason to refuse a call of `func` on a traced tensor, made by `frame`; empty to allow the call."""
    if func is torch.Tensor.data_ptr and frame.f_code.co_filename == _RECURRENT:
        return (
            "cuDNN packs the weights of recurrent networks, and a plan cannot follow that. Use nn.LSTMCell in a loop, "
            f"or put the recurrent layers outside of the plan. {WAY_OUT}"
        )
    if func in _TEXTS:
        return _looks("it writes the data as text")
    if func in _READS:
        return _looks(f"`{func.__name__}`")
    if func in _REFUSED:
        if _is_within(frame, torch.nn.Module._apply.__code__):
            return (
                "the function converts a module (`module.to(...)`, `module.half()` or the like), which replaces the "
                f"memory of its parameters. A plan would not do so. Convert the module before the call. {WAY_OUT}"
            )
        return f"the function {_REFUSED[func]} {WAY_OUT}"
    if not _is_called_by_user(frame):
        return ""
    return (
        f"the function reads `{STATES[func]}` of a tensor here, which may differ between the tensors of calls that one "
        f"trace serves. {WAY_OUT}"
    )


def _is_within(frame: Any, code: Any) -> bool:
    """Whether a frame runs this code, or torch does below it."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def _is_called_by_user(frame: Any) -> bool:
    """Whether the user's code called a method of a tensor. torch's own file of such methods is skipped."""
    while frame.f_code.co_filename in _METHODS:
        frame = frame.f_back
    return is_users(frame.f_code.co_filename)


_NO_DATA = (
    "Cannot access data pointer",
    "its data is not allocated yet",
    "unallocated storage",
    "invalid python storage",
)


class HigherOrderError(TraceError):
    """The function calls an operator that takes functions as arguments, so that it cannot be traced in any way."""


@contextlib.contextmanager
def errors_located() -> Iterator[None]:
    """Turns errors of fake tensors and of higher-order operators into a `TraceError` that names the user's line."""
    try:
        yield
    except Exception as error:
        kind = type(error).__name__
        if isinstance(error, NotImplementedError) and "HigherOrderOperator" in str(error):
            name = str(error).partition("HigherOrderOperator ")[2].partition(" ")[0] or "an operator"
            raise _refused_operator(_line_of(error), name) from error
        if "no fake impl registered" in str(error) or "UnsupportedOperator" in kind:
            raise TraceError(
                f"{_line_of(error)}: the function calls a custom operation without `register_fake`, and a plan cannot "
                f"infer the layouts of its results. Register a function for that ({_first_line(error)[:200]}). "
                f"{WAY_OUT}"
            ) from error
        if isinstance(error, RuntimeError) and "INTERNAL ASSERT FAILED" in str(error):
            raise TraceError(
                f"{_line_of(error)}: the function makes a call here that torch cannot run on tensors without data, as "
                f"a plan is made with ({_first_line(error)[:200]}). {WAY_OUT}"
            ) from error
        if isinstance(error, RuntimeError) and "Cannot set version_counter for inference tensor" in str(error):
            raise TraceError(
                f"{_line_of(error)}: in inference mode, the function takes a view of a tensor that was made outside of "
                "that mode (or detaches it), which torch cannot run on tensors without data, as a plan is made with. "
                f"Use `torch.no_grad()` in place of `torch.inference_mode()`. {WAY_OUT}"
            ) from error
        hidden = isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_DATA)
        if not hidden and not any(word in kind for word in ("DataDependent", "DynamicOutputShape", "UnsupportedFake")):
            raise
        raise TraceError(f"{_line_of(error)}: {_looks(f'{kind}: {_first_line(error)}')}{_advice(error)}") from error


def _refused_operator(line: Any, name: str) -> HigherOrderError:
    return HigherOrderError(
        f"{line}: the function uses torch's operator `{name}`, which takes functions as arguments. A plan cannot tell "
        "which operations it will run. Write the branch or the loop in Python, or put the budget around a part without "
        f"the operator. {WAY_OUT}"
    )


_COMPOSED = {
    torch.binary_cross_entropy_with_logits,
    torch.nn.functional.binary_cross_entropy_with_logits,
    torch.dropout,
    torch.nn.functional.dropout,
    torch.alpha_dropout,
    torch.nn.functional.alpha_dropout,
    torch.feature_dropout,
    torch.feature_alpha_dropout,
    torch.nn.functional.feature_alpha_dropout,
}
"""Functions that torch composes of other operations at a level of torch.func."""

_BRANCHING = {"cond", "while_loop", "map_impl", "scan", "associative_scan"}
"""Operators that take functions, and choose at run time which of them to call, or how often."""


LOOKS = "the function looks at the data"
"""The beginning of the message about data that decide what a function computes, on which a captured one may branch."""


def _looks(what: str) -> str:
    return (
        f"{LOOKS} of a tensor here ({what}), so its operations are not the same for all data "
        f"and cannot be planned ahead. {WAY_OUT}"
    )


def _advice(error: Exception) -> str:
    """Returns a way out for functions of torch that can do without looking at data."""
    if "_nested_tensor_from_mask" in str(error):
        return (
            " Or keep `nn.TransformerEncoder` from its fast path, which depends on the mask, with "
            "`enable_nested_tensor=False`."
        )
    if "bincount" in str(error):
        return " Or count with `torch.nn.functional.one_hot(x, n).sum(0)`, whose size does not depend on the data."
    files = [f.filename for f in traceback.extract_tb(error.__traceback__)]
    if any(file == torch.nn.modules.batchnorm.__file__ for file in files):
        return (
            " Or give batch normalisation a momentum: with `momentum=None`, it reads its counter. (`update_bn` and "
            "stochastic weight averaging set None for a while. Let them run the model without a plan.)"
        )
    if any("/distributions/" in file for file in files):
        return (
            " Or pass `validate_args=False` to the distribution, which looks at its parameters only to validate them."
        )
    return ""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _line_of(error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    if not frames:
        return "in the traced function"
    last = frames[-1]
    module = failing_module(error)
    inside = f"{last.name} of {module}" if module else last.name
    return f"{last.filename}:{last.lineno}, in {inside} ({(last.line or '').strip()})"
