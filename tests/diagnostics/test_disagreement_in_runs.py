"""In real runs, diagnostics agree with what methods tell of themselves, and with the papers."""

from __future__ import annotations

import pytest

from fedstrata.experiment import Experiment
from fedstrata.runs.driver import Driver
from fedstrata.studies import mask_errors

EXPERIMENT = Experiment(
    data="digits", clients=4, rounds=2, epochs=1, model="mlp", evaluate_every=9, engine="loop", device="cpu",
    precision="fp64", batch_size=256,
)  # fmt: skip


def told(method, diagnose, **changes):
    """Run a method; return what stands in the table of layers, in that of rounds, and in that of diagnostics."""
    driver = Driver.prepare(EXPERIMENT.with_changes({"method": method, "diagnose": diagnose, **changes}))
    driver.run()
    tables = driver.metrics.to_tables()
    layers = {(row["round"], row["metric"], row["layer"]): row["value"] for row in tables["layers"].to_pylist()}
    rounds = {(row["round"], row["metric"]): row["value"] for row in tables["rounds"].to_pylist()}
    return layers, rounds, tables["diagnostics"].to_pylist() if "diagnostics" in tables else []


def of(layers, metric):
    return {(round, layer): value for (round, name, layer), value in layers.items() if name == metric}


def test_what_lws_would_do_is_what_lws_does():
    layers, _, _ = told("lws(beta=0.2)", "shrinking(beta=0.2)")
    for number in ("gamma", "tau", "r"):
        assert of(layers, f"shrinking.{number}") == pytest.approx(of(layers, number))
    assert of(layers, "shrinking.applied") == pytest.approx(of(layers, "gamma"))
    assert of(layers, "shrinking.ratio") == pytest.approx(of(layers, "r"))


@pytest.mark.slow
def test_plain_averaging_neither_shrinks_nor_grows():
    layers, _, _ = told("fedavg", "shrinking", rounds=1)
    assert list(of(layers, "shrinking.applied").values()) == pytest.approx([1.0] * 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "nearly"),
    [("subfedavg", 0), ("dispfl", 0), ("random-k", 0), ("sparse-ft", 0), ("flash-jmwst", 0.01), ("fedpm", 0.01)],
)
def test_masks_are_as_dense_as_their_method_says(method, nearly):
    """Some tell the density of a mask that the server has made of the clients'."""
    layers, _, _ = told(method, "masks")
    densities = of(layers, "masks.density")
    assert densities == pytest.approx(of(layers, "density"), rel=nearly or None)
    assert densities


def test_one_mask_for_all_is_shared_whole_and_does_not_move():
    layers, rounds, rows = told("ssfl(sparsity=0.7)", "masks")
    assert of(layers, "masks.density") == pytest.approx(of(layers, "density"))
    assert {*of(layers, "masks.jaccard").values(), *of(layers, "masks.steady").values()} == {1}
    assert rounds[2, "masks.moved"] == 0
    assert {row["value"] for row in rows if row["metric"] == "masks.jaccard"} == {1}


@pytest.mark.slow
def test_masks_of_their_own_differ_and_move():
    layers, rounds, _ = told("dispfl", "masks", rounds=3)
    assert 0 < rounds[1, "masks.jaccard"] < 1
    assert all(0 < value < 1 for (round, _), value in of(layers, "masks.steady").items() if round == 2 and value < 1)
    assert rounds[2, "masks.moved"] > 0


def test_the_error_against_the_oracle_is_that_of_the_study():
    _, rounds, _ = told("ssfl(sparsity=0.8, batch_size=5)", "oracle(batch_size=200)", rounds=1, clients=2)
    study = mask_errors([2], EXPERIMENT.with_changes({"clients": 2}), sparsity=0.8, batch_size=5)
    assert rounds[1, "oracle.error"] == study[2]


@pytest.mark.parametrize(
    ("more", "returned"), [("", 1), pytest.param(", local_sparsity=round", 0, marks=pytest.mark.slow)]
)
def test_zeros_fall_where_lips_puts_them_and_come_back_unless_held(more, returned):
    """Half of what is left of tau0 = 0.6 after one of two rounds: 0.3 of the middle layers, and nothing elsewhere."""
    layers, _, _ = told(f"transient(tau0=0.6, every=1{more})", "zeros", model="cnn")
    driver = Driver.prepare(EXPERIMENT.with_changes({"model": "cnn"}))
    fell, came_back = of(layers, "zeros.fell"), of(layers, "zeros.returned")
    for layer in driver.setting.layers.weighted:
        assert fell[1, layer.name] == 0
        middle = layer.role == "middle"
        assert fell[2, layer.name] == pytest.approx(0.3 if middle else 0, abs=0.01)
        if middle:
            assert came_back[2, layer.name] == pytest.approx(returned, abs=0.01)


def test_histograms_stand_under_no_client_and_add_up_to_one():
    _, _, rows = told("fedavg", "weights(bins=8)", rounds=1)
    assert {row["client"] for row in rows} == {-1}
    for metric, bins in (("weights.merged", 8), ("weights.clients", 8), ("weights.edges", 9)):
        own = [row for row in rows if row["metric"] == metric and row["layer"] == "head"]
        assert [row["other"] for row in own] == list(range(bins))
        assert metric == "weights.edges" or sum(row["value"] for row in own) == pytest.approx(1)


@pytest.mark.slow
def test_data_that_differ_make_updates_that_differ():
    """FedLWS, Fig. 5: clients of few classes move as those with the same classes do."""
    for diagnostic in ("distance", "transport"):
        _, rounds, _ = told("fedavg", diagnostic, clients=12, partition="classes:2", rounds=1, epochs=2, batch_size=32)
        assert rounds[1, f"{diagnostic}.correlation"] > 0.5
