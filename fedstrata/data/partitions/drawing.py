"""Shares, counts and draws that several partitions use."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from fedstrata.data.dataset import Dataset
from fedstrata.data.split import Parts

Allocate = Callable[[int, np.ndarray], np.ndarray]


def class_pools(dataset: Dataset, positions: np.ndarray) -> list[np.ndarray]:
    """Sort positions by the label of their samples: one array of positions per class."""
    labels = dataset.labels.numpy()[positions]
    return [positions[labels == label] for label in range(dataset.classes)]


def even_sizes(total: int, parts: int) -> np.ndarray:
    """Divide a number evenly: the first parts get one more where it does not come out even.

    >>> even_sizes(7, 3).tolist()
    [3, 2, 2]
    """
    sizes = np.full(parts, total // parts)
    sizes[: total % parts] += 1
    return sizes


def cut_evenly(shuffled: np.ndarray, clients: int) -> Parts:
    """Cut positions into equal parts, one for each client, and sort each."""
    each, longer = divmod(len(shuffled), clients)
    cut = longer * (each + 1)
    parts = shuffled[:cut].reshape(longer, each + 1), shuffled[cut:].reshape(clients - longer, each)
    return Parts(np.concatenate([np.sort(part, axis=1).ravel() for part in parts]), even_sizes(len(shuffled), clients))


def dealt(pools: Sequence[np.ndarray], counts: np.ndarray) -> Parts:
    """Deal classes out, from each to one client after the other as many as ``counts`` ``[clients, classes]`` says.

    >>> [own.tolist() for own in dealt([np.array([5, 1, 3]), np.array([4])], np.array([[2, 0], [1, 1]]))]
    [[1, 5], [3, 4]]
    """
    everybody = np.arange(len(counts))
    owners = np.concatenate([np.repeat(everybody, column) for column in counts.T])
    taken = [pool[: column.sum()] for pool, column in zip(pools, counts.T, strict=True)]
    return Parts.grouped(owners, np.concatenate(taken), len(counts))


def dirichlet_log_shares(alpha: float, size: int, generator: np.random.Generator) -> np.ndarray:
    """Draw the logarithms of shares from the symmetric Dirichlet distribution, for any ``alpha`` > 0.

    A gamma variable of shape alpha is one of shape alpha + 1 times U^(1 / alpha); its logarithm neither vanishes nor
    overflows for a small alpha, where the shares themselves would all become zero.
    """
    alpha = min(max(alpha, 1e-300), 1e12)
    logarithms = np.log(generator.standard_gamma(alpha + 1, size)) + np.log1p(-generator.random(size)) / alpha
    return normalised_logarithms(logarithms)


def normalised_logarithms(logarithms: np.ndarray) -> np.ndarray:
    """Shift logarithms so that their exponentials sum to one."""
    shifted = logarithms - logarithms.max()
    normalised: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return normalised


def largest_remainders(total: int, shares: np.ndarray) -> np.ndarray:
    """Divide ``total`` in proportion to shares: round down, then one more for the largest remainders.

    >>> largest_remainders(10, np.array([0.55, 0.30, 0.15])).tolist()
    [6, 3, 1]
    """
    exact = total * shares / shares.sum()
    counts: np.ndarray = np.floor(exact + 1e-9).astype(np.int64)
    order = np.argsort(np.round(counts - exact, 9), kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return counts


def draw(pool: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    """Draw positions without replacement; where too few are there, take all as often as they fit, and draw the rest."""
    if count == 0:
        return pool[:0]
    copies, rest = divmod(count, len(pool))
    drawn: np.ndarray = pool[generator.choice(len(pool), rest, replace=False)] if rest else pool[:0]
    return np.concatenate([np.tile(pool, copies), drawn]) if copies else drawn


def draw_by_class(pools: Sequence[np.ndarray], counts: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Draw as many positions of each class as ``counts`` says, and sort them."""
    wanted = [(pool, count) for pool, count in zip(pools, counts.tolist(), strict=True) if count]
    return np.sort(np.concatenate([pools[0][:0], *(draw(pool, count, generator) for pool, count in wanted)]))


def present_shares(log_shares: np.ndarray, pools: Sequence[np.ndarray]) -> np.ndarray:
    """Turn logarithms into shares of the classes that have samples; none of these vanishes for want of the others."""
    shares = np.zeros(len(pools))
    present = np.array([len(pool) > 0 for pool in pools])
    if present.any():
        shares[present] = np.exp(normalised_logarithms(log_shares[present]))
    return shares


def present_counts(total: int, shares: np.ndarray, pools: Sequence[np.ndarray], allocate: Allocate) -> np.ndarray:
    """Divide ``total`` over the classes that have samples, by their shares; nothing where those shares are all zero."""
    counts = np.zeros(len(pools), dtype=np.int64)
    present = np.array([len(pool) > 0 for pool in pools])
    mass = shares[present].sum()
    if mass > 0:
        counts[present] = allocate(total, shares[present] / mass)
    return counts


def local_test(
    pools: Sequence[np.ndarray],
    shares: np.ndarray,
    size: int | None,
    trained: int,
    generator: np.random.Generator,
    allocate: Allocate = largest_remainders,
) -> np.ndarray:
    """Draw a client's test samples in the proportions of its training labels.

    Without a ``size``, the set is as large as the training set (``trained``), or as large as it can be without
    repeating a sample. Clients draw independently and may share samples.
    """
    if size is not None:
        return draw_by_class(pools, present_counts(size, shares, pools, allocate), generator)
    available = np.array([len(pool) for pool in pools])
    present = (available > 0) & (shares > 0)
    if not present.any():
        return np.arange(0)
    # Rounding takes less than half a sample per class from any one class, so beyond this size some class must run out.
    slack = len(pools) / 2 + 1
    fitting = int(((available[present] + slack) / (shares[present] / shares[available > 0].sum())).min())
    for total in range(min(trained, fitting), 0, -1):
        counts = present_counts(total, shares, pools, allocate)
        if (counts <= available).all():
            return draw_by_class(pools, counts, generator)
    return np.arange(0)


def local_tests(
    dataset: Dataset,
    train: Parts,
    size: int | None,
    generator: Callable[[int, str], np.random.Generator],
) -> Sequence[np.ndarray]:
    """Draw the test samples of all clients from the test part, in the proportions of each client's training labels."""
    if len(dataset.test) == 0:
        return Parts(np.empty(0, dtype=np.int64), np.zeros(len(train), dtype=np.int64))
    pools = class_pools(dataset, dataset.test)
    counts = train.label_counts(dataset)
    return tuple(
        local_test(pools, own / trained, size, trained, generator(client, "test"))
        for client, (own, trained) in enumerate(zip(counts, train.sizes.tolist(), strict=True))
    )


def own_tests(
    train: Parts, fraction: float, generator: Callable[[int, str], np.random.Generator]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Draw a fraction of each client's own samples to test on; one at least stays to train on."""
    left, held = [], []
    for client, own in enumerate(train):
        count = min(len(own) - 1, math.floor(len(own) * fraction + 0.5))
        shuffled = generator(client, "test").permutation(own)
        held.append(np.sort(shuffled[:count]))
        left.append(np.sort(shuffled[count:]))
    return left, held
