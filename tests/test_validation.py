"""Samples held out for validation: nobody trains on them, and the model of the best round on them is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata
from fedstrata.callbacks import RoundView
from fedstrata.cli.showing import summary_of_run
from fedstrata.data import from_arrays
from fedstrata.data.held_out import hold_out_for_validation
from fedstrata.deployment.server import Deployment
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.files import from_safetensors
from fedstrata.models import build_model
from fedstrata.report import read_run
from fedstrata.report.rows import comparison_rows
from fedstrata.runs.driver import Driver
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.preparing import divide
from fedstrata.runs.signals import Interrupted
from fedstrata.stack import clone

BUMPY = Experiment(
    clients=4, rounds=5, steps=8, model="mlp", validation=100, partition="dirichlet:0.5", precision="fp64",
    engine="loop", optimiser="sgd(learning_rate=0.7, momentum=0.9)", schedule="constant", checkpoint_every=1, seed=4,
)  # fmt: skip
"""Rates so high that the last round is not the best one."""


def test_it_takes_the_classes_in_proportion_and_leaves_the_rest_to_train_on() -> None:
    dataset = from_arrays(torch.rand(100, 2), [0] * 60 + [1] * 30 + [2] * 10, test_fraction=0)
    rest, held = hold_out_for_validation(dataset, 20, seed=0)
    assert np.bincount(dataset.labels[held]).tolist() == [12, 6, 2]
    assert sorted([*rest.train, *held]) == dataset.train.tolist()
    assert np.array_equal(held, hold_out_for_validation(dataset, 20, seed=0)[1])
    assert not np.array_equal(held, hold_out_for_validation(dataset, 20, seed=1)[1])
    hold_out_for_validation(dataset, 99, seed=0)
    with pytest.raises(FedStrataError, match="100 samples are to be held out for validation, but 'arrays' has 100"):
        hold_out_for_validation(dataset, 100, seed=0)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_nobody_has_them_and_the_best_model_on_them_is_kept(engine: str) -> None:
    driver = Driver.prepare(BUMPY.with_changes({"engine": engine}))
    held = hold_out_for_validation(driver.dataset, 100, seed=4)[1]
    assert not set(held) & {position for own in (*driver.split.train, *driver.split.test) for position in own}
    _, even = divide(BUMPY.with_changes({"partition": "iid"}), driver.dataset)
    assert sum(map(len, even.train)) == len(driver.dataset.train) - 100
    models = []
    for _ in range(5):
        driver.step()
        models.append(clone(driver.engine.server.model))
    rounds, accuracy = driver.metrics.series("validation.accuracy")
    assert rounds.tolist() == [1, 2, 3, 4, 5]
    best = int(accuracy.argmax())
    assert 0 < best < 4  # else this test would see nothing
    for name, tensor in models[best].items():
        assert torch.equal(driver.model[name], tensor)
    summary = driver.summary()
    assert summary["validated_round"] == best + 1
    assert summary["validated"]["validation.accuracy"] == accuracy[best]
    assert summary["validated"]["global.accuracy"] == driver.metrics.series("global.accuracy")[1][best]
    assert summary["final"]["global.accuracy"] == driver.metrics.series("global.accuracy")[1][-1]


def test_accuracy_and_loss_are_those_of_the_held_out_samples() -> None:
    driver = Driver.prepare(BUMPY.with_changes({"transforms": "none", "rounds": 1}))
    driver.step()
    model = build_model("mlp", driver.dataset.input_shape, driver.dataset.classes, 4).double().eval()
    model.load_state_dict(driver.engine.server.model)
    held = torch.from_numpy(hold_out_for_validation(driver.dataset, 100, seed=4)[1])
    inputs, labels = driver.dataset.inputs[held], driver.dataset.labels[held]
    scale = 1 if inputs.is_floating_point() else 255
    with torch.no_grad():
        outputs = model(inputs.double() / scale)
    latest = driver.metrics.latest()
    assert latest["validation.accuracy"] == (outputs.argmax(1) == labels).double().mean().item()
    assert latest["validation.loss"] == pytest.approx(torch.nn.functional.cross_entropy(outputs, labels).item())


def test_of_equals_the_first_is_kept() -> None:
    driver = Driver.prepare(BUMPY.with_changes({"optimiser": "sgd(learning_rate=1e-12)", "rounds": 2}))
    driver.step()
    first = clone(driver.engine.server.model)
    driver.step()
    assert not torch.equal(next(iter(first.values())), next(iter(driver.engine.server.model.values())))
    assert all(torch.equal(driver.model[name], tensor) for name, tensor in first.items())
    assert driver.summary()["validated_round"] == 1


def test_a_run_that_goes_on_keeps_the_same_model(tmp_path: Path) -> None:
    whole = fedstrata.run(BUMPY, out=tmp_path / "whole")
    chosen = whole.summary["validated_round"]

    def stop(update: RoundView) -> None:
        if update.round == chosen + 1:
            raise Interrupted(2, update.round, None)

    with pytest.raises(Interrupted):
        fedstrata.run(BUMPY, out=tmp_path / "parts", callbacks=[stop])
    again = fedstrata.resume(tmp_path / "parts")
    assert {key: value for key, value in again.summary.items() if not key.endswith("seconds")} == {
        key: value for key, value in whole.summary.items() if not key.endswith("seconds")
    }
    for folder, result in ((tmp_path / "whole", whole), (tmp_path / "parts", again)):
        saved = from_safetensors((folder / "model.safetensors").read_bytes(), folder)
        for name, tensor in whole.model.items():
            assert torch.equal(result.model[name], tensor)
            assert torch.equal(saved[name], tensor)
    assert RunFolder.open(tmp_path / "parts").summary()["validated_round"] == chosen


def test_without_it_the_last_model_is_kept_and_nothing_is_said() -> None:
    driver = Driver.prepare(Experiment(clients=2, rounds=1, epochs=1, model="mlp"))
    driver.step()
    for name, tensor in driver.engine.server.model.items():
        assert torch.equal(driver.model[name], tensor)
    assert "validated" not in driver.summary()
    assert not [metric for metric in driver.metrics.latest() if metric.startswith("validation")]


def test_the_terminal_tells_which_model_is_kept() -> None:
    from rich.console import Console

    driver = Driver.prepare(BUMPY.with_changes({"rounds": 1}))
    driver.step()
    console = Console(width=200)
    with console.capture() as shown:
        console.print(summary_of_run(driver.experiment, driver.summary()))
    assert "best on the validation samples, and kept: round 1 with " in shown.get()
    driver = Driver.prepare(ADAPTED)
    summary = driver.run()
    with console.capture() as shown:
        console.print(summary_of_run(driver.experiment, summary))
    few = sum(summary["validated_adapted"])
    assert f" to 5 or adapted after the last ({few} of 4 clients), with " in shown.get()


def test_where_it_cannot_be_it_is_refused() -> None:
    for method in ("fedper", "fedavg-ft", "local"):
        with pytest.raises(FedStrataError, match="clients use models of their own"):
            Driver.prepare(BUMPY.with_changes({"method": method}))
    dataset = from_arrays(torch.rand(60, 4), [0, 1] * 30)
    driver = Driver.prepare(Experiment(clients=2, model="mlp"))
    with pytest.raises(FedStrataError, match="before the data is divided, but the split comes from Python"):
        fedstrata.run(BUMPY, data=driver.dataset, split=driver.split, clients=None, partition=None)
    with pytest.raises(FedStrataError, match="samples are to be held out for validation"):
        fedstrata.run(BUMPY, data=dataset)
    with pytest.raises(FedStrataError, match="a server of real sites does not have"):
        Deployment(BUMPY, ("a", "b", "c", "d"), Path("nowhere")).check()


AT_CLIENTS = BUMPY.with_changes({"validation": None, "validation_fraction": 0.2})


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_each_client_keeps_its_own_best_model(engine: str, tmp_path: Path) -> None:
    kept: list[dict[str, torch.Tensor]] = []
    result = fedstrata.run(
        AT_CLIENTS.with_changes({"method": "ditto", "engine": engine, "metrics": "f1"}),
        out=tmp_path / "run",
        callbacks=[lambda view: kept.append(clone(result_of(view)))],
    )
    driver = result.driver
    assert driver is not None
    data = driver.engine.evaluator.data
    judged = data.validation_at_clients
    for own, trained, whole in zip(judged, data.split.train, driver.split.train, strict=True):
        assert not set(own) & set(trained)
        assert {*own, *trained} == set(whole)
    rounds = result.summary["validated_rounds"]
    assert len(set(rounds)) > 1  # else this test would see nothing
    for client, chosen in enumerate(rounds):
        accuracy = [result.metrics.of_client(client, "client_validation.accuracy", number) for number in range(1, 6)]
        assert chosen == 1 + int(np.argmax(accuracy))
        model = result.client_model(client)
        for name, tensor in model.network.named_parameters():
            assert torch.equal(tensor, kept[chosen - 1][name][client])
        names = np.array(driver.dataset.class_names)[driver.dataset.labels[judged[client]]]
        found = (model.predict(driver.dataset.inputs[judged[client]]) == names).mean()
        assert found == pytest.approx(max(accuracy), abs=1e-12)
        assert model.card.origin["round"] == chosen
        assert model.card.metrics["accuracy"] == result.metrics.of_client(client, "client_after.accuracy", chosen)
        loaded = fedstrata.load(tmp_path / "run", client=client)
        assert loaded.card == model.card
        for final in (
            result.client_model(client, last=True),
            fedstrata.load(tmp_path / "run", client=client, last=True),
        ):
            assert final.card.origin["round"] == 5
            assert final.card.metrics["accuracy"] == result.metrics.of_client(client, "client_after.accuracy", 5)
            assert all(torch.equal(one, kept[-1][name][client]) for name, one in final.network.named_parameters())
        assert all(
            torch.equal(tensor, loaded.plain_state_dict()[name]) for name, tensor in model.plain_state_dict().items()
        )
    own = [result.metrics.of_client(client, "client_after.accuracy", chosen) for client, chosen in enumerate(rounds)]
    assert result.summary["validated"]["client_after.accuracy.mean"] == pytest.approx(np.mean(own))
    scores = [result.metrics.of_client(client, "client_after.f1", chosen) for client, chosen in enumerate(rounds)]
    assert result.summary["validated"]["client_after.f1.mean"] == pytest.approx(np.mean(scores))
    assert result.summary["validated"]["client_after.f1.worst10"] == pytest.approx(min(scores))
    [row] = comparison_rows([read_run(tmp_path / "run")])
    assert row.validated is not None
    assert row.validated.mean == pytest.approx(np.mean(own))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_clients_also_judge_what_they_have_just_trained(engine: str) -> None:
    """The models that would be merged, each alone on the samples that its client holds out."""
    found = {}

    def judge(view: RoundView) -> None:
        driver = view.models
        assert isinstance(driver, Driver)
        evaluator, trained = driver.engine.evaluator, driver.engine.models(range(4), view.round)
        found[view.round] = evaluator.pending_judgement(driver.engine.forward, trained, range(4))()

    result = fedstrata.run(AT_CLIENTS.with_changes({"method": "local", "engine": engine}), callbacks=[judge])
    assert sorted(found) == [1, 2, 3, 4, 5]
    for number, scores in found.items():
        for client in range(4):  # alone, what is trained is what is used afterwards
            for metric, values in (("accuracy", scores.accuracy), ("loss", scores.loss)):
                noted = result.metrics.of_client(client, f"client_before_validation.{metric}", number)
                assert noted == pytest.approx(values[client], rel=1e-6)
        values = result.metrics.of_round(number)
        assert values["client_before_validation.loss.mean"] == pytest.approx(scores.loss.mean(), rel=1e-6)
        assert values["client_before_validation.accuracy.mean"] == values["client_validation.accuracy.mean"]


def driver_of(result: fedstrata.Result) -> Driver:
    assert result.driver is not None
    return result.driver


def result_of(view: RoundView) -> dict[str, torch.Tensor]:
    """Take the models that all clients use after a round, as stacks."""
    driver = view.models
    assert isinstance(driver, Driver)
    return driver.engine.models(range(4), view.round)


def test_one_model_for_all_is_chosen_by_the_mean_over_clients() -> None:
    result = fedstrata.run(AT_CLIENTS)
    rounds, accuracy = result.metrics.series("client_validation.accuracy.mean")
    assert result.summary["validated_round"] == rounds[accuracy.argmax()] < 5
    assert result.global_model().card.origin["round"] == result.summary["validated_round"]
    chosen = result.metrics.of_round(result.summary["validated_round"])
    assert result.global_model().card.metrics["accuracy"] == chosen["global.accuracy"]
    final = result.global_model(last=True)
    assert final.card.metrics["accuracy"] == result.summary["final"]["global.accuracy"]
    tested = driver_of(result).engine.server.model
    assert all(torch.equal(one, tested[name]) for name, one in final.network.named_parameters())


@pytest.mark.parametrize("method", ["fedavg", "fedbn"])
def test_a_run_that_goes_on_keeps_the_same_models_of_clients(method: str, tmp_path: Path) -> None:
    experiment = AT_CLIENTS.with_changes({"method": method, "model": "cnn", "steps": 2})
    fedstrata.run(experiment, out=tmp_path / "whole")

    def stop(view: RoundView) -> None:
        if view.round == 4:
            raise Interrupted(2, 4, None)

    with pytest.raises(Interrupted):
        fedstrata.run(experiment, out=tmp_path / "parts", callbacks=[stop])
    fedstrata.resume(tmp_path / "parts")
    for name in ("clients.safetensors", "model.safetensors", "model.json", "metrics/rounds.parquet"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


def test_a_run_ends_when_nothing_gets_better(tmp_path: Path) -> None:
    experiment = BUMPY.with_changes({"patience": 2, "rounds": 30, "method": "fedavg"})
    result = fedstrata.run(experiment, out=tmp_path / "run")
    rounds, accuracy = result.metrics.series("validation.accuracy")
    best = int(accuracy.argmax())
    assert len(rounds) == best + 3 < 30
    assert result.summary["stopped"] == "no model was better on the validation samples for 2 evaluations in a row"
    assert result.summary["validated_round"] == best + 1
    assert RunFolder.open(tmp_path / "run").finished
    for wrong, sentence in {
        "patience": "waits for better models on validation samples, and there are none",
        "both": "give one of them",
    }.items():
        changes = {"validation": None} if wrong == "patience" else {"validation_fraction": 0.1}
        with pytest.raises(FedStrataError, match=sentence):
            fedstrata.run(experiment.with_changes(changes))


ADAPTED = AT_CLIENTS.with_changes({"method": "fedbabu(epochs=1)", "metrics": "f1", "seed": 2})
"""In the end some clients' adapted models are better than those of all rounds, and some are not."""


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_client_keeps_its_adapted_model_where_that_is_better_than_those_of_all_rounds(
    engine: str, tmp_path: Path
) -> None:
    of_rounds: list[dict[str, torch.Tensor]] = []
    result = fedstrata.run(
        ADAPTED.with_changes({"engine": engine}),
        out=tmp_path / "run",
        callbacks=[lambda view: of_rounds.append(clone(result_of(view)))],
    )
    driver, metrics, summary = driver_of(result), result.metrics, result.summary
    assert driver.adapted is not None
    adapted = summary["validated_adapted"]
    assert set(adapted) == {True, False}  # else this test would see nothing
    judged = driver.engine.evaluator.data.validation_at_clients
    scores: dict[str, list[Any]] = {"accuracy": [], "loss": [], "f1": []}
    for client, (is_adapted, chosen) in enumerate(zip(adapted, summary["validated_rounds"], strict=True)):
        before = [metrics.of_client(client, "client_validation.accuracy", number) or 0.0 for number in range(1, 6)]
        after = metrics.of_client(client, "client_adapted_validation.accuracy") or 0.0
        assert is_adapted == (after > max(before))
        assert chosen == (5 if is_adapted else 1 + int(np.argmax(before)))
        models, label = (
            (driver.adapted.models, "client_adapted") if is_adapted else (of_rounds[chosen - 1], "client_after")
        )
        model = result.client_model(client)
        assert all(torch.equal(one, models[name][client]) for name, one in model.network.named_parameters())
        names = np.array(driver.dataset.class_names)[driver.dataset.labels[judged[client]]]
        found = (model.predict(driver.dataset.inputs[judged[client]]) == names).mean()
        assert found == pytest.approx(after if is_adapted else max(before), abs=1e-12)
        for metric, values in scores.items():
            values.append(metrics.of_client(client, f"{label}.{metric}", chosen))
        assert (model.card.origin["round"], model.card.metrics["accuracy"]) == (chosen, scores["accuracy"][-1])
        assert fedstrata.load(tmp_path / "run", client=client).card == model.card
        last = fedstrata.load(tmp_path / "run", client=client, last=True)
        assert last.card.metrics["accuracy"] == metrics.of_client(client, "client_adapted.accuracy", 5)
        assert all(
            torch.equal(one, driver.adapted.models[name][client]) for name, one in last.network.named_parameters()
        )
    for metric, values in scores.items():
        assert summary["validated"][f"client_adapted.{metric}.mean"] == pytest.approx(np.mean(values))
    [row] = comparison_rows([read_run(tmp_path / "run")])
    assert row.validated is not None
    assert row.validated.mean == pytest.approx(np.mean(scores["accuracy"]))


@pytest.mark.parametrize("validation_fraction", [None, 0.2])
def test_a_run_that_breaks_while_it_ends_ends_with_the_same_models(
    validation_fraction: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rounds are saved, and their numbers; what clients made of their models after the last is not."""
    experiment = ADAPTED.with_changes({"validation_fraction": validation_fraction})
    fedstrata.run(experiment, out=tmp_path / "whole")
    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "finish", _without_space)
        with pytest.raises(OSError, match="no space"):
            fedstrata.run(experiment, out=tmp_path / "parts")
    fedstrata.resume(tmp_path / "parts")
    for name in ("clients.safetensors", "model.safetensors", "model.json", "metrics/rounds.parquet"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


def _without_space(*given: object) -> None:
    raise OSError("no space")


def test_no_global_model_is_chosen_where_clients_adapt_it_in_the_end() -> None:
    with pytest.raises(FedStrataError, match="with 'fedavg-ft' clients use models of their own"):
        fedstrata.run(BUMPY, method="fedavg-ft")
    with pytest.raises(FedStrataError, match=r"validation_fraction = 0\.2 is not offered on real sites"):
        Deployment(AT_CLIENTS, ("a", "b", "c", "d"), Path("nowhere")).check()
