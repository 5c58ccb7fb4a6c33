"""Binomial checkpointing: against the closed form, against the recurrence, and on chains."""

from __future__ import annotations

import functools
from collections import Counter
from math import comb

import pytest
from graphs import chain

from fckpt.graph import schedule_of, simulate
from fckpt.solve._revolve import binomial, revolve
from fckpt.solve.chains.stages import Stages
from fckpt.solve.core.rules import Rules


def repetitions(length: int, snapshots: int) -> int:
    """The paper's r."""
    r = 0
    while comb(snapshots + r, snapshots) < length:
        r += 1
    return r


def closed_form(length: int, snapshots: int) -> int:
    """Returns the paper's t: the advances, without the runs that save everything for their own reversal."""
    r = repetitions(length, snapshots)
    return r * length - comb(snapshots + r, snapshots + 1)


def advances(length: int, snapshots: int) -> Counter[int]:
    """Runs the schedule, and counts how often each stage is advanced."""
    counts: Counter[int] = Counter()
    stored, at, gradient, recorded = {0}, 0, length, -1
    for step in binomial(length, snapshots):
        if step.kind == "backward":
            assert step.stage == recorded == gradient - 1
            gradient = step.stage
            stored.discard(gradient)
            at = max(stored, default=-1)  # what runs next starts from the last snapshot
            continue
        assert step.stage == at
        if step.kind == "all":
            recorded = step.stage
        else:
            counts[at] += 1
            if step.kind == "checkpoint":
                stored.add(at)
                assert len(stored) <= snapshots
            at += 1
    assert gradient == 0
    return counts


@pytest.mark.parametrize("snapshots", range(1, 21))
def test_the_number_of_advances_is_the_closed_form(snapshots: int):
    for length in range(1, 201):
        counts = advances(length, snapshots)
        assert counts.total() == closed_form(length, snapshots)
        assert max(counts.values(), default=0) <= repetitions(length, snapshots)


def test_the_closed_form_is_the_optimum():
    @functools.cache
    def least(length: int, snapshots: int) -> int:
        if length == 1:
            return 0
        if snapshots == 1:
            return length * (length - 1) // 2
        return min(k + least(length - k, snapshots - 1) + least(k, snapshots) for k in range(1, length))

    for length in range(1, 61):
        for snapshots in range(1, 9):
            assert least(length, snapshots) == closed_form(length, snapshots)


@pytest.mark.parametrize("snapshots", [1, 2, 3, 5, 21])
def test_on_a_chain_the_peak_is_the_number_of_snapshots(snapshots: int):
    graph = chain(20)
    stages = Stages(Rules(graph), order=None)
    assert len(stages) == 21  # the loss is one of them
    timeline = simulate(graph, schedule_of(graph, *stages.order(binomial(21, snapshots))))
    assert timeline.recomputed_seconds == closed_form(21, snapshots) - 20
    # the first input is the caller's; a layer's input and output, or cotangents before and after it
    assert timeline.peak_nbytes <= snapshots - 1 + 3


def test_more_memory_gives_a_faster_schedule():
    graph = chain(60)
    plain = 61
    seconds = [simulate(graph, revolve(graph, budget)).seconds for budget in (9, 12, 20, 40, plain)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 1.2 * seconds[-1]
    assert simulate(graph, revolve(graph)).seconds == seconds[-1]
