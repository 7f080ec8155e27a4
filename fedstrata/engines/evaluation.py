"""Accuracy, loss and further metrics of models on test sets, under names that say which model was tested on what.

=============================  =======================================================================================
``global``                     the global model on the global test set
``validation``                 the global model on training samples that nobody got, where an experiment asks for some
``global_on_clients``          the global model on each client's test set
``client_before``              each participant's own model, just trained, before aggregation, on its own test set
``client_after``               each client's own model after aggregation, shared part new, personal part its own,
                               likewise
``client_validation``          each client's own model after aggregation, on training samples that it holds out to
                               choose by
``client_before_validation``   each participant's own model before aggregation, on the same samples
``client_adapted``             each client's model after the final adaptation of a method that has one, on its own test
                               set
``client_adapted_validation``  the same models on the samples that clients hold out to choose by
=============================  =======================================================================================

The first three exist only where nothing of the model is personal: else the server has no whole model.

Accuracy and the experiment's test loss are always there; further metrics (:mod:`fedstrata.scores`) where an experiment
asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedstrata.data.split import Parts
from fedstrata.engines.batches import DeviceData
from fedstrata.engines.forward import Forward
from fedstrata.engines.replaying import ReplayedFunction
from fedstrata.engines.setting import Setting
from fedstrata.scores import compute
from fedstrata.stack import Stack, Tensors, take, under
from fedstrata.transfer import to_device

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
        self._replayed = ReplayedFunction(setting.device) if setting.replay else None

    @property
    def judges(self) -> bool:
        """Whether clients hold samples out to choose models by."""
        return len(self.data.validation_at_clients) > 0

    def own_models(self, forward: Forward, models: Tensors, clients: Sequence[int]) -> Scores:
        """Test each client's model, a stack in the order of ``clients``, on its own test set."""
        return self.pending(forward, models, clients)()

    def pending(self, forward: Forward, models: Tensors, clients: Sequence[int]) -> Callable[[], Scores]:
        """Begin :meth:`own_models`; what is returned waits for the device, and brings the scores."""
        return self._pending(forward, models, clients, self.data.split.test_parts, bool(self.setting.metrics))

    def pending_judgement(self, forward: Forward, models: Tensors, clients: Sequence[int]) -> Callable[[], Scores]:
        """Begin to test each client's model on the samples that it holds out to choose by: accuracy and loss."""
        return self._pending(forward, models, clients, self.data.validation_at_clients, asked=False)

    def _pending(
        self, forward: Forward, models: Tensors, clients: Sequence[int], parts: Parts, asked: bool
    ) -> Callable[[], Scores]:
        ids = np.array(clients, dtype=np.int64)
        tested = np.flatnonzero(parts.sizes[ids])
        if not len(tested):
            return lambda: Scores((), np.empty(0), np.empty(0))
        if len(tested) < len(ids):
            ids, models = ids[tested], take(models, to_device(tested, self.setting.device))
        correct, losses, chances = _run_own(self.setting, self.data, forward, models, parts, ids, asked, self._replayed)
        lengths = to_device(parts.sizes[ids], self.setting.device)
        means = torch.stack((_means(correct, lengths), _means(losses, lengths)))
        predictions: list[Predictions] = []
        if chances is not None:
            owned = zip(chances, (parts[client] for client in ids), strict=True)
            predictions = [(own[: len(positions)], self._labels(positions)) for own, positions in owned]

        def scores() -> Scores:
            accuracy, loss = means.cpu().numpy()
            return Scores(tuple(ids.tolist()), accuracy, loss, self._further(predictions), tuple(predictions))

        return scores

    def on_validation(self, forward: Forward, models: Tensors, clients: Sequence[int]) -> np.ndarray:
        """Judge each client's model on the samples that it holds out for that: the accuracy ``[K]``."""
        judged = self.data.validation_at_clients
        return score_models(self.setting, self.data, forward, models, judged, clients)[0].cpu().numpy()

    def common_model(self, forward: Forward, model: Tensors) -> tuple[Scores, dict[str, float]]:
        """Test one model on every client's test set and on those that nobody owns, by the names of their metrics.

        Each sample is looked at once; of a set without samples nothing is told.
        """
        split = self.data.split
        common = {"global": self.data.dataset.test, "validation": self.data.validation}
        own = split.test_parts.joined()
        needed = np.unique(np.concatenate([*common.values(), own]))
        if len(needed) == 0:
            return Scores((), np.empty(0), np.empty(0)), {}
        stack = {name: tensor.unsqueeze(0) for name, tensor in model.items()}
        asked, positions = bool(self.setting.metrics), to_device(needed[None], self.setting.device)
        right, losses, chances = _run(self.setting, self.data, forward, stack, positions, asked, None, self._replayed)
        correct, loss = torch.cat((right, losses)).cpu().numpy()
        places = Parts(np.searchsorted(needed, own), split.test_sizes)
        tested = np.flatnonzero(places.sizes)
        everywhere = {
            f"{name}.{metric}": float(values[np.searchsorted(needed, samples)].mean())
            for name, samples in common.items()
            for metric, values in (("accuracy", correct), ("loss", loss))
            if len(samples)
        }
        predictions, of_all = [], {}
        if chances is not None:
            predictions = [(chances[0, places[client]], self._labels(split.test[client])) for client in tested.tolist()]
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
        means = [means_of_parts(values, places, tested) for values in (correct, loss)]
        clients = tuple(tested.tolist())
        return Scores(clients, means[0], means[1], self._further(predictions), tuple(predictions), of_all), everywhere

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
    samples: Sequence[np.ndarray],
    clients: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Test the models of K clients, each on its own samples, at least one: accuracy and mean test loss, ``[K]``.

    ``samples`` are the positions of all clients there are.
    """
    parts, ids = Parts.of(samples), np.array(clients, dtype=np.int64)
    correct, loss, _ = _run_own(setting, data, forward, models, parts, ids, asked=False)
    lengths = to_device(parts.sizes[ids], setting.device)
    return _means(correct, lengths), _means(loss, lengths)


def means_of_parts(values: np.ndarray, places: Parts, clients: np.ndarray) -> np.ndarray:
    """Take the mean over each client's places, of which it has at least one; those of equal number at once.

    Every mean is to the last bit the one of the client alone.

    >>> means_of_parts(np.array([1.0, 2.0, 6.0]), Parts.of([np.array([0, 1]), np.array([2])]), np.array([1, 0]))
    array([6. , 1.5])
    """
    sizes, begins = places.sizes[clients], places.begins[clients]
    means = np.empty(len(clients))
    for size in np.unique(sizes):
        rows = np.flatnonzero(sizes == size)
        means[rows] = values[places.flat[begins[rows, None] + np.arange(size)]].mean(axis=1)
    return means


_Run = tuple[Tensor, Tensor, np.ndarray | None]
"""Of each sample of K models whether it is right and its loss ``[K, n]``, and its probabilities ``[K, n, classes]`` if
they are asked for; in float64.
"""


def _run_own(
    setting: Setting,
    data: DeviceData,
    forward: Forward,
    models: Tensors,
    parts: Parts,
    clients: np.ndarray,
    asked: bool,
    replayed: ReplayedFunction | None = None,
) -> _Run:
    """Run the models of K clients, each on its own samples; where these are fewer than the most, some are repeated."""
    sizes = parts.sizes[clients, None]
    padded = parts.flat[parts.begins[clients, None] + np.arange(sizes.max()) % sizes]
    numbers = to_device(clients, setting.device)
    return _run(setting, data, forward, models, to_device(padded, setting.device), asked, numbers, replayed)


def _means(values: Tensor, lengths: Tensor) -> Tensor:
    """Take each client's mean over its own samples, so many, without those that were repeated."""
    inside = torch.arange(values.shape[1], device=values.device) < lengths[:, None]
    return (values * inside).sum(1) / lengths


def _run(
    setting: Setting,
    data: DeviceData,
    forward: Forward,
    models: Tensors,
    positions: Tensor,
    asked: bool,
    clients: Tensor | None = None,
    replayed: ReplayedFunction | None = None,
) -> _Run:
    """Run K models on their positions ``[K, n]``, which are samples of these ``clients``."""

    def run(given: Stack) -> Tensors:
        parameters, buffers = (
            {name: given[f"models/{name}"] for name in names}
            for names in (setting.layers.parameter_names, setting.layers.buffer_names)
        )
        keys = torch.zeros(len(positions), 2, dtype=torch.int64, device=setting.device)
        found: dict[str, list[Tensor]] = {name: [] for name in ("correct", "losses", *["chances"] * asked)}
        with torch.no_grad():
            for part in torch.split(given["positions"], _at_once(setting, len(positions)), dim=1):
                inputs, labels = data.make(part, None, clients=given.get("clients"))
                outputs, _ = forward(parameters, buffers, inputs, keys, training=False)
                found["correct"].append((outputs.argmax(-1) == labels).to(torch.float64))
                alike = torch.ones(len(outputs), outputs.shape[-1], device=outputs.device)  # for a loss that judges
                found["losses"].append(setting.test_loss.samples(outputs, labels, alike).to(torch.float64))
                if asked:
                    found["chances"].append(outputs.to(torch.float64).softmax(-1))
        return {name: torch.cat(parts, dim=1) for name, parts in found.items()}

    given = under("models", models) | {"positions": positions} | ({} if clients is None else {"clients": clients})
    result = run(given) if replayed is None else replayed(run, given)
    chances = result["chances"].cpu().numpy() if asked else None
    return result["correct"], result["losses"], chances


def _at_once(setting: Setting, models: int) -> int:
    """Tell how many samples of each of so many models are run at once: on a GPU as many as in training, which fit."""
    few = max(1, _SAMPLES_AT_ONCE // models)
    return max(few, setting.work.batch_size) if setting.device.type == "cuda" else few
