"""Clients as the data knows them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedstrata.data.dataset import Dataset
from fedstrata.data.partitions.base import SEED, Partitioner, check_clients, partitions
from fedstrata.data.split import Split
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.spec import parameter

_NAMED = 3
"""How many of the sites that are left out are named."""


@partitions.register("natural")
@dataclass(frozen=True)
class Natural(Partitioner):
    """One client per site of the dataset (a hospital, a writer): its training and its test samples.

    With fewer clients than sites, as many sites as clients are drawn at random, with a warning. Clients stand in the
    order in which their sites first occur.
    """

    seed: int | None = parameter(None, SEED, low=0)

    def split(self, dataset: Dataset, clients: int) -> Split:
        """Give each client the samples of one site."""
        check_clients(dataset, clients)
        train, test = by_site(dataset, dataset.train), by_site(dataset, dataset.test)
        sites = _training_sites(train)
        if clients > len(sites):
            raise FedStrataError(
                f"{clients} clients are asked for, but the dataset '{dataset.name}' has {len(sites)} sites; "
                f"use at most {len(sites)} clients."
            )
        chosen = np.sort(self.generator("sites").permutation(len(sites))[:clients])
        if clients < len(sites):
            _tell_who_is_left_out(
                dataset, [sites[index] for index in np.setdiff1d(np.arange(len(sites)), chosen)], clients
            )
        return Split(tuple(train[sites[index]] for index in chosen), tuple(test[sites[index]] for index in chosen))

    def clients_for(self, dataset: Dataset) -> int:
        """Count the sites that have training samples."""
        return len(_training_sites(by_site(dataset, dataset.train)))


def by_site(dataset: Dataset, positions: np.ndarray) -> list[np.ndarray]:
    """Sort positions by the site of their samples: one array, perhaps empty, for each site of the dataset."""
    if dataset.sites is None:
        raise FedStrataError(
            f"The dataset '{dataset.name}' does not tell the sites of its samples, so it has no natural partition; "
            f"choose another, such as 'dirichlet'."
        )
    names, numbers = np.unique(dataset.sites, return_inverse=True)
    own = numbers.reshape(-1)[positions]
    order = np.argsort(own, kind="stable")
    return np.split(positions[order], np.searchsorted(own[order], np.arange(1, len(names))))


def _tell_who_is_left_out(dataset: Dataset, left_out: Sequence[int], clients: int) -> None:
    names = np.unique(np.asarray(dataset.sites))[list(left_out[:_NAMED])]
    more = f" and {len(left_out) - _NAMED:,} more" if len(left_out) > _NAMED else ""
    everybody = clients + len(left_out)
    warnings.warn(
        f"{clients:,} of {everybody:,} sites were drawn to be clients; left out: {', '.join(map(str, names))}{more}. "
        f"With {everybody:,} clients, all take part.",
        FedStrataWarning,
        stacklevel=3,
    )


def _training_sites(train: list[np.ndarray]) -> list[int]:
    """Number the sites that have training samples, in the order of their first one."""
    return sorted((site for site, own in enumerate(train) if len(own)), key=lambda site: int(train[site].min()))
