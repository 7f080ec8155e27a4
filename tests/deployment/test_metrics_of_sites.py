"""Metrics and losses over sites: the same code and numbers as in simulation, and what sites keep to themselves."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_world import EXPERIMENT, SITES, digits, hello, ingredients, request, simulated
from test_parity import on_flower

from fedstrata.data import Split
from fedstrata.deployment.checks import RefusedReply
from fedstrata.deployment.facts import scores_from_facts
from fedstrata.deployment.protocol import OK, REFUSED, Place, Request
from fedstrata.deployment.rules import tells_of_classes
from fedstrata.deployment.server import Deployment
from fedstrata.deployment.site import Site
from fedstrata.deployment.site_data import SiteData
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.runs.preparing import Ingredients
from fedstrata.scores import make_metrics


def with_metrics(greeting: Request, metrics: str) -> Request:
    facts = {**greeting.facts, "experiment": {**greeting.facts["experiment"], "metrics": metrics}}
    return Request("hello", greeting.run, facts=facts)


def enough_of_two_classes() -> Ingredients:
    """Let every site test on a dozen zeros and a dozen ones."""
    own, labels = ingredients(), digits().labels.numpy()
    assert own.split is not None
    tested = digits().test
    mine = np.concatenate([tested[labels[tested] == one][:12] for one in (0, 1)])
    return replace(own, split=Split(own.split.train, (mine,) * SITES))


def test_sites_tell_the_numbers_of_the_simulation(tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "metrics": "f1+auc+brier", "rounds": 2, "loss": "cross-entropy(label_smoothing=0.1, weights=balanced)",
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedStrataWarning)
        simulation = simulated("fedbn", **asked)
        simulation.run()
        sites = on_flower("fedbn", tmp_path, **asked)
    for name, tensor in simulation.model.items():
        assert torch.equal(tensor, sites.model[name])
    ours, theirs = simulation.metrics.to_tables()["clients"].to_pydict(), sites.metrics["clients"].to_pydict()
    assert set(ours["metric"]) >= {"client_after.auc", "client_before.f1", "client_after.brier"}
    for column in ("round", "client", "metric"):
        assert ours[column] == theirs[column]
    assert ours["value"] == pytest.approx(theirs["value"], rel=1e-6, abs=1e-7, nan_ok=True)
    names = set(sites.metrics["rounds"]["metric"].to_pylist())
    assert "client_after.auc.undefined" in names
    assert "client_after.auc.pooled" not in names  # that would take the samples of all sites


def test_numbers_of_classes_travel_where_there_are_samples_enough(tmp_path: Path) -> None:
    own = enough_of_two_classes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedStrataWarning)
        simulation = simulated("fedbn", own, metrics="recall:each+recall:1", rounds=1)
        simulation.run()
        sites = on_flower("fedbn", tmp_path, own=own, metrics="recall:each+recall:1", rounds=1)
    ours = [row for row in simulation.metrics.to_tables()["classes"].to_pylist() if row["client"] >= 0]
    theirs = sites.metrics["classes"].to_pylist()
    assert theirs == ours
    assert {row["class"] for row in theirs} == {0, 1}


@pytest.mark.parametrize(("enough", "told"), [(True, float), (False, type(None))])
def test_a_site_with_few_samples_of_a_class_tells_nothing_of_single_classes(
    enough: bool, told: type, tmp_path: Path
) -> None:
    own, log = enough_of_two_classes() if enough else ingredients(), []
    here = Site(tmp_path, SiteData(part=0, ingredients=own), log.append)
    assert here.answer(with_metrics(hello(), "f1+recall:each+recall:1")).status == OK
    engine = simulated("fedbn", own).engine
    message = engine.central.messages([0], 1)[0]  # type: ignore[attr-defined]
    facts = here.answer(request("train", Place.training(1), message, evaluate=True)).facts["scores"]["metrics"]
    assert isinstance(facts["f1"], float)
    assert isinstance(facts["recall(of=1)"], told)
    assert isinstance(facts["recall(of=each)"], list if enough else type(None))
    words = "keeps recall(of=each), recall(of=1) to itself: of some class it has fewer than 10 test samples"
    assert (words in log) is not enough


def test_few_samples_by_hand() -> None:
    assert tells_of_classes([10, 0, 25])
    assert not tells_of_classes([10, 9, 25])
    assert tells_of_classes([])


def test_confusion_matrices_stay_at_sites(tmp_path: Path) -> None:
    words = "'confusion' counts single samples, which sites do not tell"
    with pytest.raises(FedStrataError, match=words):
        Deployment(EXPERIMENT.with_changes({"metrics": "f1+confusion"}), ["a", "b"], tmp_path / "run").check()
    answer = Site(tmp_path / "site", SiteData(part=0, ingredients=ingredients())).answer(
        with_metrics(hello(), "confusion")
    )
    assert answer.status == REFUSED  # whatever the server says
    assert words in answer.facts["reason"]


def test_unknown_metrics_are_refused_before_anybody_connects(tmp_path: Path) -> None:
    with pytest.raises(FedStrataError, match="Did you mean 'auc'"):
        Deployment(EXPERIMENT.with_changes({"metrics": "acu"}), ["a", "b"], tmp_path / "run").check()
    with pytest.raises(FedStrataError, match="is a function of a Python program"):
        Deployment(EXPERIMENT.with_changes({"metrics": "python:mine"}), ["a", "b"], tmp_path / "run").check()


GOOD = {"accuracy": 0.5, "loss": 1.0, "metrics": {"f1": 0.25, "recall(of=each)": [1.0, None]}}
CHOSEN = make_metrics("f1+recall:each")


def test_what_a_site_tells_is_read_as_it_was_written() -> None:
    scores = scores_from_facts(2, GOOD, CHOSEN, 2)
    assert scores.clients == (2,)
    assert scores.further["f1"].tolist() == [0.25]
    assert scores.further["recall(of=each)"][0].tolist() == pytest.approx([1.0, math.nan], nan_ok=True)
    kept = scores_from_facts(2, {**GOOD, "metrics": {"f1": None, "recall(of=each)": None}}, CHOSEN, 2)
    assert math.isnan(kept.further["f1"][0])
    assert kept.further["recall(of=each)"].shape == (1, 2)


@pytest.mark.parametrize(
    "told",
    [
        None,
        [],
        {"f1": 0.25},
        {**GOOD["metrics"], "more": 1.0},  # type: ignore[dict-item]
        {**GOOD["metrics"], "f1": "high"},  # type: ignore[dict-item]
        {**GOOD["metrics"], "f1": True},  # type: ignore[dict-item]
        {**GOOD["metrics"], "f1": math.inf},  # type: ignore[dict-item]
        {**GOOD["metrics"], "recall(of=each)": 0.5},  # type: ignore[dict-item]
        {**GOOD["metrics"], "recall(of=each)": [0.5]},  # type: ignore[dict-item]
        {**GOOD["metrics"], "recall(of=each)": [0.5, "x"]},  # type: ignore[dict-item]
    ],
)
def test_what_does_not_fit_is_refused(told: Any) -> None:
    with pytest.raises(RefusedReply):
        scores_from_facts(2, {**GOOD, "metrics": told}, CHOSEN, 2)
