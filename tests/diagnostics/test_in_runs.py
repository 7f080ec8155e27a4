"""Diagnostics that ask clients' models and data, in whole runs."""

from __future__ import annotations

import numpy as np
import pytest
from seeing import pictures

import fedstrata
from fedstrata.fairness import fairness, worst_clients

ASKED = "sensitivity, gradient-variance, hessian(probes=2, batch_size=8), cka(samples=12), fisher(batch_size=4), people"
SMALL = {
    "data": pictures(), "rounds": 3, "epochs": 1, "model": "mlp", "participation": 0.67, "device": "cpu",
    "precision": "fp64", "batch_size": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def runs():
    engines = {
        "loop": {"engine": "loop"},
        "stacked": {"engine": "stacked"},
        "chunks": {"engine": "stacked", "chunk": 1},
    }
    asked = {name: fedstrata.run(**SMALL, **engine, diagnose=ASKED) for name, engine in engines.items()}
    return {**asked, "nobody asked": fedstrata.run(**SMALL, engine="stacked")}


def rows(result, name):
    table = result.metrics.to_tables()[name].to_pydict()
    keys = [column for column in table if column != "value"]
    return {tuple(key): value for *key, value in zip(*(table[key] for key in keys), table["value"], strict=True)}


@pytest.mark.parametrize("other", ["stacked", "chunks"])
@pytest.mark.parametrize("table", ["rounds", "layers", "diagnostics", "clients"])
def test_numbers_are_the_same_on_every_engine_and_in_chunks(runs, table, other):
    ours, theirs = rows(runs["loop"], table), rows(runs[other], table)
    assert ours.keys() == theirs.keys()
    for place, value in ours.items():
        assert theirs[place] == pytest.approx(value, rel=1e-8, abs=1e-12), place


def test_looking_on_changes_no_other_number(runs):
    for table in ("rounds", "layers", "clients"):
        asked, plain = rows(runs["stacked"], table), rows(runs["nobody asked"], table)
        assert {place: asked[place] for place in plain} == plain


def test_they_are_measured_in_the_first_round_and_in_the_last(runs):
    found = rows(runs["stacked"], "layers")
    for metric in ("sensitivity.cumulated", "hessian.trace", "cka.dissimilarity", "gradient-variance.variance"):
        assert {round for round, _, name in found if name == metric} == {1, 3}
        split = {round: value for (round, name), value in rows(runs["stacked"], "rounds").items()
                 if name == f"{metric.split('.')[0]}.split"}  # fmt: skip
        assert split.keys() == {1, 3}
        for round, count in split.items():
            marks = [value for (at, _, name), value in found.items()
                     if at == round and name == f"{metric.split('.')[0]}.federated"]  # fmt: skip
            assert sum(marks) == count
            assert marks == sorted(marks, reverse=True)


def test_people_are_those_of_the_runs_headline(runs):
    result = runs["stacked"]
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
