"""The networks of the benches: their parameters are as published, and their outputs bitwise equal to torchvision's."""

from __future__ import annotations

import pytest

pytest.importorskip("rich")

import torch
import torchvision_shim  # noqa: F401  before torchvision
from torch import nn

from benches.models.published_networks import NETWORKS
from benches.models.searched_cells import AMOEBANET_A, DARTS_V2, NASNET_A, Genotype
from benches.models.wrapping import TorchCheckpoint

PARAMETERS = {
    "alexnet": 61_100_840,
    "vgg11": 132_863_336,
    "vgg13": 133_047_848,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "densenet121": 7_978_856,
    "densenet161": 28_681_000,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
    "inception_v3": 23_834_568,  # 27,161,264 with the auxiliary classifier, which is left out here
    "nasnet": 3_830_950,
    "amoebanet": 3_145_078,
    "darts": 3_349_342,
}
"""torchvision's published counts; for the last three those of Feng & Huang's code."""
META = torch.device("meta")


def test_the_table_is_whole() -> None:
    assert list(NETWORKS) == list(PARAMETERS)
    assert {tuple(network.sizes) for network in NETWORKS.values()} == {("paper", "cpu", "tiny")}


@pytest.mark.parametrize("name", NETWORKS)
def test_parameters_are_those_of_the_paper(name: str) -> None:
    with META:
        model = NETWORKS[name].build({})
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", ["alexnet", "vgg11", "resnet18", "resnet50", "densenet121", "inception_v3", "darts"])
def test_the_networks_of_the_paper(name: str) -> None:
    task = NETWORKS[name].task("paper", META)
    blocks = task.in_blocks(TorchCheckpoint)
    assert blocks.model(task.inputs[:2]).shape == (2, 10 if "CIFAR" in task.name else 1000)


@pytest.mark.parametrize("name", ["alexnet", "vgg19", "resnet18", "densenet121", "inception_v3", "nasnet", "amoebanet"])
def test_every_parameter_of_a_tiny_one_gets_a_gradient(name: str) -> None:
    task = NETWORKS[name].task("tiny", torch.device("cpu"))
    task.loss(task.inputs, task.labels).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in task.loss.parameters())


@pytest.mark.parametrize(
    ("name", "side"), [("alexnet", 64), ("resnet18", 32), ("densenet121", 32), ("inception_v3", 75)]
)
def test_torchvision_computes_the_same(name: str, side: int) -> None:
    models = pytest.importorskip("torchvision.models")
    with META:
        ours, theirs = NETWORKS[name].build({}), _theirs(models, name)
    for module in (ours, theirs):
        module.to_empty(device="cpu")
    with torch.no_grad():
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            q.copy_(p.normal_(std=0.05))
        for b, c in zip(ours.buffers(), theirs.buffers(), strict=True):
            c.copy_(b.fill_(1))
    images = torch.randn(2, 3, side, side)
    # In training BatchNorm would see a single pixel at the end of these images.
    assert torch.equal(ours.eval()(images), theirs.eval()(images))


def _theirs(models: object, name: str) -> nn.Module:
    options = {"aux_logits": False, "init_weights": False} if name == "inception_v3" else {}
    return getattr(models, name)(**options)


@pytest.mark.parametrize("genotype", [NASNET_A, AMOEBANET_A, DARTS_V2])
def test_genotypes_are_cells(genotype: Genotype) -> None:
    for edges, concat in (genotype[:2], genotype[2:]):
        assert len(edges) % 2 == 0
        assert all(source < 2 + i // 2 for i, (_, source) in enumerate(edges))
        read = {source for _, source in edges} | set(concat)
        assert read == set(range(2 + len(edges) // 2)) | ({0, 1} & read)  # no state is in vain


def test_published_figures() -> None:
    published = NETWORKS["resnet50"].published
    assert f"{published.cut:.0%} {published.overhead:.0%}" == "63% 31%"
