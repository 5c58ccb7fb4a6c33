"""Under torch.compile and make_fx: right, by torch's own region operator or by a graph break; never wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import TORCH, assert_equal, gradients, leaf, seeded
from torch.func import functionalize, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import fckpt

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

G = torch.Generator().manual_seed(0)
PARAMS = {"w": torch.randn(4, 5, generator=G), "v": torch.randn(5, 3, generator=G)}
X = torch.randn(2, 4, generator=G)


def fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.dropout(torch.tanh(x @ params["w"]), 0.5)
    return F.dropout(torch.tanh(h @ params["v"]), 0.3)


def backward(f: Any) -> Any:
    params = leaf(PARAMS)
    (f(params, X) ** 2).sum().backward()
    return gradients(params)


@pytest.fixture(autouse=True)
def reset() -> None:
    torch._dynamo.reset()


# aot_eager runs the partitioner's graphs with eager kernels, so results are comparable bit for bit.
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_caller_with_dropout(fullgraph: bool) -> None:
    region = fckpt.remat(fn)
    compiled = torch.compile(lambda p, x: region(p, x), backend="aot_eager", fullgraph=fullgraph)
    (actual, expected) = (seeded(lambda f=f: backward(f))[0] for f in (compiled, fn))
    assert_equal(actual, expected)


@pytest.mark.parametrize("backend", ["eager", "ts", lambda graph, inputs: graph.forward], ids=["eager", "ts", "own"])
@pytest.mark.parametrize("inside", [False, True])
def test_compiled_caller_that_does_not_differentiate_its_graphs(backend: Any, inside: bool) -> None:
    region = fckpt.remat(fn)
    caller = (lambda p, x: fckpt.remat(fn)(p, x)) if inside else (lambda p, x: region(p, x))
    compiled = torch.compile(caller, backend=backend)
    (actual, expected) = (seeded(lambda f=f: (backward(f), torch.rand(2))) for f in (compiled, fn))
    assert_equal(actual, expected)


def test_compiled_caller_keeps_the_recompute() -> None:
    """The partitioner saves no intermediate of the region: only what a plain checkpoint saves."""
    saved: dict[str, int] = {}

    def count(name: str) -> Any:
        def compiler(graph: Any, _: Any) -> Any:
            saved[name] = sum(len(n.args[0]) for n in graph.graph.nodes if n.op == "output")
            return graph.forward

        return compiler

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    for name, f in (("plain", fn), ("remat", fckpt.remat(fn))):
        torch._dynamo.reset()
        compiler = count(name)
        backend = aot_autograd(
            fw_compiler=lambda g, i, c=compiler: make_boxed_func(c(g, i)),
            bw_compiler=lambda g, i: make_boxed_func(g.forward),
        )
        torch.compile(lambda p, x, f=f: f(p, x), backend=backend)(leaf(PARAMS), X)
    assert saved["remat"] < saved["plain"], saved


def test_transforms_inside_compile_break_the_graph() -> None:
    region = fckpt.remat(fn)
    loss = lambda f: lambda p: (f(p, X) ** 2).sum()
    expected = seeded(lambda: grad(loss(fn))(PARAMS))
    assert_equal(seeded(lambda: torch.compile(grad(loss(region)), backend="aot_eager")(PARAMS)), expected)
    torch._dynamo.reset()
    assert_equal(seeded(lambda: grad(torch.compile(loss(region), backend="aot_eager"))(PARAMS)), expected)
    torch._dynamo.reset()
    per_sample = lambda f: vmap(grad(lambda p, x: (f(p, x) ** 2).sum()), (None, 0), randomness="different")
    expected = seeded(lambda: per_sample(fn)(PARAMS, X))
    assert_equal(seeded(lambda: torch.compile(per_sample(region), backend="aot_eager")(PARAMS, X)), expected)


def test_transforms_inside_compile_with_fullgraph_are_an_error_and_leave_regions_working() -> None:
    region = fckpt.remat(fn)
    with pytest.raises(Exception, match=r"torch.compiler.disable|Unsupported"):
        torch.compile(grad(lambda p: region(p, X).sum()), backend="aot_eager", fullgraph=True)(PARAMS)
    assert_equal(seeded(lambda: backward(region)), seeded(lambda: backward(fn)))


def test_compiled_function_inside_a_region() -> None:
    plain = lambda p, x: torch.tanh(torch.tanh(x @ p["w"]) @ p["v"])
    inner = torch.compile(plain, backend="aot_eager")
    assert_equal(backward(fckpt.remat(lambda p, x: inner(p, x))), backward(plain))


def test_compiled_module_updates_its_statistics_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh())
    torch.compile(fckpt.remat(model), backend="aot_eager")(X).sum().backward()
    assert int(model[1].num_batches_tracked) == 1


@pytest.mark.parametrize("options", [{}, {"budget": 0.9}, {"policy": fckpt.policies.dots_saveable}], ids=str)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_region_without_arguments(options: Any, backend: str) -> None:
    """Dynamo does not trace frames without tensors, so the region's function may run uncompiled."""
    torch._dynamo.reset()
    w, x = leaf(PARAMS["w"]), X.clone()
    plain = lambda: torch.tanh(torch.tanh(x @ w).exp() + 1).sum()
    region = fckpt.remat(plain, **options)
    plain().backward()
    expected, w.grad = w.grad, None
    for _ in range(2):
        torch.compile(region, backend=backend)().backward()
        if backend == "aot_eager" or options:  # Inductor's own kernels have other bits
            assert_equal(w.grad, expected)
        w.grad = None


def test_make_fx_and_functionalize_inline_the_region() -> None:
    plain = lambda x: (torch.tanh(torch.tanh(x @ PARAMS["w"]) @ PARAMS["v"]) ** 2).sum()
    region = fckpt.remat(plain)
    expected = grad(plain)(X)
    graphs = [make_fx(grad(f))(X) for f in (plain, region)]
    assert_equal(graphs[1](X), expected)
    assert [n.target for n in graphs[1].graph.nodes] == [n.target for n in graphs[0].graph.nodes]
    assert_equal(functionalize(grad(region))(X), expected)
    assert_equal(grad(functionalize(region))(X), expected)


def layer(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return fckpt.checkpoint_name(torch.tanh(x @ w), "out").sin()


KEEPS_OUT = fckpt.policies.save_only_these_names("out")


@pytest.mark.parametrize("options", [{}, {"policy": fckpt.policies.dots_saveable}, {"policy": KEEPS_OUT}], ids=str)
def test_regions_that_a_planned_function_makes_itself(options: Any) -> None:
    """As in JAX: `remat(layer)(w, x)` within the function. What is kept is what the policy of each region lets be."""
    made = {}

    def stack(ws: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for w in ws:
            x = fckpt.remat(layer, **options)(w, x)
        return x.sum()

    region = fckpt.remat(layer, **options)

    def made_before(ws: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for w in ws:
            x = region(w, x)
        return x.sum()

    ws = [torch.randn(8, 8, generator=G, requires_grad=True) for _ in range(3)]
    x = torch.randn(4, 8, generator=G)
    expected = torch.autograd.grad(stack(ws, x), ws)
    for function in (stack, made_before):
        f = fckpt.remat(function, policy=fckpt.policies.everything_saveable)
        assert_equal(list(torch.autograd.grad(f(ws, x), ws)), list(expected))
        if TORCH >= (2, 13):  # Dynamo of torch 2.11 refuses regions that are made within
            assert fckpt.stats(f).captures == 1
        made[function] = fckpt.measure_peak(lambda f=f: torch.autograd.grad(f(ws, x), ws)).peak_bytes
    # The state of torch's generator is saved before Python code is traced: 5,056 bytes.
    assert made[stack] == (made[made_before] if TORCH >= (2, 13) else 5056)


@pytest.mark.parametrize("around", [False, True])
def test_a_step_inside_of_torch_compile_runs_by_its_plan(around: bool) -> None:
    torch._dynamo.reset()
    nets = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    plain, made = (torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets)
    loss_fn = lambda net, x: net(x).square().mean()
    planned = fckpt.step(nets[1], made, loss_fn, budget=1.0)
    called = torch.compile((lambda x: planned(x + 1) * 2) if around else planned, backend="aot_eager")
    for _ in range(3):
        x = torch.randn(4, 8)
        plain.zero_grad()
        loss = loss_fn(nets[0], x + 1 if around else x)
        loss.backward()
        plain.step()
        assert torch.equal(called(x), loss.detach() * 2 if around else loss.detach())
        assert_equal(list(nets[1].parameters()), list(nets[0].parameters()))
    assert (fckpt.stats(planned).calls, fckpt.stats(planned).plans) == (3, 1)


def test_all_options_of_a_region_that_a_compiled_function_makes() -> None:
    x, gradient = torch.ones(64), torch.ones(64)

    def updated(options: dict[str, Any]) -> torch.Tensor:
        return fckpt.remat(lambda x, g: x - g * 0.5, **options)(x, gradient)

    with torch.no_grad():
        assert torch.compile(updated, backend="eager")({"budget": 1.0, "donate_argnums": (0,)}) is x
    assert x[0] == 0.5
    wrong: list[dict[str, Any]] = [{"kernels": "typo"}, {"untraceable": "typo"}, {"donate_argnums": 0}]
    for options in [*wrong, *({"budget": 1.0, **options} for options in wrong[:2])]:
        with pytest.raises(fckpt.ArgumentValueError):
            torch.compile(updated, backend="eager")(options)
