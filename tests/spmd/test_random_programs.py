"""Random programs of collectives on random meshes are those of one process, and so are their gradients."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_programs import AXES, F64, Program, all_found, expected, extent, found

import fckpt

CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}  # sums in another order
EXAMPLES = {"slow": 2_000}.get(os.environ.get("FCKPT_PROFILE", ""), 60)
MOST = 48
pytestmark = pytest.mark.filterwarnings("ignore::fckpt.MeshWarning")  # a psum of what all have is what it is


@st.composite
def groupings(draw: st.DrawFn, count: int, even: bool) -> Any:
    """Groups of so many ranks, in any order, or None."""
    if draw(st.booleans()):
        return None
    order = draw(st.permutations(range(count)))
    if even:
        size = draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
        return tuple(tuple(order[i : i + size]) for i in range(0, count, size))
    cuts = sorted(draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    return tuple(tuple(order[i:j]) for i, j in zip([0, *cuts], [*cuts, count], strict=True))


@st.composite
def programs(draw: st.DrawFn, meshes: Any = None) -> Program:
    mesh = draw(st.sampled_from(meshes or [(1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (3, 2), (2, 3)]))
    shape = [draw(st.sampled_from([1, 2, 3, 6])) for _ in range(2)]
    program, size = Program(mesh, (shape[0], shape[1]), ()), list(shape)
    steps: list[tuple[Any, ...]] = []
    for _ in range(draw(st.integers(1, 6))):
        axes = draw(st.sampled_from([("a",), ("b",), ("a", "b"), ("b", "a")]))
        dim = draw(st.integers(0, 1))
        name = draw(
            st.sampled_from(
                ["sin", "scale", "number", "psum", "pmean", "all_gather", "psum_scatter", "all_to_all", "ppermute"]
            )
        )
        groups = draw(groupings(extent(program, axes), even=name not in ("psum", "pmean")))
        n = len(groups[0]) if groups else extent(program, axes)
        if name in ("sin", "scale"):
            steps.append((name,))
        elif name == "number":
            steps.append((name, axes))
        elif name in ("psum", "pmean"):
            steps.append((name, axes, groups))
        elif name == "all_gather" and size[dim] * n <= MOST:
            left_out = draw(st.integers(0, n - 1)) if draw(st.booleans()) else None
            size[dim] = size[dim] * n - (left_out or 0)
            steps.append((name, axes, dim, groups, None if left_out is None else size[dim]))
        elif name == "psum_scatter":
            pad = size[dim] % n > 0 or draw(st.booleans())
            size[dim] = -(-size[dim] // n)
            steps.append((name, axes, dim, groups, pad))
        elif name == "all_to_all" and size[dim] % n == 0:
            concat = draw(st.integers(0, 1))
            if size[concat] * n <= MOST or concat == dim:
                size[dim] //= n
                size[concat] *= n
                steps.append((name, axes, dim, concat, groups))
        elif name == "ppermute":
            axis = axes[0]
            ranks = range(program.axes[axis])
            targets = draw(st.permutations(ranks))
            kept = draw(st.lists(st.booleans(), min_size=len(ranks), max_size=len(ranks)))
            pairs = tuple((i, j) for i, j, keep in zip(ranks, targets, kept, strict=True) if keep)
            steps.append((name, axis, pairs))
    return Program(mesh, (shape[0], shape[1]), tuple(steps))


def check(program: Program, all_ranks: list[dict[str, torch.Tensor]]) -> None:
    for mine, own in zip(all_ranks, expected(program), strict=True):
        for name, value in own.items():
            torch.testing.assert_close(mine[name], value, **CLOSE, msg=lambda said, n=name: f"{n} of {program}: {said}")


@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES < 1000, suppress_health_check=[HealthCheck.too_slow]
)
@given(programs(), st.sampled_from(["plain", "remat", "budget"]))
def test_simulated_ranks_find_what_one_process_finds(program: Program, wrap: str) -> None:
    with fckpt.use_mesh(fckpt.Mesh(program.axes)):
        check(program, fckpt.sim(program.axes).run(found, program, wrap))


SAMPLE = [
    Program((2, 2), (2, 6), (("scale",), ("all_gather", ("b", "a"), 1), ("sin",), ("psum_scatter", ("a",), 0))),
    Program((2, 2), (4, 2), (("all_to_all", ("a", "b"), 0, 1), ("number", ("b",)), ("psum", ("a",)), ("scale",))),
    Program((2, 2), (1, 3), (("ppermute", "a", ((0, 1),)), ("pmean", ("b",)), ("scale",), ("all_gather", ("a",), 0))),
    Program((2, 2), (4, 4), (("psum_scatter", ("b", "a"), 1), ("scale",), ("ppermute", "b", ((1, 0), (0, 1))))),
    Program(
        (2, 2), (3, 5), (("psum_scatter", ("a", "b"), 1, None, True), ("scale",), ("all_gather", ("b",), 0, None, 5))
    ),
    Program(
        (2, 2), (2, 2), (("psum", ("a", "b"), ((3, 0, 1), (2,))), ("scale",), ("pmean", ("b", "a"), ((0,), (1, 2, 3))))
    ),
    Program(
        (2, 2),
        (2, 4),
        (
            ("all_to_all", ("a", "b"), 1, 0, ((0, 3), (2, 1))),
            ("scale",),
            ("all_gather", ("b", "a"), 1, ((3, 1), (0, 2)), None),
        ),
    ),
]


@pytest.mark.parametrize("wrap", ["plain", "remat"])
def test_processes_find_what_simulated_ranks_find_bit_for_bit(wrap: str) -> None:
    in_processes = fckpt.launch(all_found, 4, SAMPLE, wrap)
    for i, program in enumerate(SAMPLE):
        ranks = [found_by_one[i] for found_by_one in in_processes]
        check(program, ranks)
        for mine, simulated in zip(ranks, fckpt.sim(program.axes).run(found, program, wrap), strict=True):
            for name, value in simulated.items():
                assert torch.equal(mine[name], value), f"{name} of {program}"


def test_the_reference_is_not_the_program() -> None:
    """It exchanges nothing: a mistake in a collective cannot hide in both."""
    program = SAMPLE[0]
    w, x = program.inputs()
    assert w.dtype == F64 and x.shape == (2, 2, 2, 6) and len(AXES) == 2
    assert len({tuple(row["x inside"].flatten().tolist()) for row in expected(program)}) == 4
