"""Run folders as a real run leaves them, with made-up but plausible numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstrata.data.dataset import Dataset
from fedstrata.data.split import Split
from fedstrata.experiment import Experiment
from fedstrata.runs.describing import describe_environment
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.metrics import MetricLog, TimingLog, describe_clients
from fedstrata.trained import Card

MakeRun = Callable[..., Path]


def write_run(
    path: Path,
    *,
    level: float = 0.85,
    personal: bool = False,
    headline: str = "client_after",
    layers: bool = False,
    finish: bool = True,
    samples: int = 1800,
    classes: int = 10,
    class_names: tuple[str, ...] | None = None,
    seconds: float = 0.8,
    adapted: bool = False,
    similarity: bool = False,
    **settings: Any,
) -> Path:
    """Write a run whose accuracy rises to about ``level``."""
    experiment = Experiment(**{"rounds": 12, "clients": 8, "evaluate_every": 1, **settings})
    generator = np.random.default_rng([experiment.seed, len(experiment.method), sum(map(ord, experiment.method))])
    dataset, split = _data(experiment, samples, classes, class_names)
    metrics, timings = _numbers(experiment, generator, level, personal, layers, seconds, adapted)
    if similarity:
        clients = range(experiment.clients)
        directions = generator.normal(size=(experiment.clients, 5))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        metrics.add_diagnostics(
            experiment.rounds, "drift.similarity", "", clients, directions @ directions.T, list(clients)
        )
    environment = describe_environment("cpu", {"engine": "stacked", "chunk": experiment.clients})
    with RunFolder.create(path, experiment, dataset, split, environment) as run:
        if finish:
            weights = {"weight": torch.zeros(2)}
            card = Card(experiment.model, dataset.input_shape, "float32", (), dataset.class_names)
            run.finish(weights, {}, card, metrics, timings, _summary(experiment, headline, metrics, timings))
        else:
            run.save_checkpoint(experiment.rounds // 2, {"weight": torch.zeros(2)}, {}, metrics, timings)
    return path


def _data(
    experiment: Experiment, samples: int, classes: int, class_names: tuple[str, ...] | None
) -> tuple[Dataset, Split]:
    generator = np.random.default_rng(experiment.seed)
    labels = np.arange(samples) % classes
    dataset = Dataset(
        name=experiment.data,
        inputs=torch.zeros(samples, 1),
        labels=torch.from_numpy(labels),
        train=np.arange(samples),
        test=np.arange(0),
        class_names=class_names or tuple(str(label) for label in range(classes)),
    )
    parts = []
    for _ in range(experiment.clients):
        shares = generator.dirichlet(np.full(classes, 0.3))[labels]
        size = int(generator.integers(40, 90))
        parts.append(generator.choice(samples, size, replace=False, p=shares / shares.sum()))
    return dataset, Split(tuple(parts), tuple(part[: len(part) // 4] for part in parts))


def _numbers(
    experiment: Experiment,
    generator: np.random.Generator,
    level: float,
    personal: bool,
    layers: bool,
    seconds: float,
    adapted: bool,
) -> tuple[MetricLog, TimingLog]:
    metrics, timings = MetricLog(), TimingLog()
    clients = range(experiment.clients)
    talent = generator.normal(0, 0.06, experiment.clients)
    speed = generator.uniform(4, 8) * experiment.rounds / 40
    for number in range(1, experiment.rounds + 1):
        progress = 1 - np.exp(-number / speed)
        wobble = generator.normal(0, 0.008)
        own = np.clip(level * (0.25 + 0.75 * progress) + talent + wobble, 0, 1)
        measured = {"client_before": np.clip(own - 0.03, 0, 1), "client_after": own}
        if not personal:
            measured["global_on_clients"] = np.clip(own - 0.05, 0, 1)
        if adapted and number == experiment.rounds:
            measured["client_adapted"] = np.clip(own + 0.04, 0, 1)
        values = {
            "train.loss": 2.3 * (1 - progress) + 0.05,
            "bytes.up": 40_000.0 * len(clients),
            "bytes.down": 52_000.0,
        }
        if not personal:
            values |= {"global.accuracy": float(own.mean() - 0.04), "global.loss": float(2.3 - 2 * own.mean())}
        for label, accuracy in measured.items():
            for kind, vector in (("accuracy", accuracy), ("loss", 2.4 - 2.2 * accuracy)):
                metrics.add_clients(number, f"{label}.{kind}", clients, vector.tolist())
                described = describe_clients(vector, higher_is_better=kind == "accuracy")
                values |= {f"{label}.{kind}.{statistic}": value for statistic, value in described.items()}
        metrics.add_round(number, values)
        if layers:
            names = ("conv1", "norm1", "conv2", "norm2", "conv3", "norm3", "head")
            metrics.add_layers(
                number, "drift", {name: (1 + depth) * (1.2 - progress) for depth, name in enumerate(names)}
            )
        for phase, share in (("train", 0.7), ("evaluate", 0.2), ("merge", 0.1)):
            timings.add(number, phase, seconds * share * generator.uniform(0.9, 1.1))
    return metrics, timings


def _summary(experiment: Experiment, headline: str, metrics: MetricLog, timings: TimingLog) -> dict[str, Any]:
    return {
        "method": experiment.method,
        "rounds": experiment.rounds,
        "seed": experiment.seed,
        "headline": headline,
        "final": metrics.latest(),
        "last_ten": metrics.last_ten(),
        "best": metrics.best(),
        "best_round": experiment.rounds,
        "bytes_up": metrics.series("bytes.up")[1].sum(),
        "bytes_down": metrics.series("bytes.down")[1].sum(),
        "seconds": sum(timings.totals().values()),
        "parameters": 12_345,
    }
