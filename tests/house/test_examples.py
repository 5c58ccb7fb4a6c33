"""The examples in docs/examples, run small: what their texts promise is asserted here."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torchvision_shim

import fckpt

EXAMPLES = torchvision_shim.EXAMPLES
NEEDS = {"lightning_module": ["lightning"]}
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.fixture
def example() -> Callable[[str], ModuleType]:
    """Imports an example by name (the shim has put their folder on the path)."""
    return importlib.import_module


# -- two views -----------------------------------------------------------------------------------------------


def test_two_views_train_every_parameter(example: Any) -> None:
    rows = {row.way: row for row in example("two_views").main(["--batch", "2"])}
    plain, frozen = rows.pop("plain"), rows.pop("torch checkpoint, reentrant")
    # What the forum's thread found: torch's reentrant checkpoint takes less because it trains nothing.
    assert (frozen.trained, frozen.equal) == (0, False)
    assert len(rows) == 2
    for row in rows.values():
        assert row.trained == row.parameters == plain.trained > 80
        assert row.equal and row.statistics_equal
        assert row.peak_bytes < plain.peak_bytes
    assert rows["fckpt.remat(block) for each block"].peak_bytes < rows["fckpt.remat(net)"].peak_bytes


def test_the_full_size_of_two_views_is_resnet50(example: Any) -> None:
    with torch.device("meta"):
        net = example("two_views").ResNet((3, 4, 6, 3), 64)
    assert sum(p.numel() for p in net.parameters()) == 25_557_032  # He et al., as torchvision has it


# -- CIFAR-10 ------------------------------------------------------------------------------------------------


def write_cifar(folder: Path, batches: int, images: int) -> torch.Tensor:
    """Writes files in the format of CIFAR-10's python version; returns the images as they should be read."""
    numpy = pytest.importorskip("numpy")
    generator = numpy.random.default_rng(0)
    data = generator.integers(0, 256, (batches, images, 3072), dtype=numpy.uint8)
    for i in range(batches):
        batch = {
            b"batch_label": f"training batch {i + 1} of {batches}".encode(),
            b"labels": [int(n) for n in generator.integers(0, 10, images)],
            b"data": data[i],
            b"filenames": [f"image_{n}.png".encode() for n in range(images)],
        }
        (folder / f"data_batch_{i + 1}").write_bytes(pickle.dumps(batch, protocol=2))
    return torch.from_numpy(data).view(-1, 3, 32, 32)


def test_cifar_training_is_bitwise_that_of_the_plain_network(example: Any) -> None:
    result = example("cifar_cnn").main(["--batch", "8", "--steps", "3"])
    assert result.losses_equal and result.weights_equal
    assert len(set(result.losses)) == 3, "nothing was trained"
    assert result.peak_bytes[1] < result.peak_bytes[0]


def test_cifar_reads_the_python_version(example: Any, tmp_path: Path) -> None:
    raw = write_cifar(tmp_path, batches=2, images=5)
    cnn = example("cifar_cnn")
    images, labels = cnn.load_cifar(tmp_path)
    assert (images.shape, images.dtype) == ((10, 3, 32, 32), torch.float32)
    assert (labels.shape, labels.dtype) == ((10,), torch.int64)
    red = (raw[7, 0, 3, 4] / 255 - 0.4914) / 0.2470
    torch.testing.assert_close(images[7, 0, 3, 4], red)
    result = cnn.main(["--data", str(tmp_path), "--batch", "4", "--steps", "2"])
    assert result.losses_equal and result.weights_equal


def test_cifar_says_which_folder_it_wants(example: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="pass the folder cifar-10-batches-py itself"):
        example("cifar_cnn").load_cifar(tmp_path)


def test_cifar_runs_nothing_that_a_file_brings_along(example: Any, tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return print, ("ran",)

    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": Payload()}))
    with pytest.raises(pickle.UnpicklingError, match="not part of a CIFAR-10 file"):
        example("cifar_cnn").load_cifar(tmp_path)


def test_the_first_block_and_its_dropout_are_rematerialised(example: Any) -> None:
    cnn = example("cifar_cnn")
    model = cnn.rematerialised(cnn.network())
    assert "remat" in repr(model[0]).splitlines()[1]
    assert any(isinstance(m, torch.nn.Dropout) for m in model[0])
    images, labels = cnn.synthetic(4)
    assert not images.requires_grad
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    assert all(p.grad is not None for p in model.parameters())


# -- the heavy function --------------------------------------------------------------------------------------


def test_heavy_function_keeps_inputs_and_one_call(example: Any) -> None:
    calls, length = 49, 20
    rows = example("heavy_function").main(["--calls", "49", "--length", "20", "--width", "65536"])
    assert all(row.equal for row in rows)
    peak = {(row.operation, row.way): row.peak for row in rows}
    # Additions keep nothing, as they are.
    assert peak["x + a", "plain"] < 4
    assert peak["x + a", "fckpt.remat"] < 5
    # Products: every intermediate; inputs and one call's intermediates; groups, calls, intermediates.
    assert calls * length <= peak["x * a", "plain"] < calls * length + 4
    assert calls + length - 2 <= peak["x * a", "fckpt.remat"] < calls + length + 4
    assert peak["x * a", "fckpt.remat, two levels"] < 7 + 7 + length + 4
    assert peak["x * a", "fckpt.remat"] <= peak["x * a", "torch checkpoint"]


# -- a chain of layers ---------------------------------------------------------------------------------------


def test_sequential_is_equal_and_takes_no_more_than_torch(example: Any) -> None:
    rows = example("sequential_mlp").main(["--layers", "9", "--width", "16", "--batch", "256"])
    assert all(row.equal for row in rows)
    peak = {row.way: row.peak_bytes for row in rows}
    assert len(peak) == 7
    assert peak["fckpt.sequential(model)"] <= peak["checkpoint_sequential(model, 3, x)"] < peak["plain"]
    assert peak["fckpt.sequential(functions)"] < peak["plain functions"]


# -- model libraries -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit"])
def test_hugging_face(example: Any, name: str) -> None:
    pytest.importorskip("transformers")
    (row,) = example("huggingface").main(["--model", name, "--layers", "4", "--hidden", "32"])
    assert row.equal and row.same_keys
    assert row.peak_bytes[1] < row.peak_bytes[0] / 2


def test_timm(example: Any) -> None:
    pytest.importorskip("timm")
    result = example("timm_vit").main(["--depth", "4", "--width", "32", "--batch", "4"])
    assert result.equal and result.same_keys
    assert result.peak_bytes[1] < result.peak_bytes[0] / 2


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.filterwarnings("ignore")  # of other libraries, of each other
def test_hugging_face_trainer(example: Any, lora: bool) -> None:
    pytest.importorskip("accelerate")
    if lora:
        pytest.importorskip("peft")
    small = ["--layers", "2", "--hidden", "32", "--tokens", "64"]
    assert example("hf_trainer").main([*small, *["--lora"] * lora]) == dict.fromkeys(
        ("plain", "blocks", "loss within a budget"), True
    )


@pytest.mark.filterwarnings("ignore")
def test_lightning(example: Any) -> None:
    pytest.importorskip("lightning")
    module = example("lightning_module")
    assert module.main(["--depth", "3", "--width", "32", "--batch", "256"]) == dict.fromkeys(module.WAYS, (True, True))


def test_budgets_around_the_outermost_function(example: Any) -> None:
    sizes = ["--points", "512", "--width", "32", "--layers", "3", "--inner", "2", "--tasks", "2", "--rounds", "1"]
    rows = example("torch_func").main([*sizes, "--budget", "0.5", "0.5"])
    budgeted = [row for row in rows if "budget" in row.way]
    assert [row.problem for row in budgeted] == ["PINN", "MAML"]
    assert all(row.equal and row.peak <= 0.5 for row in budgeted)
    assert all(row.difference < 1e-5 for row in rows)


# -- as scripts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_examples_say_how_they_are_run(example: Any, name: str) -> None:
    for library in NEEDS.get(name, ()):
        pytest.importorskip(library)
    module = example(name)
    assert module.__doc__ and len(module.__doc__.splitlines()[0]) < 100
    if hasattr(module, "main"):
        assert f"python docs/examples/{name}.py" in module.__doc__
        with pytest.raises(SystemExit) as exit_:
            module.main(["--help"])
        assert exit_.value.code == 0


def test_an_example_runs_as_a_script() -> None:
    root = Path(fckpt.__file__).parent.parent
    command = [sys.executable, str(EXAMPLES / "sequential_mlp.py"), "--layers", "4", "--batch", "64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root, check=True)
    assert done.stdout.count("gradients equal") == 7


def test_the_heavy_function_at_full_size_does_not_exhaust_the_stack() -> None:
    """A graph of 100,000 operations in a row, which must not be torn down by recursion."""
    program = """if True:
        import sys, torch, fckpt
        sys.path.insert(0, sys.argv[1])
        import heavy_function as h
        function, a = h.heavy(h.operator.mul, 100), torch.ones(2, requires_grad=True)
        for model in (h.repeated(fckpt.remat(function), 1000), h.nested(function, 1000)):
            model(torch.ones(2), a).sum().backward()
        print(a.grad.tolist())
        loss = lambda a: h.repeated(function, 1000)(torch.ones(2), a).sum()
        print(fckpt.grad(loss)(torch.ones(2)).tolist())
    """
    command = [sys.executable, "-c", program, str(EXAMPLES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-500:]}"
    assert done.stdout == "[200000.0, 200000.0]\n[100000.0, 100000.0]\n"
