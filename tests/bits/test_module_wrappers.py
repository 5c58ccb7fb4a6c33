"""What libraries do to modules (wrap, parametrize, replicate, compile, copy), done to rematerialised ones."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import assert_equal, leaf
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import fckpt

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
PLANS: list[dict[str, Any]] = [{"budget": 1.0}, {"policy": fckpt.policies.nothing_saveable}]
under_a_plan = pytest.mark.parametrize("options", PLANS, ids=["budget", "policy"])
estimated = pytest.mark.filterwarnings("ignore:fckpt does not run custom operations:fckpt.BudgetWarning")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(self.norm(self.a(x))))).exp().sin()


def made(cls: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return cls()


def gradients(module: nn.Module, call: Callable[[Tensor], Tensor] | None = None) -> list[Any]:
    x = leaf(X)
    (module if call is None else call)(x).sum().backward()
    found = [x.grad, *(p.grad for _, p in sorted(module.named_parameters()))]
    module.zero_grad()
    return [*found, *(b.clone() for b in module.buffers())]


def retained(call: Callable[[Tensor], Tensor]) -> int:
    x = torch.randn(256, 6, requires_grad=True)
    return fckpt.measure_peak(lambda: call(x)).retained_bytes


def hooked(module: nn.Module, log: list[str]) -> nn.Module:
    """Replaces the forward of a module as accelerate's `add_hook_to_module` does."""
    old = module.forward
    module._old_forward = old  # type: ignore[assignment]

    def new_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        log.append("called")
        return module._old_forward(*args, **kwargs)

    module.forward = functools.update_wrapper(functools.partial(new_forward, module), old)  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize("copied", [False, True])
def test_forward_replaced_on_the_result(copied: bool) -> None:
    expected, log = gradients(made()), []
    region = hooked(fckpt.remat(made()), log)
    if copied:
        region = copy.deepcopy(region)
    assert_equal(gradients(region), expected)
    assert len(log) == 1 or copied  # around the region, not again in its recompute
    assert retained(region) < retained(made())
    region.forward = region._old_forward  # type: ignore[method-assign, assignment]
    expected = gradients(made())
    assert_equal(gradients(region)[:5], expected[:5])
    del region.forward
    assert_equal(gradients(region)[:5], expected[:5])


def test_forward_replaced_before() -> None:
    log: list[str] = []
    region = fckpt.remat(hooked(made(), log))
    assert_equal(gradients(region), gradients(made()))
    assert log
    assert retained(region) < retained(made())


def test_the_module_itself_stays_as_it_is() -> None:
    plain, log = made(), []
    hooked(fckpt.remat(plain), log)
    gradients(plain)
    assert not log


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).T


def symmetric(module: nn.Module) -> nn.Module:
    parametrize.register_parametrization(module, "weight", Symmetric())
    return module


def old_weight_norm(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, and in use
        return nn.utils.weight_norm(module)


PARAMETRIZE = [symmetric, parametrizations.weight_norm, parametrizations.orthogonal, old_weight_norm]


@pytest.mark.parametrize("change", PARAMETRIZE)
@pytest.mark.parametrize("order", ["before", "after", "inside"])
def test_parametrizations(change: Any, order: str) -> None:
    linear = lambda: nn.Linear(6, 6)
    plain = made(lambda: nn.Sequential(change(linear()), nn.Tanh()))
    if order == "inside":
        region = fckpt.remat(made(lambda: nn.Sequential(change(linear()), nn.Tanh())))
    else:
        wrap = (lambda m: fckpt.remat(change(m))) if order == "before" else (lambda m: change(fckpt.remat(m)))
        region = made(lambda: nn.Sequential(wrap(linear()), nn.Tanh()))
    assert list(region.state_dict()) == list(plain.state_dict())
    assert_equal(gradients(region), gradients(plain))
    assert_equal(gradients(region), gradients(plain))


def test_a_parametrization_that_is_taken_away() -> None:
    region = symmetric(fckpt.remat(made(lambda: nn.Linear(6, 6))))
    gradients(region)
    parametrize.remove_parametrizations(region, "weight")
    assert sorted(dict(region.named_parameters())) == ["bias", "weight"]
    gradients(region)


def replicated(module: nn.Module) -> nn.Module:
    """A replica as `torch.nn.parallel.replicate` makes it: parameters are tensors with a history."""
    replica = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        replica._modules[name] = replicated(child)  # type: ignore[arg-type]
    for name, p in module._parameters.items():
        setattr(replica, name, p * 1.0)  # type: ignore[operator]
    for name, buffer in module._buffers.items():
        replica._buffers[name] = buffer.clone()  # type: ignore[union-attr]
    return replica


def test_replicas() -> None:
    plain, region = made(), fckpt.remat(made())
    assert_equal(gradients(region, replicated(region)), gradients(plain, replicated(plain)))
    assert retained(replicated(region)) < retained(replicated(plain))


@under_a_plan
def test_replicas_of_a_planned_module(options: dict[str, Any]) -> None:
    plain, region = made(), fckpt.remat(made(), **options)
    for _ in range(2):
        assert_equal(gradients(region, replicated(region)), gradients(plain, replicated(plain)))
        assert_equal(gradients(region, nn.DataParallel(region)), gradients(plain, nn.DataParallel(plain)))
    assert not fckpt.stats(region).fallbacks


@under_a_plan
def test_replicas_of_a_planned_module_run_in_threads(options: dict[str, Any]) -> None:
    def in_threads(module: nn.Module) -> Callable[[Tensor], Tensor]:
        replicas = [replicated(module).eval() for _ in range(3)]

        def call(x: Tensor) -> Tensor:
            with ThreadPoolExecutor(3) as pool:
                return torch.cat([*pool.map(lambda replica: replica(x), replicas)])

        return call

    plain, region = made(), fckpt.remat(made(), **options)
    for _ in range(2):
        assert_equal(gradients(region, in_threads(region)), gradients(plain, in_threads(plain)))


def test_compiled_before() -> None:
    plain, inner = made(), made()
    plain.compile(backend="eager")
    inner.compile(backend="eager")
    region = fckpt.remat(inner)
    assert_equal(gradients(region), gradients(plain))
    assert retained(region) < retained(plain)
    region = fckpt.remat(torch.compile(made(), backend="eager"))
    assert_equal(gradients(region), gradients(made()))


def test_a_budget_around_what_is_compiled_already() -> None:
    """The plan sees through compiled modules and functions, and runs PyTorch's kernels within the budget."""
    layers = lambda: nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(6, 6), nn.Tanh(), nn.GELU())))
    plain, whole, part, regional = (made(layers) for _ in range(4))
    whole.compile(backend="eager")
    for module in regional.modules():
        if isinstance(module, nn.Linear):
            module.compile(backend="eager")
    x = torch.randn(256, 6)
    limit = fckpt.plan(plain, x).baseline_peak_bytes * 0.6
    plain(x).sum().backward()
    for model in (whole, torch.compile(part, backend="eager"), regional):
        region = fckpt.remat(model, budget=0.6)
        region(x).sum().backward()
        assert_equal([p.grad for p in region.parameters()], [p.grad for p in plain.parameters()])
        region.zero_grad()
        assert fckpt.measure_peak(lambda region=region: region(x).sum().backward()).peak_bytes <= limit
        assert not fckpt.stats(region).fallbacks


class Wrapped(nn.Module):
    """A submodule that is assigned after `torch.compile` or `torch.compiler.disable`, so it has a wrapper."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Tanh()
        self.inner = wrap(Net())
        self.scale = 1.5

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)) * self.scale)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it in intermediate results
@pytest.mark.parametrize("options", [{}, {"budget": 1.0}, {"policy": fckpt.policies.dots_saveable}], ids=str)
@pytest.mark.parametrize("wrap", [functools.partial(torch.compile, backend="eager"), torch.compiler.disable])
def test_submodules_in_the_wrapper_of_the_compiler(wrap: Any, options: dict[str, Any]) -> None:
    plain, inner = (made(lambda: Wrapped(wrap)) for _ in range(2))
    region = fckpt.remat(inner, **options)
    for training in (True, False, True):
        plain.train(training), region.train(training)
        assert_equal(gradients(region), gradients(plain))


@pytest.mark.parametrize("wrap", [functools.partial(torch.compile, backend="eager"), torch.compiler.disable])
def test_a_recompute_of_wrapped_submodules_finds_what_its_forward_found(wrap: Any) -> None:
    plain, inner = (made(lambda: Wrapped(wrap)) for _ in range(2))

    def call(module: nn.Module) -> Callable[[Tensor], Tensor]:
        def called(x: Tensor) -> Tensor:
            y = module(x)
            inner.eval()
            inner.scale = 3.0
            return y

        return called

    region = fckpt.remat(inner)
    assert_equal(gradients(region, call(region)), gradients(plain))
    assert not region.training and inner.scale == 3.0


def test_compiled_after() -> None:
    block = lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
    region, expected = fckpt.remat(made(block)), gradients(made(block))
    assert_equal(gradients(region, torch.compile(region, backend="eager")), expected)
    region.compile(backend="eager")
    assert_equal(gradients(region), expected)
    assert_equal(gradients(copy.deepcopy(region)), expected)


@pytest.mark.parametrize("via", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(via: Any) -> None:
    region = via(fckpt.remat(made()))
    assert_equal(gradients(region), gradients(made()))
    parametrized = copy.deepcopy(symmetric(fckpt.remat(made(lambda: nn.Linear(6, 6)))))
    assert_equal(gradients(parametrized), gradients(symmetric(made(lambda: nn.Linear(6, 6)))))
    assert list(parametrized.state_dict()) == list(symmetric(nn.Linear(6, 6)).state_dict())


LAZY: dict[str, Callable[[], nn.Module]] = {
    "itself": lambda: nn.LazyLinear(5),
    "inside": lambda: nn.Sequential(
        nn.LazyLinear(5), nn.Dropout(0.3), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(3)
    ),
}


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("way", ["module", "function"])
def test_lazy_modules_by_a_plan(name: str, way: str) -> None:
    """The first call creates the parameters as the plain function does, and is not planned."""
    plain, inner = made(LAZY[name]), made(LAZY[name])
    take = (lambda x: inner(x)) if way == "function" else inner
    with pytest.raises(fckpt.TraceError, match=r"lazy module.*Call the function once"):
        fckpt.plan(take, X, budget=1.0)
    region: Any = fckpt.remat(take, budget=1.0)
    for call in range(3):
        torch.manual_seed(1)
        expected = gradients(plain), torch.get_rng_state()
        torch.manual_seed(1)
        warned = call == 0 and (way, name) != ("module", "itself")  # a hook creates the parameters before the region
        with pytest.warns(fckpt.BudgetWarning, match="first call of a lazy module") if warned else nullcontext():
            got = gradients(inner, region)
        assert_equal((got, torch.get_rng_state()), expected)
    assert fckpt.stats(region).hits >= 1


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("way", ["module", "function"])
def test_lazy_modules(name: str, way: str) -> None:
    plain, inner = made(LAZY[name]), made(LAZY[name])
    region: Any = fckpt.remat(inner) if way == "module" else fckpt.remat(lambda x: inner(x))
    for _ in range(3):
        torch.manual_seed(1)
        expected = gradients(plain)
        torch.manual_seed(1)
        assert_equal(gradients(inner, region), expected)
    if name == "inside":
        assert retained(region) < retained(plain)


@torch.library.custom_op("fckpt_tests::double_into", mutates_args={"out"})
def double_into(x: Tensor, out: Tensor) -> None:
    out.copy_(x * 2)


def into_own(x: Tensor) -> Tensor:
    h = x.sin()
    out = torch.empty_like(h)
    double_into(h.detach(), out)
    return (h * out).exp().sin()


def conjugated(x: Tensor) -> Tensor:
    c = torch.view_as_complex(torch.tanh(x).view(4, 3, 2))
    return torch.view_as_real((c.conj() * c.conj() * c).conj().resolve_conj()).sum((1, 2)).sin()


FUNCTIONS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "reentrant checkpoint": lambda m, x: checkpoint(m, x.sin(), use_reentrant=True).exp().sin(),  # type: ignore[union-attr]
    "checkpoint": lambda m, x: checkpoint(m, x.sin(), use_reentrant=False).exp().sin(),  # type: ignore[union-attr]
    "cond": lambda m, x: torch.cond(x.sum() > 0, lambda x: x.sin().exp(), lambda x: x.cos().exp(), (m(x),)).sin(),
    "conjugation": lambda m, x: conjugated(m(x)),
    "an operation that mutates what the function made": lambda m, x: into_own(m(x)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_inside_of_a_region(name: str) -> None:
    plain, module, fn = made(), made(), FUNCTIONS[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute", UserWarning)  # torch.cond asks for it
        expected = gradients(plain, lambda x: fn(plain, x))
        assert_equal(gradients(module, fckpt.remat(lambda x: fn(module, x))), expected)


NOT_PLANNED = {
    "checkpoint": r"torch.utils.checkpoint inside, and draws random numbers there.*preserve_rng_state=False",
    "cond": r"torch.s operator `cond`.*Write the branch",
}


@estimated
@under_a_plan
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in NOT_PLANNED])
def test_inside_of_a_plan(name: str, options: dict[str, Any]) -> None:
    plain, module, fn = made(), made(), FUNCTIONS[name]
    region = fckpt.remat(lambda x: fn(module, x), **options)
    for call in range(2):
        warned = call == 0 and name == "reentrant checkpoint" and "budget" in options
        with pytest.warns(fckpt.BudgetWarning, match="use_reentrant=False") if warned else nullcontext():
            got = gradients(module, region)
        assert_equal(got, gradients(plain, lambda x: fn(plain, x)))


@under_a_plan
@pytest.mark.parametrize("name", NOT_PLANNED)
def test_what_is_refused_inside_of_a_plan_has_changed_nothing(name: str, options: dict[str, Any]) -> None:
    module, fn = made(), FUNCTIONS[name]
    with pytest.raises(fckpt.TraceError, match=NOT_PLANNED[name]):
        fckpt.remat(lambda x: fn(module, x), **options)(leaf(X))
    assert_equal(module.state_dict(), made().state_dict())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_inside_of_a_plan_keeps_a_budget_in_bytes(use_reentrant: bool) -> None:
    net = made(lambda: nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(6, 6), nn.Tanh(), nn.GELU()))))
    fn = lambda x: checkpoint(net, x.sin(), use_reentrant=use_reentrant).exp().sum()  # type: ignore[union-attr]
    x, found = torch.randn(256, 6, requires_grad=True), []
    budget = fckpt.measure_peak(lambda: fn(x).backward()).peak_bytes * 7 // 10
    region = fckpt.remat(fn, budget=budget)
    region(x).backward()
    for f in (fn, region):
        x.grad = None
        net.zero_grad()
        peak = fckpt.measure_peak(lambda f=f: f(x).backward()).peak_bytes
        found.append([x.grad, *(p.grad for p in net.parameters())])
    assert peak <= budget
    assert_equal(*found)


@pytest.mark.parametrize("fn", [
    lambda x: torch.cond(x.sum() > 0, lambda x: x.sin().exp(), lambda x: x.cos().exp(), (x,)).sin(),
    lambda x: torch.cond(torch.tensor(True), lambda x: x.sin().exp(), lambda x: x.cos().exp(), (x,)).sin(),
])  # fmt: skip
def test_an_operator_of_functions_is_refused_under_a_plan_and_runs_as_before_without(fn: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute", UserWarning)  # torch.cond asks for it
        with pytest.raises(fckpt.TraceError, match=r"torch.s operator `cond`.*Write the branch"):
            fckpt.remat(fn, budget=1.0)(leaf(X))
        got = []
        for f in (fn, fckpt.remat(fn)):
            x = leaf(X)
            f(x).sum().backward()
            got.append(x.grad)
    assert_equal(got[1], got[0])


class Around(nn.Module):
    """Holds a module of TorchScript."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).exp().sin()


def scripted(*, with_buffers: bool = False) -> Any:
    layers = [nn.Linear(6, 6), nn.Tanh(), *([nn.BatchNorm1d(6)] if with_buffers else [])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript as a whole
        return torch.jit.script(nn.Sequential(*layers)) if with_buffers else torch.jit.trace(nn.Sequential(*layers), X)


@pytest.mark.parametrize("held", [False, True])
def test_torchscript_inside(held: bool) -> None:
    module = scripted()
    inner = Around(module)
    fn = inner if held else lambda x: module(x).exp().sin()
    got = []
    for f in (fn, fckpt.remat(fn)):
        x = leaf(X)
        for _ in range(3):  # it is compiled anew at the second call
            module.zero_grad()
            x.grad = None
            f(x).sum().backward()
        got.append([x.grad, *(p.grad for p in module.parameters())])
    assert_equal(got[1], got[0])
    with pytest.raises(fckpt.TraceError, match="TorchScript"):
        fckpt.remat(fn, budget=1.0)(leaf(X))
    with pytest.raises(fckpt.ArgumentTypeError, match=r"TorchScript module in training mode.*'2.running_mean'.*eval"):
        fckpt.remat(Around(scripted(with_buffers=True)))(leaf(X))


def test_a_function_of_torchscript_is_refused_under_a_plan() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        function = torch.jit.script(scaled)
    with pytest.raises(fckpt.TraceError, match="TorchScript"):
        fckpt.remat(lambda x: function(x).sin(), budget=1.0)(leaf(X))


def scaled(x: Tensor) -> Tensor:
    return torch.tanh(x).exp()


@pytest.mark.parametrize("options", [{}, *PLANS], ids=["plain", "budget", "policy"])
def test_conjugated_arguments_and_cotangents(options: dict[str, Any]) -> None:
    z, g = (torch.randn(4, 3, dtype=torch.complex64) for _ in range(2))
    fn = lambda z: (z.exp() * z.conj()).sin()
    region = fckpt.remat(fn, **options)
    for cotangent in (g.conj(), g, g.t().contiguous().mH, g.conj()):
        got = []
        for f in (fn, region):
            x = leaf(z)
            f(x.conj()).backward(cotangent)
            got.append(x.grad)
        assert_equal(got[1], got[0])


def test_an_operation_that_mutates_what_is_not_the_functions() -> None:
    held = torch.zeros(4, 6)

    def fn(x: Tensor, out: Tensor) -> Tensor:
        double_into(x.detach(), out)
        return (x.sin() * out).exp().sin()

    with pytest.raises(fckpt.MutationError, match=r"args\[1\] was changed in place"):
        fckpt.remat(fn)(leaf(X), torch.zeros(4, 6))
    with pytest.raises(fckpt.MutationError, match="changed a captured tensor in place"):
        fckpt.remat(lambda x: fn(x, held))(leaf(X))


class Mutating(nn.Module):
    """Has a buffer that an operation overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("held", torch.zeros(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        double_into(h.detach(), self.held)
        return (h.sin() * self.held).exp().sin()


@estimated
@under_a_plan
def test_an_operation_that_mutates_a_buffer_under_a_plan(options: dict[str, Any]) -> None:
    plain, region = made(Mutating), fckpt.remat(made(Mutating), **options)
    for _ in range(2):
        assert_equal(gradients(region), gradients(plain))


@estimated
@under_a_plan
def test_an_operation_that_mutates_an_argument_is_refused_under_a_plan(options: dict[str, Any]) -> None:
    def fn(x: Tensor, out: Tensor) -> Tensor:
        double_into(x.detach(), out)
        return (x.sin() * out).exp().sin()

    out = torch.zeros(4, 6)
    with pytest.raises(fckpt.MutationError, match=r"args\[1\] was changed in place.*Return the new value"):
        fckpt.remat(fn, **options)(leaf(X), out)
    assert_equal(out, torch.zeros(4, 6))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@under_a_plan
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("captured", [False, True])
def test_nested_tensors_are_refused_under_a_plan(captured: bool, layout: torch.layout, options: Any) -> None:
    t = torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(3, 6)], requires_grad=True, layout=layout)
    region = fckpt.remat((lambda: t.sin()) if captured else (lambda t: t.sin()), **options)
    with pytest.raises(fckpt.TraceError, match="without policy and budget"):
        region(*([] if captured else [t]))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout) -> None:
    linear = made(lambda: nn.Linear(6, 6))
    fn = lambda t: torch.relu(linear(torch.relu(linear(t))))
    got = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a prototype, torch says
        for f in (fn, fckpt.remat(fn)):
            parts = [torch.ones(2, 6), torch.ones(3, 6)]
            t = torch.nested.nested_tensor(parts, requires_grad=True, layout=layout)
            torch.nested.to_padded_tensor(f(t), 0.0).sum().backward()
            assert t.grad is not None
            got.append([x.clone() for x in t.grad.unbind()])
    assert_equal(got[1], got[0])


def test_inference_tensors() -> None:
    with torch.inference_mode():
        x = torch.randn(4, 6)
    fn = lambda w, x: torch.tanh(torch.sin(x) * w).exp()
    got = []
    for f in (fn, fckpt.remat(fn), fckpt.remat(lambda w, _: fn(w, x))):
        w = torch.ones(6, requires_grad=True)
        f(w, x).sum().backward()
        got.append(w.grad)
    assert_equal(got[1:], [got[0]] * 2)


@under_a_plan
@pytest.mark.parametrize("captured", [False, True])
def test_inference_tensors_are_refused_under_a_plan(captured: bool, options: dict[str, Any]) -> None:
    with torch.inference_mode():
        x = torch.randn(4, 6)
    fn = lambda w, x: torch.tanh(torch.sin(x) * w).exp()
    region = fckpt.remat((lambda w, _: fn(w, x)) if captured else fn, **options)
    with pytest.raises(fckpt.ArgumentValueError, match=r"made in inference mode.*torch.no_grad\(\), or pass its clone"):
        region(torch.ones(6, requires_grad=True), X if captured else x)


@pytest.mark.parametrize("options", [{}, *PLANS], ids=["plain", "budget", "policy"])
def test_jit_trace(options: dict[str, Any]) -> None:
    module = made().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and in use
        traced = torch.jit.trace(fckpt.remat(module, **options), leaf(X))
    assert_equal(gradients(module, traced), gradients(module))


@pytest.mark.parametrize("options", [{}, *PLANS], ids=["plain", "budget", "policy"])
def test_jit_trace_of_a_function(options: dict[str, Any]) -> None:
    fn, found = lambda w, x: torch.tanh(x @ w).exp().sin(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(fckpt.remat(fn, **options), (torch.ones(6, 6, requires_grad=True), leaf(X)))
    for f in (traced, fn):
        w = torch.linspace(-1, 1, 36).view(6, 6).requires_grad_()
        found.append(torch.autograd.grad(f(w, X).sum(), w))
    assert_equal(*found)


@under_a_plan
def test_jit_trace_inside_is_refused_under_a_plan(options: dict[str, Any]) -> None:
    module = made().eval()
    region = fckpt.remat(lambda x: torch.jit.trace(module, x.detach())(x).sin(), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(fckpt.TraceError, match="without policy and budget takes any function"):
            region(leaf(X))


@pytest.mark.parametrize("options", [{}, {"budget": 1.0}])
def test_a_shallow_copy_has_its_own_attributes_and_the_same_parameters(options: dict[str, Any]) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(4, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.tanh(self.linear(x)).sin()

    module = fckpt.remat(Counting(), **options)
    other = copy.copy(module)
    other(torch.ones(2, 4)).sum().backward()
    other.tag = "copy"
    assert (module.calls, other.calls, hasattr(module, "tag")) == (0, 1, False)
    assert other.linear is module.linear and other != module
    assert type(other) is type(module)
