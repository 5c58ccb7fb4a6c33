"""Hugging Face models under a budget, called as users call them: masks, dropout, labels, default configurations."""

from __future__ import annotations

import copy
import functools
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision_shim  # noqa: F401  before transformers
import zoo
from cases import OLD
from judge import Session, Verdict, judge
from torch import nn

import fckpt

transformers: Any = pytest.importorskip("transformers")

SLOW = os.environ.get("FCKPT_PROFILE") == "slow"
BATCH, TOKENS, WORDS = 4, 32, 99
Batch = dict[str, Any]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def encoder(name: str, **options: Any) -> Callable[[], tuple[nn.Module, Batch]]:
    """A classifier of texts."""

    def make() -> tuple[nn.Module, Batch]:
        config = getattr(transformers, f"{name}Config")(
            vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            max_position_embeddings=64, **options,
        )  # fmt: skip
        model = getattr(transformers, f"{name}ForSequenceClassification")(config)
        return model, {"input_ids": torch.randint(2, WORDS, (BATCH, TOKENS)), "labels": torch.arange(BATCH) % 2}

    return make


def distilbert() -> tuple[nn.Module, Batch]:
    config = transformers.DistilBertConfig(
        vocab_size=WORDS, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=64
    )
    batch = {"input_ids": torch.randint(2, WORDS, (BATCH, TOKENS)), "labels": torch.arange(BATCH) % 2}
    return transformers.DistilBertForSequenceClassification(config), batch


def words() -> Batch:
    tokens = torch.randint(2, WORDS, (BATCH, TOKENS))
    return {"input_ids": tokens, "labels": tokens}


def gpt2() -> tuple[nn.Module, Batch]:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config), words()


def decoder(name: str, **options: Any) -> Callable[[], tuple[nn.Module, Batch]]:
    """A causal language model."""

    def make() -> tuple[nn.Module, Batch]:
        config = getattr(transformers, f"{name}Config")(
            vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=64, max_position_embeddings=64, attention_dropout=0.1, pad_token_id=0, bos_token_id=0,
            eos_token_id=1, **options,
        )  # fmt: skip
        return getattr(transformers, f"{name}ForCausalLM")(config), words()

    return make


def t5() -> tuple[nn.Module, Batch]:
    # The cache copies the configuration, and torch 2.11 does not capture `copy.deepcopy`.
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0,
        use_cache=not OLD,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), words()


def bart() -> tuple[nn.Module, Batch]:
    config = transformers.BartConfig(
        vocab_size=WORDS, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=0, eos_token_id=1, decoder_start_token_id=0, forced_eos_token_id=None,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config), words()


def vit() -> tuple[nn.Module, Batch]:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=4,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, num_labels=3,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.arange(BATCH) % 3}
    return transformers.ViTForImageClassification(config), batch


def swin() -> tuple[nn.Module, Batch]:
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=3,
        drop_path_rate=0.2,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.arange(BATCH) % 3}
    return transformers.SwinForImageClassification(config), batch


def clip() -> tuple[nn.Module, Batch]:
    shared = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    text = {**shared, "vocab_size": WORDS, "max_position_embeddings": 64, "eos_token_id": 1, "bos_token_id": 0}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**shared, "image_size": 32, "patch_size": 4}, projection_dim=16
    )
    tokens = torch.randint(2, WORDS, (BATCH, TOKENS))
    tokens[:, -1] = 1
    batch = {"input_ids": tokens, "pixel_values": torch.randn(BATCH, 3, 32, 32), "return_loss": True}
    return transformers.CLIPModel(config), batch


TEXTS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "bert": encoder("Bert"),
    "roberta": encoder("Roberta", pad_token_id=1),
    "distilbert": distilbert,
    "gpt2": gpt2,
    "llama": decoder("Llama"),
    "mistral": decoder("Mistral"),
    "qwen2": decoder("Qwen2"),
    "t5": t5,
    "bart": bart,
}
PICTURES: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {"vit": vit, "swin": swin, "clip": clip}


def of_the_zoo(name: str) -> tuple[nn.Module, Batch]:
    """A model with a batch that is large enough for its activations to outweigh its gradients."""
    model, batch = zoo.make(name)
    return model, {key: value.repeat(8, *[1] * (value.dim() - 1)) for key, value in batch.items()}


OTHERS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    name: functools.partial(of_the_zoo, name) for name in ("whisper", "timm-vit", "timm-convnext")
}
MODELS = {**TEXTS, **PICTURES, **OTHERS}
MASKED = [(name, mask) for name in (*TEXTS, "clip") for mask in ("none", "ones", "padding")]


def masked(batch: Batch, mask: str) -> Batch:
    """Adds an attention mask to a batch."""
    if mask == "none":
        return batch
    ones = torch.ones(BATCH, TOKENS, dtype=torch.int64)
    if mask == "padding":
        ones[1, TOKENS // 2 :] = 0
        ones[2, TOKENS - 3 :] = 0
    return {**batch, "attention_mask": ones}


def without_cache(out: Any) -> Any:
    """A result without the keys and values for generation, which a plan may leave out in training."""
    if isinstance(out, torch.Tensor):
        return out
    return {"class": type(out).__name__, **{k: v for k, v in out.items() if k != "past_key_values"}}


def loss_of(model: nn.Module) -> Callable[..., torch.Tensor]:
    """The function of a batch that returns only the loss."""
    if isinstance(model, zoo.WithLoss):
        return lambda **batch: model(**batch)["loss"]
    return lambda **batch: model(**batch).loss


def trained(
    name: str,
    mask: str,
    budget: float,
    pick: Any = lambda out: out["loss"],
    wrap: Any = None,
    peak: bool = True,
    fraction: bool = True,
) -> Verdict:
    """A few steps of a model in training, its dropout on."""

    def scenario(session: Session) -> None:
        torch.manual_seed(0)
        model, batch = MODELS[name]()
        batch = masked(batch, mask)
        model.train()
        session.watch(model=model)
        f = session.region(model if wrap is None else wrap(model))
        session.step(lambda: without_cache(f(**batch)), pick, peak=peak)

    return judge(scenario, budget=budget, fraction=fraction)


@pytest.mark.sweep(8)
@pytest.mark.parametrize(("name", "mask"), [case for case in MASKED if case[0] != "clip"])
def test_a_model_of_texts(name: str, mask: str) -> None:
    verdict = trained(name, mask, 0.8)
    assert verdict.kept, (verdict.error, verdict.over)


@pytest.mark.sweep(5)
@pytest.mark.parametrize(("name", "mask"), [("vit", "none"), ("swin", "none"), *MASKED[-3:]])
def test_a_model_of_pictures(name: str, mask: str) -> None:
    verdict = trained(name, mask, 0.8)
    assert verdict.kept, (verdict.error, verdict.over)


def test_a_picture_at_a_time() -> None:
    """A batch of one makes tokens an image whose memory format is ambiguous."""
    torch.manual_seed(0)
    sizes = {"hidden_sizes": [8] * 4, "decoder_hidden_size": 8, "depths": [1] * 4}
    model = transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig(**sizes, num_labels=3))
    region = fckpt.remat(lambda **batch: model(**batch).loss, budget=1.0)
    for size in (1, 2, 1):
        batch = {"pixel_values": torch.randn(size, 3, 32, 32), "labels": torch.randint(3, (size, 32, 32))}
        found = []
        for call in (lambda **batch: model(**batch).loss, region):
            torch.manual_seed(1)
            loss = call(**batch)
            loss.backward()
            found.append([loss.detach(), *[p.grad for p in model.parameters() if p.grad is not None], torch.rand(1)])
            model.zero_grad()
        assert len(found[0]) == len(found[1]) and all(map(torch.equal, *found))


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "vit"] if SLOW else ["bert"])
def test_the_least_budget(name: str) -> None:
    """Nothing fits a hundredth; what would is said, and does."""
    verdict = trained(name, "none", 0.01)
    assert verdict.kept and isinstance(verdict.budget, int), (verdict.error, verdict.over)


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("name", "mask"), [*MASKED, ("vit", "none"), ("swin", "none"), *((name, "none") for name in OTHERS)]
)
def test_a_function_that_returns_the_loss(name: str, mask: str) -> None:
    verdict = trained(name, mask, 0.8, pick=lambda out: out, wrap=loss_of, fraction=False)
    assert verdict.kept_by_plans, verdict


@pytest.mark.filterwarnings("ignore:.*only as compiled code:fckpt.GradientWarning")
@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", [*TEXTS, *PICTURES])
def test_the_plain_peak_that_a_plan_predicts_is_neither_higher_nor_lower_than_the_measured_one(name: str) -> None:
    net, batch = MODELS[name]()
    loss, batch = loss_of(net.train()), batch if name in PICTURES else masked(batch, "padding")
    loss(**batch).backward()
    net.zero_grad()
    measured = fckpt.measure_peak(lambda: loss(**batch).backward()).peak_bytes
    assert fckpt.plan(loss, **batch).baseline_peak_bytes == pytest.approx(measured, rel=0.01)


def saved(session: Session, f: Any, batch: Batch, folder: Path) -> Any:
    f.save_pretrained(folder)
    return f


def loaded(session: Session, f: Any, batch: Batch, folder: Path) -> Any:
    f.save_pretrained(folder)
    return session.region(type(f).from_pretrained(folder))


def generated(session: Session, f: Any, batch: Batch, folder: Path) -> Any:
    prompt = batch["input_ids"][:, :4]
    session.watch(tokens=f.eval().generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False))
    return f


def copied(session: Session, f: Any, batch: Batch, folder: Path) -> Any:
    session.regions.append(copy.deepcopy(f))
    return session.regions[-1]


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("use", [saved, loaded, generated, copied])
def test_a_planned_model_keeps_its_budget_after_other_uses(use: Callable[..., Any], name: str, tmp_path: Path) -> None:
    def scenario(session: Session) -> None:
        torch.manual_seed(0)
        model, batch = TEXTS[name]()
        model.config.use_cache = False
        f = session.region(model.train())
        session.step(lambda: f(**batch), lambda out: out["loss"])
        f.zero_grad()
        again = use(session, f, batch, tmp_path).train()
        session.watch(model=f, again=again)
        session.step(lambda: again(**batch), lambda out: out["loss"])

    verdict = judge(scenario, budget=0.9)
    assert verdict.kept_by_plans, verdict
    assert all(s.captures == 1 for s in verdict.stats)


@pytest.mark.parametrize("name", ["gpt2"])
def test_a_loss_of_the_logits_beside(name: str) -> None:
    pick = lambda out: out["loss"] + out["logits"].square().mean()
    verdict = trained(name, "padding", 0.8, pick=pick, peak=False)  # the square is memory outside of the region
    assert verdict.outcome == "equal", verdict.error


@pytest.mark.parametrize("budget", [0.9, None])
@pytest.mark.parametrize("name", [*TEXTS, *PICTURES] if SLOW else ["bert", "t5", "vit"])
def test_hidden_states_from_the_first_call(name: str, budget: float | None) -> None:
    """The model registers hooks in its first such call, under a lock."""

    def scenario(session: Session) -> None:
        torch.manual_seed(0)
        model, batch = MODELS[name]()
        batch = batch if name in PICTURES else masked(batch, "ones")
        session.watch(model=model)
        f = session.region(model)
        call = lambda: without_cache(f(**batch, output_hidden_states=True))
        session.step(call, lambda out: out["loss"])
        hooks = [len(module._forward_hooks) for module in model.modules()]
        assert hooks and max(hooks) == 1

    verdict = judge(scenario, budget=budget, fraction=True) if budget else judge(scenario, budget=None)
    assert verdict.kept, (verdict.error, verdict.over)


@pytest.mark.parametrize("name", TEXTS if SLOW else ["llama"])
def test_masks_and_sizes_in_turn(name: str) -> None:
    """One model meets batches with and without padding, of two lengths, and is evaluated between."""

    def scenario(session: Session) -> None:
        torch.manual_seed(0)
        model, batch = TEXTS[name]()
        session.watch(model=model)
        model.train()
        f = session.region(model)
        shorter = {k: v[:, :20].contiguous() if v.dim() == 2 else v for k, v in batch.items()}
        pick = lambda out: out["loss"]
        run = lambda batch: without_cache(f(**batch))
        for mask in ("none", "padding", "none"):
            session.step(lambda: run(masked(batch, mask)), pick, times=2, peak=False)
        session.step(lambda: run(shorter), pick, times=2, peak=False)
        f.eval()
        with torch.no_grad():
            f(**batch)
        f.train()
        session.step(lambda: run(masked(batch, "padding")), pick, times=1, peak=False)

    verdict = judge(scenario, budget=0.9)
    assert verdict.outcome == "equal", verdict.error


class Records(logging.Handler):
    """Keeps what a logger prints."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record)


@pytest.mark.filterwarnings("ignore:.*only as compiled code:fckpt.GradientWarning")
def test_no_stacks_of_errors_are_printed_while_a_mixture_of_experts_is_captured() -> None:
    """Transformers tries a product of groups that PyTorch has in bf16 only, and takes another one where that fails."""
    logger, records = logging.getLogger("torch._subclasses.fake_tensor"), Records()
    logger.addHandler(records)
    net, batch = zoo.make("mixtral")
    try:
        fckpt.remat(lambda **b: net(**b).loss, budget=0.9)(**batch).backward()
    finally:
        logger.removeHandler(records)
    assert not records.kept and not logger.filters


@pytest.mark.filterwarnings("ignore:.*only as compiled code:fckpt.GradientWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plain_peak_of_a_mixture_of_experts_is_predicted(dtype: torch.dtype) -> None:
    """In float32 its products are operations of transformers, in bfloat16 one of PyTorch: both are measured."""
    net, batch = zoo.make("mixtral")
    net = net.to(dtype)

    def loss(parameters: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(net, dict(parameters), (), dict(batch)).loss

    parameters = dict(net.named_parameters())
    plan = fckpt.plan(loss, parameters, batch, budget=0.95)
    for _ in range(2):
        net.zero_grad()
        peak = fckpt.measure_peak(lambda: loss(parameters, batch).backward()).peak_bytes
    assert plan.baseline_peak_bytes == pytest.approx(peak, rel=0.001)


@pytest.mark.filterwarnings("ignore:.*only as compiled code:fckpt.GradientWarning")
def test_a_mixture_of_experts_keeps_its_budget() -> None:
    def scenario(session: Session) -> None:
        net, batch = zoo.make("mixtral")
        del net.model.layers[1:]
        session.watch(net=net)
        f = session.region(loss_of(net))
        session.step(lambda: f(**batch))

    verdict = judge(scenario, budget=0.9)
    assert verdict.kept_by_plans, verdict


def mixtral() -> tuple[Any, Batch]:
    """A model that loops over its experts, but only over experts to which a token was sent."""
    net, batch = zoo.make("mixtral")
    net.set_experts_implementation("eager")
    del net.model.layers[1:]
    return net, batch


def ctc() -> tuple[Any, Batch]:
    """Looks at the largest label."""
    net, batch = zoo.make("wav2vec2")
    net.config.layerdrop, net.config.num_hidden_layers = 0.0, 1
    batch["labels"] = torch.randint(1, zoo.VOCABULARY, (2, 5))
    return transformers.Wav2Vec2ForCTC(net.config).train(), batch


UNTRACEABLE: dict[str, tuple[Callable[[], tuple[Any, Batch]], str]] = {
    "experts in a loop": (mixtral, "modeling_mixtral"),
    "the loss of wav2vec2": (ctc, "modeling_wav2vec2"),
    "layers dropped at random": (functools.partial(zoo.make, "wav2vec2"), "modeling_wav2vec2"),
}


def untraceable(kind: str, **options: Any) -> Verdict:
    def scenario(session: Session) -> None:
        torch.manual_seed(0)
        net, batch = UNTRACEABLE[kind][0]()
        session.watch(net=net)
        f = session.region(loss_of(net))
        session.step(lambda: f(**batch))

    return judge(scenario, budget=0.9, **options)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", UNTRACEABLE)
def test_a_model_that_looks_at_data_is_refused_with_the_line(kind: str) -> None:
    error = untraceable(kind).error
    assert isinstance(error, fckpt.TraceError)
    assert re.search(rf"{UNTRACEABLE[kind][1]}\.py:\d+, in forward", str(error)), error


@pytest.mark.sweep(3, 1)
@pytest.mark.parametrize("kind", UNTRACEABLE)
def test_a_model_that_looks_at_data_is_rematerialised_with_a_warning(kind: str) -> None:
    verdict = untraceable(kind, untraceable="remat")
    assert verdict.outcome == "equal", verdict.error
    assert any("cannot be traced" in text for text in verdict.warned)
