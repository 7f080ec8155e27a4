from __future__ import annotations

import pytest
import torch
from torch import nn
from watching import server_view

from fedstrata.layers import LayerMap
from fedstrata.methods import methods
from fedstrata.methods.mechanisms import peers as mechanism
from fedstrata.methods.mechanisms.peers import mean_with, mix
from fedstrata.stack import weighted_mean

LAYERS = LayerMap.read(nn.Sequential(nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1)), (2,))


def test_entries_are_averaged_over_their_holders():
    held = torch.tensor([[[True, True, False], [True, False, False]]])
    mean = mean_with(torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[[4.0, 0.0, 0.0]]]), held)
    assert mean.tolist() == [[2.5, 2.0, 0.0]]


def test_mixing_rounds_counters():
    counters = torch.tensor([[10, 20]])
    assert mix(counters, torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.0, 0.33]])).tolist() == [18, 15, 7]


def test_a_mixture_has_the_type_of_its_models():
    models = torch.tensor([[[1.0], [3.0]]])
    mixed = mix(models, torch.tensor([[0.25, 0.75]], dtype=torch.float64))
    assert (mixed.dtype, mixed.tolist()) == (torch.float32, [[2.5]])
    assert mix(torch.tensor([[2**40, 2**40]]), torch.tensor([[0.5, 0.5]])).tolist() == [2**40]


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
@pytest.mark.parametrize("at_once", [1, 7, 10**6])
def test_mixtures_are_weighted_sums_over_peers(alike, shape, at_once, monkeypatch):
    monkeypatch.setattr(mechanism, "_ENTRIES_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(0)
    models = torch.randn(1 if alike else 4, 3, *shape, generator=generator)
    weights = torch.rand(4, 3, generator=generator)
    mixed = mix(models, weights)
    assert mixed.shape == (4, *shape)
    for client in range(4):
        own = models[0 if alike else client]
        expected = sum(float(weight) * model.double() for weight, model in zip(weights[client], own, strict=True))
        torch.testing.assert_close(mixed[client], expected.float())


def test_neighbours_are_others_without_repetition_and_new_in_each_round():
    part = methods.make("d-psgd(neighbours=3)")
    chosen = {}
    for round in range(1, 30):
        server = server_view(LAYERS, {}, round, clients=6, participants=(0, 2, 5), sizes=torch.ones(3))
        peers = part.choose_peers(server)
        assert peers.shape == (3, 3)
        for client, row in zip(server.participants, peers.tolist(), strict=True):
            assert len({*row, client}) == 4
            assert all(0 <= other < 6 for other in row)
        chosen[round] = peers.tolist()
        alone = part.choose_peers(server_view(LAYERS, {}, round, clients=6, participants=(5,), sizes=torch.ones(1)))
        assert alone.tolist() == [chosen[round][2]]
    heard = [other for rows in chosen.values() for other in rows[0]]
    assert {other: heard.count(other) > 5 for other in range(1, 6)} == dict.fromkeys(range(1, 6), True)
    assert chosen[1] != chosen[2]


def test_with_fewer_others_than_neighbours_everybody_is_heard():
    server = server_view(LAYERS, {}, clients=3, participants=(0, 1, 2), sizes=torch.ones(3))
    peers = methods.make("d-psgd").choose_peers(server)
    assert [sorted(row) for row in peers.tolist()] == [[1, 2], [0, 2], [0, 1]]


@pytest.mark.parametrize("name", ["d-psgd", "d-psgd-ft", "dispfl"])
def test_without_a_server_there_is_nothing_to_deploy(name):
    assert "no server" in methods.get(name).facts.not_on_network
    assert all(methods.get(other).facts.not_on_network is None for other in ("fedfomo", "pfedla", "fedcac", "feddst"))


@pytest.mark.parametrize("at_once", [1, 50, 2**24])
@pytest.mark.parametrize("masked", [False, True])
def test_peers_are_averaged_in_blocks_to_the_same_bits(monkeypatch, at_once, masked):
    generator = torch.Generator().manual_seed(0)
    own, peers = torch.randn(7, 3, 2, generator=generator), torch.randn(7, 20, 3, 2, generator=generator)
    held = torch.rand(7, 21, 3, 2, generator=generator) < 0.5 if masked else None
    everybody = torch.cat((own.unsqueeze(1), peers), dim=1).transpose(0, 1)
    shares = torch.full((21,), 1 / 21, dtype=torch.float64)
    wanted = weighted_mean(everybody, shares, None if held is None else held.transpose(0, 1))
    monkeypatch.setattr(mechanism, "_ENTRIES_AT_ONCE", at_once)
    assert torch.equal(mean_with(own, peers, held), wanted)


def test_peers_are_chosen_in_blocks_as_at_once(monkeypatch):
    server = server_view(LAYERS, {}, clients=9, participants=(0, 3, 4, 8), sizes=torch.ones(4))
    part = methods.make("d-psgd(neighbours=4)")
    wanted = part.choose_peers(server)
    monkeypatch.setattr(mechanism, "_ENTRIES_AT_ONCE", 20)
    assert torch.equal(part.choose_peers(server), wanted)
