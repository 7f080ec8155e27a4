"""Folders for others: safetensors with a card, ONNX, and what the Hugging Face hub shows."""

from __future__ import annotations

import importlib
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedstrata import files
from fedstrata.errors import FedStrataError
from fedstrata.trained.card import Card
from fedstrata.trained.model import PYTHON, TrainedModel

ONNX_FILE, README_FILE = "model.onnx", "README.md"
_TOLERANCE = 1e-3


def export(model: TrainedModel, folder: str | Path, *, onnx: bool = False, hub: bool = False) -> Path:
    """Write a model into a new folder: weights and card; with ``onnx`` for onnxruntime, with ``hub`` a README.

    The folder appears whole or not at all.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
        raise FedStrataError(f"'{folder}' exists already and is not empty; choose another folder.")
    contents = model.contents()
    if onnx:
        contents[ONNX_FILE] = to_onnx(model)
    if hub:
        contents[README_FILE] = readme(model.card)
    if folder.is_dir():
        folder.rmdir()
    files.make_folder(folder.absolute().parent)
    files.write_folder_atomically(folder.absolute(), contents)
    return folder


class _Probabilities(nn.Module):
    """From raw inputs to probabilities, so that a program needs no further arithmetic."""

    def __init__(self, model: TrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        probabilities: Tensor = self.model(inputs).softmax(-1)
        return probabilities


def to_onnx(model: TrainedModel) -> bytes:
    """Write a model, with its preprocessing, as ONNX: raw ``inputs`` in, ``probabilities`` out, any number of samples.

    What onnxruntime computes is compared with PyTorch before it is given out.
    """
    onnx, runtime = _packages()
    samples = _trial_samples(model.card)
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings(), _quiet():
        warnings.simplefilter("ignore")
        path = Path(place) / ONNX_FILE
        try:
            program = torch.onnx.export(
                _Probabilities(model).eval(),
                (samples,),
                input_names=["inputs"],
                output_names=["probabilities"],
                dynamic_shapes=({0: torch.export.Dim("samples", min=1)},),
                dynamo=True,
                verbose=False,
            )
            assert program is not None
            program.save(str(path), external_data=False)
        except Exception as error:
            line = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise FedStrataError(f"The network cannot be written as ONNX: {line}") from error
        written = onnx.load(str(path))
    for key, value in {"class_names": "\n".join(model.class_names), "fedstrata": model.card.architecture}.items():
        written.metadata_props.add(key=key, value=value)
    content: bytes = written.SerializeToString()
    _compare(runtime, content, model, samples)
    return content


def _compare(runtime: Any, content: bytes, model: TrainedModel, samples: Tensor) -> None:
    """Refuse an ONNX file that does not compute what PyTorch does, for one sample and for several."""
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    for part in (samples, samples[:1]):
        (found,) = session.run(None, {"inputs": part.numpy()})
        apart = float(np.abs(found - model.predict_proba(part)).max())
        if not apart < _TOLERANCE:
            raise FedStrataError(
                f"What onnxruntime computes from the ONNX file differs from PyTorch by {apart:.2g} in probability; "
                "the file is not written. Use the safetensors file."
            )


def _trial_samples(card: Card) -> Tensor:
    """Make some inputs of the type that a model takes, different from each other."""
    kind: torch.dtype = getattr(torch, card.input_type)
    shape = (3, *card.input_shape)
    ramp = torch.linspace(0, 1, int(np.prod(shape))).reshape(shape)
    if kind == torch.uint8:
        return (ramp * 255).to(torch.uint8)
    return ramp.to(kind) if kind.is_floating_point else (ramp > 0.5).to(kind)


def _packages() -> tuple[Any, Any]:
    """Import what writes ONNX, and what runs it; PyTorch's exporter needs onnxscript itself."""
    try:
        importlib.import_module("onnxscript")
        return importlib.import_module("onnx"), importlib.import_module("onnxruntime")
    except ImportError as error:
        raise FedStrataError(
            f"ONNX needs the package {error.name}; install what it takes with: pip install 'fedstrata[onnx]'."
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep to itself what the exporter prints and logs."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)


def readme(card: Card) -> str:
    """Write what the Hugging Face hub shows of a model: facts for its search on top, then words for people."""
    origin = card.origin
    tags = ["federated-learning", "fedstrata", *filter(None, [str(origin.get("method", "")).split("(")[0]])]
    facts = ["---", "library_name: fedstrata", "tags:", *(f"- {tag}" for tag in dict.fromkeys(tags)), "---", ""]
    top = "\n".join(facts)
    own = card.architecture.startswith(PYTHON)
    network = f", network={card.architecture.removeprefix(PYTHON)}(...)" if own else ""
    told = {
        "architecture": card.architecture,
        "inputs": f"{list(card.input_shape)} of {card.input_type}",
        **({} if card.table is None else {"columns": ", ".join(one["name"] for one in card.table["columns"])}),
        **({} if card.vocabulary is None else {"vocabulary": f"{len(card.vocabulary['tokens'])} tokens"}),
        "classes": ", ".join(card.class_names),
        **{key: value for key, value in origin.items() if value is not None},
        **{name: f"{value:.4f}" for name, value in card.metrics.items()},
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in told.items())
    return f"""{top}
# {card.architecture} trained by {origin.get("method", "federated learning")}

A classifier that was trained over several clients that kept their data.

| | |
|---|---|
{table}

## Use

```python
import fedstrata

model = fedstrata.load("PATH"{network})
print(model.predict(inputs))  # raw inputs, as in the data
```

Without FedStrata: `model.safetensors` is the plain `state_dict` of the network, and `model.json` tells what is done to
inputs before (`preprocessing`, in order) and what the scores mean (`class_names`).
"""
