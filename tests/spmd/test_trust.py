"""Checkpoints can be trusted: what is damaged, what is hostile, and what is written while the program goes on."""

from __future__ import annotations

import io
import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import checkpoint_programs
import numpy as np
import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemWriter

import fckpt
from fckpt import P
from fckpt.errors import ArgumentTypeError, ArgumentValueError, CheckpointError, RankFailure
from fckpt.spmd import files

STATE = {"params": {"w": torch.arange(24.0).reshape(4, 6), "b": torch.ones(6, dtype=torch.bfloat16)}, "step": 7}
LIKE = {"params": {"w": torch.zeros(4, 6), "b": torch.zeros(6, dtype=torch.bfloat16)}, "step": 0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint that two ranks wrote."""
    specs = {"params": {"w": P("i"), "b": P()}, "step": P()}
    fckpt.sim({"i": 2}).run(
        lambda: fckpt.save(tmp_path / "x", fckpt.shard(STATE, specs), specs),
    )
    return tmp_path / "x"


# ---- damaged ---------------------------------------------------------------------------------------


def parts(folder: Path) -> list[tuple[str, str, int, int]]:
    """Returns what is where: name, file, offset, length."""
    found = files.read_metadata(files.reader(folder)).storage_data
    return [(index.fqn, info.relative_path, info.offset, info.length) for index, info in found.items()]


def test_a_flipped_bit_is_an_error_that_names_the_file_and_the_leaf(folder: Path):
    draw = np.random.default_rng(0)
    seen = set()
    for name, file, offset, length in parts(folder):
        seen.add(file)
        whole = (folder / file).read_bytes()
        for at in {offset, offset + length - 1, *(offset + draw.integers(0, length, 12)).tolist()}:
            data = bytearray(whole)
            data[at] ^= 1 << int(draw.integers(8))
            (folder / file).write_bytes(data)
            leaf = "tree" + "".join(f"['{key}']" for key in name.split("."))
            with pytest.raises(CheckpointError, match=re.escape(f"{leaf} is damaged in {folder / file}")):
                fckpt.load(folder, LIKE)
        (folder / file).write_bytes(whole)
    assert len(seen) == 2
    assert torch.equal(fckpt.load(folder, LIKE)["params"]["w"], STATE["params"]["w"])


def test_every_flipped_byte_of_the_metadata_is_an_error(folder: Path):
    whole = (folder / ".metadata").read_bytes()
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        (folder / ".metadata").write_bytes(data)
        with pytest.raises(CheckpointError, match="metadata is damaged"):
            fckpt.load(folder, LIKE)


@pytest.mark.parametrize("how", ["shorter", "gone", "of another step"])
def test_files_that_are_not_those_that_were_saved(how: str, folder: Path, tmp_path: Path):
    file = folder / "__0_0.distcp"
    if how == "shorter":
        file.write_bytes(file.read_bytes()[:-40])
    elif how == "gone":
        file.unlink()
    else:
        fckpt.save(tmp_path / "y", {**STATE, "params": {"w": torch.ones(4, 6), "b": STATE["params"]["b"]}})
        file.write_bytes((tmp_path / "y" / file.name).read_bytes())
    with pytest.raises(CheckpointError, match=re.escape(str(file))):
        fckpt.load(folder, LIKE)


def test_only_what_is_read_must_be_whole(folder: Path):
    (folder / "__1_0.distcp").unlink()
    there = {name for name, file, *_ in parts(folder) if file == "__0_0.distcp"}
    assert "params.w" in there
    load = lambda: fckpt.load(folder, {"params": {"w": torch.zeros(2, 6)}}, P("i"))
    with pytest.raises(
        CheckpointError, match=r"__1_0\.distcp, which contains tree\['params'\]\['w'\], is missing"
    ) as caught:
        fckpt.sim({"i": 2}).run(load)
    assert caught.value.__notes__ == ["on rank 1 of Mesh({'i': 2})"]


def test_parts_that_do_not_come_to_a_whole(folder: Path):
    torchs = files.torchs
    found = pickle.loads((folder / ".metadata").read_bytes())
    chunks = found.state_dict_metadata["params.w"].chunks
    for bad in (chunks[:1], [chunks[0], chunks[0]], [*chunks, chunks[0]]):
        found.state_dict_metadata["params.w"].chunks = bad
        (folder / ".metadata").write_bytes(rewritten(found))
        with pytest.raises(CheckpointError, match=r"parts of tree\['params'\]\['w'\] are missing or overlap"):
            fckpt.load(folder, LIKE)
    found.state_dict_metadata["params.w"].chunks = [torchs.ChunkStorageMetadata(torch.Size([1, 0]), torch.Size([4, 6]))]
    (folder / ".metadata").write_bytes(rewritten(found))
    with pytest.raises(CheckpointError, match=r"a part of 'params.w' is outside of the tensor"):
        fckpt.load(folder, LIKE)


def rewritten(metadata: Any) -> bytes:
    """Metadata as `fckpt.save` would have written them."""
    data = pickle.dumps(metadata)
    return data + b"fckpt crc32 %08x\n" % files.zlib.crc32(data)


# ---- hostile ---------------------------------------------------------------------------------------


class Runs:
    """Runs a command where it is unpickled."""

    def __init__(self, touched: Path):
        self.touched = touched

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.touched}",)


@pytest.mark.parametrize("where", ["metadata", "within metadata", "leaf", "tensor"])
@pytest.mark.parametrize("signed", [False, True], ids=["plain", "with a checksum"])
def test_nothing_in_a_file_is_executed(where: str, signed: bool, tmp_path: Path):
    folder, touched = tmp_path / "x", tmp_path / "touched"
    bad = Runs(touched)
    if where in ("leaf", "tensor"):
        write = checkpoint.save if not signed else fckpt.save
        if where == "leaf" and not signed:
            with pytest.warns(UserWarning, match="in a single process"):
                write({"x": bad}, checkpoint_id=folder, no_dist=True)
        else:
            like = {
                "x": torch.ones(4) if where == "tensor" else "some text that is long enough to be written over " * 9
            }
            fckpt.save(folder, like)
            found = pickle.loads((folder / ".metadata").read_bytes())
            [(index, info)] = found.storage_data.items()
            data = io.BytesIO()
            torch.save(bad, data)
            (folder / info.relative_path).write_bytes(data.getvalue())
            info.offset, info.length, info.crc32 = 0, len(data.getvalue()), files.zlib.crc32(data.getvalue())
            found.storage_data = {index: info}
            (folder / ".metadata").write_bytes(rewritten(found))
    else:
        fckpt.save(folder, {"x": torch.ones(4)})
        found = pickle.loads((folder / ".metadata").read_bytes())
        if where == "metadata":
            found = bad
        else:
            found.planner_data = {"x": bad}
        (folder / ".metadata").write_bytes(rewritten(found) if signed else pickle.dumps(found))
    with pytest.raises(CheckpointError, match=r"would execute .*system|is not plain data|damaged or not part of"):
        fckpt.load(folder, {"x": torch.ones(4) if where != "leaf" else 0})
    assert not touched.exists()
    checkpoint_programs.opened(folder)  # it would have run
    assert touched.exists() or where == "tensor"  # which torch does not unpickle either


@pytest.mark.parametrize("file", ["../y/__0_0.distcp", "{tmp}/y/__0_0.distcp", "memory://y"])
def test_no_file_outside_of_the_folder_is_read(file: str, tmp_path: Path):
    for name in "xy":
        fckpt.save(tmp_path / name, {"x": torch.ones(4)})
    found = pickle.loads((tmp_path / "x" / ".metadata").read_bytes())
    [info] = found.storage_data.values()
    info.relative_path = file.format(tmp=tmp_path)
    (tmp_path / "x" / ".metadata").write_bytes(rewritten(found))
    with pytest.raises(CheckpointError, match="is outside of its folder"):
        fckpt.load(tmp_path / "x", {"x": torch.ones(4)})


@pytest.mark.parametrize(
    "bad", [np.float64(0.1), np.arange(3), slice(1), Path("x"), object()], ids=lambda x: type(x).__name__
)
def test_leaves_are_tensors_and_plain_data(bad: Any, tmp_path: Path):
    with pytest.raises(ArgumentTypeError, match=r"tree\['lr'\] is \w+, which is neither a tensor nor plain data"):
        fckpt.save(tmp_path / "x", {"lr": bad})
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("good", [0.1, 3, True, 1j, "warm", b"\0\1", {1, 2}, torch.bfloat16], ids=repr)
def test_plain_data(good: Any, tmp_path: Path):
    fckpt.save(tmp_path / "x", {"x": good})
    found = fckpt.load(tmp_path / "x", {"x": good})["x"]
    assert found == good and type(found) is type(good)


@pytest.mark.parametrize("bad", [torch.ones(2, device="meta"), torch.eye(2).to_sparse()], ids=["meta", "sparse"])
def test_tensors_without_data_to_write(bad: torch.Tensor, tmp_path: Path):
    with pytest.raises(ArgumentTypeError, match=r"tree\['x'\] (has no data|is sparse)"):
        fckpt.save(tmp_path / "x", {"x": bad})


# ---- while the program goes on ---------------------------------------------------------------------


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writing takes half a second."""
    write = FileSystemWriter.write_data
    monkeypatch.setattr(FileSystemWriter, "write_data", lambda *args: (time.sleep(0.5), write(*args))[1])


def test_tensors_may_change_at_once(tmp_path: Path, slow: None):
    x = torch.nn.Parameter(torch.ones(1000))
    saving = fckpt.save(tmp_path / "x", {"x": x, "step": 1}, wait=False)
    with torch.no_grad():
        x.fill_(5)
    assert not saving.done() and repr(saving) == f"<Saving to {tmp_path / 'x'}, under way>"
    assert not (tmp_path / "x" / ".metadata").exists()
    saving.wait()
    assert saving.done() and torch.equal(fckpt.load(tmp_path / "x", {"x": x})["x"], torch.ones(1000))


def test_the_next_save_and_a_load_wait(tmp_path: Path, slow: None):
    first = fckpt.save(tmp_path / "1", torch.ones(3), wait=False)
    second = fckpt.save(tmp_path / "2", torch.ones(3), wait=False)
    assert first.done() and not second.done()
    assert fckpt.load(tmp_path / "2", torch.zeros(3)).sum() == 3 and second.done()


def test_a_failure_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    fckpt.save(tmp_path / "1", torch.ones(3), wait=False)
    with pytest.raises(OSError, match="no space left"):
        fckpt.save(tmp_path / "2", torch.ones(3), wait=False)
    saving = fckpt.save(tmp_path / "3", torch.ones(3), wait=False)
    with pytest.raises(OSError, match="no space left"):
        saving.wait()
    monkeypatch.undo()
    fckpt.save(tmp_path / "3", torch.ones(3))  # what was not whole is no checkpoint
    assert fckpt.load(tmp_path / "3", torch.zeros(3)).sum() == 3


def test_simulated_ranks_end_when_their_files_are_whole(tmp_path: Path, slow: None):
    def program() -> bool:
        x = torch.ones(2) * fckpt.axis_index("i")
        saving = fckpt.save(tmp_path / "x", x, P("i"), wait=False)
        x.zero_()
        return saving.done()

    assert fckpt.sim({"i": 2}).run(program) == [False, False]
    assert fckpt.load(tmp_path / "x", torch.zeros(4)).tolist() == [0, 0, 1, 1]


def test_a_rank_that_cannot_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write = FileSystemWriter.write_data

    def second(self: Any, plan: Any, planner: Any) -> Any:
        if plan.storage_data.prefix == "__1_":
            raise OSError("no space left on device")
        return write(self, plan, planner)

    monkeypatch.setattr(FileSystemWriter, "write_data", second)
    said = []

    def program(wait: bool) -> None:
        try:
            saving = fckpt.save(tmp_path / str(wait), torch.ones(2), P("i"), wait=wait)  # type: ignore[call-overload]
            if saving is not None:
                saving.wait()
        except (OSError, RankFailure) as error:
            said.append(f"{type(error).__name__} {error}")

    for wait in (True, False):
        said.clear()
        fckpt.sim({"i": 2}).run(program, wait)
        assert sorted(text.partition(" ")[0] for text in said) == ["OSError", "RankFailure"]
        assert any("save: rank 1 could not write to" in text and "no space left" in text for text in said)
        assert not (tmp_path / str(wait) / ".metadata").exists()


def test_the_end_of_a_program_waits(tmp_path: Path):
    script = """if True:
        import sys, time, torch, fckpt
        from torch.distributed.checkpoint import FileSystemWriter
        write = FileSystemWriter.write_data
        def slow(*args):
            time.sleep(1)
            if sys.argv[2] == "fails":
                raise OSError("no space left on device")
            return write(*args)
        FileSystemWriter.write_data = slow
        fckpt.save(sys.argv[1], torch.ones(3), wait=False)
        print("the last line")
    """
    run = lambda how: subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / how), how],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert run("works").stdout == "the last line\n"
    assert fckpt.load(tmp_path / "works", torch.zeros(3)).sum() == 3
    assert "no space left on device" in run("fails").stderr


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_train_on_while_they_save(ranks: int, tmp_path: Path):
    for found in fckpt.launch(checkpoint_programs.saves_meanwhile, ranks, str(tmp_path)):
        assert found["going"] and found["same"]
    assert fckpt.load(tmp_path / "1", torch.zeros(ranks * 1000)).tolist() == [1.0] * ranks * 1000
    assert fckpt.load(tmp_path / "2", torch.zeros(ranks * 1000)).tolist() == [2.0] * ranks * 1000
    with pytest.raises(ArgumentValueError, match="there is no checkpoint in"):
        fckpt.load(tmp_path / "3", torch.zeros(ranks * 1000))


def test_addresses_of_fsspec():
    fckpt.save("memory://fckpt/1", STATE)
    assert torch.equal(fckpt.load("memory://fckpt/1", LIKE)["params"]["w"], STATE["params"]["w"])
    with pytest.raises(ArgumentValueError, match="there is a checkpoint in memory://fckpt/1"):
        fckpt.save("memory://fckpt/1", STATE)
    with pytest.raises(ArgumentValueError, match="there is no checkpoint in memory://fckpt/2"):
        fckpt.load("memory://fckpt/2", LIKE)
