"""What sets of texts share: where their parts are found, and how the texts become whole numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from fedstrata.data.dataset import Dataset
from fedstrata.data.datasets.base import DatasetSource, data_roots, is_path, search_places
from fedstrata.data.formats.parquet import choose_shards, find_shards
from fedstrata.data.formats.texts import Texts
from fedstrata.data.vocabulary import Vocabulary
from fedstrata.errors import FedStrataError
from fedstrata.spec import parameter

WORDS = 20_000
"""How many tokens a vocabulary has that is built, unless the dataset says otherwise."""


class Pool(NamedTuple):
    """All texts of a set, and which of them are to train and to test on."""

    texts: Texts
    train: np.ndarray
    test: np.ndarray


@dataclass(frozen=True)
class TextSource(DatasetSource, ABC):
    """A set of texts, each of which becomes ``length`` whole numbers, those of its tokens."""

    words: int | None = parameter(
        None,
        f"How many tokens, the most frequent words of the training texts, are known; by default {WORDS:,}, or all of a "
        "given vocabulary. The model needs as many words.",
        low=3,
    )
    length: int = parameter(128, "How many tokens of a text are kept; shorter texts are filled up.", low=1)
    vocabulary: str | None = parameter(
        None,
        "A file with one token a line, such as BERT's vocab.txt, absolute or inside the current folder or a data root; "
        "by default it is built.",
        local=True,
    )

    class_names: ClassVar[tuple[str, ...]]
    start: ClassVar[bool] = False
    """Whether a token stands before each text whose place in a transformer is that of the whole text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.words is not None and self.vocabulary is not None:
            raise FedStrataError(
                f"The dataset '{self.name}' takes all tokens of the vocabulary '{self.vocabulary}'; leave 'words' out."
            )

    def local_values(self) -> dict[str, Any]:
        """Tell what names a place on a machine: a vocabulary elsewhere than in the data root."""
        return {name: value for name, value in super().local_values().items() if is_path(str(value))}

    @abstractmethod
    def read(self, root: Path | None) -> Pool:
        """Read the texts from their files."""

    def load(self, root: Path | None = None) -> Dataset:
        """Read the texts, and turn them into whole numbers."""
        pool = self.read(root)
        if self.vocabulary is not None:
            return self._encoded(pool, Vocabulary.read(find_vocabulary(self.vocabulary, root), self.length, self.start))
        texts = pool.texts.texts
        training = (texts[position] for position in pool.train.tolist())
        return self._encoded(pool, Vocabulary.build(training, self.words or WORDS, self.length, self.start))

    def load_as(self, vocabulary: Vocabulary, root: Path | None = None) -> Dataset:
        """Read the texts with a vocabulary that is known already, such as that of a model."""
        return self._encoded(self.read(root), vocabulary)

    def _encoded(self, pool: Pool, vocabulary: Vocabulary) -> Dataset:
        return Dataset(
            str(self),
            vocabulary.encode(pool.texts.texts),
            torch.from_numpy(pool.texts.labels),
            pool.train,
            pool.test,
            self.class_names,
            pool.texts.sites,
            vocabulary=vocabulary,
        )


def find_parts(name: str, root: Path | None, folder: str, parts: tuple[str, ...]) -> dict[str, list[Path]] | None:
    """Find the files of all these parts in one folder, as Parquet shards or as CSV; none where they are nowhere."""
    for place in search_places(name, root):
        for inside in (place, place / "data", place / folder):
            shards = {part: find_shards(inside, part) for part in parts}
            if all(shards.values()):
                return {part: choose_shards(found, None) for part, found in shards.items()}
            tables = {part: [inside / f"{part}.csv"] for part in parts}
            if all(path.is_file() for [path] in tables.values()):
                return tables
    return None


def one_pool(parts: list[Texts], joined: Texts) -> Pool:
    """Train on the first part and test on the last."""
    first, last = np.split(np.arange(len(joined.labels)), [len(parts[0].labels)])
    return Pool(joined, first, last)


def find_vocabulary(path: str, root: Path | None) -> Path:
    """Look for a vocabulary: at its path, then inside the data roots."""
    places = [Path(path).expanduser(), *(folder / path for folder in data_roots(root))]
    return next((place for place in places if place.exists()), places[0])
