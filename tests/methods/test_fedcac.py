from __future__ import annotations

import pytest
import torch
from torch import nn
from watching import BOTH_ENGINES, clients_view, run, server_view, training_view, watched

from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method

LAYERS = LayerMap.read(nn.Linear(4, 1, bias=False), (4,))
GLOBAL = {"weight": torch.zeros(1, 4)}


def bits(*texts):
    return torch.tensor([[[character == "1" for character in text]] for text in texts])


def aggregated(text, weights, critical, participants=(0, 1, 2), round=1, memory=None, model=GLOBAL):
    """Let the server take replies in; return its model and memory."""
    method = Method.make(text)
    few = {"clients": 3, "participants": participants, "sizes": torch.ones(len(participants))}
    first = method.server_memory(server_view(LAYERS, model, clients=3, sizes=torch.ones(3)))
    server = server_view(LAYERS, model, round, memory=memory or first, **few)
    stack = torch.tensor(weights)[:, None, None].expand(-1, 1, 4)
    return method.aggregate(server, Message({"weight": stack, "fedcac/weight": critical}))


def sent(text, model, memory, round):
    """Return what the server sends to all three clients in a round."""
    server = server_view(
        LAYERS, model, round, clients=3, participants=(0, 1, 2), sizes=torch.ones(3), memory=memory
    )  # fmt: skip
    message = Message({name: tensor[None] for name, tensor in model.items()})
    return Method.make(text).broadcast(server, message).tensors["weight"].expand(3, 1, 4)[:, 0].tolist()


@pytest.mark.parametrize(("tau", "critical"), [(0.5, "1001"), (0.25, "0001"), (1.0, "1101"), (0.2, "0000")])
def test_critical_weights_moved_and_are_large(tau, critical):
    """The scores are 0.06, 0.01, 0 and 0.21; what did not move is never critical, and floor(0.2 * 4) is none."""
    before, after = torch.tensor([[[0.5, -0.2, 0.1, 0.4]]]), torch.tensor([[[0.6, -0.1, 0.1, -0.3]]])
    training = training_view({"weight": before}, {"weight": after})
    message = Method.make(f"fedcac(tau={tau})").upload(clients_view(LAYERS, 1), training, Message({"weight": after}))
    assert torch.equal(message.tensors["fedcac/weight"], bits(critical))
    assert torch.equal(message.tensors["weight"], after)


def test_critical_weights_come_from_clients_with_the_same_ones():
    """Overlaps 0.5, 1, 0.5: mean 2/3, maximum 1; after round 1 of beta 2 the threshold is 5/6: 0 and 2 collaborate."""
    text = "fedcac(beta=2)"
    model, memory = aggregated(text, (1.0, 2.0, 6.0), bits("1100", "1010", "1100"))
    assert model["weight"].tolist() == [[3.0] * 4]
    assert sent(text, model, memory, 2) == [[3.5, 3.5, 3.0, 3.0], [2.0, 3.0, 2.0, 3.0], [3.5, 3.5, 3.0, 3.0]]


def test_collaborators_become_fewer():
    """At first an overlap above the mean is enough; after round beta only the best pair is left, then nobody."""
    critical = bits("1100", "1010", "1100")
    model, memory = aggregated("fedcac(beta=2)", (1.0, 2.0, 6.0), critical)
    together, alone = [3.5, 3.5, 3.0, 3.0], [1.0, 1.0, 3.0, 3.0]
    assert sent("fedcac(beta=2)", model, memory, 3)[0] == together
    assert sent("fedcac(beta=2)", model, memory, 4)[0] == alone
    assert sent("fedcac(beta=100)", model, memory, 90)[0] == together


def test_clients_that_never_took_part_get_the_global_model_and_are_nobodys_collaborators():
    text = "fedcac(beta=1000)"
    model, memory = aggregated(text, (1.0, 3.0), bits("1100", "1100"), participants=(0, 2))
    assert sent(text, model, memory, 2) == [[2.0] * 4] * 3
    model, memory = aggregated(text, (8.0,), bits("0011"), participants=(0,), round=2, memory=memory, model=model)
    assert memory["fedcac/seen"].tolist() == [True, False, True]
    assert memory["fedcac/last/weight"][:, 0, 0].tolist() == [8.0, 0.0, 3.0]
    # The only pair does not overlap; mean and maximum are equal, so it still qualifies.
    assert sent(text, model, memory, 3) == [[8.0, 8.0, 5.5, 5.5], [8.0] * 4, [5.5, 5.5, 8.0, 8.0]]


def test_before_anybody_answered_everybody_gets_the_global_model():
    memory = Method.make("fedcac").server_memory(server_view(LAYERS, GLOBAL, clients=3, sizes=torch.ones(3)))
    assert sent("fedcac", {"weight": torch.full((1, 4), 7.0)}, memory, 1) == [[7.0] * 4] * 3


@BOTH_ENGINES
def test_clients_get_models_of_their_own_and_keep_running_statistics(engine):
    method, seen = watched("fedcac(tau=0.5, beta=2)")
    simulation = run(method, engine, rounds=2)
    buffers = set(simulation.setting.layers.buffer_names)
    assert simulation.setting.personal == buffers
    average, other = watched("fedavg")
    run(average, engine, rounds=2)
    shared = other.received[2, 0]["body.weight"]
    for client in range(5):
        mine = seen.received[2, client]
        assert torch.equal(mine["scale.running_mean"], seen.trained[1, client]["scale.running_mean"])
        same = torch.isclose(mine["body.weight"], shared, rtol=0, atol=1e-12)
        assert 72 <= int(same.sum()) < 144  # half of the weights are not critical


def test_with_everybody_alike_the_mean_is_all_there_is():
    """With tau and beta at their limits all weights are critical and, as all overlap fully, the plain mean is taken."""
    model, memory = aggregated("fedcac(tau=1.0)", (1.0, 2.0, 6.0), bits("1111", "1111", "1111"))
    assert sent("fedcac(tau=1.0)", model, memory, 50) == [[3.0] * 4] * 3


def test_the_upload_is_the_model_and_a_bit_per_weight():
    plain, critical = run("fedavg", rounds=1, statistics="local"), run("fedcac", rounds=1)
    before, after = (simulation.metrics.latest() for simulation in (plain, critical))
    names = critical.setting.layers.parameter_names
    whole = sum(-(-critical.setting.initial[name].numel() // 8) for name in names)
    extra = (after["bytes.up"] - before["bytes.up"]) / 5
    assert whole <= extra <= whole + 150 * len(names)
    assert run("fedcac", rounds=2).metrics.latest()["bytes.down"] == pytest.approx(before["bytes.down"], rel=0.02)
