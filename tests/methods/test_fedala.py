"""FedALA: hand-computed weights between the own and the global model, and what clients do before they have trained."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from watching import clients_view, probing, run

from fedstrata.layers import LayerMap
from fedstrata.methods import Message, methods
from fedstrata.stack import Stack, Tensors

LAYERS = LayerMap.read(nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)), (1,))


@dataclass
class Slopes:
    """Answers with slopes that a test made up, one for each step, and notes where it was asked."""

    given: list[list[float]]
    asked: list[tuple[float, int]] = field(default_factory=list)

    def gradients(self, model: Tensors, batch_size: int, draw: int) -> Tensors:
        self.asked.append((model["1.weight"].flatten()[0].item(), draw))
        slope = torch.tensor(self.given[len(self.asked) - 1]).reshape(-1, 1, 1)
        return {"0.weight": slope, "1.weight": slope}


def received(part, slopes, trained, begun, sizes):
    count = len(sizes)
    model = {name: torch.full((count, 1, 1), 3.0) for name in ("0.weight", "1.weight")}
    memory = {"weight/1.weight": torch.ones(count, 1, 1), "begun": torch.tensor(begun)}
    clients = clients_view(
        LAYERS, count, memory=memory, sizes=torch.tensor(sizes), trained=torch.tensor(trained),
        previous=Stack({name: torch.ones_like(tensor) for name, tensor in model.items()}), **probing(slopes),
    )  # fmt: skip
    return part.receive(clients, Message(), model)


def test_weights_follow_the_loss_and_the_model_lies_between():
    """One step: W = 1 - 0.1 * (3 - 1) = 0.8, so the last layer is 1 + 2 * 0.8 = 2.6; the first is the global one."""
    slopes = Slopes([[0.1]])
    model, memory = received(methods.make("fedala"), slopes, [True], [True], [10])
    assert model["1.weight"].item() == pytest.approx(2.6)
    assert model["0.weight"].item() == 3.0
    assert memory["weight/1.weight"].item() == pytest.approx(0.8)
    assert slopes.asked == [(3.0, 1)]


def test_each_step_looks_at_other_samples_from_where_the_last_one_led():
    """20 samples, 80 %, batches of 10: two steps. W = 1 - 0.4 = 0.6, at 2.2; then 0.6 + 0.6, clipped to 1."""
    slopes = Slopes([[0.2], [-0.3]])
    model, memory = received(methods.make("fedala"), slopes, [True], [True], [20])
    assert memory["weight/1.weight"].item() == 1.0
    assert model["1.weight"].item() == 3.0
    assert [place for place, _ in slopes.asked] == pytest.approx([3.0, 2.2])
    assert [draw for _, draw in slopes.asked] == [1, 2]


def test_the_first_time_takes_more_passes_and_clients_stop_by_their_own_count():
    """Client 0 begins: two passes of one step; client 1 has begun: one step, then it stays; client 2 never trained."""
    slopes = Slopes([[0.1, 0.1, 0.1]] * 2)
    model, memory = received(
        methods.make("fedala(first_passes=2)"), slopes, [True, True, False], [False, True, False], [10, 5, 30]
    )
    assert memory["weight/1.weight"].flatten().tolist() == pytest.approx([0.6, 0.8, 1.0])
    assert model["1.weight"].flatten().tolist() == pytest.approx([2.2, 2.6, 3.0])
    assert memory["begun"].tolist() == [True, True, False]
    assert len(slopes.asked) == 2


def test_only_the_last_layers_are_adapted():
    driver = run("fedala(layers=2)", rounds=1)
    weights = driver.engine.clients().group("memory/fedala/weight")
    assert set(weights) == {"hidden.weight", "hidden.bias", "head.weight", "head.bias"}


def test_in_the_first_round_it_is_fedavg_and_later_not():
    ours, plain = (run(method, rounds=2).metrics.series("train.loss")[1] for method in ("fedala", "fedavg"))
    assert ours[0] == plain[0]
    assert ours[1] != plain[1]
