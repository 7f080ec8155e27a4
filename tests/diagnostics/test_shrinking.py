"""What FedLWS would do in a round of any method."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds_by_hand import SHAPES, drawn, measured, seen

from fedstrata.diagnostics.shrinking import ShrinkingFactors, applied_factor, regularisation_ratio


def test_by_hand():
    """Layer 2 was (3, 4), clients change it by (1, 0) and (0, 1): tau = sqrt(1/2), a step of sqrt(1/2), so that
    beta tau step = 0.1 / 2 and gamma = 5 / 5.05. The new model is 0.9 times the mean (3.5, 4.5): the pull 0.1 * 5
    against 0.9 * sqrt(1/2)."""
    before = {name: torch.zeros(shape) for name, shape in SHAPES.items()} | {"2.weight": torch.tensor([[3.0, 4.0]])}
    uploads = {name: torch.zeros(2, *shape) for name, shape in SHAPES.items()}
    uploads["2.weight"] = torch.tensor([[[4.0, 4.0]], [[3.0, 5.0]]])
    after = before | {"2.weight": 0.9 * torch.tensor([[3.5, 4.5]])}
    found = measured(ShrinkingFactors(), seen(uploads, before, after=after)).layers
    assert found["shrinking.gamma"]["2"] == pytest.approx(5 / 5.05)
    assert found["shrinking.tau"]["2"] == pytest.approx(math.sqrt(0.5))
    assert found["shrinking.r"]["2"] == pytest.approx(0.1 * math.sqrt(0.5))
    assert found["shrinking.applied"]["2"] == pytest.approx(0.9)
    assert found["shrinking.ratio"]["2"] == pytest.approx(0.5 / (0.9 * math.sqrt(0.5)))
    assert set(found["shrinking.gamma"]) == {"0", "2"}, "a norm belongs to the layer that it follows"
    assert found["shrinking.gamma"]["0"] == found["shrinking.applied"]["0"] == 1
    assert math.isnan(found["shrinking.ratio"]["0"]), "there is no step to compare with"
    whole = measured(ShrinkingFactors(beta=1), seen(uploads, before, after=after)).of_round
    assert whole["shrinking.gamma"] == pytest.approx(5 / 5.5), "only layer 2 is not zero"


def test_plain_averaging_shrinks_nothing_also_under_masks():
    before = {name: tensor[0] for name, tensor in drawn(1, seed=4).items()}
    uploads, masks = drawn(3, seed=5), {"0.weight": torch.tensor([1, 1, 0]).bool().reshape(3, 1, 1)}
    mean = {name: tensor.mean(0) for name, tensor in uploads.items()}
    mean["0.weight"] = uploads["0.weight"][:2].mean(0)
    found = measured(ShrinkingFactors(), seen(uploads, before, masks, after=mean)).layers
    assert list(found["shrinking.applied"].values()) == pytest.approx([1, 1])
    assert list(found["shrinking.ratio"].values()) == pytest.approx([0, 0], abs=1e-5)
    assert all(0 < gamma < 1 for gamma in found["shrinking.gamma"].values())


@settings(max_examples=30, deadline=None)
@given(st.floats(0.1, 2), st.integers(0, 1000))
def test_the_factor_that_was_applied_is_found(factor, seed):
    merged = list(drawn(2, seed).values())
    assert applied_factor(merged, [factor * tensor for tensor in merged]) == pytest.approx(factor, rel=1e-5)
    old = list(drawn(2, seed + 1).values())
    ratio = regularisation_ratio(factor, old, merged)
    assert (ratio > 0) == (factor < 1) or ratio == 0


def test_training_that_diverged_does_not_end_a_run():
    uploads = drawn(2)
    uploads["2.weight"][0, 0, 0] = torch.nan
    found = measured(ShrinkingFactors(), seen(uploads, {name: tensor[0] for name, tensor in drawn(1).items()}))
    assert math.isnan(found.layers["shrinking.gamma"]["2"])
    assert math.isfinite(found.layers["shrinking.gamma"]["0"])


def test_its_names_are_those_that_it_declares():
    found = measured(ShrinkingFactors(), seen(drawn(2)))
    assert set(found.layers) == set(found.of_round) == set(ShrinkingFactors.quantities)
