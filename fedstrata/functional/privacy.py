r"""What releases with Gaussian noise cost in privacy, exactly.

A release with noise of standard deviation :math:`z \Delta`, where :math:`\Delta` bounds how far one client can move
what is released, is :math:`\mu`-Gaussian differentially private with :math:`\mu = 1/z`, and n releases, each chosen
after the ones before, are :math:`\sqrt{n}/z`-GDP (Dong, Roth and Su, "Gaussian Differential Privacy", 2019). That is
the same as :math:`(\varepsilon, \delta)` for all pairs on one curve (Balle and Wang, "Improving the Gaussian Mechanism
for Differential Privacy", ICML 2018, Theorem 8). Nothing is lost in the composition, and nothing gained from random
selection of clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fedstrata.errors import FedStrataError

_HALVINGS = 100


def gaussian_delta(epsilon: float, noise: float, releases: int = 1) -> float:
    r"""Return the smallest :math:`\delta` that goes with an :math:`\varepsilon`.

    With :math:`\mu = \sqrt{n} / z`: :math:`\delta = \Phi(\mu/2 - \varepsilon/\mu) - e^\varepsilon \Phi(-\mu/2 -
    \varepsilon/\mu)`. ``noise`` is the multiplier z.

    Citation: Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018, Theorem 8.

    >>> round(gaussian_delta(1.0, noise=1.0), 6)
    0.126937
    """
    _check(noise, releases)
    if not epsilon >= 0:
        raise FedStrataError(f"Epsilon is {epsilon}; give a number from 0 on.")
    if releases == 0:
        return 0.0
    mu = math.sqrt(releases) / noise
    first, second = (
        torch.special.log_ndtr(torch.tensor(side * mu / 2 - epsilon / mu, dtype=torch.float64)) for side in (1, -1)
    )
    return max(0.0, float(first.exp() - (second + epsilon).exp()))


def gaussian_epsilon(noise: float, releases: int, delta: float) -> float:
    r"""Return the :math:`\varepsilon` that some releases have spent, at a :math:`\delta`.

    Citation: Dong, Roth and Su, "Gaussian Differential Privacy", 2019, Corollaries 1 and 2.

    >>> round(gaussian_epsilon(noise=1.0, releases=1, delta=1e-5), 3)
    4.377
    """
    _check(noise, releases)
    _check_delta(delta)
    if gaussian_delta(0.0, noise, releases) <= delta:
        return 0.0
    return _smallest(lambda epsilon: gaussian_delta(epsilon, noise, releases) <= delta)


def gaussian_noise(epsilon: float, releases: int, delta: float) -> float:
    r"""Return the smallest noise multiplier z with which some releases spend no more than :math:`\varepsilon`.

    Citation: Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018, Algorithm 1.

    >>> round(gaussian_noise(epsilon=4.377, releases=1, delta=1e-5), 3)
    1.0
    >>> round(gaussian_noise(epsilon=4.377, releases=4, delta=1e-5), 3)
    2.0
    """
    _check_delta(delta)
    if not 0 < epsilon < math.inf:
        raise FedStrataError(f"Epsilon is {epsilon}; give a number above 0.")
    if releases < 1:
        raise FedStrataError(f"There are {releases} releases; give at least one.")
    return _smallest(lambda noise: gaussian_delta(epsilon, noise, releases) <= delta)


def _smallest(holds: Callable[[float], bool]) -> float:
    """Find the point above 0 from which on something holds."""
    low, high = 0.0, 1.0
    while not holds(high):
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _check(noise: float, releases: int) -> None:
    if not 0 < noise < math.inf:
        raise FedStrataError(f"The noise multiplier is {noise}; give a number above 0.")
    if releases < 0:
        raise FedStrataError(f"There are {releases} releases; give a number from 0 on.")


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise FedStrataError(f"Delta is {delta}; give a number between 0 and 1, below one over the number of clients.")
