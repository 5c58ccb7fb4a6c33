"""A CNN on CIFAR-10, its blocks rematerialised with their dropout inside, the first block included.

With `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)` the first block must stay outside: the
images do not require grad, so its weights would be frozen. And people move dropout out of the blocks, for
fear that the recompute draws another mask. With `fckpt.remat(block)` neither is needed. This script trains
the plain and the rematerialised network side by side, from the same weights, images and random numbers, and
compares losses and weights after the last step bit for bit.

    python docs/examples/cifar_cnn.py                                  # synthetic images
    python docs/examples/cifar_cnn.py --data cifar-10-batches-py       # the "python version" of CIFAR-10

Nothing is downloaded. `--data` takes the folder with `data_batch_1` to `data_batch_5`; reading needs NumPy.

The peak falls by little here: the first block alone holds most of what is held, and backward recomputes it
whole. Networks of many like blocks gain more (`huggingface.py`).
"""

from __future__ import annotations

import argparse
import copy
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fckpt


def block(channels: int, hidden: int, out: int) -> nn.Sequential:
    """Two 3x3 convolutions, pooling, and dropout."""
    return nn.Sequential(
        nn.Conv2d(channels, hidden, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(hidden, out, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
    )


def network() -> nn.Sequential:
    """Two blocks and a classifier."""
    return nn.Sequential(
        block(3, 32, 64),
        block(64, 64, 64),
        nn.Sequential(nn.Flatten(), nn.Linear(64 * 8 * 8, 512), nn.ReLU(), nn.Dropout(0.5), nn.Linear(512, 10)),
    )


def rematerialised(model: nn.Sequential) -> nn.Sequential:
    """Rematerialises both blocks, in place."""
    for i in (0, 1):
        model[i] = fckpt.remat(model[i])
    return model


# -- data --------------------------------------------------------------------------------------------------


class _ArraysOnly(pickle.Unpickler):
    """Reads pickled NumPy arrays in dicts and lists, and refuses all else that a pickle could run."""

    ALLOWED = frozenset({"_reconstruct", "ndarray", "dtype", "scalar", "_frombuffer"})

    def find_class(self, module: str, name: str) -> Any:
        numpy = module.partition(".")[0] == "numpy" and name in self.ALLOWED
        if numpy or (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a CIFAR-10 file")


def load_cifar(folder: Path) -> tuple[Tensor, Tensor]:
    """Reads the training images of CIFAR-10's python version.

    Args:
        folder: where `data_batch_1`, `data_batch_2`, ... lie.

    Returns:
        Images, float32[n, 3, 32, 32] with about zero mean and unit variance, and labels, int64[n].

    Raises:
        FileNotFoundError: no such file is in `folder`.
    """
    paths = sorted(folder.glob("data_batch_*"))
    if not paths:
        raise FileNotFoundError(f"no data_batch_1 in {folder}: pass the folder cifar-10-batches-py itself")
    images, labels = [], []
    for path in paths:
        with path.open("rb") as file:
            batch = _ArraysOnly(file, encoding="bytes").load()
        images.append(torch.from_numpy(batch[b"data"]).view(-1, 3, 32, 32))
        labels.append(torch.tensor(batch[b"labels"]))
    mean = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
    deviation = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
    return (torch.cat(images) / 255 - mean) / deviation, torch.cat(labels)


def synthetic(count: int) -> tuple[Tensor, Tensor]:
    """Noise around one image per class, so that there is something to learn."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(10, (count,), generator=generator)
    classes = torch.randn(10, 3, 32, 32, generator=generator)
    return classes[labels] + torch.randn(count, 3, 32, 32, generator=generator), labels


def batches(images: Tensor, labels: Tensor, size: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields `steps` batches, in an order that is the same each time."""
    generator = torch.Generator().manual_seed(2)
    order = torch.randperm(len(labels), generator=generator)
    for step in range(steps):
        chosen = order[torch.arange(step * size, (step + 1) * size) % len(labels)]
        yield images[chosen], labels[chosen]


# -- training ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What the comparison found."""

    losses: list[float]
    """Of the plain network, step by step."""
    losses_equal: bool
    weights_equal: bool
    """After the last step, bit for bit."""
    peak_bytes: tuple[int, int]
    """Of one step: plain, rematerialised."""


def train(model: nn.Module, data: Iterator[tuple[Tensor, Tensor]], rate: float) -> list[float]:
    """Trains with SGD and momentum; returns the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    torch.manual_seed(3)  # for dropout
    losses = []
    for images, labels in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(arguments: list[str] | None = None) -> Result:
    """Parses the command line, trains both networks, prints and returns what came out."""
    parser = argparse.ArgumentParser(description="CIFAR-10 with rematerialised blocks.")
    parser.add_argument("--data", type=Path, metavar="DIR", help="CIFAR-10's python version; default: synthetic")
    parser.add_argument("--batch", type=int, default=64, help="images per step (default 64)")
    parser.add_argument("--steps", type=int, default=5, help="training steps (default 5)")
    parser.add_argument("--rate", type=float, default=0.02, help="learning rate (default 0.02)")
    options = parser.parse_args(arguments)
    images, labels = load_cifar(options.data) if options.data else synthetic(options.batch * options.steps)

    torch.manual_seed(0)
    plain = network()
    remat = rematerialised(copy.deepcopy(plain))
    losses = []
    for model in (plain, remat):
        data = batches(images, labels, options.batch, options.steps)
        losses.append(train(model, data, options.rate))
    equal = all(torch.equal(a, b) for a, b in zip(plain.parameters(), remat.parameters(), strict=True))

    peaks = []
    for model in (plain, remat):
        model.zero_grad()
        first = next(batches(images, labels, options.batch, 1))
        step = lambda model=model, first=first: F.cross_entropy(model(first[0]), first[1]).backward()
        peaks.append(fckpt.measure_peak(step).peak_bytes)

    result = Result(losses[0], losses[0] == losses[1], equal, (peaks[0], peaks[1]))
    for i, (a, b) in enumerate(zip(*losses, strict=True)):
        print(f"step {i}: loss {a:.6f} plain, {b:.6f} rematerialised")
    print(f"weights after training equal: {result.weights_equal}")
    print(f"peak of a step: {peaks[0] / 2**20:.1f} MiB plain, {peaks[1] / 2**20:.1f} MiB rematerialised")
    return result


if __name__ == "__main__":
    main()
