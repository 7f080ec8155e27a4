from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrata.errors import FedStrataError
from fedstrata.fairness import fairness, incentive, incentive_of, worst_clients


@dataclass
class Run:
    client_accuracies: dict[int, float]


def test_fairness_is_the_variance_over_all_clients():
    """Three clients around 0.6: (0.04 + 0 + 0.04) / 3."""
    assert fairness([0.4, 0.6, 0.8]) == pytest.approx(0.08 / 3)
    assert fairness([0.7]) == 0
    assert math.isnan(fairness([]))
    assert math.isnan(fairness([0.5, math.nan]))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.floats(-1, 1))
def test_fairness_is_a_loop_and_does_not_depend_on_how_good_all_are(values, shift):
    mean = sum(values) / len(values)
    expected = sum((value - mean) ** 2 for value in values) / len(values)
    assert fairness(values) == pytest.approx(expected, abs=1e-12)
    assert fairness([value + shift for value in values]) == pytest.approx(expected, abs=1e-12)


def test_the_worst_come_first_and_a_diverged_model_is_the_worst():
    accuracies = {client: client / 100 for client in range(25)}
    assert worst_clients(accuracies) == [0, 1, 2]
    assert worst_clients({**accuracies, 7: math.nan}, 2) == [7, 0]
    assert worst_clients({3: 0.5, 1: 0.5}, 1) == [1]
    assert worst_clients({}) == []


def test_the_incentive_is_strict_and_takes_the_better_of_the_two():
    """Client 0 beats both, client 1 draws with one, client 2 beats only one, client 3 was not tested everywhere."""
    own, local, fedavg = {0: 0.9, 1: 0.8, 2: 0.7, 3: 1.0}, {0: 0.8, 1: 0.8, 2: 0.6}, {0: 0.5, 1: 0.1, 2: 0.75, 3: 0.0}
    assert incentive_of(own, local, fedavg) == pytest.approx(1 / 3)
    assert incentive(Run(own), Run(local), Run(fedavg)) == pytest.approx(1 / 3)
    assert incentive_of(own, local, {}) != incentive_of(own, local, {})


def test_an_incentive_without_anybody_to_compare_with_is_refused():
    with pytest.raises(FedStrataError, match=r"there are none; give those of 'local' and of 'fedavg' too\."):
        incentive_of({0: 0.9})


def test_of_losses_less_is_better():
    """Client 0 beats both, client 1 only one of them, client 2 equals the better of the two."""
    own, local, fedavg = {0: 0.1, 1: 0.4, 2: 0.3}, {0: 0.2, 1: 0.3, 2: 0.3}, {0: 0.5, 1: 0.5, 2: 0.9}
    assert incentive_of(own, local, fedavg, higher_is_better=False) == pytest.approx(1 / 3)


@given(st.dictionaries(st.integers(0, 5), st.tuples(*[st.sampled_from([0.0, 0.25, 0.5, 1.0])] * 3), min_size=1))
def test_the_incentive_is_the_mean_of_the_papers_indicator(clients):
    own, local, fedavg = ({client: values[place] for client, values in clients.items()} for place in range(3))
    expected = sum(p > max(s, g) for p, s, g in clients.values()) / len(clients)
    assert incentive_of(own, local, fedavg) == pytest.approx(expected)
