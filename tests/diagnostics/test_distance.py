"""Distances between clients' data, against those of their updates."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds_by_hand import SHAPES, measured, seen
from scipy import stats

from fedstrata.diagnostics.distance import (
    Distance,
    Transport,
    correlation,
    feature_distances,
    label_distances,
    transport_cost,
)


def three_groups():
    """Two clients with class 0, one with both, two with class 1; updates that follow the classes."""
    counts = torch.tensor([[4, 0], [8, 0], [2, 2], [0, 6], [0, 2]])
    uploads = {name: torch.zeros(5, *shape) for name, shape in SHAPES.items()}
    uploads["2.weight"] = torch.tensor([[1.0, 0], [3.0, 0], [1.0, 1], [0, 1.0], [0, 2.0]])[:, None]
    return uploads, counts


def test_by_hand():
    """Clients without a common class are 1 apart and move at right angles, the mixed one lies between them."""
    uploads, counts = three_groups()
    found = measured(Distance(), seen(uploads, label_counts=counts))
    labels = found.clients_in_layers["distance.labels"][""]
    assert labels[0].tolist() == [0, 0, 0.5, 1, 1]
    apart = found.clients_in_layers["distance.updates"][""]
    assert apart[0].tolist() == pytest.approx([0, 0, 1 - 0.5**0.5, 1, 1])
    rows, columns = np.triu_indices(5, 1)
    expected = stats.pearsonr(labels.numpy()[rows, columns], apart.numpy()[rows, columns]).statistic
    assert float(found.of_round["distance.correlation"]) == pytest.approx(expected)
    assert float(found.layers["distance.correlation"]["2"]) == pytest.approx(expected)
    assert found.layers["distance.correlation"]["0"].isnan(), "nobody moved layer 0"
    assert {*found.of_round, *found.clients_in_layers} == set(Distance.quantities)


class ByClass:
    """A probe to whose model class c is the point c + 1 on a line, for all clients."""

    def features(self, model):
        return (torch.arange(2.0) + 1).reshape(1, 2, 1).expand(5, 2, 1)


def test_with_features_by_hand():
    """The two classes are 1 apart, so that moving a part of the samples costs just that part."""
    uploads, counts = three_groups()
    found = measured(Transport(clients=4), seen(uploads, label_counts=counts, probe=ByClass(), received=uploads))
    matrix = found.clients_in_layers["transport.features"][""]
    torch.testing.assert_close(matrix[:4, :4], label_distances(counts)[:4, :4], atol=1e-12, rtol=0)
    assert matrix[4].isnan().all()
    assert {*found.of_round, *found.clients_in_layers} == set(Transport.quantities)


def test_transport_by_hand():
    """On a line, where all goes to the right, it costs the difference of the means; what is empty plays no part."""
    points, others = np.array([0.0, 1.0]), np.array([10.0, 11.0])
    costs = np.abs(points[:, None] - others)
    assert transport_cost(np.array([1, 1]), np.array([3, 3]), costs) == pytest.approx(10)
    assert transport_cost(np.array([3, 1]), np.array([1, 3]), costs) == pytest.approx(10.75 - 0.25)
    assert transport_cost(np.array([0, 1]), np.array([2, 0]), np.array([[0.0, 1], [7, 0]])) == pytest.approx(7)


HISTOGRAMS = st.lists(st.integers(0, 6), min_size=4, max_size=4).filter(any)


@settings(max_examples=25, deadline=None)
@given(HISTOGRAMS, HISTOGRAMS, HISTOGRAMS, st.integers(0, 99))
def test_exact_where_an_answer_is_known(one, other, third, seed):
    """With the 0/1 metric it is the total variation, on a line scipy's Wasserstein distance, and it is a metric."""
    first, second, last = (np.array(histogram) for histogram in (one, other, third))
    same_cost = 1 - np.eye(4)
    variation = label_distances(torch.tensor([one, other]))[0, 1]
    assert transport_cost(first, second, same_cost) == pytest.approx(float(variation), abs=1e-9)
    places = np.random.default_rng(seed).normal(size=4)
    costs = np.abs(places[:, None] - places)
    expected = stats.wasserstein_distance(places, places, first, second)
    assert transport_cost(first, second, costs) == pytest.approx(expected, abs=1e-9)
    there, back = transport_cost(first, second, costs), transport_cost(second, first, costs)
    assert there == pytest.approx(back, abs=1e-9)
    around = transport_cost(first, last, costs) + transport_cost(last, second, costs)
    assert there <= around + 1e-9


def test_as_the_best_of_all_assignments():
    """Where all masses are equal, an optimal transport is the cheapest assignment."""
    costs = np.random.default_rng(0).random((4, 4))
    cheapest = min(sum(costs[i, j] for i, j in enumerate(order)) / 4 for order in itertools.permutations(range(4)))
    assert transport_cost(np.ones(4), np.ones(4), costs) == pytest.approx(cheapest)


def test_clients_without_samples_or_with_wild_features_are_not_compared():
    counts = torch.tensor([[1, 1], [0, 0], [2, 1]])
    assert label_distances(counts)[1].isnan().all()
    features = torch.ones(3, 2, 2)
    features[2, 0, 0] = torch.inf
    assert feature_distances(counts, features).isnan().sum() == 8


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 999), st.randoms(use_true_random=False))
def test_order_of_clients_plays_no_part(seed, chance):
    matrices = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    one, other = matrices + matrices.transpose(1, 2)
    order = list(range(4))
    chance.shuffle(order)
    found = correlation(one, other)
    assert -1 <= found <= 1
    assert float(correlation(one[order][:, order], other[order][:, order])) == pytest.approx(float(found))
    assert float(correlation(one, 3 * one + 1)) == pytest.approx(1)


def test_two_clients_are_too_few_for_a_correlation():
    assert correlation(torch.eye(2), torch.eye(2)).isnan()
    assert correlation(torch.ones(4, 4), torch.rand(4, 4)).isnan()
    assert [round for round in range(1, 26) if Distance().due(round, 25)] == [1, 10, 20, 25]
