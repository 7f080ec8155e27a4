from __future__ import annotations

import torch
from watching import BOTH_ENGINES, run, watched


@BOTH_ENGINES
def test_the_mean_of_all_models_is_tested_and_fine_tuned_after_the_last_round(engine):
    method, seen = watched("d-psgd-ft(neighbours=1)")
    simulation = run(method, engine, rounds=2)
    message = simulation.engine.side.broadcast(simulation.engine.server, range(5), 3)
    assert not any(name.startswith("peers/") for name in message.tensors)
    for name in ("head.weight", "scale.running_mean"):
        mean = torch.stack([seen.trained[2, client][name] for client in range(5)]).mean(0)
        assert torch.allclose(message.tensors[name][0], mean, rtol=0, atol=1e-12)
    assert "client_adapted.accuracy.mean" in simulation.metrics.latest()
    plain = run("d-psgd(neighbours=1)", engine, rounds=2)
    assert "client_adapted.accuracy.mean" not in plain.metrics.latest()
    assert plain.metrics.latest()["client_after.loss.mean"] != simulation.metrics.latest()["client_after.loss.mean"]
    assert plain.metrics.latest()["client_before.loss.mean"] == simulation.metrics.latest()["client_before.loss.mean"]


def test_fine_tuning_lasts_as_long_as_asked():
    losses = [run(f"d-psgd-ft(epochs={epochs})").metrics.latest()["client_adapted.loss.mean"] for epochs in (1, 3)]
    assert losses[0] != losses[1]
