"""The ready module: raw inputs in, classes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedstrata import files
from fedstrata.data.dataset import Dataset
from fedstrata.data.transforms import apply_transforms, parse_transforms
from fedstrata.errors import FedStrataError
from fedstrata.models import ModelSpec, build_model
from fedstrata.models.base import models
from fedstrata.models.trial import copied
from fedstrata.trained.card import Card, Step
from fedstrata.trained.inputs import read_inputs

WEIGHTS_FILE, CARD_FILE = "model.safetensors", "model.json"
PYTHON = "python:"
"""With what the name of a module from Python begins."""
_SAMPLES_AT_ONCE = 1024

Network = nn.Module | Callable[..., nn.Module]


class TrainedModel(nn.Module):
    """A network with its weights, its preprocessing and the names of its classes.

    Called with raw inputs ``[n, ...]``, as they are in the data (bytes for images of bytes), it returns the scores
    ``[n, classes]``. :meth:`predict` and :meth:`predict_proba` work as in scikit-learn, and also take single samples,
    images, tables, and files. ``network`` is the plain network, which takes inputs that are preprocessed already.
    """

    def __init__(self, network: nn.Module, card: Card) -> None:
        super().__init__()
        self.network = network
        self.card = card
        self.preprocessing = nn.Sequential(*(_module(step, card) for step in card.preprocessing))
        self.eval()

    @classmethod
    def make(cls, network: nn.Module, tensors: Mapping[str, Tensor], card: Card) -> TrainedModel:
        """Put weights and buffers into a copy of a network, on the CPU."""
        return cls(with_tensors(network, tensors), card)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the scores."""
        return self.card.class_names

    @property
    def classes_(self) -> np.ndarray:
        """The names of the classes, as scikit-learn calls them."""
        return np.array(self.card.class_names)

    def forward(self, inputs: Tensor) -> Tensor:
        """Preprocess raw inputs ``[n, ...]`` and compute the scores ``[n, classes]``."""
        scores: Tensor = self.network(self.prepared(inputs))
        return scores

    def prepared(self, inputs: Tensor) -> Tensor:
        """Preprocess raw inputs: what the network itself takes."""
        if inputs.dtype == torch.uint8 or inputs.is_floating_point():
            scaled_already = inputs.is_floating_point() and self.card.input_type == "uint8"
            inputs = inputs.to(self._number_type)
            steps = self.preprocessing[1:] if scaled_already else self.preprocessing
        else:
            steps = self.preprocessing
        prepared: Tensor = steps(inputs)
        return prepared

    def predict_proba(self, inputs: Any) -> np.ndarray:
        """Tell how probable each class is, ``[n, classes]``, in the order of ``class_names``."""
        samples = read_inputs(inputs, self.card)
        device = next(self.network.parameters()).device
        training = self.training
        self.eval()
        with torch.no_grad():
            scores = [self(part.to(device)) for part in torch.split(samples, _SAMPLES_AT_ONCE)]
        self.train(training)
        probabilities: np.ndarray = torch.cat(scores).double().softmax(-1).cpu().numpy()
        return probabilities

    def predict(self, inputs: Any) -> np.ndarray:
        """Name the most probable class of each sample ``[n]``."""
        names: np.ndarray = self.classes_[self.predict_proba(inputs).argmax(-1)]
        return names

    def plain_state_dict(self) -> dict[str, Tensor]:
        """Return the state of the plain network, for ``network.load_state_dict``."""
        return {name: tensor.detach().cpu() for name, tensor in self.network.state_dict().items()}

    def contents(self) -> dict[str, bytes | str]:
        """Write the model as the two files of a folder: weights and card."""
        weights = files.to_safetensors(self.plain_state_dict())
        card = self.card.with_changes(hash=sha256(weights).hexdigest())
        return {WEIGHTS_FILE: weights, CARD_FILE: files.to_json(card.to_mapping())}

    def save(self, folder: str | Path, private: bool = False) -> Path:
        """Save the model in a folder: the weights for every program, and a card that tells how to use them.

        If ``private``, others cannot read it.
        """
        folder = Path(folder)
        files.make_folder(folder, private)
        for name, content in self.contents().items():
            files.write_atomically(folder / name, content, private)
        return folder

    @classmethod
    def load(cls, folder: str | Path, network: Network | None = None) -> TrainedModel:
        """Load a model that was saved or exported; a network of your own is given again."""
        folder = Path(folder)
        card_file, weights_file = folder / CARD_FILE, folder / WEIGHTS_FILE
        if not card_file.exists():
            raise FedStrataError(
                f"'{folder}' holds no {CARD_FILE}, so it is no saved model; 'fedstrata export RUN' makes such a folder."
            )
        card = Card.from_mapping(files.from_json(files.read_bytes(card_file), card_file), card_file)
        content = files.read_bytes(weights_file)
        if card.hash != sha256(content).hexdigest():
            raise FedStrataError(
                f"'{weights_file}' is not what the card beside it describes: its SHA-256 differs; copy both again."
            )
        tensors = files.from_safetensors(content, weights_file)
        return cls.make(network_of(card, tensors, network), tensors, card)

    @property
    def _number_type(self) -> torch.dtype:
        return next(
            (one.dtype for one in self.network.parameters() if one.is_floating_point()), torch.get_default_dtype()
        )

    def __repr__(self) -> str:
        origin = self.card.origin
        whose = "" if origin.get("client") is None else f" of client {origin['client']}"
        whose += f" ({origin['site']})" if "site" in origin else ""
        return (
            f"TrainedModel({self.card.architecture}, inputs {list(self.card.input_shape)} of {self.card.input_type}, "
            f"{len(self.card.class_names)} classes, by {origin.get('method', 'hand')}{whose})"
        )


def with_tensors(network: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Copy a network onto the CPU and put weights and buffers into it, by their names.

    All that its ``state_dict`` names must be there.
    """
    network = copied(network, type(network).__name__).cpu().eval()
    saved = network.state_dict()
    own = dict(network.named_parameters()) | dict(network.named_buffers())
    lacking = [name for name in own if name in saved and name not in tensors]
    if lacking:
        raise FedStrataError(
            f"The weights lack the tensor '{lacking[0]}' of the network '{type(network).__name__}'; "
            "give the network that was trained."
        )
    dtype = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), None)
    if dtype is not None:
        network = network.to(dtype)
        own = dict(network.named_parameters()) | dict(network.named_buffers())
    with torch.no_grad():
        for name, tensor in own.items():
            if name not in tensors:
                continue
            if tensor.shape != tensors[name].shape:
                raise FedStrataError(
                    f"The tensor '{name}' has the shape {list(tensors[name].shape)} in the weights, but "
                    f"{list(tensor.shape)} in the network '{type(network).__name__}'; give the one that was trained."
                )
            tensor.copy_(tensors[name])
    return network


def network_of(card: Card, tensors: Mapping[str, Tensor], given: Network | None = None) -> nn.Module:
    """Build the network that a card names, or take the one that is given."""
    if given is not None:
        return _built(given, card)
    if card.architecture.startswith(PYTHON):
        name = card.architecture.removeprefix(PYTHON)
        raise FedStrataError(
            f"The network '{name}' was made in Python and is in no file; give it again: network={name}(...)."
        )
    spec = models.make(card.architecture)
    if getattr(spec, "weights", None) is not None:
        # The weights that it began with are overwritten at once, and need not lie here.
        bare = _built(dataclasses.replace(spec, weights=None), card)  # type: ignore[call-arg]
        if {name: tensor.shape for name, tensor in bare.state_dict().items()} == {
            name: tensor.shape for name, tensor in tensors.items()
        }:
            return bare
    return _built(spec, card)


def _built(source: Network | ModelSpec, card: Card) -> nn.Module:
    """Build a network for the inputs that a card tells of, and try it on samples of their type."""
    whole = card.input_type not in ("uint8", "float16", "float32", "float64")
    sample = torch.ones((2, *card.input_shape), dtype=getattr(torch, card.input_type)) if whole else None
    return build_model(source, card.input_shape, len(card.class_names), 0, sample)


class _Scale(nn.Module):
    """Divide by a number."""

    def __init__(self, divide_by: float) -> None:
        super().__init__()
        self.divide_by = divide_by

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs / self.divide_by


class _Normalise(nn.Module):
    """Subtract the mean and divide by the deviation, per channel of ``[n, channels, ...]``."""

    def __init__(self, mean: Sequence[float], deviation: Sequence[float], dimensions: int) -> None:
        super().__init__()
        shape = (-1, *[1] * (dimensions - 1))
        for name, values in (("mean", mean), ("deviation", deviation)):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float64).reshape(shape), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        mean, deviation = self.get_buffer("mean"), self.get_buffer("deviation")
        return (inputs - mean.to(inputs.dtype)) / deviation.to(inputs.dtype)


class _Transform(nn.Module):
    """Apply a registered transform; of a dataset it may look at what the card tells."""

    def __init__(self, text: str, card: Card) -> None:
        super().__init__()
        (self.transform,) = parse_transforms(text)
        zeros = torch.zeros((1, *card.input_shape), dtype=getattr(torch, card.input_type))
        nothing = np.empty(0, dtype=np.int64)
        first = torch.zeros(1, dtype=torch.int64)
        self.dataset = Dataset("card", zeros, first, nothing, nothing, card.class_names)

    def forward(self, inputs: Tensor) -> Tensor:
        return apply_transforms((self.transform,), inputs.unsqueeze(0), self.dataset).squeeze(0)


def _module(step: Step, card: Card) -> nn.Module:
    """Make a step of preprocessing a module."""
    kind = step["step"]
    if kind == "scale":
        return _Scale(step["divide_by"])
    if kind == "normalise":
        return _Normalise(step["mean"], step["deviation"], len(card.input_shape))
    if kind == "transform":
        return _Transform(step["name"], card)
    raise FedStrataError(f"The model card has a step of preprocessing '{kind}', which this version does not know.")
