"""FedProto: hand-computed prototypes, their pull, what travels, and predictions by the nearest prototype."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from watching import clients_view, outlined, run, server_view, step_view, training_view

from fedstrata.engines.loop import LoopEngine
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method, methods
from fedstrata.testing.world import SIZES

LAYERS = LayerMap.read(nn.Linear(2, 3), (2,))
PART = methods.make("fedproto(strength=2.0)")


def test_features_are_pulled_to_the_prototype_of_their_class():
    """Class 0 lies at (1, 0): distances (1, 2) and, of class 2 without a prototype, none: 2 * (1 + 4) / 4 = 2.5."""
    prototypes = torch.tensor([[[1.0, 0.0], [5.0, 5.0], [0.0, 0.0]]])
    clients = clients_view(LAYERS, 1, memory={"prototypes": prototypes})
    features = torch.tensor([[[2.0, 2.0], [7.0, 7.0]]])
    step = step_view({"weight": torch.zeros(1, 3, 2)}, labels=torch.tensor([[0, 2]]), features=features)
    assert PART.loss(clients, step, torch.tensor([1.0])).tolist() == pytest.approx([1.0 + 2.5])


def test_each_client_is_pulled_by_its_own_samples():
    """Distances (1, 2) of the first client and (2, 2) of the second: 2 * 5 / 2 and 2 * 8 / 2."""
    clients = clients_view(LAYERS, 2, memory={"prototypes": torch.tensor([[[1.0, 0.0]] * 3] * 2)})
    features = torch.tensor([[[2.0, 2.0]], [[3.0, 2.0]]])
    step = step_view({"weight": torch.zeros(2, 3, 2)}, labels=torch.zeros(2, 1, dtype=torch.long), features=features)
    assert PART.loss(clients, step, torch.zeros(2)).tolist() == pytest.approx([5.0, 8.0])


def test_what_the_server_knows_is_what_clients_know():
    """Nothing at first; then the prototypes of the server, at every client."""
    method = Method.make("fedproto")
    initial = {"weight": torch.ones(3, 2), "bias": torch.ones(3)}
    assert not method.server_memory(server_view(LAYERS, {}, initial=initial))["fedproto/prototypes"].any()
    first = method.client_memory(clients_view(LAYERS, 2, initial=initial), {})
    assert first["fedproto/prototypes"].tolist() == torch.zeros(2, 3, 2).tolist()
    known = torch.arange(6.0).view(3, 2)
    message = method.broadcast(server_view(LAYERS, {}, memory={"fedproto/prototypes": known}), Message())
    model, memory = method.receive(clients_view(LAYERS, 2, memory=first), message, initial)
    assert model is initial
    assert memory["fedproto/prototypes"].tolist() == [known.tolist()] * 2


def test_a_head_without_a_bias_predicts_itself_and_that_is_said():
    plain = LayerMap.read(nn.Linear(2, 3, bias=False), (2,))
    [note] = PART.notes(outlined(plain))
    assert "'fedproto' predicts with the head" in note
    assert (
        list(PART.notes(outlined(LAYERS))) == list(methods.make("fedproto(predict=head)").notes(outlined(plain))) == []
    )
    model, memory = {"weight": torch.zeros(1, 3, 2)}, {"prototypes": torch.ones(1, 3, 2)}
    assert PART.deployed(clients_view(plain, 1, memory=memory, label_counts=torch.ones(1, 3)), model) is model


def test_the_server_averages_a_class_over_those_who_have_it():
    """Class 0 from both: (1 + 5) / 2 = 3; class 1 from the second: 7; class 2 from nobody: as it was."""
    sent = torch.tensor([[[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]], [[5.0, 3.0], [7.0, 7.0], [0.0, 0.0]]])
    held = torch.tensor([[True, False, False], [True, True, False]])[..., None]
    old = torch.tensor([[9.0, 9.0], [9.0, 9.0], [4.0, 4.0]])
    server = server_view(LAYERS, {}, memory={"prototypes": old})
    replies = Message({"fedproto/prototypes": sent}, {"fedproto/prototypes": held})
    _, memory = PART.refine(server, {}, replies)
    assert memory["prototypes"].tolist() == [[3.0, 2.0], [7.0, 7.0], [4.0, 4.0]]


def test_the_nearest_prototype_of_an_own_class_is_predicted():
    """(2, 1) is nearest to (3, 1), but the client has no samples of that class; of its own, (0, 1) is nearer."""
    prototypes = torch.tensor([[[0.0, 1.0], [3.0, 1.0], [-9.0, 0.0]]])
    clients = clients_view(LAYERS, 1, memory={"prototypes": prototypes}, label_counts=torch.tensor([[4, 0, 2]]))
    model = {"weight": torch.zeros(1, 3, 2), "bias": torch.tensor([[0.0, 0.0, 1.0]])}
    used = PART.deployed(clients, model)
    outputs = torch.tensor([2.0, 1.0]) @ used["weight"][0].T + used["bias"][0]
    assert int(outputs.argmax()) == 0
    distances = (torch.tensor([2.0, 1.0]) - prototypes[0]).square().sum(1)
    assert (outputs[0] - outputs[2]).item() == pytest.approx(float(distances[2] - distances[0]) / 2)
    assert methods.make("fedproto(predict=head)").deployed(clients, model) is model


def test_a_class_counts_from_its_first_sample_on_and_once_it_has_a_prototype():
    """Of three classes the client has one, no and two samples; of the last there is no prototype yet."""
    prototypes = torch.tensor([[[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]])
    model = {"weight": torch.zeros(1, 3, 2), "bias": torch.zeros(1, 3)}
    clients = clients_view(LAYERS, 1, memory={"prototypes": prototypes}, label_counts=torch.tensor([[1, 0, 2]]))
    bias = PART.deployed(clients, model)["bias"][0]
    assert bias[0] == -1.0
    assert bool((bias[1:] < -1000).all())
    without = clients_view(LAYERS, 1, memory={"prototypes": prototypes * 0}, label_counts=torch.tensor([[1, 0, 2]]))
    assert PART.deployed(without, model) is model


def test_prototypes_are_class_means_of_the_features():
    """At a client after a real round, against a plain PyTorch pass over its samples."""
    driver = run("fedproto", rounds=1)
    engine = driver.engine
    assert isinstance(engine, LoopEngine)
    ready = engine.members[3].side
    own = {name: tensor[0] for name, tensor in engine.members[3].state.group("own").items()}
    network = engine.forward.model
    network.load_state_dict(own)
    network.eval()
    caught = []
    handle = network.head.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0]))
    positions = torch.from_numpy(ready.data.split.train[3])[None]
    inputs, labels = ready.data.make(positions, None)
    network(inputs[0])
    handle.remove()
    sums = torch.zeros(10, 8, dtype=torch.float64).index_add_(0, labels[0], caught[0].detach())
    counts = labels[0].bincount(minlength=10)
    expected = sums / counts.clamp(min=1)[:, None]
    view = ready.probe([3], 1)
    measured = view.features({name: tensor[None] for name, tensor in own.items()})[0]
    assert torch.allclose(measured, expected, rtol=1e-9)


def test_nothing_of_the_model_travels():
    driver = run("fedproto", rounds=2)
    assert driver.engine.server.model == {}
    numbers = sum(1 for _ in SIZES) * 10 * 8 * 8  # five clients, ten classes, eight features of eight bytes
    assert driver.metrics.latest()["bytes.up"] < numbers + 5 * 600


def test_a_model_without_a_linear_head_is_refused():
    layers = LayerMap.read(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), (1, 3, 3))
    with pytest.raises(Exception, match="linear head"):
        list(PART.notes(outlined(layers)))


def test_a_client_sends_prototypes_of_its_own_classes_only():
    """The prototypes that are sent are those of the model after training, under a mask of the client's classes."""

    class Probe:
        def features(self, model):
            return model["weight"] * 10

    clients = clients_view(LAYERS, 1, label_counts=torch.tensor([[1, 0, 2]]), probing=lambda clients: Probe())
    start, trained = {"weight": torch.zeros(1, 3, 2)}, {"weight": torch.ones(1, 3, 2)}
    sent = PART.upload(clients, training_view(start, trained), Message())
    assert sent.tensors["fedproto/prototypes"].tolist() == [[[10.0, 10.0], [0.0, 0.0], [10.0, 10.0]]]
    assert sent.masks["fedproto/prototypes"].flatten().tolist() == [True, False, True]
