"""Canonical strategies: against exhaustive search in their model, and their schedules."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from graphs import chain, network, plain_nbytes

from fckpt.errors import BudgetError
from fckpt.graph import simulate
from fckpt.solve._lower_sets import Blocks, all_lower_sets, ancestor_sets, lower_sets, ticks_of
from fckpt.solve.chains.tensors import tensor_graph
from fckpt.solve.core.rules import Rules

Reads = list[list[int]]


def drawn(seed: int, most: int = 5) -> tuple[Reads, list[int], list[int]]:
    """Returns random graphs: what each vertex reads, bytes, and ticks."""
    rng = random.Random(seed)
    count = rng.randint(1, most)
    density = rng.choice([0.3, 0.6])
    reads = [[v for v in range(i) if rng.random() < density] for i in range(count)]
    return reads, [rng.randint(0, 9) for _ in range(count)], [rng.randint(0, 4) for _ in range(count)]


def is_lower(members: frozenset[int], reads: Reads) -> bool:
    return all(v in members for m in members for v in reads[m])


def as_sets(family: Sequence[int], count: int) -> list[frozenset[int]]:
    return [frozenset(v for v in range(count) if members >> v & 1) for members in family]


def costs(
    sequence: Sequence[frozenset[int]], reads: Reads, nbytes: Sequence[int], ticks: Sequence[int]
) -> tuple[int, int]:
    """Returns the most bytes of a stage and the ticks of a sequence of lower sets, exactly as in the paper."""
    count = len(reads)
    everything = set(range(count))

    def after(members: frozenset[int] | set[int]) -> set[int]:
        return {v for v in everything if any(r in members for r in reads[v])}

    def before(members: set[int]) -> set[int]:
        return {r for v in members for r in reads[v]}

    def boundary(members: frozenset[int]) -> set[int]:
        return {v for v in members if not after({v}) <= members}

    def total(members: set[int]) -> int:
        return sum(nbytes[v] for v in members)

    cached: set[int] = set()
    most = spent = 0
    for smaller, larger in pairwise(sequence):
        block, outer = set(larger - smaller), after(larger) - larger
        stage = total(cached) + 2 * total(block) + total(outer) + total(before(after(larger)) - larger)
        cached = cached | boundary(larger)
        most = max(most, stage, total(cached))
        spent += sum(ticks[v] for v in block - boundary(larger))
    return most, spent


def sequences(family: list[frozenset[int]], end: frozenset[int]) -> Iterator[list[frozenset[int]]]:
    """Yields all increasing sequences from the empty set to `end`."""
    if not end:
        yield [end]
    for smaller in family:
        if smaller < end:
            for head in sequences(family, smaller):
                yield [*head, end]


@pytest.mark.parametrize("start", range(0, 60, 15))
@pytest.mark.parametrize("exact", [True, False])
def test_the_best_of_all_sequences(start: int, exact: bool):
    for seed in range(start, start + 15):
        reads, nbytes, ticks = drawn(seed, most=5 if exact else 7)
        family = all_lower_sets(reads, 1000) if exact else ancestor_sets(reads)
        assert family is not None
        blocks = Blocks(reads, nbytes, ticks, family)
        named = as_sets(family, len(reads))
        known = [costs(sequence, reads, nbytes, ticks) for sequence in sequences(named, named[-1])]
        low, high = min(most for most, _ in known), max(most for most, _ in known)
        assert blocks.best(low - 1) is None
        assert low <= blocks.least() <= low + blocks.most // 1024 + 1
        assert blocks.most == 2 * sum(nbytes) >= high
        for budget in range(low, high + 1, 1 + (high - low) // 4):
            within = [spent for most, spent in known if most <= budget]
            for longest, best in ((False, min(within)), (True, max(within))):
                found = blocks.best(budget, longest=longest)
                assert found is not None
                most, spent = costs([named[i] for i in found], reads, nbytes, ticks)
                assert (most, spent) == (blocks.needs(found), best)
                assert most <= budget


def test_ancestor_sets_never_beat_all_lower_sets():
    worse = 0
    for seed in range(60):
        reads, nbytes, ticks = drawn(seed, most=9)
        family = all_lower_sets(reads, 5000)
        assert family is not None
        exact, approximate = (Blocks(reads, nbytes, ticks, sets) for sets in (family, ancestor_sets(reads)))
        for part in (0.5, 0.7, 0.9, 1.0):
            budget = int(part * exact.most)
            best, near = exact.best(budget), approximate.best(budget)
            assert best is not None or near is None
            if best is not None and near is not None:
                fewest, found = (
                    sum(int(of.recomputed[i, j]) for i, j in pairwise(sequence))
                    for of, sequence in ((exact, best), (approximate, near))
                )
                assert fewest <= found
                worse += fewest < found
            else:
                worse += best is not None
    assert worse  # otherwise it would not be an approximation


def test_families_of_lower_sets():
    for seed in range(60):
        reads, _, _ = drawn(seed, most=8)
        count = len(reads)
        subsets = [frozenset(v for v in range(count) if k >> v & 1) for k in range(1 << count)]
        every = {members for members in subsets if is_lower(members, reads)}
        found = all_lower_sets(reads, len(every))
        assert found is not None
        assert set(as_sets(found, count)) == every and len(found) == len(every)
        assert all_lower_sets(reads, len(every) - 1) is None
        some = as_sets(ancestor_sets(reads), count)
        assert set(some) <= every and len(some) <= count + 2
        for vertex in range(count):
            assert min((m for m in every if vertex in m), key=len) in some
        assert [len(members) for members in some] == sorted(len(members) for members in some)


def test_times_become_about_five_ticks_each():
    assert ticks_of([0.0, 0.0]) == [0, 0]
    rng = random.Random(0)
    for count in (10, 100):
        seconds = [rng.random() ** 4 for _ in range(count)]
        ticks = ticks_of(seconds)
        assert 4 * count < sum(ticks) <= 5 * count and min(ticks) >= 1
        order = sorted(range(count), key=seconds.__getitem__)
        assert [ticks[i] for i in order] == sorted(ticks)


@pytest.mark.parametrize("kind", ["chain", "residual", "dense", "skips"])
def test_less_memory_takes_more_time(kind: str):
    graph = {
        "chain": lambda: chain(60),
        "residual": lambda: network(20),
        "dense": lambda: network(8, dense=4),
        "skips": lambda: network(12, skips=True, shrink=0.7),
    }[kind]()
    whole = plain_nbytes(graph)
    overheads = []
    for fraction in (1.0, 0.8, 0.6, 0.5):
        found = simulate(graph, lower_sets(graph, int(fraction * whole)))
        assert found.peak_nbytes <= fraction * whole
        overheads.append(found.overhead)
    assert overheads[0] == 0.0 < overheads[-1] < 0.5
    assert overheads == sorted(overheads)


def test_on_a_chain_the_least_budget_is_about_twice_the_square_root():
    graph = chain(100)
    assert len(tensor_graph(Rules(graph))) == 100
    with pytest.raises(BudgetError) as caught:
        lower_sets(graph, 1)
    assert caught.value.least_bytes <= 2 * 100**0.5 + 3
