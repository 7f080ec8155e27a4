from __future__ import annotations

from fedstrata.methods import Phase, methods
from fedstrata.testing.world import prepare


def test_the_whole_model_is_fine_tuned_for_as_many_epochs_as_asked():
    assert methods.make("fedavg-ft(epochs=7)").adaptation() == Phase(epochs=7)
    assert methods.make("fedavg-ft").adaptation() == Phase()


def test_fine_tuning_is_reported_under_its_own_name_and_leaves_the_model_alone():
    tuned, plain = prepare("fedavg-ft"), prepare("fedavg")
    for simulation in (tuned, plain):
        for _ in range(3):
            simulation.step()
    left, right = tuned.metrics.latest(), plain.metrics.latest()
    assert left["client_adapted.loss.mean"] != left["client_after.loss.mean"]
    assert left["client_after.loss.mean"] == right["client_after.loss.mean"]
    assert "client_adapted.loss.mean" not in right
    assert tuned.summary()["headline"] == "client_adapted"
