from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from torch import nn
from watching import (
    BOTH_ENGINES,
    assert_same_bits,
    clients_view,
    declared,
    layer_values,
    probing,
    run,
    server_view,
)

from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Phase, methods
from fedstrata.methods.flash_spdst import prune_rates
from fedstrata.stack import Stack
from fedstrata.testing.world import prepare

TWO = LayerMap.read(nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)), (4,))
BOTH = pytest.mark.parametrize("name", ["flash-spdst", "flash-jmwst"])


@dataclass
class Trains:
    """A probe whose training returns given models, and notes what it was asked."""

    models: list
    asked: list = field(default_factory=list)

    def train(self, model, epochs, span=(0.0, 1.0), memory=None):
        self.asked.append((epochs, span, {name: mask.clone() for name, mask in memory.items()}))
        return self.models[len(self.asked) - 1]


def memory_of(first, second):
    return {
        "mask/0.weight": torch.tensor([first], dtype=torch.bool).view(1, 2, 4),
        "mask/1.weight": torch.tensor([second], dtype=torch.bool).view(1, 4, 2),
    }


def model_of(first, second):
    return {"0.weight": torch.tensor(first).view(1, 2, 4), "1.weight": torch.tensor(second).view(1, 4, 2)}


# Stage one -----------------------------------------------------------------------------------------------------------


def test_the_mask_moves_to_where_weights_are_large():
    """After one of two epochs the rate is .5 * (1 - 1/2): one of four weights goes in each tensor, the smallest. The
    mean magnitudes are 1.5 and .25, so that of the two that come back the first tensor gets 1.71 and the second .29,
    rounded to two and none.
    """
    part = methods.make("flash-spdst(first_epochs=2, rate=0.5)")
    memory = memory_of([1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0])
    trained = model_of([1.0, -2.0, 1.2, 1.8, 0, 0, 0, 0], [0.25, 0.5, 0.125, 0.125, 0, 0, 0, 0])
    probe = Trains([trained, trained])
    [stage_one] = part.exchanges()
    reply = stage_one.survey(clients_view(TWO, 1, memory=memory, **probing(probe)), trained)
    assert reply.tensors == {}
    assert {name: value.tolist() for name, value in reply.numbers.items()} == {"0.weight": [5 / 8], "1.weight": [3 / 8]}
    (epochs, span, first), (_, later, second) = probe.asked
    assert (epochs, span, later) == (2, (0.0, 0.5), (0.5, 1.0))
    assert first.keys() == second.keys() == {"flash-spdst/mask/0.weight", "flash-spdst/mask/1.weight"}
    assert torch.equal(first["flash-spdst/mask/0.weight"], memory["mask/0.weight"])
    assert second["flash-spdst/mask/1.weight"].flatten().int().tolist() == [1, 1, 0, 1, 0, 0, 0, 0]
    moved = second["flash-spdst/mask/0.weight"].flatten().int().tolist()
    assert moved[1:4] == [1, 1, 1]
    assert sum(moved) == 5


def test_an_important_tensor_that_is_nearly_dense_loses_little():
    """Seven of eight kept is a sparsity of .125, below .2, and the mean 6 is above the other tensor's 4: at most .125
    of the seven go, one instead of four. With the one of the other tensor, two come back: 1.2 and .8, so one each.
    """
    part = methods.make("flash-spdst(rate=0.5)")
    masks = {name.removeprefix("mask/"): mask for name, mask in memory_of([1] * 7 + [0], [1] + [0] * 7).items()}
    model = model_of([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 0], [4.0, 0, 0, 0, 0, 0, 0, 0])
    moved = part.moved(clients_view(TWO, 1), masks, model, 0.0, "test")
    first, second = (mask.flatten().int().tolist() for mask in moved.values())
    assert first[:6] == [1] * 6
    assert (sum(first), sum(second)) == (7, 1)


def test_every_client_moves_as_many_weights_as_it_has_and_as_fit():
    """Half of four weights go from the second tensor, and of seven one; the first takes two of the three back, for
    which it has room, although it is much more important. Another client lets two and two go, which all fit.
    """
    part = methods.make("flash-spdst(rate=0.5)")
    one, other = memory_of([1] * 7 + [0], [1] * 4 + [0] * 4), memory_of([1] * 4 + [0] * 4, [1] * 4 + [0] * 4)
    masks = {name.removeprefix("mask/"): torch.cat((one[name], other[name])) for name in one}
    first, second = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 0], [1e-3] * 4 + [0.0] * 4
    model = {name: torch.cat((tensor, tensor)) for name, tensor in model_of(first, second).items()}
    moved = part.moved(clients_view(TWO, 2), masks, model, 0.0, "test")
    assert [mask.flatten(1).sum(1).tolist() for mask in moved.values()] == [[8, 6], [3, 2]]


def test_a_tensor_without_any_weight_left_moves_none():
    masks = {name.removeprefix("mask/"): mask for name, mask in memory_of([1] * 4 + [0] * 4, [0] * 8).items()}
    moved = methods.make("flash-spdst").moved(clients_view(TWO, 1), masks, model_of([1.0] * 8, [1.0] * 8), 0.0, "test")
    assert [int(mask.sum()) for mask in moved.values()] == [4, 0]


def test_at_least_one_client_is_asked_and_nobody_twice():
    def asked(fraction):
        [stage_one] = methods.make(f"flash-spdst(first_clients={fraction})").exchanges()
        return stage_one.asks(server_view(TWO, {}, clients=9))

    assert len(asked(0.1)) == 1
    assert sorted(asked(1.0)) == list(range(9))


@pytest.mark.parametrize(
    ("kept", "important", "rate"),
    [(8, True, 0.25), (9, True, 0.1), (9, False, 0.25), (10, True, 0.0), (1, True, 0.25)],
)
def test_the_cap_holds_below_a_fifth_of_sparsity_and_above_the_mean(kept, important, rate):
    means = torch.tensor([[3.0, 1.0] if important else [1.0, 3.0]])
    rates = prune_rates(0.25, torch.tensor([[kept, 5]]), torch.tensor([10, 10]), means)
    assert rates[0].tolist() == pytest.approx([rate, 0.25])


def test_the_cap_is_no_more_than_the_rate_and_none_where_all_are_alike():
    kept, sizes = torch.tensor([[9, 9]]), torch.tensor([10, 10])
    assert prune_rates(0.05, kept, sizes, torch.tensor([[3.0, 1.0]])).tolist() == [[0.05, 0.05]]
    assert prune_rates(0.25, kept, sizes, torch.tensor([[2.0, 2.0]])).tolist() == [[0.25, 0.25]]


def test_a_single_epoch_of_stage_one_moves_the_mask_in_its_middle():
    part = methods.make("flash-spdst(first_epochs=1, rate=0.5)")
    memory = memory_of([1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0])
    trained = model_of([1.0, -2.0, 1.2, 1.8, 0, 0, 0, 0], [0.25, 0.5, 0.125, 0.125, 0, 0, 0, 0])
    probe = Trains([trained, trained])
    [stage_one] = part.exchanges()
    reply = stage_one.survey(clients_view(TWO, 1, memory=memory, **probing(probe)), trained)
    assert [span for _, span, _ in probe.asked] == [(0.0, 0.5), (0.5, 1.0)]
    assert {name: value.tolist() for name, value in reply.numbers.items()} == {"0.weight": [5 / 8], "1.weight": [3 / 8]}


def test_the_server_scales_the_mean_densities_to_the_target():
    """Means .75 and .25 of eight weights each: of the eight to keep in all, six and two."""
    part = methods.make("flash-spdst(sparsity=0.5)")
    model = {"0.weight": torch.arange(1.0, 9.0).view(2, 4), "1.weight": torch.arange(1.0, 9.0).view(4, 2)}
    server = server_view(TWO, model)
    server = server_view(TWO, model, memory=part.server_memory(server))
    replies = Message(numbers={"0.weight": torch.tensor([0.9, 0.6]), "1.weight": torch.tensor([0.4, 0.1])})
    [stage_one] = part.exchanges()
    new, memory = stage_one.conclude(server, replies)
    masks = Stack(memory).group("mask")
    assert len(masks) == len(memory)
    assert [int(mask.sum()) for mask in masks.values()] == [6, 2]
    for name, mask in masks.items():
        assert mask.dtype == torch.bool
        assert torch.equal(new[name], model[name] * mask)
    announced = stage_one.announce(server_view(TWO, new, memory=memory))
    adopted = stage_one.adopt(clients_view(TWO, 3), announced)
    assert all(torch.equal(adopted[f"mask/{name}"], mask.expand(3, *mask.shape)) for name, mask in masks.items())


@BOTH
def test_a_few_clients_send_a_number_per_tensor_and_everybody_hears_the_mask(name):
    simulation = prepare(f"{name}(sparsity=0.8, first_clients=0.4, first_epochs=2)")
    exchange = simulation.method.exchanges_before(1, 3)[0]
    assert len(simulation.engine.side.asked(simulation.engine.server, exchange, 1)) == 2
    assert simulation.method.exchanges_before(2, 3) == []
    up, _ = simulation.engine.exchange(1)
    assert up < 2 * 400
    masks = {key: mask for key, mask in simulation.engine.server.memory.items() if "/mask/" in key}
    assert sum(int(mask.sum()) for mask in masks.values()) == int(0.2 * 404 + 1e-9)
    clients = simulation.engine.clients().group("memory")
    for key, mask in masks.items():
        assert torch.equal(clients[key], mask.expand(5, *mask.shape))
        weight = key.split("/mask/")[1]
        assert torch.equal(simulation.engine.server.model[weight], simulation.setting.initial[weight] * mask)


# Stage two -----------------------------------------------------------------------------------------------------------


@BOTH_ENGINES
def test_spdst_keeps_its_mask(engine):
    simulation = prepare("flash-spdst(first_epochs=2)", engine, rounds=3, epochs=2)
    history = []
    for _ in range(3):
        simulation.step()
        history.append({key: mask.clone() for key, mask in simulation.engine.server.memory.items()})
    assert_same_bits(history[0], history[2])


@BOTH_ENGINES
@pytest.mark.parametrize(("every", "moving"), [(1, [True, True]), (2, [False, True]), (3, [False, False])])
def test_jmwst_moves_its_mask_every_so_many_rounds_and_keeps_its_size(engine, every, moving):
    simulation = prepare(f"flash-jmwst(first_epochs=2, every={every}, sparsity=0.6)", engine, rounds=3, epochs=1)
    history, sizes = [], []
    for _ in range(3):
        simulation.step()
        history.append({key: mask.clone() for key, mask in simulation.engine.server.memory.items()})
        sizes.append(sum(int(mask.sum()) for mask in history[-1].values()))
    assert sizes == [int(0.4 * 404 + 1e-9)] * 3
    moved = [any(not torch.equal(old[key], new[key]) for key in old) for old, new in pairwise(history)]
    assert moved == moving
    densities = layer_values(simulation, "density", 3)
    assert len(set(densities.values())) > 1


def test_jmwst_keeps_the_largest_averaged_weights_with_the_clients_mean_densities():
    """Masks keep five and three of eight, and three and five: as many as before, but where the means are largest."""
    part = methods.make("flash-jmwst")
    old = {"0.weight": torch.zeros(2, 4), "1.weight": torch.zeros(4, 2)}
    memory = {name: mask[0] for name, mask in memory_of([1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]).items()}
    server = server_view(TWO, old, memory=memory, sizes=torch.tensor([90, 10]))
    first = torch.tensor([[1.0, 8.0, 0, 0, 4.0, 6.0, 2.0, 0], [0, 2.0, 2.0, 0, 4.0, 0, 0, 8.0]]).view(2, 2, 4)
    second = torch.tensor([[3.0, 0, 0, 0, 0, 0, 5.0, 0], [-5.0, 0, 7.0, 0, 0, 0, 0, 0]]).view(2, 4, 2)
    tensors = {"0.weight": first, "1.weight": second}
    masks = {"0.weight": first != 0, "1.weight": second != 0}
    masks["1.weight"][:, 1] = True
    replies = Message(tensors, masks)
    assert part.weigh(declared(90, 10)).tolist() == [1.0, 1.0]
    shares = torch.tensor([0.5, 0.5])
    merged = part.merge(server, replies, shares)
    assert merged["0.weight"].flatten().tolist() == [0.5, 5.0, 1.0, 0.0, 4.0, 3.0, 1.0, 4.0]
    new, memory = part.refine(server, merged, replies)
    assert [int(masks.sum()) for masks in memory.values()] == [5, 3]
    assert memory["mask/0.weight"].flatten().int().tolist() == [0, 1, 0, 0, 1, 1, 1, 1]
    assert new["0.weight"].flatten().tolist() == [0.0, 5.0, 0.0, 0.0, 4.0, 3.0, 1.0, 4.0]


def test_jmwst_counts_densities_and_magnitudes():
    """Both clients keep half of eight and of four weights: four and two stay, the largest of either sign."""
    layers = LayerMap.read(nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 2, bias=False)), (4,))
    merged = {
        "0.weight": torch.tensor([[-9.0, 1.0, 2.0, -8.0], [3.0, 7.0, 6.0, -1.0]]),
        "1.weight": torch.tensor([[-4.0, 1.0], [0.5, 3.0]]),
    }
    halves = {name: torch.arange(tensor.numel()).view_as(tensor) % 2 == 0 for name, tensor in merged.items()}
    replies = Message({}, {name: mask.expand(2, *mask.shape) for name, mask in halves.items()})
    server = server_view(layers, merged, memory={f"mask/{name}": mask for name, mask in halves.items()})
    new, _ = methods.make("flash-jmwst").refine(server, merged, replies)
    assert new["0.weight"].flatten().tolist() == [-9.0, 0.0, 0.0, -8.0, 0.0, 7.0, 6.0, 0.0]
    assert new["1.weight"].flatten().tolist() == [-4.0, 0.0, 0.0, 3.0]


def test_jmwst_without_sparsity_trains_in_one_go():
    assert methods.make("flash-jmwst(sparsity=0)").phases(clients_view(TWO, 1)) == (Phase(),)
    assert len(methods.make("flash-jmwst").phases(clients_view(TWO, 1))) == 2


def test_a_client_takes_the_mask_over_with_the_model():
    part = methods.make("flash-jmwst")
    memory = memory_of([1] * 4 + [0] * 4, [1] * 4 + [0] * 4)
    masks = {name.removeprefix("mask/"): ~mask for name, mask in memory.items()}
    message = Message({name: mask.float() for name, mask in masks.items()}, masks)
    received = {name: torch.full(mask.shape, 3.0) for name, mask in masks.items()}
    model, taken = part.start(clients_view(TWO, 1, memory=memory), message, received)
    for name, mask in masks.items():
        assert torch.equal(taken[f"mask/{name}"], mask)
        assert torch.equal(model[name], 3.0 * mask)


@BOTH
def test_messages_are_sparse(name):
    sparse, dense = run(f"{name}(sparsity=0.9, first_epochs=2)", rounds=2), run("fedavg", rounds=2)
    for way in ("bytes.up", "bytes.down"):
        left, right = (one.metrics.series(way)[1][-1] for one in (sparse, dense))
        assert left < 0.6 * right


@BOTH
def test_without_sparsity_it_is_fedavg_where_clients_are_alike(name):
    assert methods.make(f"{name}(sparsity=0)").exchanges() == ()
    simulation = run(f"{name}(sparsity=0)", rounds=1)
    assert simulation.engine.server.memory == {}
    assert layer_values(simulation, "density", 1) == {}


def test_the_probe_of_a_survey_trains_under_the_masks_it_is_given():
    """Stretch by stretch with one mask is the whole training under it, without momentum."""
    simulation = prepare("flash-spdst(sparsity=0.6)", "stacked", 99, optimiser="sgd(learning_rate=0.1)")
    side, state = simulation.engine.client_side, simulation.engine.clients()
    seen = []

    class Spy:
        def survey(self, clients, model):
            seen.append((clients, model, clients.probe))
            return Message()

    message = simulation.engine.side.broadcast(simulation.engine.server, range(5), 1)
    side.answer_survey(range(5), state, Spy(), message, 1)
    [(_, model, probe)] = seen
    whole = probe.train(model, 2)
    half = probe.train(probe.train(model, 2, (0.0, 0.5)), 2, (0.5, 1.0))
    assert_same_bits(whole, half)
    mask = state["memory/flash-spdst/mask/body.weight"]
    assert not whole["body.weight"][~mask].any()
    other = {"flash-spdst/mask/body.weight": torch.ones_like(mask)}
    assert probe.train(model, 2, memory=other)["body.weight"][~mask].any()
