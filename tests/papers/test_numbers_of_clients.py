"""What a paper reports of single clients' models, each in a round of its own."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import fedstrata
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.papers.of_clients import BEFORE, over_clients, values_of_clients
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.metrics import MetricLog


def test_the_first_round_with_the_lowest_value_is_each_clients_own() -> None:
    log = MetricLog()
    for round, values in enumerate(([3.0, 1.0, math.nan], [2.0, 1.0, math.nan], [2.0, 4.0, 5.0]), start=1):
        log.add_clients(round, "some.loss", range(3), np.array(values))
        log.add_clients(round, "other.loss", range(3), np.zeros(3))
    assert log.rounds_of_lowest("some.loss") == [2, 1, 3]
    assert log.rounds_of_lowest("no.loss") == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of unequal clients that hold samples out."""
    place: Path = tmp_path_factory.mktemp("unequal") / "run"
    experiment = Experiment(
        clients=3, partition="dirichlet-clients(alpha=1.0, minimum=20, test_fraction=0.2)", model="mlp(hidden=8)",
        rounds=5, epochs=1, metrics="f1", validation_fraction=0.2, optimiser="sgd(learning_rate=1.0)",
    )  # fmt: skip
    fedstrata.run(experiment, out=place)
    return RunFolder.open(place)


def test_a_client_is_scored_by_what_it_trained_in_the_round_of_its_lowest_loss(folder: RunFolder) -> None:
    metrics = folder.metrics()
    best = [
        min(range(1, 6), key=lambda round: metrics.of_client(client, "client_before_validation.loss", round) or 0.0)
        for client in range(3)
    ]
    assert set(best) != {5}  # else the last round would do, too
    expected = {client: metrics.of_client(client, "client_before.f1", best[client]) for client in range(3)}
    assert values_of_clients("client_before.f1", folder, BEFORE) == expected
    numbers, sizes = np.array(list(expected.values()), dtype=float), folder.split().test_sizes
    assert len(set(sizes.tolist())) > 1
    assert over_clients("client_before.f1.mean", folder, BEFORE) == pytest.approx(numbers.mean())
    assert over_clients("client_before.f1.std", folder, BEFORE) == pytest.approx(numbers.std())
    weighted = (numbers * sizes).sum() / sizes.sum()
    assert over_clients("client_before.f1.weighted", folder, BEFORE) == pytest.approx(weighted)
    last = np.array(list(metrics.of_clients("client_after.accuracy").values()))
    expected_last = (last * sizes).sum() / sizes.sum()
    assert over_clients("client_after.accuracy.weighted", folder, "last") == pytest.approx(expected_last)


def test_models_adapted_in_the_end_are_scored_where_their_loss_is_lower(tmp_path: Path) -> None:
    """FedBABU in PLayer-FL's code: heads are trained after the last round, and validation chooses among all models."""
    experiment = Experiment(
        clients=4, partition="dirichlet(alpha=0.5)", model="mlp(hidden=8)", rounds=3, epochs=1, seed=1,
        metrics="f1", method="fedbabu(tune=head, epochs=1, rate=3.0)", validation_fraction=0.2,
    )  # fmt: skip
    fedstrata.run(experiment, out=tmp_path / "run")
    run = RunFolder.open(tmp_path / "run")
    metrics = run.metrics()
    expected, chosen = {}, []
    for client in range(4):
        judged = {
            (label, round): metrics.of_client(client, f"{label}_validation.loss", round) or math.inf
            for label, rounds in (("client_before", (1, 2, 3)), ("client_adapted", (3,)))
            for round in rounds
        }
        label, round = min(judged, key=lambda what: judged[what])
        chosen.append(label)
        expected[client] = metrics.of_client(client, f"{label}.f1", round)
    assert set(chosen) == {"client_before", "client_adapted"}  # else this test would see nothing
    assert values_of_clients("client_before.f1", run, BEFORE) == expected
    in_use = {
        client: metrics.of_client(client, f"{'client_adapted' if adapted else 'client_after'}.f1", round)
        for client, (round, adapted) in enumerate(
            zip(run.summary()["validated_rounds"], run.summary()["validated_adapted"], strict=True)
        )
    }
    for metric in ("client_after.f1", "client_adapted.f1"):
        assert values_of_clients(metric, run, "validated") == in_use


def test_what_there_is_not_is_said(folder: RunFolder) -> None:
    with pytest.raises(FedStrataError, match="mean, std, worst10, weighted, not 'median'"):
        over_clients("client_before.f1.median", folder, BEFORE)
    with pytest.raises(FedStrataError, match=r"has no 'client_before\.auc' of single clients"):
        over_clients("client_before.auc.mean", folder, BEFORE)


def test_runs_without_held_out_samples_cannot_be_chosen_among(tmp_path: Path) -> None:
    fedstrata.run(Experiment(clients=2, model="mlp(hidden=4)", rounds=1), out=tmp_path / "run")
    with pytest.raises(FedStrataError, match="needs a validation_fraction"):
        over_clients("client_before.loss.mean", RunFolder.open(tmp_path / "run"), BEFORE)
