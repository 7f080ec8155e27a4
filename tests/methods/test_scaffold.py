from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from torch import nn
from watching import BOTH_ENGINES, clients_view, run, server_view, step_view, training_view, watched

from fedstrata.engines.loop import LoopEngine
from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method, methods
from fedstrata.stack import under
from fedstrata.testing.world import prepare
from fedstrata.wire import decode

LINE = LayerMap.read(nn.Sequential(nn.Linear(2, 1, bias=False)), (2,))
NAME = "0.weight"


def stack(*rows: list[float]) -> dict[str, torch.Tensor]:
    return {NAME: torch.tensor([[row] for row in rows])}


# By hand -------------------------------------------------------------------------------------------------------------


def trained_client():
    """Client 0 has c_k = (.5, 0), client 1 has (0, 2); the server has c = (1, -1)."""
    part = methods.make("scaffold")
    memory = under("control", stack([0.5, 0.0], [0.0, 2.0])) | under("difference", stack([0.0, 0.0], [0.0, 0.0]))
    clients = clients_view(LINE, 2, memory=memory)
    message = Message({**stack([7.0, 7.0]), f"scaffold/{NAME}": torch.tensor([[[1.0, -1.0]]])})
    received = stack([7.0, 7.0], [7.0, 7.0])
    model, memory = part.start(clients, message, received)
    assert model is received
    return part, clients_view(LINE, 2, memory=memory)


def test_gradients_are_corrected_by_the_difference_of_control_variates():
    part, clients = trained_client()
    corrected = part.gradients(clients, step_view(stack([0.0, 0.0], [0.0, 0.0])), stack([10.0, 10.0], [10.0, 10.0]))
    assert corrected[NAME].flatten().tolist() == [10.5, 9.0, 11.0, 7.0]


def test_the_new_control_variate_is_the_mean_gradient_and_its_change_is_sent():
    part, clients = trained_client()
    training = training_view(stack([0.0, 0.0]), stack([0.0, 0.0]), mean_gradients=stack([3.0, 1.0], [4.0, 0.0]))
    model, memory = part.finish(clients, training)
    assert model is training.trained
    assert memory[f"control/{NAME}"].flatten().tolist() == [3.0, 1.0, 4.0, 0.0]
    reply = part.upload(clients_view(LINE, 2, memory=memory), training, Message(stack([0.0, 0.0], [0.0, 0.0])))
    assert reply.tensors[f"scaffold/{NAME}"].flatten().tolist() == [2.5, 1.0, 4.0, -2.0]


def test_what_was_not_trained_keeps_its_control_variate():
    clients = clients_view(
        LINE, 1, memory={**under("control", stack([1.0, 2.0])), **under("difference", stack([9, 9]))}
    )
    training = training_view(stack([1.0, 1.0]), stack([1.0, 1.0]), mean_gradients={})
    _, memory = methods.make("scaffold").finish(clients, training)
    assert memory[f"control/{NAME}"].flatten().tolist() == [1.0, 2.0]
    assert memory[f"difference/{NAME}"].flatten().tolist() == [0.0, 0.0]


def test_the_server_moves_by_the_plain_mean_and_adds_changes_over_all_clients():
    """Of ten clients two took part: their mean is (3, 1) whatever their sizes; half a step leads to (2, 1)."""
    method = Method.make("scaffold(learning_rate=0.5)")
    model = {NAME: torch.tensor([[1.0, 1.0]])}
    seen = {"sizes": torch.tensor([30, 10]), "clients": 10}
    memory = {f"scaffold/{NAME}": torch.tensor([[1.0, -1.0]])}
    changes = torch.tensor([[[2.5, 1.0]], [[4.0, -2.0]]])
    replies = Message({**stack([2.0, 0.0], [4.0, 2.0]), f"scaffold/{NAME}": changes})
    new, memory = method.aggregate(server_view(LINE, model, memory=memory, **seen), replies)
    assert new.keys() == {NAME}
    assert new[NAME].tolist() == [[2.0, 1.0]]
    assert memory[f"scaffold/{NAME}"].flatten().tolist() == pytest.approx([1.65, -1.1])


# In a federation -----------------------------------------------------------------------------------------------------


@BOTH_ENGINES
def test_with_plain_gradient_descent_it_is_option_two_of_the_paper(engine):
    method, seen = watched("scaffold")
    changes = {"optimiser": "sgd(learning_rate=0.05)", "epochs": 2}
    simulation = run(method, engine, rounds=1, **changes)
    server = {name: tensor.clone() for name, tensor in simulation.engine.server.memory.items()}
    before = {name: tensor.clone() for name, tensor in simulation.engine.clients().group("memory").items()}
    simulation.engine.round(2, range(5), evaluate=False)
    after = simulation.engine.clients().group("memory")
    for client, steps in enumerate((4, 4, 4, 2, 6)):  # two epochs of batches of 8
        for name in simulation.setting.layers.parameter_names:
            way = seen.received[2, client][name] - seen.trained[2, client][name]
            expected = before[f"scaffold/control/{name}"][client] - server[f"scaffold/{name}"] + way / (steps * 0.05)
            assert torch.allclose(after[f"scaffold/control/{name}"][client], expected, rtol=0, atol=1e-11), name


@BOTH_ENGINES
@pytest.mark.parametrize("optimiser", ["sgd(learning_rate=0.05, momentum=0.9)", "adam(learning_rate=0.01)"])
def test_the_servers_control_variate_is_the_mean_of_all_clients(engine, optimiser):
    simulation = run("scaffold+fedbn", engine, rounds=4, participation=0.6, optimiser=optimiser)
    memory, server = simulation.engine.clients().group("memory"), simulation.engine.server.memory
    shared = {f"scaffold/{name}" for name in ("stem.weight", "stem.bias", "body.weight", "shortcut.0.weight")}
    assert shared < server.keys()
    assert not any("scale" in name or "shortcut.1" in name for name in (*memory, *server))
    for name, control in server.items():
        own = memory[name.replace("scaffold/", "scaffold/control/")]
        assert torch.allclose(own.mean(0), control, rtol=0, atol=1e-12)
        if name != "scaffold/stem.bias":  # in front of a norm a bias has no gradient
            assert float(control.abs().max()) > 1e-4


def test_the_first_round_is_the_plain_mean_and_the_second_is_not():
    plain, seen = watched("fedavg")
    run(plain, rounds=1)
    mean = torch.stack([seen.trained[1, client]["head.weight"] for client in range(5)]).mean(0)
    corrected, seen = watched("scaffold")
    simulation = run(corrected, rounds=2)
    assert torch.allclose(seen.received[2, 0]["head.weight"], mean, rtol=0, atol=1e-14)
    alone = run("scaffold", rounds=1)
    alone.engine.server.memory["scaffold/head.weight"].zero_()
    alone.engine.round(2, range(5), evaluate=False)
    left, right = (one.engine.server.model["head.weight"] for one in (simulation, alone))
    assert float((left - right).abs().max()) > 1e-3


@BOTH_ENGINES
def test_traffic_doubles(engine):
    latest = {name: run(name, engine, rounds=1).metrics.latest() for name in ("scaffold+fedbn", "fedbn")}
    shared = prepare("scaffold+fedbn").setting
    values = 5 * 8 * sum(shared.initial[name].numel() for name in shared.shared)
    for way in ("bytes.up", "bytes.down"):
        extra = latest["scaffold+fedbn"][way] - latest["fedbn"][way]
        assert values < extra < 1.2 * values


def test_control_variates_travel_beside_the_shared_parameters_only():
    engine = prepare("scaffold+fedbn").engine
    assert isinstance(engine, LoopEngine)
    message = engine.central.messages([0], 1)[0]
    reply, _ = engine.members[0].answer(message, 1)
    for data in (message, reply):
        tensors = decode(data).tensors
        controls = {name.removeprefix("scaffold/") for name in tensors if name.startswith("scaffold/")}
        assert controls == {name for name in tensors if not name.startswith("scaffold/")}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("scaffold+fedlp", "'fedlp' decides which layers travel, and 'scaffold' needs all shared layers of all part"),
        (
            "freeze-middle+scaffold",
            "'freeze-middle' decides which layers travel, and 'scaffold' needs all shared layers",
        ),
        ("scaffold+fedadam", "each of them decides the server's step"),
        ("scaffold+local", "'local' shares nothing"),
    ],
)
def test_what_makes_no_sense_is_refused(text, sentence):
    with pytest.raises(FedStrataError, match=sentence):
        Method.make(text)


@pytest.mark.parametrize("text", ["scaffold(learning_rate=0)"])
def test_what_lies_outside_of_its_range_is_refused(text):
    with pytest.raises(FedStrataError, match=text.partition("(")[2].partition("=")[0]):
        methods.make(text)


@pytest.mark.parametrize("text", ["scaffold(learning_rate=0.1)"])
def test_what_is_at_the_edge_of_its_range_is_taken(text):
    assert str(methods.make(text)) == text


def test_the_defaults():
    assert asdict(methods.make("scaffold")) == {"learning_rate": 1.0}
