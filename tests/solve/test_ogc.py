"""Optimal gradient checkpoints: against exhaustive search in their model, and on graphs of known structure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise, product

import pytest
import torch
from graphs import Builder, Layer, chain, differentiated, graphs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fckpt
from benches.models.convolutional import ResNet
from fckpt.cost import Analytic, profile_of
from fckpt.errors import BudgetError
from fckpt.graph import Graph, simulate
from fckpt.solve._ogc import best_checkpoints, between_ends, ogc
from fckpt.solve.chains.division_tree import Edge, Part, divide
from fckpt.solve.chains.tensors import tensor_graph
from fckpt.solve.core.rules import Rules


def drawn(seed: int, most: int = 9) -> tuple[list[int], list[Edge]]:
    """A random graph of one of three kinds, in which every vertex lies between the first and the last."""
    rng = random.Random(seed)
    count = rng.randint(3, most)
    density, reach = rng.choice([(0.5, count), (0.2, count), (0.6, 2)])
    edges = {(a, b) for a in range(count) for b in range(a + 1, min(count, a + 1 + reach)) if rng.random() < density}
    for vertex in range(count):
        if vertex and not any(b == vertex for _, b in edges):
            edges.add((rng.randrange(vertex), vertex))
        if vertex < count - 1 and not any(a == vertex for a, _ in edges):
            edges.add((vertex, rng.randrange(vertex + 1, count)))
    return [rng.choice([0, 1, 2, 3, 5, 8]) for _ in range(count)], sorted(edges)


def parts(tree: Part) -> Iterator[Part]:
    yield tree
    for child in tree.children:
        yield from parts(child)


Plan = tuple[frozenset[int], int]
"""Checkpoints, and the most bytes inside a segment."""


def admitted(part: Part, nbytes: list[int]) -> Iterator[Plan]:
    """Yields all plans that a division tree admits for a part that is not itself one segment."""
    options = [
        [(frozenset[int](), child.nbytes), *(admitted(child, nbytes) if child.children else ())]
        for child in part.children
    ]
    if part.kind != "linear":
        for choice in product(*options):
            yield (
                frozenset(part.ends).union(*(chosen_inside for chosen_inside, _ in choice)),
                max((most for _, most in choice), default=0),
            )
        return
    cuts = [part.source, *(child.target for child in part.children)]
    inner = range(1, len(cuts) - 1)
    for chosen in (c for size in range(len(cuts) - 1) for c in combinations(inner, size)):
        segments: list[list[Plan]] = []
        for j, k in pairwise([0, *chosen, len(cuts) - 1]):
            whole = sum(child.nbytes for child in part.children[j:k]) + sum(nbytes[v] for v in cuts[j + 1 : k])
            segments.append(options[j] if k == j + 1 else [(frozenset(), whole)])
        for choice in product(*segments):
            chosen_inside = frozenset(cuts[k] for k in chosen)
            yield chosen_inside.union(*(inside for inside, _ in choice)), max(most for _, most in choice)


@pytest.mark.parametrize("start", range(0, 240, 40))
def test_the_plan_is_the_best_that_the_tree_admits(start: int):
    for seed in range(start, start + 40):
        nbytes, edges = drawn(seed)
        found = best_checkpoints(nbytes, edges)
        least = min(
            sum(nbytes[v] for v in chosen_inside) + most
            for chosen_inside, most in admitted(divide(nbytes, edges), nbytes)
        )
        assert found.total_nbytes == least
        assert found.total_nbytes == found.limit + sum(nbytes[v] for v in found.chosen)


def test_on_chains_the_plan_is_the_best_of_all_choices():
    for seed in range(60):
        rng = random.Random(seed)
        nbytes = [rng.randint(0, 9) for _ in range(rng.randint(3, 11))]
        last, totals = len(nbytes) - 1, []
        for size in range(last):
            for chosen in combinations(range(1, last), size):
                inside = [sum(nbytes[j + 1 : k]) for j, k in pairwise([0, *chosen, last])]
                totals.append(sum(nbytes[v] for v in chosen) + max(inside))
        assert best_checkpoints(nbytes, list(pairwise(range(len(nbytes))))).total_nbytes == min(totals)


def test_no_segment_exceeds_the_limit():
    for seed in range(200):
        nbytes, edges = drawn(seed, most=30)
        found = best_checkpoints(nbytes, edges)
        group = {v: {v} for v in range(1, len(nbytes) - 1) if v not in found.chosen}
        for a, b in edges:
            if a in group and b in group and group[a] is not group[b]:
                group[a] |= group[b]
                for v in group[b]:
                    group[v] = group[a]
        assert all(sum(nbytes[v] for v in together) <= found.limit for together in group.values())


def test_a_division_partitions_the_edges_into_closed_sets():
    kinds: set[str] = set()
    for seed in range(300):
        nbytes, edges = drawn(seed, most=30)
        for part in parts(divide(nbytes, edges)):
            kinds.add(part.kind)
            inside = {v for edge in part.edges for v in edge} - {part.source, part.target}
            assert all(edge in part.edges for edge in edges if not inside.isdisjoint(edge))
            assert part.nbytes == sum(nbytes[v] for v in inside)
            assert (part.kind == "leaf") == (not inside) == (not part.children)
            if part.children:
                assert sorted(edge for child in part.children for edge in child.edges) == sorted(part.edges)
                assert len(part.children) > 1
            if part.kind == "linear":
                assert [child.target for child in part.children[:-1]] == [c.source for c in part.children[1:]]
    assert kinds == {"leaf", "linear", "branched", "non-divisible"}


def test_a_graph_with_a_cross_edge_is_non_divisible():
    # 0 -> 1 -> 2 -> 5 and 0 -> 3 -> 4 -> 5 with a cross edge 1 -> 4; 6 and 7 lie between 0 and 1.
    order = [0, 6, 7, 1, 2, 3, 4, 5]
    rename = {v: i for i, v in enumerate(order)}
    named = [(0, 6), (6, 7), (7, 1), (1, 2), (2, 5), (0, 3), (3, 4), (4, 5), (1, 4)]
    edges = sorted((rename[a], rename[b]) for a, b in named)
    tree = divide([0, 10, 10, 1, 1, 1, 1, 0], edges)
    assert tree.kind == "non-divisible" and tree.ends == {rename[1], rename[4]}
    assert {(order[c.source], order[c.target]) for c in tree.children} == {(0, 1), (1, 5), (0, 4), (4, 5), (1, 4)}
    assert [c.kind for c in tree.children if order[c.target] == 1] == ["linear"]
    found = best_checkpoints([0, 10, 10, 1, 1, 1, 1, 0], edges)
    assert found.total_nbytes == 22  # with a checkpoint at 6 as well: ties go to the largest segment
    assert found.limit == 20 and {order[v] for v in found.chosen} == {1, 4}


def test_a_residual_network_has_the_vertices_of_the_papers_graph():
    # Their ResNets: the input, three vertices of the stem, six per block and one more where the shortcut is projected,
    # pooling and the classifier; their ResNet-50 has 106 vertices and 121 edges.
    torch.manual_seed(0)
    model = ResNet((1, 2), classes=10, small=False)
    plan = fckpt.plan(
        lambda x: model(x).sum(), torch.randn(2, 3, 32, 32), budget=1.0, costs=Analytic(profile_of("cpu"))
    )
    vertices, edges = between_ends(plan.graph, tensor_graph(Rules(plan.graph)))
    assert len(vertices) + 2 == 1 + 3 + 7 + 7 + 6 + 2  # what the classifier makes, nobody reads: it is the target
    assert len(edges) == 3 + 8 + 8 + 7 + 2
    assert [part.kind for part in divide([0] * (len(vertices) + 2), edges).children].count("branched") == 3


def step(branches: bool = True) -> Graph:
    """Data through three layers with a parameter each, an in-place activation, a mask, and a constant."""
    build = Builder()
    x, constant = build.value(8), build.value(8)
    parameters = [build.value(4) for _ in range(3)]
    layers, h = [], x
    for k, parameter in enumerate(parameters):
        cast = build.node("cast", [parameter], [2]) if k else [parameter]
        made = build.node("matmul", [h, *cast], [16])
        layers.append(Layer([h, *cast], made, [h, *cast], 1.0, 0, cast[0]))
        active = build.node("relu", made, [16])
        layers.append(Layer(made, active, active, 1.0, 0))
        mask = build.node("aten.rand_like.default", active, [16], random=True)
        out = build.node("mul", [*active, *mask, constant], [16])
        layers.append(Layer([*active, *mask, constant], out, mask, 1.0, 0))
        h = out[0] if k else build.node("norm", out, [16])[0]
        if not k:
            layers.append(Layer(out, [h], out, 1.0, 0))
    return differentiated(build, layers, [x, constant, *parameters], [h])


def test_vertices_of_the_tensor_graph():
    graph = step()
    vertices = tensor_graph(Rules(graph))
    assert [tuple(graph.nodes[i].op.split(".")[-2:][0] for i in v.nodes) for v in vertices] == [
        ("matmul", "relu"), ("rand_like",), ("mul",), ("norm",),
        ("cast",), ("matmul", "relu"), ("rand_like",), ("mul",),
        ("cast",), ("matmul", "relu"), ("rand_like",),
    ]  # fmt: skip
    chosen_inside, edges = between_ends(graph, vertices)
    assert [graph.nodes[v.nodes[-1]].op for v in chosen_inside] == ["relu", "mul", "norm", "relu", "mul", "relu"]
    assert edges == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7)]


@pytest.mark.parametrize("count", [1, 2, 9, 40, 64])
def test_chains_save_about_the_square_root(count: int):
    graph = chain(count, nbytes=100)
    rules = Rules(graph)
    vertices, edges = between_ends(graph, tensor_graph(rules))
    nbytes = [0, *(100 for _ in vertices), 0]
    inner = len(vertices)
    best = best_checkpoints(nbytes, edges)
    assert best.total_nbytes == min(100 * (k + -((k - inner) // (k + 1))) for k in range(inner + 1))
    assert len(best.chosen) <= inner**0.5 + 1
    found = simulate(graph, ogc(graph))
    assert count - len(best.chosen) - 1 <= found.recomputed_nodes <= count


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graph=graphs(most=8, decisions=True), fraction=st.floats(0.2, 1.0))
def test_the_only_plan_fits_or_is_refused(graph: Graph, fraction: float):
    schedule = ogc(graph)
    found = simulate(graph, schedule)
    assert found.recomputed_nodes <= graph.boundary
    budget = int(fraction * found.peak_nbytes)
    if budget < found.peak_nbytes:
        with pytest.raises(BudgetError, match="'ogc'") as caught:
            ogc(graph, budget)
        assert caught.value.least_bytes == found.peak_nbytes
    assert ogc(graph, found.peak_nbytes) == schedule
