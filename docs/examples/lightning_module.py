"""Lightning: a network, a loss or the blocks of a model rematerialised inside of a LightningModule.

    python docs/examples/lightning_module.py

Needs lightning. Trains the same network three times from the same seed, and compares weights and logged losses.
"""

from __future__ import annotations

import argparse
import logging
import warnings

import repair_torchvision  # noqa: F401  torchmetrics imports torchvision, if it is there
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fckpt

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what the library says of itself while it is imported
    import lightning


def network(width: int, depth: int) -> nn.Module:
    """A perceptron of like blocks with dropout."""
    block = lambda: nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width))
    return nn.Sequential(nn.Linear(16, width), *(block() for _ in range(depth)), nn.Linear(width, 4))


class Classifier(lightning.LightningModule):
    """A classifier; `how` says what is rematerialised."""

    def __init__(self, how: str, width: int, depth: int):
        super().__init__()
        self.net = network(width, depth)
        self.losses: list[float] = []
        if how == "network within a budget":
            self.net = fckpt.remat(self.net, budget=0.8)
        elif how == "loss within a budget":
            self.loss = fckpt.remat(self.loss, budget=0.8)
        elif how == "blocks":
            fckpt.remat_blocks(self.net)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """What a budget goes around: no logging in here."""
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Lightning's step: logging is Python code that has to run at every step, so it stays outside."""
        loss = self.loss(*batch)
        self.log("loss", loss)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), 0.1)


WAYS = ("plain", "network within a budget", "loss within a budget", "blocks")


def train(how: str, width: int, depth: int, batch: int) -> Classifier:
    """Trains from a seed."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(0, verbose=False)
    model = Classifier(how, width, depth)
    data = torch.utils.data.TensorDataset(torch.randn(4 * batch, 16), torch.randint(4, (4 * batch,)))
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice on workers and logging intervals
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=batch))
    return model


def main(arguments: list[str] | None = None) -> dict[str, tuple[bool, bool]]:
    """Parses the command line, trains, prints; returns by way whether weights and losses are equal to plain."""
    parser = argparse.ArgumentParser(description="Rematerialisation in a LightningModule.")
    parser.add_argument("--width", type=int, default=64, help="width of the network (default 64)")
    parser.add_argument("--depth", type=int, default=6, help="blocks (default 6)")
    parser.add_argument("--batch", type=int, default=512, help="samples of a batch (default 512)")
    options = parser.parse_args(arguments)
    trained = {how: train(how, options.width, options.depth, options.batch) for how in WAYS}
    plain = trained["plain"]
    found = {}
    for how, model in trained.items():
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        found[how] = all(torch.equal(a, b) for a, b in pairs), model.losses == plain.losses
        same = ["equal" if equal else "DIFFER" for equal in found[how]]
        print(f"{how:24} weights {same[0]}, {len(model.losses)} logged losses {same[1]}")
    return found


if __name__ == "__main__":
    main()
