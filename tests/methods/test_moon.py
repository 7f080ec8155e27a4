from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch
from torch import nn
from watching import clients_view, step_view

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods import methods
from fedstrata.stack import Stack

LAYERS = LayerMap.read(nn.Linear(2, 2), (2,))


def view(trained, round=2):
    """Make clients of which some have a previous model."""
    previous = Stack(weight=torch.zeros(len(trained), 2, 2))
    return clients_view(LAYERS, len(trained), round=round, previous=previous, trained=torch.tensor(trained))


def test_moon_contrasts_the_global_and_the_previous_model():
    """Cosines 1 and 0 at temperature 1/2: the logarithm of 1 + exp(-2); equal cosines give that of 2 and no slope."""
    received, previous = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 3.0]]])
    features = torch.tensor([[[2.0, 0.0]]], requires_grad=True)
    model = {"weight": torch.zeros(1, 2, 2)}

    clients, plain = view([True]), torch.tensor([3.0])

    def predict(asked):
        assert asked is model or asked is clients.previous
        known = received if asked is model else previous
        return known, known

    part = methods.make("moon(mu=2.0)")
    loss = part.loss(clients, step_view(model, model, features=features, predict=predict), plain)
    assert loss.tolist() == pytest.approx([3.0 + 2 * math.log1p(math.exp(-2))])
    # Along the second axis only the cosine with the previous features grows, by 1/2 per unit of length.
    slope = torch.autograd.grad(loss.sum(), features)[0].flatten()
    assert slope.tolist() == pytest.approx([0.0, 2 * 2 * 0.5 / (1 + math.exp(2))])
    even = step_view(model, model, features=features, predict=lambda asked: (received, received))
    same = part.loss(clients, even, plain)
    assert same.tolist() == pytest.approx([3.0 + 2 * math.log(2)])
    assert not torch.autograd.grad(same.sum(), features)[0].any()
    assert part.loss(view([False]), even, plain).tolist() == [3.0]
    assert part.loss(view([False], round=1), even, plain) is plain


def test_samples_count_in_the_mean():
    """Two samples, of which the second is as near to one model as to the other: the mean of both terms."""
    model, known = {"weight": torch.zeros(1, 2, 2)}, torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    previous = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    clients = view([True])
    step = step_view(model, model, features=known, predict=lambda asked: (known, known if asked is model else previous))
    loss = methods.make("moon").loss(clients, step, torch.tensor([3.0]))
    assert loss.tolist() == pytest.approx([3.0 + (math.log1p(math.exp(-2)) + math.log(2)) / 2])


@pytest.mark.parametrize("text", ["moon(mu=-0.1)", "moon(temperature=0)"])
def test_what_lies_outside_of_its_range_is_refused(text):
    with pytest.raises(FedStrataError, match=text.partition("(")[2].partition("=")[0]):
        methods.make(text)


@pytest.mark.parametrize("text", ["moon(mu=0.0, temperature=0.1)"])
def test_what_is_at_the_edge_of_its_range_is_taken(text):
    assert str(methods.make(text)) == text


def test_the_defaults():
    assert asdict(methods.make("moon")) == {"mu": 1.0, "temperature": 0.5}
