"""Results written over operands: the same bits as elsewhere, and less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fckpt
from fckpt._memory import measure_peak
from fckpt._trace.in_place import _SCATTERING, _WRITERS, overwritable, writer_of
from fckpt._trace.operations import Ref

aten = torch.ops.aten
OPS = sorted(_WRITERS.keys() - _SCATTERING, key=str)
LAYOUTS = {
    "contiguous": lambda: torch.randn(37, 1001),
    "transposed": lambda: torch.randn(129, 65).t(),
    "channels_last": lambda: torch.randn(2, 5, 9, 7).to(memory_format=torch.channels_last),
    "double": lambda: torch.randn(513, dtype=torch.float64),
    "bfloat16": lambda: torch.randn(64, 65).bfloat16(),
    "few": lambda: torch.randn(3),
}


def arguments(op: Any, layout: str) -> tuple[list[Any], dict[str, Any]]:
    """Values for all parameters of an operation."""
    torch.manual_seed(sum(map(ord, f"{op}{layout}")))
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for parameter in op._schema.arguments:
        kind = str(parameter.type)
        if kind == "Tensor":
            value: Any = LAYOUTS[layout]()
            if parameter.name in ("condition", "mask"):
                value = value > 0
            elif parameter.name == "value":
                value = torch.tensor(0.25, dtype=value.dtype)
        elif "number" in kind:
            value = -0.5 if parameter.name == "min" else 0.5
        else:
            value = parameter.default_value
        if parameter.kwarg_only:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    return args, kwargs


def bits(tensor: Tensor) -> Tensor:
    """What tells NaN from NaN, too."""
    return tensor.contiguous().view(torch.uint8)


def positions(op: Any, args: list[Any]) -> tuple[list[int], int]:
    """Where the result may go, found on fake tensors as the tracer does, and how many tensors there are."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype) for a in args if isinstance(a, Tensor)]
        tensors = iter(range(len(fake)))
        refs = [Ref(next(tensors)) if isinstance(a, Tensor) else a for a in args]
        result = op(*(fake[a.tensor] if isinstance(a, Ref) else a for a in refs))
        found = overwritable(op, refs, [*fake, result], list(range(len(fake) + 1)), len(fake))
    return found, len(fake)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS, ids=str)
def test_the_same_bits_wherever_they_are_written(op: Any, layout: str) -> None:
    args, kwargs = arguments(op, layout)
    expected = op(*args, **kwargs)
    writer, keyword = writer_of(op)
    found, _ = positions(op, args)
    if not found:  # masked_fill gives its result strides of its own
        assert op.overloadpacket is aten.masked_fill and expected.stride() != args[0].stride()
    for position in found:
        sent = [a.clone() if isinstance(a, Tensor) else a for a in args]
        target = sent[position]
        assert target.stride() == args[position].stride()
        result = writer(*sent, **kwargs, **({keyword: target} if keyword else {}))
        assert result.data_ptr() == target.data_ptr()
        assert result.stride() == expected.stride()
        assert torch.equal(bits(result), bits(expected))
        for i, (before, after) in enumerate(zip(args, sent, strict=True)):
            assert i == position or not isinstance(before, Tensor) or torch.equal(before, after)


COMPLEX: list[Any] = [
    lambda z: (z * z.detach()).abs().sum(),
    lambda z: (z / (z + 2)).abs().sum(),
    lambda z: z.exp().sub(z.tanh()).abs().sum(),
    lambda z: (z * (1 + 2j) + z.conj().sigmoid()).abs().sum(),
]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("number", range(len(COMPLEX)))
def test_a_plan_has_the_bits_of_complex_numbers(number: int, dtype: torch.dtype, turned: bool) -> None:
    torch.manual_seed(number)
    z = torch.randn(4, 41, 9, dtype=dtype, requires_grad=True)
    fn = lambda z: COMPLEX[number](z.mT if turned else z)
    results = [torch.autograd.grad(f(z), z)[0] for f in (fn, fckpt.remat(fn, budget=1.0))]
    assert torch.equal(*map(torch.view_as_real, results))


def test_what_cannot_be_written_over() -> None:
    def found(op: Any, *tensors: Tensor, storages: list[int] | None = None) -> list[int]:
        result = op(*tensors)
        refs = [Ref(i) for i in range(len(tensors))]
        return overwritable(op, refs, [*tensors, result], storages or list(range(len(refs) + 1)), len(refs))

    x, row = torch.randn(4, 4), torch.randn(4)
    assert found(aten.add.Tensor, x, row) == [0]
    assert found(aten.add.Tensor, row, x) == [1]
    assert found(aten.add.Tensor, x, x.clone()) == [0, 1]
    assert found(aten.add.Tensor, x, x, storages=[0, 0, 1]) == [0, 1]
    assert found(aten.add.Tensor, x, x.t(), storages=[0, 0, 1]) == [], "the other view would be read after it"
    assert found(aten.add.Tensor, x, x.clone().t()) == [0], "the result would have other strides"
    assert found(aten.mul.Tensor, x, x.double()) == [1], "another dtype"
    assert found(aten.tanh.default, torch.randn(8, 4)[:4]) == [], "a part of its memory"
    assert found(aten.tanh.default, row.expand(4, 4)) == [], "elements that share memory"
    assert found(aten.matmul.default, x, x.clone()) == [], "no pointwise operation"
    assert found(aten.relu.default, x) == [0]


def test_a_plan_writes_over_what_dies_and_holds_less() -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        h = (x @ w).exp()
        for i in range(6):
            h = h + i  # saves nothing: each dies in the next
        return (h * h).sum()

    w, x = torch.randn(8, 8, requires_grad=True), torch.randn(50_000, 8)
    plan = fckpt.plan(loss, w, x, budget=1.0)
    assert plan.peak_bytes < plan.baseline_peak_bytes
    assert plan.overhead == 0.0
    planned = fckpt.remat(loss, plan=plan)
    planned(w, x).backward()
    grad, w.grad = w.grad, None
    assert measure_peak(lambda: torch.autograd.grad(planned(w, x), w)).peak_bytes == plan.peak_bytes
    loss(w, x).backward()
    assert grad is not None and w.grad is not None and torch.equal(grad, w.grad)


def test_a_plan_without_budget_is_what_the_plain_function_does() -> None:
    def loss(x: Tensor) -> Tensor:
        return (x.exp() + 1).sum()

    plan = fckpt.plan(loss, torch.randn(1000, requires_grad=True))
    assert plan.peak_bytes == plan.baseline_peak_bytes
    assert not any(node.overwrites for node in plan.graph.nodes)


INDICES = torch.arange(16) * 3 % 7
BUILT: dict[str, Any] = {
    "topk": lambda x: x.topk(4, dim=0)[0],
    "max": lambda x: x.max(0)[0],
    "gather": lambda x: x.gather(0, INDICES[:, None].expand(16, 8)),
    "index": lambda x: x[INDICES],
    "index_select": lambda x: x.index_select(0, INDICES),
    "take": lambda x: x.take(INDICES),
    "median": lambda x: x.median(0)[0],
    "scattered": lambda x: torch.zeros(16, 8).scatter(0, INDICES[:, None].expand(16, 8), x).exp(),
    "added": lambda x: x.exp().index_add(0, INDICES, x.sin()).tanh(),
    "copied": lambda x: x.exp().index_copy(0, torch.arange(16), x.sin()).tanh(),
    "put": lambda x: x.exp().index_put((torch.arange(8),), x[:8].sin()).tanh(),
    "itself": lambda x: (y := x.exp()).scatter_add(0, INDICES[:, None].expand(16, 8), y).tanh(),
    "masked": lambda x: x.exp().masked_scatter(x.detach() > 0, x.sin()).tanh(),
}


@pytest.mark.parametrize("name", BUILT)
def test_operations_that_write_some_elements(name: str) -> None:
    """Autograd builds gradients in place by them, and a plan writes over an operand that nothing reads again."""
    torch.manual_seed(0)
    x = torch.randn(16, 8, requires_grad=True)
    fn = lambda x: BUILT[name](x.mul(2)).square().sum()
    expected = torch.autograd.grad(fn(x), x)[0]
    plan = fckpt.plan(fn, x, budget=1.0)
    measured = measure_peak(lambda: torch.autograd.grad(fn(x), x)).peak_bytes
    assert abs(plan.baseline_peak_bytes - measured) <= 64
    kept = fckpt.remat(fn, plan=plan)
    for region in (kept, fckpt.remat(fn, policy=fckpt.policies.nothing_saveable)):
        for _ in range(2):
            assert torch.equal(torch.autograd.grad(region(x), x)[0], expected)
    assert measure_peak(lambda: torch.autograd.grad(kept(x), x)).peak_bytes <= measured + 64
