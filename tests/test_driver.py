"""What a run measures of the layers, and that it survives an interruption."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fedstrata
from fedstrata.diagnostics import layer_changes, layer_cosines, layer_updates
from fedstrata.errors import FedStrataWarning
from fedstrata.experiment import Experiment
from fedstrata.layers import LayerMap
from fedstrata.runs import pacing
from fedstrata.runs.describing import describe_environment
from fedstrata.runs.driver import Driver
from fedstrata.runs.folder import RunFolder

LAYERS = LayerMap.read(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1, bias=False)), (2,))
EXPERIMENT = Experiment(
    clients=3, rounds=5, epochs=1, model="mlp", evaluate_every=9, engine="loop", device="cpu", precision="fp64",
    partition="iid", batch_size=256,
)  # fmt: skip


def model(first, bias, norm, last):
    """Make the parameters and buffers of the small model."""
    return {
        "0.weight": torch.tensor(first),
        "0.bias": torch.tensor(bias),
        "1.weight": torch.tensor(norm),
        "1.bias": torch.zeros(2),
        "1.running_mean": torch.tensor([1e9, 1e9]),
        "1.running_var": torch.ones(2),
        "1.num_batches_tracked": torch.tensor(1),
        "2.weight": torch.tensor(last),
    }


BEFORE = model([[3.0, 0.0], [0.0, 0.0]], [4.0, 0.0], [0.0, 0.0], [[1.0, 1.0]])
AFTER = model([[3.0, 0.0], [0.0, 1.0]], [4.0, 2.0], [3.0, 4.0], [[1.0, 0.0]])


def layer_values(driver, metric):
    rows = driver.metrics.to_tables()["layers"].to_pylist()
    return {(row["round"], row["layer"]): row["value"] for row in rows if row["metric"] == metric}


def test_updates_are_relative_lengths_over_a_layers_parameters():
    """Layer 0: (1, 2) against (3, 4); the norm began at zero; layer 2: 1 against sqrt 2; running statistics play no
    part."""
    updates = layer_updates(LAYERS, BEFORE, AFTER)
    assert updates["0"] == pytest.approx(math.sqrt(5) / 5)
    assert updates["1"] == pytest.approx(5 / 1e-12)
    assert updates["2"] == pytest.approx(1 / math.sqrt(2))
    assert layer_updates(LAYERS, BEFORE, BEFORE) == {"0": 0, "1": 0, "2": 0}


def test_updates_count_only_what_is_shared():
    shared = {name: AFTER[name] for name in ("0.bias", "2.weight")}
    assert layer_updates(LAYERS, BEFORE, shared) == pytest.approx({"0": 2 / 4, "2": 1 / math.sqrt(2)})
    assert layer_updates(LAYERS, BEFORE, {}) == {}


def test_cosines_are_those_of_the_weights_without_biases_and_norms():
    cosines = layer_cosines(LAYERS, BEFORE, AFTER)
    assert cosines == pytest.approx({"0": 3 / math.sqrt(10), "2": 1 / math.sqrt(2)})
    assert layer_cosines(LAYERS, BEFORE, BEFORE) == pytest.approx({"0": 1, "2": 1})
    turned = {**AFTER, "2.weight": torch.tensor([[-2.0, -2.0]])}
    assert layer_cosines(LAYERS, BEFORE, turned)["2"] == pytest.approx(-1)
    assert layer_cosines(LAYERS, {}, AFTER) == layer_cosines(LAYERS, BEFORE, {}) == {}


def test_both_are_measured_at_once_and_a_cosine_only_with_a_reference():
    updates, cosines = layer_updates(LAYERS, BEFORE, AFTER), layer_cosines(LAYERS, AFTER, AFTER)
    assert layer_changes(LAYERS, BEFORE, AFTER, AFTER) == {"update": updates, "cosine": cosines}
    assert layer_changes(LAYERS, BEFORE, AFTER, {}) == {"update": updates}
    assert layer_changes(LAYERS, BEFORE, {}, AFTER) == {"update": {}, "cosine": {}}


def test_the_cosine_of_a_layer_with_several_weights_is_that_of_all_of_them():
    layers = LayerMap.read(nn.LSTM(1, 1), (3, 1))
    then, now = (
        {f"{name}_l0": torch.tensor(value) for name, value in values.items()}
        for values in (
            {"weight_ih": [3.0, 0.0], "weight_hh": [0.0, 4.0], "bias_ih": [1.0]},
            {"weight_ih": [0.0, 3.0], "weight_hh": [0.0, 4.0], "bias_ih": [9.0]},
        )
    )
    assert list(layer_cosines(layers, then, now).values()) == pytest.approx([16 / 25])


def test_a_layer_that_diverged_says_nothing_of_the_others():
    broken = {**AFTER, "0.weight": torch.full((2, 2), math.nan)}
    changes = layer_changes(LAYERS, BEFORE, broken, BEFORE)
    assert math.isnan(changes["update"]["0"])
    assert math.isnan(changes["cosine"]["0"])
    assert changes["update"]["2"] == layer_updates(LAYERS, BEFORE, AFTER)["2"]
    assert changes["cosine"]["2"] == layer_cosines(LAYERS, BEFORE, AFTER)["2"]


def test_cosines_of_large_layers_that_hardly_moved_are_as_exact_as_in_double_precision():
    generator = torch.Generator().manual_seed(0)
    then = {"2.weight": torch.randn(1, 10**5, generator=generator)}
    now = {"2.weight": then["2.weight"] + 1e-3 * torch.randn(1, 10**5, generator=generator)}
    wide = [tensors["2.weight"].double().flatten() for tensors in (then, now)]
    [cosine] = layer_cosines(LAYERS, then, now).values()
    assert 1 - cosine == pytest.approx(1 - torch.nn.functional.cosine_similarity(*wide, dim=0).item(), rel=1e-6)


def test_a_run_measures_from_the_reference_round_on():
    driver = Driver.prepare(EXPERIMENT.with_changes({"rounds": 4, "reference_round": 2}))
    models = []
    for _ in range(4):
        driver.step()
        models.append({name: tensor.clone() for name, tensor in driver.engine.server.model.items()})
    cosines = layer_values(driver, "cosine")
    assert {round for round, _ in cosines} == {2, 3, 4}
    for layer in driver.setting.layers.weighted:
        then, now = (models[round - 1][layer.weight].flatten() for round in (2, 4))
        assert cosines[2, layer.name] == pytest.approx(1)
        assert cosines[4, layer.name] == pytest.approx(float(then @ now / (then.norm() * now.norm())), abs=1e-12)
        assert cosines[4, layer.name] < 1
    updates = layer_values(driver, "update")
    assert {round for round, _ in updates} == {1, 2, 3, 4}
    head = driver.setting.layers.weighted[-1]
    moved = [torch.cat([one[name].flatten() for name in head.parameters]) for one in models[2:]]
    assert updates[4, head.name] == pytest.approx(float((moved[1] - moved[0]).norm() / moved[0].norm()))


def test_what_is_personal_is_not_measured():
    driver = Driver.prepare(EXPERIMENT.with_changes({"rounds": 2, "method": "local"}))
    driver.step()
    driver.step()
    assert layer_values(driver, "update") == layer_values(driver, "cosine") == {}


@pytest.fixture(scope="module")
def unbroken():
    driver = Driver.prepare(EXPERIMENT)
    for _ in range(5):
        driver.step()
    return driver


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_the_reference_survives_an_interruption(unbroken, tmp_path, stop):
    broken = Driver.prepare(EXPERIMENT)
    for _ in range(stop):
        broken.step()
    with RunFolder.create(tmp_path / "run", broken.experiment, broken.dataset, broken.split, {}) as folder:
        broken.save(folder)
        resumed = Driver.prepare(EXPERIMENT)
        resumed.restore(folder)
    assert bool(resumed.reference) == (stop >= 2)
    for _ in range(5 - stop):
        resumed.step()
    assert resumed.metrics.to_tables() == unbroken.metrics.to_tables()
    assert all(torch.equal(resumed.reference[name], tensor) for name, tensor in unbroken.reference.items())


def test_a_run_without_a_reference_round_has_no_cosines():
    with pytest.warns(FedStrataWarning, match="The reference_round 3 does not come in 2 rounds.* choose one of 1 to 2"):
        result = fedstrata.run(EXPERIMENT, rounds=2, reference_round=3)
    metrics = set(result.metrics.to_tables()["layers"]["metric"].to_pylist())
    assert metrics == {"update"}


def test_a_run_over_real_sites_is_not_continued_as_a_simulation(tmp_path):
    driver = Driver.prepare(EXPERIMENT)
    environment = describe_environment("cpu", {"engine": "network", "chunk": 1})
    with RunFolder.create(tmp_path / "run", driver.experiment, driver.dataset, driver.split, environment) as folder:
        driver.step()
        driver.save(folder)
    with pytest.raises(fedstrata.FedStrataError, match="fedstrata server"):
        fedstrata.resume(tmp_path / "run")


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_where_nothing_travels_no_bytes_are_counted(engine):
    summary = fedstrata.run(EXPERIMENT, rounds=1, engine=engine, method="local").summary
    assert (summary["bytes_up"], summary["bytes_down"]) == (0, 0)


@pytest.mark.parametrize(
    ("share", "speed", "saved"),
    [(0.0, math.inf, [10, 21]), (1e9, math.inf, [10, 20, 21]), (0.05, 1.0, [21])],
    ids=["slow", "quick", "large"],
)
def test_checkpoints_that_take_too_long_are_written_less_often(share, speed, saved, monkeypatch, tmp_path):
    """Also the first one, where its size tells that it would."""
    monkeypatch.setattr(pacing, "SHARE", share)
    monkeypatch.setattr(pacing, "BYTES_PER_SECOND", speed)
    rounds, save = [], Driver.save
    monkeypatch.setattr(Driver, "save", lambda driver, folder: (rounds.append(driver.round), save(driver, folder)))
    fedstrata.run(EXPERIMENT, rounds=21, evaluate_every=99, out=tmp_path / "run")
    assert rounds == saved


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_models_just_trained_are_not_tested_where_that_is_not_asked_for(engine):
    """All other numbers stay, and so do those of clients; time is what is gained."""
    changes = {"engine": engine, "evaluate_every": 2, "validation_fraction": 0.2}
    drivers = [
        Driver.prepare(EXPERIMENT.with_changes({**changes, "evaluate_trained": asked})) for asked in (True, False)
    ]
    for driver in drivers:
        driver.run()
    with_them, without = (driver.metrics.of_round(4) for driver in drivers)
    gone = {name for name in with_them if name.startswith("client_before")}
    assert {name.split(".")[0] for name in gone} == {"client_before", "client_before_validation"}
    assert without == {name: value for name, value in with_them.items() if name not in gone}
    of_clients = [
        {row["metric"].split(".")[0] for row in driver.metrics.to_tables()["clients"].to_pylist()} for driver in drivers
    ]
    assert of_clients[0] - of_clients[1] == {"client_before", "client_before_validation"}


def test_clients_that_no_accuracy_is_of_are_told():
    """Three samples of three classes leave none to test on, and the mean is over the two others."""
    sizes = {"north": 60, "south": 60, "tiny": 3}
    data = {name: (torch.randn(size, 4), torch.arange(size) % 3) for name, size in sizes.items()}
    with pytest.warns(FedStrataWarning, match=r"Clients without test samples: 2 \(1 of 3\)"):
        result = fedstrata.run(data=data, model="mlp", rounds=1, epochs=1, device="cpu")
    tested = {row["client"] for row in result.metrics.to_tables()["clients"].to_pylist()}
    assert tested == {0, 1}
