from __future__ import annotations

from fedstrata.testing.world import prepare


def test_local_sends_nothing_and_everybody_differs():
    simulation = prepare("local")
    simulation.step()
    assert simulation.engine.server.model == {}
    heads = simulation.engine.clients().group("own")["head.weight"]
    assert len({tuple(row.flatten().tolist()) for row in heads}) == 5
    latest = simulation.metrics.latest()
    assert latest["client_before.accuracy.mean"] == latest["client_after.accuracy.mean"]
    assert "global.accuracy" not in latest
