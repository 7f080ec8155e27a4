"""The account of Gaussian noise, against integrals and numbers that others published."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from fedstrata.errors import FedStrataError
from fedstrata.functional import gaussian_delta, gaussian_epsilon, gaussian_noise


@pytest.mark.parametrize(("epsilon", "noise", "releases"), [(0.5, 1.0, 1), (1.0, 2.0, 1), (3.0, 2.0, 9), (0.0, 1.5, 2)])
def test_delta_is_what_the_densities_say(epsilon, noise, releases):
    """The definition: the mass by which one density exceeds e^epsilon times the other, of N(n, n z^2) and N(0, n z^2),
    which is what the sum of n releases with sensitivity 1 looks like.
    """
    width = noise * math.sqrt(releases)
    with_client, without = stats.norm(releases, width), stats.norm(0, width)
    crossing = releases / 2 + epsilon * width**2 / releases
    excess = lambda x: with_client.pdf(x) - math.exp(epsilon) * without.pdf(x)  # noqa: E731
    expected = integrate.quad(excess, crossing, crossing + 20 * width)[0]
    assert gaussian_delta(epsilon, noise, releases) == pytest.approx(expected, abs=1e-10)


def test_published_numbers():
    """1-GDP at delta 1e-5 is 4.38 (Dong et al.); the classic calibration sqrt(2 ln(1.25/delta)) spends less than 1."""
    assert gaussian_epsilon(1.0, 1, 1e-5) == pytest.approx(4.377, abs=1e-3)
    assert gaussian_epsilon(math.sqrt(2 * math.log(1.25 / 1e-5)), 1, 1e-5) < 1.0


@given(st.floats(0.3, 50), st.integers(1, 1000), st.floats(1e-12, 0.1))
def test_epsilon_delta_and_noise_undo_each_other(noise, releases, delta):
    epsilon = gaussian_epsilon(noise, releases, delta)
    assert gaussian_delta(epsilon, noise, releases) <= delta * (1 + 1e-6)
    assert gaussian_epsilon(noise, releases + 1, delta) >= epsilon
    if epsilon > 1e-3:
        assert gaussian_noise(epsilon, releases, delta) == pytest.approx(noise, rel=1e-4)


def test_nothing_released_costs_nothing_and_much_released_stays_finite():
    assert gaussian_epsilon(1.0, 0, 1e-5) == 0.0
    assert gaussian_delta(0.0, 1.0, 0) == 0.0
    assert 1e5 < gaussian_epsilon(0.01, 20, 1e-5) < 2e5


def test_a_delta_that_noise_gives_without_any_epsilon_costs_none():
    delta = gaussian_delta(0.0, 2.0, 3)
    assert gaussian_epsilon(2.0, 3, delta) == 0.0
    assert gaussian_epsilon(2.0, 3, delta * 0.999) > 1e-4


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: gaussian_epsilon(0.0, 1, 1e-5), "The noise multiplier is 0.0; give a number above 0."),
        (lambda: gaussian_epsilon(1.0, -1, 1e-5), "There are -1 releases"),
        (lambda: gaussian_epsilon(1.0, 1, 1.0), "Delta is 1.0"),
        (lambda: gaussian_delta(-1.0, 1.0), "Epsilon is -1.0"),
        (lambda: gaussian_noise(0.0, 1, 1e-5), "Epsilon is 0.0"),
        (lambda: gaussian_noise(1.0, 0, 1e-5), "There are 0 releases"),
        (lambda: gaussian_noise(math.inf, 1, 1e-5), "Epsilon is inf"),
        (lambda: gaussian_delta(1.0, math.inf), "The noise multiplier is inf"),
        (lambda: gaussian_epsilon(1.0, 1, 0.0), "Delta is 0.0"),
    ],
)
def test_impossible_numbers_are_refused(call, sentence):
    with pytest.raises(FedStrataError, match=sentence):
        call()
