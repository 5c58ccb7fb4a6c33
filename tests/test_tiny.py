"""A smoke test of two seconds: the sentence on the README's first line."""

from __future__ import annotations

import torch
from torch.func import grad

import fckpt


def test_same_gradients_in_less_memory() -> None:
    blocks = [{"w1": torch.randn(64, 256) / 8, "w2": torch.randn(256, 64) / 16} for _ in range(8)]
    x = torch.randn(512, 64)

    def block(params: dict[str, torch.Tensor], h: torch.Tensor) -> torch.Tensor:
        return h + torch.tanh(torch.tanh(h @ params["w1"]) @ params["w2"])

    def network(f):  # type: ignore[no-untyped-def]
        def loss(blocks: list[dict[str, torch.Tensor]]) -> torch.Tensor:
            h = x
            for params in blocks:
                h = f(params, h)
            return (h**2).mean()

        return loss

    plain, less = network(block), network(fckpt.remat(block))
    for differentiate in (grad, fckpt.grad):
        expected, actual = differentiate(plain)(blocks), differentiate(less)(blocks)
        assert all(torch.equal(a[k], e[k]) for a, e in zip(actual, expected, strict=True) for k in e)
        peaks = [fckpt.measure_peak(lambda f=f: differentiate(f)(blocks)).peak_bytes for f in (plain, less)]
        assert peaks[1] < 0.6 * peaks[0], peaks
