"""The model that a site ends with, on its disk: ready to use, with its preprocessing and the names of its classes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedstrata.runs.preparing import Prepared
from fedstrata.stack import Tensors
from fedstrata.trained import Card, TrainedModel, preprocessing_of


def save_model(
    folder: Path, ready: Prepared, number: int, round: int, model: Tensors, scores: Mapping[str, float | None]
) -> None:
    """Save the model that a site uses after a round, for its owner alone, with what it reached in its tests."""
    experiment, dataset = ready.experiment, ready.dataset
    card = Card(
        architecture=experiment.model,
        input_shape=dataset.input_shape,
        input_type=str(dataset.inputs.dtype).removeprefix("torch."),
        preprocessing=preprocessing_of(dataset, ready.data.transforms),
        class_names=dataset.class_names,
        table=None if dataset.table is None else dataset.table.to_mapping(),
        vocabulary=None if dataset.vocabulary is None else dataset.vocabulary.to_mapping(),
        metrics={name: value for name, value in scores.items() if value is not None},
        origin={
            "method": experiment.method,
            "data": experiment.data,
            "partition": experiment.partition,
            "clients": ready.setting.clients,
            "round": round,
            "seed": experiment.seed,
            "client": number,
        },
    )
    TrainedModel.make(ready.model, model, card).save(folder, private=True)
