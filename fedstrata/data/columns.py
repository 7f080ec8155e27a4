"""Anything with columns as an Arrow table: pandas, Polars, Arrow, dicts of columns, hub datasets, CSV, Parquet."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from torch import Tensor

from fedstrata.data.formats.bounds import refuse_irregular, refuse_large_table, refuse_large_text
from fedstrata.data.objects import is_hub_dataset, is_transformed
from fedstrata.errors import FedStrataError, FedStrataWarning, first_line

ENDINGS = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet", ".pq")
_OTHER_ENDINGS = (
    ".xlsx", ".xlsm", ".xlsb", ".xls", ".ods", ".json", ".jsonl", ".ndjson", ".sav", ".dta", ".sas7bdat", ".xpt",
    ".rds", ".rdata", ".feather", ".arrow", ".orc", ".zip",
)  # fmt: skip
"""Files that hold tables for other programs, which are not read."""
_SEPARATORS = (",", ";", "\t", "|")
_BLOCK = 1 << 28
"""How many bytes of a CSV file Arrow looks at to tell the types of its columns: nearly always all of it."""
_MISSING = ("?",)
"""What stands for a missing value in CSV files beside what Arrow knows: nothing, NA, NaN, null, n/a and the like."""


_DECIMAL_COMMA = r"^[+-]?\d+(,\d+)?$"
_LIKE_NUMBER = re.compile(r"\s*[+-]?(\d+[.,]?\d*|[.,]\d+)(e[+-]?\d+)?\s*%?\s*", re.IGNORECASE)
_LARGEST = float(np.finfo(np.float32).max)


def is_table(given: Any) -> bool:
    """Tell whether an object has named columns of single values: a data frame, a table, the path of one."""
    if isinstance(given, pa.Table | pa.RecordBatch | str | Path):
        return True
    if is_hub_dataset(given):
        kinds = {type(feature).__name__ for feature in given.features.values()}
        return not is_transformed(given) and kinds <= {"Value", "ClassLabel"}
    return hasattr(given, "columns") and (hasattr(given, "iloc") or hasattr(given, "__arrow_c_stream__"))


def read_table(given: Any, source: str) -> pa.Table:
    """Read a table of any kind; a dict of single values, or a list of such dicts, are rows."""
    if isinstance(given, str | Path):
        table = _read_file(Path(given))
    elif isinstance(given, pa.Table):
        table = given
    elif isinstance(given, pa.RecordBatch):
        table = pa.Table.from_batches([given])
    elif is_hub_dataset(given):
        table = _with_class_names(given)
    elif hasattr(given, "columns") and hasattr(given, "iloc"):
        table = _from_columns([(name, given.iloc[:, place]) for place, name in enumerate(given.columns)], source)
    elif hasattr(given, "__arrow_c_stream__"):
        table = pa.table(given)
    elif isinstance(given, Mapping):
        single = given and not any(_has_values(value) for value in given.values())
        table = _from_columns([(name, [value] if single else value) for name, value in given.items()], source)
    elif isinstance(given, list | tuple) and given and all(isinstance(row, Mapping) for row in given):
        names = dict.fromkeys(name for row in given for name in row)
        table = _from_columns([(name, [row.get(name) for row in given]) for name in names], source)
    else:
        raise FedStrataError(
            f"A {type(given).__name__} is no table, as {source} must be; give a data frame, an Arrow table, a dict of "
            "columns, or the path of a CSV or Parquet file."
        )
    twice = [name for name in table.column_names if table.column_names.count(name) > 1]
    if twice:
        raise FedStrataError(f"Two columns of {source} are called '{twice[0]}'; give each a name of its own.")
    return table


def table_files(folder: Path) -> dict[str, Path]:
    """List the CSV and Parquet files of a folder by their names without endings, in alphabetical order."""
    found: dict[str, Path] = {}
    left_out: list[str] = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "~$")) or not path.is_file():
            continue
        ending = next((ending for ending in ENDINGS if path.name.lower().endswith(ending)), None)
        if ending is None:
            if path.name.lower().endswith(_OTHER_ENDINGS) and not _is_encoding(path):
                left_out.append(path.name)
            continue
        stem = path.name[: -len(ending)]
        if stem in found:
            raise FedStrataError(f"'{found[stem]}' and '{path}' would both be the table '{stem}'; remove one of them.")
        found[stem] = path
    told = ", ".join(f"'{name}'" for name in left_out[:8]) + ", ..." * (len(left_out) > 8)
    if not found:
        instead = f", but {told}" if left_out else ""
        raise FedStrataError(f"'{folder}' holds no tables{instead}; put a CSV or Parquet file of each site into it.")
    if left_out:
        warnings.warn(
            f"Only CSV and Parquet files are read of '{folder}', so that {told} "
            f"{'are' if len(left_out) > 1 else 'is'} left out; save as one of these what is to be a site's table.",
            FedStrataWarning,
            stacklevel=4,
        )
    return found


def _is_encoding(path: Path) -> bool:
    """Tell the file that says how columns become inputs, which may lie beside the tables."""
    if path.suffix.lower() != ".json":
        return False
    with path.open("rb") as stream:
        return b'"class_names"' in stream.read(1 << 16)


class Numbers(NamedTuple):
    """A column of numbers, NaN where one is missing."""

    values: np.ndarray


class Texts(NamedTuple):
    """A column of categories: the distinct texts, and for each row the position of its own, -1 where it is missing."""

    distinct: tuple[str, ...]
    codes: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """The rows' texts; none where one is missing."""
        texts: np.ndarray = np.array([*self.distinct, None], dtype=object)[self.codes]
        return texts

    @property
    def like_numbers(self) -> int:
        """How many of the distinct texts are written like numbers, be it with a comma or as a percentage."""
        return sum(_LIKE_NUMBER.fullmatch(text) is not None for text in self.distinct)

    @property
    def odd(self) -> tuple[str, ...]:
        """The texts that are no numbers; where all are written like some, those with commas or percent signs."""
        unlike = tuple(text for text in self.distinct if _LIKE_NUMBER.fullmatch(text) is None)
        return unlike or tuple(text for text in self.distinct if "," in text or "%" in text)

    def row_of(self, text: str) -> int:
        """Tell the first row that holds a text; the first of all is row 1, the names of columns not counted."""
        return int((self.codes == self.distinct.index(text)).argmax()) + 1


def read_column(table: pa.Table, name: str, source: str) -> Numbers | Texts | None:
    """Read a column as numbers or categories; none where all its values are missing. Other kinds are refused."""
    column = table.column(name)
    kind = column.type
    if pa.types.is_dictionary(kind):
        return read_texts(table, name)
    if pa.types.is_null(kind) or column.null_count == len(column):
        return None
    if _is_number(kind):
        return read_numbers(table, name, source)
    if pa.types.is_boolean(kind) or _is_text(kind):
        return read_texts(table, name)
    if pa.types.is_temporal(kind):
        raise FedStrataError(
            f"The column '{name}' of {source} holds dates or times ({kind}), which are neither numbers nor categories; "
            f"make a number of it, such as the days since a date, or leave it out with drop='{name}'."
        )
    raise FedStrataError(
        f"The column '{name}' of {source} holds values of the type {kind}; numbers, texts and truth values are "
        f"possible: turn it into columns of these, or leave it out with drop='{name}'."
    )


def read_numbers(table: pa.Table, name: str, source: str) -> Numbers:
    """Read a column of numbers."""
    values = pc.cast(table.column(name), pa.float64(), safe=False).to_numpy()
    beyond = np.abs(values) > _LARGEST
    if beyond.any():
        value = float(values[beyond.argmax()])
        told = "an infinity" if np.isinf(value) else f"{value:g}, more than the {_LARGEST:.1e} that models reckon with"
        raise FedStrataError(
            f"Row {int(beyond.argmax()) + 1} of the column '{name}' of {source} is {told}; "
            f"give a number in another unit, leave it empty where it is not known, or leave out the column with "
            f"drop='{name}'."
        )
    return Numbers(values)


def read_texts(table: pa.Table, name: str) -> Texts:
    """Read a column as categories, numbers and truth values as their texts."""
    column = table.column(name)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    encoded = column.combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):  # with another version of Arrow
        encoded = encoded.combine_chunks()
    distinct = tuple(_text(value) for value in encoded.dictionary.to_pylist())
    return Texts(distinct, encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64))


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _is_number(kind: pa.DataType) -> bool:
    return any(test(kind) for test in (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal))


def _is_text(kind: pa.DataType) -> bool:
    return str(kind) in ("string", "large_string", "string_view")


def _has_values(value: Any) -> bool:
    return not isinstance(value, str | bytes) and hasattr(value, "__len__")


def _from_columns(columns: Sequence[tuple[Any, Any]], source: str) -> pa.Table:
    """Put columns together one by one, so that an error can name the column."""
    arrays = {}
    for name, values in columns:
        if str(name) in arrays:
            raise FedStrataError(f"Two columns of {source} are called '{name}'; give each a name of its own.")
        arrays[str(name)] = _as_arrow(str(name), values, source)
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"'{name}' {length}" for name, length in list(lengths.items())[:4])
        raise FedStrataError(f"The columns of {source} are of unequal length: {told}; give one value per row.")
    return pa.table(arrays)


def _as_arrow(name: str, values: Any, source: str) -> Any:
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if not _has_values(values):
        raise FedStrataError(
            f"The column '{name}' of {source} is a {type(values).__name__}; give a list or an array with one value per "
            "row."
        )
    try:
        array = pa.array(values, from_pandas=True)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        listed = values.tolist() if hasattr(values, "tolist") else list(values)
        missing = (None.__class__, float)
        kinds = sorted({type(value).__name__ for value in listed if not isinstance(value, missing) or value == value})
        kinds = [kind for kind in kinds if kind not in ("NoneType", "NAType")]
        raise FedStrataError(
            f"The column '{name}' of {source} holds values of mixed types ({', '.join(kinds)}); make them all numbers "
            f"or all texts, or leave it out with drop='{name}'."
        ) from None
    return array


def _with_class_names(dataset: Any) -> pa.Table:
    """Read a hub's dataset, with names in the place of the numbers of classes."""
    table = dataset.with_format("arrow")[:]
    for place, (name, feature) in enumerate(dataset.features.items()):
        names = getattr(feature, "names", None)
        if names is not None:
            numbers = table.column(name).combine_chunks()
            known = pc.if_else(pc.less(numbers, 0), None, numbers)  # -1 marks a row without a label
            table = table.set_column(place, name, pc.take(pa.array(names), known).dictionary_encode())
    return table


def _read_file(path: Path) -> pa.Table:
    if not path.exists():
        raise FedStrataError(f"There is no file '{path}'.")
    refuse_irregular(path)
    if path.name.lower().endswith(_OTHER_ENDINGS):
        raise _not_a_table(path)
    try:
        if path.name.lower().endswith((".parquet", ".pq")):
            refuse_large_table(path)
            return pq.read_table(path)
        if path.name.lower().endswith(".gz"):
            refuse_large_text(path)
        return _read_csv(path)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise FedStrataError(f"'{path}' cannot be read as a table: {first_line(error)}.") from None


def _read_csv(path: Path) -> pa.Table:
    """Read text with a line of column names; the separator is the one that this line has most of.

    Excel may name it in a line before, such as ``sep=;``. Where it is no comma, numbers may have a decimal comma.
    """
    with pa.input_stream(str(path), compression="detect") as stream:
        beginning = stream.read(1 << 16)
    if beginning.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise _not_utf8(path)
    if b"\0" in beginning:
        raise _not_a_table(path)
    header = beginning.removeprefix(b"\xef\xbb\xbf").split(b"\n")[0].decode("utf-8", errors="replace")
    told = re.fullmatch(r'"?sep=(.)"?\s*', header, re.IGNORECASE)
    separator = max(_SEPARATORS, key=header.count) if told is None else told[1]
    missing = [*pyarrow.csv.ConvertOptions().null_values, *_MISSING]
    table = pyarrow.csv.read_csv(
        path,
        read_options=pyarrow.csv.ReadOptions(block_size=_BLOCK, skip_rows=0 if told is None else 1),
        parse_options=pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True),
        convert_options=pyarrow.csv.ConvertOptions(null_values=missing, strings_can_be_null=True),
    )
    try:
        names = table.column_names  # which Arrow decodes only here
    except UnicodeDecodeError:
        raise _not_utf8(path) from None
    if any(pa.types.is_binary(table.schema.field(place).type) for place in range(len(names))):
        raise _not_utf8(path)
    return table if separator == "," else _with_decimal_points(table)


def _with_decimal_points(table: pa.Table) -> pa.Table:
    """Make numbers of the columns in which every value is a number with a decimal comma, or whole."""
    for place, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        if _is_text(column.type) and pc.all(pc.match_substring_regex(column, _DECIMAL_COMMA)).as_py():
            numbers = pc.cast(pc.replace_substring(column, ",", "."), pa.float64())
            table = table.set_column(place, name, numbers)
    return table


def _not_utf8(path: Path) -> FedStrataError:
    return FedStrataError(f"'{path}' is not UTF-8; save it as UTF-8 (in Excel: CSV UTF-8).")


def _not_a_table(path: Path) -> FedStrataError:
    return FedStrataError(f"'{path}' is neither a CSV file nor a Parquet file; save it as CSV or Parquet.")
