"""Merging where some clients lie, beside plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from federation import EPOCHS, RATE, ROUNDS, Federation, assert_same
from torch import Tensor


def median(updates: Tensor) -> Tensor:
    """Yin et al., 2018, Definition 1; of three numbers, torch's own."""
    return updates.median(0).values


def krum(updates: Tensor) -> Tensor:
    """Blanchard et al., 2017, Section 4: n = 3 and f = 0, so one nearest neighbour."""
    scores = [min(float(((u - v) ** 2).sum()) for j, v in enumerate(updates) if j != i) for i, u in enumerate(updates)]
    return updates[scores.index(min(scores))]


def geometric_median(updates: Tensor) -> Tensor:
    """Pillutla et al., 2022, Algorithm 2, for clients that count alike, from the model that was sent."""
    v = torch.zeros_like(updates[0])
    for _ in range(4):
        beta = [1 / max(1e-5, float((v - u).norm())) for u in updates]
        v = sum(b * u for b, u in zip(beta, updates, strict=True)) / sum(beta)
    return v


def bounded(updates: Tensor) -> Tensor:
    """Sun et al., 2019: every update divided by max(1, its length over the bound)."""
    return sum(u / max(1.0, float(u.norm()) / 0.3) for u in updates) / len(updates)


def fooled(updates: Tensor) -> Tensor:
    """FedAvg's mean, where the first client sends twice the opposite of what it found."""
    weights = Federation().sizes
    return (-2 * weights[0] * updates[0] + weights[1] * updates[1] + weights[2] * updates[2]) / weights.sum()


@pytest.mark.filterwarnings("ignore::fedstrata.FedStrataWarning")  # that Krum withstands nobody among three
@pytest.mark.parametrize(
    ("method", "rule"),
    [
        ("median", median),
        ("trimmed-mean(trim=0.4)", median),
        ("krum", krum),
        ("rfa", geometric_median),
        ("norm-bound(bound=0.3)", bounded),
        ("attack(clients=1, strength=2)", fooled),
    ],
)
def test_robust_merging(method: str, rule: Callable[[Tensor], Tensor]) -> None:
    federation = Federation()
    found = federation.run(method)

    server = federation.initial_vector
    for _ in range(ROUNDS):
        updates = []
        for k in federation.clients:
            w = server
            for _ in range(EPOCHS):
                w = w - RATE * federation.gradient(k, w)
            updates.append(w - server)
        server = server + rule(torch.stack(updates))

    assert_same(found.server, federation.named(server))
