"""The cache of costs: hits run nothing, entries that cannot be read are dropped, and signatures tell calls apart."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from priced import Counter, call_of

from fckpt._trace.operations import Ref
from fckpt.cost import Measured, OpCost, signature

pytestmark = pytest.mark.usefixtures("cost_folder")

aten = torch.ops.aten


def count(source: Measured, op: Counter | None = None) -> int:
    """Prices an operation and returns how often it ran."""
    op = op or Counter()
    call, specs = call_of(op, torch.rand(3))
    op.runs = 0
    source(call, specs)
    return op.runs


def test_cache_hits_run_nothing(cost_folder: Path) -> None:
    assert count(Measured()) > 2
    assert count(Measured()) == 0
    assert count(Measured(cache=False)) > 2
    again = Measured()
    assert count(again) == count(again) == 0
    (file,) = cost_folder.iterdir()
    assert file.suffix == ".jsonl"


def test_cached_costs_are_the_same() -> None:
    call, specs = call_of(aten.logsumexp.default, torch.rand(8, 8), [1])
    assert Measured()(call, specs) == Measured()(call, specs)


def test_cache_tells_threads_and_settings_apart() -> None:
    assert count(Measured()) > 0
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert count(Measured()) > 0
    finally:
        torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    try:
        assert count(Measured()) > 0
    finally:
        torch.use_deterministic_algorithms(False)
    assert count(Measured()) == 0


@pytest.mark.parametrize(
    "junk", [b"\xff\x00junk", b'{"signature": "x"', b"[1, 2]\n", b'{"signature": 1, "seconds": "fast"}\n', b"null"]
)
def test_corrupt_lines_are_dropped(cost_folder: Path, junk: bytes) -> None:
    count(Measured())
    (file,) = cost_folder.iterdir()
    good = file.read_bytes()
    file.write_bytes(junk)
    assert count(Measured()) > 0
    assert count(Measured()) == 0
    file.write_bytes(good + junk)
    assert count(Measured()) == 0
    assert junk not in file.read_bytes()
    assert len(list(cost_folder.iterdir())) == 1


@pytest.mark.parametrize("name", ["seconds", "flops", "temporary_nbytes", "storages", "signature", "checksum"])
@pytest.mark.parametrize("absent", [False, True])
def test_lines_that_were_edited_are_dropped(cost_folder: Path, name: str, absent: bool) -> None:
    count(Measured())
    (file,) = cost_folder.iterdir()
    (entry,) = map(json.loads, filter(None, file.read_text().splitlines()))
    others = {"storages": [8], "signature": entry["signature"] + " ", "checksum": entry["checksum"][::-1]}
    edited = {**entry, name: others.get(name, 1)}
    assert edited != entry
    if absent:
        del edited[name]
    file.write_text(json.dumps(edited) + "\n")
    assert count(Measured()) > 0
    assert count(Measured()) == 0
    assert json.dumps(edited) not in file.read_text()


def test_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FCKPT_CACHE", str(tmp_path / "file"))
    assert count(Measured()) > 0


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fckpt.cost.store import cache_folder

    monkeypatch.delenv("FCKPT_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "fckpt"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "fckpt"


WRITER = """
import sys
from fckpt.cost import OpCost
from fckpt.cost.store import Store
store = Store()
for i in range(300):
    store.put("here", f"{sys.argv[1]}.op{i}", OpCost(1.0 + i, i, 2 * i))
"""


def test_two_processes_write_at_once() -> None:
    from fckpt.cost.store import Store

    writers = [subprocess.Popen([sys.executable, "-c", WRITER, name]) for name in ("first", "second")]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    store = Store()
    for name in ("first", "second"):
        assert all(store.get("here", f"{name}.op{i}") == OpCost(1.0 + i, i, 2 * i) for i in range(300))


def test_a_file_is_read_again_only_after_another_process_has_changed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from fckpt.cost import store

    read, parse = list[Path](), store._parsed_file
    monkeypatch.setattr(store, "_parsed_file", lambda path: (read.append(path), parse(path))[1])
    cost = OpCost(1.0, 2, 3)
    store.Store().get("here", "first")
    store.Store().put("here", "unread", cost)  # a store that has not read the file
    for number in range(3):
        one, other = store.Store(), store.Store()
        assert one.get("here", "unread") == other.get("here", "unread") == cost
        one.put("here", f"op{number}", cost)
        assert other.get("here", f"op{number}") == store.Store().get("here", f"op{number}") == cost
    assert len(read) == 2
    subprocess.run([sys.executable, "-c", WRITER, "second"], check=True)
    assert store.Store().get("here", "second.op7") == OpCost(8.0, 7, 14)
    assert store.Store().get("here", "op2") == cost and len(read) == 3


def test_a_line_that_another_process_appends_at_the_same_time_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from fckpt.cost import store

    cost, write, mine = OpCost(1.0, 2, 3), store._line, store.Store()
    mine.get("here", "first")
    mine.put("here", "first", cost)

    def meanwhile(key: str, written: OpCost) -> str:
        with open(store._path("here"), "a") as file:
            file.write(write("other", cost) + "\n")
        return write(key, written)

    with monkeypatch.context() as patch:
        patch.setattr(store, "_line", meanwhile)
        mine.put("here", "second", cost)
    found = store.Store()
    assert [found.get("here", key) for key in ("first", "second", "other")] == [cost] * 3


def test_of_a_large_file_the_latest_half_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from fckpt.cost import store

    cost, full = OpCost(1.0, 2, 3), store.Store()
    for number in range(20):
        full.put("here", f"op{number}", cost)
    nbytes = store._path("here").stat().st_size
    monkeypatch.setattr(store, "MOST_BYTES_EACH", nbytes - 200)
    monkeypatch.setattr(store, "_READ", {})
    kept = [number for number in range(20) if store.Store().get("here", f"op{number}") == cost]
    assert kept == list(range(10, 20))
    assert store._path("here").stat().st_size <= nbytes // 2 + 1


def test_the_files_that_were_used_last_stay(cost_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fckpt.cost import store

    monkeypatch.setattr(store, "MOST_FILES", 3)
    cost_folder.mkdir(exist_ok=True)
    (cost_folder / "costs-left.tmp").write_text("")
    (cost_folder / "plans-of-others.json").write_text("")
    os.utime(cost_folder / "costs-left.tmp", (0, 0))
    for i, where in enumerate("abc"):
        store.Store().put(where, "op", OpCost(1.0, 2, 3))
        os.utime(store._path(where), (i + 1, i + 1))
    assert store.Store().get("a", "op") == OpCost(1.0, 2, 3)  # reading is use
    store.Store().put("d", "op", OpCost(1.0, 2, 3))
    assert {where for where in "abcd" if store._path(where).exists()} == {"a", "c", "d"}
    assert not (cost_folder / "costs-left.tmp").exists() and (cost_folder / "plans-of-others.json").exists()


def test_other_users_can_still_read_a_file_from_which_corrupt_lines_were_dropped(cost_folder: Path) -> None:
    count(Measured())
    (file,) = cost_folder.iterdir()
    file.chmod(0o644)
    file.write_bytes(file.read_bytes() + b"junk")
    assert count(Measured()) == 0 and b"junk" not in file.read_bytes()
    assert file.stat().st_mode & 0o777 == 0o644


def test_signature_text() -> None:
    x = torch.rand(4, 6)
    call, specs = call_of(aten.add.Tensor, x, x.t().contiguous().t(), alpha=2)
    assert signature(call, specs) == ("aten.add.Tensor(%0=float32[4,6](6,1)cpu, %1=float32[4,6](1,4)cpu, alpha=2)")
    call, specs = call_of(aten.mul.Tensor, x, x)
    assert signature(call, specs) == "aten.mul.Tensor(%0=float32[4,6](6,1)cpu, %0)"
    call, specs = call_of(aten.cat.default, [x, x[:, :1]], 1)
    assert signature(call, specs) == "aten.cat.default([%0=float32[4,6](6,1)cpu, %1=float32[4,1](6,1)cpu], 1)"
    call, specs = call_of(aten._to_copy.default, x, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    expected = "dtype=torch.bfloat16, memory_format=torch.contiguous_format)"
    assert signature(call, specs) == f"aten._to_copy.default(%0=float32[4,6](6,1)cpu, {expected}"


def test_signature_forgets_places_and_generators() -> None:
    x = torch.rand(4)
    call, specs = call_of(aten.bernoulli.p, x, 0.5)
    seeded = dataclasses.replace(call, kwargs={"generator": torch.Generator()})
    moved = dataclasses.replace(call, args=(Ref(2), 0.5))
    assert signature(call, specs) == signature(seeded, specs) == signature(moved, [specs[1], specs[1], specs[0]])
