"""Tables of every kind, with categories, gaps and sites, become inputs; what cannot gets a sentence."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import fedstrata
from fedstrata.cli import main
from fedstrata.data import Table, datasets, from_arrays, from_clients, from_table
from fedstrata.errors import FedStrataError, FedStrataWarning

ROWS: dict[str, list[Any]] = {
    "age": [63, None, 41, 50],
    "sex": ["male", "female", None, "male"],
    "smoker": [True, False, False, True],
    "ill": ["yes", "no", "no", "yes"],
}
INPUTS = ("age", "age is missing", "sex=female", "sex=male", "sex is missing", "smoker=False", "smoker=True")
# The median of 63, 41 and 50 is 50.
ENCODED = [
    [63, 0, 0, 1, 0, 0, 1],
    [50, 1, 1, 0, 0, 1, 0],
    [41, 0, 0, 0, 1, 1, 0],
    [50, 0, 0, 1, 0, 0, 1],
]


def frame(rows: dict[str, list[Any]] = ROWS) -> pd.DataFrame:
    return pd.DataFrame(rows)


def many(rows: int = 24, **changes: Any) -> dict[str, Any]:
    """A table of two hospitals and three classes, in which each class of a hospital has four rows."""
    columns = {
        "hospital": np.repeat(["north", "south"], rows // 2),
        "age": np.arange(rows) * 1.5,
        "sex": np.tile(["f", "m"], rows // 2),
        "outcome": np.tile([1, 2, 3], rows // 3),
    }
    return {**columns, **changes}


@pytest.mark.parametrize("kind", ["dict", "pandas", "category", "arrow", "csv", "semicolons", "gz", "parquet", "hub"])
def test_a_table_of_any_kind_becomes_the_same_inputs(kind: str, tmp_path: Path) -> None:
    given: Any = ROWS
    if kind == "pandas":
        given = frame()
    elif kind == "category":
        given = frame().astype({"sex": "category", "ill": "category"})
    elif kind == "arrow":
        given = pa.table(ROWS)
    elif kind == "parquet":
        given = tmp_path / "rows.parquet"
        pq.write_table(pa.table(ROWS), given)
    elif kind == "hub":
        given = pytest.importorskip("datasets").Dataset.from_dict(ROWS)
    elif kind != "dict":
        given = tmp_path / ("rows.csv.gz" if kind == "gz" else "rows.csv")
        frame().to_csv(given, index=False, sep=";" if kind == "semicolons" else ",", na_rep="?")
    data = from_table(given, label="ill", test_fraction=0)
    assert data.table is not None
    assert data.table.inputs == INPUTS
    assert data.inputs.tolist() == ENCODED
    assert data.class_names == ("no", "yes")
    assert data.labels.tolist() == [1, 0, 0, 1]
    assert data.sites is None


def test_only_quantities_are_standardised() -> None:
    data = from_table(ROWS, label="ill", test_fraction=0)
    assert data.mean is not None
    assert data.deviation is not None
    assert data.mean == (51.0, 0, 0, 0, 0, 0, 0)
    assert data.deviation[0] == pytest.approx(np.std([63, 50, 41, 50]))
    assert data.deviation[1:] == (1,) * 6


def test_what_is_learned_comes_from_training_rows_only() -> None:
    test = {"age": [1000, 2000], "sex": ["other", "male"], "smoker": [True, True], "ill": ["no", "yes"]}
    data = from_table(ROWS, label="ill", test=test)
    assert data.train.tolist() == [0, 1, 2, 3]
    assert data.test.tolist() == [4, 5]
    assert data.table is not None
    assert data.table.inputs == INPUTS
    assert data.mean is not None
    assert data.mean[0] == 51
    assert data.inputs[4].tolist() == [1000, 0, 0, 0, 0, 0, 1]  # a sex that training did not have is none of the known


def test_a_site_column_makes_clients_and_labels_may_begin_at_one() -> None:
    data = from_table(many(), label="outcome", site="hospital")
    assert data.class_names == ("1", "2", "3")
    assert data.sites is not None
    assert data.sites.tolist() == ["north"] * 12 + ["south"] * 12
    assert data.table is not None
    assert data.table.inputs == ("age", "sex=f", "sex=m")
    held = data.labels[data.test].tolist(), data.sites[data.test].tolist()
    assert held == ([0, 1, 2, 0, 1, 2], ["north"] * 3 + ["south"] * 3)  # a quarter of each class of each site


def test_one_table_per_site_is_one_table_with_a_site_column(tmp_path: Path) -> None:
    whole = frame(many())
    parts = {str(name): part.drop(columns="hospital") for name, part in whole.groupby("hospital")}
    for name, part in parts.items():
        part.to_csv(tmp_path / f"{name}.csv", index=False)
    expected = from_table(whole, label="outcome", site="hospital")
    split_as_wished = from_clients(parts, label="outcome")
    assert [len(part) for part in split_as_wished[1].train] == [9, 9]
    for data in (from_table(parts, label="outcome"), from_table(tmp_path, label="outcome"), split_as_wished[0]):
        assert torch.equal(data.inputs, expected.inputs)
        assert torch.equal(data.labels, expected.labels)
        assert data.sites is not None
        assert expected.sites is not None
        assert data.sites.tolist() == expected.sites.tolist()
        assert data.test.tolist() == expected.test.tolist()
        assert data.table == expected.table


def test_files_called_train_and_test_are_these_parts(tmp_path: Path) -> None:
    frame(many()).to_csv(tmp_path / "train.csv", index=False)
    frame(many(6)).to_csv(tmp_path / "test.csv", index=False)
    data = from_table(tmp_path, label="outcome", site="hospital")
    assert len(data.train) == 24
    assert len(data.test) == 6
    assert data.sites is not None
    assert set(data.sites) == {"north", "south"}


@pytest.mark.parametrize("marks", [[True, False], [1, 0], ["test", "train"]])
def test_a_column_may_tell_the_rows_to_test_on(marks: list[Any]) -> None:
    data = from_table(many(part=np.repeat(marks, [3, 21])), label="outcome", test="part", drop="hospital")
    assert data.test.tolist() == [0, 1, 2]
    assert data.table is not None
    assert data.table.inputs == ("age", "sex=f", "sex=m")


def test_a_site_may_have_nothing_but_gaps_in_a_column() -> None:
    gone = {"age": [None, None], "ill": ["no", "yes"]}
    data = from_table({"a": {"age": [1.0, 3.0], "ill": ["no", "yes"]}, "b": gone}, label="ill", test_fraction=0)
    assert data.inputs.tolist() == [[1, 0], [3, 0], [2, 1], [2, 1]]


def test_features_and_drop_choose_columns() -> None:
    for choice in ({"features": ["age", "sex"]}, {"drop": "smoker"}):
        table = from_table(ROWS, label="ill", test_fraction=0, **choice).table
        assert table is not None
        assert [column.name for column in table.columns] == ["age", "sex"]


def test_an_encoding_survives_json_and_encodes_new_rows(tmp_path: Path) -> None:
    table = from_table(ROWS, label="ill", test_fraction=0).table
    assert table is not None
    assert Table.from_mapping(json.loads(json.dumps(table.to_mapping()))) == table
    table.write(tmp_path / "columns.json")
    again = Table.read(tmp_path / "columns.json")
    assert again == table
    assert again.encode(ROWS).tolist() == ENCODED
    assert again.encode(frame()).tolist() == ENCODED
    assert again.labels(frame()) == ("yes", "no", "no", "yes")
    one = {"age": 70, "sex": "female", "smoker": True, "remark": "further columns are ignored"}
    assert again.encode(one).tolist() == [[70, 0, 1, 0, 0, 0, 1]]
    assert again.encode([one, {**one, "age": None}]).tolist()[1] == [50, 1, 1, 0, 0, 0, 1]
    with pytest.warns(FedStrataWarning, match="'sex' of the rows holds 'unknown', which training did not have"):
        assert again.encode({**one, "sex": "unknown"}).tolist() == [[70, 0, 0, 0, 0, 0, 1]]


def test_sites_agree_on_an_encoding() -> None:
    whole = from_table(many(), label="outcome", site="hospital", test_fraction=0)
    south = {name: values[12:14] for name, values in many().items()}
    own = from_table(south, label="outcome", site="hospital", encoding=whole.table, test_fraction=0)
    assert torch.equal(own.inputs, whole.inputs[12:14])
    assert own.class_names == ("1", "2", "3")
    assert own.labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ({"sex": ["male"], "smoker": [True]}, "The column 'age' is missing from the rows; there are 'sex', 'smoker'"),
        ({"smoker": [True]}, "The columns 'age', 'sex' are missing from the rows; there is 'smoker'"),
        (
            {"age": ["old"], "sex": ["male"], "smoker": [True]},
            "holds texts, such as 'old' in row 1, where training had",
        ),
        (7, "A int is no table, as the rows must be; give a data frame"),
    ],
)
def test_rows_that_do_not_fit_get_one_sentence(rows: Any, sentence: str) -> None:
    table = from_table(ROWS, label="ill", test_fraction=0).table
    assert table is not None
    with pytest.raises(FedStrataError, match=sentence):
        table.encode(rows)


DATES = pd.to_datetime(["2024-01-01", "2024-02-01", "2024-03-01", "2024-04-01"])


@pytest.mark.parametrize(
    ("table", "options", "sentence"),
    [
        (ROWS, {"label": "outcome"}, "no column of the table called 'outcome'.*Known: age, ill"),
        (ROWS, {}, "is called 'label', 'labels' or 'target'; name the one.*'age', 'sex', 'smoker', 'ill'"),
        (ROWS, {"label": "ill", "site": "town"}, "no column of the table called 'town'"),
        (ROWS, {"label": "ill", "drop": "id"}, "no column of the table called 'id'"),
        (ROWS, {"label": "sex"}, "1 of the 4 samples of the table \\(column 'sex'\\) have no label"),
        ({"age": [1, 2, 3], "ill": [0.5, 1, 2]}, {"label": "ill"}, "not whole numbers, such as 0.5"),
        ({"age": [], "ill": []}, {"label": "ill"}, "There are no rows in the table"),
        ({"ill": [0, 1]}, {"label": "ill"}, "no column in the table to learn from beside 'ill'"),
        ({"age": [7, 7], "ill": [0, 1]}, {"label": "ill"}, "All columns of the table are the same"),
        ({**ROWS, "when": DATES}, {"label": "ill"}, "'when' of the table holds dates or times.*drop='when'"),
        ({**ROWS, "odd": [1, "a", 2, 3]}, {"label": "ill"}, "'odd' of the table.* mixed types \\(int, str\\)"),
        ({**ROWS, "list": [[1], [2], [3], [4]]}, {"label": "ill"}, "values of the type list.*drop='list'"),
        ({**ROWS, "x": [1.0, float("inf"), 2, 3]}, {"label": "ill"}, "Row 2 of the column 'x' of the table is an inf"),
        ({**ROWS, "x": [1]}, {"label": "ill"}, "unequal length: 'age' 4, 'sex' 4"),
        ({"a": ROWS, "b": {**ROWS, "age": ["x"] * 4}}, {"label": "ill"}, "the table of 'b', such as 'x' in row 1"),
        ({"a": ROWS, "b": {"ill": ["no"]}}, {"label": "ill"}, "'age' is in the table of 'a' but not in"),
        ({"a": {"age": [1, 2], "ill": [0, 1]}, "b": ROWS}, {"label": "ill"}, "'sex' is in the table of 'b' but not in"),
        ({"a": ROWS, "b": ROWS}, {"label": "ill", "site": "sex"}, "a table for each site already"),
        ({}, {"label": "ill"}, "There are no tables"),
        (many(48, name=[f"patient {row}" for row in range(48)]), {"label": "outcome"}, "36 different texts in 36 rows"),
        (ROWS, {"label": "ill", "test": {**ROWS, "ill": ["Yes"] * 4}}, "The label 'Yes' is only in the test samples"),
        (ROWS, {"label": "ill", "test": "smoker", "class_names": ("no", "ja")}, "'yes' of the table.* none of the"),
        (ROWS, {"label": "ill", "test": "age"}, "to tell the rows to test on, but holds '63'"),
        ("nowhere.csv", {"label": "ill"}, "There is no file 'nowhere.csv'"),
    ],
)  # fmt: skip
def test_bad_tables_get_one_sentence(table: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FedStrataError, match=sentence):
        from_table(table, **options)


def test_a_column_that_never_changes_is_left_out_with_a_word() -> None:
    with pytest.warns(FedStrataWarning, match="The column 'ward' of the table is the same in every training row"):
        table = from_table({**ROWS, "ward": ["a"] * 4}, label="ill", test_fraction=0).table
    assert table is not None
    assert table.inputs == INPUTS


def test_a_column_called_site_is_not_learned_from_in_silence() -> None:
    with pytest.warns(FedStrataWarning, match="write site='site' if its values are the clients"):
        from_table({**ROWS, "site": ["a", "b", "a", "b"]}, label="ill")


def test_a_broken_file_gets_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n1,2,3\n")
    with pytest.raises(FedStrataError, match=r"bad.csv' cannot be read as a table: .*Expected 2 columns, got 3"):
        from_table(tmp_path / "bad.csv", label="a")
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(FedStrataError, match=r"bad.parquet' cannot be read as a table"):
        from_table(str(tmp_path / "bad.parquet"), label="a")


def test_the_command_line_takes_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.chdir(tmp_path)
    frame(many(48)).to_csv("hospitals.csv", index=False)
    command = ["run", "--data", "table(path=hospitals.csv, label=outcome, site=hospital)", "--model", "mlp:8"]
    assert main([*command, "--rounds", "1", "--epochs", "1", "--no-report", "--json", "--out", "run"]) == 0
    assert json.loads(capfd.readouterr().out)["clients"] == 2
    assert main(["run", "--data", "hospitals.csv", "--model", "mlp"]) == 2
    assert "write table(path=hospitals.csv, label=..., site=...)" in " ".join(capfd.readouterr().err.split())


def test_the_table_source_finds_files_and_columns(tmp_path: Path) -> None:
    whole = frame(many()).rename(columns={"outcome": "target"})
    whole.iloc[:18].to_csv(tmp_path / "old.csv", index=False)
    whole.iloc[18:].to_csv(tmp_path / "new.csv", index=False)
    data = datasets.make("table(path=old.csv, site=hospital, test=new.csv, drop=sex)").load(tmp_path)
    assert len(data.test) == 6
    assert data.input_shape == (1,)
    short = datasets.make("table:old.csv").load(tmp_path)
    assert short.sites is None
    assert short.table is not None
    short.table.write(tmp_path / "columns.json")
    agreed = datasets.make("table(encoding=columns.json)").load(tmp_path / "new.csv")
    assert agreed.table == short.table
    with pytest.raises(FedStrataError, match=r"'table' needs a path; write table\(path=...\)"):
        datasets.make("table").load()
    with pytest.raises(FedStrataError, match="Expected: a CSV or Parquet file"):
        datasets.make("table(path=none.csv)").load(tmp_path)


def test_run_takes_tables() -> None:
    rows = frame(many(48)).rename(columns={"outcome": "label"})
    parts = {str(name): part.drop(columns="hospital") for name, part in rows.groupby("hospital")}
    for data in (rows.drop(columns="hospital"), parts):
        result = fedstrata.run(data=data, model="mlp:8", rounds=1, epochs=1)
        assert result.summary["clients"] == (2 if data is parts else 20)
    with pytest.raises(FedStrataError, match=r"name the one that holds the labels with label=..."):
        fedstrata.run(data=rows.rename(columns={"label": "outcome"}), model="mlp", rounds=1)


def test_what_is_learned_from_is_not_guessed_where_an_encoding_tells() -> None:
    """The column of sites was warned of as one to learn from, while a model that does not know it was tested."""
    rows = {"dose": [1.0, 2.0, 3.0, 4.0], "outcome": [0, 1, 0, 1]}
    known = from_table(rows, label="outcome", test_fraction=0).table
    with_sites = {**rows, "site": ["north", "north", "south", "south"]}
    with pytest.warns(FedStrataWarning, match="'site' .* is taken as something to learn from"):
        from_table(with_sites, label="outcome", test_fraction=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_table(with_sites, label="outcome", test_fraction=0, encoding=known)


@pytest.mark.parametrize(("first", "second"), [("Train", "TEST"), ("training", "testing"), ("train", "Valid")])
@pytest.mark.parametrize("kind", ["frames", "files"])
def test_tables_called_as_parts_are_these_and_not_sites(first: str, second: str, kind: str, tmp_path: Path) -> None:
    """They were two sites, each of which trained on most of its rows, those to test on among them."""
    given: Any = {second: frame(many(6)), first: frame(many())}
    if kind == "files":
        for name, rows in given.items():
            rows.to_csv(tmp_path / f"{name}.csv", index=False)
        given = tmp_path
    if second == "Valid":
        with pytest.warns(FedStrataWarning, match="'Valid' is the part to test on"):
            data = from_table(given, label="outcome", drop="hospital")
    else:
        data = from_table(given, label="outcome", drop="hospital")
    assert data.sites is None
    assert (len(data.train), len(data.test)) == (24, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedStrataWarning)
        sites = from_table(given, label="outcome", site="hospital").sites
    assert sites is not None
    assert set(sites) == {"north", "south"}


def test_of_three_parts_the_validation_rows_are_not_used_and_told(tmp_path: Path) -> None:
    for name, rows in {"train": 24, "val": 12, "test": 6}.items():
        frame(many(rows)).to_csv(tmp_path / f"{name}.csv", index=False)
    with pytest.warns(FedStrataWarning, match="Of the parts of the data, 'val' not used"):
        data = from_table(tmp_path, label="outcome", site="hospital")
    assert (len(data.train), len(data.test)) == (24, 6)
    with pytest.warns(FedStrataWarning), pytest.raises(FedStrataError, match=r"so that test=... would tell it twice"):
        from_table(tmp_path, label="outcome", site="hospital", test=frame(many(6)))
    frame(many()).to_csv(tmp_path / "Training.csv", index=False)
    with pytest.raises(FedStrataError, match="'Training' and 'train' would both be the part called train"):
        from_table(tmp_path, label="outcome")


def test_sites_that_are_called_as_parts_are_given_as_clients() -> None:
    data, split = from_clients({"train": frame(many()), "test": frame(many())}, label="outcome", features="age")
    assert [len(part) for part in split.train] == [18, 18]
    assert data.sites is not None
    assert set(data.sites) == {"train", "test"}


def test_two_tables_are_not_of_one_name() -> None:
    """The rows of both became those of one site."""
    with pytest.raises(FedStrataError, match="Two tables are called '0'"):
        from_table({0: ROWS, "0": ROWS}, label="ill")
    with pytest.raises(FedStrataError, match="Two clients are called '0'"):
        from_clients({0: frame(), "0": frame()}, label="ill")


@pytest.mark.parametrize("kind", ["csv", "pandas", "parquet"])
def test_the_index_of_a_data_frame_is_not_learned_from(kind: str, tmp_path: Path) -> None:
    """Rows in the order of their classes let a model learn the class from their numbers."""
    rows = frame(ROWS).iloc[[3, 1, 0, 2]]
    rows.to_csv(tmp_path / "rows.csv")
    rows.to_parquet(tmp_path / "rows.parquet")
    given: Any = pd.read_csv(tmp_path / "rows.csv") if kind == "pandas" else tmp_path / f"rows.{kind}"
    with pytest.warns(FedStrataWarning, match="is left out: it has no name, as the numbers of rows"):
        table = from_table(given, label="ill", test_fraction=0).table
    assert table is not None
    assert table.inputs == INPUTS
    assert table.encode(given).shape == (4, len(INPUTS))


def test_an_index_may_be_asked_for() -> None:
    table = from_table({"": [5, 2, 9, 7], **ROWS}, label="ill", test_fraction=0, features=["", "age"]).table
    assert table is not None
    assert table.inputs == ("", "age", "age is missing")


@pytest.mark.parametrize("start", [0, 1])
def test_a_column_that_counts_the_rows_is_told(start: int) -> None:
    patients = np.arange(start, start + 24)
    with pytest.warns(FedStrataWarning, match=r"'patient' of the table only counts the rows.*drop='patient'"):
        from_table(many(patient=patients), label="outcome", site="hospital")
    parts = {name: {"patient": np.arange(12), **many(12, hospital=[name] * 12)} for name in ("a", "b")}
    with pytest.warns(FedStrataWarning, match="'patient' of the table of 'a' only counts"):
        from_table(parts, label="outcome", drop="hospital")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_table(many(patient=patients), label="outcome", features="patient")
        from_table(many(patient=patients[::-1]), label="outcome", site="hospital")
        pairs = {str(site): {"ill": [1, 0], "old": [start, start + 1]} for site in range(12)}
        from_table(pairs, label="ill", test_fraction=0)


@pytest.mark.parametrize("odd", [".", "<5", "unknown", "12%", "27,5"])
def test_a_column_of_numbers_with_something_else_is_refused_with_its_row(odd: str) -> None:
    """Each distinct number became an input of its own, 68 of them, without a word."""
    ages = [str(20 + row % 60) for row in range(400)]
    ages[3] = odd
    with pytest.raises(FedStrataError, match=rf"'age' are written like numbers, but '{odd}' in row 4 of the table is"):
        from_table({"age": ages, "ill": [0, 1] * 200}, label="ill")
    sites = {"a": {"age": list(range(9)), "ill": [0, 1, 2] * 3}, "b": {"age": ages[:9], "ill": [0, 1, 2] * 3}}
    with pytest.raises(FedStrataError, match=rf"texts in the table of 'b', such as '{odd}' in row 4, and numbers in"):
        from_table(sites, label="ill")


def test_a_column_of_percentages_is_refused() -> None:
    shares = [f"{row / 4}%" for row in range(40)]
    with pytest.raises(
        FedStrataError, match=r"All of the 40 .* 'share' are .*, but '0\.0%' in row 1 .* and 36 more are"
    ):
        from_table({"share": shares, "ill": [0, 1] * 20}, label="ill")


def test_few_numbers_beside_texts_are_codes_with_a_word() -> None:
    codes: dict[str, list[Any]] = {"code": ["1", "2", "A", "1", "2", "A"], "ill": [0, 1] * 3}
    with pytest.warns(FedStrataWarning, match="'code' is taken as 3 categories, since 'A' in row 3 of the table is no"):
        table = from_table(codes, label="ill", test_fraction=0).table
    assert table is not None
    assert table.inputs == ("code=1", "code=2", "code=A")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert from_table(frame(codes).astype({"code": "category"}), label="ill", test_fraction=0).table == table
        wards = {"ward": ["1", "B", "C"] * 2, "ill": [0, 1] * 3}
        from_table(wards, label="ill", test_fraction=0)


def test_many_numbers_that_are_texts_are_told_unless_they_are_categories() -> None:
    rows = frame({"zip": [str(90000 + row % 12) for row in range(48)], "ill": [0, 1] * 24})
    with pytest.warns(FedStrataWarning, match="'zip' is taken as 12 categories, since its numbers are texts"):
        from_table(rows, label="ill")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = from_table(rows.astype({"zip": "category"}), label="ill").table
    assert table is not None
    assert len(table.inputs) == 12


def test_decimal_commas_are_read_where_semicolons_separate(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("bmi;name;ill\n27,5;a,b;0\n30;c;1\n;c;0\n-1,25;a,b;1\n")
    data = from_table(tmp_path / "rows.csv", label="ill", features="bmi", test_fraction=0)
    assert data.inputs.tolist() == [[27.5, 0], [30, 0], [27.5, 1], [-1.25, 0]]


@pytest.mark.parametrize("line", ["sep=;", '"sep=;"', "\ufeffsep=;"])
def test_the_line_by_which_excel_names_the_separator_is_skipped(line: str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(f"{line}\r\nage;ill\r\n1;0\r\n2;1\r\n", encoding="utf-8")
    assert from_table(tmp_path / "rows.csv", label="ill", test_fraction=0).inputs.tolist() == [[1], [2]]


@pytest.mark.parametrize(
    ("text", "encoding"),
    [("Größe,ill\n1,0\n2,1\n", "latin-1"), ("size,ill\nä,0\nö,1\n", "latin-1"), ("size,ill\n1,0\n", "utf-16")],
)
def test_a_table_that_is_not_utf8_gets_one_sentence(text: str, encoding: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(text, encoding=encoding)
    with pytest.raises(FedStrataError, match=r"x.csv' is not UTF-8; save it as UTF-8 \(in Excel: CSV UTF-8\)"):
        from_table(tmp_path / "x.csv", label="ill")


def test_files_of_other_programs_are_named(tmp_path: Path) -> None:
    frame(many()).to_csv(tmp_path / "north.csv", index=False)
    (tmp_path / "south.xlsx").write_bytes(b"PK\x03\x04\x14\x00")
    (tmp_path / "~$south.xlsx").write_bytes(b"")
    (tmp_path / "readme.txt").write_text("Two sites.")
    with pytest.warns(FedStrataWarning, match=r"so that 'south.xlsx' is left out; save as one of these"):
        data = from_table(tmp_path, label="outcome", drop="hospital")
    assert data.table is not None
    data.table.write(tmp_path / "columns.json")
    (tmp_path / "south.xlsx").rename(tmp_path / "south.csv")
    with pytest.raises(FedStrataError, match=r"south.csv' is neither a CSV file nor a Parquet file; save it as CSV or"):
        from_table(tmp_path, label="outcome")
    (tmp_path / "south.csv").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_table(tmp_path, label="outcome", drop="hospital")
    (tmp_path / "rows.json").write_text("[]")
    with pytest.raises(FedStrataError, match=r"rows.json' is neither a CSV file nor a Parquet file"):
        from_table(tmp_path / "rows.json", label="outcome")
    (tmp_path / "north.csv").unlink()
    with pytest.raises(FedStrataError, match=r"holds no tables, but 'rows.json'; put a CSV"):
        from_table(tmp_path, label="outcome")


def test_columns_may_be_called_by_numbers() -> None:
    """A data frame of an array was refused as 'int' has no attribute 'lower'."""
    rows = pd.DataFrame(np.array([[1, 7, 0, 0, 0], [2, 7, 1, 0, 0], [4, 8, 0, 1, 0], [3, 8, 1, 1, 1]]))
    data = from_table(rows, label=2, site=1, drop=3, test=4)
    assert data.inputs[:, 0].tolist() == [1, 2, 4, 3]
    assert data.test.tolist() == [3]
    assert data.sites is not None
    assert data.sites.tolist() == ["7", "7", "8", "8"]
    assert torch.equal(from_table(rows, label=rows.columns[2], features=[0], test=4).inputs, data.inputs)
    with pytest.raises(FedStrataError, match="no column of the table called '9'"):
        from_table(rows, label=9)
    assert from_clients({"a": rows, "b": rows}, label=2, features=0)[0].input_shape == (1,)


def test_numbers_that_models_cannot_hold_get_one_sentence() -> None:
    with pytest.raises(
        FedStrataError, match=r"Row 3 of the column 'x' of the table is 1e\+200, more than the 3.4e\+38"
    ):
        from_table({**ROWS, "x": [1.0, 2.0, 1e200, 3.0]}, label="ill")


def test_labels_that_differ_in_capitals_or_blanks_are_told() -> None:
    rows = {"age": [1.0, 2.0, 3.0, 5.0, 4.0], "ill": ["yes", "Yes", "no", "no ", "other"]}
    with pytest.warns(FedStrataWarning, match="'Yes', 'yes' and 'no', 'no ' of the table differ only in capitals or"):
        assert len(from_table(rows, label="ill", test_fraction=0).class_names) == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_table(rows, label="ill", test_fraction=0, class_names=["yes", "Yes", "no", "no ", "other"])


def test_sites_that_differ_only_in_capitals_are_told() -> None:
    """One hospital that is written in three ways is three clients."""
    sites = ["north", "NORTH", "north ", "south"] * 10
    frame = pd.DataFrame({"score": np.arange(40.0) % 7, "ill": [0, 1] * 20, "site": sites})
    with pytest.warns(FedStrataWarning, match="The sites 'NORTH', 'north', 'north ' of the table differ only in cap"):
        from_table(frame, label="ill", site="site")
    with pytest.warns(FedStrataWarning, match="The sites .* of the dataset 'arrays' differ only in capitals"):
        from_arrays(np.ones((40, 2)), [0, 1] * 20, sites=sites)
