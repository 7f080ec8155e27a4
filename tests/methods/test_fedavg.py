from __future__ import annotations

import torch
from torch import nn
from watching import declared, server_view

from fedstrata.layers import LayerMap
from fedstrata.methods import Message, methods

LAYERS = LayerMap.read(nn.Sequential(nn.Linear(2, 1, bias=False)), (2,))
WEIGHT = LAYERS.parameter_names[0]


def server(model):
    return server_view(LAYERS, {WEIGHT: torch.tensor(model)}, sizes=torch.tensor([30, 10]))


def test_fedavg_weighs_by_samples():
    part = methods.make("fedavg")
    replies = Message({WEIGHT: torch.tensor([[[1.0, 2.0]], [[5.0, 10.0]]])})
    assert part.weigh(declared(30, 10)).tolist() == [30.0, 10.0]
    assert part.merge(server([[0.0, 0.0]]), replies, torch.tensor([0.75, 0.25]))[WEIGHT].tolist() == [[2.0, 4.0]]


def test_entries_that_few_clients_sent_are_averaged_over_those():
    replies = Message(
        {WEIGHT: torch.tensor([[[1.0, 0.0]], [[5.0, 0.0]]])},
        masks={WEIGHT: torch.tensor([[[True, False]], [[False, False]]])},
    )
    merged = methods.make("fedavg").merge(server([[7.0, 8.0]]), replies, torch.tensor([0.75, 0.25]))
    assert merged[WEIGHT].tolist() == [[1.0, 8.0]]
