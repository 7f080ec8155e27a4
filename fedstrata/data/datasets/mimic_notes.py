"""MIMIC-III: notes of the first day of emergency admissions (Johnson et al., Scientific Data, 2016).

The data is for those only who have signed its agreement at PhysioNet; this reads their copy and fetches nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch

from fedstrata.data.datasets.base import datasets, not_found, search_places
from fedstrata.data.datasets.texts import Pool, TextSource
from fedstrata.data.formats.csv_stream import stream_columns
from fedstrata.data.formats.samples import damaged
from fedstrata.data.formats.texts import Texts
from fedstrata.data.held_out import groups_of, hold_out_for_testing
from fedstrata.data.vocabulary import split_words
from fedstrata.errors import FedStrataError
from fedstrata.spec import parameter

GROUPS: Mapping[str, tuple[str, ...]] = {
    "heart": (
        "CORONARY ARTERY DISEASE",
        "CHEST PAIN",
        r"CORONARY ARTERY DISEASE\CATH",
        "ACUTE CORONARY SYNDROME",
        "MYOCARDIAL INFARCTION",
        "ACUTE MYOCARDIAL INFARCTION",
        "CHEST PAIN;TELEMETRY",
        r"MYOCARDIAL INFARCTION\CATH",
        "UNSTABLE ANGINA",
        "STEMI",
        "ST ELEVATED MYOCARDIAL INFARCTION",
        r"ACUTE MYOCARDIAL INFARCTION\CATH",
        r"UNSTABLE ANGINA\CATH",
        "NON-ST SEGMENT ELEVATION MYOCARDIAL INFARCTION",
    ),
    "gut": (
        "GASTROINTESTINAL BLEED",
        "UPPER GI BLEED",
        "ABDOMINAL PAIN",
        "UPPER GASTROINTESTINAL BLEED",
        "LOWER GASTROINTESTINAL BLEED",
    ),
    "infection": (
        "PNEUMONIA",
        "PNEUMONIA;CHRONIC OBST PULM DISEASE",
        "RESPIRATORY FAILURE",
        "SEPSIS",
        "URINARY TRACT INFECTION;PYELONEPHRITIS",
        "SEPSIS;TELEMETRY",
        "PNEUMONIA;TELEMETRY",
        "URINARY TRACT INFECTION",
        "UTI/PYELONEPHRITIS",
        "SEPTIC SHOCK",
    ),
    "brain": (
        "INTRACRANIAL HEMORRHAGE",
        "SUBARACHNOID HEMORRHAGE",
        "SUBDURAL HEMATOMA",
        "STROKE;TELEMETRY;TRANSIENT ISCHEMIC ATTACK",
        "ACUTE SUBDURAL HEMATOMA",
        "CEREBROVASCULAR ACCIDENT",
        "CARDIAC ARREST",
        "S/P CARDIAC ARREST",
        "SUBDURAL HEMORRHAGE",
        "STROKE;TELEMETRY",
        "INTRACRANIAL BLEED",
        "STROKE",
        "STROKE/TIA",
    ),
}
"""The diagnoses on admission, in the words of the hospital, by the groups of PLayer-FL."""
CATEGORIES = ("Nursing", "Physician", "Nursing/other")
_WITHIN = timedelta(hours=24)
_ADMISSIONS, _NOTES = "ADMISSIONS.csv", "NOTEEVENTS.csv"


class Admission(NamedTuple):
    """An emergency admission: its group, when it was, and whether the patient died in the hospital."""

    group: str
    time: datetime
    died: bool


@datasets.register("mimic_notes")
@dataclass(frozen=True)
class MimicNotes(TextSource):
    """MIMIC-III: whether a patient dies in the hospital, by a note of the first day; groups of diagnoses are clients.

    Read from your own licensed copy. As in PLayer-FL (Elhussein and Gürsoy, 2025) and its code: emergency admissions
    with one of the diagnoses of four groups (heart, gut, infection, brain), which are natural clients (``natural``);
    of each admission the longest note of a nurse or physician until 24 hours after it. The longest is the one with the
    most words; in the code, with the most tokens. Two diagnoses that the code joins into one by a missing comma, and
    physicians' notes, whose category it misses by a space, are taken as they were meant. Give ClinicalBERT's
    ``vocab.txt`` as the ``vocabulary``. A fraction of each outcome of each group, evenly spaced, is held out.

    Defaults:
        length: gaiters-aerials/player_fl, code/datasets/dataset_creator.py.
        test_fraction: gaiters-aerials/player_fl, code/datasets/dataset_processing.py.
        words: ours.
    """

    length: int = parameter(512, "How many tokens of a text are kept; shorter texts are filled up.", low=2)
    test_fraction: float = parameter(0.2, "The held-out fraction of each outcome of each group.", low=0, below=1)

    class_names = ("survived", "died")
    start = True

    def find(self, root: Path | None = None) -> tuple[Path, Path]:
        """Find the files of the admissions and of the notes."""
        places = search_places(self.name, root)
        for place in places:
            admitted, noted = _file(place, _ADMISSIONS), _file(place, _NOTES)
            if admitted is not None and noted is not None:
                return admitted, noted
        raise not_found(
            self.name,
            places,
            f"{_ADMISSIONS} and {_NOTES}, each with or without .gz, of your copy of MIMIC-III (PhysioNet gives it "
            "to those who have signed its agreement)",
        )

    def read(self, root: Path | None) -> Pool:
        """Read the admissions, then go through all notes."""
        admitted, noted = self.find(root)
        admissions = read_admissions(admitted)
        notes = longest_notes(noted, admissions)
        order = [number for group in GROUPS for number in notes if admissions[number].group == group]
        if not order:
            raise FedStrataError(f"No note in '{noted}' belongs to the first day of an admission in '{admitted}'.")
        sites = np.array([admissions[number].group for number in order])
        labels = np.array([admissions[number].died for number in order], dtype=np.int64)
        train, test = hold_out_for_testing(groups_of(torch.from_numpy(labels), sites), self.test_fraction)
        return Pool(Texts([notes[number] for number in order], labels, sites), train, test)


def read_admissions(path: Path) -> dict[str, Admission]:
    """Read the emergency admissions of the four groups, by their numbers; what ends before it begins is left out."""
    group_of = {diagnosis: group for group, diagnoses in GROUPS.items() for diagnosis in diagnoses}
    columns = ("HADM_ID", "ADMITTIME", "DISCHTIME", "ADMISSION_TYPE", "DIAGNOSIS", "HOSPITAL_EXPIRE_FLAG")
    found = {}
    for batch in stream_columns(path, columns):
        for number, begin, end, kind, diagnosis, died in _rows(batch):
            if kind != "EMERGENCY" or diagnosis not in group_of or not end:
                continue
            if died not in ("0", "1"):
                raise damaged(path, f"HOSPITAL_EXPIRE_FLAG of the admission {number} is '{died}', neither 0 nor 1")
            time = _time(begin, path)
            if _time(end, path) >= time:
                found[number] = Admission(group_of[diagnosis], time, died == "1")
    return found


def longest_notes(path: Path, admissions: Mapping[str, Admission]) -> dict[str, str]:
    """Find the longest note of the first day of each admission; of those of one moment the first of the file counts."""
    columns = ("HADM_ID", "CHARTTIME", "CATEGORY", "TEXT")
    seen: set[tuple[str, str]] = set()
    longest: dict[str, tuple[int, str]] = {}
    for batch in stream_columns(path, columns):
        for number, time, category, text in _rows(batch):
            admission = admissions.get(number)
            if admission is None or not time or category.strip() not in CATEGORIES or (number, time) in seen:
                continue
            if _time(time, path) - admission.time > _WITHIN:
                continue
            seen.add((number, time))
            words = sum(1 for _ in split_words(text))
            if words > longest.get(number, (0, ""))[0]:
                longest[number] = (words, text)
    return {number: text for number, (_, text) in longest.items()}


def _rows(batch: pa.RecordBatch) -> Iterator[tuple[str, ...]]:
    return zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _time(text: str, path: Path) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise damaged(path, f"'{text}' is no time") from None


def _file(place: Path, name: str) -> Path | None:
    return next((path for path in (place / name, place / f"{name}.gz") if path.is_file()), None)
