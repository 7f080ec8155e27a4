from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from watching import BOTH_ENGINES, clients_view, probing, run, server_view, watched

from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method, methods
from fedstrata.testing.world import SIZES, prepare

LAYERS = LayerMap.read(nn.Linear(2, 1, bias=False), (2,))


@dataclass
class Judge:
    """Knows the loss of each model on held-out samples."""

    losses: dict[tuple[float, ...], float]

    def test(self, model, held_out=False):
        assert held_out
        losses = [self.losses[tuple(row.flatten().tolist())] for row in model["weight"]]
        return torch.zeros(len(losses)), torch.tensor(losses, dtype=torch.float64)


def received(start, own, peers, losses, options=""):
    """Let one client put its model together; return it and the weights that it noted."""
    memory = {
        "fedfomo/start/weight": torch.tensor([[start]]),
        "fedfomo/weights": torch.zeros(1, 3, dtype=torch.float64),
    }
    message = Message({"peers/weight": torch.tensor([[[peer] for peer in peers]])})
    clients = clients_view(LAYERS, 1, memory=memory, **probing(Judge(losses)))
    method = Method.make(f"fedfomo(neighbours=3{options})")
    model, memory = method.receive(clients, message, {"weight": torch.tensor([[own]])})
    assert torch.equal(memory["fedfomo/start/weight"], clients.memory["fedfomo/start/weight"])
    return model["weight"].flatten().tolist(), memory["fedfomo/weights"].flatten().tolist()


LOSSES = {(0.0, 0.0): 1.0, (3.0, 4.0): 0.3, (0.0, 2.0): 0.4, (1.0, 0.0): 2.0}


def test_models_count_by_how_much_they_lower_the_loss_per_distance():
    """Own: (1 - 0.3) / 7 = 0.1; peers: (1 - 0.4) / 2 = 0.3 and (1 - 2) / 1 = -1: shares 1/4, 3/4 and none.

    What is added to the affinity is divided by |0.1 + 0.3 - 1| = 0.6.
    """
    model, weights = received((0.0, 0.0), (3.0, 4.0), [(0.0, 2.0), (1.0, 0.0)], LOSSES)
    assert model == pytest.approx([0.75, 2.5])
    assert weights == pytest.approx([0.5, -1 / 0.6, 0.0])
    _, plain = received((0.0, 0.0), (3.0, 4.0), [(0.0, 2.0), (1.0, 0.0)], LOSSES, ", affinity=plain")
    assert plain == pytest.approx([0.3, -1.0, 0.0])


def test_distances_may_be_euclidean():
    """Own: (1 - 0.3) / 5 = 0.14; the peer: 0.3."""
    model, weights = received((0.0, 0.0), (3.0, 4.0), [(0.0, 2.0)], LOSSES, ", norm=l2, affinity=plain")
    assert model == pytest.approx([0.14 / 0.44 * 3, 0.14 / 0.44 * 4 + 0.3 / 0.44 * 2])
    assert weights == pytest.approx([0.3, 0.0, 0.0])


def test_the_affinity_stays_finite_where_weights_cancel_each_other():
    losses = {(0.0, 0.0): 1.0, (1.0, 0.0): 0.5, (0.0, 1.0): 1.5}
    _, weights = received((0.0, 0.0), (1.0, 0.0), [(0.0, 1.0)], losses)
    assert weights == pytest.approx([-0.5 / 1e-9, 0.0, 0.0])


def test_where_nothing_helps_the_client_goes_back_to_where_it_began():
    losses = {(1.0, 1.0): 1.0, (3.0, 4.0): 1.5, (0.0, 2.0): 1.0}
    model, weights = received((1.0, 1.0), (3.0, 4.0), [(0.0, 2.0), (0.0, 2.0)], losses)
    assert model == [1.0, 1.0]
    assert weights == [0.0, 0.0, 0.0]


def test_a_model_that_does_not_differ_has_no_weight():
    losses = {(1.0, 1.0): 1.0, (2.0, 1.0): 0.5}
    model, weights = received((1.0, 1.0), (2.0, 1.0), [(1.0, 1.0)], losses)
    assert model == [2.0, 1.0]
    assert weights == [0.0, 0.0, 0.0]


def test_all_tensors_of_a_model_count_in_the_distance():
    """|3| + |4| in the weight and |2| in the bias: (1 - 0.1) / 9."""
    layers = LayerMap.read(nn.Linear(2, 1), (2,))
    zero = {"weight": torch.zeros(1, 1, 2), "bias": torch.zeros(1, 1)}
    model = {"weight": torch.tensor([[[3.0, 4.0]]]), "bias": torch.tensor([[-2.0]])}
    memory = {**{f"start/{name}": tensor for name, tensor in zero.items()}, "weights": torch.zeros(1, 3)}
    clients = clients_view(layers, 1, memory=memory, **probing(Judge({(0.0, 0.0): 1.0, (3.0, 4.0): 0.1})))
    part = methods.make("fedfomo(affinity=plain)")
    message = Message({f"peers/{name}": tensor[:, None] for name, tensor in model.items()})
    _, memory = part.receive(clients, message, zero)
    assert memory["weights"].flatten().tolist() == pytest.approx([0.1, 0.0, 0.0])


def test_a_sum_of_weights_as_small_as_the_bound_divides_them():
    part = methods.make("fedfomo")
    assert part._valued(torch.tensor([[1e-9, 0.0]], dtype=torch.float64)).tolist() == [[1.0, 0.0]]
    assert part._valued(torch.tensor([[0.5e-9, 0.0]], dtype=torch.float64)).tolist() == [[pytest.approx(1 / 3), 0.0]]


def test_a_client_that_hears_nobody_keeps_its_own_model():
    memory = {"start/weight": torch.zeros(1, 1, 2), "weights": torch.ones(1, 3)}
    clients = clients_view(LAYERS, 1, memory=memory, **probing(Judge(LOSSES)))
    model = {"weight": torch.tensor([[[3.0, 4.0]]])}
    received, memory = methods.make("fedfomo").receive(clients, Message(), model)
    assert received == model
    assert memory["weights"].tolist() == [[0.0, 0.0, 0.0]]


def test_the_model_with_which_training_begins_is_remembered():
    method, model = Method.make("fedfomo(neighbours=3)"), {"weight": torch.tensor([[[3.0, 4.0]]])}
    first = method.client_memory(clients_view(LAYERS, 1), {"weight": torch.zeros(1, 1, 2)})
    assert first["fedfomo/weights"].tolist() == [[0.0, 0.0, 0.0]]
    _, memory = method.start(clients_view(LAYERS, 1, memory=first), Message(), model)
    assert torch.equal(memory["fedfomo/start/weight"], model["weight"])


# The server's choice -------------------------------------------------------------------------------------------------


def choice(text, affinity, round=1, participants=(0,)):
    part = methods.make(text)
    server = server_view(
        LAYERS, {"weight": torch.zeros(1, 2)}, round, clients=len(affinity), participants=participants,
        sizes=torch.ones(len(participants)),
        memory={"affinity": torch.tensor(affinity, dtype=torch.float64)},
    )  # fmt: skip
    return part.choose_peers(server).tolist()


def test_without_exceptions_those_with_the_highest_affinity_are_sent():
    affinity = [[9.0, 0.1, 0.5, -1.0, 0.3], *[[0.0] * 5] * 4]
    assert [set(row) for row in choice("fedfomo(neighbours=2, epsilon=0)", affinity)] == [{2, 4}]
    assert [set(row) for row in choice("fedfomo(neighbours=3, epsilon=0)", affinity)] == [{1, 2, 4}]
    assert [set(row) for row in choice("fedfomo(neighbours=9, epsilon=1)", affinity)] == [{1, 2, 3, 4}]


def test_equal_affinities_are_drawn():
    rows = [choice("fedfomo(neighbours=2, epsilon=0)", [[0.0] * 6] * 6, round) for round in range(1, 40)]
    assert all(len(set(row)) == 2 and 0 not in row for [row] in rows)
    assert {client for [row] in rows for client in row} == {1, 2, 3, 4, 5}


def test_exceptions_become_rarer():
    """Client 5 has the lowest affinity: only chance sends it."""
    affinity = [[0.0, 5.0, 4.0, 3.0, 2.0, 1.0], *[[0.0] * 6] * 5]
    always = [choice("fedfomo(neighbours=1, epsilon=1, decay=0)", affinity, round)[0][0] for round in range(1, 200)]
    assert [20 < always.count(client) < 60 for client in range(1, 6)] == [True] * 5
    text = "fedfomo(neighbours=1, epsilon=0.5, decay=0.05)"
    assert all(choice(text, affinity, round)[0] == [1] for round in range(11, 40))
    assert any(choice(text, affinity, round)[0] != [1] for round in range(1, 9))


def test_epsilon_begins_to_fall_after_the_first_round():
    affinity = [[0.0, *([0.0] * 18), 9.0]] * 20
    first, second = (
        choice("fedfomo(neighbours=1, epsilon=1, decay=1)", affinity, round, participants=tuple(range(19)))
        for round in (1, 2)
    )
    assert len({client for [client] in first}) > 5
    assert second == [[19]] * 19


def test_whether_chance_decides_does_not_depend_on_whom_it_would_choose():
    """Client 5 hears client 4, or in half of the rounds any of five others: each of the four in a tenth of them."""
    affinity = [[0.0, 0.0, 0.0, 0.0, 9.0, 0.0]] * 6
    text = "fedfomo(neighbours=1, epsilon=0.5, decay=0)"
    chosen = [choice(text, affinity, round, participants=(5,))[0][0] for round in range(1, 601)]
    assert [chosen.count(client) / 600 for client in range(4)] == pytest.approx([0.1] * 4, abs=0.035)


def test_the_servers_affinity_adds_the_weights_up():
    method = Method.make("fedfomo(neighbours=2, epsilon=0)")
    model = {"weight": torch.zeros(1, 2)}
    server = server_view(LAYERS, model, clients=3, participants=(0, 2), sizes=torch.ones(2))
    server = server_view(
        LAYERS, model, clients=3, participants=(0, 2), sizes=torch.ones(2), memory=method.server_memory(server)
    )
    sent = torch.arange(4.0).view(2, 1, 2)
    peers = method.parts[0].choose_peers(
        server_view(
            LAYERS, model, clients=3, participants=(0, 2), sizes=torch.ones(2),
            memory={"affinity": server.memory["fedfomo/affinity"]},
        )
    )  # fmt: skip
    weights = torch.tensor([[0.5, -0.25], [1.0, 2.0]], dtype=torch.float64)
    _, memory = method.aggregate(server, Message({"weight": sent, "fedfomo/weights": weights}))
    expected = torch.zeros(3, 3, dtype=torch.float64)
    for client, row, own in zip((0, 2), peers.tolist(), weights, strict=True):
        expected[client, row] = own
    assert torch.equal(memory["fedfomo/affinity"], expected)
    assert memory["fedfomo/last/weight"].tolist() == [[[0.0, 1.0]], [[0.0, 0.0]], [[2.0, 3.0]]]


# In a run ------------------------------------------------------------------------------------------------------------


def test_judging_samples_are_not_trained_on():
    data = prepare("fedfomo(validation=0.2)").engine.evaluator.data
    assert [len(samples) for samples in data.held_out] == [2, 3, 3, 1, 5]
    assert data.split.sizes.tolist() == [size - held for size, held in zip(SIZES, (2, 3, 3, 1, 5), strict=True)]


@BOTH_ENGINES
def test_clients_go_on_with_models_of_their_own(engine):
    method, seen = watched("fedfomo")
    simulation = run(method, engine)
    models = [seen.received[3, client]["head.weight"] for client in range(5)]
    assert len({tuple(model.flatten().tolist()) for model in models}) >= 3
    affinity = simulation.engine.server.memory["fedfomo/affinity"]
    assert bool((affinity != 0).any())
    assert bool((affinity.diagonal() == 0).all())
    assert all(
        torch.equal(seen.received[1, client]["head.weight"], simulation.setting.initial["head.weight"])
        for client in range(5)
    )


def test_a_received_model_is_the_mixture_of_what_was_heard():
    """With one neighbour, the model lies on the line between the own and the neighbour's, or is the previous one."""
    method, seen = watched("fedfomo(neighbours=1)")
    run(method, rounds=2)
    mixed = 0
    for client in range(5):
        result, own = seen.received[2, client], seen.trained[1, client]
        if torch.equal(result["head.weight"], seen.received[1, client]["head.weight"]):
            continue
        others = [seen.trained[1, other] for other in range(5) if other != client]
        distances = []
        for other in others:
            direction = other["head.weight"] - own["head.weight"]
            offset = result["head.weight"] - own["head.weight"]
            share = (offset * direction).sum() / direction.square().sum()
            distances.append(float((offset - share * direction).norm()))
            if distances[-1] < 1e-12:
                assert 0 <= float(share) <= 1 + 1e-12
        assert min(distances) < 1e-12
        mixed += 1
    assert mixed > 0


def test_each_model_heard_costs_its_bytes_and_a_number_back():
    two, three = (run(f"fedfomo(neighbours={count})", rounds=1) for count in (2, 3))
    model = sum(tensor.numel() * tensor.element_size() for tensor in two.setting.initial.values())
    assert three.metrics.latest()["bytes.down"] - two.metrics.latest()["bytes.down"] == 5 * model
    assert three.metrics.latest()["bytes.up"] - two.metrics.latest()["bytes.up"] == 5 * 8
