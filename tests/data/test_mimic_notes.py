"""Notes of MIMIC-III, on small files in the true format; the real ones are licensed."""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path

import numpy as np
import pytest

from fedstrata.data import Dataset, datasets
from fedstrata.data.formats import csv_stream
from fedstrata.data.formats.csv_stream import stream_columns
from fedstrata.errors import FedStrataError
from fedstrata.testing import check_dataset

ADMISSIONS = """
    ROW_ID SUBJECT_ID HADM_ID ADMITTIME DISCHTIME DEATHTIME ADMISSION_TYPE ADMISSION_LOCATION DISCHARGE_LOCATION
    INSURANCE LANGUAGE RELIGION MARITAL_STATUS ETHNICITY EDREGTIME EDOUTTIME DIAGNOSIS HOSPITAL_EXPIRE_FLAG
    HAS_CHARTEVENTS_DATA
""".split()  # noqa: SIM905
NOTES = "ROW_ID SUBJECT_ID HADM_ID CHARTDATE CHARTTIME STORETIME CATEGORY DESCRIPTION CGID ISERROR TEXT".split()  # noqa: SIM905
# number, type, diagnosis, died
PATIENTS = [
    ("100", "EMERGENCY", "SEPSIS", 1),
    ("101", "EMERGENCY", r"MYOCARDIAL INFARCTION\CATH", 0),
    ("102", "ELECTIVE", "SEPSIS", 0),
    ("103", "EMERGENCY", "BROKEN LEG", 0),
    ("104", "EMERGENCY", "SUBDURAL HEMORRHAGE", 0),
    ("105", "EMERGENCY", "UPPER GI BLEED", 0),
    ("106", "EMERGENCY", "STEMI", 1),
]
# admission, time, category, text
WRITTEN = [
    ("100", "2151-08-04 11:05:00", "Nursing", "short note"),
    ("100", "2151-08-05 11:00:00", "Physician ", 'A longer note,\nwith "quotes" and lines\nof its own.'),
    ("100", "2151-08-05 11:00:00", "Nursing", "of the same moment and therefore not counted although it is long"),
    (
        "100",
        "2151-08-05 11:00:01",
        "Nursing",
        "a day and a second later, and the longest of all notes of this stay, but late",
    ),
    ("101", "2151-08-03 09:00:00", "Nursing/other", "before the admission"),
    ("101", "", "Nursing", "a note without a time of day is not used at all"),
    ("102", "2151-08-04 12:00:00", "Nursing", "elective"),
    ("103", "2151-08-04 12:00:00", "Nursing", "leg"),
    ("104", "2151-08-04 12:00:00", "Nursing", "bleeding inside"),
    ("105", "2151-08-04 12:00:00", "Radiology", "an image"),
    ("106", "2151-08-04 12:00:00", "Nursing", "pain in the chest"),
    ("", "2151-08-04 12:00:00", "Nursing", "of nobody"),
]


@pytest.fixture(autouse=True)
def _no_other_roots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDSTRATA_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache-home"))


def rows(header: list[str], values: list[dict[str, object]]) -> str:
    """Write as the distributed files are: names and texts in quotes, quotes inside doubled."""
    file = io.StringIO()
    writer = csv.DictWriter(file, header, restval="", quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writeheader()
    writer.writerows(values)
    return file.getvalue()


def write(folder: Path, packed: bool = False) -> None:
    folder.mkdir(exist_ok=True)
    admissions = [
        {
            "HADM_ID": int(number),
            "ADMITTIME": "2151-08-04 11:00:00",
            "DISCHTIME": "2151-08-14 11:00:00",
            "ADMISSION_TYPE": kind,
            "DIAGNOSIS": diagnosis,
            "HOSPITAL_EXPIRE_FLAG": died,
        }
        for number, kind, diagnosis, died in PATIENTS
    ]
    notes = [
        dict(zip(("HADM_ID", "CHARTTIME", "CATEGORY", "TEXT"), note, strict=True)) | {"CHARTDATE": "2151-08-04"}
        for note in WRITTEN
    ]
    for name, text in (("ADMISSIONS", rows(ADMISSIONS, admissions)), ("NOTEEVENTS", rows(NOTES, notes))):
        if packed:
            (folder / f"{name}.csv.gz").write_bytes(gzip.compress(text.encode()))
        else:
            (folder / f"{name}.csv").write_text(text)


def words(dataset: Dataset, sample: int) -> list[str]:
    assert dataset.vocabulary is not None
    return [dataset.vocabulary.tokens[number] for number in dataset.inputs[sample].tolist() if number]


@pytest.mark.parametrize("packed", [False, True])
def test_the_longest_note_of_the_first_day(tmp_path: Path, packed: bool) -> None:
    write(tmp_path / "mimic_notes", packed)
    dataset = datasets.make("mimic_notes(length=16)").load(tmp_path)
    assert dataset.sites is not None
    assert dataset.sites.tolist() == ["heart", "heart", "infection", "brain"]
    assert dataset.class_names == ("survived", "died")
    assert dataset.labels.tolist() == [0, 1, 1, 0]
    assert words(dataset, 0) == ["[CLS]", "before", "the", "admission"]
    assert words(dataset, 1) == ["[CLS]", "pain", "in", "the", "chest"]
    assert words(dataset, 2)[:10] == ["[CLS]", "a", "longer", "note", ",", "with", '"', "quotes", '"', "and"]
    assert words(dataset, 3) == ["[CLS]", "bleeding", "inside"]
    assert np.array_equal(dataset.train, [0, 1, 2, 3])
    check_dataset(dataset)


def test_a_note_goes_on_where_a_block_of_the_file_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks end between rows, not at the line breaks inside of a note."""
    monkeypatch.setattr(csv_stream, "_BLOCK", 512)
    notes = [{"HADM_ID": number, "TEXT": f'{number}:\n"line"\n' * (1 + number % 9)} for number in range(200)]
    path = tmp_path / "NOTEEVENTS.csv"
    path.write_text(rows(NOTES, notes))
    batches = list(stream_columns(path, ("HADM_ID", "TEXT")))
    assert len(batches) > 20
    read = [row for batch in batches for row in batch.to_pylist()]
    assert read == [{name: str(value) for name, value in note.items()} for note in notes]


def test_missing_and_damaged_files_get_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FedStrataError, match=r"ADMISSIONS.csv and NOTEEVENTS.csv, .* of your copy of MIMIC-III"):
        datasets.make("mimic_notes").load(tmp_path)
    write(tmp_path)
    notes, admissions = tmp_path / "NOTEEVENTS.csv", tmp_path / "ADMISSIONS.csv"
    whole = {path: path.read_text() for path in (notes, admissions)}
    for path, old, new, sentence in (
        (notes, "CHARTTIME", "TIME", "NOTEEVENTS.csv' is damaged or of another kind: it has no column 'CHARTTIME'"),
        (notes, "2151-08-04 11:05:00", "yesterday", "'yesterday' is no time"),
        (admissions, '"SEPSIS",1', '"SEPSIS",7', "of the admission 100 is '7', neither 0 nor 1"),
        (admissions, "EMERGENCY", "URGENT", "No note in .* belongs to the first day"),
        (notes, '"short note"', '"short note', "NOTEEVENTS.csv' is damaged"),
    ):
        path.write_text(whole[path].replace(old, new))
        with pytest.raises(FedStrataError, match=sentence):
            datasets.make("mimic_notes").load(tmp_path)
        path.write_text(whole[path])
