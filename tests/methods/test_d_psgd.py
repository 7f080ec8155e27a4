from __future__ import annotations

import torch
from torch import nn
from watching import BOTH_ENGINES, clients_view, run, watched

from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method

LAYERS = LayerMap.read(nn.Sequential(nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1)), (2,))
WEIGHT, COUNTER = "0.weight", "1.num_batches_tracked"


def test_own_model_and_peers_count_alike():
    """((1, 2) + (3, 4) + (5, 9)) / 3 = (3, 5); the counters 3, 4, 6 have the mean 4.33, rounded."""
    model = {WEIGHT: torch.tensor([[[1.0, 2.0]]]), COUNTER: torch.tensor([3])}
    peers = {
        f"peers/{WEIGHT}": torch.tensor([[[[3.0, 4.0]], [[5.0, 9.0]]]]),
        f"peers/{COUNTER}": torch.tensor([[4, 6]]),
    }
    mixed, memory = Method.make("d-psgd").receive(clients_view(LAYERS, 1), Message(peers), model)
    assert mixed[WEIGHT].tolist() == [[[3.0, 5.0]]]
    assert mixed[COUNTER].tolist() == [4]
    assert memory == {}


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
