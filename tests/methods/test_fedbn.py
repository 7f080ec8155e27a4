from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from torch import nn
from watching import outlined

import fedstrata
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.layers import LayerMap
from fedstrata.methods import Facts, Matter, Method, Part, Touches, methods
from fedstrata.testing.world import TinyNet, prepare


def test_fedbn_keeps_every_norm_personal_also_in_the_shortcut():
    simulation = prepare("fedbn")
    expected = {
        f"{layer}.{name}"
        for layer in ("scale", "shortcut.1")
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    assert simulation.setting.personal == expected
    simulation.step()
    weights = simulation.engine.clients().group("own")["shortcut.1.weight"]
    assert len({tuple(row) for row in weights.tolist()}) == 5
    assert not expected & simulation.engine.server.model.keys()


def test_fedbn_without_norms_says_that_it_is_fedavg():
    with pytest.warns(FedStrataWarning, match="no normalisation layers, so 'fedbn' does exactly what 'fedavg' does"):
        fedstrata.run(model="mlp", method="fedbn", clients=3, rounds=1, epochs=1, engine="loop")


def test_the_stacked_model_has_a_norm_that_no_name_gives_away():
    assert not any("bn" in name or "norm" in name for name, _ in TinyNet().named_parameters())


def test_fedbn_with_local_biases_keeps_something_also_without_norms():
    layers = LayerMap.read(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False)), (2,))
    assert list(methods.make("fedbn(biases=local)").notes(outlined(layers))) == []
    assert list(methods.make("fedbn(biases=local)").keeps(layers).personal) == ["0.bias"]
    [note] = methods.make("fedbn").notes(outlined(layers))
    assert "exactly what 'fedavg' does" in note


def test_fedbn_is_refused_beside_what_works_on_shared_norms():
    @dataclass(frozen=True)
    class MeanOfNorms(Part):
        name: ClassVar[str] = "mean-of-norms"
        facts: ClassVar[Facts] = Facts("test", "none")
        touches: ClassVar[Touches] = Touches(relies_on=(Matter.SHARED_NORMS,))

    with pytest.raises(FedStrataError, match="works on norm layers that clients share"):
        Method("both", (methods.make("fedbn"), MeanOfNorms()))
