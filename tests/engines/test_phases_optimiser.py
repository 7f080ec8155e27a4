"""A phase of local training may bring its own optimiser."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from fedstrata.errors import FedStrataWarning
from fedstrata.methods import Facts, Method, Part, Phase, Touches
from fedstrata.optimisers import Adam
from fedstrata.spec import parameter
from fedstrata.testing.world import prepare


@dataclass(frozen=True)
class OwnOptimiser(Part):
    """Train with an optimiser of its own."""

    name: ClassVar[str] = "own-optimiser"
    facts: ClassVar[Facts] = Facts("averaging", "made up for a test")
    touches: ClassVar[Touches] = Touches()
    kept: bool = parameter(False, "Keep its state.")

    def phases(self, clients):
        return (Phase(optimiser=Adam(0.01, keep=self.kept)),)

    def remarks(self, server):
        yield f"Round {server.round} was the last."


def model_after(method, **changes):
    driver = prepare(Method.make(method), "loop", rounds=2, **changes)
    driver.run()
    return driver


@pytest.mark.parametrize("schedule", ["constant", "exponential:0.5"])
@pytest.mark.parametrize("kept", [False, True])
def test_it_takes_the_place_of_the_experiments(kept, schedule):
    with pytest.warns(FedStrataWarning, match="Round 2 was the last"):
        own = model_after(OwnOptimiser(kept), optimiser="sgd(learning_rate=0.3)", schedule=schedule)
    keep = "true" if kept else "false"
    given = model_after("fedavg", optimiser=f"adam(learning_rate=0.01, keep={keep})", schedule=schedule)
    for name, tensor in given.engine.server.model.items():
        assert torch.equal(own.engine.server.model[name], tensor), name


def test_hooks_see_the_experiments_learning_rate():
    seen = []

    @dataclass(frozen=True)
    class Looking(OwnOptimiser):
        name: ClassVar[str] = "looking"

        def project(self, clients, step, parameters):
            seen.append(float(step.learning_rate))
            return parameters, clients.memory

    with pytest.warns(FedStrataWarning):
        model_after(Looking(), optimiser="sgd(learning_rate=0.3)", schedule="exponential:0.5")
    assert set(seen) == {0.3, 0.15}
