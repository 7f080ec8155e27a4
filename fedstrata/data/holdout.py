"""A fixed test part for data that comes without one."""

from __future__ import annotations

import math

import numpy as np


def hold_out(groups: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Divide samples into training and test positions, in the same proportion within each group, without chance.

    ``groups`` holds one number per sample, such as its label. Of a group of ``n`` samples, ``n * fraction``, rounded
    half up, are held out, evenly spaced in the given order; one sample at least stays for training.

    >>> train, test = hold_out(np.array([0, 0, 0, 0, 1, 1, 1, 1]), 0.25)
    >>> test.tolist()
    [2, 6]
    """
    held = np.zeros(len(groups), dtype=bool)
    order = np.argsort(groups, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        count = min(len(members) - 1, math.floor(len(members) * fraction + 0.5))
        if count > 0:
            held[members[((np.arange(count) + 0.5) * len(members) / count).astype(np.int64)]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)
