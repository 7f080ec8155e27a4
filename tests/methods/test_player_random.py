from __future__ import annotations

import pytest
from watching import assert_same_bits, layer_values, run

from fedstrata.engines.engine import pack
from fedstrata.errors import FedStrataError
from fedstrata.methods import Method


@pytest.mark.parametrize(
    ("name", "long"),
    [
        ("player-random", "player(random=true)"),
        ("player-random(threshold=1.5, batch_size=8)", "player(random=true, threshold=1.5, batch_size=8)"),
        ("fedprox+player-random", "fedprox+player(random=true)"),
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


def test_it_does_not_stand_beside_others_that_choose_layers():
    with pytest.raises(FedStrataError, match="each of them decides which layers travel"):
        Method.make("player-random+fedlp")
