"""Sentiment140: tweets with their users (Go, Bhayani, Huang, "Twitter sentiment classification", 2009)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from fedstrata.data.datasets.base import datasets, not_found, search_places
from fedstrata.data.datasets.texts import Pool, TextSource
from fedstrata.data.formats.texts import Texts, read_class_numbers, read_csv_columns
from fedstrata.data.held_out import groups_of, hold_out_for_testing
from fedstrata.errors import FedStrataError
from fedstrata.spec import parameter

FILE = "training.1600000.processed.noemoticon.csv"
_COLUMNS = ("target", "ids", "date", "flag", "user", "text")
_TARGETS = ("0", "4")


@datasets.register("sentiment140")
@dataclass(frozen=True)
class Sentiment140(TextSource):
    """Sentiment140: tweets, positive or negative; the users are natural clients (``natural``).

    Users are ranked by their numbers of tweets, equal ones in the order of the file. The official test part, which
    knows other users, is not used: a fraction of each class of each user, evenly spaced, is held out.

    PLayer-FL (Elhussein and Gürsoy, 2025) uses the 15 users with the most tweets by its text, those on the ranks 36 to
    50 by its code (``skip=35``), a fifth of their tweets to test on, and BERT's pieces of words: give the ``vocab.txt``
    of bert-base-uncased as the ``vocabulary``.

    Defaults:
        users: paper, appendix.
        skip, at_least, words: ours.
        length: gaiters-aerials/player_fl, code/models.py.
        test_fraction: gaiters-aerials/player_fl, code/datasets/dataset_processing.py.
    """

    length: int = parameter(119, "How many tokens of a text are kept; shorter texts are filled up.", low=2)
    users: int | None = parameter(15, "How many users; none for all.", low=1)
    skip: int = parameter(0, "So many users, those with the most tweets, are left out.", low=0)
    at_least: int = parameter(1, "Users with fewer tweets are left out.", low=1)
    test_fraction: float = parameter(0.2, "The held-out fraction of each class of each user.", low=0, below=1)

    class_names = ("negative", "positive")
    start = True

    def find(self, root: Path | None = None) -> Path:
        """Find the file of the tweets."""
        places = search_places(self.name, root)
        path = next((place / FILE for place in places if (place / FILE).is_file()), None)
        if path is None:
            raise not_found(self.name, places, f"{FILE}, as in the archive of the authors")
        return path

    def read(self, root: Path | None) -> Pool:
        """Read the tweets of the chosen users."""
        path = self.find(root)
        columns = read_csv_columns(path, _COLUMNS, ("target", "user", "text"), "latin1")
        labels = read_class_numbers(path, columns["target"], _TARGETS)
        names, owners = _numbered(columns["user"])
        rows = np.flatnonzero(np.isin(owners, self._chosen(owners, len(names), path)))
        texts = columns["text"].take(pa.array(rows)).to_pylist()
        own, sites = labels[rows], names[owners[rows]]
        train, test = hold_out_for_testing(groups_of(torch.from_numpy(own), sites), self.test_fraction)
        return Pool(Texts(texts, own, sites), train, test)

    def _chosen(self, owners: np.ndarray, users: int, path: Path) -> np.ndarray:
        """Rank the users by their numbers of tweets, and choose among them."""
        counts = np.bincount(owners, minlength=users)
        ranked = np.argsort(-counts, kind="stable")[self.skip :]
        there = ranked[counts[ranked] >= self.at_least]
        if len(there) < (self.users or 1):
            raise FedStrataError(
                f"{self.users or 'All'} users with at least {self.at_least} tweets are asked for after the first "
                f"{self.skip}, but there are {len(there)} in '{path}'; ask for fewer."
            )
        chosen: np.ndarray = there[: self.users]
        return chosen


def _numbered(users: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Number users in the order of their first tweets: their names, and the number of each tweet's user."""
    encoded = users.combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):  # with another version of Arrow
        encoded = encoded.combine_chunks()
    return np.array(encoded.dictionary.to_pylist(), dtype=str), encoded.indices.to_numpy()
