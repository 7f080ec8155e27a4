"""Samples of the shape of the papers' datasets, without any meaning, and the papers' runs as toys."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

from fedstrata.data import Dataset
from fedstrata.experiment import Experiment

IMAGES = {
    "cifar10": (3, 32, 10),
    "cifar100": (3, 32, 100),
    "tiny_imagenet": (3, 64, 200),
    "fashion_mnist": (1, 28, 10),
    "emnist": (1, 28, 62),
    "isic2019": (3, 64, 4),
}
TEXTS = {"ag_news": 4, "sogou_news": 5, "amazon_reviews": 2, "sentiment140": 2, "mimic_notes": 2}
FEATURES = {"heart_disease": (13, 5)}
SAMPLES, TESTS, WORDS, VOCABULARY, SITES = 64, 24, 200, 1000, 2
MANY_TESTS = 256
"""So many where a server takes samples of its own from those to test on."""


def generated(experiment: Experiment, tests: int = TESTS) -> Dataset:
    """Make a dataset of the shape of the one that an experiment names, at two sites."""
    name = experiment.data.split("(")[0]
    draw = np.random.default_rng(0)
    count = SAMPLES + tests
    if name in IMAGES:
        channels, side, classes = IMAGES[name]
        inputs = torch.from_numpy(draw.integers(0, 256, (count, channels, side, side), dtype=np.uint8))
    elif name in TEXTS:
        classes = TEXTS[name]
        inputs = torch.from_numpy(draw.integers(1, VOCABULARY, (count, WORDS)))
    else:
        features, classes = FEATURES[name]
        inputs = torch.from_numpy(draw.normal(size=(count, features)).astype(np.float32))
    labels = torch.from_numpy(np.concatenate([np.arange(SAMPLES), np.arange(tests)]) % classes)
    places = np.arange(count)
    statistics = (tuple([0.5] * inputs.shape[1]),) * 2 if name in IMAGES else (None, None)
    return Dataset(
        name, inputs, labels, places[:SAMPLES], places[SAMPLES:], tuple(map(str, range(classes))),
        np.array(["a", "b"])[places % SITES], *statistics,
    )  # fmt: skip


def toy(experiment: Experiment) -> dict[str, Any]:
    """What makes a toy of an experiment: two clients, one round, one step, no weights to be fetched, and a server that
    trains for one epoch at most.
    """
    return {
        "clients": 2,
        "partition": "natural" if experiment.partition == "natural" else "iid",
        "rounds": 1,
        "steps": 1,
        "batch_size": 8,
        "participation": 1.0,
        "late_clients": 0,
        "join_round": None,
        "evaluate_every": 1,
        "precision": "fp32",
        "engine": "loop",
        "method": re.sub(r"fedlaw\(epochs=\d+", "fedlaw(epochs=1", experiment.method),
        "diagnose": re.sub(r"\bhessian\b(?!\()", "hessian(probes=2, batch_size=4)", experiment.diagnose or "") or None,
        "validation": None if experiment.validation is None else 8,
        "model": "vit" if experiment.model.startswith("dino") else re.sub(r"\(weights=[^,)]*\)", "", experiment.model),
    }
