"""What a run on a network merged, done again by the loop engine."""

from __future__ import annotations

from typing import Any

import torch
from small_world import simulated

from fedstrata.engines.loop import LoopEngine
from fedstrata.engines.server import ServerSide
from fedstrata.runs.driver import Driver
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.preparing import Ingredients


def merged_sites(folder: RunFolder) -> dict[int, list[int]]:
    """Tell whose replies were merged in each round."""
    table = folder.metrics().to_tables()["clients"].to_pylist()
    rounds: dict[int, list[int]] = {}
    for row in table:
        if row["metric"] == "client_before.accuracy":
            rounds.setdefault(row["round"], []).append(row["client"])
    return rounds


class Chosen(ServerSide):
    """Chooses the participants that a run on a network really had."""

    rounds: dict[int, list[int]]

    def select(self, participation: float, round: int) -> tuple[int, ...]:
        return tuple(self.rounds[round])


def with_participants(simulation: Driver, rounds: dict[int, list[int]]) -> None:
    """Let a simulation choose these participants in each round."""
    assert isinstance(simulation.engine, LoopEngine)
    side = simulation.engine.side
    chosen = Chosen(side.setting, side.declared, side.proxy)
    object.__setattr__(chosen, "rounds", rounds)
    simulation.engine.central.side = chosen


def replayed(
    rounds: dict[int, list[int]], method: str = "fedavg", own: Ingredients | None = None, **changes: Any
) -> Driver:
    """Run the loop engine with the same participants in each round."""
    simulation = simulated(method, own, rounds=len(rounds), **changes)
    with_participants(simulation, rounds)
    simulation.run()
    return simulation


def assert_same_model(folder: RunFolder, simulation: Driver) -> None:
    for name, tensor in folder.model().items():
        assert torch.equal(tensor, simulation.model[name]), name
