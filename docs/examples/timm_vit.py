"""A vision transformer of timm: one call for all blocks, same gradients, less memory.

    python docs/examples/timm_vit.py                          # a small ViT, random weights
    python docs/examples/timm_vit.py --depth 12 --width 384 --image 224

Needs timm. Nothing is downloaded. Dropout and stochastic depth are on.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass

import repair_torchvision  # noqa: F401  timm imports torchvision
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fckpt


@dataclass(frozen=True)
class Result:
    """What the comparison found."""

    peak_bytes: tuple[int, int]
    """Plain, rematerialised."""
    equal: bool
    """Whether loss and all gradients are equal, bit for bit."""
    same_keys: bool
    """Whether the `state_dict` has the same keys."""


def step(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Forward and backward, with the same random numbers each time. Returns the loss."""
    torch.manual_seed(1)
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    return loss.detach()


def main(arguments: list[str] | None = None) -> Result:
    """Parses the command line, runs, prints and returns what came out."""
    parser = argparse.ArgumentParser(description="Rematerialised blocks in a timm ViT.")
    parser.add_argument("--depth", type=int, default=6, help="blocks (default 6)")
    parser.add_argument("--width", type=int, default=64, help="width of a token, a multiple of 16 (default 64)")
    parser.add_argument("--image", type=int, default=64, help="side of an image, a multiple of 8 (default 64)")
    parser.add_argument("--batch", type=int, default=8, help="images (default 8)")
    options = parser.parse_args(arguments)

    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    plain = VisionTransformer(
        img_size=options.image,
        patch_size=8,
        embed_dim=options.width,
        depth=options.depth,
        num_heads=options.width // 16,
        num_classes=10,
        proj_drop_rate=0.1,
        attn_drop_rate=0.1,
        drop_path_rate=0.1,
    ).train()
    model = copy.deepcopy(plain)
    print(fckpt.remat_blocks(model))

    images = torch.randn(options.batch, 3, options.image, options.image)
    labels = torch.randint(10, (options.batch,))
    losses: list[Tensor] = []
    peaks = [fckpt.measure_peak(lambda m=m: losses.append(step(m, images, labels))).peak_bytes for m in (plain, model)]
    equal = torch.equal(*losses) and all(
        torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True)
    )
    same_keys = list(plain.state_dict()) == list(model.state_dict())
    result = Result((peaks[0], peaks[1]), equal, same_keys)
    before, after = (nbytes / 2**20 for nbytes in result.peak_bytes)
    same = "equal" if result.equal else "DIFFER"
    print(f"peak {before:.1f} MiB plain, {after:.1f} MiB rematerialised; gradients {same}")
    return result


if __name__ == "__main__":
    main()
