"""The backend "fckpt" of `torch.compile`: Inductor, with a plan for what the forward pass saves, within a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fckpt._compile.by_size import CompiledBySize
from fckpt._compile.compilation import Compilation
from fckpt._compile.skipped import watch
from fckpt.errors import ArgumentTypeError

__all__ = ["fckpt"]


def fckpt(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compiles a function with Inductor under a budget: `torch.compile(model, backend="fckpt", options={...})`.

    A plan decides which values the forward pass saves, and what the backward pass recomputes, in which order. When the
    function is compiled, it runs once with its backward pass on the example inputs, and the peak is measured. If it is
    above the budget, the difference is taken off the budget, and the function is planned and compiled again, at most
    three times. If torch's own partition fits the budget, it stays. If no plan keeps the budget, torch's partitions for
    smaller values of `activation_memory_budget` are tried.

    A function that is compiled for symbolic sizes is measured again at sizes at which it may exceed the budget, see
    `CompiledBySize`.

    Args:
        module: the graph of a function, from Dynamo.
        inputs: example inputs.
        options: `budget`, the most bytes that forward and backward may hold at once above what is held at the call
            (an int, a string such as "8GiB", or a float for a fraction of the peak of the function without a compiler);
            `policy`, one of `fckpt.policies` without names; `solver`, the name of a solver; `mode`, because
            `torch.compile` takes no mode besides options. All other options are Inductor's.
        mode: a mode of Inductor, "reduce-overhead" for example.

    Returns:
        The compiled function.

    Raises:
        ArgumentTypeError: an option has a wrong type.
        ArgumentValueError: an option has a wrong value. Dynamo reports errors as `BackendCompilerFailed`.

    Warns:
        BudgetWarning: the compiled function exceeds the budget, or nothing could be measured.
    """
    if options is not None and not isinstance(options, dict):
        raise ArgumentTypeError(f"options are a dict, not {type(options).__name__}: {options!r}.")
    compilation = Compilation(module, inputs, dict(options or {}), mode)
    function = compilation.compiled()
    return CompiledBySize(compilation, function) if compilation.is_for_more_sizes() else function


watch()
