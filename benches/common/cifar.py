"""CIFAR-10 from a folder, and random data of the same shape.

    A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009,
    https://www.cs.toronto.edu/~kriz/cifar.html

The folder is the unpacked "python version", as torchvision stores it: `cifar-10-batches-py` with `data_batch_1` to
`data_batch_5`, or its parent folder.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["CLASSES", "Images", "load", "synthetic"]

CLASSES = 10
INSIDE = "cifar-10-batches-py"
MEAN = (0.4914, 0.4822, 0.4465)
DEVIATION = (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True)
class Images:
    """Images with their labels."""

    pixels: Tensor
    """From 0 to 255, of the shape (images, 3, 32, 32)."""
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, numbers: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the images with these numbers on a device, with mean 0 and deviation 1 in each channel."""
        mean, deviation = (torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, DEVIATION))
        pixels = self.pixels[numbers].to(device).to(torch.float32) / 255
        return (pixels - mean) / deviation, self.labels[numbers].to(device)

    def batches(self, size: int, *, epoch: int, part: slice) -> Iterator[Tensor]:
        """Yields this part of the numbers of each full batch, shuffled by epoch."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(epoch))
        for numbers in order[: len(self) // size * size].split(size):
            yield numbers[part]


class _Arrays(pickle.Unpickler):
    """Reads arrays, and refuses anything that could run code."""

    ALLOWED = ("_reconstruct", "ndarray", "dtype")

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "numpy" and name in self.ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which CIFAR-10 does not")


def load(folder: str | Path) -> Images:
    """Reads the training images of CIFAR-10.

    Raises:
        FileNotFoundError: the folder has no such files.
        ValueError: a file is not one of CIFAR-10.
    """
    root = Path(folder)
    root = root / INSIDE if (root / INSIDE).is_dir() else root
    paths = sorted(root.glob("data_batch_*"))
    if not paths:
        raise FileNotFoundError(
            f"no data_batch_1 to data_batch_5 in {root}: unpack the python version of CIFAR-10 there, from "
            "https://www.cs.toronto.edu/~kriz/cifar.html"
        )
    parts = [_read(path) for path in paths]
    return Images(torch.cat([part.pixels for part in parts]), torch.cat([part.labels for part in parts]))


def _read(path: Path) -> Images:
    try:
        with path.open("rb") as file:
            found = _Arrays(file, encoding="latin1").load()
        pixels = torch.from_numpy(np.asarray(found["data"], dtype=np.uint8)).view(-1, 3, 32, 32)
        labels = torch.tensor(found["labels"])
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is no file of CIFAR-10's python version: {error}") from error
    if len(pixels) != len(labels):
        raise ValueError(f"{path} has {len(pixels)} images and {len(labels)} labels")
    return Images(pixels, labels)


def synthetic(count: int, *, seed: int = 0) -> Images:
    """Returns images that can be learnt: a random picture for each class, with noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    pictures = torch.randint(256, (CLASSES, 3, 32, 32), generator=generator, dtype=torch.uint8)
    noise = torch.randint(256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return Images(pictures[labels] // 2 + noise // 2, labels)
