"""Symbolic numbers: how they are made, and what changes while torch computes with them.

During a capture, torch computes anew for each tensor with symbolic sizes whether it is contiguous, how many elements it
has, and so on: dozens of operations on the same few expressions. The result of an operation is determined by the
expressions, so it is remembered for the duration of the capture. Expressions are immutable, and what torch learns later
about a symbol is applied when a result is read.

Seen on torch 2.11 and 2.13: `SymNode._mul` and similar, `handlers` of sympy's classes, `torch._C._select_conv_backend`.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.interp import handlers
from torch.utils._sympy.printers import PythonPrinter

from fckpt._capture.patching import patched

__all__ = [
    "TOO_LARGE",
    "FloatPrinter",
    "FloatProduct",
    "FloatSum",
    "convolutions_unguarded",
    "environments_released",
    "floats_in_order",
    "large_expressions_refused",
    "symbol",
    "symbols_remembered",
]

_METHODS = ("_add", "_sub", "_mul", "_eq", "_ne", "_ge", "_gt", "_le", "_lt", "_and_", "_or_", "_sym_max", "_sym_min")
_PLAIN = (int, bool)
"""Types of numbers that an expression determines. Sizes of nested tensors are of other types."""


def _remembering(original: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Any, tuple[Any, Any]] = {}

    @functools.wraps(original)
    def compute(self: Any, other: Any) -> Any:
        if type(self._hint) not in _PLAIN or type(other._hint) not in _PLAIN or get_proxy_mode() is not None:
            return original(self, other)
        env = self.shape_env
        key = (
            self._expr, other._expr, self.pytype, other.pytype, id(env),
            self._optimized_summation, other._optimized_summation,
        )  # fmt: skip
        found = known.get(key)
        if found is None:
            found = known[key] = original(self, other), env  # the environment stays alive, so that its id is unique
        return found[0]

    return compute


@contextlib.contextmanager
def symbols_remembered() -> Iterator[None]:
    """Makes operations on symbolic numbers remember their results within the body."""
    with contextlib.ExitStack() as stack:
        for name in _METHODS:
            if name in vars(SymNode):
                stack.enter_context(patched(SymNode, name, _remembering))
        yield


@contextlib.contextmanager
def environments_released() -> Iterator[None]:
    """Releases the environments that are made within the body, which torch would keep until the program ends.

    An environment keeps fake tensors, and these keep the environment through sizes that torch stores in C++, where the
    garbage collector does not see them. The caches of its methods keep it too, some without a limit.
    """
    made: list[ShapeEnv] = []
    thread = threading.get_ident()

    def recorded(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(self: ShapeEnv, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if threading.get_ident() == thread:
                made.append(self)

        return init

    try:
        with patched(ShapeEnv, "__init__", recorded):
            yield
    finally:
        for env in made:
            env.tracked_fakes = None
            env.fake_tensor_cache.clear()
        for clear in _caches():
            clear()


@contextlib.contextmanager
def large_expressions_refused() -> Iterator[None]:
    """Raises `LookupError` where torch would compare large expressions of symbols within the body.

    Sizes that are padded, rolled and cut into windows (Swin, for example) become expressions of thousands of terms,
    which sympy simplifies for minutes. They are better captured and traced as constants.
    """

    @functools.lru_cache(4096)
    def is_large(expression: sympy.Basic) -> bool:
        count, todo = 0, [expression]
        while todo and count <= _MOST_TERMS:
            count += 1
            todo += todo.pop().args
        return count > _MOST_TERMS

    def checked(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def evaluate_expr(self: ShapeEnv, expression: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(expression, sympy.Basic) and is_large(expression):
                raise LookupError(TOO_LARGE)
            return original(self, expression, *args, **kwargs)

        return evaluate_expr

    with patched(ShapeEnv, "evaluate_expr", checked):
        yield


_MOST_TERMS = 100
"""The largest number of terms of an expression. In BERT, T5, GPT-2, ViT and ConvNeXt there are at most 55."""
TOO_LARGE = "the expressions of sizes are too large"


@contextlib.contextmanager
def convolutions_unguarded() -> Iterator[None]:
    """Keeps torch from guarding, within the body, on the sizes by which it chooses the kernel of a convolution.

    A fake convolution asks for the kernel only because kernels may return other strides. All return contiguous results
    if input and weight are contiguous. With a batch of one image, oneDNN runs from 20,480 elements on: each convolution
    of a network would add a guard, and so a capture for a range of image sizes.
    """

    def is_several(size: Any) -> bool:
        return size > 1 if type(size) is int else size.node.has_hint() and bool(size > 1)

    def unguarded(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def select(input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
            env = getattr(getattr(input, "fake_mode", None), "shape_env", None)
            # With one channel, a contiguous tensor may be in the format channels_last, too.
            contiguous = all(t.is_contiguous() and is_several(t.shape[1]) for t in (input, weight))
            with env.suppress_guards() if env is not None and contiguous else contextlib.nullcontext():
                return original(input, weight, *args, **kwargs)

        return select

    with patched(torch._C, "_select_conv_backend", unguarded):
        yield


@functools.cache
def _caches() -> list[Callable[[], None]]:
    """Returns the functions that clear the caches of the methods of environments."""
    found = []
    for method in vars(ShapeEnv).values():
        while method is not None:
            if hasattr(method, "cache_clear"):
                found.append(method.cache_clear)
            method = getattr(method, "__wrapped__", None)
    return found


def symbol(env: ShapeEnv, name: str, hint: int, is_size: bool) -> Any:
    """Returns a symbolic number of an environment.

    Args:
        env: the environment.
        name: a name for the number in the environment's own messages.
        hint: an example of the number.
        is_size: whether the number is the size of a dimension, and at least 2; otherwise it may be any integer.
    """
    source = ConstantSource(name)
    create = env.create_symbol if is_size else env.create_unspecified_symbol
    return env.create_symintnode(create(hint, source, DimDynamic.DYNAMIC), hint=hint, source=source)


class _FloatOperation(sympy.Function):
    """An operation on two floats, one of which depends on symbols. Sympy leaves it as it is."""

    is_real = True
    operator: Callable[[float, float], float]

    @classmethod
    def eval(cls, *args: Any) -> Any:
        a, b = args
        if isinstance(a, sympy.Number) and isinstance(b, sympy.Number):
            return sympy.Float(cls.operator(float(a), float(b)))
        return None


class FloatSum(_FloatOperation):
    """The sum of two floats."""

    operator = operator.add


class FloatProduct(_FloatOperation):
    """The product of two floats."""

    operator = operator.mul


class FloatPrinter(PythonPrinter):
    """Printer of Python expressions, with sums and products of floats as they are computed."""

    def _print_FloatSum(self, e: Any) -> str:
        return f"(({self._print(e.args[0])}) + ({self._print(e.args[1])}))"

    def _print_FloatProduct(self, e: Any) -> str:
        return f"(({self._print(e.args[0])}) * ({self._print(e.args[1])}))"


@contextlib.contextmanager
def floats_in_order(env: Any = None) -> Iterator[None]:
    """Keeps sums and products of floats that depend on symbols as they are computed, within the body.

    Sympy would rewrite them: `n * 0.7 * 10` becomes `7.0 * n`, which rounds differently.

    Args:
        env: the environment of the symbols; None for all symbols of this thread.
    """
    thread = threading.get_ident()

    def keeping(compute: Callable[[float, float], float], kept: Callable[[Any, Any], Any]) -> Any:
        def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def wrap(self: Any, other: Any) -> Any:
                concerned = threading.get_ident() == thread if env is None else self.shape_env is env
                if not concerned or float not in (self.pytype, other.pytype) or None in (self.hint, other.hint):
                    return original(self, other)
                hint = compute(float(self.hint), float(other.hint))
                return SymNode(kept(self.expr, other.expr), self.shape_env, float, hint)

            return wrap

        return wrapped

    ranges = handlers()
    with contextlib.ExitStack() as stack:
        for name, printed in vars(FloatPrinter).items():  # how guards are written
            if name.startswith("_print_") and not hasattr(PythonPrinter, name):
                setattr(PythonPrinter, name, printed)
                stack.callback(delattr, PythonPrinter, name)
        stack.enter_context(patched(SymNode, "_add", keeping(operator.add, FloatSum)))
        stack.enter_context(patched(SymNode, "_mul", keeping(operator.mul, FloatProduct)))
        less = lambda a, b: FloatSum(a, FloatProduct(sympy.Float(-1.0), b))
        stack.enter_context(patched(SymNode, "_sub", keeping(operator.sub, less)))
        for kind, name in ((FloatSum, "add"), (FloatProduct, "mul")):  # how torch finds the range of such a number
            if kind not in ranges:
                ranges[kind] = name
                stack.callback(ranges.pop, kind)
        yield
