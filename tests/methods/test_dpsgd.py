"""D-PSGD: peers' exchange, the plain average, the final fine-tuning; and what cannot stand beside a mixture."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from watching import BOTH_ENGINES, GivenProbe, clients_view, run, server_view, watched

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method, methods
from fedstrata.methods.mechanisms.peers import mean_with, mix

LAYERS = LayerMap.read(nn.Sequential(nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1)), (2,))
WEIGHT, COUNTER = "0.weight", "1.num_batches_tracked"


def test_own_model_and_peers_count_alike():
    """((1, 2) + (3, 4) + (5, 9)) / 3 = (3, 5); the counters 3, 4, 6 have the mean 4.33, rounded."""
    model = {WEIGHT: torch.tensor([[[1.0, 2.0]]]), COUNTER: torch.tensor([3])}
    peers = {
        f"peers/{WEIGHT}": torch.tensor([[[[3.0, 4.0]], [[5.0, 9.0]]]]),
        f"peers/{COUNTER}": torch.tensor([[4, 6]]),
    }
    mixed, memory = Method.make("d-psgd").receive(clients_view(LAYERS, 1), Message(peers), model, GivenProbe({}))
    assert mixed[WEIGHT].tolist() == [[[3.0, 5.0]]]
    assert mixed[COUNTER].tolist() == [4]
    assert memory == {}


def test_entries_are_averaged_over_their_holders():
    held = torch.tensor([[[True, True, False], [True, False, False]]])
    mean = mean_with(torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[[4.0, 0.0, 0.0]]]), held)
    assert mean.tolist() == [[2.5, 2.0, 0.0]]


def test_mixing_rounds_counters():
    counters = torch.tensor([[10, 20]])
    assert mix(counters, torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.0, 0.33]])).tolist() == [18, 15, 7]


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


@BOTH_ENGINES
def test_a_round_starts_from_the_mean_with_the_neighbours_just_trained(engine):
    method, seen = watched("d-psgd(neighbours=2)")
    simulation = run(method, engine, rounds=2)
    view = simulation.engine.side.view(simulation.engine.server, range(5), 2)
    peers = method.parts[0].choose_peers(view).tolist()
    for client in range(5):
        around = [seen.trained[1, other] for other in (client, *peers[client])]
        for name, tensor in seen.received[2, client].items():
            mean = torch.stack([model[name].double() for model in around]).mean(0)
            expected = mean if tensor.is_floating_point() else mean.round().to(tensor.dtype)
            assert torch.allclose(tensor, expected, rtol=0, atol=1e-12), name
    assert not torch.equal(seen.received[2, 0]["head.weight"], seen.received[2, 1]["head.weight"])


def test_sizes_do_not_count_and_nobody_is_sent_the_servers_average():
    """With all others as neighbours everybody has the plain mean, which FedAvg over unequal clients does not give."""
    method, seen = watched("d-psgd")
    run(method, rounds=2)
    averaged, other = watched("fedavg")
    run(averaged, rounds=2)
    plain = torch.stack([seen.trained[1, client]["head.weight"] for client in range(5)]).mean(0)
    assert torch.allclose(seen.received[2, 3]["head.weight"], plain, rtol=0, atol=1e-12)
    assert not torch.allclose(other.received[2, 3]["head.weight"], plain, rtol=0, atol=1e-6)


def test_each_neighbour_costs_one_model_to_download():
    two, three = (run(f"d-psgd(neighbours={count})", rounds=1) for count in (2, 3))
    model = sum(tensor.numel() * tensor.element_size() for tensor in two.setting.initial.values())
    assert three.metrics.latest()["bytes.down"] - two.metrics.latest()["bytes.down"] == 5 * model
    assert (
        three.metrics.latest()["bytes.up"]
        == two.metrics.latest()["bytes.up"]
        == run("fedavg", rounds=1).metrics.latest()["bytes.up"]
    )


def test_clients_that_sit_out_are_heard_with_their_last_model():
    method, seen = watched("d-psgd(neighbours=4)")
    simulation = run(method, rounds=1, participation=0.4)
    trained = [client for client in range(5) if (1, client) in seen.trained]
    assert len(trained) == 2
    simulation.engine.round(2, range(5), evaluate=False)
    initial = simulation.setting.initial["head.weight"]
    known = [seen.trained[1, client]["head.weight"] if client in trained else initial for client in range(5)]
    for client in range(5):
        assert torch.allclose(seen.received[2, client]["head.weight"], torch.stack(known).mean(0), rtol=0, atol=1e-12)


# Fine-tuning ---------------------------------------------------------------------------------------------------------


@BOTH_ENGINES
def test_the_mean_of_all_models_is_tested_and_fine_tuned_after_the_last_round(engine):
    method, seen = watched("d-psgd-ft(neighbours=1)")
    simulation = run(method, engine, rounds=2)
    message = simulation.engine.side.broadcast(simulation.engine.server, range(5), 3)
    assert not any(name.startswith("peers/") for name in message.tensors)
    for name in ("head.weight", "scale.running_mean"):
        mean = torch.stack([seen.trained[2, client][name] for client in range(5)]).mean(0)
        assert torch.allclose(message.tensors[name][0], mean, rtol=0, atol=1e-12)
    assert "client_adapted.accuracy.mean" in simulation.metrics.latest()
    plain = run("d-psgd(neighbours=1)", engine, rounds=2)
    assert "client_adapted.accuracy.mean" not in plain.metrics.latest()
    assert plain.metrics.latest()["client_after.loss.mean"] != simulation.metrics.latest()["client_after.loss.mean"]
    assert plain.metrics.latest()["client_before.loss.mean"] == simulation.metrics.latest()["client_before.loss.mean"]


def test_fine_tuning_lasts_as_long_as_asked():
    losses = [run(f"d-psgd-ft(epochs={epochs})").metrics.latest()["client_adapted.loss.mean"] for epochs in (1, 3)]
    assert losses[0] != losses[1]


# Combinations that make no sense -------------------------------------------------------------------------------------

MIXES = "each of them mixes the clients' models for each of them, and only one can"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("d-psgd+lws", "under 'd-psgd' no client goes on with the average of all, and 'lws' works on it"),
        ("fedavgm+d-psgd", "under 'd-psgd' no client goes on with the average of all, and 'fedavgm' works on it"),
        ("pfedla+ssfl", "under 'pfedla' no client goes on with the average of all, and 'ssfl' works on it"),
        ("fedfomo+player", "under 'fedfomo' no client goes on with the average of all, and 'player' works on it"),
        ("d-psgd+dispfl", "each of them puts a client's model together from what others sent, and only one can"),
        ("fedcac+pfedla", MIXES),
        ("d-psgd+fedcac", MIXES),
        ("dispfl+transient", "each of them puts weights to values of its own, and only one can"),
        ("feddst+ssfl", "each of them puts weights to values of its own, and only one can"),
        ("local+d-psgd", "'local' shares nothing, and 'd-psgd' works on what clients share"),
        ("local+feddst", "'local' shares nothing, and 'feddst' works on what clients share"),
        (
            "freeze-middle+d-psgd",
            "'d-psgd' mixes clients' models as they are, and 'freeze-middle' changes what travels",
        ),
        ("fedcac+ssfl", "'fedcac' mixes clients' models as they are, and 'ssfl' changes what travels"),
    ],
)
def test_what_would_undo_a_mixture_is_refused_with_the_reason(text, reason):
    with pytest.raises(FedStrataError) as caught:
        Method.make(text)
    assert f"cannot be combined: {reason}. Leave one of them out." in str(caught.value)


@pytest.mark.parametrize(
    "text", ["fedcac+fedbn+lws", "d-psgd+fedprox", "pfedla+fedbn", "fedfomo+transient", "dispfl+fedbn"]
)
def test_what_works_beside_a_mixture_is_taken(text):
    assert str(Method.make(text)) == text


@pytest.mark.parametrize("name", ["d-psgd", "d-psgd-ft", "dispfl"])
def test_without_a_server_there_is_nothing_to_deploy(name):
    assert "no server" in methods.get(name).facts.not_on_network
    assert all(methods.get(other).facts.not_on_network is None for other in ("fedfomo", "pfedla", "fedcac", "feddst"))
