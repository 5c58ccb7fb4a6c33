"""`fckpt.estimate`: the memory of a whole training step, against what the allocator shows and against sums by hand."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn, optim

import fckpt

OPTIMIZERS = {
    "SGD": functools.partial(optim.SGD, lr=0.1),
    "momentum": functools.partial(optim.SGD, lr=0.1, momentum=0.9),
    "Adam": optim.Adam,
    "AdamW": functools.partial(optim.AdamW, amsgrad=True),
    "Adafactor": optim.Adafactor,  # its step reads data
    "RMSprop": optim.RMSprop,
    "ASGD": functools.partial(optim.ASGD, t0=0),  # its update takes more memory from the third step on
    "RAdam": optim.RAdam,  # from the sixth step on
}


def network(layers: int = 2) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(layers)], nn.BatchNorm1d(32))


def loss_fn(model, batch):
    return model(batch["x"]).square().mean()


BATCH = {"x": torch.randn(256, 32)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_estimate_is_the_measured_memory_to_the_byte(name) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    found = fckpt.estimate(model, optimizer, loss_fn, BATCH)
    assert not optimizer.state  # nothing has run

    def step() -> None:
        loss_fn(model, BATCH).backward()
        optimizer.step()

    loss_fn(model, BATCH).backward()
    assert fckpt.measure_peak(optimizer.step).retained_bytes == found.optimizer_bytes
    for _ in range(6):
        optimizer.zero_grad()
        measured = fckpt.measure_peak(step)
    assert found.total_bytes - found.held_bytes == measured.peak_bytes
    assert found.gradients_bytes == measured.retained_bytes
    assert found.parameters_bytes == sum(p.nbytes for p in model.parameters())
    assert found.buffers_bytes == 32 * 4 + 32 * 4 + 8
    assert found.batch_bytes == 256 * 32 * 4


def test_a_budget_bounds_forward_and_backward() -> None:
    model = network(12)
    plain = fckpt.estimate(model, None, loss_fn, BATCH)
    found = fckpt.estimate(model, None, loss_fn, BATCH, budget=0.5)
    assert found.gradients_bytes + found.activations_bytes <= plain.plan.baseline_peak_bytes / 2
    assert found.held_bytes == plain.held_bytes == found.total_bytes - found.plan.peak_bytes
    run = fckpt.remat(functools.partial(loss_fn, model), plan=found.plan)
    assert fckpt.measure_peak(lambda: run(BATCH).backward()).peak_bytes <= found.plan.peak_bytes
    with pytest.raises(fckpt.BudgetError):
        fckpt.estimate(model, None, loss_fn, BATCH, budget="1KiB")


def test_only_what_is_trained_has_gradients_and_state() -> None:
    model = network()
    model[0].requires_grad_(False)
    model[2].weight = nn.Parameter(model[2].bias.detach())  # shares memory with the bias
    found = fckpt.estimate(model, optim.Adam(model.parameters()), loss_fn, BATCH)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert found.gradients_bytes == sum(p.nbytes for p in trained)
    assert found.optimizer_bytes == 2 * found.gradients_bytes + 4 * len(trained)
    assert found.parameters_bytes == sum(p.nbytes for p in model.parameters()) - 32 * 4


def test_a_large_model_on_a_device_that_is_not_here() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)]).to(torch.bfloat16)
        batch = {"x": torch.empty(4096, 4096, dtype=torch.bfloat16)}
    optimizer = optim.AdamW(model.parameters())
    found = fckpt.estimate(model, optimizer, loss_fn, batch, costs="H100")
    parameters = 8 * (2 * 4096**2 + 2 * 4096)
    assert found.parameters_bytes == found.gradients_bytes == parameters
    assert found.optimizer_bytes == 2 * parameters  # the numbers of steps stay on the CPU
    assert found.update_bytes >= parameters  # torch updates all parameters at once on CUDA
    assert found.device_bytes == 80 * 10**9
    residuals = 8 * 2 * 4096**2
    assert residuals <= found.plan.peak_bytes <= residuals + parameters  # gradients take the place of residuals
    assert found.activations_bytes == found.plan.peak_bytes - parameters
    less = fckpt.estimate(model, optimizer, loss_fn, batch, device="cuda", costs="H100", budget=0.8)
    assert less.plan.peak_bytes <= 0.8 * found.plan.peak_bytes
    assert less.total_bytes == found.total_bytes == found.held_bytes + parameters + found.update_bytes


def test_small_tensors_are_rounded_as_on_the_device() -> None:
    model = nn.Linear(3, 1)
    adam, total = optim.Adam(model.parameters()), lambda model, x: model(x).sum()
    found = fckpt.estimate(model, adam, total, torch.ones(2, 3), device="cuda", costs="A100")
    assert (found.parameters_bytes, found.gradients_bytes, found.optimizer_bytes) == (1024, 1024, 2048)
    assert found.total_bytes % 512 == 0


def test_the_table_and_the_errors() -> None:
    model = network()
    found = fckpt.estimate(model, optim.Adam(model.parameters()), loss_fn, BATCH)
    text = str(found)
    for name in ("parameters", "optimizer state", "gradients", "activations", "most at once"):
        assert name in text
    assert "memory of the device" not in text
    assert "<svg" in found._repr_html_()
    assert "between steps" in repr(found)
    with pytest.raises(fckpt.ArgumentTypeError, match=r"model must be an nn\.Module, not function"):
        fckpt.estimate(loss_fn, None, loss_fn, BATCH)
    with pytest.raises(fckpt.ArgumentTypeError, match=r"optimizer must be a torch\.optim\.Optimizer, not float"):
        fckpt.estimate(model, 0.1, loss_fn, BATCH)
    with pytest.raises(fckpt.ArgumentTypeError, match="LBFGS does not run without a closure"):
        fckpt.estimate(model, optim.LBFGS(model.parameters()), loss_fn, BATCH)
