"""`remat_blocks`: what it finds, that a step stays the same bit for bit, and what it refuses."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_equal
from torch import nn
from zoo import MASKS, TEXT, ZOO, make

import fckpt

CACHED = ["gpt2", "llama", "mistral", "qwen2", "mixtral", "t5", "bart", "whisper"]


def remat_blocks(model: nn.Module, **options: Any) -> fckpt.Blocks:
    """Without the warning about caches, which has tests of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fckpt.CacheWarning)
        return fckpt.remat_blocks(model, **options)


def pair(name: str, mask: str = "none", **options: Any) -> tuple[Any, Any, dict[str, Any]]:
    """A model without its cache, as its blocks must run, the same by default with regions, and a batch."""
    plain, batch = make(name, mask)
    model = copy.deepcopy(plain)
    remat_blocks(model, **options)
    for module in plain.modules():
        if getattr(getattr(module, "config", None), "use_cache", False):
            module.config.use_cache = False
    return plain, model, batch


def step(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """Forward and backward from a seed, and all that comes out of it."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(**batch)["loss"]
    loss.backward()
    return {
        "loss": loss.detach(),
        "gradients": {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
        "generator": torch.get_rng_state(),
    }


CASES = [(name, mask) for name in ZOO for mask in (MASKS if name in (*TEXT, "clip") else MASKS[:1])]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("name", "mask"), CASES)
def test_a_step_is_bitwise_that_of_the_plain_model(name: str, mask: str) -> None:
    plain, model, batch = pair(name, mask)
    expected = step(plain, batch)
    assert expected["gradients"]
    assert_equal(step(model, batch), expected)


@pytest.mark.parametrize("name", ZOO)
def test_what_is_found(name: str) -> None:
    model, _ = make(name)
    before = dict(model.named_parameters()), list(model.state_dict()), [n for n, _ in model.named_modules()]
    blocks = remat_blocks(model)
    assert repr(blocks) == ZOO[name][1]
    assert all("remat" in repr(model.get_submodule(path)) for path in blocks)
    assert all(p is before[0][n] for n, p in model.named_parameters())
    assert (list(model.state_dict()), [n for n, _ in model.named_modules()]) == before[1:]


@pytest.mark.parametrize("name", ZOO)
def test_blocks_run_again_in_backward(name: str) -> None:
    model, batch = make(name)
    runs = dict.fromkeys(remat_blocks(model), 0)
    for path in runs:
        inner = model.get_submodule(path)._fckpt_inner  # its hooks stay outside of the region; its children's do not
        child = next(m for m in inner.modules() if m is not inner and not isinstance(m, nn.ModuleList))

        def count(*_: Any, path: str = path) -> None:
            runs[path] += 1

        child.register_forward_pre_hook(count)
    loss = model(**batch)["loss"]
    forward = dict(runs)
    loss.backward()
    assert all(runs[path] == 2 * n > 0 for path, n in forward.items())


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "swin", "clip", "timm-vit", "timm-resnet"])
def test_a_step_takes_less_memory(name: str) -> None:
    plain, model, batch = pair(name)
    step(plain, batch), step(model, batch)
    plain.zero_grad(), model.zero_grad()

    def peak(model: nn.Module) -> int:
        return fckpt.measure_peak(lambda: model(**batch)["loss"].backward()).peak_bytes

    assert peak(model) < peak(plain)


# -- options -------------------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "options",
    [{"budget": 0.9}, {"policy": fckpt.policies.dots_saveable}, {"policy": fckpt.policies.nothing_saveable}],
    ids=["budget", "dots", "nothing"],
)
@pytest.mark.parametrize("name", ["vit", "timm-swin"])
def test_options_are_those_of_remat(name: str, options: dict[str, Any]) -> None:
    plain, model, batch = pair(name, **options)
    assert_equal(step(model, batch), step(plain, batch))
    assert_equal(step(model, batch), step(plain, batch))


def test_a_plan_serves_all_blocks() -> None:
    plain, batch = make("vit")
    seen: list[torch.Tensor] = []
    block = plain.get_submodule("vit.layers.0")
    hook = block.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().requires_grad_()))
    plain(**batch)
    hook.remove()
    model = copy.deepcopy(plain)
    remat_blocks(model, plan=fckpt.plan(block, seen[0], budget=0.8))
    assert_equal(step(model, batch), step(plain, batch))


def test_every_second_block() -> None:
    model, batch = make("bert")
    blocks = remat_blocks(model, every=2)
    assert repr(blocks) == "2 of 3 blocks: bert.encoder.layer.0-2 by 2 (BertLayer)"
    assert [hasattr(layer, "_fckpt_region") for layer in model.bert.encoder.layer] == [True, False, True]
    assert_equal(step(model, batch), step(make("bert")[0], batch))
    assert len(remat_blocks(make("t5")[0], every=3)) == 2  # of four of one class
    assert list(remat_blocks(make("bart")[0], every=2)) == ["model.encoder.layers.0", "model.decoder.layers.0"]


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "2"])
def test_every_must_be_a_positive_int(every: Any) -> None:
    with pytest.raises(fckpt.ArgumentValueError, match="every must be a positive int"):
        fckpt.remat_blocks(nn.Linear(2, 2), every=every)


# -- structure -----------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 8, out: int | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, out or width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.down(torch.relu(self.up(x))))


class Stage(nn.Module):
    """As Swin's: a row of blocks of a width, then a wider one."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.widen = nn.Linear(width, 2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.widen(x)


class Mixture(nn.Module):
    """A block with a list of experts, which are no blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(self.gate(x), -1)
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(x))


class Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.head = Block(), Block(), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down2(self.down1(x)))


class Shared(nn.Module):
    """One block in two places, as ALBERT's is used again and again."""

    def __init__(self) -> None:
        super().__init__()
        block = Block()
        self.blocks = nn.ModuleList([block, block, Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Named(nn.Module):
    """Blocks by name, and a list in which blocks of two kinds alternate."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"a": Block(), "b": Block()})
        self.pairs = nn.ModuleList(nn.ModuleList([Block(), nn.TransformerEncoderLayer(8, 2, 8)]) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks.values(), *(m for pair in self.pairs for m in pair)):
            x = block(x)
        return x


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in "abc"))


STRUCTURES: dict[str, tuple[Any, str]] = {
    "list": (lambda: nn.Sequential(*(Block() for _ in range(12))), "12 blocks: 0-11 (Block)"),
    "gap": (lambda: nn.Sequential(Block(), Block(), nn.Tanh(), Block(), Small()), "3 blocks: 0-1, 3 (Block)"),
    "stages": (
        lambda: nn.Sequential(Stage(8, 2), Stage(16, 1), Stage(32, 3)),
        "6 blocks: 0.blocks.0-1, 1.blocks.0, 2.blocks.0-2 (Block)",
    ),
    "rows": (
        lambda: nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(8, 4), Block(4))),
        "4 blocks: 0.0-1, 1.0-1 (Block)",
    ),
    "experts": (lambda: nn.Sequential(Mixture(), Mixture()), "2 blocks: 0-1 (Mixture)"),
    "small": (lambda: nn.Sequential(Small(), Small(), nn.Linear(8, 8)), "2 blocks: 0-1 (Small)"),
    "sequentials": (chain, "3 blocks: 1-3 (Sequential)"),
    "attributes": (Attributes, "2 blocks: down1-2 (Block)"),
    "shared": (Shared, "2 blocks: blocks.0-2 by 2 (Block)"),
    "named": (
        Named,
        "6 blocks: blocks.a, blocks.b, pairs.0.0, pairs.1.0 (Block); pairs.0.1, pairs.1.1 (TransformerEncoderLayer)",
    ),
    "mixed": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8), nn.TransformerEncoderLayer(8, 2, 8), Block()),
        "2 blocks: 0-1 (TransformerEncoderLayer)",
    ),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name: str) -> None:
    plain = STRUCTURES[name][0]()
    model = copy.deepcopy(plain)
    assert repr(remat_blocks(model)) == STRUCTURES[name][1]
    x = torch.randn(3, 8)

    def loss(net: nn.Module) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        net.zero_grad()
        net(x).square().sum().backward()
        return {n: p.grad for n, p in net.named_parameters() if p.grad is not None}

    assert_equal(loss(model), loss(plain))


class Alone(nn.Module):
    """One layer in a list of one, used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.layers[0](x)
        return x


def test_one_block_that_is_used_again_and_again() -> None:
    assert repr(remat_blocks(Alone())) == "1 block: layers.0 (Block)"


@pytest.mark.parametrize(
    ("blocks", "names"),
    [
        (Block, ["0", "1", "2.experts.0", "2.experts.1", "2.experts.2"]),
        ("Mixture", ["2"]),
        ([Mixture, "0"], ["0", "2"]),
        ("2.experts.*", ["2.experts.0", "2.experts.1", "2.experts.2"]),
        ("*", ["0", "1", "2"]),
        ("**.1", ["2.experts.1"]),
        (["0", "2.experts.1"], ["0", "2.experts.1"]),
        (lambda m: isinstance(m, Block) and m.up.in_features == 8, ["0", "1", *(f"2.experts.{i}" for i in range(3))]),
    ],
)
def test_blocks_that_are_named(blocks: Any, names: list[str]) -> None:
    model = nn.Sequential(Block(), Block(), Mixture())
    assert list(fckpt.remat_blocks(model, blocks=blocks)) == names


def test_blocks_that_are_modules_of_the_model() -> None:
    model = nn.Sequential(Stage(8, 2), Stage(16, 1))
    assert list(fckpt.remat_blocks(model, blocks=model[0].blocks)) == ["0.blocks.0", "0.blocks.1"]
    assert list(fckpt.remat_blocks(model, blocks=[model[1].blocks[0]])) == ["1.blocks.0"]


def test_regions_within_regions() -> None:
    plain = nn.Sequential(Mixture(), Mixture())
    model = copy.deepcopy(plain)
    assert len(fckpt.remat_blocks(model, blocks=[Mixture, Block])) == 8
    x = torch.randn(3, 8)
    for net in (plain, model):
        net(x).sum().backward()
    assert_equal([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


# -- refusals ------------------------------------------------------------------------------------------------


def test_nothing_repeats() -> None:
    with pytest.raises(fckpt.ArgumentValueError, match="no block repeats in it"):
        fckpt.remat_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    with pytest.raises(fckpt.ArgumentValueError, match="Modules with children: Block x3, Mixture, ModuleList"):
        fckpt.remat_blocks(nn.Sequential(Mixture()).append(nn.ReLU()), blocks="h.*")


@pytest.mark.parametrize("blocks", ["h.*", nn.LSTM, lambda module: False, nn.Linear(2, 2), []])
def test_nothing_matches(blocks: Any) -> None:
    model = nn.Sequential(Block(), Block())
    with pytest.raises(fckpt.ArgumentValueError, match="nothing in it matches blocks="):
        fckpt.remat_blocks(model, blocks=blocks)


def test_one_of_several_matches_nothing() -> None:
    with pytest.raises(fckpt.ArgumentValueError, match="nothing in this Sequential matches 'h' in `blocks`"):
        fckpt.remat_blocks(nn.Sequential(Block(), Block()), blocks=[Block, "h"])


@pytest.mark.parametrize("blocks", [3, int, [Block, 3], {"0": 1}])
def test_blocks_of_a_wrong_type(blocks: Any) -> None:
    with pytest.raises(fckpt.ArgumentTypeError, match="blocks takes a module class, a path or pattern"):
        fckpt.remat_blocks(nn.Sequential(Block(), Block()), blocks=blocks)


def test_the_model_itself_is_no_block() -> None:
    with pytest.raises(fckpt.ArgumentValueError, match=r"Use model = fckpt.remat\(model\)"):
        fckpt.remat_blocks(Block(), blocks=Block)


@pytest.mark.parametrize("model", [Block, lambda x: x, None])
def test_a_model_is_a_module(model: Any) -> None:
    with pytest.raises(fckpt.ArgumentTypeError, match="remat_blocks takes an nn"):
        fckpt.remat_blocks(model)


def test_twice_is_refused() -> None:
    model = nn.Sequential(Block(), Block())
    fckpt.remat_blocks(model)
    with pytest.raises(fckpt.ArgumentValueError, match=r"0 \(Block\) is already rematerialised"):
        fckpt.remat_blocks(model)


def test_a_refused_model_is_as_it_was() -> None:
    model = nn.Sequential(Block(), Block(), fckpt.remat(Block()))
    blocks = list(model)
    for wrong in (
        {"blocks": Block},
        {"solver": "auto", "blocks": "0", "budget": "many"},
        {"blocks": "0", "nonsense": 1},
    ):
        with pytest.raises((fckpt.FckptError, TypeError)):
            fckpt.remat_blocks(model, **wrong)
    assert all(a is b for a, b in zip(model, blocks, strict=True))


def test_layers_that_checkpoint_themselves_are_refused() -> None:
    model, _ = make("bert")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in transformers 5
        model.gradient_checkpointing_enable()
    with pytest.raises(fckpt.ArgumentValueError, match=r"model.gradient_checkpointing_disable\(\)"):
        fckpt.remat_blocks(model)
    for layer in model.bert.encoder.layer:
        layer.gradient_checkpointing = False
    assert len(fckpt.remat_blocks(model)) == 3


# -- caches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CACHED)
def test_a_cache_is_switched_off_with_a_word(name: str) -> None:
    model, batch = make(name)
    with pytest.warns(fckpt.CacheWarning, match="the configuration has use_cache=True") as caught:
        fckpt.remat_blocks(model)
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = model(**batch)
    assert out.get("past_key_values") is None
    assert model.config.use_cache is True


@pytest.mark.parametrize("name", ["bert", "roberta", "vit", "wav2vec2", "clip", "timm-vit"])
def test_no_word_where_there_is_no_cache(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fckpt.remat_blocks(make(name)[0])


def test_a_cache_that_is_off_needs_no_word() -> None:
    model, batch = make("gpt2")
    model.config.use_cache = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fckpt.remat_blocks(model)
        model(**batch).loss.backward()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_cache_that_is_switched_on_later(name: str) -> None:
    model, batch = make(name)
    model.config.use_cache = False
    fckpt.remat_blocks(model)
    model.config.use_cache = True
    with pytest.warns(fckpt.CacheWarning, match="the configuration has use_cache=True") as caught:
        assert model(**batch).get("past_key_values") is None
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**batch)


def test_a_cache_that_is_asked_for_while_training() -> None:
    plain, model, batch = pair("gpt2")
    with pytest.warns(fckpt.CacheWarning, match="this call passes use_cache=True"):
        actual = step(model, {**batch, "use_cache": True})
    assert_equal(actual, step(plain, batch))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_cache_that_is_passed_while_training(name: str) -> None:
    cache = pytest.importorskip("transformers").DynamicCache
    _, model, batch = pair(name)
    with pytest.raises(fckpt.ImpureFunctionError, match="this call passes past_key_values"):
        model(**batch, past_key_values=cache())
    with torch.no_grad():
        model(**batch, past_key_values=cache())
    model.eval()(**batch, past_key_values=cache()).loss.backward()  # appended to once, the recompute apart


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_checkpointing_that_is_switched_on_later_changes_no_bit(name: str) -> None:
    plain, model, batch = pair(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in transformers 5
        model.gradient_checkpointing_enable()
    assert_equal(step(model, batch), step(plain, batch))


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "t5", "bart"])
def test_generation_is_the_same(name: str) -> None:
    plain, batch = make(name)
    model = copy.deepcopy(plain)
    remat_blocks(model)
    if name in ("t5", "bart"):
        step(model, batch)  # nothing of a training step stays
    prompt = batch["input_ids"][:, :4]
    calls = [m.eval().generate(prompt, max_new_tokens=6, do_sample=False, min_new_tokens=6) for m in (plain, model)]
    assert torch.equal(*calls)
    with torch.no_grad():
        outs = [m(prompt, **({"decoder_input_ids": prompt} if name in ("t5", "bart") else {})) for m in (plain, model)]
    assert torch.equal(outs[0].logits, outs[1].logits)
    assert outs[1].past_key_values is not None


# -- saving and copying --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_saving_and_loading(name: str, tmp_path: Path) -> None:
    plain, model, batch = pair(name)
    model.config.use_cache = plain.config.use_cache
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    model.save_pretrained(tmp_path / "model")
    loaded = type(plain).from_pretrained(tmp_path / "model").train()
    if hasattr(model, "loss_type"):
        loaded.loss_type = model.loss_type
    remat_blocks(loaded)
    assert_equal(step(loaded, batch), step(plain, batch))
    fresh = copy.deepcopy(plain)
    with torch.no_grad():
        for p in fresh.parameters():
            p.zero_()
    fresh.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert_equal(step(fresh, batch), step(model, batch))


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "timm-resnet"])
def test_copies_are_rematerialised_too(name: str) -> None:
    plain, model, batch = pair(name)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        regions = [[n for n, m in of.named_modules() if hasattr(m, "_fckpt_region")] for of in (model, copied)]
        assert regions[0] and regions[0] == regions[1]
        assert all(p is not q for p, q in zip(copied.parameters(), model.parameters(), strict=True))
        assert_equal(step(copied, batch), step(copy.deepcopy(plain), batch))


def test_hooks_of_blocks_fire_once_a_call() -> None:
    _, model, batch = pair("bert")
    calls: list[str] = []
    for i, layer in enumerate(model.bert.encoder.layer):
        layer.register_forward_hook(lambda *_, i=i: calls.append(f"forward {i}"))
        layer.register_full_backward_hook(lambda *_, i=i: calls.append(f"backward {i}"))
    model(**batch).loss.backward()
    assert calls == [*(f"forward {i}" for i in range(3)), *(f"backward {i}" for i in (2, 1, 0))]


def test_the_result_is_a_sequence_of_paths() -> None:
    model = nn.Sequential(Block(), Block(), Block())
    blocks = fckpt.remat_blocks(model)
    assert (len(blocks), list(blocks), blocks[-1], "1" in blocks, blocks.found) == (3, ["0", "1", "2"], "2", True, 3)
    assert blocks.classes == ("Block",) * 3
    assert blocks == ["0", "1", "2"] and hash(blocks) == hash(("0", "1", "2"))
