"""Diagnostics that ask clients' models and data, in whole runs."""

from __future__ import annotations

import numpy as np
import pytest
from seeing import pictures

import fedstrata
from fedstrata.fairness import fairness, worst_clients
from fedstrata.report import read_runs
from fedstrata.report.rows import comparison_rows

ASKED = "sensitivity, gradient-variance, hessian(probes=2, batch_size=8), cka(samples=12), fisher(batch_size=4), people"
SMALL = {
    "data": pictures(), "rounds": 3, "epochs": 1, "model": "mlp", "participation": 0.67, "device": "cpu",
    "precision": "fp64", "batch_size": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def result():
    return fedstrata.run(**SMALL, engine="stacked", diagnose=ASKED)


def rows(result, name):
    table = result.metrics.to_tables()[name].to_pydict()
    keys = [column for column in table if column != "value"]
    return {tuple(key): value for *key, value in zip(*(table[key] for key in keys), table["value"], strict=True)}


def test_they_are_measured_in_the_first_round_and_in_the_last(result):
    found = rows(result, "layers")
    for metric in ("sensitivity.cumulated", "hessian.trace", "cka.dissimilarity", "gradient-variance.variance"):
        assert {round for round, _, name in found if name == metric} == {1, 3}
        split = {round: value for (round, name), value in rows(result, "rounds").items()
                 if name == f"{metric.split('.')[0]}.split"}  # fmt: skip
        assert split.keys() == {1, 3}
        for round, count in split.items():
            marks = [value for (at, _, name), value in found.items()
                     if at == round and name == f"{metric.split('.')[0]}.federated"]  # fmt: skip
            assert sum(marks) == count
            assert marks == sorted(marks, reverse=True)


def test_people_are_those_of_the_runs_headline(result):
    accuracies = {client: value for (round, client, metric), value in rows(result, "clients").items()
                  if round == 3 and metric == "client_after.accuracy"}  # fmt: skip
    assert len(accuracies) == 3
    final = result.summary["final"]
    assert final["people.fairness"] == pytest.approx(fairness(list(accuracies.values())))
    assert final["people.deviation"] == pytest.approx(final["client_after.accuracy.std"])
    assert [final["people.worst_client"]] == worst_clients(accuracies, 1)
    assert final["people.lowest"] == min(accuracies.values())
    advantages = {client: value for (round, client, metric), value in rows(result, "clients").items()
                  if round == 3 and metric == "people.advantage"}  # fmt: skip
    assert len(advantages) == 2
    mean = np.mean(list(accuracies.values()))
    assert advantages == pytest.approx({client: accuracies[client] - mean for client in advantages})


def test_people_have_numbers_in_the_rounds_that_are_tested():
    result = fedstrata.run(**SMALL | {"evaluate_every": 2, "method": "fedavg-ft"}, engine="loop", diagnose="people")
    rounds, values = result.metrics.series("people.fairness")
    assert rounds.tolist() == [2, 3]
    assert values[-1] == pytest.approx(result.summary["final"]["client_adapted.accuracy.std"] ** 2)


def test_a_comparison_tells_who_is_better_off_than_alone_and_with_fedavg(tmp_path):
    """The same from the results and from the folders; by hand from the accuracies of single clients."""
    comparison = fedstrata.compare(
        "fedavg, local, fedper", data="digits", clients=5, rounds=2, epochs=3, model="mlp", engine="stacked", seeds=1,
        device="cpu", out=tmp_path,
    )  # fmt: skip
    own, alone, averaged = (
        comparison.result(method).metrics.of_clients("client_after.accuracy")
        for method in ("fedper", "local", "fedavg")
    )
    expected = sum(own[client] > max(alone[client], averaged[client]) for client in range(5)) / 5
    assert expected > 0
    told = {row["method"]: row["incentive"] for row in comparison.to_rows()}
    assert told == {"fedavg": None, "local": None, "fedper": expected}
    rows = comparison_rows(read_runs(sorted(path for path in tmp_path.iterdir() if path.is_dir())))
    assert {row.label: row.incentive for row in rows} == {row.label: row.incentive for row in comparison.rows}
    assert f"than with both local and fedavg, of the same seed: fedper {100 * expected:.0f} %." in str(comparison)
