"""The backend "fckpt" of torch.compile: partitions have the bits of the function, and budgets hold."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled import CLOSE, QUIET, Convolutions, Perceptron, Transformer, made, peak_of, step
from helpers import assert_equal, seeded
from torch import nn
from torch._functorch import config as functorch

import fckpt
from fckpt._compile.partition import Partitioner
from fckpt.policies import dots_saveable, nothing_saveable, save_only_these_names

pytestmark = QUIET


@pytest.fixture(autouse=True)
def reset() -> None:
    torch._dynamo.reset()


def eagerly(partitioner: Any) -> Callable[..., Any]:
    """Returns a backend that runs the partitioner's halves with PyTorch's own kernels."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    keep = lambda graph, _: make_boxed_func(graph.forward)
    return aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partitioner)


def products(half: torch.fx.GraphModule) -> int:
    names = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.convolution.default")
    return sum(str(n.target).startswith(names) for n in half.graph.nodes)


# The halves run with the same kernels as the function, so the results are compared bit for bit.
@pytest.mark.parametrize("kind", [Perceptron, Convolutions, Transformer])
def test_partitions_have_the_bits_of_the_function(kind: Callable[[], nn.Module]) -> None:
    from fckpt._compile.partition import Partitioner

    (model, x), (plain, _) = made(kind), made(kind)
    expected = seeded(lambda: step(plain, plain, x))
    peak = fckpt.measure_peak(lambda: plain(x).backward()).peak_bytes
    recomputed = []
    for fraction in (1.0, 0.5, 0.01):
        torch._dynamo.reset()
        model = made(kind)[0]
        partitioner = Partitioner(int(peak * fraction), None, "auto")
        assert_equal(seeded(lambda: step(torch.compile(model, backend=eagerly(partitioner)), model, x)), expected)
        assert partitioner.plan is not None
        recomputed.append(partitioner.plan.timeline.recomputed_nodes)
        assert partitioner.is_least or partitioner.plan.peak_bytes <= peak * fraction
    assert recomputed[0] < recomputed[-1], recomputed


def test_the_backward_half_repeats_what_the_schedule_repeats() -> None:
    from fckpt._compile.partition import Partitioner

    model, x = made(Perceptron)
    found: list[int] = []
    for policy in (None, nothing_saveable, dots_saveable):
        partitioner = Partitioner(None if policy else 2**30, policy, "auto")
        halves: list[Any] = []

        def keep(*args: Any, partitioner: Any = partitioner, halves: Any = halves, **kwargs: Any) -> Any:
            halves += partitioner(*args, **kwargs)
            return tuple(halves)

        torch._dynamo.reset()
        step(torch.compile(model, backend=eagerly(keep)), model, x)
        found.append(products(halves[1]))
    assert found == [7, 11, 7], found  # two products for each gradient, one for the first; and four recomputed


def test_regions_inside_are_recomputed() -> None:
    """The tags that torch sets in checkpointed regions bind the plan."""
    from fckpt._compile.partition import Partitioner

    model, x = made(lambda: Perceptron(dropout=0.0))
    region = nn.Sequential(fckpt.remat(nn.Sequential(model.layers[0], nn.Tanh(), model.layers[1], nn.Tanh())))
    partitioner = Partitioner(2**30, None, "auto")
    step(lambda x: torch.compile(region, backend=eagerly(partitioner))(x).sum(), region, x)
    assert partitioner.plan is not None
    assert partitioner.plan.timeline.recomputed_nodes > 0


# With Inductor --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "budget"), [(Perceptron, 0.6), (Transformer, 0.7)])
def test_a_compiled_function_keeps_its_budget(kind: Callable[[], nn.Module], budget: float) -> None:
    model, x = made(kind)
    model.eval()  # without dropout: Inductor draws other numbers than PyTorch
    plain = step(model, model, x)
    limit = peak_of(model, x, model) * budget
    run = torch.compile(model, backend="fckpt", options={"budget": budget})
    with warnings.catch_warnings():
        warnings.simplefilter("error", fckpt.BudgetWarning)
        torch.testing.assert_close(step(run, model, x)[:2], plain[:2], **CLOSE)
    assert peak_of(run, x, model) <= limit


@pytest.mark.slow
def test_a_budget_that_cannot_be_kept_is_a_warning_with_the_peak() -> None:
    model, x = made(lambda: Perceptron(layers=2))
    run = torch.compile(model, backend="fckpt", options={"budget": "5 KiB"})
    with pytest.warns(fckpt.BudgetWarning, match=r"with the budget 5.00 KiB holds .* KiB.* with 1 plan\. Name"):
        run(x).backward()
    assert peak_of(run, x, model) > 5 * 2**10


@pytest.mark.slow
def test_partitions_of_torch_are_tried_if_no_plan_keeps_the_budget() -> None:
    model, x = made(lambda: Perceptron(layers=6))
    model.eval()
    plain = step(model, model, x)
    with functorch.patch(activation_memory_budget=0.2):
        limit = peak_of(torch.compile(model), x, model)
        limit = min(limit, peak_of(torch.compile(model), x, model))  # the first call compiles
    torch._dynamo.reset()
    options = {"budget": limit, "solver": "save_all"}  # which has no plan for less than the plain peak
    run = torch.compile(model, backend="fckpt", options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fckpt.BudgetWarning)
        torch.testing.assert_close(step(run, model, x)[:2], plain[:2], **CLOSE)
    assert peak_of(run, x, model) <= limit


@pytest.mark.sweep(2)
@pytest.mark.slow
@pytest.mark.parametrize("budget", [0.6, "5 KiB"])
def test_a_function_from_a_cache_is_held_to_its_budget(budget: Any) -> None:
    """A second process finds compiled functions in the caches of torch.compile, where no partitioner is called."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    found: list[tuple[int, list[str]]] = []
    with fresh_cache():
        for _ in range(3):
            torch._dynamo.reset()
            counters.clear()
            model, x = made(lambda: Perceptron(layers=3, dropout=0.0))
            run = torch.compile(model, backend="fckpt", options={"budget": budget})
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", fckpt.BudgetWarning)
                run(x).backward()
            found.append(
                (peak_of(run, x, model), [str(w.message) for w in caught if w.category is fckpt.BudgetWarning])
            )
    assert counters["aot_autograd"]["autograd_cache_hit"]
    assert found[1] == found[2] == found[0]
    assert bool(found[0][1]) == (budget == "5 KiB")


@pytest.mark.slow
def test_dropout_is_not_drawn_again() -> None:
    """The gradient of x.dropout() counts the elements that the forward kept."""
    torch.manual_seed(0)
    x = torch.randn(256, requires_grad=True)
    run = torch.compile(lambda x: F.dropout(x.sin(), 0.5).exp().sum(), backend="fckpt", options={"budget": 0.9})
    out = run(x)
    out.backward()
    kept = x.grad != 0
    assert 64 < kept.sum() < 192
    expected = ((x.sin() * 2 * kept).exp()).sum()
    torch.testing.assert_close(out, expected)  # Inductor sums in another order


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 1.5}, r"a float budget is a fraction"),
        ({"budget": [1]}, r"a budget is a number of bytes"),
        ({"budget": 0.5, "solver": "best"}, r"there is no solver 'best'"),
        ({"budget": 0.5, "mode": "fast"}, r"there is no mode 'fast'. The modes of Inductor are 'default'"),
        ({3: 0.5}, "ArgumentTypeError: the names of options are str, not int: 3"),
        ([1], "ArgumentTypeError: options are a dict, not list"),
        ({"budget": 0.5, "bugdet": 1}, r"no option 'bugdet' \(did you mean 'budget'\?\)"),
        ({"policy": save_only_these_names("h")}, r"mentions names, and names that fckpt.checkpoint_name gives do not"),
        ({"policy": "dots"}, r"a policy is one of fckpt.policies"),
        ({"custom_partitioner_fn": Partitioner(None, None, "auto")}, r"custom_partitioner_fn is set, in the options"),
    ],
)
def test_wrong_options(options: Any, message: str) -> None:
    with pytest.raises(Exception, match=message):
        torch.compile(lambda x: x.sin(), backend="fckpt", options=options)(torch.ones(2, requires_grad=True))


@torch._inductor.config.patch(custom_partitioner_fn=Partitioner(None, None, "auto"))
def test_a_partitioner_that_would_not_be_called_is_refused() -> None:
    with pytest.raises(Exception, match=r"would not call it, because its plans are partitions themselves"):
        torch.compile(lambda x: x.sin(), backend="fckpt")(torch.ones(2, requires_grad=True))


def test_a_graph_is_retained_if_nothing_is_donated() -> None:
    """Kernels that write over saved values are in Inductor's cache when the function is compiled without them."""
    w, x = torch.rand(8, 8, requires_grad=True), torch.rand(8, 8)
    fn = lambda w: (x @ w).exp().sin().sum()
    [expected] = torch.autograd.grad(fn(w), w)
    compiled = lambda: torch.compile(fn, backend="fckpt", options={"budget": 0.9})(w)
    with pytest.raises(RuntimeError, match=r"or set torch._functorch.config.donated_buffer=False"):
        torch.autograd.grad(compiled(), w, retain_graph=True)
    torch._dynamo.reset()
    with functorch.patch(donated_buffer=False):
        loss = compiled()
        for retained in (True, True, False):
            [found] = torch.autograd.grad(loss, w, retain_graph=retained)
            torch.testing.assert_close(found, expected)  # Inductor rounds otherwise
    torch._dynamo.reset()


@functorch.patch(enable_autograd_cache=False)  # its entries refuse a retained graph, as they do with Inductor
def test_without_a_budget_a_graph_may_be_retained() -> None:
    w, x = torch.rand(8, 8, requires_grad=True), torch.rand(8, 8)
    fn = lambda w: (x @ w).exp().sin().sum()
    [expected] = torch.autograd.grad(fn(w), w)
    for kept in (False, True):  # kernels that write over saved values are in Inductor's cache by then
        torch._dynamo.reset()
        loss = torch.compile(fn, backend="fckpt")(w)
        for retained in [True] * 2 * kept + [False]:
            [found] = torch.autograd.grad(loss, w, retain_graph=retained)
            torch.testing.assert_close(found, expected)  # Inductor rounds otherwise


# The class of pytorch#197838 and pytorch#193193: below a budget there is more memory than above, or far more work.


class Normalised(nn.Module):
    """Linear layers and a batch norm, whose statistics are inputs that the compiled function writes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(m for _ in range(3) for m in (nn.Linear(16, 16), nn.GELU())), nn.BatchNorm1d(16), nn.ReLU()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


def test_the_plain_peak_of_a_function_that_writes_its_inputs_is_known() -> None:
    """A float budget is a fraction of it."""
    from fckpt._compile.rehearsal import plain_peak_of

    found: list[int] = []

    def backend(module: Any, inputs: Any) -> Any:
        found.append(plain_peak_of(module, inputs))
        return module.forward

    torch.manual_seed(0)
    model, x = Normalised(), torch.randn(256, 16)
    before = [b.clone() for b in model.buffers()]
    with torch.no_grad():
        torch.compile(model, backend=backend)
    model(x).backward()  # gradients and workspaces
    measured = peak_of(model, x, model)
    for b, old in zip(model.buffers(), before, strict=True):
        b.data.copy_(old)
    torch.compile(model, backend=backend)(x)
    assert 0.95 * measured <= found[0] <= 1.05 * measured


@pytest.mark.parametrize("kind", [Perceptron, Transformer])
def test_a_lower_budget_takes_no_more_memory_and_recomputes_each_product_at_most_once(kind: Any) -> None:
    from fckpt._compile.partition import Partitioner

    model, x = made(kind)
    model.eval()
    peak = fckpt.measure_peak(lambda: model(x).backward()).peak_bytes
    peaks, counts = [], []
    budgets = [int(peak * fraction) for fraction in (1.0, 0.8, 0.6, 0.4, 0.01)]
    for budget in budgets:
        torch._dynamo.reset()
        halves: list[Any] = []
        partitioner = Partitioner(budget, None, "auto")

        def keep(*args: Any, partitioner: Any = partitioner, halves: Any = halves, **kwargs: Any) -> Any:
            halves += partitioner(*args, **kwargs)
            return tuple(halves)

        run = torch.compile(model, backend=eagerly(keep))
        step(run, model, x)
        peaks.append(peak_of(run, x, model))
        counts.append(sum(map(products, halves)))
    # Within its budget, a plan may take more memory than one of a larger budget that is as fast.
    bounds = zip(peaks[1:], map(max, peaks, budgets[1:]), strict=True)
    assert all(now <= bound for now, bound in bounds), (peaks, budgets)
    assert peaks[-1] < peaks[0]
    assert max(counts) <= 2 * counts[0], counts


class Writes(nn.Module):
    """A function that writes to a parameter, a buffer and a part of a buffer, each call anew."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.body = Perceptron(dropout=0.0)
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.add_(0.5)
            self.body.layers[0].weight.mul_(0.9)
        self.calls[:2] += 1
        return self.body(x * self.scale)


class InParts(nn.Module):
    """A function in three parts; the later ones write to what the earlier ones computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        torch._dynamo.graph_break()
        h = self.second(F.relu_(h))
        torch._dynamo.graph_break()
        h += 1.0
        return h.mul_(2.0).square().mean()


class Looping(nn.Module):
    """A function that Dynamo gives up, because its graph breaks within a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.body(x).sin()
            torch._dynamo.graph_break()
        return x


class Recurrent(nn.Module):
    """A function that Dynamo gives up, because it has a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.GRU(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)[0]


class Aliases(nn.Module):
    """A function that writes to two buffers with the same memory, and differentiates through one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.register_buffer("whole", torch.zeros(32))
        self.register_buffer("part", self.whole[:16])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.part.add_(1)
        self.whole.mul_(0.5)
        return F.gelu(self.body(x) * self.whole[:16]).square().mean()


class Normed(nn.Module):
    """A batch norm, whose compiled kernels hide that they write to its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


@pytest.mark.sweep(4)
@pytest.mark.filterwarnings("ignore::fckpt.BudgetWarning")
@pytest.mark.parametrize("budget", [0.6, 1])
@pytest.mark.parametrize(
    ("kind", "dynamic"), [(Writes, False), (InParts, False), (Aliases, False), (Normed, False), (Normed, True)]
)
def test_a_measurement_changes_nothing(kind: Callable[[], nn.Module], budget: Any, dynamic: bool) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(64, 16)
    plain = kind()
    plain.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend="fckpt", dynamic=dynamic, options={"budget": budget})
    for _ in range(3):
        results, expected = step(compiled, model, x), step(plain, plain, x)
        torch.testing.assert_close(results, expected)  # Inductor's kernels round differently
        with torch.no_grad():
            for kept, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(kept, other)


class Counts(nn.Module):
    """A function of a buffer that it updates; torch's own partition computes it again from what was overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("count", torch.zeros(128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        self.count.mul_(0.5)
        hidden = F.gelu(self.first(x) * self.count[:64]) * self.count[64:].sin()
        return (self.second(hidden) + self.count[:64]).square().mean()


@pytest.mark.sweep(4)
@pytest.mark.filterwarnings("ignore::fckpt.BudgetWarning")
@pytest.mark.parametrize("options", [{}, {"budget": 1.0}, {"budget": "10MiB"}, {"budget": 1}], ids=repr)
def test_gradients_are_those_of_inputs_before_they_were_overwritten(options: dict[str, Any]) -> None:
    plain, x = Counts(), torch.randn(256, 64)
    model = copy.deepcopy(plain)
    compiled = torch.compile(model, backend="fckpt", options=options)
    for _ in range(2):
        torch.testing.assert_close(step(compiled, model, x), step(plain, plain, x))


@pytest.mark.sweep(4)
@pytest.mark.filterwarnings("ignore::fckpt.BudgetWarning")
@pytest.mark.parametrize("budget", [0.6, "1MiB"])
@pytest.mark.parametrize("optimizer", [partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.AdamW])
def test_a_whole_step_is_compiled_in_parts(optimizer: Any, budget: Any) -> None:
    def stepping(model: nn.Module) -> Callable[..., torch.Tensor]:
        rule = optimizer(model.parameters())

        def train(x: torch.Tensor) -> torch.Tensor:
            rule.zero_grad()
            loss = model(x)
            loss.backward()
            rule.step()
            return loss

        return train

    torch.manual_seed(0)
    model, x = Perceptron(dropout=0.0), torch.randn(64, 16)
    plain = copy.deepcopy(model)
    train = torch.compile(stepping(model), backend="fckpt", options={"budget": budget})
    expected = stepping(plain)
    for _ in range(3):
        torch.testing.assert_close(train(x), expected(x))
    torch.testing.assert_close([*model.parameters()], [*plain.parameters()])


def test_a_budget_of_inference_is_compared_with_its_peak() -> None:
    model, x = Perceptron(dropout=0.0), torch.randn(4096, 16)
    with torch.no_grad():
        expected = model(x)
        for budget in (0.1, "16MiB"):  # a fraction is one of the peak with a backward pass
            torch._dynamo.reset()
            torch.testing.assert_close(torch.compile(model, backend="fckpt", options={"budget": budget})(x), expected)
        torch._dynamo.reset()
        with pytest.warns(fckpt.BudgetWarning, match=r"the budget 1\.00 KiB holds .* has no backward pass"):
            torch.compile(model, backend="fckpt", options={"budget": "1KiB"})(x)


def test_a_fraction_says_nothing_of_a_part_without_a_backward_pass() -> None:
    layer = nn.Linear(8, 8)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = layer(x).relu()
        if h.sum().item() > 1e9:
            h = h * 2
        return h.view(-1)[::2], h.t()

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="fckpt", options={"budget": 0.9})
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        results = compiled(torch.randn(4, 8))
        (results[0].sum() + results[1].square().sum()).backward()
    told = [str(warning.message) for warning in found if issubclass(warning.category, fckpt.BudgetWarning)]
    assert any("in parts" in text and "\n" not in text for text in told)
    assert not any("no backward pass" in text for text in told)


@pytest.mark.parametrize("make", [Looping, Recurrent])
def test_warns_of_functions_that_the_compiler_gives_up(make: Callable[[], nn.Module]) -> None:
    compiled = torch.compile(make(), backend="fckpt", options={"budget": 0.5})
    with pytest.warns(fckpt.BudgetWarning, match=rf"gives up {make.__name__}\.forward .* without the budget"):
        compiled(torch.randn(4, 16)).sum().backward()
    torch._dynamo.reset()
    with pytest.warns(fckpt.BudgetWarning, match="gives up"):
        compiled(torch.randn(4, 16))


def test_does_not_warn_of_functions_without_a_budget() -> None:
    compiled = torch.compile(Recurrent(), backend="fckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("error", fckpt.BudgetWarning)
        compiled(torch.randn(4, 16)).sum().backward()
