"""AG News and Sogou News.

"Character-level Convolutional Networks for Text Classification" (Zhang, Zhao, LeCun, NIPS 2015).
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedstrata.data.datasets.base import datasets, lies_in_folder_of, not_found, search_places, warn_of_shared
from fedstrata.data.datasets.texts import Pool, TextSource, find_parts, one_pool
from fedstrata.data.formats.texts import (
    Texts,
    join_texts,
    read_class_numbers,
    read_csv_columns,
    read_parquet_texts,
    with_title,
)
from fedstrata.data.held_out import hold_out_for_testing
from fedstrata.errors import FedStrataError
from fedstrata.spec import parameter

_NAMES_OF_CLASSES = ("class index", "class", "label")
"""How a line of names begins, which some copies of the CSV files have."""


@dataclass(frozen=True)
class News(TextSource, ABC):
    """What both sets share: a class, a title and a text in each row, the classes numbered from 1 in CSV files."""

    folder: ClassVar[str]
    apart: ClassVar[tuple[str, str]]
    """The columns of title and text where Parquet files hold both, not one made of them."""
    hint: ClassVar[str] = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """The official parts that are read."""
        return ("train", "test")

    def read(self, root: Path | None) -> Pool:
        """Read the official training and test parts."""
        parts = self._read_parts(root)
        return one_pool(parts, join_texts(parts))

    def _read_parts(self, root: Path | None) -> list[Texts]:
        """Read the parts; files in no folder of the set's name are its own only if they hold texts of all classes."""
        found = self.find(root)
        parts = [self._texts(found[part]) for part in self.parts]
        file = found[self.parts[0]][0]
        if not lies_in_folder_of(file.parent, (self.name, self.folder)):
            present = np.unique(np.concatenate([part.labels for part in parts]))
            lacking = [name for number, name in enumerate(self.class_names) if number not in present]
            if lacking:
                raise FedStrataError(
                    f"'{file}' seems to be of another dataset than '{self.name}', which has {len(self.class_names)} "
                    f"classes: there are no texts of the class '{lacking[0]}'. Put the files of '{self.name}' into a "
                    f"folder called '{self.name}'."
                )
            warn_of_shared(self.name, file)
        return parts

    def find(self, root: Path | None = None) -> dict[str, list[Path]]:
        """Find the files of the parts."""
        parts = self.parts
        found = find_parts(self.name, root, self.folder, parts)
        if found is None:
            files = " and ".join(f"{part}.csv" for part in parts)
            shards = " and ".join(f"{part}-*.parquet" for part in parts)
            expected = f"{files} (class, title, text), as in {self.folder}.tgz, or {shards} (text, label){self.hint}"
            raise not_found(self.name, search_places(self.name, root), expected)
        return found

    def _texts(self, paths: list[Path]) -> Texts:
        read = self._from_csv if paths[0].suffix == ".csv" else self._from_parquet
        return join_texts([read(path) for path in paths])

    def _from_parquet(self, path: Path) -> Texts:
        return read_parquet_texts(path, len(self.class_names), title=self.apart, join=self._joined)

    def _from_csv(self, path: Path) -> Texts:
        columns = read_csv_columns(path, ("class", "title", "text"), ("class", "title", "text"))
        if columns["class"] and columns["class"][0].as_py().lower() in _NAMES_OF_CLASSES:
            columns = {name: column.slice(1) for name, column in columns.items()}
        known = [str(number) for number in range(1, len(self.class_names) + 1)]
        labels = read_class_numbers(path, columns["class"], known)
        return Texts(self._joined(columns["title"], columns["text"]).to_pylist(), labels)

    def _joined(self, titles: pa.ChunkedArray, texts: pa.ChunkedArray) -> pa.ChunkedArray:
        return with_title(titles, texts)


@datasets.register("ag_news")
@dataclass(frozen=True)
class AgNews(News):
    """AG News: 120,000 + 7,600 titles with descriptions, in 4 classes.

    Read from ``train.csv`` and ``test.csv`` as published, with a line of names or without, or from Parquet as on the
    Hugging Face hub. FedLWS (Shi et al., ICLR 2025) trains TextCNN on it, and tells neither words nor length: those are
    ours.
    """

    part: str = parameter(
        "all",
        "all: the official parts; test: only the official test part, a quarter of each class of it held out to test.",
        choices=("all", "test"),
    )

    class_names = ("World", "Sports", "Business", "Sci/Tech")
    folder = "ag_news_csv"
    apart = ("title", "description")
    hint = "; where there is only the test part, ag_news(part=test) divides it"

    @property
    def parts(self) -> tuple[str, ...]:
        """The official parts that are read."""
        return ("test",) if self.part == "test" else ("train", "test")

    def read(self, root: Path | None) -> Pool:
        """Read both parts, or divide the test part."""
        if self.part == "all":
            return super().read(root)
        [texts] = self._read_parts(root)
        return Pool(texts, *hold_out_for_testing(texts.labels, 0.25))


@datasets.register("sogou_news")
@dataclass(frozen=True)
class SogouNews(News):
    """Sogou News: 450,000 + 60,000 articles in Pinyin, in 5 classes.

    Read from ``train.csv`` and ``test.csv`` as published, or from Parquet, with title and content apart or as one text.
    FedLWS (Shi et al., ICLR 2025) trains TextCNN on it, and tells neither words nor length: those are ours.
    """

    length: int = parameter(256, "How many tokens of a text are kept; shorter texts are filled up.", low=1)

    class_names = ("sports", "finance", "entertainment", "automobile", "technology")
    folder = "sogou_news_csv"
    apart = ("title", "content")

    def _joined(self, titles: pa.ChunkedArray, texts: pa.ChunkedArray) -> pa.ChunkedArray:
        """A new line is written as a backslash and an n."""
        return pc.replace_substring(with_title(titles, texts), pattern="\\n", replacement="\n")
