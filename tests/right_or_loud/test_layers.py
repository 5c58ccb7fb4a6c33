"""Layers and habits of real programs: recurrent nets, generators made inside, certain branches."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from judge import Session, judge
from torch import Tensor, nn
from torch.nn.utils import parametrizations, rnn

import fckpt

RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(32, 32),
    "LSTM of two layers, dropout": lambda: nn.LSTM(32, 32, num_layers=2, dropout=0.2),
    "bidirectional LSTM": lambda: nn.LSTM(32, 16, bidirectional=True, batch_first=True),
    "LSTM with projections": lambda: nn.LSTM(32, 64, proj_size=32),
    "GRU": lambda: nn.GRU(32, 32),
    "bidirectional GRU of two layers": lambda: nn.GRU(32, 16, num_layers=2, bidirectional=True),
    "RNN": lambda: nn.RNN(32, 32, nonlinearity="relu"),
}


class Recurrent(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.into, self.layer, self.out = nn.Linear(32, 32), RECURRENT[name](), nn.Linear(32, 32)

    def forward(self, x: Tensor, state: Any = None) -> Tensor:
        h, _ = self.layer(torch.tanh(self.into(x)).sin(), state)
        return F.gelu(self.out(h)).sin().square().mean()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(name: str, frozen: bool) -> None:
    def scenario(session: Session) -> None:
        net, x = Recurrent(name), session.leaf(5, 16, 32)  # captured step by step
        if frozen:
            net.layer.requires_grad_(False)
        session.watch(net=net)
        f = session.region(net)
        session.step(lambda: f(x))
        net.layer.flatten_parameters()  # type: ignore[operator]
        session.step(lambda: f(x), times=2)

    verdict = judge(scenario, budget=0.9)
    assert verdict.kept, (verdict.error, verdict.over)


def test_a_packed_sequence() -> None:
    def scenario(session: Session) -> None:
        layer, x = nn.GRU(32, 32), session.leaf(12, 4, 32)
        session.watch(layer=layer)
        lengths = torch.tensor([12, 9, 9, 2])

        def fn(x: Tensor) -> Tensor:
            h, _ = layer(rnn.pack_padded_sequence(x.sin(), lengths))
            return rnn.pad_packed_sequence(h)[0].square().sum()

        f = session.region(fn)
        session.step(lambda: f(x))

    judge(scenario, budget=0.9)


def seeded_outside(x: Tensor) -> Tensor:
    g = torch.Generator().manual_seed(int(torch.initial_seed()) % 1000)
    return x * torch.rand(32, generator=g)


GENERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "seeded": lambda x: x * torch.rand(32, generator=torch.Generator().manual_seed(5)),
    "unseeded": lambda x: x * torch.rand(32, generator=torch.Generator()),
    "of the initial seed": seeded_outside,
    "forked": lambda x: forked(x),
    "drawn twice": lambda x: (lambda g: x * torch.rand(32, generator=g) + torch.randn(32, generator=g))(
        torch.Generator().manual_seed(9)
    ),
    "reseeded": lambda x: torch.manual_seed(11) and x * torch.rand(32),
}


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        noise = torch.rand(32)
    return x * noise + torch.rand(32)


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_made_inside(kind: str) -> None:
    """Its numbers are those of each call, or an error says that a plan cannot draw them."""

    def scenario(session: Session) -> None:
        w, x = session.leaf(32, 32), session.leaf(96, 32)
        f = session.region(lambda x: torch.tanh(GENERATORS[kind](torch.tanh(x @ w).sin())).exp().sum())
        session.step(lambda: f(x))
        session.step(lambda: f(x), times=2)

    judge(scenario, budget=0.9)


class Codebook(nn.Module):
    """Returns its loss beside its result, and follows its inputs in a buffer that it has read before."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("codes", torch.randn(8, 32))

    def forward(self, x: Tensor) -> Any:
        z = torch.tanh(self.linear(x)).sin()
        index = torch.cdist(z, self.codes).argmin(-1)
        found = self.codes[index]
        with torch.no_grad():
            self.codes.mul_(0.9).add_(F.one_hot(index, 8).float().T @ z, alpha=0.1)
        return z + (found - z).detach(), F.mse_loss(z, found.detach())


BUFFERS: dict[str, Callable[[], nn.Module]] = {
    "codebook": Codebook,
    "spectral norm": lambda: nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.utils.spectral_norm(nn.Linear(32, 32))),
    "batch norm": lambda: nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 32)),
}


def traced_as_python(net: nn.Module) -> Callable[[Tensor], Any]:
    """A function that Dynamo does not capture, since it draws from a generator of its own."""
    generator = torch.Generator()
    return lambda x: net(x + torch.rand(32, generator=generator))


@pytest.mark.parametrize("python", [False, True])
@pytest.mark.parametrize("kind", BUFFERS)
def test_a_buffer_that_decides_before_the_first_backward_shows_what_to_plan_for(kind: str, python: bool) -> None:
    """The forward runs again from copies, because a plan for other outputs needs other values."""

    def scenario(session: Session) -> None:
        net, x = BUFFERS[kind](), session.leaf(48, 32)
        session.watch(net=net)
        f = session.region(traced_as_python(net) if python else net)
        session.step(lambda: f(x), lambda out: out[0].sum() if kind == "codebook" else out.square().sum())

    outcome = judge(scenario, budget=2.0).outcome
    if kind == "batch norm" or not python:  # Python code cannot be traced again, nor may it assign attributes
        assert outcome == "equal"


@pytest.mark.parametrize("python", [False, True])
def test_a_buffer_that_is_read_and_written_is_not_copied(python: bool) -> None:
    class Following(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)
            self.register_buffer("mean", torch.zeros(64, 32))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.linear(x)).sin()
            with torch.no_grad():
                self.mean.mul_(0.9).add_(h, alpha=0.1)
            return (h - self.mean).exp().sin().sum()

    def scenario(session: Session) -> None:
        net, x = Following(), session.leaf(64, 32)
        session.watch(net=net)
        f = session.region(traced_as_python(net) if python else net)
        session.step(lambda: f(x))

    verdict = judge(scenario, budget=0.1)  # the least that is feasible
    assert verdict.kept, (verdict.error, verdict.over)


def test_backward_passes_that_alternate_are_refused_once() -> None:
    """A plan saves copies of the buffers from then on."""
    x, errors, grads = torch.randn(48, 32), 0, []
    for plain in (True, False):
        torch.manual_seed(0)
        net = Codebook()
        f = net if plain else fckpt.remat(net, budget="1MiB")
        for turn in range(6):
            try:
                f(x)[turn % 2].sum().backward()
            except fckpt.MutationError:
                errors += 1
                net.zero_grad()
            if turn == 1:
                net.zero_grad()
        grads.append([net.codes, *(p.grad for p in net.parameters())])
    assert errors == 1
    assert all(map(torch.equal, *grads))


def test_an_ordinary_differential_equation_of_two_hundred_steps() -> None:
    class Solved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16, 8))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(200):
                x = x + 0.01 * torch.tanh(x @ self.up) @ self.down
            return x.square().mean()

    def scenario(session: Session) -> None:
        net, x = Solved(), session.leaf(32, 8)
        session.watch(net=net)
        f = session.region(net)
        session.step(lambda: f(x))

    verdict = judge(scenario, budget=0.5)
    assert verdict.kept_by_plans, verdict


class LayerDrop(nn.Module):
    """Drops layers as bart, whisper and wav2vec2 do."""

    def __init__(self, rate: float, certain: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.rate, self.certain = rate, certain

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and self.certain == "never":
                if torch.rand([]) < self.rate:
                    continue
            elif self.training and self.certain == "always" and not torch.rand([]) >= self.rate:
                continue
            x = x + torch.tanh(layer(x)).sin()
        return x.square().mean()


@pytest.mark.parametrize(("rate", "certain"), [(0.0, "never"), (1.0, "always"), (0.0, "always"), (1.0, "never")])
def test_a_branch_whose_outcome_is_certain(rate: float, certain: str) -> None:
    """The number is drawn all the same: the generator ends where the plain function leaves it."""

    def scenario(session: Session) -> None:
        net, x = LayerDrop(rate, certain), session.leaf(96, 32)
        session.watch(net=net)
        f = session.region(net)
        session.step(lambda: f(x))

    verdict = judge(scenario, budget=0.9)
    assert verdict.outcome == "equal", verdict.error


SEED, ZERO = 34, 298484
"""A seed, and how many numbers are drawn before an exact 0.0."""


@pytest.mark.parametrize("form", [lambda: torch.rand(1) > 0.0, lambda: not torch.rand([]) <= 0])
def test_a_branch_whose_outcome_is_almost_certain(form: Callable[[], Any]) -> None:
    """As in peft's LoHa and LoKr."""
    net = nn.Linear(8, 8)
    plain = lambda x: torch.tanh(net(x)).sin().sum() if form() else x.sum()
    planned = fckpt.remat(plain, budget=1.0)
    found = []
    for fn in (planned, plain):
        torch.manual_seed(0)
        x = torch.ones(4, 8, requires_grad=True)
        found.append((*torch.autograd.grad(fn(x), x), torch.rand(1)))
    assert all(map(torch.equal, *found))
    torch.manual_seed(SEED)
    torch.rand(ZERO)
    with pytest.raises(RuntimeError, match="drew exactly 0"):
        planned(x)


def test_a_branch_whose_outcome_is_not_certain() -> None:
    def scenario(session: Session) -> None:
        net, x = LayerDrop(0.5, "never"), session.leaf(96, 32)
        session.watch(net=net)
        f = session.region(net)
        session.step(lambda: f(x))

    assert judge(scenario, budget=0.9).outcome == "TraceError"
    verdict = judge(scenario, budget=0.9, untraceable="remat")
    assert verdict.outcome == "equal" and verdict.warned


@pytest.mark.parametrize("lengths", ["numbers", "tensors"])
def test_ctc_loss(lengths: str) -> None:
    """PyTorch itself reads lengths that are tensors, and writes numbers into memory past every dispatch mode."""

    def scenario(session: Session) -> None:
        net, x = nn.Linear(32, 20), session.leaf(30, 4, 32)
        session.watch(net=net)
        targets = torch.arange(4 * 6).view(4, 6) % 19 + 1
        sizes = ((30,) * 4, (6,) * 4) if lengths == "numbers" else (torch.full((4,), 30), torch.full((4,), 6))
        f = session.region(lambda x: F.ctc_loss(net(x.sin().exp()).log_softmax(-1), targets, *sizes))
        session.step(lambda: f(x))

    assert judge(scenario, budget=0.9).outcome == "TraceError"
    verdict = judge(scenario, budget=0.9, untraceable="remat")
    assert verdict.outcome == "equal" and verdict.warned


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "of a transpose": lambda h: F.dropout(h.t(), 0.3).t(),
    "of channels last": lambda h: F.dropout(h.view(2, 8, 12, 16).to(memory_format=torch.channels_last), 0.3).flatten(),
    "of a slice": lambda h: F.dropout(h[::2], 0.3),
    "of an expanded tensor": lambda h: F.dropout(h[:1].expand(96, 32), 0.3),
    "in place": lambda h: F.dropout(h.t() * 2, 0.3, inplace=True),
    "alpha": lambda h: F.alpha_dropout(h.t(), 0.3),
    "of features": lambda h: F.dropout2d(h.view(1, 8, 12, 32), 0.3),
    "rrelu": lambda h: F.rrelu(h.t(), training=True),
    "bernoulli in place": lambda h: h * torch.empty_like(h.t()).bernoulli_(0.3).t(),
    "multinomial": lambda h: h * torch.multinomial(h.detach().softmax(-1), 32),
    "normal": lambda h: h + torch.normal(h.detach(), 1.0),
    "gumbel": lambda h: F.gumbel_softmax(h.t(), tau=0.7, hard=True),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_the_same_random_numbers_at_the_same_places(kind: str) -> None:
    """Class S5: strides decide which element gets which number."""

    def scenario(session: Session) -> None:
        w, x = session.leaf(32, 32), session.leaf(96, 32)
        f = session.region(lambda x: DRAWS[kind](torch.tanh(x @ w).sin()).sin().square().sum())
        session.step(lambda: f(x))

    verdict = judge(scenario, budget=0.9)
    assert verdict.outcome == "equal", verdict.error


class Trainer:
    def __init__(self) -> None:
        self.logged: dict[str, Any] = {}
        self.step = 0


class Lightning(nn.Module):
    """Holds a weak reference to its trainer, and logs within its step."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.net, self.trainer = nn.Sequential(nn.Linear(32, 32), nn.Tanh()), weakref.proxy(trainer)

    def forward(self, x: Tensor) -> Tensor:
        loss = self.net(x).sin().square().mean()
        self.trainer.logged["loss"] = loss.detach()
        self.trainer.step += 1
        return loss


def test_a_module_that_logs_through_a_weak_reference() -> None:
    def scenario(session: Session) -> None:
        trainer = Trainer()
        net, x = Lightning(trainer), session.leaf(96, 32)
        session.watch(net=net.net, trainer=trainer)
        f = session.region(net)
        session.step(lambda: f(x))

    judge(scenario, budget=0.9)


WRAPS: dict[str, Callable[[nn.Module], Any]] = {
    "forward wrapped": lambda m: setattr(m, "forward", functools.partial(m.forward)),
    "weight norm": lambda m: parametrizations.weight_norm(m[0]),
    "frozen": lambda m: m[0].requires_grad_(False),
    "double": lambda m: m.double().float(),
    "a new layer": lambda m: m.append(nn.Linear(32, 32)),
    "a layer less": lambda m: m.pop(0),
    "evaluation": lambda m: m.eval(),
    "tied": lambda m: setattr(m[2], "weight", m[0].weight),
    "parameter data": lambda m: m[0].weight.data.mul_(2),
    "a submodule that is another": lambda m: m.__setitem__(1, nn.GELU()),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("wrap", WRAPS)
def test_what_users_do_to_a_planned_module(wrap: str) -> None:
    """Of the planned module itself, between its calls."""

    def scenario(session: Session) -> None:
        net = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Dropout(0.1))
        x = session.leaf(96, 32)
        session.watch(net=net)
        f = session.region(net)
        session.step(lambda: f(x), times=2)
        WRAPS[wrap](f)
        session.step(lambda: f(x), times=3)

    verdict = judge(scenario, budget=0.95)
    assert verdict.outcome == "equal", verdict.error


def test_compiled_before() -> None:
    """Class A3: `model.compile()` does not take the budget's place without a word."""
    net, x = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)), torch.randn(96, 32)
    net.compile(backend="eager")
    try:
        f = fckpt.remat(net, budget=1.0, solver="greedy")
        f(x).sum().backward()
    except fckpt.FckptError as error:
        assert "compile" in str(error)
    else:
        assert fckpt.stats(f).plans == 1  # type: ignore[attr-defined]


def test_compiled_after() -> None:
    """Compiling the plain module leaves the region of the other one in force."""
    net, x = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)), torch.randn(96, 32)
    f = fckpt.remat(net, budget=1.0, solver="greedy")
    net.compile(backend="eager")
    f(x).sum().backward()
    assert fckpt.stats(f).plans == 1  # type: ignore[attr-defined]


# -- calls without gradients: torch chooses other kernels


ATTENTION: dict[str, Callable[[], nn.Module]] = {
    "MultiheadAttention": lambda: nn.MultiheadAttention(16, 2, batch_first=True),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
    "TransformerDecoderLayer": lambda: nn.TransformerDecoderLayer(16, 2, 32, batch_first=True),
    "TransformerEncoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2),
}


def attended(module: nn.Module, x: Tensor, **options: Any) -> Tensor:
    if isinstance(module, nn.MultiheadAttention):
        return module(x, x, x, need_weights=False, **options)[0]
    return module(x, x, **options) if isinstance(module, nn.TransformerDecoderLayer) else module(x, **options)


@pytest.mark.parametrize("as_python", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ATTENTION)
def test_fast_paths_of_attention(name: str, frozen: bool, as_python: bool) -> None:
    module, head = ATTENTION[name]().eval().requires_grad_(not frozen), torch.randn(16, 16, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        if as_python:

            class NotCaptured:
                pass

        return attended(module, x) @ head

    planned, x = fckpt.remat(loss, budget=1.0), torch.randn(4, 6, 16)
    for _ in range(2):
        assert torch.equal(planned(x), loss(x))
        with torch.no_grad():
            assert torch.equal(planned(x), loss(x))
    assert not (as_python and fckpt.stats(planned).captures)


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_that_is_trained_with_dropout(name: str) -> None:
    def scenario(session: Session) -> None:
        module, x = ATTENTION[name](), session.leaf(8, 24, 16)
        session.watch(module=module)
        f = session.region(lambda x: attended(module, x).square().mean())
        session.step(lambda: f(x))

    verdict = judge(scenario, budget=0.8)
    assert verdict.kept_by_plans, verdict


@pytest.mark.parametrize("checked", [True, False])
def test_an_encoder_in_evaluation_mode_with_padding(checked: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    encoder, x = nn.TransformerEncoder(layer, 2, mask_check=checked).eval(), torch.randn(4, 6, 16, requires_grad=True)
    mask = torch.zeros(4, 6, dtype=torch.bool)
    mask[0, -2:] = True
    loss = lambda x: encoder(x, src_key_padding_mask=mask)
    planned = fckpt.remat(loss, budget=1.0)
    assert torch.equal(planned(x), loss(x))
    encoder.requires_grad_(False)
    with pytest.raises(fckpt.TraceError, match=r"fast path|NestedTensor"):  # zeros where the input is padding
        fckpt.remat(loss, budget=1.0)(x.detach())
    setting: Any = encoder
    setting.enable_nested_tensor = setting.use_nested_tensor = False
    head = torch.randn(16, 16, requires_grad=True)
    assert torch.equal(fckpt.remat(lambda x: loss(x) @ head, budget=1.0)(x.detach()), loss(x.detach()) @ head)


@pytest.mark.parametrize("way", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("seed", range(4))
def test_products_of_transposed_batches_without_gradients(way: str, seed: int) -> None:
    torch.manual_seed(seed)
    linear, x = nn.Linear(16, 40), torch.randn(3, 17, 16).transpose(0, 1)
    planned = fckpt.remat(linear, budget=1.0)
    with getattr(torch, way)():
        assert torch.equal(planned(x), linear(x))
        assert torch.equal(fckpt.remat(lambda x: linear(x) @ linear.weight, budget=1.0)(x), linear(x) @ linear.weight)


@pytest.mark.parametrize("decorated", [False, True])
def test_grad_mode_switched_on_inside_a_call_without_gradients(decorated: bool) -> None:
    def inside(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return torch.tanh(x @ x)

    planned, x = (
        fckpt.remat(torch.enable_grad()(inside) if decorated else inside, budget=1.0),
        torch.randn(6, 6, requires_grad=True),
    )
    with torch.no_grad(), pytest.raises(fckpt.TraceError, match="switches grad mode on"):
        planned(x)
    assert torch.equal(planned(x), inside(x))


def test_a_result_of_a_new_leaf_that_requires_grad() -> None:
    def energy(x: Tensor) -> Tensor:
        return (x @ x).detach().requires_grad_().sin()

    with pytest.raises(fckpt.TraceError, match="leads to nothing that is passed to it"):
        fckpt.remat(energy, budget=1.0)(torch.randn(6, 6, requires_grad=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_grouped_matrix_products(dtype: torch.dtype) -> None:
    """Those of experts, at several sizes. Torch's function for fake tensors takes bfloat16 only."""

    def fn(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(x, weights, offs=ends).sin().square().sum()

    weights = torch.randn(2, 32, 16, dtype=dtype, requires_grad=True)
    planned = fckpt.remat(fn, budget=1.0)
    for tokens in (8, 12, 16, 24, 40, 64):
        ends = torch.tensor([tokens // 2, tokens], dtype=torch.int32)
        x = torch.randn(tokens, 32, dtype=dtype, requires_grad=True)
        wanted = torch.autograd.grad(fn(x, weights, ends), (x, weights))
        assert all(map(torch.equal, torch.autograd.grad(planned(x, weights, ends), (x, weights)), wanted))
    assert fckpt.stats(planned).fallbacks == {}
