"""A plan is for the outputs that are differentiated; a call with a new signature expects those of earlier calls."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import assert_equal
from torch import Tensor, nn

import fckpt

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

WEIGHTS = [torch.randn(64, 64, generator=torch.Generator().manual_seed(i)) / 8 for i in range(6)]


def outputs(x: Tensor, weights: list[Tensor], scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x, x.sin() * scale, x.exp()


class Training:
    """Runs `outputs` plainly and planned, and compares the gradients."""

    def __init__(self, budget: float | int) -> None:
        self.planned = fckpt.remat(outputs, budget=budget)
        self.weights = [weight.clone().requires_grad_() for weight in WEIGHTS]
        self.warned: list[str] = []

    def gradients(self, fn: Callable[..., tuple[Tensor, ...]], which: int, times: int, *args: object) -> list[Tensor]:
        results = fn(args[0], self.weights, *args[1:])  # all of them are held until the end
        loss = results[which].sum()
        found: list[Tensor] = []
        for left in reversed(range(times)):
            found = list(torch.autograd.grad(loss, self.weights, retain_graph=bool(left)))
        return found

    def peak(self, which: int, *args: object, times: int = 1) -> int:
        """Returns the peak of a call that is differentiated for one output, once or several times."""
        found: list[Tensor] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            peak = fckpt.measure_peak(
                lambda: found.extend(self.gradients(self.planned, which, times, *args))
            ).peak_bytes
        self.warned += [str(w.message) for w in caught if issubclass(w.category, fckpt.BudgetWarning)]
        assert all(map(torch.equal, found, self.gradients(outputs, which, times, *args)))
        return peak

    @property
    def again(self) -> int:
        return fckpt.stats(self.planned).fallbacks.get("forward again", 0)


def tight(rows: int) -> int:
    """The least budget, in bytes, for the first call, which is planned for a gradient of all outputs."""
    x, weights = torch.randn(rows, 64), [weight.clone().requires_grad_() for weight in WEIGHTS]
    with pytest.raises(fckpt.BudgetError) as error:
        fckpt.plan(outputs, x, weights, budget=1)
    assert error.value.least_bytes is not None
    return error.value.least_bytes


@pytest.mark.parametrize("changing", ["a number", "a size", "autocast's state", "grad mode between"])
def test_new_signatures_expect_the_outputs_that_were_differentiated(changing: str) -> None:
    budget = tight(512)
    training = Training(budget)
    x = torch.randn(512, 64)
    training.peak(1, x)  # shows that the second output is differentiated
    for step in range(1, 5):
        if changing == "a number":
            peak = training.peak(1, x, 1 + step / 8)
        elif changing == "a size":
            peak = training.peak(1, x[: 512 - 32 * step])
        elif changing == "autocast's state":
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step % 2 == 1):
                peak = training.peak(1, x)
        else:
            with torch.no_grad():
                training.planned(x, [weight.detach() for weight in training.weights])
            peak = training.peak(1, x)
        stats = fckpt.stats(training.planned)
        assert peak <= budget + 256 or stats.plans > 2  # a call that makes a plan may hold more
    assert not training.warned and not training.again
    # One for each signature, and two for the first one and for the first backward pass under autocast.
    programs = {"a number": 6, "a size": 6, "autocast's state": 4, "grad mode between": 3}[changing]
    assert fckpt.stats(training.planned).programs == programs


def test_outputs_that_alternate_are_said_if_that_exceeds_the_budget() -> None:
    training = Training(0.8)
    x = torch.randn(512, 64)
    for which in (0, 0, 1, 1):
        training.peak(which, x)
    assert not training.warned and not training.again
    plain = max(fckpt.measure_peak(lambda i=i: training.gradients(outputs, i, 1, x)).peak_bytes for i in (0, 1))
    peaks = [training.peak(which, x) for which in (0, 1, 0, 1)]
    assert max(peaks) > 0.8 * plain and training.again == 4
    assert len(training.warned) == 1
    assert "for other outputs" in training.warned[0] and "Return only what is differentiated" in training.warned[0]


def test_a_second_backward_pass_is_said_if_it_exceeds_the_budget() -> None:
    budget = tight(512)
    training = Training(budget)
    x = torch.randn(512, 64)
    training.peak(0, x)
    training.peak(0, x, times=3)
    assert training.again == 2
    assert len(training.warned) == 1 and "a second one" in training.warned[0]


@pytest.mark.parametrize("holds", [True, False], ids=["gradients held", "gradients dropped"])
def test_losses_that_are_differentiated_in_turn_are_said_if_gradients_exceed_the_budget(holds: bool) -> None:
    """The least budget of the second plan has no room for the gradients of the first backward pass."""
    towers = [nn.ModuleList(nn.Linear(64, 64) for _ in range(8)) for _ in range(2)]

    def losses(x: Tensor, first: nn.ModuleList, second: nn.ModuleList) -> tuple[Tensor, Tensor]:
        a = b = x
        for layer in first:
            a = torch.tanh(layer(a))
        for layer in second:
            b = torch.sin(layer(b))
        return a.sum(), (a * b).sum()

    x, parameters = torch.randn(512, 64), [p for layers in towers for p in layers.parameters()]

    def step(fn: Callable[..., tuple[Tensor, Tensor]]) -> None:
        a, b = fn(x, *towers)
        if holds:
            a.backward(retain_graph=True)
            b.backward()
        else:
            for loss in (a, b):
                torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)

    def peak(fn: Callable[..., tuple[Tensor, Tensor]]) -> int:
        peaks = []
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = None
            peaks.append(fckpt.measure_peak(lambda: step(fn)).peak_bytes)
        return peaks[-1]

    budget = peak(losses) // 2
    planned = fckpt.remat(losses, budget=budget)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exceeded = peak(planned) > budget
    assert exceeded == holds == bool(fckpt.stats(planned).fallbacks.get("forward again"))
    assert exceeded == any("holds the first results and gradients" in str(w.message) for w in caught)


def test_a_forward_pass_that_runs_again_within_the_budget_is_no_exception() -> None:
    training = Training(2**30)
    x = torch.randn(512, 64)
    for which in (0, 1, 0, 1):
        training.peak(which, x, times=2)
    assert not training.warned and not fckpt.stats(training.planned).fallbacks


def test_a_budget_too_small_for_all_outputs_may_do_for_one() -> None:
    x, weights = torch.randn(512, 64), [weight.clone().requires_grad_() for weight in WEIGHTS]
    budget = tight(512) - 1
    planned = fckpt.remat(outputs, budget=budget)
    planned(x, weights)[1].sum().backward()
    with pytest.raises(fckpt.BudgetError):
        sum(output.sum() for output in planned(x, weights)).backward()


def test_a_budget_too_small_for_each_output_names_them() -> None:
    x, weights = torch.randn(512, 64), [weight.clone().requires_grad_() for weight in WEIGHTS]
    with pytest.raises(fckpt.BudgetError, match=r"a gradient of 3 outputs together, .*: return only those"):
        fckpt.remat(outputs, budget=1)(x, weights)
    with pytest.raises(fckpt.BudgetError) as error:
        fckpt.remat(lambda x, weights: outputs(x, weights)[1], budget=1)(x, weights)
    assert "outputs together" not in str(error.value)


@pytest.mark.parametrize("options", [{"budget": 1.0}, {"budget": 2**20}, {}])
def test_hooks_of_parameters_without_a_gradient_are_not_called(options: dict[str, Any]) -> None:
    def run(remat: Callable[..., Any]) -> list[Any]:
        seen: list[Any] = []
        first, second = (WEIGHTS[i].clone().requires_grad_() for i in (0, 1))
        third = (second * 3).detach_().requires_grad_()
        for name, leaf in (("first", first), ("second", second), ("third", third)):
            leaf.register_hook(lambda grad, name=name: seen.append((name, grad.sum())) or grad * 2)
            leaf.register_post_accumulate_grad_hook(lambda leaf, name=name: seen.append((name, leaf.grad.norm())))

        def several(grads: Sequence[Tensor | None]) -> None:
            if any(grad is not None for grad in grads):  # if there is none, plain autograd does not call the hook
                seen.append([grad is None for grad in grads])

        torch.autograd.graph.register_multi_grad_hook((first, second), several)
        fn = remat(lambda x: (torch.tanh(x @ first), torch.sin(x @ second), torch.exp(x @ third)))
        x = torch.ones(8, 64) / 8
        steps: list[Any] = []
        for which in ((0,), (1,), (0, 2), (2,), (1,)):
            for outside in (False, True):
                results = fn(x)
                loss = sum((results[i].sum() for i in which), torch.zeros(()))
                if outside:  # the second weight gets a gradient elsewhere
                    loss = loss + second.square().sum()
                loss.backward()
                # The order in which leaves get their gradients is not promised.
                steps.append((sorted(seen, key=str), first.grad, second.grad, third.grad))
                first.grad = second.grad = third.grad = None
                seen.clear()
        handles = [len(leaf._backward_hooks or {}) for leaf in (first, second, third)]
        return [*steps, handles]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fckpt.BudgetWarning)
        found = run(lambda fn: fckpt.remat(fn, **options))
    assert_equal(found, run(lambda fn: fn))


def test_a_hook_is_skipped_again_after_a_backward_pass_that_did_not_reach_its_tensor() -> None:
    first, second = (WEIGHTS[i].clone().requires_grad_() for i in (0, 1))
    seen: list[Any] = []
    second.register_hook(lambda grad: seen.append(grad.norm()))
    second.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.norm()))
    fn = fckpt.remat(lambda x: (torch.tanh(x @ first), torch.sin(x @ second)), budget=2**20)
    x = torch.ones(4, 64) / 4
    torch.autograd.grad(fn(x)[0].sum(), [first])
    second.grad = torch.ones_like(second)
    fn(x)[0].sum().backward()
    assert not seen
    fn(x)[1].sum().backward()
    assert len(seen) == 2


def test_a_hook_that_was_removed_stays_removed() -> None:
    first, second = (WEIGHTS[i].clone().requires_grad_() for i in (0, 1))
    seen: list[str] = []
    handle = second.register_hook(lambda grad: seen.append("hook"))
    fn = fckpt.remat(lambda x: (torch.tanh(x @ first), torch.sin(x @ second)), budget=2**20)
    fn(torch.ones(4, 64))[0].sum().backward()
    handle.remove()
    fn(torch.ones(4, 64))[1].sum().backward()
    assert not seen and not second._backward_hooks


# -- outputs that other outputs are computed from -------------------------------------------------------------


class Hidden(nn.Module):
    """Returns a loss, the hidden state from which it is computed, and another state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.other = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.first(x).tanh()
        return self.second(hidden).sin().sum(), hidden, self.other(x).cos()


def doubled(loss: Tensor, hidden: Tensor) -> Tensor:
    hidden.register_hook(lambda grad: 2 * grad)
    return loss


def retained(loss: Tensor, hidden: Tensor) -> Tensor:
    hidden.retain_grad()
    return loss + hidden.square().sum()


def all_hooked(loss: Tensor, hidden: Tensor) -> Tensor:
    torch.autograd.graph.register_multi_grad_hook([hidden], lambda grads: None)
    return loss


@pytest.mark.filterwarnings("ignore::fckpt.BudgetWarning")
@pytest.mark.parametrize("use", [doubled, retained, all_hooked])
def test_hooks_of_outputs_that_others_are_computed_from_are_refused(use: Any) -> None:
    torch.manual_seed(0)
    net, x = Hidden(), torch.randn(4, 8)
    loss, hidden, _ = fckpt.remat(net, budget=1.0)(x)
    loss = use(loss, hidden)
    with pytest.raises(fckpt.PlanError, match=r"on output 1 of .* from which other outputs are computed"):
        loss.backward()
    net.zero_grad()
    found = []
    for run in (net, fckpt.remat(net)):
        loss, hidden, _ = run(x)
        use(loss, hidden).backward()
        found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        net.zero_grad()
    assert all(map(torch.equal, *found))


@pytest.mark.filterwarnings("ignore::fckpt.BudgetWarning")
def test_hooks_of_outputs_that_are_differentiated_alone() -> None:
    torch.manual_seed(0)
    net, x = Hidden(), torch.randn(4, 8)
    planned = fckpt.remat(net, budget=1.0)
    seen: list[Tensor] = []
    for run in (net, planned):
        _, hidden, other = run(x)
        hidden.register_hook(lambda grad: seen.append(grad.clone()))
        (other.sum() + hidden.square().sum()).backward()
        net.zero_grad()
        loss, hidden, _ = run(x)
        hidden.register_hook(seen.append).remove()
        loss.backward()
        net.zero_grad()
    assert len(seen) == 2 and torch.equal(*seen)
    loss, hidden, _ = planned(x)
    with pytest.raises(fckpt.PlanError, match="retain_grad"):
        torch.autograd.backward(loss, inputs=[hidden])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(hidden, io.BytesIO())


def with_a_detached_argument(wrap: Wrap) -> list[torch.Tensor]:
    """Truncated backpropagation through time, with the detach inside of the function."""
    torch.manual_seed(0)
    cell = nn.GRUCell(8, 8)
    run = wrap(lambda x, h: cell(x, h.detach()))
    h = torch.zeros(4, 8)
    for _ in range(3):
        h = run(torch.randn(4, 8), h)
        h.square().sum().backward()
    return [p.grad for p in cell.parameters() if p.grad is not None]


def with_an_attribute_of_the_last_call(wrap: Wrap) -> list[torch.Tensor]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.last: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.linear(x))
            total = y.sum() if self.last is None else (y * self.last.detach()).sum()
            self.last = y
            return total

    torch.manual_seed(0)
    net = Net()
    run = wrap(net)
    for _ in range(3):
        run(torch.randn(4, 8)).backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def with_a_target_whose_graph_is_gone(wrap: Wrap) -> list[torch.Tensor]:
    torch.manual_seed(0)
    first, second, x = nn.Linear(8, 8), nn.Linear(8, 8), torch.randn(4, 8)
    encoded = lambda: first(x).tanh()
    run = wrap(lambda h, target: nn.functional.mse_loss(second(h), target.detach()))
    h, target = encoded(), encoded()
    (run(h, target) + target.square().mean()).backward()
    h, target = encoded(), encoded()
    target.sum().backward()
    run(h, target).backward()
    h = encoded()
    run(h, h).backward()
    return [p.grad for p in (*first.parameters(), *second.parameters()) if p.grad is not None]


def with_a_number_of_an_argument(wrap: Wrap) -> list[torch.Tensor]:
    torch.manual_seed(0)
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)

    def scaled(weight: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = last.mean()
        return torch.tanh(x @ weight) * scale

    run, y = wrap(scaled), torch.ones(4, 8)
    for _ in range(3):
        y = run(weight, y)
        y.sum().backward()
    assert weight.grad is not None
    return [weight.grad]


@pytest.mark.parametrize("wrapped", [fckpt.remat, lambda fn: fckpt.remat(fn, budget=1.0)], ids=["plain", "planned"])
@pytest.mark.parametrize(
    "program",
    [
        with_a_detached_argument,
        with_an_attribute_of_the_last_call,
        with_a_target_whose_graph_is_gone,
        with_a_number_of_an_argument,
    ],
)
def test_the_graph_behind_an_operand_without_a_gradient(
    program: Callable[[Wrap], list[torch.Tensor]], wrapped: Wrap
) -> None:
    """It belongs to another backward pass, which may be over."""
    assert all(map(torch.equal, program(lambda fn: fn), program(wrapped)))


class WithoutZeros(torch.autograd.Function):
    """Two outputs, whose `backward` treats an output without a gradient in another way than one with zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        first, second = cotangents
        return first * 2 if second is None else (0 if first is None else first) * 2 + second * 3 + 100


def test_a_function_that_gets_none_for_outputs_without_a_gradient() -> None:
    x = torch.randn(8, requires_grad=True)
    unused = lambda x: WithoutZeros.apply(x.sin())[0].sum()
    both = lambda x: WithoutZeros.apply(x.sin())
    assert torch.equal(*(torch.autograd.grad(f(x), x)[0] for f in (unused, fckpt.remat(unused, budget=1.0))))
    with pytest.raises(fckpt.FckptError, match="other outputs than the plan was made for"):
        torch.autograd.grad(fckpt.remat(both, budget=1.0)(x)[0].sum(), x)


class Replaced(torch.autograd.Function):
    """The value of one tensor, with the gradient for another."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, other: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return None, cotangents[0]


@pytest.mark.parametrize("options", [{"budget": 1.0}, {"policy": fckpt.policies.nothing_saveable}], ids=str)
@pytest.mark.parametrize("deep", [False, True])
def test_gradients_of_parameters_whose_values_nothing_reads(deep: bool, options: Any) -> None:
    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)]
    net = nn.Sequential(*(layers if deep else layers[:1]))
    x, value = torch.randn(3, 8), torch.randn(3, 4 if deep else 8)
    loss = lambda x: Replaced.apply(value, net(x)).square().mean()
    found = []
    for f in (loss, fckpt.remat(loss, **options)):
        net.zero_grad()
        f(x).backward()
        found.append([p.grad for p in net.parameters()])
    assert_equal(*found)


def test_retain_grad_inside_is_refused() -> None:
    def with_features(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x.sin()
        hidden.retain_grad()
        return hidden.exp().sum(), hidden

    x = torch.randn(8, requires_grad=True)
    with pytest.raises(fckpt.TraceError, match="on what the call returns"):
        fckpt.remat(with_features, budget=1.0)(x)


def test_operands_made_in_inference_mode_are_refused() -> None:
    with torch.inference_mode():
        teacher = nn.Linear(8, 8)
    student = nn.Linear(8, 8)

    def loss(x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x)
        return (student(x) - wanted).square().mean()

    with pytest.raises(fckpt.ArgumentValueError, match="made in inference mode"):
        fckpt.remat(loss, budget=1.0)(torch.randn(6, 8))
