"""`check`: compares a rematerialised function with the plain one, bit for bit, on the user's own arguments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fckpt import _tree as tree
from fckpt._call.arguments import Arguments
from fckpt._call.conditions import Observation
from fckpt._fuse.option import Kernels
from fckpt._inspect import Outputs
from fckpt._memory import measure_peak
from fckpt._planned.plan import Budget, Plan
from fckpt._planned.tracing import CapturedTensors
from fckpt._region import plain_of
from fckpt._remat import remat
from fckpt._units import format_bytes
from fckpt.errors import ArgumentValueError
from fckpt.policies.decisions import PolicyLike

__all__ = ["Check", "check"]


@dataclass(frozen=True)
class Check:
    """The result of `check`. True if nothing differs."""

    differences: tuple[str, ...]
    """The tensors that are not bitwise equal: `the gradient of args[0]['w'] (by up to 1.2e-07)`. With `; two plain runs
    differ, too` if the plain function is not deterministic."""
    compared: int
    """The number of tensors compared: outputs, gradients, statistics, the generator's state."""
    plain_peak_bytes: int
    peak_bytes: int
    largest: float = 0.0
    """The largest difference of a tensor of floats: the norm of the difference, as a fraction of the plain tensor's."""
    loss_of: tuple[str, ...] = ()
    """The tensors of the result that were differentiated, if there are others that could be."""

    def __bool__(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        found = "; ".join(self.differences) or f"all {self.compared} tensors are bitwise equal"
        found += f"; the largest relative difference is {self.largest:.2g}" if self.differences else ""
        peaks = f"peak {format_bytes(self.plain_peak_bytes)} -> {format_bytes(self.peak_bytes)}"
        return f"{found}; {peaks}" + (f"; for a loss of {', '.join(self.loss_of)} alone" if self.loss_of else "")


def check(
    fn: Callable[..., Any],
    *args: Any,
    policy: PolicyLike | None = None,
    budget: Budget | None = None,
    plan: Plan | None = None,
    kernels: Kernels = "aten",
    outputs: Outputs | None = None,
    **kwargs: Any,
) -> Check:
    """Runs forward and backward of `fn` plainly and rematerialised, and compares everything bit for bit.

    Args:
        fn: a function or a module; or a result of `remat`, which is compared with its original.
        args: arguments as in a call. Every tensor that requires grad is differentiated, including captured parameters.
            If none does (the function differentiates inside, for example), only the results are compared.
        policy: see `remat`.
        budget: see `remat`.
        plan: see `remat`.
        kernels: see `remat`. With "fused", results may differ: `Check.largest` says how far.
        outputs: the tensors of the result to differentiate, see `fckpt.plan`; by default, all that require grad.
        kwargs: as in the call.

    Returns:
        The differences, if any, and both measured peaks. Statistics, `.grad` and the generators are left as they were.

    Raises:
        ArgumentValueError: the call has no tensors, or `outputs` names no tensor of the result.

    Example:
        >>> import torch, fckpt
        >>> w, x = torch.randn(8, 8, requires_grad=True), torch.randn(64, 8)
        >>> bool(fckpt.check(lambda w, x: torch.tanh(torch.tanh(x @ w) @ w).sum(), w, x))
        True
    """
    plain = plain_of(fn)
    region = remat(fn, policy=policy, budget=budget, plan=plan, kernels=kernels) if plain is fn else fn
    donated = getattr(region._fckpt_region, "donated", None)  # type: ignore[attr-defined]  # set by remat
    given = donated.tensors(args, kwargs) if donated else {}
    chosen = [outputs] if isinstance(outputs, (int, str)) else outputs
    comparison = _Comparison(plain, args, kwargs, chosen, given)
    comparison.run(region, measured=False)  # traces and plans, which a profiler would disturb
    expected, plain_peak = comparison.run(plain)
    actual, peak = comparison.run(region)
    names = [name for name in expected if not _same(expected[name], actual[name])]
    again, _ = comparison.run(plain, measured=False) if names else (expected, 0)
    differences = [
        f"{name} ({_difference(expected[name], actual[name])}"
        f"{'' if _same(expected[name], again[name]) else '; two plain runs differ, too'})"
        for name in names
    ]
    largest = max((_relative(expected[name], actual[name]) for name in expected), default=0.0)
    return Check(tuple(differences), len(expected), plain_peak, peak, largest, comparison.loss_of)


class _Comparison:
    """Runs functions on the same arguments and from the same state."""

    def __init__(
        self,
        fn: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        chosen: Sequence[int | str] | None,
        donated: Collection[int],
    ):
        """Prepares the runs; `donated` are the ids of the tensors over which the rematerialised function may write."""
        self.args, self.kwargs, self.chosen, self.donated = args, kwargs, chosen, donated
        self.loss_of: tuple[str, ...] = ()
        """The tensors of the result that the last run differentiated, if there are others that could be."""
        run = fn.forward if isinstance(fn, nn.Module) else fn
        arguments = Arguments(args, kwargs)
        observation = Observation([run], arguments.statics, arguments.tensors, {})
        captured = CapturedTensors(observation, arguments.tensors)
        paths = [arguments.path(i) for i in range(len(arguments.tensors))]
        paths += [f"captured tensor {i}" for i in range(len(captured.tensors))]
        if isinstance(fn, nn.Module):
            names = {id(t): name for name, t in (*fn.named_parameters(), *fn.named_buffers())}
            paths = [
                names.get(id(t), path) for t, path in zip((*arguments.tensors, *captured.tensors), paths, strict=True)
            ]
        pairs = list(zip(paths, (*arguments.tensors, *captured.tensors), strict=True))
        self.wanted = [(path, t) for path, t in pairs if t.requires_grad]
        self.state = [(path, t, t.detach().clone()) for path, t in pairs if not t.requires_grad]
        self.generators = observation.random
        if not pairs:
            raise ArgumentValueError("nothing to check: the function has no tensor arguments and captures no tensors.")
        self.device = pairs[0][1].device

    def _differentiated(self, named: Sequence[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
        able = [t for _, t in named if t.requires_grad]
        if self.chosen is None:
            return able
        try:
            places = tree.selected(self.chosen, [name for name, _ in named])
            found = [named[i] for i in places if named[i][1].requires_grad]
            others = len(found) < len(able)
            self.loss_of = tuple([f"{name} {tree.describe(t)}".strip() for name, t in found]) if others else ()
            return [t for _, t in found]
        except LookupError as error:
            raise ArgumentValueError(f"outputs: {error}.") from error

    def run(self, fn: Callable[..., Any], *, measured: bool = True) -> tuple[dict[str, torch.Tensor | None], int]:
        """Returns all tensors that one forward and backward pass produces, by name, and the peak if `measured`."""
        found: dict[str, torch.Tensor | None] = {}

        def step() -> None:
            leaves, spec = tree.flatten(fn(*self.args, **self.kwargs))
            named = [(n, t) for n, t in zip(spec.names(), leaves, strict=True) if isinstance(t, torch.Tensor)]
            found.update({f"output {i}": t.detach() for i, (_, t) in enumerate(named)})
            outputs = self._differentiated(named)
            cotangents = [
                torch.linspace(1, 2, t.numel(), device=t.device).to(t.dtype).reshape(t.shape) for t in outputs
            ]
            inputs = [t for _, t in self.wanted]
            grads: Sequence[torch.Tensor | None] = [None] * len(inputs)
            if outputs and inputs:
                grads = torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
            found.update({f"the gradient of {path}": g for (path, _), g in zip(self.wanted, grads, strict=True)})

        self.generators.rewind()
        peak = measure_peak(step, device=self.device).peak_bytes if measured else 0
        if not measured:
            step()
        found["the random generator"] = torch.get_rng_state()
        with torch.no_grad():
            for name, value in found.items():  # a result may be a donated tensor, which gets its old value back
                found[name] = value.clone() if self.donated and value is not None else value
            for path, tensor, before in self.state:
                if id(tensor) not in self.donated:
                    found[f"{path} after the call"] = tensor.detach().clone()
                tensor.copy_(before)
        self.generators.rewind()
        return found, peak


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _relative(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """Returns the norm of a difference as a fraction of the norm of `a`; 0 if the two cannot be compared."""
    if _same(a, b) or a is None or b is None or a.shape != b.shape or not (a.is_floating_point() or a.is_complex()):
        return 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    return ((a - b).to(wide).norm() / a.to(wide).norm().clamp_min(torch.finfo(torch.float64).tiny)).item()


def _difference(a: torch.Tensor | None, b: torch.Tensor | None) -> str:
    if a is None or b is None:
        return f"{tree.describe(a)} and {tree.describe(b)}"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{tree.describe(a)} and {tree.describe(b)}"
    return f"by up to {(a.double() - b.double()).abs().max().item():.2g}"
