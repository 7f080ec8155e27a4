"""Metrics that an experiment asks for: per client, over all samples, by class, in folders, and on the page."""

import math
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

import fedstrata
from fedstrata import Experiment, FedStrataError, FedStrataWarning
from fedstrata.data import Dataset, Split
from fedstrata.report import read_run, write_report
from fedstrata.runs.driver import Driver
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.metrics import EVERYBODY
from fedstrata.runs.preparing import Ingredients

SMALL = Experiment(
    clients=4, rounds=2, epochs=1, model="mlp", partition="dirichlet:0.5", batch_size=32, engine="stacked"
)
EVERYTHING = "f1+auc+average-precision+balanced-accuracy+calibration-error+brier+recall:each+confusion"


def run(**changes: Any) -> fedstrata.Result:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedStrataWarning)
        return fedstrata.run(SMALL, **changes)


def outputs_of(driver: Driver, model: dict[str, torch.Tensor], positions: np.ndarray) -> np.ndarray:
    inputs, _ = driver.engine.evaluator.data.make(torch.from_numpy(positions)[None], None)  # type: ignore[attr-defined]
    network = driver.engine.forward.model.eval()  # type: ignore[attr-defined]
    with torch.no_grad():
        return torch.func.functional_call(network, model, (inputs[0],)).double().softmax(1).numpy()


def test_without_metrics_nothing_is_added(tmp_path: Path) -> None:
    result = run(out=tmp_path / "run")
    kinds = {name.split(".")[1] for name in result.summary["final"] if name.startswith(("client", "global"))}
    assert kinds == {"accuracy", "loss"}
    assert sorted(path.name for path in (tmp_path / "run/metrics").iterdir()) == [
        "clients.parquet", "layers.parquet", "rounds.parquet",
    ]  # fmt: skip
    assert "metrics" not in (tmp_path / "run/experiment.toml").read_text()


def test_metrics_change_no_number_that_was_there() -> None:
    plain, more = run(), run(metrics=EVERYTHING)
    for name, tensor in plain.model.items():
        assert torch.equal(tensor, more.model[name])
    final = more.summary["final"]
    assert {name: final[name] for name in plain.summary["final"]} == plain.summary["final"]
    assert run(metrics="accuracy+loss").metrics.to_tables() == plain.metrics.to_tables()


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_common_model_is_judged_as_by_scikit_learn(engine: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedStrataWarning)
        driver = Driver.prepare(SMALL.with_changes({"metrics": EVERYTHING, "engine": engine, "rounds": 1}))
        driver.run()
    final, model = driver.metrics.latest(), driver.model
    labels = driver.dataset.labels.numpy()
    sets = {"global": driver.dataset.test, "client_after": np.concatenate(driver.split.test)}
    for name, positions in sets.items():
        chances, truth = outputs_of(driver, model, positions), labels[positions]
        end = "" if name == "global" else ".pooled"
        assert final[f"{name}.f1{end}"] == pytest.approx(sk.f1_score(truth, chances.argmax(1), average="macro"))
        auc = sk.roc_auc_score(truth, chances, multi_class="ovr")
        assert final[f"{name}.auc{end}"] == pytest.approx(auc, abs=1e-4)  # float32
    own = [sk.f1_score(labels[p], outputs_of(driver, model, p).argmax(1), average="macro") for p in driver.split.test]
    assert final["client_after.f1.mean"] == pytest.approx(np.mean(own))
    assert final["client_after.f1.std"] == pytest.approx(np.std(own))
    assert final["client_after.f1.worst10"] == pytest.approx(min(own))
    assert final["client_after.f1.undefined"] == 0
    table = driver.metrics.to_tables()["clients"].to_pylist()
    noted = {row["client"]: row["value"] for row in table if row["metric"] == "client_after.f1"}
    assert noted == pytest.approx(dict(enumerate(own)))


def test_personal_models_are_pooled_each_on_its_own_samples() -> None:
    driver = Driver.prepare(SMALL.with_changes({"metrics": "confusion+accuracy", "method": "local", "rounds": 1}))
    driver.run()
    rows = driver.metrics.to_tables()["classes"].to_pylist()
    after = [row for row in rows if row["metric"] == "client_after.confusion"]
    own = {}
    for row in after:
        key = (row["class"], row["predicted"])
        if row["client"] == EVERYBODY:
            assert row["value"] > 0
        else:
            own[key] = own.get(key, 0) + row["value"]
    pooled = {(row["class"], row["predicted"]): row["value"] for row in after if row["client"] == EVERYBODY}
    assert pooled == own
    sizes = [len(positions) for positions in driver.split.test]
    assert sum(pooled.values()) == sum(sizes)
    right = [
        sum(row["value"] for row in after if row["client"] == client and row["class"] == row["predicted"])
        for client in range(4)
    ]
    expected = np.mean([count / size for count, size in zip(right, sizes, strict=True)])
    assert driver.metrics.latest()["client_after.accuracy.mean"] == pytest.approx(expected)
    assert not any(row["metric"].startswith("global") for row in rows)


def world(labels: list[list[int]]) -> Ingredients:
    """Clients with given test labels; everybody trains on the same four samples."""
    flat = [0, 1, 0, 1, *(label for own in labels for label in own)]
    inputs = torch.randn(len(flat), 3, generator=torch.Generator().manual_seed(0))
    ends = np.cumsum([4, *map(len, labels)])
    test = tuple(np.arange(begin, end) for begin, end in pairwise(ends))
    dataset = Dataset("toy", inputs, torch.tensor(flat), np.arange(4), np.arange(4, len(flat)), ("no", "yes"))
    return Ingredients(dataset=dataset, split=Split((np.arange(4),) * len(labels), test))


def toy(labels: list[list[int]], metrics: str, **changes: Any) -> Driver:
    experiment = SMALL.with_changes({"rounds": 1, "transforms": "none", "metrics": metrics, **changes})
    return Driver.prepare(experiment, world(labels))


def test_a_client_with_one_class_is_left_out_of_the_mean_with_a_word() -> None:
    driver = toy([[0, 1, 1], [1, 1], [0, 1]], "auc+f1+recall:0")
    with pytest.warns(FedStrataWarning) as caught:
        driver.run()
    words = [str(one.message) for one in caught]
    assert words == [
        "The metric 'auc' is not defined for 1 of 3 clients, of which client 1 is the first: it needs samples of the "
        "class and of others among the test samples; their mean is over the others.",
        "The metric 'recall(of=0)' is not defined for 1 of 3 clients, of which client 1 is the first: it needs samples "
        "of the class among the test samples; their mean is over the others.",
    ]
    final = driver.metrics.latest()
    table = driver.metrics.to_tables()["clients"].to_pylist()
    noted = [row["value"] for row in table if row["metric"] == "client_after.auc"]
    assert [math.isnan(value) for value in noted] == [False, True, False]
    assert final["client_after.auc.undefined"] == 1
    assert final["client_after.auc.mean"] == pytest.approx((noted[0] + noted[2]) / 2)
    assert final["client_after.auc.worst10"] == min(noted[0], noted[2])
    assert final["client_after.f1.undefined"] == 0
    assert math.isfinite(final["client_after.auc.pooled"])


def test_a_metric_that_nobody_has_is_not_0() -> None:
    driver = toy([[1, 1], [1]], "auc")
    with pytest.warns(FedStrataWarning, match="2 of 2 clients.*it has no mean over clients"):
        driver.run()
    final = driver.metrics.latest()
    assert all(math.isnan(final[f"client_after.auc.{name}"]) for name in ("mean", "std", "worst10", "pooled"))
    assert math.isnan(final["global.auc"])
    assert final["client_after.auc.undefined"] == 2


def test_a_diverged_client_is_not_hidden_as_undefined() -> None:
    driver = toy([[0, 1, 1], [0, 1]], "auc", optimiser="sgd(learning_rate=1e30)", epochs=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedStrataWarning)
        driver.run()
    final = driver.metrics.latest()
    assert not math.isfinite(final["client_after.loss.mean"])
    assert math.isnan(final["client_after.auc.mean"])
    assert final["client_after.auc.undefined"] == 0


def sureness(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The mean of the highest probability."""
    assert isinstance(probabilities, np.ndarray)
    assert probabilities.dtype == np.float64
    assert labels.dtype == np.int64
    return float(probabilities.max(axis=1).mean())


def test_a_function_of_ones_own(tmp_path: Path) -> None:
    result = run(metrics=["f1", sureness], out=tmp_path / "run")
    final = result.summary["final"]
    assert 0.1 <= final["client_after.sureness.mean"] <= 1
    assert 0.1 <= final["global.sureness"] <= 1
    assert RunFolder.open(tmp_path / "run").experiment.metrics == "f1+python:sureness"
    assert "client_after.f1.mean" in result.summary["best"]


def test_a_run_goes_on_with_its_metrics_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    changes = {"metrics": ["recall:each", sureness], "rounds": 3, "checkpoint_every": 1}
    whole = run(out=tmp_path / "whole", **changes)

    class Stop(Exception):  # noqa: N818
        pass

    def stop(update: Any) -> None:
        if update.round == 3:
            raise Stop

    with pytest.raises(Stop):
        run(out=tmp_path / "broken", callbacks=[stop], **changes)
    with pytest.raises(FedStrataError, match=r"'sureness' is a function of a Python program; give it .* metrics=\[su"):
        fedstrata.resume(tmp_path / "broken")
    with pytest.raises(FedStrataError, match=r"measures recall\(of=each\)\+python:sureness; go on with the same"):
        fedstrata.resume(tmp_path / "broken", metrics=[sureness])
    fedstrata.resume(tmp_path / "broken", metrics=["recall:each", sureness])
    for name in ("rounds", "clients", "classes"):
        one, other = (tmp_path / place / f"metrics/{name}.parquet" for place in ("whole", "broken"))
        assert one.read_bytes() == other.read_bytes()
    assert RunFolder.open(tmp_path / "whole").metrics().to_tables() == whole.metrics.to_tables()


def test_mistakes_are_told_before_anything_is_trained() -> None:
    def nothing(probabilities: np.ndarray, labels: np.ndarray) -> None: ...

    for given, words in {
        "f1+acu": "Did you mean 'auc'",
        "recall:10": "asks for class 10, but there are only 0 to 9",
        nothing: "'nothing' returned None; it must return one number",
    }.items():
        with pytest.raises(FedStrataError, match=words):
            Driver.prepare(
                SMALL if callable(given) else SMALL.with_changes({"metrics": given}),
                Ingredients(metrics=fedstrata.scores.make_metrics(given)) if callable(given) else None,
            )


OWN_METRIC = '''
import fedstrata

@fedstrata.metric("own-certainty", higher_is_better=None)
def certainty(probabilities, labels):
    """The mean of the highest probability."""
    return probabilities.max(axis=1).mean()
'''


def test_a_file_can_bring_a_metric(tmp_path: Path) -> None:
    file = tmp_path / "own_metric.py"
    file.write_text(OWN_METRIC)
    result = run(imports=[str(file)], metrics="own-certainty")
    assert 0.1 <= result.summary["final"]["global.own-certainty"] <= 1
    assert "client_after.own-certainty.worst10" not in result.summary["final"]  # nobody knows which way is up
    assert "global.own-certainty" not in result.summary["best"]


def test_the_page_shows_what_was_asked_for(tmp_path: Path) -> None:
    for seed in (0, 1):
        run(metrics="f1+recall:each+confusion", seed=seed, out=tmp_path / f"run{seed}")
    run(method="fedbn", out=tmp_path / "plain")
    page = write_report([tmp_path / "run0", tmp_path / "run1", tmp_path / "plain"], tmp_path / "report.html")
    text = page.read_text()
    for words in ("Further metrics", "Over the clients", "recall(of=each), all test samples", "fedavg: confusion"):
        assert words in text
    columns = read_run(tmp_path / "run0").classes
    assert set(columns["client"].tolist()) == {EVERYBODY, 0, 1, 2, 3}
    assert read_run(tmp_path / "plain").classes["value"].tolist() == []
    assert "Further metrics" not in write_report([tmp_path / "plain"], tmp_path / "other.html").read_text()
