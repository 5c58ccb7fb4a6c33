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
