from __future__ import annotations

import pytest
import torch
from watching import assert_same_bits, layer_values, run

import fedstrata
from fedstrata.data import from_arrays
from fedstrata.engines.engine import pack
from fedstrata.errors import FedStrataError
from fedstrata.methods import Method


@pytest.mark.parametrize(
    ("name", "long"),
    [
        ("player-random", "player(random=true)"),
        ("player-random(threshold=1.5, batch_size=8)", "player(random=true, threshold=1.5, batch_size=8)"),
        ("fedprox+player-random", "fedprox+player(random=true)"),
        ("player-random(preset=heart)", "player(random=true, preset=heart)"),
    ],
)
def test_it_is_a_name_for_player_with_a_random_prefix(name, long):
    assert Method.make(name).parts == Method.make(long).parts


def test_it_leaves_the_same_state():
    left, right = (run(text, rounds=2) for text in ("player-random", "player(random=true)"))
    assert_same_bits(*(pack(one.engine.server, one.engine.clients()) for one in (left, right)))
    assert str(left.method) == "player-random"


def test_it_shares_a_prefix_that_is_neither_everything_nor_the_measured_one():
    shared = layer_values(run("player-random", rounds=1), "federated", 1)
    measured = layer_values(run("player", rounds=1), "federated", 1)
    values = list(shared.values())
    assert values == sorted(values, reverse=True)
    assert 0 < sum(values) < len(values)
    assert shared != measured


def test_beside_a_preset_it_is_never_the_papers_and_nothing_is_measured():
    """Of four layers PLayer-FL shares two: one or three are left to draw."""
    heart = {"data": from_arrays(torch.rand(20, 10), [0, 1, 2, 3, 4] * 4), "model": "player_mlp"}
    drawn = set()
    for seed in range(6):
        result = fedstrata.run(**heart, clients=2, rounds=1, epochs=1, seed=seed, method="player-random(preset=heart)")
        layers = result.metrics.to_tables()["layers"].to_pylist()
        drawn.add(sum(row["value"] for row in layers if row["metric"] == "federated"))
        assert not [row for row in layers if row["metric"] == "federation_sensitivity"]
    assert drawn == {1, 3}


def test_it_does_not_stand_beside_others_that_choose_layers():
    with pytest.raises(FedStrataError, match="each of them decides which layers travel"):
        Method.make("player-random+fedlp")
