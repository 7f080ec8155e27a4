"""How weights are distributed before and after aggregation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds_by_hand import SHAPES, drawn, measured, seen
from scipy import stats

from fedstrata.diagnostics.weights import Weights, histogram, moments


def test_by_hand():
    """Layer 2 was (1, -1) with a spread of 1, so its bins reach from -4 to 4: with four of them, each is 2 wide."""
    before = {name: torch.zeros(shape) for name, shape in SHAPES.items()} | {"2.weight": torch.tensor([[1.0, -1.0]])}
    uploads = drawn(2) | {"2.weight": torch.tensor([[[3.0, -1.0]], [[-1.0, -9.0]]])}
    after = before | {"2.weight": torch.tensor([[1.0, -5.0]])}
    found = measured(Weights(bins=4), seen(uploads, before, after=after))
    assert found.in_layers["weights.edges"]["2"].tolist() == [-4, -2, 0, 2, 4]
    assert found.in_layers["weights.clients"]["2"].tolist() == [0.25, 0.5, 0, 0.25]
    assert found.in_layers["weights.merged"]["2"].tolist() == [0.5, 0, 0.5, 0]
    assert float(found.layers["weights.std"]["2"]) == 3
    assert float(found.layers["weights.kurtosis"]["2"]) == -2
    assert float(found.layers["weights.clients_std"]["2"]) == pytest.approx(math.sqrt(19))
    assert set(found.layers["weights.std"]) == {"0", "2"}, "a norm has no weights"
    used = {*found.layers, *found.in_layers}
    assert used == set(Weights.quantities)


def test_only_what_was_sent_counts():
    uploads = drawn(2) | {"2.weight": torch.tensor([[[1.0, 0.0]], [[2.0, 3.0]]])}
    masks = {"2.weight": torch.tensor([[[True, False]], [[True, True]]])}
    found = measured(Weights(bins=2), seen(uploads, masks=masks))
    assert float(found.layers["weights.clients_std"]["2"]) == pytest.approx(np.std([1, 2, 3]))
    assert found.in_layers["weights.clients"]["2"].tolist() == [0, 1]


def test_a_layer_of_which_nothing_was_sent_has_no_spread():
    masks = {"2.weight": torch.zeros(2, 1, 2, dtype=torch.bool)}
    found = measured(Weights(bins=2), seen(drawn(2), masks=masks))
    assert found.layers["weights.clients_std"]["2"].isnan()
    assert found.in_layers["weights.clients"]["2"].tolist() == [0, 0]


def test_bins_stay_the_same_over_rounds():
    first = seen(drawn(2), {name: tensor[0] for name, tensor in drawn(1, seed=3).items()})
    later = seen(drawn(2), {name: 100 * tensor[0] for name, tensor in drawn(1, seed=4).items()}, round=10)
    expected = measured(Weights(), first).in_layers["weights.edges"]
    found = measured(Weights(), first, later).in_layers["weights.edges"]
    assert {layer: edges.tolist() for layer, edges in found.items()} == {
        layer: edges.tolist() for layer, edges in expected.items()
    }
    assert not measured(Weights(), first, seen(drawn(2), round=3)).in_layers, "round 3 has no histogram"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-3, 3, width=32), min_size=2, max_size=30), st.integers(2, 9))
def test_as_numpy_and_scipy_have_it(values, bins):
    pieces = torch.split(torch.tensor(values), 4)
    inside = [value for value in values if value != 1]  # numpy's last bin holds its upper edge, ours what lies above it
    edges = np.linspace(-1, 1, bins + 1)
    if inside and not np.isclose(np.subtract.outer(inside, edges), 0, atol=1e-6).any():
        counts = np.histogram(np.clip(inside, -1, 1), bins, (-1, 1))[0]
        found = histogram(torch.split(torch.tensor(inside), 4), 1.0, bins)
        assert (found * len(inside)).tolist() == pytest.approx(counts.tolist())
    assert float(histogram(pieces, 1.0, bins).sum()) == pytest.approx(1)
    found = moments(pieces)
    assert float(found.std) == pytest.approx(np.std(values))
    if np.std(values) > 1e-3:
        assert float(found.kurtosis) == pytest.approx(float(stats.kurtosis(values)), rel=1e-5, abs=1e-6)


def test_training_that_diverged_does_not_end_a_run():
    uploads = drawn(2)
    uploads["2.weight"][0, 0, 0] = torch.nan
    uploads["2.weight"][1, 0, 0] = torch.inf
    found = measured(Weights(bins=2), seen(uploads))
    assert float(found.in_layers["weights.clients"]["2"].sum()) == 0.5
    assert found.layers["weights.clients_std"]["2"].isnan()
