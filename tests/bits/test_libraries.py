"""Rematerialisation under Lightning, Accelerate, peft and diffusers, and what those libraries do to functions."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision_shim  # noqa: F401  before all of these libraries
from helpers import assert_equal
from judge import Session, judge
from torch import nn
from zoo import WithLoss, make

import fckpt

pytestmark = pytest.mark.filterwarnings("ignore")  # what libraries say of each other

X, Y = torch.randn(256, 8, generator=torch.Generator().manual_seed(3)), torch.arange(256) % 2


def network() -> nn.Sequential:
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32))
    return nn.Sequential(nn.Linear(8, 32), *(block() for _ in range(4)), nn.Linear(32, 2))


# -- what Lightning's modules hold ---------------------------------------------------------------------------


class Holder(nn.Module):
    """Holds what holds it, as Lightning's modules and trainers do, by a proxy."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.trainer = Trainer(self)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean() * self.trainer.scale


class Trainer:
    def __init__(self, module: nn.Module) -> None:
        self.module, self.scale = weakref.proxy(module), 2.0
        self.itself = weakref.proxy(self)


@pytest.mark.parametrize("options", [{}, {"budget": 0.9}], ids=["plain", "budget"])
@pytest.mark.parametrize("through", ["method", "proxy", "dead"])
def test_functions_that_reach_weak_proxies(options: dict[str, Any], through: str) -> None:
    holder = Holder(network().eval())
    proxy = weakref.proxy(holder)
    if through == "dead":
        proxy = weakref.proxy(Trainer(holder))
    kept = [proxy]

    def fn(x: torch.Tensor) -> torch.Tensor:
        return kept[0].loss(x) if through == "proxy" else holder.loss(x) + 0 * len(kept)

    plain = holder.loss if through == "method" else fn
    assert_equal(gradients(fckpt.remat(plain, **options), holder), gradients(plain, holder))


class Child(nn.Module):
    """A part of a module that reads its parent's counter by a proxy, as a module of Lightning reads its trainer."""

    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.net = network().eval()
        object.__setattr__(self, "parent", weakref.proxy(parent))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).tanh() * self.parent.count


class Parent(nn.Module):
    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.count, self.counts = 2.0, counts
        self.child = Child(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.count += 1
        return self.child(x).sin().square().mean()


@pytest.mark.parametrize("counts", [True, False])
def test_recomputes_read_what_changes_behind_a_proxy(counts: bool) -> None:
    plain, held = Parent(counts), Parent(counts)
    held.load_state_dict(plain.state_dict())
    run = fckpt.remat(lambda x: held(x))
    for _ in range(2):
        expected = gradients(plain, plain)
        assert_equal(gradients(run, held), expected)
    assert held.count == plain.count


def gradients(fn: Any, module: nn.Module) -> list[torch.Tensor | None]:
    module.zero_grad()
    torch.manual_seed(1)
    fn(X).backward()
    return [p.grad for p in module.parameters()]


def test_a_tensor_that_is_copied_by_its_storage_cannot_be_planned() -> None:
    """As a metric does that is logged within a step."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.square().sum() + copy.deepcopy(torch.tensor(1.0))

    with pytest.raises(fckpt.TraceError, match=r"test_libraries\.py:\d+ \(fn\): the function copies .*deepcopy"):
        fckpt.plan(fn, X.clone().requires_grad_(), budget=0.9)


def test_logging_within_a_budget_is_refused() -> None:
    lightning = pytest.importorskip("lightning")

    class Logs(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            self.training_step = fckpt.remat(self.training_step, budget=0.9)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = lightning.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=256)
    with pytest.raises(fckpt.TraceError):
        trainer.fit(Logs(), loader)


@pytest.mark.parametrize("ending", ["mean", "cross entropy"])  # a recompute ends before the first, and after the second
def test_a_step_within_a_region_logs_once(ending: str) -> None:
    lightning = pytest.importorskip("lightning")

    class Logs(lightning.LightningModule):
        def __init__(self, region: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = network()
            if region:
                self.training_step = fckpt.remat(self.training_step)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            out = self.net(batch[0])
            loss = out.square().mean() if ending == "mean" else F.cross_entropy(out, batch[1])
            self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            self.log("seen", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum")
            self.log("largest", out.detach().max(), on_step=False, on_epoch=True, reduce_fx="max")
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    def train(region: bool) -> tuple[list[str], list[torch.Tensor]]:
        model = Logs(region)
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", enable_model_summary=False, **options)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=100)
        trainer.fit(model, loader)
        logged = trainer.callback_metrics | trainer.logged_metrics
        return list(logged), [*logged.values(), *model.net.parameters()]

    expected, actual = train(False), train(True)
    assert actual[0] == expected[0]
    assert_equal(actual[1], expected[1])


# -- Accelerate ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("how", ["blocks before", "blocks after", "loss"])
def test_accelerate(how: str, precision: str | None) -> None:
    accelerate = pytest.importorskip("accelerate")

    def train(how: str) -> dict[str, torch.Tensor]:
        accelerate.state.AcceleratorState._reset_state(True)
        model = network()
        if how == "blocks before":
            fckpt.remat_blocks(model)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        if how == "blocks after":
            fckpt.remat_blocks(model)
        loss = lambda x, y: F.cross_entropy(model(x), y)
        if how == "loss":
            loss = fckpt.remat(loss, budget=0.9)
        torch.manual_seed(1)
        for _ in range(2):
            accelerator.backward(loss(X, Y))
            optimizer.step()
            optimizer.zero_grad()
        return {k: v.clone() for k, v in accelerator.unwrap_model(model).state_dict().items()}

    assert_equal(train(how), train("plain"))


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_planned_model_keeps_its_budget_under_accelerate(when: str, precision: str | None) -> None:
    accelerate = pytest.importorskip("accelerate")

    def scenario(session: Session) -> None:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        model: nn.Module = WithLoss(network())
        if when == "before":
            model = session.region(model)
        model = accelerator.prepare(model)
        if when == "after":
            model = session.region(model)
        session.watch(model=model)
        session.step(lambda: model(images=X, labels=Y)["loss"])

    verdict = judge(scenario, budget=0.8)
    assert verdict.kept_by_plans, verdict


# -- transformers' Trainer -----------------------------------------------------------------------------------


def test_a_trainer_with_the_loss_within_a_budget(tmp_path: Path) -> None:
    """It saves, evaluates and changes its learning rate between the steps."""
    transformers = pytest.importorskip("transformers")
    model, _ = make("bert")
    del model.bert.encoder.layer[1:]
    data = [{"input_ids": torch.randint(3, 99, (12,)), "labels": i % 2} for i in range(32)]
    batch = {"input_ids": torch.stack([d["input_ids"] for d in data[:8]]), "labels": torch.arange(8) % 2}
    plain = lambda **inputs: model(**inputs).loss
    first = copy.deepcopy(model.state_dict())
    whole = peak(plain, batch, model)
    budget = int(0.7 * whole)
    loss = fckpt.remat(plain, budget=budget)
    counts: list[tuple[bool, int, int]] = []

    class BudgetTrainer(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            value = loss(**inputs)
            stats = fckpt.stats(loss)
            counts.append((model.training, stats.captures, stats.plans))
            return (value, {}) if return_outputs else value

    def train(kind: Any) -> list[torch.Tensor]:
        model.load_state_dict(first)
        folder = tmp_path / kind.__name__
        arguments = transformers.TrainingArguments(
            folder, use_cpu=True, max_steps=4, per_device_train_batch_size=8, per_device_eval_batch_size=8,
            learning_rate=0.01, lr_scheduler_type="cosine", save_strategy="steps", save_steps=2, eval_strategy="steps",
            eval_steps=2, prediction_loss_only=True, report_to=[], disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        kind(model=model, args=arguments, train_dataset=data, eval_dataset=data[:16]).train()
        assert (folder / "checkpoint-2").exists()
        return [p.detach().clone() for p in model.parameters()]

    expected = train(transformers.Trainer)
    assert_equal(train(BudgetTrainer), expected)
    assert counts[0] == counts[1] == (True, 1, 1)
    assert counts[2:4] == [(False, 2, 2)] * 2
    assert counts[4:] == [(True, 2, 2)] * 2 + [(False, 2, 2)] * 2
    assert fckpt.stats(loss).fallbacks == {}
    assert peak(loss, batch, model.train()) <= budget < whole


def peak(loss: Any, batch: dict[str, torch.Tensor], model: nn.Module) -> int:
    loss(**batch).backward()
    model.zero_grad()
    found = fckpt.measure_peak(lambda: loss(**batch).backward()).peak_bytes
    model.zero_grad()
    return found


# -- peft ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_that_freeze_and_unfreeze(name: str, when: str) -> None:
    peft = pytest.importorskip("peft")
    targets = ["query", "value"] if name == "bert" else ["q_proj", "v_proj"]

    def train(when: str) -> list[dict[str, torch.Tensor]]:
        model, batch = make(name)
        model.config.use_cache = False
        if when == "before":
            fckpt.remat_blocks(model)
        config = peft.LoraConfig(r=2, target_modules=targets, lora_dropout=0.1, init_lora_weights=False)
        torch.manual_seed(2)
        adapted = peft.get_peft_model(model, config)
        if when == "after":
            assert len(fckpt.remat_blocks(adapted)) == 3
        found = []
        for unfrozen in ("lora", "orm", ""):
            for path, p in adapted.named_parameters():
                p.requires_grad_(unfrozen in path)
            adapted.zero_grad()
            torch.manual_seed(1)
            adapted(**batch).loss.backward()
            found.append({n: p.grad.clone() for n, p in adapted.named_parameters() if p.grad is not None})
        return found

    expected = train("never")
    assert 0 < len(expected[0]) < len(expected[2])
    assert_equal(train(when), expected)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_budget_is_kept_while_weights_freeze_and_unfreeze(name: str) -> None:
    peft = pytest.importorskip("peft")
    targets = ["query", "value"] if name == "bert" else ["q_proj", "v_proj"]

    def scenario(session: Session) -> None:
        model, batch = make(name)
        model.config.use_cache = False
        del (model.bert.encoder.layer if name == "bert" else model.model.layers)[1:]
        config = peft.LoraConfig(r=2, target_modules=targets, lora_dropout=0.1, init_lora_weights=False)
        adapted = peft.get_peft_model(model, config)
        session.watch(adapted=adapted)
        f = session.region(lambda **batch: adapted(**batch).loss)
        for unfrozen in ("lora", "", "lora"):
            for path, p in adapted.named_parameters():
                p.requires_grad_(unfrozen in path)
            session.step(lambda: f(**batch))

    verdict = judge(scenario, budget=0.9, fraction=True)
    assert verdict.kept and verdict.budget == 0.9 and not verdict.unmeasured, verdict
    assert not verdict.stats[0].fallbacks


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["dora", "adalora", "ia3"])
def test_adapters_within_a_budget(name: str, masked: bool) -> None:
    peft = pytest.importorskip("peft")
    made = {
        "dora": lambda: peft.LoraConfig(r=2, target_modules=["query"], use_dora=True),
        "adalora": lambda: peft.AdaLoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS", total_step=10),
        "ia3": lambda: peft.IA3Config(target_modules=["query", "output.dense"], feedforward_modules=["output.dense"]),
    }
    model, batch = make("bert")
    batch.pop("attention_mask", None)
    if masked:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    adapted = peft.get_peft_model(model, made[name]())
    weights = [p for p in adapted.parameters() if p.requires_grad]
    loss = lambda **batch: adapted(**batch).loss
    planned = fckpt.remat(loss, budget=0.95)
    found = []
    for fn in (loss, planned):
        torch.manual_seed(1)
        found.append(torch.autograd.grad(fn(**batch), weights))
    assert_equal(*found)
    assert fckpt.stats(planned).captures == 1


# -- diffusers -----------------------------------------------------------------------------------------------


def test_a_diffusion_model() -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    plain = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8, 16), layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8, attention_head_dim=4, norm_num_groups=4, dropout=0.1,
    ).train()  # fmt: skip
    args = torch.randn(2, 4, 8, 8), torch.tensor([3, 7]), torch.randn(2, 3, 8)
    model = copy.deepcopy(plain)
    blocks = fckpt.remat_blocks(model)
    assert set(blocks.classes) == {"BasicTransformerBlock", "ResnetBlock2D"}
    within = fckpt.remat(lambda *args: plain(*args).sample.square().mean(), budget=0.8)

    def gradient(fn: Any, net: nn.Module) -> dict[str, torch.Tensor]:
        net.zero_grad()
        torch.manual_seed(1)
        fn(*args).backward()
        return {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}

    loss = lambda net: lambda *args: net(*args).sample.square().mean()
    expected = gradient(loss(plain), plain)
    assert_equal(gradient(loss(model), model), expected)
    assert_equal(gradient(within, plain), expected)

    def peak(fn: Any, net: nn.Module) -> int:
        net.zero_grad()
        return fckpt.measure_peak(lambda: fn(*args).backward()).peak_bytes

    whole = peak(loss(plain), plain)
    assert peak(loss(model), model) < 0.7 * whole
    assert peak(within, plain) <= 0.81 * whole


def test_what_a_recompute_compares_around_a_model_of_transformers_is_little() -> None:
    """Each place is compared at each call. Generation, saving and loading refer to far more than a forward reads."""
    from fckpt._call.conditions import Observation
    from fckpt._call.snapshots import Snapshot

    model, batch = make("llama", "none")
    fckpt.remat(lambda **b: model(**b).loss)(**batch).backward()  # what the first call imports
    observation = Observation([lambda **b: model(**b).loss], [], [], {})
    snapshots = [s for s in observation.state if isinstance(s, Snapshot)]
    assert sum(len(s.places) + len(s.dicts) + len(s.lists) for s in snapshots) < 10_000
    held = [holder.get("__name__", "") for s in snapshots for holder, _, _ in s.places if isinstance(holder, dict)]
    assert not [name for name in held if str(name).startswith(("sympy", "mpmath"))]
