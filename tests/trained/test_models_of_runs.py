"""The models that runs give: what they predict is what was reported, for every method, in memory and from files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedstrata
from fedstrata.data import datasets
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.methods import methods
from fedstrata.models import build_model
from fedstrata.runs import models
from fedstrata.trained.export import readme

SPLIT = "dirichlet(alpha=0.5, samples=60, test_samples=40)"
SMALL = {"clients": 3, "rounds": 2, "steps": 3, "model": "cnn", "partition": SPLIT, "seed": 3}
DIGITS = datasets.make("digits").load(None)


def accuracy(model: fedstrata.TrainedModel, positions: np.ndarray) -> float:
    """Test a model as anybody would: raw inputs in, names of classes out."""
    names = np.array(DIGITS.class_names)[DIGITS.labels[positions]]
    return float((model.predict(DIGITS.inputs[positions]) == names).mean())


def reported(result: fedstrata.Result, metric: str) -> list[float]:
    rows = result.metrics.to_tables()["clients"].to_pylist()
    return [row["value"] for row in rows if row["round"] == SMALL["rounds"] and row["metric"] == metric]


@pytest.mark.filterwarnings("ignore::fedstrata.FedStrataWarning")
@pytest.mark.parametrize("name", methods.names())
def test_clients_models_reach_what_the_headline_says(name: str, tmp_path: Path) -> None:
    """Whatever a method does to the models that clients use (personal, adapted, masked), they can be had."""
    model = "mlp(hidden=16)" if name == "fedala" else "cnn"  # which takes long on other models
    result = fedstrata.run(method=name, engine="stacked", out=tmp_path / "run", **{**SMALL, "model": model})
    numbers = reported(result, f"{result.summary['headline']}.accuracy")
    split = result.driver.engine.evaluator.data.split
    for client, number in enumerate(numbers):
        own, loaded = result.client_model(client), fedstrata.load(tmp_path / "run", client=client)
        assert accuracy(own, split.test[client]) == pytest.approx(number, abs=1e-9)
        inputs = DIGITS.inputs[split.test[client]]
        assert np.array_equal(own.predict_proba(inputs), loaded.predict_proba(inputs))
        assert loaded.card.metrics["accuracy"] == pytest.approx(number, abs=1e-9)
        assert loaded.card.origin["client"] == client


@pytest.mark.parametrize("name", ["fedbn", "ditto", "fedavg-ft", "fedpm"])
def test_both_engines_give_the_same_models(name: str) -> None:
    result = fedstrata.run(method=name, engine="stacked", precision="fp64", **SMALL)
    other = fedstrata.run(method=name, engine="loop", precision="fp64", **SMALL)
    for client in range(3):
        own, same = (one.client_model(client).plain_state_dict() for one in (result, other))
        for key, tensor in own.items():
            assert torch.allclose(tensor.double(), same[key].double(), atol=1e-9), key


def test_the_global_model_reaches_what_was_reported(tmp_path: Path) -> None:
    result = fedstrata.run(method="fedavg", out=tmp_path / "run", **SMALL)
    for model in (result.global_model(), fedstrata.load(tmp_path / "run")):
        assert accuracy(model, DIGITS.test) == pytest.approx(result.summary["final"]["global.accuracy"], abs=1e-9)
        assert model.card.metrics["accuracy"] == result.summary["final"]["global.accuracy"]


def test_a_saved_model_is_of_use_in_plain_pytorch(tmp_path: Path) -> None:
    """With the weights and the card alone: no constant is hidden."""
    result = fedstrata.run(method="fedavg", rounds=4, epochs=2, model="cnn", clients=2, partition="iid", seed=1)
    result.global_model().save(tmp_path / "saved")
    card = json.loads((tmp_path / "saved" / "model.json").read_text())
    network = build_model("cnn", (1, 8, 8), 10, seed=9)
    network.load_state_dict(load_file(tmp_path / "saved" / "model.safetensors"))
    inputs: Tensor = DIGITS.inputs[DIGITS.test].float()
    without = float((network.eval()(inputs).argmax(1) == DIGITS.labels[DIGITS.test]).float().mean())
    (normalise,) = card["preprocessing"]
    inputs = (inputs - torch.tensor(normalise["mean"])) / torch.tensor(normalise["deviation"])
    right = float((network(inputs).argmax(1) == DIGITS.labels[DIGITS.test]).float().mean())
    assert right == pytest.approx(result.summary["final"]["global.accuracy"], abs=1e-6)
    assert right > 0.9 > without
    assert [card["class_names"][number] for number in network(inputs).argmax(1)[:5]] == list(
        result.global_model().predict(DIGITS.inputs[DIGITS.test[:5]])
    )


def test_where_something_stays_at_clients_there_is_no_global_model(tmp_path: Path) -> None:
    result = fedstrata.run(method="fedbn", out=tmp_path / "run", **SMALL)
    told = set()
    for ask in (result.global_model, lambda: fedstrata.load(tmp_path / "run")):
        with pytest.raises(
            FedStrataError, match=r"With 'fedbn' there is no global model: .* stay at the clients"
        ) as no:
            ask()
        told.add(str(no.value))
    assert len(told) == 1
    assert told.pop().endswith("--client 0, or client=0 in Python.")
    with pytest.raises(FedStrataError, match="There is no client 3; the run has 3, from 0 to 2"):
        result.client_model(3)
    with pytest.raises(FedStrataError, match="There is no client 3"):
        fedstrata.load(tmp_path / "run", client=3)


def test_a_client_is_asked_for_by_its_number(tmp_path: Path) -> None:
    result = fedstrata.run(method="fedbn", out=tmp_path / "run", **SMALL)
    read = dataclasses.replace(result, driver=None)
    for wrong in (None, 1.0, True):
        for one in (result, read):
            with pytest.raises(
                FedStrataError, match=f"{wrong!r} is no number or name of a client; the run has 3, from"
            ):
                one.client_model(wrong)  # type: ignore[arg-type]
    for one in (result, read):
        with pytest.raises(FedStrataError, match="There is no client 'north'; the run has 3, from 0 to 2"):
            one.client_model("north")
    with pytest.raises(FedStrataError, match="There is no client 'north'"):
        fedstrata.load(tmp_path / "run", client="north")
    for one in (result, read):
        assert one.client_model(np.int64(1)).card == result.client_model(1).card  # type: ignore[arg-type]


def test_the_card_of_a_site_has_its_name(tmp_path: Path) -> None:
    hospitals = {name: (torch.randn(20, 4), [0, 1] * 10) for name in ("north", "south")}
    result = fedstrata.run(data=hospitals, model="mlp", method="ditto", rounds=1, epochs=1, out=tmp_path / "run")
    loaded = fedstrata.load(tmp_path / "run", client="south")
    for model in (result.client_model("south"), loaded):
        assert (model.card.origin["client"], model.card.origin["site"]) == (1, "south")
        assert " of client 1 (south))" in repr(model)
    assert "| site | south |" in readme(loaded.card)
    with pytest.warns(FedStrataWarning):
        assert "site" not in result.global_model().card.origin


def test_clients_files_hold_only_what_differs(tmp_path: Path) -> None:
    fedstrata.run(method="fedbn", out=tmp_path / "fedbn", **SMALL)
    fedstrata.run(method="fedavg", out=tmp_path / "fedavg", **SMALL)
    own = load_file(tmp_path / "fedbn" / "clients.safetensors")
    assert own
    assert all(len(stack) == 3 for stack in own.values())
    assert not set(own) & set(load_file(tmp_path / "fedbn" / "model.safetensors"))
    assert load_file(tmp_path / "fedavg" / "clients.safetensors") == {}


class Net(nn.Module):
    """A network of somebody's own, with a tied weight and a buffer that is in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.last = nn.Linear(64, 10)
        self.register_buffer("shift", torch.tensor(0.5), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.first(inputs.flatten(1)))
        return self.last(torch.relu(self.second(hidden)) + self.shift)


def test_a_network_of_ones_own_is_given_again(tmp_path: Path) -> None:
    result = fedstrata.run(method="ditto", out=tmp_path / "run", **{**SMALL, "model": Net})
    with pytest.raises(FedStrataError, match=r"The network 'Net' was made in Python .* network=Net\(...\)"):
        fedstrata.load(tmp_path / "run", client=0)
    with pytest.raises(FedStrataError, match=r"lack the tensor '1\.weight' of the network 'Sequential'"):
        fedstrata.load(tmp_path / "run", client=0, network=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    loaded = fedstrata.load(tmp_path / "run", client=0, network=Net)
    inputs = DIGITS.inputs[:50]
    assert np.array_equal(loaded.predict_proba(inputs), result.client_model(0).predict_proba(inputs))
    saved = fedstrata.load(loaded.save(tmp_path / "saved"), network=Net)
    assert np.array_equal(loaded.predict_proba(inputs), saved.predict_proba(inputs))
    Net().load_state_dict(load_file(tmp_path / "saved" / "model.safetensors"))


def test_damaged_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    model = fedstrata.run(method="fedavg", **SMALL).global_model()
    folder = model.save(tmp_path / "saved")
    assert "TrainedModel(cnn, inputs [1, 8, 8] of float32, 10 classes, by fedavg)" in repr(model)
    with pytest.raises(FedStrataError, match="is not the folder of a run"):
        fedstrata.load(folder, client=1)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1] + b"\1")
    with pytest.raises(FedStrataError, match="its SHA-256 differs"):
        fedstrata.load(folder)
    with pytest.raises(FedStrataError, match=r"holds no model\.json"):
        fedstrata.load(tmp_path)


def test_the_model_that_is_given_does_not_change(tmp_path: Path) -> None:
    """Two models of one run are independent of each other, and of the run."""
    result = fedstrata.run(method="fedbn", **SMALL)
    first = result.client_model(0)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    assert float(next(result.client_model(0).parameters()).detach().abs().sum()) > 0


def test_clients_who_use_the_shared_model_stand_beside_those_who_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """With pFedSD, clients that have not trained yet use what the server sends; they are gathered one by one here."""
    monkeypatch.setattr(models, "_CLIENTS_AT_ONCE", 1)
    changes = {**SMALL, "clients": 4, "rounds": 1, "participation": 0.5}
    driver = fedstrata.run(method="pfedsd", engine="stacked", **changes).driver
    own, shared = models.models_of_clients(driver), driver.model
    assert own
    differing = []
    for client in range(4):
        used = driver.used([client])
        assert all(torch.equal(stack[client], used[name][0]) for name, stack in own.items())
        differing.append(not all(torch.equal(used[name][0], tensor) for name, tensor in shared.items()))
    assert sorted(differing) == [False, False, True, True]
