from __future__ import annotations

import pytest
import torch
from torch import nn
from watching import BOTH_ENGINES, clients_view, run, server_view, step_view, training_view

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method, methods

LINE = LayerMap.read(nn.Sequential(nn.Linear(2, 1, bias=False)), (2,))
NAME = "0.weight"


def stack(*rows: list[float]) -> dict[str, torch.Tensor]:
    return {NAME: torch.tensor([[row] for row in rows])}


# By hand -------------------------------------------------------------------------------------------------------------


def test_the_loss_is_proximal_and_leans_along_the_state():
    """At (2, 0) from (1, 1) the proximal term is .25 * 2, and <h, w> = .4 + 0; the gradient is .5 (w - w_t) - h."""
    parameters = {NAME: torch.tensor([[[2.0, 0.0]]], requires_grad=True)}
    clients = clients_view(LINE, 1, memory=stack([0.2, -0.4]))
    step, plain = step_view(parameters, stack([1.0, 1.0])), torch.tensor([3.0])
    loss = methods.make("feddyn(alpha=0.5)").loss(clients, step, plain)
    assert loss.tolist() == pytest.approx([3.0 + 0.5 - 0.4])
    [slope] = torch.autograd.grad(loss.sum(), parameters[NAME])
    assert slope.flatten().tolist() == pytest.approx([0.5 - 0.2, -0.5 + 0.4])


def test_the_clients_state_follows_its_way():
    clients = clients_view(LINE, 2, memory=stack([0.2, -0.4], [0.0, 0.0]))
    training = training_view(stack([1.0, 1.0], [1.0, 1.0]), stack([2.0, 0.0], [1.0, 3.0]))
    model, memory = methods.make("feddyn(alpha=0.5)").finish(clients, training)
    assert model is training.trained
    assert memory[NAME].flatten().tolist() == pytest.approx([-0.3, 0.1, 0.0, -1.0])


def test_the_server_corrects_the_mean_of_the_participants_by_the_mean_of_all():
    """Two of four took part: their mean is (3, 1) whatever their sizes, and h = -.5 * (2 / 4) * (2, 0)."""
    method = Method.make("feddyn(alpha=0.5)")
    model = {NAME: torch.tensor([[1.0, 1.0]])}
    seen = {"sizes": torch.tensor([30, 10]), "clients": 4}
    memory = method.server_memory(server_view(LINE, model, **seen))
    new, memory = method.aggregate(
        server_view(LINE, model, memory=memory, **seen), Message(stack([2.0, 0.0], [4.0, 2.0]))
    )
    assert new[NAME].tolist() == [[4.0, 1.0]]
    assert memory[f"feddyn/{NAME}"].tolist() == [[-0.5, 0.0]]
    new, _ = method.aggregate(server_view(LINE, new, memory=memory, **seen), Message(stack([4.0, 1.0], [4.0, 1.0])))
    assert new[NAME].tolist() == [[5.0, 1.0]]


# In a federation -----------------------------------------------------------------------------------------------------


@BOTH_ENGINES
def test_the_servers_state_is_the_mean_of_all_clients_states(engine):
    simulation = run("feddyn(alpha=0.1)", engine, rounds=4, participation=0.6)
    memory, server = simulation.engine.clients().group("memory"), simulation.engine.server.memory
    assert memory.keys() == server.keys() == {f"feddyn/{name}" for name in simulation.setting.layers.parameter_names}
    for name, states in memory.items():
        assert torch.allclose(states.mean(0), server[name], rtol=0, atol=1e-12)
        if name != "feddyn/stem.bias":  # in front of a norm a bias has no gradient
            assert float(states.abs().max()) > 1e-5


def test_it_goes_further_than_the_mean_and_sends_no_more():
    feddyn, fedavg = run("feddyn", rounds=1), run("fedavg", rounds=1)
    initial = fedavg.setting.initial["head.weight"]
    further, plain = (float((one.engine.server.model["head.weight"] - initial).norm()) for one in (feddyn, fedavg))
    assert further > 1.5 * plain  # in the first round the correction adds the mean update once more
    assert feddyn.metrics.latest()["bytes.up"] == fedavg.metrics.latest()["bytes.up"]
    assert feddyn.metrics.latest()["bytes.down"] == fedavg.metrics.latest()["bytes.down"]


def test_with_shrinking_the_corrected_model_shrinks():
    left, right = run("feddyn+lws(beta=5)", rounds=1).engine.server.model, run("feddyn", rounds=1).engine.server.model
    assert float(left["head.weight"].norm()) < float(right["head.weight"].norm())
    assert torch.equal(left["scale.running_var"], right["scale.running_var"])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "feddyn+player",
            "'player' decides which layers travel, and 'feddyn' needs all shared layers of all participants",
        ),
        ("fedlama+feddyn", "'fedlama' decides which layers travel, and 'feddyn' needs all shared layers of all part"),
        ("feddyn+scaffold", "each of them decides the shares of the clients"),
        ("feddyn+feddisco", "each of them decides the shares of the clients"),
        ("feddyn+fedavgm", "each of them decides the server's step"),
        ("local+feddyn", "'local' shares nothing"),
    ],
)
def test_what_makes_no_sense_is_refused(text, sentence):
    with pytest.raises(FedStrataError, match=sentence):
        Method.make(text)
