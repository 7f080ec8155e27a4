from __future__ import annotations

import pytest
import torch
from torch import nn
from watching import (
    BOTH_ENGINES,
    assert_same_bits,
    declared,
    layer_values,
    memory_of,
    run,
    server_view,
)

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method, methods
from fedstrata.stack import under
from fedstrata.testing.world import prepare

WEIGHTS = {"stem.weight": 36, "body.weight": 144, "shortcut.0.weight": 16, "hidden.weight": 128, "head.weight": 80}
ONE = LayerMap.read(nn.Linear(4, 1, bias=False), (4,))


def own_masks(simulation):
    return memory_of(simulation, "random-k", "mask")


def test_an_entry_is_the_mean_over_those_who_hold_it():
    """Shares 3/4 and 1/4: (1*.75 + 5*.25), 2 alone, 7 alone, nobody keeps the old 9."""
    part = methods.make("random-k")
    server = server_view(ONE, {"weight": torch.tensor([[0.0, 0.0, 0.0, 9.0]])}, sizes=torch.tensor([30, 10]))
    replies = Message(
        {"weight": torch.tensor([[[1.0, 2.0, 0.0, 0.0]], [[5.0, 0.0, 7.0, 0.0]]])},
        {"weight": torch.tensor([[[True, True, False, False]], [[True, False, True, False]]])},
    )
    merged = part.merge(server, replies, part.weigh(declared(30, 10)) / 40)
    assert merged["weight"].tolist() == [[2.0, 2.0, 7.0, 9.0]]


@BOTH_ENGINES
def test_every_client_keeps_its_own_mask_of_the_exact_size(engine):
    simulation = prepare("random-k(sparsity=0.7)", engine, rounds=3, epochs=1)
    first = {name: masks.clone() for name, masks in own_masks(simulation).items()}
    assert first.keys() == WEIGHTS.keys()
    for _ in range(2):
        simulation.step()
    masks = own_masks(simulation)
    assert_same_bits(first, masks)
    kept = sum(mask.flatten(1).sum(1) for mask in masks.values())
    assert kept.tolist() == [int(0.3 * sum(WEIGHTS.values()) + 1e-9)] * 5
    assert len({tuple(row.flatten().tolist()) for row in masks["body.weight"]}) == 5
    server = simulation.engine.server.memory
    assert_same_bits(under("random-k/mask", masks), server)
    density = layer_values(simulation, "density", 1)
    assert density["body"] == pytest.approx(float(masks["body.weight"].double().mean()))


@BOTH_ENGINES
def test_what_travels_and_is_tested_lies_under_the_clients_mask(engine):
    simulation = run("random-k(sparsity=0.8)", engine, 2, participation=0.6)
    masks = own_masks(simulation)
    message = simulation.engine.side.broadcast(simulation.engine.server, [4, 1], 3)
    for name, mask in masks.items():
        assert torch.equal(message.masks[name], mask[[4, 1]])
        assert not message.tensors[name][~mask[[4, 1]]].any()
        assert simulation.engine.server.model[name].count_nonzero() > mask[0].sum()
    fedavg = run("fedavg", engine, 2, participation=0.6)
    for way in ("bytes.up", "bytes.down"):
        sparse, dense = (one.metrics.series(way)[1] for one in (simulation, fedavg))
        assert (sparse < 0.75 * dense).all()


def test_without_sparsity_it_is_fedavg_also_in_bytes():
    left, right = run("random-k(sparsity=0)"), run("fedavg")
    assert_same_bits(left.engine.server.model, right.engine.server.model)
    for way in ("bytes.up", "bytes.down"):
        assert left.metrics.series(way)[1].tolist() == right.metrics.series(way)[1].tolist()


def test_what_is_personal_is_not_masked():
    simulation = run("fedbn+random-k(scope=all, sparsity=0.9)", rounds=1)
    assert own_masks(simulation).keys() == {*WEIGHTS, "stem.bias", "hidden.bias", "head.bias"}
    assert simulation.engine.clients().group("own")["scale.weight"].all()


def test_ssfl_with_random_masks_per_client_is_random_k():
    assert Method.make("ssfl(topology=random-per-client, sparsity=0.3, scope=all)").parts == (
        methods.make("random-k(sparsity=0.3, scope=all)"),
    )
    left, right = run("ssfl(topology=random-per-client)", rounds=1), run("random-k", rounds=1)
    assert_same_bits(left.engine.server.model, right.engine.server.model)
    with pytest.raises(FedStrataError, match="keeps its masks from the first round on; leave out warmup"):
        methods.make("ssfl(topology=random-per-client, refresh_every=2)")
