"""Tables: one per site or one with a column for the site, of numbers, categories and gaps, become inputs of a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from fedstrata import files
from fedstrata.data.channels import channel_statistics
from fedstrata.data.columns import (
    Numbers,
    Texts,
    is_table,
    read_column,
    read_table,
    read_texts,
    table_files,
)
from fedstrata.data.dataset import Dataset
from fedstrata.data.held_out import checked_fraction, groups_of, hold_out_for_testing
from fedstrata.data.labels import (
    Marks,
    label_texts,
    number_labels,
    read_labels,
    refuse_untrained,
    tell_alike,
    tell_sites_alike,
)
from fedstrata.data.objects import (
    are_parts,
    by_text,
    choose_parts,
    class_names_of,
    find_label,
    is_hub_dataset,
    label_column,
)
from fedstrata.errors import FedStrataError, FedStrataWarning, unknown_name

_MANY = 20
"""So many distinct texts are a category in any case; more are none where most rows have a text of their own."""
_CODES = 10
"""So few distinct numbers may be codes that stand beside others, such as 1, 2 and A; more are taken for quantities."""
_COUNTED = 10
"""So many rows that a column counts are no chance."""
_NAMELESS = ("", "Unnamed: 0")
"""What the first column is called where pandas wrote the numbers of rows into a CSV file, and read it again."""
_LIKE_SITES = ("site", "client")
_TESTING = {"true", "1", "test", "yes"}
_TRAINING = {"false", "0", "train", "training", "no"}


def is_free_text(distinct: int, rows: int) -> bool:
    """Tell whether so many different texts are no categories, but names or sentences.

    >>> is_free_text(20, 20), is_free_text(21, 60), is_free_text(40, 60)
    (False, False, True)
    """
    return distinct > max(_MANY, rows / 2)


@dataclass(frozen=True)
class Column:
    """How a column becomes inputs of a model.

    A number is one input; ``fill``, the median of the training rows, takes the place of a missing one. A category is
    one input for each of its ``categories``, 1 for the row's own and 0 for the others: so a value that training did not
    have is all zeros. With ``missing``, a last input is 1 where the value is missing, which it was in training too.
    """

    name: str
    fill: float | None = None
    categories: tuple[str, ...] | None = None
    missing: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of its inputs, such as ``age`` or ``sex=female``."""
        own = (self.name,) if self.categories is None else tuple(f"{self.name}={one}" for one in self.categories)
        return (*own, f"{self.name} is missing") if self.missing else own

    @property
    def standardised(self) -> tuple[bool, ...]:
        """Which of its inputs are quantities, to be brought to a common scale, and not zeros and ones."""
        return (self.categories is None, *[False] * (len(self.inputs) - 1))

    @classmethod
    def fit(cls, name: str, column: Numbers | Texts | None, rows: np.ndarray, source: str) -> Column | None:
        """Learn from the training rows how to encode a column; none where it is the same in all of them."""
        if isinstance(column, Numbers):
            values = column.values[rows]
            known = values[~np.isnan(values)]
            if len(known) and (len(known) < len(values) or known.min() < known.max()):
                return cls(name, float(np.median(known)), None, len(known) < len(values))
        elif isinstance(column, Texts):
            codes = column.codes[rows]
            categories = tuple(sorted({column.distinct[code] for code in np.unique(codes[codes >= 0])}))
            if is_free_text(len(categories), len(rows)):
                raise FedStrataError(
                    f"The column '{name}' of {source} holds {len(categories)} different texts in {len(rows)} rows; "
                    f"names and free text are no categories: leave it out with drop='{name}', or make numbers of it."
                )
            missing = bool((codes < 0).any())
            if len(categories) + missing > 1:
                return cls(name, None, categories, missing)
        return None

    def encode(self, table: pa.Table, source: str, tell: bool) -> np.ndarray:
        """Turn the values of some rows into inputs ``[rows, inputs]``; ``tell`` of those that training did not have."""
        column = read_column(table, self.name, source)
        if self.categories is None:
            if isinstance(column, Texts):
                raise FedStrataError(
                    f"The column '{self.name}' of {source} holds texts, such as {_first_odd(column)}, where training "
                    "had numbers; give numbers, or nothing where one is missing."
                )
            values = np.full(len(table), np.nan) if column is None else column.values
            gaps = np.isnan(values)
            encoded = np.where(gaps, self.fill or 0.0, values)[:, None]
            return np.column_stack((encoded, gaps)) if self.missing else encoded
        texts = Texts((), np.full(len(table), -1)) if column is None else read_texts(table, self.name)
        places = {category: place for place, category in enumerate(self.categories)}
        new = [text for text in texts.distinct if text not in places]
        if new and tell:
            warnings.warn(
                f"The column '{self.name}' of {source} holds '{new[0]}'{' and others' * (len(new) > 1)}, which "
                "training did not have; such a value is taken as none of the known ones.",
                FedStrataWarning,
                stacklevel=4,
            )
        width = len(self.categories)
        own = np.array([*(places.get(text, width + 1) for text in texts.distinct), width])[texts.codes]
        one_hot: np.ndarray = np.eye(width + 2)[own][:, : len(self.inputs)]
        return one_hot


@dataclass(frozen=True)
class Table:
    """How the rows of a table become inputs of a model, as learned from the training rows.

    It goes with a model, so that new rows are encoded as those it was trained on, and to other sites, so that all
    encode alike.
    """

    columns: tuple[Column, ...]
    label: str
    class_names: tuple[str, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of all inputs, in their order."""
        return tuple(name for column in self.columns for name in column.inputs)

    @property
    def quantities(self) -> tuple[bool, ...]:
        """Which inputs are quantities, to be normalised; what is zero or one stays as it is."""
        return tuple(one for column in self.columns for one in column.standardised)

    def encode(self, rows: Any) -> Tensor:
        """Turn rows into inputs ``[rows, inputs]``: a data frame, an Arrow table, a dict of columns, a path, dicts.

        Columns that are not needed are ignored, the label included.
        """
        return self.encode_table(read_table(rows, "the rows"), "the rows")

    def labels(self, rows: Any) -> tuple[str, ...]:
        """Read the labels of rows that have some, as the names of their classes."""
        table = read_table(rows, "the rows")
        return label_texts(_labels(table, self.label, "the rows"))

    def encode_table(self, table: pa.Table, source: str, tell: bool = True) -> Tensor:
        """Encode an Arrow table from some source; ``tell`` of values that training did not have."""
        lacking = [column.name for column in self.columns if column.name not in table.column_names]
        if lacking:
            raise FedStrataError(
                f"The column{'s' * (len(lacking) > 1)} {_named(lacking)} {'are' if len(lacking) > 1 else 'is'} missing "
                f"from {source}; there {'are' if table.num_columns != 1 else 'is'} {_named(table.column_names)}."
            )
        encoded = [column.encode(table, source, tell) for column in self.columns]
        return torch.from_numpy(np.concatenate(encoded, axis=1).astype(np.float32))

    def to_mapping(self) -> dict[str, Any]:
        """Write it as plain data, for JSON."""
        return {
            "label": self.label,
            "class_names": list(self.class_names),
            "columns": [
                {"name": column.name, "fill": column.fill, "missing": column.missing}
                if column.categories is None
                else {"name": column.name, "categories": list(column.categories), "missing": column.missing}
                for column in self.columns
            ],
        }

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Table:
        """Read what :meth:`to_mapping` has written."""
        try:
            columns = tuple(
                Column(
                    str(one["name"]),
                    None if "categories" in one else float(one["fill"]),
                    tuple(map(str, one["categories"])) if "categories" in one else None,
                    bool(one["missing"]),
                )
                for one in values["columns"]
            )
            return cls(columns, str(values["label"]), tuple(map(str, values["class_names"])))
        except (KeyError, TypeError, ValueError) as error:
            raise FedStrataError(f"This does not describe the columns of a table: {error!r} is the trouble.") from None

    def write(self, path: str | Path) -> None:
        """Write it into a JSON file, for sites that are to encode alike."""
        files.write_atomically(Path(path), files.to_json(self.to_mapping()))

    @classmethod
    def read(cls, path: str | Path) -> Table:
        """Read the file that :meth:`write` has written."""
        with files.explained(Path(path), "read"):
            content = Path(path).read_bytes()
        return cls.from_mapping(files.from_json(content, Path(path)))


class SiteTables(dict[str, Any]):
    """A table for each site, also where the sites are called as parts of a dataset are, such as train and test."""


def from_table(
    table: Any,
    *,
    label: str | int | None = None,
    site: str | int | None = None,
    test: Any = None,
    test_fraction: float = 0.25,
    features: str | int | Sequence[str | int] | None = None,
    drop: str | int | Sequence[str | int] = (),
    class_names: Sequence[Any] | None = None,
    encoding: Table | str | Path | None = None,
    name: str | None = None,
) -> Dataset:
    """Build a dataset from one table, or from one table per site.

    A table is a pandas or Polars data frame, an Arrow table, a dict of columns, a ``datasets.Dataset`` of single
    values, or the path of a CSV or Parquet file. ``label`` names the column with the class, of any kind; ``site`` the
    one with the owner of each row: the owners are then the clients. Instead, a dict from each site's name to its table,
    or the path of a folder with one file per site; names of parts only, such as train, validation and test, are taken
    for these, not for sites. ``test`` is another table like the first, or a column that is true for the rows to test
    on; without, the fraction ``test_fraction`` of each class and site is held out, always the same rows. ``features``
    are the columns to learn from, by default all but ``drop``.

    Texts, truth values and categories become zeros and ones, missing numbers the median, with an input that tells where
    (see :class:`Column`). What this takes, and the mean and deviation of ``normalise``, comes from the training rows of
    all sites together, as only a simulation can; sites that cannot see each other's rows agree on an ``encoding``
    before: a :class:`Table`, or the file of one.

    >>> rows = {"age": [63, None, 41, 50], "sex": ["male", "female", "male", "male"], "ill": ["yes", "no", "no", "yes"]}
    >>> data = from_table(rows, label="ill", test_fraction=0)
    >>> data.table.inputs, data.class_names
    (('age', 'age is missing', 'sex=female', 'sex=male'), ('no', 'yes'))
    >>> data.inputs.tolist()[1]
    [50.0, 1.0, 1.0, 0.0]
    """
    site = None if site is None else str(site)
    test = str(test) if isinstance(test, int | np.integer) else test
    parts = list(_parts(table, site, testing=False))
    if not parts:
        raise FedStrataError("There are no tables; give a dict from each site's name to its table.")
    first = next(iter(table.values())) if isinstance(table, Mapping) else table
    if is_hub_dataset(first):
        label = label_column(first, label, parts[0].source)
        class_names = class_names_of(first, label) if class_names is None else class_names
    label = find_label(parts[0].table.column_names, None if label is None else str(label), parts[0].source)
    tested = test if isinstance(test, str) and test in parts[0].table.column_names else None
    if test is not None and any(part.testing for part in parts):
        raise FedStrataError("There is a part to test on among the tables, so that test=... would tell it twice.")
    if test is not None and tested is None:
        parts += _parts(test, site, testing=True)
    for part in parts:
        if part.table.num_rows == 0:
            raise FedStrataError(f"There are no rows in {part.source}.")
    marks = [_labels(part.table, label, part.source) for part in parts]
    owners = _owners(parts, site)
    wanted = None if features is None else _texts(features)
    if owners is not None:
        tell_sites_alike(np.unique(owners).tolist(), parts[0].source)
    names = _feature_names(parts, (label, site, tested), wanted, _texts(drop), tell=encoding is None)
    if encoding is not None:
        agreed = encoding if isinstance(encoding, Table) else Table.read(encoding)
        class_names = agreed.class_names if class_names is None else class_names
    numbers, classes = number_labels(marks, class_names)
    labels = torch.cat(numbers)
    if test is None and not any(part.testing for part in parts):
        train, held = hold_out_for_testing(groups_of(labels, owners), checked_fraction(test_fraction))
    else:
        testing = np.concatenate([_testing_rows(part, tested) for part in parts])
        train, held = np.flatnonzero(~testing), np.flatnonzero(testing)
        _refuse_odd_testing(train, held, owners, parts[0].source)
    if encoding is None:
        agreed = Table(_fit(parts, names, train, tell=wanted is None), label, classes)
    inputs = torch.cat([agreed.encode_table(part.table, part.source, tell=encoding is not None) for part in parts])
    refuse_untrained(labels, train, classes, parts[0].source, named=class_names is not None)
    if class_names is None:
        tell_alike(classes, parts[0].source)
    mean, deviation = _statistics(inputs[torch.from_numpy(train)], agreed)
    return Dataset(
        name or _name_of(table), inputs, labels, train, held, classes, owners, mean, deviation,
        estimated=True, table=replace(agreed, class_names=classes),
    )  # fmt: skip


class _Part(NamedTuple):
    """A table from one source, which errors name: of one site or of several, to train on or to test on."""

    source: str
    site: str | None
    table: pa.Table
    testing: bool


def _parts(given: Any, site: str | None, testing: bool) -> Iterator[_Part]:
    word = "the test table" if testing else "the table"
    in_folder = isinstance(given, str | Path) and Path(given).expanduser().is_dir()
    if in_folder:
        tables: Mapping[str, Any] = table_files(Path(given).expanduser())
        sources = {name: f"'{path}'" for name, path in tables.items()}
    elif isinstance(given, Mapping) and all(is_table(one) or isinstance(one, Mapping) for one in given.values()):
        tables = by_text(given, "tables")
        sources = {name: f"{word} of '{name}'" for name in tables}
    else:
        source = f"'{given}'" if isinstance(given, str | Path) else word
        path = Path(given).expanduser() if isinstance(given, str | Path) else given
        yield _Part(source, None, read_table(path, source), testing)
        return
    if not testing and not isinstance(given, SiteTables) and are_parts(tables):
        train, test = choose_parts(tables)
        for name in (train,) if test is None else (train, test):
            yield _Part(sources[name], None, read_table(tables[name], sources[name]), name == test)
        return
    if site is not None and not in_folder:
        raise FedStrataError(
            f"There is a table for each site already, so that the column '{site}' would tell it twice; leave site "
            "out, or give one table."
        )
    for name, one in tables.items():
        yield _Part(sources[name], None if site is not None else name, read_table(one, sources[name]), testing)


def _labels(table: pa.Table, label: str, source: str) -> Marks:
    column = table.column(find_label(table.column_names, label, source))
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return read_labels(column.to_pylist(), f"{source} (column '{label}')")


def _owners(parts: Sequence[_Part], site: str | None) -> np.ndarray | None:
    """Tell the site of every row, where there are sites."""
    if site is None:
        if all(part.site is None for part in parts):
            return None
        if any(part.site is None for part in parts):
            raise FedStrataError("The training tables tell their sites and the test tables do not; give both by site.")
        return np.repeat([str(part.site) for part in parts], [part.table.num_rows for part in parts])
    owners = []
    for part in parts:
        if site not in part.table.column_names:
            raise unknown_name(f"column of {part.source} called", site, part.table.column_names)
        texts = read_texts(part.table, site)
        if (texts.codes < 0).any():
            row = int((texts.codes < 0).argmax())
            raise FedStrataError(
                f"Row {row + 1} of {part.source}, the names of its columns not counted, has no site in the column "
                f"'{site}'; give one or drop it."
            )
        owners.append(texts.values.astype(str))
    return np.concatenate(owners)


def _feature_names(
    parts: Sequence[_Part],
    taken: tuple[str, str | None, str | None],
    wanted: Sequence[str] | None,
    dropped: Sequence[str],
    tell: bool,
) -> list[str]:
    """Tell from which columns to learn, after checking that all tables have them."""
    first = parts[0]
    for name in (*(wanted or ()), *dropped):
        if not any(name in part.table.column_names for part in parts):
            raise unknown_name(f"column of {first.source} called", name, first.table.column_names)
    left_out = {*taken, *dropped}
    if wanted is None:
        indices = {name for part in parts for name in _indices(part.table)} - left_out
        if indices and tell:
            warnings.warn(
                f"The column {_named(sorted(indices))} of {first.source} is left out: it has no name, as the numbers "
                "of rows that pandas writes beside a table; write tables with index=False, or give it a name to learn "
                "from it.",
                FedStrataWarning,
                stacklevel=3,
            )
        left_out |= indices
    names = [name for name in (wanted or first.table.column_names) if name not in left_out]
    if not names:
        beside = _named(sorted(name for name in left_out if name is not None))
        raise FedStrataError(f"There is no column in {first.source} to learn from beside {beside}.")
    for part in parts:
        lacking = [name for name in names if name not in part.table.column_names]
        further = [name for name in part.table.column_names if name not in (*names, *left_out)]
        if lacking or (further and wanted is None):
            one, where, other = (lacking[0], first, part) if lacking else (further[0], part, first)
            raise FedStrataError(
                f"The column '{one}' is in {where.source} but not in {other.source}; all tables must have the same "
                f"columns: rename it, or leave it out with drop='{one}'."
            )
    likely = [name for name in names if name.lower() in _LIKE_SITES]
    if tell and likely and first.site is None and taken[1] is None and wanted is None:
        warnings.warn(
            f"The column '{likely[0]}' of {first.source} is taken as something to learn from; write "
            f"site='{likely[0]}' if its values are the clients, or drop='{likely[0]}'.",
            FedStrataWarning,
            stacklevel=3,
        )
    return names


def _indices(table: pa.Table) -> list[str]:
    """List the columns that are the index of a data frame: first and without a name, or called so in Parquet files."""
    first = [name for name in table.column_names[:1] if name in _NAMELESS]
    return first + [name for name in table.column_names if name.startswith("__index_level_")]


def _texts(names: str | int | Sequence[str | int]) -> list[str]:
    if isinstance(names, Iterable) and not isinstance(names, str):
        return [str(name) for name in names]
    return [str(names)]


def _fit(parts: Sequence[_Part], names: Sequence[str], train: np.ndarray, tell: bool) -> tuple[Column, ...]:
    """Learn from the training rows of all tables how to encode each column; ``tell`` of those that only count rows."""
    joined = {name: _joined(parts, name) for name in names}
    counting = [name for name, column in joined.items() if _count_rows(column, parts)]
    if counting and tell:
        warnings.warn(
            f"The column{'s' * (len(counting) > 1)} {_named(counting)} of {parts[0].source} only "
            f"count{'' if len(counting) > 1 else 's'} the rows; where these are in the order of the classes, models "
            f"learn that order: leave it out with drop='{counting[0]}'.",
            FedStrataWarning,
            stacklevel=3,
        )
    fitted = {name: Column.fit(name, column, train, parts[0].source) for name, column in joined.items()}
    constant = [name for name, column in fitted.items() if column is None]
    if len(constant) == len(names):
        raise FedStrataError(f"All columns of {parts[0].source} are the same in every training row: nothing to learn.")
    if constant:
        warnings.warn(
            f"The column{'s' * (len(constant) > 1)} {_named(constant)} of {parts[0].source} "
            f"{'are' if len(constant) > 1 else 'is'} the same in every training row and left out: there is nothing to "
            "learn from it.",
            FedStrataWarning,
            stacklevel=3,
        )
    return tuple(column for column in fitted.values() if column is not None)


def _joined(parts: Sequence[_Part], name: str) -> Numbers | Texts | None:
    """Read one column of all tables; numbers in one and texts in another are refused."""
    read = [read_column(part.table, name, part.source) for part in parts]
    texts = [(part, one) for part, one in zip(parts, read, strict=True) if isinstance(one, Texts)]
    numbers = [(part, one) for part, one in zip(parts, read, strict=True) if isinstance(one, Numbers)]
    if texts and numbers:
        (part, one), (other, _) = texts[0], numbers[0]
        raise FedStrataError(
            f"The column '{name}' holds texts in {part.source}, such as {_first_odd(one)}, and numbers in "
            f"{other.source}; make it all numbers or all texts, or leave it out with drop='{name}'."
        )
    rows = [part.table.num_rows for part in parts]
    if numbers:
        own = [np.full(count, np.nan) if one is None else one.values for one, count in zip(read, rows, strict=True)]
        return Numbers(np.concatenate(own))
    if texts:
        own = [np.full(count, None) if one is None else one.values for one, count in zip(read, rows, strict=True)]
        whole = read_texts(pa.table({name: pa.array(np.concatenate(own).tolist(), pa.string())}), name)
        if not any(pa.types.is_dictionary(part.table.column(name).type) for part, _ in texts):
            _judge_numbers_as_texts(name, whole, texts)
        return whole
    return None


def _judge_numbers_as_texts(name: str, column: Texts, where: Sequence[tuple[_Part, Texts]]) -> None:
    """Refuse texts that are numbers but for some; tell where few distinct ones may be codes, or all are numbers.

    Every distinct number would be an input of its own, without a word of what it is near to.
    """
    if 2 * column.like_numbers <= len(column.distinct):
        return
    told: list[str] = []
    for text in column.odd[:4]:
        part, own = next((part, own) for part, own in where if text in own.distinct)
        told.append(f"'{text}' in row {own.row_of(text)} of {part.source}")
    further = f" and {len(column.odd) - 4} more" if len(column.odd) > 4 else ""
    odd = f"{', '.join(told)}{further} {'are no numbers' if len(column.odd) > 1 else 'is no number'}"
    amount = "Most" if column.like_numbers < len(column.distinct) else "All"
    many = column.like_numbers > _CODES
    if many and told:
        raise FedStrataError(
            f"{amount} of the {len(column.distinct)} different texts in the column '{name}' are written like numbers, "
            f"but {odd}; leave empty what is missing and write decimals with a point, or make the column one of "
            f"categories (in pandas: .astype('category')), or leave it out with drop='{name}'."
        )
    if not told and not many:
        return
    why = odd if told else f"its numbers are texts, such as '{column.distinct[0]}'"
    instead = "leave empty what stands for a missing value" if told else "give quantities as numbers"
    warnings.warn(
        f"The column '{name}' is taken as {len(column.distinct)} categories, since {why}; {instead}, or make the "
        "column one of categories (in pandas: .astype('category')).",
        FedStrataWarning,
        stacklevel=4,
    )


def _first_odd(column: Texts) -> str:
    text = (column.odd or column.distinct)[0]
    return f"'{text}' in row {column.row_of(text)}"


def _count_rows(column: Numbers | Texts | None, parts: Sequence[_Part]) -> bool:
    """Tell whether numbers are 0, 1, 2, ... or 1, 2, 3, ..., in each table anew or through all of them."""
    if not isinstance(column, Numbers):
        return False
    each = np.split(column.values, np.cumsum([part.table.num_rows for part in parts])[:-1])
    return _is_counting(column.values) or all(map(_is_counting, each))


def _is_counting(values: np.ndarray) -> bool:
    return len(values) >= _COUNTED and bool(values[0] in (0, 1) and (np.diff(values) == 1).all())


def _testing_rows(part: _Part, column: str | None) -> np.ndarray:
    """Tell which rows are to test on: all of a test table, or those that a column marks."""
    if part.testing or column is None:
        return np.full(part.table.num_rows, part.testing)
    texts = read_texts(part.table, column)
    known = [text.lower() in _TESTING for text in texts.distinct]
    odd = [text for text in texts.distinct if text.lower() not in _TESTING | _TRAINING]
    if odd or (texts.codes < 0).any():
        raise FedStrataError(
            f"The column '{column}' of {part.source} is to tell the rows to test on, but holds "
            f"{repr(odd[0]) if odd else 'gaps'}; true and false, 1 and 0, or 'test' and 'train' are possible."
        )
    testing: np.ndarray = np.array(known)[texts.codes]
    return testing


def _refuse_odd_testing(train: np.ndarray, held: np.ndarray, owners: np.ndarray | None, source: str) -> None:
    if len(train) == 0:
        raise FedStrataError(f"All rows of {source} are to test on; leave some to train on.")
    alone = [] if owners is None else sorted(set(owners[held]) - set(owners[train]))
    if alone:
        raise FedStrataError(f"The site '{alone[0]}' has rows to test on, but none to train on; leave it out.")


def _statistics(inputs: Tensor, table: Table) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute mean and deviation of quantities; what is zero or one stays as it is."""
    means, deviations = channel_statistics(inputs)
    assert means is not None
    assert deviations is not None
    return (
        tuple(value if one else 0.0 for value, one in zip(means, table.quantities, strict=True)),
        tuple(value if one else 1.0 for value, one in zip(deviations, table.quantities, strict=True)),
    )


def _name_of(given: Any) -> str:
    return Path(given).stem if isinstance(given, str | Path) else "table"


def _named(names: Sequence[Any]) -> str:
    return ", ".join(f"'{name}'" for name in names[:12]) + (", ..." if len(names) > 12 else "")
