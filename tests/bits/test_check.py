"""`fckpt.check` says yes where it should, and no where it should."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fckpt

W = torch.linspace(-1, 1, 64).reshape(8, 8)
X = torch.linspace(-2, 2, 256).reshape(32, 8)


def chain(w: Tensor, x: Tensor) -> Tensor:
    for _ in range(6):
        x = F.dropout(torch.tanh(x @ w), 0.1)
    return x.sum()


@pytest.mark.parametrize("options", [{}, {"policy": fckpt.policies.dots_saveable}, {"budget": 0.8}])
def test_equal_functions_are_found_equal(
    options: dict[str, object], tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FCKPT_CACHE", str(tmp_path))
    state = torch.get_rng_state()
    found = fckpt.check(chain, W.clone().requires_grad_(), X, **options)  # type: ignore[arg-type]
    assert found and found.compared == 4
    if options:
        assert found.peak_bytes <= found.plain_peak_bytes
    assert torch.equal(torch.get_rng_state(), state)


def test_modules_keep_their_state() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(inplace=True))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    for checked in (model, fckpt.remat(model)):
        found = fckpt.check(checked, X)
        assert found, str(found)
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())


def test_differences_are_named() -> None:
    class Drifting:
        scale = 1.0

        def __call__(self, params: dict[str, Tensor]) -> Tensor:
            self.scale += 1e-3  # every run computes something else
            return (params["w"] * self.scale).sum()

    found = fckpt.check(Drifting(), {"w": W.exp().requires_grad_()})
    assert not found
    assert [text.split(" (")[0] for text in found.differences] == ["output 0", "the gradient of args[0]['w']"]
    assert all("(by up to" in text and text.endswith("; two plain runs differ, too)") for text in found.differences)


def test_only_functions_that_are_not_deterministic_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    region = fckpt.remat(lambda w: (w * 3).sum())
    monkeypatch.setattr(region, "__wrapped__", lambda w: (w * 2).sum())  # `check` compares with this function
    found = fckpt.check(region, W.clone().requires_grad_())
    assert len(found.differences) == 2 and "two plain runs" not in str(found)


def test_nothing_to_check() -> None:
    with pytest.raises(fckpt.ArgumentValueError, match="nothing to check"):
        fckpt.check(lambda: 3)


def test_only_results_to_compare() -> None:
    assert fckpt.check(chain, W, X).compared == 4
