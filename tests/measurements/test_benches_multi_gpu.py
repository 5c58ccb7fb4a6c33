"""The bench of data parallel training: it runs from end to end on real processes, and its parts are right."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rich")

import torch
import torch.nn.functional as F

from benches import multi_gpu
from benches.common import cifar
from benches.common.data_parallel import NAIVE, Planned, Rank, Setting, data_parallel, join, plain_plan, planned_step
from benches.common.data_parallel_runs import PLANNED_AS, Report, Row
from benches.common.results import read_json
from benches.common.timing import spread
from benches.models.convolutional import DenseNet

METHODS = ("DDP + layers", "DDP + bottlenecks", "FSDP2 + layers", "FSDP2 + bottlenecks")


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "table.json"
    assert multi_gpu.main(["--tiny", "--device", "cpu", "--rounds", "1", "--json", str(target)]) == 0
    document = read_json(target)
    assert document["command"].startswith("python -m benches.multi_gpu --tiny")
    assert document["machine"]["torch_threads"] >= 1
    rows = {row["name"]: row for row in document["rows"]}
    assert [*rows] == [NAIVE, *METHODS, "fckpt in 80%", *(PLANNED_AS + name for name in METHODS)]
    # Two ranks: a sum of two has one order only, and so all gradients are bitwise the same.
    assert all(row["difference"] == 0 for row in rows.values())
    assert all(rows[name]["step_seconds"]["rounds"] == 1 for name in METHODS)
    parameters = 4 * document["parameters"]
    assert rows[NAIVE]["held_bytes"] > 3 * parameters  # with their momentum, and the buckets of messages
    assert 0 < rows["FSDP2 + layers"]["held_bytes"] < 2 * parameters
    assert rows["DDP + bottlenecks"]["peak_bytes"] < rows[NAIVE]["peak_bytes"]
    planned = [row for name, row in rows.items() if name.startswith("fckpt")]
    for row in planned:
        assert row["step_bytes"] == row["predicted_bytes"] <= row["budget_bytes"]
        assert 2 * parameters < row["held_bytes"] < 3 * parameters
        assert row["statistics_equal"] and row["least_bytes"] is None
    assert rows["fckpt in 80%"]["peak_bytes"] <= 0.8 * rows[NAIVE]["peak_bytes"]
    printed = capsys.readouterr().out
    assert "needs 2 GPUs" in printed and "complaints." in printed


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, which is this process: starting another takes seconds."""
    monkeypatch.setattr(multi_gpu, "run", lambda fn, ranks, *args: fn(*args))


ONE = ["--tiny", "--device", "cpu", "--threads", "1", "--processes", "1"]


@pytest.mark.usefixtures("here")
def test_training_goes_on_where_it_stopped(tmp_path: Path) -> None:
    common = [*ONE, "--batch_size", "16", "--efficient", "True"]
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    assert multi_gpu.main([*common, "--epochs", "2", "--save", whole, "--json", str(tmp_path / "two.json")]) == 0
    for _ in range(2):
        assert multi_gpu.main([*common, "--save", parts, "--json", str(tmp_path / "one.json")]) == 0
    two, one = (read_json(tmp_path / name)["epochs"] for name in ("two.json", "one.json"))
    assert [epoch["number"] for epoch in two] == [1, 2] and [epoch["number"] for epoch in one] == [2]
    assert one[0]["last_loss"] == two[1]["last_loss"] < two[0]["first_loss"]
    states = [torch.load(Path(folder, "densenet.pt"), weights_only=True)["model"] for folder in (whole, parts)]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    DenseNet(4, (1, 1, 1), classes=10, small=True).load_state_dict(states[0])
    with pytest.raises(ValueError, match="another network's"):
        multi_gpu.main([*common, "--growth", "6", "--save", parts])


@pytest.mark.usefixtures("here")
def test_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "scaling.json"
    assert multi_gpu.main([*ONE, "--rounds", "1", "--scaling", "1", "--json", str(target)]) == 0
    assert "Weak scaling, 4 images for each process of 1 threads" in capsys.readouterr().out
    rows = read_json(target)["scaling"]
    assert [row["ranks"] for row in rows] == [1]
    assert rows[0]["planned_to_naive"]["rounds"] == 1 and "plan" not in rows[0]


SETTING = Setting(depth=10, growth=4, batch=4, device="cpu", threads=1, fraction=0.9, rounds=1)


@pytest.fixture(scope="module")
def rank() -> Rank:
    """This process as the only rank."""
    return join(SETTING)


def test_a_step_is_sgd_on_the_loss(rank: Rank) -> None:
    images, labels = rank.data.batch(rank.numbers, rank.device)
    planned = Planned(rank, planned_step(rank, plain_plan(rank)))
    model = copy.deepcopy(rank.loss)
    loss = model(images, labels)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4).step()
    assert torch.equal(planned.step(images, labels), loss.detach())
    for name, parameter in model.named_parameters():
        assert torch.equal(planned.params[name], parameter)
    for name, buffer in model.named_buffers():
        assert torch.equal(planned.buffers[name], buffer)


def test_data_parallel_with_the_reentrant_checkpoint(rank: Rank) -> None:
    # Without GPUs, DataParallel runs its module: the reentrant checkpoint alone is what differs.
    method = data_parallel(rank)
    images, labels = rank.data.batch(rank.numbers, rank.device)
    network = rank.loss.model
    expected = torch.autograd.grad(F.cross_entropy(network(images), labels), list(network.parameters()))
    for mine, other in zip(method.gradients(images, labels), expected, strict=True):
        assert mine is not None and torch.equal(mine, other)


# ---- what is wrong -----------------------------------------------------------------------------------


def test_the_targets_are_checked() -> None:
    def row(name: str, mebibytes: int, ratio: float, **options: Any) -> Row:
        once = spread([ratio])
        return Row(name, step_bytes=mebibytes << 20, step_seconds=once, to_naive=once, **options)

    naive, ddp = row(NAIVE, 100, 1.0), row("DDP + layers", 40, 1.3)
    good = row("fckpt in 57%", 56, 1.09, predicted_bytes=56 << 20)
    even = row("fckpt as DDP + layers", 40, 1.2, predicted_bytes=40 << 20, other="DDP + layers", to_other=spread([0.9]))
    report = Report({}, 0, 0.0, [naive, ddp, good, even])
    multi_gpu.check(report, ranks=2, fraction=0.57)
    assert not [text for found in report.rows for text in found.complaints]

    good.to_naive, good.step_bytes = spread([1.2]), 58 << 20
    even.to_other, even.difference, even.statistics_equal = spread([1.1]), 1e-7, False
    ddp.difference = 1e-7
    multi_gpu.check(report, ranks=2, fraction=0.57)
    assert [text.split(" ")[0] for text in good.complaints] == ["holds", "takes"]
    assert [text.split(" ")[0] for text in even.complaints] == ["gradients", "statistics", "takes"]
    assert len(ddp.complaints) == 1
    ddp.complaints.clear()
    multi_gpu.check(report, ranks=3, fraction=0.57)
    assert not ddp.complaints  # three summands have several orders


# ---- data --------------------------------------------------------------------------------------------


def _write(path: Path, labels: list[int], pixels: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps({"batch_label": path.name, "labels": labels, "data": pixels}, protocol=4))


def test_cifar_from_a_folder(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (5, 2, 3072), dtype=np.uint8)
    for i in range(5):
        _write(tmp_path / "cifar-10-batches-py" / f"data_batch_{i + 1}", [i, 9 - i], pixels[i])
    for folder in (tmp_path, tmp_path / "cifar-10-batches-py"):
        images = cifar.load(folder)
        assert images.labels.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
        assert torch.equal(images.pixels, torch.from_numpy(pixels.reshape(10, 3, 32, 32)))
    scaled, labels = images.batch(torch.tensor([3, 0]), torch.device("cpu"))
    assert labels.tolist() == [8, 0]
    expected = (pixels[1, 1, 1024] / 255 - 0.4822) / 0.2435
    assert scaled[0, 1, 0, 0].item() == pytest.approx(expected, rel=1e-5)
    parts = [list(images.batches(4, epoch=1, part=part)) for part in (slice(0, 2), slice(2, 4))]
    seen = torch.cat([*parts[0], *parts[1]]).tolist()
    assert len(parts[0]) == len(parts[1]) == 2 and len(set(seen)) == 8


class _Harm:
    def __reduce__(self) -> Any:
        return print, ("harm",)


def test_what_is_no_cifar_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileNotFoundError, match=r"unpack the python version of CIFAR-10"):
        cifar.load(tmp_path)
    path = tmp_path / "data_batch_1"
    path.write_bytes(b"no pickle")
    with pytest.raises(ValueError, match=r"data_batch_1 is no file of CIFAR-10"):
        cifar.load(tmp_path)
    path.write_bytes(pickle.dumps(_Harm()))
    with pytest.raises(ValueError, match=r"it holds builtins.print, which CIFAR-10 does not"):
        cifar.load(tmp_path)
    assert capsys.readouterr().out == ""
    _write(path, [1], np.zeros((2, 3072), dtype=np.uint8))
    with pytest.raises(ValueError, match="2 images and 1 labels"):
        cifar.load(tmp_path)


def test_made_up_images_can_be_learnt() -> None:
    images = cifar.synthetic(100)
    assert images.pixels.dtype == torch.uint8 and images.pixels.shape == (100, 3, 32, 32)
    pixels = images.pixels.float().flatten(1)
    means = torch.stack([pixels[images.labels == label].mean(0) for label in range(10)])
    assert torch.equal(torch.cdist(pixels, means).argmin(1), images.labels)


# ---- the command line --------------------------------------------------------------------------------


def test_arguments() -> None:
    parsed = multi_gpu.parse(["--device", "cpu"])
    assert (parsed.processes, parsed.batch_size, parsed.depth, parsed.growth) == (2, 32, 40, 12)
    published = multi_gpu.parse(
        ["--device", "cpu", "--efficient", "True", "--data", "cifar", "--save", "model", "--batch_size", "256"]
    )
    assert published.efficient is True and published.batch_size == 256 and published.save == "model"
    assert multi_gpu.parse(["--device", "cpu", "--batch-size", "8", "--efficient", "False"]).efficient is False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch_size", "3"], "cannot be divided among 2 processes"),
        (["--depth", "41"], "4 layers and a multiple of 6, not 41"),
        (["--budget", "1.5"], "above 0 and at most 1"),
        (["--save", "model"], "--save is for --efficient"),
        (["--efficient", "--scaling", "1"], "one of them"),
        (["--processes", "0"], "are 1 or more"),
        (["--efficient", "perhaps"], "True or False, not perhaps"),
    ],
)
def test_mistakes_are_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        multi_gpu.parse(["--device", "cpu", *arguments])
    assert said in capsys.readouterr().err
