"""Any dataset of the Hugging Face hub by its name, which is also its name in ``flwr-datasets``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from fedstrata.data.channels import channel_statistics
from fedstrata.data.columns import read_texts
from fedstrata.data.dataset import Dataset
from fedstrata.data.datasets.base import ROOT_VARIABLE, DatasetSource, data_roots, datasets
from fedstrata.data.datasets.texts import WORDS, find_vocabulary
from fedstrata.data.decoded import kept
from fedstrata.data.download import HUB_FOLDER, checked_repository, download
from fedstrata.data.formats.hub_tables import Parts, column_types, features, find_parts, read_columns
from fedstrata.data.formats.images import decode_images, opened_image
from fedstrata.data.formats.parquet import class_names
from fedstrata.data.held_out import groups_of, hold_out_for_testing
from fedstrata.data.labels import number_labels, read_labels, refuse_untrained
from fedstrata.data.objects import LABELS, find_label
from fedstrata.data.tables import Table, from_table, is_free_text
from fedstrata.data.vocabulary import Vocabulary
from fedstrata.errors import FedStrataError, NotHereError, unknown_name
from fedstrata.spec import parameter

_TEST_PARTS = ("test", "validation", "valid", "val")
UNNAMED = "owner/name"
"""What stands where a dataset's own name is to stand."""
LENGTH = 128
"""How many tokens of a text are kept unless that is said."""
_GREY = {"1", "L", "LA"}


@datasets.register("hub")
@dataclass(frozen=True)
class Hub(DatasetSource):
    """Any dataset of the Hugging Face hub, or of ``flwr-datasets``: ``hub:owner/name``.

    It is read from Parquet shards, as ``fedstrata download hub:owner/name`` fetches them, or from a folder that
    ``datasets.save_to_disk`` wrote, in ``hub/owner/name``, ``owner/name`` or ``name`` of a data root. Nothing is
    fetched unless ``download=true`` says so. Inputs are the images or the texts of a column; else all other columns,
    as in a ``table``. The owners in the column ``site`` are natural clients (``natural``).
    """

    repository: str = parameter(UNNAMED, "Its name on the hub: owner/name.", local=True)
    label: str | None = parameter(
        None, "The column with the class; by default label, labels or target, or the only one of classes."
    )
    image: str | None = parameter(None, "The column with images; by default the only one that holds images.")
    text: str | None = parameter(
        None, "The column with texts, which become the numbers of their tokens; by default the only other column."
    )
    site: str | None = parameter(None, "The column with the owner of each sample, who is then a client.")
    features: str | None = parameter(
        None, "The columns to learn from, joined by '+', where these are neither images nor texts."
    )
    drop: str | None = parameter(
        None, "Columns that are neither texts nor values to learn from, joined by '+', such as a number of the row."
    )
    configuration: str | None = parameter(None, "Which version, of a dataset that has several.")
    train: str = parameter("train", "The part to train on.")
    test: str | None = parameter(None, "The part to test on; by default test, else validation, else some is held out.")
    test_fraction: float = parameter(
        0.25, "The held-out fraction of each class of each site, where there is no part to test on.", low=0, below=1
    )
    size: int | None = parameter(
        None, "Width and height, in pixels, to which each image is scaled; by default all are of one size.", low=1
    )
    words: int | None = parameter(
        None, f"How many tokens of texts are known; by default {WORDS:,}, or all of a given vocabulary.", low=3
    )
    length: int | None = parameter(None, f"How many tokens of a text are kept; by default {LENGTH}.", low=1)
    vocabulary: str | None = parameter(
        None, "A file with one token of texts a line, such as BERT's vocab.txt; by default it is built.", local=True
    )
    download: bool = parameter(False, "Whether to fetch it from the hub where it is not found.")

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_repository(self.repository)
        if self.configuration is not None and Path(self.configuration).name != self.configuration:
            raise FedStrataError(f"The configuration '{self.configuration}' is no plain name of a folder.")
        if self.words is not None and self.vocabulary is not None:
            raise FedStrataError(f"All tokens of the vocabulary '{self.vocabulary}' are taken; leave 'words' out.")

    def load(self, root: Path | None = None) -> Dataset:
        """Read the part to train on and the one to test on."""
        return self._load(root, None)

    def load_as(self, known: Table | Vocabulary, root: Path | None = None) -> Dataset:
        """Read them with an encoding of rows or texts that is known already, such as that of a model."""
        return self._load(root, known)

    def _load(self, root: Path | None, known: Table | Vocabulary | None) -> Dataset:
        if self.repository == UNNAMED:
            raise FedStrataError(
                "The dataset 'hub' needs a name; write hub:owner/name with those of a dataset on the Hugging Face hub."
            )
        parts = self._find_or_fetch(root)
        train = self._part(parts, self.train)
        tested = self.test or next((name for name in _TEST_PARTS if name in parts and name != self.train), None)
        test = [] if tested is None else self._part(parts, tested)
        schema = column_types(train[0])
        label = self._label(schema)
        image = self._image(schema)
        text = None if image is not None else self._text(schema, label)
        self._refuse_unused(image, text)
        if image is not None:
            decode = partial(self._from_images, train, test, image, label, tested)
            dataset = kept(str(self._said()), train[0].parent, [*train, *test], decode)
        elif text is not None:
            dataset = self._from_texts(train, test, text, label, root, known if isinstance(known, Vocabulary) else None)
        else:
            return self._from_values(train, test, label, known if isinstance(known, Table) else None)
        named = class_names(schema.metadata, label) is not None
        refuse_untrained(dataset.labels, dataset.train, dataset.class_names, f"'{self.repository}'", named)
        return dataset

    def _refuse_unused(self, image: str | None, text: str | None) -> None:
        """Refuse parameters of other kinds of inputs."""
        kind = "images" if image is not None else "texts" if text is not None else "single values"
        of_texts = ("text", "words", "length", "vocabulary")
        unused = {
            "images": ("features", "drop", *of_texts),
            "texts": ("features", "size"),
            "single values": ("size", *of_texts),
        }
        given = [name for name in unused[kind] if getattr(self, name) is not None]
        if given:
            raise FedStrataError(f"The inputs of '{self.repository}' are {kind}; leave {given[0]} out.")

    def _said(self) -> Hub:
        return dataclasses.replace(self, download=False)

    def find(self, root: Path | None = None) -> Parts:
        """Find the files of all parts, and fetch nothing: of what would be fetched, there are none yet."""
        places = self._places(root)
        found = next((parts for place in places if (parts := find_parts(place, self.configuration))), None)
        if found is None and not self.download:
            raise self._missing(places)
        return found or {}

    def _find_or_fetch(self, root: Path | None) -> Parts:
        found = self.find(root) or find_parts(download(f"hub:{self.repository}", root), self.configuration)
        if not found:
            raise self._missing(self._places(root))
        return found

    def _places(self, root: Path | None) -> list[Path]:
        names = dict.fromkeys((f"{HUB_FOLDER}/{self.repository}", self.repository, self.repository.split("/")[-1]))
        places = [folder / name for folder in data_roots(root) for name in names]
        return places + ([] if root is None else [root.expanduser()])

    def _missing(self, places: Sequence[Path]) -> NotHereError:
        looked = ", ".join(f"'{place}'" for place in places)
        which = "" if self.configuration is None else f" with the configuration '{self.configuration}'"
        fetch = f"fedstrata download hub:{self.repository}"
        offer = f"or fetch it with '{fetch}' (which needs: pip install 'fedstrata[hub]')"
        return NotHereError(
            f"The dataset '{self.repository}' of the hub{which} is in none of {looked}. Expected: Parquet shards "
            "(train-*.parquet, ...) or a folder that datasets.save_to_disk wrote. Name its folder with --data-root "
            f"or {ROOT_VARIABLE}, {offer}.",
            f"hub:{self.repository}{which}: Parquet shards (train-*.parquet, ...) or a folder that "
            f"datasets.save_to_disk wrote, {offer}.",
        )

    def _part(self, parts: Parts, name: str) -> list[Path]:
        if name not in parts:
            raise unknown_name(f"part of '{self.repository}' called", name, parts)
        return parts[name]

    def _label(self, schema: pa.Schema) -> str:
        classes = [name for name, told in features(schema).items() if isinstance(told, Mapping) and "names" in told]
        if self.label is None and not set(LABELS) & set(schema.names) and len(classes) == 1:
            return str(classes[0])
        return find_label(schema.names, self.label, f"'{self.repository}'")

    def _image(self, schema: pa.Schema) -> str | None:
        found = [field.name for field in schema if _holds_images(field.type)]
        if self.image is None:
            if len(found) > 1:
                raise FedStrataError(
                    f"'{self.repository}' has the columns {', '.join(map(repr, found))} of images; "
                    "name the one to learn from with image=...."
                )
            return found[0] if found and self.features is None else None
        if self.image not in schema.names:
            raise unknown_name(f"column of '{self.repository}' called", self.image, schema.names)
        if self.image not in found:
            raise FedStrataError(
                f"The column '{self.image}' of '{self.repository}' holds no encoded images, but "
                f"{schema.field(self.image).type}."
            )
        return self.image

    def _text(self, schema: pa.Schema, label: str) -> str | None:
        """Find the column of texts: the one that is named, or the only one beside label and site if it holds texts."""
        left_out = self._left_out(schema, label)
        others = [field for field in schema if field.name not in left_out]
        if self.text is None:
            alone = len(others) == 1 and self.features is None and _is_text(others[0].type)
            return str(others[0].name) if alone else None
        if self.text not in schema.names:
            raise unknown_name(f"column of '{self.repository}' called", self.text, schema.names)
        if not _is_text(schema.field(self.text).type):
            raise FedStrataError(
                f"The column '{self.text}' of '{self.repository}' holds no texts, but {schema.field(self.text).type}."
            )
        return self.text

    def _left_out(self, schema: pa.Schema, label: str) -> set[str | None]:
        """Name the columns that nothing is learned from."""
        dropped = [] if self.drop is None else self.drop.split("+")
        for name in dropped:
            if name not in schema.names:
                raise unknown_name(f"column of '{self.repository}' called", name, schema.names)
        return {label, self.site, *dropped}

    def _from_values(self, train: Sequence[Path], test: Sequence[Path], label: str, known: Table | None) -> Dataset:
        schema = column_types(train[0])
        left_out = self._left_out(schema, label)
        asked = schema.names if self.features is None else self.features.split("+")
        learned = [name for name in asked if name not in left_out]
        names = class_names(schema.metadata, label)
        first, *last = self._read(train, test, label, *learned)
        self._refuse_free_texts(first, learned)
        return from_table(
            first,
            label=label,
            site=self.site,
            test=last[0] if last else None,
            test_fraction=self.test_fraction,
            features=None if self.features is None else learned,
            class_names=names,
            encoding=known,
            name=str(self._said()),
        )

    def _refuse_free_texts(self, table: pa.Table, learned: Sequence[str]) -> None:
        """Refuse texts beside other columns: as categories of a table they would be as many as there are rows."""
        for name in learned:
            if not _is_text(table.schema.field(name).type):
                continue
            distinct = len(table.column(name).unique())
            if is_free_text(distinct, table.num_rows):
                raise FedStrataError(
                    f"The column '{name}' of '{self.repository}' holds {distinct} different texts in {table.num_rows} "
                    f"rows, which are no categories: learn from these texts alone with text={name}, from other columns "
                    f"with features=..., or leave it out with drop={name}."
                )

    def _from_texts(
        self,
        train: Sequence[Path],
        test: Sequence[Path],
        column: str,
        label: str,
        root: Path | None,
        known: Vocabulary | None,
    ) -> Dataset:
        tables = self._read(train, test, label, column)
        texts = [text or "" for table in tables for text in table.column(column).to_pylist()]
        labels, classes, sites = self._labelled(tables, train, label)
        first, last = self._divided(tables, labels, sites)
        length = self.length or LENGTH
        if known is None and self.vocabulary is not None:
            known = Vocabulary.read(find_vocabulary(self.vocabulary, root), length)
        if known is None:
            known = Vocabulary.build((texts[place] for place in first.tolist()), self.words or WORDS, length)
        inputs = known.encode(texts)
        return Dataset(str(self._said()), inputs, labels, first, last, classes, sites, vocabulary=known)

    def _from_images(
        self, train: Sequence[Path], test: Sequence[Path], image: str, label: str, tested: str | None
    ) -> Dataset:
        tables = self._read(train, test, label, image)
        first_test = tables[0].num_rows

        def called(number: int) -> str:
            part, row = (self.train, number) if number < first_test else (tested, number - first_test)
            return f"The image in row {row} of the column '{image}' (part '{part}' of '{self.repository}')"

        encoded = _encoded([table.column(image) for table in tables], called)
        mode = _mode(encoded, called)
        inputs = torch.from_numpy(decode_images(encoded, mode, self.size, self.repository, called=called))
        labels, classes, sites = self._labelled(tables, train, label)
        first, last = self._divided(tables, labels, sites)
        mean, deviation = channel_statistics(inputs[torch.from_numpy(first)])
        name = str(self._said())
        return Dataset(name, inputs, labels, first, last, classes, sites, mean, deviation, estimated=True)

    def _read(self, train: Sequence[Path], test: Sequence[Path], label: str, *columns: str) -> list[pa.Table]:
        """Read the columns of one part or of both, the site's too, with the names of classes as labels."""
        schema = column_types(train[0])
        wanted = list(dict.fromkeys((*columns, label, *([] if self.site is None else [self.site]))))
        for name in wanted:
            if name not in schema.names:
                raise unknown_name(f"column of '{self.repository}' called", name, schema.names)
        names = class_names(schema.metadata, label)
        return [_with_names(read_columns(part, wanted), label, names) for part in (train, test) if part]

    def _labelled(
        self, tables: Sequence[pa.Table], train: Sequence[Path], label: str
    ) -> tuple[Tensor, tuple[str, ...], np.ndarray | None]:
        """Number the classes, and tell the site of each sample."""
        names = class_names(column_types(train[0]).metadata, label)
        marks = [read_labels(table.column(label).to_pylist(), f"'{self.repository}'") for table in tables]
        numbers, classes = number_labels(marks, names)
        sites = None if self.site is None else np.concatenate([_sites(table, self.site) for table in tables])
        return torch.cat(numbers), classes, sites

    def _divided(
        self, tables: Sequence[pa.Table], labels: Tensor, sites: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        if len(tables) == 1:
            return hold_out_for_testing(groups_of(labels, sites), self.test_fraction)
        first, last = np.split(np.arange(len(labels)), [tables[0].num_rows])
        return first, last


def _with_names(table: pa.Table, label: str, names: Sequence[str] | None) -> pa.Table:
    """Put names in the place of the numbers of classes; a number without one marks a sample without a label."""
    column = table.column(label).combine_chunks()
    if names is None or not pa.types.is_integer(column.type):
        return table
    known = pc.if_else(pc.and_(pc.greater_equal(column, 0), pc.less(column, len(names))), column, None)
    if known.null_count:
        row = int(np.flatnonzero(known.is_null().to_numpy(zero_copy_only=False))[0])
        raise FedStrataError(
            f"Row {row} of a part has no class in the column '{label}'; choose another part with train=... or test=...."
        )
    return table.set_column(table.column_names.index(label), label, pc.take(pa.array(names), known))


def _holds_images(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind)) and {"bytes", "path"} <= {field.name for field in kind}


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _encoded(columns: Sequence[pa.ChunkedArray], called: Callable[[int], str]) -> list[bytes]:
    blobs = [blob for column in columns for chunk in column.chunks for blob in chunk.field("bytes").to_pylist()]
    if None in blobs:
        raise FedStrataError(
            f"{called(blobs.index(None))} is not inside of the dataset, which names a file instead; save it with its "
            "images, as push_to_hub does."
        )
    return blobs


def _mode(encoded: Sequence[bytes], called: Callable[[int], str]) -> str:
    """Tell whether all images are grey, so that one channel holds them, by what their headers say."""
    for number, one in enumerate(encoded):
        with opened_image(one, called(number)) as image:
            if image.mode not in _GREY:
                return "RGB"
    return "L"


def _sites(table: pa.Table, site: str) -> np.ndarray:
    texts = read_texts(table, site)
    if (texts.codes < 0).any():
        row = int((texts.codes < 0).argmax())
        raise FedStrataError(f"Row {row} of a part has no site in the column '{site}'; give one or drop it.")
    return texts.values.astype(str)
