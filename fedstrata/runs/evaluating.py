"""Testing a model that is loaded, on data that it may never have seen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstrata.data import Dataset, datasets
from fedstrata.data.datasets.hub import Hub
from fedstrata.data.datasets.table import TableFiles
from fedstrata.data.datasets.texts import TextSource
from fedstrata.data.tables import Table
from fedstrata.data.vocabulary import Vocabulary
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.naming import called
from fedstrata.runs.preparing import load_data
from fedstrata.scores import ALWAYS, score
from fedstrata.trained import TrainedModel

PARTS = ("test", "train", "all")


def evaluate_model(
    model: TrainedModel,
    path: Path,
    data: str | None = None,
    data_root: str | None = None,
    client: int | None = None,
    part: str = "test",
    metrics: str | None = None,
) -> dict[str, Any]:
    """Test a model on a part of a dataset, by default that of its run and there on its own client's samples.

    ``metrics`` are further ones beside accuracy and loss, such as ``f1+auc``.
    """
    if part not in PARTS:
        raise FedStrataError(f"'{part}' is no part of a dataset; possible are {', '.join(PARTS)}.")
    experiment, own = _experiment(path, data, data_root)
    dataset = _loaded(experiment, model)
    positions = _positions(dataset, part)
    whose = "all clients"
    if own is not None and client is not None:
        split = own.split()
        chosen = {"test": [split.test[client]], "train": [split.train[client]]}
        positions = np.sort(np.concatenate(chosen.get(part, [split.train[client], split.test[client]])))
        whose = called(client, own.client_names())
    if len(positions) == 0:
        raise FedStrataError(f"There are no {part} samples of {whose} in '{experiment.data}'; choose another --part.")
    found = measured(model, dataset, positions, metrics)
    told = part if own is None else f"{part}, {whose}"
    return {"data": experiment.data, "part": told, "samples": len(positions), "metrics": found}


def measured(
    model: TrainedModel, dataset: Dataset, positions: np.ndarray, metrics: str | None = None
) -> dict[str, float]:
    """Judge a model on some samples by accuracy, loss and further metrics; classes go by their names."""
    places = {name: number for number, name in enumerate(model.class_names)}
    labels = dataset.labels[positions]
    there = [dataset.class_names[label] for label in sorted(set(labels.tolist()))]
    unknown = [name for name in there if name not in places]
    if unknown:
        raise FedStrataError(
            f"'{dataset.name}' has samples of the class '{unknown[0]}', which the model does not know; its classes are "
            f"{', '.join(model.class_names)}."
        )
    right = torch.tensor([places.get(name, -1) for name in dataset.class_names])[labels]
    found = score(model.predict_proba(dataset.inputs[positions]), right, "+".join(filter(None, (*ALWAYS, metrics))))
    return {_with_names(name, model.class_names): value for name, value in found.items()}


def _with_names(metric: str, class_names: Sequence[str]) -> str:
    """Name classes, not their places, at the end of a metric's name.

    >>> _with_names("confusion.0.1", ("ill", "well")), _with_names("recall(of=each).1", ("ill", "well"))
    ('confusion.ill.well', 'recall(of=each).well')
    """
    matched = re.fullmatch(r"(.*?)((?:\.\d+)+)", metric)
    if matched is None or matched.group(1).endswith("="):
        return metric
    places = matched.group(2).split(".")[1:]
    return ".".join((matched.group(1), *(class_names[int(place)] for place in places)))


def _loaded(experiment: Experiment, model: TrainedModel) -> Dataset:
    """Load the data; rows of tables, and texts, become inputs as for the model, not as they would by themselves."""
    source = None if experiment.data.startswith("python:") else datasets.make(experiment.data)
    root = None if experiment.data_root is None else Path(experiment.data_root)
    if model.card.table is not None and isinstance(source, TableFiles | Hub):
        return source.load_as(Table.from_mapping(model.card.table), root)
    if model.card.vocabulary is not None and isinstance(source, TextSource | Hub):
        return source.load_as(Vocabulary.from_mapping(model.card.vocabulary), root)
    return load_data(experiment)


def _experiment(path: Path, data: str | None, data_root: str | None) -> tuple[Experiment, RunFolder | None]:
    """Name the data: what is given, or that of the run, whose split is then known too."""
    root = {} if data_root is None else {"data_root": data_root}
    if data is not None:
        return Experiment(data=data, **root), None  # type: ignore[arg-type]
    if not (path / "experiment.toml").exists():
        raise FedStrataError(f"'{path}' is not the folder of a run, so that its data is not known; give --data.")
    folder = RunFolder.open(path)
    return folder.experiment.with_changes(dict(root)), folder


def _positions(dataset: Dataset, part: str) -> np.ndarray:
    chosen = {"test": dataset.test, "train": dataset.train}
    return chosen.get(part, np.sort(np.concatenate([dataset.train, dataset.test])))
