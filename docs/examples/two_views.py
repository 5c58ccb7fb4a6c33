"""Two views of each image through one network: every parameter must get its gradient.

A network sees two augmentations of each image and learns to make a linear map of one output meet the
other:

    o1, o2 = net(x[:, 0]), net(x[:, 1])
    loss = ((linear(o1) - o2) ** 2).mean()

With `torch.utils.checkpoint.checkpoint(net, view, use_reentrant=True)` this takes less memory and less
time, and the reason is that the network is not trained: the images do not require grad, so the checkpoint's
output does not either, and only `linear` moves. `fckpt.remat(net)` makes no difference between the two.

    python docs/examples/two_views.py               # a small ResNet on 64x64 images
    python docs/examples/two_views.py --full        # ResNet-50 on 224x224 images

The table also shows that one region around the whole network is not the best choice: a region per block
takes less.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fckpt


class Bottleneck(nn.Module):
    """A residual block: 1x1, 3x3 and 1x1 convolutions, and a projection where the shape changes."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        h = F.relu(self.norm2(self.conv2(h)))
        return F.relu(self.norm3(self.conv3(h)) + self.shortcut(x))


class ResNet(nn.Module):
    """A ResNet of bottleneck blocks; `ResNet((3, 4, 6, 3), 64)` is ResNet-50."""

    def __init__(self, depths: tuple[int, ...], width: int, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
        )
        channels, blocks = width, []
        for stage, depth in enumerate(depths):
            for i in range(depth):
                blocks.append(Bottleneck(channels, width << stage, 2 if stage and not i else 1))
                channels = 4 * (width << stage)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


@dataclass(frozen=True)
class Row:
    """What one way of running the network comes to."""

    way: str
    peak_bytes: int
    trained: int
    """Parameters of the network that got a gradient."""
    parameters: int
    equal: bool
    """Whether all gradients are those of the plain network, bit for bit."""
    statistics_equal: bool
    """Whether BatchNorm's statistics after the step are those of the plain network, bit for bit."""


def step(net: Callable[[Tensor], Tensor], linear: nn.Module, x: Tensor) -> None:
    """The script's training step, from the first view to the gradients."""
    o1 = net(x[:, 0])
    o2 = net(x[:, 1])
    ((linear(o1) - o2) ** 2).mean().backward()


def torch_reentrant(net: nn.Module) -> Callable[[Tensor], Tensor]:
    """What the script did: a checkpoint around the network."""

    def call(view: Tensor) -> Tensor:
        with warnings.catch_warnings():
            # Torch warns today that gradients will be None; when the script was written it did not.
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
            return checkpoint(net, view, use_reentrant=True)

    return call


def remat_blocks(net: ResNet) -> ResNet:
    """Rematerialises each block on its own."""
    for i, block in enumerate(net.blocks):
        net.blocks[i] = fckpt.remat(block)
    return net


WAYS: dict[str, Callable[[ResNet], Callable[[Tensor], Tensor]]] = {
    "plain": lambda net: net,
    "torch checkpoint, reentrant": torch_reentrant,
    "fckpt.remat(net)": fckpt.remat,
    "fckpt.remat(block) for each block": remat_blocks,
}


def run(net: ResNet, x: Tensor) -> list[Row]:
    """Takes one step in each way, from the same weights and images."""
    classes = net.head.out_features
    linear = nn.Linear(classes, classes)
    rows: list[Row] = []
    plain: list[Tensor | None] = []
    statistics: list[Tensor] = []
    for way, wrap in WAYS.items():
        own, own_linear = copy.deepcopy(net), copy.deepcopy(linear)
        call = wrap(own)
        peak = fckpt.measure_peak(lambda call=call, own_linear=own_linear: step(call, own_linear, x)).peak_bytes
        grads = [p.grad for p in (*own.parameters(), *own_linear.parameters())]
        if way == "plain":
            plain, statistics = grads, list(own.buffers())
        rows.append(
            Row(
                way,
                peak,
                sum(p.grad is not None for p in own.parameters()),
                len(list(own.parameters())),
                all(a is not None and torch.equal(a, b) for a, b in zip(grads, plain, strict=True)),
                all(torch.equal(a, b) for a, b in zip(own.buffers(), statistics, strict=True)),
            )
        )
    return rows


def main(arguments: list[str] | None = None) -> list[Row]:
    """Parses the command line, runs, prints the table and returns its rows."""
    parser = argparse.ArgumentParser(description="Two views of each image through one network.")
    parser.add_argument("--full", action="store_true", help="ResNet-50 on 224x224 images")
    parser.add_argument("--batch", type=int, default=4, help="images (default 4)")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    if options.full:
        net, size = ResNet((3, 4, 6, 3), 64), 224
    else:
        net, size = ResNet((2, 2, 2, 2), 8, classes=32), 64
    rows = run(net, torch.randn(options.batch, 2, 3, size, size))
    print(f"{'way':34} {'peak':>11}  {'trained':>9}  gradients  statistics")
    for row in rows:
        print(
            f"{row.way:34} {row.peak_bytes / 2**20:7.1f} MiB  {row.trained:4}/{row.parameters:<4}  "
            f"{'equal' if row.equal else 'DIFFER':9}  {'equal' if row.statistics_equal else 'DIFFER'}"
        )
    return rows


if __name__ == "__main__":
    main()
