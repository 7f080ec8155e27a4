"""The model that a site ends with, on its disk: tensors, and a card that says all that is needed to use them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstrata import files
from fedstrata.data.transforms import normalisation_in
from fedstrata.runs.preparing import Prepared
from fedstrata.stack import Tensors

MODEL_FILE = "model.safetensors"
CARD_FILE = "card.json"


def save_model(folder: Path, ready: Prepared, model: Tensors, facts: Mapping[str, Any]) -> None:
    """Save a site's own model; ``facts`` tell more about it, such as its round and scores."""
    experiment, dataset = ready.experiment, ready.dataset
    normalisation = normalisation_in(ready.data.transforms)
    constants = None if normalisation is None else normalisation.constants(dataset)
    mean, deviation = constants or (None, None)
    card = {
        "model": experiment.model,
        "method": experiment.method,
        "data": experiment.data,
        "input_shape": dataset.input_shape,
        "class_names": dataset.class_names,
        "transforms": experiment.transforms,
        "mean": mean,
        "deviation": deviation,
        **facts,
    }
    files.make_folder(folder)
    files.write_atomically(folder / MODEL_FILE, files.to_safetensors(model))
    files.write_atomically(folder / CARD_FILE, files.to_json(card))
