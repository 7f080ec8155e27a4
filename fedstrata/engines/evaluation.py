"""Accuracy and loss of models on test sets, each under a name that says which model was tested on what.

=====================  =============================================================================================
``global``             the global model on the global test set
``validation``         the global model on training samples that nobody got, where an experiment asks for some
``global_on_clients``  the global model on each client's test set
``client_before``      each participant's own model, just trained, before aggregation, on its own test set
``client_after``       each client's own model after aggregation, shared part new, personal part its own, likewise
``client_adapted``     each client's model after the final adaptation of a method that has one, on its own test set
=====================  =============================================================================================

The first three exist only where nothing of the model is personal: else the server has no whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedstrata.engines.batches import DeviceData
from fedstrata.engines.forward import Forward
from fedstrata.engines.setting import Setting
from fedstrata.losses import cross_entropy
from fedstrata.stack import Tensors

_SAMPLES_AT_ONCE = 2048


@dataclass(frozen=True)
class Scores:
    """One number per client, for the clients in ``clients`` (those that have test samples)."""

    clients: tuple[int, ...]
    accuracy: np.ndarray
    loss: np.ndarray

    @classmethod
    def join(cls, parts: Sequence[Scores]) -> Scores:
        """Put the scores of several groups of clients together."""
        return cls(
            tuple(client for part in parts for client in part.clients),
            np.concatenate([part.accuracy for part in parts]),
            np.concatenate([part.loss for part in parts]),
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
        accuracy, loss = score_models(self.setting, self.data, forward, models, positions, ids)
        return Scores(tuple(ids), accuracy.cpu().numpy(), loss.cpu().numpy())

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
        correct, loss = (
            values[0].cpu().numpy()
            for values in _run(self.setting, self.data, forward, stack, torch.from_numpy(needed)[None])
        )
        places = [np.searchsorted(needed, positions) for positions in split.test]
        tested = tuple(client for client, place in enumerate(places) if len(place))
        scores = Scores(
            tested, *(np.array([values[places[client]].mean() for client in tested]) for values in (correct, loss))
        )
        return scores, {
            f"{name}.{metric}": float(values[np.searchsorted(needed, positions)].mean())
            for name, positions in common.items()
            for metric, values in (("accuracy", correct), ("loss", loss))
            if len(positions)
        }


def score_models(
    setting: Setting,
    data: DeviceData,
    forward: Forward,
    models: Tensors,
    positions: Sequence[np.ndarray],
    clients: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Test the models of K clients, each on its own samples, at least one: accuracy and mean loss, ``[K]`` each."""
    longest = max(len(own) for own in positions)
    padded = np.stack([np.resize(own, longest) for own in positions])
    correct, loss = _run(setting, data, forward, models, torch.from_numpy(padded), clients)
    lengths = torch.tensor([len(own) for own in positions], device=setting.device)
    inside = torch.arange(longest, device=setting.device) < lengths[:, None]
    return (correct * inside).sum(1) / lengths, (loss * inside).sum(1) / lengths


def _run(
    setting: Setting,
    data: DeviceData,
    forward: Forward,
    models: Tensors,
    positions: Tensor,
    clients: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Run K models on their positions ``[K, n]``: for each sample whether it is right, and its loss, in float64."""
    parameters = {name: models[name] for name in setting.layers.parameter_names}
    buffers = {name: models[name] for name in setting.layers.buffer_names}
    keys = torch.zeros(len(positions), 2, dtype=torch.int64, device=setting.device)
    correct, losses = [], []
    with torch.no_grad():
        for part in torch.split(positions, max(1, _SAMPLES_AT_ONCE // len(positions)), dim=1):
            inputs, labels = data.make(part.to(setting.device), None, clients=clients)
            outputs, _ = forward(parameters, buffers, inputs, keys, training=False)
            correct.append((outputs.argmax(-1) == labels).to(torch.float64))
            losses.append(cross_entropy(outputs, labels).to(torch.float64))
    return torch.cat(correct, dim=1), torch.cat(losses, dim=1)
