"""Runs one entry of PyTorch's op database plain and rematerialised, and lists where the two differ.

A *case* is one sample input of an op. A *mode* is one way to differentiate a program on a case. Plain
PyTorch runs first: what it refuses is not compared. Where the two differ, it runs again: what it does not
repeat bitwise is compared with a tolerance; everything else must be equal to the last bit.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from helpers import DEVICE, generator_state
from sampling import todays
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

Program = Callable[..., Any]
Remat = Callable[[Program], Program]
Leaves = list[Any]

DEFAULT_SAMPLES = 6
SAMPLES = int(os.environ.get("FCKPT_OPINFO_SAMPLES", DEFAULT_SAMPLES))
"""float64 samples per op, and three times those of complex128."""
LARGEST_INPUT = 40_000  # elements; the few samples above it take seconds and show nothing more
POOL = 40  # samples are chosen evenly from this many first ones: neighbours differ little


def differentiable_ops() -> list[Any]:
    """The entries of the op database that have a float64 or complex128 backward on the device."""
    return [op for op in op_db if op.supports_autograd and dtypes_of(op)]


def dtypes_of(op: Any) -> list[torch.dtype]:
    """Which of float64 and complex128 `op` differentiates in."""
    supported = op.supported_backward_dtypes(DEVICE.type) & op.supported_dtypes(DEVICE.type)
    return [dtype for dtype in (torch.float64, torch.complex128) if dtype in supported]


@dataclass
class Case:
    """One sample input of an op, as a function of its differentiable tensors alone."""

    program: Program
    inplace: Program | None
    """The same with the op's in-place variant, where there is one that differentiates."""
    leaves: Leaves
    spec: Any
    active: list[int]
    """Positions in `leaves` of the tensors to differentiate."""
    outputs: list[int] = field(default_factory=list)
    """Positions among the outputs of those that are differentiable."""
    cotangents: list[Tensor] = field(default_factory=list)

    def fresh(self, requires_grad: bool = False) -> Leaves:
        """A copy of the arguments that a run may do with what it likes."""
        copies = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        for position in self.active:
            copies[position].requires_grad_(requires_grad)
        return copies

    def call(self, program: Program, leaves: Leaves) -> list[Any]:
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return pytree.tree_leaves(program(*args, **kwargs))

    def function(self, program: Program, leaves: Leaves) -> Callable[..., tuple[Tensor, ...]]:
        """`program` as a function from its differentiable inputs to its differentiable outputs."""

        def run(*active: Tensor) -> tuple[Tensor, ...]:
            arguments = list(leaves)
            for position, tensor in zip(self.active, active, strict=True):
                arguments[position] = tensor
            outputs = self.call(program, arguments)
            return tuple(outputs[i] for i in self.outputs)

        return run

    def loss(self, program: Program, leaves: Leaves) -> Callable[..., Tensor]:
        run = self.function(program, leaves)
        return lambda *active: weighted_sum(run(*active), self.cotangents)


def weighted_sum(tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The real part of the sum of all products: a real loss, also of complex tensors."""
    terms = [tensor * weight for tensor, weight in zip(tensors, weights, strict=True)]
    # float64 because the database's half and complex-half outputs have no sum on CPU.
    return sum(((t.real if t.is_complex() else t).double().sum() for t in terms), start=torch.zeros(()))


def random_like(tensor: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator).to(tensor.device)


# modes: (case, program) -> (values, gradients) ------------------------------------------------------

Result = tuple[Sequence[Any], Sequence[Any]]


def backward(case: Case, program: Program) -> Result:
    leaves = case.fresh(requires_grad=True)
    outputs = case.call(program, leaves)
    torch.autograd.backward([outputs[i] for i in case.outputs], case.cotangents)
    state = [leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i not in case.active]
    flags = [getattr(output, "requires_grad", False) for output in outputs]
    return [*outputs, *state, *flags], [leaves[i].grad for i in case.active]


def vjp(case: Case, program: Program) -> Result:
    leaves = case.fresh()
    values, pullback = torch.func.vjp(case.function(program, leaves), *(leaves[i] for i in case.active))
    return values, pullback(tuple(case.cotangents))


def grad(case: Case, program: Program) -> Result:
    leaves = case.fresh()
    active = [leaves[i] for i in case.active]
    every = tuple(range(len(active)))
    gradients, value = torch.func.grad_and_value(case.loss(program, leaves), argnums=every)(*active)
    return [value], gradients


def vmap_grad(case: Case, program: Program) -> Result:
    """Per-example gradients of two examples, the second one scaled: a mix-up of the two shows."""
    leaves = case.fresh()
    active = [torch.stack([leaves[i], 0.75 * leaves[i]]) for i in case.active]
    gradient = torch.func.grad_and_value(case.loss(program, leaves), argnums=tuple(range(len(active))))
    gradients, value = torch.func.vmap(gradient, randomness="different")(*active)
    return [value], gradients


def jvp(case: Case, program: Program) -> Result:
    leaves = case.fresh()
    active = tuple(leaves[i] for i in case.active)
    tangents = tuple(random_like(tensor, seed=7 + i) for i, tensor in enumerate(active))
    return torch.func.jvp(case.function(program, leaves), active, tangents)


def grad_grad(case: Case, program: Program) -> Result:
    leaves = case.fresh()
    active = [leaves[i] for i in case.active]
    every = tuple(range(len(active)))
    directions = [random_like(tensor, seed=70 + i) for i, tensor in enumerate(active)]
    first = torch.func.grad(case.loss(program, leaves), argnums=every)
    second = torch.func.grad_and_value(lambda *xs: weighted_sum(first(*xs), directions), argnums=every)
    gradients, value = second(*active)
    return [value], gradients


def double_backward(case: Case, program: Program) -> Result:
    """Plain autograd with `create_graph=True`, by the inputs and by the cotangents."""
    leaves = case.fresh(requires_grad=True)
    active = [leaves[i] for i in case.active]
    outputs = case.function(program, leaves)(*active)
    cotangents = [cotangent.clone().requires_grad_() for cotangent in case.cotangents]
    first = torch.autograd.grad(outputs, active, cotangents, create_graph=True, allow_unused=True)
    smooth = [gradient for gradient in first if gradient is not None and gradient.requires_grad]
    directions = [random_like(gradient, seed=70 + i) for i, gradient in enumerate(smooth)]
    # Zeros for None: where the first gradient is constant, plain PyTorch has no path, a recompute a zero one.
    second = [torch.zeros_like(tensor) for tensor in (*active, *cotangents)]
    if smooth:
        second = torch.autograd.grad(smooth, active + cotangents, directions, materialize_grads=True)
    return first, second


def inplace(case: Case, program: Program) -> Result:
    """`.backward()` through the in-place variant, on a copy that the program makes itself."""
    return backward(case, program)


MODES: dict[str, Callable[[Case, Program], Result]] = {
    mode.__name__: mode for mode in (backward, vjp, grad, vmap_grad, jvp, grad_grad, double_backward, inplace)
}


# cases ---------------------------------------------------------------------------------------------


def cases(op: Any, samples: int = SAMPLES) -> Iterator[Case]:
    """The cases of `op`: `samples` of float64, a third as many of complex128, spread over its list."""
    for dtype in dtypes_of(op):
        wanted = samples if dtype == torch.float64 else -(-samples // 3)
        torch.manual_seed(0)
        pool = op.sample_inputs(DEVICE.type, dtype, requires_grad=True)
        usable = [case for case in map(_case_maker(op), itertools.islice(pool, POOL * wanted)) if case]
        yield from (usable[i * len(usable) // wanted] for i in range(min(wanted, len(usable))))


def _case_maker(op: Any) -> Callable[[Any], Case | None]:
    def make(sample: Any) -> Case | None:
        finish = sample.output_process_fn_grad

        def program(*args: Any, **kwargs: Any) -> Any:
            return finish(op.gradcheck_wrapper(op.op, *args, **kwargs))

        def inplace(input: Any, *args: Any, **kwargs: Any) -> Any:
            own = pytree.tree_map_only(Tensor, torch.clone, input)
            return finish(op.gradcheck_wrapper(op.inplace_variant, own, *args, **kwargs))

        leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
        tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        active = [i for i, tensor in tensors.items() if tensor.requires_grad]
        if not active or sum(tensor.numel() for tensor in tensors.values()) > LARGEST_INPUT:
            return None
        return Case(program, inplace if op.inplace_variant else None, leaves, spec, active)

    return make


def _probe(case: Case) -> bool:
    """Finds the differentiable outputs by running plain PyTorch; false if there are none."""
    torch.manual_seed(0)
    try:
        outputs = case.call(case.program, case.fresh(requires_grad=True))
    except Exception:  # whatever plain PyTorch raises here, there is nothing to compare with
        return False
    case.outputs = [i for i, out in enumerate(outputs) if isinstance(out, Tensor) and out.requires_grad]
    case.cotangents = [random_like(outputs[i], seed=700 + i) for i in case.outputs]
    return bool(case.outputs)


# comparing -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """One deviation of the rematerialised op from the plain one."""

    mode: str
    part: str
    """"values", "gradients", "generator", "warnings" or "error"."""
    size: float
    """Largest absolute difference; infinite where the results cannot be subtracted."""
    detail: str


@dataclass
class Report:
    """What was compared for one op, and what differed."""

    compared: Counter[str] = field(default_factory=Counter)
    """Cases per mode that were compared with plain PyTorch."""
    unrepeatable: Counter[str] = field(default_factory=Counter)
    """Cases per mode, out of these, that differ and that plain PyTorch does not repeat bitwise."""
    refused: dict[str, str] = field(default_factory=dict)
    """Per mode the last error of plain PyTorch."""
    differences: list[Difference] = field(default_factory=list)


def compare(op: Any, remat: Remat, modes: Sequence[str] = tuple(MODES), parts: int = 1) -> Report:
    """Runs the cases of `op`, or the part of them whose turn it is, in every mode, plain and under `remat`."""
    report = Report()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [case for case in cases(op) if _probe(case)]
    for number, case in todays(enumerate(found), min(parts, len(found) or 1)):
        for mode in modes:
            _compare_case(report, case, mode, remat, f"case {number}: {describe(case)}")
    return report


@dataclass
class _Run:
    result: Result
    generator: Tensor
    messages: set[str]


def _run(mode: str, case: Case, program: Program) -> _Run:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        result = MODES[mode](case, program)
    return _Run(result, generator_state(), {str(warning.message) for warning in caught})


def _equal(a: _Run, b: _Run) -> bool:
    return all(distance(x, y) == 0 for x, y in zip(a.result, b.result, strict=True))


def _compare_case(report: Report, case: Case, mode: str, remat: Remat, where: str) -> None:
    program = case.inplace if mode == "inplace" else case.program
    if program is None:
        return
    try:
        plain = _run(mode, case, program)
    except Exception as error:  # plain PyTorch refuses: nothing to compare with
        report.refused[mode] = f"{type(error).__name__}: {error}"
        return
    report.compared[mode] += 1
    try:
        ours = _run(mode, case, remat(program))
    except Exception as error:  # reported as a difference, with the op and the mode
        text = f"{where}: {type(error).__name__}: {error}"
        report.differences.append(Difference(mode, "error", float("inf"), text))
        return
    gaps = {
        part: distance(expected, got)
        for part, expected, got in zip(("values", "gradients"), plain.result, ours.result, strict=True)
    }
    repeats = not any(gaps.values()) or _repeats(mode, case, program, plain)
    report.unrepeatable[mode] += not repeats
    for part, size in gaps.items():
        if size > (0.0 if repeats else 1e-9):  # what plain PyTorch does not repeat: to rounding
            report.differences.append(Difference(mode, part, size, where))
    if not torch.equal(plain.generator, ours.generator):
        report.differences.append(Difference(mode, "generator", float("inf"), where))
    if (new := ours.messages - plain.messages) and (new := new - _run(mode, case, program).messages):
        report.differences.append(Difference(mode, "warnings", float("inf"), f"{where}: {sorted(new)}"))


def _repeats(mode: str, case: Case, program: Program, plain: _Run) -> bool:
    """Whether plain PyTorch repeats a run to the last bit."""
    # Some LAPACK drivers depend on where memory lies, which two runs in a row may not show.
    held = []  # so that every run finds its memory elsewhere
    for size in range(0, 408, 8):
        held.append(torch.empty(size, device=DEVICE))
        if not _equal(plain, _run(mode, case, program)):
            return False
    return True


def distance(expected: Sequence[Any], got: Sequence[Any]) -> float:
    """Largest absolute difference between two lists of results; 0.0 only if they are bitwise equal."""
    if len(expected) != len(got):
        return float("inf")
    return max((_distance(a, b) for a, b in zip(expected, got, strict=True)), default=0.0)


def _distance(a: Any, b: Any) -> float:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return 0.0 if type(a) is type(b) and a == b else float("inf")
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return float("inf")
    a, b = (_dense(tensor) for tensor in (a, b))
    equal = (a == b) | (a.isnan() & b.isnan())
    if equal.all():
        return 0.0
    if not a.is_floating_point():
        return float("inf")
    gap = torch.where(equal, 0.0, (a - b).abs())
    return float(gap.nan_to_num(nan=float("inf")).max())


def _dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def describe(case: Case) -> str:
    """The arguments of a case, tensors as dtype and shape."""

    def show(leaf: Any) -> str:
        return f"{str(leaf.dtype)[6:]}{list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)

    return str(pytree.tree_unflatten([show(leaf) for leaf in case.leaves], case.spec))
