"""The parts of examples/pretrain_vit.py; tests/models/test_vit.py runs the whole of it."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedstrata.data import datasets
from fedstrata.data.transforms import parse_transforms
from fedstrata.models import build_model


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    return pytest.importorskip("pretrain_vit")


def test_mixup_weighs_pixels_and_losses_alike(script: ModuleType) -> None:
    mixing = script.Mixing(0.75)
    images = torch.tensor([0.0, 4.0]).reshape(2, 1, 1, 1)
    assert mixing.apply(images).flatten().tolist() == [1.0, 3.0]
    outputs, labels = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
    # The losses with the own label are log(1 + e^-2) and log(1 + e^-1), with the other one 2 and 1 more.
    own = (math.log1p(math.exp(-2)) + math.log1p(math.exp(-1))) / 2
    assert float(mixing.loss(outputs, labels, 0.0)) == pytest.approx(0.75 * own + 0.25 * (own + 1.5))


def test_cutmix_counts_the_pixels_that_stay(script: ModuleType) -> None:
    images = torch.stack((torch.zeros(1, 8, 6), torch.ones(1, 8, 6)))
    shares = set()
    for seed in range(50):
        mixing = script.Mixing.draw(np.random.default_rng(seed), (8, 6), mixup=0.0, cutmix=1.0)
        mixed = mixing.apply(images)
        assert float(mixed[0].mean()) == pytest.approx(1 - mixing.share)
        assert torch.equal(mixed[1], 1 - mixed[0])
        shares.add(mixing.share)
    assert len(shares) > 10
    assert not images[0].any()


def test_without_mixing_nothing_changes(script: ModuleType) -> None:
    mixing = script.Mixing.draw(np.random.default_rng(0), (8, 8), mixup=0.0, cutmix=0.0)
    images, outputs, labels = torch.rand(3, 1, 8, 8), torch.rand(3, 4), torch.tensor([0, 3, 1])
    assert mixing.apply(images) is images
    assert torch.equal(mixing.loss(outputs, labels, 0.1), F.cross_entropy(outputs, labels, label_smoothing=0.1))


def test_the_rate_rises_and_falls(script: ModuleType) -> None:
    rates = [script.factor(done, 20, 4) for done in (0, 1, 2, 4, 12, 20)]
    assert rates == pytest.approx([0, 0.25, 0.5, 1, 0.5, 0])
    assert script.factor(0, 20, 0) == 1


def test_every_image_is_seen_once_in_an_epoch_and_changed_anew_in_the_next(script: ModuleType) -> None:
    dataset = datasets.make("digits").load(None)

    def epoch(number: int, transforms: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        images = script.Images(dataset, parse_transforms(transforms), torch.device("cpu"), seed)
        inputs, labels = zip(*images.training_batches(number, 100), strict=True)
        return torch.cat(inputs), torch.cat(labels)

    inputs, labels = epoch(1, "none")
    assert len(labels) == len(dataset.train) // 100 * 100
    trained = dataset.inputs[torch.from_numpy(dataset.train)].float()
    trained = trained / 255 if dataset.inputs.dtype == torch.uint8 else trained
    seen, known = (set(map(tuple, images.flatten(1).tolist())) for images in (inputs, trained))
    assert seen <= known
    assert len(seen) > 0.9 * len(known)
    assert torch.equal(inputs, epoch(1, "none")[0])
    assert not torch.equal(labels, epoch(2, "none")[1])
    changed = epoch(1, "flip+crop:1")
    assert torch.equal(changed[1], labels)
    assert torch.equal(changed[0], epoch(1, "flip+crop:1")[0])
    assert not torch.equal(changed[0], epoch(1, "flip+crop:1", seed=1)[0])


def test_only_weights_of_layers_shrink(script: ModuleType) -> None:
    model = build_model("vit(width=12, depth=1)", (1, 8, 8), 10, seed=0)
    shrunk, others = script.make_optimiser(model, 0.1, 0.05, fused=False).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def chosen(group: dict[str, Any]) -> set[str]:
        return {names[id(parameter)] for parameter in group["params"]}

    assert (shrunk["weight_decay"], others["weight_decay"]) == (0.05, 0)
    assert chosen(shrunk) | chosen(others) == set(names.values())
    assert all(name.endswith("weight") and "norm" not in name for name in chosen(shrunk))
    assert {"stem.class_token", "stem.positions", "head.bias", "norm.weight"} <= chosen(others)
    assert {"stem.projection.weight", "stages.0.attention.query.weight", "head.weight"} <= chosen(shrunk)
