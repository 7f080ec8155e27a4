"""The next round begins before the numbers of the one before are read: on a GPU, wherever nothing depends on them."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
import torch

from fedstrata.callbacks import Callback, StopRun
from fedstrata.errors import FedStrataWarning
from fedstrata.experiment import Experiment
from fedstrata.runs.driver import Driver
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.signals import Interrupted

EXPERIMENT = Experiment(
    clients=3, rounds=6, epochs=1, model="mlp", evaluate_every=4, engine="stacked", device="cpu", precision="fp64",
    partition="iid", batch_size=256, checkpoint_every=5,
)  # fmt: skip


class Told(Callback):
    """Notes in which order rounds begin and their numbers are told."""

    only_numbers = True

    def __init__(self, driver, monkeypatch):
        self.order = []
        begin = driver.begin_round

        def noted():
            self.order.append(f"begin {driver.round + 1}")
            return begin()

        monkeypatch.setattr(driver, "begin_round", noted)

    def on_round(self, view):
        self.order.append(f"told {view.round}")


class WithModels(Callback):
    """Looks at the model of each round."""

    def __init__(self):
        self.models = []

    def on_round(self, view):
        self.models.append(view.model)


def prepared(ahead, **changes):
    driver = Driver.prepare(replace(EXPERIMENT, **changes))
    driver.runs_ahead = ahead
    return driver


def in_folder(driver, path):
    return RunFolder.create(path, driver.experiment, driver.dataset, driver.split, driver.environment())


def test_the_numbers_of_a_round_are_told_while_the_next_is_under_way(tmp_path, monkeypatch):
    """Round 4 is tested, 5 is saved, and 6 is the last: what depends on their numbers waits for them."""
    driver = prepared(True)
    told = Told(driver, monkeypatch)
    with in_folder(driver, tmp_path / "run") as folder:
        driver.run(folder, [told])
    ahead = "begin 1, begin 2, told 1, begin 3, told 2, begin 4, told 3, told 4, begin 5, told 5, begin 6, told 6"
    assert told.order == ahead.split(", ")
    at_once = prepared(False)
    at_once.run()
    assert driver.metrics.to_tables() == at_once.metrics.to_tables()
    assert all(torch.equal(driver.model[name], tensor) for name, tensor in at_once.model.items())
    assert all(torch.equal(driver.reference[name], tensor) for name, tensor in at_once.reference.items())
    for numbers in (driver, at_once):
        assert numbers.timings.to_table()["round"].to_pylist() == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5, 6, 6, 6]


@pytest.mark.parametrize("changes", [{"schedule": "plateau"}, {"diagnose": "inertia"}, {"evaluate_every": 1}])
def test_nothing_runs_ahead_of_what_it_depends_on(changes, monkeypatch):
    driver = prepared(True, **changes)
    told = Told(driver, monkeypatch)
    driver.run(callbacks=[told])
    assert told.order == [f"{what} {number}" for number in range(1, 7) for what in ("begin", "told")]


@pytest.mark.parametrize(("ahead", "engine"), [(None, "stacked"), (True, "network")])
def test_on_a_cpu_and_on_real_sites_rounds_are_told_at_once(ahead, engine, monkeypatch):
    driver = prepared(ahead)
    driver.plan = replace(driver.plan, engine=engine)
    told = Told(driver, monkeypatch)
    driver.run(callbacks=[told])
    assert told.order[:4] == ["begin 1", "told 1", "begin 2", "told 2"]


def test_who_looks_at_models_sees_those_of_the_round():
    seen = []
    for ahead in (True, False):
        looking = WithModels()
        prepared(ahead).run(callbacks=[looking])
        seen.append(looking.models)
    for model, other in zip(*seen, strict=True):
        assert all(torch.equal(model[name], tensor) for name, tensor in other.items())
    first, second = seen[0][:2]
    assert not all(torch.equal(first[name], tensor) for name, tensor in second.items())


@pytest.mark.parametrize(("said", "rounds"), [(False, 2), (True, 3)])
def test_a_callback_ends_a_run_after_its_round_or_the_one_under_way(said, rounds, tmp_path):
    """The latter where it has said that it would not."""

    class Ending(Callback):
        only_numbers = said

        def on_round(self, view):
            if view.round == 2:
                raise StopRun("enough")

    driver = prepared(True)
    with in_folder(driver, tmp_path / "run") as folder:
        summary = driver.run(folder, [Ending()])
        assert folder.metrics().series("train.loss")[0].tolist() == list(range(1, rounds + 1))
    assert (summary["rounds"], summary["stopped"]) == (rounds, "enough")


def test_an_interrupted_run_has_the_numbers_of_all_its_rounds(tmp_path):
    """The signal comes while round 3 is under way and the numbers of round 2 are told."""

    class Interrupting(Callback):
        only_numbers = True

        def on_round(self, view):
            if view.round == 2:
                os.kill(os.getpid(), signal.SIGINT)

    broken, unbroken = prepared(True), prepared(False)
    unbroken.run()
    with in_folder(broken, tmp_path / "run") as folder:
        with pytest.raises(Interrupted), pytest.warns(FedStrataWarning, match="Stopping after this round"):
            broken.run(folder, [Interrupting()])
        assert broken.round == 3
        resumed = prepared(True)
        resumed.restore(folder)
        assert resumed.metrics.series("train.loss")[0].tolist() == [1, 2, 3]
        resumed.run(folder)
    assert resumed.metrics.to_tables() == unbroken.metrics.to_tables()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", ["fedavg", "lips(every=2)", "ssfl"])
def test_a_gpu_gives_the_same_bits_either_way(method):
    changes = {"device": "cuda", "precision": "fp32", "deterministic": True, "method": method, "model": "cnn"}
    drivers = [prepared(ahead, **changes) for ahead in (True, False)]
    for driver in drivers:
        driver.run()
    first, second = drivers
    assert first.metrics.to_tables() == second.metrics.to_tables()
    assert all(torch.equal(first.model[name], tensor) for name, tensor in second.model.items())
