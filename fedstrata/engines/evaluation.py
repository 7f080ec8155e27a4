"""Accuracy, loss and further metrics of models on test sets, under names that say which model was tested on what.

=====================  =============================================================================================
``global``             the global model on the global test set
``validation``         the global model on training samples that nobody got, where an experiment asks for some
``global_on_clients``  the global model on each client's test set
``client_before``      each participant's own model, just trained, before aggregation, on its own test set
``client_after``       each client's own model after aggregation, shared part new, personal part its own, likewise
``client_validation``  each client's own model after aggregation, on training samples that it holds out to choose by
``client_adapted``     each client's model after the final adaptation of a method that has one, on its own test set
=====================  =============================================================================================

The first three exist only where nothing of the model is personal: else the server has no whole model.

Accuracy and loss, the cross entropy, are always there; further metrics (:mod:`fedstrata.scores`) where an experiment
asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedstrata.engines.batches import DeviceData
from fedstrata.engines.forward import Forward
from fedstrata.engines.setting import Setting
from fedstrata.losses import cross_entropy
from fedstrata.scores import compute
from fedstrata.stack import Tensors

_SAMPLES_AT_ONCE = 2048

Predictions = tuple[np.ndarray, np.ndarray]
"""The probabilities of some samples ``[n, classes]``, and their labels ``[n]``."""


@dataclass(frozen=True)
class Scores:
    """One number per client, for the clients in ``clients`` (those that have test samples).

    ``further`` are those of the metrics that the experiment asks for, by name: ``[clients]``, or with further axes for
    classes; NaN where a client's labels do not define them. ``predictions`` is what they were computed from, where it
    is at hand: sites keep it to themselves. ``of_all`` are the numbers of classes of the one model of all on the sets
    that nobody owns, such as ``global.confusion``.
    """

    clients: tuple[int, ...]
    accuracy: np.ndarray
    loss: np.ndarray
    further: Mapping[str, np.ndarray] = field(default_factory=dict)
    predictions: tuple[Predictions, ...] = ()
    of_all: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def pooled(self) -> Predictions | None:
        """The predictions of all clients together, each with its own model."""
        if not self.predictions:
            return None
        probabilities, labels = zip(*self.predictions, strict=True)
        return np.concatenate(probabilities), np.concatenate(labels)

    @classmethod
    def join(cls, parts: Sequence[Scores]) -> Scores:
        """Put the scores of several groups of clients together."""
        return cls(
            tuple(client for part in parts for client in part.clients),
            np.concatenate([part.accuracy for part in parts]),
            np.concatenate([part.loss for part in parts]),
            {
                name: np.concatenate([part.further[name] for part in parts if part.clients])
                for name in dict.fromkeys(name for part in parts for name in part.further)
            },
            tuple(one for part in parts for one in part.predictions),
        )


class Evaluator:
    """Tests models on a run's test sets."""

    def __init__(self, setting: Setting, data: DeviceData) -> None:
        self.setting = setting
        self.data = data

    def own_models(self, forward: Forward, models: Tensors, clients: Sequence[int]) -> Scores:
        """Test each client's model, a stack in the order of ``clients``, on its own test set."""
        sizes = [len(self.data.split.test[client]) for client in clients]
        tested = [row for row, size in enumerate(sizes) if size]
        if not tested:
            return Scores((), np.empty(0), np.empty(0))
        rows = None if len(tested) == len(sizes) else torch.tensor(tested, device=self.setting.device)
        models = {name: tensor if rows is None else tensor[rows] for name, tensor in models.items()}
        ids = [clients[row] for row in tested]
        positions = [self.data.split.test[client] for client in ids]
        asked = bool(self.setting.metrics)
        correct, losses, chances = _run_own(self.setting, self.data, forward, models, positions, asked, ids)
        accuracy, loss = _means(correct, positions), _means(losses, positions)
        predictions = [
            (chances[row, : len(own)], self._labels(own)) for row, own in enumerate(positions) if chances is not None
        ]
        return Scores(
            tuple(ids), accuracy.cpu().numpy(), loss.cpu().numpy(), self._further(predictions), tuple(predictions)
        )

    def on_validation(self, forward: Forward, models: Tensors, clients: Sequence[int]) -> np.ndarray:
        """Judge each client's model on the samples that it holds out for that: the accuracy ``[K]``."""
        positions = [self.data.validation_at_clients[client] for client in clients]
        accuracy, _ = score_models(self.setting, self.data, forward, models, positions, clients)
        return accuracy.cpu().numpy()

    def common_model(self, forward: Forward, model: Tensors) -> tuple[Scores, dict[str, float]]:
        """Test one model on every client's test set and on those that nobody owns, by the names of their metrics.

        Each sample is looked at once; of a set without samples nothing is told.
        """
        split = self.data.split
        common = {"global": self.data.dataset.test, "validation": self.data.validation}
        needed = np.unique(np.concatenate([*common.values(), *split.test]))
        if len(needed) == 0:
            return Scores((), np.empty(0), np.empty(0)), {}
        stack = {name: tensor.unsqueeze(0) for name, tensor in model.items()}
        asked, positions = bool(self.setting.metrics), torch.from_numpy(needed)[None]
        right, losses, chances = _run(self.setting, self.data, forward, stack, positions, asked)
        correct, loss = (values[0].cpu().numpy() for values in (right, losses))
        places = [np.searchsorted(needed, positions) for positions in split.test]
        tested = tuple(client for client, place in enumerate(places) if len(place))
        everywhere = {
            f"{name}.{metric}": float(values[np.searchsorted(needed, samples)].mean())
            for name, samples in common.items()
            for metric, values in (("accuracy", correct), ("loss", loss))
            if len(samples)
        }
        predictions, of_all = [], {}
        if chances is not None:
            predictions = [(chances[0, places[client]], self._labels(split.test[client])) for client in tested]
            further = {
                f"{name}.{metric}": value
                for name, samples in common.items()
                if len(samples)
                for metric, value in compute(
                    chances[0, np.searchsorted(needed, samples)], self._labels(samples), self.setting.metrics
                ).items()
            }
            everywhere |= {name: float(value) for name, value in further.items() if value.ndim == 0}
            of_all = {name: value for name, value in further.items() if value.ndim}
        means = [np.array([values[places[client]].mean() for client in tested]) for values in (correct, loss)]
        return Scores(tested, means[0], means[1], self._further(predictions), tuple(predictions), of_all), everywhere

    def _labels(self, positions: np.ndarray) -> np.ndarray:
        labels: np.ndarray = self.data.dataset.labels.numpy()[positions]
        return labels

    def _further(self, predictions: Sequence[Predictions]) -> dict[str, np.ndarray]:
        """Compute the metrics that the experiment asks for, client by client."""
        computed = [compute(*one, self.setting.metrics) for one in predictions]
        return {name: np.stack([one[name] for one in computed]) for name in (computed[0] if computed else ())}


def score_models(
    setting: Setting,
    data: DeviceData,
    forward: Forward,
    models: Tensors,
    positions: Sequence[np.ndarray],
    clients: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Test the models of K clients, each on its own samples, at least one: accuracy and mean cross entropy, ``[K]``."""
    correct, loss, _ = _run_own(setting, data, forward, models, positions, False, clients)
    return _means(correct, positions), _means(loss, positions)


_Run = tuple[Tensor, Tensor, np.ndarray | None]
"""Of each sample of K models whether it is right and its loss ``[K, n]``, and its probabilities ``[K, n, classes]`` if
they are asked for; in float64.
"""


def _run_own(
    setting: Setting,
    data: DeviceData,
    forward: Forward,
    models: Tensors,
    positions: Sequence[np.ndarray],
    asked: bool,
    clients: Sequence[int],
) -> _Run:
    """Run the models of K clients, each on its own samples; where these are fewer than the most, some are repeated."""
    longest = max(len(own) for own in positions)
    padded = np.stack([np.resize(own, longest) for own in positions])
    return _run(setting, data, forward, models, torch.from_numpy(padded), asked, clients)


def _means(values: Tensor, positions: Sequence[np.ndarray]) -> Tensor:
    """Take each client's mean over its own samples, without those that were repeated."""
    lengths = torch.tensor([len(own) for own in positions], device=values.device)
    inside = torch.arange(values.shape[1], device=values.device) < lengths[:, None]
    return (values * inside).sum(1) / lengths


def _run(
    setting: Setting,
    data: DeviceData,
    forward: Forward,
    models: Tensors,
    positions: Tensor,
    asked: bool,
    clients: Sequence[int] | None = None,
) -> _Run:
    """Run K models on their positions ``[K, n]``, which are samples of these ``clients``."""
    parameters = {name: models[name] for name in setting.layers.parameter_names}
    buffers = {name: models[name] for name in setting.layers.buffer_names}
    keys = torch.zeros(len(positions), 2, dtype=torch.int64, device=setting.device)
    correct, losses, chances = [], [], []
    with torch.no_grad():
        for part in torch.split(positions, max(1, _SAMPLES_AT_ONCE // len(positions)), dim=1):
            inputs, labels = data.make(part.to(setting.device), None, clients=clients)
            outputs, _ = forward(parameters, buffers, inputs, keys, training=False)
            correct.append((outputs.argmax(-1) == labels).to(torch.float64))
            losses.append(cross_entropy(outputs, labels).to(torch.float64))
            if asked:
                chances.append(outputs.to(torch.float64).softmax(-1).cpu())
    found = torch.cat(chances, dim=1).numpy() if chances else None
    return torch.cat(correct, dim=1), torch.cat(losses, dim=1), found
