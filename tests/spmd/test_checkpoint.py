"""Trees in files: saved on some ranks, loaded on others, bit for bit; and what is refused."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import checkpoint_programs
import pytest
import torch
from checkpoint_programs import STATE, Moments, tree
from torch.distributed import checkpoint

import fckpt
from fckpt import P
from fckpt import _tree as trees
from fckpt.errors import ArgumentTypeError, ArgumentValueError, MeshWarning, RankFailure


def same(a: Any, b: Any) -> bool:
    (leaves, spec), (others, other_spec) = trees.flatten(a), trees.flatten(b)
    assert spec == other_spec
    return all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(leaves, others, strict=True)
    )


# ---- processes -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def written(folder: Path) -> list[dict[str, Any]]:
    return fckpt.launch(checkpoint_programs.writes, 4, str(folder))


def test_training_resumed_is_training_not_interrupted(written: list[dict[str, Any]]):
    assert len(written) == 4 and written[0]["saved"]["step"] == 2
    for found in written:
        assert same(found["on"], found["again"]) and not same(found["on"], found["saved"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_four_ranks_save_others_load(ranks: int, folder: Path, written: list[dict[str, Any]]):
    reads = checkpoint_programs.reads
    for found in [reads(str(folder))] if ranks == 1 else fckpt.launch(reads, ranks, str(folder)):
        assert same(found["saved"], written[0]["saved"])
        assert same(found["part"]["params"], written[0]["saved"]["params"])
        assert same(found["adam"], written[0]["adam"])
        assert torch.equal(found["grid"], torch.arange(32.0, dtype=torch.bfloat16).reshape(8, 4))
        for x, y in zip(trees.leaves(found["on"]), trees.leaves(written[0]["on"]), strict=True):
            if isinstance(x, torch.Tensor):  # fewer ranks add in another order
                torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_a_process_without_a_mesh_loads_what_ranks_have_saved(folder: Path, written: list[dict[str, Any]]):
    assert same(fckpt.load(folder / "flat", tree(1)), written[0]["saved"])


def test_a_failure_on_one_rank_is_seen_on_all_and_a_caught_one_forgotten(tmp_path: Path):
    start = time.monotonic()
    fckpt.save(tmp_path / "flat", tree(0))
    with pytest.raises(RankFailure, match="the process of rank 1 was killed by SIGKILL"):
        fckpt.launch(checkpoint_programs.goes_wrong, 2, str(tmp_path), timeout_seconds=3)
    assert time.monotonic() - start < 60
    seen = lambda name, rank: json.loads((tmp_path / f"{name} {rank}").read_text())
    for rank in range(2):
        kind, said, _ = seen("tree", rank)
        assert kind == "RankFailure" and re.match(
            r"save: rank 1 has tree\['x'\] of float32\[6\] with P\('data'\)", said
        )
        kind, said, _ = seen("leaf", rank)
        assert kind == "ArgumentValueError" and said.startswith("load: tree['params']['left'] is not in")
    kind, said, seconds = seen("death", 0)
    assert kind == "RankFailure" and said.startswith("rank 1 gives no sign of life") and seconds < 3 + 5
    with pytest.raises(ArgumentValueError, match="there is no checkpoint in"):
        fckpt.load(tmp_path / "cut", {"x": torch.zeros(2)})


# ---- simulations, and a process on its own ---------------------------------------------------------


def test_meshes_and_specs_need_not_be_those_of_save(tmp_path: Path):
    x = torch.arange(72.0).reshape(6, 12)
    first, then = P("a", ("c", "b")), P(("j", "i"))
    save = lambda: fckpt.save(tmp_path / "x", [fckpt.shard(x, first)], first)
    fckpt.sim({"a": 2, "b": 2, "c": 3}).run(save)
    parts = fckpt.sim({"i": 2, "j": 3}).run(lambda: fckpt.load(tmp_path / "x", [torch.empty(1, 12)], then))
    order = [0, 2, 4, 1, 3, 5]  # j varies slowest in the spec, fastest in the mesh
    assert all(torch.equal(part[0], x[i : i + 1]) for part, i in zip(parts, order, strict=True))
    assert torch.equal(fckpt.load(tmp_path / "x", [torch.empty(6, 12)])[0], x)


def test_torch_reads_and_writes_the_same_files(tmp_path: Path):
    state = tree(0)
    fckpt.save(tmp_path / "ours", {"params": state["params"], "blocks": [{"w": torch.ones(2)}], "step": 3})
    like = {"params": tree(1)["params"], "blocks": [{"w": torch.zeros(2)}], "step": 0}
    with pytest.warns(UserWarning, match="in a single process"):
        checkpoint.load(like, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert same(like["params"], state["params"]) and like["step"] == 3 and like["blocks"][0]["w"].sum() == 2
    with pytest.warns(UserWarning, match="in a single process"):
        checkpoint.save(like, checkpoint_id=tmp_path / "theirs", no_dist=True)
    assert same(fckpt.load(tmp_path / "theirs", {"params": tree(1)["params"]})["params"], state["params"])


def test_new_tensors_are_like_the_old_ones(tmp_path: Path):
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    weight = torch.nn.Parameter(torch.randn(3))
    saved = {
        "image": image,
        "weight": weight,
        "none": None,
        "empty": torch.empty(0, 3),
        "turned": torch.randn(3, 4).T[1:],
    }
    fckpt.save(tmp_path / "x", saved)
    like = trees.map_leaves(lambda x: torch.zeros_like(x, requires_grad=x.requires_grad), saved)
    found = fckpt.load(tmp_path / "x", {**like, "image": like["image"].to("meta")})
    assert same(found, saved) and found["image"].is_contiguous(memory_format=torch.channels_last)
    assert found["weight"].requires_grad and found["weight"].is_leaf and not like["weight"].any()


def test_dtensors_are_taken_for_their_parts(tmp_path: Path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = fckpt.init_mesh({"data": 1})
    devices = init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
    fckpt.save(tmp_path / "x", distribute_tensor(torch.arange(4.0), devices, [Shard(0)]), P("data"), mesh)
    assert torch.equal(fckpt.load(tmp_path / "x", torch.zeros(4), P("data"), mesh), torch.arange(4.0))


def test_data_that_differ_where_the_spec_says_that_they_do_not_are_a_warning(tmp_path: Path):
    def program(spec: P) -> None:
        with fckpt.use_mesh(fckpt.init_mesh({"a": 2, "b": 2})):
            mine = torch.ones(2) * fckpt.axis_index("a")
            fckpt.save(tmp_path / str(spec), {"x": mine, "y": torch.ones(3)}, {"x": spec, "y": P()})

    with pytest.warns(MeshWarning, match=r"say that they are replicated: tree\['x'\], with P\('b'\)\. The data of one"):
        fckpt.sim({"a": 2, "b": 2}).run(program, P("b"))
    fckpt.sim({"a": 2, "b": 2}).run(program, P("a"))


@pytest.mark.parametrize(
    ("like", "error", "text"),
    [
        ({"x": {"w": torch.ones(6), "v": torch.ones(1)}}, ArgumentValueError, r"tree\['x'\]\['v'\] is not in .* 'x.w'"),
        (
            {"x": {"w": torch.ones(5)}},
            ArgumentValueError,
            r"is float32\[6\] in .*, but float32\[5\] with P\(\) is a part",
        ),
        ({"x": {"w": torch.ones(6, dtype=torch.float64)}}, ArgumentTypeError, r"is torch.float32 in .* not .*float64"),
        ({"step": torch.ones(())}, ArgumentTypeError, r"tree\['step'\] is a tensor, but plain data in"),
        ({"x": {"w": 0}}, ArgumentTypeError, r"tree\['x'\]\['w'\] is plain data, but a tensor in"),
    ],
)
def test_what_is_not_there(like: Any, error: Any, text: str, tmp_path: Path):
    fckpt.save(tmp_path / "x", {"x": {"w": torch.ones(6)}, "step": 3})
    with pytest.raises(error, match=text):
        fckpt.load(tmp_path / "x", like)


def test_what_cannot_be_divided(tmp_path: Path):
    fckpt.save(tmp_path / "x", {"w": torch.ones(6)})
    with pytest.raises(
        ArgumentValueError, match=r"load: dimension 0 of tree\['w'\] in .*, float32\[6\], cannot be .*'i'"
    ):
        fckpt.sim({"i": 4}).run(lambda: fckpt.load(tmp_path / "x", {"w": torch.ones(1)}, P("i")))


@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, ArgumentValueError, r"would both be 'a.b' in the file"),
        ({"model": torch.nn.Linear(1, 1)}, ArgumentTypeError, r"tree\['model'\] is Linear: pass its state_dict\(\)"),
    ],
)
def test_what_cannot_be_saved(bad: Any, error: Any, text: str, tmp_path: Path):
    with pytest.raises(error, match=text):
        fckpt.save(tmp_path / "x", bad)
    assert not (tmp_path / "x").exists()


def test_a_checkpoint_is_not_written_over(tmp_path: Path):
    fckpt.save(tmp_path / "x", torch.ones(1))
    with pytest.raises(ArgumentValueError, match=r"there is a checkpoint in .* a new folder, one for each step"):
        fckpt.save(tmp_path / "x", torch.zeros(1))
    assert fckpt.load(tmp_path / "x", torch.zeros(1)) == 1


def test_specs_and_meshes_belong_together(tmp_path: Path):
    with pytest.raises(ArgumentValueError, match=r"save: there are specs, but no mesh. Pass mesh="):
        fckpt.save(tmp_path / "x", torch.ones(1), P())
    with pytest.raises(ArgumentTypeError, match=r"save: on Mesh\(\{'i': 2\}\) each tensor needs a spec"):
        fckpt.sim({"i": 2}).run(lambda: fckpt.save(tmp_path / "x", torch.ones(1)))
    with pytest.raises(ArgumentValueError, match=r"a fake mesh carries no messages"):
        fckpt.save(tmp_path / "x", torch.ones(1), P(), fckpt.fake_mesh({"i": 512}))


def test_all_ranks_must_save(tmp_path: Path):
    def program() -> None:
        if int(fckpt.axis_index("i")) == 0:
            fckpt.save(tmp_path / "x", torch.ones(1), P())

    with pytest.raises(RankFailure, match="rank 1 has returned, while rank 0 waits for save of a tree"):
        fckpt.sim({"i": 2}).run(program)


def test_a_folder_that_cannot_be_written_is_the_error_that_it_is(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file") as caught:
        fckpt.sim({"i": 2}).run(lambda: fckpt.save(tmp_path / "file" / "x", torch.ones(1), P()))
    assert re.match(r"on rank \d, in save of", caught.value.__notes__[0])


def test_names_in_files_are_paths():
    named = {"blocks": [{"w": 1}, (2, None)], "moments": Moments({3: 3}, 4)}
    assert trees.flatten(named)[1].names() == ["blocks.0.w", "blocks.1.0", "moments.mean.3", "moments.square"]
    assert set(trees.flatten(STATE)[1].names()) >= {"params.up", "moments.square.scale", "step"}
