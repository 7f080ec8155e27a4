from __future__ import annotations

import pytest
import torch
from watching import assert_same_bits, run, watched

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods import methods
from fedstrata.testing.world import TinyNet, prepare

LAYERS = LayerMap.read(TinyNet(), (1, 8, 8))
HEAD = {"head.weight", "head.bias"}
BYTES_OF_THE_HEAD = 90 * 8


def moved(before, after):
    return {name for name in LAYERS.parameter_names if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize(
    ("count", "more"),
    [
        (1, set()),
        (2, {"hidden.weight", "hidden.bias"}),
        (
            3,
            {"hidden.weight", "hidden.bias", "shortcut.0.weight"}
            | {f"shortcut.1.{x}" for x in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")},
        ),
    ],
)
def test_the_head_is_the_last_layers_with_their_norms(count, more):
    assert set(methods.make(f"fedper(head_layers={count})").keeps(LAYERS).personal) == HEAD | more


@pytest.mark.parametrize("name", ["fedper", "fedrep", "fedbabu"])
def test_a_head_without_a_body_is_refused(name):
    with pytest.raises(
        FedStrataError, match=rf"'{name}' was given head_layers=5, but the model has 5 layers with weights"
    ):
        prepare(f"{name}(head_layers=5)")


def test_fedper_shares_the_body_and_keeps_heads():
    simulation, fedavg = run("fedper", rounds=2), run("fedavg", rounds=2)
    assert not HEAD & simulation.engine.server.model.keys()
    heads = simulation.engine.clients().group("own")
    assert heads.keys() == HEAD
    assert len({tuple(head.flatten().tolist()) for head in heads["head.weight"]}) == 5
    ours, theirs = simulation.metrics.latest(), fedavg.metrics.latest()
    for direction in ("bytes.up", "bytes.down"):
        assert theirs[direction] - ours[direction] >= 5 * BYTES_OF_THE_HEAD


def test_fedper_trains_body_and_head_together():
    method, seen = watched("fedper")
    run(method, rounds=1)
    assert moved(seen.start[1, 0], seen.steps[1, 0][0]) >= HEAD | {"stem.weight", "hidden.weight"}


def test_personal_heads_are_the_same_bits_after_a_round_without_the_client():
    simulation = run("fedper", rounds=2, participation=0.4)
    before = {name: tensor.clone() for name, tensor in simulation.engine.clients().group("own").items()}
    simulation.engine.round(3, [1], evaluate=False)
    after = simulation.engine.clients().group("own")
    others = torch.tensor([0, 2, 3, 4])
    assert_same_bits(*({name: state[name][others] for name in HEAD} for state in (before, after)))
    assert not torch.equal(before["head.weight"][1], after["head.weight"][1])
