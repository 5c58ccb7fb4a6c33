"""Modules: drop-ins whose state steps once, and pure functions over parameters and buffers."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_equal, seeded
from torch import nn
from torch.func import grad, stack_module_state, vmap

import fckpt
from fckpt._planned.planner import Planner

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def network(momentum: float | None = 0.1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, momentum=momentum),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.Tanh()),
        nn.Flatten(),
        nn.Linear(4 * 16, 5),
    )


def step(model: nn.Module, steps: int = 3) -> Any:
    """Gradients and state after a few steps of SGD, from a seed."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grads = []
    for _ in range(steps):
        optimizer.zero_grad()
        (model(X) ** 2).mean().backward()
        grads.append([p.grad.clone() for p in model.parameters()])  # type: ignore[union-attr]
        optimizer.step()
    return grads, {k: v.clone() for k, v in model.state_dict().items()}


def children(model: nn.Sequential) -> nn.Module:
    for i in range(len(model)):
        model[i] = fckpt.remat(model[i])
    return model


def deep(model: nn.Sequential) -> nn.Module:
    model[4] = fckpt.remat(fckpt.remat(children(model[4])))  # type: ignore[arg-type]
    return fckpt.remat(children(model))


WRAPS: dict[str, Callable[[Any], nn.Module]] = {
    "whole": fckpt.remat,
    "twice": lambda m: fckpt.remat(fckpt.remat(m)),
    "children": children,
    "deep": deep,
    "sequential": fckpt.sequential,
    "sequential, last too": lambda m: fckpt.sequential(m, (2, 1, 4), remat_last=True),
}


@pytest.mark.parametrize("momentum", [0.1, None, 0.0])
@pytest.mark.parametrize("wrap", WRAPS)
def test_statistics_and_gradients_after_steps_equal_those_of_the_plain_module(wrap: str, momentum: Any) -> None:
    (expected, state), after = seeded(lambda: step(network(momentum)))
    (actual, new_state), after_remat = seeded(lambda: step(WRAPS[wrap](network(momentum))))
    assert list(new_state) == list(state)
    assert_equal(actual, expected)
    assert_equal(list(new_state.values()), list(state.values()))
    assert int(new_state["1.num_batches_tracked"]) == 3
    assert torch.equal(after, after_remat)


class Reading(nn.Module):
    """Writes a buffer and reads it: the recompute must see the value from before the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("average", torch.zeros(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.mul_(0.9).add_(x.mean().detach())
        return (x.mean((2, 3))[:2] * self.weight * self.average).sin().exp()


def test_buffers_that_are_written_and_read_replay_from_their_old_value() -> None:
    expected = step(Reading())
    actual = step(fckpt.remat(Reading()))
    assert_equal(actual, expected)


def test_evaluation_first_then_training() -> None:
    for wrap in (lambda m: m, fckpt.remat):
        model = wrap(network())
        model.eval()
        seeded(lambda model=model: (model(X) ** 2).mean().backward())
        model.train()
        result, _ = seeded(lambda model=model: step(model))
        if wrap is not fckpt.remat:
            expected = result
    assert_equal(result[0], expected[0])
    assert_equal(list(result[1].values()), list(expected[1].values()))


def test_two_forwards_before_backward() -> None:
    def run(model: nn.Module) -> Any:
        ((model(X) - model(X.flip(0))) ** 2).mean().backward()
        return [p.grad for p in model.parameters()], list(model.buffers())

    expected, _ = seeded(lambda: run(network()))
    actual, _ = seeded(lambda: run(fckpt.remat(network())))
    assert_equal(actual, expected)


def test_function_that_closes_over_a_module_updates_its_statistics_once() -> None:
    expected, _ = seeded(lambda: step(network()))
    model = network()

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model
            self.run = fckpt.remat(lambda x: model(x))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.run(x)

    (grads, state), _ = seeded(lambda: step(Caller()))
    assert_equal(grads, expected[0])
    assert_equal(list(state.values()), list(expected[1].values()))


def test_functional_batch_norm_on_arguments_and_closed_over_statistics() -> None:
    def run(make: Any, closed: bool) -> Any:
        mean, var, w = torch.zeros(3), torch.ones(3), torch.ones(3, 1, 1, requires_grad=True)
        norm = lambda x, mean, var: torch.nn.functional.batch_norm(x * w, mean, var, training=True).tanh()
        region = make(lambda x: norm(x, mean, var)) if closed else make(norm)
        out = region(X) if closed else region(X, mean, var)
        (out**2).sum().backward()
        return mean, var, w.grad

    for closed in (False, True):
        assert_equal(run(fckpt.remat, closed), run(lambda f: f, closed))


def test_instance_norm_statistics() -> None:
    make = lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4, affine=True, track_running_stats=True))
    torch.manual_seed(0)
    plain = make()
    region = fckpt.remat(copy.deepcopy(plain))
    expected, actual = step(plain), step(region)
    assert_equal(actual, expected)


def test_functional_call_of_a_module_with_regions_inside() -> None:
    """The parameters are in the module for the time of the call only; the recompute comes later."""
    model = network()
    params = {k: p.detach() * 1.5 for k, p in model.named_parameters()}
    buffers = {k: b.clone() for k, b in model.named_buffers()}

    def gradients(model: nn.Module) -> Any:
        leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
        out = torch.func.functional_call(model, (leaves, {k: b.clone() for k, b in buffers.items()}), (X,))
        (out**2).mean().backward()
        return [p.grad for p in leaves.values()]

    expected, _ = seeded(lambda: gradients(copy.deepcopy(model)))
    for wrap in (children, deep, fckpt.remat):
        assert_equal(seeded(lambda wrap=wrap: gradients(wrap(copy.deepcopy(model))))[0], expected)


def test_mode_switched_before_backward() -> None:
    expected, _ = seeded(lambda: step(network(), steps=1))
    model = fckpt.remat(network())
    torch.manual_seed(1)
    value = (model(X) ** 2).mean()
    model.eval()
    value.backward()
    assert_equal([p.grad for p in model.parameters()], expected[0][0])
    assert not model[3].training


# -- the drop-in --------------------------------------------------------------------------------------------


def test_it_is_a_module_of_the_same_class_with_the_same_state() -> None:
    model = network()
    region = fckpt.remat(model)
    assert isinstance(region, nn.Sequential) and type(region).__name__ == "Sequential"
    assert list(region.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(region.parameters(), model.parameters(), strict=True))
    assert len(region) == len(model) and region[0] is model[0]
    region.eval()
    assert not model.training and not region[1].training
    region.double()
    assert model[0].weight.dtype == torch.float64
    region.load_state_dict(network().state_dict())
    assert "remat" in repr(region)


def test_signature_is_that_of_the_module() -> None:
    class Takes(nn.Module):
        def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
            return x

    assert list(inspect.signature(fckpt.remat(Takes()).forward).parameters) == ["x", "mask"]


@pytest.mark.parametrize("options", [{}, {"budget": 1.0}, {"policy": fckpt.policies.nothing_saveable}], ids=str)
@pytest.mark.filterwarnings("ignore::fckpt.BudgetWarning")  # a plan within another region
def test_the_class_makes_new_modules_which_are_plain(options: Any) -> None:
    once = fckpt.remat(nn.Linear(3, 2), **options)
    for module in (once, fckpt.remat(once)):
        made = type(module)(3, 2, bias=False)
        assert type(made) is nn.Linear and made.bias is None
        assert inspect.signature(type(module)) == inspect.signature(nn.Linear)
        made.load_state_dict({"weight": module.weight})
        assert_equal([made(torch.ones(3))], [module(torch.ones(3)) - module.bias])
    parametrized = nn.utils.parametrizations.weight_norm(fckpt.remat(nn.Linear(3, 2), **options))
    assert_equal([copy.deepcopy(parametrized)(torch.ones(3))], [parametrized(torch.ones(3))])


def test_hooks_of_the_inner_module_run_once_a_call() -> None:
    model = network()
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("forward"))
    model.register_forward_pre_hook(lambda *_: calls.append("pre"))
    model.register_full_backward_hook(lambda *_: calls.append("backward"))
    region = fckpt.remat(model)
    region.register_forward_hook(lambda *_: calls.append("later"))
    region(X.clone().requires_grad_()).sum().backward()
    assert calls == ["pre", "forward", "later", "backward"]


def test_copy_and_pickle_keep_the_region_and_separate_the_state() -> None:
    region = fckpt.remat(network())
    for other in (copy.deepcopy(region), pickle.loads(pickle.dumps(region))):
        before = region[1].running_mean.clone()
        result, _ = seeded(lambda other=other: step(other))
        expected, _ = seeded(lambda: step(network()))
        assert_equal(result[0], expected[0])
        assert torch.equal(region[1].running_mean, before)
        held = [fckpt.measure_peak(lambda m=m: m(X).sum()).retained_bytes for m in (other, network())]
        assert held[0] < held[1]


def test_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.embed(x.mean((2, 3)))).sin())

    plain = Tied()
    region = copy.deepcopy(plain)
    region.embed, region.head = fckpt.remat(region.embed), fckpt.remat(region.head)
    assert_equal(step(fckpt.remat(region)), step(plain))
    apply, params, buffers = fckpt.from_module(plain)
    assert list(params) == ["embed.weight"]
    loss = lambda apply: lambda params: (apply(params, buffers, X)[0] ** 2).mean()
    assert_equal(grad(loss(fckpt.remat(apply)))(params), grad(loss(apply))(params))


def test_submodules_that_are_rematerialised_already() -> None:
    model = network()
    expected, _ = seeded(lambda: step(copy.deepcopy(model)))
    model[4] = fckpt.remat(model[4])
    actual, _ = seeded(lambda: step(fckpt.remat(model)))
    assert_equal(actual[0], expected[0])


# -- from_module --------------------------------------------------------------------------------------------


def test_from_module_unpacks_and_never_writes_its_arguments() -> None:
    model = network()
    functional = fckpt.from_module(model)
    apply, params, buffers = functional
    assert functional.apply is apply and functional.params is params and functional.buffers is buffers
    before = {k: v.clone() for k, v in buffers.items()}
    _, new = apply(params, buffers, X)
    assert_equal(list(buffers.values()), list(before.values()))
    assert int(new["1.num_batches_tracked"]) == 1
    assert not any(p.requires_grad for p in params.values())


@pytest.mark.parametrize("region", ["remat", "remat of parts", "twice"])
@pytest.mark.parametrize("differentiate", [grad, fckpt.grad])
def test_functional_gradients_and_new_buffers_equal_the_modules(region: str, differentiate: Any) -> None:
    model = network()
    (grads, state), _ = seeded(lambda: step(network(), steps=1))
    wrap: Any = {
        "remat": fckpt.remat,
        "remat of parts": lambda f: f,
        "twice": lambda f: fckpt.remat(fckpt.remat(f)),
    }
    if region == "remat of parts":
        children(model)
    apply, params, buffers = fckpt.from_module(model)
    apply = wrap[region](apply)

    def loss(params: Any, buffers: Any) -> Any:
        out, new = apply(params, buffers, X)
        return (out**2).mean(), new

    (actual, new), _ = seeded(lambda: differentiate(loss, has_aux=True)(params, buffers))
    assert_equal([actual[k] for k in params], grads[0])
    assert_equal([new[k] for k in sorted(new)], [p for k, p in sorted(network_buffers(state).items())])


def test_later_calls_with_new_buffers_have_the_plan_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real = Planner.plan
    monkeypatch.setattr(Planner, "plan", lambda self, *args: made.append(self) or real(self, *args))
    apply, params, buffers = fckpt.from_module(network())

    def loss(params: Any, buffers: Any) -> Any:
        out, new = apply(params, buffers, X)
        return (out**2).mean(), new

    gradient = fckpt.grad(fckpt.remat(loss, budget=1.0), has_aux=True)
    for _ in range(3):
        _, buffers = gradient(params, buffers)
    assert len(made) == 1
    assert int(buffers["1.num_batches_tracked"]) == 3


def network_buffers(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v for k, v in state.items() if "running" in k or "tracked" in k}


def test_ensembles() -> None:
    models = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(3)]
    params, buffers = stack_module_state(models)  # type: ignore[arg-type]
    apply, _, _ = fckpt.from_module(models[0])
    x = X.mean((2, 3))
    loss = lambda f: lambda params, buffers: (f(params, buffers, x)[0] ** 2).sum()
    expected = vmap(grad(loss(apply)))(params, buffers)
    assert_equal(vmap(grad(loss(fckpt.remat(apply))))(params, buffers), expected)


def test_under_torch_func_closed_over_statistics_fail_as_they_do_without_remat() -> None:
    model = network()
    for f in (model, fckpt.remat(model)):
        with pytest.raises(RuntimeError, match="mutate a captured Tensor"):
            grad(lambda x, f=f: f(x).sum())(X)


def test_a_submodule_replaced_after_a_call_is_seen() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    region = fckpt.remat(model)
    region(torch.randn(8, 4)).sum().backward()
    model[1] = nn.BatchNorm1d(4)
    region(torch.randn(8, 4)).sin().sum().backward()
    assert int(model[1].num_batches_tracked) == 1


def test_modules_in_plain_attributes_keep_their_statistics() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms, self.scale = [nn.BatchNorm1d(4)], torch.full((4,), 2.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norms[0](x * self.scale).sin()

    for options in ({}, {"policy": fckpt.policies.nothing_saveable}):
        holder = Holder()
        fckpt.remat(holder, **options)(torch.randn(8, 4, requires_grad=True)).sum().backward()
        assert int(holder.norms[0].num_batches_tracked) == 1


class Made(nn.Module):
    """A module whose first call makes a tensor, which this call and all later ones replace."""

    def __init__(self, make: Callable[[nn.Module, torch.Tensor], None], *, declared: bool):
        super().__init__()
        self.inner = nn.Identity()
        self.make = make
        if declared:
            make(self, None)  # type: ignore[arg-type]  # registered as None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for owner in (self, self.inner):
            scale = getattr(owner, "scale", None)
            self.make(owner, torch.arange(8.0) if scale is None else scale.detach() + 1)
        return (x * self.scale * self.inner.scale).sin()


def as_parameter(module: nn.Module, value: torch.Tensor | None) -> None:
    module.register_parameter("scale", None if value is None else nn.Parameter(value))


def as_buffer(module: nn.Module, value: torch.Tensor | None) -> None:
    module.register_buffer("scale", value, persistent=False)


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("make", [as_parameter, as_buffer])
@pytest.mark.sweep(1)
def test_tensors_that_the_first_call_makes_are_made_once(make: Any, captured: bool, declared: bool) -> None:
    def run(wrap: Any) -> list[Any]:
        module, found = Made(make, declared=declared), []
        region = wrap(lambda x: module(x)) if captured else wrap(module)
        for _ in range(3):
            x = torch.linspace(0, 1, 32).reshape(4, 8).requires_grad_()
            region(x).sum().backward()
            found += [x.grad, module.scale.clone(), module.inner.scale.clone(), [p.grad for p in module.parameters()]]
        return found

    assert_equal(run(fckpt.remat), run(lambda fn: fn))


class Gated(nn.Module):
    """A module whose first call makes its gate, in the place of a None."""

    def __init__(self, none: Callable[[nn.Module, str, None], None], make: Callable[[], Any]):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        none(self, "gate", None)
        self.make = make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            self.gate = self.make()
        h = torch.tanh(self.inner(x))
        return self.gate(h) if isinstance(self.gate, nn.Module) else h * self.gate


NONE = {
    "attribute": setattr,
    "parameter": nn.Module.register_parameter,
    "buffer": nn.Module.register_buffer,
    "module": nn.Module.register_module,
}
MADE = {
    "parameter": lambda: nn.Parameter(torch.ones(4)),
    "module": lambda: nn.Linear(4, 4),
    "tensor": lambda: torch.ones(4),
}


def in_blocks(module: nn.Module) -> nn.Module:
    net = nn.Sequential(module)
    fckpt.remat_blocks(net, blocks=type(module))
    return net


PLACES = [(none, made) for none in ("attribute", "buffer") for made in MADE]
PLACES += [("parameter", "parameter"), ("module", "parameter"), ("module", "module")]  # torch refuses the others


@pytest.mark.parametrize("none, make", PLACES)
@pytest.mark.sweep(2)
def test_what_the_first_call_puts_in_the_place_of_none(none: str, make: str) -> None:
    def run(wrap: Any) -> tuple[list[Any], list[Any]]:
        module = Gated(NONE[none], MADE[make])
        region, found = wrap(module), []
        for _ in range(3):
            region(torch.linspace(0, 1, 32).reshape(8, 4)).sum().backward()
            found += [(p.detach().clone(), p.grad.clone()) for p in module.parameters()]
        return found, [[*module.state_dict()], [*vars(module)], [*module._modules]]

    (expected, names), _ = seeded(lambda: run(lambda module: module))
    for wrap in (fckpt.remat, in_blocks):
        (found, names_after), _ = seeded(lambda wrap=wrap: run(wrap))
        assert_equal(found, expected)
        assert names_after == names
