from __future__ import annotations

import pytest
import torch
from watching import BOTH_ENGINES, clients_view, run, watched

from fedstrata.layers import LayerMap
from fedstrata.methods import methods
from fedstrata.testing.world import TinyNet

LAYERS = LayerMap.read(TinyNet(), (1, 8, 8))
HEAD = {"head.weight", "head.bias"}
BODY = [name for name in LAYERS.parameter_names if name not in HEAD]


def moved(before, after):
    return {name for name in LAYERS.parameter_names if not torch.equal(before[name], after[name])}


@BOTH_ENGINES
def test_fedrep_trains_the_head_and_then_the_body(engine):
    method, seen = watched("fedrep(head_epochs=2)")
    run(method, engine, rounds=1)
    start, steps = seen.start[1, 0], seen.steps[1, 0]
    assert len(steps) == 2 * 2 + 1 * 2  # nine samples in batches of eight: two steps an epoch
    assert all(moved(start, after) == HEAD for after in steps[:4])
    assert all(moved(steps[3], after) == set(BODY) for after in steps[4:])


def test_fedrep_trains_the_head_for_the_epochs_of_the_experiment_and_the_body_for_one():
    method, seen = watched("fedrep")
    run(method, rounds=1, epochs=3)
    assert len(seen.steps[1, 0]) == 3 * 2 + 2
    assert moved(seen.steps[1, 0][5], seen.steps[1, 0][6]) == set(BODY)


def test_fedrep_goes_with_transient_sparsity_of_the_body():
    method, seen = watched("fedrep+transient(every=1, tau0=0.5)")
    run(method, rounds=2)
    zeros = (seen.start[2, 0]["hidden.weight"] == 0).double().mean()
    assert zeros == pytest.approx(0.5 * (1 - 1 / 2), abs=0.01)
    assert not (seen.start[2, 0]["head.weight"] == 0).any()


def test_other_parts_can_tell_the_phases_by_their_names():
    phases = methods.make("fedrep(head_epochs=4, body_epochs=2)").phases(clients_view(LAYERS, 1))
    assert [(phase.name, phase.epochs) for phase in phases] == [("head", 4), ("body", 2)]
